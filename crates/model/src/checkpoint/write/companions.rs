//! The files that other programs need to use saved weights as they were trained: tokenizer, chat template, settings of chats, of generation and of
//! preprocessors, license.
//!
//! They are copied from the model's folder byte for byte, except for changes by training: another chat template, and more end-of-text tokens.

use std::collections::BTreeMap;
use std::fs::{create_dir_all, read, read_dir};
use std::path::{Path, PathBuf};

use firebrick_arch::folder::{
    ADDITIONAL_TEMPLATES, CHAT_TEMPLATE_JSON, PREPROCESSOR_FILES, SPECIAL_TOKENS_FILE, TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE, TOKENIZER_FILES, states_terms,
};
pub use firebrick_arch::folder::{CHAT_SETTINGS_FILE, CHAT_TEMPLATE_FILE};
use firebrick_arch::json::{parse_object, read_text};
use firebrick_arch::python_json::to_string_pretty;
use firebrick_arch::{GENERATION_CONFIG_FILE, generation_eos_token_ids, generation_settings};
use serde_json::{Map, Value, json};

use crate::error::ModelError;

/// Files and settings that are saved next to trained weights.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Companions {
    /// The folder of the model that was trained.
    pub from: PathBuf,
    /// The chat template of the training, if it is none of the folder's own.
    pub chat_template: Option<String>,
    /// The contents of [`CHAT_SETTINGS_FILE`], which is not written if they are empty.
    pub chat_settings: Map<String, Value>,
    /// The tokenizer files that training has changed, as text by name: they replace the folder's.
    pub tokenizer: BTreeMap<String, String>,
}

impl Companions {
    /// Reads the tokenizer files of an adapter's folder, which may have tokens that its base lacks; empty if it has no tokenizer.
    pub fn tokenizer_of(adapter: &Path) -> Result<BTreeMap<String, String>, ModelError> {
        if !adapter.join(TOKENIZER_FILE).is_file() {
            return Ok(BTreeMap::new());
        }
        let files = [TOKENIZER_FILE, TOKENIZER_CONFIG_FILE, SPECIAL_TOKENS_FILE].into_iter();
        let there = files.filter(|file| adapter.join(file).is_file());
        there.map(|file| Ok((file.to_owned(), read_text(&adapter.join(file))?))).collect()
    }

    /// Writes the files into `to`. The generation settings also name `eos_token_ids`, and the padding token if one was chosen.
    pub(crate) fn write(&self, to: &Path, eos_token_ids: &[u32], pad_token_id: Option<u32>) -> Result<(), ModelError> {
        for file in TOKENIZER_FILES.into_iter().chain(PREPROCESSOR_FILES) {
            self.copy(file, to)?;
        }
        for file in self.terms()? {
            self.copy(&file, to)?;
        }
        match &self.chat_template {
            Some(template) => self.write_template(to, template)?,
            None => self.copy_templates(to)?,
        }
        if !self.chat_settings.is_empty() {
            write_json(&to.join(CHAT_SETTINGS_FILE), &self.chat_settings)?;
        }
        self.write_generation_config(to, eos_token_ids, pad_token_id)
    }

    /// Writes a file if training has changed it, or copies it if the folder has it.
    fn copy(&self, file: &str, to: &Path) -> Result<(), ModelError> {
        if let Some(text) = self.tokenizer.get(file) {
            return write_file(&to.join(file), text);
        }
        let path = self.from.join(file);
        if !path.is_file() {
            return Ok(());
        }
        write_file(&to.join(file), read(&path).map_err(ModelError::io("read", &path))?)
    }

    /// Returns the names of the files that state the model's terms.
    fn terms(&self) -> Result<Vec<String>, ModelError> {
        let listed = read_dir(&self.from).map_err(ModelError::io("list", &self.from))?;
        let names = listed.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        Ok(names.filter(|name| states_terms(name)).collect())
    }

    fn copy_templates(&self, to: &Path) -> Result<(), ModelError> {
        for file in [TOKENIZER_CONFIG_FILE, CHAT_TEMPLATE_FILE, CHAT_TEMPLATE_JSON] {
            self.copy(file, to)?;
        }
        let folder = self.from.join(ADDITIONAL_TEMPLATES);
        if !folder.is_dir() {
            return Ok(());
        }
        let target = to.join(ADDITIONAL_TEMPLATES);
        create_dir_all(&target).map_err(ModelError::io("create", &target))?;
        for entry in read_dir(&folder).map_err(ModelError::io("list", &folder))? {
            let name = entry.map_err(ModelError::io("list", &folder))?.file_name();
            self.copy(&Path::new(ADDITIONAL_TEMPLATES).join(name).to_string_lossy(), to)?;
        }
        Ok(())
    }

    /// Writes a template for old and new readers. The folder's own files are not copied: they would take precedence or contradict it.
    fn write_template(&self, to: &Path, template: &str) -> Result<(), ModelError> {
        write_file(&to.join(CHAT_TEMPLATE_FILE), template)?;
        let path = self.from.join(TOKENIZER_CONFIG_FILE);
        let text = match self.tokenizer.get(TOKENIZER_CONFIG_FILE) {
            Some(text) => text.clone(),
            None if path.is_file() => read_text(&path)?,
            None => return Ok(()),
        };
        let mut config = parse_object(&text, &path)?;
        config.insert("chat_template".to_owned(), Value::from(template));
        write_json(&to.join(TOKENIZER_CONFIG_FILE), &config)
    }

