//! Names of a source's keys.
//!
//! Trade-off: one name per meaning. A source whose records differ in their names must be split in two.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value as Json;

use super::row::Object;

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
    /// The preferred answer of a pair.
    pub chosen: String,
    /// The other answer of a pair.
    pub rejected: String,
    /// Token ids.
    pub input_ids: String,
    /// Targets, aligned with the token ids; -100 means no loss.
    pub labels: String,
    /// Names of roles in this source and the corresponding roles of chat templates.
    pub roles: BTreeMap<String, String>,
}

/// Columns of a question, and of its answer, under the names that public sets use.
const QUESTIONS: [&str; 5] = ["instruction", "question", "prompt", "query", "input"];
const ANSWERS: [&str; 3] = ["output", "response", "answer"];
/// What accompanies a question.
const INPUTS: [&str; 2] = ["input", "context"];

impl Fields {
    /// Where the record has no key with the names of instruction and output, and a question and an answer under other
    /// common names, takes those. Names that the recipe gives stay. Returns whether the record has both.
    pub(super) fn take_common_pair(&mut self, fields: &Object) -> bool {
        let usual = Self::default();
        let is_text = |key: &str| fields.get(key).is_some_and(Json::is_string);
        let first = |keys: &[&'static str]| keys.iter().copied().find(|&key| is_text(key));
        if self.instruction == usual.instruction && self.output == usual.output {
            let (Some(question), Some(answer)) = (first(&QUESTIONS), first(&ANSWERS)) else { return false };
            (self.instruction, self.output) = (question.to_owned(), answer.to_owned());
            if self.input == usual.input {
                let input = first(&INPUTS).filter(|&input| input != question).unwrap_or("input");
                // A question that is called "input" has none of its own.
                self.input = if input == question { "context" } else { input }.to_owned();
            }
        }
        fields.contains_key(&self.instruction) && fields.contains_key(&self.output)
    }

    /// The names of keys in records.
    pub(super) fn all(&self) -> impl Iterator<Item = &str> {
        let optional = [&self.messages, &self.role, &self.content].into_iter().flatten();
        let rest = [&self.text, &self.prompt, &self.completion, &self.instruction, &self.input, &self.output];
        optional.chain(rest).map(String::as_str)
    }
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
            chosen: own("chosen"),
            rejected: own("rejected"),
            input_ids: own("input_ids"),
            labels: own("labels"),
            roles: BTreeMap::new(),
        }
    }
}
