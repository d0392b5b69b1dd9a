//! Ministral 3, the text model: Mistral with YaRN, and with queries that grow with their position.
//!
//! Defaults are those of transformers' `Ministral3Config`: no window, heads of 128 columns, and the rotary embedding of the published models if the
//! config describes none.
//! Not supported: `attention_dropout`, which is ignored.

use super::keys::rope::rope_with_query_scale;
use super::keys::{Base, Defaults, activation, gated_mlp, given_window};
use super::mistral::refuse_other_layer_types;
use crate::error::ArchError;
use crate::json::JsonObject;
use crate::spec::{LayerNorms, ModelSpec};

pub(super) fn spec(json: &JsonObject) -> Result<ModelSpec, ArchError> {
    let head_dim = (!json.is_null("head_dim")).then_some(128);
    let defaults = Defaults { head_dim, kv_heads: Some(8), max_position_embeddings: 262_144, rms_norm_eps: 1e-5 };
    let mut base = Base::read(json, defaults)?;
    base.attention.window = given_window(json)?;
    refuse_other_layer_types(json, base.count, base.attention.window)?;
    let layers = base.equal_layers(gated_mlp(json, activation(json)?)?, LayerNorms::Pre);
    base.model(layers, vec![rope_with_query_scale(json, &base)?])
}
