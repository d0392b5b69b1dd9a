//! `config.json` of a model folder: the [`ModelSpec`] that its family reads from it, the special tokens, and the text itself.
//!
//! Keys that decide a shape must be there; the others default as in transformers. The text of the file is stored, so that saving a model writes it
//! back unchanged.
//! Trade-off: token ids that neither file names stay absent, where transformers has defaults that fit one vocabulary only.

use std::collections::BTreeSet;
use std::ops::Range;
use std::path::Path;

use serde_json::{Map, Value};

use crate::error::ArchError;
use crate::families::wrapper::{TEXT_CONFIG, TIE_WORD_EMBEDDINGS, text_part};
use crate::families::{self, Wrapper};
use crate::folder::{CONFIG_FILE, GENERATION_CONFIG_FILE};
use crate::json::{JsonObject, parse_object, read_text};
use crate::lora::LoraConfig;
use crate::modules::PieceSpec;
use crate::python_json::to_string_pretty;
use crate::quantization::QUANTIZATION_CONFIG;
use crate::spec::{MlpSpec, ModelSpec, PerLayerInputs};
use crate::text_names::layer_of;

/// The key of the number format, and its name in transformers 4.
const DTYPES: [&str; 2] = ["dtype", "torch_dtype"];
const EOS_TOKEN_ID: &str = "eos_token_id";
const PAD_TOKEN_ID: &str = "pad_token_id";

/// Returns the numbers of the layers after the `layers` of the decoder, under the names of the key in checkpoints and in transformers 5.
fn skipped_layers(json: &JsonObject, layers: usize) -> Result<Range<usize>, ArchError> {
    let count = json.usize("num_nextn_predict_layers")?.or(json.usize("num_mtp_layers")?).unwrap_or(0);
    Ok(layers..layers.saturating_add(count))
}

/// Returns the weight of the loss that balances the experts; transformers has none where a correction balances them, and none for a Gemma 4.
fn router_aux_loss_coef(json: &JsonObject, spec: &ModelSpec) -> Result<Option<f64>, ArchError> {
    let mut routers = spec.layers.iter().filter_map(|layer| layer.mlp.router());
    if routers.next().is_none_or(|router| router.corrects || router.scaled) {
        return Ok(None);
    }
    let key = "router_aux_loss_coef";
    match json.f64(key)?.unwrap_or(0.001) {
        weight if weight.is_finite() && weight >= 0.0 => Ok(Some(weight)),
        weight => Err(json.bad(key, weight, "it must be 0 or more")),
    }
}

/// The contents of a model folder's `config.json`.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// The decoder.
    pub spec: ModelSpec,
    /// The family's name in `config.json`, such as "llama".
    pub model_type: String,
    /// What the decoder is the text model of; `None`: the decoder is the whole checkpoint.
    pub wrapper: Option<&'static Wrapper>,
    /// The token that begins a text.
    pub bos_token_id: Option<u32>,
    /// End-of-text tokens: `config.json`'s, then those that only `generation_config.json` names, then those that a run trains.
    pub eos_token_ids: Vec<u32>,
    /// The padding token, where a run has chosen it.
    pub pad_token_id: Option<u32>,
    /// Numbers of layers that a checkpoint may have after the decoder's and that are not read: they predict more tokens than the next.
    pub skipped_layers: Range<usize>,
    /// The number format that the weights were stored in, such as "bfloat16" (`dtype`, in transformers 4 `torch_dtype`).
    pub dtype: Option<String>,
    /// Weight of the auxiliary loss that balances the experts (`router_aux_loss_coef`, by default 0.001 as in every class of transformers 5.17 to
    /// 5.24; until 5.0 that of gpt-oss had 0.9, which its published files name); `None` without a router, and in families that have no such loss.
    pub router_aux_loss_coef: Option<f64>,
    /// Whether a folder without a head has the embedding's, although the spec does not say so: the class of a wrapper ties them where no key denies it.
    pub ties_without_head: bool,
    /// Weights of projections that a folder of 4-bit codes has without, in names of its tensors: they stay unquantized.
    pub unquantized: BTreeSet<String>,
    /// Rows of embedding and head in the folder: fewer than `spec.vocab_size` where tokens were added.
    pub stored_vocab_size: usize,
    /// The layers' own inputs as the folder has them: with fewer rows than those of the spec where tokens were added.
    pub stored_per_layer_inputs: Option<PerLayerInputs>,
    /// Added tokens. Their rows start at the mean of the folder's rows.
    pub new_tokens: Vec<usize>,
    text: String,
}

