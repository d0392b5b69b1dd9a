//! Starts the ranks of one machine as processes, passes on their output and incoming signals, and ends all when one fails.
//!
//! Ranks get the same variables as from torchrun, a random job token, and a pipe as standard input to which nothing is written: when it closes, the
//! supervisor is gone, and the rank ends too. They are in separate process groups, so that a Ctrl-C in a terminal reaches only the supervisor, which
//! sends it to each rank once.
//! Trade-off: the port of rank 0 is free when it is chosen, and another program may take it before rank 0 does; the run is then started
//! again.

use std::ffi::OsString;
use std::io::{BufRead, BufReader, Read};
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::Receiver;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::error::ParallelError;
use crate::token::JobToken;

/// Set for ranks that must end when their standard input closes, because the supervisor is gone.
pub const SUPERVISED: &str = "FIREBRICK_SUPERVISED";

/// Time between two looks at the ranks.
const PAUSE: Duration = Duration::from_millis(20);
/// Time for the other ranks to end by themselves once one has failed, so that they can report why.
const GRACE: Duration = Duration::from_secs(5);
/// Time until they are killed.
const END: Duration = Duration::from_secs(25);
/// Time until they are killed if all of them are stopped (SIGSTOP), so that none can end by itself or save anything.
const STOPPED_END: Duration = Duration::from_secs(1);

/// The signals that request the end of a process, and that end it, on every Unix.
const TERM: i32 = 15;
const KILL: i32 = 9;

/// The output stream of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Printed {
    /// Standard output.
    Output,
    /// Standard error.
    Error,
}

/// Ranks to start on this machine.
#[derive(Clone, Debug)]
pub struct LocalRanks {
    /// The program, the same for all.
    pub program: PathBuf,
    /// Its arguments.
    pub arguments: Vec<OsString>,
    /// Number of ranks.
    pub count: usize,
    /// Additional variables for all ranks.
    pub variables: Vec<(String, String)>,
}

/// Called with a rank, its output stream, and the line without its end.
pub type Print = dyn Fn(usize, Printed, &str) + Send + Sync;

/// Starts all ranks and waits for their end. `signals` are numbers of signals to pass on. Returns the exit status of the job: 0, or that
/// of the first rank that failed, where a rank that was killed by signal n counts as 128 + n.
///
/// # Errors
/// [`ParallelError::Start`] if a rank cannot be started; those that were are ended.
pub fn supervise(ranks: &LocalRanks, signals: &Receiver<i32>, print: &'static Print) -> Result<i32, ParallelError> {
    let mut children = Children::start(ranks, print)?;
    let mut failure: Option<(i32, Instant)> = None;
    while children.any_runs(print) {
        for signal in signals.try_iter() {
            children.send(signal);
        }
        if failure.is_none() {
            failure = children.worst_status().map(|status| (status, Instant::now()));
        }
        if let Some((_, since)) = failure {
            children.end_after(since.elapsed());
        }
        thread::sleep(PAUSE);
    }
    for printer in children.printers.drain(..) {
        // A panic of a printer must not end the job.
        let _ = printer.join();
    }
    Ok(failure.map(|(status, _)| status).or_else(|| children.worst_status()).unwrap_or(0))
}

struct Children {
    children: Vec<Running>,
    printers: Vec<JoinHandle<()>>,
    was_requested_to_end: bool,
}

struct Running {
    child: Child,
    /// Whether the supervisor sent it a signal because it did not end after another rank had failed.
    is_ended_here: bool,
    /// `None` while it runs.
    status: Option<i32>,
}

impl Children {
    fn start(ranks: &LocalRanks, print: &'static Print) -> Result<Self, ParallelError> {
        let mut children = Self { children: Vec::new(), printers: Vec::new(), was_requested_to_end: false };
        let (token, port) = (JobToken::random(), free_port().map_err(|error| ranks.start_error(0, &error))?);
        for rank in 0..ranks.count {
            let mut child =
                ranks.command(rank, &token, port).spawn().map_err(|error| ranks.start_error(rank, &error))?;
            let (output, error) = (child.stdout.take(), child.stderr.take());
            children.children.push(Running { child, is_ended_here: false, status: None });
            let lines = output.map(|stream| printer(rank, Printed::Output, stream, print));
            let errors = error.map(|stream| printer(rank, Printed::Error, stream, print));
            children.printers.extend(lines.into_iter().chain(errors));
        }
        Ok(children)
    }

