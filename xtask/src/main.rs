//! `cargo xtask <command>`: the project's own commands. It builds and starts things and checks the house rules; it
//! knows nothing of training. Few dependencies and plain argument handling keep its cold build at seconds: the price
//! is that options are matched by hand here, and that the `train` binary's own options are explained only by itself.
#![allow(clippy::print_stdout, clippy::print_stderr)] // a command-line tool talks to its terminal

mod backend;
mod build;
mod dist;
mod dist_tests;
mod help;
mod lint;
mod quickstart;
mod run_train;
mod test;
mod tidy;
mod workspace;

use std::env;
use std::process::ExitCode;

use anyhow::Result;

use crate::workspace::Workspace;

fn main() -> ExitCode {
    let args: Vec<String> = env::args().skip(1).collect();
    match dispatch(&args) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Starts the command that `args` names. What xtask does not know itself goes to the `train` binary, so a new
/// subcommand there works here on the same day; a near misspelling of a known command is refused before any build.
fn dispatch(args: &[String]) -> Result<ExitCode> {
    let Some((command, rest)) = args.split_first() else {
        print!("{}", help::OVERVIEW);
        return Ok(ExitCode::SUCCESS);
    };
    let asks_for_help = rest.iter().take_while(|arg| *arg != "--").any(|arg| arg == "--help" || arg == "-h");
    if matches!(command.as_str(), "help" | "--help" | "-h") {
        print!("{}", rest.first().map_or(help::OVERVIEW, |about| help::of(about)));
        return Ok(ExitCode::SUCCESS);
    }
    if asks_for_help && help::OWN_COMMANDS.contains(&command.as_str()) {
        print!("{}", help::of(command));
        return Ok(ExitCode::SUCCESS);
    }
    let workspace = Workspace::find()?;
    match command.as_str() {
        "test" => test::run(&workspace, rest),
        "lint" => lint::run(&workspace, rest),
        "tidy" => tidy::run(&workspace, rest),
        "dist" => dist::run(&workspace, rest),
        "quickstart-data" => quickstart::run(rest).map(|()| ExitCode::SUCCESS),
        other => {
            help::refuse_misspelling(other)?;
            run_train::run(&workspace, other, rest)
        }
    }
}
