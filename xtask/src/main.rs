//! `cargo xtask COMMAND`: the project's own commands. It builds and starts programs and checks the project rules; it knows
//! nothing about training.
//!
//! Trade-off: the options of the `firebrick` binary are explained only by itself, so asking for them may build it first.
#![allow(clippy::print_stdout, clippy::print_stderr)] // a command-line tool talks to its terminal

mod backend;
mod build;
mod cli;
mod dist;
mod lint;
#[cfg(test)]
mod models_table;
mod quickstart;
mod run_train;
mod slowest;
mod test;
mod tidy;
mod workspace;

use std::env;
use std::process::ExitCode;

use anyhow::Result;
use clap::Parser;

use crate::cli::{Cli, Command};
use crate::workspace::{Workspace, exit_code};

fn main() -> ExitCode {
    let cli = Cli::parse_from(cli::with_leading_dashes(env::args().collect()));
    match dispatch(cli.command) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Starts `command`. A command that xtask does not know goes to the `firebrick` binary, so a new subcommand there works here
/// on the same day; a near misspelling of a known command is refused before any build.
fn dispatch(command: Option<Command>) -> Result<ExitCode> {
    let Some(command) = command else {
        return cli::print_overview();
    };
    match command {
        Command::Test(request) => test::run(&Workspace::find()?, &request.args),
        Command::Lint { stages } => lint::run(&Workspace::find()?, &stages),
        Command::Tidy { all, root } => {
            let workspace = root.as_deref().map_or_else(Workspace::find, Workspace::at)?;
            tidy::run(&workspace, all).map(exit_code)
        }
        Command::Dist { tests: true, .. } => dist::run_gpu_suite(&Workspace::find()?),
        Command::Dist { backend, .. } => dist::run(&Workspace::find()?, backend.as_deref()),
        Command::QuickstartData { root: Some(folder) } => quickstart::run(&folder).map(|()| ExitCode::SUCCESS),
        Command::QuickstartData { root: None } => {
            quickstart::run(Workspace::find()?.root()).map(|()| ExitCode::SUCCESS)
        }
        train => {
            let (subcommand, args) = train.into_train_call()?;
            run_train::run(&Workspace::find()?, &subcommand, &args)
        }
    }
}
