//! A compiled chat template. It turns messages into the exact text that the model was trained on.
//!
//! Runs Jinja templates as transformers 5 runs them: block trimming, loop controls, `{% generation %}` blocks, tools,
//! documents, `raise_exception`, `strftime_now`, Python's methods and `tojson`. Keys of a message that are null are left
//! out, and reasoning is available under each of its names. Not supported: messages with images or sound.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, OnceLock};

use minijinja::{Environment, Value};
use serde::Serialize;
use serde_json::{Map, Value as Json};

use super::engine::{self, DEADLINE, Failure, max_text_bytes};
use super::python_compat::{strftime, to_str};
use super::{dict, lexer};
use crate::error::DataError;
use crate::record_format::fields_weight;
use crate::text_marks::{BLOCK_END, BLOCK_START, find_mark};

const NAME: &str = "chat_template";
/// The names of a message's reasoning. A template reads one of them.
pub(crate) const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// Values that a template receives unless a conversation overrides them.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct TemplateDefaults {
    /// Variables (`enable_thinking`, for example): `chat_template_kwargs` of transformers.
    pub arguments: Map<String, Json>,
    /// System message of conversations that have none.
    pub system_prompt: Option<String>,
}

/// A chat template, compiled.
#[derive(Debug, Clone)]
pub struct ChatTemplate {
    environment: Arc<Environment<'static>>,
    source: String,
    pub(super) special_tokens: BTreeMap<String, String>,
    /// Whether it marks the assistant's text with `{% generation %}` blocks.
    pub(crate) marks_generation: bool,
    pub(super) defaults: TemplateDefaults,
    /// The limit that a render exceeded. Then no thread renders this template again: each such render costs its limit.
    ran_out: Arc<OnceLock<String>>,
}

impl ChatTemplate {
    /// Compiles `source`, read from `path`; `special_tokens` are variables of the template (`bos_token`, ...). The tokenizer sets the date.
    pub(crate) fn new(source: &str, path: &Path, special_tokens: BTreeMap<String, String>) -> Result<Self, DataError> {
        let bad = |reason: String| {
            // The engine's words for every kind of block.
            let not_closed = "unexpected end of input, a {% for %} or {% if %} lacks its {% endfor %} or {% endif %}, or a block its %}";
            let reason = reason.replace("unexpected end of input, expected end of block", not_closed);
            DataError::Tokenizer(format!("the chat template in {} does not parse: {reason}", path.display()))
        };
        let (rewritten, marks_generation) = lexer::rewrite(source).map_err(bad)?;
        let environment =
            engine::compile(engine::environment(), NAME, rewritten).map_err(|failure| bad(failure.reason()))?;
        let (environment, source) = (Arc::new(environment), source.to_owned());
        let (defaults, ran_out) = Default::default();
        Ok(Self { environment, source, special_tokens, marks_generation, defaults, ran_out })
    }

    /// Fixes the date that `strftime_now` returns, in seconds since 1970 UTC. By default it is the time of loading. A run that is resumed on another
    /// day must set the date of its start, or its prompts change.
    pub fn set_date(&mut self, unix_seconds: i64) {
        let environment = Arc::make_mut(&mut self.environment);
        environment.add_function("strftime_now", move |format: &str| strftime(format, unix_seconds));
    }

    /// Returns whether the template reads the date, so that [`ChatTemplate::set_date`] matters.
    pub fn uses_date(&self) -> bool {
        self.source.contains("strftime_now")
    }

    /// Returns the source of the template.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Renders messages with some `variables` and more `arguments` (`enable_thinking`, for example), which take precedence over special tokens; the
    /// whole conversation has about `bytes` bytes. Returns the text and the byte ranges that came from `{% generation %}` blocks.
    pub(super) fn render_values(
        &self,
        messages: &[Value],
        variables: [(&str, Value); 3],
        arguments: &Map<String, Json>,
        bytes: usize,
    ) -> Result<(String, Vec<Range<usize>>), DataError> {
        let max_bytes = max_text_bytes(self.source.len() + fields_weight(&self.defaults.arguments) + bytes);
        let tokens =
            self.special_tokens.iter().map(|(name, token)| (Value::from(name.as_str()), token.as_str().into()));
        let arguments = self.defaults.arguments.iter().chain(arguments);
        let arguments = arguments.map(|(name, value)| (Value::from(name.as_str()), dict::from_json(value)));
        let own = [("messages", Value::from(messages.to_vec()))].into_iter().chain(variables);
        let own = own.map(|(name, value)| (Value::from(name), value));
        let context: Value = tokens.chain(arguments).chain(own).collect::<BTreeMap<_, _>>().into();
        if let Some(reason) = self.ran_out.get() {
            return Err(DataError::TemplateRanOut(reason.clone()));
        }
        match engine::render(&self.environment, NAME, context, max_bytes, DEADLINE) {
            Ok(rendered) => Ok(take_blocks(&rendered)),
            Err(Failure::RanOut(reason)) => Err(DataError::TemplateRanOut(self.ran_out.get_or_init(|| reason).clone())),
            Err(Failure::Refused(reason)) => {
                let roles: Vec<_> = messages.iter().map(describe).collect();
                let roles = if roles.is_empty() { NO_MESSAGE.to_owned() } else { roles.join(", ") };
                Err(DataError::TemplateFailed { roles, reason })
            }
        }
    }
}

const NO_MESSAGE: &str = "no message at all";

