//! Shows what a run is doing before its first step: a spinner on a terminal, a line every few seconds in a log file.

use std::io::{self, IsTerminal};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

use crate::console::{escaped, warn};

/// Time between two updates on a terminal.
const ON_TERMINAL: Duration = Duration::from_millis(500);
/// Time between two lines if there is no terminal.
const IN_LOG: Duration = Duration::from_secs(5);

/// Shows what goes on until it is dropped.
pub struct Activity {
    is_over: Arc<(Mutex<bool>, Condvar)>,
    thread: Option<JoinHandle<()>>,
}

impl Activity {
    /// Shows `describe()` on standard error until the value is dropped; nothing unless `is_shown`.
    pub fn start(is_shown: bool, describe: impl Fn() -> String + Send + 'static) -> Self {
        let is_over = Arc::new((Mutex::new(false), Condvar::new()));
        let watched = Arc::clone(&is_over);
        let show = move || {
            if io::stderr().is_terminal() { spin(&watched, &describe) } else { write_lines(&watched, &describe) }
        };
        // Without a thread nothing is shown, and the work goes on.
        let thread =
            is_shown.then(|| std::thread::Builder::new().name("activity".to_owned()).spawn(show).ok()).flatten();
        Self { is_over, thread }
    }
}

impl Drop for Activity {
    fn drop(&mut self) {
        let (is_over, changed) = &*self.is_over;
        *is_over.lock().unwrap_or_else(PoisonError::into_inner) = true;
        changed.notify_all();
        if let Some(thread) = self.thread.take() {
            // A panic of the display must not end the run.
            let _ = thread.join();
        }
    }
}

/// Waits for `time`; returns whether the activity is over.
fn is_over_after(state: &(Mutex<bool>, Condvar), time: Duration) -> bool {
    let (is_over, changed) = state;
    let guard = is_over.lock().unwrap_or_else(PoisonError::into_inner);
    let (guard, _) =
        changed.wait_timeout_while(guard, time, |is_over| !*is_over).unwrap_or_else(PoisonError::into_inner);
    *guard
}

fn spin(state: &(Mutex<bool>, Condvar), describe: &impl Fn() -> String) {
    let bar = ProgressBar::new_spinner();
    // Invariant: the template is fixed, and it is well formed.
    bar.set_style(ProgressStyle::with_template("{spinner} {msg}  {elapsed}").expect("the template is well formed"));
    while !is_over_after(state, ON_TERMINAL) {
        bar.set_message(escaped(&describe()).into_owned());
        bar.tick();
    }
    bar.finish_and_clear();
}

fn write_lines(state: &(Mutex<bool>, Condvar), describe: &impl Fn() -> String) {
    while !is_over_after(state, IN_LOG) {
        warn(&describe());
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn a_short_activity_ends_at_once() {
        let started = Instant::now();
        drop(Activity::start(true, || unreachable!("nothing is shown so early")));
        assert!(started.elapsed() < Duration::from_millis(400));
        assert!(Activity::start(false, String::new).thread.is_none());
    }
}
