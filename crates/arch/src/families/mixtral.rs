//! Mixtral: a Mistral whose MLPs are mixtures of experts.
//!
//! Defaults are those of transformers' `MixtralConfig`: an absent or null `sliding_window` means none. The weights of a token's experts
//! add up to one.
//! Not supported: `router_jitter_noise` in training, and `attention_dropout`, which is ignored.

use super::keys::rope::rope;
use super::keys::{activation, experts, head_dim_or_quotient, kv_heads, layer_count, model, size, size_or};
use crate::error::ArchError;
use crate::json::JsonObject;
use crate::mixer::{AttentionSpec, Mixer};
use crate::router::RouterSpec;
use crate::spec::{ExpertNames, LayerNorms, LayerSpec, MlpSpec, ModelSpec};

pub(super) fn spec(json: &JsonObject) -> Result<ModelSpec, ArchError> {
    let heads = size(json, "num_attention_heads")?;
    let head_dim = head_dim_or_quotient(json, heads)?;
    let layers = layer_count(json)?;
    let max_position_embeddings = size_or(json, "max_position_embeddings", 131_072)?;
    let window = match json.get("sliding_window") {
        Some(_) => Some(size(json, "sliding_window")?),
        None => None,
    };
    let (count, top_k) = experts(json, ["num_local_experts", "num_experts"], [8, 2], layers)?;
    if let Some(noise) = json.f64("router_jitter_noise")?.filter(|noise| *noise != 0.0) {
        let advice = "Noise on the router's input is not supported; set it to 0";
        return Err(json.unsupported("router_jitter_noise", noise, advice));
    }

    let attention = AttentionSpec { window, ..AttentionSpec::new(heads, kv_heads(json, heads, 8)?, head_dim) };
    let mlp = MlpSpec::Experts {
        count,
        top_k,
        intermediate_size: size(json, "intermediate_size")?,
        activation: activation(json)?,
        router: RouterSpec::softmax(true),
        shared: None,
        names: ExpertNames::Mixtral,
        fused: false,
        bias: false,
        mxfp4: false,
    };
    let layers = vec![LayerSpec { mixer: Mixer::Attention(attention), mlp, norms: LayerNorms::Pre }; layers];
    let ropes = vec![rope(json, head_dim, max_position_embeddings)?];
    model(json, layers, ropes, max_position_embeddings, 1e-5)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::config::ModelConfig;
    use crate::config::tests::{family_json, layout_5_of, parse, refusal_of};
    use crate::error::ArchError;
    use crate::spec::MlpSpec;
    use crate::tensor_spec::Role;

    fn mixtral(changes: &[(&str, Value)]) -> Result<ModelConfig, ArchError> {
        parse(&family_json("MixtralForCausalLM", "mixtral", changes))
    }

    fn experts(changes: &[(&str, Value)]) -> (usize, usize) {
        let MlpSpec::Experts { count, top_k, .. } = mixtral(changes).unwrap().spec.layers[1].mlp else {
            panic!("every layer is a mixture")
        };
        (count, top_k)
    }

    #[test]
    fn absent_keys_default_as_transformers_does() {
        assert_eq!(experts(&[]), (8, 2));
        assert_eq!(experts(&[("num_local_experts", json!(4)), ("num_experts_per_tok", json!(1))]), (4, 1));
        assert_eq!(experts(&[("num_experts", json!(5))]), (5, 2), "the other name of the key");
        assert_eq!(mixtral(&[]).unwrap().spec.attentions().next().unwrap().window, None);
        assert_eq!(
            mixtral(&[("sliding_window", json!(16))]).unwrap().spec.attentions().next().unwrap().window,
            Some(16)
        );
    }

    #[test]
    fn tensors_have_the_names_of_the_hub_and_the_router_comes_before_its_experts_module_by_module() {
        let tensors = mixtral(&[("num_local_experts", json!(2))]).unwrap().spec.tensors();
        let mlp: Vec<_> = tensors.iter().filter(|tensor| tensor.name.contains("layers.1.block")).collect();
        let names: Vec<_> = mlp.iter().map(|tensor| tensor.name.trim_start_matches("model.layers.1.")).collect();
        let expected = [
            "gate.weight",
            "experts.0.w1.weight",
            "experts.1.w1.weight",
            "experts.0.w3.weight",
            "experts.1.w3.weight",
            "experts.0.w2.weight",
            "experts.1.w2.weight",
        ];
        assert_eq!(names, expected.map(|name| format!("block_sparse_moe.{name}")));
        assert_eq!((mlp[0].role, &mlp[0].shape[..]), (Role::Router, &[2, 8][..]));
        assert_eq!((mlp[1].role, &mlp[1].shape[..]), (Role::Projection, &[12, 8][..]));
        assert_eq!(mlp[5].shape, [8, 12]);
    }

    #[test]
    fn more_experts_per_token_than_experts_and_noise_are_refused_by_their_keys() {
        let too_many = [("num_local_experts", json!(2)), ("num_experts_per_tok", json!(3))];
        assert!(refusal_of(mixtral(&too_many)).contains("`num_experts_per_tok`"));
        assert!(refusal_of(mixtral(&[("num_local_experts", json!(0))])).contains("`num_local_experts`"));
        let all = [("num_local_experts", json!(1000)), ("num_hidden_layers", json!(9000))];
        assert!(refusal_of(mixtral(&all)).contains("`num_local_experts`"));
        assert!(refusal_of(mixtral(&[("router_jitter_noise", json!(0.1))])).contains("`router_jitter_noise`"));
    }

    #[test]
    fn both_layouts_give_one_spec() {
        let changes = [("num_local_experts", json!(4))];
        let new = layout_5_of("MixtralForCausalLM", "mixtral", &changes).unwrap();
        assert_eq!(new.spec, mixtral(&changes).unwrap().spec);
    }
}
