//! A tokenizer as GGUF metadata, from `tokenizer.json` and `tokenizer_config.json`: byte-level BPE or SentencePiece.
//!
//! What llama.cpp does with a text is code there: which of its rules the tokenizer has is in `pre_tokenizer`, and what of SentencePiece is left in a
//! `tokenizer.json` in `sentencepiece`. Tokenizers that it would compute otherwise are refused, or differ in something that a note says.
//! Trade-off: no WordPiece and no Unigram, which no family here has.

mod pre_tokenizer;
mod sentencepiece;

use std::collections::BTreeMap;
use std::path::Path;

use firebrick_arch::folder::{CHAT_TEMPLATE_FILE, TOKENIZER_CONFIG_FILE, TOKENIZER_FILE};
use firebrick_arch::json::{parse_object, read_text};
use firebrick_arch::{ModelConfig, generation_settings};
use serde_json::{Map, Value as Json};

use super::GgufEnds;
use super::container::Value;
use crate::error::ModelError;

/// Kinds of tokens, as ggml numbers them.
const NORMAL: i32 = 1;
const UNKNOWN: i32 = 2;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const UNUSED: i32 = 5;
const BYTE: i32 = 6;

/// Texts that llama.cpp treats as special tokens, whatever their kind. No rule here keeps letters and what follows them in one piece, so no text
/// gives an ordinary token of such a name; llama.cpp would find it in every text that spells it.
const TAKEN_FOR_SPECIAL: &str = "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s> <|eom_id|> <EOT> \
    _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> <｜end▁of▁sentence｜> [e~[ \
    <|fim_prefix|> <fim-prefix> <fim_prefix> <｜fim▁begin｜> <PRE> ▁<PRE> <|code_prefix|> <|prefix|> <|fim_suffix|> \
    <fim-suffix> <fim_suffix> <｜fim▁hole｜> <SUF> ▁<SUF> <|code_suffix|> <|suffix|> <|fim_middle|> <fim-middle> <fim_middle> \
    <｜fim▁end｜> <MID> ▁<MID> <|code_middle|> <|middle|> <|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD] <|fim_repo|> \
    <|repo_name|> <REPO> <reponame> <fim-repo> <|file_sep|> <|channel|> <|message|> <|start|> <|constrain|>";

/// Special tokens that llama.cpp has to print, because it finds the thoughts and tool calls of Gemma 4 by them.
const PRINTED: [&str; 7] =
    ["<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", "<|\"|>"];

/// What a file says of a tokenizer.
pub(super) struct Vocabulary {
    pub metadata: Vec<(String, Value)>,
    /// What a user of the file has to know, in sentences.
    pub notes: Vec<String>,
    /// Whether special tokens take the white space after them, as those of Phi-3 do.
    pub strips_spaces: bool,
}

