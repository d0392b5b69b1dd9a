//! Writes the model card (README.md) of a folder without one: known facts about base, data and license, and how to use the model.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use firebrick_arch::CONFIG_FILE;
use firebrick_arch::folder::ADAPTER_CONFIG_FILE;
use firebrick_arch::json::{parse_object, read_text};
use firebrick_hub::{Hub, HubId, RepoKind};
use firebrick_trainer::RunError;
use firebrick_trainer::config::RunConfig;
use firebrick_trainer::hub::result_of;
use serde_json::Value;

use crate::report::folder_in;

pub(super) const FILE: &str = "README.md";
/// The recipe of the run that saved the folder, next to the folder.
const RECIPE: &str = "config.toml";

#[derive(Debug, PartialEq)]
pub(super) struct Facts {
    /// Whether it is an adapter rather than a whole model.
    is_adapter: bool,
    /// The base's id, if it has one.
    pub(super) base: Option<HubId>,
    /// The base that an adapter names, if that is a path.
    pub(super) local_base: Option<String>,
    datasets: Vec<String>,
    lora: Option<(u64, f64)>,
}

/// The terms of a base model, as its own card states them.
#[derive(Debug, PartialEq)]
pub(super) struct License {
    /// `license`, `license_name` and `license_link` of the card, if present.
    keys: Vec<(&'static str, String)>,
}

impl License {
    /// Reads the license of a base; `None` if its card cannot be read or states none.
    pub(super) fn of_base(hub: &Hub, base: &HubId) -> Option<Self> {
        let listing = hub.listing(base).ok()?;
        let text = |key: &'static str| Some((key, listing.card(key).as_str()?.to_owned()));
        let keys: Vec<_> = ["license", "license_name", "license_link"].into_iter().filter_map(text).collect();
        (!keys.is_empty()).then_some(Self { keys })
    }
}

impl Facts {
    /// Reads a folder, and the recipe of the run that saved it.
    pub(super) fn read(folder: &Path) -> Result<Self, RunError> {
        let adapter = folder.join(ADAPTER_CONFIG_FILE);
        let is_adapter = adapter.is_file();
        if !is_adapter && !folder.join(CONFIG_FILE).is_file() {
            let run = folder_in(folder, |run| result_of(run) != run);
            let run = run.map(|run| format!(": give that of one run, such as {}", run.display())).unwrap_or_default();
            return Err(RunError::Refused(format!(
                "{}: neither an adapter (adapter_config.json) nor a model (config.json) is in this folder, nor is it that of a run that \
                 saved one{run}",
                folder.display()
            )));
        }
        let config = if is_adapter { parse_object(&read_text(&adapter)?, &adapter)? } else { Default::default() };
        let recipe = folder.parent().map(|run| run.join(RECIPE)).filter(|path| path.is_file());
        let recipe = recipe.map(|path| RunConfig::load(&path, &[])).transpose()?;
        let trained_from = recipe.as_ref().map(|recipe| recipe.model.clone());
        let named = config.get("base_model_name_or_path").and_then(Value::as_str).map(str::to_owned);
        let local_base = named.clone().filter(|name| on_hub(RepoKind::Model, name).is_none());
        let base = named.or(trained_from).and_then(|base| on_hub(RepoKind::Model, &base));
        let paths = recipe.iter().flat_map(|recipe| {
            let data = &recipe.data;
            data.sources.iter().map(|source| &source.path).chain([&data.path]).cloned().collect::<Vec<_>>()
        });
        let mut datasets: Vec<String> = paths.filter_map(|path| Some(on_hub(RepoKind::Dataset, &path)?.name)).collect();
        datasets.sort();
        datasets.dedup();
        let lora = config.get("r").and_then(Value::as_u64).zip(config.get("lora_alpha").and_then(Value::as_f64));
        Ok(Self { is_adapter, base, local_base, datasets, lora })
    }

