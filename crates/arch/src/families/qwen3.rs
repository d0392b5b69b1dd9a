//! Qwen3, dense: Llama with an RMSNorm on each query and key head, a head width independent of the hidden size, and an optional sliding window.
//!
//! Defaults are those of transformers' `Qwen3Config`: a head of 128 columns whatever the hidden size.
//! Not supported: `attention_dropout`, which is ignored.

use super::keys::{Base, Defaults, activation, gated_mlp, windows_by_layer};
use crate::error::ArchError;
use crate::json::JsonObject;
use crate::mixer::QkNorm;
use crate::spec::{LayerNorms, ModelSpec};

pub(super) fn spec(json: &JsonObject) -> Result<ModelSpec, ArchError> {
    let defaults =
        Defaults { head_dim: Some(128), kv_heads: Some(32), max_position_embeddings: 32_768, rms_norm_eps: 1e-6 };
    let mut base = Base::read(json, defaults)?.with_bias(false)?;
    base.attention.qk_norm = QkNorm::PerHead;
    let mlp = gated_mlp(json, activation(json)?)?;
    let layers = base.layers(&mlp, LayerNorms::Pre, windows_by_layer(json, base.count)?);
    base.model(layers, vec![base.rope()?])
}
