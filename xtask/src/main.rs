//! `cargo xtask COMMAND`: the project's own commands. It builds and starts programs and checks the project rules; it knows
//! nothing about training.
//!
//! Trade-off: only the `firebrick` binary explains its options, so `--help` may build it first.
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
mod site;
mod slowest;
mod test;
mod tidy;
mod workspace;

use std::env;
use std::process::ExitCode;

use anyhow::Result;

use crate::cli::{Call, Command};
use crate::workspace::{Workspace, exit_code};

fn main() -> ExitCode {
    let call = Call::parse(env::args().collect()).unwrap_or_else(|error| error.exit());
    match dispatch(call) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Carries out `call`.
fn dispatch(call: Call) -> Result<ExitCode> {
    let command = match call {
        Call::Overview => return Ok(cli::command_line().print_help().map(|()| ExitCode::SUCCESS)?),
        Call::PassedOn(name, args) => return run_train::run(&Workspace::find()?, &name, &args),
        Call::Own(command) => command,
    };
    match command {
        Command::Test { args } => test::run(&Workspace::find()?, &args),
        Command::Lint { stages } => lint::run(&Workspace::find()?, &stages),
        Command::Tidy { root } => {
            let workspace = root.as_deref().map_or_else(Workspace::find, Workspace::at)?;
            tidy::run(&workspace).map(exit_code)
        }
        Command::Site { out } => site::run(&Workspace::find()?, out).map(|()| ExitCode::SUCCESS),
        Command::Dist { tests: true, .. } => dist::run_gpu_suite(&Workspace::find()?),
        Command::Dist { target, backend, wheel, .. } => {
            dist::run(&Workspace::find()?, target.as_deref(), backend.as_deref(), wheel)
        }
        Command::QuickstartData { root } => {
            let root = root.map_or_else(|| Workspace::find().map(|workspace| workspace.root().to_owned()), Ok)?;
            quickstart::run(&root).map(|()| ExitCode::SUCCESS)
        }
    }
}
