//! A Hugging Face tokenizer folder: `tokenizer.json`, the special tokens, the chat template.
//!
//! `tokenizer.json` determines the tokens of a text, as in transformers; truncation and padding stored in it are ignored (sequences are cut and
//! padded by this crate). Not supported: slow tokenizers. A folder with only `tokenizer.model` is refused.

pub(crate) mod added_tokens;
pub(crate) mod special_tokens;

use std::collections::{BTreeMap, HashSet};
use std::fs::read;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::{SystemTime, UNIX_EPOCH};

use firebrick_arch::folder::{SPECIAL_TOKENS_FILE, TOKENIZER_CONFIG_FILE, TOKENIZER_FILE};
use serde_json::Value as Json;
use tokenizers::{AddedToken, Encoding, PostProcessor, PostProcessorWrapper, Tokenizer as Inner};
use xxhash_rust::xxh3::xxh3_128;

use crate::catch_panic::catch_panic;
use crate::chat_template::{BuiltIn, ChatTemplate, TemplateChoice, TemplateDefaults, TemplateSet};
use crate::error::DataError;
use crate::long_text::{PIECE_BYTES, encode_in_pieces};
use crate::tokenizer::added_tokens::{OtherFiles, Outline, bad_file, read_json};

/// Tokens that a post-processor may add to a text.
const MAX_FRAME: usize = 1024;

/// A token that the folder does not have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewToken {
    /// Its text.
    pub content: String,
    /// Its id.
    pub id: u32,
    /// Whether it is left out of decoded text, like the tokens that begin and end turns.
    pub special: bool,
}

/// A role that another token of the tokenizer may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum SpecialToken {
    /// Ends texts, and turns where the chat template says so.
    Eos,
    /// Fills rows.
    Pad,
}

impl SpecialToken {
    /// Returns its key in a tokenizer's files, which is also its name in chat templates.
    pub fn key(self) -> &'static str {
        match self {
            Self::Eos => "eos_token",
            Self::Pad => "pad_token",
        }
    }
}

/// Converts text to token ids and back, with the special tokens and the chat template of a model.
///
/// Threads may share it, but one copy per thread is faster: regular expressions keep their working memory for the first
/// thread that uses them and make others wait. A copy takes about 30 MB for a vocabulary of 128,000.
#[derive(Debug, Clone)]
pub struct Tokenizer {
    /// Without its post-processor, which may trim the offsets of tokens; the mask needs the offset of every character.
    pub(crate) inner: Inner,
    post_processor: Option<PostProcessorWrapper>,
    pub(crate) folder: PathBuf,
    pub(crate) special_ids: HashSet<u32>,
    add_bos_token: bool,
    pub(crate) before_text: OnceLock<Option<u32>>,
    pub(crate) vocab_size: usize,
    pub(crate) templates: TemplateSet,
    /// Hash of `tokenizer.json`.
    content_key: u128,
    /// Tokens that `tokenizer.json` lacks or describes differently, by id, from the other files of the folder.
    pub(crate) of_other_files: BTreeMap<u32, AddedToken>,
    pub(crate) new_tokens: Vec<NewToken>,
    /// The roles that the folder gives to other tokens, or to none.
    pub(crate) chosen_tokens: BTreeMap<SpecialToken, String>,
}

