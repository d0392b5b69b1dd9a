//! Answers to commands and options of other programs, where clap would only call them unexpected: `answers.toml`.
//!
//! Trade-off: an option that is misspelled is left to clap, which names the one that is meant.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Command, Error};
use firebrick_trainer::config::instead_of_option;
use firebrick_trainer::console::shell_quoted;
use serde::Deserialize;

/// Answers, each with the words that it is for.
type Answers = BTreeMap<String, Vec<String>>;

#[derive(Deserialize)]
struct Table {
    commands: Answers,
    /// By commands with blanks between them.
    options: BTreeMap<String, Answers>,
    missing: BTreeMap<String, String>,
}

static TABLE: LazyLock<Table> =
    LazyLock::new(|| toml::from_str(include_str!("answers.toml")).expect("a test has read the table"));

const WITH_RECIPE: [&str; 4] = ["train", "plan", "inspect", "reward"];

/// Returns the answer to what was typed after the program's name, if it is better than `error`, which clap made of it.
pub(crate) fn answer(line: &Command, error: &Error, typed: &[String]) -> Option<String> {
    let text = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.as_str()),
        _ => None,
    };
    match error.kind() {
        ErrorKind::InvalidSubcommand => instead_of_command(text(ContextKind::InvalidSubcommand)?),
        ErrorKind::UnknownArgument => {
            let word = text(ContextKind::InvalidArg)?;
            // Of a word with one dash, clap names the first letter.
            let is_letter = word.starts_with('-') && !word.starts_with("--");
            let is_it = |other: &String| match other.strip_prefix(word) {
                Some(rest) => is_letter || rest.is_empty() || rest.starts_with('='),
                None => false,
            };
            let place = typed.iter().position(is_it)?;
            let word = if is_letter { typed[place].as_str() } else { word };
            let command = typed[..place].iter().find_map(|other| line.find_subcommand(other));
            instead_of_argument(command, word, typed, place, error.get(ContextKind::SuggestedArg).is_some())
        }
        ErrorKind::MissingRequiredArgument => {
            let name = typed.first()?;
            let forms = ["--merge", "--gguf", "--bnb-4bit"];
            let is_clear = match name.as_str() {
                "export" => typed.iter().any(|word| forms.iter().any(|form| word.starts_with(form))),
                _ => typed.len() > 1,
            };
            TABLE.missing.get(name).filter(|_| !is_clear).cloned()
        }
        _ => None,
    }
}

fn find<'a>(answers: &'a Answers, word: &str) -> Option<&'a str> {
    let found = answers.iter().find(|(_, words)| words.iter().any(|known| known == word));
    found.map(|(answer, _)| answer.as_str())
}

fn is_recipe(word: &str) -> bool {
    [".toml", ".yaml", ".yml"].iter().any(|end| word.ends_with(end))
}

fn instead_of_command(word: &str) -> Option<String> {
    if is_recipe(word) {
        let recipe = shell_quoted(word);
        return Some(format!(
            "{word} is a recipe: `firebrick plan {recipe}` shows what it does, and `firebrick train {recipe}` does it"
        ));
    }
    let answer = find(&TABLE.commands, &word.to_lowercase())?;
    Some(format!("there is no command '{word}': {answer}"))
}

