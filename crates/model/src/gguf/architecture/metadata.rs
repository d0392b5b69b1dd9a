//! The metadata of a model in a GGUF file, in the keys that llama.cpp reads for its family.
//!
//! Sizes that differ between layers are lists; Gemma 4's keys have the width of heads without a window, and more keys that with one.
//! Trade-off: other sizes are those of the first layer; no family in the table has layers that differ in them.

use std::path::Path;

use firebrick_arch::folder::CONFIG_FILE;
use firebrick_arch::json::parse_object;
use firebrick_arch::{LayerSpec, MlpSpec, ModelConfig, ModelSpec, Rope, RopeScaling};
use serde_json::Value as Json;

use super::super::container::Value;
use super::{Architecture, GEMMA4, Windows, first_attention, window};

impl Architecture {
    /// Returns what the file says of the model, for llama.cpp's number of a file's type.
    pub(in super::super) fn metadata(&self, config: &ModelConfig, title: &str, file_type: u32) -> Vec<(String, Value)> {
        let spec = &config.spec;
        let text = |text: &str| Value::Text(text.to_owned());
        let mut metadata = vec![
            ("general.architecture".to_owned(), text(self.name)),
            ("general.type".to_owned(), text("model")),
            ("general.name".to_owned(), text(title)),
            ("general.file_type".to_owned(), Value::U32(file_type)),
            ("general.quantization_version".to_owned(), Value::U32(2)),
        ];
        let more_sizes = if self.name == GEMMA4 { sizes_of_gemma4(spec) } else { Vec::new() };
        let keys =
            [self.sizes(config), more_sizes, self.windows(spec), rope_keys(&spec.ropes), self.multipliers(config)];
        metadata.extend(keys.into_iter().flatten().map(|(key, value)| (format!("{}.{key}", self.name), value)));
        metadata
    }

    fn sizes(&self, config: &ModelConfig) -> Vec<(&'static str, Value)> {
        let spec = &config.spec;
        let layer = &spec.layers[0];
        let (attention, full) = (first_attention(spec), spec.attentions().rfind(|one| one.window.is_none()));
        let head_dim = full.unwrap_or(attention).head_dim;
        let context = match (self.windows, window(spec)) {
            (Windows::Unknown, Some(window)) => window,
            _ => spec.max_position_embeddings,
        };
        // A mixture may have a width that none of its layers has.
        let has_another = layer.mlp.is_mixture() && layer.mlp.shared().is_none();
        let width = number_in(config, "intermediate_size").filter(|_| has_another).map(|width| count(width as usize));
        let own_width = || of_layers(spec.layers.iter().map(dense_width));
        let mut sizes = vec![
            ("block_count", count(spec.layers.len())),
            ("context_length", count(context)),
            ("embedding_length", count(spec.hidden_size)),
            ("feed_forward_length", width.unwrap_or_else(own_width)),
            ("attention.head_count", count(attention.heads)),
            ("attention.head_count_kv", of_layers(spec.attentions().map(|attention| attention.kv_heads))),
            ("attention.key_length", count(head_dim)),
            ("attention.value_length", count(head_dim)),
            ("rope.dimension_count", count(spec.ropes[0].rotary_dim)),
            ("vocab_size", count(spec.vocab_size)),
        ];
        if let MlpSpec::Experts { count: experts, top_k, intermediate_size, .. } = layer.mlp {
            sizes.extend([("expert_count", count(experts)), ("expert_used_count", count(top_k))]);
            if self.name != "llama" {
                sizes.push(("expert_feed_forward_length", count(intermediate_size)));
            }
        }
        sizes
    }

    fn windows(&self, spec: &ModelSpec) -> Vec<(&'static str, Value)> {
        let key = "attention.sliding_window";
        let (every, is_required) = match self.windows {
            // llama.cpp distinguishes versions of the family by it.
            Windows::Unknown if self.name == "phi3" => {
                let window = first_attention(spec).window.unwrap_or(0);
                return vec![(key, Value::U32(window as u32))];
            }
            Windows::Unknown => return Vec::new(),
            Windows::AllButEvery(every) => (every, false),
            Windows::AlwaysAllButEvery(every) => (every, true),
            Windows::AlwaysListed => (usize::MAX, true),
        };
        let slides: Vec<bool> = spec.attentions().map(|attention| attention.window.is_some()).collect();
        let window = spec.attentions().find_map(|attention| attention.window);
        if window.is_none() && !is_required {
            return Vec::new();
        }
        let mut keys = vec![(key, Value::U32(window.unwrap_or(spec.max_position_embeddings) as u32))];
        let as_usual = slides.iter().enumerate().all(|(layer, &slides)| slides == (layer % every < every - 1));
        if !as_usual || ["olmo2", GEMMA4].contains(&self.name) {
            keys.push(("attention.sliding_window_pattern", Value::Bools(slides)));
        }
        keys
    }

