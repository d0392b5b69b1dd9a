//! Gemma 4, the text models: layers with a window and layers without, whose heads are wider and partly rotated; norms of queries, keys and values;
//! inputs of each layer and shared keys and values (E2B, E4B), values that are keys (12B, 31B), a dense MLP next to experts (26B-A4B).
//!
//! Defaults are those of transformers' `Gemma4TextConfig` and `Gemma4UnifiedTextConfig`, whose last layer has no window whatever `layer_types` says.
//! `use_bidirectional_attention` may be "vision": that is about tokens of images.
//! Trade-off: a projection outside the layers, `per_layer_model_projection`, gets no adapter, which PEFT's "all-linear" gives it.
//! Not supported: attention to later tokens of a text ("all"); other activations; `attention_dropout`, which is ignored.

use super::keys::rope::{FULL, SLIDING, ropes_of_heads};
use super::keys::{
    Base, Defaults, activation_or, bool_or, checked_experts, gated_mlp, size, size_or, soft_cap, windows_by_pattern,
};
use crate::error::ArchError;
use crate::json::JsonObject;
use crate::mixer::{AttentionSpec, KeysAndValues, Mixer, QkNorm};
use crate::rope::{Rope, RopeScaling};
use crate::router::{RouterSpec, SharedExpertSpec};
use crate::spec::{Activation, ExpertNames, LayerNorms, LayerSpec, MlpSpec, ModelSpec, PerLayerInputs};

/// The width of heads without a window, if no key says it.
const FULL_HEAD_DIM: usize = 512;
/// The bases of the frequencies without a window and with one, if no key says them.
const THETAS: [f64; 2] = [1e6, 1e4];

pub(super) fn spec(json: &JsonObject) -> Result<ModelSpec, ArchError> {
    let mut spec = text(json, 131_072, 512)?;
    if bool_or(json, "enable_moe_block", false)? {
        let count = spec.layers.len();
        for layer in &mut spec.layers {
            layer.mlp = mixture(json, &layer.mlp, count)?;
        }
    }
    Ok(ModelSpec { per_layer_inputs: per_layer_inputs(json)?, ..spec })
}

/// Reads the 12B, which has neither experts nor inputs of layers.
pub(super) fn unified_spec(json: &JsonObject) -> Result<ModelSpec, ArchError> {
    text(json, 262_144, 1024)
}

/// Reads what all have; absent keys mean this longest context and this window.
fn text(json: &JsonObject, max_position_embeddings: usize, window: usize) -> Result<ModelSpec, ArchError> {
    let key = "use_bidirectional_attention";
    if let Some(other) = json.str(key)?.filter(|&other| other != "vision") {
        let advice = "Tokens of a text see earlier ones alone here; choose a model where it is null or \"vision\"";
        return Err(json.unsupported(key, format!("\"{other}\""), advice));
    }
    let defaults = Defaults { head_dim: Some(256), kv_heads: Some(4), max_position_embeddings, rms_norm_eps: 1e-6 };
    let mut base = Base::read(json, defaults)?.with_bias(false)?;
    (base.attention.qk_norm, base.attention.value_norm, base.attention.scale) = (QkNorm::PerHead, true, 1.0);
    let mut windows = windows_by_pattern(json, base.count, 6, window)?;
    windows[base.count - 1] = None;
    let sizes = head_sizes(json, &base.attention, &windows)?;
    let mixers = attentions(json, &base.attention, &windows, sizes)?;
    let mlp = gated_mlp(json, activation(json)?)?;
    let is_double = bool_or(json, "use_double_wide_mlp", false)?;
    let (intermediate_size, activation) = (2 * mlp.intermediate_size(), mlp.activation());
    let double_wide = MlpSpec::Gated { intermediate_size, activation, fused: false, bias: false };
    let layer = |attention: AttentionSpec| {
        let mlp = if is_double && attention.reads_another() { double_wide.clone() } else { mlp.clone() };
        LayerSpec { mixer: Mixer::Attention(attention), mlp, norms: LayerNorms::PreAndPost, has_scalar: true }
    };
    let spec = base.model(mixers.into_iter().map(layer).collect(), ropes(json, &base, sizes)?)?;
    Ok(ModelSpec {
        embedding_scale: Some((spec.hidden_size as f64).sqrt()),
        logit_soft_cap: soft_cap(json, "final_logit_softcapping", None)?,
        tie_word_embeddings: bool_or(json, "tie_word_embeddings", true)?,
        ..spec
    })
}

