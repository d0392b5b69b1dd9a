//! Ctrl-C and SIGTERM: the first makes the run finish its step, save everything and end; the second ends it at once.
//!
//! Trade-off: no cleanup after the second one. What is already saved stays complete, because saves are atomic.

use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The exit status after the second signal: 128 + SIGINT, as in shells.
const EXIT_STATUS: i32 = 130;

/// Whether the run should end. Clones share one flag.
#[derive(Debug, Clone, Default)]
pub struct Interrupt {
    requested: Arc<AtomicBool>,
}

impl Interrupt {
    /// Listens for signals from now on, until the process ends.
    ///
    /// # Errors
    /// The system refuses to install the handlers.
    pub fn install() -> io::Result<Interrupt> {
        let interrupt = Interrupt::default();
        interrupt.listen()?;
        Ok(interrupt)
    }

    /// An interrupt without signal handlers, for runs inside a test.
    #[must_use]
    pub fn detached() -> Interrupt {
        Interrupt::default()
    }

    /// Whether the run should end.
    #[must_use]
    pub fn is_requested(&self) -> bool {
        self.requested.load(Ordering::Relaxed)
    }

    /// Makes the run end after its step, as the first signal does.
    pub fn request(&self) {
        self.requested.store(true, Ordering::Relaxed);
    }

    /// A thread receives the signals, because a signal handler must not print.
    #[cfg(unix)]
    fn listen(&self) -> io::Result<()> {
        use signal_hook::consts::{SIGINT, SIGTERM};
        use signal_hook::iterator::Signals;

        let mut signals = Signals::new([SIGINT, SIGTERM])?;
        let interrupt = self.clone();
        std::thread::Builder::new().name("signals".to_string()).spawn(move || {
            for _ in signals.forever() {
                if interrupt.is_requested() {
                    print_line("stopped at once; what was saved before is complete: continue with --resume");
                    std::process::exit(EXIT_STATUS);
                }
                interrupt.request();
                print_line("finishing this step, then saving everything; press Ctrl-C again to stop at once");
            }
        })?;
        Ok(())
    }

    /// Windows has no signal iterator: the same behavior from flags, without the messages.
    #[cfg(not(unix))]
    fn listen(&self) -> io::Result<()> {
        use signal_hook::consts::{SIGINT, SIGTERM};
        use signal_hook::flag;

        for signal in [SIGINT, SIGTERM] {
            flag::register_conditional_shutdown(signal, EXIT_STATUS, Arc::clone(&self.requested))?;
            flag::register(signal, Arc::clone(&self.requested))?;
        }
        Ok(())
    }
}

/// Prints a line below the progress bar.
#[cfg(unix)]
fn print_line(message: &str) {
    // Standard error may be closed, and then there is nothing to do about it.
    let _ = writeln!(io::stderr(), "\n{message}");
}

#[cfg(all(test, unix))]
mod tests {
    use std::process::Command;
    use std::thread::sleep;
    use std::time::Duration;

    use signal_hook::consts::{SIGINT, SIGTERM};
    use signal_hook::low_level::raise;

    use super::*;

    /// Set in the process that this test starts of itself, because a signal reaches a whole process.
    const CHILD: &str = "FIREBRICK_INTERRUPT_TEST";

    #[test]
    fn first_signal_requests_the_end_and_second_one_exits_with_130() {
        if std::env::var_os(CHILD).is_some() {
            let interrupt = Interrupt::install().unwrap();
            assert!(!interrupt.is_requested());
            raise(SIGTERM).unwrap();
            while !interrupt.is_requested() {
                sleep(Duration::from_millis(1));
            }
            raise(SIGINT).unwrap();
            sleep(Duration::from_secs(20));
            unreachable!("the second signal ends the process");
        }
        let name = std::thread::current().name().unwrap().to_string();
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", &name, "--nocapture"])
            .env(CHILD, "1")
            .output()
            .unwrap();
        let printed = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(EXIT_STATUS), "{printed}");
        assert!(printed.contains("finishing this step") && printed.contains("stopped at once"), "{printed}");
    }

    #[test]
    fn clones_share_one_flag() {
        let interrupt = Interrupt::detached();
        let clone = interrupt.clone();
        interrupt.request();
        assert!(clone.is_requested());
    }
}
