//! Gemma 2: RMSNorms of inputs and outputs that multiply by `1 + weight`, a gated GELU MLP, soft caps on attention scores and logits, a scaled
//! embedding, and a sliding window on every other layer.
//!
//! Defaults are those of transformers' `Gemma2Config`. The scale of attention scores is `1 / sqrt(query_pre_attn_scalar)`.
//! Not supported: bidirectional attention, and `attention_dropout`, which is ignored.

use super::keys::{Base, Defaults, activation_or, bool_or, gated_mlp, positive_or, soft_cap, windows_by_pattern};
use crate::error::ArchError;
use crate::json::JsonObject;
use crate::spec::{Activation, LayerNorms, ModelSpec};

pub(super) fn spec(json: &JsonObject) -> Result<ModelSpec, ArchError> {
    let defaults =
        Defaults { head_dim: Some(256), kv_heads: Some(4), max_position_embeddings: 8192, rms_norm_eps: 1e-6 };
    let mut base = Base::read(json, defaults)?.with_bias(false)?;
    base.attention.scale = 1.0 / positive_or(json, "query_pre_attn_scalar", 256.0)?.sqrt();
    base.attention.soft_cap = soft_cap(json, "attn_logit_softcapping", Some(50.0))?;
    let mlp = gated_mlp(json, activation_or(json, "hidden_activation", Activation::GeluTanh)?)?;
    let layers = base.layers(&mlp, LayerNorms::PreAndPost, windows_by_pattern(json, base.count, 2, 4096)?);
    let spec = base.model(layers, vec![base.rope()?])?;
    Ok(ModelSpec {
        norm_offset: 1.0,
        embedding_scale: Some((spec.hidden_size as f64).sqrt()),
        logit_soft_cap: soft_cap(json, "final_logit_softcapping", Some(30.0))?,
        tie_word_embeddings: bool_or(json, "tie_word_embeddings", true)?,
        ..spec
    })
}
