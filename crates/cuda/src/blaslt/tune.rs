//! Choosing an algorithm by the clock instead of by the library's model.
//!
//! What it gives up: which algorithm wins can differ from one process to the next, and algorithms add in different orders. Where
//! a run must repeat bit by bit, do not tune, or see that [`Plan::chosen`](super::Plan::chosen) came out the same.

use super::plan::{Call, Plan};
use crate::{Context, CudaError, Event, Stream};

/// Timed rounds, after one that is not counted.
const ROUNDS: usize = 3;
/// Shorter products are repeated within a round until it lasts this long, so that gaps between kernels weigh little.
const ROUND_MILLISECONDS: f32 = 0.2;
/// Another algorithm must be this much faster than the library's first choice: less is noise, and would make the choice vary.
const WORTH_IT: f32 = 0.98;

/// What tuning found. Times are of one product, in milliseconds of device time: the best of three rounds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tuning {
    /// Algorithms that were timed.
    pub candidates: usize,
    /// The fastest, 0 being the library's first choice.
    pub chosen: usize,
    /// Time of the library's first choice.
    pub first_milliseconds: f32,
    /// Time of the chosen one.
    pub chosen_milliseconds: f32,
}

impl Tuning {
    /// Of a product with no elements: nothing was timed.
    pub(super) const NONE: Self = Self { candidates: 0, chosen: 0, first_milliseconds: 0.0, chosen_milliseconds: 0.0 };
}

/// Times every candidate of the plan.
///
/// # Safety
/// As [`Plan::submit`].
pub(super) unsafe fn measure(plan: &Plan, stream: &Stream, call: &Call) -> Result<Tuning, CudaError> {
    let clock = Clock::new(stream.context())?;
    let mut best = vec![f32::INFINITY; plan.candidates()];
    let mut repeats = vec![1; plan.candidates()];
    let mut failure = None;
    // Round by round and not candidate by candidate, so that a change of the clock rate meets all of them alike.
    for round in 0..=ROUNDS {
        for candidate in 0..plan.candidates() {
            // SAFETY: handed on to the caller.
            match unsafe { clock.time(plan, stream, candidate, call, repeats[candidate]) } {
                Ok(milliseconds) if round == 0 => repeats[candidate] = repeats_for(milliseconds),
                Ok(milliseconds) => best[candidate] = best[candidate].min(milliseconds),
                // One that cannot be launched is out of the race; a broken device makes all of them fail.
                Err(error) => (failure, repeats[candidate]) = (Some(error), 0),
            }
        }
    }
    let chosen = pick(&best);
    match failure {
        Some(error) if best[chosen].is_infinite() => Err(error),
        _ => Ok(Tuning {
            candidates: best.len(),
            chosen,
            first_milliseconds: best[0],
            chosen_milliseconds: best[chosen],
        }),
    }
}

fn repeats_for(milliseconds: f32) -> u32 {
    (ROUND_MILLISECONDS / milliseconds.max(1e-3)).clamp(1.0, 50.0) as u32
}

/// The fastest, or the first where nothing is worth leaving it for.
fn pick(milliseconds: &[f32]) -> usize {
    let fastest = (0..milliseconds.len()).min_by(|&x, &y| milliseconds[x].total_cmp(&milliseconds[y])).unwrap_or(0);
    if milliseconds[fastest] < WORTH_IT * milliseconds[0] { fastest } else { 0 }
}

struct Clock {
    start: Event,
    end: Event,
}

impl Clock {
    fn new(context: &Context) -> Result<Self, CudaError> {
        Ok(Self { start: Event::timed(context)?, end: Event::timed(context)? })
    }

    /// Milliseconds of one product; infinite for no repeats.
    ///
    /// # Safety
    /// As [`Plan::submit`].
    unsafe fn time(
        &self,
        plan: &Plan,
        stream: &Stream,
        candidate: usize,
        call: &Call,
        repeats: u32,
    ) -> Result<f32, CudaError> {
        if repeats == 0 {
            return Ok(f32::INFINITY);
        }
        stream.record(&self.start)?;
        for _ in 0..repeats {
            // SAFETY: handed on to the caller.
            unsafe { plan.submit(candidate, call)? };
        }
        stream.record(&self.end)?;
        self.end.synchronize()?;
        Ok(self.end.milliseconds_since(&self.start)? / repeats as f32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_choice_stays_unless_another_is_clearly_faster() {
        assert_eq!(pick(&[1.0, 0.99, 1.2]), 0);
        assert_eq!(pick(&[1.0, 0.9, 0.8, 0.85]), 2);
        assert_eq!(pick(&[f32::INFINITY, 0.9]), 1, "a first choice that cannot be launched");
        assert_eq!(pick(&[f32::INFINITY]), 0);
    }

    #[test]
    fn short_products_are_repeated_and_long_ones_are_not() {
        assert_eq!([0.0, 0.01, 0.1, 5.0].map(repeats_for), [50, 20, 2, 1]);
    }
}