    /// Returns whether a rank still runs. Prints the signal that killed one.
    fn any_runs(&mut self, print: &Print) -> bool {
        for (rank, running) in self.children.iter_mut().enumerate().filter(|(_, running)| running.status.is_none()) {
            let ended = running.child.try_wait();
            if let Some(signal) = ended.as_ref().ok().copied().flatten().and_then(signal_of) {
                let line = match running.is_ended_here {
                    true => format!("this rank did not end and was killed (signal {signal})"),
                    false => format!("this rank was killed by signal {signal}"),
                };
                print(rank, Printed::Error, &line);
            }
            // A child that cannot be waited for is gone.
            running.status = ended.map_or(Some(1), |ended| ended.map(status_of));
        }
        self.running().next().is_some()
    }

    fn running(&mut self) -> impl Iterator<Item = &mut Running> {
        self.children.iter_mut().filter(|running| running.status.is_none())
    }

    fn worst_status(&self) -> Option<i32> {
        self.children.iter().filter_map(|running| running.status).filter(|&status| status != 0).max()
    }

    fn send(&mut self, signal: i32) {
        self.running().for_each(|running| send(&running.child, signal));
    }

    /// Ends the ranks that still run this long after another one has failed.
    fn end_after(&mut self, time: Duration) {
        if time >= END || (time >= STOPPED_END && self.running().all(|running| is_stopped(&running.child))) {
            self.end_with(KILL);
        } else if time >= GRACE && !self.was_requested_to_end {
            self.was_requested_to_end = true;
            self.end_with(TERM);
        }
    }

    fn end_with(&mut self, signal: i32) {
        for running in self.running() {
            running.is_ended_here = true;
            end(&mut running.child, signal);
        }
    }
}

impl Drop for Children {
    fn drop(&mut self) {
        self.end_with(KILL);
        for running in &mut self.children {
            // Waiting removes the dead process from the system's table.
            let _ = running.child.wait();
        }
    }
}

impl LocalRanks {
    fn command(&self, rank: usize, token: &JobToken, port: u16) -> Command {
        let mut command = Command::new(&self.program);
        command.args(&self.arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.env_remove("FIREBRICK_PORT").env_remove("TORCHELASTIC_USE_AGENT_STORE");
        command.envs(self.variables.iter().map(|(name, value)| (name, value)));
        command.env("RANK", rank.to_string()).env("WORLD_SIZE", self.count.to_string());
        command.env("LOCAL_RANK", rank.to_string()).env("LOCAL_WORLD_SIZE", self.count.to_string());
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
        command.env("FIREBRICK_JOB_TOKEN", token.text()).env(SUPERVISED, "1");
        #[cfg(unix)]
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        command
    }

    fn start_error(&self, rank: usize, error: &std::io::Error) -> ParallelError {
        ParallelError::Start { rank, program: self.program.display().to_string(), problem: error.to_string() }
    }
}

/// Finds a port of this machine that is free now.
pub fn free_port() -> std::io::Result<u16> {
    Ok(TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port())
}

/// Passes on what a rank prints, line by line.
fn printer(rank: usize, printed: Printed, stream: impl Read + Send + 'static, print: &'static Print) -> JoinHandle<()> {
    let pass_on = move || {
        let mut reader = BufReader::new(stream);
        let mut line = Vec::new();
        while reader.read_until(b'\n', &mut line).is_ok_and(|bytes| bytes > 0) {
            print(rank, printed, String::from_utf8_lossy(&line).trim_end_matches(['\n', '\r']));
            line.clear();
        }
    };
    // Only a system without free threads refuses one; no rank could work there.
    thread::Builder::new().name(format!("output-{rank}")).spawn(pass_on).expect("the system refused a thread")
}

fn status_of(status: ExitStatus) -> i32 {
    signal_of(status).map_or_else(|| status.code().unwrap_or(1), |signal| 128 + signal)
}

#[cfg(unix)]
fn signal_of(status: ExitStatus) -> Option<i32> {
    std::os::unix::process::ExitStatusExt::signal(&status)
}

#[cfg(not(unix))]
fn signal_of(_status: ExitStatus) -> Option<i32> {
    None
}

/// Returns whether a process is stopped (SIGSTOP). Its exit status can still be waited for.
#[cfg(unix)]
fn is_stopped(child: &Child) -> bool {
    use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};

    let options = WaitIdOptions::STOPPED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    waitid(WaitId::Pid(Pid::from_child(child)), options).is_ok_and(|status| status.is_some())
}

#[cfg(not(unix))]
fn is_stopped(_child: &Child) -> bool {
    false
}

