//! The parsed content of a record.
//!
//! Not supported: images and sound.

use serde_json::{Map, Value as Json};
use xxhash_rust::xxh3::Xxh3;

/// The fields of a JSON object, in their order.
pub(crate) type Object = Map<String, Json>;

/// The role of a message that a model writes.
pub(crate) const ASSISTANT: &str = "assistant";

/// One message as the chat template sees it.
#[derive(Debug, Clone, PartialEq)]
pub struct Turn {
    /// `role`, `content` and the record's other keys, without nulls and training flags.
    pub message: Object,
    /// The training flag of the message.
    pub train: Option<bool>,
}

impl Turn {
    /// Creates a message with a role and a text.
    pub fn new(role: &str, content: &str) -> Self {
        let message = [("role", role), ("content", content)];
        Self {
            message: message.map(|(key, text)| (key.to_owned(), Json::from(text))).into_iter().collect(),
            train: None,
        }
    }

    /// Returns the role, or an empty string.
    pub fn role(&self) -> &str {
        self.message.get("role").and_then(Json::as_str).unwrap_or_default()
    }

    /// Returns the content, if it is a string.
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

impl Chat {
    /// Creates messages with roles and texts.
    pub fn new(turns: &[(&str, &str)]) -> Self {
        Self { turns: turns.iter().map(|(role, content)| Turn::new(role, content)).collect(), ..Self::default() }
    }

    /// Creates a conversation from messages as templates see them.
    pub fn from_messages(messages: impl IntoIterator<Item = Map<String, Json>>) -> Self {
        let turns = messages.into_iter().map(|message| Turn { message, train: None }).collect();
        Self { turns, ..Self::default() }
    }

    /// Returns the approximate size in bytes of what a template receives.
    pub(crate) fn bytes(&self) -> usize {
        let messages = self.turns.iter().map(|turn| fields_weight(&turn.message));
        let lists = [&self.tools, &self.documents].into_iter().flatten().flatten().map(weight);
        messages.chain(lists).sum::<usize>() + fields_weight(&self.arguments)
    }

    /// Returns the conversation with a system message in front, unless it has one.
    pub(crate) fn with_system(mut self, prompt: Option<&str>) -> Self {
        if let Some(prompt) = prompt
            && self.turns.iter().all(|turn| turn.role() != "system")
        {
            self.turns.insert(0, Turn::new("system", prompt));
            self.prompt_turns += usize::from(self.prompt_turns > 0);
        }
        self
    }
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
    /// Two answers to one prompt, each with the prompt: two conversations, or two completions.
    Pair {
        /// With the preferred answer.
        chosen: Box<Row>,
        /// With the other answer.
        rejected: Box<Row>,
    },
    /// A prompt without an answer: a text, or a conversation that the assistant continues.
    Prompt(Box<Row>),
}

impl Row {
    /// Returns a hash of the content, the same on every machine, for any order of keys, file format and loss mask.
    pub(crate) fn content_hash(&self) -> u64 {
        let mut hash = Xxh3::new();
        match self {
            Self::Pair { chosen, rejected } => {
                hash.update(b"2");
                [chosen, rejected].iter().for_each(|row| hash.update(&row.content_hash().to_le_bytes()));
            }
            Self::Prompt(content) => {
                hash.update(b"1");
                hash.update(&content.content_hash().to_le_bytes());
            }
            Self::Text(text) => add_text(&mut hash, b't', text),
            Self::Chat(chat) => {
                for turn in &chat.turns {
                    add_object(&mut hash, &turn.message);
                }
                for list in [&chat.tools, &chat.documents].into_iter().flatten() {
                    list.iter().for_each(|item| add_json(&mut hash, item));
                }
                add_object(&mut hash, &chat.arguments);
            }
            Self::PromptCompletion { prompt, completion } => {
                add_text(&mut hash, b'p', prompt);
                add_text(&mut hash, b'c', completion);
            }
            Self::Pretokenized { tokens, .. } => tokens.iter().for_each(|token| hash.update(&token.to_le_bytes())),
        }
        hash.digest()
    }
}

/// Returns a hash of a record that has no content because one of its values is bad.
pub(crate) fn fields_hash(fields: &Object) -> u64 {
    let mut hash = Xxh3::new();
    add_object(&mut hash, fields);
    hash.digest()
}

/// Returns the approximate size of a value in memory, in bytes.
pub(crate) fn weight(value: &Json) -> usize {
    match value {
        Json::String(text) => text.len(),
        Json::Array(values) => values.iter().map(weight).sum(),
        Json::Object(fields) => fields_weight(fields),
        _ => 8,
    }
}

pub(crate) fn fields_weight(fields: &Object) -> usize {
    fields.iter().map(|(key, value)| key.len() + weight(value)).sum()
}

/// Adds a text with its length, so that no two texts give the bytes of two others.
fn add_text(hash: &mut Xxh3, kind: u8, text: &str) {
    hash.update(&[kind]);
    hash.update(&(text.len() as u64).to_le_bytes());
    hash.update(text.as_bytes());
}

fn add_json(hash: &mut Xxh3, value: &Json) {
    match value {
        Json::String(text) => add_text(hash, b's', text),
        Json::Array(items) => {
            hash.update(b"[");
            items.iter().for_each(|item| add_json(hash, item));
            hash.update(b"]");
        }
        Json::Object(fields) => add_object(hash, fields),
        other => add_text(hash, b'v', &other.to_string()),
    }
}

/// Adds keys in alphabetical order, without nulls: tables have null where other formats have no key.
fn add_object(hash: &mut Xxh3, fields: &Object) {
    let mut keys: Vec<&String> = fields.iter().filter(|(_, value)| !value.is_null()).map(|(key, _)| key).collect();
    keys.sort_unstable();
    hash.update(b"{");
    for key in keys {
        add_text(hash, b'k', key);
        add_json(hash, &fields[key]);
    }
    hash.update(b"}");
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn hash(message: Json) -> u64 {
        let turn = |train| Turn { message: message.as_object().unwrap().clone(), train };
        let [one, other] = [None, Some(true)].map(|train| {
            Row::Chat(Chat { turns: vec![turn(train)], prompt_turns: 1, ..Chat::default() }).content_hash()
        });
        assert_eq!(one, other, "a training flag is no content");
        one
    }

    #[test]
    fn content_hash_depends_on_the_content_and_not_on_its_form() {
        let first = hash(json!({ "role": "user", "content": "a", "n": 1 }));
        assert_eq!(first, hash(json!({ "n": 1, "name": null, "content": "a", "role": "user" })));
        for other in
            [json!({ "role": "user", "content": "b", "n": 1 }), json!({ "role": "user", "content": "a", "n": "1" })]
        {
            assert_ne!(first, hash(other));
        }
        let pair = |prompt: &str, completion: &str| {
            Row::PromptCompletion { prompt: prompt.to_owned(), completion: completion.to_owned() }.content_hash()
        };
        assert_ne!(pair("ab", "c"), pair("a", "bc"));
        let tokens = |loss_mask| Row::Pretokenized { tokens: vec![1, 2], loss_mask }.content_hash();
        assert_eq!(tokens(vec![true, false]), tokens(vec![true, true]));
    }
}
