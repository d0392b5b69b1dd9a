//! The options of a benchmark, and the recipe that they stand for.
//!
//! Not supported: full fine-tuning and bases that are not quantized.

use std::path::{Path, PathBuf};

use clap::Args;
use firebrick_kernels::Recompute;
use firebrick_optim::OptimizerKind;
use firebrick_precision::{FloatType, QuantFormat};
use firebrick_trainer::RunError;
use firebrick_trainer::config::compute::Compute;
use firebrick_trainer::config::{Auto, BackendChoice, RunConfig, compute, from_name, to_name};
use toml::Value;

/// The settings without options: QLoRA on all projections, at one learning rate, over data that is never opened.
const RECIPE: &str = r#"
name = "bench"
seed = 0
[lora]
[data]
path = "synthetic tokens"
format = "text"
[train]
schedule = "constant"
warmup_steps = 0
[eval]
max_new_tokens = 1
"#;

/// The options of `train bench`.
#[derive(Args, Clone, Debug)]
pub struct BenchOptions {
    /// Model folder: config.json and safetensors; no tokenizer is needed.
    #[arg(long)]
    pub model: PathBuf,
    /// Tokens per row.
    #[arg(long, default_value = "4096", value_parser = count)]
    pub seq: usize,
    /// Rows per step.
    #[arg(long, default_value = "8", value_parser = count)]
    pub micro_batch: usize,
    /// What layers compute again in their backward: full, projections, selective or none; auto: the fastest that fits.
    #[arg(long, default_value = "auto", value_parser = from_name::<Auto<Recompute>>)]
    pub recompute: Auto<Recompute>,
    /// GiB of the device's memory that the plan may use; without it, all but its reserve.
    #[arg(long)]
    pub device_memory_gib: Option<f64>,
    /// What to compute in, if the backend has it: bf16, fp16, fp32, or fp8 for the matrix multiplications of the layers. Default: bf16
    /// on CUDA, fp16 on cards without it, fp32 elsewhere.
    #[arg(long, value_parser = compute::parse)]
    pub compute: Option<Compute>,
    /// How the base is stored: nf4, nf4_double_quant, nvfp4, mxfp4 or fp8.
    #[arg(long, default_value = "nf4_double_quant", value_name = "FORMAT")]
    pub base: QuantFormat,
    /// Timed steps.
    #[arg(long, default_value = "5", value_parser = count)]
    pub steps: usize,
    /// Steps before them: pools fill, kernels compile, clocks go up.
    #[arg(long, default_value_t = 3)]
    pub warmup: usize,
    /// Whether what layers save waits in host memory; without it, the plan decides.
    #[arg(long)]
    pub offload: Option<bool>,
    /// GiB of weights that stay on the device as GEMMs read them; without it, the plan decides.
    #[arg(long)]
    pub kept_weights_gib: Option<f64>,
    /// Whether algorithms of large GEMMs are measured first; without it, what was measured before is used.
    #[arg(long)]
    pub tune_gemms: Option<bool>,
    /// Modules that get an adapter, separated by commas, such as q_proj,o_proj. Default: every linear module of the layers but experts.
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    pub target: Vec<String>,
    /// Parameters of fused experts that get an adapter, such as mlp.experts.gate_up_proj,mlp.experts.down_proj.
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    pub target_parameters: Vec<String>,
    /// Rank of the adapters.
    #[arg(long, default_value = "16", value_parser = count)]
    pub rank: usize,
    /// Numerator of the adapters' scale.
    #[arg(long, default_value_t = 32.0)]
    pub alpha: f64,
    /// Optimizer, under the name that recipes use.
    #[arg(long, default_value = "paged_adamw_8bit", value_parser = from_name::<OptimizerKind>)]
    pub optimizer: OptimizerKind,
    /// Tokens whose logits exist at a time.
    #[arg(long, default_value = "1024", value_parser = count)]
    pub loss_chunk: usize,
    /// Documents per row, of equal length.
    #[arg(long, default_value = "1", value_parser = count)]
    pub documents: usize,
    /// What several ranks divide: 0 nothing, 1 the optimizer's state, 2 gradients too, 3 the weights of the layers too.
    #[arg(long, default_value_t = 0, value_name = "STAGE")]
    pub zero: u8,
    /// Repeat random numbers instead of reading weights: the model folder needs a config.json alone.
    #[arg(long)]
    pub random_base: bool,
    /// Where tensors live: auto, cuda, wgpu, candle or flex.
    #[arg(long, default_value_t)]
    pub backend: BackendChoice,
    /// Take one more step and report how long each operation took, next to peak rates measured on the same device.
    #[arg(long)]
    pub trace: bool,
}

