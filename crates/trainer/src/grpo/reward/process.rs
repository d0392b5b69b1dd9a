//! Rewards that processes of the user compute: requests on their stdin, answers on their stdout, a JSON value per line.
//!
//! ```text
//! start     {"firebrick_reward": 1, "batch": false}
//! request   {"id": 17, "group": 3, "step": 12, "prompt": [messages] or text, "completion": "...", "finish": "stop" or "length",
//!            "tokens": 214, "completion_ids": [their ids], "row": {columns of the data row}}; with "batch": true all of a call in one line
//!            {"requests": [...]}
//! answer    {"id": 17, "reward": 1.0 or null, "metrics": {"name": 0.5}}, in any order, each id once; metrics may be absent
//! ```
//!
//! Each pipe has a thread, so a full one blocks nothing. These threads end with their pipe and are not waited for.
//! Not supported: answers that ask for another turn of the model. Trade-off: on Windows only the process itself is ended, not what it started.

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

#[cfg(unix)]
use rustix::process::{Pid, Signal, kill_process_group};
use serde_json::Value;

use super::{Answer, Request, RewardSection, together};

/// Minimum time for the start line, which comes after the imports of the process.
const START: Duration = Duration::from_secs(60);
/// Time for a process to end by itself after its error.
const END: Duration = Duration::from_secs(2);

/// What to do with other lines.
const NOT_ON_STDOUT: &str = "Standard output is for the start line and answers: print everything else to standard error (in Python, \
                             file=sys.stderr)";

type Answers = BTreeMap<u64, Option<Answer>>;

pub(super) struct Process(Vec<Worker>);

impl Process {
    /// Starts the processes of a section and waits for their start lines.
    pub(super) fn start(section: &RewardSection, log: &Path) -> Result<Self, String> {
        together((0..section.workers.unwrap_or(1)).map(|_| || Worker::start(section, log))).map(Self)
    }

    /// Returns the answers in the order of the requests; `None` where none came in time.
    pub(super) fn score(&mut self, requests: &[Request<'_>]) -> Result<Vec<Option<Answer>>, String> {
        let (is_batch, count) = (self.0[0].is_batch, self.0.len());
        let mut parts = vec![Vec::new(); count];
        // Groups stay whole in a batch. Otherwise they are spread, because completions of one prompt take about the same time.
        let units = requests.chunk_by(|one, next| is_batch && one.group == next.group);
        units.enumerate().for_each(|(number, unit)| parts[number % count].extend(unit));
        let jobs = self.0.iter_mut().zip(parts).filter(|(_, part)| !part.is_empty());
        let answers = together(jobs.map(|(worker, part)| move || worker.answers(&part)))?;
        let mut answers: Answers = answers.into_iter().flatten().collect();
        let answer = |request: &Request<'_>| answers.remove(&request.id).expect("each request has its own id");
        Ok(requests.iter().map(answer).collect())
    }
}

/// A process, which is killed when this is dropped.
struct Worker {
    section: RewardSection,
    log: PathBuf,
    timeout: Duration,
    child: Child,
    /// `None` until it was waited for.
    status: Option<ExitStatus>,
    is_batch: bool,
    input: Sender<String>,
    output: Receiver<String>,
    errors: JoinHandle<()>,
    last_error: Arc<Mutex<String>>,
}

impl Worker {
    /// Starts a process and waits for its start line.
    fn start(section: &RewardSection, log: &Path) -> Result<Self, String> {
        let file = OpenOptions::new().create(true).append(true).open(log);
        let mut file = file.map_err(|error| format!("the log {} cannot be opened: {error}", log.display()))?;
        let command = section.command.as_deref().and_then(|command| command.split_first());
        let (program, arguments) = command.expect("it was checked that there is a program");
        let mut command = Command::new(program);
        command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        // Ctrl-C in the terminal ends the run after its step, which still needs rewards.
        #[cfg(unix)]
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        let advice = "the command must begin with a program on PATH, or with the path of one";
        let mut child = command.spawn().map_err(|error| format!("`{program}` does not start ({error}): {advice}"))?;
        let pipes = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let (Some(mut stdin), Some(stdout), Some(stderr)) = pipes else { unreachable!("it was started with pipes") };
        let (input, requests) = channel::<String>();
        thread::spawn(move || requests.iter().all(|line| stdin.write_all(line.as_bytes()).is_ok()));
        let (lines, output) = channel();
        thread::spawn(move || for_lines(stdout, |line| drop(lines.send(line))));
        let last_error = Arc::new(Mutex::new(String::new()));
        let last = Arc::clone(&last_error);
        let errors = thread::spawn(move || {
            for_lines(stderr, |line| {
                // A full disk under the log ends no run.
                let _ = file.write_all(format!("{line}\n").as_bytes());
                *last.lock().expect("no holder panics") = line;
            });
        });
        let timeout = Duration::from_secs_f64(section.timeout());
        let (section, log, status, is_batch) = (section.clone(), log.to_owned(), None, false);
        let mut worker = Self { section, log, timeout, child, status, is_batch, input, output, errors, last_error };
        worker.read_start_line().map_err(|problem| worker.failed(&problem))?;
        Ok(worker)
    }

