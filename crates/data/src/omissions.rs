//! Finds the parts of a conversation that a chat template silently leaves out: messages, tools, tool calls, reasoning, documents.
//!
//! A part is left out if the conversation renders to the same text without it. Trade-off: one more render for each kind of part in the conversation.
//! Parts of one kind are tested together: a template that writes some of them passes. What is known of other keys of messages is that of the first
//! conversation of the thread that had the same keys in the same roles.

use std::cell::RefCell;
use std::collections::{BTreeSet, HashMap};

use serde_json::Value as Json;
use xxhash_rust::xxh3::xxh3_64;

use crate::chat_template::{ChatTemplate, REASONING, RenderedChat};
use crate::finding::{Finding, FindingKind};
use crate::locate::Located;
use crate::record_format::{Chat, Turn};
use crate::selection::Selection;

/// Returns the parts that the template leaves out, and selected answers of which only the end is left to train on.
pub(crate) fn omissions(
    template: &ChatTemplate,
    chat: &Chat,
    selection: &Selection,
    located: &Located,
) -> Vec<Finding> {
    let mut found = Vec::new();
    let mut add = |kind, detail: String| found.push(Finding { kind, detail });
    if !located.ignored.is_empty() {
        let roles: Vec<&str> = located.ignored.iter().map(|&index| chat.turns[index].role()).collect();
        add(
            FindingKind::MessageIgnored,
            format!("nothing is written of {} messages ({})", roles.len(), roles.join(", ")),
        );
    }
    let same = |changed: Chat| renders_to(&located.text, template, &changed);
    if let Some(tools) = &chat.tools
        && same(Chat { tools: None, ..chat.clone() })
    {
        add(FindingKind::ToolsIgnored, format!("nothing is written of the {} tools", tools.len()));
    }
    if chat.documents.is_some() && same(Chat { documents: None, ..chat.clone() }) {
        add(FindingKind::DocumentsIgnored, "nothing is written of the documents".to_owned());
    }
    // Some templates require a content if there are no calls, and some write it.
    let ignores = |keys: &[&str]| {
        chat.turns.iter().any(|turn| keys.iter().any(|key| has(turn, key)))
            && (same(without(chat, keys, None)) || same(without(chat, keys, Some(""))))
    };
    let (calls, reasoning) = (ignores(&[TOOL_CALLS]), ignores(&REASONING));
    if calls {
        add(FindingKind::ToolCallsIgnored, "nothing is written of the tool calls".to_owned());
    }
    if reasoning {
        add(FindingKind::ReasoningIgnored, "nothing is written of the reasoning".to_owned());
    }
    let is_empty = |turn: &Turn| {
        let is_blank = turn.content().is_none_or(|content| content.trim().is_empty());
        is_blank && (calls || !has(turn, TOOL_CALLS)) && (reasoning || !REASONING.iter().any(|key| has(turn, key)))
    };
    let empty = (0..chat.turns.len()).filter(|&index| selection.turns[index] && !selection.inverted);
    if let Some(index) = empty.into_iter().find(|&index| is_empty(&chat.turns[index])) {
        add(FindingKind::EmptyAnswer, format!("message {} ({}) is empty", index + 1, chat.turns[index].role()));
    }
    found
}

const TOOL_CALLS: &str = "tool_calls";
/// Maximum number of sets of keys whose result is stored, and their bytes: datasets could have a new key in every record.
const MAX_SETS: usize = 256;
const MAX_SET_BYTES: usize = 4096;

thread_local! {
    /// Keys that a template does not write, by hash of the template and of the keys of each role.
    static UNREAD: RefCell<HashMap<u64, Vec<String>>> = RefCell::default();
}

