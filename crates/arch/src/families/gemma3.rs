//! Gemma 3, the text model: Gemma 2 without soft caps on attention scores, with RMSNorms of query and key heads, and with separate rotary embeddings
//! for layers with a sliding window and for layers without.
//!
//! Defaults are those of transformers' `Gemma3TextConfig`. `attn_logit_softcapping` is refused, because transformers reads it and does
//! not apply it.
//! Not supported: bidirectional attention, and `attention_dropout`, which is ignored.

use super::keys::rope::{by_layer_type, ropes_by_layer_type};
use super::keys::{
    Base, Defaults, activation_or, bool_or, gated_mlp, positive_or, size_or, soft_cap, windows_by_pattern,
};
use crate::error::ArchError;
use crate::json::JsonObject;
use crate::mixer::QkNorm;
use crate::spec::{Activation, LayerNorms, ModelSpec};

pub(super) fn spec(json: &JsonObject) -> Result<ModelSpec, ArchError> {
    let defaults =
        Defaults { head_dim: Some(256), kv_heads: Some(4), max_position_embeddings: 131_072, rms_norm_eps: 1e-6 };
    let mut base = Base::read(json, defaults)?.with_bias(false)?;
    base.attention.qk_norm = QkNorm::PerHead;
    base.attention.scale = 1.0 / positive_or(json, "query_pre_attn_scalar", 256.0)?.sqrt();
    let mlp = gated_mlp(json, activation_or(json, "hidden_activation", Activation::GeluTanh)?)?;
    let windows = windows_by_pattern(json, base.count, size_or(json, "sliding_window_pattern", 6)?, 4096)?;
    let layers = base.layers(&mlp, LayerNorms::PreAndPost, windows);
    let spec = base.model(layers, ropes_by_layer_type(json, &base, [1e6, 1e4])?)?;
    Ok(ModelSpec {
        norm_offset: 1.0,
        embedding_scale: Some((spec.hidden_size as f64).sqrt()),
        logit_soft_cap: soft_cap(json, "final_logit_softcapping", None)?,
        tie_word_embeddings: bool_or(json, "tie_word_embeddings", true)?,
        ..by_layer_type(spec)
    })
}