impl Tokenizer {
    /// Reads a tokenizer from a model's folder. Errors: no `tokenizer.json`, a file that cannot be parsed, or special tokens that are not in the
    /// vocabulary. A missing chat template is an error only in [`Tokenizer::chat_template`].
    pub fn from_folder(dir: &Path) -> Result<Self, DataError> {
        let (mut inner, outline, content_key) = read_tokenizer_json(dir)?;
        let bad = |reason: tokenizers::Error| bad_file(&dir.join(TOKENIZER_FILE), reason);
        inner.with_truncation(None).map_err(bad)?;
        inner.with_padding(None);
        let post_processor = inner.get_post_processor().cloned();
        inner.with_post_processor(None::<PostProcessorWrapper>);
        let config = read_json(&dir.join(TOKENIZER_CONFIG_FILE))?.unwrap_or_default();
        let others = OtherFiles::read(dir, &config)?;
        let special_tokens = others.special_tokens();
        let of_other_files = others.add_to(&mut inner, &outline, dir)?;
        let vocab_size = inner.get_vocab(true).values().max().map_or(0, |&id| id as usize + 1);
        if let Some(post_processor) = &post_processor {
            let checked = check_added_ids(post_processor, vocab_size);
            checked.map_err(|reason| bad_file(&dir.join(TOKENIZER_FILE), reason))?;
        }

        let special = inner.get_added_tokens_decoder().into_iter().filter(|(_, token)| token.special);
        let special_ids = special.map(|(id, _)| id).collect();
        let mut templates = TemplateSet::read(dir, &config, special_tokens, read_json)?;
        templates.date = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_secs() as i64);
        templates.apply();
        Ok(Self {
            vocab_size,
            add_bos_token: config.get("add_bos_token").and_then(Json::as_bool).unwrap_or(false),
            before_text: OnceLock::new(),
            folder: dir.to_owned(),
            inner,
            post_processor,
            special_ids,
            templates,
            content_key,
            of_other_files,
            new_tokens: Vec::new(),
            chosen_tokens: BTreeMap::new(),
        })
    }

    /// Returns the token ids of a text. `add_special_tokens` adds what the model expects around a complete text (often a beginning-of-text token);
    /// leave it off for text rendered by a chat template. Never doubles a beginning-of-text token that the text already has.
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, DataError> {
        if !add_special_tokens {
            return self.encode_plain(text);
        }
        let mut ids = self.framed(text)?;
        if let Some(bos) = self.bos_token_id() {
            if self.add_bos_token && ids.first() != Some(&bos) {
                ids.insert(0, bos);
            }
            if ids.starts_with(&[bos, bos]) {
                ids.remove(0);
            }
        }
        Ok(ids)
    }

    /// Applies the post-processor. A long text gets the special tokens of a short one, so that it can be tokenized in pieces.
    fn framed(&self, text: &str) -> Result<Vec<u32>, DataError> {
        let Some(post_processor) = &self.post_processor else { return self.encode_plain(text) };
        let framed = |text: &str| {
            let plain = self.encode_fast(text)?;
            let ids = plain.get_ids().to_vec();
            let framed = call_library(|| post_processor.process(plain, None, true))?;
            Ok::<_, DataError>((framed.get_ids().to_vec(), ids))
        };
        if text.len() <= 2 * PIECE_BYTES {
            return Ok(framed(text)?.0);
        }
        let (frame, inside) = framed("a")?;
        let at = frame.windows(inside.len().max(1)).position(|part| part == inside).unwrap_or(0);
        let (before, after) = (&frame[..at], &frame[(at + inside.len()).min(frame.len())..]);
        Ok([before, &self.encode_plain(text)?, after].concat())
    }

    /// Returns the token that is added before every text, if there is one; determined once. Training, prompts and exported files all ask this.
    /// Rendered conversations begin as their template does.
    pub fn token_before_text(&self) -> Result<Option<u32>, DataError> {
        if let Some(&before) = self.before_text.get() {
            return Ok(before);
        }
        let (framed, plain) = (self.encode("a", true)?, self.encode_plain("a")?);
        let before = framed.first().copied().filter(|first| plain.first() != Some(first));
        Ok(*self.before_text.get_or_init(|| before))
    }

    fn encode_fast(&self, text: &str) -> Result<Encoding, DataError> {
        call_library(|| self.inner.encode_fast(text, false))
    }

    /// Returns token ids without added special tokens.
    pub(crate) fn encode_plain(&self, text: &str) -> Result<Vec<u32>, DataError> {
        encode_in_pieces(text, PIECE_BYTES, |piece| Ok(self.encode_fast(piece)?.get_ids().to_vec()))
    }

    /// Returns token ids with the byte range of the text that each came from, without added special tokens.
    pub(crate) fn encode_with_offsets(&self, text: &str) -> Result<Encoding, DataError> {
        call_library(|| self.inner.encode(text, false))
    }

    /// Returns the text of token ids. Bytes that are not UTF-8 become U+FFFD.
    pub fn decode(&self, ids: &[u32], skip_special_tokens: bool) -> Result<String, DataError> {
        call_library(|| self.inner.decode(ids, skip_special_tokens))
    }

    /// Returns the id of the beginning-of-text token.
    pub fn bos_token_id(&self) -> Option<u32> {
        self.special_token_id("bos_token")
    }

    /// Returns the id of the end-of-text token.
    pub fn eos_token_id(&self) -> Option<u32> {
        self.special_token_id("eos_token")
    }

    /// Returns the id of the padding token.
    pub fn pad_token_id(&self) -> Option<u32> {
        self.special_token_id("pad_token")
    }

    /// Returns the vocabulary size: every token id is below it; added tokens count.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// Returns the chat template. Error: the folder has none; the message lists where it was searched and what to do.
    pub fn chat_template(&self) -> Result<&ChatTemplate, DataError> {
        self.chat_template_for(false)
    }

    /// Returns the chat template of a conversation with or without tools: with tools the one named "tool_use", if it exists, as transformers chooses.
    /// Error: that of [`Tokenizer::chat_template`].
    pub fn chat_template_for(&self, has_tools: bool) -> Result<&ChatTemplate, DataError> {
        self.templates.get(has_tools).ok_or_else(|| {
            DataError::Tokenizer(format!(
                "{} has no chat template: add data.chat_template = {:?} to the recipe, or the template of its family to that folder as \
                 chat_template.jinja",
                self.folder.display(),
                self.fitting_template()
            ))
        })
    }

    /// Returns the name of the first built-in template whose tokens the tokenizer has.
    fn fitting_template(&self) -> &'static str {
        let is_token = |token: &&str| self.inner.token_to_id(token).is_some_and(|id| self.is_special(id));
        let fits = |name: &&str| self.templates.built_in(name).is_some_and(|known| known.tokens.iter().all(is_token));
        ["chatml", "llama3", "gemma", "phi3"].into_iter().find(fits).unwrap_or("zephyr")
    }

    /// Uses one template for every conversation from now on, instead of those of the folder. Errors: no template of that name, a file that cannot be
    /// read, a template that does not parse, a built-in template for another vocabulary.
    pub fn choose_template(&mut self, choice: &TemplateChoice) -> Result<(), DataError> {
        if let TemplateChoice::Named(name) = choice
            && let Some(BuiltIn { name, tokens, .. }) = self.templates.built_in(name)
        {
            let is_absent = |token: &&&str| self.inner.token_to_id(token).is_none_or(|id| !self.is_special(id));
            if let Some(token) = tokens.iter().find(is_absent) {
                return Err(DataError::Tokenizer(format!(
                    "the built-in chat template {name:?} writes {token}, which is no token of this tokenizer: it would be cut \
                     into pieces that the model never saw as one, and no token would end a turn. Choose \"zephyr\" or \
                     \"alpaca\", which need an eos_token alone, or the template of the model's family"
                )));
            }
            self.require_eos_token_id()?;
        }
        self.templates.choose(choice)
    }

    /// Sets what the chat templates receive unless a conversation overrides it.
    pub fn set_template_defaults(&mut self, defaults: TemplateDefaults) {
        self.templates.defaults = defaults;
        self.templates.apply();
    }

    /// Returns what the chat templates receive unless a conversation overrides it.
    pub fn template_defaults(&self) -> &TemplateDefaults {
        &self.templates.defaults
    }

    /// Fixes the date that the chat templates see; see [`ChatTemplate::set_date`].
    pub fn set_date(&mut self, unix_seconds: i64) {
        self.templates.date = unix_seconds;
        self.templates.apply();
    }

    /// Returns the date that the chat templates see, in seconds since 1970 UTC; `None` if no template reads it.
    pub fn date(&self) -> Option<i64> {
        let reads_date = |tools| self.templates.get(tools).is_some_and(ChatTemplate::uses_date);
        (reads_date(false) || reads_date(true)).then_some(self.templates.date)
    }

    /// Returns everything that tokenization depends on, as bytes: `tokenizer.json`, new tokens, the special tokens, the chat templates and their
    /// defaults. Equal bytes mean equal tokens (apart from the date, if a template reads it).
    pub fn fingerprint(&self) -> Vec<u8> {
        let set = &self.templates;
        let templates = [false, true].map(|tools| set.get(tools).map(ChatTemplate::source));
        let rest = serde_json::json!([set.special_tokens, self.add_bos_token, templates, set.defaults]);
        let mut added =
            self.new_tokens.iter().map(|token| format!("{token:?}").into_bytes()).collect::<Vec<_>>().concat();
        added.extend(self.of_other_files.iter().flat_map(|token| format!("{token:?}").into_bytes()));
        [&self.content_key.to_le_bytes(), &added[..], rest.to_string().as_bytes()].concat()
    }

    /// Returns whether the id is a token that is never part of ordinary text.
    pub fn is_special(&self, id: u32) -> bool {
        self.special_ids.contains(&id)
    }

    pub(crate) fn refuse_doubled_bos(&self, tokens: &[u32]) -> Result<(), DataError> {
        match (self.bos_token_id(), self.templates.special_tokens.get("bos_token")) {
            (Some(bos), Some(token)) if tokens.starts_with(&[bos, bos]) => Err(DataError::DoubledBos(token.clone())),
            _ => Ok(()),
        }
    }

    /// Returns the id of the end-of-text token, or an error that lists where it was searched.
    pub(crate) fn require_eos_token_id(&self) -> Result<u32, DataError> {
        self.eos_token_id().ok_or_else(|| {
            DataError::Tokenizer(format!(
                "the tokenizer defines no eos_token, which ends every {{\"text\": ...}} record; looked for it in \
                 {TOKENIZER_CONFIG_FILE} and {SPECIAL_TOKENS_FILE} in {}. Name one of its special tokens with data.eos_token",
                self.folder.display()
            ))
        })
    }

    fn special_token_id(&self, key: &str) -> Option<u32> {
        self.templates.special_tokens.get(key).and_then(|token| self.inner.token_to_id(token))
    }
}

