#![doc = include_str!("../README.md")]

pub mod bench;
pub mod bench_generate;
pub mod chat;
mod commands;
pub mod convert;
pub mod export;
pub mod inspect;
mod offered;
pub mod page;
pub mod plot;
pub mod push;
pub mod report;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand};
use clap_complete::Shell;
use firebrick_hwprofile::measure::ProcessClock;
use firebrick_trainer::config::json_schema;
use firebrick_trainer::console::{Console, error_message};
use firebrick_trainer::run::device::prepare_process;

use crate::commands::answers::answer;
use crate::commands::{machine, overview, recipes, rewards, show_reports, text, timing, training, warn};
use crate::export::{ExportOptions, export};
use crate::push::{PushOptions, push};

/// Train, try and check language models from one TOML or YAML recipe.
#[derive(Parser)]
#[command(name = "firebrick", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run a recipe: plan, evaluate, train, save.
    Train(training::Train),
    /// Read a recipe and its data, and print what a run would do and why, here or on a machine that is named; no weights are read.
    Plan(recipes::PlanArguments),
    /// Write a commented recipe for a model and data that plans here: rows, batch, template and 4 bits as they need.
    New(recipes::New),
    /// Turn a configuration of axolotl, LLaMA-Factory, TRL, ms-swift, torchtune or mlx-lm into a recipe; what does not carry over stays as comments with its reason.
    Convert(recipes::Convert),
    /// Show what a recipe trains on: counts, lengths, packing, dropped records, and sample rows with loss tokens marked.
    Inspect(recipes::Inspect),
    /// Try the rewards of a recipe on completions in a file, without a model.
    Reward(rewards::TryRewards),
    /// Write the report of a run folder: one HTML page with plots, as a run writes it at its end.
    Report(Report),
    /// Continue prompts with a model.
    Generate(text::Generate),
    /// Talk to a model in the terminal, through its chat template.
    Chat(text::Talk),
    /// Write what a run made for other programs: a merged model, one GGUF file for llama.cpp and Ollama, or 4 bits for transformers.
    Export(ExportOptions),
    /// Send an adapter folder or a model folder to the Hugging Face Hub.
    Push(PushOptions),
    /// Compare a model's logits with a golden file.
    Verify(text::Verify),
    /// Check what a run needs here: driver, libraries, cards, disk, cache, Hub, a kernel, and what `auto` chooses. Status 1: a run would fail.
    Doctor,
    /// Print what machine this is: processor, memory, accelerators with their peaks and links, and how they are tuned.
    Profile(machine::Profile),
    /// Time training steps of a model on synthetic tokens: speed, memory, and where the time goes.
    Bench(timing::Bench),
    /// Time the writing of text with a model, on random prompts: tokens per second for one sequence and for many.
    BenchGenerate(timing::BenchGenerate),
    /// Print the JSON schema of recipes.
    Schema,
    /// Print a script that makes a shell complete commands and options: load it in the shell's startup file.
    Completions {
        /// The shell.
        shell: Shell,
    },
    /// Write the manual pages, firebrick.1 and one for each command.
    #[command(hide = true)]
    Man {
        /// The folder to write to.
        folder: PathBuf,
    },
}

#[derive(Args)]
struct Report {
    /// The folder of the run, finished or not, such as runs/my-run.
    run: PathBuf,
    /// Write the page here instead of to report.html in that folder.
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

/// Describes everything that can be typed, for clap.
fn command_line() -> clap::Command {
    overview::grouped(Cli::command())
}

/// Runs the command line: parses it, calls the command, and reports an error as one message.
pub fn main() -> ExitCode {
    let clock = ProcessClock::start();
    show_reports();
    let typed = match command_line().try_get_matches().and_then(|matches| Cli::from_arg_matches(&matches)) {
        Ok(typed) => typed,
        Err(error) => return refused(&error),
    };
    prepare_process();
    let done = |()| ExitCode::SUCCESS;
    let result = match typed.command {
        Command::Train(arguments) => training::train(arguments),
        Command::Plan(arguments) => recipes::plan(&arguments).map(done),
        Command::New(arguments) => recipes::write_new(arguments).map(done),
        Command::Convert(arguments) => recipes::convert_file(&arguments).map(done),
        Command::Doctor => Ok(machine::doctor()),
        Command::Profile(arguments) => machine::profile(&arguments).map(done),
        Command::Inspect(arguments) => recipes::show_data(&arguments).map(done),
        Command::Reward(arguments) => rewards::try_rewards(&arguments).map(done),
        Command::Bench(arguments) => timing::time_steps(&arguments, clock),
        Command::BenchGenerate(arguments) => timing::time_generation(&arguments).map(done),
        Command::Generate(arguments) => text::write_text(arguments).map(done),
        Command::Chat(arguments) => text::talk(arguments).map(done),
        Command::Export(options) => printed(export(&options)),
        Command::Push(options) => printed(push(&options, Console::VERBOSE)),
        Command::Verify(arguments) => text::compare(arguments).map(done),
        Command::Report(Report { run, out }) => {
            printed(report::write(&run, out.as_deref()).map(|page| format!("written to {}", page.display())))
        }
        Command::Schema => printed(anyhow::Ok(json_schema().trim_end())),
        Command::Completions { shell } => printed(anyhow::Ok(overview::completions(command_line(), shell).trim_end())),
        Command::Man { folder } => overview::write_manual(command_line(), &folder).map(done),
    };
    result.unwrap_or_else(|error| {
        warn(&format!("error: {}", error_message(&*error)));
        ExitCode::FAILURE
    })
}

/// Prints why a command line is not understood; where it is in the words of other programs, what does the same here.
fn refused(error: &clap::Error) -> ExitCode {
    let typed: Vec<String> = std::env::args_os().skip(1).map(|word| word.to_string_lossy().into_owned()).collect();
    match answer(&command_line(), error, &typed) {
        Some(answer) => {
            warn(&format!("error: {answer}"));
            ExitCode::from(2)
        }
        None => error.exit(),
    }
}

fn printed<E: Into<anyhow::Error>>(text: Result<impl AsRef<str>, E>) -> anyhow::Result<ExitCode> {
    Console::VERBOSE.print(text.map_err(Into::into)?.as_ref());
    Ok(ExitCode::SUCCESS)
}
