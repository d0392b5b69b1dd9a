//! Converts the keys of a record to its content: a text, a conversation, a prompt with one or two completions, or token ids.
//!
//! The format is named in the recipe or detected from the first record. Trade-off: no guessing within a source. All its records have one format, and
//! a record of another format is an error that lists the keys found. A value that is absent, null or not a text where a text is expected is an error
//! about that record alone ([`RecordFormatError::is_bad_cell`]).

mod fields;
mod messages;
mod pairs;
mod preference;
mod pretokenized;
mod prompt;
mod row;
mod value;

use std::cell::RefCell;

use serde::{Deserialize, Serialize};
use serde_json::Value as Json;

use crate::source::RecordPlace;
use fields::MESSAGE_KEYS;
use value::{Parsed, Reader, names, unread_keys};

pub use fields::Fields;
pub(crate) use pairs::headed_text;
pub(crate) use row::{ASSISTANT, Object, fields_hash, fields_weight, weight};
pub use row::{Chat, Row, Turn};
pub use value::RecordFormatError;

/// The format of a source's records: which keys they have and what they mean.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum RecordFormat {
    /// Detected from the keys of the first record.
    #[default]
    Auto,
    /// `messages` with `role` and `content` (OpenAI), or `conversations` with `from` and `value` (ShareGPT); optionally
    /// with `tools` and `system`. Rendered with the chat template.
    Chat,
    /// As chat, with ShareGPT's names: `conversations` of `from` and `value`.
    Sharegpt,
    /// `instruction`, `input` and `output`, optionally with `system` and `history`. Rendered with the chat template if
    /// there is one, otherwise with plain headings. Also pairs under other common names: `instruction`, `question`,
    /// `prompt`, `query` or `input` with `output`, `response` or `answer`, optionally with `context`.
    Alpaca,
    /// `instruction`, `input` and `output` as the Alpaca project wrote them, without the chat template: a preamble that
    /// differs with and without an input, then headings. Only the output counts in the loss. axolotl's `type: alpaca`.
    AlpacaPrompt,
    /// `text`, followed by the end-of-text token; all tokens count in the loss.
    Text,
    /// `prompt` and `completion`: two strings or two lists of messages. Only the completion counts in the loss.
    PromptCompletion,
    /// `input_ids` with `labels` (-100: no loss) or a mask of ones and zeros, used unchanged.
    Pretokenized,
    /// `chosen` and `rejected`: two answers to a `prompt`, to `messages`, to an `instruction`, or two conversations that begin alike. Only
    /// the answers count in the loss. What a recipe with `[preference]` reads, and no other.
    Preference,
    /// `prompt` (a text, or messages), `messages` without the answer at their end, or an `instruction`; all other keys are columns that
    /// rewards see. What a recipe with `[grpo]` reads, and no other.
    Prompt,
}

impl RecordFormat {
    /// Returns this format, or for `Auto` the format that the keys of a source's first record show. If the record has a common pair of columns under
    /// other names (`question` and `answer`, ...), `names` becomes these names. Errors: the keys match no format, and the message lists the keys and
    /// the formats; or they are those of a set for preference training.
    pub fn resolve(self, fields: &Object, names: &mut Fields, place: &RecordPlace) -> Result<Self, RecordFormatError> {
        if self == Self::Preference {
            preference::resolve(fields, names, place)?;
            return Ok(self);
        }
        if self == Self::Prompt {
            return Ok(self);
        }
        preference::refuse(fields, names, place)?;
        if matches!(self, Self::Alpaca | Self::AlpacaPrompt) {
            names.take_common_pair(fields);
        }
        if self != Self::Auto {
            return self.unless_another(fields, names, place);
        }
        let has = |key: &String| fields.contains_key(key);
        let has_messages = match &names.messages {
            Some(key) => has(key),
            None => MESSAGE_KEYS.iter().any(|key| fields.contains_key(*key)),
        };
        if has(&names.input_ids) {
            Ok(Self::Pretokenized)
        } else if has_messages {
            Ok(Self::Chat)
        } else if has(&names.prompt) && has(&names.completion) {
            Ok(Self::PromptCompletion)
        } else if has(&names.instruction) && has(&names.output) {
            Ok(Self::Alpaca)
        } else if has(&names.text) {
            Ok(Self::Text)
        } else if names.take_common_pair(fields) {
            Ok(Self::Alpaca)
        } else {
            Err(unrecognized(fields, names, place))
        }
    }

    /// Returns this format, which the recipe names. Error: the first record lacks its key and has those of another format.
    fn unless_another(self, fields: &Object, names: &Fields, place: &RecordPlace) -> Parsed<Self> {
        let lacks = |key: &String| !fields.contains_key(key);
        let lacks_key = match self {
            Self::Chat | Self::Sharegpt => match &names.messages {
                Some(key) => lacks(key),
                None => MESSAGE_KEYS.iter().all(|key| !fields.contains_key(*key)),
            },
            Self::Alpaca | Self::AlpacaPrompt => lacks(&names.instruction),
            Self::Text => lacks(&names.text),
            Self::PromptCompletion => lacks(&names.prompt),
            Self::Pretokenized => lacks(&names.input_ids),
            Self::Auto | Self::Preference | Self::Prompt => false,
        };
        let found = if lacks_key { Self::Auto.resolve(fields, &mut names.clone(), place).ok() } else { None };
        let Some(found) = found else { return Ok(self) };
        let shown = |format: Self| serde_json::to_value(format).unwrap_or_default();
        let problem = format!(
            "data.format is {}, and the rows are {}: they have {}. Remove data.format, or write the right one",
            shown(self),
            shown(found),
            value::names(fields)
        );
        Err(RecordFormatError::new(place, problem))
    }

