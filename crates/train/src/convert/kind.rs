//! Whose configuration a file is, and of which method; what it is if it is none.

use std::path::Path;

use super::setting::Setting;

/// Keys that ms-swift's configurations have, next to `model`.
const SWIFT: &str = "tuner_type train_type rlhf_type torch_dtype split_dataset_ratio lora_rank num_train_epochs per_device_train_batch_size";

/// Keys of TRL's that only GRPO has.
const GRPO: [&str; 6] =
    ["reward_funcs", "num_generations", "num_iterations", "steps_per_generation", "scale_rewards", "epsilon_high"];

/// The program that a configuration is of; `values.toml` has sections of these names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Trainer {
    Axolotl,
    LlamaFactory,
    Trl,
    Swift,
    Torchtune,
    MlxLm,
    /// None of them, so it gets the defaults here.
    #[default]
    Other,
}

impl Trainer {
    /// Returns whose configuration it is, by keys that only one of them has.
    pub(super) fn of(all: &[Setting]) -> Self {
        let has = |names: &[&str]| all.iter().any(|setting| names.contains(&&*setting.path));
        if all.iter().any(|setting| setting.name() == "_component_") {
            Self::Torchtune
        } else if has(&["base_model"]) {
            Self::Axolotl
        } else if has(&["iters", "fine_tune_type", "mask_prompt", "grad_accumulation_steps", "steps_per_eval"]) {
            Self::MlxLm
        } else if has(&["model"]) && has(&SWIFT.split(' ').collect::<Vec<_>>()) {
            Self::Swift
        } else if has(&["finetuning_type", "stage", "template", "cutoff_len"]) {
            Self::LlamaFactory
        } else if has(&["model_name_or_path"]) {
            Self::Trl
        } else {
            Self::Other
        }
    }
}

/// Returns whether the settings are those of GRPO. TRL's do not name the method, so keys that no other has mean it.
pub(super) fn is_grpo(all: &[Setting], trainer: Trainer) -> bool {
    let method = all.iter().find(|setting| matches!(&*setting.path, "rl" | "rlhf_type"));
    match method {
        Some(method) => method.value.as_str() == Some("grpo"),
        None => trainer == Trainer::Trl && all.iter().any(|setting| GRPO.contains(&&*setting.path)),
    }
}

/// Returns what a file is, by its name and its first characters, if it is no configuration.
pub(super) fn refusal_of_file(text: &str, file: &Path) -> Option<&'static str> {
    let extension = file.extension().unwrap_or_default().to_string_lossy().to_lowercase();
    let first = text.trim_start_matches('\u{feff}').trim_start();
    let lines = first.lines().filter(|line| line.starts_with('{') && line.trim_end().ends_with('}'));
    Some(match &*extension {
        _ if first.lines().all(|line| line.trim().is_empty() || line.starts_with('#')) => {
            "the file is empty; the YAML or JSON configuration of another trainer was expected"
        }
        "py" | "ipynb" | "sh" => {
            "this is a program, which is never run; write what it passes as a YAML file, or a recipe by hand (docs/coming-from.md)"
        }
        "jsonl" | "csv" | "tsv" | "parquet" | "arrow" => "this is a data set; name it in a recipe as data.path",
        "toml" => {
            "this is TOML, as recipes are: `firebrick plan` reads it; YAML or JSON of another trainer becomes a recipe"
        }
        _ if lines.take(2).count() == 2 || first.starts_with('[') => {
            "these are records, not settings: name the data set in a recipe as data.path"
        }
        _ => return None,
    })
}

/// Returns what the settings are of, if not of a trainer.
pub(super) fn refusal(all: &[Setting]) -> Option<&'static str> {
    let has = |start: &str| all.iter().any(|setting| setting.path.starts_with(start));
    let kinds = [
        (has("data.") || has("train."), "this is a recipe of Firebrick already: `firebrick plan` reads it as it is"),
        (
            has("zero_optimization.") && !has("model") && !has("base_model"),
            "these are DeepSpeed's settings: convert the file that names them; their stage is train.zero_stage here",
        ),
        (
            has("compute_environment") || has("distributed_type"),
            "these are accelerate's settings: `firebrick train --gpus N` starts ranks, and train.zero_stage divides them",
        ),
        (
            all.iter().any(|setting| setting.name() == "file_name"),
            "this describes data sets; convert the configuration that names them",
        ),
    ];
    kinds.into_iter().find(|(is_it, _)| *is_it).map(|(_, message)| message)
}
