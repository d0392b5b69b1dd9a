//! The tokens of a folder's other files, and the limits of `tokenizer.json`.
//!
//! `tokenizer_config.json`, `added_tokens.json` and `special_tokens_map.json` may have tokens that `tokenizer.json` lacks. They are added in the order
//! and with the flags of transformers 5: without an `added_tokens_decoder`, special_tokens_map.json overrides tokenizer_config.json, and with one it
//! is not read. The library assigns ids; a file that states another id is refused, where transformers says nothing.
//! Trade-off: `tokenizer.json` is parsed a second time, without its vocabulary, so that it is bounded before the library reads it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;
use std::fs::read;
use std::io::ErrorKind;
use std::path::Path;

use firebrick_arch::folder::{SPECIAL_TOKENS_FILE, TOKENIZER_CONFIG_FILE, TOKENIZER_FILE};
use firebrick_arch::python_json;
use serde::Deserialize;
use serde_json::{Map, Value as Json};
use tokenizers::{AddedToken, Tokenizer as Inner};

use crate::error::DataError;

const ADDED_TOKENS_FILE: &str = "added_tokens.json";
const EXTRA: &str = "extra_special_tokens";
const OLDER_EXTRA: &str = "additional_special_tokens";
pub(crate) const ROLES: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];
/// Bytes of an added token, and of all of them: the library builds automata of them.
const MAX_TOKEN_BYTES: usize = 1024;
const MAX_TOKENS_BYTES: usize = 8 << 20;
/// How much longer normalizers, pre-tokenizers or decoders may make a text, in total.
const MAX_GROWTH: usize = 256;
/// Values in the description of a step other than the model, and bytes of each text; only a `Precompiled` table is longer.
const MAX_VALUES: usize = 20_000;
const MAX_TEXT_BYTES: usize = 16 << 10;
const MAX_TABLE_BYTES: usize = 16 << 20;

/// `tokenizer.json` without the model.
#[derive(Deserialize)]
pub(crate) struct Outline {
    #[serde(default)]
    added_tokens: Vec<Map<String, Json>>,
    #[serde(default)]
    normalizer: Json,
    #[serde(default)]
    pre_tokenizer: Json,
    #[serde(default)]
    decoder: Json,
    #[serde(default)]
    post_processor: Json,
}

impl Outline {
    /// Parses the file. Errors: no JSON object, or beyond the limits.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, String> {
        let outline: Self = serde_json::from_slice(bytes).map_err(|reason| reason.to_string())?;
        bound(outline.added_tokens.iter().filter_map(|token| token.get("content")?.as_str()))?;
        let steps = [&outline.normalizer, &outline.pre_tokenizer, &outline.decoder, &outline.post_processor];
        for (step, name) in steps.into_iter().zip(["normalizer", "pre_tokenizer", "decoder", "post_processor"]) {
            let mut values = 0;
            let growth = growth(step, &mut values).map_err(|problem| format!("{name}: {problem}"))?;
            if values > MAX_VALUES || growth > MAX_GROWTH {
                return Err(format!(
                    "{name} has {values} values and makes texts up to {growth} times as long; the limits are {MAX_VALUES} and {MAX_GROWTH}"
                ));
            }
        }
        Ok(outline)
    }
}

/// Estimates how many times as long a step makes a text, and counts the values of its description.
fn growth(step: &Json, values: &mut usize) -> Result<usize, String> {
    *values += 1;
    let bytes = step.as_str().map_or(0, str::len);
    if bytes > MAX_TEXT_BYTES {
        return Err(format!("a text of {bytes} bytes; the limit is {MAX_TEXT_BYTES}"));
    }
    let text = |key: &str| step[key].as_str().unwrap_or_default();
    let content = text("content").len().max(text("prepend").len());
    let own = match (text("type"), step.pointer("/pattern/String").and_then(Json::as_str)) {
        ("Replace", Some(old)) if !old.is_empty() => content.div_ceil(old.len()).max(1),
        ("Replace", _) => content + 1,
        ("Prepend", _) => content / 16 + 1,
        ("TemplateProcessing", _) => {
            let pieces = step["single"].as_array().into_iter().flatten();
            match pieces.filter(|piece| piece.get("Sequence").is_some()).count() {
                0 | 1 => 1,
                texts => return Err(format!("it has the text {texts} times; the limit is once")),
            }
        }
        ("Precompiled", _) if text("precompiled_charsmap").len() <= MAX_TABLE_BYTES => return Ok(1),
        _ => 1,
    };
    let mut inside = step.as_array().into_iter().flatten().chain(step.as_object().into_iter().flat_map(Map::values));
    inside.try_fold(own, |product, value| Ok(product.saturating_mul(growth(value, values)?)))
}

