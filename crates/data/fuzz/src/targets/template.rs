//! Chat templates: any template with a fixed conversation, and templates of known models with any conversation.
//!
//! Trade-off: memory is bounded only where the allocator of `firebrick-data` is installed, as `tests/fuzz_corpus.rs` does.

use std::path::PathBuf;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use firebrick_data::{Chat, EncodeOptions, Encoder, Record, RecordFormat, RecordPlace, TemplateChoice, Tokenizer};
use serde_json::{Map, Value as Json, json};

use super::{Outcome, encode, tokenizer};

static TOKENIZER: LazyLock<Mutex<Tokenizer>> = LazyLock::new(|| Mutex::new(tokenizer::small()));
/// Tokenizers with one compiled template each.
static KNOWN: LazyLock<Vec<Tokenizer>> = LazyLock::new(|| {
    let with = |source: &&str| {
        let mut tokenizer = tokenizer::small();
        let chosen = tokenizer.choose_template(&TemplateChoice::Text((*source).to_owned()));
        chosen.expect("a template that the goldens render");
        tokenizer.set_date(0);
        tokenizer
    };
    TEMPLATES.iter().map(with).collect()
});
const TEMPLATES: [&str; 8] = [
    include_str!("../../../tests/golden/templates/chatml.jinja"),
    include_str!("../../../tests/golden/templates/command_r.jinja"),
    include_str!("../../../tests/golden/templates/deepseek.jinja"),
    include_str!("../../../tests/golden/templates/gemma.jinja"),
    include_str!("../../../tests/golden/templates/llama3_tools.jinja"),
    include_str!("../../../tests/golden/templates/mistral_tools.jinja"),
    include_str!("../../../tests/golden/templates/qwen3.jinja"),
    include_str!("../../../tests/golden/templates/reasoning.jinja"),
];

pub(crate) fn template(bytes: &[u8]) -> Outcome {
    let mut outcome = Outcome::default();
    let mut tokenizer: MutexGuard<'_, Tokenizer> = TOKENIZER.lock().unwrap_or_else(PoisonError::into_inner);
    let choice = TemplateChoice::Text(String::from_utf8_lossy(bytes).into_owned());
    if outcome.note(tokenizer.choose_template(&choice)).is_none() {
        return outcome;
    }
    outcome.read = 0;
    tokenizer.set_date(0);
    let fields = conversation();
    let messages = fields["messages"].as_array().into_iter().flatten();
    let chat = Chat {
        tools: fields["tools"].as_array().cloned(),
        ..Chat::from_messages(messages.filter_map(|message| message.as_object().cloned()))
    };
    for add_generation_prompt in [false, true] {
        if let Some(template) = outcome.note(tokenizer.chat_template()) {
            outcome.read -= 1;
            outcome.note(template.render(&chat, add_generation_prompt));
        }
    }
    encode_record(&tokenizer, fields, &mut outcome);
    outcome
}

/// Renders a record with messages and other keys; the first byte chooses the template.
pub(crate) fn messages(bytes: &[u8]) -> Outcome {
    let (&first, rest) = bytes.split_first().unwrap_or((&0, &[]));
    let mut outcome = Outcome::default();
    let fields = serde_json::from_slice(rest).unwrap_or_else(|_| lines(rest));
    encode_record(&KNOWN[usize::from(first) % KNOWN.len()], fields, &mut outcome);
    outcome
}

fn encode_record(tokenizer: &Tokenizer, fields: Map<String, Json>, outcome: &mut Outcome) {
    let record = Record::new(fields, RecordPlace { path: PathBuf::from("rows.jsonl"), line: 1 });
    let options = EncodeOptions { record_format: RecordFormat::Chat, ..EncodeOptions::new(1 << 20) };
    let Ok(encoder) = Encoder::new(tokenizer, options, &record) else { return };
    encode::encode(&encoder, &record, outcome);
}

/// Builds a conversation from text that is not JSON: one message per line, the roles in turn.
fn lines(bytes: &[u8]) -> Map<String, Json> {
    let text = String::from_utf8_lossy(bytes);
    let role = |index: usize| ["system", "user", "assistant", "tool"][index % 4];
    let messages = text.split('\n').enumerate();
    let messages: Vec<Json> =
        messages.map(|(index, content)| json!({ "role": role(index), "content": content })).collect();
    Map::from_iter([("messages".to_owned(), Json::Array(messages))])
}

/// Returns a conversation with several roles, reasoning, a tool, and a tool call with its result.
fn conversation() -> Map<String, Json> {
    let call = json!({ "type": "function", "id": "abcdefghi", "function": {
        "name": "weather", "arguments": { "city": "Paris", "days": 2 }
    } });
    let parameters = json!({ "type": "object", "properties": { "city": { "type": "string" } } });
    let fields = json!({
        "messages": [
            { "role": "system", "content": "Be brief." },
            { "role": "user", "content": "How is the weather in \u{e9}? " },
            { "role": "assistant", "content": "", "reasoning_content": "ask", "tool_calls": [call] },
            { "role": "tool", "content": "12.5 'C' <b>", "tool_call_id": "abcdefghi" },
            { "role": "assistant", "content": "Mild." }
        ],
        "tools": [{ "type": "function", "function": {
            "name": "weather", "description": "now", "parameters": parameters
        } }]
    });
    fields.as_object().cloned().expect("an object")
}