#[cfg(unix)]
fn send(child: &Child, signal: i32) {
    if let Some(signal) = rustix::process::Signal::from_named_raw(signal) {
        // It may have ended just now. A rank leads a process group, so what it started gets the signal too.
        let _ = rustix::process::kill_process_group(rustix::process::Pid::from_child(child), signal);
    }
}

/// Does nothing on Windows: a console's Ctrl-C reaches the ranks without help there.
#[cfg(not(unix))]
fn send(_child: &Child, _signal: i32) {}

/// Ends a process by a signal; without signals by the only way there is.
fn end(child: &mut Child, signal: i32) {
    if cfg!(unix) {
        return send(child, signal);
    }
    // It may have ended just now.
    let _ = child.kill();
}

#[cfg(all(test, unix))]
mod tests {
    use std::sync::Mutex;
    use std::sync::mpsc::channel;

    use super::*;

    fn shell(count: usize, script: &str) -> LocalRanks {
        let arguments = vec!["-c".into(), script.into()];
        LocalRanks { program: "sh".into(), arguments, count, variables: vec![("EXTRA".into(), "x".into())] }
    }

    /// Collects the output of a test's ranks.
    fn log() -> (&'static Mutex<Vec<String>>, &'static Print) {
        let lines: &'static Mutex<Vec<String>> = Box::leak(Box::default());
        let print = move |rank: usize, printed: Printed, line: &str| {
            lines.lock().unwrap().push(format!("{rank} {printed:?} {line}"));
        };
        (lines, Box::leak(Box::new(print)))
    }

    #[test]
    fn ranks_get_their_place_and_pass_lines_on() {
        let (lines, print) = log();
        let script = "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $MASTER_ADDR ${#FIREBRICK_JOB_TOKEN} $EXTRA; echo e >&2";
        assert_eq!(supervise(&shell(2, script), &channel().1, print).unwrap(), 0);
        let mut lines = lines.lock().unwrap().clone();
        lines.sort();
        let expected = ["0 Error e", "0 Output 0/2 0/2 127.0.0.1 64 x", "1 Error e", "1 Output 1/2 1/2 127.0.0.1 64 x"];
        assert_eq!(lines, expected);
    }

    #[test]
    fn the_first_failure_ends_all_and_is_the_status() {
        let started = Instant::now();
        let script = "if [ $RANK = 1 ]; then exit 7; fi; sleep 60";
        assert_eq!(supervise(&shell(3, script), &channel().1, log().1).unwrap(), 7);
        let (lines, print) = log();
        let killed = "if [ $RANK = 0 ]; then kill -9 $$; fi";
        assert_eq!(supervise(&shell(2, killed), &channel().1, print).unwrap(), 137);
        assert_eq!(*lines.lock().unwrap(), ["0 Error this rank was killed by signal 9"]);
        assert!(started.elapsed() < Duration::from_secs(20), "{:?}", started.elapsed());
    }

    /// The stopped rank does not shorten the time of the others.
    #[test]
    fn a_stopped_rank_is_killed_and_named() {
        let (started, (lines, print)) = (Instant::now(), log());
        let script = "case $RANK in 0) kill -STOP $$;; 1) sleep 0.5; exit 7;; *) sleep 2.5; echo saved; exit 1;; esac";
        assert_eq!(supervise(&shell(3, script), &channel().1, print).unwrap(), 7);
        let mut lines = lines.lock().unwrap().clone();
        lines.sort();
        assert_eq!(lines, ["0 Error this rank did not end and was killed (signal 9)", "2 Output saved"]);
        assert!(started.elapsed() < Duration::from_secs(15), "{:?}", started.elapsed());
    }

    #[test]
    fn a_signal_reaches_every_rank() {
        let (lines, print) = log();
        let (sender, receiver) = channel();
        let script = "trap 'echo got; exit 130' INT; echo ready; while true; do sleep 0.05; done";
        let signal = thread::spawn(move || {
            while lines.lock().unwrap().len() < 2 {
                thread::sleep(PAUSE);
            }
            sender.send(2).unwrap();
        });
        assert_eq!(supervise(&shell(2, script), &receiver, print).unwrap(), 130);
        signal.join().unwrap();
        let lines = lines.lock().unwrap();
        assert!(lines.iter().filter(|line| line.ends_with("got")).count() == 2, "{lines:?}");
    }

    #[test]
    fn a_program_that_does_not_exist_is_an_error() {
        let ranks = LocalRanks { program: "/no/such/program".into(), ..shell(2, "") };
        let message = supervise(&ranks, &channel().1, log().1).unwrap_err().to_string();
        assert!(message.contains("rank 0 could not be started as /no/such/program"), "{message}");
    }
}
