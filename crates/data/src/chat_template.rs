//! The tokenizer's own chat template: messages in, the exact text that the model was trained on out.
//!
//! Runs Jinja templates as transformers 5 runs them: block trimming, loop controls, `{% generation %}` blocks, tools,
//! documents, `raise_exception`, `strftime_now`, Python's methods and `tojson`; keys of a message that are null are left
//! out, and reasoning is given under each of its names. Gives up messages with images or sound.

pub(crate) mod engine;
mod find;
mod generation;
mod methods;

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use minijinja::{Environment, Error, Value};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value as Json};

use crate::error::DataError;
use crate::guarded::guarded;
use crate::locate::Skeletons;
use crate::python::strftime;
use generation::{BLOCK_END, BLOCK_START};

pub use find::TemplateChoice;
pub(crate) use find::TemplateSet;
pub(crate) use methods::is_space;

const NAME: &str = "chat_template";
/// The largest template file. The largest that is published has some 30 KiB.
const MAX_SOURCE_BYTES: usize = 1 << 20;
/// The names of a message's reasoning; a template reads one of them.
const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// One turn of a conversation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// Who speaks: "system", "user" or "assistant", or what else the template knows.
    pub role: String,
    /// What is said.
    pub content: String,
}

/// Everything that a template sees beside the messages.
#[derive(Debug, Clone, Copy, Default)]
pub struct TemplateInput<'a> {
    /// JSON schemas of tools.
    pub tools: Option<&'a [Json]>,
    /// Texts to answer from.
    pub documents: Option<&'a [Json]>,
    /// More variables, `enable_thinking` for example; they win over the special tokens.
    pub arguments: Option<&'a Map<String, Json>>,
    /// Append what comes before an assistant's answer.
    pub add_generation_prompt: bool,
    /// Leave the last message open, so that the model goes on with it.
    pub continue_final_message: bool,
}

/// A chat template, compiled.
#[derive(Debug, Clone)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    source: String,
    special_tokens: BTreeMap<String, String>,
    marks_generation: bool,
    uses_date: bool,
    skeletons: Skeletons,
}

impl ChatTemplate {
    /// Compiles `source`, which came from `path`; `special_tokens` are variables of the template (`bos_token`, ...). The
    /// tokenizer that reads it sets the date.
    pub(crate) fn new(source: &str, path: &Path, special_tokens: BTreeMap<String, String>) -> Result<Self, DataError> {
        let bad = |reason: String| DataError::BadChatTemplate { path: path.to_owned(), reason };
        if source.len() > MAX_SOURCE_BYTES {
            return Err(bad(format!("it has {} bytes; the most is {MAX_SOURCE_BYTES}", source.len())));
        }
        let mut environment = engine::environment();
        let (rewritten, marks_generation) = generation::rewrite(source).map_err(bad)?;
        let compile = || environment.add_template_owned(NAME, rewritten).map_err(|reason| full_reason(&reason));
        guarded("the template engine", compile).map_err(bad)?;
        let uses_date = source.contains("strftime_now");
        let source = source.to_owned();
        let skeletons = Skeletons::default();
        Ok(Self { environment, source, special_tokens, marks_generation, uses_date, skeletons })
    }

    /// Renders the messages. `add_generation_prompt` appends what comes before an assistant's answer.
    ///
    /// Errors: the template refuses the messages (an unknown role, two users in a row, ...).
    pub fn render(&self, messages: &[Message], add_generation_prompt: bool) -> Result<String, DataError> {
        let object = |message: &Message| {
            let fields = [("role", &message.role), ("content", &message.content)];
            fields.map(|(key, text)| (key.to_owned(), Json::from(text.as_str()))).into_iter().collect()
        };
        let messages: Vec<Map<String, Json>> = messages.iter().map(object).collect();
        self.render_chat(&messages, TemplateInput { add_generation_prompt, ..TemplateInput::default() })
    }