fn bound<'a>(contents: impl Iterator<Item = &'a str>) -> Result<(), String> {
    let mut sum = 0;
    for content in contents {
        sum += content.len();
        if content.len() > MAX_TOKEN_BYTES || sum > MAX_TOKENS_BYTES {
            let start: String = content.chars().take(40).collect();
            return Err(format!(
                "the added token {start:?}... has {} bytes, all up to it {sum}; the limits are {MAX_TOKEN_BYTES} and {MAX_TOKENS_BYTES}",
                content.len()
            ));
        }
    }
    Ok(())
}

/// What a folder's files have besides `tokenizer.json`.
pub(crate) struct OtherFiles {
    /// Tokens by their role, such as `eos_token`, or a name of the model's own, such as `image_token`.
    roles: Vec<(String, AddedToken)>,
    extra: Vec<AddedToken>,
    /// Tokens with the ids that a file states.
    stated: BTreeMap<u64, AddedToken>,
    stated_by: &'static str,
}

impl OtherFiles {
    pub(crate) fn read(dir: &Path, config: &Map<String, Json>) -> Result<Self, DataError> {
        let map = read_json(&dir.join(SPECIAL_TOKENS_FILE))?;
        let decoder = config.get("added_tokens_decoder").filter(|decoder| !decoder.is_null());
        let (mut settings, mut named) = (config.clone(), Map::new());
        let (mut stated, mut stated_by) = (Vec::new(), TOKENIZER_CONFIG_FILE);
        let is_empty =
            |extra: &Json| extra.as_array().is_none_or(Vec::is_empty) && extra.as_object().is_none_or(Map::is_empty);
        if settings.get(EXTRA).is_none_or(is_empty)
            && let Some(older) = settings.remove(OLDER_EXTRA)
        {
            settings.insert(EXTRA.to_owned(), older);
        }
        take_named(&mut settings, &mut named);
        if decoder.is_none() {
            merge_map(&mut settings, map.unwrap_or_default());
            take_named(&mut settings, &mut named);
            stated_by = ADDED_TOKENS_FILE;
        }
        let extra: Vec<_> = settings
            .get(EXTRA)
            .or(settings.get(OLDER_EXTRA))
            .and_then(Json::as_array)
            .into_iter()
            .flatten()
            .filter_map(token)
            .collect();
        let mut roles = Vec::new();
        let own = settings.keys().filter(|key| key.ends_with("_token") && !ROLES.contains(&key.as_str()));
        for key in ROLES.into_iter().chain(own.map(String::as_str)) {
            roles.extend(settings.get(key).and_then(token).map(|token| (key.to_owned(), token)));
        }
        roles.extend(named.iter().filter_map(|(key, value)| Some((key.clone(), token(value)?))));
        let bad = |problem: String| bad_file(&dir.join(stated_by), problem);
        if let Some(decoder) = decoder {
            let decoder = decoder.as_object().ok_or_else(|| bad("added_tokens_decoder is no object".to_owned()))?;
            for (id, value) in decoder {
                let parsed = id.parse().ok().zip(value.get("content").and(token_of(value, false)));
                stated.push(parsed.ok_or_else(|| bad(format!("added_tokens_decoder: {id:?} is no id with a token")))?);
            }
        } else {
            let extra = settings.get(EXTRA).and_then(Json::as_array).into_iter().flatten();
            let legacy: Vec<&Json> = ROLES.iter().filter_map(|key| settings.get(*key)).chain(extra).collect();
            for (content, id) in read_json(&dir.join(ADDED_TOKENS_FILE))?.unwrap_or_default() {
                let id = id.as_u64().ok_or_else(|| bad(format!("the id of {content:?} is no whole number")))?;
                let is_special = legacy.iter().any(|value| value.get("content").unwrap_or(value) == content.as_str());
                stated.push((id, AddedToken::from(content, is_special)));
            }
        }
        let contents = roles.iter().map(|(_, token)| token).chain(&extra).chain(stated.iter().map(|(_, token)| token));
        bound(contents.map(|token| token.content.as_str())).map_err(bad)?;
        let mut by_id = BTreeMap::new();
        for (id, token) in stated {
            if let Some(other) = by_id.insert(id, token) {
                return Err(bad(format!("{:?} and {:?} have the same id {id}", other.content, by_id[&id].content)));
            }
        }
        Ok(Self { roles, extra, stated: by_id, stated_by })
    }

