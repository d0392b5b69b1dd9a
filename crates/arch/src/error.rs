//! Errors in a model's description: in its `config.json`, or in an adapter that does not fit it.
//!
//! Each message names the file and the key, what was expected, what was found, and what to do next. Messages that wrap another error leave its text
//! to the error chain (`source`), so that a report that prints the chain repeats nothing.
//! Trade-off: values are stored as text for the message, not as types to match on.

use std::io::{Error as IoError, ErrorKind};
use std::path::{Path, PathBuf};

use serde_json::Error as JsonError;
use thiserror::Error;

/// An error while a model's description is read or an adapter is matched with it.
#[derive(Debug, Error)]
pub enum ArchError {
    /// The operating system refused a read.
    #[error("cannot {action} `{}`{}", path.display(), io_advice(source))]
    Io {
        /// The verb of the sentence "cannot ... `path`".
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The error of the operating system.
        source: IoError,
    },

    /// A folder that should hold a model lacks the file that makes it one.
    #[error("`{}` has no {missing}. {advice}", dir.display())]
    NotThere {
        /// The folder that was given.
        dir: PathBuf,
        /// The file that is missing.
        missing: &'static str,
        /// Advice to the user.
        advice: &'static str,
    },

    /// A file that should hold a JSON object does not.
    #[error("`{}` is not a valid JSON object; fetch the file again from where the model came from", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// Line and column of the mistake.
        source: JsonError,
    },

    /// A JSON file lacks a key that has no default.
    #[error("`{}` has no key `{key}` (expected {expected}); fetch the file again or add the key", path.display())]
    MissingKey {
        /// The file.
        path: PathBuf,
        /// The key, dotted where nested.
        key: String,
        /// The type that belongs there.
        expected: &'static str,
    },

    /// A JSON value has the wrong type.
    #[error("`{}`: key `{key}` must be {expected}, got {got}", path.display())]
    WrongType {
        /// The file.
        path: PathBuf,
        /// The key, dotted where nested.
        key: String,
        /// The type that belongs there.
        expected: &'static str,
        /// The value in the file.
        got: String,
    },

    /// A value has the right type but cannot be used, alone or in combination with the others.
    #[error("`{}`: key `{key}` is {got}, but {expected}", path.display())]
    BadValue {
        /// The file.
        path: PathBuf,
        /// The key, dotted where nested.
        key: String,
        /// The value in the file.
        got: String,
        /// The rule that it breaks, as a clause.
        expected: String,
    },

    /// A setting asks for arithmetic that is not implemented.
    #[error("`{}`: `{key}` is {got}, which is not supported. {advice}", path.display())]
    Unsupported {
        /// The file.
        path: PathBuf,
        /// The key, dotted where nested.
        key: String,
        /// The value in the file.
        got: String,
        /// The supported values, or other advice to the user.
        advice: String,
    },

    /// No family reads this model.
    #[error("`{}`: no family here reads {found}. {advice}", path.display())]
    UnsupportedArchitecture {
        /// The config.json.
        path: PathBuf,
        /// The key and value that were found.
        found: String,
        /// What is known about the model, and what to do next: a sentence.
        advice: String,
    },

    /// A LoRA target matches no linear module of the model.
    #[error(
        "LoRA target `{name}` matches no linear module of this model; choose \"all-linear\" or from {}{}", modules.join(", "),
        list_advice(name)
    )]
    UnknownTarget {
        /// The name that was given.
        name: String,
        /// The names of the linear modules of a layer.
        modules: Vec<String>,
    },

    /// No module carries LoRA: an empty list, or all targets are excluded.
    #[error("the settings of the adapter leave no module; choose \"all-linear\" or from {}", modules.join(", "))]
    NoTargets {
        /// The names of the linear modules of a layer.
        modules: Vec<String>,
    },

    /// A setting of the adapter matches nothing of the model.
    #[error("{key}: `{value}` matches nothing of this model, which has {has}")]
    Unused {
        /// The setting.
        key: &'static str,
        /// The name, expression or number that was given.
        value: String,
        /// The names or layers that it could match.
        has: String,
    },

    /// Two keys of a pattern give one module different values.
    #[error("`{first}` and `{other}` give `{module}` different values; write keys of which one matches each module")]
    TwoValues {
        /// The module.
        module: String,
        /// A key that matches it.
        first: String,
        /// Another one.
        other: String,
    },

    /// The experts of this model are one parameter, and the settings adapt them one by one.
    #[error(
        "lora.target matches `{module}`, but all experts of a projection are one parameter in this model, which PEFT adapts by target_parameters \
         alone: take experts out of lora.target, and name {has}, or one of them, in lora.target_parameters"
    )]
    OnlyAsParameters {
        /// A module that the targets match.
        module: String,
        /// What `target_parameters` can name.
        has: &'static str,
    },

    /// A setting that adapters of parameters cannot have.
    #[error("lora.{key} cannot be combined with lora.target_parameters, in PEFT neither: leave one of them out")]
    NotWithParameters {
        /// The setting.
        key: &'static str,
    },

    /// A setting of the adapter holds for some experts of a layer and not for others.
    #[error(
        "the settings of the adapter (targets, ranks, alphas, modules_to_save) differ between `{first}` and `{other}`, but the experts of a layer \
         are one weight: write patterns that hold for all experts, such as \"gate_proj\" instead of \"experts.0.gate_proj\""
    )]
    ExpertsDiffer {
        /// The first expert's module.
        first: String,
        /// One with other settings.
        other: String,
    },

    /// Layers were given next to a regular expression, which already selects layers by their paths.
    #[error("layers_to_transform needs targets as a list of names; a regular expression says the layers itself")]
    LayersAndExpression,

    /// A text that is no regular expression.
    #[error("`{pattern}` is not a regular expression")]
    BadPattern {
        /// The text.
        pattern: String,
        /// The error of the parser.
        source: Box<fancy_regex::Error>,
    },

    /// The rank exceeds that of the weight, so there is no principal part of this rank.
    #[error(
        "`{module}` has rank {rank}, but a principal part of it at most {most}: write a smaller lora.r, or one of its own in lora.rank_pattern"
    )]
    NoSuchPart {
        /// The module.
        module: String,
        /// Its rank.
        rank: usize,
        /// The shorter side of its weight.
        most: usize,
    },

    /// The rank of a LoRA adapter is zero.
    #[error("the LoRA rank `r` is 0, but must be at least 1")]
    ZeroRank,
}

