//! Python's methods of strings, lists and dictionaries, for templates that call them.
//!
//! Written to match Python (checked by the goldens), because `pycompat` of minijinja-contrib counts bytes where Python counts characters and lacks
//! half of the methods. Not supported: methods that modify a value, which the sandbox of transformers forbids too, and locales.

use minijinja::value::{Kwargs, ValueKind, from_args};
use minijinja::{Error, ErrorKind, FormatStyle, State, Value, format_filter};

/// The method that replaces `[a:b:c]`: the engine's slices with a negative step take too much.
pub(super) const SLICE: &str = "firebrick_slice";
use super::python_compat::{check_size, failed};
use crate::text_marks::is_space;

/// Calls a Python method that the engine does not provide.
pub(crate) fn call(_: &State<'_, '_>, value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    match (value.kind(), value.as_str()) {
        (_, Some(text)) if method == SLICE => {
            Ok(slice(&text.chars().collect::<Vec<_>>(), args)?.into_iter().collect::<String>().into())
        }
        (ValueKind::Seq | ValueKind::Iterable, _) if method == SLICE => {
            Ok(slice(&value.try_iter()?.collect::<Vec<_>>(), args)?.into())
        }
        (_, Some(text)) => string_method(text, method, args),
        (ValueKind::Map, _) => dict_method(value, method, args),
        (ValueKind::Seq | ValueKind::Iterable, _) => list_method(value, method, args),
        _ => Err(unknown()),
    }
}

/// Implements `items[start:stop:step]`.
fn slice<T: Clone>(items: &[T], args: &[Value]) -> Result<Vec<T>, Error> {
    let number = |index: usize| args.get(index).filter(|part| !part.is_none()).cloned().map(i64::try_from).transpose();
    let (length, step) = (items.len() as i64, number(2)?.unwrap_or(1));
    if step == 0 || args.len() > 3 {
        return Err(failed("a slice has a step of 0, or more than three parts"));
    }
    let (first, last) = if step > 0 { (0, length) } else { (length - 1, -1) };
    let place = |part: Option<i64>, default| {
        let place = |part: i64| if part < 0 { part.saturating_add(length) } else { part };
        part.map_or(default, |part| place(part).clamp(first.min(last), first.max(last)))
    };
    let (start, stop) = (place(number(0)?, first), place(number(1)?, last));
    let places = std::iter::successors(Some(start), |at| at.checked_add(step));
    let taken = places.take_while(|&at| if step > 0 { at < stop } else { at > stop });
    Ok(taken.map(|at| items[at as usize].clone()).collect())
}

fn unknown() -> Error {
    Error::from(ErrorKind::UnknownMethod)
}

fn dict_method(value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    let Some(object) = value.as_object() else { return Err(unknown()) };
    let pairs = || object.try_iter_pairs().into_iter().flatten();
    if method == "get" {
        let (key, default): (&Value, Option<Value>) = from_args(args)?;
        return Ok(object.get_value(key).or(default).unwrap_or_else(|| Value::from(())));
    }
    let result: Vec<Value> = match method {
        "items" => pairs().map(|(key, value)| Value::from(vec![key, value])).collect(),
        "keys" => pairs().map(|(key, _)| key).collect(),
        "values" => pairs().map(|(_, value)| value).collect(),
        "copy" => return from_args(args).map(|()| value.clone()),
        _ => return Err(unknown()),
    };
    from_args(args).map(|()| result.into())
}

fn list_method(value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    match method {
        "count" => {
            let (what,): (&Value,) = from_args(args)?;
            Ok(value.try_iter()?.filter(|item| item == what).count().into())
        }
        "index" => {
            let (what,): (&Value,) = from_args(args)?;
            let found = value.try_iter()?.position(|item| item == *what);
            found.map(Value::from).ok_or_else(|| failed(format!("{what} is not in the list")))
        }
        "copy" => from_args(args).map(|()| value.clone()),
        _ => Err(unknown()),
    }
}

fn string_method(text: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    match method {
        "strip" | "lstrip" | "rstrip" => strip(text, method, args),
        "split" => split(text, args, false),
        "rsplit" => split(text, args, true),
        "splitlines" => split_lines(text, args),
        "replace" => replace(text, args),
        "join" => join(text, args),
        "startswith" => affix(args, |prefix| text.starts_with(prefix)),
        "endswith" => affix(args, |suffix| text.ends_with(suffix)),
        "removeprefix" => from_args(args).map(|(prefix,): (&str,)| text.strip_prefix(prefix).unwrap_or(text).into()),
        "removesuffix" => from_args(args).map(|(suffix,): (&str,)| text.strip_suffix(suffix).unwrap_or(text).into()),
        "partition" | "rpartition" => partition(text, method, args),
        "find" | "rfind" | "index" | "rindex" => find(text, method, args),
        "count" => {
            let (what,): (&str,) = from_args(args)?;
            let count = if what.is_empty() { text.chars().count() + 1 } else { text.matches(what).count() };
            Ok(count.into())
        }
        "ljust" | "rjust" | "center" | "zfill" => pad(text, method, args),
        "format" => format_filter(FormatStyle::StrFormat, text, args).map(Value::from),
        _ => {
            let () =
                from_args(args).map_err(|error| if plain_method("", method).is_ok() { error } else { unknown() })?;
            plain_method(text, method)
        }
    }
}

