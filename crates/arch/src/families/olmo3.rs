//! OLMo 3: OLMo 2 with a sliding window on three of four layers, and with a separate rotary embedding for those, which is not scaled.
//!
//! Defaults are those of transformers' `Olmo3Config`. transformers 4 writes one `rope_theta`, and `rope_scaling` for the layers without a window.
//! Not supported: another `rope_theta` than 500,000 in that layout if some layers have a window, because transformers 5 then rotates those by
//! 500,000 all the same and other programs do not; `attention_dropout`, which is ignored.

use super::keys::rope::{by_layer_type, ropes_by_layer_type};
use super::keys::{Base, Defaults, activation, gated_mlp, windows_by_pattern};
use crate::error::ArchError;
use crate::json::JsonObject;
use crate::mixer::QkNorm;
use crate::spec::{LayerNorms, ModelSpec};

/// The base where a config names none.
const THETA: f64 = 500_000.0;

pub(super) fn spec(json: &JsonObject) -> Result<ModelSpec, ArchError> {
    let defaults = Defaults { head_dim: None, kv_heads: None, max_position_embeddings: 2048, rms_norm_eps: 1e-5 };
    let mut base = Base::read(json, defaults)?.with_bias(false)?;
    base.attention.qk_norm = QkNorm::WholeProjection;
    let windows = windows_by_pattern(json, base.count, 4, 4096)?;
    if windows.iter().any(Option::is_some) {
        refuse_other_theta(json)?;
    }
    let layers = base.layers(&gated_mlp(json, activation(json)?)?, LayerNorms::Post, windows);
    Ok(by_layer_type(base.model(layers, ropes_by_layer_type(json, &base, [THETA; 2])?)?))
}

fn refuse_other_theta(json: &JsonObject) -> Result<(), ArchError> {
    let Some(theta) = json.f64("rope_theta")?.filter(|&theta| theta != THETA) else { return Ok(()) };
    let by_type = json.object("rope_parameters")?;
    let sliding = by_type.as_ref().map(|types| types.object("sliding_attention")).transpose()?.flatten();
    if sliding.is_some_and(|sliding| sliding.get("rope_theta").is_some()) {
        return Ok(());
    }
    let advice = "It is not clear whether layers with a window rotate by it too; write `rope_parameters` with \
                  `full_attention` and `sliding_attention`";
    Err(json.unsupported("rope_theta", theta, advice))
}