/// Reads the activation, which is also that of the gates of layers' inputs.
fn activation(json: &JsonObject) -> Result<Activation, ArchError> {
    match activation_or(json, "hidden_activation", Activation::GeluTanh)? {
        Activation::GeluTanh => Ok(Activation::GeluTanh),
        other => {
            let advice = format!("Only \"{}\" is there, as in the published models", Activation::GeluTanh.name());
            Err(json.unsupported("hidden_activation", format!("\"{}\"", other.name()), advice))
        }
    }
}

/// Width and number of key and value heads.
type HeadSizes = [usize; 2];

/// Reads the sizes of heads without a window and with one: by `per_layer_config`, or else by the keys of a model whose layers of one type are alike.
fn head_sizes(
    json: &JsonObject,
    attention: &AttentionSpec,
    windows: &[Option<usize>],
) -> Result<[HeadSizes; 2], ArchError> {
    let (key, heads, own) = ("per_layer_config", attention.heads, [attention.head_dim, attention.kv_heads]);
    let mut sizes = vec![own; windows.len()];
    match json.object(key)? {
        None if json.is_null(key) => {}
        None => {
            // The second key counts only where values are keys.
            let of_full = if values_are_keys(json)? { "num_global_key_value_heads" } else { "num_key_value_heads" };
            let absent = [FULL_HEAD_DIM, attention.kv_heads];
            let full = checked_sizes(json, ["global_head_dim", of_full], absent, heads)?;
            let of_layers = sizes.iter_mut().zip(windows).filter(|(_, window)| window.is_none());
            of_layers.for_each(|(sizes, _)| *sizes = full);
        }
        Some(layers) => {
            for number in layers.map().keys() {
                let place = number.parse().ok().and_then(|layer: usize| sizes.get_mut(layer));
                let wrong = || json.bad(key, format!("about layer {number}"), "it must be about layers of this model");
                *place.ok_or_else(wrong)? = overridden(&layers, number, own, heads)?;
            }
        }
    }
    let of_type = |slides: bool| {
        let mut all =
            sizes.iter().zip(windows).filter(|(_, window)| window.is_some() == slides).map(|(sizes, _)| *sizes);
        let first = all.next().unwrap_or(own);
        let (got, rule) =
            ("different for layers of one type", "their heads must have one width, and equally many of keys");
        if all.all(|sizes| sizes == first) { Ok(first) } else { Err(json.bad(key, got, rule)) }
    };
    Ok([of_type(false)?, of_type(true)?])
}

/// Reads the sizes that `per_layer_config` has for a layer.
fn overridden(layers: &JsonObject, number: &str, own: HeadSizes, heads: usize) -> Result<HeadSizes, ArchError> {
    let keys = ["head_dim", "num_key_value_heads"];
    let Some(layer) = layers.object(number)? else { return Ok(own) };
    if let Some((key, value)) = layer.map().iter().find(|(key, _)| !keys.contains(&key.as_str())) {
        let advice = format!("A layer may have its own {} here", keys.join(" and "));
        return Err(layer.unsupported(key, value, advice));
    }
    checked_sizes(&layer, keys, own, heads)
}

