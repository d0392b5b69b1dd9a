//! `config.json` of a Llama: the sizes and constants that fix the model's arithmetic, under Hugging Face's names.
//!
//! Keys that decide a shape must be there; the others default as transformers' `LlamaConfig` does. What this crate
//! cannot compute (biases, other activations, checkpoints that are quantised already) is refused here, before any
//! weight is read. The text of the file is kept, so that saving a model writes it back unchanged.

use std::path::Path;

use serde_json::{Value, to_string_pretty};

use crate::error::ModelError;
use crate::json::{JsonObject, parse_object, read_text};
use crate::rope::{DEFAULT_ROPE_THETA, RopeScaling};

/// Hugging Face's name of the file that [`LlamaConfig::read`] reads.
pub const CONFIG_FILE: &str = "config.json";
/// Hugging Face's name of the file that may hold further end-of-text tokens.
pub const GENERATION_CONFIG_FILE: &str = "generation_config.json";

/// The seven projections of a layer, as module paths inside `model.layers.{i}`: what "all-linear" LoRA targets.
pub const PROJECTIONS: [&str; 7] = [
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
];

/// A Llama's sizes and constants. Fields carry the names of `config.json`.
#[derive(Clone, Debug, PartialEq)]
pub struct LlamaConfig {
    /// Number of tokens: rows of `model.embed_tokens.weight` and of `lm_head.weight`.
    pub vocab_size: usize,
    /// Model width.
    pub hidden_size: usize,
    /// Feed-forward width.
    pub intermediate_size: usize,
    /// Number of blocks.
    pub num_hidden_layers: usize,
    /// Number of query heads.
    pub num_attention_heads: usize,
    /// Number of key and value heads; divides `num_attention_heads`.
    pub num_key_value_heads: usize,
    /// Width of one head; even.
    pub head_dim: usize,
    /// Added to the mean square inside RMSNorm.
    pub rms_norm_eps: f64,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// How the rotary frequencies are stretched for long contexts.
    pub rope_scaling: RopeScaling,
    /// The longest context that the model was made for, in tokens.
    pub max_position_embeddings: usize,
    /// Whether the head shares `model.embed_tokens.weight`.
    pub tie_word_embeddings: bool,
    /// Standard deviation of randomly initialised weights.
    pub initializer_range: f64,
    /// The token that begins a text.
    pub bos_token_id: Option<u32>,
    /// The tokens that end a text: `config.json`'s, then those only `generation_config.json` names.
    pub eos_token_ids: Vec<u32>,
    /// The number format that the weights were stored in, such as "bfloat16" (`dtype`, before transformers 5
    /// `torch_dtype`).
    pub dtype: Option<String>,
    text: String,
}

impl LlamaConfig {
    /// Reads `config.json`, and `generation_config.json` if it is there, from a model folder.
    ///
    /// # Errors
    /// A missing file, JSON that does not parse, and everything that [`LlamaConfig::parse`] refuses.
    pub fn read(dir: &Path) -> Result<Self, ModelError> {
        let path = dir.join(CONFIG_FILE);
        if !path.is_file() {
            let advice = "Give a folder in Hugging Face format: config.json, model.safetensors, tokenizer.json";
            return Err(ModelError::NotThere { dir: dir.to_path_buf(), missing: CONFIG_FILE, advice });
        }
        let mut config = Self::parse(&read_text(&path)?, &path)?;
        let path = dir.join(GENERATION_CONFIG_FILE);
        if path.is_file() {
            let map = parse_object(&read_text(&path)?, &path)?;
            let ids = JsonObject::new(&path, &map).token_ids("eos_token_id")?.unwrap_or_default();
            let new = ids.into_iter().filter(|id| !config.eos_token_ids.contains(id)).collect::<Vec<_>>();
            config.eos_token_ids.extend(new);
        }
        Ok(config)
    }

