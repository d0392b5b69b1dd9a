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

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::families::tests::{model, refused};
    use crate::module_names::TargetModules;
    use crate::rope::RopeScaling;

    /// Returns the keys of heads of 16 columns, 12 of them rotated.
    fn sizes() -> Vec<(&'static str, Value)> {
        vec![("hidden_size", json!(64)), ("partial_rotary_factor", json!(0.75))]
    }

    fn lists() -> Value {
        json!({"type": "longrope", "short_factor": [1.0, 1.0, 1.0, 1.0, 1.0, 1.0], "long_factor": [2.0, 2.0, 2.0, 2.0, 2.0, 2.0]})
    }

    #[test]
    fn modules_are_fused_and_lora_names_them() {
        let spec = model("phi3", &[]);
        let names: Vec<_> =
            spec.modules().take(4).map(|(module, _)| (module.name().to_owned(), module.out_features())).collect();
        let expected = [("qkv_proj", 16), ("o_proj", 8), ("gate_up_proj", 24), ("down_proj", 8)];
        assert_eq!(names, expected.map(|(name, width)| (name.to_owned(), width)));
        let named = |name: &str| TargetModules::from_names(vec![name.to_owned()]).resolve(&spec);
        named("qkv_proj").unwrap();
        let message = named("q_proj").unwrap_err().to_string();
        assert!(message.ends_with("qkv_proj, o_proj, gate_up_proj, down_proj"), "{message}");
    }

    #[test]
    fn a_share_of_the_head_is_rotated() {
        let original = ("original_max_position_embeddings", json!(32));
        let old = model("phi3", &[sizes(), vec![("rope_scaling", lists()), original]].concat());
        assert_eq!(old.ropes[0].rotary_dim, 12);
        let RopeScaling::LongRope { original_max_position_embeddings, attention_factor, .. } = old.ropes[0].scaling
        else {
            panic!("longrope")
        };
        assert_eq!(original_max_position_embeddings, 32);
        assert!((attention_factor - (1.0 + 2_f64.ln() / 32_f64.ln()).sqrt()).abs() < 1e-12);
        assert_eq!(model("phi3", &[("sliding_window", json!(7))]).attentions().nth(1).unwrap().window, Some(7));
    }

    #[test]
    fn what_has_no_arithmetic_here_is_refused_by_key() {
        let linear = json!({"rope_type": "linear", "factor": 2.0});
        let message = refused("phi3", &[("rope_scaling", linear)]);
        assert!(message.contains("`rope_scaling`") && message.contains("longrope"), "{message}");
        let message = refused("phi3", &[sizes(), vec![("partial_rotary_factor", json!(0.2))]].concat());
        assert!(message.contains("`partial_rotary_factor` is 0.2") && message.contains("16 columns"), "{message}");
        let message =
            refused("phi3", &[sizes(), vec![("partial_rotary_factor", json!(1)), ("rope_scaling", lists())]].concat());
        assert!(message.contains("short_factor` is a list of 6 numbers"), "{message}");
    }
}
