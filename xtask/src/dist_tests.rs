//! `cargo xtask dist --tests`: the GPU suite as programs, for a machine that has a GPU and no Rust.
//!
//! CI has no GPU, so these tests return early there; the bundle is how they are run for real. `run.sh` in it runs every
//! program and ends with one line a program. What it gives up: Windows, where the script does not run (the programs do).

use std::fs;
use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context, Result, bail};
use cargo_metadata::Message;

use crate::workspace::{Workspace, shown};

/// Packages with tests that need a GPU: their features, and the test programs.
const SUITES: [(&str, &str, &[&str]); 3] = [
    ("firebrick-cuda", "", &["gpu", "blaslt_gpu", "cudnn_gpu"]),
    ("firebrick-kernels", "cuda", &["cuda"]),
    ("firebrick-tests", "cuda", &["gpu"]),
];

/// Data that the programs read, relative to the bundle and to the project alike.
const DATA: [&str; 2] = ["tests/fixtures", "tests/golden"];

/// Runs every program of the bundle and reports; fails if one did.
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
pub(crate) fn assemble(workspace: &Workspace, folder: &Path) -> Result<()> {
    if folder.exists() {
        fs::remove_dir_all(folder).with_context(|| format!("could not clear {}", folder.display()))?;
    }
    let programs = folder.join("bin");
    fs::create_dir_all(&programs).with_context(|| format!("could not make {}", programs.display()))?;
    for (package, features, tests) in SUITES {
        for (name, built) in build(workspace, package, features, tests)? {
            crate::dist::copy(&built, &programs.join(format!("{package}-{name}")))?;
        }
    }
    for data in DATA {
        crate::dist::copy(&workspace.root().join(data), &folder.join(data))?;
    }
    fs::write(folder.join("run.sh"), SCRIPT).context("could not write run.sh")
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

/// Builds test programs; each by its name.
fn build(workspace: &Workspace, package: &str, features: &str, tests: &[&str]) -> Result<Vec<(String, PathBuf)>> {
    let mut command = workspace.cargo(&build_args(package, features, tests));
    eprintln!("xtask: {}", shown(&command));
    let mut child =
        command.stdout(Stdio::piped()).spawn().with_context(|| format!("could not start {}", shown(&command)))?;
    let output = child.stdout.take().context("cargo's output was not piped")?;
    let mut built = Vec::new();
    for message in Message::parse_stream(BufReader::new(output)) {
        if let Message::CompilerArtifact(artifact) = message.context("could not read cargo's build messages")?
            && let Some(program) = artifact.executable
            && tests.contains(&artifact.target.name.as_str())
        {
            built.push((artifact.target.name, program.into_std_path_buf()));
        }
    }
    if !child.wait().context("waiting for cargo")?.success() {
        bail!("the tests of {package} did not build; the compiler's messages are above");
    }
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
