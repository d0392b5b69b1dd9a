//! Names of a source's keys.
//!
//! Trade-off: one name per meaning. A source whose records differ in their names must be split in two.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Keys that hold a conversation, unless one is named.
pub(super) const MESSAGE_KEYS: [&str; 2] = ["messages", "conversations"];

/// Names of a source's keys, where they differ from the usual ones.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Fields {
    /// The text of a text record.
    pub text: String,
    /// The list of messages: "messages" or "conversations" by default.
    pub messages: Option<String>,
    /// The role of a message: "role" or "from" by default.
    pub role: Option<String>,
    /// The text of a message: "content" or "value" by default.
    pub content: Option<String>,
    /// The tools that the model may call.
    pub tools: String,
    /// A system message in addition to the messages or the instruction.
    pub system: String,
    /// The prompt of a prompt-completion record.
    pub prompt: String,
    /// The completion of a prompt-completion record.
    pub completion: String,
    /// The task of an Alpaca record.
    pub instruction: String,
    /// The optional input of the task.
    pub input: String,
    /// The answer.
    pub output: String,
    /// Token ids.
    pub input_ids: String,
    /// Targets, aligned with the token ids; -100 means no loss.
    pub labels: String,
    /// Names of roles in this source and the corresponding roles of chat templates.
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
