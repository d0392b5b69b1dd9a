//! A byte-level BPE tokenizer as GGUF metadata, from `tokenizer.json` and `tokenizer_config.json`.
//!
//! llama.cpp implements each pre-tokenizer in code and selects it by name. The names here are those whose rules equal the ones in the file; other
//! rules are refused, since another split gives other tokens.
//! Trade-off: no SentencePiece models (Llama 2, Mistral 7B, Gemma), and no tekken (Mistral Nemo and later).

use std::collections::BTreeMap;
use std::path::Path;

use firebrick_arch::folder::{CHAT_TEMPLATE_FILE, TOKENIZER_CONFIG_FILE, TOKENIZER_FILE};
use firebrick_arch::json::{parse_object, read_text};
use serde_json::{Map, Value as Json};

use super::GgufEnds;
use super::container::Value;
use crate::error::ModelError;

/// Kinds of tokens, as ggml numbers them.
const NORMAL: i32 = 1;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const UNUSED: i32 = 5;

/// Texts that llama.cpp treats as special tokens, whatever their kind. No rule here keeps letters and what follows them in one piece, so no text
/// gives an ordinary token of such a name; llama.cpp would find it in every text that spells it.
const TAKEN_FOR_SPECIAL: &str = "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s> <|eom_id|> <EOT> \
    _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> <｜end▁of▁sentence｜> [e~[ \
    <|fim_prefix|> <fim-prefix> <fim_prefix> <｜fim▁begin｜> <PRE> ▁<PRE> <|code_prefix|> <|prefix|> <|fim_suffix|> \
    <fim-suffix> <fim_suffix> <｜fim▁hole｜> <SUF> ▁<SUF> <|code_suffix|> <|suffix|> <|fim_middle|> <fim-middle> <fim_middle> \
    <｜fim▁end｜> <MID> ▁<MID> <|code_middle|> <|middle|> <|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD] <|fim_repo|> \
    <|repo_name|> <REPO> <reponame> <fim-repo> <|file_sep|> <|channel|> <|message|> <|start|> <|constrain|>";

/// The rule of GPT-4 and Llama 3, which keeps up to three digits together.
const LLAMA_3: &str = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";
/// The same with single digits.
const QWEN_2: &str = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";

/// Returns the metadata of the tokenizer in `folder`, for a model of `vocab_size` tokens.
pub(super) fn metadata(
    folder: &Path,
    vocab_size: usize,
    bos: Option<u32>,
    ends: GgufEnds,
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
        let [rule, normalizer] = ["pre_tokenizer", "normalizer"].map(|key| json.get(key).unwrap_or(&Json::Null));
        refused(format!("how this tokenizer cuts text: {rule}, after {normalizer}"))
    })?;
    let (tokens, kinds) = tokens(&json, model, vocab_size, &[bos, ends.text, ends.turn]).map_err(refused)?;
    let key = |name: &str| format!("tokenizer.ggml.{name}");
    let mut metadata = vec![
        (key("model"), Value::Text("gpt2".to_owned())),
        (key("pre"), Value::Text(pre.to_owned())),
        (key("tokens"), Value::Texts(tokens)),
        (key("token_type"), Value::I32s(kinds)),
        (key("merges"), Value::Texts(merges(model).map_err(refused)?)),
    ];
    metadata.extend(bos.map(|id| (key("bos_token_id"), Value::U32(id))));
    metadata.extend(ends.text.map(|id| (key("eos_token_id"), Value::U32(id))));
    metadata.extend(ends.turn.map(|id| (key("eot_token_id"), Value::U32(id))));
    metadata.push((key("add_bos_token"), Value::Bool(bos.is_some_and(|bos| begins_with(&json, bos)))));
    metadata
        .extend(chat_template(folder)?.map(|template| ("tokenizer.chat_template".to_owned(), Value::Text(template))));
    Ok(metadata)
}

/// Returns llama.cpp's name of the pre-tokenizer, if llama.cpp does everything else that the tokenizer does too: under one name a piece that is a
/// token is not merged again, and under none is a text lowercased, or begun with a space.
fn pre_tokenizer(json: &Map<String, Json>) -> Option<&'static str> {
    let rule = json.get("pre_tokenizer")?;
    let is = |step: &Json, name: &str| step.get("type").and_then(Json::as_str) == Some(name);
    let flag = |step: &Json, key: &str, default: bool| step.get(key).and_then(Json::as_bool).unwrap_or(default);
    let steps = match rule.get("pretokenizers").and_then(Json::as_array) {
        Some(steps) => steps.iter().collect(),
        None => vec![rule],
    };
    let (bytes, before) = steps.split_last()?;
    let adds_space = flag(bytes, "add_prefix_space", true);
    if !is(bytes, "ByteLevel") || adds_space || !json.get("normalizer").is_none_or(leaves_composed_text) {
        return None;
    }
    let ignores_merges = flag(json.get("model")?, "ignore_merges", false);
    match (before, flag(bytes, "use_regex", true), ignores_merges) {
        ([], true, false) => Some("gpt-2"),
        ([digits], true, false) if is(digits, "Digits") && flag(digits, "individual_digits", false) => Some("smollm"),
        ([split], false, _) if is(split, "Split") && !flag(split, "invert", false) => {
            let is_isolated = split.get("behavior").and_then(Json::as_str) == Some("Isolated");
            match (split.pointer("/pattern/Regex")?.as_str()?, ignores_merges) {
                (LLAMA_3, true) if is_isolated => Some("llama-bpe"),
                (LLAMA_3, false) if is_isolated => Some("smaug-bpe"),
                (QWEN_2, false) if is_isolated => Some("qwen2"),
                _ => None,
            }
        }
        _ => None,
    }
}

