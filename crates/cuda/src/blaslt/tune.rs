//! Chooses one of the algorithms that the library proposes for a GEMM.
//!
//! The library orders its proposals by a model of the card; the first is often within a percent of the fastest, but sometimes ten
//! percent slower. A large GEMM is measured in one of its own calls, on its operands and into its output, which the call itself then
//! overwrites. This needs no further memory and uses the run's own values, which determine the power that the card draws. Each
//! algorithm is timed in a few calls; those near the fastest then run long enough that a card at its power limit slows down. The
//! choice is saved on disk for this card, library and shape, so that it is made once and runs repeat bit by bit.
//!
//! A shape is measured at its third call, because layers repeat theirs, while the number of loss tokens in a packed
//! batch, which is the height of some GEMMs of the head, rarely recurs.
//!
//! Trade-off: a tenth of a second to a second per shape, once; if the file is lost, the new choice may round differently.

use std::sync::Arc;

use super::descriptors::Key;
use super::matmul::Matmul;
use super::plan::{Call, Plan};
use super::symbols::{Algorithm, Symbols};
use crate::disk_cache::{Cache, Key as FileKey};
use crate::driver::DeviceInfo;
use crate::error::CudaError;
use crate::stream::{Event, Stream};

/// Minimum work of measured GEMMs: a quarter of a millisecond on an H100. The operands of smaller ones stay in the level 2 cache while they are
/// repeated, but not between the operations of a step: a 1B model with rows of 512 tokens was 15 % slower with algorithms from such measurements.
const LARGE_FLOPS: f64 = 2e11;
/// The call of a shape at which it is measured.
const DUE: usize = 3;
/// Maximum number of shapes that a process measures.
const MAX_SHAPES: usize = 64;
/// Number of timed calls of each algorithm in the first pass.
const FIRST_CALLS: usize = 2;
/// Algorithms slower than the fastest by this factor in the first pass are not timed again.
const CLOSE: f32 = 1.04;
/// Duration of the others in each of [`ROUNDS`].
const ROUND_MILLISECONDS: f32 = 40.0;
const ROUNDS: usize = 3;
/// Another algorithm must take less than this share of the time of the library's first.
const WORTH: f32 = 0.995;

/// Source of the algorithms of large GEMMs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Measuring {
    /// The library's first proposal.
    Off,
    /// The algorithm measured earlier on this machine, if there is one.
    Kept,
    /// The same, and other shapes are measured at their third call.
    On,
}

/// The chosen algorithms of this process, with their file cache.
pub(super) struct Choices {
    pub(super) measuring: Measuring,
    /// Number of shapes measured so far.
    measured: usize,
    cache: Cache,
    /// The library, card and workspace for which choices are valid.
    machine: String,
}

impl Choices {
    pub(super) fn new(symbols: &Symbols, device: &DeviceInfo, workspace_bytes: usize) -> Self {
        // SAFETY: takes nothing and returns a number.
        let version = unsafe { (symbols.version)() };
        let (name, capability) = (&device.name, device.compute_capability);
        let machine = format!("cuBLASLt {version}, {name} {capability:?}, {workspace_bytes} bytes");
        Self { measuring: Measuring::Off, measured: 0, cache: Cache::of("gemms"), machine }
    }

    /// Makes the choice for a shape at its first call.
    pub(super) fn first(&self, key: &Key, plan: Plan, proposed: Vec<Algorithm>) -> Choice {
        if self.measuring == Measuring::Off || proposed.len() == 1 || !is_large(&key.matmul) {
            return Choice::settled(plan, proposed[0]);
        }
        // Only algorithms that the library proposes now may run, whatever the file contains.
        let kept = self.cache.read(&self.file(key));
        let kept = kept.and_then(|bytes| proposed.iter().find(|one| bytes_of(one) == bytes).copied());
        match kept {
            Some(algorithm) => Choice::settled(plan, algorithm),
            None if self.measuring == Measuring::Kept => Choice::settled(plan, proposed[0]),
            None => {
                let settled = Choice::settled(plan, proposed[0]);
                Choice { open: Some(Open { proposed, calls: 0 }), ..settled }
            }
        }
    }

    /// Measures a shape, unless the limit is reached, and saves the choice.
    ///
    /// # Safety
    /// The requirements of [`BlasLt::prepare`](crate::BlasLt::prepare) must hold for this call, for which the choice is due and
    /// which the caller submits afterwards; its context must be current.
    pub(super) unsafe fn measure(
        &mut self,
        key: &Key,
        choice: &mut Choice,
        call: &Call,
        stream: &Stream,
    ) -> Result<(), CudaError> {
        let Some(Open { proposed, .. }) = choice.open.take() else { return Ok(()) };
        if self.measured == MAX_SHAPES {
            return Ok(());
        }
        self.measured += 1;
        // SAFETY: the caller's promise; repeating the call writes the same output.
        choice.algorithm = unsafe { fastest(&choice.plan, &proposed, call, stream) }?;
        self.cache.write(&self.file(key), &bytes_of(&choice.algorithm));
        Ok(())
    }

    fn file(&self, key: &Key) -> FileKey {
        FileKey::of([self.machine.as_str(), &format!("{key:?}")])
    }
}

