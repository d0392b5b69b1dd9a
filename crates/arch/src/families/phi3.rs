//! Phi-3, Phi-3.5 and Phi-4: Llama with one fused module for the query, key and value projections and another for gate and up, with rotation of a
//! part of each head (Phi-4-mini) and longrope.
//!
//! Defaults are those of transformers' `Phi3Config`. LoRA targets carry the names of the fused modules, as PEFT's do.
//! Not supported: Phi-3-small, Phi-3.5-MoE and the multimodal models, which are architectures of their own; `resid_pdrop`, `embd_pdrop`
//! and `attention_dropout`, which are ignored.

use super::keys::rope::partial_rope;
use super::keys::{Base, Defaults, activation, given_window, size};
use crate::error::ArchError;
use crate::json::JsonObject;
use crate::rope::{Rope, RopeScaling};
use crate::spec::{LayerNorms, MlpSpec, ModelSpec};

pub(super) fn spec(json: &JsonObject) -> Result<ModelSpec, ArchError> {
    let defaults = Defaults { head_dim: None, kv_heads: None, max_position_embeddings: 4096, rms_norm_eps: 1e-5 };
    let mut base = Base::read(json, defaults)?;
    (base.attention.fused_qkv, base.attention.window) = (true, given_window(json)?);
    let mlp = MlpSpec::Gated {
        intermediate_size: size(json, "intermediate_size")?,
        activation: activation(json)?,
        fused: true,
        bias: false,
    };
    base.model(base.equal_layers(mlp, LayerNorms::Pre), vec![rope(json, &base)?])
}

/// Reads plain rotation or longrope. transformers reads "yarn" in a Phi-3 as longrope, so other names are refused rather than taken literally.
fn rope(json: &JsonObject, base: &Base<'_>) -> Result<Rope, ArchError> {
    let rope = partial_rope(json, base, 1.0)?;
    match rope.scaling {
        RopeScaling::Default | RopeScaling::LongRope { .. } => Ok(rope),
        RopeScaling::Proportional { .. }
        | RopeScaling::Linear { .. }
        | RopeScaling::Llama3 { .. }
        | RopeScaling::Yarn { .. } => {
            let advice = "A Phi-3 has none or \"longrope\"; correct the type";
            Err(json.unsupported("rope_scaling", "of another type than \"longrope\"", advice))
        }
    }
}
