//! Folders of a Python environment, of a conda environment and of a CUDA toolkit that hold libraries or headers of CUDA.
//!
//! NVIDIA's wheels and PyTorch install them below `site-packages`, which Debian calls `dist-packages`.
//!
//! Trade-off: the layouts are known by their names. No Python is started to ask for its search path.

use std::fs;
use std::path::{Path, PathBuf};

#[derive(Default)]
pub(super) struct Folders {
    pub(super) libraries: Vec<PathBuf>,
    pub(super) headers: Vec<PathBuf>,
}

impl Folders {
    /// Adds the folders of another layout after these.
    pub(super) fn and(mut self, other: Self) -> Self {
        self.libraries.extend(other.libraries);
        self.headers.extend(other.headers);
        self
    }

    fn push(&mut self, libraries: impl IntoIterator<Item = PathBuf>, headers: impl IntoIterator<Item = PathBuf>) {
        self.libraries.extend(libraries.into_iter().filter(|folder| folder.is_dir()));
        self.headers.extend(headers.into_iter().filter(|folder| folder.is_dir()));
    }
}

/// Returns the folders of NVIDIA's wheels and of PyTorch in the Python environment `prefix`.
pub(super) fn python(prefix: &Path, windows: bool) -> Folders {
    let mut found = Folders::default();
    for site in site_folders(prefix, windows) {
        for package in folders_in(&site.join("nvidia")) {
            let libraries = ["lib", "bin", "bin/x86_64"].map(|name| package.join(name));
            found.push(libraries, [package.join("include")]);
        }
        found.push([site.join("torch/lib")], []);
    }
    found
}

/// Returns the folders of NVIDIA's conda packages in the environment `prefix`.
pub(super) fn conda(prefix: &Path) -> Folders {
    let mut found = Folders::default();
    found.push(
        [prefix.join("lib"), prefix.join("Library/bin")],
        [prefix.join("include"), prefix.join("Library/include")],
    );
    found.and(targets(prefix))
}

/// Returns the folders of the CUDA toolkit `root`.
pub(super) fn toolkit(root: &Path, windows: bool) -> Folders {
    let inside: &[&str] = if windows { &["bin/x64", "bin"] } else { &["lib64", "lib"] };
    let mut found = Folders::default();
    found.push(inside.iter().map(|name| root.join(name)), [root.join("include")]);
    found.and(targets(root))
}

/// Returns the folders `targets/*` of a toolkit for this processor; there may be others, for cross-compiling.
fn targets(root: &Path) -> Folders {
    let names: &[&str] = match std::env::consts::ARCH {
        "aarch64" => &["sbsa-linux", "aarch64-linux"],
        _ => &["x86_64-linux"],
    };
    let mut found = Folders::default();
    for name in names {
        let target = root.join("targets").join(name);
        found.push([target.join("lib")], [target.join("include")]);
    }
    found
}

/// Returns the folders where `prefix` installs packages, followed by those of the Python that it was made from, where it uses
/// them. Empty for a folder that is no Python environment.
pub(super) fn site_folders(prefix: &Path, windows: bool) -> Vec<PathBuf> {
    let mut found = sites_of(prefix, windows);
    if let Some(base) = base_prefix(prefix, windows) {
        found.extend(sites_of(&base, windows));
    }
    found
}

fn sites_of(prefix: &Path, windows: bool) -> Vec<PathBuf> {
    let candidates: Vec<PathBuf> = if windows {
        vec![prefix.join("Lib/site-packages")]
    } else {
        // Debian's Python in /usr also uses the packages below /usr/local.
        let parents = ["lib", "lib64", "local/lib"].into_iter().flat_map(|name| folders_in(&prefix.join(name)));
        let is_python =
            |folder: &PathBuf| folder.file_name().is_some_and(|name| name.to_string_lossy().starts_with("python3"));
        let names = ["site-packages", "dist-packages"];
        parents.filter(is_python).flat_map(|python| names.map(|name| python.join(name))).collect()
    };
    candidates.into_iter().filter(|folder| folder.is_dir()).collect()
}

/// Returns the prefix of the Python that a virtual environment was made from, if the environment uses its packages.
fn base_prefix(prefix: &Path, windows: bool) -> Option<PathBuf> {
    let text = fs::read_to_string(prefix.join("pyvenv.cfg")).ok()?;
    let value = |key: &str| {
        let mut pairs = text.lines().filter_map(|line| line.split_once('='));
        pairs.find(|(name, _)| name.trim() == key).map(|(_, value)| value.trim())
    };
    if !value("include-system-site-packages").is_some_and(|value| value.eq_ignore_ascii_case("true")) {
        return None;
    }
    let home = PathBuf::from(value("home")?);
    // Windows has python.exe in the prefix itself, other systems have it in `bin`.
    if windows { Some(home) } else { home.parent().map(Path::to_path_buf) }
}

/// Returns the folders in `folder`, sorted by name.
fn folders_in(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut found: Vec<PathBuf> = entries.map(|entry| entry.path()).filter(|path| path.is_dir()).collect();
    found.sort();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn make(root: &Path, folders: &[&str]) {
        folders.iter().for_each(|folder| fs::create_dir_all(root.join(folder)).unwrap());
    }

    #[test]
    fn wheels_are_found_in_site_and_dist_packages() {
        let folder = tempfile::tempdir().unwrap();
        let prefix = folder.path();
        make(prefix, &["lib/python3.12/site-packages/nvidia/cublas/lib", "lib/python3/dist-packages/torch/lib"]);
        make(prefix, &["local/lib/python3.11/dist-packages/nvidia/cu13/include", "lib/perl5/site-packages/torch/lib"]);
        let found = python(prefix, false);
        let libraries = ["lib/python3/dist-packages/torch/lib", "lib/python3.12/site-packages/nvidia/cublas/lib"];
        assert_eq!(found.libraries, libraries.map(|name| prefix.join(name)));
        assert_eq!(found.headers, [prefix.join("local/lib/python3.11/dist-packages/nvidia/cu13/include")]);
    }

    #[test]
    fn windows_has_libraries_in_bin() {
        let folder = tempfile::tempdir().unwrap();
        let site = folder.path().join("Lib/site-packages");
        make(&site, &["nvidia/cu13/bin/x86_64", "torch/lib"]);
        let expected = ["nvidia/cu13/bin", "nvidia/cu13/bin/x86_64", "torch/lib"].map(|name| site.join(name));
        assert_eq!(python(folder.path(), true).libraries, expected);
    }

    #[test]
    fn only_an_environment_that_says_so_has_its_base() {
        let folder = tempfile::tempdir().unwrap();
        let (environment, base) = (folder.path().join("environment"), folder.path().join("base"));
        make(&environment, &["lib/python3.12/site-packages"]);
        make(&base, &["lib/python3.12/site-packages"]);
        for (uses, count) in [("true", 2), ("false", 1)] {
            let home = base.join("bin");
            let text = format!("home = {}\ninclude-system-site-packages = {uses}\n", home.display());
            fs::write(environment.join("pyvenv.cfg"), text).unwrap();
            let found = site_folders(&environment, false);
            assert_eq!(found.len(), count, "{uses}");
            assert!(found[0].starts_with(&environment), "its packages come first");
        }
    }

    #[test]
    fn a_toolkit_has_libraries_for_this_processor_only() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        make(
            root,
            &["lib64", "include", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib", "targets/ppc64le-linux/lib"],
        );
        let found = toolkit(root, false);
        assert_eq!(found.libraries[0], root.join("lib64"));
        assert_eq!((found.libraries.len(), found.headers.len()), (2, 1));
    }
}
