//! Reads from one Rust file what it declares, what it imports, and which paths it names: the raw material of the module
//! graph in `modules`.
//!
//! Trade-off: tokens, not a syntax tree. Items of inline modules count as items of the file, names that a macro creates
//! are not seen, and a name that a function shadows is taken for the imported one.

use std::collections::{HashMap, HashSet};

use super::lexer::is_name;

/// One name that a `use` brings into a file.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Import {
    /// Name in this file; `*` for a glob.
    pub(super) name: String,
    /// Path as written, without `as`; a glob's path is that of the module.
    pub(super) path: Vec<String>,
    /// `pub use` of any visibility.
    pub(super) is_reexport: bool,
    /// Line from 1.
    pub(super) line: usize,
}

/// The names in one file.
#[derive(Debug, Default)]
pub(super) struct FileNames {
    /// Items that are defined here, of any visibility.
    pub(super) items: HashSet<String>,
    /// Macros with `#[macro_export]`: they belong to the root of the crate, wherever they are defined.
    pub(super) exported_macros: Vec<String>,
    /// Everything that `use` brings in.
    pub(super) imports: Vec<Import>,
    /// Paths of two or more segments in code, with their lines.
    pub(super) paths: Vec<(Vec<String>, usize)>,
    /// How often each identifier occurs.
    pub(super) words: HashMap<String, usize>,
}

/// Keywords that are followed by the name of an item.
const ITEM_KEYWORDS: [&str; 10] =
    ["fn", "struct", "enum", "trait", "type", "const", "static", "union", "mod", "macro_rules"];

impl FileNames {
    /// Reads `code`: text without comments, literals and test items.
    pub(super) fn read(code: &str) -> Self {
        let tokens = tokens(code);
        let mut reader = Reader { names: Self::default(), tokens: &tokens, modules: Vec::new(), depth: 0 };
        let mut at = 0;
        while at < tokens.len() {
            at = reader.step(at);
        }
        reader.names
    }
}

/// An identifier, `::`, or one other character, with its line.
type Token<'a> = (&'a str, usize);

fn tokens(code: &str) -> Vec<Token<'_>> {
    let mut found = Vec::new();
    for (index, line) in code.lines().enumerate() {
        let mut rest = line.trim_start();
        while let Some(first) = rest.chars().next() {
            let length = match first {
                c if is_name(c) => rest.find(|c| !is_name(c)).unwrap_or(rest.len()),
                ':' if rest.starts_with("::") => 2,
                c => c.len_utf8(),
            };
            found.push((&rest[..length], index + 1));
            rest = rest[length..].trim_start();
        }
    }
    found
}

struct Reader<'a> {
    names: FileNames,
    tokens: &'a [Token<'a>],
    /// Brace depths at which the inline modules around the current token began.
    modules: Vec<usize>,
    depth: usize,
}

