//! `cargo xtask dist --tests`: the GPU suite as programs, for a machine that has a GPU and no Rust.
//!
//! CI has no GPU, so these tests return early there; the bundle runs them for real. Its `run.sh` runs every program and prints one line per program,
//! several at a time unless that disturbs one of them.
//!
//! Not supported: Windows, where the script does not run (the programs do).

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use super::archive::{copy, make_empty};
use crate::build::build_programs;
use crate::workspace::{Workspace, shown, words};

/// Packages with tests that need a GPU: their features, and the test programs.
const SUITES: [(&str, &str, &[&str]); 3] = [
    ("firebrick-cuda", "", &["gpu", "blaslt_gpu", "cudnn_gpu"]),
    ("firebrick-kernels", "cuda", &["cuda", "cuda_adapters", "cuda_fp8"]),
    ("firebrick-tests", "cuda", &["gpu", "gpu_ranks"]),
];

/// Data that the programs read, at the same relative path in the bundle and in the project.
const DATA: [&str; 3] = ["tests/fixtures", "tests/golden", "docs/decisions.md"];

/// Runs every program of the bundle and reports; fails if one of them failed.
const SCRIPT: &str = "\
#!/bin/sh
# Runs the GPU suite. Needs the NVIDIA driver, and cuBLASLt, NVRTC and (for attention) cuDNN of one CUDA version. If there are
# several in Python environments, toolkits and on the loader's path, FIREBRICK_CUDA names the folder of those to test.
cd \"$(dirname \"$0\")\" || exit 1
export FIREBRICK_TESTS=\"$PWD/tests\"
# Tests run at the same time, and each computes what it compares with on one core.
export RAYON_NUM_THREADS=1
cores=$(nproc 2> /dev/null || echo 4)
# A program, and for a part of its tests the name of that and a filter.
run() {
  threads=$cores
  # It counts the card's memory.
  [ \"$1\" = firebrick-cuda-gpu ] && threads=1
  log=$1$2.log
  if \"./bin/$1\" --test-threads=$threads $3 > \"$log\" 2>&1; then verdict=passed; else verdict=FAILED; fi
  echo \"$verdict $1: $(grep '^test result' \"$log\")\"
  [ \"$verdict\" = passed ]
}
failed=0
# These two count the card's memory: nothing else may run meanwhile.
for program in firebrick-cuda-gpu firebrick-kernels-cuda; do run \"$program\" || failed=1; done
running=
for program in bin/*; do
  program=$(basename \"$program\")
  case \"$program\" in
  firebrick-cuda-gpu | firebrick-kernels-cuda) continue ;;
  firebrick-tests-gpu)
    # The steps of one process take turns on the card.
    run \"$program\" -steps ten_steps &
    running=\"$running $!\"
    run \"$program\" -rest --skip=ten_steps &
    ;;
  *) run \"$program\" & ;;
  esac
  running=\"$running $!\"
done
for process in $running; do wait \"$process\" || failed=1; done
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
        let to = folder.join(data);
        fs::create_dir_all(to.parent().context("data lies in a folder")?)?;
        copy(&workspace.root().join(data), &to)?;
    }
    write_script(&folder.join("run.sh"))
}

/// Writes the script, executable on systems with such a permission.
fn write_script(path: &Path) -> Result<()> {
    fs::write(path, SCRIPT).with_context(|| format!("could not write {}", path.display()))?;
    #[cfg(unix)]
    fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o755))
        .with_context(|| format!("could not make {} executable", path.display()))?;
    Ok(())
}

/// Builds the arguments of the cargo call that builds the test programs of a package.
fn build_args(package: &str, features: &str, tests: &[&str]) -> Vec<String> {
    let features = if features.is_empty() { String::new() } else { format!("--features {features}") };
    let tests: String = tests.iter().map(|test| format!(" --test {test}")).collect();
    // What results are compared with is computed on the CPU, which takes minutes in unoptimized programs.
    let command = "test --profile fast --no-run --message-format=json-render-diagnostics";
    words(&format!("{command} --package {package} {features}{tests}"))
}

/// Builds test programs; each with its name.
fn build(workspace: &Workspace, package: &str, features: &str, tests: &[&str]) -> Result<Vec<(String, PathBuf)>> {
    let command = workspace.cargo(&build_args(package, features, tests));
    eprintln!("xtask: {}", shown(&command));
    let programs = build_programs(command, &format!("tests of {package}"))?;
    let named = programs.into_iter().map(|(target, path)| (target.name, path));
    let built: Vec<(String, PathBuf)> = named.filter(|(name, _)| tests.contains(&name.as_str())).collect();
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
        let expected = "test --profile fast --no-run --message-format=json-render-diagnostics --package firebrick-kernels --features cuda";
        assert_eq!(typed, format!("{expected} --test cuda"));
        assert!(!build_args("firebrick-cuda", "", &["gpu"]).contains(&"--features".to_owned()));
    }

    /// Scripts stand for the programs.
    #[cfg(unix)]
    #[test]
    fn the_script_runs_every_program_and_fails_if_one_does() {
        let folder = tempfile::tempdir().unwrap();
        let bin = folder.path().join("bin");
        fs::create_dir(&bin).unwrap();
        write_script(&folder.path().join("run.sh")).unwrap();
        let run = || {
            let ran = std::process::Command::new(folder.path().join("run.sh")).output().unwrap();
            (ran.status.success(), String::from_utf8(ran.stdout).unwrap())
        };
        let stand_in = |name: &str, status: u8| {
            let text = format!("#!/bin/sh\necho test result: {name} $FIREBRICK_TESTS\nexit {status}\n");
            fs::write(bin.join(name), text).unwrap();
            fs::set_permissions(bin.join(name), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        };
        let names: Vec<String> = SUITES
            .iter()
            .flat_map(|(package, _, tests)| tests.iter().map(move |test| format!("{package}-{test}")))
            .collect();
        names.iter().for_each(|name| stand_in(name, 0));
        let (passed, printed) = run();
        let all_passed = names.iter().all(|name| printed.contains(&format!("passed {name}: test result")));
        assert!(passed && all_passed, "{printed}");
        for name in ["firebrick-tests-gpu", "firebrick-kernels-cuda"] {
            stand_in(name, 1);
            let (passed, printed) = run();
            assert!(!passed && printed.contains(&format!("FAILED {name}: test result")), "{printed}");
            stand_in(name, 0);
        }
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
        assert!(DATA.iter().all(|data| root.join(data).exists()));
    }
}