/// Returns whether a normalizer leaves texts of composed characters unchanged. llama.cpp has no step for NFC: it makes other tokens of a text with
/// decomposed characters.
fn leaves_composed_text(normalizer: &Json) -> bool {
    match normalizer.get("normalizers").and_then(Json::as_array) {
        Some(steps) => steps.iter().all(leaves_composed_text),
        None => normalizer.is_null() || normalizer.get("type").and_then(Json::as_str) == Some("NFC"),
    }
}

/// Returns the text and the kind of every id. Ids are unused if no text gives their token and it neither begins nor ends texts.
fn tokens(
    json: &Map<String, Json>,
    model: &Map<String, Json>,
    vocab_size: usize,
    ends: &[Option<u32>],
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
    by_id.retain(|id, (text, kind)| {
        *kind != NORMAL || ends.contains(&Some(*id as u32)) || !TAKEN_FOR_SPECIAL.split(' ').any(|name| name == text)
    });
    let token = |id: usize| by_id.remove(&id).unwrap_or_else(|| (format!("[PAD{id}]"), UNUSED));
    Ok((0..vocab_size).map(token).unzip())
}

/// Reads the merges, each as two tokens with a space between; newer files have pairs.
fn merges(model: &Map<String, Json>) -> Result<Vec<String>, String> {
    let merges = model.get("merges").and_then(Json::as_array).ok_or("a tokenizer without merges")?;
    let text = |merge: &Json| match merge {
        Json::String(merge) => Some(merge.clone()),
        Json::Array(pair) => Some(format!("{} {}", pair.first()?.as_str()?, pair.get(1)?.as_str()?)),
        _ => None,
    };
    merges.iter().map(text).collect::<Option<_>>().ok_or_else(|| "merges in an unknown form".to_owned())
}

/// Returns whether the tokenizer begins every text with this token.
fn begins_with(json: &Map<String, Json>, bos: u32) -> bool {
    let processor = json.get("post_processor").unwrap_or(&Json::Null);
    let steps = processor.get("processors").and_then(Json::as_array);
    steps.map_or_else(|| vec![processor], |steps| steps.iter().collect()).into_iter().any(|step| {
        let first = step.pointer("/single/0/SpecialToken/id").and_then(Json::as_str);
        let ids = first.and_then(|token| step.get("special_tokens")?.get(token)?.get("ids")?.as_array());
        ids.is_some_and(|ids| ids.first().and_then(Json::as_u64) == Some(u64::from(bos)))
    })
}

/// Reads the chat template of a folder.
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

    fn split(regex: &str) -> Json {
        let split = json!({ "type": "Split", "pattern": { "Regex": regex }, "behavior": "Isolated", "invert": false });
        let bytes = json!({ "type": "ByteLevel", "add_prefix_space": false, "use_regex": false });
        json!({ "type": "Sequence", "pretokenizers": [split, bytes] })
    }

    fn name_of(rule: Json, normalizer: Json, ignores_merges: bool) -> Option<&'static str> {
        let model = json!({ "ignore_merges": ignores_merges });
        let json = json!({ "pre_tokenizer": rule, "normalizer": normalizer, "model": model });
        pre_tokenizer(json.as_object().unwrap())
    }

    #[test]
    fn a_rule_has_a_name_only_if_llama_cpp_does_all_of_it() {
        let bytes = |adds_space: bool, regex: bool| json!({ "type": "ByteLevel", "add_prefix_space": adds_space, "use_regex": regex });
        let (none, nfc) = (Json::Null, json!({ "type": "NFC" }));
        assert_eq!(name_of(bytes(false, true), none.clone(), false), Some("gpt-2"));
        assert_eq!(name_of(split(LLAMA_3), none.clone(), true), Some("llama-bpe"));
        assert_eq!(name_of(split(LLAMA_3), none.clone(), false), Some("smaug-bpe"));
        assert_eq!(name_of(split(QWEN_2), json!({ "type": "Sequence", "normalizers": [nfc] }), false), Some("qwen2"));
        assert_eq!(name_of(bytes(true, true), none.clone(), false), None, "a space before the text");
        assert_eq!(name_of(bytes(false, false), none.clone(), false), None, "no rule");
        assert_eq!(name_of(split(QWEN_2), none.clone(), true), None, "tokens that are not merged");
        assert_eq!(name_of(split(QWEN_2), json!({ "type": "Lowercase" }), false), None);
        let merged = split(QWEN_2).to_string().replace("Isolated", "MergedWithPrevious");
        assert_eq!(name_of(merged.parse().unwrap(), none, false), None);
    }

    #[test]
    fn an_ordinary_token_that_llama_cpp_would_take_for_special_is_unused() {
        let json = json!({ "added_tokens": [{ "id": 2, "content": "<|im_end|>", "special": true }] });
        let model = json!({ "vocab": { "a": 0, "</s>": 1, "<eos>": 3 } });
        let [json, model] = [&json, &model].map(|json| json.as_object().unwrap());
        let (texts, kinds) = tokens(json, model, 4, &[None, Some(3)]).unwrap();
        assert_eq!(texts, ["a", "[PAD1]", "<|im_end|>", "<eos>"]);
        assert_eq!(kinds, [NORMAL, UNUSED, CONTROL, NORMAL]);
    }
}