/// Reads the width and the number of key and value heads under two keys.
fn checked_sizes(json: &JsonObject, keys: [&str; 2], absent: HeadSizes, heads: usize) -> Result<HeadSizes, ArchError> {
    let [head_dim, kv_heads] = [size_or(json, keys[0], absent[0])?, size_or(json, keys[1], absent[1])?];
    if head_dim % 2 == 1 {
        return Err(json.bad(keys[0], head_dim, "it must be even: rotary embedding rotates pairs of columns"));
    }
    if !heads.is_multiple_of(kv_heads) {
        return Err(json.bad(keys[1], kv_heads, format!("it must divide num_attention_heads ({heads})")));
    }
    Ok([head_dim, kv_heads])
}

fn values_are_keys(json: &JsonObject) -> Result<bool, ArchError> {
    bool_or(json, "attention_k_eq_v", false)
}

/// Builds the attention of each layer. The last `num_kv_shared_layers` read the keys and values of the last layer of their type before them.
fn attentions(
    json: &JsonObject,
    base: &AttentionSpec,
    windows: &[Option<usize>],
    sizes: [HeadSizes; 2],
) -> Result<Vec<AttentionSpec>, ArchError> {
    let (key, values_are_keys) = ("num_kv_shared_layers", values_are_keys(json)?);
    let of_layer = |&window: &Option<usize>| {
        let rope = if window.is_some() { SLIDING } else { FULL };
        let [head_dim, kv_heads] = sizes[rope];
        let values_are_keys = values_are_keys && window.is_none();
        AttentionSpec { head_dim, kv_heads, rope: Some(rope), window, values_are_keys, ..base.clone() }
    };
    let mut layers: Vec<AttentionSpec> = windows.iter().map(of_layer).collect();
    let shared = json.usize(key)?.unwrap_or(0);
    let (own, sharers) = layers.split_at_mut(windows.len().saturating_sub(shared));
    for sharer in sharers {
        let Some(source) = own.iter().rposition(|layer| layer.rope == sharer.rope) else {
            let rule = format!("the {} layers before those must have one of each of their types", own.len());
            return Err(json.bad(key, shared, rule));
        };
        own[source].keys_and_values = KeysAndValues::Published(source);
        (sharer.keys_and_values, sharer.values_are_keys) = (KeysAndValues::OfLayer(source), false);
    }
    Ok(layers)
}

/// Reads the rotary embeddings; without a key a quarter of the pairs of wider heads is rotated.
fn ropes(json: &JsonObject, base: &Base<'_>, sizes: [HeadSizes; 2]) -> Result<Vec<Rope>, ArchError> {
    let [full, sliding] = sizes.map(|[head_dim, _]| head_dim);
    if json.get("rope_parameters").is_some() {
        return ropes_of_heads(json, base, THETAS, [full, sliding]);
    }
    let quarter = RopeScaling::Proportional { rotated: full / 8 };
    Ok(vec![Rope::new(THETAS[FULL], quarter, full), Rope::new(THETAS[SLIDING], RopeScaling::Default, sliding)])
}

/// Reads the sizes of layers' own inputs; a width of 0 means none.
fn per_layer_inputs(json: &JsonObject) -> Result<Option<PerLayerInputs>, ArchError> {
    let key = "hidden_size_per_layer_input";
    if json.usize(key)? == Some(0) {
        return Ok(None);
    }
    let (width, vocab_size) = (size_or(json, key, 256)?, size_or(json, "vocab_size_per_layer_input", 262_144)?);
    Ok(Some(PerLayerInputs { width, vocab_size }))
}

