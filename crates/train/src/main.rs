//! The command line of `train`: parse, call, report one clear error.
//!
//! Trade-off: every backend of the binary is compiled into every command.

use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::Context;
use clap::{Args, Parser, Subcommand};
use firebrick_arch::ModelConfig;
use firebrick_hwprofile::measure::ProcessClock;
use firebrick_hwprofile::peaks::cache_folder;
use firebrick_hwprofile::spec::UnknownMachine;
use firebrick_hwprofile::{AcceleratorSpec, HardwareProfile};
use firebrick_kernels::{BackendKind, BaseStorage};
use firebrick_parallel::{Placement, Ranks};
use firebrick_precision::{Format, QuantFormat};
#[cfg(feature = "flex")]
use firebrick_train::bench::matrix::{MatrixOptions, bench_matrix};
use firebrick_train::bench::{BenchOptions, GenerationOptions, bench, bench_generation, measure_peaks};
use firebrick_train::compress::{CompressOptions, DecompressOptions, compress, decompress};
use firebrick_train::config::{BackendChoice, EvalConfig, RunConfig, compute, json_schema};
use firebrick_train::console::{Console, Outcome, error_message};
use firebrick_train::export::{ExportOptions, export};
use firebrick_train::hub::{Need, model_folder};
use firebrick_train::inspect::{Style, inspect};
use firebrick_train::plan::{PlanRequest, choose_backend, compute_format};
use firebrick_train::push::{PushOptions, push};
use firebrick_train::run::chat::{ChatRequest, ChatTerminal, HELP, chat};
use firebrick_train::run::chat_settings;
use firebrick_train::run::device::device_work;
use firebrick_train::run::generate::{GenerateRequest, LoadOptions, generate, generate_streaming, read_prompts};
use firebrick_train::run::interrupt::{Interrupt, exit_status};
use firebrick_train::run::local_ranks::{self, GpuCount};
use firebrick_train::run::prepare::prepare_for;
use firebrick_train::run::sampling::{ChosenSampling, TypedSampling};
use firebrick_train::run::trace::TraceSteps;
use firebrick_train::run::verify::{VerifyOptions, verify};
use firebrick_train::run::{RunOptions, reading_data, run};
use firebrick_train::state::resume_point::ResumeFrom;
use firebrick_train::{RunError, report, with_backend};
use serde_json::json;

/// glibc returns an operation's megabytes to the system and faults them in again for the next one; that took a quarter of a
/// CPU step (docs/decisions.md).
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Train, try and check language models from one TOML or YAML recipe.
#[derive(Parser)]
#[command(name = "train", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run a recipe: plan, evaluate, train, save.
    Train(Train),
    /// Read a recipe and its data, and print what a run would do and why, here or on a machine that is named; no weights are read.
    Plan(PlanArguments),
    /// Print what machine this is: processor, memory, accelerators with their peaks and links, and how they are tuned.
    Profile(Profile),
    /// Show what a recipe trains on: counts, lengths, packing, dropped records, and sample rows with loss tokens marked.
    Inspect(Inspect),
    /// Time training steps of a model on synthetic tokens: speed, memory, and where the time goes.
    Bench(Bench),
    /// Time the operations of training and whole steps on every backend that is there, each checked against its reference.
    #[cfg(feature = "flex")]
    BenchMatrix(BenchMatrix),
    /// Time the writing of text with a model, on random prompts: tokens per second for one sequence and for many.
    BenchGenerate(BenchGenerate),
    /// Continue prompts with a model.
    Generate(Generate),
    /// Talk to a model in the terminal, through its chat template.
    Chat(Talk),
    /// Write what a run made in the form that other programs take: an adapter merged into its base.
    Export(ExportOptions),
    /// Send an adapter folder or a model folder to the Hugging Face Hub.
    Push(PushOptions),
    /// Write a model folder with compressed weights, which every command reads as it is.
    Compress(CompressOptions),
    /// Write a compressed model folder as it was, byte for byte.
    Decompress(DecompressOptions),
    /// Compare a model's logits with a golden file.
    Verify(Verify),
    /// Write the report of a run folder: one HTML page with plots, as a run writes it at its end.
    Report(Report),
    /// Print the JSON schema of recipes.
    Schema,
}

