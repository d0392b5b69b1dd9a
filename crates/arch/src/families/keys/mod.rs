//! Keys that several families read, with their checks.
//!
//! Every function names the key in its errors. Defaults that differ between families are arguments.
//! Trade-off: sizes have generous upper limits, so that a damaged file is an error and not an allocation failure.

pub(super) mod rope;

use serde_json::Value;

use crate::error::ArchError;
use crate::json::JsonObject;
use crate::mixer::{AttentionSpec, Mixer, ShortConvSpec};
use crate::naming::Naming;
use crate::quantization::{QUANTIZATION_CONFIG, Quantization};
use crate::rope::Rope;
use crate::spec::{Activation, LayerNorms, LayerSpec, MlpSpec, ModelSpec};

/// The largest size of one dimension.
const MAX_SIZE: usize = 1 << 28;
const MAX_LAYERS: usize = 10_000;
/// The largest number of experts of one layer.
const MAX_EXPERTS: usize = 1024;
/// The largest number of experts of all layers.
const MAX_ALL_EXPERTS: usize = 1 << 16;

/// What absent keys mean in a family.
pub(super) struct Defaults {
    /// Columns of a head; `None`: `hidden_size / num_attention_heads`.
    pub(super) head_dim: Option<usize>,
    /// Heads of keys and values; `None`: as many as of queries.
    pub(super) kv_heads: Option<usize>,
    pub(super) max_position_embeddings: usize,
    pub(super) rms_norm_eps: f64,
}

/// The keys that every family reads.
pub(super) struct Base<'a> {
    json: &'a JsonObject<'a>,
    rms_norm_eps: f64,
    /// The attention of a layer; as it is read, without biases, norms and window.
    pub(super) attention: AttentionSpec,
    pub(super) count: usize,
    pub(super) max_position_embeddings: usize,
}

impl<'a> Base<'a> {
    pub(super) fn read(json: &'a JsonObject<'a>, defaults: Defaults) -> Result<Self, ArchError> {
        let heads = size(json, "num_attention_heads")?;
        let head_dim = match defaults.head_dim {
            Some(default) => head_dim_or(json, default)?,
            None => head_dim_or_quotient(json, heads)?,
        };
        let attention = AttentionSpec::new(heads, kv_heads(json, heads, defaults.kv_heads.unwrap_or(heads))?, head_dim);
        let max_position_embeddings = size_or(json, "max_position_embeddings", defaults.max_position_embeddings)?;
        let layers = "num_hidden_layers";
        let (count, rms_norm_eps) = (in_range(json, layers, size(json, layers)?, MAX_LAYERS)?, defaults.rms_norm_eps);
        Ok(Self { json, rms_norm_eps, attention, count, max_position_embeddings })
    }

    /// Reads `attention_bias`, one key for all four projections.
    pub(super) fn with_bias(mut self, absent: bool) -> Result<Self, ArchError> {
        let bias = bool_or(self.json, "attention_bias", absent)?;
        (self.attention.qkv_bias, self.attention.output_bias) = (bias, bias);
        Ok(self)
    }

    /// Reads the one rotary embedding of whole heads.
    pub(super) fn rope(&self) -> Result<Rope, ArchError> {
        rope::rope_with_theta(self.json, self, rope::DEFAULT_THETA)
    }

    pub(super) fn equal_layers(&self, mlp: MlpSpec, norms: LayerNorms) -> Vec<LayerSpec> {
        vec![self.layer(mlp, norms, self.attention.window); self.count]
    }

    /// Returns layers that differ in their windows alone.
    pub(super) fn layers(&self, mlp: &MlpSpec, norms: LayerNorms, windows: Vec<Option<usize>>) -> Vec<LayerSpec> {
        windows.into_iter().map(|window| self.layer(mlp.clone(), norms, window)).collect()
    }

    pub(super) fn layer(&self, mlp: MlpSpec, norms: LayerNorms, window: Option<usize>) -> LayerSpec {
        let attention = AttentionSpec { window, ..self.attention.clone() };
        LayerSpec { mixer: Mixer::Attention(attention), mlp, norms, has_scalar: false }
    }

