//! Turns one record into examples, or into the reason why it has none.
//!
//! Worker threads share an [`Encoder`]. [`Encoded::findings`] lists what it drops, cuts or doubts, and [`Diagnosis`](crate::Diagnosis) counts them;
//! an error is only what no threshold can excuse. Trade-off: a conversation of many megabytes is tokenized in one piece (unlike a text), because its
//! mask needs the offset of every token.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::cache::Example;
use crate::chat_template::within_deadline;
use crate::conversation::{RecordTokens, TokenOffsets, encode_chat};
use crate::error::DataError;
use crate::finding::{Finding, FindingKind};
use crate::pair::{PairCut, cut_pair};
use crate::record_format::{ASSISTANT, Chat, Fields, RecordFormat, Row, fields_hash, headed_text};
use crate::selection::{Selection, TrainOn};
use crate::source::Record;
use crate::tokenizer::Tokenizer;

/// Version of the meaning of tokens and masks. Incremented whenever the same records, tokenizer and options give other examples: after a change in
/// how records are parsed, rendered, tokenized, masked or cut. It is part of [`Encoder::fingerprint`] and so of a cache's key; the layout of token
/// files has its own version.
const CODE_VERSION: u32 = 9;
const SECONDS_PER_DAY: i64 = 86_400;
/// Roles that chat templates know.
const ROLES: [&str; 9] =
    ["system", "user", "assistant", "tool", "developer", "function", "ipython", "environment", "model"];

/// What happens to a document that is longer than `max_seq_len`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum OverflowPolicy {
    /// The end is cut off and counted.
    Truncate,
    /// It becomes several documents, each beginning with the last token of the previous one, so that no target is lost.
    Split,
    /// It is dropped and counted.
    Drop,
}

/// Options that determine how records become examples.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EncodeOptions {
    /// The format of the records.
    pub record_format: RecordFormat,
    /// Names of the records' keys.
    pub fields: Fields,
    /// The tokens that count in the loss.
    pub train_on: TrainOn,
    /// The roles whose messages count in the loss if `train_on` is `Assistant` or `Last`: ["assistant"].
    pub roles_to_train: Vec<String>,
    /// Whether the token that ends the assistant's turn counts in the loss.
    pub train_end_of_turn: bool,
    /// Maximum number of tokens per example, at least 2.
    pub max_seq_len: usize,
    /// The policy for longer documents. By default texts and tokens are split, and everything else is cut.
    pub overflow: Option<OverflowPolicy>,
}

impl EncodeOptions {
    /// Creates the default options with a maximum length.
    pub fn new(max_seq_len: usize) -> Self {
        Self {
            record_format: RecordFormat::default(),
            fields: Fields::default(),
            train_on: TrainOn::default(),
            roles_to_train: vec![ASSISTANT.to_owned()],
            train_end_of_turn: true,
            max_seq_len,
            overflow: None,
        }
    }
}

/// The result of encoding a record.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Encoded {
    /// One example, several if the record was split, none if it was dropped. Each has at most `max_seq_len` tokens and
    /// at least one loss token; the first token never counts.
    pub examples: Vec<Example>,
    /// The reasons why the record was dropped, cut or doubted.
    pub findings: Vec<Finding>,
    /// Hash of the record's content before anything is rendered or tokenized. Splits depend on it.
    pub record: u64,
    /// Tokens that were cut off or dropped because of the length.
    pub tokens_cut: usize,
    /// Whether the record is a conversation, rendered with the chat template.
    pub is_chat: bool,
    /// Whether an end-of-turn token counts in the loss.
    pub end_trained: bool,
    /// Keys of the record that have a value and that its format does not read, and of its messages (`message.mask`) that the
    /// chat template does not write; none of a record with a bad value.
    pub unread_keys: Vec<String>,
}

impl Encoded {
    /// Creates the result for a row that cannot be read, from its error.
    pub(crate) fn unreadable(line: usize, problem: &str) -> Self {
        let record = xxhash_rust::xxh3::xxh3_64(format!("{line} {problem}").as_bytes());
        Self { record, ..Self::dropped(FindingKind::Unreadable, problem) }
    }

