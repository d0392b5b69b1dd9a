//! SentencePiece's BPE with bytes for unknown characters (Llama 2, Mistral, Gemma), as llama.cpp computes it: characters are merged to the token with
//! the largest score.
//!
//! A `tokenizer.json` has no scores but a list of merges, in the order of the scores that they were made from. A token's score here is the negative
//! number of its first merge, counted by tokens: another value than in `tokenizer.model`, and the same order, which is all that counts.
//! Trade-off: llama.cpp merges whatever gives a token, so a tokenizer whose list leaves out such a pair is refused. Not so in Gemma 4, where llama.cpp
//! reads the list itself, and merges no line break with another character.

use std::collections::{HashMap, HashSet};

use serde_json::{Map, Value as Json};

use super::super::container::Value;
use super::{BYTE, Method, UNKNOWN, UNUSED};

/// SentencePiece's character for a space.
const SPACE: &str = "\u{2581}";

const NOT_IF_THERE: &str = "llama.cpp adds a space at the start and after special tokens even where the text has one, which this tokenizer does not";
const NOT_AT_START: &str = "llama.cpp adds no space before a text without the chat template, which this tokenizer does; chats are as in training";
const NOT_AFTER_SPECIAL: &str = "llama.cpp adds a space before a text that begins with one and after special tokens in it, which this tokenizer does \
                                 not";

/// What the tokenizer does before the text of a segment, which is all between two special tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Prefix {
    Nothing,
    Space,
    /// A space, unless there is one.
    SpaceIfNone,
    /// The same, before the first segment only, and only if the text does not begin with a special token.
    SpaceAtStart,
}

/// Describes the tokenizer; `tokens` are the texts and kinds of all ids, of which bytes and the unknown token get their kinds here.
pub(super) fn method(
    json: &Map<String, Json>,
    model: &Map<String, Json>,
    merges: &[(&str, &str)],
    (texts, kinds): (&mut [String], &mut [i32]),
    has_template: bool,
    in_order: bool,
) -> Result<Method, String> {
    if model.get("ignore_merges") == Some(&Json::Bool(true)) {
        return Err("a tokenizer with bytes for unknown characters that takes tokens without merging them".to_owned());
    }
    let [rule, normalizer] = ["pre_tokenizer", "normalizer"].map(|key| json.get(key).unwrap_or(&Json::Null));
    let unknown = || format!("how this tokenizer cuts text: {rule}, after {normalizer}");
    let prefix = prefix(rule, normalizer).ok_or_else(unknown)?;
    let bytes: HashSet<String> = (0..=255).map(|byte| format!("<0x{byte:02X}>")).collect();
    let unk = model.get("unk_token").and_then(Json::as_str);
    for (text, kind) in texts.iter().zip(kinds.iter_mut()) {
        if bytes.contains(text) {
            *kind = BYTE;
        } else if Some(text.as_str()) == unk {
            *kind = UNKNOWN;
        }
    }
    if kinds.iter().filter(|kind| **kind == BYTE).count() != bytes.len() {
        return Err("a tokenizer without a token for each byte".to_owned());
    }
    let (adds_space, note) = match prefix {
        Prefix::Nothing => (false, None),
        Prefix::Space => (true, None),
        Prefix::SpaceIfNone => (true, Some(NOT_IF_THERE)),
        Prefix::SpaceAtStart if has_template => (false, Some(NOT_AT_START)),
        Prefix::SpaceAtStart => (true, Some(NOT_AFTER_SPECIAL)),
    };
    let mut keys = if in_order {
        in_order_of_merges(merges, prefix)?
    } else {
        let scores = Value::F32s(scores(merges, texts, kinds)?);
        vec![("model", Value::Text("llama".to_owned())), ("pre", Value::Text("default".to_owned())), ("scores", scores)]
    };
    keys.push(("add_space_prefix", Value::Bool(adds_space)));
    let unk = texts.iter().position(|text| Some(text.as_str()) == unk);
    keys.extend(unk.map(|id| ("unknown_token_id", Value::U32(id as u32))));
    Ok(Method { keys, note })
}

/// Describes the merges in their order, for a tokenizer that puts nothing before a text.
fn in_order_of_merges(merges: &[(&str, &str)], prefix: Prefix) -> Result<Vec<(&'static str, Value)>, String> {
    if prefix != Prefix::Nothing {
        return Err("a tokenizer that puts a space before a text, in a family where llama.cpp does not".to_owned());
    }
    let is_cut = |(left, right): &&(&str, &str)| {
        let breaks = |text: &str| text.matches('\n').count();
        let found = breaks(left) + breaks(right);
        found > 0 && found < left.len() + right.len()
    };
    if let Some((left, right)) = merges.iter().find(is_cut) {
        return Err(format!("a tokenizer that merges {left:?} and {right:?}, where llama.cpp cuts at line breaks"));
    }
    let merges = merges.iter().map(|(left, right)| format!("{left} {right}")).collect();
    Ok(vec![("model", Value::Text("gemma4".to_owned())), ("merges", Value::Texts(merges))])
}

