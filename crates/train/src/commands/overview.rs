//! The overview of `firebrick --help`, its commands in groups; and what follows from the command line: completions for shells and manual pages.
//!
//! Trade-off: clap has no groups of commands, so the overview is a template of ours; a test finds a command that no group has.

use std::fs;
use std::path::Path;

use anyhow::Context;
use clap::Command;
use clap_complete::{Shell, generate};

/// The visible commands, in the order and under the headings of the overview.
pub(super) const GROUPS: [(&str, &[&str]); 4] = [
    ("Train", &["train", "plan", "new", "convert", "inspect", "reward", "report"]),
    ("Use and share what was trained", &["generate", "chat", "export", "push", "verify"]),
    ("Know the machine", &["doctor", "profile", "bench", "bench-generate"]),
    ("Set up", &["schema", "completions"]),
];

/// Shows the commands of `line` in groups where its help is printed.
pub(crate) fn grouped(line: Command) -> Command {
    let (header, literal) = (*line.get_styles().get_header(), *line.get_styles().get_literal());
    let width = GROUPS.iter().flat_map(|(_, names)| names.iter()).map(|name| name.len()).max().unwrap_or(0);
    let mut groups = String::new();
    for (title, names) in GROUPS {
        groups += &format!("\n{header}{title}:{header:#}\n");
        for name in names {
            let about = line.find_subcommand(name).and_then(Command::get_about).map(ToString::to_string);
            groups += &format!("  {literal}{name:width$}{literal:#}  {}\n", about.unwrap_or_default());
        }
    }
    line.help_template(format!(
        "{{about-with-newline}}\n{{usage-heading}} {{usage}}\n{groups}\n{header}Options:{header:#}\n{{options}}\n\n`firebrick help \
         COMMAND` says more.\n"
    ))
}

/// Returns the script that makes a shell complete the commands and options of `line`.
pub(crate) fn completions(mut line: Command, shell: Shell) -> String {
    let (name, mut script) = (line.get_name().to_owned(), Vec::new());
    generate(shell, &mut line, name, &mut script);
    String::from_utf8_lossy(&script).into_owned()
}

/// Writes a manual page for `line` and one for each of its commands into a folder.
pub(crate) fn write_manual(line: Command, folder: &Path) -> anyhow::Result<()> {
    let written = fs::create_dir_all(folder).and_then(|()| clap_mangen::generate_to(line, folder));
    written.with_context(|| format!("cannot write manual pages to {}", folder.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command_line;

    #[test]
    fn every_visible_command_is_in_one_group() {
        let line = command_line();
        let mut listed: Vec<&str> = GROUPS.iter().flat_map(|(_, names)| names.iter().copied()).collect();
        let mut visible: Vec<&str> =
            line.get_subcommands().filter(|command| !command.is_hide_set()).map(Command::get_name).collect();
        assert_eq!((listed[0], visible[0]), ("train", "train"));
        listed.sort_unstable();
        visible.sort_unstable();
        assert_eq!(listed, visible);
    }

    #[test]
    fn shells_offer_types_of_files_and_machines() {
        let script = completions(command_line(), Shell::Bash);
        for values in ["f32 f16 bf16 q8_0 q6_k q5_k_m q4_k_m q4_0", "all "] {
            assert!(script.contains(&format!("compgen -W \"{values}")), "{values} are not offered");
        }
    }

    #[test]
    fn the_help_of_export_begins_with_what_goes_in() {
        let help = command_line().find_subcommand_mut("export").unwrap().render_help().to_string();
        let places = ["GGUF", "--model", "--out", "      --adapter", "      --merge", "      --gguf"];
        let places = places.map(|word| help.find(word).expect(word));
        assert!(places.is_sorted(), "{help}");
        assert!(!completions(command_line(), Shell::Zsh).contains("clap"));
    }

    #[test]
    fn the_overview_has_a_line_for_each_command() {
        command_line().debug_assert();
        let help = command_line().render_help().to_string();
        let places = GROUPS.map(|(title, _)| help.find(&format!("\n{title}:\n")).expect(title));
        assert!(places.is_sorted() && help.starts_with("Train, try and check") && !help.contains('{'), "{help}");
        for name in GROUPS.iter().flat_map(|(_, names)| names.iter()) {
            let line = help.lines().find(|line| line.trim_start().starts_with(&format!("{name} "))).expect(name);
            assert!(line.trim_start().len() > name.len() + 20, "{line}");
        }
    }
}
