//! Qwen1.5-MoE and Qwen2-MoE: a Qwen2 whose MLPs are mixtures of experts, in all layers or in some, with a shared expert behind a sigmoid gate.
//!
//! Defaults are those of transformers' `Qwen2MoeConfig`. Which layers are mixtures is as in Qwen3-MoE.
//! Not supported: `attention_dropout`, which is ignored.

use super::keys::{Base, Defaults, bool_or, layer_types, size_or, sliding_window};
use super::qwen3_moe::{dense, mixture, mixture_layers};
use crate::error::ArchError;
use crate::json::JsonObject;
use crate::router::SharedExpertSpec;
use crate::spec::{LayerNorms, ModelSpec};

pub(super) fn spec(json: &JsonObject) -> Result<ModelSpec, ArchError> {
    let defaults = Defaults { head_dim: None, kv_heads: Some(16), max_position_embeddings: 32_768, rms_norm_eps: 1e-6 };
    let mut base = Base::read(json, defaults)?;
    base.attention.qkv_bias = bool_or(json, "qkv_bias", true)?;
    let layer = |(is_mixture, window)| {
        let mlp = match is_mixture {
            true => {
                let intermediate_size = size_or(json, "shared_expert_intermediate_size", 5632)?;
                let shared = SharedExpertSpec { intermediate_size, gated: true, normed: false };
                mixture(json, base.count, [60, 4, 1408], Some(shared))?
            }
            false => dense(json, 5632)?,
        };
        Ok(base.layer(mlp, LayerNorms::Pre, window))
    };
    let kinds = mixture_layers(json, base.count)?.into_iter().zip(windows(json, base.count)?);
    let layers = kinds.map(layer).collect::<Result<_, ArchError>>()?;
    base.model(layers, vec![base.rope()?])
}

/// Returns the window of each layer: by `layer_types`, or else of every second one from the first, below `max_window_layers`. Without
/// `use_sliding_window` no layer has a window.
fn windows(json: &JsonObject, layers: usize) -> Result<Vec<Option<usize>>, ArchError> {
    let window = if bool_or(json, "use_sliding_window", false)? { sliding_window(json, 4096)? } else { None };
    let below = json.usize("max_window_layers")?.unwrap_or(28);
    let types = match layer_types(json, layers)? {
        Some(types) => types,
        None => (0..layers).map(|layer| layer % 2 == 0 && layer < below).collect(),
    };
    Ok(types.into_iter().map(|slides| window.filter(|_| slides)).collect())
}
