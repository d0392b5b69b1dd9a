//! `train bench-generate`: measures how fast this machine generates text with a model of this shape, on random prompts.
//!
//! Runs the code of `generate` without tokenizer and text: reads prompts of one length, then generates the same number of tokens for each.
//! One run warms up; the median of the timed runs counts. Speed is new tokens over the whole time, including that of reading the prompts.

use std::fmt;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::time::Instant;

use clap::Args;
use firebrick_arch::LoraConfig;
use firebrick_hwprofile::HardwareProfile;
use firebrick_kernels::{BackendKind, BaseStorage, GemmFormat, Kernels, RunShape};
use firebrick_model::{BatchLimits, BuildOptions, Decoder, GenerateOptions, HfFolder, Sampler, Sampling, read_config};
use firebrick_precision::{FloatType, Format, QuantFormat};
use serde::Serialize;

use crate::bench::{Spread, Synthetic, sums, timed};
use firebrick_trainer::RunError;
use firebrick_trainer::config::{BackendChoice, compute};
use firebrick_trainer::plan::{choose_backend, command_format};
use firebrick_trainer::run::device::{device_work, dtype_of, wait};
use firebrick_trainer::with_backend;

/// Tokens of a traced run: enough to see a step.
const TRACED_TOKENS: usize = 8;

/// The options of `train bench-generate`.
#[derive(Args, Clone, Debug)]
pub struct GenerationOptions {
    /// Model folder: config.json and safetensors; no tokenizer is needed.
    #[arg(long)]
    pub model: PathBuf,
    /// Repeat random numbers instead of reading weights: the model folder needs a config.json alone.
    #[arg(long)]
    pub random_base: bool,
    /// How the base is stored: nf4, nf4_double_quant, nvfp4, mxfp4 or fp8. Without it, in the format that is computed in.
    #[arg(long, value_name = "FORMAT")]
    pub base: Option<QuantFormat>,
    /// GiB of the base that stay on the device in the compute format as well, as in a run with `[grpo]` where they fit.
    #[arg(long, default_value_t = 0.0)]
    pub kept_weights_gib: f64,
    /// Draw tokens by their probability instead of taking the most probable ones.
    #[arg(long)]
    pub draw: bool,
    /// Rank of adapters on all projections; 0: no adapters.
    #[arg(long, default_value_t = 0)]
    pub rank: usize,
    /// Sequences that are written at the same time. Several numbers are measured one after the other.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 64])]
    pub sequences: Vec<usize>,
    /// Tokens of a prompt.
    #[arg(long, default_value_t = 128)]
    pub prompt_tokens: usize,
    /// Tokens that are written after it.
    #[arg(long, default_value_t = 256)]
    pub new_tokens: usize,
    /// Number format of activations and matrix multiplications: float32, bfloat16 or float16. Default: bfloat16 on CUDA, float16
    /// on cards without it, float32 elsewhere.
    #[arg(long, value_name = "FORMAT", value_parser = compute::parse_format)]
    pub dtype: Option<FloatType>,
    /// Timed runs of each number of sequences.
    #[arg(long, default_value_t = 3)]
    pub runs: usize,
    /// Where tensors live: auto, cuda, wgpu, candle or flex.
    #[arg(long, default_value_t)]
    pub backend: BackendChoice,
    /// Write a few tokens more and report how long the device took for each operation.
    #[arg(long)]
    pub trace: bool,
}

