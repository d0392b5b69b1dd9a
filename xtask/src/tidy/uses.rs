//! Reads the declarations, imports and named paths of one Rust file: the input of the module graph in `modules`.
//!
//! Trade-off: the syntax tree knows no types and expands no macros. Paths in macro calls are found by their form. Inline
//! modules, which are rare outside tests, are not read. A name that a function shadows is taken for the imported one.

use std::collections::{HashMap, HashSet};
use std::sync::LazyLock;

use proc_macro2::{Ident, TokenStream};
use regex::Regex;
use syn::visit::{self, Visit};
use syn::{Attribute, ImplItemFn, Item, ItemUse, Macro, Meta, MetaList, UseTree, Visibility};

use super::text::{Source, pattern};

/// An identifier, or several with `::` between them.
static PATH: LazyLock<Regex> = LazyLock::new(|| pattern(r"\b[A-Za-z_]\w*(?:\s*::\s*[A-Za-z_]\w*)*"));

/// One name that a `use` brings into a file.
#[derive(Debug)]
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

/// The names in one file, without those in test code.
#[derive(Debug, Default)]
pub(super) struct FileNames {
    /// Items of any visibility that are defined here.
    pub(super) items: HashSet<String>,
    /// Modules that are compiled for tests only.
    pub(super) test_modules: HashSet<String>,
    /// Macros with `#[macro_export]`: they belong to the root of the crate, wherever they are defined.
    pub(super) exported_macros: Vec<String>,
    /// Everything that `use` brings in.
    pub(super) imports: Vec<Import>,
    /// Paths of two or more segments in code, with their lines.
    pub(super) paths: Vec<(Vec<String>, usize)>,
    /// Number of occurrences of each identifier.
    pub(super) words: HashMap<String, usize>,
}

impl FileNames {
    /// Reads the Rust file `text`; fails if it is not well-formed.
    pub(super) fn read(text: &str) -> syn::Result<Self> {
        let mut names = Self::default();
        names.visit_file(&syn::parse_file(text)?);
        Ok(names)
    }

    fn import(&mut self, item: &ItemUse) {
        let mut found = Vec::new();
        leaves(&item.tree, &[], &mut found);
        for (name, path) in found {
            *self.words.entry(name.clone()).or_default() += 1;
            let is_reexport = !matches!(item.vis, Visibility::Inherited);
            self.imports.push(Import { name, path, is_reexport, line: item.use_token.span.start().line });
        }
    }

    /// Records the paths in tokens that have no syntax tree.
    fn read_tokens(&mut self, tokens: &TokenStream, line: usize) {
        let code = Source::read(&tokens.to_string()).code;
        for found in PATH.find_iter(&code) {
            let path: Vec<String> = found.as_str().split("::").map(|segment| segment.trim().to_owned()).collect();
            path.iter().for_each(|word| *self.words.entry(word.clone()).or_default() += 1);
            self.paths.extend((path.len() > 1).then_some((path, line)));
        }
    }
}

impl<'ast> Visit<'ast> for FileNames {
    fn visit_item(&mut self, item: &'ast Item) {
        let (attributes, name) = match item {
            Item::Const(item) => (&item.attrs, Some(&item.ident)),
            Item::Enum(item) => (&item.attrs, Some(&item.ident)),
            Item::Fn(item) => (&item.attrs, Some(&item.sig.ident)),
            Item::Impl(item) => (&item.attrs, None),
            Item::Macro(item) => (&item.attrs, item.ident.as_ref()),
            Item::Mod(item) => (&item.attrs, item.content.as_ref().map(|_| &item.ident)),
            Item::Static(item) => (&item.attrs, Some(&item.ident)),
            Item::Struct(item) => (&item.attrs, Some(&item.ident)),
            Item::Trait(item) => (&item.attrs, Some(&item.ident)),
            Item::Type(item) => (&item.attrs, Some(&item.ident)),
            Item::Union(item) => (&item.attrs, Some(&item.ident)),
            Item::Use(item) => (&item.attrs, None),
            _ => return,
        };
        if attributes.iter().any(is_test) {
            if let Item::Mod(module) = item {
                self.test_modules.insert(module.ident.to_string());
            }
            return;
        }
        let is_exported = attributes.iter().any(|attribute| attribute.path().is_ident("macro_export"));
        self.exported_macros.extend(name.filter(|_| is_exported).map(Ident::to_string));
        self.items.extend(name.map(Ident::to_string));
        match item {
            Item::Use(item) => self.import(item),
            Item::Mod(_) => {}
            item => visit::visit_item(self, item),
        }
    }

    fn visit_impl_item_fn(&mut self, function: &'ast ImplItemFn) {
        if !function.attrs.iter().any(is_test) {
            visit::visit_impl_item_fn(self, function);
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let segments: Vec<String> = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
        if segments.len() > 1 && path.leading_colon.is_none() {
            self.paths.push((segments, path.segments[0].ident.span().start().line));
        }
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, call: &'ast Macro) {
        self.read_tokens(&call.tokens, call.bang_token.span.start().line);
        visit::visit_macro(self, call);
    }

    fn visit_meta_list(&mut self, list: &'ast MetaList) {
        self.read_tokens(&list.tokens, list.delimiter.span().open().start().line);
        visit::visit_meta_list(self, list);
    }

    fn visit_ident(&mut self, name: &'ast Ident) {
        *self.words.entry(name.to_string()).or_default() += 1;
    }
}

/// Returns whether an attribute restricts its item to tests.
fn is_test(attribute: &Attribute) -> bool {
    let Meta::List(list) = &attribute.meta else { return false };
    let condition = list.tokens.to_string().replace(' ', "");
    list.path.is_ident("cfg")
        && (condition == "test" || condition.starts_with("all(test,") || condition.starts_with("any(test,"))
}

/// Lists the names that a `use` tree after `prefix` imports, each with its path.
fn leaves(tree: &UseTree, prefix: &[String], found: &mut Vec<(String, Vec<String>)>) {
    let with = |name: &Ident| match name.to_string() {
        name if name == "self" && !prefix.is_empty() => prefix.to_vec(),
        name => [prefix, &[name]].concat(),
    };
    match tree {
        UseTree::Path(path) => leaves(&path.tree, &with(&path.ident), found),
        UseTree::Name(name) => found.extend(with(&name.ident).last().cloned().map(|last| (last, with(&name.ident)))),
        UseTree::Rename(rename) => found.push((rename.rename.to_string(), with(&rename.ident))),
        UseTree::Glob(_) => found.push(("*".to_owned(), prefix.to_vec())),
        UseTree::Group(group) => group.items.iter().for_each(|tree| leaves(tree, prefix, found)),
    }
}
