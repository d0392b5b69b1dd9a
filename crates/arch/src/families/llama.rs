//! Llama 2, 3.x and models of the same shape: RMSNorm, rotary embedding, grouped key/value heads, gated SiLU MLP, optional biases.
//!
//! Defaults are those of transformers' `LlamaConfig`.
//! Not supported: `attention_dropout`, and `pretraining_tp`, which changes the order of sums only; both are ignored.

use super::keys::{Base, Defaults, activation, bool_or, size};
use crate::error::ArchError;
use crate::json::JsonObject;
use crate::spec::{LayerNorms, MlpSpec, ModelSpec};

pub(super) fn spec(json: &JsonObject) -> Result<ModelSpec, ArchError> {
    let defaults = Defaults { head_dim: None, kv_heads: None, max_position_embeddings: 2048, rms_norm_eps: 1e-6 };
    let base = Base::read(json, defaults)?.with_bias(false)?;
    let mlp = MlpSpec::Gated {
        intermediate_size: size(json, "intermediate_size")?,
        activation: activation(json)?,
        fused: false,
        bias: bool_or(json, "mlp_bias", false)?,
    };
    base.model(base.equal_layers(mlp, LayerNorms::Pre), vec![base.rope()?])
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::config::tests::{refusal_of, tiny};
    use crate::mixer::{AttentionSpec, KeysAndValues, Mixer, OutputGate, QkNorm};
    use crate::rope::RopeScaling;
    use crate::spec::{LayerSpec, MlpSpec};

    fn has_mlp_bias(layer: &LayerSpec) -> bool {
        matches!(layer.mlp, MlpSpec::Gated { bias: true, .. })
    }

    #[test]
    fn absent_keys_default_as_transformers_does() {
        let absent =
            ["num_key_value_heads", "rms_norm_eps", "rope_theta", "max_position_embeddings", "tie_word_embeddings"];
        let spec = tiny(&absent.map(|key| (key, Value::Null))).unwrap().spec;
        let attention = AttentionSpec {
            keys_and_values: KeysAndValues::Own,
            heads: 4,
            kv_heads: 4,
            head_dim: 2,
            rope: Some(0),
            qk_norm: QkNorm::None,
            value_norm: false,
            gate: OutputGate::None,
            fused_qkv: false,
            qkv_bias: false,
            output_bias: false,
            window: None,
            scale: 1.0 / 2_f64.sqrt(),
            soft_cap: None,
            sinks: false,
        };
        assert!(
            spec.layers.iter().all(|layer| layer.mixer == Mixer::Attention(attention.clone()) && !has_mlp_bias(layer))
        );
        assert_eq!((spec.rms_norm_eps, spec.initializer_range), (1e-6, 0.02));
        assert_eq!((spec.max_position_embeddings, spec.tie_word_embeddings), (2048, false));
        let rope = &spec.ropes[0];
        assert_eq!((rope.theta, &rope.scaling, rope.rotary_dim), (10_000.0, &RopeScaling::Default, 2));
    }

    #[test]
    fn biases_cover_all_projections_of_their_half() {
        let with = |key| tiny(&[(key, json!(true))]).unwrap().spec.layers[0].clone();
        let attention = with("attention_bias");
        assert!(
            attention.mixer.attention().unwrap().qkv_bias
                && attention.mixer.attention().unwrap().output_bias
                && !has_mlp_bias(&attention)
        );
        let mlp = with("mlp_bias");
        assert!(
            has_mlp_bias(&mlp)
                && !mlp.mixer.attention().unwrap().qkv_bias
                && !mlp.mixer.attention().unwrap().output_bias
        );
    }

    #[test]
    fn sizes_that_contradict_each_other_are_refused() {
        let refusal = |key: &str, value: Value| refusal_of(tiny(&[(key, value)]));
        assert!(refusal("num_key_value_heads", json!(3)).contains("must divide num_attention_heads (4)"));
        assert!(refusal("num_attention_heads", json!(3)).contains("must divide hidden_size (8)"));
        assert!(refusal("head_dim", json!(3)).contains("must be even"));
        assert!(refusal("num_hidden_layers", json!(0)).contains("at least 1"));
        assert!(refusal("num_hidden_layers", json!(1_000_000)).contains("at most 10000"));
        assert!(refusal("vocab_size", json!(1_u64 << 40)).contains("at most"));
        assert!(refusal("max_position_embeddings", json!(0)).contains("at least 1"));
        assert!(refusal("rms_norm_eps", json!(-1e-5)).contains("greater than zero"));
        assert!(refusal("rope_theta", json!(0)).contains("greater than zero"));
    }

    #[test]
    fn what_has_no_arithmetic_here_is_refused() {
        let refusal = |key: &str, value: Value| refusal_of(tiny(&[(key, value)]));
        assert!(refusal("hidden_act", json!("gelu")).contains("\"gelu\""));
        assert!(refusal("quantization_config", json!({"quant_method": "gptq"})).contains("gptq"));
    }
}
