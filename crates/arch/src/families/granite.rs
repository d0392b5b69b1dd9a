//! Granite 3, the dense models: Llama with a factor each of the embedding, the attention scores, the outputs of attention and MLP, and a divisor
//! of the logits.
//!
//! Other keys and their defaults are Llama's, as in transformers' `GraniteConfig`; the scale of attention scores is `attention_multiplier`, 1 if the key is absent.
//! With the residual multiplier `r`, layers compute `x + r f(norm(x))`. This is `r` times `h + f(norm(h))` with `h = x / r`: the residual stream
//! is `h` here, whose norms add `rms_norm_eps / r²` to the mean square and whose embedding has the factor `embedding_multiplier / r`. So the factor
//! costs no operation and no rounding, and gradients are the same.
//! Not supported: the mixtures and hybrids of Granite, which are architectures of their own, and `attention_dropout`, which is ignored.
//! Trade-off: values of the residual stream are larger than in transformers, about 4.5 times in published models, which matters to f16 alone.

use super::keys::positive_or;
use super::llama;
use crate::error::ArchError;
use crate::json::JsonObject;
use crate::spec::ModelSpec;

pub(super) fn spec(json: &JsonObject) -> Result<ModelSpec, ArchError> {
    let mut model = llama::spec(json)?;
    let scale = positive_or(json, "attention_multiplier", 1.0)?;
    model.attentions_mut().for_each(|attention| attention.scale = scale);
    let residual_multiplier = positive_or(json, "residual_multiplier", 1.0)?;
    let rms_norm_eps = model.rms_norm_eps / (residual_multiplier * residual_multiplier);
    if !rms_norm_eps.is_finite() {
        return Err(json.bad("residual_multiplier", residual_multiplier, "it is too close to zero"));
    }
    Ok(ModelSpec {
        rms_norm_eps,
        embedding_scale: Some(positive_or(json, "embedding_multiplier", 1.0)? / residual_multiplier),
        rounds_embedding_scale: false,
        logits_scaling: positive_or(json, "logits_scaling", 1.0)?,
        ..model
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::families::tests::{model, refused};

    #[test]
    fn absent_multipliers_are_one_as_in_transformers() {
        let spec = model("granite", &[]);
        assert_eq!((spec.attentions().next().unwrap().scale, spec.logits_scaling), (1.0, 1.0));
        assert_eq!((spec.embedding_scale, spec.rounds_embedding_scale), (Some(1.0), false));
        assert_eq!(spec.rms_norm_eps, 1e-5);
    }

    #[test]
    fn the_residual_stream_is_divided_by_the_residual_multiplier() {
        let spec = model(
            "granite",
            &[
                ("residual_multiplier", json!(0.25)),
                ("embedding_multiplier", json!(12.0)),
                ("attention_multiplier", json!(0.015625)),
                ("logits_scaling", json!(8)),
            ],
        );
        assert_eq!((spec.embedding_scale, spec.rms_norm_eps), (Some(48.0), 16e-5));
        assert_eq!((spec.attentions().nth(1).unwrap().scale, spec.logits_scaling), (1.0 / 64.0, 8.0));
    }

    #[test]
    fn a_multiplier_of_zero_is_refused_by_key() {
        for key in ["residual_multiplier", "embedding_multiplier", "attention_multiplier", "logits_scaling"] {
            let message = refused("granite", &[(key, json!(0))]);
            assert!(message.contains(key) && message.contains("greater than zero"), "{message}");
        }
        assert!(refused("granite", &[("residual_multiplier", json!(1e-200))]).contains("too close to zero"));
    }
}