    fn dropped(kind: FindingKind, detail: impl Into<String>) -> Self {
        Self { findings: vec![Finding { kind, detail: detail.into() }], ..Self::default() }
    }
}

/// The reason why a record gives no tokens: a finding about this record, or an error that affects all records.
enum Failure {
    Finding(FindingKind, String),
    Error(DataError),
}

impl From<DataError> for Failure {
    fn from(error: DataError) -> Self {
        let kind = match &error {
            DataError::TemplateFailed { .. } => FindingKind::TemplateRefused,
            DataError::MaskNotFound(_) => FindingKind::MaskNotFound,
            DataError::DoubledBos(_) => FindingKind::DoubledBos,
            _ => return Self::Error(error),
        };
        Self::Finding(kind, error.to_string())
    }
}

/// Turns the records of one source into examples. Shared by threads.
#[derive(Debug)]
pub struct Encoder<'a> {
    tokenizer: &'a Tokenizer,
    options: Arc<EncodeOptions>,
}

impl<'a> Encoder<'a> {
    /// Creates an encoder for a source. The keys of its first record determine the format if the options do not. Errors: the format is not
    /// recognized, or `max_seq_len` is less than 2.
    pub fn new(tokenizer: &'a Tokenizer, mut options: EncodeOptions, first: &Record) -> Result<Self, DataError> {
        if options.max_seq_len < 2 {
            return Err(DataError::SequenceTooShort(options.max_seq_len));
        }
        options.record_format = options.record_format.resolve(&first.fields, &mut options.fields, &first.place)?;
        Ok(Self { tokenizer, options: Arc::new(options) })
    }

