//! Gemma 2: RMSNorms of inputs and outputs that multiply by `1 + weight`, a gated GELU MLP, soft caps on attention scores and logits, a scaled
//! embedding, and a sliding window on every other layer.
//!
//! Defaults are those of transformers' `Gemma2Config`. The scale of attention scores is `1 / sqrt(query_pre_attn_scalar)`.
//! Not supported: bidirectional attention, and `attention_dropout`, which is ignored.

use super::keys::rope::rope;
use super::keys::{
    activation_or, bool_or, gated_mlp, head_dim_or, kv_heads, layer_count, model, positive_or, size, size_or, soft_cap,
    windows_by_pattern,
};
use crate::error::ArchError;
use crate::json::JsonObject;
use crate::mixer::{AttentionSpec, Mixer};
use crate::spec::{Activation, LayerNorms, LayerSpec, ModelSpec};

pub(super) fn spec(json: &JsonObject) -> Result<ModelSpec, ArchError> {
    let hidden_size = size(json, "hidden_size")?;
    let heads = size(json, "num_attention_heads")?;
    let head_dim = head_dim_or(json, 256)?;
    let max_position_embeddings = size_or(json, "max_position_embeddings", 8192)?;
    let windows = windows_by_pattern(json, layer_count(json)?, 2)?;
    // One key for all four projections.
    let attention_bias = bool_or(json, "attention_bias", false)?;

    let attention = AttentionSpec {
        qkv_bias: attention_bias,
        output_bias: attention_bias,
        scale: 1.0 / positive_or(json, "query_pre_attn_scalar", 256.0)?.sqrt(),
        soft_cap: soft_cap(json, "attn_logit_softcapping", Some(50.0))?,
        ..AttentionSpec::new(heads, kv_heads(json, heads, 4)?, head_dim)
    };
    let mlp = gated_mlp(json, activation_or(json, "hidden_activation", Activation::GeluTanh)?)?;
    let layer = |window| {
        let attention = AttentionSpec { window, ..attention.clone() };
        LayerSpec { mixer: Mixer::Attention(attention), mlp: mlp.clone(), norms: LayerNorms::PreAndPost }
    };
    let layers = windows.into_iter().map(layer).collect();
    let ropes = vec![rope(json, head_dim, max_position_embeddings)?];
    Ok(ModelSpec {
        norm_offset: 1.0,
        embedding_scale: Some((hidden_size as f64).sqrt()),
        logit_soft_cap: soft_cap(json, "final_logit_softcapping", Some(30.0))?,
        tie_word_embeddings: bool_or(json, "tie_word_embeddings", true)?,
        ..model(json, layers, ropes, max_position_embeddings, 1e-6)?
    })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::config::ModelConfig;
    use crate::config::tests::{family_json, layout_5_of, parse, refusal_of};
    use crate::error::ArchError;
    use crate::spec::Activation;

    fn gemma2(changes: &[(&str, Value)]) -> Result<ModelConfig, ArchError> {
        parse(&family_json("Gemma2ForCausalLM", "gemma2", changes))
    }

    #[test]
    fn absent_keys_default_as_transformers_does() {
        let absent = ["tie_word_embeddings", "max_position_embeddings", "rms_norm_eps"];
        let spec = gemma2(&absent.map(|key| (key, Value::Null))).unwrap().spec;
        let attention = spec.attentions().next().unwrap();
        assert_eq!((attention.head_dim, attention.scale, attention.soft_cap), (256, 1.0 / 16.0, Some(50.0)));
        assert_eq!(
            (spec.norm_offset, spec.embedding_scale, spec.logit_soft_cap),
            (1.0, Some(8_f64.sqrt()), Some(30.0))
        );
        assert_eq!((spec.tie_word_embeddings, spec.max_position_embeddings, spec.rms_norm_eps), (true, 8192, 1e-6));
        assert_eq!(spec.layers[0].mlp.activation(), Activation::GeluTanh);
        let windows: Vec<_> = spec.attentions().map(|attention| attention.window).collect();
        assert_eq!(windows, [Some(4096), None]);
    }

    #[test]
    fn a_null_cap_is_none_and_the_scale_has_a_key_of_its_own() {
        let mut map: serde_json::Map<String, Value> =
            serde_json::from_str(&family_json("Gemma2ForCausalLM", "gemma2", &[])).unwrap();
        map.insert("attn_logit_softcapping".to_owned(), Value::Null);
        map.insert("final_logit_softcapping".to_owned(), json!(7.5));
        map.insert("query_pre_attn_scalar".to_owned(), json!(144));
        let spec = parse(&Value::from(map).to_string()).unwrap().spec;
        let attention = spec.attentions().nth(1).unwrap();
        assert_eq!((attention.soft_cap, spec.logit_soft_cap, attention.scale), (None, Some(7.5), 1.0 / 12.0));
        assert!(refusal_of(gemma2(&[("attn_logit_softcapping", json!(0))])).contains("greater than zero"));
    }

    #[test]
    fn both_layouts_give_one_spec() {
        let types = ("layer_types", json!(["sliding_attention", "full_attention"]));
        let new = layout_5_of("Gemma2ForCausalLM", "gemma2", &[types]).unwrap();
        assert_eq!(new.spec, gemma2(&[]).unwrap().spec);
    }

    #[test]
    fn what_has_no_arithmetic_here_is_refused_by_key() {
        let message = refusal_of(gemma2(&[("use_bidirectional_attention", json!(true))]));
        assert!(message.contains("`use_bidirectional_attention`"), "{message}");
        gemma2(&[("use_bidirectional_attention", json!(false))]).unwrap();
        let message = refusal_of(gemma2(&[("hidden_activation", json!("gelu"))]));
        assert!(message.contains("`hidden_activation` is \"gelu\""), "{message}");
    }
}