/// Returns the answer to an option that a command does not have, or to a word that belongs to none.
fn instead_of_argument(
    command: Option<&Command>,
    word: &str,
    typed: &[String],
    place: usize,
    has_similar: bool,
) -> Option<String> {
    let Some(command) = command else {
        return Some(format!(
            "'{word}' comes before a command: write the command first, as in `firebrick train RECIPE`"
        ));
    };
    let name = command.get_name();
    if word.starts_with('-') && word.parse::<f64>().is_ok() {
        let option = typed[..place].iter().rev().find(|other| other.starts_with("--"))?;
        return Some(format!("{option} must be 0 or more, got {word}"));
    }
    if !word.starts_with('-') {
        return instead_of_word(command, word, typed);
    }
    let plain = word.trim_start_matches('-').replace('-', "_");
    let mut of_command = TABLE.options.iter().filter(|(names, _)| names.split(' ').any(|other| other == name));
    if let Some(answer) = of_command.find_map(|(_, answers)| find(answers, &plain)) {
        return Some(format!("`{name}` has no option {word}: {answer}"));
    }
    let takes_recipe = WITH_RECIPE.contains(&name);
    // What was typed as its value: after `=`, or the next word.
    let value = match typed[place].split_once('=') {
        Some((_, value)) => Some(value),
        None => typed.get(place + 1).map(String::as_str).filter(|next| !next.starts_with("--") && !is_recipe(next)),
    };
    let value = value.map(shell_quoted);
    let key = takes_recipe.then(|| instead_of_option(&plain, value.as_deref())).flatten();
    match key {
        Some(answer) if !(has_similar && answer.starts_with("did you mean")) => {
            Some(format!("`{name}` has no option {word}: {answer}"))
        }
        _ if has_similar => None,
        _ => {
            let keys = if takes_recipe { ", and a key of the recipe is changed with --set KEY=VALUE" } else { "" };
            Some(format!("`{name}` has no option {word}: `firebrick help {name}` lists them{keys}"))
        }
    }
}