/// Returns what is put before a segment; `None` if the tokenizer does anything besides that and writing spaces as SentencePiece does.
fn prefix(rule: &Json, normalizer: &Json) -> Option<Prefix> {
    let is = |step: &Json, name: &str| step.get("type").and_then(Json::as_str) == Some(name);
    let text = |step: &Json, pointer: &str| step.pointer(pointer).and_then(Json::as_str).map(str::to_owned);
    let writes_spaces = |step: &Json| {
        is(step, "Replace")
            && text(step, "/pattern/String").as_deref() == Some(" ")
            && text(step, "/content").as_deref() == Some(SPACE)
    };
    let steps: Vec<&Json> = match normalizer.get("normalizers").and_then(Json::as_array) {
        Some(steps) => steps.iter().collect(),
        None if normalizer.is_null() => Vec::new(),
        None => vec![normalizer],
    };
    match steps.as_slice() {
        [before, spaces] if is(before, "Prepend") && writes_spaces(spaces) && rule.is_null() => {
            (text(before, "/prepend").as_deref() == Some(SPACE)).then_some(Prefix::Space)
        }
        // Gemma cuts at spaces when none is left.
        [spaces] if writes_spaces(spaces) => {
            let cuts_at_spaces = is(rule, "Split") && text(rule, "/pattern/String").as_deref() == Some(" ");
            (rule.is_null() || cuts_at_spaces).then_some(Prefix::Nothing)
        }
        [] if is(rule, "Metaspace") && rule.get("split") == Some(&Json::Bool(false)) => {
            match text(rule, "/prepend_scheme").as_deref() {
                Some("never") => Some(Prefix::Nothing),
                Some("first") => Some(Prefix::SpaceAtStart),
                Some("always") | None => Some(Prefix::SpaceIfNone),
                Some(_) => None,
            }
        }
        _ => None,
    }
}

/// Returns a score per id: tokens that are merged earlier have larger ones. Tokens that no merge gives have 0, which nothing reads.
fn scores(merges: &[(&str, &str)], texts: &[String], kinds: &[i32]) -> Result<Vec<f32>, String> {
    let mut numbers: HashMap<String, usize> = HashMap::new();
    for (left, right) in merges {
        let number = numbers.len();
        numbers.entry(format!("{left}{right}")).or_insert(number);
    }
    let (listed, known): (HashSet<&(&str, &str)>, HashSet<&str>) =
        (merges.iter().collect(), texts.iter().map(String::as_str).collect());
    for (text, _) in texts.iter().zip(kinds).filter(|(_, kind)| ![UNKNOWN, UNUSED].contains(*kind)) {
        let splits = text.char_indices().skip(1).map(|(at, _)| text.split_at(at));
        let left_out = |(left, right): &(&str, &str)| known.contains(left) && known.contains(right);
        if let Some((left, right)) = splits.filter(left_out).find(|pair| !listed.contains(pair)) {
            return Err(format!("a tokenizer that does not merge `{left}` and `{right}` to its token `{text}`"));
        }
    }
    Ok(texts.iter().map(|text| numbers.get(text).map_or(0.0, |&number| -(number as f32))).collect())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::NORMAL;
    use super::*;

    fn replace() -> Json {
        json!({ "type": "Replace", "pattern": { "String": " " }, "content": SPACE })
    }

    #[test]
    fn the_prefix_is_read_from_all_forms() {
        let prepend = json!({ "type": "Prepend", "prepend": SPACE });
        let both = json!({ "type": "Sequence", "normalizers": [prepend, replace()] });
        let metaspace = |scheme: &str, split: bool| json!({ "type": "Metaspace", "replacement": SPACE, "prepend_scheme": scheme, "split": split });
        let none = Json::Null;
        assert_eq!(prefix(&none, &both), Some(Prefix::Space), "Llama 2, Mistral v1");
        let gemma = json!({ "type": "Split", "pattern": { "String": " " }, "behavior": "MergedWithPrevious" });
        assert_eq!(prefix(&gemma, &replace()), Some(Prefix::Nothing));
        assert_eq!(prefix(&metaspace("first", false), &none), Some(Prefix::SpaceAtStart), "Mistral v3");
        assert_eq!(prefix(&metaspace("always", false), &none), Some(Prefix::SpaceIfNone));
        assert_eq!(prefix(&metaspace("never", false), &none), Some(Prefix::Nothing));
        assert_eq!(prefix(&metaspace("first", true), &none), None, "words are cut");
        assert_eq!(prefix(&none, &json!({ "type": "Lowercase" })), None);
        assert_eq!(prefix(&gemma, &both), None);
    }

    #[test]
    fn merges_are_in_order_and_keep_line_breaks_apart() {
        let of = |merges: &[(&str, &str)], prefix| in_order_of_merges(merges, prefix);
        let keys = of(&[("\n", "\n"), ("a", "b")], Prefix::Nothing).unwrap();
        assert_eq!(keys[1], ("merges", Value::Texts(vec!["\n \n".to_owned(), "a b".to_owned()])));
        assert!(of(&[("a", "b")], Prefix::Space).unwrap_err().contains("puts a space before a text"));
        assert!(of(&[("\n", "a")], Prefix::Nothing).unwrap_err().contains("cuts at line breaks"));
    }

    #[test]
    fn scores_follow_the_merges() {
        let texts = ["a", "b", "c", "ab", "abc", "bc"].map(str::to_owned);
        let merges = [("b", "c"), ("a", "b"), ("a", "bc"), ("ab", "c")];
        assert_eq!(scores(&merges, &texts, &[NORMAL; 6]), Ok(vec![0.0, 0.0, 0.0, -1.0, -2.0, 0.0]));
        let refused = scores(&merges[..3], &texts, &[NORMAL; 6]).unwrap_err();
        assert!(refused.contains("does not merge `ab` and `c` to its token `abc`"), "{refused}");
    }
}
