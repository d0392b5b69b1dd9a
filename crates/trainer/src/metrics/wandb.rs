//! A sink for Weights & Biases, off unless the recipe has `[wandb]`: a run in W&B's own files, which W&B's own program sends.
//!
//! `wandb/offline-run-DATE-ID/run-ID.wandb` in the run folder is a transaction log of protobuf messages (`Record` of wandb_internal.proto, whose
//! field numbers are used here): header, run with its config, rows of numbers with the summary after each, exit. `wandb beta sync --live` reads it
//! while it grows, and `wandb sync` afterwards. A resumed run writes another log of the same ID, without the steps that W&B has.
//! Not supported: console output, code, system metrics of W&B, artifacts.
//! Trade-off: W&B expects one row per step, so a row is written when the next step begins, and a killed run loses its last row.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use chrono::DateTime;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use xxhash_rust::xxh3::xxh3_64;

use crate::metrics::protobuf::{bytes, fields, string, varint};
use crate::metrics::transaction_log::{self, TransactionLog};
use crate::metrics::{MetricSink, RunEnd, now};
use crate::storage::StorageError;

/// `[wandb]`: a run of Weights & Biases that gets the plan's decisions and the metrics too.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct WandbSection {
    /// Project of the run. Default "firebrick".
    #[serde(default = "super::program")]
    pub project: String,
    /// User or team that the project belongs to. Default: absent, that of the login.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub entity: Option<String>,
    /// "online": W&B's program `wandb` sends the numbers during the run, where it is installed and has logged in. "offline": nothing leaves the
    /// machine until `wandb sync`. Default "online".
    #[serde(default)]
    pub mode: WandbMode,
}

/// `wandb.mode`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum WandbMode {
    /// Sent during the run.
    #[default]
    Online,
    /// Sent by the user.
    Offline,
}

const PROGRAM: &str = "wandb";
/// Longest wait for it at the end of a run.
const PATIENCE: Duration = Duration::from_secs(30);
/// The numbers of messages in a `Record`.
const HISTORY: u32 = 2;
const SUMMARY: u32 = 3;
const RUN: u32 = 17;
const EXIT: u32 = 18;
const HEADER: u32 = 21;
/// The number of `value_json` in items of a config, a summary or a row.
const VALUE: u32 = 16;

/// The sink.
#[derive(Debug)]
pub struct Wandb {
    log: TransactionLog,
    folder: PathBuf,
    records: u64,
    /// The row that may still get numbers.
    row: Option<(u64, Vec<(String, f64)>)>,
    /// The last step of earlier parts of the run.
    step_before: Option<u64>,
    started: Duration,
    /// The time since 1970.
    now: fn() -> Duration,
    sync: Option<Child>,
    has_ended: bool,
}

impl Wandb {
    /// Begins a log in the run folder, after those of earlier parts of a resumed run; starts W&B's program if the section says so.
    pub fn start(
        section: &WandbSection,
        (run_folder, name): (&Path, &str),
        parameters: &[(String, String)],
        resumed: bool,
    ) -> Result<Self, StorageError> {
        let home = run_folder.join("wandb");
        let earlier = if resumed { earlier_logs(&home) } else { Vec::new() };
        let run_id = earlier.last().and_then(|log| run_id_of(log)).unwrap_or_else(|| new_id(run_folder));
        let last_steps = earlier.iter().map(|log| close_earlier(log)).collect::<Result<Vec<_>, _>>()?;
        let mut sink = Self::create(&home, &run_id, section, name, parameters, now)?;
        sink.step_before = last_steps.into_iter().flatten().max();
        if section.mode == WandbMode::Online {
            sink.start_sync(PROGRAM);
        }
        Ok(sink)
    }

    fn create(
        home: &Path,
        run_id: &str,
        section: &WandbSection,
        name: &str,
        parameters: &[(String, String)],
        now: fn() -> Duration,
    ) -> Result<Self, StorageError> {
        let started = now();
        // Parts of a run that begin in the same second get later names.
        let folder = (started.as_secs()..).map(|second| home.join(format!("offline-run-{}-{run_id}", date(second))));
        let folder = folder.into_iter().find(|folder| !folder.exists()).expect("some second is free");
        let files = folder.join("files");
        fs::create_dir_all(&files).map_err(|source| StorageError::io("create", &files, source))?;
        let log = TransactionLog::create(&folder.join(format!("run-{run_id}.wandb")))?;
        let (row, step_before, sync) = (None, None, None);
        let mut sink = Self { log, folder, records: 0, row, step_before, started, now, sync, has_ended: false };
        let producer = string(1, "firebrick");
        sink.record(HEADER, &bytes(1, &producer))?;
        let config = parameters.iter().map(|(key, text)| {
            let value = serde_json::from_str(text).unwrap_or_else(|_| Value::from(text.as_str()));
            bytes(1, &item(key, &value))
        });
        let entity = section.entity.as_ref().map(|entity| string(2, entity)).unwrap_or_default();
        let time = [unless_zero(1, started.as_secs()), unless_zero(2, started.subsec_nanos().into())].concat();
        let run = [
            string(1, run_id),
            entity,
            string(3, &section.project),
            bytes(4, &config.collect::<Vec<_>>().concat()),
            string(8, name),
            bytes(17, &time),
        ];
        sink.record(RUN, &run.concat())?;
        Ok(sink)
    }

