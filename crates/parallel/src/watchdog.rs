//! Ends the job if this rank is stuck in a step: its heartbeats go on, so the other ranks cannot notice.
//!
//! The limit of a step is [`Limits::least`], or four times the longest step so far if that is more. Time in which the rank waits for others in an
//! exchange does not count: then another rank is stuck, and reports it itself. A rank that waits for its device, where kernels may wait for another
//! rank, has [`Limits::device`] longer, so that the stuck rank is named first. If the watcher itself did not run, the process was suspended, and the
//! time of its step begins again; the other ranks notice one that is suspended alone.
//! Trade-off: only steps are watched, and only after two were taken: the duration of evaluation, saving and the first step is unknown.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::ranks::Ranks;

/// Steps after which the duration of a step is known.
const WARM_UP: u64 = 2;
/// Limit of a step as a multiple of the longest step so far.
const FACTOR: u32 = 4;
/// A watcher that has not run for this many of its pauses was suspended.
const SUSPENDED: u32 = 3;

/// Time limits of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// At least.
    pub least: Duration,
    /// Additional time while the rank waits for its device.
    pub device: Duration,
}

impl Limits {
    /// Ends a job of short steps within 30 s of the failure, including the 10 s that ranks have to end by themselves.
    pub const DEFAULT: Self = Self { least: Duration::from_secs(15), device: Duration::from_secs(4) };

    /// Reads `FIREBRICK_STUCK_TIMEOUT`, in seconds; 0 watches nothing.
    pub fn from_environment() -> Option<Self> {
        let text = std::env::var("FIREBRICK_STUCK_TIMEOUT").ok();
        match text.as_deref().map(str::trim).and_then(|seconds| seconds.parse().ok()) {
            Some(0) => None,
            Some(seconds) => Some(Self { least: Duration::from_secs(seconds), ..Self::DEFAULT }),
            None => Some(Self::DEFAULT),
        }
    }
}

/// Watches the steps of a rank. Its thread ends when it is dropped.
#[derive(Debug)]
pub struct Watchdog {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// The current step: its number, its start, and since when it has not been in an exchange.
    step: Option<(u64, Instant, Instant)>,
    waits_for_device: bool,
    taken: u64,
    longest: Duration,
    /// The last time that this process was seen to run, and the time between two polls; `None` if nothing is watched.
    seen: Option<(Instant, Duration)>,
    is_over: bool,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing that can panic happens under the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Watchdog {
    /// Watches nothing: for a job of one rank.
    pub fn off() -> Self {
        Self { shared: Arc::default(), thread: None }
    }

    /// Watches the steps of this rank from now on. A job of one rank is not watched.
    #[must_use]
    pub fn start(ranks: &Ranks, limits: Limits) -> Self {
        if ranks.world_size() == 1 {
            return Self::off();
        }
        let pause = Duration::from_millis(500).min(limits.least / 4);
        let state = State { seen: Some((Instant::now(), pause)), ..State::default() };
        let shared = Arc::new(Shared { state: Mutex::new(state), changed: Condvar::new() });
        let (ranks, watched) = (ranks.clone(), Arc::clone(&shared));
        let watch = move || watch(&ranks, &watched, limits, pause);
        // Without a thread, a stuck rank is not noticed.
        let thread = thread::Builder::new().name("watchdog".to_owned()).spawn(watch).ok();
        Self { shared, thread }
    }

    /// Notes that a step begins.
    pub fn step_begins(&self, step: u64) {
        let now = Instant::now();
        self.shared.state().step = Some((step, now, now));
    }

    /// Notes that the step is over.
    pub fn step_ends(&self) {
        self.shared.state().step_ends(Instant::now());
    }

    /// Runs `wait`, which waits for the device.
    pub fn waiting_for_device<R>(&self, wait: impl FnOnce() -> R) -> R {
        self.shared.state().waits_for_device = true;
        let result = wait();
        self.shared.state().waits_for_device = false;
        result
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.shared.state().is_over = true;
        self.shared.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            // The thread cannot panic, and an error could not be handled here.
            let _ = thread.join();
        }
    }
}

/// Polls the step every half second, or more often for shorter limits.
fn watch(ranks: &Ranks, shared: &Shared, limits: Limits, pause: Duration) {
    let mut state = shared.state();
    while !state.is_over {
        if let Some(problem) = state.look(Instant::now(), ranks.communicator().is_exchanging(), limits) {
            drop(state);
            ranks.fail(&problem);
            return;
        }
        (state, _) = shared.changed.wait_timeout(state, pause).unwrap_or_else(PoisonError::into_inner);
    }
}

