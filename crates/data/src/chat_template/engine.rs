//! The Jinja engine, made to do what transformers' sandboxed environment does, within bounds.
//!
//! Template files come from strangers. A render is bounded by fuel (instructions), by the depth of recursion, by the bytes
//! that it writes and by what it makes on the way (`budget`; `generation` sends every value that a template makes through
//! it), so a template that never ends or that doubles a string is an error, not a hang. Gives up the rest of Jinja that
//! templates from strings cannot use (includes, inheritance), and a tight bound on time: a template that compares or
//! searches long texts until its fuel is spent ends, but may take a minute or two.

mod budget;
mod filters;

use std::io::{Error as IoError, Write as IoWrite};
use std::panic::{AssertUnwindSafe, catch_unwind};

use minijinja::value::ValueKind;
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Value};

pub(crate) use budget::{spend, spend_text, too_large};
pub(crate) use filters::check_format;

use crate::chat_template::generation::generation;
use crate::chat_template::methods;
use crate::python::bounded_str;

/// Instructions of one render. A template of today's kind needs about a hundred for a message.
const FUEL: u64 = 3_000_000;
/// Depth of macros that call themselves.
const RECURSION: usize = 100;
/// The most bytes that a render may write, or that a text inside a template may have.
pub(crate) const MAX_TEXT_BYTES: usize = 128 << 20;
/// The most items that a list inside a template may have.
pub(crate) const MAX_ITEMS: usize = 4_000_000;

/// An environment with everything but the template.
pub(crate) fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_trim_blocks(true);
    environment.set_lstrip_blocks(true);
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_fuel(Some(FUEL));
    environment.set_recursion_limit(RECURSION);
    environment.set_unknown_method_callback(methods::call);
    environment.set_formatter(|output, _, value| match value.as_str() {
        Some(text) => {
            spend(text.len())?;
            Ok(output.write_str(text)?)
        }
        None if value.is_undefined() => Ok(()),
        None => Ok(output.write_str(&bounded_str(value)?)?),
    });
    environment.add_function("raise_exception", filters::raise_exception);
    environment.add_function("dict", filters::dict);
    environment.add_function("namespace", filters::namespace);
    environment.add_function("firebrick_generation", generation);
    environment.add_function("firebrick_text", |bytes: usize| spend(bytes).map(|()| Value::from("")));
    environment.add_filter("firebrick_bounded", budget::bounded);
    environment.add_filter("firebrick_attribute", budget::attribute);
    environment.add_filter("firebrick_made", budget::made);
    environment.add_filter("firebrick_looped", budget::looped);
    // Not in Jinja; shows all variables.
    environment.remove_global("debug");
    filters::add_filters(&mut environment);
    add_tests(&mut environment);
    environment
}

/// The tests of Jinja that follow Python's notion of types.
fn add_tests(environment: &mut Environment<'static>) {
    let is_collection =
        |kind| matches!(kind, ValueKind::Seq | ValueKind::Map | ValueKind::String | ValueKind::Iterable);
    environment.add_test("sequence", move |value: &Value| is_collection(value.kind()));
    // Undefined can be looped over, so Jinja calls it iterable.
    environment.add_test("iterable", move |value: &Value| is_collection(value.kind()) || value.is_undefined());
    environment.add_test("number", |value: &Value| matches!(value.kind(), ValueKind::Number | ValueKind::Bool));
    environment.add_test("callable", |value: &Value| value.kind() == ValueKind::Plain);
}

/// Renders into a text of bounded length.
pub(crate) fn render(environment: &Environment<'_>, name: &str, variables: Value) -> Result<String, Error> {
    let mut text = BoundedText(Vec::with_capacity(1 << 12));
    let template = environment.get_template(name)?;
    budget::open(&variables);
    // The engine trusts its arithmetic: a slice from 5 back to 9 overflows, a cycle of nothing divides by 0.
    let rendered = catch_unwind(AssertUnwindSafe(|| template.render_captured_to(variables, &mut text).map(drop)));
    budget::close();
    let rendered = rendered.unwrap_or_else(|_| {
        let message = "the template engine gave up: a number in the template is beyond what it can work with";
        Err(Error::new(ErrorKind::InvalidOperation, message))
    });
    rendered.map_err(|error| if text.0.len() >= MAX_TEXT_BYTES { too_large() } else { error })?;
    String::from_utf8(text.0).map_err(|_| Error::new(ErrorKind::WriteFailure, "the engine wrote half a character"))
}

/// A buffer that refuses to grow over [`MAX_TEXT_BYTES`].
struct BoundedText(Vec<u8>);

impl IoWrite for BoundedText {
    fn write(&mut self, bytes: &[u8]) -> Result<usize, IoError> {
        let room = MAX_TEXT_BYTES - self.0.len();
        self.0.extend_from_slice(&bytes[..bytes.len().min(room)]);
        if bytes.len() > room { Err(IoError::other("too much text")) } else { Ok(bytes.len()) }
    }

    fn flush(&mut self) -> Result<(), IoError> {
        Ok(())
    }
}