/// Returns the role, and whether the content that templates read is absent.
fn describe(message: &Value) -> String {
    let role = message.get_attr("role").unwrap_or_default();
    let without = message.get_attr("content").is_ok_and(|content| content.is_undefined());
    format!("{}{}", to_str(&role).unwrap_or_default(), if without { " without content" } else { "" })
}

/// Removes the marks of blocks and returns the byte ranges between them.
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
    use crate::chat_template::RenderedChat;
    use crate::record_format::{Chat, Turn};

    fn template(source: &str) -> ChatTemplate {
        let tokens = BTreeMap::from([("bos_token".to_owned(), "<s>".to_owned())]);
        ChatTemplate::new(source, Path::new("chat_template.jinja"), tokens).unwrap()
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
        let chat = Chat::new(&[("user", "q"), ("assistant", "é")]);
        let rendered_chat = RenderedChat::new(&template, &chat);
        let (text, ranges) = rendered_chat.render(&rendered_chat.plain, false).unwrap();
        assert_eq!(text, "21é.x");
        assert_eq!(ranges, [1..5, 5..6]);
        assert!(template.marks_generation);
    }

    #[test]
    fn templates_write_what_transformers_writes() {
        let documents = Some(vec![serde_json::json!({ "title": "t" })]);
        let arguments = [("enable_thinking".to_owned(), false.into()), ("bos_token".to_owned(), "x".into())];
        let with_more = Chat { documents, arguments: arguments.into_iter().collect(), ..Chat::default() };
        let cases = [
            // A block sees every variable, assigns to namespaces and keeps what it sets.
            (
                "{% set last = namespace(name=none) %}{% set list = messages %}{% for m in list %}\
                 {% if m.role == 'assistant' %}{% generation %}{% set own = namespace(count=0) %}\
                 {% for other in list[loop.index:] %}{% set own.count = own.count + 1 %}{% endfor %}\
                 {% set last.name = m.content %}{% set inside = 1 %}{{ own.count }}{% endgeneration %}\
                 {% else %}[{{ last.name }}{{ inside is defined }}]{% endif %}{% endfor %}",
                Chat::new(&[("user", "q"), ("assistant", "x"), ("user", "r")]),
                "[NoneFalse]1[xFalse]",
            ),
            // Documents and arguments reach the template; arguments take precedence over special tokens.
            ("{{ documents[0].title }}|{{ enable_thinking is false }}|{{ bos_token }}", with_more, "t|True|x"),
            // Text is not escaped as HTML.
            ("{{ messages[0].content }}", Chat::new(&[("user", "<a & 'b'>")]), "<a & 'b'>"),
        ];
        for (source, chat, text) in cases {
            assert_eq!(template(source).render(&chat, false).unwrap(), text);
        }
    }

    #[test]
    fn a_date_is_written_where_no_variable_replaces_it() {
        let source = "{% if date_string is not defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}\
            {% for m in messages %}{% if m.role == 'system' %}{{ date_string }}{% endif %}{{ m.content }}{% endfor %}";
        let mut template = template(source);
        let (plain, system) = (Chat::new(&[("user", "q")]), Chat::new(&[("system", "s"), ("user", "q")]));
        assert!(template.writes_date(&system) && !template.writes_date(&plain));
        let arguments = [("date_string".to_owned(), "26 Jul 2024".into())].into_iter().collect();
        template.defaults.arguments = arguments;
        assert!(!template.writes_date(&system) && template.uses_date());
    }

    #[test]
    fn a_failure_tells_reason_roles_and_empty_messages() {
        let mut call = Turn::new("assistant", "");
        call.message.insert("content".to_owned(), Json::Null);
        let raise = "{% if true %}{{ raise_exception('only one system message') }}{% endif %}";
        let adds = "{% for m in messages %}{{ 'x' + m.content }}{% endfor %}";
        for (source, turn, words) in [
            (raise, Turn::new("system", "a"), ["only one system message", "roles: system"]),
            (adds, call, ["", "roles: assistant without content"]),
        ] {
            let chat = Chat { turns: vec![turn], ..Chat::default() };
            let error = template(source).render(&chat, false).unwrap_err().to_string();
            assert!(words.iter().all(|words| error.contains(words)), "{error}");
        }
    }

    #[test]
    fn only_a_far_longer_text_is_refused() {
        let long = "word ".repeat(200_000);
        let chat = Chat::new(&[("user", &long)]);
        let twice = template("{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}");
        assert_eq!(twice.render(&chat, false).unwrap().len(), 2 * long.len());
        let raw = template(&("x".repeat(300_000) + "{{ messages[0].content }}"));
        assert_eq!(raw.render(&Chat::new(&[("user", "q")]), false).unwrap().len(), 300_001);
        let in_block = "{% generation %}{% for a in range(9999) %}{{ 'x' * 1000 }}{% endfor %}{% endgeneration %}";
        let error = template(in_block).render(&Chat::new(&[("user", "q")]), false).unwrap_err().to_string();
        assert!(error.contains(" KiB, far more than it and the conversation have"), "{error}");
    }

    #[test]
    fn a_template_that_ran_out_is_not_rendered_again() {
        let template = template(
            "{% if messages[0].content == 'q' %}{% for a in range(9999) %}{{ 'x' * 999 }}{% endfor %}{% endif %}a",
        );
        assert_eq!(template.render(&Chat::new(&[("user", "r")]), false).unwrap(), "a");
        for content in ["q", "r"] {
            let error = template.render(&Chat::new(&[("user", content)]), false).unwrap_err();
            assert!(matches!(error, DataError::TemplateRanOut(_)), "{content}: {error}");
        }
    }
}
