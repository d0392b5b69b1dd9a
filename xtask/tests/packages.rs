//! The crates that others can depend on: `cargo package` takes them as they are, they bring their licenses and refer to nothing outside of
//! themselves, and `tests/downstream` builds from the packages alone, without a network.
//!
//! Trade-off: that build compiles Arrow and Parquet once more, which takes minutes, so it runs only with `cargo xtask test --slow`.

use std::env;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use flate2::read::GzDecoder;

/// In the order in which they can be published: a crate depends only on those before it. CONTRIBUTING.md lists the same.
const CRATES: [&str; 6] = ["files", "arch", "precision", "hub", "hwprofile", "data"];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies in the root")
}

/// Runs a cargo command offline in `folder` and returns what it prints; panics with its messages if it fails.
fn cargo(folder: &Path, target: &Path, verb: &str, args: &[&str]) -> String {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(folder).args([verb, "--offline", "--target-dir"]).arg(target).args(args);
    let ran = command.output().expect("cargo starts");
    assert!(ran.status.success(), "cargo {verb} {args:?}: {}", String::from_utf8_lossy(&ran.stderr));
    String::from_utf8(ran.stdout).unwrap()
}

/// Packages all crates and unpacks them into `folder`; returns the folder of each.
fn packages(folder: &Path) -> Vec<PathBuf> {
    let names = CRATES.map(|name| format!("firebrick-{name}"));
    // A lock file would name crates that are not published.
    let mut args = vec!["--no-verify", "--allow-dirty", "--exclude-lockfile"];
    names.iter().for_each(|name| args.extend(["--package", name]));
    cargo(root(), folder, "package", &args);
    let unpack = |name: &String| {
        let is_its =
            |file: &str| file.strip_prefix(&format!("{name}-")).is_some_and(|version| version.ends_with(".crate"));
        let mut files = fs::read_dir(folder.join("package")).unwrap().map(|entry| entry.unwrap().path());
        let found = files.find(|path| is_its(&path.file_name().unwrap().to_string_lossy()));
        let package = found.unwrap_or_else(|| panic!("cargo wrote no package of {name}"));
        tar::Archive::new(GzDecoder::new(File::open(&package).unwrap())).unpack(folder).unwrap();
        folder.join(package.file_stem().unwrap())
    };
    names.iter().map(unpack).collect()
}

/// Lists the Rust files below `folder`.
fn sources(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let (folders, files): (Vec<_>, Vec<_>) = entries.partition(|path| path.is_dir());
    let files = files.into_iter().filter(|path| path.extension().is_some_and(|extension| extension == "rs"));
    files.chain(folders.iter().flat_map(|folder| sources(folder))).collect()
}

/// Lists the texts in quotes that follow `call` in a source.
fn named<'a>(source: &'a str, call: &str) -> Vec<&'a str> {
    source.split(call).skip(1).filter_map(|rest| rest.trim_start().strip_prefix('"')?.split('"').next()).collect()
}

#[test]
fn packages_are_licensed_described_and_publishable_in_their_order() {
    let folder = tempfile::tempdir().unwrap();
    for (index, package) in packages(folder.path()).iter().enumerate() {
        for license in ["LICENSE-MIT", "LICENSE-APACHE"] {
            assert_eq!(fs::read(package.join(license)).ok(), fs::read(root().join(license)).ok(), "{package:?}");
        }
        let manifest: toml::Table = fs::read_to_string(package.join("Cargo.toml")).unwrap().parse().unwrap();
        let described = manifest["package"].as_table().unwrap();
        assert!((1..=5).contains(&described["keywords"].as_array().unwrap().len()), "{package:?}");
        assert!(described.contains_key("categories") && described.contains_key("description"), "{package:?}");
        assert_eq!(described["metadata"]["docs"]["rs"]["all-features"].as_bool(), Some(true), "{package:?}");
        for (name, dependency) in manifest["dependencies"].as_table().unwrap() {
            assert!(dependency.get("path").is_none(), "{package:?} finds {name} by its path");
            if let Some(ours) = name.strip_prefix("firebrick-") {
                assert!(CRATES[..index].contains(&ours), "{package:?} needs {name} before it is published");
            }
        }
    }
}

#[test]
fn packages_refer_to_no_file_outside_of_themselves() {
    let folder = tempfile::tempdir().unwrap();
    for package in packages(folder.path()) {
        let package = package.canonicalize().unwrap();
        for path in sources(&package) {
            let source = fs::read_to_string(&path).unwrap();
            for file in ["include_str!(", "include_bytes!("].iter().flat_map(|call| named(&source, call)) {
                let found = path.parent().unwrap().join(file).canonicalize();
                let is_inside = found.is_ok_and(|found| found.starts_with(&package));
                assert!(is_inside, "{} includes {file}, which is not in the package", path.display());
            }
            for line in source.lines().filter(|line| line.contains("CARGO_MANIFEST_DIR")) {
                assert!(!line.contains("\"../"), "{} leaves its package: {line}", path.display());
            }
        }
    }
}

#[test]
fn a_project_outside_builds_and_runs_with_the_packages_alone() {
    if env::var_os("FIREBRICK_SLOW_TESTS").is_none() {
        println!("left out: `cargo xtask test --slow` compiles the packages");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let packages = packages(folder.path());
    let (project, from) = (folder.path().join("downstream"), root().join("tests/downstream"));
    fs::create_dir_all(project.join("src")).unwrap();
    fs::copy(from.join("src/main.rs"), project.join("src/main.rs")).unwrap();
    // The versions that are on this machine.
    fs::copy(root().join("Cargo.lock"), project.join("Cargo.lock")).unwrap();
    let mut text = fs::read_to_string(from.join("Cargo.toml")).unwrap() + "\n[patch.crates-io]\n";
    for (name, package) in CRATES.iter().zip(&packages) {
        text += &format!("firebrick-{name} = {{ path = {:?} }}\n", package.display().to_string());
    }
    fs::write(project.join("Cargo.toml"), text).unwrap();
    let written = project.display().to_string();
    let printed = cargo(&project, &folder.path().join("target"), "run", &["--quiet", "--", &written]);
    let expected = "arch: 596049920 parameters\nprecision: 2120 bytes\nhub: owner/name at main\n\
                    data: 2 tokens in the loss\nhwprofile: h100\nfiles: complete\n";
    assert_eq!(printed, expected);
}
