//! The file that travels with a result: what a chat template receives in addition to the messages, and the length by which training chose longrope's
//! factors. A run writes it; `generate` and `chat` read it.
//!
//! ```json
//! {"system_prompt": "Answer in one word.", "chat_template_kwargs": {"enable_thinking": false}, "longrope_sequence_tokens": 8192}
//! ```
//! Trade-off: the date is not in the file; a template that writes the date gets today's, as in any other use of a model.

use std::path::{Path, PathBuf};

use firebrick_arch::json::{JsonObject, parse_object, read_text};
use firebrick_data::TemplateDefaults;
use firebrick_model::CHAT_SETTINGS_FILE;
use serde_json::{Map, Value};

use crate::error::RunError;

const SYSTEM_PROMPT: &str = "system_prompt";
const ARGUMENTS: &str = "chat_template_kwargs";
const SEQUENCE_TOKENS: &str = "longrope_sequence_tokens";

/// Returns the content of the file; empty if a template receives nothing but the messages, and the model has no factors to choose.
pub fn to_json(defaults: &TemplateDefaults, sequence_tokens: Option<usize>) -> Map<String, Value> {
    let mut file = Map::new();
    if let Some(prompt) = &defaults.system_prompt {
        file.insert(SYSTEM_PROMPT.to_owned(), Value::from(prompt.as_str()));
    }
    if !defaults.arguments.is_empty() {
        file.insert(ARGUMENTS.to_owned(), Value::Object(defaults.arguments.clone()));
    }
    if let Some(tokens) = sequence_tokens {
        file.insert(SEQUENCE_TOKENS.to_owned(), Value::from(tokens));
    }
    file
}

/// Opens the file of a folder and returns its path and content; without any key if there is no such file.
fn open(folder: &Path) -> Result<(PathBuf, Map<String, Value>), RunError> {
    let path = folder.join(CHAT_SETTINGS_FILE);
    if !path.is_file() {
        return Ok((path, Map::new()));
    }
    let map = parse_object(&read_text(&path)?, &path)?;
    let known = [SYSTEM_PROMPT, ARGUMENTS, SEQUENCE_TOKENS];
    if let Some((key, value)) = map.iter().find(|(key, _)| !known.contains(&key.as_str())) {
        let advice = format!("only {} are known", known.join(", "));
        return Err(JsonObject::new(&path, &map).unsupported(key, value, advice).into());
    }
    Ok((path, map))
}

/// Reads the length by which the training of a result chose longrope's factors; `None` if the folder does not record it.
pub fn read_sequence_tokens(folder: &Path) -> Result<Option<usize>, RunError> {
    let (path, map) = open(folder)?;
    Ok(JsonObject::new(&path, &map).usize(SEQUENCE_TOKENS)?)
}

/// Reads the chat settings of a folder; empty if it has no such file.
///
/// # Errors
/// A file that cannot be read, is no JSON object, has a key of another type, or one that is not known.
pub fn read(folder: &Path) -> Result<TemplateDefaults, RunError> {
    let (path, map) = open(folder)?;
    let json = JsonObject::new(&path, &map);
    let arguments = match map.get(ARGUMENTS) {
        None | Some(Value::Null) => Map::new(),
        Some(Value::Object(arguments)) => arguments.clone(),
        Some(other) => return Err(json.wrong_type(ARGUMENTS, "an object", other).into()),
    };
    Ok(TemplateDefaults { system_prompt: json.str(SYSTEM_PROMPT)?.map(str::to_owned), arguments })
}

/// Returns a sentence about what the file of a folder decides, where no system prompt was typed; `None` if that is nothing.
pub fn note(defaults: &TemplateDefaults, typed_prompt: Option<&str>) -> Option<String> {
    let prompt = defaults.system_prompt.as_ref().filter(|_| typed_prompt.is_none());
    let prompt = prompt.map(|prompt| format!("the system prompt {prompt:?}"));
    let arguments = defaults.arguments.iter().map(|(key, value)| format!("{key} = {value}"));
    let parts: Vec<String> = prompt.into_iter().chain(arguments).collect();
    (!parts.is_empty()).then(|| format!("chats get {}, as {CHAT_SETTINGS_FILE} says", parts.join(", ")))
}

#[cfg(test)]
mod tests {
    use std::fs::write;

    use serde_json::json;
    use tempfile::tempdir;

    use super::*;

    fn of(text: &str) -> Result<TemplateDefaults, RunError> {
        let folder = tempdir().unwrap();
        write(folder.path().join(CHAT_SETTINGS_FILE), text).unwrap();
        read(folder.path())
    }

    #[test]
    fn what_is_written_is_read_again_and_said() {
        let arguments = json!({"enable_thinking": false, "depth": 2}).as_object().unwrap().clone();
        let defaults = TemplateDefaults { arguments, system_prompt: Some("Be brief.".to_owned()) };
        let folder = tempdir().unwrap();
        write(folder.path().join(CHAT_SETTINGS_FILE), Value::Object(to_json(&defaults, Some(256))).to_string())
            .unwrap();
        assert_eq!(
            (read(folder.path()).unwrap(), read_sequence_tokens(folder.path()).unwrap()),
            (defaults.clone(), Some(256))
        );
        let said = note(&defaults, None).unwrap();
        assert!(said.contains("\"Be brief.\"") && said.contains("enable_thinking = false"), "{said}");
        let said = note(&defaults, Some("Be kind.")).unwrap();
        assert!(
            !said.contains("prompt") && said.contains("enable_thinking = false"),
            "an option says the prompt: {said}"
        );
    }

    #[test]
    fn nothing_is_written_for_nothing_and_read_from_nothing() {
        let nothing = TemplateDefaults::default();
        assert!(to_json(&nothing, None).is_empty() && note(&nothing, None).is_none());
        assert_eq!(read_sequence_tokens(tempdir().unwrap().path()).unwrap(), None);
        assert_eq!(read(tempdir().unwrap().path()).unwrap(), nothing);
    }

    #[test]
    fn a_file_of_another_shape_is_refused_with_its_key() {
        for (text, named) in [
            (r#"{"system": "S"}"#, "`system`"),
            (r#"{"system_prompt": 3}"#, "system_prompt"),
            (r#"{"chat_template_kwargs": []}"#, "chat_template_kwargs"),
            ("[]", CHAT_SETTINGS_FILE),
        ] {
            let message = of(text).unwrap_err().to_string();
            assert!(message.contains(named), "{text}: {message}");
        }
    }
}