    /// Renders messages with all that a conversation may have, as `apply_chat_template(..., tokenize=False)` of
    /// transformers does.
    ///
    /// Errors: the template refuses the messages, takes too long or writes too much; `continue_final_message` and the
    /// template does not write the last message as it is.
    pub fn render_chat(&self, messages: &[Map<String, Json>], input: TemplateInput<'_>) -> Result<String, DataError> {
        if !input.continue_final_message {
            return Ok(self
                .render_marked(&to_values(messages), &Variables::new(input), input.add_generation_prompt)?
                .0);
        }
        let failed = |reason: &str| DataError::TemplateFailed { roles: roles(messages), reason: reason.to_owned() };
        if input.add_generation_prompt {
            return Err(failed("continue_final_message and add_generation_prompt exclude each other"));
        }
        let mut messages = messages.to_vec();
        let content = messages.last_mut().and_then(|message| message.get_mut("content"));
        let Some(Json::String(content)) = content else {
            return Err(failed("continue_final_message needs a last message with a text"));
        };
        // With a space behind it, as transformers does it: a template that takes the space away takes that of the message.
        content.push(OPEN_END);
        content.push(' ');
        let (text, _) = self.render_marked(&to_values(&messages), &Variables::new(input), false)?;
        let end = text.rfind(OPEN_END).ok_or_else(|| failed("the template does not write the whole last message"))?;
        let (before, behind) = text.split_at(end);
        let kept = behind[OPEN_END.len_utf8()..].starts_with(' ');
        Ok(if kept { before } else { before.trim_end_matches(is_space) }.to_owned())
    }

    /// Fixes what `strftime_now` returns, in seconds since 1970 UTC; until then it is the moment of loading. A run
    /// that is resumed on another day must set the day it began, or its prompts change.
    pub fn set_date(&mut self, unix_seconds: i64) {
        self.environment.add_function("strftime_now", move |format: &str| strftime(format, unix_seconds));
        self.skeletons.clear();
    }

    /// Whether the template asks for the date, so that [`ChatTemplate::set_date`] matters.
    pub fn uses_date(&self) -> bool {
        self.uses_date
    }

    /// The template's text, as it was read.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// What the template writes between the contents of messages, as far as that is known.
    pub(crate) fn skeletons(&self) -> &Skeletons {
        &self.skeletons
    }

    /// Whether the template says itself which text is the assistant's, with `{% generation %}` blocks.
    pub(crate) fn marks_generation(&self) -> bool {
        self.marks_generation
    }

    /// Renders, and gives the byte ranges that came from `{% generation %}` blocks.
    pub(crate) fn render_marked(
        &self,
        messages: &[Value],
        variables: &Variables<'_>,
        add_generation_prompt: bool,
    ) -> Result<(String, Vec<Range<usize>>), DataError> {
        let tokens =
            self.special_tokens.iter().map(|(name, token)| (Value::from(name.as_str()), token.as_str().into()));
        let arguments = variables.arguments.iter().flat_map(|arguments| arguments.iter());
        let arguments = arguments.map(|(name, value)| (Value::from(name.as_str()), Value::from_serialize(value)));
        let own = [
            ("messages", Value::from(messages.to_vec())),
            ("tools", variables.tools.clone()),
            ("documents", variables.documents.clone()),
            ("add_generation_prompt", add_generation_prompt.into()),
        ];
        let own = own.into_iter().map(|(name, value)| (Value::from(name), value));
        let context: Value = tokens.chain(arguments).chain(own).collect::<BTreeMap<_, _>>().into();
        let rendered = engine::render(&self.environment, NAME, context).map_err(|reason| {
            let roles = messages.iter().map(|message| crate::python::to_str(&role_of(message))).collect::<Vec<_>>();
            let roles = if roles.is_empty() { NO_MESSAGE.to_owned() } else { roles.join(", ") };
            DataError::TemplateFailed { roles, reason: full_reason(&reason) }
        })?;
        Ok(take_blocks(&rendered))
    }
}

/// Stands behind the last message while it is left open. A code point that Unicode promises never to assign.
const OPEN_END: char = '\u{FDD4}';
const NO_MESSAGE: &str = "no message at all";

/// What a template sees beside the messages, as the engine's values: made once for all renders of a conversation.
pub(crate) struct Variables<'a> {
    tools: Value,
    documents: Value,
    arguments: Option<&'a Map<String, Json>>,
}

impl<'a> Variables<'a> {
    pub(crate) fn new(input: TemplateInput<'a>) -> Self {
        let list = |items: Option<&[Json]>| items.map_or(Value::from(()), Value::from_serialize);
        Self { tools: list(input.tools), documents: list(input.documents), arguments: input.arguments }
    }
}

