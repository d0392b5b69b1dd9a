//! The parsed content of a record.
//!
//! Not supported: images, sound and preference pairs.

use serde_json::{Map, Value as Json};

/// The fields of a JSON object, in their order.
pub(crate) type Object = Map<String, Json>;

/// One message as the chat template sees it.
#[derive(Debug, Clone, PartialEq)]
pub struct Turn {
    /// `role`, `content` and the record's other keys, without nulls and training flags.
    pub message: Object,
    /// The message's own training flag.
    pub train: Option<bool>,
}

impl Turn {
    /// A message with a role and a text.
    pub fn new(role: &str, content: &str) -> Self {
        let message = [("role", role), ("content", content)];
        Self {
            message: message.map(|(key, text)| (key.to_owned(), Json::from(text))).into_iter().collect(),
            train: None,
        }
    }

    /// The role, or an empty string.
    pub fn role(&self) -> &str {
        self.message.get("role").and_then(Json::as_str).unwrap_or_default()
    }

    /// The content, if it is a string.
    pub fn content(&self) -> Option<&str> {
        self.message.get("content").and_then(Json::as_str)
    }
}

/// A conversation.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Chat {
    /// The messages in order.
    pub turns: Vec<Turn>,
    /// JSON schemas of the callable tools, passed to the template.
    pub tools: Option<Vec<Json>>,
    /// Documents for retrieval, passed to the template.
    pub documents: Option<Vec<Json>>,
    /// More template variables (`enable_thinking`, for example).
    pub arguments: Object,
    /// Messages before this index belong to the prompt of a completion and never count in the loss.
    pub prompt_turns: usize,
}

/// The parsed content of a record.
#[derive(Debug, Clone, PartialEq)]
pub enum Row {
    /// A text; all its tokens count in the loss.
    Text(String),
    /// A conversation.
    Chat(Chat),
    /// A text of which only the end counts in the loss.
    PromptCompletion {
        /// Context only.
        prompt: String,
        /// Counts in the loss.
        completion: String,
    },
    /// Tokens that were computed elsewhere.
    Pretokenized {
        /// Token ids, padding removed.
        tokens: Vec<u32>,
        /// For each token, whether it counts in the loss.
        loss_mask: Vec<bool>,
    },
}
