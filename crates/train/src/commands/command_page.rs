//! docs/command-line.md: every command with its options, made from what the command line is read with, so that the page is never out of date.

use std::fs;
use std::path::Path;

use clap::{Arg, Command};

use super::overview::GROUPS;
use crate::command_line;

/// The page up to its first group.
const BEGIN: &str = "# Command line

Every command of `firebrick` with its options; `firebrick help COMMAND` says more, and `firebrick completions SHELL` makes
a shell complete them. From the sources the same commands are `cargo xtask COMMAND`, which builds what a recipe needs
first. A command ends with status 0, with 1 after an error, with 2 where it was not understood; a run that a signal ends
with 128 and the signal's number, one whose time is up with 124.
";

fn page() -> String {
    let line = command_line();
    let mut text = BEGIN.to_owned();
    for (title, names) in GROUPS {
        text += &format!("\n## {title}\n");
        for name in names {
            text += &section(line.find_subcommand(name).expect("a test compares groups and commands"));
        }
    }
    text
}

fn section(command: &Command) -> String {
    let name = command.get_name();
    let arguments: Vec<&Arg> = command.get_arguments().filter(|argument| !argument.is_hide_set()).collect();
    let positional = arguments.iter().filter(|argument| argument.is_positional());
    let usage: String = positional.map(|argument| format!(" {}", value_of(argument))).collect();
    let about = command.get_about().map(ToString::to_string).unwrap_or_default();
    let mut text = format!("\n### {name}\n\n`firebrick {name}{usage}`: {about}\n");
    if !arguments.is_empty() {
        text += "\n| option | |\n|---|---|\n";
    }
    for argument in arguments {
        let option = match argument.get_long() {
            Some(long) => format!("--{long} {}", value_of(argument)),
            None => value_of(argument),
        };
        let help = argument.get_help().map(ToString::to_string).unwrap_or_default();
        let values = argument.get_default_values().iter().map(|value| value.to_string_lossy().into_owned());
        let default = values.collect::<Vec<_>>().join(",");
        let is_flag = !argument.get_action().takes_values();
        let default = if is_flag || default.is_empty() { String::new() } else { format!(". Default {default}") };
        text += &format!(
            "| `{}` | {}{default} |\n",
            option.trim().replace('|', "\\|"),
            help.replace('|', "\\|").replace(['<', '>'], "")
        );
    }
    text
}

/// Returns the names of an argument's values, in brackets where it may be left out.
fn value_of(argument: &Arg) -> String {
    if !argument.get_action().takes_values() {
        return String::new();
    }
    let names = argument.get_value_names().unwrap_or_default().iter().map(ToString::to_string);
    let names = names.collect::<Vec<_>>().join(" ");
    if argument.is_positional() && !argument.is_required_set() { format!("[{names}]") } else { names }
}

#[test]
fn the_page_of_commands_is_that_of_the_program() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/command-line.md");
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        fs::write(&path, page()).unwrap();
    }
    let kept = fs::read_to_string(&path).unwrap_or_default();
    assert!(kept == page(), "run this test once with UPDATE_GOLDEN=1 to write {}", path.display());
}