    /// Builds a model of these layers with the constants of most families: norms multiply by their weights; embedding and logits are not scaled.
    pub(super) fn model(&self, layers: Vec<LayerSpec>, ropes: Vec<Rope>) -> Result<ModelSpec, ArchError> {
        let json = self.json;
        Ok(ModelSpec {
            vocab_size: size(json, "vocab_size")?,
            hidden_size: size(json, "hidden_size")?,
            layers,
            ropes,
            rms_norm_eps: positive_or(json, "rms_norm_eps", self.rms_norm_eps)?,
            norm_offset: 0.0,
            naming: Naming::Llama,
            embedding_scale: None,
            rounds_embedding_scale: true,
            logits_scaling: 1.0,
            logit_soft_cap: None,
            tie_word_embeddings: bool_or(json, "tie_word_embeddings", false)?,
            max_position_embeddings: self.max_position_embeddings,
            initializer_range: positive_or(json, "initializer_range", 0.02)?,
            per_layer_inputs: None,
        })
    }
}

/// Reads a required size of at least 1.
pub(super) fn size(json: &JsonObject, key: &str) -> Result<usize, ArchError> {
    let value = json.required(key, json.usize(key)?, "a whole number")?;
    in_range(json, key, value, MAX_SIZE)
}

/// Reads the number of experts of a layer, under one of these keys (transformers knows both names), and the number of experts per token.
pub(super) fn experts(
    json: &JsonObject,
    keys: [&str; 2],
    absent: [usize; 2],
    layers: usize,
) -> Result<(usize, usize), ArchError> {
    let key = if json.get(keys[0]).is_some() { keys[0] } else { keys[1] };
    let (count, of_token) = (json.usize(key)?.unwrap_or(absent[0]), "num_experts_per_tok");
    checked_experts(json, [key, of_token], [count, json.usize(of_token)?.unwrap_or(absent[1])], layers)
}

/// Checks the number of experts of a layer and the number of experts per token, which stand under these keys.
pub(super) fn checked_experts(
    json: &JsonObject,
    keys: [&str; 2],
    [count, top_k]: [usize; 2],
    layers: usize,
) -> Result<(usize, usize), ArchError> {
    let count = in_range(json, keys[0], count, MAX_EXPERTS)?;
    if count * layers > MAX_ALL_EXPERTS {
        let rule = format!("{layers} layers may have at most {MAX_ALL_EXPERTS} experts together");
        return Err(json.bad(keys[0], count, rule));
    }
    if top_k == 0 || top_k > count {
        return Err(json.bad(keys[1], top_k, format!("it must be at least 1 and at most {count}, the experts")));
    }
    Ok((count, top_k))
}

/// Reads a size of at least 1 with a default.
pub(super) fn size_or(json: &JsonObject, key: &str, default: usize) -> Result<usize, ArchError> {
    in_range(json, key, json.usize(key)?.unwrap_or(default), MAX_SIZE)
}

pub(super) fn positive_or(json: &JsonObject, key: &str, default: f64) -> Result<f64, ArchError> {
    let value = json.f64(key)?.unwrap_or(default);
    if value.is_finite() && value > 0.0 { Ok(value) } else { Err(json.bad(key, value, "it must be greater than zero")) }
}

pub(super) fn bool_or(json: &JsonObject, key: &str, default: bool) -> Result<bool, ArchError> {
    Ok(json.bool(key)?.unwrap_or(default))
}

fn in_range(json: &JsonObject, key: &str, value: usize, max: usize) -> Result<usize, ArchError> {
    match value {
        0 => Err(json.bad(key, 0, "it must be at least 1")),
        value if value > max => Err(json.bad(key, value, format!("it must be at most {max}"))),
        value => Ok(value),
    }
}

/// Reads `num_key_value_heads`, which must divide `heads`. A null means `heads`; an absent key means `absent`.
fn kv_heads(json: &JsonObject, heads: usize, absent: usize) -> Result<usize, ArchError> {
    let key = "num_key_value_heads";
    let default = if json.is_null(key) { heads } else { absent };
    let kv_heads = json.usize(key)?.unwrap_or(default);
    if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
        return Err(json.bad(key, kv_heads, format!("it must divide num_attention_heads ({heads})")));
    }
    Ok(kv_heads)
}