#[derive(Args)]
struct Train {
    /// The recipe: a path, or the name of a file in configs/. Without it, the saved recipe of the run to resume.
    #[arg(long, required_unless_present = "resume")]
    config: Option<PathBuf>,
    /// Override a key, e.g. --set train.learning_rate=1e-4. May be given several times.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// Continue a run from its newest checkpoint. RUN is a run folder, a run's name or a checkpoint folder; without it, the newest
    /// run of the recipe's name.
    #[arg(long, value_name = "RUN", num_args = 0..=1)]
    resume: Option<Option<PathBuf>>,
    /// Trace these steps, e.g. 5-8: when the host queued and waited and when the device ran what, written to trace.json in the run
    /// folder, for <https://ui.perfetto.dev>. Only CUDA shows its device.
    #[arg(long, value_name = "STEPS")]
    trace: Option<TraceSteps>,
    /// Train although the plan says that the run does not fit into memory.
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    ranks: LocalRankCount,
}

/// Ranks on this machine. Other launchers (torchrun, srun, mpirun) start ranks themselves: docs/scaling.md.
#[derive(Args)]
struct LocalRankCount {
    /// Train on this many GPUs of this machine, or on all: one process per GPU, each with its own rows of every step.
    #[arg(long, value_name = "N|all", conflicts_with = "ranks")]
    gpus: Option<GpuCount>,
    /// The same with this many processes, for backends that compute on the CPU.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    ranks: Option<u32>,
}

/// What this process is.
enum Place {
    /// It started ranks, which have ended with this status.
    Supervised(i32),
    /// A rank of a job, or the only one.
    Rank(Option<Box<Placement>>),
}

impl LocalRankCount {
    /// Starts the ranks that are requested, unless this process is one of them, or was started as one by another launcher.
    fn place(&self, backend: BackendChoice, is_for_programs: bool) -> Result<Place, RunError> {
        let placement = local_ranks::placement(!self.words().is_empty())?;
        if placement.is_none() {
            let count = local_ranks::requested(backend, self.gpus, self.ranks.map(|ranks| ranks as usize))?;
            if count > 1 {
                return Ok(Place::Supervised(local_ranks::run_supervised(count, is_for_programs)?));
            }
        }
        Ok(Place::Rank(placement.map(Box::new)))
    }

    /// The option as it was typed.
    fn words(&self) -> Vec<String> {
        let gpus = self.gpus.map(|gpus| match gpus {
            GpuCount::All => ["--gpus".to_owned(), "all".to_owned()],
            GpuCount::Number(number) => ["--gpus".to_owned(), number.to_string()],
        });
        gpus.or(self.ranks.map(|ranks| ["--ranks".to_owned(), ranks.to_string()])).into_iter().flatten().collect()
    }
}

impl Train {
    /// The recipe file: the given one, or the config.toml of the run folder that RUN is or is inside of.
    fn config(&self) -> anyhow::Result<PathBuf> {
        if let Some(config) = &self.config {
            return Ok(config.clone());
        }
        let named = self.resume.as_ref().and_then(Option::as_ref);
        let folders = named.into_iter().flat_map(|run| run.ancestors().take(3));
        let found = folders.map(|folder| folder.join("config.toml")).find(|path| path.is_file());
        found.context("give the recipe with --config FILE, or the folder of the run as in --resume runs/my-run")
    }
}

#[derive(Args)]
struct PlanArguments {
    #[command(flatten)]
    recipe: Recipe,
    /// Plan for this machine instead of the one at hand: b200, h100, a100, l4, mi300x, m4-max, tpu-v5p, ...; a wrong name lists all.
    #[arg(long = "for", value_name = "MACHINE", value_parser = machine)]
    machine: Option<&'static AcceleratorSpec>,
    /// Price of the machine per hour, for the cost of the run.
    #[arg(long, value_name = "PRICE", value_parser = price)]
    price_per_hour: Option<f64>,
    /// Print the plan of a run that does not fit into memory, too.
    #[arg(long)]
    force: bool,
    /// Plan for a run of this many ranks, on one machine or many.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    ranks: u32,
}

