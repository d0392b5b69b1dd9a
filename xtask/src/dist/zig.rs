//! zig as the linker and C compiler of released Linux programs. It has the symbols of every glibc and the headers of every Linux target, so that
//! what is built on a new system starts on an old one, and a machine of one kind builds for the other.
//!
//! Source: words that rustc and build scripts pass to gcc or clang, and zig does not take, were found by trying.
//!
//! Trade-off: zig's own unwinder is linked in place of gcc's, so that the program needs no libgcc_s. C++ is not compiled: no dependency of a
//! release has any. Where the target is this machine's, cargo links build scripts with zig as well.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use super::elf::GLIBC;
use crate::workspace::{Workspace, is_installed};

/// The release that was tried, as the Python package `ziglang`.
const INSTALL: &str = "pip install ziglang==0.17.1";

/// Takes out what zig does not know: it gets the target in its own words, and has its own unwinder.
const COMPILER: &str = r#"#!/bin/sh
# The C compiler and linker for a released program, written by `cargo xtask dist`.
for word do
    shift
    case "$word" in
        -lgcc_s) set -- "$@" -lunwind ;;
        --target=* | -m64 | -no-pie) ;;
        *) set -- "$@" "$word" ;;
    esac
done
exec python3 -m ziglang cc -target TARGET "$@"
"#;

const ARCHIVER: &str = "#!/bin/sh\nexec python3 -m ziglang ar \"$@\"\n";

/// Returns the variables with which cargo and build scripts compile and link for the target `triple` with zig; none if it is not a Linux with glibc.
///
/// # Errors
/// zig is not installed, or this system runs no shell scripts.
pub(super) fn environment(workspace: &Workspace, triple: &str) -> Result<Vec<(String, PathBuf)>> {
    let Some(target) = target_of_zig(triple) else { return Ok(Vec::new()) };
    ensure!(cfg!(unix), "archives for Linux are built on Linux or macOS: zig is called by a shell script");
    ensure!(
        is_installed("python3", &["-m", "ziglang", "version"]),
        "`python3 -m ziglang` does not run, and archives for Linux are linked by zig for glibc {}.{}: {INSTALL}",
        GLIBC.0,
        GLIBC.1
    );
    write_scripts(&workspace.root().join("target/zig"), triple, &target)
}

/// Translates a target triple of Rust to one of zig, with the version of glibc.
fn target_of_zig(triple: &str) -> Option<String> {
    let machine = triple.strip_suffix("-unknown-linux-gnu")?;
    Some(format!("{machine}-linux-gnu.{}.{}", GLIBC.0, GLIBC.1))
}

/// Writes the scripts into `folder`, and returns the variables that name them.
fn write_scripts(folder: &Path, triple: &str, target: &str) -> Result<Vec<(String, PathBuf)>> {
    fs::create_dir_all(folder).with_context(|| format!("could not create {}", folder.display()))?;
    let (compiler, archiver) = (folder.join(format!("cc-{triple}")), folder.join("ar"));
    for (path, text) in [(&compiler, COMPILER.replace("TARGET", target)), (&archiver, ARCHIVER.to_owned())] {
        fs::write(path, text).with_context(|| format!("could not write {}", path.display()))?;
        #[cfg(unix)]
        fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o755))?;
    }
    let small = triple.replace('-', "_");
    let linker = format!("CARGO_TARGET_{}_LINKER", small.to_uppercase());
    Ok(vec![(linker, compiler.clone()), (format!("CC_{small}"), compiler), (format!("AR_{small}"), archiver)])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_linux_with_glibc_is_linked_by_zig() {
        assert_eq!(target_of_zig("aarch64-unknown-linux-gnu").unwrap(), "aarch64-linux-gnu.2.28");
        for other in ["aarch64-apple-darwin", "x86_64-pc-windows-msvc", "x86_64-unknown-linux-musl"] {
            assert_eq!(target_of_zig(other), None, "{other}");
        }
    }

    /// A program in the place of python3 prints its words.
    #[cfg(unix)]
    #[test]
    fn the_compiler_gets_every_word_but_those_that_zig_does_not_take() {
        let folder = tempfile::tempdir().unwrap();
        let names = write_scripts(folder.path(), "x86_64-unknown-linux-gnu", "x86_64-linux-gnu.2.28").unwrap();
        let variables: Vec<&str> = names.iter().map(|(name, _)| name.as_str()).collect();
        let cargo = "CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_LINKER";
        assert_eq!(variables, [cargo, "CC_x86_64_unknown_linux_gnu", "AR_x86_64_unknown_linux_gnu"]);

        let bin = folder.path().join("bin");
        fs::create_dir(&bin).unwrap();
        let python = bin.join("python3");
        fs::write(&python, "#!/bin/sh\nprintf '%s\\n' \"$@\"\n").unwrap();
        fs::set_permissions(&python, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        let typed = ["-O3", "--target=x86_64-unknown-linux-gnu", "a file.c", "-m64", "-lgcc_s", "-no-pie", "-lc"];
        let ran = std::process::Command::new(&names[0].1).args(typed).env("PATH", &bin).output().unwrap();
        let words = String::from_utf8(ran.stdout).unwrap();
        let expected =
            ["-m", "ziglang", "cc", "-target", "x86_64-linux-gnu.2.28", "-O3", "a file.c", "-lunwind", "-lc"];
        assert_eq!(words.lines().collect::<Vec<_>>(), expected);
    }
}
