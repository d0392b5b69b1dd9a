//! Dictionaries whose methods are attributes, as in Python: `d.items` is a method whether or not there is such a key, and so is `d['items']` if there
//! is none. Templates ask `schema['items'] is defined` of tools.
//!
//! Trade-off: a method that the sandbox of transformers forbids is undefined; methods of other types are no attributes.

use std::fmt::{Formatter, Result as FormatResult};
use std::sync::Arc;

use firebrick_arch::python_json::number;
use minijinja::value::{DynObject, Enumerator, Object, ObjectRepr};
use minijinja::{Error, State, Value};
use serde_json::Value as Json;

use super::python_methods;

/// Begins a subscript in a template's source that names a method (`lexer`): a key has precedence.
pub(super) const SUBSCRIPT: char = '\u{FDD4}';
const METHODS: [&str; 5] = ["items", "keys", "values", "get", "copy"];
const FORBIDDEN: [&str; 5] = ["clear", "pop", "popitem", "setdefault", "update"];

pub(super) fn is_method(name: &str) -> bool {
    METHODS.contains(&name) || FORBIDDEN.contains(&name)
}

/// Converts JSON for templates. Whole numbers beyond 64 bits, which JSON values here hold as marked texts, keep their digits up to 128 bits;
/// `record_format` refuses longer ones by name.
pub(crate) fn from_json(json: &Json) -> Value {
    match json {
        Json::Object(map) => {
            dict(&map.iter().map(|(key, value)| (Value::from(key.as_str()), from_json(value))).collect())
        }
        Json::Array(items) => items.iter().map(from_json).collect::<Vec<_>>().into(),
        Json::String(text) => match number(json).map(str::parse::<i128>) {
            Some(Ok(number)) => number.into(),
            _ => text.as_str().into(),
        },
        other => Value::from_serialize(other),
    }
}

/// Turns a map of the engine into a dictionary; other values stay as they are.
pub(super) fn dict(map: &Value) -> Value {
    match map.as_object() {
        Some(object) if object.repr() == ObjectRepr::Map => Value::from_object(Dict(object.clone())),
        _ => map.clone(),
    }
}

#[derive(Debug)]
struct Dict(DynObject);

impl Dict {
    fn method(self: &Arc<Self>, name: &str) -> Option<Value> {
        let dict = || Value::from_dyn_object(self.clone());
        let found = METHODS.into_iter().find(|method| *method == name);
        found
            .map(|name| Value::from_object(Method { dict: dict(), name }))
            .or_else(|| FORBIDDEN.contains(&name).then_some(Value::UNDEFINED))
    }
}

impl Object for Dict {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Map
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        match key.as_str().and_then(|key| key.strip_prefix(SUBSCRIPT)) {
            Some(name) => self.0.get_value(&name.into()).or_else(|| self.method(name)),
            None => self.0.get_value(key),
        }
    }

    fn get_value_by_str(self: &Arc<Self>, key: &str) -> Option<Value> {
        self.method(key).or_else(|| self.0.get_value_by_str(key))
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        self.0.enumerate()
    }

    fn enumerator_len(self: &Arc<Self>) -> Option<usize> {
        self.0.enumerator_len()
    }
}

#[derive(Debug)]
struct Method {
    dict: Value,
    name: &'static str,
}

impl Object for Method {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn call(self: &Arc<Self>, state: &State<'_, '_>, args: &[Value]) -> Result<Value, Error> {
        python_methods::call(state, &self.dict, self.name, args)
    }

    fn render(self: &Arc<Self>, out: &mut Formatter<'_>) -> FormatResult {
        write!(out, "<built-in method {} of dict object>", self.name)
    }
}
