//! One record to the examples that are trained on, or to the reason why there are none.
//!
//! An [`Encoder`] is shared by worker threads. What it drops, cuts or doubts it says in [`Encoded::findings`], and
//! [`Diagnosis`](crate::Diagnosis) adds those up; only what no threshold can excuse is an error. Gives up encoding a
//! conversation of many megabytes in pieces, as texts are: its mask needs the place of every token.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value as Json};

use crate::conversation::encode_chat;
use crate::dataset::Example;
use crate::diagnose::{Finding, FindingKind};
use crate::error::{DataError, Place};
use crate::mask::{Tokens, TrainOn};
use crate::shape::{Chat, Fields, Row, Shape, headed_text};
use crate::source::Record;
use crate::tokenizer::Tokenizer;

/// The meaning of tokens and masks. Raised whenever the same records, tokenizer and options come to give other examples:
/// a change of how records are understood, rendered, tokenised, masked or cut. It is part of [`Encoder::fingerprint`], and
/// so of a cache's key; the layout of token files has a version of its own.
const CODE_VERSION: u32 = 1;
const SECONDS_PER_DAY: i64 = 86_400;

/// What becomes of a document that is longer than `max_seq_len`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Overflow {
    /// It is cut there; what is behind is lost and counted.
    #[default]
    Truncate,
    /// It becomes several documents, each beginning with the last token of the one before, so that no target is lost.
    Split,
    /// It is left out and counted.
    Drop,
}

/// How records become examples.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EncodeOptions {
    /// What records hold.
    pub shape: Shape,
    /// Names of keys.
    pub fields: Fields,
    /// Which tokens are trained.
    pub train_on: TrainOn,
    /// Train the token that ends the assistant's turn.
    pub train_end_of_turn: bool,
    /// Tokens of the longest example, at least 2.
    pub max_seq_len: usize,
    /// What becomes of longer ones.
    pub overflow: Overflow,
    /// Variables for the chat template (`enable_thinking` and the like); those of a record win.
    pub template_arguments: Map<String, Json>,
}

impl EncodeOptions {
    /// The defaults with a length.
    pub fn new(max_seq_len: usize) -> Self {
        Self {
            shape: Shape::default(),
            fields: Fields::default(),
            train_on: TrainOn::default(),
            train_end_of_turn: true,
            max_seq_len,
            overflow: Overflow::default(),
            template_arguments: Map::new(),
        }
    }
}

/// What became of a record.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Encoded {
    /// One example, several if it was split, none if it was dropped. Each has at most `max_seq_len` tokens and at least
    /// one that is trained; the first never is.
    pub examples: Vec<Example>,
    /// Why it was dropped, cut or doubted.
    pub findings: Vec<Finding>,
    /// Tokens that were cut off or dropped because of the length.
    pub tokens_cut: usize,
    /// It is a conversation, rendered with the chat template.
    pub is_chat: bool,
    /// A token that ends a turn is trained.
    pub end_trained: bool,
}

impl Encoded {
    fn dropped(kind: FindingKind, detail: impl Into<String>) -> Self {
        Self { findings: vec![Finding { kind, detail: detail.into() }], ..Self::default() }
    }
}

/// A record in tokens, not yet cut.
struct Whole {
    example: Example,
    /// Tokens that end a turn.
    closings: Vec<usize>,
    is_chat: bool,
    findings: Vec<Finding>,
}

impl Whole {
    fn new(tokens: Vec<u32>, trained: Vec<bool>) -> Self {
        Self { example: Example { tokens, trained }, closings: Vec::new(), is_chat: false, findings: Vec::new() }
    }
}

/// Why a record gives no tokens: its own fault, or one that every record has.
enum Failure {
    Finding(FindingKind, String),
    Error(DataError),
}

impl From<DataError> for Failure {
    fn from(error: DataError) -> Self {
        let kind = match &error {
            DataError::TemplateFailed { .. } => FindingKind::TemplateRefused,
            DataError::NotAPrefix { .. } | DataError::MessageNotFound { .. } => FindingKind::MaskNotFound,
            DataError::DoubledBos { .. } => FindingKind::DoubledBos,
            _ => return Self::Error(error),
        };
        Self::Finding(kind, error.to_string())
    }
}