    /// Parses the text of a `config.json`; `path` is for messages.
    ///
    /// # Errors
    /// Missing or ill-typed keys, sizes that contradict each other, another architecture than Llama, and features
    /// without arithmetic here; each error names the file and the key.
    pub fn parse(text: &str, path: &Path) -> Result<Self, ModelError> {
        let map = parse_object(text, path)?;
        let json = JsonObject::new(path, &map);
        check_architecture(&json)?;
        check_features(&json)?;

        let size = |key| {
            let value = json.required(key, json.usize(key)?, "a whole number")?;
            if value == 0 { Err(json.bad(key, 0, "it must be at least 1")) } else { Ok(value) }
        };
        let hidden_size = size("hidden_size")?;
        let num_attention_heads = size("num_attention_heads")?;
        let max_position_embeddings = json.usize("max_position_embeddings")?.unwrap_or(2048);
        let rope = match json.object("rope_scaling")? {
            Some(rope) => Some(rope),
            None => json.object("rope_parameters")?,
        };
        let rope_theta = match rope.map(|rope| rope.f64("rope_theta")).transpose()?.flatten() {
            Some(theta) => theta,
            None => json.f64("rope_theta")?.unwrap_or(DEFAULT_ROPE_THETA),
        };
        let original_max = json.usize("original_max_position_embeddings")?;
        let config = Self {
            vocab_size: size("vocab_size")?,
            hidden_size,
            intermediate_size: size("intermediate_size")?,
            num_hidden_layers: size("num_hidden_layers")?,
            num_attention_heads,
            num_key_value_heads: json.usize("num_key_value_heads")?.unwrap_or(num_attention_heads),
            head_dim: json.usize("head_dim")?.unwrap_or(hidden_size / num_attention_heads),
            rms_norm_eps: json.f64("rms_norm_eps")?.unwrap_or(1e-6),
            rope_theta,
            rope_scaling: RopeScaling::from_json(rope, original_max, max_position_embeddings)?,
            max_position_embeddings,
            tie_word_embeddings: json.bool("tie_word_embeddings")?.unwrap_or(false),
            initializer_range: json.f64("initializer_range")?.unwrap_or(0.02),
            bos_token_id: json.token_ids("bos_token_id")?.and_then(|ids| ids.first().copied()),
            eos_token_ids: json.token_ids("eos_token_id")?.unwrap_or_default(),
            dtype: json.str("dtype")?.or(json.str("torch_dtype")?).map(str::to_owned),
            text: text.to_owned(),
        };
        config.check_sizes(&json)?;
        Ok(config)
    }

    /// The text of the `config.json` that this was parsed from.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// The text of a `config.json` for weights saved as `dtype` ("float32", "bfloat16"): the original text, unless it
    /// names another format.
    pub fn text_with_dtype(&self, dtype: &str) -> String {
        if self.dtype.as_deref() == Some(dtype) {
            return self.text.clone();
        }
        // `text` parsed as an object when `self` was made, and an object always prints.
        let mut map = parse_object(&self.text, Path::new(CONFIG_FILE)).expect("the text was parsed before");
        let key = if map.contains_key("torch_dtype") && !map.contains_key("dtype") { "torch_dtype" } else { "dtype" };
        map.insert(key.to_owned(), Value::from(dtype));
        to_string_pretty(&map).expect("a JSON object prints") + "\n"
    }

    /// Width of all query heads together: rows of `q_proj`, columns of `o_proj`.
    pub fn query_size(&self) -> usize {
        self.num_attention_heads * self.head_dim
    }

    /// Width of all key (or value) heads together: rows of `k_proj` and `v_proj`.
    pub fn key_value_size(&self) -> usize {
        self.num_key_value_heads * self.head_dim
    }

    /// `[out, in]` of one of [`PROJECTIONS`].
    ///
    /// # Panics
    /// If `projection` is not one of them: callers take the names from there.
    pub fn projection_shape(&self, projection: &str) -> [usize; 2] {
        match projection {
            "self_attn.q_proj" => [self.query_size(), self.hidden_size],
            "self_attn.k_proj" | "self_attn.v_proj" => [self.key_value_size(), self.hidden_size],
            "self_attn.o_proj" => [self.hidden_size, self.query_size()],
            "mlp.gate_proj" | "mlp.up_proj" => [self.intermediate_size, self.hidden_size],
            "mlp.down_proj" => [self.hidden_size, self.intermediate_size],
            other => panic!("`{other}` is not one of PROJECTIONS"),
        }
    }

