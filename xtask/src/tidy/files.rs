//! Rules `machine-path` and `dependency`, about any text file: no paths of one machine, and a reason next to every
//! dependency of the workspace.
//!
//! Rationale: a path of one machine works for one developer only and tells others about that machine. A dependency costs
//! every build; the reason next to it is what a later reader needs to drop or replace it.
//!
//! Trade-off: the manifest is read line by line, so a dependency must be written on one line.

use super::Finding;

/// Top folders whose paths are valid on one machine only. Written in halves, or this file would break its own rule.
const MACHINE_FOLDERS: [&str; 4] =
    [concat!("/ho", "me/"), concat!("/ro", "ot/"), concat!("/wo", "rk/"), concat!("/Us", "ers/")];

/// Dependencies without a reason of their own: our crates, and the Burn group, which shares one above it.
const EXEMPT: [&str; 2] = ["firebrick-", "burn-"];

/// Checks the text file at `path`.
pub(super) fn check(path: &str, text: &str) -> Vec<Finding> {
    let lines = text.lines().enumerate().filter_map(|(index, line)| Some((index + 1, machine_path(line)?)));
    let mut findings: Vec<Finding> = lines
        .map(|(line, folder)| {
            let message = format!("a path under {folder} exists on one machine: make it relative, or an argument");
            Finding::new("machine-path", path, line, message)
        })
        .collect();
    if path == "Cargo.toml" {
        findings.extend(unexplained(text).into_iter().map(|(line, name)| {
            let message = format!("`{name}` has no reason next to it: end the line with `# what it is for`");
            Finding::new("dependency", path, line, message)
        }));
    }
    findings
}

/// Returns the machine folder of an absolute path in `line`. A folder of that name further down a path or a URL does not count.
fn machine_path(line: &str) -> Option<&'static str> {
    MACHINE_FOLDERS.into_iter().find(|folder| {
        line.match_indices(folder).any(|(at, _)| {
            let before = line[..at].chars().next_back();
            !before.is_some_and(|c| c.is_alphanumeric() || "._-~}*/".contains(c))
        })
    })
}

/// Lists names and lines of workspace dependencies without a comment, neither at the end of the line nor on the line above.
fn unexplained(manifest: &str) -> Vec<(usize, String)> {
    let (mut found, mut inside, mut explained_above) = (Vec::new(), false, false);
    for (index, line) in manifest.lines().enumerate() {
        let line = line.trim();
        if line.starts_with('[') {
            inside = line == "[workspace.dependencies]";
        } else if inside && !line.is_empty() && !line.starts_with('#') {
            let name = line.split(['=', '.', ' ']).next().unwrap_or_default();
            let exempt = EXEMPT.iter().any(|prefix| name.starts_with(prefix));
            if !exempt && !explained_above && !has_comment(line) {
                found.push((index + 1, name.to_owned()));
            }
        }
        explained_above = line.starts_with('#');
    }
    found
}

/// Returns whether a line of TOML ends in a comment with words in it.
fn has_comment(line: &str) -> bool {
    let mut quoted = false;
    let start = line.find(|c| {
        quoted ^= c == '"';
        c == '#' && !quoted
    });
    start.is_some_and(|start| line[start + 1..].contains(char::is_alphabetic))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_of_one_machine_is_found_and_a_folder_further_down_is_none() {
        for folder in MACHINE_FOLDERS {
            for before in ["path = \"", "", "see `"] {
                assert_eq!(check("a.toml", &format!("{before}{folder}a/b")).len(), 1, "{before}{folder}");
            }
            for before in ["https://example.org", "..", "~", "a"] {
                assert_eq!(check("a.toml", &format!("{before}{folder}a")).len(), 0, "{before}{folder}");
            }
        }
    }

    #[test]
    fn every_dependency_of_the_root_manifest_has_its_reason() {
        let manifest = "[workspace]\na = 1\n[workspace.dependencies]\nfirebrick-data = { path = \"x\" }\nburn-flex = \"1\"\n\
                        good = \"1\" # reads recipes\n# reads weights\nalso = \"1\"\nbad = { version = \"1\", git = \"a#b\" }\n\
                        empty = \"1\" #\n\n[profile.dev]\nopt-level = 1\n";
        assert_eq!(unexplained(manifest), [(9, "bad".to_owned()), (10, "empty".to_owned())]);
        assert_eq!(check("Cargo.toml", manifest).len(), 2);
        assert!(check("crates/data/Cargo.toml", manifest).is_empty());
    }
}
