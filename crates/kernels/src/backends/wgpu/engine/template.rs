//! Sources of kernels: WGSL with a few lines that are decided when a program is built.
//!
//! - `#if NAME` ... `#else` ... `#end` keeps lines if the constant is there and not 0.
//! - `#for i in NAME` ... `#end` repeats lines with `{i}` replaced by 0, 1, ...
//! - `#use NAME` is replaced by a text that several templates share.
//! - `{NAME}` is replaced by the constant's value.
//! - `@binding(_)` numbers the bindings that are kept, in order; `READ` is `read`, or `read_write` where an operand shares its memory with a result.
//!
//! Trade-off: no expressions; what depends on two constants is a constant of its own.

use std::collections::BTreeMap;

/// Values by name, of which a program is built.
pub(crate) type Constants = BTreeMap<&'static str, u32>;

/// Texts that templates share, by name.
const SHARED: [(&str, &str); 5] = [
    ("largest", include_str!("largest.wgsl")),
    ("half_rows", include_str!("half_rows.wgsl")),
    ("document", include_str!("../attention/document.wgsl")),
    ("tile_order", include_str!("../linear/tile_order.wgsl")),
    ("products", include_str!("../linear/products.wgsl")),
];

/// Returns the text of a program.
///
/// # Panics
/// If the template uses a name that has no value.
pub(super) fn expand(template: &str, constants: &Constants, are_aliased: bool) -> String {
    let lines: Vec<&str> = template.lines().collect();
    let mut text = String::with_capacity(2 * template.len());
    let values = constants.iter().map(|(&name, &value)| (name.to_owned(), value)).collect();
    block(&lines, &values, &mut text);
    let access = if are_aliased { "read_write" } else { "read" };
    let mut numbered = String::with_capacity(text.len());
    let mut rest = text.as_str();
    for binding in 0.. {
        let Some((before, after)) = rest.split_once("@binding(_)") else { break };
        numbered.push_str(before);
        numbered.push_str(&format!("@group(0) @binding({binding})"));
        rest = after;
    }
    numbered.push_str(rest);
    numbered.replace("READ>", &format!("{access}>"))
}

/// Returns for each binding whether it is only read.
pub(super) fn bindings(text: &str) -> Vec<bool> {
    let lines = text.match_indices("@binding(").map(|(at, _)| text[at..].lines().next().unwrap_or_default());
    lines.map(|line| !line.contains("read_write>")).collect()
}

fn block(lines: &[&str], values: &BTreeMap<String, u32>, text: &mut String) {
    let mut index = 0;
    while index < lines.len() {
        let is_command = lines[index].trim_start().starts_with('#');
        let mut line = String::new();
        substitute(lines[index], values, &mut line);
        let command = is_command.then(|| line.trim_start()[1..].split_whitespace().collect::<Vec<_>>());
        match command.as_deref() {
            Some(["if", name]) => {
                let (end, other) = ends(lines, index);
                let is_kept = values.get(*name).is_some_and(|&value| value != 0);
                match (is_kept, other) {
                    (true, other) => block(&lines[index + 1..other.unwrap_or(end)], values, text),
                    (false, Some(other)) => block(&lines[other + 1..end], values, text),
                    (false, None) => {}
                }
                index = end;
            }
            Some(["for", variable, "in", name]) => {
                let (end, _) = ends(lines, index);
                let count = *values.get(*name).unwrap_or_else(|| panic!("the template has no {name}"));
                for value in 0..count {
                    let mut inner = values.clone();
                    inner.insert((*variable).to_owned(), value);
                    block(&lines[index + 1..end], &inner, text);
                }
                index = end;
            }
            Some(["use", name]) => {
                let (_, shared) = SHARED.iter().find(|(known, _)| known == name).expect("a text that templates share");
                block(&shared.lines().collect::<Vec<_>>(), values, text);
            }
            Some(other) => panic!("a template has no command {other:?}"),
            None => text.push_str(&line),
        }
        index += 1;
    }
}

/// Returns the line of a command's `#end`, and of its `#else`.
fn ends(lines: &[&str], start: usize) -> (usize, Option<usize>) {
    let (mut depth, mut other) = (0, None);
    for (index, line) in lines.iter().enumerate().skip(start) {
        let line = line.trim_start();
        if line.starts_with("#if") || line.starts_with("#for") {
            depth += 1;
        } else if line.starts_with("#else") && depth == 1 {
            other = Some(index);
        } else if line.starts_with("#end") {
            depth -= 1;
            if depth == 0 {
                return (index, other);
            }
        }
    }
    panic!("`{}` has no #end", lines[start])
}

fn substitute(line: &str, values: &BTreeMap<String, u32>, text: &mut String) {
    let mut rest = line;
    while let Some(open) = rest.find('{') {
        let name = rest[open + 1..].split('}').next().unwrap_or_default();
        let value = values.get(name).filter(|_| rest[open + 1..].len() > name.len());
        match value {
            Some(value) => {
                text.push_str(&rest[..open]);
                text.push_str(&value.to_string());
                rest = &rest[open + name.len() + 2..];
            }
            None => {
                text.push_str(&rest[..=open]);
                rest = &rest[open + 1..];
            }
        }
    }
    text.push_str(rest);
    text.push('\n');
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn templates_choose_repeat_and_number() {
        let template = "@binding(_) var<storage, READ> x: array<f32>;\n#if BIAS\n@binding(_) var<storage, READ> b: array<f32>;\n#else\nno\n#end\n\
                        @binding(_) var<storage, read_write> y: array<f32>;\n#for i in N\n#for j in N\nc_{i}_{j} {N}u {\n#end\n#end";
        let text = expand(template, &Constants::from([("BIAS", 0), ("N", 2)]), false);
        assert!(
            text.contains("no")
                && !text.contains(" b:")
                && text.contains("@group(0) @binding(1) var<storage, read_write> y")
        );
        assert!(text.contains("c_1_0 2u {"), "{text}");
        assert_eq!(bindings(&text), [true, false]);
        let text = expand(template, &Constants::from([("BIAS", 1), ("N", 0)]), true);
        assert_eq!(bindings(&text), [false; 3]);
    }
}
