//! Signals that end a run: Ctrl-C, SIGTERM, a closed terminal (SIGHUP), and the warning that batch systems send (SIGUSR1).
//!
//! While nothing has been trained yet (data is read, the model is loaded), the first signal ends the process at once. After that it makes the run
//! finish its step, save everything and end; a second signal ends it at once. The exit status is 128 plus the signal's number, as in shells, so that
//! `train && upload` does not upload half a run.
//! Trade-off: no cleanup when the process ends at once. What is already saved stays complete, because saves are atomic.

use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

/// The stored value of a request without a signal.
const NO_SIGNAL: i32 = -1;
/// The stored value once the run has taken the time that its recipe allows.
const TIME_IS_UP: i32 = -2;
/// Its exit status, that of the command `timeout`.
const TIMEOUT_STATUS: u8 = 124;

/// A flag that requests the end of the run. Clones share their state.
#[derive(Debug, Clone, Default)]
pub struct Interrupt {
    /// 0: no request.
    request: Arc<AtomicI32>,
    /// Whether there is anything to save.
    is_training: Arc<AtomicBool>,
    /// Whether a signal has come to this process. A request that has another reason is no signal: the first one may still come, and often does.
    has_signal: Arc<AtomicBool>,
}

impl Interrupt {
    /// Listens for signals from now on, until the process ends.
    pub fn install() -> io::Result<Interrupt> {
        let interrupt = Interrupt::default();
        interrupt.listen()?;
        Ok(interrupt)
    }

    /// Creates an interrupt without signal handlers, for runs inside a test.
    pub fn detached() -> Interrupt {
        Interrupt::default()
    }

    /// Returns whether the run should end.
    pub fn is_requested(&self) -> bool {
        self.request.load(Ordering::Relaxed) != 0
    }

    /// Returns the exit status of a run that ended by this request: that of a process killed by the signal, and 124 where the time was up.
    pub fn exit_status(&self) -> u8 {
        match self.request.load(Ordering::Relaxed) {
            TIME_IS_UP => TIMEOUT_STATUS,
            signal if signal > 0 => u8::try_from(exit_status(signal)).unwrap_or(u8::MAX),
            _ => 0,
        }
    }

