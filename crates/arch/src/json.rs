//! Typed reading of JSON objects, so that a missing or ill-typed key is named together with its file.
//!
//! `null` counts as absent, as in Hugging Face's config files; [`JsonObject::is_null`] distinguishes the two where it matters.
//! Trade-off: unknown keys are ignored, because those files carry many that do not concern the model's arithmetic.

use std::fs::read_to_string;
use std::path::Path;

use serde_json::{Map, Value, from_value};

use crate::error::ArchError;
use crate::python_json;

/// A JSON object with its file and the key that led to it. Every typed getter returns `None` for an absent key and [`ArchError::WrongType`] for a
/// value of another type.
#[derive(Clone, Copy)]
pub struct JsonObject<'a> {
    /// The file, for messages.
    pub path: &'a Path,
    parent: &'a str,
    map: &'a Map<String, Value>,
}

/// Reads a file as text, for [`parse_object`].
pub fn read_text(path: &Path) -> Result<String, ArchError> {
    read_to_string(path).map_err(ArchError::io("read", path))
}

/// Parses the text of the file at `path` as a JSON object, as Python writes it ([`python_json`]).
pub fn parse_object(text: &str, path: &Path) -> Result<Map<String, Value>, ArchError> {
    let object = python_json::from_slice(text.as_bytes()).and_then(from_value);
    object.map_err(|source| ArchError::Json { path: path.to_path_buf(), source })
}

impl<'a> JsonObject<'a> {
    /// Creates the top level of a file.
    pub fn new(path: &'a Path, map: &'a Map<String, Value>) -> Self {
        Self { path, parent: "", map }
    }

    /// Creates the object that stands under the key `parent` of a file.
    pub fn within(path: &'a Path, parent: &'a str, map: &'a Map<String, Value>) -> Self {
        Self { path, parent, map }
    }

    /// Returns the keys and values.
    pub fn map(&self) -> &'a Map<String, Value> {
        self.map
    }

    /// Returns the value under `key`, unless it is absent or null.
    pub fn get(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    /// Returns whether `key` is there and null.
    pub fn is_null(&self, key: &str) -> bool {
        self.map.get(key).is_some_and(Value::is_null)
    }

    /// Returns the object under `key`.
    pub fn object(&self, key: &'a str) -> Result<Option<JsonObject<'a>>, ArchError> {
        let map = self.typed(key, "an object", Value::as_object)?;
        Ok(map.map(|map| JsonObject { path: self.path, parent: key, map }))
    }

    /// Reads a whole number of at least zero.
    pub fn usize(&self, key: &str) -> Result<Option<usize>, ArchError> {
        self.typed(key, "a whole number", |value| value.as_u64()?.try_into().ok())
    }

    /// Reads a number.
    pub fn f64(&self, key: &str) -> Result<Option<f64>, ArchError> {
        self.typed(key, "a number", Value::as_f64)
    }

    /// Reads `true` or `false`.
    pub fn bool(&self, key: &str) -> Result<Option<bool>, ArchError> {
        self.typed(key, "true or false", Value::as_bool)
    }

    /// Reads a string.
    pub fn str(&self, key: &str) -> Result<Option<&'a str>, ArchError> {
        self.typed(key, "a string", Value::as_str)
    }

    /// Reads one token id or a list of them.
    pub fn token_ids(&self, key: &str) -> Result<Option<Vec<u32>>, ArchError> {
        let id = |value: &Value| value.as_u64().and_then(|id| id.try_into().ok());
        self.typed(key, "a token id or a list of token ids", |value| match value {
            Value::Array(ids) => ids.iter().map(id).collect(),
            one => id(one).map(|id| vec![id]),
        })
    }

    /// Turns an absent value into an error that names the key.
    pub fn required<T>(&self, key: &str, value: Option<T>, expected: &'static str) -> Result<T, ArchError> {
        value.ok_or_else(|| ArchError::MissingKey { path: self.path.to_path_buf(), key: self.dotted(key), expected })
    }

    /// Builds the error for a value that breaks a rule.
    pub fn bad(&self, key: &str, got: impl ToString, expected: impl ToString) -> ArchError {
        let (path, key) = (self.path.to_path_buf(), self.dotted(key));
        ArchError::BadValue { path, key, got: got.to_string(), expected: expected.to_string() }
    }

    /// Builds the error for a value that requires something unsupported.
    pub fn unsupported(&self, key: &str, got: impl ToString, advice: impl ToString) -> ArchError {
        let (path, key) = (self.path.to_path_buf(), self.dotted(key));
        ArchError::Unsupported { path, key, got: got.to_string(), advice: advice.to_string() }
    }

    /// Builds the error for a value of the wrong type.
    pub fn wrong_type(&self, key: &str, expected: &'static str, got: &Value) -> ArchError {
        let (path, key) = (self.path.to_path_buf(), self.dotted(key));
        ArchError::WrongType { path, key, expected, got: python_json::unmarked(&got.to_string()) }
    }

    fn typed<T>(
        &self,
        key: &str,
        expected: &'static str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ArchError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        read(value).map(Some).ok_or_else(|| self.wrong_type(key, expected, value))
    }

    fn dotted(&self, key: &str) -> String {
        if self.parent.is_empty() { key.to_owned() } else { format!("{}.{key}", self.parent) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_nested_key_is_named_by_its_dotted_path() {
        let path = Path::new("config.json");
        let map = parse_object(r#"{"rope_parameters": {"factor": "eight"}, "none": null}"#, path).unwrap();
        let top = JsonObject::new(path, &map);
        assert!(top.is_null("none") && !top.is_null("absent") && !top.is_null("rope_parameters"));
        let error = top.object("rope_parameters").unwrap().unwrap().f64("factor").unwrap_err();
        assert_eq!(error.to_string(), "`config.json`: key `rope_parameters.factor` must be a number, got \"eight\"");
        assert_eq!(top.usize("none").unwrap(), None);
        let error = top.required("none", top.usize("none").unwrap(), "a whole number").unwrap_err();
        assert!(error.to_string().contains("no key `none` (expected a whole number)"), "{error}");
    }

    #[test]
    fn one_token_id_and_a_list_read_alike() {
        let path = Path::new("config.json");
        let map = parse_object(r#"{"one": 2, "many": [1, 2], "bad": [1, -2]}"#, path).unwrap();
        let top = JsonObject::new(path, &map);
        assert_eq!(top.token_ids("one").unwrap(), Some(vec![2]));
        assert_eq!(top.token_ids("many").unwrap(), Some(vec![1, 2]));
        assert!(top.token_ids("bad").is_err());
    }
}
