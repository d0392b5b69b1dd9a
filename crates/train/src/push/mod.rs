//! `push`: commits an adapter folder or a model folder to a repository on the Hub.
//!
//! Trade-off: the repository is public unless `--private` is given or its organization's settings say otherwise, as with
//! `huggingface_hub`; the command says which it was.

mod card;

use std::path::PathBuf;

use clap::Args;
use firebrick_arch::counted;
use firebrick_hub::{HubId, Push, RepoKind};
use firebrick_trainer::RunError;
use firebrick_trainer::console::Console;
use firebrick_trainer::hub::{client, result_of};

/// The options of `push`.
#[derive(Args, Clone, Debug)]
pub struct PushOptions {
    /// Folder of an adapter, of a model, or of the run that made it. Hidden files stay here.
    #[arg(value_name = "DIR")]
    pub folder: PathBuf,
    /// Repository: OWNER/NAME, or OWNER/NAME@BRANCH. It is created if there is none.
    #[arg(long, value_name = "ID")]
    pub to: String,
    /// Make a new repository private. Without it, it is public, unless the organization's settings say otherwise. One that exists stays
    /// as it is.
    #[arg(long)]
    pub private: bool,
    /// The commit's message.
    #[arg(long, value_name = "TEXT", default_value = "Upload with Firebrick")]
    pub message: String,
}

/// Pushes a folder and returns a text for the user. A folder without README.md gets a model card of known facts, only in the repository.
///
/// # Errors
/// A folder without a model; an adapter whose base is a path; an invalid id; an error of the Hub.
pub fn push(options: &PushOptions, console: Console) -> Result<String, RunError> {
    let PushOptions { folder, to, private, message } = options;
    let id = HubId::parse(RepoKind::Model, to, None).ok_or_else(|| {
        RunError::Refused(format!("--to {to}: this is no repository. Write OWNER/NAME or OWNER/NAME@BRANCH"))
    })?;
    let hub = client(console);
    let mut texts = Vec::new();
    let folder = &result_of(folder);
    let facts = card::Facts::read(folder)?;
    if let Some(base) = &facts.local_base {
        return Err(RunError::Refused(format!(
            "{}: the adapter's base is `{base}`, a path of this machine, so it would not load anywhere else. Write the id of the base on the \
             Hub as base_model_name_or_path in its adapter_config.json, and in its README.md, which has the path too. \
             lora.base_model_name_or_path = \"OWNER/NAME\" in a recipe writes both",
            folder.display()
        )));
    }
    if !folder.join(card::FILE).is_file() {
        let license = facts.base.as_ref().and_then(|base| card::License::of_base(&hub, base));
        texts.push((card::FILE.to_owned(), facts.card(&id.name, license.as_ref())));
    }
    let private = private.then_some(true);
    let pushed = hub.push(&Push { id, private, message: message.clone(), folder: folder.clone(), texts })?;
    let what = match &pushed.commit {
        Some(commit) => format!("{} in commit {commit}", counted(pushed.files.len(), "file")),
        None => "nothing to do, all files are there".to_owned(),
    };
    let stored = format!("{:.1} MB to large-file storage", pushed.stored_bytes as f64 / 1e6);
    let visibility = match (pushed.is_new, private) {
        (true, Some(_)) => ", a new private repository",
        (true, None) => ", a new repository, public unless its owner's settings say otherwise",
        (false, _) => "",
    };
    let mut text = format!("pushed to {}{visibility}: {what}, {stored}", pushed.page);
    if !pushed.ignored.is_empty() {
        text += &format!("\nleft out by the repository's .gitignore: {}", pushed.ignored.join(", "));
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use std::fs::write;

    use super::*;

    #[test]
    fn an_adapter_whose_base_is_a_path_is_not_pushed() {
        let folder = tempfile::tempdir().unwrap();
        let base = folder.path().display().to_string();
        let settings = serde_json::json!({ "base_model_name_or_path": base, "r": 8, "lora_alpha": 16 });
        write(folder.path().join("adapter_config.json"), settings.to_string()).unwrap();
        let options = PushOptions {
            folder: folder.path().to_owned(),
            to: "me/mine".to_owned(),
            private: false,
            message: "m".to_owned(),
        };
        let message = push(&options, Console::QUIET).unwrap_err().to_string();
        assert!(message.contains(&base) && message.contains("lora.base_model_name_or_path"), "{message}");
    }
}
