//! The Jinja engine, made to do what transformers' sandboxed environment does, within bounds.
//!
//! Template files come from strangers. A render is bounded by fuel (instructions), by the depth of recursion, by the bytes
//! it writes and by the size of every value that a `set` keeps, so a template that never ends or that doubles a string
//! is an error, not a hang. Gives up the bound on one expression alone that builds a huge list and prints it, and the
//! rest of Jinja that templates from strings cannot use (includes, inheritance).

use std::fmt::Write;
use std::io::{Error as IoError, Write as IoWrite};

use minijinja::value::{Kwargs, Rest, ValueKind, from_args};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, State, Value};

use crate::chat_template::generation::generation;
use crate::chat_template::methods;
use crate::python::{bounded_str, to_str, tojson};

/// Instructions of one render. A template of today's kind needs about a hundred for a message.
const FUEL: u64 = 10_000_000;
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
        Some(text) => Ok(output.write_str(text)?),
        None if value.is_undefined() => Ok(()),
        None => Ok(output.write_str(&bounded_str(value)?)?),
    });
    environment.add_function("raise_exception", raise_exception);
    environment.add_function("dict", dict);
    environment.add_function("firebrick_generation", generation);
    add_filters(&mut environment);
    add_tests(&mut environment);
    environment
}

/// The filters whose outcome differs from Python's in the engine, or is not bounded there.
fn add_filters(environment: &mut Environment<'static>) {
    environment.add_filter("firebrick_bounded", bounded);
    environment.add_filter("tojson", tojson);
    environment.add_filter("string", |value: &Value| bounded_str(value));
    environment.add_filter("trim", |state: &State<'_, '_>, value: &Value, rest: Rest<Value>| {
        methods::call(state, &text_of(value)?, "strip", &rest)
    });
    environment.add_filter("capitalize", |value: &Value| Ok::<_, Error>(methods::capitalize(&bounded_str(value)?)));
    environment.add_filter("replace", |value: &Value, old: String, new: String, count: Option<i64>| {
        methods::replaced(&bounded_str(value)?, &old, &new, count.and_then(|count| usize::try_from(count).ok()))
    });
    environment.add_filter("join", join);
    environment
        .add_filter("list", |state: &State<'_, '_>, value: Value| minijinja::filters::list(state, bounded(value)?));
    environment.add_filter("int", |value: &Value, rest: Rest<Value>| int(value, &rest));
    environment.add_filter("float", |value: &Value, rest: Rest<Value>| float(value, &rest));
    environment.add_filter("indent", |value: &Value, rest: Rest<Value>| indent(&bounded_str(value)?, &rest));
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
    environment
        .get_template(name)?
        .render_captured_to(variables, &mut text)
        .map_err(|error| if text.0.len() >= MAX_TEXT_BYTES { too_large() } else { error })?;
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

/// The error of a template that grows without bound.
pub(crate) fn too_large() -> Error {
    let limit = MAX_TEXT_BYTES >> 20;
    Error::new(ErrorKind::InvalidOperation, format!("the template makes a text or a list of more than {limit} MiB"))
}

/// Lets a value pass that is not too large; every `set` of a template goes through it.
fn bounded(value: Value) -> Result<Value, Error> {
    let size = match value.as_str() {
        Some(text) => text.len() / (MAX_TEXT_BYTES / MAX_ITEMS),
        None => value.len().unwrap_or(0),
    };
    if size > MAX_ITEMS { Err(too_large()) } else { Ok(value) }
}

fn raise_exception(message: &Value) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, to_str(message)))
}

fn text_of(value: &Value) -> Result<Value, Error> {
    match value.as_str() {
        Some(_) => Ok(value.clone()),
        None => bounded_str(value).map(Value::from),
    }
}

/// Jinja's `join`: items as Python writes them, or one attribute of each.
fn join(value: &Value, arguments: Rest<Value>) -> Result<String, Error> {
    let (separator, attribute, named): (Option<Value>, Option<Value>, Kwargs) = from_args(&arguments)?;
    let separator = separator.or(named.get("d")?).filter(|value| !value.is_none());
    let attribute = attribute.or(named.get("attribute")?);
    named.assert_all_used()?;
    let separator = separator.as_ref().map_or_else(String::new, to_str);
    let mut text = String::new();
    if value.is_undefined() {
        return Ok(text);
    }
    for (index, item) in bounded(value.clone())?.try_iter()?.enumerate() {
        let item = attribute.as_ref().map_or_else(|| Ok(item.clone()), |attribute| item.get_item(attribute))?;
        if index > 0 {
            text.push_str(&separator);
        }
        text.write_str(&bounded_str(&item)?)?;
        if text.len() > MAX_TEXT_BYTES {
            return Err(too_large());
        }
    }
    Ok(text)
}

