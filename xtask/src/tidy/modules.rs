//! The module graph of one crate: which file uses items of which other file.
//!
//! An edge goes to the file that defines the item. A path that ends at a re-export is followed to the definition; the module
//! files that re-export it get an edge too, from users outside of them: an import through `mod.rs` uses the folder, and the
//! folder uses what any file that it re-exports uses. Inside a folder, importing through its `mod.rs` is no edge to that,
//! and the root's re-exports are none. Naming a module (`use super::other;`) is no edge either; the items reached through it are.
//! Test code does not count.
//!
//! Trade-off: files are found by their place (`a.rs`, `a/mod.rs`); `#[path]` is not supported. An item that cannot be
//! found, such as one that a macro defines, counts as defined in the module that the path names.

use std::collections::{BTreeMap, HashMap, HashSet};

use super::uses::{FileNames, Import};

/// Maximum number of re-exports to follow before a path counts as unknown.
const MAX_REEXPORTS: usize = 12;

struct File {
    /// Path from the workspace root.
    path: String,
    /// Module path from the crate root, empty for the root itself.
    module: Vec<String>,
    names: FileNames,
}

/// The files of one crate and what they use from each other.
pub(super) struct ModuleGraph {
    files: Vec<File>,
    by_module: HashMap<Vec<String>, usize>,
    macros: HashMap<String, usize>,
}

/// The target of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Target {
    /// The module of this file.
    Module(usize),
    /// An item that this file defines.
    Item(usize),
}

impl ModuleGraph {
    /// Creates the graph of the crate whose `src` folder is `source_folder`, from its files by path.
    pub(super) fn new(source_folder: &str, files: BTreeMap<String, FileNames>) -> Self {
        let mut found: BTreeMap<Vec<String>, File> = BTreeMap::new();
        for (path, names) in files {
            let Some(module) = module_of(&path[source_folder.len() + 1..]) else { continue };
            // If a crate has a library and a program, the program names the library from outside.
            found.entry(module.clone()).or_insert(File { path, module, names });
        }
        let with_child = |file: &File, name: &String| [&file.module[..], std::slice::from_ref(name)].concat();
        let tests: HashSet<Vec<String>> = found
            .values()
            .flat_map(|file| file.names.test_modules.iter().map(move |name| with_child(file, name)))
            .collect();
        let is_test = |module: &[String]| (0..=module.len()).any(|end| tests.contains(&module[..end]));
        let files: Vec<File> = found.into_values().filter(|file| !is_test(&file.module)).collect();
        let by_module = files.iter().enumerate().map(|(index, file)| (file.module.clone(), index)).collect();
        let exported = |(index, file): (usize, &File)| {
            file.names.exported_macros.iter().map(|name| (name.clone(), index)).collect::<Vec<_>>()
        };
        let macros = files.iter().enumerate().flat_map(exported).collect();
        Self { files, by_module, macros }
    }

    /// Returns the number of files.
    pub(super) fn len(&self) -> usize {
        self.files.len()
    }

    /// Returns the path of a file from the workspace root.
    pub(super) fn path(&self, file: usize) -> &str {
        &self.files[file].path
    }

    /// Returns the module in the crate root that a file belongs to; `None` for the root itself.
    pub(super) fn top(&self, file: usize) -> Option<&str> {
        self.files[file].module.first().map(String::as_str)
    }

    /// Returns whether `child` is a module directly inside `parent`.
    pub(super) fn is_direct_child(&self, child: usize, parent: usize) -> bool {
        self.is_inside(child, parent) && self.files[child].module.len() == self.files[parent].module.len() + 1
    }

    /// Returns whether `inner` is a module anywhere below `outer`.
    pub(super) fn is_inside(&self, inner: usize, outer: usize) -> bool {
        let (inner, outer) = (&self.files[inner].module, &self.files[outer].module);
        inner.len() > outer.len() && inner.starts_with(outer)
    }

    /// Returns for every file the files that it uses, each with the line of the first use.
    pub(super) fn edges(&self) -> Vec<BTreeMap<usize, usize>> {
        (0..self.files.len()).map(|file| self.edges_of(file)).collect()
    }

