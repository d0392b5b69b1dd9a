//! Transfers from and to the Hub: a bar on a terminal, a line every few seconds in a log file.

use std::io::{self, IsTerminal};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use firebrick_hub::Progress;
use indicatif::{ProgressBar, ProgressStyle};

use crate::console::{Console, escaped, warn};

/// Time between two lines if there is no terminal.
const LINE_EVERY: Duration = Duration::from_secs(5);
const MB: f64 = 1e6;

/// Shows transfers on standard error.
pub struct Download {
    console: Console,
    shown: Mutex<Option<Shown>>,
}

enum Shown {
    Bar(ProgressBar),
    Lines { what: String, bytes: u64, done: u64, last: Instant },
}

impl Download {
    /// Shows nothing if the console is quiet.
    pub fn new(console: Console) -> Self {
        Self { console, shown: Mutex::new(None) }
    }

    fn set(&self, shown: Option<Shown>) {
        *self.shown.lock().unwrap_or_else(PoisonError::into_inner) = shown;
    }
}

impl Progress for Download {
    fn begin(&self, what: &str, bytes: u64) {
        if !self.console.verbose {
            return;
        }
        if !io::stderr().is_terminal() {
            warn(&format!("{what}: {:.1} MB", bytes as f64 / MB));
            self.set(Some(Shown::Lines { what: what.to_owned(), bytes, done: 0, last: Instant::now() }));
            return;
        }
        let style = ProgressStyle::with_template("{bar:32} {msg}  {decimal_bytes}/{decimal_total_bytes}  {eta} left");
        let bar = ProgressBar::new(bytes);
        // Invariant: the template above is fixed, and it is well formed.
        bar.set_style(style.expect("the template is well formed").progress_chars("█▉▊▋▌▍▎▏ "));
        bar.set_message(escaped(what).into_owned());
        self.set(Some(Shown::Bar(bar)));
    }

    fn advance(&self, more: u64) {
        match &mut *self.shown.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(Shown::Bar(bar)) => bar.inc(more),
            Some(Shown::Lines { what, bytes, done, last }) => {
                *done += more;
                if last.elapsed() >= LINE_EVERY {
                    *last = Instant::now();
                    warn(&format!("{what}: {:.1} of {:.1} MB", *done as f64 / MB, *bytes as f64 / MB));
                }
            }
            None => {}
        }
    }

    fn end(&self) {
        let shown = self.shown.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(Shown::Bar(bar)) = shown {
            bar.finish_and_clear();
        }
    }
}
