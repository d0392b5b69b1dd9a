//! A byte-level BPE tokenizer as GGUF metadata, from `tokenizer.json` and `tokenizer_config.json`.
//!
//! llama.cpp has its own code for how text is cut before the merges, and knows it by a name. The names here are those whose rules are
//! written in the file that is read; other rules are refused, since another cut gives other tokens.
//! Trade-off: no SentencePiece models (Llama 2, Mistral 7B v0.1, Gemma).

use std::collections::BTreeMap;
use std::path::Path;

use firebrick_arch::folder::{CHAT_TEMPLATE_FILE, TOKENIZER_CONFIG_FILE, TOKENIZER_FILE};
use firebrick_arch::json::{parse_object, read_text};
use serde_json::{Map, Value as Json};

use super::container::Value;
use crate::error::ModelError;

/// Kinds of tokens, as ggml numbers them.
const NORMAL: i32 = 1;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const UNUSED: i32 = 5;

/// The rule of GPT-4 and Llama 3, which keeps up to three digits together.
const LLAMA_3: &str = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";
/// The same with single digits.
const QWEN_2: &str = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";

/// The metadata of the tokenizer in `folder`, for a model of `vocab_size` tokens.
///
/// # Errors
/// Files that cannot be read, and tokenizers that GGUF cannot describe here, by what is different.
pub(super) fn metadata(
    folder: &Path,
    vocab_size: usize,
    bos: Option<u32>,
    eos: Option<u32>,
) -> Result<Vec<(String, Value)>, ModelError> {
    let path = folder.join(TOKENIZER_FILE);
    let json = parse_object(&read_text(&path)?, &path)?;
    let refused = |what: String| ModelError::NoGguf { what };
    let model =
        json.get("model").and_then(Json::as_object).ok_or_else(|| refused("a tokenizer without a model".into()))?;
    if model.get("type").and_then(Json::as_str) != Some("BPE") || model.get("byte_fallback") == Some(&Json::Bool(true))
    {
        return Err(refused("a tokenizer that is not byte-level BPE".to_owned()));
    }
    let pre = pre_tokenizer(&json).ok_or_else(|| {
        refused(format!("how this tokenizer cuts text: {}", json.get("pre_tokenizer").unwrap_or(&Json::Null)))
    })?;
    let (tokens, kinds) = tokens(&json, model, vocab_size).map_err(refused)?;
    let key = |name: &str| format!("tokenizer.ggml.{name}");
    let mut metadata = vec![
        (key("model"), Value::Text("gpt2".to_owned())),
        (key("pre"), Value::Text(pre.to_owned())),
        (key("tokens"), Value::Texts(tokens)),
        (key("token_type"), Value::I32s(kinds)),
        (key("merges"), Value::Texts(merges(model).map_err(refused)?)),
    ];
    metadata.extend(bos.map(|id| (key("bos_token_id"), Value::U32(id))));
    metadata.extend(eos.map(|id| (key("eos_token_id"), Value::U32(id))));
    metadata.push((key("add_bos_token"), Value::Bool(bos.is_some_and(|bos| begins_with(&json, bos)))));
    metadata
        .extend(chat_template(folder)?.map(|template| ("tokenizer.chat_template".to_owned(), Value::Text(template))));
    Ok(metadata)
}

/// llama.cpp's name of the rule by which text is cut.
fn pre_tokenizer(json: &Map<String, Json>) -> Option<&'static str> {
    let rule = json.get("pre_tokenizer")?;
    let is = |step: &Json, name: &str| step.get("type").and_then(Json::as_str) == Some(name);
    let steps = match rule.get("pretokenizers").and_then(Json::as_array) {
        Some(steps) => steps.iter().collect(),
        None => vec![rule],
    };
    match steps.as_slice() {
        [bytes] if is(bytes, "ByteLevel") => Some("gpt-2"),
        [digits, bytes] if is(digits, "Digits") && is(bytes, "ByteLevel") => {
            (digits.get("individual_digits") == Some(&Json::Bool(true))).then_some("smollm")
        }
        [split, bytes] if is(split, "Split") && is(bytes, "ByteLevel") => {
            match split.get("pattern")?.get("Regex")?.as_str()? {
                LLAMA_3 => Some("llama-bpe"),
                QWEN_2 => Some("qwen2"),
                _ => None,
            }
        }
        _ => None,
    }
}

/// The text and the kind of every id; ids without a token are unused.
fn tokens(
    json: &Map<String, Json>,
    model: &Map<String, Json>,
    vocab_size: usize,
) -> Result<(Vec<String>, Vec<i32>), String> {
    let mut by_id: BTreeMap<usize, (String, i32)> = BTreeMap::new();
    let vocab = model.get("vocab").and_then(Json::as_object).ok_or("a tokenizer without a vocabulary")?;
    for (token, id) in vocab {
        by_id.insert(id.as_u64().ok_or("an id that is no number")? as usize, (token.clone(), NORMAL));
    }
    for token in json.get("added_tokens").and_then(Json::as_array).into_iter().flatten() {
        let id = token.get("id").and_then(Json::as_u64).ok_or("an added token without an id")?;
        let content = token.get("content").and_then(Json::as_str).ok_or("an added token without a text")?;
        let is_special = token.get("special") == Some(&Json::Bool(true));
        by_id.insert(id as usize, (content.to_owned(), if is_special { CONTROL } else { USER_DEFINED }));
    }
    if let Some((id, _)) = by_id.last_key_value().filter(|(id, _)| **id >= vocab_size) {
        return Err(format!("a tokenizer with the id {id}, and a model of {vocab_size} tokens"));
    }
    let token = |id: usize| by_id.remove(&id).unwrap_or_else(|| (format!("[PAD{id}]"), UNUSED));
    Ok((0..vocab_size).map(token).unzip())
}

/// The merges, each as two tokens with a space between; newer files have pairs.
fn merges(model: &Map<String, Json>) -> Result<Vec<String>, String> {
    let merges = model.get("merges").and_then(Json::as_array).ok_or("a tokenizer without merges")?;
    let text = |merge: &Json| match merge {
        Json::String(merge) => Some(merge.clone()),
        Json::Array(pair) => Some(format!("{} {}", pair.first()?.as_str()?, pair.get(1)?.as_str()?)),
        _ => None,
    };
    merges.iter().map(text).collect::<Option<_>>().ok_or_else(|| "merges in an unknown form".to_owned())
}

/// Whether the tokenizer puts this token before every text.
fn begins_with(json: &Map<String, Json>, bos: u32) -> bool {
    let processor = json.get("post_processor").unwrap_or(&Json::Null);
    let steps = processor.get("processors").and_then(Json::as_array);
    steps.map_or_else(|| vec![processor], |steps| steps.iter().collect()).into_iter().any(|step| {
        let first = step.pointer("/single/0/SpecialToken/id").and_then(Json::as_str);
        let ids = first.and_then(|token| step.get("special_tokens")?.get(token)?.get("ids")?.as_array());
        ids.is_some_and(|ids| ids.first().and_then(Json::as_u64) == Some(u64::from(bos)))
    })
}

/// The chat template of a folder.
fn chat_template(folder: &Path) -> Result<Option<String>, ModelError> {
    let path = folder.join(CHAT_TEMPLATE_FILE);
    if path.is_file() {
        return Ok(Some(read_text(&path)?));
    }
    let path = folder.join(TOKENIZER_CONFIG_FILE);
    if !path.is_file() {
        return Ok(None);
    }
    let json = parse_object(&read_text(&path)?, &path)?;
    Ok(json.get("chat_template").and_then(Json::as_str).map(str::to_owned))
}
