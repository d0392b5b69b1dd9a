//! The first Gemma: Llama with RMSNorms that multiply by `1 + weight`, a gated GELU MLP, a scaled embedding, and heads of 256 columns.
//!
//! Defaults are those of transformers' `GemmaConfig`. In published files `hidden_act` is "gelu" or "gelu_pytorch_tanh", and either means the
//! latter, as in transformers. `hidden_activation`, which older versions read, may repeat it.
//! Not supported: bidirectional attention, and `attention_dropout`, which is ignored.

use super::keys::{Base, Defaults, activation_or, bool_or, gated_mlp};
use crate::error::ArchError;
use crate::json::JsonObject;
use crate::spec::{Activation, LayerNorms, ModelSpec};

pub(super) fn spec(json: &JsonObject) -> Result<ModelSpec, ArchError> {
    let defaults =
        Defaults { head_dim: Some(256), kv_heads: Some(16), max_position_embeddings: 8192, rms_norm_eps: 1e-6 };
    let base = Base::read(json, defaults)?.with_bias(false)?;
    let layers = base.equal_layers(gated_mlp(json, activation(json)?)?, LayerNorms::Pre);
    let spec = base.model(layers, vec![base.rope()?])?;
    Ok(ModelSpec {
        norm_offset: 1.0,
        embedding_scale: Some((spec.hidden_size as f64).sqrt()),
        tie_word_embeddings: bool_or(json, "tie_word_embeddings", true)?,
        ..spec
    })
}

fn activation(json: &JsonObject) -> Result<Activation, ArchError> {
    let activation = match json.str("hidden_act")? {
        Some("gelu") => Activation::GeluTanh,
        _ => activation_or(json, "hidden_act", Activation::GeluTanh)?,
    };
    let other = activation_or(json, "hidden_activation", activation)?;
    if other != activation {
        let rule = format!("`hidden_act` means \"{}\"; correct one of the two keys", activation.name());
        return Err(json.bad("hidden_activation", format!("\"{}\"", other.name()), rule));
    }
    Ok(activation)
}