/// Messages as the engine's values, as transformers prepares them: without nulls, reasoning under each of its names.
fn to_values(messages: &[Map<String, Json>]) -> Vec<Value> {
    messages.iter().map(|message| to_value(message, None)).collect()
}

/// A message as the engine's value, with another content if one is given.
pub(crate) fn to_value(message: &Map<String, Json>, content: Option<&str>) -> Value {
    let mut pairs: Vec<(Value, Value)> = Vec::with_capacity(message.len() + 2);
    let reasoning = REASONING.iter().find_map(|key| message.get(*key).filter(|value| !value.is_null()));
    if let Some(reasoning) = reasoning
        && message.get("thinking").is_none_or(Json::is_null)
    {
        pairs.push((Value::from("thinking"), Value::from_serialize(reasoning)));
    }
    let kept = message.iter().filter(|(_, value)| !value.is_null());
    let value = |value: &Json| value.as_str().map_or_else(|| Value::from_serialize(value), Value::from);
    pairs.extend(kept.map(|(key, item)| match content.filter(|_| key == "content") {
        Some(content) => (Value::from(key.as_str()), Value::from(content)),
        None => (Value::from(key.as_str()), value(item)),
    }));
    if let Some(reasoning) = reasoning
        && !message.contains_key("reasoning_content")
    {
        pairs.push((Value::from("reasoning_content"), Value::from_serialize(reasoning)));
    }
    Value::from_iter(pairs)
}

fn role_of(message: &Value) -> Value {
    message.get_attr("role").unwrap_or_default()
}

/// Roles in order, for error messages.
fn roles(messages: &[Map<String, Json>]) -> String {
    if messages.is_empty() {
        return NO_MESSAGE.to_owned();
    }
    messages
        .iter()
        .map(|message| message.get("role").and_then(Json::as_str).unwrap_or("?"))
        .collect::<Vec<_>>()
        .join(", ")
}

/// The engine's error with its causes and the template's line.
fn full_reason(error: &Error) -> String {
    let mut reason = error.detail().map_or_else(|| error.to_string(), str::to_owned);
    if let Some(line) = error.line() {
        reason.push_str(&format!(" (template line {line})"));
    }
    reason
}

/// Where the first of some marks stands in a text. They are code points from U+FDD0 on, which begin with one byte that is
/// rare, so this is a search for a byte.
pub(crate) fn find_mark(text: &str, marks: &[char]) -> Option<usize> {
    const LEAD: u8 = 0xef;
    let mut from = 0;
    while let Some(at) = text.as_bytes()[from..].iter().position(|&byte| byte == LEAD) {
        from += at;
        if text[from..].starts_with(marks) {
            return Some(from);
        }
        from += 1;
    }
    None
}

