//! Rule `launches`: every CUDA kernel of `kernels` is launched by name from Rust.
//!
//! Rationale: a kernel that nothing launches is compiled by NVRTC at every start, is not covered by the self-test, and looks as if it were in use.
//! The compiler cannot see it, because kernels are looked up by name at run time. Launch it or delete it.
//!
//! Trade-off: a kernel counts as launched if its name is a string literal of non-test code of the backend; whether that
//! code is ever reached is not checked.

use std::collections::HashSet;
use std::sync::LazyLock;

use regex::Regex;

use super::Finding;
use super::text::{Source, line_of, pattern};

/// Folder of the CUDA sources and the code that launches them.
const FOLDER: &str = "crates/kernels/src/backends/cuda/";

/// A kernel's declaration: `KERNEL` or `__global__`, words and attributes, and the name before a parenthesis.
const DECLARED: &str = r"\b(?:KERNEL|__global__)\b(?:\s+(?:__\w+\s*\([^)]*\)|\w+))*?\s+([A-Za-z]\w*)\s*\(";

/// The definition of `KERNEL` itself.
static KERNEL: LazyLock<Regex> = LazyLock::new(|| pattern("(?m)^#define KERNEL .*"));

static DECLARATION: LazyLock<Regex> = LazyLock::new(|| pattern(DECLARED));

/// A macro whose body declares a kernel: its name, its parameters and the kernel's name.
static MACRO: LazyLock<Regex> = LazyLock::new(|| pattern(&format!(r"#define\s+(\w+)\(([^)]*)\)\s+{DECLARED}")));

/// Collects kernels and literals file by file.
#[derive(Default)]
pub(super) struct Launches {
    kernels: Vec<(String, usize, String)>,
    literals: HashSet<String>,
}

impl Launches {
    /// Records what the file at `path` defines or launches.
    pub(super) fn add(&mut self, path: &str, text: &str, source: &Source) {
        if !path.starts_with(FOLDER) {
            return;
        }
        if path.ends_with(".cu") {
            self.kernels.extend(kernels(&source.code).into_iter().map(|(line, name)| (path.to_owned(), line, name)));
        } else if path.ends_with(".rs") {
            // Unit tests are at the foot of a file.
            let tests = text.find("\n#[cfg(test)]\nmod ").unwrap_or(text.len());
            self.literals.extend(Source::read(&text[..tests]).strings);
        }
    }

    /// Reports the kernels that nothing launches.
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

/// Finds lines and names of the kernels that `code` defines, directly or through a macro.
fn kernels(code: &str) -> Vec<(usize, String)> {
    let code = KERNEL.replace_all(code, "").replace('\\', " ");
    let named = DECLARATION.captures_iter(&code).filter_map(|found| found.get(1));
    let mut found: Vec<_> = named.map(|name| (line_of(&code, name.start()), name.as_str().to_owned())).collect();
    for maker in MACRO.captures_iter(&code) {
        let [name, parameters, kernel] = maker.extract().1;
        let Some(place) = parameters.split(',').position(|parameter| parameter.trim() == kernel) else { continue };
        found.retain(|(_, declared)| declared != kernel);
        let calls = pattern(&format!(r"(?m)^[ \t]*{name}[ \t]*\(([^)]*)\)"));
        for arguments in calls.captures_iter(&code).filter_map(|call| call.get(1)) {
            let argument = arguments.as_str().split(',').nth(place);
            found.extend(argument.map(|name| (line_of(&code, arguments.start()), name.trim().to_owned())));
        }
    }
    found
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
        let rust = "fn f() { launch(\"copy\") } // \"add\"\n#[cfg(test)]\nmod tests { const A: &str = \"fill\"; }";
        let found = found(rust, cuda);
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