/// Returns the answer to a word that belongs to no option: the model, if the command has an option for it that was not typed.
fn instead_of_word(command: &Command, word: &str, typed: &[String]) -> Option<String> {
    let name = command.get_name();
    let takes_model = command.get_arguments().any(|argument| argument.get_long() == Some("model"));
    let has_model = typed.iter().any(|other| other == "--model" || other.starts_with("--model="));
    let word = shell_quoted(word);
    Some(match takes_model && !has_model {
        true => format!("{word} belongs to no option: if it is the model, write `firebrick {name} --model {word}`"),
        false => format!(
            "{word} belongs to no option: `firebrick help {name}` lists them; put a text with blanks into quotes"
        ),
    })
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use firebrick_files::files_below;

    use super::*;
    use crate::command_line;

    fn said(words: &str) -> String {
        let typed: Vec<String> = words.split(' ').map(str::to_owned).collect();
        let line = command_line();
        let all = ["firebrick".to_owned()].into_iter().chain(typed.iter().cloned());
        let error = command_line().try_get_matches_from(all).expect_err(words);
        answer(&line, &error, &typed).unwrap_or_else(|| error.to_string())
    }

    #[test]
    fn what_other_programs_call_it_is_answered_in_one_line() {
        let cases = [
            ("finetune r.toml", "there is no command 'finetune': `firebrick train RECIPE`"),
            ("merge --model m", "`firebrick export --merge"),
            ("quantize m", "`firebrick export --gguf q4_k_m"),
            ("webui", "`firebrick new MODEL DATA`"),
            ("version", "`firebrick --version`"),
            ("mine.toml", "`firebrick plan mine.toml` shows"),
            ("--model m train", "write the command first"),
            (
                "train r.toml --learning_rate 1e-4",
                "`train` has no option --learning_rate: write --set train.learning_rate=1e-4",
            ),
            ("train r.toml --learning-rate=1e-4", "write --set train.learning_rate=1e-4"),
            ("train r.toml --output_dir out", "write --set output_dir=out"),
            ("train r.toml --nproc_per_node 8", "--gpus N` starts a process for each GPU"),
            ("train r.toml --deepspeed ds.json", "train.zero_stage says what they divide"),
            ("train r.toml --dry-run", "`firebrick plan RECIPE` shows what a run would do"),
            ("train --model_name_or_path a/b", "write --set model=a/b"),
            ("train r.toml --quux", "`firebrick help train` lists them, and a key of the recipe"),
            ("export --format gguf", "write --gguf TYPE, such as --gguf q4_k_m"),
            ("export", "say what to write: `firebrick export --gguf q4_k_m"),
            ("chat --model m --load-in-4bit", "write --nf4"),
            ("chat m", "write `firebrick chat --model m`"),
            ("chat --model m hello there", "put a text with blanks into quotes"),
            ("generate --model m --prompt x --temperature -1", "--temperature must be 0 or more, got -1"),
            ("generate --model m --prompt x --top-p -0.5", "--top-p must be 0 or more, got -0.5"),
            ("chat -m m", "write --model MODEL"),
            ("chat --model m --max_tokens 5", "write --max-new-tokens N"),
            ("push runs/q", "--to"),
            ("bench --model m --batch_size 3", "write --micro-batch ROWS"),
            ("train r.toml --resum", "--resume"),
        ];
        for (words, part) in cases {
            let said = said(words);
            assert!(said.contains(part), "{words}: {said}");
            let is_ours = !said.starts_with("error:");
            assert!(!is_ours || said.lines().count() == 1, "{words}: {said}");
        }
        for answers in TABLE.options.values().chain([&TABLE.commands]) {
            let mut words: Vec<&String> = answers.values().flatten().collect();
            let count = words.len();
            words.sort_unstable();
            words.dedup();
            assert_eq!(words.len(), count, "each word is there once");
        }
        for word in TABLE.commands.values().flatten() {
            assert!(command_line().find_subcommand(word).is_none(), "{word} is a command");
        }
        for names in TABLE.options.keys().chain(TABLE.missing.keys()) {
            assert!(names.split(' ').all(|name| command_line().find_subcommand(name).is_some()), "{names}");
        }
    }

    /// Returns the commands of this program that a text has in backticks.
    fn commands_in(text: &str) -> Vec<String> {
        let starts = ["firebrick", "{program}"].map(|name| format!("`{name} "));
        let found = starts.iter().flat_map(|start| text.split(start.as_str()).skip(1));
        found.filter_map(|rest| rest.split_once('`').map(|(words, _)| words.to_owned())).collect()
    }

    /// Returns a word of advice as a user would type it: what stands for something else is that.
    fn typed(word: &str) -> String {
        let word = word.trim_end_matches([',', '.']).trim_matches(['\'', '"']);
        let stands_for = match word {
            "N" | "STEPS" => "2",
            "TYPE" => "q8_0",
            "SHELL" => "bash",
            "MACHINE" => "h100",
            "COMMAND" => "train",
            "KEY=VALUE" => "train.steps=5",
            word if word.starts_with("{name}") => "chat",
            word if word.starts_with('{') => "word",
            word => word,
        };
        stands_for.to_owned()
    }

    fn lacks_value(error: &Error) -> bool {
        let value = error.get(ContextKind::InvalidValue);
        error.kind() == ErrorKind::InvalidValue && matches!(value, Some(ContextValue::String(text)) if text.is_empty())
    }

    /// Reads every command that a message or a page has in backticks as a command line. What it needs besides may be missing.
    #[test]
    fn every_command_that_is_advised_can_be_typed() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let mut files = vec![root.join("README.md")];
        for (folder, endings) in [("crates", &[".rs", ".toml"][..]), ("docs", &[".md"])] {
            let mut below = files_below(&root.join(folder)).unwrap();
            below.retain(|(name, _)| endings.iter().any(|ending| name.ends_with(ending)));
            below.retain(|(name, _)| !name.split('/').any(|part| ["fuzz", "target"].contains(&part)));
            files.extend(below.into_iter().map(|(_, path)| path));
        }
        let (mut wrong, mut count) = (Vec::new(), 0);
        for file in files {
            let text = fs::read_to_string(&file).unwrap();
            for advice in commands_in(&text).into_iter().filter(|advice| !advice.contains('\n')) {
                let words = advice.split_whitespace().map(typed);
                let all = ["firebrick".to_owned()].into_iter().chain(words);
                let harmless = [
                    ErrorKind::MissingRequiredArgument,
                    ErrorKind::DisplayHelp,
                    ErrorKind::DisplayVersion,
                    ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand,
                    ErrorKind::MissingSubcommand,
                ];
                count += 1;
                match command_line().try_get_matches_from(all) {
                    Err(error) if !harmless.contains(&error.kind()) && !lacks_value(&error) => {
                        wrong.push(format!("{}: `{advice}`: {error}", file.display()));
                    }
                    _ => {}
                }
            }
        }
        assert!(wrong.is_empty() && count > 60, "{count} commands\n{}", wrong.join("\n"));
    }
}
