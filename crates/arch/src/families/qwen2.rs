//! Qwen2 and Qwen2.5: Llama with biases on queries, keys and values, and an optional sliding window on the upper layers.
//!
//! Defaults are those of transformers' `Qwen2Config`.
//! Not supported: `attention_dropout`, which is ignored.

use super::keys::{Base, Defaults, activation, gated_mlp, windows_by_layer};
use crate::error::ArchError;
use crate::json::JsonObject;
use crate::spec::{LayerNorms, ModelSpec};

pub(super) fn spec(json: &JsonObject) -> Result<ModelSpec, ArchError> {
    let defaults = Defaults { head_dim: None, kv_heads: Some(32), max_position_embeddings: 32_768, rms_norm_eps: 1e-6 };
    let mut base = Base::read(json, defaults)?;
    base.attention.qkv_bias = true;
    let mlp = gated_mlp(json, activation(json)?)?;
    let layers = base.layers(&mlp, LayerNorms::Pre, windows_by_layer(json, base.count)?);
    base.model(layers, vec![base.rope()?])
}
