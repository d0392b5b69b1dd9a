//! Mistral 7B and models of the same shape: Llama without biases, with a sliding window over all layers.
//!
//! Defaults are those of transformers' `MistralConfig`: a null `sliding_window` means none, an absent one means 4096 tokens.
//! Not supported: a window on some layers only (Ministral), and `attention_dropout`, which is ignored.

use super::keys::{Base, Defaults, activation, gated_mlp, layer_types, sliding_window};
use crate::error::ArchError;
use crate::json::JsonObject;
use crate::spec::{LayerNorms, ModelSpec};

pub(super) fn spec(json: &JsonObject) -> Result<ModelSpec, ArchError> {
    let defaults = Defaults { head_dim: None, kv_heads: Some(8), max_position_embeddings: 131_072, rms_norm_eps: 1e-6 };
    let mut base = Base::read(json, defaults)?;
    base.attention.window = sliding_window(json, 4096)?;
    refuse_other_layer_types(json, base.count, base.attention.window)?;
    let layers = base.equal_layers(gated_mlp(json, activation(json)?)?, LayerNorms::Pre);
    base.model(layers, vec![base.rope()?])
}

/// Refuses `layer_types` that differ from a window on all layers: transformers ignores the key for Mistral and Ministral 3 and applies the window.
pub(super) fn refuse_other_layer_types(
    json: &JsonObject,
    layers: usize,
    window: Option<usize>,
) -> Result<(), ArchError> {
    let types = layer_types(json, layers)?.unwrap_or_default();
    if types.iter().any(|&sliding| sliding != window.is_some()) {
        let advice =
            "All layers of a Mistral have the window of `sliding_window`; choose a model without `layer_types`";
        return Err(json.unsupported("layer_types", "different from `sliding_window` for some layers", advice));
    }
    Ok(())
}