    /// Returns the texts of the roles, for chat templates.
    pub(crate) fn special_tokens(&self) -> BTreeMap<String, String> {
        self.roles.iter().map(|(key, token)| (key.clone(), token.content.clone())).collect()
    }

    /// Adds the tokens to a tokenizer, as transformers does. Returns those that `tokenizer.json` lacks or describes differently, by id. Errors: a
    /// file states another id than the token has, or the beginning, end or padding of texts is no token.
    pub(crate) fn add_to(
        self,
        inner: &mut Inner,
        outline: &Outline,
        dir: &Path,
    ) -> Result<BTreeMap<u32, AddedToken>, DataError> {
        let entry =
            |entry: &Map<String, Json>| Some((entry.get("id")?.as_u64()?, token(&Json::Object(entry.clone()))?));
        let entries: Vec<(u64, AddedToken)> = outline.added_tokens.iter().filter_map(entry).collect();
        let of_file: BTreeMap<u64, AddedToken> = entries.iter().cloned().collect();
        check_ids(inner, entries).map_err(|problem| bad_file(&dir.join(TOKENIZER_FILE), problem))?;
        let is_role = |content: &str| self.roles.iter().any(|(_, role)| role.content == content);
        let mut described = self.stated.clone();
        if self.stated_by == ADDED_TOKENS_FILE {
            described.extend(of_file.clone());
        }
        let special = |token: AddedToken| if is_role(&token.content) { token.special(true) } else { token };
        add(inner, described.into_values().map(special));
        check_ids(inner, self.stated.clone()).map_err(|problem| bad_file(&dir.join(self.stated_by), problem))?;
        for (key, AddedToken { content, .. }) in &self.roles {
            if inner.token_to_id(content).is_none() && matches!(key.as_str(), "bos_token" | "eos_token" | "pad_token") {
                let reason = format!("{key} is {content:?}, which is not in the vocabulary of {TOKENIZER_FILE}");
                return Err(bad_file(&dir.join(TOKENIZER_CONFIG_FILE), reason));
            }
        }
        let known: BTreeSet<String> =
            inner.get_added_tokens_decoder().into_values().map(|token| token.content).collect();
        let named = self.roles.into_iter().map(|(_, token)| token.special(true)).chain(self.extra);
        add(inner, named.filter(|token| !known.contains(&token.content)));
        let added = inner.get_added_tokens_decoder().into_iter();
        Ok(added.filter(|(id, token)| of_file.get(&u64::from(*id)) != Some(token)).collect())
    }
}

/// Adds tokens, all at once because each time the library builds its automata again.
fn add(inner: &mut Inner, tokens: impl Iterator<Item = AddedToken>) {
    let known = inner.get_added_tokens_decoder();
    let is_known = |token: &AddedToken| inner.token_to_id(&token.content).and_then(|id| known.get(&id)) == Some(token);
    let tokens: Vec<AddedToken> = tokens.filter(|token| !is_known(token)).collect();
    if !tokens.is_empty() {
        inner.add_tokens(&tokens);
    }
}