fn plain_method(text: &str, method: &str) -> Result<Value, Error> {
    let all = |test: fn(char) -> bool| !text.is_empty() && text.chars().all(test);
    let cased = |test: fn(char) -> bool, other: fn(char) -> bool| text.chars().any(test) && !text.chars().any(other);
    Ok(match method {
        "upper" => text.to_uppercase().into(),
        "lower" | "casefold" => text.to_lowercase().into(),
        "title" => title(text, char::is_alphabetic).into(),
        "capitalize" => capitalize(text).into(),
        "swapcase" => swap_case(text).into(),
        "islower" => cased(char::is_lowercase, char::is_uppercase).into(),
        "isupper" => cased(char::is_uppercase, char::is_lowercase).into(),
        "istitle" => (text.chars().any(char::is_alphabetic) && title(text, char::is_alphabetic) == text).into(),
        "isspace" => all(is_space).into(),
        "isdigit" | "isnumeric" | "isdecimal" => all(char::is_numeric).into(),
        "isalnum" => all(char::is_alphanumeric).into(),
        "isalpha" => all(char::is_alphabetic).into(),
        "isascii" => text.is_ascii().into(),
        _ => return Err(unknown()),
    })
}

pub(crate) fn capitalize(text: &str) -> String {
    let mut characters = text.chars();
    let first = characters.next().map(|first| first.to_uppercase().collect::<String>()).unwrap_or_default();
    first + &characters.as_str().to_lowercase()
}

/// Implements `str.title`, in which letters continue a word: its first letter becomes upper case, every other lower case.
pub(super) fn title(text: &str, continues: impl Fn(char) -> bool) -> String {
    let mut titled = String::with_capacity(text.len());
    let mut inside = false;
    for character in text.chars() {
        if inside {
            titled.extend(character.to_lowercase());
        } else {
            titled.extend(character.to_uppercase());
        }
        inside = continues(character);
    }
    titled
}

fn swap_case(text: &str) -> String {
    let mut swapped = String::with_capacity(text.len());
    for character in text.chars() {
        if character.is_uppercase() {
            swapped.extend(character.to_lowercase());
        } else {
            swapped.extend(character.to_uppercase());
        }
    }
    swapped
}

/// Implements `strip`, `lstrip` and `rstrip`, of white space or of a set of characters.
fn strip(text: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    let (set,): (Option<&str>,) = from_args(args)?;
    let strips = |character: char| set.map_or_else(|| is_space(character), |set| set.contains(character));
    Ok(match method {
        "lstrip" => text.trim_start_matches(strips),
        "rstrip" => text.trim_end_matches(strips),
        _ => text.trim_matches(strips),
    }
    .into())
}

fn split(text: &str, args: &[Value], from_right: bool) -> Result<Value, Error> {
    let (separator, most, named): (Option<Value>, Option<i64>, Kwargs) = from_args(args)?;
    let separator = separator.or(named.get("sep")?).filter(|separator| !separator.is_none());
    let most = most.or(named.get("maxsplit")?).and_then(|most| usize::try_from(most).ok());
    named.assert_all_used()?;
    let Some(separator) = separator else {
        return Ok(split_space(text, most, from_right).into_iter().map(Value::from).collect::<Vec<_>>().into());
    };
    let separator = separator.as_str().ok_or_else(|| failed("split by no string"))?;
    if separator.is_empty() {
        return Err(failed("empty separator"));
    }
    let most = most.map_or(usize::MAX, |most| most.saturating_add(1));
    let mut parts: Vec<&str> =
        if from_right { text.rsplitn(most, separator).collect() } else { text.splitn(most, separator).collect() };
    if from_right {
        parts.reverse();
    }
    Ok(parts.into_iter().map(Value::from).collect::<Vec<_>>().into())
}

