//! GLM-4-0414, the dense models: RMSNorms of inputs and outputs, one fused module for gate and up, and rotation of neighboring columns in a half of
//! each head.
//!
//! Defaults are those of transformers' `Glm4Config`. `attention_bias` is about queries, keys and values; the output projection has no bias.
//! Not supported: the mixtures from GLM-4.5 on, and `attention_dropout`, which is ignored.

use super::keys::rope::partial_rope;
use super::keys::{Base, Defaults, activation, bool_or, size};
use crate::error::ArchError;
use crate::json::JsonObject;
use crate::rope::Rope;
use crate::spec::{LayerNorms, MlpSpec, ModelSpec};

pub(super) fn spec(json: &JsonObject) -> Result<ModelSpec, ArchError> {
    let defaults =
        Defaults { head_dim: Some(128), kv_heads: Some(2), max_position_embeddings: 131_072, rms_norm_eps: 1.5625e-7 };
    let mut base = Base::read(json, defaults)?;
    base.attention.qkv_bias = bool_or(json, "attention_bias", true)?;
    let mlp = MlpSpec::Gated {
        intermediate_size: size(json, "intermediate_size")?,
        activation: activation(json)?,
        fused: true,
        bias: false,
    };
    let rope = partial_rope(json, &base, 0.5)?;
    base.model(base.equal_layers(mlp, LayerNorms::PreAndPostGlm), vec![Rope { interleaved: true, ..rope }])
}
