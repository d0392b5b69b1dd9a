//! gpt-oss: attention with sinks and biases, a window on every other layer, and a mixture of experts with biases in all layers.
//!
//! Defaults are those of transformers' `GptOssConfig`. A router's weights are the softmax over the chosen experts. The experts of a layer are one
//! tensor on disk, in bfloat16 or as published in MXFP4; the model has the same modules for both.
//! Not supported: `attention_dropout`, which is ignored.

use super::keys::rope::rope_with_theta;
use super::keys::{Base, Defaults, activation, experts, positive_or, size_or, windows_by_pattern};
use crate::error::ArchError;
use crate::json::JsonObject;
use crate::quantization::{QUANTIZATION_CONFIG, Quantization};
use crate::rope::{Rope, RopeScaling};
use crate::router::RouterSpec;
use crate::spec::{Activation, ExpertNames, LayerNorms, MlpSpec, ModelSpec, SwigluConstants};

/// The base where a config names none.
const THETA: f64 = 150_000.0;

pub(super) fn spec(json: &JsonObject) -> Result<ModelSpec, ArchError> {
    let defaults =
        Defaults { head_dim: Some(64), kv_heads: Some(8), max_position_embeddings: 131_072, rms_norm_eps: 1e-5 };
    let mut base = Base::read(json, defaults)?.with_bias(true)?;
    base.attention.sinks = true;
    let windows = windows_by_pattern(json, base.count, 2, 128)?;
    let layers = base.layers(&mixture(json, base.count)?, LayerNorms::Pre, windows);
    base.model(layers, vec![rope(json, &base)?])
}

fn mixture(json: &JsonObject, layers: usize) -> Result<MlpSpec, ArchError> {
    let (count, top_k) = experts(json, ["num_local_experts", "num_experts"], [128, 4], layers)?;
    let quantization = Quantization::parse(json)?;
    if let Some(other) = quantization.as_ref().filter(|method| !matches!(method, Quantization::Mxfp4)) {
        let advice = "Experts of a gpt-oss are read in mxfp4, as published, or unquantized";
        return Err(json.unsupported(QUANTIZATION_CONFIG, format!("{other:?}"), advice));
    }
    Ok(MlpSpec::Experts {
        count,
        top_k,
        intermediate_size: size_or(json, "intermediate_size", 2880)?,
        activation: Activation::ClampedSwiglu(swiglu(json)?),
        router: RouterSpec { bias: true, ..RouterSpec::softmax(true) },
        shared: None,
        names: ExpertNames::GptOss,
        fused: false,
        bias: true,
        mxfp4: quantization.is_some(),
    })
}

/// Reads the constants of the activation; refuses another function.
fn swiglu(json: &JsonObject) -> Result<SwigluConstants, ArchError> {
    if activation(json)? != Activation::Silu {
        return Err(json.unsupported("hidden_act", "another function", "The gates of a gpt-oss are \"silu\""));
    }
    let constant = |key: &str, default: f32| match positive_or(json, key, f64::from(default))? as f32 {
        value if value.is_finite() && value > 0.0 => Ok(value),
        value => Err(json.bad(key, value, "it must be a positive number that float32 holds")),
    };
    let published = SwigluConstants::PUBLISHED;
    let alpha = constant("swiglu_alpha", published.alpha())?;
    Ok(SwigluConstants::new(alpha, constant("swiglu_limit", published.limit())?))
}

/// Reads the rotary embedding; without any key that of the published models.
fn rope(json: &JsonObject, base: &Base<'_>) -> Result<Rope, ArchError> {
    let rope = rope_with_theta(json, base, THETA)?;
    if json.get("rope_scaling").is_some() || json.get("rope_parameters").is_some() {
        return Ok(rope);
    }
    let factor: f64 = 32.0;
    let scaling = RopeScaling::Yarn {
        factor,
        beta_fast: 32.0,
        beta_slow: 1.0,
        original_max_position_embeddings: 4096,
        attention_factor: 0.1 * factor.ln() + 1.0,
        truncate: false,
    };
    Ok(Rope { scaling, ..rope })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::families::tests::read;
    use crate::spec::{Activation, SwigluConstants};

    #[test]
    fn constants_of_the_activation_are_read_as_numbers() {
        let constants = |changes| read("gpt_oss", changes).spec.layers[0].mlp.activation();
        assert_eq!(constants(json!({})), Activation::ClampedSwiglu(SwigluConstants::PUBLISHED));
        let other = json!({"swiglu_limit": 1.5, "swiglu_alpha": 1});
        assert_eq!(constants(other), Activation::ClampedSwiglu(SwigluConstants::new(1.0, 1.5)));
    }
}
