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

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::config::tests::{family_json, parse};
    use crate::families::tests::{model, read, refused};
    use crate::spec::Activation;

    #[test]
    fn absent_keys_default_as_transformers_does() {
        let absent = ["tie_word_embeddings", "max_position_embeddings", "rms_norm_eps"];
        let spec = model("gemma2", &absent.map(|key| (key, Value::Null)));
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
        assert!(refused("gemma2", &[("attn_logit_softcapping", json!(0))]).contains("greater than zero"));
    }

    #[test]
    fn what_has_no_arithmetic_here_is_refused_by_key() {
        let message = refused("gemma2", &[("use_bidirectional_attention", json!(true))]);
        assert!(message.contains("`use_bidirectional_attention`"), "{message}");
        read("gemma2", &[("use_bidirectional_attention", json!(false))]).unwrap();
        let message = refused("gemma2", &[("hidden_activation", json!("gelu"))]);
        assert!(message.contains("`hidden_activation` is \"gelu\""), "{message}");
    }
}
