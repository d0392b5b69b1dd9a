//! From a record's keys to what it says: a text, a conversation, a prompt with its completion, or token ids.
//!
//! A shape is named, or recognised by the keys of the first record. Gives up guessing inside a source: all its records
//! have one shape, and a record of another one is an error that names the keys found.

mod error;
mod instruction;
mod messages;
mod pretokenized;
mod prompt;
pub(crate) mod value;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value as Json;

use crate::error::Place;
use value::{Object, Reader, names};

pub use error::{Percent, ShapeError};
pub(crate) use instruction::headed_text;

/// The key that holds a conversation, when none is named.
const MESSAGE_KEYS: [&str; 2] = ["messages", "conversations"];

/// What the records of a source hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Shape {
    /// What the keys of the first record show.
    #[default]
    Auto,
    /// `{"messages": [{"role", "content"}, ...]}` (OpenAI), or `{"conversations": [{"from", "value"}, ...]}` (ShareGPT);
    /// with `tools` and `system` if there are. Rendered with the chat template.
    Messages,
    /// As `Messages`, with the names ShareGPT gives: `conversations`, `from`, `value`.
    Sharegpt,
    /// `{"instruction", "input", "output"}`, with `system` and `history` if there are. Rendered with the chat template
    /// if there is one, else under plain headings.
    Alpaca,
    /// `{"text"}`, closed by the end-of-text token and trained whole.
    Text,
    /// `{"prompt", "completion"}`, two strings or two lists of messages; only the completion is trained.
    PromptCompletion,
    /// `{"input_ids"}` with `labels` (-100: not trained) or a mask of ones and zeros, used as they are.
    Pretokenized,
}

/// Which key means what, where a source has other names than the usual ones.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Fields {
    /// The text of a text record.
    pub text: String,
    /// The list of messages: "messages" or "conversations" unless named.
    pub messages: Option<String>,
    /// Who speaks, in a message: "role" or "from" unless named.
    pub role: Option<String>,
    /// What is said, in a message: "content" or "value" unless named.
    pub content: Option<String>,
    /// The tools that the model may call.
    pub tools: String,
    /// A system message beside the messages or the instruction.
    pub system: String,
    /// The prompt of a prompt and completion.
    pub prompt: String,
    /// Its completion.
    pub completion: String,
    /// What is asked, in the Alpaca shape.
    pub instruction: String,
    /// What it is asked about.
    pub input: String,
    /// The answer.
    pub output: String,
    /// Token ids.
    pub input_ids: String,
    /// Targets, aligned with the token ids; -100 is not trained.
    pub labels: String,
    /// Names of roles in this source, and what they are called in chat templates.
    pub roles: BTreeMap<String, String>,
}

impl Default for Fields {
    fn default() -> Self {
        let own = |name: &str| name.to_owned();
        Self {
            text: own("text"),
            messages: None,
            role: None,
            content: None,
            tools: own("tools"),
            system: own("system"),
            prompt: own("prompt"),
            completion: own("completion"),
            instruction: own("instruction"),
            input: own("input"),
            output: own("output"),
            input_ids: own("input_ids"),
            labels: own("labels"),
            roles: BTreeMap::new(),
        }
    }
}

/// One message, as the chat template sees it.
#[derive(Debug, Clone, PartialEq)]
pub struct Turn {
    /// `role`, `content` and whatever else the record had, without nulls and training flags.
    pub message: Object,
    /// What the record itself says about training on this message.
    pub trained: Option<bool>,
}

impl Turn {
    /// A message with a role and a text.
    pub fn new(role: &str, content: &str) -> Self {
        let message = [("role", role), ("content", content)];
        Self {
            message: message.map(|(key, text)| (key.to_owned(), Json::from(text))).into_iter().collect(),
            trained: None,
        }
    }

    /// Who speaks.
    pub fn role(&self) -> &str {
        self.message.get("role").and_then(Json::as_str).unwrap_or_default()
    }

    /// What is said, if it is a text.
    pub fn content(&self) -> Option<&str> {
        self.message.get("content").and_then(Json::as_str)
    }
}

