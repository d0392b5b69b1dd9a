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
