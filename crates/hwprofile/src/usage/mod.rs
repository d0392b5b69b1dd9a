//! Usage of the machine while something runs on it: a thread samples one accelerator and this process, and its owner takes the averages since the
//! last call.
//!
//! The thread rests at least 200 times as long as a sample took, so that sampling takes less than 0.5 % of one thread with any driver. Values that a
//! machine does not report are missing in the readings and named once in [`UsageMonitor::notes`].
//! Trade-off: one accelerator per monitor; a reading of a short interval rests on one sample, or on none and is then empty.

mod gauge;
mod nvidia;
mod process;
mod reading;

use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

pub use crate::throttle::Throttle;
pub use gauge::Gauge;
pub use reading::Usage;

use crate::Gpu;
use crate::spec::Maker;
use process::ProcessSampler;
use reading::{Sample, Totals};

/// Time between two samples, at least.
const EVERY: Duration = Duration::from_millis(500);

/// A rest is this many times as long as the sample before it: at most 1 / 201 of a thread's time goes into samples.
const REST: u32 = 200;

/// The accelerator to sample in addition to the process itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum UsageTarget {
    /// The process alone.
    #[default]
    Process,
    /// An NVIDIA card, through NVML.
    Nvidia {
        /// `GPU-` and a unique number.
        uuid: String,
        /// NVML's library, if it is not the driver's own.
        library: Option<PathBuf>,
    },
}

impl UsageTarget {
    /// Returns the way to sample a detected card. `None`: it is not NVIDIA's, or it is a partition, which NVML does not measure.
    pub fn of(gpu: &Gpu) -> Option<Self> {
        let is_measured = gpu.maker == Maker::Nvidia && !gpu.is_partition;
        is_measured.then(|| Some(Self::Nvidia { uuid: gpu.uuid.clone()?, library: None }))?
    }
}

/// A sampling thread, which ends when this is dropped.
#[derive(Debug)]
pub struct UsageMonitor {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    wake: Condvar,
}

#[derive(Debug, Default)]
struct State {
    totals: Totals,
    notes: Vec<String>,
    is_over: bool,
    samples: u64,
}

impl UsageMonitor {
    /// Starts sampling. A target that cannot be sampled becomes a note, and only the process is sampled.
    pub fn start(target: UsageTarget) -> Self {
        let shared = Arc::new(Shared::default());
        let seen = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("usage".to_owned()).spawn(move || sample(target, &seen));
        if let Err(error) = &thread {
            shared.lock().notes.push(format!("usage is not sampled: no thread could be started ({error})"));
        }
        Self { shared, thread: thread.ok() }
    }

    /// Returns the averages since the last call; without values if no sample was taken in between.
    pub fn take(&self) -> Usage {
        self.shared.lock().totals.take()
    }

    /// Returns what could not be sampled, in sentences, each once.
    pub fn notes(&self) -> Vec<String> {
        std::mem::take(&mut self.shared.lock().notes)
    }

    /// Returns the number of samples so far.
    pub fn samples(&self) -> u64 {
        self.shared.lock().samples
    }
}

impl Drop for UsageMonitor {
    fn drop(&mut self) {
        self.shared.lock().is_over = true;
        self.shared.wake.notify_all();
        if let Some(thread) = self.thread.take() {
            // A sampler that panicked has nothing left to end.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Samples until the monitor is dropped.
    fn repeat(&self, mut read: impl FnMut(&mut Sample)) {
        let mut process = ProcessSampler::default();
        loop {
            let started = Instant::now();
            let mut sample = Sample::default();
            process.read(&mut sample);
            read(&mut sample);
            let took = started.elapsed();
            let mut state = self.lock();
            state.totals.add(&sample);
            state.samples += 1;
            let rest = EVERY.max(took * REST);
            let (state, _) = self
                .wake
                .wait_timeout_while(state, rest, |state| !state.is_over)
                .unwrap_or_else(PoisonError::into_inner);
            if state.is_over {
                return;
            }
        }
    }
}

fn sample(target: UsageTarget, shared: &Shared) {
    match target {
        UsageTarget::Process => shared.repeat(|_| ()),
        UsageTarget::Nvidia { uuid, library } => {
            if let Err(error) = nvidia::watch(&uuid, library.as_deref(), shared) {
                shared.lock().notes.push(format!("the card's usage is not sampled: NVML reports \"{error}\""));
                shared.repeat(|_| ());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn first(monitor: &UsageMonitor) -> Usage {
        let started = Instant::now();
        while monitor.samples() == 0 {
            assert!(started.elapsed() < Duration::from_secs(30), "no sample was taken");
            std::thread::sleep(Duration::from_millis(2));
        }
        monitor.take()
    }

    #[test]
    fn a_process_without_an_accelerator_reports_its_memory() {
        let monitor = UsageMonitor::start(UsageTarget::Process);
        let usage = first(&monitor);
        assert!(usage.get(Gauge::GpuUtil).is_none() && usage.throttle().is_empty());
        assert!(usage.get(Gauge::HostMemory).is_some_and(|bytes| bytes > 0.0) || !cfg!(target_os = "linux"));
        assert!(monitor.take().is_empty(), "a sample counts once");
    }

    #[test]
    fn a_missing_library_is_a_note_and_the_process_is_still_sampled() {
        let library = Some(PathBuf::from("libnvidia-ml-that-is-not-there.so"));
        let monitor = UsageMonitor::start(UsageTarget::Nvidia { uuid: "GPU-0".to_owned(), library });
        let usage = first(&monitor);
        assert!(usage.get(Gauge::PowerW).is_none());
        let notes = monitor.notes();
        assert!(notes.len() == 1 && notes[0].contains("not sampled"), "{notes:?}");
        assert!(monitor.notes().is_empty(), "a note is given once");
    }

    #[test]
    fn a_monitor_ends_at_once() {
        let monitor = UsageMonitor::start(UsageTarget::Process);
        first(&monitor);
        let started = Instant::now();
        drop(monitor);
        assert!(started.elapsed() < Duration::from_secs(5), "the end does not wait for the next sample");
    }
}
