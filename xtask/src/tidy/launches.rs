//! Rule `launches`: every CUDA kernel of `kernels` is launched by name from Rust.
//!
//! Rationale: a kernel that nothing launches is compiled by NVRTC at every start, is not covered by the self-test, and
//! looks as if it were in use. The compiler cannot see it, because kernels are looked up by name at run time. Either wire
//! it or delete it.
//!
//! Trade-off: a kernel counts as launched if its name is a string literal of non-test code of the backend; whether that
//! code is ever reached is not checked.

use std::collections::HashSet;

use super::finding::Finding;
use super::lexer::{Source, is_name};

/// Where the CUDA sources and the code that launches them are.
const FOLDER: &str = "crates/kernels/src/backends/cuda/";

/// Collects kernels and literals file by file.
#[derive(Default)]
pub(super) struct Launches {
    kernels: Vec<(String, usize, String)>,
    literals: HashSet<String>,
}

impl Launches {
    /// Notes what the file at `path` defines or launches.
    pub(super) fn add(&mut self, path: &str, text: &str, source: &Source) {
        if !path.starts_with(FOLDER) {
            return;
        }
        if path.ends_with(".cu") {
            self.kernels.extend(kernels(&source.code).into_iter().map(|(line, name)| (path.to_owned(), line, name)));
        } else if path.ends_with(".rs") {
            self.literals.extend(Source::read(before_tests(text)).strings);
        }
    }

    /// The kernels that nothing launches.
    pub(super) fn check(&self) -> Vec<Finding> {
        let unlaunched = self.kernels.iter().filter(|(_, _, name)| !self.literals.contains(name));
        let report = |(path, line, name): &(String, usize, String)| {
            let message =
                format!("kernel `{name}` is never launched: no Rust file of {FOLDER} names it. Wire it or delete it");
            Finding::new("launches", path, *line, message)
        };
        unlaunched.map(report).collect()
    }
}

/// `text` up to its unit tests, which are at the foot of a file.
fn before_tests(text: &str) -> &str {
    text.find("\n#[cfg(test)]\nmod ").map_or(text, |end| &text[..end])
}

/// Lines and names of the kernels that `code` defines, directly or through a macro.
fn kernels(code: &str) -> Vec<(usize, String)> {
    // A macro's body counts as the line of its `#define`.
    let joined = code.replace("\\\n", "\u{2} ");
    let (mut found, mut macros) = (Vec::new(), Vec::new());
    let mut line = 1;
    for text in joined.split('\n') {
        let definition = text.trim_start().strip_prefix("#define ");
        match definition {
            Some(definition) => macros.extend(kernel_macro(definition)),
            None => found.extend(invoked(text, &macros).map(|name| (line, name))),
        }
        line += 1 + text.matches('\u{2}').count();
    }
    found.extend(declared(code));
    found.sort();
    found.retain(|(_, name)| !macros.iter().any(|(_, parameter, _)| parameter == name));
    found
}

/// Lines and names in `KERNEL ... name(` and `extern "C" __global__ ... name(`.
fn declared(code: &str) -> Vec<(usize, String)> {
    let marks = ["KERNEL", "__global__"].into_iter().flat_map(|mark| code.match_indices(mark));
    let whole = marks.map(|(at, mark)| (at, at + mark.len())).filter(|(at, end)| {
        let line_start = code[..*at].rfind('\n').map_or(0, |newline| newline + 1);
        let is_define = code[line_start..].trim_start().starts_with("#define KERNEL");
        !is_define && !code[..*at].ends_with(is_name) && !code[*end..].starts_with(is_name)
    });
    let named = whole.filter_map(|(_, end)| {
        let (offset, name) = name_after(&code[end..])?;
        Some((line_at(code, end + offset), name))
    });
    named.collect()
}

fn line_at(text: &str, at: usize) -> usize {
    text[..at].matches('\n').count() + 1
}

/// The function's name after `KERNEL`: the first identifier before a parenthesis that is no attribute, with its offset.
fn name_after(text: &str) -> Option<(usize, String)> {
    let mut at = 0;
    loop {
        let start = at + text[at..].find(is_name)?;
        let length = text[start..].find(|c| !is_name(c))?;
        let name = &text[start..start + length];
        at = start + length;
        if !text[at..].trim_start().starts_with('(') {
            continue;
        }
        if !name.starts_with("__") {
            return Some((start, name.to_owned()));
        }
        at += text[at..].find(')')? + 1;
    }
}

/// Name, name parameter and its position of a macro whose body defines a kernel named by a parameter.
fn kernel_macro(definition: &str) -> Option<(String, String, usize)> {
    let (name, rest) = definition.split_once('(')?;
    let (parameters, body) = rest.split_once(')')?;
    let after = body.split_once("KERNEL").or_else(|| body.split_once("__global__"))?.1;
    let (_, kernel) = name_after(&after.replace('\u{2}', " "))?;
    let position = parameters.split(',').position(|parameter| parameter.trim() == kernel)?;
    Some((name.trim().to_owned(), kernel, position))
}

/// Names of kernels in invocations of `macros` on a line.
fn invoked<'a>(line: &'a str, macros: &'a [(String, String, usize)]) -> impl Iterator<Item = String> + 'a {
    macros.iter().filter_map(|(name, _, position)| {
        let arguments = line.trim_start().strip_prefix(name.as_str())?.trim_start().strip_prefix('(')?;
        let argument = arguments.split([',', ')']).nth(*position)?;
        Some(argument.trim().to_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(rust: &str, cuda: &str) -> Vec<String> {
        let mut launches = Launches::default();
        for (name, text) in [("launch.rs", rust), ("a.cu", cuda)] {
            launches.add(&format!("{FOLDER}{name}"), text, &Source::read(text));
        }
        launches.check().iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_kernel_that_no_literal_names_is_found() {
        let cuda = "#define KERNEL extern \"C\" __global__ void\nKERNEL __launch_bounds__(256, 2)\nadd(float *x) { f(x); }\n\
                    KERNEL copy(float *x) {}\nextern \"C\" __global__ void fill(int n) {}\n// KERNEL old(\n";
        let found = found(
            "fn f() { launch(\"copy\") } // \"add\"\n#[cfg(test)]\nmod tests { const A: &str = \"fill\"; }",
            cuda,
        );
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found[0].contains("a.cu:3") && found[0].contains("`add`") && found[1].contains("`fill`"), "{found:?}");
    }

    #[test]
    fn kernels_of_a_macro_are_named_where_it_is_invoked() {
        let cuda = "#define MAKE(NAME, N) \\\n    KERNEL __launch_bounds__(N) NAME( \\\n int n) {}\nMAKE(a_16, 16)\nMAKE(a_32, 32)\n";
        let found = found("const A: &str = \"a_16\";", cuda);
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].contains("a.cu:5") && found[0].contains("`a_32`"), "{found:?}");
    }
}