    /// Writes the folder's generation settings, unchanged if they name all these tokens and no padding token was chosen.
    fn write_generation_config(&self, to: &Path, eos_token_ids: &[u32], pad: Option<u32>) -> Result<(), ModelError> {
        let mut ids = generation_eos_token_ids(&self.from)?;
        let known = ids.len();
        ids.extend(eos_token_ids.iter().filter(|&id| !ids.contains(id)).copied().collect::<Vec<_>>());
        if ids.len() == known && pad.is_none() {
            return self.copy(GENERATION_CONFIG_FILE, to);
        }
        // Readers may replace settings with this mark by those of config.json.
        let settings = generation_settings(&self.from)?.into_iter().filter(|(key, _)| key != "_from_model_config");
        let mut config: Map<_, _> = settings.collect();
        if ids.len() > known {
            config.insert("eos_token_id".to_owned(), if let [only] = ids[..] { json!(only) } else { json!(ids) });
        }
        config.extend(pad.map(|id| ("pad_token_id".to_owned(), json!(id))));
        write_json(&to.join(GENERATION_CONFIG_FILE), &config)
    }
}

/// Writes a small file atomically.
pub(crate) fn write_file(path: &Path, bytes: impl AsRef<[u8]>) -> Result<(), ModelError> {
    firebrick_files::write(path, bytes).map_err(ModelError::io("write", path))
}

fn write_json(path: &Path, object: &Map<String, Value>) -> Result<(), ModelError> {
    write_file(path, to_string_pretty(object) + "\n")
}

#[cfg(test)]
mod tests {
    use std::fs::{create_dir, read_to_string, write};

    use serde_json::from_str;
    use tempfile::{TempDir, tempdir};

    use super::*;

    const FILES: [(&str, &str); 9] = [
        ("tokenizer.json", "{\"model\": {}}"),
        (
            "tokenizer_config.json",
            "{\n  \"model_max_length\": 1000000000000000019884624838656,\n  \"chat_template\": \"old\"\n}\n",
        ),
        ("chat_template.jinja", "old"),
        ("chat_template.json", "{\"chat_template\": \"oldest\"}"),
        ("additional_chat_templates/tool_use.jinja", "tools"),
        ("generation_config.json", "{\"_from_model_config\": true, \"eos_token_id\": 2, \"top_p\": 0.9}"),
        ("LICENSE.txt", "terms"),
        ("Notice", "thanks"),
        ("USE_POLICY.md", "policy"),
    ];

    fn model() -> TempDir {
        let folder = tempdir().unwrap();
        create_dir(folder.path().join(ADDITIONAL_TEMPLATES)).unwrap();
        for (name, text) in FILES {
            write(folder.path().join(name), text).unwrap();
        }
        write(folder.path().join("optimizer.pt"), "not ours").unwrap();
        folder
    }

    fn written(chat_template: Option<&str>, eos_token_ids: &[u32], pad_token_id: Option<u32>) -> TempDir {
        let (from, to) = (model(), tempdir().unwrap());
        let chat_template = chat_template.map(str::to_owned);
        let companions = Companions { from: from.path().to_owned(), chat_template, ..Companions::default() };
        companions.write(to.path(), eos_token_ids, pad_token_id).unwrap();
        to
    }

    fn json(folder: &TempDir, file: &str) -> Value {
        from_str(&read_to_string(folder.path().join(file)).unwrap()).unwrap()
    }

    #[test]
    fn untrained_tensors_are_copied_byte_for_byte() {
        let to = written(None, &[2], None);
        for (name, text) in FILES {
            assert_eq!(read_to_string(to.path().join(name)).unwrap(), text, "{name}");
        }
        assert!(!to.path().join("optimizer.pt").exists());
    }

    #[test]
    fn the_template_of_the_run_replaces_all_others() {
        let to = written(Some("{{ new }}"), &[], None);
        assert_eq!(read_to_string(to.path().join(CHAT_TEMPLATE_FILE)).unwrap(), "{{ new }}");
        let config = read_to_string(to.path().join(TOKENIZER_CONFIG_FILE)).unwrap();
        assert_eq!(config, FILES[1].1.replace("old", "{{ new }}"));
        assert!(!to.path().join(CHAT_TEMPLATE_JSON).exists() && !to.path().join(ADDITIONAL_TEMPLATES).exists());
    }

    #[test]
    fn generation_settings_gain_the_end_tokens() {
        let of = |ids: &[u32], pad| json(&written(None, ids, pad), GENERATION_CONFIG_FILE);
        assert_eq!(of(&[2, 7], None), json!({"eos_token_id": [2, 7], "top_p": 0.9}));
        assert_eq!(of(&[2], Some(4)), json!({"eos_token_id": 2, "top_p": 0.9, "pad_token_id": 4}));
        assert_eq!(of(&[7], Some(4)), json!({"eos_token_id": [2, 7], "top_p": 0.9, "pad_token_id": 4}));
    }

    #[test]
    fn a_folder_without_generation_settings_gets_them() {
        let (from, to) = (tempdir().unwrap(), tempdir().unwrap());
        let mut companions = Companions { from: from.path().to_owned(), ..Companions::default() };
        companions.write(to.path(), &[], None).unwrap();
        assert_eq!(read_dir(to.path()).unwrap().count(), 0);
        companions.write(to.path(), &[5], None).unwrap();
        assert_eq!(json(&to, GENERATION_CONFIG_FILE), json!({"eos_token_id": 5}));
        assert!(!to.path().join(CHAT_SETTINGS_FILE).exists());
        companions.chat_settings.insert("system_prompt".to_owned(), json!("S"));
        companions.write(to.path(), &[], None).unwrap();
        assert_eq!(json(&to, CHAT_SETTINGS_FILE), json!({"system_prompt": "S"}));
    }
}
