//! Commands about a model's output: continued prompts, a chat, and logits against a golden file.

use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::Context;
use clap::Args;
use firebrick_hwprofile::HardwareProfile;
use firebrick_kernels::{BackendKind, BaseStorage, MemoryOps};
use firebrick_model::read_config;
use firebrick_precision::{FloatType, Format, QuantFormat};
use firebrick_trainer::config::{BackendChoice, EvalConfig, compute};
use firebrick_trainer::console::{Console, escaped};
use firebrick_trainer::hub::{Need, adapter_folder, model_folder, other_base};
use firebrick_trainer::plan::{choose_backend, command_format};
use firebrick_trainer::run::chat_settings;
use firebrick_trainer::run::device::device_work;
use firebrick_trainer::run::generate::{GenerateRequest, LoadOptions, generate, generate_streaming, read_prompts};
use firebrick_trainer::run::interrupt::exit_status;
use firebrick_trainer::run::sampling::{ChosenSampling, TypedSampling};
use firebrick_trainer::{RunError, with_backend};
use serde_json::json;

use super::warn;
use crate::chat::{ChatRequest, ChatTerminal, HELP, chat};
use firebrick_trainer::run::verify::{VerifyOptions, verify};

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
pub(crate) struct Generate {
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
    /// Number format of activations and matrix multiplications: float32, bfloat16 or float16. Default: bfloat16 on CUDA, float16
    /// on cards without it, float32 elsewhere.
    #[arg(long, value_name = "FORMAT", value_parser = compute::parse_format)]
    dtype: Option<FloatType>,
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

#[derive(Args)]
pub(crate) struct Talk {
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
pub(crate) struct Verify {
    #[command(flatten)]
    weights: Weights,
    /// Safetensors file with input_ids (i64, B x T), logits (f32, B x T x V) and optionally loss (one f32).
    #[arg(long)]
    golden: PathBuf,
    /// Largest absolute difference of a logit, and of the loss, that passes.
    #[arg(long, default_value_t = 2e-4, value_parser = tolerance)]
    tol: f64,
}

pub(crate) fn write_text(arguments: Generate) -> anyhow::Result<()> {
    let Generate { weights, prompt, input, out, batch, chat, max_new_tokens, system_prompt, choice } = arguments;
    let (backend, load, sampling) = choose(weights, &choice)?;
    let prompts = input.as_deref().map_or(Ok(prompt), read_prompts)?;
    let (sampler, sequences) = (sampling.sampler(), batch as usize);
    let request = GenerateRequest { load, prompts, chat, system_prompt, max_new_tokens, sampler, sequences };
    let saved = request.load.chat_settings()?;
    let saved = if chat { chat_settings::note(&saved, request.system_prompt.as_deref()) } else { None };
    sampling.note().iter().chain(&saved).for_each(|note| warn(note));
    if let ([prompt], None) = (request.prompts.as_slice(), &out) {
        // After the model is loaded, so that an error is not preceded by the prompt.
        let mut prompt = Some(format!("{prompt}\n"));
        let mut print = |text: &str| print_part(&format!("{}{text}", prompt.take().unwrap_or_default()));
        with_backend!(backend, B => device_work(|| {
            generate_streaming::<B>(&request, &B::device_of(0), &mut |_, text| print(text))
        }))?;
        print("");
        print_part("\n\n");
        return Ok(());
    }
    let texts = with_backend!(backend, B => device_work(|| generate::<B>(&request, &B::device_of(0))))?;
    let answers = request.prompts.iter().zip(&texts);
    let Some(path) = out else {
        answers.for_each(|(prompt, text)| print_part(&format!("{prompt}\n{text}\n\n")));
        return Ok(());
    };
    let lines: String =
        answers.map(|(prompt, text)| format!("{}\n", json!({"prompt": prompt, "text": text}))).collect();
    std::fs::write(&path, lines).with_context(|| format!("cannot write {}", path.display()))
}

/// Writes a part of a text to standard output at once: to a terminal without what it would obey, elsewhere as it is. A closed pipe is ignored.
fn print_part(text: &str) {
    let mut output = std::io::stdout();
    let shown = if output.is_terminal() { escaped(text) } else { text.into() };
    let _ = write!(output, "{shown}").and_then(|()| output.flush());
}

pub(crate) fn talk(arguments: Talk) -> anyhow::Result<()> {
    let Talk { weights, system_prompt, max_new_tokens, context, choice } = arguments;
    let (backend, load, sampling) = choose(weights, &choice)?;
    let positions = read_config(&load.model)?.spec.max_position_embeddings;
    let context = context.unwrap_or_else(|| positions.min(4096));
    let saved = chat_settings::note(&load.chat_settings()?, system_prompt.as_deref());
    sampling.note().iter().chain(&saved).for_each(|note| warn(note));
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
    Ok(with_backend!(backend, B => device_work(|| chat::<B>(&request, &B::device_of(0), &mut terminal)))?)
}

/// Reads a tolerance: a number that something can be within.
fn tolerance(typed: &str) -> Result<f64, String> {
    let number = typed.parse().ok().filter(|number: &f64| number.is_finite() && *number >= 0.0);
    number.ok_or_else(|| "expected a number from 0 on, such as 2e-4".to_owned())
}

pub(crate) fn compare(arguments: Verify) -> anyhow::Result<()> {
    let backend = choose_backend(arguments.weights.backend, &HardwareProfile::detect())?.value;
    let options = VerifyOptions {
        load: load_options(arguments.weights, FloatType::F32)?,
        golden: arguments.golden,
        tolerance: arguments.tol,
    };
    let found = with_backend!(backend, B => device_work(|| verify::<B>(&options, &B::device_of(0))))?;
    let console = Console::VERBOSE;
    console.print(&format!("largest difference  {:e}", found.largest as f32));
    console.print(&format!("mean difference     {:e}", found.mean as f32));
    console.print(&format!("top-1 agreement     {:.2} %", 100.0 * found.top1_agreement));
    if let Some(loss) = found.loss {
        console.print(&format!("loss difference     {:e}", loss as f32));
    }
    if let Some(what) = found.beyond(options.tolerance) {
        anyhow::bail!("{what}, above the tolerance of {:e}", options.tolerance);
    }
    let within = if options.tolerance > 0.0 { format!("within {:e}", options.tolerance) } else { "equal".to_owned() };
    console.print(&within);
    Ok(())
}

/// Chooses the backend, how the model is loaded, and how tokens are sampled.
fn choose(weights: Weights, choice: &TokenChoice) -> Result<(BackendKind, LoadOptions, ChosenSampling), RunError> {
    let profile = HardwareProfile::detect();
    let backend = choose_backend(weights.backend, &profile)?.value;
    let compute = command_format(choice.dtype, backend, &profile)?;
    let load = load_options(weights, compute)?;
    let &TokenChoice { temperature, top_p, top_k, min_p, repetition_penalty, seed, .. } = choice;
    let typed = TypedSampling { temperature, top_p, top_k, min_p, repetition_penalty, seed };
    let sampling = ChosenSampling::resolve(&load.model, load.adapter.as_deref(), typed)?;
    Ok((backend, load, sampling))
}

fn load_options(weights: Weights, compute: FloatType) -> Result<LoadOptions, RunError> {
    let nf4 = weights.nf4.then_some(QuantFormat::Nf4 { double_quant: true });
    let format = weights.base.or(nf4).map_or(Format::Float(compute), Format::Quantized);
    let console = Console::VERBOSE;
    let adapter = |path: &PathBuf| adapter_folder(path, "--adapter", Need::Weights, console);
    let adapter = weights.adapter.as_ref().map(adapter).transpose()?;
    let model = model_folder(&weights.model, Need::Weights, console)?.folder;
    adapter.iter().filter_map(|adapter| other_base(adapter, &model)).for_each(|note| warn(&note));
    Ok(LoadOptions { model, adapter, storage: BaseStorage::Frozen(format), compute })
}