#[derive(Args)]
struct Profile {
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
    /// Describe this machine of the table instead of the one at hand.
    #[arg(long = "for", value_name = "MACHINE", value_parser = machine)]
    machine: Option<&'static AcceleratorSpec>,
    /// Time large matrix multiplications of each format and copies, and keep the rates for the plans of this machine.
    #[arg(long, conflicts_with = "machine")]
    measure: bool,
    /// The backend to measure: auto, cuda, wgpu, candle or flex.
    #[arg(long, default_value_t, requires = "measure")]
    backend: BackendChoice,
}

/// The row of a machine that was typed.
fn machine(name: &str) -> Result<&'static AcceleratorSpec, UnknownMachine> {
    AcceleratorSpec::named(name)
}

/// A price: a number above 0.
fn price(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(price) if price > 0.0 && price.is_finite() => Ok(price),
        _ => Err("expected a price above 0, such as 2.50".to_owned()),
    }
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

impl Recipe {
    fn load(&self) -> anyhow::Result<RunConfig> {
        Ok(RunConfig::load(&self.config, &self.overrides)?)
    }
}

#[derive(Args)]
struct Inspect {
    #[command(flatten)]
    recipe: Recipe,
    /// Samples of each kind: rows spread evenly; the longest, the shortest and random documents.
    #[arg(long, default_value_t = 3)]
    rows: usize,
    /// Write one HTML page too: complete samples with token boundaries and ids, and the records with findings.
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
}

#[derive(Args)]
struct Weights {
    /// Model folder (config.json, safetensors, tokenizer files) or id of the Hub: OWNER/NAME or OWNER/NAME@REVISION.
    #[arg(long)]
    model: PathBuf,
    /// PEFT adapter folder, or id of the Hub.
    #[arg(long)]
    adapter: Option<PathBuf>,
    /// Store the base's projections in this format: nf4, nf4_double_quant, nvfp4, mxfp4 or fp8, as training on it does.
    #[arg(long, value_name = "FORMAT")]
    base: Option<QuantFormat>,
    /// The same as `--base nf4_double_quant`.
    #[arg(long, conflicts_with = "base")]
    nf4: bool,
    /// Where tensors live: auto, cuda, wgpu, candle or flex.
    #[arg(long, default_value_t)]
    backend: BackendChoice,
}

#[derive(Args)]
struct Bench {
    #[command(flatten)]
    options: BenchOptions,
    /// Print one JSON object as the last line, and everything else to standard error.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    ranks: LocalRankCount,
}

#[cfg(feature = "flex")]
#[derive(Args)]
struct BenchMatrix {
    #[command(flatten)]
    options: MatrixOptions,
}

#[derive(Args)]
struct BenchGenerate {
    #[command(flatten)]
    options: GenerationOptions,
    /// Print one JSON object as the last line, and everything else to standard error.
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
struct Report {
    /// The folder of the run, finished or not, such as runs/my-run.
    run: PathBuf,
    /// Write the page here instead of to report.html in that folder.
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

#[derive(Args)]
struct Generate {
    #[command(flatten)]
    weights: Weights,
    /// Text to answer or continue. May be given several times.
    #[arg(long, required_unless_present = "input")]
    prompt: Vec<String>,
    /// A file of prompts: one per line, or with the ending .jsonl the `prompt` of the object of each line.
    #[arg(long, value_name = "FILE", conflicts_with = "prompt")]
    input: Option<PathBuf>,
    /// Write the answers here, an object with `prompt` and `text` on each line, instead of printing them.
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Prompts that are answered at the same time, at most.
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..))]
    batch: u32,
    /// Treat prompts as a user's turn, rendered by the tokenizer's chat template.
    #[arg(long)]
    chat: bool,
    /// Maximum new tokens per prompt.
    #[arg(long, default_value_t = EvalConfig::default().max_new_tokens)]
    max_new_tokens: usize,
    /// The system message of a chat; an empty text for none. Default: the one of the training, where a run saved it.
    #[arg(long, value_name = "TEXT", requires = "chat")]
    system_prompt: Option<String>,
    #[command(flatten)]
    choice: TokenChoice,
}

