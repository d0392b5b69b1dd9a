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