    /// Makes the run end after its step because it has taken the time that it may, unless it ends already.
    pub(crate) fn time_is_up(&self) {
        // Another request keeps its reason.
        let _ = self.request.compare_exchange(0, TIME_IS_UP, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// Makes the run end after its step, as the first signal does.
    pub fn request(&self) {
        self.request.store(NO_SIGNAL, Ordering::Relaxed);
    }

    /// Returns the request as a number that other ranks understand; 0 if there is none.
    pub(crate) fn code(&self) -> u64 {
        u64::from(self.request.load(Ordering::Relaxed).cast_unsigned())
    }

    /// Takes over the request of another rank, unless there is one here.
    pub(crate) fn adopt(&self, code: u64) {
        let request = u32::try_from(code).map_or(NO_SIGNAL, u32::cast_signed);
        let _ = self.request.compare_exchange(0, request, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// Marks that there is something to save, so a signal lets the run save it.
    pub fn training_begins(&self) {
        self.is_training.store(true, Ordering::Relaxed);
    }

    /// Ends the run for this reason: after its step, or at once with the process if nothing was trained yet.
    pub(crate) fn end(&self, reason: &str) {
        // A closed standard error is ignored.
        let _ = writeln!(io::stderr(), "{reason}");
        if !self.is_training.load(Ordering::Relaxed) {
            end_process(1);
        }
        self.request();
    }

    /// Receives the signals on a thread, because a signal handler must not print.
    #[cfg(unix)]
    fn listen(&self) -> io::Result<()> {
        use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};
        use signal_hook::iterator::Signals;

        let mut numbers = vec![SIGINT, SIGTERM, SIGUSR1];
        if !hangups_are_ignored() {
            numbers.push(SIGHUP);
        }
        let mut signals = Signals::new(numbers)?;
        let interrupt = self.clone();
        std::thread::Builder::new().name("signals".to_string()).spawn(move || {
            for signal in signals.forever() {
                if !interrupt.is_training.load(Ordering::Relaxed) {
                    print_line("stopped; nothing was trained yet");
                    end_process(exit_status(signal));
                }
                // The run may be about to end for another reason: its time is up, or another rank got the signal first.
                if interrupt.has_signal.swap(true, Ordering::Relaxed) {
                    print_line("stopped at once; what was saved before is complete: continue with --resume");
                    end_process(exit_status(signal));
                }
                interrupt.request.store(signal, Ordering::Relaxed);
                print_line("finishing this step, then saving everything; press Ctrl-C again to stop at once");
            }
        })?;
        Ok(())
    }

    /// Listens without messages: Windows has no signal iterator. The first signal lets the run save, the second one ends it.
    #[cfg(not(unix))]
    fn listen(&self) -> io::Result<()> {
        use signal_hook::consts::{SIGINT, SIGTERM};
        use signal_hook::flag;

        let is_second = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM] {
            flag::register_conditional_shutdown(signal, exit_status(signal), Arc::clone(&is_second))?;
            flag::register(signal, Arc::clone(&is_second))?;
        }
        let interrupt = self.clone();
        std::thread::Builder::new().name("signals".to_string()).spawn(move || {
            while !is_second.load(Ordering::Relaxed) {
                std::thread::sleep(std::time::Duration::from_millis(50));
            }
            if !interrupt.is_training.load(Ordering::Relaxed) {
                end_process(exit_status(SIGINT));
            }
            interrupt.request.store(SIGINT, Ordering::Relaxed);
        })?;
        Ok(())
    }
}

/// Ends the process at once, from any thread. Exit handlers do not run: they would tear down libraries that another thread is using.
pub(crate) fn end_process(status: i32) -> ! {
    // A closed standard output is ignored.
    let _ = io::stdout().flush();
    signal_hook::low_level::exit(status)
}

/// Returns the exit status of a process that a signal ended, as in shells.
pub fn exit_status(signal: i32) -> i32 {
    128 + signal
}

/// Returns whether this process must survive its terminal, as under `nohup`; a handler would undo that.
#[cfg(unix)]
pub(crate) fn hangups_are_ignored() -> bool {
    use std::io::IsTerminal;

    match std::fs::read_to_string("/proc/self/status") {
        Ok(status) => ignored_signals(&status) & 1 << (signal_hook::consts::SIGHUP - 1) != 0,
        // Other systems do not report it. `nohup` leaves no terminal on the standard streams.
        Err(_) => !(io::stdin().is_terminal() || io::stdout().is_terminal() || io::stderr().is_terminal()),
    }
}

/// Parses the mask of ignored signals in the text of `/proc/self/status`; bit n - 1 is signal n.
#[cfg(unix)]
fn ignored_signals(status: &str) -> u64 {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

/// Prints a line below the progress bar.
#[cfg(unix)]
fn print_line(message: &str) {
    // A closed standard error is ignored.
    let _ = writeln!(io::stderr(), "\n{message}");
}

#[cfg(all(test, unix))]
mod tests {
    use std::process::{Command, Output};
    use std::thread::sleep;
    use std::time::Duration;

    use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
    use signal_hook::low_level::raise;

    use super::*;

    /// Set in the child process of a test; a signal reaches a whole process, so the test runs in one of its own.
    const CHILD: &str = "FIREBRICK_INTERRUPT_TEST";

    fn is_child() -> bool {
        std::env::var_os(CHILD).is_some()
    }

    /// Runs the calling test in a child process, which receives a number.
    fn in_a_child(number: usize) -> Output {
        let name = std::thread::current().name().unwrap().to_string();
        let arguments = ["--exact", &name, "--nocapture"];
        Command::new(std::env::current_exe().unwrap()).args(arguments).env(CHILD, number.to_string()).output().unwrap()
    }

    /// A reason to end the run that came before is no signal.
    #[test]
    fn first_signal_requests_the_end_and_second_one_exits_with_its_own_status() {
        let reasons: [fn(&Interrupt); 5] =
            [|_| (), Interrupt::time_is_up, Interrupt::request, |of| of.adopt(2), |of| of.end("a reason")];
        if is_child() {
            let interrupt = Interrupt::install().unwrap();
            interrupt.training_begins();
            let number: usize = std::env::var(CHILD).unwrap().parse().unwrap();
            reasons[number](&interrupt);
            assert_eq!(interrupt.is_requested(), number > 0);
            // Tests may run under nohup, which this program respects.
            let first = if hangups_are_ignored() { SIGTERM } else { SIGHUP };
            raise(first).unwrap();
            sleep(Duration::from_millis(300));
            assert_eq!(i32::from(interrupt.exit_status()), exit_status(first));
            raise(SIGINT).unwrap();
            sleep(Duration::from_secs(20));
            unreachable!("the second signal ends the process");
        }
        for number in 0..reasons.len() {
            let output = in_a_child(number);
            let printed = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(130), "{printed}");
            assert!(printed.contains("finishing this step") && printed.contains("stopped at once"), "{printed}");
        }
    }

    #[test]
    fn before_training_the_first_signal_ends_the_process() {
        if is_child() {
            let _interrupt = Interrupt::install().unwrap();
            raise(SIGTERM).unwrap();
            sleep(Duration::from_secs(20));
            unreachable!("the signal ends the process");
        }
        let output = in_a_child(0);
        let printed = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(143), "{printed}");
        assert!(printed.contains("nothing was trained yet"), "{printed}");
    }

    #[test]
    fn ignored_signals_are_read_from_the_status_of_the_process() {
        assert_eq!(ignored_signals("Name:\ttrain\nSigIgn:\t0000000000001001\n"), 0x1001);
        assert_eq!(ignored_signals("Name:\ttrain\n"), 0);
    }

    #[test]
    fn time_that_is_up_ends_all_ranks_with_the_status_of_timeout() {
        let (own, other) = (Interrupt::detached(), Interrupt::detached());
        own.time_is_up();
        other.adopt(own.code());
        assert!(own.is_requested() && own.exit_status() == 124 && other.exit_status() == 124);
        let stopped = Interrupt::detached();
        stopped.request();
        stopped.time_is_up();
        assert_eq!(stopped.exit_status(), 0, "an earlier request keeps its reason");
    }
}
