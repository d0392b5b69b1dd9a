//! OLMo Hybrid: Gated DeltaNet in most layers, whose states may change their sign and whose norms are before attention and MLP, and between them layers
//! of OLMo 3 without windows, whose norms are after both.
//!
//! Defaults are those of transformers' `OlmoHybridConfig`. Without a `rope_theta` no layer rotates, as in the published model.
//! Not supported: `attention_dropout`, which is ignored, as are the ranges that new parameters of a delta rule are drawn from.

use super::keys::{Base, Defaults, activation, bool_or, gated_mlp};
use super::qwen3_5::{attention_layers, delta_net};
use crate::error::ArchError;
use crate::json::JsonObject;
use crate::mixer::{DeltaNetSpec, DeltaProjections, Mixer, QkNorm};
use crate::naming::Naming;
use crate::spec::{LayerNorms, LayerSpec, ModelSpec};

/// Epsilon of the norm after a delta rule, whatever the config says.
const GATED_NORM_EPSILON: f64 = 1e-5;

pub(super) fn spec(json: &JsonObject) -> Result<ModelSpec, ArchError> {
    let defaults = Defaults { head_dim: None, kv_heads: None, max_position_embeddings: 65_536, rms_norm_eps: 1e-6 };
    let mut base = Base::read(json, defaults)?.with_bias(false)?;
    base.attention.qk_norm = QkNorm::WholeProjection;
    let nested = json.object("rope_parameters")?;
    let of = |object: &JsonObject| object.f64("rope_theta");
    let rotates = nested.as_ref().map(of).transpose()?.flatten().or(of(json)?).is_some();
    base.attention.rope = rotates.then_some(0);
    let (delta, mlp) = (delta_rule(json, &base)?, gated_mlp(json, activation(json)?)?);
    let layer = |is_attention| {
        if is_attention {
            return base.layer(mlp.clone(), LayerNorms::Post, None);
        }
        LayerSpec { mixer: Mixer::DeltaNet(delta.clone()), ..base.layer(mlp.clone(), LayerNorms::Pre, None) }
    };
    let mut with_attention = attention_layers(json, base.count)?;
    if !with_attention.contains(&true) {
        with_attention[base.count - 1] = true;
    }
    let layers = with_attention.into_iter().map(layer).collect();
    let ropes = if rotates { vec![base.rope()?] } else { Vec::new() };
    Ok(ModelSpec { naming: Naming::OlmoHybrid, ..base.model(layers, ropes)? })
}

fn delta_rule(json: &JsonObject, base: &Base<'_>) -> Result<DeltaNetSpec, ArchError> {
    let (heads, hidden) = (base.attention.heads, base.attention.heads * base.attention.head_dim);
    let key_heads = json.usize("linear_num_key_heads")?.unwrap_or(heads);
    let key_head_dim = json.usize("linear_key_head_dim")?.unwrap_or(3 * hidden / (4 * key_heads.max(1)));
    let absent = DeltaNetSpec {
        key_heads: heads,
        value_heads: heads,
        key_head_dim,
        value_head_dim: 2 * key_head_dim,
        conv_width: 4,
        projections: DeltaProjections::Separate,
        doubles_beta: bool_or(json, "linear_allow_neg_eigval", true)?,
        norm_epsilon: Some(GATED_NORM_EPSILON),
    };
    delta_net(json, absent)
}