impl Reader<'_> {
    fn text(&self, at: usize) -> &str {
        self.tokens.get(at).map_or("", |token| token.0)
    }

    /// Reads what begins at `at` and returns where to go on.
    fn step(&mut self, at: usize) -> usize {
        let (text, line) = self.tokens[at];
        match text {
            "{" => self.depth += 1,
            "}" => {
                self.depth = self.depth.saturating_sub(1);
                if self.modules.last() == Some(&self.depth) {
                    self.modules.pop();
                }
            }
            "use" => return self.use_statement(at, line),
            _ if ITEM_KEYWORDS.contains(&text) => self.item(at),
            _ if text.starts_with(|c: char| is_name(c) && !c.is_ascii_digit()) => return self.path(at, line),
            _ => {}
        }
        at + 1
    }

    /// Notes the item whose keyword is at `at`.
    fn item(&mut self, at: usize) {
        let is_macro = self.text(at) == "macro_rules";
        let name = self.text(if is_macro { at + 2 } else { at + 1 }).to_owned();
        if !name.starts_with(is_name) {
            return;
        }
        if self.text(at) == "mod" {
            match self.text(at + 2) {
                "{" => self.modules.push(self.depth),
                _ => return, // a file of its own
            }
        }
        let attribute = &self.tokens[at.saturating_sub(8)..at];
        if is_macro && attribute.iter().any(|token| token.0 == "macro_export") {
            self.names.exported_macros.push(name.clone());
        }
        self.names.items.insert(name);
    }

    /// Reads a path in code that starts at `at`; its end is where to go on.
    fn path(&mut self, at: usize, line: usize) -> usize {
        let mut segments = vec![self.text(at).to_owned()];
        let mut end = at + 1;
        while self.text(end) == "::" && self.text(end + 1).starts_with(|c: char| is_name(c)) {
            segments.push(self.text(end + 1).to_owned());
            end += 2;
        }
        for segment in &segments {
            *self.names.words.entry(segment.clone()).or_default() += 1;
        }
        let continues = at > 0 && matches!(self.text(at - 1), "::" | ".");
        if segments.len() > 1 && !continues {
            self.names.paths.extend(self.seen_from_file(segments).map(|path| (path, line)));
        }
        end
    }

    /// Reads the `use` at `at` up to its semicolon.
    fn use_statement(&mut self, at: usize, line: usize) -> usize {
        let before = at.checked_sub(1).map_or("", |before| self.text(before));
        // `impl Trait + use<'a>` is no import; `pub(super) use` ends its visibility with a parenthesis.
        if self.text(at + 1) == "<" {
            return at + 1;
        }
        let is_reexport = matches!(before, "pub" | ")");
        let mut found = Vec::new();
        let end = self.use_tree(at + 1, &mut Vec::new(), &mut found);
        for (name, path) in found {
            *self.names.words.entry(name.clone()).or_default() += 1;
            if let Some(path) = self.seen_from_file(path) {
                self.names.imports.push(Import { name, path, is_reexport, line });
            }
        }
        end
    }

    /// Reads one tree of a `use` after `prefix`; returns the index of the `,`, `}` or `;` that ends it.
    fn use_tree(&self, mut at: usize, prefix: &mut Vec<String>, found: &mut Vec<(String, Vec<String>)>) -> usize {
        let length = prefix.len();
        loop {
            match self.text(at) {
                "" | ";" | "," | "}" => break,
                "::" => at += 1,
                "*" => {
                    found.push(("*".to_owned(), prefix.clone()));
                    at += 1;
                }
                "{" => {
                    at += 1;
                    while !matches!(self.text(at), "" | "}" | ";") {
                        at = self.use_tree(at, prefix, found);
                        at += usize::from(self.text(at) == ",");
                    }
                    at += 1;
                }
                name => {
                    if name != "self" || prefix.is_empty() {
                        prefix.push(name.to_owned());
                    }
                    at += 1;
                    if self.text(at) == "as" {
                        found.push((self.text(at + 1).to_owned(), prefix.clone()));
                        at += 2;
                    } else if self.text(at) != "::" {
                        found.push((prefix.last().cloned().unwrap_or_default(), prefix.clone()));
                    }
                }
            }
        }
        prefix.truncate(length);
        at
    }

    /// `path` as it reads from the file's own module; `None` if it stays inside an inline module.
    fn seen_from_file(&self, path: Vec<String>) -> Option<Vec<String>> {
        let inside = self.modules.len();
        if inside == 0 {
            return Some(path);
        }
        let supers = path.iter().take_while(|segment| *segment == "super").count();
        match (supers, path.first().map(String::as_str)) {
            (0, Some("self")) => None,
            (0, _) => Some(path),
            (supers, _) if supers < inside => None,
            (supers, _) if supers == inside => {
                Some(std::iter::once("self".to_owned()).chain(path.into_iter().skip(supers)).collect())
            }
            _ => Some(path.into_iter().skip(inside).collect()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Imports as `name=path`.
    fn imports(code: &str) -> Vec<String> {
        let names = FileNames::read(code);
        names.imports.iter().map(|import| format!("{}={}", import.name, import.path.join("::"))).collect()
    }

    #[test]
    fn use_trees_are_expanded() {
        assert_eq!(imports("use crate::a::B;"), ["B=crate::a::B"]);
        assert_eq!(imports("use crate::{a::{self, B as C}, d};"), ["a=crate::a", "C=crate::a::B", "d=crate::d"]);
        assert_eq!(imports("use super::*; use ::std::fmt;"), ["*=super", "fmt=std::fmt"]);
        assert!(FileNames::read("pub(super) use a::B;").imports[0].is_reexport);
        assert!(!FileNames::read("fn f() {} use a::B;").imports[0].is_reexport);
    }

    #[test]
    fn paths_in_code_are_found_once() {
        let names = FileNames::read("fn f() -> crate::a::B {\n x.y::<u8>(); self::g(super::c::d) }");
        let paths: Vec<_> = names.paths.iter().map(|(path, line)| (path.join("::"), *line)).collect();
        assert_eq!(paths, [("crate::a::B".into(), 1), ("self::g".into(), 2), ("super::c::d".into(), 2)]);
    }

    #[test]
    fn items_of_the_file_are_known_and_module_files_are_none() {
        let names = FileNames::read("mod file; struct A; #[macro_export] macro_rules! m { } mod inline { fn g() {} }");
        let mut items: Vec<_> = names.items.iter().map(String::as_str).collect();
        items.sort_unstable();
        assert_eq!(items, ["A", "g", "inline", "m"]);
        assert_eq!(names.exported_macros, ["m"]);
    }

    #[test]
    fn super_in_an_inline_module_is_the_file_itself() {
        assert_eq!(imports("mod inner { use super::a; use super::super::b; }"), ["a=self::a", "b=super::b"]);
    }
}