/// Calls the library and turns its panics into errors: it panics on some damaged files, and on texts that hit the damage.
fn call_library<T>(work: impl FnOnce() -> tokenizers::Result<T>) -> Result<T, DataError> {
    let result = catch_panic("the tokenizer", || work().map_err(|reason| reason.to_string()));
    result.map_err(|reason| DataError::Tokenizer(format!("the tokenizer failed: {reason}")))
}

/// Refuses a post-processor that adds too many tokens, or some that are not in the vocabulary: the model has no embedding for them.
fn check_added_ids(post_processor: &PostProcessorWrapper, vocab_size: usize) -> Result<(), String> {
    let count = post_processor.added_tokens(false);
    if count > MAX_FRAME {
        return Err(format!("its post_processor adds {count} tokens to every text; the limit is {MAX_FRAME}"));
    }
    let added = catch_panic("the tokenizer", || {
        post_processor.process(Encoding::default(), None, true).map_err(|reason| reason.to_string())
    })?;
    match added.get_ids().iter().find(|&&id| id as usize >= vocab_size) {
        Some(id) => Err(format!(
            "its post_processor adds the token {id} to every text, but the vocabulary has only {vocab_size} ids. Take \
             the file from the model's own folder, or correct the id"
        )),
        None => Ok(()),
    }
}

