//! Resolves the name of a model or an adapter to a folder: a local one, a repository of a Hub cache, or the download of a Hub id.
//!
//! A local folder takes precedence over an id. An id whose owner is a folder here is taken for a misspelled path, and nothing is requested. Of the
//! ranks of a job, only rank 0 asks the Hub what an id stands for.
//! Trade-off: every start requests the commit of the branch. `@COMMIT` at the end of the id avoids that once the whole model is in the cache,
//! whichever program put it there; `HF_HUB_OFFLINE=1` avoids it for everything.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use firebrick_arch::folder::ADAPTER_CONFIG_FILE;
use firebrick_arch::{CONFIG_FILE, ModelConfig};
use firebrick_files::{advice_on_path, siblings_of};
use firebrick_hub::{Hub, HubError, HubId, ModelFolder, RepoKind, snapshot_of};
use firebrick_model::{ModelError, read_config};
use firebrick_parallel::Ranks;

pub use firebrick_hub::Need;

use crate::config::{ConfigError, Init, RunConfig, SourceConfig};
use crate::console::{Console, Download, shell_quoted};
use crate::error::RunError;
use crate::shipped;
use crate::state::checkpoint::{ADAPTER, MODEL};

/// The beginning of a file that Git LFS left instead of the one it stands for.
const POINTER: &[u8; 23] = b"version https://git-lfs";

impl RunConfig {
    /// Returns the folder that `model` names. From the Hub everything but the weights is downloaded.
    pub fn model_folder(&self) -> Result<PathBuf, RunError> {
        Ok(model_folder(Path::new(&self.model), Need::Description, Console::QUIET)?.folder)
    }

    /// Reads the model in this folder as the recipe's adapter needs it.
    pub fn read_model(&self, folder: &Path) -> Result<ModelConfig, ModelError> {
        Ok(read_config(folder)?.for_adapter(self.lora.as_ref()))
    }

    /// Returns the folder that `model` names, with the files that `need` names; a run from random weights needs no weights.
    pub fn fetch_model(&self, need: Need, console: Console) -> Result<ModelFolder, RunError> {
        let need = if self.init == Init::Pretrained { need } else { Need::Description };
        model_folder(Path::new(&self.model), need, console)
    }

    /// Fetches the model as [`RunConfig::fetch_model`] does, on the ranks of a job. Only rank 0 asks the Hub about model, adapter and `sources`, so
    /// all ranks see the same commits; the first rank of each machine downloads before the others look.
    pub fn fetch_model_on(
        &self,
        ranks: &Ranks,
        sources: &[SourceConfig],
        need: Need,
        console: Console,
    ) -> Result<ModelFolder, RunError> {
        if ranks.world_size() > 1 {
            let hub = Hub::from_environment();
            if ranks.is_main() {
                self.fetch_model(Need::Description, Console::QUIET)?;
                // Errors of these are reported where they are read.
                let _ = self.fetch_adapter(Need::Description, Console::QUIET);
                sources.iter().for_each(|source| drop(source.spec().resolve(&hub)));
            }
            let shared = ranks.from_main("hub", hub.to_share())?;
            if !ranks.is_main() {
                hub.learn(&shared);
            }
        }
        let is_first = ranks.local_rank() == 0;
        if !is_first {
            ranks.barrier()?;
        }
        let found = self.fetch_model(need, console)?;
        if is_first {
            ranks.barrier()?;
        }
        Ok(found)
    }

    /// Returns the folder of the adapter that the run starts from, with the files that `need` names; `None` if it starts from none.
    pub fn fetch_adapter(&self, need: Need, console: Console) -> Result<Option<PathBuf>, RunError> {
        let Some(from) = self.lora.as_ref().and_then(|lora| lora.init_from.as_ref()) else { return Ok(None) };
        adapter_folder(Path::new(from), "lora.init_from", need, console).map(Some)
    }
}