    fn read_start_line(&mut self) -> Result<(), String> {
        let time = self.timeout.max(START);
        let line = self.line(time).map_err(|problem| format!("{problem} before it was ready"))?;
        let line = line.unwrap_or_else(|| format!("nothing for {} s", time.as_secs()));
        let start: Value = serde_json::from_str(&line).unwrap_or_default();
        let is_batch = start["batch"].as_bool().filter(|_| start["firebrick_reward"] == 1);
        let expected = r#"the start line {"firebrick_reward": 1, "batch": false} (or true)"#;
        self.is_batch = is_batch.ok_or_else(|| format!("expected {expected}, got: {line:.300}. {NOT_ON_STDOUT}"))?;
        Ok(())
    }

    /// Returns an answer per id. After a timeout the others are `None`, and the process is started again.
    fn answers(&mut self, requests: &[&Request<'_>]) -> Result<Answers, String> {
        let mut answers = requests.iter().map(|request| (request.id, None)).collect();
        if !self.ask(requests, &mut answers).map_err(|problem| self.failed(&problem))? {
            self.end();
            *self = Self::start(&self.section, &self.log)?;
        }
        Ok(answers)
    }

    /// Returns whether all answers came in time.
    fn ask(&mut self, requests: &[&Request<'_>], answers: &mut Answers) -> Result<bool, String> {
        // A second answer to a request of an earlier call must not count in this one.
        if let Ok(line) = self.output.try_recv() {
            return Err(format!("expected one answer to each request, got one more: {line:.300}"));
        }
        let lines = match self.is_batch {
            true => vec![serde_json::to_string(&BTreeMap::from([("requests", requests)]))],
            false => requests.iter().map(serde_json::to_string).collect(),
        };
        for line in lines {
            // If the process is gone, the end of its stdout says so.
            let _ = self.input.send(line.expect("requests are JSON") + "\n");
        }
        for _ in requests {
            let line = self.line(self.timeout).map_err(|problem| {
                let open = requests.iter().find(|request| answers[&request.id].is_none()).expect("one is open");
                format!("{problem} before id {} was answered", open.id)
            })?;
            let Some(line) = line else { return Ok(false) };
            let (id, answer) = parse(&line)?;
            let unknown = || format!("expected an answer to an open request, got one with the unknown id {id}");
            if answers.get_mut(&id).ok_or_else(unknown)?.replace(answer).is_some() {
                return Err(format!("expected one answer to each request, got two with id {id}"));
            }
        }
        Ok(true)
    }

    /// Returns the next line; `None` if it does not come in time.
    fn line(&self, time: Duration) -> Result<Option<String>, String> {
        match self.output.recv_timeout(time) {
            Ok(line) => Ok(Some(line)),
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(RecvTimeoutError::Disconnected) => Err("its output ended".to_owned()),
        }
    }

    /// Ends the process, and returns the problem with its exit status and the last line of its stderr.
    fn failed(&mut self, problem: &str) -> String {
        // Without more requests it can end by itself, and say why.
        self.input = channel().0;
        let until = Instant::now() + END;
        while Instant::now() < until && !self.errors.is_finished() {
            thread::sleep(Duration::from_millis(5));
        }
        self.end();
        let status = self.status.map_or("no exit status".to_owned(), |status| status.to_string());
        let last = self.last_error.lock().expect("no holder panics");
        if last.is_empty() {
            return format!("{problem}; {status}; nothing on stderr");
        }
        format!("{problem}; {status}; last line on stderr, which is in {}: '{last:.300}'", self.log.display())
    }

    /// Kills the process with those that it started, and waits for it.
    fn end(&mut self) {
        // Once it was waited for, its number may be that of another process.
        if self.status.is_none() {
            #[cfg(unix)]
            let _ = kill_process_group(Pid::from_child(&self.child), Signal::KILL);
            let _ = self.child.kill();
            self.status = self.child.wait().ok();
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.end();
    }
}

/// Passes on the lines of a stream until it ends, without empty ones.
fn for_lines(stream: impl Read, take: impl FnMut(String)) {
    let lines = BufReader::new(stream).split(b'\n').map_while(Result::ok);
    let texts = lines.map(|line| String::from_utf8_lossy(&line).trim_end().to_owned());
    texts.filter(|text| !text.is_empty()).for_each(take);
}

fn parse(line: &str) -> Result<(u64, Answer), String> {
    let other = |problem: &str| format!("expected an answer, got: {line:.300} ({problem})");
    let no_json = || format!("expected an answer, a line of JSON, got: {line:.300}. {NOT_ON_STDOUT}");
    // Python writes NaN and Infinity, which are no JSON; as texts they are refused with their id.
    let quoted = || line.replace("-Inf", "Inf").replace("Infinity", "\"Infinity\"").replace("NaN", "\"NaN\"");
    let parsed = serde_json::from_str::<Value>(line).or_else(|_| serde_json::from_str(&quoted()));
    let parsed = parsed.ok().filter(Value::is_object).ok_or_else(no_json)?;
    let id = parsed["id"].as_u64().ok_or_else(|| other("it has no id"))?;
    let number = |what: &str, value: &Value| {
        value.as_f64().ok_or_else(|| format!("id {id}: {what} must be a finite number, got {value}"))
    };
    let reward = match parsed.get("reward").ok_or_else(|| other("it has no reward"))? {
        Value::Null => None,
        reward => Some(number("a reward that is not null", reward)?),
    };
    let metrics = parsed["metrics"].as_object().into_iter().flatten();
    let metric = |(name, value): (&String, _)| Ok((name.clone(), number(&format!("metric '{name}'"), value)?));
    Ok((id, (reward, metrics.map(metric).collect::<Result<_, String>>()?)))
}
