//! The filters whose outcome differs from Python's in the engine, or is not bounded there.
//!
//! Source: Jinja's "List of Builtin Filters".

use std::fmt::Write;

use minijinja::value::{Kwargs, Rest, ValueKind, from_args};
use minijinja::{Environment, Error, ErrorKind, FormatStyle, State, Value, filters, format_filter, functions};

use super::budget::{bounded, made, size_of, spend, spend_text, too_large};
use super::{MAX_ITEMS, MAX_TEXT_BYTES};
use crate::chat_template::methods;
use crate::python::{bounded_str, to_str, tojson};

/// What sorting and grouping cost for each value.
const COMPARED_BYTES: usize = 64;

pub(super) fn add_filters(environment: &mut Environment<'static>) {
    environment.add_filter("tojson", tojson);
    environment.add_filter("string", |value: &Value| bounded_str(value));
    environment.add_filter("trim", |state: &State<'_, '_>, value: &Value, rest: Rest<Value>| {
        methods::call(state, &text_of(value)?, "strip", &rest)
    });
    for name in ["capitalize", "lower", "upper", "title"] {
        environment.add_filter(name, move |state: &State<'_, '_>, value: &Value| {
            methods::call(state, &text_of(value)?, name, &[])
        });
    }
    environment.add_filter("replace", |value: &Value, old: String, new: String, count: Option<i64>| {
        methods::replaced(&bounded_str(value)?, &old, &new, count.and_then(|count| usize::try_from(count).ok()))
    });
    environment.add_filter("join", join);
    environment.add_filter("list", |state: &State<'_, '_>, value: Value| {
        let items = filters::list(state, bounded(value)?)?;
        spend(items.len().unwrap_or(0) * 32).map(|()| items)
    });
    environment.add_filter("int", |value: &Value, rest: Rest<Value>| int(value, &rest));
    environment.add_filter("float", |value: &Value, rest: Rest<Value>| float(value, &rest));
    environment.add_filter("indent", |value: &Value, rest: Rest<Value>| indent(&bounded_str(value)?, &rest));
    environment.add_filter("format", |value: &Value, rest: Rest<Value>| {
        let text = bounded_str(value)?;
        check_format(&text, &rest)?;
        format_filter(FormatStyle::Printf, &text, &rest)
    });
    add_list_filters(environment);
    // Not in Jinja, and what they make is lazy and may be nested without bound.
    environment.remove_filter("chain");
    environment.remove_filter("zip");
}

/// Those of lists: they pay for what they look at, and what they make is looked at for its depth.
fn add_list_filters(environment: &mut Environment<'static>) {
    fn compared(value: Value) -> Result<Value, Error> {
        let value = bounded(value)?;
        let size = size_of(&value)?;
        spend(size.nodes * COMPARED_BYTES + size.text).map(|()| value)
    }
    environment.add_filter("sort", |state: &State<'_, '_>, value: Value, options: Kwargs| {
        filters::sort(state, compared(value)?, options)
    });
    environment.add_filter("unique", |state: &State<'_, '_>, value: Value, options: Kwargs| {
        filters::unique(state, compared(value)?, options)
    });
    environment
        .add_filter("dictsort", |value: Value, options: Kwargs| made(filters::dictsort(&compared(value)?, options)?));
    environment.add_filter("groupby", |value: Value, attribute: Option<&str>, options: Kwargs| {
        made(filters::groupby(compared(value)?, attribute, options)?)
    });
    environment.add_filter("min", |state: &State<'_, '_>, value: Value| filters::min(state, compared(value)?));
    environment.add_filter("max", |state: &State<'_, '_>, value: Value| filters::max(state, compared(value)?));
    environment.add_filter("sum", |state: &State<'_, '_>, value: Value| filters::sum(state, bounded(value)?));
    environment.add_filter("reverse", |value: Value| {
        let value = bounded(value)?;
        spend(value.len().unwrap_or(0)).and_then(|()| filters::reverse(&value))
    });
    environment.add_filter("last", |value: Value| filters::last(bounded(value)?));
    environment.add_filter("items", |value: Value| made(filters::items(&value)?));
    environment.add_filter("pprint", |value: Value| compared(value).map(|value| filters::pprint(&value)));
    environment.add_filter("batch", |state: &State<'_, '_>, value: Value, size: usize, fill: Option<Value>| {
        let value = bounded(value)?;
        // Longer batches are one, but for what fills it.
        let most = if fill.is_some() { MAX_ITEMS } else { value.len().unwrap_or(0).max(1) };
        if fill.is_some() && size > MAX_ITEMS {
            return Err(too_large());
        }
        spend(if fill.is_some() { size.saturating_mul(32) } else { 0 })?;
        made(filters::batch(state, value, size.min(most), fill)?)
    });
    environment.add_filter("slice", |state: &State<'_, '_>, value: Value, count: usize, fill: Option<Value>| {
        if count > MAX_ITEMS {
            return Err(too_large());
        }
        spend(count.saturating_mul(32))?;
        made(filters::slice(state, bounded(value)?, count, fill)?)
    });
}

/// What a format with these arguments may come to; every conversion may write its width, or the longest argument.
pub(crate) fn check_format(format: &str, arguments: &[Value]) -> Result<(), Error> {
    let mut longest = 0;
    let mut width = 0;
    for argument in arguments {
        longest = longest.max(bounded_str(argument)?.len());
        // A width may be an argument, too.
        if argument.is_integer() && format.contains('*') {
            width = width.max(usize::try_from(argument.clone()).unwrap_or(0));
        }
    }
    for digits in format.split(|character: char| !character.is_ascii_digit()).filter(|digits| !digits.is_empty()) {
        width = width.max(digits.parse().unwrap_or(usize::MAX));
    }
    // More precision than that is a fault of the engine's formatter, and no number has it.
    if width > usize::from(u16::MAX) {
        return Err(too_large());
    }
    let conversions = format.bytes().filter(|byte| matches!(byte, b'{' | b'%')).count();
    spend_text(conversions.saturating_mul(longest + width).saturating_add(format.len()))
}

/// A text, or what Python writes for another value.
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
        let before = text.len();
        if index > 0 {
            text.push_str(&separator);
        }
        text.write_str(&bounded_str(&item)?)?;
        spend(text.len() - before)?;
    }
    spend_text(text.len())?;
    Ok(text)
}

/// Python's `dict` of nothing, of a dictionary or a list of pairs, with more keys.
pub(super) fn dict(arguments: Rest<Value>) -> Result<Value, Error> {
    let (first, more): (Option<Value>, Kwargs) = from_args(&arguments)?;
    let mut pairs: Vec<(Value, Value)> = Vec::new();
    if let Some(first) = first {
        let first = bounded(first)?;
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
    made(Value::from_iter(pairs))
}

/// The engine's `namespace`, without one inside.
pub(super) fn namespace(defaults: Option<Value>) -> Result<Value, Error> {
    functions::namespace(defaults.map(made).transpose()?)
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
        Some(Err(width)) => {
            let width = usize::try_from(width.clone())?.min(MAX_TEXT_BYTES);
            spend_text(width)?;
            " ".repeat(width)
        }
    };
    let lines: Vec<&str> = text.split('\n').collect();
    spend_text(space.len().saturating_mul(lines.len()).saturating_add(text.len()))?;
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

/// Jinja's `raise_exception` of transformers.
pub(super) fn raise_exception(message: &Value) -> Result<Value, Error> {
    let mut message = to_str(message);
    if let Some((end, _)) = message.char_indices().nth(10_000) {
        message.truncate(end);
    }
    Err(Error::new(ErrorKind::InvalidOperation, message))
}