/// Turns records of one source into examples. Shared by threads.
#[derive(Debug)]
pub struct Encoder<'a> {
    tokenizer: &'a Tokenizer,
    options: Arc<EncodeOptions>,
}

impl<'a> Encoder<'a> {
    /// An encoder for a source whose first record has these fields; they decide the shape where it is not named.
    ///
    /// Errors: the shape is not recognised, `max_seq_len` is less than 2.
    pub fn new(
        tokenizer: &'a Tokenizer,
        mut options: EncodeOptions,
        first: &Map<String, Json>,
        place: &Place,
    ) -> Result<Self, DataError> {
        if options.max_seq_len < 2 {
            return Err(DataError::SequenceTooShort { max_seq_len: options.max_seq_len });
        }
        options.shape = options.shape.resolve(first, &options.fields, place)?;
        Ok(Self { tokenizer, options: Arc::new(options) })
    }

    /// The same encoder with another copy of its tokenizer, for a thread of its own: see [`Tokenizer`].
    pub fn with_tokenizer<'b>(&self, tokenizer: &'b Tokenizer) -> Encoder<'b> {
        Encoder { tokenizer, options: self.options.clone() }
    }

    /// The shape that records have.
    pub fn shape(&self) -> Shape {
        self.options.shape
    }

    /// How records become examples; the shape is never [`Shape::Auto`].
    pub fn options(&self) -> &EncodeOptions {
        &self.options
    }

    /// The tokenizer that it was made with.
    pub(crate) fn tokenizer(&self) -> &'a Tokenizer {
        self.tokenizer
    }

    /// What tokens and masks depend on beside the records, as bytes for a cache's key: the tokenizer with its templates,
    /// the options, the version of this code; and the day that chat templates see (see [`Tokenizer::set_date`]), where
    /// records are rendered and a template asks for it. A template that writes the time of day too is told apart by the
    /// day only: set the date to the beginning of a day where that matters.
    pub fn fingerprint(&self) -> Vec<u8> {
        let is_rendered = !matches!(self.options.shape, Shape::Text | Shape::Pretokenized);
        let day = self.tokenizer.date().filter(|_| is_rendered).map(|seconds| seconds.div_euclid(SECONDS_PER_DAY));
        let options = serde_json::to_vec(&(&*self.options, day)).expect("options are plain data");
        [self.tokenizer.fingerprint(), options, CODE_VERSION.to_le_bytes().to_vec()].concat()
    }

    /// Turns a record into examples.
    ///
    /// Errors: a key is missing or has the wrong type; there is no chat template, or no end-of-text token, and one is
    /// needed; the tokenizer fails.
    pub fn encode(&self, record: &Record) -> Result<Encoded, DataError> {
        self.encode_fields(&record.fields, &record.place)
    }

    /// As [`Encoder::encode`], of fields and their place.
    pub fn encode_fields(&self, fields: &Map<String, Json>, place: &Place) -> Result<Encoded, DataError> {
        let row = self.options.shape.parse(fields, &self.options.fields, place)?;
        let whole = match self.whole(row) {
            Ok(whole) => whole,
            Err(Failure::Finding(kind, detail)) => return Ok(Encoded::dropped(kind, detail)),
            Err(Failure::Error(reason)) => {
                return Err(DataError::InRow { place: place.clone(), reason: Box::new(reason) });
            }
        };
        Ok(self.fit(whole))
    }

    fn whole(&self, row: Row) -> Result<Whole, Failure> {
        if self.options.train_on == TrainOn::Flags && matches!(row, Row::Text(_) | Row::PromptCompletion { .. }) {
            return Err(Failure::Finding(FindingKind::NoFlags, "the row has no messages that could say it".to_owned()));
        }
        match row {
            Row::Text(text) => self.text(&text),
            Row::Chat(chat) => self.chat(chat),
            Row::PromptCompletion { prompt, completion } => self.prompt_completion(&prompt, &completion),
            Row::Pretokenized { tokens, trained } => self.pretokenized(tokens, trained),
        }
    }

    /// A text with the beginning-of-text token if the tokenizer puts one, and one end-of-text token; all trained but the
    /// first.
    fn text(&self, text: &str) -> Result<Whole, Failure> {
        if text.trim().is_empty() {
            return Err(empty("the text is blank"));
        }
        let eos = self.tokenizer.require_eos_token_id()?;
        let mut tokens = self.tokenizer.encode(text, true)?;
        if tokens.last() != Some(&eos) {
            tokens.push(eos);
        }
        let trained = (0..tokens.len()).map(|index| index > 0).collect();
        Ok(Whole::new(tokens, trained))
    }

    fn chat(&self, mut chat: Chat) -> Result<Whole, Failure> {
        if chat.turns.is_empty() {
            return Err(empty("there are no messages"));
        }
        if self.options.train_on == TrainOn::Flags && chat.turns.iter().all(|turn| turn.trained.is_none()) {
            let detail = "no message says itself whether it is trained, with \"train\": true or the like";
            return Err(Failure::Finding(FindingKind::NoFlags, detail.to_owned()));
        }
        if self.options.shape == Shape::Alpaca
            && self.tokenizer.chat_template_for(chat.tools.is_some()).is_err()
            && let Some((prompt, completion)) = headed_text(&chat)
        {
            return self.prompt_completion(&prompt, &completion);
        }
        for (key, value) in &self.options.template_arguments {
            chat.arguments.entry(key.clone()).or_insert_with(|| value.clone());
        }
        let options = &self.options;
        let encoded = encode_chat(self.tokenizer, &chat, options.train_on, options.train_end_of_turn)?;
        let mut whole = Whole { closings: encoded.closings, is_chat: true, ..Whole::new(Vec::new(), Vec::new()) };
        whole.example = encoded.example;
        if options.train_on == TrainOn::All {
            whole.closings = self.ends_of_whole(&whole.example);
        }
        if encoded.system_ignored {
            let detail = "the chat template writes nothing of the system message; put it into the first user message";
            whole.findings.push(Finding { kind: FindingKind::SystemIgnored, detail: detail.to_owned() });
        }
        let all = whole.example.trained.iter().skip(1).all(|&trained| trained) && whole.example.tokens.len() > 1;
        if all && options.train_on != TrainOn::All {
            let detail = "every token is trained, the user's too: the {% generation %} blocks of the chat template \
                          hold more than the assistant's text, or there is nothing else";
            whole.findings.push(Finding { kind: FindingKind::AllTrained, detail: detail.to_owned() });
        }
        if whole.example.trained_tokens() == 0 {
            return Err(Failure::Finding(FindingKind::NothingToTrain, self.nothing_trained(&chat)));
        }
        Ok(whole)
    }

    /// The tokens that end turns where everything is trained and nobody looked for them: the special tokens that are
    /// trained, of which a header may be one; without any, whatever comes last.
    fn ends_of_whole(&self, example: &Example) -> Vec<usize> {
        let is_trained = |index: &usize| example.trained[*index];
        let is_special = |index: &usize| self.tokenizer.is_special(example.tokens[*index]);
        let ends: Vec<usize> = (0..example.tokens.len()).filter(is_trained).filter(is_special).collect();
        if ends.is_empty() { example.tokens.len().checked_sub(1).into_iter().collect() } else { ends }
    }

    /// Why nothing of a conversation is trained.
    fn nothing_trained(&self, chat: &Chat) -> String {
        let roles = chat.turns.iter().map(|turn| turn.role()).collect::<Vec<_>>().join(", ");
        let which = match self.options.train_on {
            TrainOn::Flags => "no message has a flag that says yes",
            _ => "no message that is to be trained has the role \"assistant\"",
        };
        format!("{which} (roles: {roles}), or the template writes nothing for it")
    }

    /// A prompt and its completion, joined and tokenised as one; a token across the joint belongs to the completion.
    fn prompt_completion(&self, prompt: &str, completion: &str) -> Result<Whole, Failure> {
        if completion.trim().is_empty() {
            return Err(empty("the completion is blank"));
        }
        let tokenizer = self.tokenizer;
        let eos = tokenizer.require_eos_token_id()?;
        let text = format!("{prompt}{completion}");
        let encoding = tokenizer.encode_with_offsets(&text)?;
        let (ids, offsets) = (encoding.get_ids(), encoding.get_offsets());
        let tokens = Tokens { tokenizer, text: &text, ids, offsets };
        let start = tokens.of_span(&(prompt.len()..text.len()).into()).0.start;
        let all = self.options.train_on == TrainOn::All;
        let mut trained: Vec<bool> = (0..ids.len()).map(|index| all || index >= start).collect();
        let mut tokens = ids.to_vec();
        if let Some(before) = tokenizer.token_before_text()?
            && tokens.first() != Some(&before)
        {
            tokens.insert(0, before);
            trained.insert(0, false);
        }
        if tokens.last() != Some(&eos) {
            tokens.push(eos);
            trained.push(true);
        }
        trained[0] = false;
        Ok(Whole::new(tokens, trained))
    }

    fn pretokenized(&self, tokens: Vec<u32>, mut trained: Vec<bool>) -> Result<Whole, Failure> {
        let vocabulary = self.tokenizer.vocab_size();
        if tokens.is_empty() {
            return Err(empty("there are no tokens"));
        }
        if let Some(foreign) = tokens.iter().find(|&&token| token as usize >= vocabulary) {
            let (token, vocab_size) = (*foreign, vocabulary);
            return Err(Failure::Error(DataError::ForeignToken { token, vocab_size }));
        }
        if let (Some(bos), Some(token)) = (self.tokenizer.bos_token_id(), self.tokenizer.bos_token())
            && tokens.starts_with(&[bos, bos])
        {
            return Err(DataError::DoubledBos { token: token.to_owned() }.into());
        }
        if self.options.train_on == TrainOn::All {
            trained.fill(true);
        }
        trained[0] = false;
        Ok(Whole::new(tokens, trained))
    }

    /// Brings a record under `max_seq_len`.
    fn fit(&self, whole: Whole) -> Encoded {
        let Whole { mut example, closings, is_chat, findings } = whole;
        let mut encoded = Encoded { findings, is_chat, ..Encoded::default() };
        if example.trained_tokens() == 0 {
            let detail = "no token has something before it to be predicted from and is meant to be trained";
            encoded.findings.push(Finding { kind: FindingKind::NothingToTrain, detail: detail.to_owned() });
            return encoded;
        }
        let (length, limit) = (example.tokens.len(), self.options.max_seq_len);
        let is_trained = |&&index: &&usize| example.trained[index];
        let first_end = closings.iter().find(is_trained).copied();
        encoded.end_trained = first_end.is_some();
        let mut find = |kind, detail: String| encoded.findings.push(Finding { kind, detail });
        if length <= limit {
            encoded.examples.push(example);
            return encoded;
        }
        let too_long = format!("{length} tokens, max_seq_len is {limit}");
        match self.options.overflow {
            Overflow::Drop => {
                find(FindingKind::TooLong, too_long);
                (encoded.tokens_cut, encoded.end_trained) = (length, false);
            }
            Overflow::Split => {
                find(FindingKind::Split, too_long);
                (encoded.examples, encoded.tokens_cut) = split(&example, limit);
            }
            Overflow::Truncate => {
                encoded.tokens_cut = length - limit;
                encoded.end_trained = first_end.is_some_and(|end| end < limit);
                example.tokens.truncate(limit);
                example.trained.truncate(limit);
                if example.trained_tokens() == 0 {
                    find(FindingKind::CutToNothing, too_long);
                } else {
                    find(FindingKind::Truncated, too_long);
                    encoded.examples.push(example);
                }
            }
        }
        encoded
    }
}

fn empty(detail: &str) -> Failure {
    Failure::Finding(FindingKind::Empty, detail.to_owned())
}

/// Pieces of at most `limit` tokens, each beginning with the last token of the one before; those without a trained token
/// are left out and their tokens counted.
fn split(example: &Example, limit: usize) -> (Vec<Example>, usize) {
    let mut pieces = Vec::new();
    let mut lost = 0;
    let mut start = 0;
    while start + 1 < example.tokens.len() {
        let end = (start + limit).min(example.tokens.len());
        let mut trained = example.trained[start..end].to_vec();
        trained[0] = false;
        let piece = Example { tokens: example.tokens[start..end].to_vec(), trained };
        if piece.trained_tokens() == 0 {
            lost += end - start;
        } else {
            pieces.push(piece);
        }
        start = end - 1;
    }
    (pieces, lost)
}
