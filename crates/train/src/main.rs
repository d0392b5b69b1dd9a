//! The command line of `train`: parse, call, report one clear error.
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "this is the edge of the program")]

use std::io::IsTerminal;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::{Args, Parser, Subcommand};
use firebrick_hwprofile::HardwareProfile;
use firebrick_hwprofile::measure::ProcessClock;
use firebrick_model::{BaseStorage, Sampler};
use firebrick_train::backend::{self, device_work};
use firebrick_train::bench::{BenchOptions, bench};
use firebrick_train::config::{BackendChoice, RunConfig, json_schema};
use firebrick_train::generate::{WriteOptions, generate};
use firebrick_train::inspect::{Style, inspect};
use firebrick_train::interrupt::Interrupt;
use firebrick_train::prepare::prepare;
use firebrick_train::report::{Outcome, Voice};
use firebrick_train::run::{RunOptions, run};
use firebrick_train::verify::{VerifyOptions, verify};
use firebrick_train::{RunError, with_backend};

/// glibc returns an operation's megabytes to the system and faults them in again for the next one; that took a quarter of a
/// CPU step (docs/decisions.md).
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Train, try and check language models from one TOML recipe.
#[derive(Parser)]
#[command(name = "train", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run a recipe: plan, evaluate, train, save.
    Train {
        #[command(flatten)]
        recipe: Recipe,
        /// Continue the run of this name from its newest checkpoint.
        #[arg(long)]
        resume: bool,
    },
    /// Read a recipe and its data, and print what a run would do and why; no weight is read.
    Plan {
        #[command(flatten)]
        recipe: Recipe,
    },
    /// Show what a recipe trains on: counts, lengths, packing, dropped rows, and sample rows with trained tokens marked.
    Inspect(Inspect),
    /// Time training steps of a model on made-up tokens: speed, memory, and where the time goes.
    Bench(Bench),
    /// Continue prompts with a model.
    Generate(Generate),
    /// Compare a model's logits with a golden file.
    Verify(Verify),
    /// Print the JSON schema of recipes.
    Schema,
}

#[derive(Args)]
struct Recipe {
    /// The recipe: a path, or the name of a file in configs/.
    #[arg(long)]
    config: PathBuf,
    /// Override a key, e.g. --set train.learning_rate=1e-4. May be given several times.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
}

#[derive(Args)]
struct Inspect {
    #[command(flatten)]
    recipe: Recipe,
    /// Sample rows of each set, spread evenly.
    #[arg(long, default_value_t = 3)]
    rows: usize,
    /// Write the same, with whole rows, as one HTML page too.
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
}

#[derive(Args)]
struct Weights {
    /// Model folder: config.json, safetensors, tokenizer files.
    #[arg(long)]
    model: PathBuf,
    /// PEFT adapter folder.
    #[arg(long)]
    adapter: Option<PathBuf>,
    /// Keep the base's projections in 4 bits (NF4, double quantisation), as in QLoRA training.
    #[arg(long)]
    nf4: bool,
    /// Where tensors live.
    #[arg(long, value_enum, default_value = "auto")]
    backend: BackendChoice,
}

#[derive(Args)]
struct Bench {
    #[command(flatten)]
    options: BenchOptions,
    /// Print one JSON object as the last line, and all else to standard error.
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
struct Generate {
    #[command(flatten)]
    weights: Weights,
    /// Text to answer or continue. May be given several times.
    #[arg(long, required = true)]
    prompt: Vec<String>,
    /// Treat prompts as a user's turn, rendered by the tokenizer's chat template.
    #[arg(long)]
    chat: bool,
    /// Most new tokens a prompt.
    #[arg(long, default_value_t = 64)]
    max_new_tokens: usize,
    /// 0 is greedy.
    #[arg(long, default_value_t = 0.0)]
    temperature: f32,
    /// Keep the most probable tokens up to this sum of probabilities.
    #[arg(long, default_value_t = 1.0)]
    top_p: f32,
    /// Seed of the sampler.
    #[arg(long, default_value_t = 0)]
    seed: u64,
}

#[derive(Args)]
struct Verify {
    #[command(flatten)]
    weights: Weights,
    /// Safetensors file with input_ids (i64, B x T), logits (f32, B x T x V) and optionally loss (one f32).
    #[arg(long)]
    golden: PathBuf,
    /// Largest absolute difference of a logit that passes.
    #[arg(long, default_value_t = 2e-4)]
    tol: f32,
}

fn main() -> ExitCode {
    let clock = ProcessClock::start();
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| "warn".into()))
        .with_writer(std::io::stderr)
        .init();
    match execute(Cli::parse().command, clock) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn execute(command: Command, clock: ProcessClock) -> anyhow::Result<()> {
    match command {
        Command::Train { recipe, resume } => train(&recipe, resume),
        Command::Plan { recipe } => plan(&recipe),
        Command::Inspect(arguments) => show_data(&arguments),
        Command::Bench(arguments) => time_steps(&arguments, clock),
        Command::Generate(arguments) => write_text(arguments),
        Command::Verify(arguments) => compare(arguments),
        Command::Schema => {
            print!("{}", json_schema());
            Ok(())
        }
    }
}

