//! Translates `{% generation %}` blocks, which the engine does not know. Their tags become those of a `{% filter %}` that writes the body between
//! marks, around a `{% with %}` that ends the scope of what the body sets.
//!
//! As the body of a `{% call %}`, which transformers uses, it would not see every variable: the engine (minijinja 2.24) does not find those that are
//! only sliced, only assigned to (`{% set ns.a = b %}`), or `loop` at the beginning of a loop.
//!
//! Reads the source as Jinja's lexer does (texts, comments, raw blocks, strings inside tags), so that only real tags
//! change; lines keep their numbers. Not supported: custom delimiters, which no chat template has.

use crate::text_marks::{BLOCK_END, BLOCK_START};

/// The filter that replaces `{% generation %}`.
pub(super) const FILTER: &str = "firebrick_generation";

/// Writes the body of a block between marks.
pub(super) fn generation(body: &str) -> String {
    format!("{BLOCK_START}{body}{BLOCK_END}")
}

/// Returns the source for the engine, and whether it has generation blocks.
pub(super) fn rewrite(source: &str) -> (String, bool) {
    let mut text = String::with_capacity(source.len() + 256);
    let (mut has_blocks, mut rest) = (false, source);
    while let Some(start) = next_tag(rest) {
        text.push_str(&rest[..start]);
        rest = &rest[start..];
        // If a tag has no end, the engine reports it with the line.
        let Some(length) = tag_length(rest) else { break };
        let (tag, after) = rest.split_at(length);
        rest = after;
        match keyword(tag) {
            "generation" => {
                has_blocks = true;
                text.push_str(&tag.replacen("generation", &format!("filter {FILTER} %}}{{% with"), 1));
            }
            "endgeneration" => text.push_str(&tag.replacen("endgeneration", "endwith %}{% endfilter", 1)),
            "raw" => {
                let end = raw_length(rest);
                text.push_str(tag);
                text.push_str(&rest[..end]);
                rest = &rest[end..];
            }
            _ => text.push_str(tag),
        }
    }
    text.push_str(rest);
    (text, has_blocks)
}

fn next_tag(text: &str) -> Option<usize> {
    text.as_bytes().windows(2).position(|two| two[0] == b'{' && matches!(two[1], b'%' | b'{' | b'#'))
}

/// Returns the length in bytes of the tag at the start of `rest`, its end included. Ends inside strings and brackets do not count.
fn tag_length(rest: &str) -> Option<usize> {
    let end = match &rest[..2] {
        "{#" => return rest[2..].find("#}").map(|end| end + 4),
        "{{" => b"}}",
        _ => b"%}",
    };
    let bytes = rest.as_bytes();
    let (mut quote, mut escaped, mut depth) = (None, false, 0_isize);
    for (index, &byte) in bytes.iter().enumerate().skip(2) {
        match quote {
            Some(_) if escaped => escaped = false,
            Some(_) if byte == b'\\' => escaped = true,
            Some(open) if byte == open => quote = None,
            Some(_) => {}
            None if depth == 0 && bytes[index..].starts_with(end) => return Some(index + end.len()),
            None => match byte {
                b'"' | b'\'' => quote = Some(byte),
                b'(' | b'[' | b'{' => depth += 1,
                b')' | b']' | b'}' => depth -= 1,
                _ => {}
            },
        }
    }
    None
}

/// Returns the inside of a `{% %}` tag, without the signs that trim around it; empty for other tags.
fn keyword(tag: &str) -> &str {
    let inside = tag.strip_prefix("{%").and_then(|tag| tag.strip_suffix("%}")).unwrap_or_default();
    inside.trim_start_matches(['-', '+']).trim_end_matches(['-', '+']).trim()
}

/// Returns the number of bytes before the tag that ends a raw block; the whole length if there is none.
fn raw_length(text: &str) -> usize {
    let mut from = 0;
    while let Some(at) = text[from..].find("{%").map(|at| from + at) {
        let inside = text[at + 2..].trim_start_matches(['-', '+']).trim_start();
        if let Some(rest) = inside.strip_prefix("endraw")
            && rest.trim_start().trim_start_matches(['-', '+']).starts_with("%}")
        {
            return at;
        }
        from = at + 2;
    }
    text.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_become_filters_and_keep_their_trimming() {
        let source = "{%- generation -%}x{%+ endgeneration %}{{ '{% generation %}' }}";
        let expected =
            "{%- filter firebrick_generation %}{% with -%}x{%+ endwith %}{% endfilter %}{{ '{% generation %}' }}";
        assert_eq!(rewrite(source), (expected.to_owned(), true));
    }

    #[test]
    fn everything_but_generation_tags_stays_unchanged_also_tags_without_an_end() {
        let sources = [
            "{# {% generation %} #}{{ '{% generation %}' }}{% raw %}{% generation %}{% endraw %}generation",
            "{%- raw -%}endraw {% endraw {{ a * b }} {%- endraw -%} {{ {'a': b} }}",
            "{% set generation = 1 %}{{ generation }}{% if generation == '%}' %}{% endif %}",
        ];
        for source in sources {
            assert_eq!(rewrite(source), (source.to_owned(), false));
        }
        for source in ["{% set x = 1", "{{ 'a", "{#", "{{", "{%%}", "{{}}", "{%-%}", "{{-}}", "{%--%}", "{", ""] {
            assert_eq!(rewrite(source).0, source);
        }
    }
}