/// How text is written.
#[derive(Args)]
struct TokenChoice {
    /// Number format of activations and matrix multiplications: float32, bfloat16 or float16. Default: bfloat16 on CUDA, float32
    /// elsewhere.
    #[arg(long, value_name = "FORMAT", value_parser = compute::parse_format)]
    dtype: Option<Format>,
    /// 0 is greedy. Default: what the folder's generation_config.json says; 0 where it does not sample. So are the next four.
    #[arg(long)]
    temperature: Option<f32>,
    /// Keep the most probable tokens up to this sum of probabilities. Default 1, all of them.
    #[arg(long)]
    top_p: Option<f32>,
    /// Keep this many most probable tokens. Default 0, all of them.
    #[arg(long)]
    top_k: Option<usize>,
    /// Keep tokens that have at least this part of the largest probability. Default 0, all of them.
    #[arg(long)]
    min_p: Option<f32>,
    /// Divide positive logits of tokens that are there already by this, and multiply negative ones. Default 1, no penalty.
    #[arg(long)]
    repetition_penalty: Option<f32>,
    /// Seed of the sampler. Every prompt is sampled as if it were the only one. Default 0.
    #[arg(long)]
    seed: Option<u64>,
}

impl TokenChoice {
    fn typed(&self) -> TypedSampling {
        let &Self { temperature, top_p, top_k, min_p, repetition_penalty, seed, .. } = self;
        TypedSampling { temperature, top_p, top_k, min_p, repetition_penalty, seed }
    }
}

#[derive(Args)]
struct Talk {
    #[command(flatten)]
    weights: Weights,
    /// The system message; an empty text for none. Default: the one of the training, where a run saved it.
    #[arg(long, value_name = "TEXT")]
    system_prompt: Option<String>,
    /// Maximum tokens of an answer.
    #[arg(long, default_value_t = 512)]
    max_new_tokens: usize,
    /// Tokens of the whole conversation, at most. Default: 4096, or the positions of the model if it has fewer.
    #[arg(long, value_name = "TOKENS")]
    context: Option<usize>,
    #[command(flatten)]
    choice: TokenChoice,
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
        Ok(status) => status,
        Err(error) => {
            warn(&format!("error: {}", error_message(&*error)));
            ExitCode::FAILURE
        }
    }
}