    fn edges_of(&self, file: usize) -> BTreeMap<usize, usize> {
        let names = &self.files[file].names;
        let mut found: Vec<(usize, usize)> = Vec::new();
        for import in &names.imports {
            found.extend(self.used_by(file, import).into_iter().map(|target| (target, import.line)));
        }
        for (path, line) in &names.paths {
            let mut indexes = Vec::new();
            if let Some(Target::Item(target)) = self.resolve(file, path, 0, &mut indexes) {
                found.extend(self.with_indexes(file, target, indexes).map(|target| (target, *line)));
            }
        }
        let mut edges = BTreeMap::new();
        for (target, line) in found.into_iter().filter(|(target, _)| *target != file) {
            let first = edges.entry(target).or_insert(line);
            *first = line.min(*first);
        }
        edges
    }

    /// Returns the files whose items `file` uses through `import`.
    fn used_by(&self, file: usize, import: &Import) -> Vec<usize> {
        let File { module, names, .. } = &self.files[file];
        let mut indexes = Vec::new();
        let target = self.resolve(file, &import.path, 0, &mut indexes);
        let of_root = import.is_reexport && module.is_empty();
        if import.name != "*" {
            let Some(Target::Item(target)) = target else { return Vec::new() };
            let only_passed_on = of_root && names.words.get(&import.name).is_none_or(|count| *count < 2);
            return if only_passed_on { Vec::new() } else { self.with_indexes(file, target, indexes).collect() };
        }
        match target {
            Some(Target::Item(target)) => self.with_indexes(file, target, indexes).collect(),
            Some(Target::Module(inner)) if import.is_reexport && self.is_inside(inner, file) => {
                (!of_root).then_some(inner).into_iter().collect()
            }
            Some(Target::Module(module)) => {
                let used = names.words.keys().filter(|word| !names.items.contains(*word));
                let found = used.filter_map(|word| {
                    let mut indexes = vec![];
                    match self.lookup(module, word, 0, &mut indexes)? {
                        Target::Item(target) => Some(self.with_indexes(file, target, indexes)),
                        Target::Module(_) => None,
                    }
                });
                found.flatten().collect()
            }
            None => Vec::new(),
        }
    }

    /// Returns `target`, and the module files through which `file` reaches it, unless `file` is inside them.
    fn with_indexes(&self, file: usize, target: usize, indexes: Vec<usize>) -> impl Iterator<Item = usize> {
        let outside = indexes.into_iter().filter(move |index| !self.is_inside(file, *index));
        std::iter::once(target).chain(outside)
    }

    /// Resolves `path` in the module of `file`; `None` if it leads out of the crate. The files whose imports it follows go into `indexes`.
    fn resolve(&self, file: usize, path: &[String], followed: usize, indexes: &mut Vec<usize>) -> Option<Target> {
        let (first, mut rest) = path.split_first()?;
        let mut target = match first.as_str() {
            "crate" => Target::Module(*self.by_module.get(&Vec::new())?),
            "self" => Target::Module(file),
            "super" => Target::Module(self.parent(file)?),
            name => self.lookup(file, name, followed, indexes)?,
        };
        while let (Target::Module(module), Some((name, after))) = (target, rest.split_first()) {
            rest = after;
            target = match name.as_str() {
                "super" => Target::Module(self.parent(module)?),
                name => self.lookup(module, name, followed, indexes).unwrap_or_else(|| self.unknown(module, name)),
            };
        }
        Some(target)
    }

    /// Resolves a name that no file visibly defines: an exported macro, else an item that a macro defines in `module`.
    fn unknown(&self, module: usize, name: &str) -> Target {
        let exported = self.files[module].module.is_empty().then(|| self.macros.get(name)).flatten();
        Target::Item(exported.copied().unwrap_or(module))
    }

    fn parent(&self, file: usize) -> Option<usize> {
        let module = &self.files[file].module;
        self.by_module.get(&module[..module.len().checked_sub(1)?]).copied()
    }

    /// Looks up `name` in the module of `file`.
    fn lookup(&self, file: usize, name: &str, followed: usize, indexes: &mut Vec<usize>) -> Option<Target> {
        if followed > MAX_REEXPORTS {
            return None;
        }
        let File { module, names, .. } = &self.files[file];
        let child: Vec<String> = module.iter().cloned().chain([name.to_owned()]).collect();
        if let Some(child) = self.by_module.get(&child) {
            return Some(Target::Module(*child));
        }
        if names.items.contains(name) {
            return Some(Target::Item(file));
        }
        if let Some(import) = names.imports.iter().find(|import| import.name == name) {
            // Without another meaning of `name` here, `use name::...` refers to a crate, not to this import itself.
            let is_itself = import.path.first().is_some_and(|first| first == name);
            indexes.extend((!is_itself).then_some(file));
            return if is_itself { None } else { self.resolve(file, &import.path, followed + 1, indexes) };
        }
        let globs = names.imports.iter().filter(|import| import.name == "*");
        globs.into_iter().find_map(|import| {
            let is_itself = import.path.first().is_some_and(|first| first == name);
            let mut through = vec![file];
            let found =
                match (!is_itself).then(|| self.resolve(file, &import.path, followed + 4, &mut through)).flatten()? {
                    Target::Module(module) if module != file => self.lookup(module, name, followed + 4, &mut through),
                    _ => None,
                };
            indexes.extend(through.into_iter().filter(|_| found.is_some()));
            found
        })
    }
}