/// Measurements with one number of sequences.
#[derive(Clone, Debug, Serialize)]
struct GenerationSpeed {
    sequences: usize,
    /// New tokens per second, of all sequences together.
    tok_s: f64,
    run_s: Spread,
    /// Seconds until the first token of each sequence was chosen, in the median run.
    first_token_s: f64,
    /// Milliseconds per step after that.
    step_ms: f64,
    /// Operations of a traced run: name, number of launches, and their total milliseconds.
    operations: Vec<(&'static str, usize, f64)>,
}

/// All measurements.
#[derive(Clone, Debug, Serialize)]
pub struct GenerationReport {
    model: String,
    backend: BackendKind,
    compute: FloatType,
    base: Format,
    rank: usize,
    prompt_tokens: usize,
    new_tokens: usize,
    /// Seconds until the model was on the device.
    load_s: f64,
    speeds: Vec<GenerationSpeed>,
}

/// Loads the model and measures its speed.
///
/// # Errors
/// A folder that cannot be read, a backend that is not available, or logits that are not finite.
pub fn bench_generation(options: &GenerationOptions) -> Result<GenerationReport, RunError> {
    let profile = HardwareProfile::detect();
    let backend = choose_backend(options.backend, &profile)?.value;
    let compute = command_format(options.dtype, backend, &profile)?;
    with_backend!(backend, B => device_work(|| measure::<B>(options, backend, compute)))
}

fn measure<B: Kernels>(
    options: &GenerationOptions,
    backend: BackendKind,
    compute: FloatType,
) -> Result<GenerationReport, RunError> {
    let device = B::device_of(0);
    let base = options.base.map_or(Format::Float(compute), Format::Quantized);
    let kept_bytes = [(options.kept_weights_gib * (1_u64 << 30) as f64) as u64, 0];
    B::open(&device, &RunShape { kept_bytes, ..RunShape::default() });
    let positions = options.prompt_tokens + options.new_tokens.max(TRACED_TOKENS);
    let lora = LoraConfig { r: options.rank, lora_alpha: 2.0 * options.rank as f64, ..LoraConfig::default() };
    let build = BuildOptions {
        storage: BaseStorage::Frozen(base),
        lora: (options.rank > 0).then_some(lora),
        seed: 0,
        compute_dtype: dtype_of(compute),
        gemms: GemmFormat::Compute,
        max_positions: positions,
        sequence_tokens: positions,
    };
    let (load_s, loaded) = timed(|| -> Result<_, RunError> {
        let config = read_config(&options.model)?;
        let model = match options.random_base {
            true => Decoder::<B>::synthetic(config, &build, None, &device)?,
            false => Decoder::load(&HfFolder::open(&options.model)?, config, &build, &device, &mut |_| ())?,
        };
        wait::<B>(&device).map(|()| model)
    });
    let loaded = loaded?;
    let speeds =
        options.sequences.iter().map(|&sequences| speed(&loaded, options, sequences)).collect::<Result<_, _>>()?;
    let GenerationOptions { ref model, rank, prompt_tokens, new_tokens, .. } = *options;
    let model = model.display().to_string();
    Ok(GenerationReport { model, backend, compute, base, rank, prompt_tokens, new_tokens, load_s, speeds })
}

/// Seconds of one run, and seconds until the first token of the last sequence.
struct Run {
    seconds: f64,
    first_token_s: f64,
}

fn speed<B: Kernels>(
    model: &Decoder<B>,
    options: &GenerationOptions,
    sequences: usize,
) -> Result<GenerationSpeed, RunError> {
    let vocab_size = model.config.spec.vocab_size;
    let length = options.prompt_tokens;
    let mut random = Synthetic { rows: sequences, row_len: length, documents: 1, vocab_size, seed: 0 };
    let prompts: Vec<Vec<u32>> = random.next_batch().input_ids.chunks(length).map(<[u32]>::to_vec).collect();
    write_all(model, &prompts, options.new_tokens, options.draw)?;
    let run = |_| write_all(model, &prompts, options.new_tokens, options.draw);
    let mut runs = (0..options.runs.max(1)).map(run).collect::<Result<Vec<_>, _>>()?;
    runs.sort_by(|left, right| left.seconds.total_cmp(&right.seconds));
    let Run { seconds, first_token_s } = runs[runs.len() / 2];
    let mut operations = Vec::new();
    if options.trace {
        let (traced, launches) = B::trace(model.device(), || write_all(model, &prompts, TRACED_TOKENS, options.draw));
        traced?;
        operations = sums(&launches, |launch| launch.name);
    }
    B::release_memory(model.device());
    Ok(GenerationSpeed {
        sequences,
        tok_s: (sequences * options.new_tokens) as f64 / seconds,
        first_token_s,
        step_ms: 1e3 * (seconds - first_token_s) / options.new_tokens.saturating_sub(1).max(1) as f64,
        run_s: Spread::of(runs.iter().map(|run| run.seconds).collect()),
        operations: operations.iter().map(|(count, sum)| (sum.name, *count, sum.milliseconds)).collect(),
    })
}

fn write_all<B: Kernels>(
    model: &Decoder<B>,
    prompts: &[Vec<u32>],
    max_new_tokens: usize,
    draws: bool,
) -> Result<Run, RunError> {
    let sampling = Sampling { temperature: if draws { 1.0 } else { 0.0 }, ..Sampling::GREEDY };
    let options = GenerateOptions {
        max_new_tokens,
        stop_tokens: Vec::new(),
        sampler: Sampler::new(sampling, 0)?,
        limits: BatchLimits::NONE,
    };
    let (started, mut written, mut first_token_s) = (Instant::now(), 0, 0.0);
    model.generate_each(prompts, &options, &mut |_, _| {
        written += 1;
        if written == prompts.len() {
            first_token_s = started.elapsed().as_secs_f64();
        }
        ControlFlow::Continue(())
    })?;
    assert_eq!(written, prompts.len() * max_new_tokens, "nothing ends a text before its last token");
    Ok(Run { seconds: started.elapsed().as_secs_f64(), first_token_s })
}

impl fmt::Display for GenerationReport {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { model, backend, compute, base, rank, prompt_tokens, new_tokens, load_s, speeds } = self;
        writeln!(out, "{model} on {backend}: base {base}, computed in {compute}, adapters of rank {rank}")?;
        writeln!(out, "{prompt_tokens} tokens read and {new_tokens} written per sequence; loaded in {load_s:.1} s")?;
        for GenerationSpeed { sequences, tok_s, run_s, first_token_s, step_ms, operations } in speeds {
            let run_s = run_s.median;
            writeln!(
                out,
                "{sequences:>4} sequences  {tok_s:>8.1} tokens/s  {run_s:.3} s per run  first token after {first_token_s:.3} s  {step_ms:.2} ms per step"
            )?;
            for (name, count, milliseconds) in operations {
                writeln!(out, "      {name:<28} {count:>6} launches  {milliseconds:>9.3} ms")?;
            }
        }
        Ok(())
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;

    #[test]
    fn the_shipped_model_is_measured() {
        let options = GenerationOptions {
            model: concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/tiny-llama").into(),
            random_base: true,
            base: Some(QuantFormat::Nf4 { double_quant: true }),
            kept_weights_gib: 0.0,
            draw: false,
            rank: 4,
            sequences: vec![1, 3],
            prompt_tokens: 5,
            new_tokens: 4,
            dtype: None,
            runs: 1,
            backend: BackendChoice::Given(BackendKind::Flex),
            trace: true,
        };
        for rank in [0, 4] {
            let report = bench_generation(&GenerationOptions { rank, draw: rank > 0, ..options.clone() }).unwrap();
            assert_eq!(report.speeds.iter().map(|speed| speed.sequences).collect::<Vec<_>>(), [1, 3]);
            for speed in &report.speeds {
                let tokens = (speed.sequences * 4) as f64;
                assert!((speed.tok_s * speed.run_s.median - tokens).abs() < 1e-6 * tokens);
                assert!(speed.first_token_s > 0.0 && speed.first_token_s <= speed.run_s.median);
            }
            let text = report.to_string();
            assert!(text.contains("nf4_double_quant") && text.contains("3 sequences"), "{text}");
        }
    }
}
