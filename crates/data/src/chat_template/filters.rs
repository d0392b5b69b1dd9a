//! Jinja's filters for which the engine's result differs from Python's, and the functions of transformers.
//!
//! Source: Jinja's "List of Builtin Filters". Trade-off: the widths in `format` are not bounded, and neither are lists (see `engine`).

use minijinja::value::{Kwargs, Rest, ValueKind, from_args};
use minijinja::{Environment, Error, FormatStyle, State, Value, format_filter};

use super::python_compat::{check_size, failed, to_str, tojson};
use super::python_methods;
use crate::text_marks::is_space;

/// Maximum width that the `indent` filter accepts.
const MAX_INDENT: usize = 1 << 20;

pub(super) fn add_filters(environment: &mut Environment<'static>) {
    environment.add_filter("tojson", tojson);
    environment.add_filter("string", |value: &Value| to_str(value).map(Value::from));
    for (name, method) in [("trim", "strip"), ("replace", "replace")] {
        environment.add_filter(name, move |state: &State<'_, '_>, value: &Value, rest: Rest<Value>| {
            python_methods::call(state, &text_of(value)?, method, &rest)
        });
    }
    environment.add_filter("title", |value: &Value| {
        let continues = |character: char| !is_space(character) && !"-({[<".contains(character);
        to_str(value).map(|text| python_methods::title(&text, continues))
    });
    for name in ["capitalize", "lower", "upper"] {
        environment.add_filter(name, move |state: &State<'_, '_>, value: &Value| {
            python_methods::call(state, &text_of(value)?, name, &[])
        });
    }
    environment.add_filter("join", join);
    environment.add_filter("int", |value: &Value, rest: Rest<Value>| int(value, &rest));
    environment.add_filter("float", |value: &Value, rest: Rest<Value>| float(value, &rest));
    environment.add_filter("indent", |value: &Value, rest: Rest<Value>| indent(&to_str(value)?, &rest));
    environment.add_filter("format", |value: &Value, rest: Rest<Value>| {
        format_filter(FormatStyle::Printf, &to_str(value)?, &rest)
    });
}

/// Returns a string unchanged, and any other value as Python writes it.
pub(super) fn text_of(value: &Value) -> Result<Value, Error> {
    Ok(if value.as_str().is_some() { value.clone() } else { to_str(value)?.into() })
}

/// Implements Jinja's `join`: the items as Python writes them, or one attribute of each.
fn join(value: &Value, arguments: Rest<Value>) -> Result<String, Error> {
    let (separator, attribute, named): (Option<Value>, Option<Value>, Kwargs) = from_args(&arguments)?;
    let separator = separator.or(named.get("d")?).filter(|value| !value.is_none()).unwrap_or_default();
    let separator = to_str(&separator)?;
    let attribute = attribute.or(named.get("attribute")?);
    named.assert_all_used()?;
    let mut text = String::new();
    if value.is_undefined() {
        return Ok(text);
    }
    for (index, item) in value.try_iter()?.enumerate() {
        let item = attribute.as_ref().map_or_else(|| Ok(item.clone()), |attribute| item.get_item(attribute))?;
        if index > 0 {
            text.push_str(&separator);
        }
        text.push_str(&to_str(&item)?);
        check_size(text.len())?;
    }
    Ok(text)
}

/// Implements Python's `dict` of nothing, of a dictionary or of a list of pairs, with more keys.
pub(super) fn dict(arguments: Rest<Value>) -> Result<Value, Error> {
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
    Ok(super::dict::dict(&Value::from_iter(pairs)))
}

/// Implements Jinja's `int(default=0, base=10)`: the default for a value that is not a number.
fn int(value: &Value, arguments: &[Value]) -> Result<Value, Error> {
    let (default, base, named): (Option<Value>, Option<u32>, Kwargs) = from_args(arguments)?;
    let default = default.or(named.get("default")?).unwrap_or_else(|| 0.into());
    let base = base.or(named.get("base")?).unwrap_or(10);
    named.assert_all_used()?;
    if let Some(text) = value.as_str() {
        let text = text.trim_matches(is_space).replace('_', "").to_lowercase();
        let prefix =
            ["0b", "0o", "0x"].into_iter().zip([2, 8, 16]).find(|(_, of)| *of == base).map_or("", |(it, _)| it);
        let (sign, digits) = text.split_at(usize::from(text.starts_with(['+', '-'])));
        let digits = sign.to_owned() + digits.strip_prefix(prefix).unwrap_or(digits);
        let whole = i64::from_str_radix(&digits, base.clamp(2, 36)).ok();
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

/// Implements Jinja's `float(default=0.0)`.
fn float(value: &Value, arguments: &[Value]) -> Result<Value, Error> {
    let (default, named): (Option<Value>, Kwargs) = from_args(arguments)?;
    let default = default.or(named.get("default")?).unwrap_or_else(|| 0.0.into());
    named.assert_all_used()?;
    let number = match (value.as_str(), value.kind()) {
        (Some(text), _) => text.trim_matches(is_space).parse().ok(),
        (None, ValueKind::Number) => f64::try_from(value.clone()).ok(),
        (None, ValueKind::Bool) => Some(f64::from(u8::from(value.is_true()))),
        _ => None,
    };
    Ok(number.map_or(default, Value::from))
}

/// Implements Jinja's `indent(width=4, first=False, blank=False)`.
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
            let width = usize::try_from(width.clone())?;
            if width > MAX_INDENT {
                return Err(failed(format!("indent: a width of {width}")));
            }
            " ".repeat(width)
        }
    };
    let mut indented = String::new();
    for (index, line) in text.split('\n').enumerate() {
        if index > 0 {
            indented.push('\n');
        }
        if if index == 0 { first } else { blank || !line.is_empty() } {
            indented.push_str(&space);
        }
        indented.push_str(line);
        check_size(indented.len())?;
    }
    Ok(indented)
}

/// Implements the function `raise_exception` of transformers.
pub(super) fn raise_exception(message: &Value) -> Result<Value, Error> {
    let mut message = to_str(message)?.into_owned();
    if let Some((end, _)) = message.char_indices().nth(10_000) {
        message.truncate(end);
    }
    Err(failed(message))
}