/// A conversation.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Chat {
    /// The messages in order.
    pub turns: Vec<Turn>,
    /// JSON schemas of the tools that may be called, passed through to the template.
    pub tools: Option<Vec<Json>>,
    /// Texts to answer from, passed through to the template.
    pub documents: Option<Vec<Json>>,
    /// More variables for the template (`enable_thinking` and the like).
    pub arguments: Object,
    /// Messages before this one are never trained: they are the prompt of a completion.
    pub prompt_turns: usize,
}

/// What a record says.
#[derive(Debug, Clone, PartialEq)]
pub enum Row {
    /// A text to be learned whole.
    Text(String),
    /// A conversation.
    Chat(Chat),
    /// A text of which the end is learned.
    PromptCompletion {
        /// What is read.
        prompt: String,
        /// What is learned.
        completion: String,
    },
    /// Tokens that somebody else made.
    Pretokenized {
        /// Token ids, padding removed.
        tokens: Vec<u32>,
        /// Which of them are targets.
        trained: Vec<bool>,
    },
}

impl Shape {
    /// This shape, or for [`Shape::Auto`] the one that the keys of a source's first record show.
    ///
    /// Error: the keys fit no shape; lists them and the shapes.
    pub fn resolve(self, fields: &Object, names: &Fields, place: &Place) -> Result<Self, ShapeError> {
        if self != Self::Auto {
            return Ok(self);
        }
        let has = |key: &String| fields.contains_key(key);
        let has_messages = match &names.messages {
            Some(key) => has(key),
            None => MESSAGE_KEYS.iter().any(|key| fields.contains_key(*key)),
        };
        if has(&names.input_ids) {
            Ok(Self::Pretokenized)
        } else if has_messages {
            Ok(Self::Messages)
        } else if has(&names.prompt) && has(&names.completion) {
            Ok(Self::PromptCompletion)
        } else if has(&names.instruction) && has(&names.output) {
            Ok(Self::Alpaca)
        } else if has(&names.text) {
            Ok(Self::Text)
        } else {
            Err(unrecognised(fields, names, place))
        }
    }

    /// Takes a record apart; `self` must not be [`Shape::Auto`].
    ///
    /// Errors: a key is missing or of the wrong type; names place and key.
    pub fn parse(self, fields: &Object, names: &Fields, place: &Place) -> Result<Row, ShapeError> {
        let record = Reader { fields, place };
        match self {
            Self::Auto => Self::Auto.resolve(fields, names, place)?.parse(fields, names, place),
            Self::Messages | Self::Sharegpt => messages::parse(record, names, self == Self::Sharegpt).map(Row::Chat),
            Self::Alpaca => instruction::parse(record, names).map(Row::Chat),
            Self::Text => Ok(Row::Text(record.need_string(&names.text)?.to_owned())),
            Self::PromptCompletion => prompt::parse(record, names),
            Self::Pretokenized => pretokenized::parse(record, names),
        }
    }
}

fn unrecognised(fields: &Object, expected: &Fields, place: &Place) -> ShapeError {
    let messages = expected.messages.as_deref().unwrap_or("messages\" or \"conversations");
    let known = [
        format!("messages ({messages:?})").replace('\\', ""),
        format!("alpaca ({:?}, {:?}, {:?})", expected.instruction, expected.input, expected.output),
        format!("text ({:?})", expected.text),
        format!("prompt_completion ({:?}, {:?})", expected.prompt, expected.completion),
        format!("pretokenized ({:?}, {:?})", expected.input_ids, expected.labels),
    ];
    let is_preference = fields.contains_key("chosen") && fields.contains_key("rejected");
    let hint = if is_preference {
        ". Pairs of chosen and rejected answers are for preference training, which this is not: to train on the chosen \
         ones, say that messages or completion is \"chosen\""
    } else {
        ""
    };
    ShapeError::Unrecognised {
        place: place.clone(),
        found: names(fields),
        known: known.join(", "),
        hint: hint.to_owned(),
    }
}
