//! Completions of shells and manual pages, which the program itself writes. They are the same for every target, so where the program
//! cannot run here, the one that was built for this machine writes them.
//!
//! Trade-off: that one may be older than the sources; it is named in a line.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::workspace::shown;

/// Shells by the name that the program knows, with the name of the file that each of them looks for.
const SHELLS: [(&str, &str); 4] =
    [("bash", "firebrick.bash"), ("zsh", "_firebrick"), ("fish", "firebrick.fish"), ("powershell", "_firebrick.ps1")];

/// Finds the program that writes the pages: `program` itself if it was built for this machine, the `host`, else the one that was built for it in
/// the same target folder. `None` if there is none.
pub(super) fn writer(program: &Path, triple: &str, host: &str) -> Option<PathBuf> {
    if triple == host {
        return Some(program.to_owned());
    }
    // TARGET_DIR/TRIPLE/PROFILE/PROGRAM
    let name = Path::new("firebrick").with_extension(std::env::consts::EXE_EXTENSION);
    let profile = program.parent()?;
    let built = profile.parent()?.with_file_name(host).join(profile.file_name()?).join(name);
    built.is_file().then_some(built)
}

/// Lets the program `writer` write completions/ and man/ into `folder`.
pub(super) fn write(writer: &Path, folder: &Path) -> Result<()> {
    let (completions, man) = (folder.join("completions"), folder.join("man"));
    for path in [&completions, &man] {
        fs::create_dir_all(path).with_context(|| format!("could not create {}", path.display()))?;
    }
    for (shell, file) in SHELLS {
        let text = output(Command::new(writer).args(["completions", shell]))?;
        let path = completions.join(file);
        fs::write(&path, text).with_context(|| format!("could not write {}", path.display()))?;
    }
    output(Command::new(writer).arg("man").arg(&man))?;
    if fs::read_dir(&man)?.next().is_none() {
        bail!("{} wrote no manual page", writer.display());
    }
    Ok(())
}

/// Runs `command` and returns what it prints.
fn output(command: &mut Command) -> Result<Vec<u8>> {
    let ran = command.output().with_context(|| format!("could not start {}", shown(command)))?;
    if !ran.status.success() {
        bail!("`{}` failed: {}", shown(command), String::from_utf8_lossy(&ran.stderr).trim());
    }
    Ok(ran.stdout)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_for_another_machine_leaves_the_pages_to_the_one_for_this_machine() {
        let target = tempfile::tempdir().unwrap();
        let of = |triple: &str| {
            let name = Path::new("firebrick").with_extension(std::env::consts::EXE_EXTENSION);
            target.path().join(triple).join("dist").join(name)
        };
        assert_eq!(writer(&of("here"), "here", "here"), Some(of("here")));
        assert_eq!(writer(&of("there"), "there", "here"), None);
        fs::create_dir_all(of("here").parent().unwrap()).unwrap();
        fs::write(of("here"), "").unwrap();
        assert_eq!(writer(&of("there"), "there", "here"), Some(of("here")));
    }

    /// A script stands for the program.
    #[cfg(unix)]
    #[test]
    fn what_the_program_writes_is_packed_and_its_failure_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("firebrick");
        let stand_in = |text: &str| {
            fs::write(&program, format!("#!/bin/sh\n{text}\n")).unwrap();
            fs::set_permissions(&program, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        };
        stand_in("if [ $1 = man ]; then echo page > $2/firebrick.1; else echo \"for $2\"; fi");
        write(&program, folder.path()).unwrap();
        for (shell, file) in SHELLS {
            let text = fs::read_to_string(folder.path().join("completions").join(file)).unwrap();
            assert_eq!(text, format!("for {shell}\n"));
        }
        assert_eq!(fs::read_to_string(folder.path().join("man/firebrick.1")).unwrap(), "page\n");

        stand_in("echo unknown command >&2; exit 2");
        let message = write(&program, folder.path()).unwrap_err().to_string();
        assert!(message.contains("completions bash") && message.contains("unknown command"), "{message}");
    }
}