impl ModelConfig {
    /// Returns the weights of projections that stay unquantized, in names of the folder and of the run: a stack does if one of its matrices does.
    pub fn dense_weights(&self) -> BTreeSet<String> {
        let mut dense = self.unquantized.clone();
        for (stack, _) in self.spec.stacks().filter(|_| !self.unquantized.is_empty()) {
            let pieces: Vec<String> = stack.pieces.iter().map(PieceSpec::weight_name).collect();
            if pieces.iter().any(|piece| dense.contains(piece)) {
                dense.extend(pieces.into_iter().chain([stack.weight_name()]));
            }
        }
        dense
    }

    /// Reads `config.json`, and `generation_config.json` if it is there, from a model folder.
    ///
    /// # Errors
    /// A missing file, JSON that does not parse, and everything that [`ModelConfig::parse`] refuses.
    pub fn read(dir: &Path) -> Result<Self, ArchError> {
        let path = dir.join(CONFIG_FILE);
        if !path.is_file() {
            let advice = match dir.join("params.json").is_file() {
                true => {
                    "params.json is of another format, Meta's or Mistral's own: get the model in Hugging Face format, with config.json"
                }
                false => "Give a folder in Hugging Face format: config.json, model.safetensors, tokenizer.json",
            };
            return Err(ArchError::NotThere { dir: dir.to_path_buf(), missing: CONFIG_FILE, advice });
        }
        let mut config = Self::parse(&read_text(&path)?, &path)?;
        config.note_eos_token_ids(generation_eos_token_ids(dir)?);
        Ok(config)
    }

    /// Adds tokens that end a text, each once; `config.json` names them too.
    pub fn add_eos_token_ids(&mut self, ids: impl IntoIterator<Item = u32>) {
        if self.note_eos_token_ids(ids) {
            let ids = &self.eos_token_ids;
            self.set(EOS_TOKEN_ID, if let [only] = ids[..] { only.into() } else { ids.clone().into() });
        }
    }

    fn note_eos_token_ids(&mut self, ids: impl IntoIterator<Item = u32>) -> bool {
        let known = self.eos_token_ids.len();
        for id in ids {
            if !self.eos_token_ids.contains(&id) {
                self.eos_token_ids.push(id);
            }
        }
        self.eos_token_ids.len() > known
    }

    /// Chooses the padding token; `config.json` names it too.
    pub fn set_pad_token_id(&mut self, id: u32) {
        self.pad_token_id = Some(id);
        self.set(PAD_TOKEN_ID, id.into());
    }

    /// Says whether head and embedding share one table.
    pub fn set_tied(&mut self, is_tied: bool) {
        self.spec.tie_word_embeddings = is_tied;
        self.set(TIE_WORD_EMBEDDINGS, is_tied.into());
    }

    /// Adds tokens with these ids: every table gets the missing rows, and the rows of all these ids start at the mean of the table.
    pub fn add_tokens(&mut self, ids: &[usize]) {
        self.new_tokens.extend(ids);
        self.grow_vocabulary(ids.iter().max().map_or(0, |id| id + 1));
    }

    /// Grows embedding, head and the table of the layers' own inputs to at least this many rows; never shrinks a table.
    pub fn grow_vocabulary(&mut self, rows: usize) {
        if rows > self.spec.vocab_size {
            self.spec.vocab_size = rows;
            self.set("vocab_size", rows.into());
        }
        if let Some(inputs) = self.spec.per_layer_inputs.as_mut().filter(|inputs| rows > inputs.vocab_size) {
            inputs.vocab_size = rows;
            self.set("vocab_size_per_layer_input", rows.into());
        }
    }