fn read_tokenizer_json(dir: &Path) -> Result<(Inner, Outline, u128), DataError> {
    let path = dir.join(TOKENIZER_FILE);
    let bytes = match read(&path) {
        Ok(bytes) => bytes,
        Err(reason) if reason.kind() == ErrorKind::NotFound => {
            let hint = if !dir.is_dir() {
                "the folder does not exist"
            } else if dir.join("tokenizer.model").is_file() {
                "the folder has only tokenizer.model; convert it once with \
                 `AutoTokenizer.from_pretrained(folder).save_pretrained(folder)` of transformers"
            } else {
                "copy it from the model on the Hugging Face Hub"
            };
            return Err(DataError::Tokenizer(format!("no tokenizer.json in {}: {hint}", dir.display())));
        }
        Err(reason) => return Err(DataError::Io { path, reason }),
    };
    let content_key = xxh3_128(&bytes);
    let outline = Outline::parse(&bytes).map_err(|reason| bad_file(&path, reason))?;
    let inner = catch_panic("the tokenizer", || Inner::from_bytes(bytes).map_err(|reason| reason.to_string()));
    Ok((inner.map_err(|reason| bad_file(&path, reason))?, outline, content_key))
}

#[cfg(test)]
mod tests {
    use std::fs::{create_dir, remove_file, write};

    use serde_json::json;
    use tempfile::TempDir;

    use super::*;
    use crate::record_format::Chat;
    use crate::test_tokenizer::{BOS, EOS, TestTokenizer, adding};

    fn hello() -> Chat {
        Chat::new(&[("user", "hello")])
    }

    #[test]
    fn decode_is_the_inverse_of_encode() {
        let tokenizer = TestTokenizer::default().load();
        let text = "  Ünïcode 😀\n\ttabs, 数字 and 'quotes' of more than eight tokens ";
        assert_eq!(tokenizer.decode(&tokenizer.encode(text, true).unwrap(), true).unwrap(), text);
        assert_eq!(tokenizer.encode("a<s>", false).unwrap(), [97, BOS]);
        assert_eq!(tokenizer.decode(&[97, BOS], false).unwrap(), "a<s>");
    }

