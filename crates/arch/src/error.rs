//! Errors in a model's description: in its `config.json`, or in an adapter that does not fit it.
//!
//! Each message names the file and the key, what was expected, what was found, and what to do next. Messages that wrap another error leave its text
//! to the error chain (`source`), so that a report that prints the chain repeats nothing.

use std::io::{Error as IoError, ErrorKind};
use std::path::{Path, PathBuf};

use serde_json::Error as JsonError;
use thiserror::Error;

/// An error while a model's description is read or an adapter is matched with it.
#[derive(Debug, Error)]
#[expect(missing_docs, reason = "messages say what variants and their fields are")]
pub enum ArchError {
    #[error("cannot {action} `{}`{}", path.display(), io_advice(source))]
    Io {
        /// The verb of the sentence "cannot ... `path`".
        action: &'static str,
        path: PathBuf,
        source: IoError,
    },

    #[error("`{}` has no {missing}. {advice}", dir.display())]
    NotThere { dir: PathBuf, missing: &'static str, advice: &'static str },

    #[error("`{}` is not a valid JSON object; fetch the file again from where the model came from", path.display())]
    Json { path: PathBuf, source: JsonError },

    #[error("`{}` has no key `{key}` (expected {expected}); fetch the file again or add the key", path.display())]
    MissingKey {
        path: PathBuf,
        /// The key, dotted where nested.
        key: String,
        expected: &'static str,
    },

    #[error("`{}`: key `{key}` must be {expected}, got {got}", path.display())]
    WrongType { path: PathBuf, key: String, expected: &'static str, got: String },

    #[error("`{}`: key `{key}` is {got}, but {expected}", path.display())]
    BadValue {
        path: PathBuf,
        key: String,
        got: String,
        /// The rule that it breaks, as a clause.
        expected: String,
    },

    #[error("`{}`: `{key}` is {got}, which is not supported. {advice}", path.display())]
    Unsupported { path: PathBuf, key: String, got: String, advice: String },

    #[error("`{}`: no family here reads {found}. {advice}", path.display())]
    UnsupportedArchitecture {
        path: PathBuf,
        found: String,
        /// What is known about the model, and what to do next: a sentence.
        advice: String,
    },

    #[error(
        "LoRA target `{name}` matches no linear module of this model; choose \"all-linear\" or from {}{}", modules.join(", "),
        list_advice(name)
    )]
    UnknownTarget { name: String, modules: Vec<String> },

    /// An expression that matches the ends of paths.
    #[error(
        "LoRA target `{pattern}` matches no whole path such as `{path}`, and a text is one regular expression for the whole path: write \
         lora.target = '{whole}', or a list of names such as [\"q_proj\", \"v_proj\"]"
    )]
    NotWholePath { pattern: String, path: String, whole: String },

    #[error(
        "LoRA target `{name}` hits no module of this model but such as `{module}`, which is not there: its layer reads the keys and values of layer \
         {source_layer}, so an adapter would do nothing. Leave the target out, or let it hit layer {source_layer}, too"
    )]
    SharedTarget { name: String, module: String, source_layer: usize },

    #[error("the settings of the adapter leave no module; choose \"all-linear\" or from {}", modules.join(", "))]
    NoTargets { modules: Vec<String> },

    #[error("{key}: `{value}` matches nothing of this model, which has {has}")]
    Unused { key: &'static str, value: String, has: String },

    #[error("`{first}` and `{other}` give `{module}` different values; write keys of which one matches each module")]
    TwoValues { module: String, first: String, other: String },

    #[error(
        "lora.target matches `{module}`, but all experts of a projection are one parameter in this model, which PEFT adapts by target_parameters \
         alone: take experts out of lora.target, and name {has}, or one of them, in lora.target_parameters"
    )]
    OnlyAsParameters { module: String, has: String },

    #[error("lora.{key} cannot be combined with lora.target_parameters, in PEFT neither: leave one of them out")]
    NotWithParameters { key: &'static str },

    #[error(
        "the settings of the adapter (targets, ranks, alphas, modules_to_save) differ between `{first}` and `{other}`, but the experts of a layer \
         are one weight: write patterns that hold for all experts, such as \"gate_proj\" instead of \"experts.0.gate_proj\""
    )]
    ExpertsDiffer { first: String, other: String },

    #[error("layers_to_transform needs targets as a list of names; a regular expression says the layers itself")]
    LayersAndExpression,

    #[error("`{pattern}` is not a regular expression")]
    BadPattern { pattern: String, source: Box<fancy_regex::Error> },

    #[error(
        "`{module}` has rank {rank}, but a principal part of it at most {most}: write a smaller lora.r, or one of its own in lora.rank_pattern"
    )]
    NoSuchPart { module: String, rank: usize, most: usize },

    #[error("the LoRA rank `r` is 0, but must be at least 1")]
    ZeroRank,
}

impl ArchError {
    /// Builds the error "cannot `action` `path`": for use in `map_err`.
    pub fn io(action: &'static str, path: &Path) -> impl FnOnce(IoError) -> Self {
        move |source| Self::Io { action, path: path.to_path_buf(), source }
    }
}

/// Returns advice for the kinds of I/O error that a user can fix: a clause, or nothing.
pub fn io_advice(error: &IoError) -> &'static str {
    match error.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => "; free space on that disk or write somewhere else",
        ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem => {
            "; check the permissions or choose another place"
        }
        ErrorKind::NotFound => "; check the path",
        _ => "",
    }
}

/// Returns how several names are written, if a name looks like several.
fn list_advice(name: &str) -> String {
    let names: Vec<&str> = name.split([',', ' ', '[', ']', '"', '\'']).filter(|part| !part.is_empty()).collect();
    match &names[..] {
        [only] if ["lm_head", "embed_tokens", "wte"].iter().any(|table| only.ends_with(table)) => {
            format!("; an adapter there is not available: lora.modules_to_save = [{only:?}] trains it whole")
        }
        [] => String::new(),
        [_] if !name.starts_with('[') => String::new(),
        several => format!("; several are a list: {several:?}, after --set in quotes: --set 'lora.target={several:?}'"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_io_error_names_the_file_and_what_to_do() {
        for (kind, advice) in [
            (ErrorKind::PermissionDenied, "; check the permissions or choose another place"),
            (ErrorKind::StorageFull, "; free space on that disk or write somewhere else"),
        ] {
            let error = ArchError::io("write", Path::new("m/config.json"))(kind.into());
            assert_eq!(error.to_string(), format!("cannot write `m/config.json`{advice}"));
        }
    }

    #[test]
    fn several_targets_in_one_text_are_shown_as_a_list() {
        let message = |name: &str| {
            ArchError::UnknownTarget { name: name.to_owned(), modules: vec!["q_proj".to_owned()] }.to_string()
        };
        for name in ["q_proj,v_proj", "[q_proj, v_proj]", "q_proj v_proj"] {
            let advice = "; several are a list: [\"q_proj\", \"v_proj\"], after --set in quotes: --set 'lora.target=[\"q_proj\", \"v_proj\"]'";
            assert!(message(name).ends_with(advice), "{}", message(name));
        }
        assert!(!message("c_attn").contains("list"));
        let whole = "; an adapter there is not available: lora.modules_to_save = [\"lm_head\"] trains it whole";
        assert!(message("lm_head").ends_with(whole), "{}", message("lm_head"));
    }
}
