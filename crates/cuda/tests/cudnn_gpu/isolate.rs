//! Runs each case in its own process: a kernel that ends in an error leaves a context in which nothing else can run.

use std::io::Read;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Environment variable with the case that a process runs.
const CASE: &str = "FIREBRICK_CUDNN_CASE";
/// The prefix of each line that such a process sends to its parent.
const MARK: &str = "|> ";
/// The last line of a case that passed.
const PASSED: &str = "passed";
/// Maximum duration of a case. Most need two or three seconds.
const TIME_LIMIT: Duration = Duration::from_secs(60);
/// Number of concurrent processes. They share the device, so more of them would gain little.
const PROCESSES: usize = 6;

/// Returns the case for which this process was started, if any.
pub(crate) fn case_of_this_process() -> Option<String> {
    std::env::var(CASE).ok()
}

/// Sends a line to the parent process.
pub(crate) fn tell(line: &str) {
    // The line break ends the line that the test harness has begun.
    println!("\n{MARK}{}", line.replace('\n', "; "));
}

/// Reports to the parent process that the case passed.
pub(crate) fn tell_passed() {
    tell(PASSED);
}

/// Runs each case by starting this program again for the test `test`, and prints its report. Returns the names of those that
/// failed. Failures whose report is `excused` do not count.
pub(crate) fn run_each(test: &str, names: &[String], excused: impl Fn(&str) -> bool + Sync) -> Vec<String> {
    let (next, failed) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..PROCESSES.min(names.len()) {
            scope.spawn(|| {
                while let Some(name) = names.get(next.fetch_add(1, Ordering::Relaxed)) {
                    match run(test, name) {
                        Ok(report) => println!("PASS {name}: {report}"),
                        Err(report) if excused(&report) => println!("SKIP {name}: {report}"),
                        Err(report) => {
                            println!("FAIL {name}: {report}");
                            failed.lock().expect("no thread panics with the lock").push(name.clone());
                        }
                    }
                }
            });
        }
    });
    failed.into_inner().expect("no thread panicked")
}

fn run(test: &str, name: &str) -> Result<String, String> {
    let program = std::env::current_exe().map_err(|error| format!("finding this program: {error}"))?;
    let child = Command::new(program)
        .args([test, "--exact", "--nocapture", "--test-threads=1"])
        .env(CASE, name)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let mut child = child.map_err(|error| format!("starting the process of the case: {error}"))?;
    let status = wait(&mut child);
    // Both are far smaller than the buffer of a pipe, so the process did not block on them.
    let (output, errors) = (read(child.stdout.take()), read(child.stderr.take()));
    let mut told: Vec<&str> = output.lines().filter_map(|line| line.strip_prefix(MARK)).collect();
    if told.last() == Some(&PASSED) {
        told.pop();
        return Ok(told.join("; "));
    }
    let ending = match status {
        None => format!("killed after {} s", TIME_LIMIT.as_secs()),
        Some(status) if status.code() == Some(101) => String::new(),
        Some(status) => format!("ended with {status}: {}", errors.lines().last().unwrap_or("no output")),
    };
    told.extend((!ending.is_empty()).then_some(&*ending));
    if told.is_empty() {
        told.extend(errors.lines().filter(|line| !line.trim().is_empty()).take(3));
    }
    Err(told.join("; "))
}

/// Waits; returns `None` if the process took too long and was killed.
fn wait(child: &mut Child) -> Option<ExitStatus> {
    let start = Instant::now();
    while start.elapsed() < TIME_LIMIT {
        if let Ok(Some(status)) = child.try_wait() {
            return Some(status);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    // An error here means that the process has just ended by itself.
    let _ = child.kill();
    let _ = child.wait();
    None
}

fn read(pipe: Option<impl Read>) -> String {
    let mut bytes = Vec::new();
    // The bytes read before an error are still worth showing.
    let _ = pipe.map(|mut pipe| pipe.read_to_end(&mut bytes));
    String::from_utf8_lossy(&bytes).into_owned()
}
