//! llama.cpp's names of tensors, and the tensors of a checkpoint that each is made of.
//!
//! The experts of a module are one tensor, a stack; every other tensor is one of the checkpoint's.

use firebrick_arch::{EMBEDDING, FINAL_NORM, HEAD, ModelSpec, PER_LAYER_EMBEDDING, TensorSpec};

use crate::error::ModelError;

/// Tensors of a layer whose names do not end in "weight" or "bias".
const WHOLE_NAMES: [(&str, &str); 4] = [
    ("self_attn.sinks", "attn_sinks.weight"),
    ("layer_scalar", "layer_output_scale.weight"),
    ("router.scale", "ffn_gate_inp.scale"),
    // Both multiply what an expert gives.
    ("router.per_expert_scale", "ffn_down_exps.scale"),
];

/// Modules of a layer but the norms that most families have. Those of experts stand without the expert's number.
const MODULES: [(&str, &str); 30] = [
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.qkv_proj", "attn_qkv"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
    // Gate's rows, then up's, as llama.cpp expects them.
    ("mlp.gate_up_proj", "ffn_up"),
    ("mlp.gate", "ffn_gate_inp"),
    ("mlp.router", "ffn_gate_inp"),
    ("mlp.experts.gate_proj", "ffn_gate_exps"),
    ("mlp.experts.up_proj", "ffn_up_exps"),
    ("mlp.experts.down_proj", "ffn_down_exps"),
    ("router.proj", "ffn_gate_inp"),
    ("experts.gate_proj", "ffn_gate_exps"),
    ("experts.up_proj", "ffn_up_exps"),
    ("experts.down_proj", "ffn_down_exps"),
    ("pre_feedforward_layernorm_2", "pre_ffw_norm_2"),
    ("post_feedforward_layernorm_1", "post_ffw_norm_1"),
    ("post_feedforward_layernorm_2", "post_ffw_norm_2"),
    ("per_layer_input_gate", "inp_gate"),
    ("per_layer_projection", "proj"),
    ("post_per_layer_input_norm", "post_norm"),
    ("block_sparse_moe.gate", "ffn_gate_inp"),
    ("block_sparse_moe.experts.w1", "ffn_gate_exps"),
    ("block_sparse_moe.experts.w3", "ffn_up_exps"),
    ("block_sparse_moe.experts.w2", "ffn_down_exps"),
];

#[derive(Clone, Debug)]
pub(super) struct NamedTensor {
    pub name: String,
    /// Rows first, as in PyTorch; experts before them.
    pub shape: Vec<usize>,
    /// What it is made of: one tensor, or one per expert.
    pub parts: Vec<TensorSpec>,
}

/// Lists the tensors of the file of a model.
pub(super) fn tensors(spec: &ModelSpec) -> Result<Vec<NamedTensor>, ModelError> {
    let mut tensors: Vec<NamedTensor> = Vec::new();
    for part in spec.tensors() {
        let what = || ModelError::NoGguf { what: format!("the tensor `{}`", part.name) };
        let name = name_of(spec, &part).ok_or_else(what)?;
        match tensors.iter_mut().rev().find(|tensor| tensor.name == name) {
            Some(stack) => stack.parts.push(part),
            None => tensors.push(NamedTensor { name, shape: part.shape.clone(), parts: vec![part] }),
        }
    }
    let is_stack = |name: &str| name.contains("_exps.") && !name.ends_with(".scale");
    for stack in tensors.iter_mut().filter(|tensor| is_stack(&tensor.name)) {
        stack.shape.insert(0, stack.parts.len());
    }
    Ok(tensors)
}

fn name_of(spec: &ModelSpec, tensor: &TensorSpec) -> Option<String> {
    match tensor.name.as_str() {
        EMBEDDING => return Some("token_embd.weight".to_owned()),
        HEAD => return Some("output.weight".to_owned()),
        FINAL_NORM => return Some("output_norm.weight".to_owned()),
        PER_LAYER_EMBEDDING => return Some("per_layer_token_embd.weight".to_owned()),
        "model.per_layer_model_projection.weight" => return Some("per_layer_model_proj.weight".to_owned()),
        "model.per_layer_projection_norm.weight" => return Some("per_layer_proj_norm.weight".to_owned()),
        _ => {}
    }
    let layer = tensor.layer?;
    let path = tensor.name.strip_prefix(&format!("model.layers.{layer}."))?;
    if let Some((_, name)) = WHOLE_NAMES.iter().find(|(ours, _)| *ours == path) {
        return Some(format!("blk.{layer}.{name}"));
    }
    let (module, kind) = path.rsplit_once('.')?;
    let module = without_number(module);
    let known = MODULES.iter().find(|(ours, _)| *ours == module).map(|(_, name)| *name);
    let name = known.or_else(|| norm(spec, layer, &module))?;
    Some(format!("blk.{layer}.{name}.{kind}"))
}

/// Returns the name of a norm, which depends on its place.
fn norm(spec: &ModelSpec, layer: usize, module: &str) -> Option<&'static str> {
    let names = spec.layers[layer].norms.names();
    // With sinks, which gpt-oss alone has, the name is that of attention's output norm.
    let has_sinks = spec.layers[layer].mixer.attention().is_some_and(|attention| attention.sinks);
    let before_mlp = if has_sinks { "post_attention_norm" } else { "ffn_norm" };
    let places = [
        (names.before_mixer, "attn_norm"),
        (names.after_mixer, "post_attention_norm"),
        (names.before_mlp, before_mlp),
        (names.after_mlp, "post_ffw_norm"),
    ];
    places.into_iter().find(|(ours, _)| *ours == Some(module)).map(|(_, name)| name)
}

/// Removes the number of an expert from a module's path.
fn without_number(module: &str) -> String {
    let numbered = module.split_once("experts.").filter(|(block, _)| block.is_empty() || block.ends_with('.'));
    match numbered.and_then(|(block, rest)| Some((block, rest.split_once('.')?.1))) {
        Some((block, projection)) => format!("{block}experts.{projection}"),
        None => module.to_owned(),
    }
}
