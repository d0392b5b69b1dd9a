//! Finds a tokenizer's chat templates and chooses the one that applies, as in transformers.
//!
//! `chat_template.jinja` and `additional_chat_templates/*.jinja` take precedence over the key in `tokenizer_config.json`,
//! which takes precedence over `chat_template.json`. Not supported: templates of image processors.

use std::collections::BTreeMap;
use std::fs::{read, read_dir};
use std::io::{Error, ErrorKind, Result as IoResult};
use std::path::{Path, PathBuf};

use firebrick_arch::folder::{ADDITIONAL_TEMPLATES, CHAT_TEMPLATE_FILE, CHAT_TEMPLATE_JSON, TOKENIZER_CONFIG_FILE};
use serde_json::{Map, Value as Json};

use super::built_in::BuiltIn;
use super::template::{ChatTemplate, TemplateDefaults};
use crate::error::DataError;

const DEFAULT: &str = "default";
/// The name of the template for conversations with tools.
const TOOL_USE: &str = "tool_use";

/// A chat template to use instead of the tokenizer's default.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TemplateChoice {
    /// One of the tokenizer's named templates, or a built-in one: "chatml", "llama3", "gemma", "phi3", "zephyr", "alpaca".
    Named(String),
    /// This text.
    Text(String),
    /// The text of this file.
    File(PathBuf),
}

/// The templates of a tokenizer by name, and the compiled ones.
#[derive(Debug, Clone, Default)]
pub(crate) struct TemplateSet {
    sources: BTreeMap<String, (String, PathBuf)>,
    /// Tokens by their role, such as `eos_token`: variables of the templates.
    pub(crate) special_tokens: BTreeMap<String, String>,
    default: Option<ChatTemplate>,
    tool_use: Option<ChatTemplate>,
    /// The date that templates see, in seconds since 1970 UTC.
    pub(crate) date: i64,
    pub(crate) defaults: TemplateDefaults,
}

impl TemplateSet {
    /// Reads the templates of a folder whose `tokenizer_config.json` contains `config`.
    pub(crate) fn read(
        dir: &Path,
        config: &Map<String, Json>,
        special_tokens: BTreeMap<String, String>,
        read_json: impl Fn(&Path) -> Result<Option<Map<String, Json>>, DataError>,
    ) -> Result<Self, DataError> {
        let mut sources = files(dir)?;
        if sources.is_empty() {
            sources = named(config.get("chat_template"), &dir.join(TOKENIZER_CONFIG_FILE));
        }
        if sources.is_empty() {
            let path = dir.join(CHAT_TEMPLATE_JSON);
            sources = named(read_json(&path)?.unwrap_or_default().get("chat_template"), &path);
        }
        let mut set = Self { sources, special_tokens, ..Self::default() };
        set.default = set.compile(DEFAULT)?;
        set.tool_use = set.compile(TOOL_USE)?;
        Ok(set)
    }

    pub(crate) fn get(&self, has_tools: bool) -> Option<&ChatTemplate> {
        self.tool_use.as_ref().filter(|_| has_tools).or(self.default.as_ref())
    }

    /// Replaces all templates by one.
    pub(crate) fn choose(&mut self, choice: &TemplateChoice) -> Result<(), DataError> {
        let template = match choice {
            TemplateChoice::Named(name) => self.compile(name)?.ok_or_else(|| {
                DataError::Tokenizer(format!(
                    "no chat template is named {name:?}: the tokenizer has {}, built in are {}, and a file is named with its path",
                    self.names(),
                    BuiltIn::names()
                ))
            })?,
            TemplateChoice::Text(source) => {
                ChatTemplate::new(source, Path::new("the recipe"), self.special_tokens.clone())?
            }
            TemplateChoice::File(path) => {
                let source = read_text(path).map_err(|reason| DataError::Io { path: path.clone(), reason })?;
                ChatTemplate::new(&source, path, self.special_tokens.clone())?
            }
        };
        self.default = Some(template);
        self.tool_use = None;
        self.apply();
        Ok(())
    }

    /// Passes the changed date, defaults and special tokens to the templates.
    pub(crate) fn apply(&mut self) {
        for template in self.default.iter_mut().chain(&mut self.tool_use) {
            template.set_date(self.date);
            template.defaults.clone_from(&self.defaults);
            template.special_tokens.clone_from(&self.special_tokens);
        }
    }

    /// Returns the built-in template of this name; `None` if the tokenizer has one of this name.
    pub(crate) fn built_in(&self, name: &str) -> Option<&'static BuiltIn> {
        BuiltIn::named(name).filter(|_| !self.sources.contains_key(name))
    }

    pub(crate) fn names(&self) -> String {
        if self.sources.is_empty() {
            return "none".to_owned();
        }
        self.sources.keys().map(|name| format!("{name:?}")).collect::<Vec<_>>().join(", ")
    }

    fn compile(&self, name: &str) -> Result<Option<ChatTemplate>, DataError> {
        let compile = |(source, path): &(String, PathBuf)| ChatTemplate::new(source, path, self.special_tokens.clone());
        match (self.sources.get(name), BuiltIn::named(name)) {
            (Some(template), _) => compile(template).map(Some),
            (None, Some(BuiltIn { source, .. })) => compile(&((*source).to_owned(), PathBuf::from(name))).map(Some),
            (None, None) => Ok(None),
        }
    }
}

/// Reads the text of a file; the error names the line that is not UTF-8.
fn read_text(path: &Path) -> IoResult<String> {
    String::from_utf8(read(path)?).map_err(|error| {
        let line =
            error.as_bytes()[..error.utf8_error().valid_up_to()].iter().filter(|&&byte| byte == b'\n').count() + 1;
        Error::new(ErrorKind::InvalidData, format!("line {line} is not valid UTF-8"))
    })
}

/// Reads templates in separate files.
fn files(dir: &Path) -> Result<BTreeMap<String, (String, PathBuf)>, DataError> {
    let mut sources = BTreeMap::new();
    let path = dir.join(CHAT_TEMPLATE_FILE);
    match read_text(&path) {
        Ok(source) => {
            sources.insert(DEFAULT.to_owned(), (source, path));
        }
        Err(reason) if reason.kind() == ErrorKind::NotFound => {}
        Err(reason) => return Err(DataError::Io { path, reason }),
    }
    let folder = dir.join(ADDITIONAL_TEMPLATES);
    let entries = match read_dir(&folder) {
        Ok(entries) => entries,
        Err(_) => return Ok(sources),
    };
    for entry in entries {
        let path = entry.map_err(|reason| DataError::Io { path: folder.clone(), reason })?.path();
        if path.extension().is_none_or(|extension| extension != "jinja") {
            continue;
        }
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let source = read_text(&path).map_err(|reason| DataError::Io { path: path.clone(), reason })?;
        sources.insert(name, (source, path));
    }
    Ok(sources)
}

/// Reads templates in JSON: a string, or a list of named ones.
fn named(value: Option<&Json>, path: &Path) -> BTreeMap<String, (String, PathBuf)> {
    let entry = |name: &str, source: &Json| Some((name.to_owned(), (source.as_str()?.to_owned(), path.to_owned())));
    match value {
        Some(Json::Array(entries)) => {
            let entries = entries.iter().filter_map(|item| entry(item.get("name")?.as_str()?, item.get("template")?));
            entries.collect()
        }
        Some(source) => entry(DEFAULT, source).into_iter().collect(),
        None => BTreeMap::new(),
    }
}
