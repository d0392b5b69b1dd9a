//! Mixtral: a Mistral whose MLPs are mixtures of experts.
//!
//! Defaults are those of transformers' `MixtralConfig`: an absent or null `sliding_window` means none. The weights of a token's experts
//! add up to one.
//! Not supported: `router_jitter_noise` in training, and `attention_dropout`, which is ignored.

use super::keys::rope::rope_with_theta;
use super::keys::{Base, Defaults, activation, experts, given_window, size};
use crate::error::ArchError;
use crate::json::JsonObject;
use crate::router::RouterSpec;
use crate::spec::{ExpertNames, LayerNorms, MlpSpec, ModelSpec};

const DEFAULT_THETA: f64 = 1_000_000.0;

pub(super) fn spec(json: &JsonObject) -> Result<ModelSpec, ArchError> {
    let defaults = Defaults { head_dim: None, kv_heads: Some(8), max_position_embeddings: 131_072, rms_norm_eps: 1e-5 };
    let mut base = Base::read(json, defaults)?;
    base.attention.window = given_window(json)?;
    let (count, top_k) = experts(json, ["num_local_experts", "num_experts"], [8, 2], base.count)?;
    if let Some(noise) = json.f64("router_jitter_noise")?.filter(|noise| *noise != 0.0) {
        let advice = "Noise on the router's input is not supported; set it to 0";
        return Err(json.unsupported("router_jitter_noise", noise, advice));
    }
    let sizes = [count, top_k, size(json, "intermediate_size")?];
    let mlp = MlpSpec::experts(ExpertNames::Mixtral, sizes, activation(json)?, RouterSpec::softmax(true), None);
    base.model(base.equal_layers(mlp, LayerNorms::Pre), vec![rope_with_theta(json, &base, DEFAULT_THETA)?])
}
