//! OLMo 2: Llama whose layers normalize the outputs of attention and MLP instead of their inputs, with an RMSNorm over all query heads
//! together and one over all key heads together.
//!
//! Defaults are those of transformers' `Olmo2Config`.
//! Not supported: the sliding windows of OLMo 3, which is a family of its own, and `attention_dropout`, which is ignored.

use super::keys::{Base, Defaults, activation, gated_mlp};
use crate::error::ArchError;
use crate::json::JsonObject;
use crate::mixer::QkNorm;
use crate::spec::{LayerNorms, ModelSpec};

pub(super) fn spec(json: &JsonObject) -> Result<ModelSpec, ArchError> {
    let defaults = Defaults { head_dim: None, kv_heads: None, max_position_embeddings: 2048, rms_norm_eps: 1e-5 };
    let mut base = Base::read(json, defaults)?.with_bias(false)?;
    base.attention.qk_norm = QkNorm::WholeProjection;
    let mlp = gated_mlp(json, activation(json)?)?;
    base.model(base.equal_layers(mlp, LayerNorms::Post), vec![base.rope()?])
}