/// Returns the other keys of messages that the template does not write, as `message.key`.
pub(crate) fn unread_keys(template: &ChatTemplate, chat: &Chat, text: &str) -> Vec<String> {
    let is_known = |key: &str| ["role", "content", TOOL_CALLS].contains(&key) || REASONING.contains(&key);
    let mut of_roles: BTreeSet<(&str, &str)> = BTreeSet::new();
    for turn in &chat.turns {
        let others = turn.message.keys().map(String::as_str).filter(|key| !is_known(key) && has(turn, key));
        of_roles.extend(others.map(|key| (turn.role(), key)));
    }
    if of_roles.is_empty() {
        return Vec::new();
    }
    let set = format!("{of_roles:?}");
    let id = xxh3_64(format!("{set}{}", template.source()).as_bytes());
    if let Some(unread) = UNREAD.with_borrow(|known| known.get(&id).cloned()) {
        return unread;
    }
    let mut keys: Vec<&str> = of_roles.iter().map(|(_, key)| *key).collect();
    keys.sort_unstable();
    keys.dedup();
    let is_same = |keys: &[&str]| renders_to(text, template, &without(chat, keys, None));
    // Usually the template writes none of them.
    if !is_same(&keys) {
        keys.retain(|key| is_same(&[*key]));
    }
    let unread: Vec<String> = keys.into_iter().map(|key| format!("message.{key}")).collect();
    UNREAD.with_borrow_mut(|known| {
        if known.len() < MAX_SETS && set.len() <= MAX_SET_BYTES {
            known.insert(id, unread.clone());
        }
    });
    unread
}

fn renders_to(text: &str, template: &ChatTemplate, chat: &Chat) -> bool {
    let chat = RenderedChat::new(template, chat);
    chat.render(&chat.plain, false).is_ok_and(|(rendered, _)| rendered == text)
}

/// Returns a conversation without these keys; messages that have no content then get `content`.
fn without(chat: &Chat, keys: &[&str], content: Option<&str>) -> Chat {
    let mut chat = chat.clone();
    for turn in chat.turns.iter_mut().filter(|turn| keys.iter().any(|key| has(turn, key))) {
        keys.iter().for_each(|key| drop(turn.message.shift_remove(*key)));
        if let Some(content) = content.filter(|_| !turn.message.contains_key("content")) {
            turn.message.insert("content".to_owned(), content.into());
        }
    }
    chat
}

/// Returns whether a message has a value under a key that is not empty.
fn has(turn: &Turn, key: &str) -> bool {
    match turn.message.get(key) {
        None | Some(Json::Null) => false,
        Some(Json::String(text)) => !text.trim().is_empty(),
        Some(Json::Array(items)) => !items.is_empty(),
        Some(_) => true,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::conversation::encode_chat;
    use crate::record_format::ASSISTANT;
    use crate::selection::TrainOn;
    use crate::test_tokenizer::{TEMPLATE, TestTokenizer};

    fn kinds(template: &str, chat: &Chat) -> Vec<FindingKind> {
        let tokenizer = TestTokenizer { template: Some(template), ..TestTokenizer::default() }.load();
        let selection = Selection::new(chat, TrainOn::Assistant, &[ASSISTANT.to_owned()]);
        let found = encode_chat(&tokenizer, chat, &selection, true).unwrap().findings;
        found.into_iter().map(|finding| finding.kind).collect()
    }

    fn chat() -> Chat {
        let mut chat = Chat::new(&[("user", "q"), ("assistant", "a")]);
        let call = json!([{ "type": "function", "function": { "name": "f", "arguments": {} } }]);
        chat.turns.push(Turn::new("assistant", ""));
        chat.turns[2].message.insert("tool_calls".to_owned(), call);
        chat.turns[1].message.insert("reasoning_content".to_owned(), "thought".into());
        chat.tools = Some(vec![json!({ "name": "f" })]);
        chat.documents = Some(vec![json!({ "title": "t" })]);
        chat
    }

    #[test]
    fn exactly_the_parts_that_are_not_written_are_found() {
        use FindingKind::{DocumentsIgnored, EmptyAnswer, ReasoningIgnored, ToolCallsIgnored, ToolsIgnored};
        let all = vec![ToolsIgnored, DocumentsIgnored, ToolCallsIgnored, ReasoningIgnored, EmptyAnswer];
        assert_eq!(kinds(TEMPLATE, &chat()), all);
        let message = "{{ message.reasoning_content }}{{ message.tool_calls }}{{ message.content }}";
        let complete = TEMPLATE.replace("{{ bos_token }}", "{{ bos_token }}{{ tools }}{{ documents }}");
        assert_eq!(kinds(&complete.replace("{{ message.content }}", message), &chat()), []);
    }

    #[test]
    fn empty_answers_are_found_unless_they_do_not_count() {
        let mut chat = Chat::new(&[("user", "q"), ("assistant", " \n")]);
        assert_eq!(kinds(TEMPLATE, &chat), [FindingKind::EmptyAnswer]);
        chat.turns[1].train = Some(false);
        assert_eq!(kinds(TEMPLATE, &chat), []);
    }
}
