//! Layers that read the keys and values of earlier ones: which modules they do not have, and what folders, adapters and LoRA targets make of that.
//!
//! Trade-off: only attention's own names are known here, which no such family changes.

use crate::error::ArchError;
use crate::lora::PREFIX;
use crate::mixer::KeysAndValues;
use crate::spec::ModelSpec;
use crate::text_names::layer_of;

/// The modules of keys and values in a layer.
const LINEAR: [&str; 2] = ["self_attn.k_proj", "self_attn.v_proj"];
const NORMS: [&str; 2] = ["self_attn.k_norm", "self_attn.v_norm"];

impl ModelSpec {
    /// Returns the layer that has the keys and values which another reads, if they are not its own.
    fn source_of(&self, layer: usize) -> Option<usize> {
        match self.layers.get(layer)?.mixer.attention()?.keys_and_values {
            KeysAndValues::OfLayer(source) => Some(source),
            KeysAndValues::Own | KeysAndValues::Published(_) => None,
        }
    }

    /// Returns whether a tensor or module, by its name in the text model alone or in an adapter of it, is of keys and values in a layer that reads
    /// another's: a folder may have it, and nothing reads it.
    pub fn is_ignored(&self, name: &str) -> bool {
        let name = name.strip_prefix(PREFIX).unwrap_or(name);
        let is_of = |layer: usize, path: &str| {
            name.strip_prefix(&self.path(layer).name(path)).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        };
        let layer = layer_of(name).filter(|layer| self.source_of(*layer).is_some());
        layer.is_some_and(|layer| LINEAR.into_iter().chain(NORMS).any(|path| is_of(layer, path)))
    }

    /// Lists the linear modules of keys and values that layers do not have because they read another's.
    pub(crate) fn missing_modules(&self) -> impl Iterator<Item = String> + '_ {
        let sharers = (0..self.layers.len()).filter(|layer| self.source_of(*layer).is_some());
        sharers.map(|layer| self.path(layer)).flat_map(|at| LINEAR.into_iter().map(move |path| at.name(path)))
    }

    /// Returns the error for a LoRA target that hits such modules, if it does; it must hit no others.
    pub(crate) fn only_missing(&self, name: &str, hits: impl Fn(&str) -> bool) -> Option<ArchError> {
        let module = self.missing_modules().find(|path| hits(path))?;
        let source = layer_of(&module).and_then(|layer| self.source_of(layer))?;
        Some(ArchError::SharedTarget { name: name.to_owned(), module, source_layer: source })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::families::tests::read;
    use crate::lora::LoraConfig;
    use crate::module_names::TargetModules;

    /// Describes layers 0 (window), 1 (full), and 2 (window), 3 (full) that read their keys and values.
    fn sharing() -> ModelSpec {
        let types = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"];
        let keys = json!({"num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": types});
        read("gemma4_text", keys).spec
    }

    #[test]
    fn a_target_that_hits_only_layers_without_keys_and_values_is_refused_and_others_skip_them() {
        let spec = sharing();
        let resolve = |targets: serde_json::Value, layers: Option<Vec<usize>>| {
            let target_modules = serde_json::from_value::<TargetModules>(targets).unwrap();
            LoraConfig { target_modules, layers_to_transform: layers, ..LoraConfig::default() }.resolve(&spec)
        };
        let by_name = resolve(json!(["k_proj", "q_proj"]), None).unwrap();
        assert_eq!(spec.tensors_of(&by_name).len(), 2 * (4 + 2));
        let skipped = by_name.skipped_modules(&spec);
        assert_eq!(skipped, ["model.layers.2.self_attn.k_proj", "model.layers.3.self_attn.k_proj"]);
        assert!(LoraConfig::default().resolve(&spec).unwrap().skipped_modules(&spec).is_empty());
        assert!(resolve(json!(r".*layers\.[12]\..*k_proj"), None).is_ok());
        for (targets, layers) in [
            (json!(["q_proj", "model.layers.3.self_attn.k_proj"]), None),
            (json!(r".*layers\.3\..*v_proj"), None),
            (json!(["q_proj", "v_proj"]), Some(vec![3])),
        ] {
            let message = resolve(targets, layers).unwrap_err().to_string();
            assert!(message.contains("reads the keys and values of layer 1"), "{message}");
        }
    }

    #[test]
    fn tensors_of_keys_and_values_that_no_layer_reads_are_ignored() {
        let spec = sharing();
        let names = ["k_proj.weight", "v_proj.weight.absmax", "k_norm.weight", "v_proj"];
        assert!(spec.is_ignored("base_model.model.model.layers.3.self_attn.k_proj.lora_A.weight"));
        for name in names.map(|name| format!("self_attn.{name}")) {
            assert!(spec.is_ignored(&format!("model.layers.2.{name}")), "{name}");
            assert!(!spec.is_ignored(&format!("model.layers.1.{name}")), "{name}");
        }
        assert!(spec.tensors().iter().all(|tensor| !spec.is_ignored(&tensor.name)));
        assert!(!spec.is_ignored("model.layers.9.self_attn.k_proj.weight"));
    }
}
