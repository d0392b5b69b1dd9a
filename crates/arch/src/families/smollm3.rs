//! SmolLM3: Llama in which some layers do not rotate queries and keys, every fourth one by default.
//!
//! Defaults are those of transformers' `SmolLM3Config`: a sliding window without `layer_types` is on the layers without rotation.
//! Not supported: `attention_dropout`, which is ignored.

use serde_json::Value;

use super::keys::rope::rope_with_theta;
use super::keys::{Base, Defaults, activation, bool_or, given_window, size, size_or, windows_by_types};
use crate::error::ArchError;
use crate::json::JsonObject;
use crate::spec::{LayerNorms, MlpSpec, ModelSpec};

const DEFAULT_THETA: f64 = 2_000_000.0;

pub(super) fn spec(json: &JsonObject) -> Result<ModelSpec, ArchError> {
    let defaults = Defaults { head_dim: None, kv_heads: Some(4), max_position_embeddings: 32_768, rms_norm_eps: 1e-6 };
    let base = Base::read(json, defaults)?.with_bias(false)?;
    let rotated = rotated_layers(json, base.count)?;
    let mlp = MlpSpec::Gated {
        intermediate_size: size(json, "intermediate_size")?,
        activation: activation(json)?,
        fused: false,
        bias: bool_or(json, "mlp_bias", false)?,
    };
    let window = if bool_or(json, "use_sliding_window", false)? { given_window(json)? } else { None };
    let windows = windows_by_types(json, window, rotated.iter().map(|rotated| !rotated).collect())?;
    let layers = base.layers(&mlp, LayerNorms::Pre, windows);
    let mut spec = base.model(layers, vec![rope_with_theta(json, &base, DEFAULT_THETA)?])?;
    spec.attentions_mut().zip(rotated).for_each(|(attention, rotated)| attention.rope = rotated.then_some(0));
    Ok(ModelSpec { tie_word_embeddings: bool_or(json, "tie_word_embeddings", true)?, ..spec })
}

/// Returns whether each layer rotates queries and keys: by `no_rope_layers` (in spite of its name, 1 means that the layer rotates), otherwise all but
/// every `no_rope_layer_interval`-th.
fn rotated_layers(json: &JsonObject, layers: usize) -> Result<Vec<bool>, ArchError> {
    let key = "no_rope_layers";
    let flags = match json.get(key) {
        None => {
            let interval = size_or(json, "no_rope_layer_interval", 4)?;
            return Ok((1..=layers).map(|layer| layer % interval != 0).collect());
        }
        Some(Value::Array(flags)) => flags,
        Some(other) => return Err(json.wrong_type(key, "a list of 0 and 1", other)),
    };
    if flags.len() < layers {
        let got = format!("a list of {} layers", flags.len());
        return Err(json.bad(key, got, format!("num_hidden_layers is {layers}")));
    }
    let is_rotated = |flag: &Value| match flag.as_u64() {
        Some(flag @ 0..=1) => Ok(flag == 1),
        _ => Err(json.wrong_type(key, "a list of 0 and 1", flag)),
    };
    flags[..layers].iter().map(is_rotated).collect()
}