    /// Returns the model as an adapter needs it: gate and up of all experts are one module in every mixture if the settings adapt parameters of
    /// experts ([`LoraConfig::target_parameters`]). Tensors on disk stay as they are.
    #[must_use]
    pub fn for_adapter(mut self, lora: Option<&LoraConfig>) -> Self {
        if lora.is_some_and(LoraConfig::adapts_parameters) {
            for layer in &mut self.spec.layers {
                if let MlpSpec::Experts { fused, .. } = &mut layer.mlp {
                    *fused = true;
                }
            }
        }
        self
    }

    /// Returns the decoder as stored in its folder, without the added rows.
    pub fn stored_spec(&self) -> ModelSpec {
        let (vocab_size, per_layer_inputs) = (self.stored_vocab_size, self.stored_per_layer_inputs);
        ModelSpec { vocab_size, per_layer_inputs, ..self.spec.clone() }
    }

    /// Returns whether a tensor belongs to a layer that is not read.
    pub fn skips(&self, name: &str) -> bool {
        layer_of(name).is_some_and(|layer| self.skipped_layers.contains(&layer))
    }

    /// Changes a key of the text model, and of the wrapper where that has it too.
    fn set(&mut self, key: &str, value: Value) {
        let mut map = self.map();
        // Versions of transformers differ in where they look for this one.
        let is_above = self.wrapper.is_some() && (map.contains_key(key) || key == TIE_WORD_EMBEDDINGS);
        if is_above {
            map.insert(key.to_owned(), value.clone());
        }
        self.text_settings(&mut map).insert(key.to_owned(), value);
        self.text = to_string_pretty(&map) + "\n";
    }

    fn map(&self) -> Map<String, Value> {
        parse_object(&self.text, Path::new(CONFIG_FILE)).expect("the text was parsed before")
    }

    /// Returns the settings of the text model among the keys of the file.
    fn text_settings<'a>(&self, map: &'a mut Map<String, Value>) -> &'a mut Map<String, Value> {
        let is_nested = self.wrapper.is_some() && map.get(TEXT_CONFIG).is_some_and(Value::is_object);
        if is_nested { map.get_mut(TEXT_CONFIG).and_then(Value::as_object_mut).expect("it is an object") } else { map }
    }

    /// Parses the text of a `config.json`; `path` is for messages.
    ///
    /// # Errors
    /// Missing or ill-typed keys, sizes that contradict each other, an architecture that no family reads, and features without
    /// arithmetic here; each error names the file and the key.
    pub fn parse(text: &str, path: &Path) -> Result<Self, ArchError> {
        let map = parse_object(text, path)?;
        let json = JsonObject::new(path, &map);
        let part = text_part(&json)?;
        let (family, settings) = match &part {
            Some(part) => (part.family, JsonObject::within(path, TEXT_CONFIG, &part.settings)),
            None => (families::family_of(&json)?, json),
        };
        let spec = family.spec(&settings)?;
        // Wrappers have these at the top, or with the other settings of their text model.
        let token_ids = |key| Ok::<_, ArchError>(json.token_ids(key)?.or(settings.token_ids(key)?));
        let dtype =
            |json: &JsonObject| Ok::<_, ArchError>(json.str(DTYPES[0])?.or(json.str(DTYPES[1])?).map(str::to_owned));
        Ok(Self {
            ties_without_head: part.as_ref().is_some_and(|part| part.ties_without_head),
            unquantized: BTreeSet::new(),
            stored_vocab_size: spec.vocab_size,
            stored_per_layer_inputs: spec.per_layer_inputs,
            skipped_layers: skipped_layers(&settings, spec.layers.len())?,
            router_aux_loss_coef: router_aux_loss_coef(&settings, &spec)?,
            new_tokens: Vec::new(),
            spec,
            model_type: family.model_type.to_owned(),
            bos_token_id: token_ids("bos_token_id")?.and_then(|ids| ids.first().copied()),
            eos_token_ids: token_ids(EOS_TOKEN_ID)?.unwrap_or_default(),
            pad_token_id: None,
            dtype: dtype(&json)?.or(dtype(&settings)?),
            text: text.to_owned(),
            wrapper: part.as_ref().map(|part| part.wrapper),
        })
    }

    /// Returns the text of the `config.json` that this was parsed from.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Returns what `config.json` says about quantized weights, if they are.
    pub fn quantization_config(&self) -> Option<Value> {
        self.map().shift_remove(QUANTIZATION_CONFIG)
    }

    /// Returns the text of a `config.json` for weights saved as `dtype` ("float32", "bfloat16") and quantized as `quantization` describes. The text
    /// is the original unless one of these changes it.
    pub fn text_with(&self, dtype: &str, quantization: Option<Value>) -> String {
        let mut map = self.map();
        if self.dtype.as_deref() == Some(dtype) && quantization.is_none() && !map.contains_key(QUANTIZATION_CONFIG) {
            return self.text.clone();
        }
        let [current, older] = DTYPES;
        let key = if map.contains_key(older) && !map.contains_key(current) { older } else { current };
        map.insert(key.to_owned(), Value::from(dtype));
        for (_, named) in self.text_settings(&mut map).iter_mut().filter(|(key, _)| DTYPES.contains(&key.as_str())) {
            *named = Value::from(dtype);
        }
        match quantization {
            Some(quantization) => map.insert(QUANTIZATION_CONFIG.to_owned(), quantization),
            None => map.shift_remove(QUANTIZATION_CONFIG),
        };
        if self.wrapper.is_some_and(|_| map.contains_key(TEXT_CONFIG)) {
            self.text_settings(&mut map).shift_remove(QUANTIZATION_CONFIG);
        }
        to_string_pretty(&map) + "\n"
    }
}