/// Reads the experts of a layer, next to its dense MLP.
fn mixture(json: &JsonObject, dense: &MlpSpec, layers: usize) -> Result<MlpSpec, ArchError> {
    let keys = ["num_experts", "top_k_experts"];
    let (count, top_k) = checked_experts(json, keys, [size(json, keys[0])?, size(json, keys[1])?], layers)?;
    let shared = SharedExpertSpec { intermediate_size: dense.intermediate_size(), gated: false, normed: true };
    Ok(MlpSpec::Experts {
        count,
        top_k,
        intermediate_size: size(json, "moe_intermediate_size")?,
        activation: dense.activation(),
        router: RouterSpec { scaled: true, ..RouterSpec::softmax(true) },
        shared: Some(shared),
        names: ExpertNames::Gemma4,
        // As PEFT has them, names of modules hit none.
        fused: true,
        bias: false,
        mxfp4: false,
    })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::config::tests::parse;
    use crate::families::tests::read;
    use crate::lora::LoraConfig;
    use crate::module_names::TargetModules;
    use crate::spec::ModelSpec;
    use crate::tensor_spec::Role;

    fn spec(changes: Value) -> ModelSpec {
        read("gemma4_text", changes).spec
    }

    /// Describes layers of heads of 4 with a window and of 8 without, in turn.
    fn small(changes: Value) -> ModelSpec {
        let types = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"];
        let mut all = json!({
            "num_hidden_layers": 4, "head_dim": 4, "global_head_dim": 8, "layer_types": types,
            "hidden_size_per_layer_input": 0
        });
        all.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        spec(all)
    }

    #[test]
    fn published_sizes_have_the_parameters_that_transformers_counts() {
        let of = |changes: Value, parameters: u64| {
            let mut all = json!({"vocab_size": 262_144, "tie_word_embeddings": true, "rope_theta": null});
            all.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
            let spec = spec(all);
            // The numbers that outputs of layers are multiplied by are buffers there.
            assert_eq!(spec.parameters() - spec.layers.len() as u64, parameters);
        };
        let types: Vec<_> =
            (1..=35).map(|layer| if layer % 5 == 0 { "full_attention" } else { "sliding_attention" }).collect();
        let e2b = json!({
            "hidden_size": 1536, "num_hidden_layers": 35, "intermediate_size": 6144, "num_attention_heads": 8,
            "num_key_value_heads": 1, "num_kv_shared_layers": 20, "use_double_wide_mlp": true, "layer_types": types
        });
        of(e2b, 4_628_569_344);
        let of_31b = json!({
            "hidden_size": 5376, "num_hidden_layers": 60, "intermediate_size": 21_504, "num_attention_heads": 32,
            "num_key_value_heads": 16, "num_global_key_value_heads": 4, "attention_k_eq_v": true,
            "hidden_size_per_layer_input": 0
        });
        of(of_31b, 30_697_345_280);
        let of_26b = json!({
            "hidden_size": 2816, "num_hidden_layers": 30, "intermediate_size": 2112, "num_attention_heads": 16,
            "num_key_value_heads": 8, "num_global_key_value_heads": 2, "attention_k_eq_v": true,
            "hidden_size_per_layer_input": 0, "enable_moe_block": true, "num_experts": 128, "top_k_experts": 8,
            "moe_intermediate_size": 704
        });
        of(of_26b, 25_233_141_760);
    }

    #[test]
    fn sizes_of_heads_by_layer_are_those_of_the_global_keys() {
        let by_key = small(json!({"attention_k_eq_v": true, "num_global_key_value_heads": 1}));
        let of_full = json!({"head_dim": 8, "num_key_value_heads": 1});
        let by_layer = json!({"01": of_full, "03": of_full});
        let by_layer = json!({"attention_k_eq_v": true, "global_head_dim": 16, "per_layer_config": by_layer});
        assert_eq!(small(by_layer), by_key);
        let kv_heads: Vec<_> = by_key.attentions().map(|attention| attention.kv_heads).collect();
        assert_eq!(kv_heads, [2, 1, 2, 1]);
        let ignored = small(json!({"num_global_key_value_heads": 1}));
        assert!(ignored.attentions().all(|attention| attention.kv_heads == 2 && !attention.values_are_keys));
    }

    #[test]
    fn values_that_are_keys_have_no_projection() {
        let spec = small(json!({"attention_k_eq_v": true}));
        let parts: Vec<_> = (0..2).map(|layer| spec.layer_groups(layer).mixer.input.parts).collect();
        assert_eq!(parts, [vec![16, 8, 8], vec![32, 16]]);
        let names: Vec<_> = spec.vectors(1).into_iter().map(|tensor| tensor.name).collect();
        assert_eq!(names, ["q_norm", "k_norm"].map(|name| format!("model.layers.1.self_attn.{name}.weight")));
    }

    #[test]
    fn layers_that_share_keys_and_values_have_queries_alone_and_a_double_wide_mlp() {
        let spec = small(json!({"num_kv_shared_layers": 2, "use_double_wide_mlp": true}));
        let groups = spec.layer_groups(3);
        assert_eq!((groups.mixer.input.parts, spec.layers[3].mlp.intermediate_size()), (vec![32], 24));
        assert_eq!(spec.layers[1].mlp.intermediate_size(), 12);
        assert_eq!(spec.vectors(3).len(), 1);
        assert_eq!([2, 3].map(|layer| spec.layers[layer].mixer.cache_of(layer)), [0, 1]);
    }

    #[test]
    fn inputs_of_layers_have_a_table_that_never_trains_and_modules_that_lora_adapts() {
        let inputs = json!({"hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": 11});
        let (spec, without) = (small(inputs), small(json!({})));
        let more = 4 * 6 * (11 + 8) + 6 + 4 * (2 * 6 * 8 + 8);
        assert_eq!(spec.parameters() - without.parameters(), more);
        assert_eq!(spec.parameters() - spec.trainable_parameters(), 4 * 6 * 11 + 4);
        assert_eq!(spec.matmul_parameters() - without.matmul_parameters(), 4 * 6 * 8 + 4 * 2 * 6 * 8);
        let names = TargetModules::AllLinear.names(&spec);
        assert_eq!(names[7..], ["per_layer_input_gate", "per_layer_projection"]);
        let lora = LoraConfig::default();
        assert_eq!(spec.adapter_tensors(&lora).unwrap().len(), without.adapter_tensors(&lora).unwrap().len() + 4 * 4);
    }

    #[test]
    fn new_tokens_grow_both_tables() {
        let inputs = json!({"hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": 11});
        let mut config = read("gemma4_text", inputs);
        config.add_tokens(&[11, 12]);
        let read = parse(config.text()).unwrap();
        assert_eq!((config.spec.per_layer_inputs.unwrap().vocab_size, &config.spec), (13, &read.spec));
        assert_eq!(config.stored_spec().per_layer_inputs.unwrap().vocab_size, 11);
    }

    #[test]
    fn experts_are_next_to_the_dense_mlp_and_are_adapted_as_parameters_alone() {
        let moe = json!({"enable_moe_block": true, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 6});
        let config = read("gemma4_text", moe);
        assert_eq!(config.router_aux_loss_coef, None);
        let scales = config.spec.tensors().into_iter().filter(|tensor| tensor.role == Role::RouterScale);
        let scales: Vec<_> = scales.take(2).map(|tensor| (tensor.name, tensor.shape)).collect();
        let name = |name: &str| format!("model.layers.0.router.{name}");
        assert_eq!(scales, [(name("scale"), vec![8]), (name("per_expert_scale"), vec![4])]);
        let names = TargetModules::AllLinear.names(&config.spec);
        assert_eq!(names[4..7], ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]);
        let target_modules = TargetModules::from_names(vec!["gate_proj".to_owned()]);
        let by_name = LoraConfig { target_modules, ..LoraConfig::default() };
        let tensors = config.spec.adapter_tensors(&by_name).unwrap();
        assert!(tensors.iter().all(|tensor| tensor.name.contains(".mlp.gate_proj.")), "{tensors:?}");
        let target_parameters = Some(vec!["experts.gate_up_proj".to_owned()]);
        let lora = LoraConfig { target_parameters, ..LoraConfig::default() };
        let spec = config.for_adapter(Some(&lora)).spec;
        let tensors = spec.adapter_tensors(&lora).unwrap();
        let of_experts = tensors.iter().find(|tensor| tensor.name.contains("experts")).unwrap();
        assert_eq!(of_experts.name, "base_model.model.model.layers.0.experts.lora_A.weight");
    }
}
