//! Names of a source's keys.
//!
//! Trade-off: one name per meaning. A source whose records differ in their names must be split in two.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value as Json;

use super::row::Object;
use super::value::is_text;

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
/// Keys of text that accompanies a question.
const INPUTS: [&str; 2] = ["input", "context"];
/// Other words for known keys. They are suggested, never used.
const OTHER_MESSAGES: [&str; 5] = ["conversation", "dialog", "dialogue", "chat", "turns"];
const OTHER_QUESTIONS: [&str; 4] = ["task", "problem", "inputs", "user"];
const OTHER_ANSWERS: [&str; 6] = ["completion", "solution", "target", "targets", "reply", "assistant"];
const OTHER_TEXTS: [&str; 4] = ["text", "content", "body", "document"];

impl Fields {
    /// If the record lacks the keys named for instruction and output, takes a question and an answer under other common names: of several keys one
    /// with a text, otherwise one with null. Names that the recipe gives stay. Returns whether the record has both.
    pub(super) fn take_common_pair(&mut self, fields: &Object) -> bool {
        let usual = Self::default();
        let first = |keys: &[&'static str]| {
            let text = keys.iter().copied().find(|&key| fields.get(key).is_some_and(is_text));
            text.or_else(|| keys.iter().copied().find(|&key| fields.get(key).is_some_and(Json::is_null)))
        };
        if self.instruction == usual.instruction && self.output == usual.output {
            let has_usual = fields.contains_key(&usual.instruction) && fields.contains_key(&usual.output);
            let pair =
                if has_usual { Some((QUESTIONS[0], ANSWERS[0])) } else { first(&QUESTIONS).zip(first(&ANSWERS)) };
            let Some((question, answer)) = pair else { return false };
            (self.instruction, self.output) = (question.to_owned(), answer.to_owned());
            if self.input == usual.input {
                let input = first(&INPUTS).filter(|&input| input != question).unwrap_or("input");
                // A question named "input" has no separate input.
                self.input = if input == question { "context" } else { input }.to_owned();
            }
        }
        fields.contains_key(&self.instruction) && fields.contains_key(&self.output)
    }

    /// Returns the line of a recipe that maps the record's keys, if they are other words for known keys or known keys in another case. `None` if
    /// there are no such keys.
    pub(super) fn suggestion(&self, fields: &Object) -> Option<String> {
        let is_cell = |value: &Json| value.is_null() || is_text(value);
        let has_turns = |value: &Json| value.as_array().is_some_and(|turns| turns.iter().all(Json::is_object));
        let cell = |words: &[&str], others: &[&str]| find(fields, &[words, others].concat(), is_cell);
        let mut keys: Vec<(&str, &str, &str)> = Vec::new();
        if let Some(messages) = find(fields, &[&MESSAGE_KEYS[..], &OTHER_MESSAGES].concat(), has_turns) {
            keys.push(("messages", self.messages.as_deref().unwrap_or_default(), messages));
        } else if let (Some(prompt), Some(completion)) = (cell(&["prompt"], &[]), cell(&["completion"], &[])) {
            keys.push(("prompt", self.prompt.as_str(), prompt));
            keys.push(("completion", self.completion.as_str(), completion));
        } else if let (Some(question), Some(answer)) =
            (cell(&QUESTIONS, &OTHER_QUESTIONS), cell(&ANSWERS, &OTHER_ANSWERS))
        {
            keys.push(("instruction", self.instruction.as_str(), question));
            let input = cell(&INPUTS, &[]).filter(|&input| input != question);
            keys.extend(input.map(|input| ("input", self.input.as_str(), input)));
            keys.push(("output", self.output.as_str(), answer));
        } else if let Some(text) = cell(&OTHER_TEXTS, &[]) {
            keys.push(("text", self.text.as_str(), text));
        }
        let mapped = keys.iter().filter(|(_, known, key)| known != key);
        let mapped: Vec<String> = mapped.map(|(name, _, key)| format!("{name} = {key:?}")).collect();
        (!mapped.is_empty()).then(|| format!("fields = {{ {} }}", mapped.join(", ")))
    }

    pub(super) fn all(&self) -> impl Iterator<Item = &str> {
        let optional = [&self.messages, &self.role, &self.content].into_iter().flatten();
        let rest = [&self.text, &self.prompt, &self.completion, &self.instruction, &self.input, &self.output];
        optional.chain(rest).map(String::as_str)
    }
}

/// Returns the key that is the first of these words, in any case, and whose value fits.
fn find<'a>(fields: &'a Object, words: &[&str], fits: impl Fn(&Json) -> bool) -> Option<&'a str> {
    words.iter().find_map(|word| {
        let mut keys = fields.iter().filter(|(_, value)| fits(value)).map(|(key, _)| key.as_str());
        keys.find(|key| key.trim().eq_ignore_ascii_case(word))
    })
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