/// Python's `dict` of nothing, of a dictionary or a list of pairs, with more keys.
fn dict(arguments: Rest<Value>) -> Result<Value, Error> {
    let (first, more): (Option<Value>, Kwargs) = from_args(&arguments)?;
    let mut pairs: Vec<(Value, Value)> = Vec::new();
    if let Some(first) = first {
        for item in first.try_iter()? {
            let is_pair = first.kind() != ValueKind::Map;
            let (key, value) = if is_pair {
                (item.get_item(&0.into())?, item.get_item(&1.into())?)
            } else {
                (item.clone(), first.get_item(&item)?)
            };
            pairs.push((key, value));
        }
    }
    for key in more.args() {
        pairs.push((key.into(), more.peek::<Value>(key)?));
    }
    Ok(Value::from_iter(pairs))
}

/// Jinja's `int(default=0)`: of what is no number, the default.
fn int(value: &Value, arguments: &[Value]) -> Result<Value, Error> {
    let (default, named): (Option<Value>, Kwargs) = from_args(arguments)?;
    let default = default.or(named.get("default")?).unwrap_or_else(|| 0.into());
    let base = named.get::<Option<u32>>("base")?.unwrap_or(10);
    named.assert_all_used()?;
    if let Some(text) = value.as_str() {
        let text = text.trim_matches(methods::is_space).replace('_', "");
        let whole = i64::from_str_radix(&text, base.clamp(2, 36)).ok();
        let cut = || text.parse::<f64>().ok().filter(|number| number.is_finite()).map(|number| number as i64);
        return Ok(whole.or_else(cut).map_or(default, Value::from));
    }
    if value.is_integer() {
        return Ok(value.clone());
    }
    match value.kind() {
        ValueKind::Bool => Ok(i64::from(value.is_true()).into()),
        ValueKind::Number => Ok((f64::try_from(value.clone())? as i64).into()),
        _ => Ok(default),
    }
}

/// Jinja's `float(default=0.0)`.
fn float(value: &Value, arguments: &[Value]) -> Result<Value, Error> {
    let (default, named): (Option<Value>, Kwargs) = from_args(arguments)?;
    let default = default.or(named.get("default")?).unwrap_or_else(|| 0.0.into());
    named.assert_all_used()?;
    let number = match (value.as_str(), value.kind()) {
        (Some(text), _) => text.trim_matches(methods::is_space).parse().ok(),
        (None, ValueKind::Number) => f64::try_from(value.clone()).ok(),
        (None, ValueKind::Bool) => Some(f64::from(u8::from(value.is_true()))),
        _ => None,
    };
    Ok(number.map_or(default, Value::from))
}

/// Jinja's `indent(width=4, first=False, blank=False)`.
fn indent(text: &str, arguments: &[Value]) -> Result<String, Error> {
    let (width, first, blank, named): (Option<Value>, Option<bool>, Option<bool>, Kwargs) = from_args(arguments)?;
    let width = width.or(named.get("width")?);
    let first = first.or(named.get("first")?).unwrap_or(false);
    let blank = blank.or(named.get("blank")?).unwrap_or(false);
    named.assert_all_used()?;
    let space = match width.as_ref().map(|width| width.as_str().ok_or(width)) {
        None => "    ".to_owned(),
        Some(Ok(space)) => space.to_owned(),
        Some(Err(width)) => " ".repeat(usize::try_from(width.clone())?.min(MAX_TEXT_BYTES)),
    };
    let lines: Vec<&str> = text.split('\n').collect();
    if space.len().saturating_mul(lines.len()).saturating_add(text.len()) > MAX_TEXT_BYTES {
        return Err(too_large());
    }
    let mut indented = String::new();
    for (index, line) in lines.iter().enumerate() {
        if index > 0 {
            indented.push('\n');
        }
        if if index == 0 { first } else { blank || !line.is_empty() } {
            indented.push_str(&space);
        }
        indented.push_str(line);
    }
    Ok(indented)
}