    fn check_sizes(&self, json: &JsonObject) -> Result<(), ModelError> {
        let (heads, kv_heads, head_dim) = (self.num_attention_heads, self.num_key_value_heads, self.head_dim);
        if json.get("head_dim").is_none() && !self.hidden_size.is_multiple_of(heads) {
            let rule = format!("it must divide hidden_size ({}) when head_dim is not given", self.hidden_size);
            return Err(json.bad("num_attention_heads", heads, rule));
        }
        if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
            let rule = format!("it must divide num_attention_heads ({heads})");
            return Err(json.bad("num_key_value_heads", kv_heads, rule));
        }
        if head_dim == 0 || head_dim % 2 == 1 {
            let rule =
                "it (or hidden_size / num_attention_heads) must be even: rotary embedding turns pairs of columns";
            return Err(json.bad("head_dim", head_dim, rule));
        }
        if self.max_position_embeddings == 0 {
            return Err(json.bad("max_position_embeddings", 0, "it must be at least 1"));
        }
        let constants = [
            ("rms_norm_eps", self.rms_norm_eps),
            ("rope_theta", self.rope_theta),
            ("initializer_range", self.initializer_range),
        ];
        match constants.iter().find(|(_, value)| !value.is_finite() || *value <= 0.0) {
            Some((key, value)) => Err(json.bad(key, value, "it must be greater than zero")),
            None => Ok(()),
        }
    }
}

/// Only `LlamaForCausalLM`: names are the one sign of which arithmetic a checkpoint needs.
fn check_architecture(json: &JsonObject) -> Result<(), ModelError> {
    let other = |found| Err(ModelError::UnsupportedArchitecture { path: json.path.to_path_buf(), found });
    let architectures = json.get("architectures");
    let model_type = json.str("model_type")?;
    match (architectures, model_type) {
        (Some(Value::Array(names)), _) if !names.iter().any(|name| name == "LlamaForCausalLM") => {
            other(format!("`architectures` {}", Value::from(names.clone())))
        }
        (Some(Value::Array(_)) | None, Some("llama")) | (Some(Value::Array(_)), None) => Ok(()),
        (Some(Value::Array(_)) | None, Some(name)) => other(format!("`model_type` \"{name}\"")),
        (None, None) => other("neither `architectures` nor `model_type`".to_owned()),
        (Some(value), _) => Err(json.wrong_type("architectures", "a list of strings", value)),
    }
}

fn check_features(json: &JsonObject) -> Result<(), ModelError> {
    if let Some(method) = json.object("quantization_config")? {
        let method = method.str("quant_method")?.unwrap_or("not named");
        let advice =
            "Use the model's unquantised checkpoint: the base is quantised while it is read, where the run asks for it";
        return Err(json.unsupported("quantization_config", format!("there (method: {method})"), advice));
    }
    let activation = json.str("hidden_act")?.unwrap_or("silu");
    if activation != "silu" {
        return Err(json.unsupported("hidden_act", format!("\"{activation}\""), "Supported: \"silu\""));
    }
    for key in ["attention_bias", "mlp_bias"] {
        if json.bool(key)? == Some(true) {
            let advice = "Only projections without bias are supported; choose a model where it is false";
            return Err(json.unsupported(key, true, advice));
        }
    }
    if let Some(factor) = json.f64("partial_rotary_factor")?.filter(|&factor| factor != 1.0) {
        return Err(json.unsupported("partial_rotary_factor", factor, "Rotary embedding covers the whole head here"));
    }
    Ok(())
}

#[cfg(test)]
pub(crate) mod tests {
    use std::fs::write;

    use serde_json::json;
    use tempfile::tempdir;

    use super::*;

    /// A tiny Llama's `config.json` with some keys replaced; a null removes the key.
    pub(crate) fn tiny_json(changes: &[(&str, Value)]) -> String {
        let mut value = json!({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
            "vocab_size": 11, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
            "max_position_embeddings": 64, "tie_word_embeddings": false, "bos_token_id": 1, "eos_token_id": 2,
            "torch_dtype": "float32"
        });
        for (key, change) in changes {
            value[*key] = change.clone();
        }
        value.as_object_mut().unwrap().retain(|_, value| !value.is_null());
        to_string_pretty(&value).unwrap()
    }

    pub(crate) fn tiny(changes: &[(&str, Value)]) -> Result<LlamaConfig, ModelError> {
        LlamaConfig::parse(&tiny_json(changes), Path::new("m/config.json"))
    }

    fn refusal(key: &str, value: Value) -> String {
        tiny(&[(key, value)]).unwrap_err().to_string()
    }