    /// Returns the same encoder with another copy of its tokenizer, for another thread: see [`Tokenizer`].
    pub fn with_tokenizer<'b>(&self, tokenizer: &'b Tokenizer) -> Encoder<'b> {
        Encoder { tokenizer, options: self.options.clone() }
    }

    /// Returns the options; the record format is never `Auto`.
    pub fn options(&self) -> &EncodeOptions {
        &self.options
    }

    /// Returns the policy for documents that are too long.
    pub fn overflow(&self) -> OverflowPolicy {
        self.options.overflow.unwrap_or(match self.options.record_format {
            RecordFormat::Text | RecordFormat::Pretokenized => OverflowPolicy::Split,
            // The end of a prompt is the question.
            RecordFormat::Prompt => OverflowPolicy::Drop,
            _ => OverflowPolicy::Truncate,
        })
    }

    /// Returns the encoder's tokenizer.
    pub fn tokenizer(&self) -> &'a Tokenizer {
        self.tokenizer
    }

    /// Returns everything except the records that tokens and masks depend on, as bytes for a cache's key: the tokenizer with its templates, the
    /// options, the version of this code; and the day that chat templates see (see [`Tokenizer::set_date`]), if records are rendered and a template
    /// reads the date. For a template that writes the time of day, the key still contains only the day: set the date to the beginning of a day if
    /// that matters.
    pub fn fingerprint(&self) -> Vec<u8> {
        let is_rendered = !matches!(self.options.record_format, RecordFormat::Text | RecordFormat::Pretokenized);
        let day = self.tokenizer.date().filter(|_| is_rendered).map(|seconds| seconds.div_euclid(SECONDS_PER_DAY));
        let options = serde_json::to_vec(&(&*self.options, day)).expect("options are plain data");
        [self.tokenizer.fingerprint(), options, CODE_VERSION.to_le_bytes().to_vec()].concat()
    }

    /// Encodes a record. Errors: a key is missing or has the wrong type, except for a null or another value that is not a text where one is expected,
    /// which is a finding; a key contains images, audio or video; a chat template or an end-of-text token is needed and missing; the tokenizer fails.
    pub fn encode(&self, record: &Record) -> Result<Encoded, DataError> {
        let options = &self.options;
        let (row, unread) = match options.record_format.parse_whole(&record.fields, &options.fields, &record.place) {
            Ok(parsed) => parsed,
            Err(error) if error.is_bad_cell => {
                let dropped = Encoded::dropped(FindingKind::BadCell, error.problem);
                return Ok(Encoded { record: fields_hash(&record.fields), ..dropped });
            }
            Err(error) => return Err(error.into()),
        };
        let hash = row.content_hash();
        let encoded = match row {
            Row::Pair { chosen, rejected } => within_deadline(|| self.encode_pair(*chosen, *rejected)),
            row => within_deadline(|| self.encode_row(row).map(|record| self.cut(record))),
        };
        let encoded = match encoded {
            Ok(encoded) => encoded,
            Err(Failure::Finding(kind, detail)) => Encoded::dropped(kind, detail),
            Err(Failure::Error(reason)) => {
                return Err(DataError::InRow { place: record.place.clone(), reason: Box::new(reason) });
            }
        };
        let mut unread_keys: Vec<String> = unread.into_iter().map(str::to_owned).collect();
        unread_keys.extend_from_slice(&encoded.unread_keys);
        Ok(Encoded { record: hash, unread_keys, ..encoded })
    }

    fn encode_pair(&self, chosen: Row, rejected: Row) -> Result<Encoded, Failure> {
        let sides = [self.encode_row(chosen)?, self.encode_row(rejected)?];
        let is_chat = sides[0].is_chat;
        let dropped = |kind, detail: &str| Ok(Encoded { is_chat, ..Encoded::dropped(kind, detail) });
        if sides.iter().any(|side| side.example.loss_tokens() == 0) {
            return dropped(FindingKind::NothingToTrain, "no token of an answer counts in the loss");
        }
        if sides[0].example == sides[1].example {
            return dropped(FindingKind::SameAnswers, "both give the same tokens");
        }
        let mut encoded = Encoded { is_chat, ..Encoded::default() };
        for key in sides.iter().flat_map(|side| &side.unread_keys) {
            encoded.unread_keys.extend((!encoded.unread_keys.contains(key)).then(|| key.clone()));
        }
        let find = |kind, detail: &str| Finding { kind, detail: detail.to_owned() };
        for finding in sides.iter().flat_map(|side| &side.findings) {
            if encoded.findings.iter().all(|found| found.kind != finding.kind) {
                encoded.findings.push(finding.clone());
            }
        }
        encoded.end_trained = sides[0].closings.iter().any(|&index| sides[0].example.loss_mask[index]);
        let length: usize = sides.iter().map(|side| side.example.tokens.len()).sum();
        let limit = self.options.max_seq_len;
        let examples = sides.map(|side| side.example);
        if length <= limit {
            encoded.examples = examples.into();
            return Ok(encoded);
        }
        let too_long = format!("{length} tokens in both answers with their prompt, max_seq_len is {limit}");
        if self.overflow() == OverflowPolicy::Drop {
            encoded.findings.push(find(FindingKind::TooLong, &too_long));
            (encoded.tokens_cut, encoded.end_trained) = (length, false);
            return Ok(encoded);
        }
        let PairCut { examples, of_prompt, of_answers } = cut_pair(examples, limit);
        encoded.tokens_cut = of_prompt + of_answers;
        if examples.iter().any(|example| example.loss_tokens() == 0) {
            encoded.findings.push(find(FindingKind::CutToNothing, &too_long));
            encoded.end_trained = false;
            return Ok(encoded);
        }
        for (kind, tokens) in [(FindingKind::PromptCut, of_prompt), (FindingKind::Truncated, of_answers)] {
            encoded.findings.extend((tokens > 0).then(|| find(kind, &too_long)));
        }
        encoded.examples = examples.into();
        Ok(encoded)
    }

    fn encode_row(&self, row: Row) -> Result<RecordTokens, Failure> {
        if self.options.train_on == TrainOn::Flags && matches!(row, Row::Text(_) | Row::PromptCompletion { .. }) {
            let detail = "the record has no messages that could have a flag";
            return Err(Failure::Finding(FindingKind::NoFlags, detail.to_owned()));
        }
        match row {
            Row::Text(text) => self.text(&text),
            Row::Chat(chat) => self.chat(chat),
            Row::PromptCompletion { prompt, completion } => self.prompt_completion(&prompt, &completion),
            Row::Pretokenized { tokens, loss_mask } => self.pretokenized(tokens, loss_mask),
            Row::Prompt(content) => self.prompt(*content),
            Row::Pair { .. } => unreachable!("the answers of a pair are encoded one by one"),
        }
    }

    /// Tokenizes a prompt, up to the assistant's header if it is a conversation. No token of it is trained; all but the first count, as of a text.
    fn prompt(&self, content: Row) -> Result<RecordTokens, Failure> {
        let tokens = match content {
            Row::Chat(chat) if chat.turns.is_empty() => return Err(empty("there are no messages before an answer")),
            Row::Chat(chat) => {
                let chat = chat.with_system(self.tokenizer.template_defaults().system_prompt.as_deref());
                let template = self.tokenizer.chat_template_for(chat.tools.is_some())?;
                self.tokenizer.encode(&template.render(&chat, true)?, false)?
            }
            Row::Text(text) => self.tokenizer.encode(&text, true)?,
            other => unreachable!("a prompt is a text or a conversation: {other:?}"),
        };
        if tokens.len() < 2 {
            return Err(empty("the prompt is blank"));
        }
        self.tokenizer.refuse_doubled_bos(&tokens)?;
        let loss_mask = (0..tokens.len()).map(|index| index > 0).collect();
        Ok(plain_record(tokens, loss_mask))
    }

    /// Tokenizes a text, with the beginning-of-text token if the tokenizer adds one, and with one end-of-text token. All tokens but the first count
    /// in the loss.
    fn text(&self, text: &str) -> Result<RecordTokens, Failure> {
        if text.trim().is_empty() {
            return Err(empty("the text is blank"));
        }
        let eos = self.tokenizer.require_eos_token_id()?;
        let mut tokens = self.tokenizer.encode(text, true)?;
        if tokens.last() != Some(&eos) {
            tokens.push(eos);
        }
        let loss_mask = (0..tokens.len()).map(|index| index > 0).collect();
        Ok(plain_record(tokens, loss_mask))
    }

    fn chat(&self, chat: Chat) -> Result<RecordTokens, Failure> {
        if chat.turns.is_empty() {
            return Err(empty("there are no messages"));
        }
        if self.options.train_on == TrainOn::Flags && chat.turns.iter().all(|turn| turn.train.is_none()) {
            let detail = "no message has a training flag, such as \"train\": true";
            return Err(Failure::Finding(FindingKind::NoFlags, detail.to_owned()));
        }
        let chat = chat.with_system(self.tokenizer.template_defaults().system_prompt.as_deref());
        if matches!(self.options.record_format, RecordFormat::Alpaca | RecordFormat::Preference)
            && self.tokenizer.chat_template_for(chat.tools.is_some()).is_err()
            && let Some((prompt, completion)) = headed_text(&chat)
        {
            return self.prompt_completion(&prompt, &completion);
        }
        let options = &self.options;
        let selection = Selection::new(&chat, options.train_on, &options.roles_to_train);
        let mut record = encode_chat(self.tokenizer, &chat, &selection, options.train_end_of_turn)?;
        if options.train_on == TrainOn::All {
            record.closings = self.ends_of_all(&record.example);
        }
        let all = record.example.loss_mask.iter().skip(1).all(|&counts| counts) && record.example.tokens.len() > 1;
        if all && options.train_on != TrainOn::All {
            let detail = "every token counts in the loss, the user's too: the {% generation %} blocks of the chat template \
                          contain more than the assistant's text, or there is nothing else";
            record.findings.push(Finding { kind: FindingKind::AllTrained, detail: detail.to_owned() });
        }
        if record.example.loss_tokens() == 0 {
            return Err(Failure::Finding(FindingKind::NothingToTrain, self.no_loss_reason(&chat)));
        }
        record.findings.extend(self.other_role(&chat));
        record.findings.extend(answer_first(&chat, &selection));
        Ok(record)
    }

    /// Returns a finding about the first role that templates do not know and the recipe does not name.
    fn other_role(&self, chat: &Chat) -> Option<Finding> {
        let options = &self.options;
        let is_known = |role: &str| {
            ROLES.contains(&role)
                || options.roles_to_train.iter().any(|other| other == role)
                || options.fields.roles.values().any(|other| other == role)
        };
        let role = chat.turns.iter().map(|turn| turn.role()).find(|role| !is_known(role))?;
        let detail = format!(
            "{role:?} is none of system, user, assistant and tool: if it means one of them, write data.roles = {{ {role:?} = \"user\" }}"
        );
        Some(Finding { kind: FindingKind::OtherRole, detail })
    }

    /// Returns the tokens that end turns if everything counts in the loss and no spans were located: the special tokens in the loss, possibly
    /// including headers; without any, the last token.
    fn ends_of_all(&self, example: &Example) -> Vec<usize> {
        let counts = |index: &usize| example.loss_mask[*index];
        let is_special = |index: &usize| self.tokenizer.is_special(example.tokens[*index]);
        let ends: Vec<usize> = (0..example.tokens.len()).filter(counts).filter(is_special).collect();
        if ends.is_empty() { example.tokens.len().checked_sub(1).into_iter().collect() } else { ends }
    }

    fn no_loss_reason(&self, chat: &Chat) -> String {
        let roles = chat.turns.iter().map(|turn| turn.role()).collect::<Vec<_>>().join(", ");
        let quoted: Vec<String> = self.options.roles_to_train.iter().map(|role| format!("{role:?}")).collect();
        let trained = quoted.join(" or ");
        let is_trained = |role: &str| self.options.roles_to_train.iter().any(|other| other == role);
        match self.options.train_on {
            TrainOn::Flags => {
                format!("no message has a flag that is true (roles: {roles}), or the template writes nothing for it")
            }
            _ if chat.turns.iter().any(|turn| is_trained(turn.role())) => format!(
                "nothing of {trained} counts (roles: {roles}): the template writes nothing for it, or train_on or a message's flag leaves it out"
            ),
            _ => format!("no selected message has the role {trained} (roles: {roles})"),
        }
    }

    /// Tokenizes a prompt and its completion, concatenated. A token across the boundary belongs to the completion.
    fn prompt_completion(&self, prompt: &str, completion: &str) -> Result<RecordTokens, Failure> {
        if completion.trim().is_empty() {
            return Err(empty("the completion is blank"));
        }
        let tokenizer = self.tokenizer;
        let eos = tokenizer.require_eos_token_id()?;
        let text = format!("{prompt}{completion}");
        let encoding = tokenizer.encode_with_offsets(&text)?;
        let (ids, offsets) = (encoding.get_ids(), encoding.get_offsets());
        let tokens = TokenOffsets { tokenizer, text: &text, ids, offsets };
        let start = tokens.of_span(&(prompt.len()..text.len()).into()).0.start;
        let all = self.options.train_on == TrainOn::All;
        let mut loss_mask: Vec<bool> = (0..ids.len()).map(|index| all || index >= start).collect();
        let mut tokens = ids.to_vec();
        if let Some(before) = tokenizer.token_before_text()?
            && tokens.first() != Some(&before)
        {
            tokens.insert(0, before);
            loss_mask.insert(0, false);
        }
        if tokens.last() != Some(&eos) {
            tokens.push(eos);
            loss_mask.push(true);
        }
        loss_mask[0] = false;
        Ok(plain_record(tokens, loss_mask))
    }

    fn pretokenized(&self, tokens: Vec<u32>, mut loss_mask: Vec<bool>) -> Result<RecordTokens, Failure> {
        let vocabulary = self.tokenizer.vocab_size();
        if tokens.is_empty() {
            return Err(empty("there are no tokens"));
        }
        if let Some(foreign) = tokens.iter().find(|&&token| token as usize >= vocabulary) {
            let (token, vocab_size) = (*foreign, vocabulary);
            return Err(Failure::Error(DataError::ForeignToken { token, vocab_size }));
        }
        self.tokenizer.refuse_doubled_bos(&tokens)?;
        if self.options.train_on == TrainOn::All {
            loss_mask.fill(true);
        }
        loss_mask[0] = false;
        Ok(plain_record(tokens, loss_mask))
    }

    fn cut(&self, record: RecordTokens) -> Encoded {
        let RecordTokens { mut example, closings, is_chat, findings, unread_keys } = record;
        let mut encoded = Encoded { findings, is_chat, unread_keys, ..Encoded::default() };
        if example.loss_tokens() == 0 {
            let detail = "no selected token has a token before it to be predicted from";
            encoded.findings.push(Finding { kind: FindingKind::NothingToTrain, detail: detail.to_owned() });
            return encoded;
        }
        let (length, limit) = (example.tokens.len(), self.options.max_seq_len);
        let counts = |&&index: &&usize| example.loss_mask[index];
        let first_end = closings.iter().find(counts).copied();
        encoded.end_trained = first_end.is_some();
        let mut find = |kind, detail: String| encoded.findings.push(Finding { kind, detail });
        if length <= limit {
            encoded.examples.push(example);
            return encoded;
        }
        let too_long = format!("{length} tokens, max_seq_len is {limit}");
        match self.overflow() {
            OverflowPolicy::Drop => {
                find(FindingKind::TooLong, too_long);
                (encoded.tokens_cut, encoded.end_trained) = (length, false);
            }
            OverflowPolicy::Split => {
                find(FindingKind::Split, too_long);
                (encoded.examples, encoded.tokens_cut) = split(&example, limit);
            }
            OverflowPolicy::Truncate => {
                encoded.tokens_cut = length - limit;
                encoded.end_trained = first_end.is_some_and(|end| end < limit);
                example.tokens.truncate(limit);
                example.loss_mask.truncate(limit);
                if example.loss_tokens() == 0 {
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

/// Returns a finding about a conversation that begins with an answer and ends with a question.
fn answer_first(chat: &Chat, selection: &Selection) -> Option<Finding> {
    let first = chat.turns.iter().map(|turn| turn.role()).find(|role| *role != "system")?;
    let is_open = chat.turns.last()?.role() == "user" && selection.turns.last() == Some(&false);
    let detail = format!("the last of its {} messages is the user's", chat.turns.len());
    (first == ASSISTANT && is_open).then_some(Finding { kind: FindingKind::AnswerFirst, detail })
}

fn plain_record(tokens: Vec<u32>, loss_mask: Vec<bool>) -> RecordTokens {
    let (closings, findings, unread_keys) = (Vec::new(), Vec::new(), Vec::new());
    RecordTokens { example: Example { tokens, loss_mask }, closings, is_chat: false, findings, unread_keys }
}

fn empty(detail: &str) -> Failure {
    Failure::Finding(FindingKind::Empty, detail.to_owned())
}

/// Splits into pieces of at most `limit` tokens, each beginning with the last token of the previous one. Pieces without loss tokens are dropped and
/// their tokens counted.
fn split(example: &Example, limit: usize) -> (Vec<Example>, usize) {
    let mut pieces = Vec::new();
    let mut lost = 0;
    let mut start = 0;
    while start + 1 < example.tokens.len() {
        let end = (start + limit).min(example.tokens.len());
        let mut loss_mask = example.loss_mask[start..end].to_vec();
        loss_mask[0] = false;
        let piece = Example { tokens: example.tokens[start..end].to_vec(), loss_mask };
        if piece.loss_tokens() == 0 {
            lost += end - start;
        } else {
            pieces.push(piece);
        }
        start = end - 1;
    }
    (pieces, lost)
}