/// Checks that tokens have the ids that a file states.
fn check_ids(inner: &Inner, stated: impl IntoIterator<Item = (u64, AddedToken)>) -> Result<(), String> {
    for (id, AddedToken { content, .. }) in stated {
        let got = inner.token_to_id(&content);
        if got.map(u64::from) != Some(id) {
            let has = got.map_or("cannot be a token".to_owned(), |got| {
                format!("has the id {got} by the other files and their order")
            });
            let there = u32::try_from(id).ok().and_then(|id| inner.id_to_token(id));
            let there = there.map_or(String::new(), |there| format!(", and {id} is {there:?}"));
            return Err(format!(
                "it gives the token {content:?} the id {id}, but that {has}{there}. Take all files of the tokenizer from one folder"
            ));
        }
    }
    Ok(())
}

/// Lets special_tokens_map.json override tokenizer_config.json; lists of extra tokens are joined.
fn merge_map(settings: &mut Map<String, Json>, map: Map<String, Json>) {
    for (key, value) in map {
        match (settings.get_mut(&key).filter(|_| key == EXTRA), value) {
            (Some(Json::Array(known)), Json::Array(more)) => {
                more.into_iter().for_each(|token| {
                    if !known.contains(&token) {
                        known.push(token)
                    }
                });
            }
            (_, value) => drop(settings.insert(key, value)),
        }
    }
}

/// Moves extra tokens that have names out of the settings.
fn take_named(settings: &mut Map<String, Json>, named: &mut Map<String, Json>) {
    if let Some(Json::Object(extra)) = settings.get(EXTRA) {
        named.extend(extra.clone());
        settings.remove(EXTRA);
    }
}

/// Parses a special token: its text, or an object with `content`.
fn token(json: &Json) -> Option<AddedToken> {
    token_of(json, json.get("special").and_then(Json::as_bool).unwrap_or(true))
}

fn token_of(json: &Json, special: bool) -> Option<AddedToken> {
    let content = json.get("content").unwrap_or(json).as_str()?;
    let flag = |name: &str| json.get(name).and_then(Json::as_bool);
    let is = |name: &str| flag(name).unwrap_or(false);
    let special = flag("special").unwrap_or(special);
    let token =
        AddedToken::from(content, special).single_word(is("single_word")).lstrip(is("lstrip")).rstrip(is("rstrip"));
    Some(token.normalized(flag("normalized").unwrap_or(!special)))
}

pub(crate) fn bad_file(path: &Path, reason: impl Display) -> DataError {
    DataError::Tokenizer(format!("cannot use {}: {reason}", path.display()))
}