/// Implements `split` without a separator: splits at runs of white space, ignoring those at the ends.
fn split_space(text: &str, most: Option<usize>, from_right: bool) -> Vec<&str> {
    let mut parts = Vec::new();
    let mut rest = text.trim_matches(is_space);
    while !rest.is_empty() {
        let cut = if most == Some(parts.len()) {
            None
        } else if from_right {
            rest.rfind(is_space)
        } else {
            rest.find(is_space)
        };
        let Some(cut) = cut else {
            // After the last split Python keeps the white space at the far end.
            parts.push(rest);
            break;
        };
        if from_right {
            let width = rest[cut..].chars().next().map_or(0, char::len_utf8);
            parts.push(&rest[cut + width..]);
            rest = rest[..cut].trim_end_matches(is_space);
        } else {
            parts.push(&rest[..cut]);
            rest = rest[cut..].trim_start_matches(is_space);
        }
    }
    if from_right {
        parts.reverse();
    }
    parts
}

fn split_lines(text: &str, args: &[Value]) -> Result<Value, Error> {
    let (keep, named): (Option<bool>, Kwargs) = from_args(args)?;
    let keep = keep.or(named.get("keepends")?).unwrap_or(false);
    let ends = |character: char| {
        matches!(character, '\n' | '\r' | '\u{b}' | '\u{c}' | '\u{1c}'..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}')
    };
    let mut lines = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let Some(end) = rest.find(ends) else {
            lines.push(Value::from(rest));
            break;
        };
        let width =
            if rest[end..].starts_with("\r\n") { 2 } else { rest[end..].chars().next().map_or(0, char::len_utf8) };
        lines.push(Value::from(&rest[..if keep { end + width } else { end }]));
        rest = &rest[end + width..];
    }
    Ok(lines.into())
}

fn replace(text: &str, args: &[Value]) -> Result<Value, Error> {
    let (old, new, count): (&str, &str, Option<i64>) = from_args(args)?;
    // A negative count means all, as in Python.
    let count = count.and_then(|count| usize::try_from(count).ok()).unwrap_or(usize::MAX);
    if new.len() > old.len() {
        let places = text.matches(old).take(count).count();
        check_size(text.len().saturating_add(places.saturating_mul(new.len())))?;
    }
    Ok(text.replacen(old, new, count).into())
}

fn join(separator: &str, args: &[Value]) -> Result<Value, Error> {
    let (items,): (&Value,) = from_args(args)?;
    let mut text = String::new();
    for (index, item) in items.try_iter()?.enumerate() {
        let Some(item) = item.as_str() else {
            return Err(failed(format!("join: item {index} is a {}, not a string", item.kind())));
        };
        if index > 0 {
            text.push_str(separator);
        }
        text.push_str(item);
        check_size(text.len())?;
    }
    Ok(text.into())
}

/// Implements `startswith` and `endswith` with one string or several.
fn affix(args: &[Value], holds: impl Fn(&str) -> bool) -> Result<Value, Error> {
    let (affix,): (&Value,) = from_args(args)?;
    if let Some(affix) = affix.as_str() {
        return Ok(holds(affix).into());
    }
    for affix in affix.try_iter()? {
        if holds(affix.as_str().ok_or_else(|| failed("startswith and endswith take strings"))?) {
            return Ok(true.into());
        }
    }
    Ok(false.into())
}

fn partition(text: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    let (separator,): (&str,) = from_args(args)?;
    if separator.is_empty() {
        return Err(failed("empty separator"));
    }
    let parts = if method == "partition" {
        text.split_once(separator).map_or([text, "", ""], |(before, after)| [before, separator, after])
    } else {
        text.rsplit_once(separator).map_or(["", "", text], |(before, after)| [before, separator, after])
    };
    Ok(parts.into_iter().map(Value::from).collect::<Vec<_>>().into())
}

/// Implements `find`, `rfind`, `index` and `rindex`, in characters.
fn find(text: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    let (what, start): (&str, Option<usize>) = from_args(args)?;
    let skipped = text.char_indices().nth(start.unwrap_or(0)).map_or(text.len(), |(byte, _)| byte);
    let byte = if method.starts_with('r') { text[skipped..].rfind(what) } else { text[skipped..].find(what) };
    match byte {
        Some(byte) => Ok(text[..skipped + byte].chars().count().into()),
        None if method.ends_with("index") => Err(failed("substring not found")),
        None => Ok((-1).into()),
    }
}

fn pad(text: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    let (width, fill): (usize, Option<&str>) = from_args(args)?;
    let missing = width.saturating_sub(text.chars().count());
    let fill = fill.unwrap_or(if method == "zfill" { "0" } else { " " });
    check_size(missing.saturating_mul(fill.len()))?;
    let sign = text.starts_with(['+', '-']) && method == "zfill";
    let (sign, text) = text.split_at(usize::from(sign));
    let before = match method {
        "ljust" => 0,
        // Python puts the odd character on the left if the width is odd.
        "center" => missing / 2 + (missing & width & 1),
        _ => missing,
    };
    Ok(format!("{sign}{}{text}{}", fill.repeat(before), fill.repeat(missing - before)).into())
}