/// The plan of a shape with its algorithm, and the algorithms still to be tried.
pub(super) struct Choice {
    pub(super) plan: Arc<Plan>,
    pub(super) algorithm: Algorithm,
    open: Option<Open>,
}

struct Open {
    proposed: Vec<Algorithm>,
    calls: usize,
}

impl Choice {
    fn settled(plan: Plan, algorithm: Algorithm) -> Self {
        Self { plan: Arc::new(plan), algorithm, open: None }
    }

    /// Returns whether to measure with this call. One that adds to its own output cannot be repeated.
    pub(super) fn is_due(&mut self, call: &Call) -> bool {
        let Some(open) = &mut self.open else { return false };
        open.calls += 1;
        open.calls >= DUE && (call.beta == 0.0 || call.pointers.c != call.pointers.d)
    }
}

fn bytes_of(algorithm: &Algorithm) -> Vec<u8> {
    algorithm.data.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn is_large(matmul: &Matmul) -> bool {
    2.0 * matmul.m as f64 * matmul.n as f64 * matmul.k as f64 >= LARGE_FLOPS
}

/// Returns the fastest algorithm: the library's first, unless another beats it by more than the noise that [`WORTH`] allows for.
///
/// # Safety
/// The requirements of [`Choices::measure`] must hold, and the call must be repeatable.
unsafe fn fastest(plan: &Plan, proposed: &[Algorithm], call: &Call, stream: &Stream) -> Result<Algorithm, CudaError> {
    let timer = Timer { start: Event::timed(stream.context())?, end: Event::timed(stream.context())? };
    // SAFETY: the caller's promise.
    let time = |algorithm: &Algorithm, calls: usize| unsafe { timer.time(plan, algorithm, call, stream, calls) };
    let mut times = Vec::with_capacity(proposed.len());
    for (index, algorithm) in proposed.iter().enumerate() {
        // Skip an algorithm that the library proposes and then rejects; the error of the first is reported when it is submitted.
        let Ok(_) = time(algorithm, 1) else { continue };
        times.push((index, time(algorithm, FIRST_CALLS)?));
    }
    let best = times.iter().map(|(_, time)| *time).fold(f32::INFINITY, f32::min);
    times.retain(|(index, time)| *index == 0 || *time <= best * CLOSE);
    let mut long = vec![Vec::with_capacity(ROUNDS); times.len()];
    for _ in 0..ROUNDS {
        for ((index, once), rounds) in times.iter().zip(&mut long) {
            let calls = (ROUND_MILLISECONDS / once.max(1e-3)).ceil() as usize;
            rounds.push(time(&proposed[*index], calls)?);
        }
    }
    let medians: Vec<_> = times.iter().zip(long).map(|((index, _), rounds)| (*index, median(rounds))).collect();
    let index = choose(&medians);
    tracing::debug!("{}: algorithm {index} of {} in {medians:?} ms", plan.matmul, proposed.len());
    Ok(proposed[index])
}

/// Returns the index of the shortest time, or 0 unless that is below [`WORTH`] times the time of 0.
fn choose(times: &[(usize, f32)]) -> usize {
    let of_first = times.iter().find(|(index, _)| *index == 0).map_or(f32::INFINITY, |(_, time)| *time);
    let fastest = times.iter().min_by(|left, right| left.1.total_cmp(&right.1));
    fastest.filter(|(_, time)| *time < of_first * WORTH).map_or(0, |(index, _)| *index)
}

fn median(mut times: Vec<f32>) -> f32 {
    times.sort_by(f32::total_cmp);
    times[times.len() / 2]
}

struct Timer {
    start: Event,
    end: Event,
}

impl Timer {
    /// Returns the mean milliseconds of `calls` calls. Waits for them.
    ///
    /// # Safety
    /// The requirements of [`fastest`] must hold.
    unsafe fn time(
        &self,
        plan: &Plan,
        algorithm: &Algorithm,
        call: &Call,
        stream: &Stream,
        calls: usize,
    ) -> Result<f32, CudaError> {
        stream.record(&self.start)?;
        for _ in 0..calls {
            // SAFETY: the caller's promise.
            unsafe { plan.submit(algorithm, call, stream) }?;
        }
        stream.record(&self.end)?;
        self.end.synchronize()?;
        Ok(self.end.milliseconds_since(&self.start)? / calls as f32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::blaslt::matmul::ElementType::Bf16;

    #[test]
    fn only_a_clearly_faster_algorithm_is_taken() {
        assert_eq!(choose(&[(0, 1.0), (3, 0.998), (5, 1.01)]), 0);
        assert_eq!(choose(&[(0, 1.0), (3, 0.98), (5, 0.97)]), 5);
        assert_eq!(choose(&[(2, 1.0), (3, 0.9)]), 3, "the library's first was refused");
    }

    #[test]
    fn only_gemms_that_take_long_are_measured() {
        let matmul = |sizes| Matmul::dense(sizes, Bf16, [false, true], Bf16);
        assert!(is_large(&matmul([12_288, 4096, 4096])));
        assert!(!is_large(&matmul([12_288, 48, 4096])));
        assert!(!is_large(&matmul([512, 16_384, 2048])));
    }
}