/// Reads `head_dim`, which must be even; `hidden_size / heads` if the key is absent.
fn head_dim_or_quotient(json: &JsonObject, heads: usize) -> Result<usize, ArchError> {
    let hidden_size = size(json, "hidden_size")?;
    if json.get("head_dim").is_none() && !hidden_size.is_multiple_of(heads) {
        let rule = format!("it must divide hidden_size ({hidden_size}) when head_dim is not given");
        return Err(json.bad("num_attention_heads", heads, rule));
    }
    head_dim_or(json, hidden_size / heads)
}

/// Reads `head_dim`, which must be even, with a default.
fn head_dim_or(json: &JsonObject, default: usize) -> Result<usize, ArchError> {
    let head_dim = json.usize("head_dim")?.unwrap_or(default);
    if head_dim == 0 || head_dim % 2 == 1 || head_dim > MAX_SIZE {
        let rule = "it (or hidden_size / num_attention_heads) must be even: rotary embedding rotates pairs of columns";
        return Err(json.bad("head_dim", head_dim, rule));
    }
    Ok(head_dim)
}

/// Reads `hidden_act`; the default is SiLU, as in most families here.
pub(super) fn activation(json: &JsonObject) -> Result<Activation, ArchError> {
    activation_or(json, "hidden_act", Activation::Silu)
}

/// Reads the activation under a key, with a default.
pub(super) fn activation_or(json: &JsonObject, key: &str, default: Activation) -> Result<Activation, ArchError> {
    let name = json.str(key)?.unwrap_or(default.name());
    Activation::NAMED.into_iter().find(|activation| activation.name() == name).ok_or_else(|| {
        let names = Activation::NAMED.map(|activation| format!("\"{}\"", activation.name()));
        json.unsupported(key, format!("\"{name}\""), format!("Supported: {}", names.join(", ")))
    })
}

/// Reads an MLP whose gate, up and down projections are separate modules without biases.
pub(super) fn gated_mlp(json: &JsonObject, activation: Activation) -> Result<MlpSpec, ArchError> {
    let intermediate_size = size(json, "intermediate_size")?;
    Ok(MlpSpec::Gated { intermediate_size, activation, fused: false, bias: false })
}

/// Reads a soft cap greater than zero; `None` if the key is null, `absent` if it is absent.
pub(super) fn soft_cap(json: &JsonObject, key: &str, absent: Option<f64>) -> Result<Option<f64>, ArchError> {
    match (json.is_null(key), absent) {
        (true, _) => Ok(None),
        (false, Some(absent)) => positive_or(json, key, absent).map(Some),
        (false, None) => json.get(key).map(|_| positive_or(json, key, 1.0)).transpose(),
    }
}

/// Returns the window of each of `layers` layers: by `layer_types`, or without them one full layer after `pattern - 1` sliding ones (Gemma). The
/// window is `sliding_window`; an absent key means `absent` tokens.
pub(super) fn windows_by_pattern(
    json: &JsonObject,
    layers: usize,
    pattern: usize,
    absent: usize,
) -> Result<Vec<Option<usize>>, ArchError> {
    let types = match layer_types(json, layers)? {
        Some(types) => types,
        None => (1..=layers).map(|layer| layer % pattern != 0).collect(),
    };
    let window = sliding_window(json, absent)?;
    if window.is_none() && types.contains(&true) {
        return Err(json.bad(
            "sliding_window",
            "null",
            "some layers have sliding attention, so it must be a number of tokens",
        ));
    }
    Ok(types.into_iter().map(|sliding| window.filter(|_| sliding)).collect())
}

/// Refuses a checkpoint whose quantization is supported for a gpt-oss alone, or not at all.
pub(super) fn refuse_quantized(json: &JsonObject) -> Result<(), ArchError> {
    match Quantization::parse(json)? {
        Some(Quantization::Mxfp4) => {
            let advice = "It is read for the experts of a gpt-oss alone; use the unquantized checkpoint";
            Err(json.unsupported(QUANTIZATION_CONFIG, "mxfp4", advice))
        }
        _ => Ok(()),
    }
}

/// Returns the window of each of `layers` layers: by `layer_types` if it is there, otherwise `sliding_window` from layer `max_window_layers` on.
/// Without `use_sliding_window` no layer has a window (Qwen2 and Qwen3).
pub(super) fn windows_by_layer(json: &JsonObject, layers: usize) -> Result<Vec<Option<usize>>, ArchError> {
    let window = if bool_or(json, "use_sliding_window", false)? { sliding_window(json, 4096)? } else { None };
    let first = json.usize("max_window_layers")?.unwrap_or(28);
    windows_by_types(json, window, (0..layers).map(|layer| layer >= first).collect())
}

