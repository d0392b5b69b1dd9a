//! `cargo xtask dist --tests`: the GPU suite as programs, for a machine that has a GPU and no Rust.
//!
//! CI has no GPU, so these tests return early there; the bundle is how they are run for real. Its `run.sh` runs every
//! program and prints one line per program.
//!
//! Not supported: Windows, where the script does not run (the programs do).

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use super::archive::{copy, make_empty};
use crate::build::build_programs;
use crate::workspace::{Workspace, shown};

/// Packages with tests that need a GPU: their features, and the test programs.
const SUITES: [(&str, &str, &[&str]); 3] = [
    ("firebrick-cuda", "", &["gpu", "blaslt_gpu", "cudnn_gpu"]),
    ("firebrick-kernels", "cuda", &["cuda", "cuda_adapters"]),
    ("firebrick-tests", "cuda", &["gpu", "gpu_ranks"]),
];

/// Data that the programs read, at the same relative path in the bundle and in the project.
const DATA: [&str; 2] = ["tests/fixtures", "tests/golden"];

/// Runs every program of the bundle and reports; fails if one of them failed.
const SCRIPT: &str = "\
#!/bin/sh
# Runs the GPU suite. Needs the NVIDIA driver, and cuBLASLt, NVRTC and (for attention) cuDNN where the loader finds them.
cd \"$(dirname \"$0\")\" || exit 1
export FIREBRICK_TESTS=\"$PWD/tests\"
failed=0
for program in bin/*; do
  if \"./$program\" --test-threads=1 > \"$(basename \"$program\").log\" 2>&1; then verdict=passed; else verdict=FAILED; failed=1; fi
  echo \"$verdict $(basename \"$program\"): $(grep '^test result' \"$(basename \"$program\").log\")\"
done
exit $failed
";

/// Builds the suite into `folder`.
pub(super) fn assemble(workspace: &Workspace, folder: &Path) -> Result<()> {
    make_empty(folder)?;
    let programs = folder.join("bin");
    make_empty(&programs)?;
    for (package, features, tests) in SUITES {
        for (name, built) in build(workspace, package, features, tests)? {
            copy(&built, &programs.join(format!("{package}-{name}")))?;
        }
    }
    for data in DATA {
        copy(&workspace.root().join(data), &folder.join(data))?;
    }
    write_script(&folder.join("run.sh"))
}

/// Writes the script, executable where files have such a permission.
fn write_script(path: &Path) -> Result<()> {
    fs::write(path, SCRIPT).with_context(|| format!("could not write {}", path.display()))?;
    #[cfg(unix)]
    fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o755))
        .with_context(|| format!("could not make {} executable", path.display()))?;
    Ok(())
}

/// Arguments of the cargo call that builds the test programs of a package.
fn build_args(package: &str, features: &str, tests: &[&str]) -> Vec<String> {
    let mut args = vec!["test", "--no-run", "--package", package, "--message-format=json-render-diagnostics"];
    if !features.is_empty() {
        args.extend(["--features", features]);
    }
    args.extend(tests.iter().flat_map(|test| ["--test", test]));
    args.into_iter().map(str::to_owned).collect()
}

/// Builds test programs; each with its name.
fn build(workspace: &Workspace, package: &str, features: &str, tests: &[&str]) -> Result<Vec<(String, PathBuf)>> {
    let command = workspace.cargo(&build_args(package, features, tests));
    eprintln!("xtask: {}", shown(&command));
    let programs = build_programs(command, &format!("tests of {package}"))?;
    let named = programs.into_iter().filter(|program| tests.contains(&program.target.as_str()));
    let built: Vec<(String, PathBuf)> = named.map(|program| (program.target, program.path)).collect();
    if built.len() != tests.len() {
        bail!("cargo built {} of the {} test programs of {package}", built.len(), tests.len());
    }
    Ok(built)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_programs_of_each_suite_are_named_to_cargo() {
        let typed = build_args("firebrick-kernels", "cuda", &["cuda"]).join(" ");
        let expected =
            "test --no-run --package firebrick-kernels --message-format=json-render-diagnostics --features cuda";
        assert_eq!(typed, format!("{expected} --test cuda"));
        assert!(!build_args("firebrick-cuda", "", &["gpu"]).contains(&"--features".to_owned()));
    }

    #[cfg(unix)]
    #[test]
    fn the_script_is_executable() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let script = folder.path().join("run.sh");
        write_script(&script).unwrap();
        assert_eq!(fs::metadata(&script).unwrap().permissions().mode() & 0o777, 0o755);
        assert!(super::super::archive::is_program(Path::new("run.sh")));
    }

    #[test]
    fn every_suite_is_where_it_is_looked_for() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        for (package, _, tests) in SUITES {
            let folder = match package.trim_start_matches("firebrick-") {
                "tests" => "tests/tests".to_owned(),
                name => format!("crates/{name}/tests"),
            };
            for test in tests {
                let file = root.join(&folder).join(format!("{test}.rs"));
                assert!(file.is_file() || root.join(&folder).join(test).join("main.rs").is_file(), "{folder}/{test}");
            }
        }
        assert!(DATA.iter().all(|data| root.join(data).is_dir()));
    }
}
