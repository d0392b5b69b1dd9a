//! A sink for MLflow's tracking server over REST, off unless the recipe has `[mlflow]`.
//!
//! Steps queue their numbers, and a separate thread sends many of them per request, so a slow or lost server never delays a step. The run's
//! identifier is stored in the run folder, so a resumed run continues the same MLflow run. Credentials come from MLflow's own variables:
//! `MLFLOW_TRACKING_TOKEN`, or `MLFLOW_TRACKING_USERNAME` and `MLFLOW_TRACKING_PASSWORD`.
//! Trade-off: while a server cannot be reached, numbers wait, and the oldest beyond [`QUEUE`] are dropped; metrics.jsonl has all.

use std::collections::{BTreeMap, VecDeque};
use std::fs;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use base64::prelude::{BASE64_STANDARD, Engine};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::metrics::{MetricSink, RunEnd, now};
use crate::storage::{StorageError, write_atomically};

/// `[mlflow]`: an MLflow tracking server that gets parameters and metrics too.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct MlflowSection {
    /// Address of the server, such as "http://127.0.0.1:5000". Credentials are read from MLFLOW_TRACKING_TOKEN, or from
    /// MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD; an address that holds them, or a query, is refused.
    pub tracking_uri: String,
    /// Name of the experiment, which is created if it is not there. Default "firebrick".
    #[serde(default = "super::program")]
    pub experiment_name: String,
}

