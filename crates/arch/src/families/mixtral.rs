//! Mixtral: a Mistral whose MLPs are mixtures of experts.
//!
//! Defaults are those of transformers' `MixtralConfig`: an absent or null `sliding_window` means none. The weights of a token's experts
//! add up to one.
//! Not supported: `router_jitter_noise` in training, and `attention_dropout`, which is ignored.

use super::keys::{Base, Defaults, activation, experts, given_window, size};
use crate::error::ArchError;
use crate::json::JsonObject;
use crate::router::RouterSpec;
use crate::spec::{ExpertNames, LayerNorms, MlpSpec, ModelSpec};

pub(super) fn spec(json: &JsonObject) -> Result<ModelSpec, ArchError> {
    let defaults = Defaults { head_dim: None, kv_heads: Some(8), max_position_embeddings: 131_072, rms_norm_eps: 1e-5 };
    let mut base = Base::read(json, defaults)?;
    base.attention.window = given_window(json)?;
    let (count, top_k) = experts(json, ["num_local_experts", "num_experts"], [8, 2], base.count)?;
    if let Some(noise) = json.f64("router_jitter_noise")?.filter(|noise| *noise != 0.0) {
        let advice = "Noise on the router's input is not supported; set it to 0";
        return Err(json.unsupported("router_jitter_noise", noise, advice));
    }
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
    base.model(base.equal_layers(mlp, LayerNorms::Pre), vec![base.rope()?])
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::families::tests::{model, refused};
    use crate::spec::MlpSpec;
    use crate::tensor_spec::Role;

    fn experts(changes: &[(&str, Value)]) -> (usize, usize) {
        let MlpSpec::Experts { count, top_k, .. } = model("mixtral", changes).layers[1].mlp else {
            panic!("every layer is a mixture")
        };
        (count, top_k)
    }

    #[test]
    fn absent_keys_default_as_transformers_does() {
        assert_eq!(experts(&[]), (8, 2));
        assert_eq!(experts(&[("num_local_experts", json!(4)), ("num_experts_per_tok", json!(1))]), (4, 1));
        assert_eq!(experts(&[("num_experts", json!(5))]), (5, 2), "the other name of the key");
        assert_eq!(model("mixtral", &[]).attentions().next().unwrap().window, None);
        assert_eq!(model("mixtral", &[("sliding_window", json!(16))]).attentions().next().unwrap().window, Some(16));
    }

    #[test]
    fn tensors_have_the_names_and_order_of_the_hub() {
        let tensors = model("mixtral", &[("num_local_experts", json!(2))]).tensors();
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
    fn too_many_experts_per_token_and_noise_are_refused() {
        let too_many = [("num_local_experts", json!(2)), ("num_experts_per_tok", json!(3))];
        assert!(refused("mixtral", &too_many).contains("`num_experts_per_tok`"));
        assert!(refused("mixtral", &[("num_local_experts", json!(0))]).contains("`num_local_experts`"));
        let all = [("num_local_experts", json!(1000)), ("num_hidden_layers", json!(9000))];
        assert!(refused("mixtral", &all).contains("`num_local_experts`"));
        assert!(refused("mixtral", &[("router_jitter_noise", json!(0.1))]).contains("`router_jitter_noise`"));
    }
}
