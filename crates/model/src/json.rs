//! Typed reading of JSON objects, so that a missing or ill-typed key is named together with its file.
//!
//! `null` counts as absent, as in Hugging Face's config files. Unknown keys are left alone: those files carry many that
//! do not concern the model's arithmetic.

use std::fs::read_to_string;
use std::path::Path;

use serde_json::{Map, Value, from_str};

use crate::error::ModelError;

/// A JSON object, where it came from, and the dotted path of keys that led to it.
#[derive(Clone, Copy)]
pub(crate) struct JsonObject<'a> {
    pub(crate) path: &'a Path,
    parent: &'a str,
    map: &'a Map<String, Value>,
}

/// Reads a file as text, for [`parse_object`].
pub(crate) fn read_text(path: &Path) -> Result<String, ModelError> {
    read_to_string(path).map_err(ModelError::io("read", path))
}

/// Parses the text of the file at `path` as a JSON object.
pub(crate) fn parse_object(text: &str, path: &Path) -> Result<Map<String, Value>, ModelError> {
    from_str(text).map_err(|source| ModelError::Json { path: path.to_path_buf(), source })
}

impl<'a> JsonObject<'a> {
    /// The top level of a file.
    pub(crate) fn new(path: &'a Path, map: &'a Map<String, Value>) -> Self {
        Self { path, parent: "", map }
    }

    /// The value under `key`, unless it is absent or null.
    pub(crate) fn get(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    /// The object under `key`.
    pub(crate) fn object(&self, key: &'a str) -> Result<Option<JsonObject<'a>>, ModelError> {
        let map = self.typed(key, "an object", Value::as_object)?;
        Ok(map.map(|map| JsonObject { path: self.path, parent: key, map }))
    }

    /// A whole number of at least zero.
    pub(crate) fn usize(&self, key: &str) -> Result<Option<usize>, ModelError> {
        self.typed(key, "a whole number", |value| value.as_u64()?.try_into().ok())
    }

    /// A number.
    pub(crate) fn f64(&self, key: &str) -> Result<Option<f64>, ModelError> {
        self.typed(key, "a number", Value::as_f64)
    }

    /// `true` or `false`.
    pub(crate) fn bool(&self, key: &str) -> Result<Option<bool>, ModelError> {
        self.typed(key, "true or false", Value::as_bool)
    }

    /// A string.
    pub(crate) fn str(&self, key: &str) -> Result<Option<&'a str>, ModelError> {
        self.typed(key, "a string", Value::as_str)
    }

    /// One token id or a list of them.
    pub(crate) fn token_ids(&self, key: &str) -> Result<Option<Vec<u32>>, ModelError> {
        let id = |value: &Value| value.as_u64().and_then(|id| id.try_into().ok());
        self.typed(key, "a token id or a list of token ids", |value| match value {
            Value::Array(ids) => ids.iter().map(id).collect(),
            one => id(one).map(|id| vec![id]),
        })
    }

    /// Turns an absent value into an error that names the key.
    pub(crate) fn required<T>(&self, key: &str, value: Option<T>, expected: &'static str) -> Result<T, ModelError> {
        value.ok_or_else(|| ModelError::MissingKey { path: self.path.to_path_buf(), key: self.dotted(key), expected })
    }

    /// The error for a value that breaks a rule.
    pub(crate) fn bad(&self, key: &str, got: impl ToString, expected: impl ToString) -> ModelError {
        let (path, key) = (self.path.to_path_buf(), self.dotted(key));
        ModelError::BadValue { path, key, got: got.to_string(), expected: expected.to_string() }
    }

    /// The error for a value that asks for something this crate does not do.
    pub(crate) fn unsupported(&self, key: &str, got: impl ToString, advice: impl ToString) -> ModelError {
        let (path, key) = (self.path.to_path_buf(), self.dotted(key));
        ModelError::Unsupported { path, key, got: got.to_string(), advice: advice.to_string() }
    }

    /// The error for a value of the wrong type.
    pub(crate) fn wrong_type(&self, key: &str, expected: &'static str, got: &Value) -> ModelError {
        let (path, key) = (self.path.to_path_buf(), self.dotted(key));
        ModelError::WrongType { path, key, expected, got: got.to_string() }
    }

    fn typed<T>(
        &self,
        key: &str,
        expected: &'static str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ModelError> {
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