    /// Writes the card of the repository `name`.
    pub(super) fn card(&self, name: &str, license: Option<&License>) -> String {
        let mut text = String::from("---\n");
        let library = if self.is_adapter { "peft" } else { "transformers" };
        // Writing into a String cannot fail.
        let _ = writeln!(text, "library_name: {library}\npipeline_tag: text-generation");
        if let Some(base) = &self.base {
            let relation = if self.is_adapter { "adapter" } else { "finetune" };
            let _ = writeln!(text, "base_model: {}\nbase_model_relation: {relation}", base.name);
        }
        for (key, value) in license.iter().flat_map(|license| &license.keys) {
            let _ = writeln!(text, "{key}: {}", Value::from(value.as_str()));
        }
        if !self.datasets.is_empty() {
            let _ = writeln!(text, "datasets:\n- {}", self.datasets.join("\n- "));
        }
        let tags = if self.is_adapter { "- lora\n- firebrick" } else { "- firebrick" };
        let short = name.rsplit('/').next().unwrap_or(name);
        let _ = writeln!(text, "tags:\n{tags}\n---\n\n# {short}\n");
        let base = self.base.as_ref().map(|base| format!(" of [{0}](https://huggingface.co/{0})", base.name));
        let base = base.unwrap_or_default();
        let rank = self.lora.map(|(r, alpha)| format!(" (rank {r}, alpha {alpha})")).unwrap_or_default();
        let what =
            if self.is_adapter { format!("A LoRA adapter{base}{rank}") } else { format!("A fine-tuned model{base}") };
        let _ = writeln!(text, "{what}, trained with Firebrick.");
        if !self.datasets.is_empty() {
            let link = |id: &String| format!("[{id}](https://huggingface.co/datasets/{id})");
            let links: Vec<String> = self.datasets.iter().map(link).collect();
            let _ = writeln!(text, "\nData: {}.", links.join(", "));
        }
        text
    }
}

/// Returns the id that a text is, unless it is a path on this machine.
fn on_hub(kind: RepoKind, text: &str) -> Option<HubId> {
    HubId::parse(kind, text, None).filter(|_| fs::metadata(text).is_err())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_card_states_what_is_known_and_nothing_else() {
        let run = tempfile::tempdir().unwrap();
        let folder = run.path().join("adapter");
        fs::create_dir(&folder).unwrap();
        assert!(Facts::read(&folder).unwrap_err().to_string().contains("adapter_config.json"));
        fs::write(
            folder.join(ADAPTER_CONFIG_FILE),
            r#"{"base_model_name_or_path": "org/base", "r": 8, "lora_alpha": 16}"#,
        )
        .unwrap();
        let recipe = "model='org/base@v1'\nmax_seq_len=64\n[lora]\n[data]\nsources=[{path='org/rows'}, {path='rows.jsonl'}]\n\
                      [train]\nsteps=1\n";
        fs::write(run.path().join(RECIPE), recipe).unwrap();
        let facts = Facts::read(&folder).unwrap();
        let license = License { keys: vec![("license", "other".to_owned()), ("license_name", "a: b".to_owned())] };
        let card = facts.card("me/mine", Some(&license));
        let expected = "---\nlibrary_name: peft\npipeline_tag: text-generation\nbase_model: org/base\nbase_model_relation: adapter\n\
                        license: \"other\"\nlicense_name: \"a: b\"\ndatasets:\n- org/rows\ntags:\n- lora\n- firebrick\n---\n\n# mine\n\n\
                        A LoRA adapter of [org/base](https://huggingface.co/org/base) (rank 8, alpha 16), trained with Firebrick.\n\n\
                        Data: [org/rows](https://huggingface.co/datasets/org/rows).\n";
        assert_eq!(card, expected);
        fs::remove_file(run.path().join(RECIPE)).unwrap();
        fs::write(folder.join(ADAPTER_CONFIG_FILE), r#"{"base_model_name_or_path": "./models/base"}"#).unwrap();
        let card = Facts::read(&folder).unwrap().card("me/mine", None);
        assert!(!card.contains("base_model") && !card.contains("./models") && !card.contains("license"), "{card}");
    }
}