    /// Parses a record. Errors: a key is missing, has the wrong type, or contains images, audio or video; the message names place and key.
    pub fn parse(self, fields: &Object, names: &Fields, place: &RecordPlace) -> Result<Row, RecordFormatError> {
        self.parse_whole(fields, names, place).map(|(row, _)| row)
    }

    /// Parses a record, and lists the keys with a value that the format does not read. Errors: those of [`RecordFormat::parse`].
    pub(crate) fn parse_whole<'a>(
        self,
        fields: &'a Object,
        names: &Fields,
        place: &RecordPlace,
    ) -> Parsed<(Row, Vec<&'a str>)> {
        let read = RefCell::default();
        let row = self.content(Reader { fields, place, read: &read }, names);
        let row = row.map_err(|error| under_another_name(error, fields, names))?;
        if self == Self::Prompt {
            return Ok((row, Vec::new()));
        }
        let unread = unread_keys(fields, &read.borrow(), place)?;
        Ok((row, unread))
    }

    fn content(self, record: Reader<'_>, names: &Fields) -> Parsed<Row> {
        match self {
            Self::Auto => {
                let mut names = names.clone();
                Self::Auto.resolve(record.fields, &mut names, record.place)?.content(record, &names)
            }
            Self::Chat | Self::Sharegpt => messages::parse(record, names, self == Self::Sharegpt).map(Row::Chat),
            Self::Alpaca => pairs::parse_instruction(record, names).map(Row::Chat),
            Self::AlpacaPrompt => pairs::parse_alpaca_prompt(record, names),
            Self::Text => Ok(Row::Text(record.need_text(&names.text)?.into_owned())),
            Self::PromptCompletion => pairs::parse_prompt(record, names),
            Self::Pretokenized => pretokenized::parse(record, names),
            Self::Preference => preference::parse(record, names),
            Self::Prompt => prompt::parse(record, names),
        }
    }
}

/// Replaces the advice on a key that is missing if a key of the record looks like another name for it.
fn under_another_name(mut error: RecordFormatError, fields: &Object, names: &Fields) -> RecordFormatError {
    let key = error.problem.split('"').nth(1).unwrap_or_default();
    let line = names.suggestion(fields).filter(|line| line.contains(&format!(" {key} = ")));
    let Some(line) = line else { return error };
    if let Some(start) = error.problem.strip_suffix(value::SAME_FORMAT) {
        error.problem = format!("{start}If it is there under another name, write {line}");
    }
    error
}

fn unrecognized(fields: &Object, expected: &Fields, place: &RecordPlace) -> RecordFormatError {
    let messages = expected.messages.as_deref().unwrap_or("messages\" or \"conversations");
    let known = [
        format!("chat ({messages:?})").replace('\\', ""),
        format!(
            "alpaca ({:?}, {:?}, {:?}, or a pair of a question and an answer)",
            expected.instruction, expected.input, expected.output
        ),
        format!("text ({:?})", expected.text),
        format!("prompt_completion ({:?}, {:?})", expected.prompt, expected.completion),
        format!("pretokenized ({:?}, {:?})", expected.input_ids, expected.labels),
    ];
    if let Some(problem) = known_otherwise(fields) {
        return RecordFormatError::new(place, problem);
    }
    let hint = expected.suggestion(fields).map_or_else(String::new, |line| {
        format!(". Some of these look like other names of known keys: if they are, write {line}")
    });
    let problem = format!(
        "found {}, which matches no known format. The formats are {}. Rename the keys, name the format, or map the keys with \
         `fields`, as in fields = {{ instruction = \"QUESTION\", output = \"ANSWER\" }}{hint}",
        names(fields),
        known.join(", ")
    );
    RecordFormatError::new(place, problem)
}

/// Returns what rows are whose keys show that they are no format of a record, and what to do.
fn known_otherwise(fields: &Object) -> Option<String> {
    let only = fields.iter().next().filter(|_| fields.len() == 1);
    let separator = only.and_then(|(key, _)| [';', '|', '\t'].into_iter().find(|&separator| key.contains(separator)));
    if let Some(separator) = separator {
        let columns = names(fields);
        return Some(format!(
            "{separator:?} separates the columns here ({columns}), and CSV needs commas: write the file with commas"
        ));
    }
    let has = |value: &Json, keys: &[&str]| keys.iter().all(|key| value.get(*key).is_some());
    let turns = fields.get("conversation").and_then(Json::as_array);
    if turns.is_some_and(|turns| turns.iter().any(|turn| has(turn, &["input", "output"]))) {
        let what = "this is xtuner's format, \"conversation\" with \"input\" and \"output\", which is not read: write each turn as two messages, \
                    {\"messages\": [{\"role\": \"user\", \"content\": ...}, {\"role\": \"assistant\", \"content\": ...}]}";
        return Some(what.to_owned());
    }
    if fields.values().any(|value| has(value, &["file_name"]) || has(value, &["hf_hub_url"])) {
        let what =
            "this is LLaMA-Factory's dataset_info.json, which describes data: name the data file itself as data.path";
        return Some(what.to_owned());
    }
    if ["architectures", "model_type"].iter().all(|key| fields.contains_key(*key)) {
        return Some(
            "this is the configuration of a model, not data: name the file of the data as data.path".to_owned(),
        );
    }
    None
}
