//! `[mlflow]`: the data that a tracking server gets of a run, over MLflow's REST API as a small server here implements it.
//!
//! Trade-off: the server answers as the API's reference says; MLflow's own server was not tried.

use std::path::Path;
use std::sync::{Arc, Mutex};

use firebrick_hub_imitation::{Answer, Request, Server};
use firebrick_tests::{NEW, NEWEST, finish, metrics, one_step, recipe, refusal};
use serde_json::{Value, json};
use tempfile::tempdir;

/// The requests so far, as their last two words and bodies.
type Requests = Arc<Mutex<Vec<(String, Value)>>>;

/// Starts a server of one experiment and of the run in this output folder. Returns its address and the requests that it gets.
fn server(output: &Path) -> (String, Requests) {
    let requests = Requests::default();
    let (seen, run) = (Arc::clone(&requests), output.join("run"));
    let server = Server::new(move |request| answer(request, &seen, &run));
    (server.address, requests)
}

fn answer(request: &Request, seen: &Requests, run: &Path) -> Answer {
    let path = request.target.trim_start_matches("/api/2.0/mlflow/").to_owned();
    let mut seen = seen.lock().unwrap();
    let has_experiment = seen.iter().any(|(path, _)| path == "experiments/create");
    let mut body: Value = serde_json::from_slice(&request.body).unwrap_or(Value::Null);
    if path == "runs/update" {
        let files = ["adapter/adapter_model.safetensors", "summary.json"];
        body["files"] = files.into_iter().filter(|file| run.join(file).exists()).collect();
    }
    seen.push((path.clone(), body));
    let sent: Vec<Value> = seen.iter().filter_map(|(_, body)| body["metrics"].as_array()).flatten().cloned().collect();
    let (status, text) = match path.as_str() {
        "runs/get?run_id=abc" => (200, json!({"run": {"data": {"metrics": sent}}})),
        "experiments/get-by-name?experiment_name=my%20runs" if has_experiment => {
            (200, json!({"experiment": {"experiment_id": "5"}}))
        }
        "experiments/get-by-name?experiment_name=my%20runs" => {
            (404, json!({"error_code": "RESOURCE_DOES_NOT_EXIST", "message": "No Experiment with that name"}))
        }
        "experiments/create" => (200, json!({"experiment_id": "5"})),
        "runs/create" => (200, json!({"run": {"info": {"run_id": "abc"}}})),
        "runs/log-batch" | "runs/update" => (200, json!({})),
        other => (404, json!({"error_code": "ENDPOINT_NOT_FOUND", "message": other})),
    };
    Answer::new(status, text.to_string())
}

/// Returns step and value of a metric in all batches that were sent.
fn sent(requests: &Requests, key: &str) -> Vec<(u64, f64)> {
    let requests = requests.lock().unwrap();
    let batches =
        requests.iter().filter(|(path, _)| path == "runs/log-batch").filter_map(|(_, body)| body["metrics"].as_array());
    let found = batches.flatten().filter(|metric| metric["key"] == key);
    found.map(|metric| (metric["step"].as_u64().unwrap(), metric["value"].as_f64().unwrap())).collect()
}

fn updates(requests: &Requests) -> Vec<String> {
    let requests = requests.lock().unwrap();
    let updates = requests.iter().filter(|(path, _)| path == "runs/update");
    updates
        .map(|(_, body)| format!("{} {}", body["run_id"].as_str().unwrap(), body["status"].as_str().unwrap()))
        .collect()
}

fn tracked(address: &str) -> Vec<String> {
    vec![format!("mlflow={{tracking_uri='{address}', experiment_name='my runs'}}"), "train.steps=4".to_owned()]
}

