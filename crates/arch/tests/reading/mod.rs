//! What a spec has at a path, so that tables in JSON can say it.

use firebrick_arch::ModelSpec;
use serde_json::{Value, json, to_value};

/// Returns what a spec has at a path; names of the linear modules under "modules", and of the tensors of a layer, in order, under "layers.0".
pub(crate) fn reading(spec: &ModelSpec, path: &str) -> Value {
    if path == "modules" {
        return json!(spec.linear_module_names());
    }
    if path.starts_with("layers.") {
        let names = spec.tensors().into_iter().map(|tensor| tensor.name);
        return names.filter_map(|name| Some(name.strip_prefix(&format!("model.{path}."))?.to_owned())).collect();
    }
    let spec = to_value(spec).unwrap();
    match path.split_once("/*") {
        Some((list, rest)) => {
            let entries = spec.pointer(list).and_then(Value::as_array).unwrap();
            assert!(entries.iter().any(|entry| entry.pointer(rest).is_some()), "no {path} in {spec}");
            entries.iter().map(|entry| entry.pointer(rest).cloned().unwrap_or_default()).collect()
        }
        None => spec.pointer(path).unwrap_or_else(|| panic!("no {path} in {spec}")).clone(),
    }
}