/// A line on standard error, which may be closed: then there is nothing to do about it.
fn warn(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

fn execute(command: Command, clock: ProcessClock) -> anyhow::Result<ExitCode> {
    match command {
        Command::Train(arguments) => return train(arguments),
        Command::Plan(arguments) => plan(&arguments),
        Command::Profile(arguments) => profile(&arguments),
        Command::Inspect(arguments) => show_data(&arguments),
        Command::Bench(arguments) => return time_steps(&arguments, clock),
        #[cfg(feature = "flex")]
        Command::BenchMatrix(arguments) => return time_matrix(&arguments.options),
        Command::BenchGenerate(BenchGenerate { options, json }) => {
            let report = bench_generation(&options)?;
            if json {
                warn(report.to_string().trim_end());
                Console::VERBOSE.print(&serde_json::to_string(&report)?);
            } else {
                Console::VERBOSE.print(report.to_string().trim_end());
            }
            Ok(())
        }
        Command::Generate(arguments) => write_text(arguments),
        Command::Chat(arguments) => talk(arguments),
        Command::Export(options) => export(&options).map(|text| Console::VERBOSE.print(&text)).map_err(Into::into),
        Command::Push(options) => {
            push(&options, Console::VERBOSE).map(|text| Console::VERBOSE.print(&text)).map_err(Into::into)
        }
        Command::Compress(options) => compress(&options).map(|text| Console::VERBOSE.print(&text)).map_err(Into::into),
        Command::Decompress(options) => {
            decompress(&options).map(|text| Console::VERBOSE.print(&text)).map_err(Into::into)
        }
        Command::Verify(arguments) => compare(arguments),
        Command::Report(Report { run, out }) => {
            let path = report::write(&run, out.as_deref())?;
            Console::VERBOSE.print(&format!("written to {}", path.display()));
            Ok(())
        }
        Command::Schema => {
            Console::VERBOSE.print(json_schema().trim_end());
            Ok(())
        }
    }?;
    Ok(ExitCode::SUCCESS)
}

/// Trains. The exit status of a run that a signal ended is that of a process which the signal killed.
fn train(arguments: Train) -> anyhow::Result<ExitCode> {
    let path = arguments.config()?;
    let config = RunConfig::load(&path, &arguments.overrides)?;
    let placement = match arguments.ranks.place(config.backend, false)? {
        Place::Supervised(ended) => return Ok(status(ended)),
        Place::Rank(placement) => placement,
    };
    let interrupt = Interrupt::install().context("cannot listen for Ctrl-C")?;
    local_ranks::follow_supervisor(&interrupt);
    let ranks = placement.as_deref().map_or_else(|| Ok(Ranks::single()), Ranks::join)?;
    let resume = arguments.resume.map(|named| named.map_or(ResumeFrom::Newest, ResumeFrom::Named));
    let console = if ranks.is_main() { Console::VERBOSE } else { Console::QUIET };
    let mut words = vec!["--config".to_owned(), path.display().to_string()];
    words.extend(arguments.overrides.into_iter().flat_map(|set| ["--set".to_owned(), set]));
    words.extend(arguments.ranks.words());
    let Train { trace, force, .. } = arguments;
    let outcome = run(RunOptions { config, resume, console, interrupt, trace, force, ranks })?;
    let Outcome::Interrupted { step, signal, folder, .. } = outcome else { return Ok(ExitCode::SUCCESS) };
    console.stopped(step, &words, &folder);
    Ok(signal.map(exit_status).map_or(ExitCode::SUCCESS, status))
}

/// A status that fits into what a process can return; any other is a failure.
fn status(status: i32) -> ExitCode {
    u8::try_from(status).map_or(ExitCode::FAILURE, ExitCode::from)
}

fn plan(arguments: &PlanArguments) -> anyhow::Result<()> {
    let &PlanArguments { machine, price_per_hour, force, ranks, .. } = arguments;
    let request = PlanRequest { machine, force, price_per_hour, local_ranks: 1 };
    let prepared = {
        let _shown = Console::VERBOSE.activity(reading_data);
        prepare_for(arguments.recipe.load()?, ranks as usize, &request)?
    };
    for note in &prepared.data_notes {
        Console::VERBOSE.print(note);
    }
    Console::VERBOSE.plan(&prepared.plan);
    Ok(())
}

fn profile(arguments: &Profile) -> anyhow::Result<()> {
    let mut profile = arguments.machine.map_or_else(HardwareProfile::detect_with_adapters, HardwareProfile::of_machine);
    if arguments.measure {
        measure(&mut profile, arguments.backend)?;
    }
    let text = if arguments.json { serde_json::to_string_pretty(&profile)? } else { profile.to_string() };
    Console::VERBOSE.print(text.trim_end_matches('\n'));
    Ok(())
}

/// Measures the peaks of a backend here, keeps them, and puts them into the profile.
fn measure(profile: &mut HardwareProfile, choice: BackendChoice) -> anyhow::Result<()> {
    let backend = choose_backend(choice, profile)?.value;
    let peaks = measure_peaks(backend, profile, &warn)?;
    let folder = cache_folder().context("there is no cache folder to keep the peaks in: set HOME or XDG_CACHE_HOME")?;
    let path = peaks.save(&folder).with_context(|| format!("cannot write to {}", folder.display()))?;
    warn(&format!("kept in {}", path.display()));
    profile.measured.retain(|kept| (&kept.backend, &kept.device) != (&peaks.backend, &peaks.device));
    profile.measured.push(peaks);
    Ok(())
}

fn show_data(arguments: &Inspect) -> anyhow::Result<()> {
    let inspection = {
        let _shown = Console::VERBOSE.activity(reading_data);
        inspect(&arguments.recipe.load()?, arguments.rows)?
    };
    let no_color = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let style = if std::io::stdout().is_terminal() && !no_color { Style::Colors } else { Style::Markers };
    Console::VERBOSE.print(inspection.text(style).trim_end_matches('\n'));
    if let Some(path) = &arguments.html {
        std::fs::write(path, inspection.page()).with_context(|| format!("cannot write {}", path.display()))?;
        Console::VERBOSE.print(&format!("\nwritten to {}", path.display()));
    }
    Ok(())
}

fn time_steps(arguments: &Bench, clock: ProcessClock) -> anyhow::Result<ExitCode> {
    let Bench { options, json, ranks } = arguments;
    let placement = match ranks.place(options.backend, *json)? {
        Place::Supervised(ended) => return Ok(status(ended)),
        Place::Rank(placement) => placement,
    };
    local_ranks::follow_supervisor(&Interrupt::detached());
    let ranks = placement.as_deref().map_or_else(|| Ok(Ranks::single()), Ranks::join)?;
    let quiet: &dyn Fn(&str) = &|_| ();
    let report = bench(options, &ranks, clock, if ranks.is_main() { &warn } else { quiet })?;
    if ranks.is_main() && *json {
        warn(&report.to_string());
        Console::VERBOSE.print(&serde_json::to_string(&report)?);
    } else if ranks.is_main() {
        Console::VERBOSE.print(&report.to_string());
    }
    Ok(ExitCode::SUCCESS)
}

/// Fails if a result was wrong or a device failed, after everything was printed and written.
#[cfg(feature = "flex")]
fn time_matrix(options: &MatrixOptions) -> anyhow::Result<ExitCode> {
    if let Some(refusal) = options.refusal() {
        anyhow::bail!("--subjects: {refusal}");
    }
    let run = bench_matrix(options, &warn)?;
    Console::VERBOSE.print(&run.text);
    for path in &run.written {
        Console::VERBOSE.print(&format!("written: {}", path.display()));
    }
    let bad = run.results.wrong().count() + run.results.failed().count();
    Ok(if bad == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn write_text(arguments: Generate) -> anyhow::Result<()> {
    let backend = backend(&arguments.weights)?;
    let typed = arguments.choice.typed();
    let compute = arguments.choice.dtype.unwrap_or_else(|| compute_format(Format::Bf16, backend).value);
    let Generate { weights, prompt, input, out, batch, chat, max_new_tokens, system_prompt, .. } = arguments;
    let load = load_options(weights, compute)?;
    let sampling = ChosenSampling::resolve(&load.model, load.adapter.as_deref(), typed)?;
    let prompts = input.as_deref().map_or(Ok(prompt), read_prompts)?;
    let (sampler, sequences) = (sampling.sampler(), batch as usize);
    let request = GenerateRequest { load, prompts, chat, system_prompt, max_new_tokens, sampler, sequences };
    let saved = if chat { chat_settings::note(&request.template_defaults()?) } else { None };
    for note in sampling.note().into_iter().chain(saved) {
        warn(&note);
    }
    if let ([prompt], None) = (request.prompts.as_slice(), &out) {
        print_part(&format!("{prompt}\n"));
        with_backend!(backend, B => device_work(|| {
            generate_streaming::<B>(&request, &Default::default(), &mut |_, text| print_part(text))
        }))?;
        print_part("\n\n");
        return Ok(());
    }
    let texts = with_backend!(backend, B => device_work(|| generate::<B>(&request, &Default::default())))?;
    let answers = request.prompts.iter().zip(&texts);
    let Some(path) = out else {
        answers.for_each(|(prompt, text)| Console::VERBOSE.print(&format!("{prompt}\n{text}\n")));
        return Ok(());
    };
    let lines: String =
        answers.map(|(prompt, text)| format!("{}\n", json!({"prompt": prompt, "text": text}))).collect();
    std::fs::write(&path, lines).with_context(|| format!("cannot write {}", path.display()))
}

/// Part of a text on standard output, at once; which may be closed.
fn print_part(text: &str) {
    let mut output = std::io::stdout();
    let _ = write!(output, "{text}").and_then(|()| output.flush());
}

fn talk(arguments: Talk) -> anyhow::Result<()> {
    let backend = backend(&arguments.weights)?;
    let typed = arguments.choice.typed();
    let compute = arguments.choice.dtype.unwrap_or_else(|| compute_format(Format::Bf16, backend).value);
    let Talk { weights, system_prompt, max_new_tokens, context, .. } = arguments;
    let load = load_options(weights, compute)?;
    let sampling = ChosenSampling::resolve(&load.model, load.adapter.as_deref(), typed)?;
    let positions = ModelConfig::read(&load.model)?.spec.max_position_embeddings;
    let context = context.unwrap_or_else(|| positions.min(4096));
    let saved = chat_settings::note(&load.template_defaults(system_prompt.as_deref())?);
    for note in sampling.note().into_iter().chain(saved) {
        warn(&note);
    }
    let (stop, is_idle) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(true)));
    // While an answer is written, Ctrl-C ends it; otherwise it ends the process.
    let interrupt = signal_hook::consts::SIGINT;
    signal_hook::flag::register_conditional_shutdown(interrupt, exit_status(interrupt), is_idle.clone())
        .and_then(|_| signal_hook::flag::register(interrupt, stop.clone()))
        .context("cannot listen for Ctrl-C")?;
    let request = ChatRequest { load, system_prompt, max_new_tokens, context, sampling };
    let is_terminal = std::io::stdin().is_terminal();
    if is_terminal {
        warn(HELP);
    }
    let (mut input, mut output) = (std::io::stdin().lock(), std::io::stdout());
    let mut terminal =
        ChatTerminal { input: &mut input, output: &mut output, prompts: is_terminal, stop: &stop, is_idle: &is_idle };
    Ok(with_backend!(backend, B => device_work(|| chat::<B>(&request, &Default::default(), &mut terminal)))?)
}

fn compare(arguments: Verify) -> anyhow::Result<()> {
    let backend = backend(&arguments.weights)?;
    let options = VerifyOptions {
        load: load_options(arguments.weights, Format::F32)?,
        golden: arguments.golden,
        tolerance: arguments.tol,
    };
    let found = with_backend!(backend, B => device_work(|| verify::<B>(&options, &Default::default())))?;
    let console = Console::VERBOSE;
    console.print(&format!("largest difference  {:e}", found.largest));
    console.print(&format!("mean difference     {:e}", found.mean));
    console.print(&format!("top-1 agreement     {:.2} %", 100.0 * found.top1_agreement));
    if let Some(loss) = found.loss {
        console.print(&format!("loss difference     {loss:e}"));
    }
    if found.largest > options.tolerance {
        return Err(RunError::VerifyFailed { largest: found.largest, tolerance: options.tolerance }.into());
    }
    console.print(&format!("within {:e}", options.tolerance));
    Ok(())
}

fn backend(weights: &Weights) -> Result<BackendKind, RunError> {
    Ok(choose_backend(weights.backend, &HardwareProfile::detect())?.value)
}

fn load_options(weights: Weights, compute: Format) -> Result<LoadOptions, RunError> {
    let nf4 = weights.nf4.then_some(QuantFormat::Nf4 { double_quant: true });
    let format = weights.base.or(nf4).map_or(compute, Format::Quantized);
    let folder = |path: &PathBuf| model_folder(path, Need::Weights, Console::VERBOSE).map(|found| found.folder);
    let adapter = weights.adapter.as_ref().map(folder).transpose()?;
    Ok(LoadOptions { model: folder(&weights.model)?, adapter, storage: BaseStorage::Frozen(format), compute })
}