/// How llama.cpp makes tokens of a text.
struct Method {
    keys: Vec<(&'static str, Value)>,
    note: Option<&'static str>,
}

/// Describes the tokenizer in `folder`, and which tokens its `generation_config.json` suppresses.
pub(super) fn read(
    folder: &Path,
    config: &ModelConfig,
    ends: &GgufEnds,
    merges_in_order: bool,
) -> Result<Vocabulary, ModelError> {
    let path = folder.join(TOKENIZER_FILE);
    let json = parse_object(&read_text(&path)?, &path)?;
    let template = chat_template(folder)?;
    let described = describe(&json, config, ends, template.is_some(), merges_in_order);
    let mut vocabulary = described.map_err(|what| ModelError::NoGguf { what })?;
    let template = template.map(|template| ("tokenizer.chat_template".to_owned(), Value::Text(template)));
    vocabulary.metadata.extend(template);
    if let Some(Json::Array(ids)) = generation_settings(folder)?.get("suppress_tokens") {
        let ids = ids.iter().filter_map(|id| i32::try_from(id.as_i64()?).ok()).collect();
        vocabulary.metadata.push(("tokenizer.ggml.suppress_tokens".to_owned(), Value::I32s(ids)));
    }
    Ok(vocabulary)
}

fn describe(
    json: &Map<String, Json>,
    config: &ModelConfig,
    ends: &GgufEnds,
    has_template: bool,
    merges_in_order: bool,
) -> Result<Vocabulary, String> {
    let bos = ends.before_text.or(config.bos_token_id);
    let model = json.get("model").and_then(Json::as_object).ok_or("a tokenizer without a model")?;
    let kind = model.get("type").and_then(Json::as_str);
    if kind != Some("BPE") {
        return Err(format!("a tokenizer of the kind {}", kind.unwrap_or("that it does not name")));
    }
    let (mut texts, mut kinds) = tokens(json, model, config.spec.vocab_size, bos, ends)?;
    let merges = merges(model)?;
    let method = if model.get("byte_fallback") == Some(&Json::Bool(true)) {
        sentencepiece::method(json, model, &merges, (&mut texts, &mut kinds), has_template, merges_in_order)?
    } else {
        pre_tokenizer::method(json, model, &merges)?
    };
    let mut keys = vec![("tokens", Value::Texts(texts)), ("token_type", Value::I32s(kinds))];
    keys.extend(method.keys);
    keys.extend(bos.map(|id| ("bos_token_id", Value::U32(id))));
    keys.extend(ends.text.map(|id| ("eos_token_id", Value::U32(id))));
    keys.extend(ends.turn.map(|id| ("eot_token_id", Value::U32(id))));
    keys.push(("add_bos_token", Value::Bool(ends.before_text.is_some())));
    Ok(Vocabulary {
        metadata: keys.into_iter().map(|(key, value)| (format!("tokenizer.ggml.{key}"), value)).collect(),
        notes: method.note.into_iter().map(str::to_owned).collect(),
        strips_spaces: strips_spaces(json)?,
    })
}

/// Returns whether added tokens take the white space after them. llama.cpp knows that of all of Phi-3's but three, and of no other tokenizer.
fn strips_spaces(json: &Map<String, Json>) -> Result<bool, String> {
    let added: Vec<&Json> = json.get("added_tokens").and_then(Json::as_array).into_iter().flatten().collect();
    let is = |token: &Json, key: &str| token.get(key) == Some(&Json::Bool(true));
    let is_of_three = |token: &Json| {
        let content = token.get("content").and_then(Json::as_str).unwrap_or_default();
        ["<unk>", "<s>", "<|endoftext|>"].contains(&content)
    };
    let strips = added.iter().any(|token| is(token, "rstrip"));
    let as_phi_3 = added.iter().all(|token| is(token, "rstrip") != is_of_three(token));
    if added.iter().any(|token| is(token, "lstrip")) || (strips && !as_phi_3) {
        return Err("added tokens that take the white space next to them".to_owned());
    }
    Ok(strips)
}

/// Returns the text and the kind of every id. Ids are unused if no text gives their token and it neither begins nor ends texts.
fn tokens(
    json: &Map<String, Json>,
    model: &Map<String, Json>,
    vocab_size: usize,
    bos: Option<u32>,
    ends: &GgufEnds,
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
        by_id.insert(id as usize, (content.to_owned(), kind_of_added(content, is_special)));
    }
    for (id, content, is_special) in &ends.added {
        by_id.insert(*id as usize, (content.clone(), kind_of_added(content, *is_special)));
    }
    if let Some((id, _)) = by_id.last_key_value().filter(|(id, _)| **id >= vocab_size) {
        return Err(format!("a tokenizer with the id {id}, and a model of {vocab_size} tokens"));
    }
    by_id.retain(|id, (text, kind)| {
        *kind != NORMAL
            || [bos, ends.text, ends.turn].contains(&Some(*id as u32))
            || !TAKEN_FOR_SPECIAL.split(' ').any(|name| name == text)
    });
    let token = |id: usize| by_id.remove(&id).unwrap_or_else(|| (format!("[PAD{id}]"), UNUSED));
    Ok((0..vocab_size).map(token).unzip())
}

fn kind_of_added(text: &str, is_special: bool) -> i32 {
    if is_special && !PRINTED.contains(&text) { CONTROL } else { USER_DEFINED }
}

/// Reads the merges as pairs; older files have two tokens with a space between.
fn merges(model: &Map<String, Json>) -> Result<Vec<(&str, &str)>, String> {
    let merges = model.get("merges").and_then(Json::as_array).ok_or("a tokenizer without merges")?;
    fn pair(merge: &Json) -> Option<(&str, &str)> {
        match merge {
            Json::String(merge) => merge.split_once(' '),
            Json::Array(pair) => Some((pair.first()?.as_str()?, pair.get(1)?.as_str()?)),
            _ => None,
        }
    }
    merges.iter().map(pair).collect::<Option<_>>().ok_or_else(|| "merges in an unknown form".to_owned())
}

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

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn tokens_take_spaces_as_in_phi_3_or_are_refused() {
        let of = |tokens: Json| strips_spaces(json!({ "added_tokens": tokens }).as_object().unwrap());
        let token = |content: &str, rstrip: bool| json!({ "content": content, "lstrip": false, "rstrip": rstrip });
        assert_eq!(of(json!([token("<s>", false), token("<|end|>", false)])), Ok(false));
        assert_eq!(of(json!([token("<s>", false), token("<|end|>", true)])), Ok(true));
        assert!(of(json!([token("<|user|>", false), token("<|end|>", true)])).is_err());
        assert!(of(json!([{ "content": "<mask>", "lstrip": true }])).is_err());
    }

    #[test]
    fn ordinary_tokens_with_special_names_are_unused() {
        let added = |id: u32, content: &str| json!({ "id": id, "content": content, "special": true });
        let json = json!({ "added_tokens": [added(2, "<|im_end|>"), added(4, "<|tool_call>")] });
        let model = json!({ "vocab": { "a": 0, "</s>": 1, "<eos>": 3 } });
        let [json, model] = [&json, &model].map(|json| json.as_object().unwrap());
        let (texts, kinds) = tokens(json, model, 5, None, &GgufEnds { text: Some(3), ..GgufEnds::default() }).unwrap();
        assert_eq!(texts, ["a", "[PAD1]", "<|im_end|>", "<eos>", "<|tool_call>"]);
        assert_eq!(kinds, [NORMAL, UNUSED, CONTROL, NORMAL, USER_DEFINED], "llama.cpp prints the last");
    }
}