/// Returns the folder of an adapter, which `what` names, as [`model_folder`] does that of a model.
///
/// # Errors
/// Neither a folder nor an id; a repository that cannot be read.
pub fn adapter_folder(adapter: &Path, what: &'static str, need: Need, console: Console) -> Result<PathBuf, RunError> {
    match folder_of(adapter, need, console) {
        Err(RunError::Config(ConfigError::NoModel { model, .. })) => {
            let general = "write the folder that holds adapter_config.json and adapter_model.safetensors, a run, or an id of the Hub";
            let help = advice_on_name(&model).unwrap_or_else(|| general.to_owned());
            Err(ConfigError::NoModel { what, model, help }.into())
        }
        found => Ok(found?.folder),
    }
}

/// Returns a warning if an adapter names another base than the model in `model`: another folder that is here too, or one whose name is no part of
/// the model's path. Only shapes are a reason to refuse it.
pub fn other_base(adapter: &Path, model: &Path) -> Option<String> {
    let text = std::fs::read_to_string(adapter.join(ADAPTER_CONFIG_FILE)).ok()?;
    let config: serde_json::Value = serde_json::from_str(&text).ok()?;
    let base = config["base_model_name_or_path"].as_str().filter(|base| !base.is_empty())?;
    let name = base.trim_end_matches('/').rsplit(['/', '\\']).next().unwrap_or(base).to_lowercase();
    let name = name.split('@').next().unwrap_or_default();
    let (path, here) = (model.display().to_string(), |path: &Path| path.canonicalize().ok());
    // Where both are here, a merged model often has its base's name as a part of its own.
    let is_other = match here(Path::new(base)) {
        Some(base) => base.file_name() != model.file_name() && Some(base) != here(model),
        None => !path.to_lowercase().contains(name),
    };
    is_other.then(|| {
        format!(
            "warning: the adapter was trained on {base}, and --model is {path}. Unless their weights are the same, the result is wrong; if the \
             adapter is merged into {path} already, it counts twice. Give its base: --model {}",
            shell_quoted(base)
        )
    })
}

/// Returns the folder of a model, downloading its files if the name is an id of the Hub. The quickstart's base is found from any folder.
///
/// # Errors
/// Neither a folder nor an id; an adapter or a GGUF file; a repository that cannot be read, or is not a model.
pub fn model_folder(model: &Path, need: Need, console: Console) -> Result<ModelFolder, RunError> {
    refuse_gguf(model)?;
    let found = folder_of(model, need, console)?;
    let folder = &found.folder;
    if let Ok(text) = std::fs::read_to_string(folder.join(ADAPTER_CONFIG_FILE))
        && !folder.join(CONFIG_FILE).is_file()
    {
        let config: serde_json::Value = serde_json::from_str(&text).unwrap_or_default();
        let base = config["base_model_name_or_path"].as_str().filter(|base| !base.is_empty()).unwrap_or("its base");
        let adapter = folder.display();
        return Err(RunError::Refused(format!(
            "{adapter} is a LoRA adapter of {base}, not a model. Give {base} as the model, and this folder as --adapter, or in a recipe as \
             lora.init_from"
        )));
    }
    refuse_gguf(folder)?;
    // Pointers of Git LFS in place of weights are found where weights are read.
    let names = [CONFIG_FILE, "tokenizer.json", "tokenizer.model", "tekken.json"];
    let is_pointer = |path: &PathBuf| {
        let mut begin = [0; POINTER.len()];
        File::open(path).is_ok_and(|mut file| file.read_exact(&mut begin).is_ok()) && begin == *POINTER
    };
    if let Some(path) = names.map(|name| folder.join(name)).into_iter().find(is_pointer) {
        return Err(RunError::Refused(format!(
            "{} is a Git LFS pointer, not the file itself: run `git lfs pull` in its folder",
            path.display()
        )));
    }
    Ok(found)
}

