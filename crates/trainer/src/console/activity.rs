//! Shows what a run is doing before its first step: a spinner on a terminal, a line every few seconds in a log file.

use std::io::{self, IsTerminal};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
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
    /// `None` only while it is dropped, which the thread sees at once.
    goes_on: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Activity {
    /// Shows `describe()` on standard error until the value is dropped; nothing unless `is_shown`.
    pub fn start(is_shown: bool, describe: impl Fn() -> String + Send + 'static) -> Self {
        let (goes_on, end) = channel();
        let show =
            move || if io::stderr().is_terminal() { spin(&end, &describe) } else { write_lines(&end, &describe) };
        // Without a thread nothing is shown, and the work goes on.
        let thread =
            is_shown.then(|| std::thread::Builder::new().name("activity".to_owned()).spawn(show).ok()).flatten();
        Self { goes_on: Some(goes_on), thread }
    }
}

impl Drop for Activity {
    fn drop(&mut self) {
        drop(self.goes_on.take());
        if let Some(thread) = self.thread.take() {
            // A panic of the display must not end the run.
            let _ = thread.join();
        }
    }
}

/// Waits for `time`; returns whether the activity is over.
fn is_over_after(end: &Receiver<()>, time: Duration) -> bool {
    end.recv_timeout(time) == Err(RecvTimeoutError::Disconnected)
}

fn spin(end: &Receiver<()>, describe: &impl Fn() -> String) {
    let bar = ProgressBar::new_spinner();
    // Invariant: the template is fixed, and it is well formed.
    bar.set_style(ProgressStyle::with_template("{spinner} {msg}  {elapsed}").expect("the template is well formed"));
    while !is_over_after(end, ON_TERMINAL) {
        bar.set_message(escaped(&describe()).into_owned());
        bar.tick();
    }
    bar.finish_and_clear();
}

fn write_lines(end: &Receiver<()>, describe: &impl Fn() -> String) {
    while !is_over_after(end, IN_LOG) {
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
