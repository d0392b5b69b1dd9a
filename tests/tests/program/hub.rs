//! A run whose model and adapter are Hub ids, as users start it; against a server on this machine that answers as the Hub does.
//!
//! Trade-off: one step on the tiny model; firebrick-hub tests broken connections.

use std::fs;
use std::process::{Command, Output};

use firebrick_hub_imitation::ImitatedHub;
use firebrick_tests::{fixture, fixtures};
use serde_json::Value;
use tempfile::TempDir;

/// A Hub, and a folder with a cache and a recipe.
struct Place {
    hub: ImitatedHub,
    folder: TempDir,
}

impl Place {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let recipe = format!(
            "name='run'\nbackend='flex'\nmodel='org/tiny'\nmax_seq_len=64\n[lora]\nr=4\nalpha=8\ninit_from='org/tiny-lora'\n[data]\n\
             path='{}/data/chat-tiny.jsonl'\n[train]\nsteps=1\nmicro_batch_size=1\n",
            fixtures().display()
        );
        fs::write(folder.path().join("recipe.toml"), recipe).unwrap();
        let place = Self { hub: ImitatedHub::new("hf_imitated"), folder };
        place.add("org/tiny", "tiny-llama", None);
        place.add("org/tiny-lora", "tiny-llama-lora", Some("org/tiny"));
        place
    }

    /// Adds a repository with the files of a fixture; an adapter's config names this base.
    fn add(&self, id: &str, model: &str, base: Option<&str>) {
        let mut files = Vec::new();
        for entry in fs::read_dir(fixture(model)).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_str().unwrap().to_owned();
            let mut bytes = fs::read(&path).unwrap();
            if let (Some(base), "adapter_config.json") = (base, name.as_str()) {
                let mut config: Value = serde_json::from_slice(&bytes).unwrap();
                config["base_model_name_or_path"] = base.into();
                bytes = config.to_string().into_bytes();
            }
            files.push((name, bytes));
        }
        let files: Vec<(&str, &[u8])> = files.iter().map(|(name, bytes)| (name.as_str(), bytes.as_slice())).collect();
        self.hub.add(id, &files);
    }

    fn train(&self, changes: &[&str]) -> Output {
        self.program(changes).output().unwrap()
    }

    fn program(&self, changes: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_firebrick-under-test"));
        command.current_dir(self.folder.path()).args(["train", "--config", "recipe.toml"]);
        command.env("HF_ENDPOINT", &self.hub.server.address).env("HF_HUB_CACHE", self.folder.path().join("cache"));
        command.env_remove("HF_HUB_OFFLINE").env_remove("FIREBRICK_CALLED_AS").env_remove("RUST_LOG");
        for change in changes {
            command.args(["--set", change]);
        }
        command
    }
}

fn printed(output: &Output) -> String {
    [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned()).concat()
}

#[test]
fn a_run_starts_from_an_adapter_of_the_hub_on_a_model_of_the_hub() {
    let place = Place::new();
    // A rate of almost zero: the adapter after the step is the one on the Hub.
    let output = place.train(&["train.learning_rate=1e-30"]);
    let text = printed(&output);
    assert!(output.status.success(), "{text}");
    assert!(!text.contains("was made for"), "{text}");
    let adapter = place.folder.path().join("runs/run/adapter");
    let saved = firebrick_model::peft::read_adapter(&adapter).unwrap();
    let started = firebrick_model::peft::read_adapter(&fixture("tiny-llama-lora")).unwrap();
    assert!(saved.1 == started.1, "the matrices are those of the adapter on the Hub");
    assert_eq!(saved.0.base_model_name_or_path.as_deref(), Some("org/tiny"));
    let log = fs::read_to_string(place.folder.path().join("runs/run/metrics.jsonl")).unwrap();
    assert!(log.contains("\"step\":1,"), "{log}");
}

#[test]
fn one_of_four_ranks_asks_the_hub_and_one_downloads() {
    let place = Place::new();
    let rows = fs::read(fixture("data/chat-tiny.jsonl")).unwrap();
    place.hub.add("datasets/org/rows", &[("train.jsonl", rows.as_slice())]);
    let output = place.program(&["data.path='org/rows'"]).args(["--ranks", "4"]).output().unwrap();
    assert!(output.status.success(), "{}", printed(&output));
    let requests = place.hub.server.requests();
    let mut listings: Vec<&str> = requests.iter().map(String::as_str).filter(|line| line.contains("/api/")).collect();
    listings.sort_unstable();
    let of = |path: &str| format!("GET /api/{path}/revision/main?blobs=true");
    assert_eq!(listings, ["datasets/org/rows", "models/org/tiny-lora", "models/org/tiny"].map(of));
    let weights =
        requests.iter().filter(|line| line.contains("/org/tiny/resolve/") && line.contains("model.safetensors"));
    assert_eq!(weights.count(), 1);
}

#[test]
fn a_run_whose_model_is_in_the_cache_needs_no_hub_and_says_what_it_takes() {
    let place = Place::new();
    let first = place.train(&[]);
    assert!(first.status.success(), "{}", printed(&first));
    let before = place.hub.server.requests().len();
    let taken = |adapter: &str| {
        let commit = place.hub.store().repos[&format!("org/tiny{adapter}")].commits[0].0.clone();
        format!("org/tiny{adapter} is taken from the cache, as of commit {commit}")
    };
    // Nothing listens there.
    let output = place.program(&[]).env("HF_ENDPOINT", "http://127.0.0.1:9").output().unwrap();
    let text = printed(&output);
    assert!(output.status.success() && text.contains("\nwarning: the Hub") && !text.contains(" WARN "), "{text}");
    for adapter in ["", "-lora"] {
        assert_eq!(text.matches(&taken(adapter)).count(), 1, "{text}");
    }
    let offline = printed(&place.program(&[]).env("HF_HUB_OFFLINE", "1").output().unwrap());
    assert!(offline.contains("run-3") && !offline.contains("is taken from the cache"), "{offline}");
    assert_eq!(place.hub.server.requests().len(), before);
}

#[test]
fn an_adapter_of_the_hub_that_was_made_for_another_base_is_reported_or_refused() {
    let place = Place::new();
    place.add("org/other-lora", "tiny-llama-lora", Some("org/other"));
    let output = place.train(&["lora.init_from='org/other-lora'"]);
    let text = printed(&output);
    assert!(output.status.success(), "{text}");
    assert!(text.contains("org/other-lora was made for org/other, and this run trains on org/tiny"), "{text}");

    // Other modules do not fit, and a model is no adapter.
    place.add("org/phi-lora", "tiny-phi3-lora", Some("org/tiny"));
    place.add("org/none", "tiny-llama", None);
    for (adapter, expected) in
        [("phi-lora", "gate_up_proj"), ("none", "adapter_config.json"), ("missing", "org/missing")]
    {
        let output = place.train(&[&format!("lora.init_from='org/{adapter}'"), "name='refused'"]);
        let text = printed(&output);
        assert!(!output.status.success() && text.contains(expected), "{adapter}: {text}");
        assert!(!place.folder.path().join("runs/refused/metrics.jsonl").exists());
    }
}