    fn record(&mut self, number: u32, message: &[u8]) -> Result<(), StorageError> {
        self.records += 1;
        self.log.append(&[varint(1, self.records), bytes(number, message)].concat())
    }

    fn write_row(&mut self) -> Result<(), StorageError> {
        let Some((step, values)) = self.row.take() else { return Ok(()) };
        let now = (self.now)();
        let runtime = now.saturating_sub(self.started).as_secs_f64();
        let of_row = [("_step", json!(step)), ("_timestamp", json!(now.as_secs_f64())), ("_runtime", json!(runtime))];
        let values = values.iter().map(|(name, value)| item(name, &json!(value)));
        let items = values.chain(of_row.iter().map(|(name, value)| item(name, value)));
        let items: Vec<u8> = items.flat_map(|item| bytes(1, &item)).collect();
        self.record(HISTORY, &[&items[..], &bytes(2, &unless_zero(1, step))].concat())?;
        self.record(SUMMARY, &items)
    }

    fn write_end(&mut self, how: RunEnd) -> Result<(), StorageError> {
        self.write_row()?;
        let runtime = (self.now)().saturating_sub(self.started).as_secs();
        self.record(EXIT, &exit(how.wandb_exit_code(), runtime))?;
        self.log.flush()
    }

    /// Starts the program that sends the log while it grows. What it prints goes to a file next to the log.
    fn start_sync(&mut self, program: &str) {
        let started = self.sync_command(program).and_then(|mut command| command.spawn());
        match started {
            Ok(child) => self.sync = Some(child),
            Err(error) if error.kind() == io::ErrorKind::NotFound => tracing::warn!(
                "[wandb]: W&B's program `{program}` is not installed, so nothing is sent during the run. Install it (pip install wandb) or write \
                 wandb.mode = \"offline\"; {}",
                self.advice()
            ),
            Err(error) => tracing::warn!("[wandb]: `{program}` cannot be started: {error}; {}", self.advice()),
        }
    }

    fn sync_command(&self, program: &str) -> io::Result<Command> {
        let folder = fs::canonicalize(&self.folder)?;
        let output = File::create(folder.join("sync.log"))?;
        let mut command = Command::new(program);
        command.args(["beta", "sync", "--live"]).arg(&folder);
        // Where the run is known already, this part continues it; W&B's program keeps its own files in the folder `wandb` of its working folder.
        command.env("WANDB_RESUME", "allow").current_dir(folder.join("../.."));
        command.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output);
        // Ctrl-C in the terminal ends the run, and this program afterwards, when all is sent.
        #[cfg(unix)]
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        Ok(command)
    }

    fn advice(&self) -> String {
        format!("afterwards, `WANDB_RESUME=allow wandb sync {}` sends it", self.folder.display())
    }
}

impl MetricSink for Wandb {
    /// Adds numbers to the row of a step. Numbers of a step that an earlier part has written are the same again, except for an evaluation that was
    /// still due.
    fn plot(&mut self, step: u64, scalars: Vec<(String, f64)>, is_evaluation: bool) -> Result<(), StorageError> {
        if let Some(Ok(Some(status))) = self.sync.as_mut().map(Child::try_wait) {
            self.sync = None;
            let output = self.folder.join("sync.log");
            tracing::warn!(
                "W&B's program ended before the run ({status}): see {}; {}",
                output.display(),
                self.advice()
            );
        }
        if self.step_before.is_some_and(|last| step < last || step == last && !is_evaluation) {
            return Ok(());
        }
        match &mut self.row {
            Some((at, values)) if *at == step => {
                values.extend(scalars);
                Ok(())
            }
            _ => {
                let written = self.write_row();
                self.row = Some((step, scalars));
                written
            }
        }
    }

