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
        mxfp4: is_mxfp4(json)?,
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

/// Returns whether the experts are stored in MXFP4.
fn is_mxfp4(json: &JsonObject) -> Result<bool, ArchError> {
    match Quantization::parse(json)? {
        None => Ok(false),
        Some(Quantization::Mxfp4) => Ok(true),
        Some(other) => {
            let advice = "Experts of a gpt-oss are read in mxfp4, as published, or unquantized";
            Err(json.unsupported(QUANTIZATION_CONFIG, format!("{other:?}"), advice))
        }
    }
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
    use serde_json::{Value, json};

    use crate::config::ModelConfig;
    use crate::config::tests::{family_json, parse, refusal_of};
    use crate::error::ArchError;
    use crate::families::tests::read;
    use crate::quantization::QUANTIZATION_CONFIG;
    use crate::rope::RopeScaling;
    use crate::spec::{Activation, MlpSpec, SwigluConstants};

    fn gpt_oss(changes: &[(&str, Value)]) -> Result<ModelConfig, ArchError> {
        let few = [("num_local_experts", json!(2)), ("num_experts_per_tok", json!(1))];
        read("gpt_oss", &[&few[..], changes].concat())
    }

    /// The keys of openai/gpt-oss-20b that decide its sizes and arithmetic.
    fn published() -> ModelConfig {
        let rope = json!({
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
            "rope_type": "yarn", "truncate": false
        });
        gpt_oss(&[
            ("attention_bias", json!(true)),
            ("head_dim", json!(64)),
            ("hidden_size", json!(2880)),
            ("intermediate_size", json!(2880)),
            ("max_position_embeddings", json!(131_072)),
            ("num_attention_heads", json!(64)),
            ("num_hidden_layers", json!(24)),
            ("num_key_value_heads", json!(8)),
            ("num_local_experts", json!(32)),
            ("num_experts_per_tok", json!(4)),
            (QUANTIZATION_CONFIG, json!({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})),
            ("rope_scaling", rope),
            ("rope_theta", json!(150_000)),
            ("sliding_window", json!(128)),
            ("swiglu_limit", json!(7.0)),
            ("vocab_size", json!(201_088)),
        ])
        .unwrap()
    }

    #[test]
    fn the_published_20b_has_its_parameters_windows_and_rope() {
        let spec = published().spec;
        assert_eq!(spec.parameters(), 20_914_757_184);
        let windows: Vec<_> = spec.attentions().take(3).map(|attention| attention.window).collect();
        assert_eq!(windows, [Some(128), None, Some(128)]);
        assert!(spec.layers.iter().all(|layer| matches!(layer.mlp, MlpSpec::Experts { mxfp4: true, .. })));
        let RopeScaling::Yarn { attention_factor, truncate, .. } = spec.ropes[0].scaling else { panic!("yarn") };
        assert!(!truncate && (attention_factor - 1.346_573_6).abs() < 1e-6, "{attention_factor}");
        let absent = gpt_oss(&[("rope_theta", Value::Null), ("head_dim", json!(64))]).unwrap().spec;
        assert_eq!(absent.ropes, spec.ropes);
    }

    #[test]
    fn single_experts_are_named_with_biases_after_routers() {
        let names: Vec<_> = gpt_oss(&[]).unwrap().spec.tensors().into_iter().map(|tensor| tensor.name).collect();
        let of_layer: Vec<_> = names.iter().filter_map(|name| name.strip_prefix("model.layers.1.")).collect();
        let expected = [
            "self_attn.v_proj.bias",
            "self_attn.sinks",
            "self_attn.o_proj.weight",
            "self_attn.o_proj.bias",
            "post_attention_layernorm.weight",
            "mlp.router.weight",
            "mlp.router.bias",
            "mlp.experts.0.gate_proj.weight",
            "mlp.experts.1.gate_proj.weight",
            "mlp.experts.0.gate_proj.bias",
        ];
        assert_eq!(of_layer[6..16], expected);
    }

    #[test]
    fn constants_of_the_activation_are_read_as_numbers() {
        let constants = |changes: &[(&str, Value)]| gpt_oss(changes).unwrap().spec.layers[0].mlp.activation();
        assert_eq!(constants(&[]), Activation::ClampedSwiglu(SwigluConstants::PUBLISHED));
        let other = [("swiglu_limit", json!(1.5)), ("swiglu_alpha", json!(1))];
        assert_eq!(constants(&other), Activation::ClampedSwiglu(SwigluConstants::new(1.0, 1.5)));
    }

    #[test]
    fn another_activation_or_quantization_is_refused() {
        for (key, value) in [
            ("swiglu_limit", json!(0.0)),
            ("swiglu_alpha", json!(1e300)),
            ("hidden_act", json!("gelu_pytorch_tanh")),
            ("sliding_window", Value::Null),
            (QUANTIZATION_CONFIG, json!({"quant_method": "fp8"})),
        ] {
            let text =
                family_json("GptOssForCausalLM", "gpt_oss", &[]).replacen('{', &format!("{{\"{key}\": {value},"), 1);
            let text = if key == "hidden_act" { text.replace("\"hidden_act\": \"silu\",", "") } else { text };
            let message = refusal_of(parse(&text));
            assert!(message.contains(&format!("`{key}`")), "{message}");
        }
    }
}