/// Removes the marks of blocks and gives the byte ranges between them.
fn take_blocks(rendered: &str) -> (String, Vec<Range<usize>>) {
    let mut text = String::with_capacity(rendered.len());
    let mut ranges = Vec::new();
    let (mut start, mut rest) = (0, rendered);
    while let Some(at) = find_mark(rest, &[BLOCK_START, BLOCK_END]) {
        text.push_str(&rest[..at]);
        if rest[at..].starts_with(BLOCK_START) {
            start = text.len();
        } else {
            ranges.push(start..text.len());
        }
        rest = &rest[at + BLOCK_START.len_utf8()..];
    }
    text.push_str(rest);
    (text, ranges)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn template(source: &str) -> ChatTemplate {
        let tokens = BTreeMap::from([("bos_token".to_owned(), "<s>".to_owned())]);
        ChatTemplate::new(source, Path::new("chat_template.jinja"), tokens).unwrap()
    }

    fn message(role: &str, content: &str) -> Message {
        Message { role: role.to_owned(), content: content.to_owned() }
    }

    #[test]
    fn generation_blocks_are_stripped_and_located() {
        let template = template(
            "{% for m in messages %}\n\
             {% if m.role == 'assistant' %}\n\
             {{ loop.index }}{% generation %}{{ loop.index0 }}{{ m.content }}.{% endgeneration %}\n\
             {%- generation -%} x {%- endgeneration %}\n\
             {% endif %}\n\
             {% endfor %}",
        );
        let messages =
            [("user", "q"), ("assistant", "é")].map(|(role, content)| crate::shape::Turn::new(role, content).message);
        let variables = Variables::new(TemplateInput::default());
        let (text, ranges) = template.render_marked(&to_values(&messages), &variables, false).unwrap();
        assert_eq!(text, "21é.x");
        assert_eq!(ranges, [1..5, 5..6]);
        assert!(template.marks_generation());
    }

    #[test]
    fn blocks_are_trimmed_as_transformers_trims_them() {
        let template = template(
            "  {% for m in messages %}\n  {% if m.role == 'user' %}\n[{{ m.content }}]\n  {% endif %}\n\
             {% endfor %}\n{{ bos_token }}\n",
        );
        assert_eq!(template.render(&[message("user", " a ")], false).unwrap(), "[ a ]\n<s>");
    }

    #[test]
    fn python_idioms_of_published_templates_render() {
        let template = template(
            "{%- set ns = namespace(last=-1) -%}\
             {%- for m in messages[::-1] -%}\
             {%- if ns.last == -1 and m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}\
             {%- endfor -%}\
             {{ ns.last }}|{{ messages[0]['content'].strip().split(' ')[-1].upper() }}|\
             {{ messages[0].get('tool_calls') is none }}|\
             {%- for m in messages -%}\
             {%- if loop.first -%}{%- continue -%}{%- endif -%}{{ m.content | trim }}\
             {%- if loop.index == 2 -%}{%- break -%}{%- endif -%}\
             {%- endfor -%}\
             |{{ messages[0] | tojson }}|{{ tools is none }}|{{ undefined_thing is defined }}|{{ 'a' ~ (1 + 1) }}|\
             {{ none }}{{ true }}",
        );
        let messages = [message("user", " hello there "), message("assistant", " x "), message("assistant", "y")];
        assert_eq!(
            template.render(&messages, false).unwrap(),
            "2|THERE|True|x|{\"role\": \"user\", \"content\": \" hello there \"}|True|False|a2|NoneTrue"
        );
    }

    #[test]
    fn final_message_can_be_left_open() {
        let open = |source: &str, content: &str| {
            let messages = [crate::shape::Turn::new("assistant", content).message];
            let input = TemplateInput { continue_final_message: true, ..TemplateInput::default() };
            template(source).render_chat(&messages, input)
        };
        let plain = "{% for m in messages %}[{{ m.content }}]</s>{% endfor %}";
        assert_eq!(open(plain, "so ").unwrap(), "[so ");
        // A template that trims takes the space behind the text too, as in transformers.
        assert_eq!(open(&plain.replace("m.content", "m.content | trim"), "so ").unwrap(), "[so");
        assert!(open("nothing of it", "so").is_err());
    }

    #[test]
    fn documents_and_arguments_reach_the_template_and_arguments_win_over_special_tokens() {
        let template = template("{{ documents[0].title }}|{{ enable_thinking is false }}|{{ bos_token }}");
        let documents = [serde_json::json!({ "title": "t" })];
        let arguments = serde_json::json!({ "enable_thinking": false, "bos_token": "x" });
        let input =
            TemplateInput { documents: Some(&documents), arguments: arguments.as_object(), ..TemplateInput::default() };
        assert_eq!(template.render_chat(&[], input).unwrap(), "t|True|x");
    }

    #[test]
    fn text_is_not_escaped_as_html() {
        assert_eq!(
            template("{{ messages[0].content }}").render(&[message("user", "<a & 'b'>")], false).unwrap(),
            "<a & 'b'>"
        );
    }

    #[test]
    fn date_is_fixed_by_set_date() {
        let mut template = template("{{ strftime_now('%d %b %Y') }}");
        template.set_date(0);
        assert!(template.uses_date());
        assert_eq!(template.render(&[], false).unwrap(), "01 Jan 1970");
    }

    #[test]
    fn exception_raised_by_the_template_reaches_the_user() {
        let template = template("{% if true %}{{ raise_exception('only one system message') }}{% endif %}");
        let error = template.render(&[message("system", "a")], false).unwrap_err().to_string();
        assert!(error.contains("only one system message") && error.contains("roles: system"), "{error}");
    }

    #[test]
    fn template_that_does_not_parse_names_file_and_line() {
        let error =
            ChatTemplate::new("\n{% if %}", Path::new("folder/chat_template.jinja"), BTreeMap::new()).unwrap_err();
        let error = error.to_string();
        assert!(error.contains("folder/chat_template.jinja") && error.contains("line 2"), "{error}");
    }
}