impl State {
    /// Leaves out the time during which this process did not run.
    fn leave_out_suspension(&mut self, now: Instant) {
        let Some((seen, pause)) = &mut self.seen else { return };
        let unseen = now.saturating_duration_since(std::mem::replace(seen, now));
        if unseen > SUSPENDED * *pause
            && let Some((_, began, since)) = &mut self.step
        {
            *began = (*began + unseen).min(now);
            *since = now;
        }
    }

    fn step_ends(&mut self, now: Instant) {
        self.leave_out_suspension(now);
        if let Some((_, began, _)) = self.step.take() {
            self.taken += 1;
            if self.taken > 1 {
                // The first step compiles and allocates.
                self.longest = self.longest.max(now.saturating_duration_since(began));
            }
        }
    }

    /// Returns why the rank is stuck; `None` if it is not.
    fn look(&mut self, now: Instant, is_exchanging: bool, limits: Limits) -> Option<String> {
        self.leave_out_suspension(now);
        let taken = self.taken;
        let (step, _, since) = self.step.as_mut()?;
        if is_exchanging {
            *since = now;
        }
        let time = now.saturating_duration_since(*since);
        let grace = if self.waits_for_device { limits.device } else { Duration::ZERO };
        if taken < WARM_UP || time <= limits.least.max(FACTOR * self.longest) + grace {
            return None;
        }
        let (time, longest) = (time.as_secs_f64(), self.longest.as_secs_f64());
        let what = match self.waits_for_device {
            true => "its device, or a rank that its device waits for,",
            false => "it",
        };
        Some(format!(
            "{what} is stuck in step {step}: nothing for {time:.0} s, where the longest step before took {longest:.2} s \
             (FIREBRICK_STUCK_TIMEOUT is the seconds that a step has at least; 0 watches nothing)"
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits { least: Duration::from_millis(20), device: Duration::from_millis(60) };

    fn in_step_for(ms: u64, longest_ms: u64) -> State {
        let began = Instant::now().checked_sub(Duration::from_millis(ms)).unwrap();
        let longest = Duration::from_millis(longest_ms);
        State { step: Some((7, began, began)), taken: WARM_UP, longest, ..State::default() }
    }

    #[test]
    fn a_step_is_stuck_after_four_times_the_longest() {
        assert_eq!(in_step_for(10, 1).look(Instant::now(), false, LIMITS), None);
        let problem = in_step_for(3000, 1).look(Instant::now(), false, LIMITS).unwrap();
        assert!(problem.starts_with("it is stuck in step 7: nothing for 3 s"), "{problem}");
        assert_eq!(in_step_for(3000, 1000).look(Instant::now(), false, LIMITS), None);
        assert!(in_step_for(5000, 1000).look(Instant::now(), false, LIMITS).is_some());
    }

    #[test]
    fn time_in_exchanges_does_not_count() {
        let mut state = in_step_for(3000, 1);
        assert_eq!(state.look(Instant::now(), true, LIMITS), None);
        assert_eq!(state.look(Instant::now(), false, LIMITS), None);
        let mut state = State { waits_for_device: true, ..in_step_for(50, 1) };
        assert_eq!(state.look(Instant::now(), false, LIMITS), None);
        let mut state = State { waits_for_device: true, ..in_step_for(3000, 1) };
        let problem = state.look(Instant::now(), false, LIMITS).unwrap();
        assert!(problem.starts_with("its device, or a rank that its device waits for, is stuck"), "{problem}");
    }

    #[test]
    fn nothing_is_stuck_between_steps() {
        assert_eq!(State { taken: 9, ..State::default() }.look(Instant::now(), false, LIMITS), None);
        assert_eq!(State { taken: 1, ..in_step_for(3000, 1) }.look(Instant::now(), false, LIMITS), None);
    }

    #[test]
    fn suspended_time_does_not_count() {
        let began = Instant::now();
        let at = |ms| began + Duration::from_millis(ms);
        let seen = Some((began, Duration::from_millis(5)));
        let suspended = || {
            let mut state = State { step: Some((7, began, began)), taken: WARM_UP, seen, ..State::default() };
            assert_eq!(state.look(at(5), false, LIMITS), None);
            state
        };
        // Suspended for a minute; then its time begins again.
        let mut state = suspended();
        for ms in [60_000, 60_005, 60_010, 60_015, 60_020] {
            assert_eq!(state.look(at(ms), false, LIMITS), None, "{ms}");
        }
        let problem = state.look(at(60_025), false, LIMITS).unwrap();
        assert!(problem.starts_with("it is stuck in step 7: nothing for 0 s"), "{problem}");
        let mut state = suspended();
        state.step_ends(at(60_000));
        assert_eq!((state.taken, state.longest), (WARM_UP + 1, Duration::from_millis(5)));
        // A watcher that is a little late was not suspended.
        let mut state = suspended();
        assert_eq!(state.look(at(19), false, LIMITS), None);
        assert!(state.look(at(30), false, LIMITS).is_some());
    }
}