    #[test]
    fn absent_keys_default_as_transformers_does() {
        let config =
            tiny(&["num_key_value_heads", "rms_norm_eps", "rope_theta"].map(|key| (key, Value::Null))).unwrap();
        assert_eq!((config.num_key_value_heads, config.head_dim), (4, 2));
        assert_eq!((config.rms_norm_eps, config.rope_theta, config.initializer_range), (1e-6, 10_000.0, 0.02));
        assert_eq!(config.rope_scaling, RopeScaling::Default);
    }

    #[test]
    fn rope_theta_reads_from_either_generation_of_the_format() {
        let new = json!({"rope_type": "default", "rope_theta": 500000.0});
        let config = tiny(&[("rope_theta", Value::Null), ("rope_parameters", new)]).unwrap();
        assert_eq!(config.rope_theta, 500_000.0);
        assert_eq!(tiny(&[("rope_theta", json!(7))]).unwrap().rope_theta, 7.0);
    }

    #[test]
    fn another_architecture_is_named_beside_the_supported_one() {
        let message = refusal("architectures", json!(["MistralForCausalLM"]));
        assert!(message.contains("MistralForCausalLM") && message.contains("LlamaForCausalLM"), "{message}");
        assert!(refusal("model_type", json!("qwen2")).contains("`model_type` \"qwen2\""));
        let neither = tiny(&[("model_type", Value::Null), ("architectures", Value::Null)]).unwrap_err();
        assert!(matches!(neither, ModelError::UnsupportedArchitecture { .. }));
    }

    #[test]
    fn a_missing_or_ill_typed_key_is_named_with_its_file() {
        assert!(refusal("hidden_size", Value::Null).starts_with("`m/config.json` has no key `hidden_size`"));
        assert_eq!(
            refusal("vocab_size", json!("11")),
            "`m/config.json`: key `vocab_size` must be a whole number, got \"11\""
        );
        assert!(matches!(LlamaConfig::parse("{", Path::new("c")), Err(ModelError::Json { .. })));
    }

    #[test]
    fn sizes_that_contradict_each_other_are_refused() {
        assert!(refusal("num_key_value_heads", json!(3)).contains("must divide num_attention_heads (4)"));
        assert!(refusal("num_attention_heads", json!(3)).contains("must divide hidden_size (8)"));
        assert!(refusal("head_dim", json!(3)).contains("must be even"));
        assert!(refusal("num_hidden_layers", json!(0)).contains("at least 1"));
        assert!(refusal("rms_norm_eps", json!(-1e-5)).contains("greater than zero"));
    }

    #[test]
    fn what_has_no_arithmetic_here_is_refused() {
        assert!(refusal("attention_bias", json!(true)).contains("without bias"));
        assert!(refusal("mlp_bias", json!(true)).contains("without bias"));
        assert!(refusal("hidden_act", json!("gelu")).contains("\"gelu\""));
        assert!(refusal("quantization_config", json!({"quant_method": "gptq"})).contains("gptq"));
    }

    #[test]
    fn end_tokens_of_both_files_are_merged_in_order() {
        let dir = tempdir().unwrap();
        write(dir.path().join(CONFIG_FILE), tiny_json(&[("eos_token_id", json!(9))])).unwrap();
        write(dir.path().join(GENERATION_CONFIG_FILE), r#"{"eos_token_id": [1, 9, 8]}"#).unwrap();
        assert_eq!(LlamaConfig::read(dir.path()).unwrap().eos_token_ids, [9, 1, 8]);
        write(dir.path().join(GENERATION_CONFIG_FILE), r#"{"eos_token_id": "</s>"}"#).unwrap();
        let error = LlamaConfig::read(dir.path()).unwrap_err().to_string();
        assert!(error.contains("generation_config.json") && error.contains("eos_token_id"), "{error}");
    }

    #[test]
    fn the_text_is_written_back_unchanged_unless_the_dtype_differs() {
        let config = tiny(&[]).unwrap();
        assert_eq!(config.text_with_dtype("float32"), tiny_json(&[]));
        let changed = tiny_json(&[("torch_dtype", json!("bfloat16"))]) + "\n";
        assert_eq!(config.text_with_dtype("bfloat16"), changed);
    }

    #[test]
    fn a_folder_without_config_is_refused() {
        let error = LlamaConfig::read(tempdir().unwrap().path()).unwrap_err();
        assert!(matches!(error, ModelError::NotThere { missing: CONFIG_FILE, .. }));
    }
}
