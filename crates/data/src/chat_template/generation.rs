//! Rewrites a template's source for the engine: `{% generation %}` blocks become calls, every `set` becomes bounded.
//!
//! Reads the source as Jinja's own lexer does (texts, comments, raw blocks, strings inside tags), so that nothing that
//! only looks like a tag is touched; lines keep their numbers. Gives up custom delimiters, which no chat template has.

use minijinja::value::Kwargs;
use minijinja::{Error, State, Value};

/// Marks around a `{% generation %}` block while rendering: two code points that Unicode promises never to assign.
pub(crate) const BLOCK_START: char = '\u{FDD0}';
pub(crate) const BLOCK_END: char = '\u{FDD1}';

/// What a `{% generation %}` block became: its body between marks.
pub(crate) fn generation(state: &State<'_, '_>, arguments: Kwargs) -> Result<String, Error> {
    let body = arguments.get::<Value>("caller")?.call(state, &[])?;
    Ok(format!("{BLOCK_START}{body}{BLOCK_END}"))
}

/// The source that the engine gets, and whether it has generation blocks.
pub(crate) fn rewrite(source: &str) -> (String, bool) {
    let mut rewritten = String::with_capacity(source.len() + source.len() / 4);
    let mut has_blocks = false;
    let mut rest = source;
    while let Some(start) = rest.find("{%").into_iter().chain(rest.find("{{")).chain(rest.find("{#")).min() {
        rewritten.push_str(&rest[..start]);
        rest = &rest[start..];
        let length = match &rest[..2] {
            "{#" => rest[2..].find("#}").map(|end| end + 4),
            "{{" => tag_length(rest, "}}"),
            _ => tag_length(rest, "%}"),
        };
        // A tag without an end: the engine says so, with the line.
        let Some(length) = length else { break };
        let tag = &rest[..length];
        rest = &rest[length..];
        if !tag.starts_with("{%") {
            rewritten.push_str(tag);
            continue;
        }
        let body = &tag[2..length - 2];
        let inner = body.trim_matches(['-', '+']).trim();
        match inner {
            "generation" => {
                has_blocks = true;
                rewritten.push_str(&tag.replacen("generation", "call firebrick_generation()", 1));
            }
            "endgeneration" => rewritten.push_str(&tag.replacen("endgeneration", "endcall", 1)),
            "raw" => {
                rewritten.push_str(tag);
                let end = rest.find("endraw").unwrap_or(rest.len());
                rewritten.push_str(&rest[..end]);
                rest = &rest[end..];
            }
            _ => rewritten.push_str(&bounded_set(tag, inner).unwrap_or_else(|| tag.to_owned())),
        }
    }
    rewritten.push_str(rest);
    (rewritten, has_blocks)
}

/// Bytes of the tag at the start of `rest`, its end included. Ends inside strings do not count.
fn tag_length(rest: &str, end: &str) -> Option<usize> {
    let mut quote = None;
    let mut escaped = false;
    for (index, character) in rest.char_indices().skip(2) {
        match quote {
            Some(_) if escaped => escaped = false,
            Some(_) if character == '\\' => escaped = true,
            Some(open) if character == open => quote = None,
            Some(_) => {}
            None if matches!(character, '"' | '\'') => quote = Some(character),
            None if rest[index..].starts_with(end) => return Some(index + end.len()),
            None => {}
        }
    }
    None
}

/// `{% set target = value %}` with the value passed through the filter that bounds it. `None` if it is no such tag.
fn bounded_set(tag: &str, inner: &str) -> Option<String> {
    let assignment = inner.strip_prefix("set").filter(|rest| rest.starts_with(char::is_whitespace))?;
    let (target, value) = assignment.split_once('=')?;
    let is_target = |character: char| character.is_alphanumeric() || "_.,() \t\r\n".contains(character);
    if !target.chars().all(is_target) {
        return None;
    }
    let at = tag.find(assignment)? + target.len() + 1;
    let (before, after) = tag.split_at(at);
    Some(format!("{before}({value})|firebrick_bounded{}", &after[value.len()..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_tags_are_rewritten() {
        let source = "{# {% generation %} #}{{ '{% set a = 1 %}' }}{% raw %}{% set b = 2 %}{% endraw %}set c = 3";
        assert_eq!(rewrite(source), (source.to_owned(), false));
    }

    #[test]
    fn sets_are_bounded_and_blocks_become_calls() {
        let (rewritten, has_blocks) = rewrite("{%- set ns.a = b == '%}' -%}{%+ generation -%}x{%- endgeneration %}");
        assert_eq!(
            rewritten,
            "{%- set ns.a =( b == '%}')|firebrick_bounded -%}{%+ call firebrick_generation() -%}x{%- endcall %}"
        );
        assert!(has_blocks);
    }

    #[test]
    fn set_blocks_and_open_tags_stay_as_they_are() {
        for source in
            ["{% set x %}a = b{% endset %}", "{% set x | replace(a='b') %}{% endset %}", "{% set x = 1", "{{ 'a"]
        {
            assert_eq!(rewrite(source).0, source);
        }
    }
}