    #[test]
    fn template_is_found_in_each_of_its_places() {
        let mut test = TestTokenizer { template: None, ..TestTokenizer::default() };
        test.config["chat_template"] = json!([
            { "name": "tool_use", "template": "tools" },
            { "name": "default", "template": "config {{ messages[0].content }}" }
        ]);
        let folder = test.write();
        let render =
            || Tokenizer::from_folder(folder.path()).unwrap().chat_template().unwrap().render(&hello(), false).unwrap();
        assert_eq!(render(), "config hello");
        let jinja = folder.path().join("chat_template.jinja");
        write(&jinja, "file {{ messages[0].content }}").unwrap();
        assert_eq!(render(), "file hello");
        remove_file(&jinja).unwrap();
        write(folder.path().join(TOKENIZER_CONFIG_FILE), "{}").unwrap();
        write(folder.path().join("chat_template.json"), json!({ "chat_template": "json" }).to_string()).unwrap();
        assert_eq!(render(), "json");
    }

    #[test]
    fn named_template_is_chosen_by_tools_or_by_name() {
        let folder = TestTokenizer { template: Some("default"), ..TestTokenizer::default() }.write();
        let more = folder.path().join("additional_chat_templates");
        create_dir(&more).unwrap();
        write(more.join("tool_use.jinja"), "tools").unwrap();
        write(more.join("rag.jinja"), "documents").unwrap();
        let mut tokenizer = Tokenizer::from_folder(folder.path()).unwrap();
        let render =
            |tokenizer: &Tokenizer, tools| tokenizer.chat_template_for(tools).unwrap().render(&hello(), false).unwrap();
        assert_eq!(render(&tokenizer, false), "default");
        assert_eq!(render(&tokenizer, true), "tools");
        let before = tokenizer.fingerprint();
        tokenizer.choose_template(&TemplateChoice::Named("rag".to_owned())).unwrap();
        assert_eq!((render(&tokenizer, false), render(&tokenizer, true)), ("documents".into(), "documents".into()));
        assert_ne!(tokenizer.fingerprint(), before);
        tokenizer.choose_template(&TemplateChoice::Text("text".to_owned())).unwrap();
        assert_eq!(render(&tokenizer, true), "text");
        let error = tokenizer.choose_template(&TemplateChoice::Named("x".to_owned())).unwrap_err().to_string();
        assert!(error.contains("\"default\", \"rag\", \"tool_use\""), "{error}");
    }

    #[test]
    fn folder_without_tokenizer_says_what_to_do() {
        let folder = TempDir::new().unwrap();
        let error = |dir: &Path| Tokenizer::from_folder(dir).unwrap_err().to_string();
        assert!(error(folder.path()).contains("copy it from the model"));
        write(folder.path().join("tokenizer.model"), "").unwrap();
        assert!(error(folder.path()).contains("save_pretrained"));
        assert!(error(&folder.path().join("absent")).contains("does not exist"));
    }

    #[test]
    fn damaged_files_are_named() {
        for name in [TOKENIZER_FILE, TOKENIZER_CONFIG_FILE, SPECIAL_TOKENS_FILE] {
            let folder = TestTokenizer::default().write();
            write(folder.path().join(name), "{").unwrap();
            let error = Tokenizer::from_folder(folder.path()).unwrap_err().to_string();
            assert!(error.contains(name), "{error}");
        }
    }

    #[test]
    fn an_added_token_outside_the_vocabulary_is_refused() {
        let roberta = |sep: u32| {
            json!({
                "type": "RobertaProcessing", "sep": ["</s>", sep], "cls": ["<s>", BOS], "trim_offsets": true,
                "add_prefix_space": false
            })
        };
        let load = |post_processor: Json| {
            Tokenizer::from_folder(TestTokenizer::default().write_with("post_processor", post_processor).path())
        };
        for (good, bad, id) in [(roberta(EOS), roberta(262), 262), (adding(BOS), adding(256_000_768), 256_000_768)] {
            assert!(load(good).is_ok());
            for bad in [bad.clone(), json!({ "type": "Sequence", "processors": [bad] })] {
                let error = load(bad).unwrap_err().to_string();
                let added = format!("post_processor adds the token {id} ");
                assert!(error.contains(TOKENIZER_FILE) && error.contains(&added), "{error}");
            }
        }
    }
}