/// Returns the end-of-text tokens that the `generation_config.json` of a model or adapter folder names; none if there is no such file.
///
/// # Errors
/// A file that cannot be read or is no JSON object, or a key `eos_token_id` that is neither a token id nor a list of them.
pub fn generation_eos_token_ids(dir: &Path) -> Result<Vec<u32>, ArchError> {
    let map = generation_settings(dir)?;
    let path = dir.join(GENERATION_CONFIG_FILE);
    Ok(JsonObject::new(&path, &map).token_ids(EOS_TOKEN_ID)?.unwrap_or_default())
}

/// Returns the padding token that the `generation_config.json` of a folder names; `None` if it names none or there is no such file.
pub fn generation_pad_token_id(dir: &Path) -> Result<Option<u32>, ArchError> {
    // Older models write -1 for none.
    Ok(generation_settings(dir)?.get(PAD_TOKEN_ID).and_then(Value::as_u64).and_then(|id| u32::try_from(id).ok()))
}

/// Reads the `generation_config.json` of a model or adapter folder; empty if there is none.
pub fn generation_settings(dir: &Path) -> Result<Map<String, Value>, ArchError> {
    let path = dir.join(GENERATION_CONFIG_FILE);
    if path.is_file() { parse_object(&read_text(&path)?, &path) } else { Ok(Map::new()) }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::fs::write;

    use serde_json::json;
    use tempfile::tempdir;

    use super::*;
    use crate::rope::Rope;

    /// Returns a tiny model's `config.json` in the layout of transformers 4 with some keys replaced; a null removes the key.
    pub(crate) fn family_json(architecture: &str, model_type: &str, changes: &[(&str, Value)]) -> String {
        let mut value = json!({
            "architectures": [architecture], "model_type": model_type, "hidden_act": "silu",
            "vocab_size": 11, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
            "max_position_embeddings": 64, "tie_word_embeddings": false, "bos_token_id": 1, "eos_token_id": 2,
            "torch_dtype": "float32"
        });
        for (key, change) in changes {
            value[*key] = change.clone();
        }
        value.as_object_mut().unwrap().retain(|_, value| !value.is_null());
        to_string_pretty(&value)
    }

    /// Returns a tiny Llama's `config.json` with some keys replaced; a null removes the key.
    pub(crate) fn tiny_json(changes: &[(&str, Value)]) -> String {
        family_json("LlamaForCausalLM", "llama", changes)
    }

    pub(crate) fn parse(text: &str) -> Result<ModelConfig, ArchError> {
        ModelConfig::parse(text, Path::new("m/config.json"))
    }

    pub(crate) fn tiny(changes: &[(&str, Value)]) -> Result<ModelConfig, ArchError> {
        parse(&tiny_json(changes))
    }

    /// Returns the rotary embedding of a tiny Llama with heads of 32 columns and these `rope_parameters`.
    pub(crate) fn rope(parameters: Value) -> Result<Rope, ArchError> {
        let config = tiny(&[
            ("head_dim", json!(32)),
            ("max_position_embeddings", json!(16384)),
            ("rope_theta", Value::Null),
            ("rope_parameters", parameters),
        ])?;
        Ok(config.spec.ropes[0].clone())
    }

    pub(crate) fn refusal_of(config: Result<ModelConfig, ArchError>) -> String {
        config.unwrap_err().to_string()
    }

    #[test]
    fn end_tokens_of_both_files_are_merged_in_order() {
        let dir = tempdir().unwrap();
        write(dir.path().join(CONFIG_FILE), tiny_json(&[("eos_token_id", json!(9))])).unwrap();
        write(dir.path().join(GENERATION_CONFIG_FILE), r#"{"eos_token_id": [1, 9, 8]}"#).unwrap();
        let config = ModelConfig::read(dir.path()).unwrap();
        assert_eq!((config.bos_token_id, &config.eos_token_ids[..]), (Some(1), &[9, 1, 8][..]));
        write(dir.path().join(GENERATION_CONFIG_FILE), r#"{"eos_token_id": "</s>"}"#).unwrap();
        let error = ModelConfig::read(dir.path()).unwrap_err().to_string();
        assert!(error.contains("generation_config.json") && error.contains("eos_token_id"), "{error}");
    }

    #[test]
    fn added_tokens_take_rows_that_are_there_before_tables_grow() {
        let mut config = tiny(&[]).unwrap();
        config.add_tokens(&[9, 10]);
        assert_eq!((config.spec.vocab_size, config.text()), (11, &tiny_json(&[])[..]));
        config.add_tokens(&[11, 12]);
        let read = parse(config.text()).unwrap();
        assert_eq!((read.spec.vocab_size, config.stored_spec().vocab_size), (13, 11));
        assert_eq!((config.spec == read.spec, config.new_tokens), (true, vec![9, 10, 11, 12]));
    }

    #[test]
    fn the_text_is_written_back_unchanged_unless_the_dtype_differs() {
        let config = tiny(&[]).unwrap();
        assert_eq!(config.text(), tiny_json(&[]));
        assert_eq!(config.text_with("float32", None), tiny_json(&[]));
        let changed = tiny_json(&[("torch_dtype", json!("bfloat16"))]) + "\n";
        assert_eq!(config.text_with("bfloat16", None), changed);
        let new = [("torch_dtype", Value::Null), ("dtype", json!("float32"))];
        let changed = tiny_json(&[("torch_dtype", Value::Null), ("dtype", json!("bfloat16"))]) + "\n";
        assert_eq!(tiny(&new).unwrap().text_with("bfloat16", None), changed);
        let infinite = parse(&tiny_json(&[]).replacen('{', "{\"limit\": [-Infinity, NaN],", 1)).unwrap();
        assert!(infinite.text_with("bfloat16", None).contains("    -Infinity,\n    NaN\n"));
    }

    #[test]
    fn the_text_of_unquantized_weights_has_no_quantization() {
        let quantization = json!({"quant_method": "bitsandbytes", "load_in_4bit": true});
        let config = tiny(&[(QUANTIZATION_CONFIG, quantization.clone())]).unwrap();
        assert_eq!(config.text_with("float32", None), tiny_json(&[]) + "\n");
        assert_eq!(
            (config.quantization_config(), tiny(&[]).unwrap().quantization_config()),
            (Some(quantization.clone()), None)
        );
        assert_eq!(tiny(&[]).unwrap().text_with("float32", Some(quantization)), config.text().to_owned() + "\n");
    }

    #[test]
    fn a_folder_without_config_and_text_that_is_no_json_are_refused() {
        assert!(matches!(parse("{"), Err(ArchError::Json { .. })));
        let error = ModelConfig::read(tempdir().unwrap().path()).unwrap_err();
        assert!(matches!(error, ArchError::NotThere { missing: CONFIG_FILE, .. }));
    }
}
