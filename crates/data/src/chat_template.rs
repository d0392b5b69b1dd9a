//! The tokenizer's own chat template: messages in, the exact text that the model was trained on out.
//!
//! Runs Jinja templates as transformers runs them (block trimming, loop controls, `raise_exception`, `strftime_now`,
//! Python's string methods and `tojson`). Gives up tools, documents and messages with parts: `tools` and `documents`
//! are `none` in the template, a message has a role and a text.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::value::Kwargs;
use minijinja::{AutoEscape, Environment, Error, ErrorKind, State, Value, context};
use minijinja_contrib::pycompat::unknown_method_callback;
use serde::{Deserialize, Serialize};

use crate::error::DataError;
use crate::python::{strftime, tojson};

const NAME: &str = "chat_template";
/// Marks around a `{% generation %}` block while rendering: two code points that Unicode promises never to assign.
const BLOCK_START: char = '\u{FDD0}';
const BLOCK_END: char = '\u{FDD1}';

/// One turn of a conversation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// Who speaks: "system", "user" or "assistant", or what else the template knows.
    pub role: String,
    /// What is said.
    pub content: String,
}

/// A chat template, compiled.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    special_tokens: BTreeMap<String, String>,
    marks_generation: bool,
    uses_date: bool,
}

impl ChatTemplate {
    /// Compiles `source`, which came from `path`; `special_tokens` are variables of the template (`bos_token`, ...).
    pub(crate) fn new(source: &str, path: &Path, special_tokens: BTreeMap<String, String>) -> Result<Self, DataError> {
        let mut environment = Environment::new();
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        environment.set_unknown_method_callback(unknown_method_callback);
        environment.add_filter("tojson", tojson);
        environment.add_function("raise_exception", raise_exception);
        environment.add_function("firebrick_generation", generation);
        let (source, marks_generation) = replace_generation_tags(source);
        let uses_date = source.contains("strftime_now");
        environment
            .add_template_owned(NAME, source)
            .map_err(|reason| DataError::BadChatTemplate { path: path.to_owned(), reason: full_reason(&reason) })?;
        let mut template = Self { environment, special_tokens, marks_generation, uses_date };
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_secs() as i64);
        template.set_date(now);
        Ok(template)
    }

    /// Renders the messages. `add_generation_prompt` appends what comes before an assistant's answer.
    ///
    /// Errors: the template refuses the messages (an unknown role, two users in a row, ...).
    pub fn render(&self, messages: &[Message], add_generation_prompt: bool) -> Result<String, DataError> {
        Ok(self.render_marked(messages, add_generation_prompt)?.0)
    }

    /// Fixes what `strftime_now` returns, in seconds since 1970 UTC; until then it is the moment of loading. A run
    /// that is resumed on another day must set the day it began, or its prompts change.
    pub fn set_date(&mut self, unix_seconds: i64) {
        self.environment.add_function("strftime_now", move |format: &str| strftime(format, unix_seconds));
    }

    /// Whether the template asks for the date, so that [`ChatTemplate::set_date`] matters.
    pub fn uses_date(&self) -> bool {
        self.uses_date
    }

    /// Whether the template says itself which text is the assistant's, with `{% generation %}` blocks.
    pub(crate) fn marks_generation(&self) -> bool {
        self.marks_generation
    }

    /// Renders, and gives the byte ranges that came from `{% generation %}` blocks.
    pub(crate) fn render_marked(
        &self,
        messages: &[Message],
        add_generation_prompt: bool,
    ) -> Result<(String, Vec<Range<usize>>), DataError> {
        let failed = |reason: String| DataError::TemplateFailed { roles: roles(messages), reason };
        if messages.iter().any(|message| message.content.contains([BLOCK_START, BLOCK_END])) {
            return Err(failed("a message holds U+FDD0 or U+FDD1, which are not characters".to_owned()));
        }
        let special_tokens = Value::from_serialize(&self.special_tokens);
        let variables = context! {
            messages => messages,
            tools => Value::from(()),
            documents => Value::from(()),
            add_generation_prompt => add_generation_prompt,
            ..special_tokens
        };
        let rendered = self
            .environment
            .get_template(NAME)
            .and_then(|template| template.render(variables))
            .map_err(|reason| failed(full_reason(&reason)))?;
        Ok(take_marks(&rendered))
    }
}

/// Roles in order, for error messages.
fn roles(messages: &[Message]) -> String {
    if messages.is_empty() {
        return "no message at all".to_owned();
    }
    messages.iter().map(|message| message.role.as_str()).collect::<Vec<_>>().join(", ")
}

/// The engine's error with its causes and the template's line.
fn full_reason(error: &Error) -> String {
    let mut reason = error.detail().map_or_else(|| error.to_string(), str::to_owned);
    if let Some(line) = error.line() {
        reason.push_str(&format!(" (template line {line})"));
    }
    reason
}

fn raise_exception(message: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message))
}

/// What a `{% generation %}` block became: its body between marks.
fn generation(state: &State, arguments: Kwargs) -> Result<String, Error> {
    let body = arguments.get::<Value>("caller")?.call(state, &[])?;
    Ok(format!("{BLOCK_START}{body}{BLOCK_END}"))
}

/// `{% generation %}` is an extension of transformers that the engine does not know: it becomes a call block, which has
/// the same white-space rules. Says whether there was any.
fn replace_generation_tags(source: &str) -> (String, bool) {
    let mut replaced = String::with_capacity(source.len());
    let mut rest = source;
    let mut found = false;
    while let Some((before, after)) = rest.split_once("{%") {
        let (tag, behind) = after.split_once("%}").unwrap_or((after, ""));
        let closed = tag.len() < after.len();
        replaced.push_str(before);
        replaced.push_str("{%");
        match tag.trim_matches(['-', '+']).trim() {
            "generation" => {
                replaced.push_str(&tag.replace("generation", "call firebrick_generation()"));
                found = true;
            }
            "endgeneration" => replaced.push_str(&tag.replace("endgeneration", "endcall")),
            _ => replaced.push_str(tag),
        }
        replaced.push_str(if closed { "%}" } else { "" });
        rest = behind;
    }
    replaced.push_str(rest);
    (replaced, found)
}

/// Removes the marks and gives the byte ranges between them.
fn take_marks(rendered: &str) -> (String, Vec<Range<usize>>) {
    let mut text = String::with_capacity(rendered.len());
    let mut ranges = Vec::new();
    let mut start = 0;
    for character in rendered.chars() {
        match character {
            BLOCK_START => start = text.len(),
            BLOCK_END => ranges.push(start..text.len()),
            _ => text.push(character),
        }
    }
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
        let (text, ranges) = template.render_marked(&[message("user", "q"), message("assistant", "é")], false).unwrap();
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