    fn flush(&mut self) -> Result<(), StorageError> {
        self.log.flush()
    }

    fn end(&mut self, how: RunEnd) {
        self.has_ended = true;
        if let Err(error) = self.write_end(how) {
            tracing::warn!("{}: the run's end is missing in W&B's log", error.problem());
        }
        let Some(mut child) = self.sync.take() else { return };
        let since = Instant::now();
        while matches!(child.try_wait(), Ok(None)) {
            if since.elapsed() > PATIENCE {
                tracing::warn!("W&B's program is still sending {}; it goes on by itself", self.folder.display());
                return;
            }
            sleep(Duration::from_millis(100));
        }
        let is_sent = fs::read_dir(&self.folder).into_iter().flatten().flatten();
        if !is_sent.into_iter().any(|file| file.path().extension().is_some_and(|extension| extension == "synced")) {
            let output = self.folder.join("sync.log");
            tracing::warn!("W&B's program has not sent all: see {}; {}", output.display(), self.advice());
        }
    }
}

impl Drop for Wandb {
    fn drop(&mut self) {
        if !self.has_ended {
            self.end(RunEnd::Failed);
        }
    }
}

impl RunEnd {
    /// Returns the exit codes that W&B's package gives to the same ends; 255 is Ctrl-C.
    fn wandb_exit_code(self) -> u64 {
        match self {
            Self::Finished => 0,
            Self::Interrupted => 255,
            Self::Failed => 1,
        }
    }
}

/// Encodes a key with its value, as configs, rows and summaries have them.
fn item(key: &str, value: &Value) -> Vec<u8> {
    [string(1, key), string(VALUE, &value.to_string())].concat()
}

fn exit(code: u64, runtime: u64) -> Vec<u8> {
    [unless_zero(1, code), unless_zero(2, runtime)].concat()
}

/// Encodes a number; zeros are left out, as protobuf does.
fn unless_zero(field: u32, value: u64) -> Vec<u8> {
    if value == 0 { Vec::new() } else { varint(field, value) }
}

/// Returns the logs of a run, oldest first.
fn earlier_logs(home: &Path) -> Vec<PathBuf> {
    let list = |folder: &Path| fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let logs = list(home).filter(|folder| folder.is_dir()).flat_map(|folder| list(&folder).collect::<Vec<_>>());
    let mut logs: Vec<PathBuf> = logs.filter(|file| run_id_of(file).is_some()).collect();
    logs.sort();
    logs
}

fn run_id_of(log: &Path) -> Option<String> {
    Some(log.file_name()?.to_str()?.strip_prefix("run-")?.strip_suffix(".wandb")?.to_owned())
}

/// Returns the last step of a log. A log without an exit is of a part that was killed: it gets one, which also ends a program that waits for more.
fn close_earlier(path: &Path) -> Result<Option<u64>, StorageError> {
    let (records, _) = transaction_log::read(path)?;
    let messages: Vec<(u32, Vec<u8>)> = records.iter().filter_map(|record| fields(record)).flatten().collect();
    if !messages.iter().any(|(number, _)| *number == EXIT) {
        let mut log = TransactionLog::reopen(path)?;
        log.append(
            &[varint(1, records.len() as u64 + 1), bytes(EXIT, &exit(RunEnd::Failed.wandb_exit_code(), 0))].concat(),
        )?;
    }
    let rows = messages.iter().filter(|(number, _)| *number == HISTORY);
    Ok(rows.filter_map(|(_, row)| step_of(row)).max())
}

fn step_of(row: &[u8]) -> Option<u64> {
    let (_, step) = fields(row)?.into_iter().find(|(number, _)| *number == 2)?;
    let number = fields(&step)?.into_iter().find(|(number, _)| *number == 1);
    Some(number.map_or(0, |(_, value)| value.try_into().map_or(0, u64::from_le_bytes)))
}

fn new_id(run_folder: &Path) -> String {
    const LETTERS: &[u8; 36] = b"abcdefghijklmnopqrstuvwxyz0123456789";
    let mut hash = xxh3_64(format!("{} {:?} {}", run_folder.display(), now(), std::process::id()).as_bytes());
    let letters = (0..8).map(|_| {
        let letter = LETTERS[(hash % 36) as usize];
        hash /= 36;
        char::from(letter)
    });
    letters.collect()
}

fn date(unix_seconds: u64) -> String {
    let time = i64::try_from(unix_seconds).ok().and_then(|seconds| DateTime::from_timestamp(seconds, 0));
    time.unwrap_or_default().format("%Y%m%d_%H%M%S").to_string()
}

#[cfg(test)]
mod tests;