fn train(recipe: &Recipe, resume: bool) -> anyhow::Result<()> {
    let config = RunConfig::load(&recipe.config, &recipe.overrides)?;
    let interrupt = Interrupt::install().context("cannot listen for Ctrl-C")?;
    match run(RunOptions { config, resume, voice: Voice::Aloud, interrupt })? {
        Outcome::Finished(_) => {}
        Outcome::Interrupted { step, name } => {
            let overrides: String = recipe.overrides.iter().map(|set| format!(" --set {set}")).collect();
            println!(
                "stopped after step {step}; everything is saved. Go on with\n  cargo xtask train --config {}{overrides} --set \
                 name={name} --resume",
                recipe.config.display()
            );
        }
    }
    Ok(())
}

fn plan(recipe: &Recipe) -> anyhow::Result<()> {
    let prepared = prepare(RunConfig::load(&recipe.config, &recipe.overrides)?)?;
    for note in &prepared.data_notes {
        println!("{note}");
    }
    Voice::Aloud.plan(&prepared.config.name, &prepared.plan);
    Ok(())
}

fn show_data(arguments: &Inspect) -> anyhow::Result<()> {
    let config = RunConfig::load(&arguments.recipe.config, &arguments.recipe.overrides)?;
    let inspection = inspect(&config, arguments.rows)?;
    let no_colours = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let style = if std::io::stdout().is_terminal() && !no_colours { Style::Colours } else { Style::Markers };
    print!("{}", inspection.text(style));
    if let Some(path) = &arguments.html {
        std::fs::write(path, inspection.page()).with_context(|| format!("cannot write {}", path.display()))?;
        println!("\nwritten to {}", path.display());
    }
    Ok(())
}

fn time_steps(arguments: &Bench, clock: ProcessClock) -> anyhow::Result<()> {
    let report = bench(&arguments.options, clock, &|note| eprintln!("{note}"))?;
    if arguments.json {
        eprintln!("{report}");
        println!("{}", serde_json::to_string(&report)?);
    } else {
        println!("{report}");
    }
    Ok(())
}

fn write_text(arguments: Generate) -> anyhow::Result<()> {
    let kind = choose(&arguments.weights)?;
    let options = WriteOptions {
        sampler: Sampler::new(arguments.temperature, arguments.top_p, arguments.seed)?,
        storage: storage(&arguments.weights),
        model: arguments.weights.model,
        adapter: arguments.weights.adapter,
        prompts: arguments.prompt,
        chat: arguments.chat,
        max_new_tokens: arguments.max_new_tokens,
    };
    let texts = with_backend!(kind, B => device_work(|| generate::<B>(&options, &Default::default())))?;
    for (prompt, text) in options.prompts.iter().zip(texts) {
        println!("{prompt}\n{text}\n");
    }
    Ok(())
}

fn compare(arguments: Verify) -> anyhow::Result<()> {
    let kind = choose(&arguments.weights)?;
    let options = VerifyOptions {
        storage: storage(&arguments.weights),
        model: arguments.weights.model,
        adapter: arguments.weights.adapter,
        golden: arguments.golden,
        tolerance: arguments.tol,
    };
    let found = with_backend!(kind, B => device_work(|| verify::<B>(&options, &Default::default())))?;
    println!("largest difference  {:e}", found.largest);
    println!("mean difference     {:e}", found.mean);
    println!("top-1 agreement     {:.2} %", 100.0 * found.top1_agreement);
    if let Some(loss) = found.loss {
        println!("loss difference     {loss:e}");
    }
    if found.largest > options.tolerance {
        return Err(RunError::VerifyFailed { largest: found.largest, tolerance: options.tolerance }.into());
    }
    println!("within {:e}", options.tolerance);
    Ok(())
}

fn choose(weights: &Weights) -> Result<backend::BackendKind, RunError> {
    Ok(backend::choose(weights.backend, &HardwareProfile::detect())?.value)
}

fn storage(weights: &Weights) -> BaseStorage {
    if weights.nf4 { BaseStorage::Nf4 { double_quant: true } } else { BaseStorage::Frozen }
}