impl BenchOptions {
    /// Returns the recipe of a run that does the same work, in the format `usual` where no option names one.
    pub(super) fn recipe(&self, usual: FloatType) -> Result<RunConfig, RunError> {
        if self.documents > self.seq / 2 {
            return Err(RunError::Refused(format!(
                "{} documents do not fit into a row of {} tokens: each needs at least two tokens, so that one can be predicted from the \
                 other. Lower --documents or raise --seq",
                self.documents, self.seq
            )));
        }
        let steps = self.warmup.saturating_add(self.steps).saturating_add(usize::from(self.trace));
        let mut overrides = vec![
            format!("model={}", Value::String(self.model.display().to_string())),
            format!("backend={}", self.backend),
            format!("max_seq_len={}", self.seq),
            format!("compute={}", self.compute.unwrap_or(Compute::Plain(usual))),
            format!("base={}", self.base),
            format!("lora.r={}", self.rank),
            format!("lora.alpha={}", self.alpha),
            "pack=true".to_owned(),
            format!("train.recompute={}", to_name(&self.recompute)),
            format!("train.optimizer={}", to_name(&self.optimizer)),
            format!("train.micro_batch_size={}", self.micro_batch),
            format!("train.loss_chunk_tokens={}", self.loss_chunk),
            format!("train.zero_stage={}", self.zero),
            format!("train.steps={steps}"),
        ];
        for (key, names) in [("target", &self.target), ("target_parameters", &self.target_parameters)] {
            if !names.is_empty() {
                overrides.push(format!("lora.{key}={}", Value::from(names.clone())));
            }
        }
        overrides.extend(self.kept_weights_gib.map(|gib| format!("train.kept_weights_gib={gib}")));
        overrides.extend(self.device_memory_gib.map(|gib| format!("train.device_memory_gib={gib}")));
        overrides.extend(self.tune_gemms.map(|tune| format!("train.tune_gemms={tune}")));
        overrides.extend(self.offload.map(|offload| format!("train.offload={offload}")));
        Ok(RunConfig::from_toml(RECIPE, Path::new("train bench"), &overrides)?)
    }
}

/// Parses a whole number of at least 1.
fn count(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err("must be at least 1".to_owned()),
        Ok(number) => Ok(number),
        Err(_) => Err("expected a whole number, 1 or more".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use firebrick_arch::TargetModules;

    use super::*;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        options: BenchOptions,
    }

    fn parse(words: &str) -> Result<BenchOptions, String> {
        let words = ["bench", "--model", "m"].into_iter().chain(words.split_whitespace());
        Cli::try_parse_from(words).map(|cli| cli.options).map_err(|error| error.to_string())
    }

    #[test]
    fn options_become_the_recipe_of_the_same_work() {
        let words = "--seq 512 --micro-batch 3 --recompute selective --compute fp32 --rank 8 --optimizer adamw --trace";
        let config = parse(words).unwrap().recipe(FloatType::Bf16).unwrap();
        assert_eq!((config.max_seq_len(), config.train.micro_batch_size), (512, Auto::Given(3)));
        assert_eq!(
            (config.recompute(), config.compute()),
            (Some(Recompute::Selective), Compute::Plain(FloatType::F32))
        );
        assert_eq!((config.lora.as_ref().unwrap().r, config.train.optimizer), (8, OptimizerKind::AdamW));
        assert_eq!(config.train.steps, Some(3 + 5 + 1));
        assert_eq!(config.train.offload, None);
        let words = "--target q_proj,up_proj --target-parameters mlp.experts.down_proj";
        let lora = parse(words).unwrap().recipe(FloatType::Bf16).unwrap().lora.unwrap();
        assert_eq!(lora.target_modules, TargetModules::from_names(vec!["q_proj".to_owned(), "up_proj".to_owned()]));
        assert_eq!(lora.target_parameters, Some(vec!["mlp.experts.down_proj".to_owned()]));
        assert_eq!(config.quantized_base(), Some(QuantFormat::Nf4 { double_quant: true }));
        let config = parse("--base nvfp4 --compute fp8").unwrap().recipe(FloatType::Bf16).unwrap();
        assert_eq!(config.quantized_base(), Some(QuantFormat::Nvfp4));
        let default = parse("").unwrap().recipe(FloatType::F16).unwrap();
        assert_eq!(default.compute(), Compute::Plain(FloatType::F16), "what is usual on the card");
        assert_eq!(default.recompute(), None, "the plan decides, as in a run");
        // A path with quotes is still one path.
        let options = BenchOptions { model: "a'b\"c".into(), ..parse("").unwrap() };
        assert_eq!(options.recipe(FloatType::Bf16).unwrap().model, "a'b\"c");
    }

    #[test]
    fn unknown_names_are_answered_with_the_allowed_ones() {
        for (words, parts) in [
            ("--recompute some", ["'some'", "full, projections, selective, none"]),
            ("--compute nf4", ["float32, bfloat16, float16"; 2]),
            ("--optimizer sgd", ["adamw, adamw_8bit, paged_adamw_8bit"; 2]),
            ("--micro-batch 0", ["at least 1"; 2]),
            ("--backend tpu", ["flex"; 2]),
        ] {
            let message = parse(words).unwrap_err();
            assert!(parts.iter().all(|part| message.contains(part)), "{message}");
        }
    }

    #[test]
    fn documents_need_two_tokens() {
        let refusal = |words: &str| parse(words).unwrap().recipe(FloatType::Bf16).unwrap_err().to_string();
        assert!(refusal("--seq 8 --documents 5").contains("at least two tokens"));
        for (policy, is_allowed) in [("none", false), ("selective", false), ("projections", true), ("full", true)] {
            let recipe = parse(&format!("--recompute {policy} --offload true")).unwrap().recipe(FloatType::Bf16);
            assert_eq!(recipe.is_ok(), is_allowed, "{policy}");
            assert!(recipe.err().is_none_or(|error| error.to_string().contains("train.offload")), "{policy}");
        }
    }
}