/// Reads a JSON object, as Python writes it ([`python_json`]), from a file that may be absent.
pub(crate) fn read_json(path: &Path) -> Result<Option<Map<String, Json>>, DataError> {
    match read(path) {
        Ok(bytes) => {
            let object = python_json::from_slice(&bytes).and_then(serde_json::from_value);
            object.map(Some).map_err(|reason| bad_file(path, reason))
        }
        Err(reason) if reason.kind() == ErrorKind::NotFound => Ok(None),
        Err(reason) => Err(DataError::Io { path: path.to_owned(), reason }),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::write;
    use std::path::PathBuf;

    use serde_json::json;
    use tempfile::TempDir;

    use super::*;
    use crate::encoder::{EncodeOptions, Encoder};
    use crate::source::{Record, RecordPlace};
    use crate::test_tokenizer::{BOS, TEMPLATE, TestTokenizer};
    use crate::tokenizer::Tokenizer;

    const TOOL: u32 = 262;

    /// A folder whose tokenizer_config.json has these keys too, with another file.
    fn folder(keys: &Json, file: &str, content: &Json) -> TempDir {
        let mut test = TestTokenizer::default();
        test.config.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
        let folder = test.write();
        if !file.is_empty() {
            write(folder.path().join(file), content.to_string()).unwrap();
        }
        folder
    }

    #[test]
    fn a_token_of_any_file_is_one_id_in_written_files() {
        let none = json!({});
        for (keys, file, content) in [
            (json!({ "added_tokens_decoder": { "262": { "content": "<tool>", "special": true } } }), "", none.clone()),
            (json!({ "extra_special_tokens": ["<tool>"] }), "", none.clone()),
            (json!({ "extra_special_tokens": ["<tool>"], "added_tokens_decoder": {} }), "", none.clone()),
            (json!({ "extra_special_tokens": { "tool_token": "<tool>" } }), "", none.clone()),
            (json!({ "additional_special_tokens": [{ "content": "<tool>" }] }), "", none.clone()),
            (json!({ "tool_token": "<tool>" }), "", none.clone()),
            (none.clone(), ADDED_TOKENS_FILE, json!({ "<tool>": 262 })),
            (none.clone(), SPECIAL_TOKENS_FILE, json!({ "additional_special_tokens": ["<tool>"] })),
            (none.clone(), SPECIAL_TOKENS_FILE, json!({ "extra_special_tokens": ["<tool>"] })),
        ] {
            let folder = folder(&keys, file, &content);
            let mut tokenizer = Tokenizer::from_folder(folder.path()).unwrap();
            let ids = [97, TOOL, 98];
            assert_eq!(tokenizer.encode("a<tool>b", false).unwrap(), ids, "{keys} {file}");
            assert_eq!(tokenizer.vocab_size(), 263);
            assert_eq!(tokenizer.tokens_of_other_files()[0].1, "<tool>");
            tokenizer.add_tokens(&["<new>".to_owned()], false).unwrap();
            let alone = TestTokenizer { config: json!({}), ..TestTokenizer::default() }.write();
            let files = tokenizer.changed_files().unwrap();
            write(alone.path().join(TOKENIZER_FILE), &files[TOKENIZER_FILE]).unwrap();
            let read = Tokenizer::from_folder(alone.path()).unwrap();
            assert_eq!(read.encode("a<tool>b<new>", false).unwrap(), [97, TOOL, 98, 263]);
            if let Some(config) = files.get(TOKENIZER_CONFIG_FILE) {
                let config: Json = serde_json::from_str(config).unwrap();
                let described = |id: &str| config["added_tokens_decoder"][id]["content"].clone();
                assert_eq!([described("262"), described("263")], ["<tool>", "<new>"]);
            }
        }
    }

    #[test]
    fn files_that_contradict_each_other_are_refused_by_the_token() {
        let decoder = |tokens: Json| json!({ "added_tokens_decoder": tokens });
        let none = || json!({});
        for (keys, file, content, words) in [
            (decoder(json!({ "7": { "content": "<tool>" } })), "", none(), ["<tool>", "id 7"]),
            (decoder(json!({ "262": { "content": "<a>" }, "900": { "content": "<b>" } })), "", none(), ["<b>", "900"]),
            (decoder(json!({ "x": { "content": "<a>" } })), "", none(), ["\"x\"", "no id"]),
            (none(), ADDED_TOKENS_FILE, json!({ "<a>": 262, "<b>": 262 }), ["<a>", "<b>"]),
            (none(), ADDED_TOKENS_FILE, json!({ "<s>": 262 }), ["<s>", "256"]),
            (none(), ADDED_TOKENS_FILE, json!({ "<a>": u64::MAX }), ["<a>", "18446744073709551615"]),
            (none(), SPECIAL_TOKENS_FILE, json!({ "eos_token": "<nowhere>" }), ["eos_token", "<nowhere>"]),
            (json!({ "extra_special_tokens": ["x".repeat(16_000)] }), "", none(), ["xxx", "1024"]),
        ] {
            let folder = folder(&keys, file, &content);
            let error = Tokenizer::from_folder(folder.path()).unwrap_err().to_string();
            assert!(words.iter().all(|word| error.contains(word)), "{error}");
        }
        // The map overrides the config, unless that describes tokens by id.
        let map = json!({ "eos_token": "<pad>" });
        for (keys, eos) in [(json!({}), "<pad>"), (decoder(json!({})), "</s>")] {
            let tokenizer = Tokenizer::from_folder(folder(&keys, SPECIAL_TOKENS_FILE, &map).path()).unwrap();
            assert_eq!(tokenizer.eos_token_id(), tokenizer.token_to_id(eos));
        }
    }

    #[test]
    fn the_beginning_of_texts_is_one_decision() {
        let without = TEMPLATE.replace("{{ bos_token }}", "");
        for add in [json!(null), json!(false), json!(true)] {
            for (adds_bos, template) in [(false, TEMPLATE), (false, &without), (true, TEMPLATE), (true, &without)] {
                let mut test = TestTokenizer { adds_bos, template: Some(template), ..TestTokenizer::default() };
                test.config["add_bos_token"] = add.clone();
                let tokenizer = test.load();
                let before = tokenizer.token_before_text().unwrap();
                assert_eq!(before, (adds_bos || add == true).then_some(BOS));
                assert_eq!(tokenizer.encode("<s>a", true).unwrap(), [BOS, 97], "never twice");
                let first = |fields: Json| {
                    let place = RecordPlace { path: PathBuf::new(), line: 1 };
                    let record = Record::new(fields.as_object().unwrap().clone(), place);
                    let encoder = Encoder::new(&tokenizer, EncodeOptions::new(99), &record).unwrap();
                    encoder.encode(&record).unwrap().examples[0].tokens[0]
                };
                let chat = json!({ "messages": [{ "role": "user", "content": "a" }, { "role": "assistant", "content": "b" }] });
                assert_eq!(first(chat) == BOS, template == TEMPLATE, "a conversation begins as its template does");
                for fields in [json!({ "text": "a" }), json!({ "prompt": "a", "completion": "b" })] {
                    assert_eq!(first(fields), before.unwrap_or(97));
                }
            }
        }
    }

    #[test]
    fn what_costs_the_library_too_much_is_refused_at_once() {
        let replace = |old: &str, new: &str| json!({ "type": "Replace", "pattern": { "String": old }, "content": new });
        let all = |steps: Vec<Json>| json!({ "type": "Sequence", "normalizers": steps });
        let piece = json!({ "SpecialToken": { "id": "<s>", "type_id": 0 } });
        let text = json!({ "Sequence": { "id": "A", "type_id": 0 } });
        let template = |single: &[Json], count: usize| {
            let special = json!({ "<s>": { "id": "<s>", "ids": vec![BOS; count], "tokens": vec!["<s>"; count] } });
            json!({ "type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": special })
        };
        for (key, value, is_refused) in [
            ("added_tokens", json!([{ "content": "x".repeat(16_000) }]), true),
            ("normalizer", all(vec![replace("a", "aa"); 40]), true),
            ("normalizer", all(vec![replace("", "a"); 40]), true),
            ("normalizer", all(vec![replace(" ", "▁"), replace("``", "\"")]), false),
            ("normalizer", json!({ "type": "Prepend", "prepend": "x".repeat(1 << 20) }), true),
            ("post_processor", template(&[vec![piece.clone(); 100], vec![text.clone()]].concat(), 100), true),
            ("post_processor", template(&[text.clone(), text.clone()], 1), true),
            ("post_processor", template(&[piece, text], 1), false),
        ] {
            let test = TestTokenizer { config: json!({}), ..TestTokenizer::default() };
            let folder = test.write_with(key, value);
            let result = Tokenizer::from_folder(folder.path()).map(drop).map_err(|error| error.to_string());
            assert_eq!(result.is_err(), is_refused, "{key}: {result:?}");
            assert!(
                result.err().is_none_or(|error| error.contains(TOKENIZER_FILE) && error.contains("limit")),
                "{key}"
            );
        }
    }
}
