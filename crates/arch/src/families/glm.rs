//! GLM-4-9B of 2024, and other models of its architecture: GLM-4-0414 without norms of the outputs.
//!
//! Defaults are those of transformers' `GlmConfig`, which equal those of `Glm4Config`.
//! Not supported: folders of ChatGLM's own code (`model_type` "chatglm"), and `attention_dropout`, which is ignored.

use super::glm4;
use crate::error::ArchError;
use crate::json::JsonObject;
use crate::spec::{LayerNorms, ModelSpec};

pub(super) fn spec(json: &JsonObject) -> Result<ModelSpec, ArchError> {
    let mut spec = glm4::spec(json)?;
    spec.layers.iter_mut().for_each(|layer| layer.norms = LayerNorms::Pre);
    Ok(spec)
}