    /// Returns the constants of norms, scores and residual stream.
    fn multipliers(&self, config: &ModelConfig) -> Vec<(&'static str, Value)> {
        let spec = &config.spec;
        let mut keys = Vec::new();
        // Granite's residual stream is divided by its factor here, and not in llama.cpp.
        let residual = if self.name == "granite" { number_in(config, "residual_multiplier") } else { None };
        let residual = residual.unwrap_or(1.0);
        keys.push(("attention.layer_norm_rms_epsilon", float(spec.rms_norm_eps * residual * residual)));
        if self.name == "granite" {
            keys.extend([
                ("attention.scale", float(first_attention(spec).scale)),
                ("embedding_scale", float(spec.embedding_scale.unwrap_or(1.0) * residual)),
                ("residual_scale", float(residual)),
                ("logit_scale", float(spec.logits_scaling)),
            ]);
        }
        keys.extend(first_attention(spec).soft_cap.map(|cap| ("attn_logit_softcapping", float(cap))));
        keys.extend(spec.logit_soft_cap.map(|cap| ("final_logit_softcapping", float(cap))));
        keys
    }
}

fn count(value: usize) -> Value {
    Value::U32(value as u32)
}

fn float(value: f64) -> Value {
    Value::F32(value as f32)
}

/// Describes a size of each layer: one number if all have the same.
fn of_layers(sizes: impl Iterator<Item = usize>) -> Value {
    let sizes: Vec<usize> = sizes.collect();
    if sizes.iter().all(|size| *size == sizes[0]) {
        count(sizes[0])
    } else {
        Value::I32s(sizes.into_iter().map(|size| size as i32).collect())
    }
}

/// Returns the width of a layer's MLP, which is the one next to the experts if there are any.
fn dense_width(layer: &LayerSpec) -> usize {
    layer.mlp.shared().map_or(layer.mlp.intermediate_size(), |shared| shared.intermediate_size)
}

/// Describes heads with a window, which have widths of their own, the layers without keys of their own, and the layers' inputs.
fn sizes_of_gemma4(spec: &ModelSpec) -> Vec<(&'static str, Value)> {
    let sliding = spec.attentions().find(|attention| attention.window.is_some()).unwrap_or(first_attention(spec));
    let sharers = spec.attentions().filter(|attention| attention.reads_another()).count();
    vec![
        ("attention.key_length_swa", count(sliding.head_dim)),
        ("attention.value_length_swa", count(sliding.head_dim)),
        ("attention.shared_kv_layers", count(sharers)),
        ("embedding_length_per_layer_input", count(spec.per_layer_inputs.map_or(0, |inputs| inputs.width))),
        ("rope.dimension_count_swa", count(sliding.rope.map_or(0, |rope| spec.ropes[rope].rotary_dim))),
    ]
}

/// Reads a number of a config.json that a [`ModelSpec`] does not have, because nothing is computed with it or it is part of others.
fn number_in(config: &ModelConfig, key: &str) -> Option<f64> {
    let json = parse_object(config.text(), Path::new(CONFIG_FILE)).expect("the text was parsed before");
    json.get(key).and_then(Json::as_f64)
}

fn rope_keys(ropes: &[Rope]) -> Vec<(&'static str, Value)> {
    let rope = &ropes[0];
    let mut keys = vec![("rope.freq_base", float(rope.theta))];
    keys.extend(ropes.get(1).map(|sliding| ("rope.freq_base_swa", float(sliding.theta))));
    let mut scaled = |kind: &str, factor: Option<f64>, original: Option<usize>, attention: f64| {
        keys.push(("rope.scaling.type", Value::Text(kind.to_owned())));
        keys.extend(factor.map(|factor| ("rope.scaling.factor", float(factor))));
        keys.extend(original.map(|tokens| ("rope.scaling.original_context_length", Value::U32(tokens as u32))));
        if (attention - 1.0).abs() > 1e-9 {
            keys.push(("rope.scaling.attn_factor", float(attention)));
        }
    };
    match rope.scaling {
        RopeScaling::Default | RopeScaling::Proportional { .. } | RopeScaling::Llama3 { .. } => {}
        RopeScaling::Linear { factor } => scaled("linear", Some(factor), None, 1.0),
        RopeScaling::LongRope { original_max_position_embeddings, attention_factor, .. } => {
            scaled("longrope", None, Some(original_max_position_embeddings), attention_factor);
        }
        RopeScaling::Yarn { factor, original_max_position_embeddings, attention_factor, .. } => {
            // llama.cpp has the usual factor of YaRN already.
            let usual = if factor > 1.0 { 0.1 * factor.ln() + 1.0 } else { 1.0 };
            scaled("yarn", Some(factor), Some(original_max_position_embeddings), attention_factor / usual);
        }
    }
    keys
}