#[test]
fn a_server_gets_the_plan_as_parameters_every_step_and_the_end() {
    let output = tempdir().unwrap();
    let (address, requests) = server(output.path());
    let changes = tracked(&address);
    finish(recipe(output.path(), &changes.iter().map(String::as_str).collect::<Vec<_>>()), NEW);
    let losses: Vec<(u64, f64)> = metrics(&output.path().join("run"))
        .iter()
        .filter_map(|line| Some((line["step"].as_u64()?, line.get("loss")?.as_f64()?)))
        .collect();
    assert_eq!(sent(&requests, "train/loss"), losses);
    assert_eq!(sent(&requests, "eval/loss").first().map(|(step, _)| *step), Some(0));
    assert_eq!(updates(&requests), ["abc FINISHED"]);
    let requests = requests.lock().unwrap();
    let (_, end) = requests.iter().find(|(path, _)| path == "runs/update").unwrap();
    assert_eq!(
        end["files"],
        json!(["adapter/adapter_model.safetensors"]),
        "a run is finished when its weights are written, and the summary comes last, so that a kill here is repaired"
    );
    let run = requests.iter().find(|(path, _)| path == "runs/create").unwrap();
    assert_eq!((run.1["experiment_id"].as_str(), run.1["run_name"].as_str()), (Some("5"), Some("run")));
    let parameters: Vec<&Value> = requests.iter().filter_map(|(_, body)| body["params"].as_array()).flatten().collect();
    let parameter = |key: &str| parameters.iter().find(|one| one["key"] == key).and_then(|one| one["value"].as_str());
    assert_eq!((parameter("steps"), parameter("backend")), (Some("4"), Some("flex")));
}

#[test]
fn a_resumed_run_goes_on_in_the_same_run_of_the_server() {
    let output = tempdir().unwrap();
    let (address, requests) = server(output.path());
    let changes = tracked(&address);
    let recipe = || recipe(output.path(), &changes.iter().map(String::as_str).collect::<Vec<_>>());
    assert_eq!(one_step(recipe(), NEW), 1);
    finish(recipe(), NEWEST);
    assert_eq!(updates(&requests), ["abc KILLED", "abc RUNNING", "abc FINISHED"]);
    assert_eq!(sent(&requests, "train/loss").iter().map(|(step, _)| *step).collect::<Vec<_>>(), [1, 2, 3, 4]);
    assert_eq!(requests.lock().unwrap().iter().filter(|(path, _)| path == "runs/create").count(), 1);
    // Killed before its last checkpoint: the steps since the one before are taken again.
    let all = ["train/loss", "eval/loss"].map(|key| sent(&requests, key));
    let run = output.path().join("run");
    std::fs::remove_dir_all(run.join("checkpoints/step-4")).unwrap();
    std::fs::remove_file(run.join("summary.json")).unwrap();
    finish(recipe(), NEWEST);
    assert_eq!(["train/loss", "eval/loss"].map(|key| sent(&requests, key)), all);
}

#[test]
fn a_server_that_refuses_is_an_error_before_the_first_step() {
    let output = tempdir().unwrap();
    let (address, _) = server(output.path());
    let mlflow = format!("mlflow={{tracking_uri='{address}/wrong'}}");
    let message = refusal(recipe(output.path(), &[&mlflow]), NEW);
    assert!(message.contains("mlflow.tracking_uri") && message.contains("the server answers 404"), "{message}");
    assert!(!output.path().join("run").exists(), "the server is asked before the run begins");
    let message = recipe_error(&["mlflow={tracking_uri='mlruns'}"]);
    assert!(message.contains("is no address of a server"), "{message}");
}

#[test]
fn a_password_in_the_address_is_refused_and_not_repeated() {
    for change in ["mlflow={tracking_uri='http://me:secret@host'}", "mlflow.tracking_uri=http://me:secret@host"] {
        let message = recipe_error(&[change]);
        assert!(message.contains("MLFLOW_TRACKING_PASSWORD") && !message.contains("secret"), "{change}: {message}");
    }
}

fn recipe_error(changes: &[&str]) -> String {
    let overrides: Vec<String> = changes.iter().map(ToString::to_string).collect();
    let text = "model='m'\n[lora]\n[data]\npath='d'\n";
    let parsed = firebrick_trainer::config::RunConfig::from_toml(text, std::path::Path::new("r.toml"), &overrides);
    parsed.unwrap_err().to_string()
}
