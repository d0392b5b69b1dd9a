//! llama.cpp's name for how a byte-level BPE tokenizer cuts texts into pieces before it merges them.
//!
//! llama.cpp implements each pre-tokenizer in code and selects it by name. The names here are those whose rules equal the ones in the file, but for two
//! that llama.cpp has nearly, which a note says; other rules are refused, since another split gives other tokens. Without merges every split gives the same.
//! Trade-off: rules are recognized by their text, so an equal rule that is written otherwise is refused.

use std::collections::{HashMap, HashSet};

use serde_json::{Map, Value as Json};

use super::super::container::Value;
use super::Method;

/// The rule of GPT-4 and Llama 3, which keeps up to three digits together.
const LLAMA_3: &str = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";
/// The same with single digits.
const QWEN_2: &str = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";
/// The same whose words include combining marks, that of Qwen3.5.
const QWEN_3_5: &str = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?[\\p{L}\\p{M}]+|\\p{N}| ?[^\\s\\p{L}\\p{M}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";

/// That of GPT-4o and gpt-oss.
const O200K: &str = "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]*[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]+[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";
/// That of Mistral NeMo and later.
const TEKKEN: &str = "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]*[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]+|[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]+[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]*|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";

/// Rules of llama.cpp: the rule's text, its name, whether a piece that is a token is taken without merging it, and whether llama.cpp has it nearly.
const RULES: [(&str, &str, bool, bool); 6] = [
    (LLAMA_3, "llama-bpe", true, false),
    (LLAMA_3, "smaug-bpe", false, false),
    (QWEN_2, "qwen2", false, false),
    (QWEN_3_5, "qwen35", false, false),
    (O200K, "gpt-4o", false, true),
    (TEKKEN, "tekken", true, true),
];

const NEARLY: &str = "llama.cpp knows the capitals A to Z only and no combining marks where it cuts words, so it makes other tokens of some texts in \
                      other letters";

/// Describes byte-level BPE, if llama.cpp does everything that the tokenizer does: under none of its names is a text lowercased, or begun with a space.
pub(super) fn method(
    json: &Map<String, Json>,
    model: &Map<String, Json>,
    merges: &[(&str, &str)],
) -> Result<Method, String> {
    let [rule, normalizer] = ["pre_tokenizer", "normalizer"].map(|key| json.get(key).unwrap_or(&Json::Null));
    let unknown = || format!("how this tokenizer cuts text: {rule}, after {normalizer}");
    let (name, is_near) = name_of(json, model, merges).ok_or_else(unknown)?;
    let merges = merges.iter().map(|(left, right)| format!("{left} {right}")).collect();
    let keys = vec![
        ("model", Value::Text("gpt2".to_owned())),
        ("pre", Value::Text(name.to_owned())),
        ("merges", Value::Texts(merges)),
    ];
    Ok(Method { keys, note: is_near.then_some(NEARLY) })
}

/// Returns llama.cpp's name of the pre-tokenizer, and whether it is nearly the same.
fn name_of(
    json: &Map<String, Json>,
    model: &Map<String, Json>,
    merges: &[(&str, &str)],
) -> Option<(&'static str, bool)> {
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
    // Without merges each byte is a token, however the text is cut.
    if merges.is_empty() && !ignores_merges {
        return Some(("gpt-2", false));
    }
    match (before, flag(bytes, "use_regex", true), ignores_merges) {
        ([], true, false) => Some(("gpt-2", false)),
        ([digits], true, false) if is(digits, "Digits") && flag(digits, "individual_digits", false) => {
            Some(("smollm", false))
        }
        ([split], false, _) if is(split, "Split") && !flag(split, "invert", false) => {
            let text = split.pointer("/pattern/Regex")?.as_str()?;
            let is_isolated = split.get("behavior").and_then(Json::as_str) == Some("Isolated");
            let known = || RULES.iter().filter(|(rule, ..)| *rule == text && is_isolated);
            let same = known().find(|(_, _, ignores, _)| *ignores == ignores_merges);
            let found = same.or_else(|| known().next().filter(|_| merges_give_every_token(json, model, merges)))?;
            Some((found.1, found.3))
        }
        _ => None,
    }
}

/// Returns whether the merges make every token but the added ones of its bytes: then it is the same whether a piece that is a token is merged.
fn merges_give_every_token(json: &Map<String, Json>, model: &Map<String, Json>, merges: &[(&str, &str)]) -> bool {
    let Some(vocab) = model.get("vocab").and_then(Json::as_object) else { return false };
    let id = |token: &str| vocab.get(token).and_then(Json::as_u64);
    let ranks: HashMap<(u64, u64), (usize, u64)> = merges
        .iter()
        .enumerate()
        .filter_map(|(rank, (left, right))| Some(((id(left)?, id(right)?), (rank, id(&format!("{left}{right}"))?))))
        .collect();
    let added = json.get("added_tokens").and_then(Json::as_array).into_iter().flatten();
    let added: HashSet<&str> = added.filter_map(|token| token.get("content")?.as_str()).collect();
    vocab.iter().filter(|(token, _)| !added.contains(token.as_str())).all(|(token, id_of_token)| {
        let mut character = [0; 4];
        let parts: Option<Vec<u64>> = token.chars().map(|one| id(one.encode_utf8(&mut character))).collect();
        let Some(mut parts) = parts else { return false };
        loop {
            let pairs = parts.windows(2).enumerate();
            let best =
                pairs.filter_map(|(at, pair)| ranks.get(&(pair[0], pair[1])).map(|&(rank, id)| (rank, at, id))).min();
            let Some((_, at, merged)) = best else { break };
            parts[at] = merged;
            parts.remove(at + 1);
        }
        parts.len() == 1 && Some(parts[0]) == id_of_token.as_u64()
    })
}

/// Returns whether a normalizer keeps composed characters. llama.cpp has no step for NFC: it makes other tokens of decomposed ones.
fn leaves_composed_text(normalizer: &Json) -> bool {
    match normalizer.get("normalizers").and_then(Json::as_array) {
        Some(steps) => steps.iter().all(leaves_composed_text),
        None => normalizer.is_null() || normalizer.get("type").and_then(Json::as_str) == Some("NFC"),
    }
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

    /// Names the rule of a tokenizer with one merge and with tokens that merges do not give.
    fn name_of(rule: Json, normalizer: Json, ignores_merges: bool) -> Option<&'static str> {
        let model = json!({ "ignore_merges": ignores_merges, "vocab": { "a": 0, "b": 1, "ab": 2, "abc": 3 } });
        let json = json!({ "pre_tokenizer": rule, "normalizer": normalizer, "model": model });
        super::name_of(json.as_object().unwrap(), model.as_object().unwrap(), &[("a", "b")]).map(|(name, _)| name)
    }

    #[test]
    fn a_rule_has_a_name_only_if_llama_cpp_does_all_of_it() {
        let bytes = |adds_space: bool, regex: bool| json!({ "type": "ByteLevel", "add_prefix_space": adds_space, "use_regex": regex });
        let (none, nfc) = (Json::Null, json!({ "type": "NFC" }));
        assert_eq!(name_of(bytes(false, true), none.clone(), false), Some("gpt-2"));
        assert_eq!(name_of(split(LLAMA_3), none.clone(), true), Some("llama-bpe"));
        assert_eq!(name_of(split(LLAMA_3), none.clone(), false), Some("smaug-bpe"));
        assert_eq!(name_of(split(QWEN_2), json!({ "type": "Sequence", "normalizers": [nfc] }), false), Some("qwen2"));
        assert_eq!(name_of(split(QWEN_3_5), json!({ "type": "NFC" }), false), Some("qwen35"));
        assert_eq!(name_of(bytes(true, true), none.clone(), false), None, "a space before the text");
        assert_eq!(name_of(bytes(false, false), none.clone(), false), None, "no rule");
        assert_eq!(name_of(split(QWEN_2), none.clone(), true), None, "tokens that are not merged");
        assert_eq!(name_of(split(QWEN_2), json!({ "type": "Lowercase" }), false), None);
        let merged = split(QWEN_2).to_string().replace("Isolated", "MergedWithPrevious");
        assert_eq!(name_of(merged.parse().unwrap(), none, false), None);
    }

    #[test]
    fn merges_that_give_every_token_fit_either_way() {
        let of = |vocab: Json, merges: &[(&str, &str)], rule: &str| {
            let json = json!({ "pre_tokenizer": split(rule), "model": { "ignore_merges": true, "vocab": vocab } });
            let model = json["model"].as_object().unwrap();
            super::name_of(json.as_object().unwrap(), model, merges)
        };
        let vocab = json!({ "a": 0, "b": 1, "c": 2, "ab": 3, "abc": 4 });
        assert_eq!(of(vocab.clone(), &[("a", "b"), ("ab", "c")], QWEN_2), Some(("qwen2", false)));
        assert_eq!(of(vocab.clone(), &[("a", "b"), ("ab", "c")], O200K), Some(("gpt-4o", true)));
        assert_eq!(of(vocab, &[("a", "b"), ("a", "bc")], QWEN_2), None, "abc is not merged");
        let with_bc = json!({ "a": 0, "b": 1, "c": 2, "ab": 3, "abc": 4, "bc": 5 });
        assert_eq!(of(with_bc, &[("b", "c"), ("a", "b"), ("a", "bc")], QWEN_2), Some(("qwen2", false)));
    }

    #[test]
    fn without_merges_any_rule_cuts_alike() {
        let of = |rule: Json, ignores: bool| {
            let json = json!({ "pre_tokenizer": rule, "model": { "ignore_merges": ignores } });
            super::name_of(json.as_object().unwrap(), json["model"].as_object().unwrap(), &[])
        };
        let bytes = |regex: bool| json!({ "type": "ByteLevel", "add_prefix_space": false, "use_regex": regex });
        assert_eq!(of(bytes(false), false), Some(("gpt-2", false)));
        assert_eq!(of(split("[a-z]"), false), Some(("gpt-2", false)));
        assert_eq!(of(split("[a-z]"), true), None, "pieces may be tokens");
        assert_eq!(of(json!({ "type": "ByteLevel" }), false), None, "a space before the text");
    }
}