/// Returns the module path of the file at `relative` below `src`; `None` for files that are not modules of the crate.
fn module_of(relative: &str) -> Option<Vec<String>> {
    let mut parts: Vec<String> = relative.strip_suffix(".rs")?.split('/').map(str::to_owned).collect();
    if matches!(relative, "lib.rs" | "main.rs") || parts.last().is_some_and(|last| last == "mod") {
        parts.pop();
    }
    (parts.first().is_none_or(|first| first != "bin")).then_some(parts)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the edges as `from -> to`, from files (path below `src`, code).
    fn edges(files: &[(&str, &str)]) -> Vec<String> {
        let read = |(path, code): &(&str, &str)| (format!("c/src/{path}"), FileNames::read(code).unwrap());
        let graph = ModuleGraph::new("c/src", files.iter().map(read).collect());
        let short = |file: usize| graph.path(file).trim_start_matches("c/src/").to_owned();
        let edges = graph.edges();
        let pairs = edges.iter().enumerate().flat_map(|(from, to)| to.keys().map(move |to| (from, *to)));
        pairs.map(|(from, to)| format!("{} -> {}", short(from), short(to))).collect()
    }

    #[test]
    fn an_edge_leads_to_the_file_that_defines_the_item() {
        let through_reexports = [
            ("lib.rs", "mod a; mod b; pub use a::A; pub use b::*;"),
            ("a.rs", "use crate::B; pub struct A;"),
            ("b/mod.rs", "mod deep; pub use deep::B;"),
            ("b/deep.rs", "pub struct B;"),
        ];
        let expected = ["a.rs -> b/mod.rs", "a.rs -> b/deep.rs", "b/mod.rs -> b/deep.rs"];
        assert_eq!(edges(&through_reexports), expected);
        let used_where_it_is_reexported =
            [("lib.rs", "mod a; pub use a::A; fn f() -> A { A }"), ("a.rs", "pub struct A;")];
        assert_eq!(edges(&used_where_it_is_reexported), ["lib.rs -> a.rs"]);
        let through_module_names_and_in_macros = [
            ("main.rs", "mod a; mod b; mod c; fn main() { a::run() }"),
            ("a.rs", "use super::c; pub fn run() { assert!(crate::b::go(\"b::x\")); c::stop() }"),
            ("b.rs", "use crate::c; pub fn go() {} #[macro_export] macro_rules! each { }"),
            ("c.rs", "pub fn stop() { crate::each!() }"),
        ];
        let expected = ["main.rs -> a.rs", "a.rs -> b.rs", "a.rs -> c.rs", "c.rs -> b.rs"];
        assert_eq!(edges(&through_module_names_and_in_macros), expected);
        let a_glob_counts_for_the_names_that_are_used = [
            ("lib.rs", "mod a; mod b; mod c;"),
            ("a.rs", "use super::{b::{self, *}, c as d}; fn f() -> B { b::g() }"),
            ("b.rs", "pub use super::c::C; pub struct B; pub fn g() {}"),
            ("c.rs", "pub struct C;"),
        ];
        assert_eq!(edges(&a_glob_counts_for_the_names_that_are_used), ["a.rs -> b.rs", "b.rs -> c.rs"]);
    }

    #[test]
    fn test_code_and_test_files_do_not_count() {
        let files = [
            ("lib.rs", "mod a; #[cfg(test)] mod check; mod b;"),
            (
                "a.rs",
                "pub fn f() {} #[cfg(test)] mod tests { use crate::b::g; } #[cfg(all(test, unix))] use crate::b::g;",
            ),
            ("b.rs", "pub fn g() { crate::a::f() }"),
            ("check.rs", "use crate::b::g; pub fn h() {}"),
        ];
        assert_eq!(edges(&files), ["b.rs -> a.rs"]);
    }
}
