//! GLM-4.5 and 4.6: dense layers first, then mixtures of experts with a shared one, whose router has sigmoid scores and a correction of the choice.
//!
//! Defaults are those of transformers' `Glm4MoeConfig`. `attention_bias` is about queries, keys and values; a half of each head is rotated.
//! Trade-off: layers that predict more tokens (`num_nextn_predict_layers`) are skipped, as in transformers; a saved model has none. Logits of the
//! router are computed in the compute format, which transformers computes in float32.
//! Not supported: `attention_dropout`, which is ignored.

use super::keys::rope::partial_rope;
use super::keys::{Base, Defaults, activation, bool_or, experts, positive_or, size_or};
use super::qwen3_moe::dense;
use crate::error::ArchError;
use crate::json::JsonObject;
use crate::mixer::QkNorm;
use crate::router::{ExpertGroups, RouterScores, RouterSpec, SharedExpertSpec};
use crate::spec::{ExpertNames, LayerNorms, MlpSpec, ModelSpec};

pub(super) fn spec(json: &JsonObject) -> Result<ModelSpec, ArchError> {
    let defaults = Defaults { head_dim: None, kv_heads: Some(8), max_position_embeddings: 131_072, rms_norm_eps: 1e-5 };
    let mut base = Base::read(json, defaults)?;
    base.attention.qk_norm = if bool_or(json, "use_qk_norm", false)? { QkNorm::PerHead } else { QkNorm::None };
    base.attention.qkv_bias = bool_or(json, "attention_bias", false)?;
    let dense_layers = json.usize("first_k_dense_replace")?.unwrap_or(1);
    let layer = |index: usize| {
        let mlp = if index < dense_layers { dense(json, 10_944)? } else { mixture(json, base.count)? };
        Ok(base.layer(mlp, LayerNorms::Pre, None))
    };
    let layers = (0..base.count).map(layer).collect::<Result<_, ArchError>>()?;
    base.model(layers, vec![partial_rope(json, &base, 0.5)?])
}

fn mixture(json: &JsonObject, layers: usize) -> Result<MlpSpec, ArchError> {
    let (count, top_k) = experts(json, ["n_routed_experts", "num_local_experts"], [128, 8], layers)?;
    let intermediate_size = size_or(json, "moe_intermediate_size", 1408)?;
    let sizes = [count, top_k, intermediate_size];
    let intermediate_size = intermediate_size.saturating_mul(size_or(json, "n_shared_experts", 1)?);
    let shared = Some(SharedExpertSpec { intermediate_size, gated: false, normed: false });
    let activation = activation(json)?;
    let router = RouterSpec {
        scores: RouterScores::Sigmoid,
        normalizes: bool_or(json, "norm_topk_prob", true)?,
        epsilon: 1e-20,
        scale: positive_or(json, "routed_scaling_factor", 1.0)?,
        corrects: true,
        groups: groups(json, count, top_k)?,
        ..RouterSpec::softmax(true)
    };
    Ok(MlpSpec::experts(ExpertNames::DeepSeek, sizes, activation, router, shared))
}

/// Reads `n_group` and `topk_group`; `None` if every group is chosen, so that groups decide nothing.
fn groups(json: &JsonObject, experts: usize, top_k: usize) -> Result<Option<ExpertGroups>, ArchError> {
    let [count, chosen] = [size_or(json, "n_group", 1)?, size_or(json, "topk_group", 1)?];
    if chosen > count {
        return Err(json.bad("topk_group", chosen, format!("it must be at most n_group ({count})")));
    }
    if count == chosen {
        return Ok(None);
    }
    if !experts.is_multiple_of(count) || experts / count < 2 || count > ExpertGroups::MAX {
        let most = ExpertGroups::MAX;
        let rule = format!("it must divide the {experts} experts into at most {most} groups of 2 experts or more");
        return Err(json.bad("n_group", count, rule));
    }
    if chosen * (experts / count) < top_k {
        let rule = format!("groups of {} experts must have num_experts_per_tok ({top_k}) together", experts / count);
        return Err(json.bad("topk_group", chosen, rule));
    }
    Ok(Some(ExpertGroups { count, chosen }))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::config::ModelConfig;
    use crate::families::tests::read;
    use crate::tensor_spec::Role;

    fn glm4_moe(key: &str, value: usize) -> ModelConfig {
        let mut changes = json!({
            "hidden_size": 16, "num_hidden_layers": 3, "n_routed_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 6
        });
        changes[key] = json!(value);
        read("glm4_moe", changes)
    }

    #[test]
    fn a_correction_follows_its_router_and_never_trains() {
        let spec = glm4_moe("first_k_dense_replace", 2).spec;
        let tensors = spec.tensors();
        let router = tensors.iter().position(|tensor| tensor.role == Role::Router).unwrap();
        let correction = &tensors[router + 1];
        assert_eq!(correction.name, "model.layers.2.mlp.gate.e_score_correction_bias");
        assert_eq!((correction.role, correction.may_train()), (Role::RouterCorrection, false));
        assert_eq!(spec.parameters() - spec.trainable_parameters(), 4);
    }

    #[test]
    fn layers_that_predict_more_tokens_are_skipped() {
        let config = glm4_moe("num_nextn_predict_layers", 1);
        let skips = |name| config.skips(name);
        assert!(skips("model.layers.3.mlp.gate.weight") && !skips("model.layers.2.mlp.gate.weight"));
        assert!(!skips("model.layers.4.mlp.gate.weight") && !skips("model.norm.weight"));
        assert!(!glm4_moe("num_nextn_predict_layers", 0).skips("model.layers.3.mlp.gate.weight"));
    }
}