fn refuse_gguf(model: &Path) -> Result<(), RunError> {
    let is_gguf = |path: &Path| path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"));
    let mut files = std::fs::read_dir(model).into_iter().flatten().flatten().map(|entry| entry.path());
    let file =
        if is_gguf(model) && model.is_file() { Some(model.to_owned()) } else { files.find(|file| is_gguf(file)) };
    match file.filter(|_| !model.join(CONFIG_FILE).is_file()) {
        None => Ok(()),
        Some(file) => Err(RunError::Refused(format!(
            "{} is a GGUF file, which `export --gguf` writes and nothing here reads: give the folder in Hugging Face format, or the id of \
             the Hub, that it was made from",
            file.display()
        ))),
    }
}

fn folder_of(model: &Path, need: Need, console: Console) -> Result<ModelFolder, RunError> {
    let asset = shipped::asset(model);
    let model = asset.as_deref().unwrap_or(model);
    if model.is_dir() {
        return Ok(ModelFolder { folder: snapshot_of(&result_of(model))?, missing_bytes: 0 });
    }
    let Some(id) = hub_id(model) else {
        let name = model.display().to_string();
        let general = || {
            format!(
                "write the folder that holds config.json, the safetensors and tokenizer.json, or an id of the Hub such as \
                 HuggingFaceTB/SmolLM2-135M; {}{}",
                if model.is_relative() { "relative paths start at the folder you run from, and " } else { "" },
                siblings_of(model)
            )
        };
        let help = advice_on_name(&name).unwrap_or_else(general);
        return Err(ConfigError::NoModel { what: "model", model: name, help }.into());
    };
    let found = client(console).model(&id, need);
    Ok(found.map_err(|error| match error {
        HubError::NotCached { what, cache } => HubError::NotCached { what: nor_folder(&what), cache },
        HubError::Unreachable { what, reason, cache } => {
            HubError::Unreachable { what: nor_folder(&what), reason, cache }
        }
        error => error,
    })?)
}

/// Returns what to write instead of a name that is neither a folder nor an id, if that is clear: a file's folder, the id in an address, a path.
fn advice_on_name(name: &str) -> Option<String> {
    if Path::new(name).is_file() {
        let folder = Path::new(name).parent().filter(|folder| !folder.as_os_str().is_empty());
        return Some(format!("it is a file: write its folder, {}", folder.unwrap_or(Path::new(".")).display()));
    }
    let page = ["huggingface.co/", "hf.co/"].iter().find_map(|host| Some(name.split_once(host)?.1));
    let id = page.map(|page| page.split(['/', '?', '#']).take(2).collect::<Vec<_>>().join("/"));
    let id = id.filter(|id| HubId::parse(RepoKind::Model, id, None).is_some());
    id.map(|id| format!("write its id alone: {id}")).or_else(|| advice_on_path(name))
}

/// Returns the name of what could not be fetched, with what else it is not.
fn nor_folder(what: &str) -> String {
    format!("{what} (which is no folder here)")
}

/// Returns the folder of the adapter or the model that a run or one of its checkpoints saved in `folder`, else `folder` itself.
pub fn result_of(folder: &Path) -> PathBuf {
    let results = [(ADAPTER, ADAPTER_CONFIG_FILE), (MODEL, CONFIG_FILE)];
    if results.iter().any(|(_, file)| folder.join(file).is_file()) {
        return folder.to_owned();
    }
    let saved = results.iter().find(|(name, file)| folder.join(name).join(file).is_file());
    saved.map_or_else(|| folder.to_owned(), |(name, _)| folder.join(name))
}

/// Returns a Hub client with the settings of the environment, whose transfers the console shows.
pub fn client(console: Console) -> Hub {
    Hub::from_environment().watched_by(Arc::new(Download::new(console)))
}