/// Returns `window` for the layers that `layer_types` names, or without that key for those of `absent`.
pub(super) fn windows_by_types(
    json: &JsonObject,
    window: Option<usize>,
    absent: Vec<bool>,
) -> Result<Vec<Option<usize>>, ArchError> {
    let types = layer_types(json, absent.len())?;
    if window.is_none() && types.as_ref().is_some_and(|types| types.contains(&true)) {
        let rule = "`use_sliding_window` is not true or `sliding_window` is null, so such layers have no window";
        return Err(json.bad("layer_types", "\"sliding_attention\" for some layers", rule));
    }
    Ok(types.unwrap_or(absent).into_iter().map(|sliding| window.filter(|_| sliding)).collect())
}

/// Reads `sliding_window` in tokens; `None` if it is null, `absent` if the key is absent.
pub(super) fn sliding_window(json: &JsonObject, absent: usize) -> Result<Option<usize>, ArchError> {
    let key = "sliding_window";
    if json.is_null(key) { Ok(None) } else { size_or(json, key, absent).map(Some) }
}

/// Reads `sliding_window` in tokens; `None` if it is null or absent.
pub(super) fn given_window(json: &JsonObject) -> Result<Option<usize>, ArchError> {
    json.get("sliding_window").map(|_| size(json, "sliding_window")).transpose()
}

/// Reads `layer_types`: whether each layer has sliding attention.
pub(super) fn layer_types(json: &JsonObject, layers: usize) -> Result<Option<Vec<bool>>, ArchError> {
    is_second_kind(json, layers, &["full_attention", "sliding_attention"])
}

/// Returns whether each layer is of the second kind, by `layer_types`; `None` without the key.
pub(super) fn is_second_kind(
    json: &JsonObject,
    layers: usize,
    kinds: &[&str; 2],
) -> Result<Option<Vec<bool>>, ArchError> {
    let Some(types) = json.get("layer_types") else { return Ok(None) };
    let kinds = kinds_of_layers(json, types, layers, kinds)?;
    Ok(Some(kinds.into_iter().map(|kind| kind == 1).collect()))
}

/// Reads a list of numbers of layers; `None` without the key.
pub(super) fn layer_numbers(json: &JsonObject, key: &str) -> Result<Option<Vec<usize>>, ArchError> {
    let numbers = match json.get(key) {
        None => return Ok(None),
        Some(Value::Array(numbers)) => numbers,
        Some(other) => return Err(json.wrong_type(key, "a list of numbers of layers", other)),
    };
    let number = |value: &Value| value.as_u64().and_then(|number| usize::try_from(number).ok());
    let read: Option<_> = numbers.iter().map(number).collect();
    let wrong = || json.bad(key, Value::from(numbers.clone()), "it must list numbers of layers");
    read.map(Some).ok_or_else(wrong)
}

/// Reads the number of tokens that a filter of a convolution covers.
pub(super) fn filter_width(json: &JsonObject, key: &str, absent: usize) -> Result<usize, ArchError> {
    let (width, most) = (size_or(json, key, absent)?, ShortConvSpec::MAX_WIDTH);
    if width <= most { Ok(width) } else { Err(json.bad(key, width, format!("it must be at most {most}"))) }
}

/// Returns the kind of each layer that `layer_types` lists, as its place among `kinds`.
pub(super) fn kinds_of_layers(
    json: &JsonObject,
    types: &Value,
    layers: usize,
    kinds: &[&str],
) -> Result<Vec<usize>, ArchError> {
    let key = "layer_types";
    let Value::Array(types) = types else { return Err(json.wrong_type(key, "a list of strings", types)) };
    if types.len() != layers {
        let got = format!("a list of {} layers", types.len());
        return Err(json.bad(key, got, format!("num_hidden_layers is {layers}")));
    }
    let place = |kind: &Value| {
        let place = kinds.iter().position(|known| Some(*known) == kind.as_str());
        let names = || kinds.iter().map(|kind| format!("\"{kind}\"")).collect::<Vec<_>>().join(", ");
        place.ok_or_else(|| json.unsupported(key, kind, format!("Supported: {}", names())))
    };
    types.iter().map(place).collect()
}
