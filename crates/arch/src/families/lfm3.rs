//! LFM3: LFM2 with norms of outputs, too, a gate for each head of attention, windows in some layers, and a rotary embedding for each type of
//! attention.
//!
//! Defaults are those of transformers' `Lfm3Config`.
//! Not supported: biases of convolutions (`conv_bias`) and of attention, which no published model has; models without norms of outputs or
//! without gates (`use_sandwich_norm`, `use_attention_gate`).

use super::keys::rope::{FULL, SLIDING, ropes_by_layer_type};
use super::keys::{Base, Defaults, bool_or, gated_mlp, kinds_of_layers, positive_or, size_or};
use super::lfm2::conv;
use crate::error::ArchError;
use crate::json::JsonObject;
use crate::mixer::{AttentionSpec, Mixer, OutputGate, QkNorm};
use crate::naming::Naming;
use crate::rope::{Rope, RopeScaling};
use crate::spec::{Activation, LayerNorms, LayerSpec, ModelSpec};

/// The types of layers.
const KINDS: [&str; 3] = ["conv", "full_attention", "sliding_attention"];

pub(super) fn spec(json: &JsonObject) -> Result<ModelSpec, ArchError> {
    for (key, needed) in [("use_sandwich_norm", true), ("use_attention_gate", true), ("attention_bias", false)] {
        if bool_or(json, key, needed)? != needed {
            let advice = format!("Only {needed} is there, as in the published models");
            return Err(json.unsupported(key, !needed, advice));
        }
    }
    let defaults =
        Defaults { head_dim: Some(128), kv_heads: Some(4), max_position_embeddings: 128_000, rms_norm_eps: 1e-5 };
    let mut base = Base::read(json, defaults)?;
    (base.attention.qk_norm, base.attention.gate) = (QkNorm::PerHead, OutputGate::PerHead);
    let (conv, window) = (conv(json, 7)?, size_or(json, "sliding_window", 256)?);
    let mlp = gated_mlp(json, Activation::Silu)?;
    let kinds = match json.get("layer_types") {
        Some(types) => kinds_of_layers(json, types, base.count, &KINDS)?,
        None => (0..base.count).map(default_kind).collect(),
    };
    let mixer = |kind: usize| match kind {
        0 => Mixer::ShortConv(conv.clone()),
        1 => Mixer::Attention(AttentionSpec { rope: Some(FULL), ..base.attention.clone() }),
        _ => Mixer::Attention(AttentionSpec { rope: Some(SLIDING), window: Some(window), ..base.attention.clone() }),
    };
    let layer =
        |kind| LayerSpec { mixer: mixer(kind), mlp: mlp.clone(), norms: LayerNorms::PreAndPost, has_scalar: false };
    let ropes = match json.get("rope_parameters") {
        Some(_) => ropes_by_layer_type(json, &base, [1e6, 1e4])?,
        None => {
            let head_dim = base.attention.head_dim;
            let full = RopeScaling::Proportional { rotated: head_dim / 4 };
            vec![Rope::new(1e6, full, head_dim), Rope::new(1e4, RopeScaling::Default, head_dim)]
        }
    };
    let spec = base.model(kinds.into_iter().map(layer).collect(), ropes)?;
    Ok(ModelSpec {
        naming: Naming::Lfm3,
        rms_norm_eps: positive_or(json, "norm_eps", 1e-5)?,
        tie_word_embeddings: bool_or(json, "tie_word_embeddings", true)?,
        ..spec
    })
}

/// Returns the type of a layer that no key gives: every fourth has full attention, from the third on, and every fourth a window, from the fifth on.
fn default_kind(layer: usize) -> usize {
    match layer % 4 {
        2 => 1,
        0 if layer > 0 => 2,
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::families::tests::read;

    #[test]
    fn full_attention_rotates_half_of_each_head() {
        let (frequencies, _) = read("lfm3", json!({})).spec.ropes[0].inverse_frequencies(1);
        assert!(frequencies[..32].iter().all(|frequency| *frequency > 0.0));
        assert_eq!(frequencies[32..], [0.0; 32]);
    }
}