/// Returns the id that a text stands for, unless it is a path on this machine.
pub(crate) fn hub_id(model: &Path) -> Option<HubId> {
    let is_local = model.exists() || model.parent().is_some_and(Path::is_dir);
    HubId::parse(RepoKind::Model, model.to_str().filter(|_| !is_local)?, None)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn path_of(model: &Path) -> Result<PathBuf, RunError> {
        model_folder(model, Need::Weights, Console::QUIET).map(|found| found.folder)
    }

    #[test]
    fn a_local_folder_wins_and_a_repository_of_a_cache_is_its_snapshot() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(path_of(folder.path()).unwrap(), folder.path());
        let (commit, root) = ("a".repeat(40), folder.path().join("models--org--tiny"));
        fs::create_dir_all(root.join("snapshots").join(&commit)).unwrap();
        fs::create_dir_all(root.join("refs")).unwrap();
        fs::write(root.join("refs/main"), &commit).unwrap();
        assert_eq!(path_of(&root).unwrap(), root.join("snapshots").join(&commit));
    }

    #[test]
    fn a_run_stands_for_what_it_saved() {
        let run = tempfile::tempdir().unwrap();
        assert_eq!(result_of(run.path()), run.path());
        for (name, file) in [("model", "config.json"), ("adapter", "adapter_config.json")] {
            fs::create_dir(run.path().join(name)).unwrap();
            fs::write(run.path().join(name).join(file), "{}").unwrap();
            assert_eq!(result_of(run.path()), run.path().join(name));
            assert_eq!(result_of(&run.path().join(name)), run.path().join(name));
        }
    }

    #[test]
    fn an_adapter_and_a_gguf_file_are_no_models_and_the_message_names_what_is() {
        let folder = tempfile::tempdir().unwrap();
        let (run, gguf) = (folder.path().join("run"), folder.path().join("small.gguf"));
        fs::create_dir_all(run.join("adapter")).unwrap();
        fs::write(run.join("adapter/adapter_config.json"), r#"{"base_model_name_or_path": "owner/base"}"#).unwrap();
        fs::write(&gguf, "GGUF").unwrap();
        for model in [run.clone(), run.join("adapter")] {
            let message = path_of(&model).unwrap_err().to_string();
            assert!(message.contains("is a LoRA adapter of owner/base") && message.contains("--adapter"), "{message}");
        }
        for model in [gguf.as_path(), folder.path()] {
            let message = path_of(model).unwrap_err().to_string();
            assert!(message.contains("small.gguf is a GGUF file") && message.contains("made from"), "{message}");
        }
        let (pointer, text) =
            (folder.path().join("pointer"), "version https://git-lfs.github.com/spec/v1\noid sha256:0\n");
        fs::create_dir(&pointer).unwrap();
        fs::write(pointer.join("config.json"), "{}").unwrap();
        fs::write(pointer.join("tokenizer.json"), text).unwrap();
        let message = path_of(&pointer).unwrap_err().to_string();
        assert!(
            message.contains("tokenizer.json is a Git LFS pointer") && message.contains("git lfs pull"),
            "{message}"
        );
        let note = |model: &str| other_base(&run.join("adapter"), Path::new(model));
        assert!(note("models/tiny").is_some());
        assert_eq!([note("models/Base"), note("cache/models--owner--base/snapshots/a")], [None, None]);
        let message = path_of(Path::new("~/tiny")).unwrap_err().to_string();
        assert!(message.contains("'~' and variables stand for folders in a shell alone"), "{message}");
        let of_adapter = |path: &Path| adapter_folder(path, "--adapter", Need::Weights, Console::QUIET);
        assert_eq!(of_adapter(&run).unwrap(), run.join("adapter"));
        let message = of_adapter(Path::new("nope")).unwrap_err().to_string();
        assert!(message.starts_with("--adapter 'nope'") && message.contains("adapter_config.json"), "{message}");
    }

    #[test]
    fn what_is_neither_a_folder_nor_an_id_says_what_to_write() {
        let folder = tempfile::tempdir().unwrap();
        let misspelled = folder.path().join("tiny");
        for model in [Path::new("./nowhere"), Path::new("nowhere"), Path::new("src/nowhere"), misspelled.as_path()] {
            let message = path_of(model).unwrap_err().to_string();
            assert!(message.contains("config.json") && message.contains("id of the Hub"), "{message}");
        }
        let address = Path::new("https://huggingface.co/org/tiny/tree/main");
        assert!(path_of(address).unwrap_err().to_string().ends_with("write its id alone: org/tiny"));
        assert_eq!(hub_id(Path::new("org/tiny@v1")).unwrap().to_string(), "org/tiny@v1");
    }
}