impl ArchError {
    /// Builds the error "cannot `action` `path`": for use in `map_err`.
    pub fn io(action: &'static str, path: &Path) -> impl FnOnce(IoError) -> Self {
        move |source| Self::Io { action, path: path.to_path_buf(), source }
    }
}

/// Returns advice for the kinds of I/O error that a user can fix.
fn io_advice(error: &IoError) -> &'static str {
    match error.kind() {
        ErrorKind::PermissionDenied => "; check the permissions or choose another place",
        ErrorKind::NotFound => "; check the path",
        _ => "",
    }
}

/// Returns how several names are written, if a name looks like several.
fn list_advice(name: &str) -> String {
    let names: Vec<&str> = name.split([',', ' ', '[', ']', '"', '\'']).filter(|part| !part.is_empty()).collect();
    if names.len() < 2 { String::new() } else { format!("; several are a list: {names:?}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_io_error_names_the_file_and_what_to_do() {
        let error = ArchError::io("read", Path::new("m/config.json"))(ErrorKind::PermissionDenied.into());
        assert_eq!(error.to_string(), "cannot read `m/config.json`; check the permissions or choose another place");
    }

    #[test]
    fn several_targets_in_one_text_are_shown_as_a_list() {
        let message = |name: &str| {
            ArchError::UnknownTarget { name: name.to_owned(), modules: vec!["q_proj".to_owned()] }.to_string()
        };
        for name in ["q_proj,v_proj", "[q_proj, v_proj]", "q_proj v_proj"] {
            assert!(message(name).ends_with("; several are a list: [\"q_proj\", \"v_proj\"]"), "{}", message(name));
        }
        assert!(!message("c_attn").contains("list"));
    }
}