/// The reasons why a run is not tracked.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "messages say what variants and their fields are")]
pub enum MlflowError {
    /// The server refused a request or could not be reached.
    #[error(
        "mlflow.tracking_uri = \"{uri}\": {problem} ({request}). Start the server (`mlflow server`), correct the address, or leave \
         [mlflow] out"
    )]
    Server { uri: String, request: &'static str, problem: String },
    /// The run's identifier cannot be written to the run folder.
    #[error(transparent)]
    Note(#[from] StorageError),
    /// No thread can be started.
    #[error("metrics cannot be sent to MLflow: {0}")]
    Thread(#[from] std::io::Error),
}

/// Maximum count of numbers that wait for the server.
const QUEUE: usize = 100_000;
/// Numbers per request; MLflow takes 1,000.
const BATCH: usize = 1000;
/// Parameters per request; MLflow takes 100.
const PARAMETERS: usize = 100;
/// Maximum characters of a parameter's value; older servers take 500.
const VALUE_LETTERS: usize = 500;
/// Longest wait between two attempts, and for the last numbers at the end of a run.
const PATIENCE: Duration = Duration::from_secs(10);

/// The sink.
#[derive(Debug)]
pub struct Mlflow {
    shared: Arc<Shared>,
    /// The last step of each metric that the server has from earlier parts of the run.
    sent: BTreeMap<String, u64>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    wake: Condvar,
}

#[derive(Debug, Default)]
struct State {
    metrics: VecDeque<Value>,
    dropped: u64,
    end: Option<(RunEnd, Instant)>,
}

impl Mlflow {
    /// Looks up the experiment, so that a server which is down or refuses is found before anything else is done.
    pub fn reach(section: &MlflowSection) -> Result<(), MlflowError> {
        Client::new(&section.tracking_uri).find_experiment(&section.experiment_name).map(|_| ())
    }

    /// Begins an MLflow run, or continues the one that `note`, a file of the run folder, names; sends the parameters.
    pub fn start(
        section: &MlflowSection,
        name: &str,
        parameters: &[(String, String)],
        note: &Path,
        resumed: bool,
    ) -> Result<Self, MlflowError> {
        let client = Client::new(&section.tracking_uri);
        let known = if resumed { known_run(note, &section.tracking_uri) } else { None };
        let (run_id, sent) = match known {
            Some(run_id) => {
                client.update(&run_id, "RUNNING", None)?;
                let sent = client.last_steps(&run_id)?;
                (run_id, sent)
            }
            None => {
                let run_id = client.create_run(&section.experiment_name, name, parameters)?;
                let text = json!({"tracking_uri": section.tracking_uri, "run_id": run_id}).to_string();
                write_atomically(note, (text + "\n").as_bytes())?;
                (run_id, BTreeMap::new())
            }
        };
        let shared = Arc::new(Shared::default());
        let queue = Arc::clone(&shared);
        let thread =
            std::thread::Builder::new().name("mlflow".to_owned()).spawn(move || send(&client, &run_id, &queue))?;
        Ok(Self { shared, sent, thread: Some(thread) })
    }
}

impl MetricSink for Mlflow {
    /// Queues numbers that the server does not have: it cannot forget those of steps that a resumed run takes again.
    fn plot(&mut self, step: u64, scalars: Vec<(String, f64)>, _: bool) -> Result<(), StorageError> {
        let timestamp = now_ms();
        let is_new = |key: &String| self.sent.get(key).is_none_or(|last| *last < step);
        let new = scalars.into_iter().filter(|(key, _)| is_new(key));
        let metrics = new.map(|(key, value)| json!({"key": key, "value": value, "timestamp": timestamp, "step": step}));
        let mut state = self.shared.lock();
        state.metrics.extend(metrics);
        while state.metrics.len() > QUEUE {
            state.metrics.pop_front();
            state.dropped += 1;
        }
        drop(state);
        self.shared.wake.notify_all();
        Ok(())
    }

    fn end(&mut self, how: RunEnd) {
        self.shared.lock().end = Some((how, Instant::now()));
        self.shared.wake.notify_all();
        if let Some(thread) = self.thread.take() {
            // A sender that panicked has nothing left to send.
            let _ = thread.join();
        }
    }
}

impl Drop for Mlflow {
    fn drop(&mut self) {
        if self.thread.is_some() {
            self.end(RunEnd::Failed);
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for numbers or the end, or until a pause is over.
    fn wait(&self, pause: Option<Duration>) {
        let waits = |state: &mut State| pause.is_some() || state.end.is_none() && state.metrics.is_empty();
        let longest = pause.unwrap_or(Duration::from_secs(3600));
        drop(self.wake.wait_timeout_while(self.lock(), longest, waits));
    }
}

/// Sends until the run has ended and nothing waits, or until the server stays lost after the end.
fn send(client: &Client, run_id: &str, shared: &Shared) {
    let mut pause = None;
    loop {
        shared.wait(pause);
        let (batch, end, dropped_before) = {
            let state = shared.lock();
            (state.metrics.iter().take(BATCH).cloned().collect::<Vec<_>>(), state.end, state.dropped)
        };
        if batch.is_empty() {
            let Some((how, _)) = end else { continue };
            let status = match how {
                RunEnd::Finished => "FINISHED",
                RunEnd::Interrupted => "KILLED",
                RunEnd::Failed => "FAILED",
            };
            if let Err(error) = client.update(run_id, status, Some(now_ms())) {
                tracing::warn!("{error}: the run's end is not noted there");
            }
            return;
        }
        match client.post("runs/log-batch", &json!({"run_id": run_id, "metrics": batch})) {
            Ok(_) => {
                let mut state = shared.lock();
                // Some of the numbers that were sent may have been dropped from the front meanwhile.
                let gone = (state.dropped - dropped_before) as usize;
                let sent = batch.len().saturating_sub(gone);
                state.metrics.drain(..sent);
                if pause.take().is_some() {
                    tracing::warn!("MLflow is reached again; {} numbers were dropped", state.dropped);
                }
            }
            Err(error) => {
                if pause.is_none() {
                    tracing::warn!("{error}. The run goes on; metrics.jsonl has all numbers");
                }
                if end.is_some_and(|(_, since)| since.elapsed() > PATIENCE) || end.is_some() && pause.is_some() {
                    tracing::warn!("{} numbers were not sent to MLflow", shared.lock().metrics.len());
                    return;
                }
                pause = Some(pause.map_or(Duration::from_millis(500), |pause| (2 * pause).min(PATIENCE)));
            }
        }
    }
}

/// Returns the run that a note names, if it is on this server.
fn known_run(note: &Path, uri: &str) -> Option<String> {
    let note: Value = serde_json::from_str(&fs::read_to_string(note).ok()?).ok()?;
    (note["tracking_uri"] == uri).then(|| note["run_id"].as_str().map(str::to_owned)).flatten()
}

fn now_ms() -> u64 {
    now().as_millis() as u64
}

/// A client for the five requests of MLflow's REST API (version 2.0) that are needed.
#[derive(Debug)]
struct Client {
    uri: String,
    authorization: Option<String>,
}

impl Client {
    fn new(uri: &str) -> Self {
        let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        let basic = || {
            let (user, password) = (variable("MLFLOW_TRACKING_USERNAME")?, variable("MLFLOW_TRACKING_PASSWORD")?);
            Some(format!("Basic {}", BASE64_STANDARD.encode(format!("{user}:{password}"))))
        };
        let bearer = variable("MLFLOW_TRACKING_TOKEN").map(|token| format!("Bearer {token}"));
        Self { uri: uri.trim_end_matches('/').to_owned(), authorization: bearer.or_else(basic) }
    }

    fn create_run(&self, experiment: &str, name: &str, parameters: &[(String, String)]) -> Result<String, MlflowError> {
        let experiment_id = self.experiment(experiment)?;
        let run = json!({"experiment_id": experiment_id, "run_name": name, "start_time": now_ms(),
            "tags": [{"key": "mlflow.runName", "value": name}, {"key": "mlflow.source.name", "value": "firebrick"}]});
        let created = self.post("runs/create", &run)?;
        let run_id = text(&created["run"]["info"]["run_id"])
            .ok_or_else(|| self.error("runs/create", "the answer has no run.info.run_id".to_owned()))?;
        let parameter = |(key, value): &(String, String)| {
            let value: String = value.chars().take(VALUE_LETTERS).collect();
            json!({"key": key, "value": value})
        };
        for some in parameters.chunks(PARAMETERS) {
            let some: Vec<Value> = some.iter().map(parameter).collect();
            self.post("runs/log-batch", &json!({"run_id": run_id, "params": some}))?;
        }
        Ok(run_id)
    }

    /// Returns the identifier of an experiment, creating one if none has that name.
    fn experiment(&self, name: &str) -> Result<String, MlflowError> {
        if let Some(found) = self.find_experiment(name)? {
            return Ok(found);
        }
        let created = self.post("experiments/create", &json!({"name": name}))?;
        text(&created["experiment_id"])
            .ok_or_else(|| self.error("experiments/create", "the answer has no experiment_id".to_owned()))
    }

    fn find_experiment(&self, name: &str) -> Result<Option<String>, MlflowError> {
        const GET: &str = "experiments/get-by-name";
        let (status, answer) = self.get(GET, "experiment_name", name)?;
        if status != 200 && answer["error_code"] == "RESOURCE_DOES_NOT_EXIST" {
            return Ok(None);
        }
        let found = text(&self.accepted(GET, (status, answer))?["experiment"]["experiment_id"]);
        found.map(Some).ok_or_else(|| self.error(GET, "the answer has no experiment.experiment_id".to_owned()))
    }

    fn last_steps(&self, run_id: &str) -> Result<BTreeMap<String, u64>, MlflowError> {
        const GET: &str = "runs/get";
        let answer = self.accepted(GET, self.get(GET, "run_id", run_id)?)?;
        // Numbers of 64 bits are texts in protobuf's JSON.
        let number = |step: &Value| step.as_u64().or_else(|| step.as_str()?.parse().ok()).unwrap_or(0);
        let metrics = answer["run"]["data"]["metrics"].as_array().into_iter().flatten();
        Ok(metrics.filter_map(|metric| Some((text(&metric["key"])?, number(&metric["step"])))).collect())
    }

    fn get(&self, request: &'static str, key: &str, value: &str) -> Result<(u16, Value), MlflowError> {
        let call = firebrick_hub::http_agent().get(self.url(request)).query(key, value);
        self.read(request, self.authorized(call).call())
    }

    fn update(&self, run_id: &str, status: &str, end_time: Option<u64>) -> Result<(), MlflowError> {
        self.post("runs/update", &json!({"run_id": run_id, "status": status, "end_time": end_time})).map(|_| ())
    }

    fn post(&self, request: &'static str, body: &Value) -> Result<Value, MlflowError> {
        let call = firebrick_hub::http_agent().post(self.url(request)).header("content-type", "application/json");
        self.accepted(request, self.read(request, self.authorized(call).send(body.to_string()))?)
    }

    fn url(&self, request: &str) -> String {
        format!("{}/api/2.0/mlflow/{request}", self.uri)
    }

    fn authorized<B>(&self, call: ureq::RequestBuilder<B>) -> ureq::RequestBuilder<B> {
        self.authorization.iter().fold(call, |call, value| call.header("authorization", value))
    }

    fn read(
        &self,
        request: &'static str,
        answer: Result<ureq::http::Response<ureq::Body>, ureq::Error>,
    ) -> Result<(u16, Value), MlflowError> {
        let mut answer = answer.map_err(|error| self.error(request, error.to_string()))?;
        let status = answer.status().as_u16();
        let body = answer.body_mut().read_to_string().map_err(|error| self.error(request, error.to_string()))?;
        Ok((status, serde_json::from_str(&body).unwrap_or(Value::Null)))
    }

    /// Returns the body of an answer that is not a refusal.
    fn accepted(&self, request: &'static str, (status, answer): (u16, Value)) -> Result<Value, MlflowError> {
        if status == 200 {
            return Ok(answer);
        }
        let message = answer["message"].as_str().unwrap_or("no reason given");
        Err(self.error(request, format!("the server answers {status}: {message}")))
    }

    fn error(&self, request: &'static str, problem: String) -> MlflowError {
        MlflowError::Server { uri: self.uri.clone(), request, problem }
    }
}

fn text(value: &Value) -> Option<String> {
    value.as_str().map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_note_names_a_run_of_its_own_server_only() {
        let folder = tempfile::tempdir().unwrap();
        let note = folder.path().join("mlflow.json");
        fs::write(&note, r#"{"tracking_uri": "http://a", "run_id": "7"}"#).unwrap();
        assert_eq!(known_run(&note, "http://a").as_deref(), Some("7"));
        assert_eq!(known_run(&note, "http://b"), None);
        assert_eq!(known_run(&folder.path().join("none"), "http://a"), None);
    }

    #[test]
    fn a_lost_server_is_named_with_what_to_do() {
        let section = MlflowSection { tracking_uri: "http://127.0.0.1:9".to_owned(), experiment_name: "e".to_owned() };
        let folder = tempfile::tempdir().unwrap();
        let error =
            Mlflow::start(&section, "run", &[], &folder.path().join("mlflow.json"), false).unwrap_err().to_string();
        assert!(
            error.contains("mlflow.tracking_uri = \"http://127.0.0.1:9\"") && error.contains("[mlflow]"),
            "{error}"
        );
    }
}
