//! The licenses of everything that is compiled into the program: one text, from `cargo metadata` and the license files in the packages.
//! Most licenses ask that their text and the names in it go with a copy of the program.
//!
//! Trade-off: the features of the whole workspace count as one, so that a package may be listed which the program was built without. License
//! files are found by their names, at the top of a package.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use cargo_metadata::{DependencyKind, Metadata, NodeDep, Package, PackageId};

use crate::backend::Choice;
use crate::workspace::Workspace;

/// The package whose program is shipped.
const SHIPPED: &str = "firebrick-train";

/// How the names of license files begin, in capitals; the first is LICENSE in American and British spelling.
const LICENSE_FILES: [&str; 5] = ["LICEN", "COPYING", "COPYRIGHT", "NOTICE", "UNLICENSE"];

const PREFACE: &str = "\
Firebrick is licensed as LICENSE-MIT and LICENSE-APACHE say, at your choice. It contains the packages below, under their
own licenses, and Rust's standard library (MIT OR Apache-2.0). Their license texts follow the list.

";

/// Writes the text for a program with the backends of `choice` on the target `triple`.
pub(super) fn text(workspace: &Workspace, choice: &Choice, triple: &str) -> Result<String> {
    let features: Vec<String> = choice.features().split(',').map(|name| format!("{SHIPPED}/{name}")).collect();
    let metadata = workspace.dependencies(&features, triple)?;
    let packages = compiled_in(&metadata)?;
    let mut listed = PREFACE.to_owned();
    let mut texts: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for package in packages {
        let name = format!("{} {}", package.name, package.version);
        let license = package.license.as_deref().unwrap_or("see its license below");
        let folder = package.manifest_path.parent().context("a manifest lies in a folder")?;
        let found = license_texts(folder.as_std_path())?;
        let note = if found.is_empty() { " (its package has no text)" } else { "" };
        writeln!(listed, "{name}: {license}{note}")?;
        for text in found {
            texts.entry(text).or_default().push(name.clone());
        }
    }
    // In the order of the first package of each text.
    let mut texts: Vec<(Vec<String>, String)> = texts.into_iter().map(|(text, names)| (names, text)).collect();
    texts.sort();
    for (names, text) in texts {
        write!(listed, "\n{}\n{}\n\n{text}\n", "-".repeat(80), names.join(", "))?;
    }
    Ok(listed)
}

/// Lists the packages that are compiled into the program and come from elsewhere, sorted. What only builds or tests it is left out.
fn compiled_in(metadata: &Metadata) -> Result<Vec<&Package>> {
    let resolved = metadata.resolve.as_ref().context("`cargo metadata` resolved no dependencies")?;
    let nodes: HashMap<&PackageId, &Vec<NodeDep>> = resolved.nodes.iter().map(|node| (&node.id, &node.deps)).collect();
    let packages: HashMap<&PackageId, &Package> =
        metadata.packages.iter().map(|package| (&package.id, package)).collect();
    let program = metadata.packages.iter().find(|package| package.name.as_str() == SHIPPED);
    let mut open = vec![&program.with_context(|| format!("no package {SHIPPED}"))?.id];
    let mut reached: BTreeSet<&PackageId> = open.iter().copied().collect();
    while let Some(id) = open.pop() {
        let is_normal = |dep: &&NodeDep| dep.dep_kinds.iter().any(|kind| kind.kind == DependencyKind::Normal);
        for dep in nodes.get(id).into_iter().flat_map(|deps| deps.iter()).filter(is_normal) {
            let is_macro = packages
                .get(&dep.pkg)
                .is_some_and(|package| package.targets.iter().any(|target| target.is_proc_macro()));
            if !is_macro && reached.insert(&dep.pkg) {
                open.push(&dep.pkg);
            }
        }
    }
    let mut found: Vec<&Package> = reached.iter().filter_map(|id| packages.get(id).copied()).collect();
    found.retain(|package| package.source.is_some());
    found.sort_by(|a, b| (a.name.as_str(), &a.version).cmp(&(b.name.as_str(), &b.version)));
    Ok(found)
}

/// Reads the license files at the top of a package, sorted by name, with the line ends and spaces of all alike.
fn license_texts(folder: &Path) -> Result<Vec<String>> {
    let entries = fs::read_dir(folder).with_context(|| format!("could not read {}", folder.display()))?;
    let mut files: Vec<_> = entries.collect::<Result<_, _>>()?;
    files.sort_by_key(fs::DirEntry::file_name);
    let mut found = Vec::new();
    for file in files {
        let name = file.file_name().to_string_lossy().to_uppercase();
        if LICENSE_FILES.iter().any(|start| name.starts_with(start)) && file.path().is_file() {
            let bytes = fs::read(file.path()).with_context(|| format!("could not read {}", file.path().display()))?;
            let text = String::from_utf8_lossy(&bytes);
            found.push(text.lines().map(str::trim_end).collect::<Vec<_>>().join("\n").trim_matches('\n').to_owned());
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn license_of_release() -> String {
        let triple = "x86_64-unknown-linux-gnu";
        text(&Workspace::find().unwrap(), &Choice::release(triple), triple).unwrap()
    }

    /// Needs the packages of one Linux target, which the build of this test has fetched or which cargo fetches.
    #[test]
    fn everything_that_is_compiled_in_is_listed_with_its_license_and_what_is_not_is_not() {
        let text = license_of_release();
        let (list, texts) = text.split_once(&"-".repeat(80)).unwrap();
        for expected in ["\nburn-flex 0.21.0: MIT OR Apache-2.0 (", "\nring 0.17.", "\nwgpu 29.", "\ncudarc 0.19."] {
            assert!(list.contains(expected), "{expected}");
        }
        for absent in ["firebrick-", "candle-core", "\ntempfile-macros", "\nsyn ", "\ncc ", "windows-sys"] {
            assert!(!list.contains(absent), "{absent}");
        }
        assert!(texts.contains("Permission is hereby granted, free of charge"));
        assert_eq!(text, license_of_release());
    }

    #[test]
    fn license_files_are_found_by_name_and_equal_texts_are_equal() {
        let folder = tempfile::tempdir().unwrap();
        let files = [("LICENSE-MIT", "a \r\nb\r\n"), ("license.txt", "\na\nb\n"), ("README.md", "c"), ("COPYING", "d")];
        files.iter().for_each(|(name, text)| fs::write(folder.path().join(name), text).unwrap());
        fs::create_dir(folder.path().join("LICENSES")).unwrap();
        assert_eq!(license_texts(folder.path()).unwrap(), ["d", "a\nb", "a\nb"]);
    }
}
