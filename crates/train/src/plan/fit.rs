//! Whether a run fits into memory, and the nearest change that does where it does not.
//!
//! Two memories count: where the tensors live, and the host's, which block inputs may wait in.

use firebrick_hwprofile::HardwareProfile;
use firebrick_hwprofile::memory::{self, BaseStorage, MemoryEstimate, MemoryLine, TrainingShape, human_bytes};

use crate::backend::BackendKind;
use crate::checkpoint;
use crate::config::{ComputeDtype, OptimizerKind, Recompute, RunConfig};
use crate::error::RunError;
use crate::plan::{PlanInputs, lora_shape, model_shape};

/// The part of the free memory that a plan may use: the estimate leaves out rounding and what a backend keeps for itself.
const USABLE: f64 = 0.9;

/// The estimate of a run that fits.
///
/// # Errors
/// [`RunError::DoesNotFit`] with the table and the nearest change that fits.
pub(super) fn check(inputs: &PlanInputs<'_>, backend: BackendKind) -> Result<MemoryEstimate, RunError> {
    let estimate = estimate(inputs, inputs.config, backend);
    let fits = |estimate: &MemoryEstimate| shortage(inputs.profile, backend, estimate).is_none();
    let Some(short) = shortage(inputs.profile, backend, &estimate) else { return Ok(estimate) };
    let change =
        smaller(inputs.config, backend).into_iter().find(|(_, config)| fits(&self::estimate(inputs, config, backend)));
    let advice = match change {
        Some((settings, config)) => {
            let needed = human_bytes(self::estimate(inputs, &config, backend).total_bytes());
            format!("The nearest change that fits needs {needed}: {settings}")
        }
        None => {
            "No smaller micro-batch fits either: shorten max_seq_len, or take a smaller model or a larger device".into()
        }
    };
    Err(RunError::DoesNotFit {
        needed: human_bytes(short.needed),
        available: format!("{} {}", human_bytes(short.free), short.place),
        breakdown: table(short.lines),
        advice,
    })
}

/// A memory that is too small.
struct Shortage<'a> {
    needed: u64,
    free: u64,
    place: &'static str,
    lines: &'a [MemoryLine],
}

fn shortage<'a>(profile: &HardwareProfile, backend: BackendKind, estimate: &'a MemoryEstimate) -> Option<Shortage<'a>> {
    let (free, place) = available(profile, backend);
    let own = Shortage { needed: estimate.total_bytes(), free, place, lines: &estimate.lines };
    let host = Shortage {
        needed: estimate.host_bytes(),
        free: profile.memory.available_bytes,
        place: "in host memory, where block inputs are to wait",
        lines: &estimate.host_lines,
    };
    [own, host].into_iter().find(|memory| memory.needed as f64 > memory.free as f64 * USABLE)
}

/// A run that needs less than the one that ran out of memory although it was expected to fit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SmallerRun {
    /// What the failed run was expected to need, line by line.
    pub table: String,
    /// The settings to change, and what they are expected to need; `None` where nothing is left to change.
    pub settings: Option<String>,
    /// Whether a checkpoint of the failed run can be continued with them.
    pub resumable: bool,
}

/// The next step down from a plan that turned out to be too large.
pub fn next_smaller(inputs: &PlanInputs<'_>, backend: BackendKind) -> SmallerRun {
    let failed = estimate(inputs, inputs.config, backend);
    let next = smaller(inputs.config, backend).into_iter().find_map(|(settings, config)| {
        let needed = estimate(inputs, &config, backend).total_bytes();
        (needed < failed.total_bytes()).then_some((settings, needed, config))
    });
    let resumable =
        next.as_ref().is_some_and(|(.., config)| checkpoint::settings(config) == checkpoint::settings(inputs.config));
    SmallerRun {
        table: table(&failed.lines),
        settings: next
            .map(|(settings, needed, _)| format!("{settings}, which is expected to need {}", human_bytes(needed))),
        resumable,
    }
}

fn table(lines: &[MemoryLine]) -> String {
    lines.iter().map(|line| format!("\n  {:<34} {:>10}  {}", line.what, human_bytes(line.bytes), line.why)).collect()
}

/// Free bytes where the backend's tensors live, and that place's name.
pub(super) fn available(profile: &HardwareProfile, backend: BackendKind) -> (u64, &'static str) {
    match (backend, profile.gpus.first()) {
        (BackendKind::Cuda, Some(card)) => (card.memory_free_bytes, "on the card"),
        // WebGPU does not say how much memory its device has; unified and software devices share the host's.
        _ => (profile.memory.available_bytes, "in host memory"),
    }
}

fn estimate(inputs: &PlanInputs<'_>, config: &RunConfig, backend: BackendKind) -> MemoryEstimate {
    memory::estimate(&model_shape(inputs.model), &training_shape(config, backend, inputs.data.row_len))
}

pub(super) fn training_shape(config: &RunConfig, backend: BackendKind, row_len: usize) -> TrainingShape {
    let wide = backend != BackendKind::Cuda || config.compute_dtype() == ComputeDtype::Float32;
    let base = match &config.bnb_4bit {
        Some(bnb) => BaseStorage::Nf4 { double_quant: bnb.double_quant },
        None if wide => BaseStorage::F32,
        None => BaseStorage::Bf16,
    };
    TrainingShape {
        base,
        lora: lora_shape(config),
        optimizer_bytes_per_parameter: moment_bytes(config.train.optimizer, backend),
        micro_batch_size: config.train.micro_batch_size,
        row_len,
        recompute: match config.recompute() {
            Recompute::Full => memory::Recompute::Full,
            Recompute::Selective => memory::Recompute::Selective,
            Recompute::None => memory::Recompute::None,
        },
        offload: super::offload(config, backend).value,
        fused: !wide,
        activation_bytes: if wide { 4 } else { 2 },
        trainable_bytes: 4,
        loss_chunk_tokens: config.train.loss_chunk_tokens,
        // The portable attention holds the scores of one document at a time, at most a row.
        score_tokens: row_len,
    }
}

/// Bytes of both moments of a parameter.
fn moment_bytes(optimizer: OptimizerKind, backend: BackendKind) -> f64 {
    /// One f32 scale in 256 values, for each moment.
    const SCALES: f64 = 2.0 * 4.0 / 256.0;
    match (optimizer, backend) {
        (OptimizerKind::Adamw, _) => 8.0,
        // WebGPU stores no bytes, so each code takes a word there.
        (_, BackendKind::Wgpu) => 8.0 + SCALES,
        _ => 2.0 + SCALES,
    }
}

/// Smaller runs with the same effective batch, nearest first: less kept by the blocks, then kept elsewhere, then fewer rows at
/// a time.
fn smaller(config: &RunConfig, backend: BackendKind) -> Vec<(String, RunConfig)> {
    let mut runs = Vec::new();
    let mut next = config.clone();
    let mut settings = String::new();
    let ladder = [(Recompute::None, "none"), (Recompute::Selective, "selective"), (Recompute::Full, "full")];
    for (recompute, word) in ladder.into_iter().skip_while(|&(step, _)| step != config.recompute()).skip(1) {
        next.train.recompute = Some(recompute);
        next.train.grad_checkpointing = None;
        settings = format!("--set train.recompute={word}");
        runs.push((settings.clone(), next.clone()));
    }
    if backend == BackendKind::Cuda {
        // Towards the host where the device is short, and back where the host is.
        let offload = !super::offload(&next, backend).value;
        let mut moved = next.clone();
        moved.train.offload = Some(offload);
        let words = format!("{settings} --set train.offload={offload}").trim_start().to_owned();
        runs.push((words.clone(), moved.clone()));
        if offload {
            (next, settings) = (moved, words);
        }
    }
    while next.train.micro_batch_size > 1 && next.train.micro_batch_size.is_multiple_of(2) {
        next.train.micro_batch_size /= 2;
        next.train.gradient_accumulation *= 2;
        let words = format!(
            "{settings} --set train.micro_batch_size={} --set train.gradient_accumulation={} (the same effective batch)",
            next.train.micro_batch_size, next.train.gradient_accumulation
        );
        runs.push((words.trim_start().to_owned(), next.clone()));
    }
    runs
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use firebrick_hwprofile::{Cpu, Gpu, Memory};
    use firebrick_model::LlamaConfig;

    use super::*;
    use crate::plan::DataShape;

    const LLAMA_8B: &str = r#"{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256,
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "max_position_embeddings": 131072, "rope_theta": 500000.0, "rms_norm_eps": 1e-5,
        "hidden_act": "silu", "tie_word_embeddings": false}"#;

    const RECIPE: &str = "model='m'\nmax_seq_len=4096\n[bnb_4bit]\n[lora]\n[data]\npath='d'\n[train]\n\
                          optimizer='adamw_8bit'\nmicro_batch_size=8\n";

    struct Case {
        config: RunConfig,
        profile: HardwareProfile,
        model: LlamaConfig,
        data: DataShape,
    }

    impl Case {
        fn new(changes: &[&str], card_gib: u64, host_gib: u64) -> Self {
            let folder = tempfile::tempdir().unwrap();
            std::fs::write(folder.path().join("config.json"), LLAMA_8B).unwrap();
            let overrides: Vec<String> = changes.iter().map(ToString::to_string).collect();
            let card = Gpu {
                index: 0,
                name: "card".to_owned(),
                memory_total_bytes: card_gib << 30,
                memory_free_bytes: card_gib << 30,
                driver_version: String::new(),
                compute_capability: None,
                spec: None,
            };
            Self {
                config: RunConfig::from_toml(RECIPE, Path::new("r.toml"), &overrides).unwrap(),
                profile: HardwareProfile {
                    cpu: Cpu { name: String::new(), logical_cores: 1, physical_cores: 1, features: Vec::new() },
                    memory: Memory { total_bytes: host_gib << 30, available_bytes: host_gib << 30 },
                    gpus: vec![card],
                    notes: Vec::new(),
                },
                model: LlamaConfig::read(folder.path()).unwrap(),
                data: DataShape { rows: 100, row_len: 4096, report: String::new() },
            }
        }

        fn inputs(&self) -> PlanInputs<'_> {
            PlanInputs { config: &self.config, profile: &self.profile, model: &self.model, data: &self.data }
        }

        fn refusal(&self) -> String {
            check(&self.inputs(), BackendKind::Cuda).expect_err("it should not fit").to_string()
        }
    }

    #[test]
    fn a_card_of_24_gib_takes_eight_rows_with_offloaded_inputs() {
        assert!(check(&Case::new(&[], 24, 64).inputs(), BackendKind::Cuda).is_ok());
    }

    #[test]
    fn the_advice_is_the_nearest_step_that_fits() {
        let message = Case::new(&["train.recompute=none"], 40, 64).refusal();
        assert!(message.contains("on the card") && message.contains("stored activations"), "{message}");
        assert!(message.ends_with("--set train.recompute=full"), "{message}");
        let message = Case::new(&["train.offload=false"], 20, 64).refusal();
        assert!(message.ends_with(": --set train.offload=true"), "{message}");
        let message = Case::new(&["train.recompute=none", "train.offload=false"], 12, 64).refusal();
        assert!(
            message.contains("--set train.recompute=full --set train.offload=true --set train.micro_batch_size="),
            "{message}"
        );
    }

    #[test]
    fn host_memory_that_is_short_is_refused_and_not_the_card() {
        let message = Case::new(&[], 80, 8).refusal();
        assert!(message.contains("8.00 GiB in host memory") && message.contains("offloaded activations"), "{message}");
        assert!(message.ends_with("--set train.offload=false"), "{message}");
    }

    #[test]
    fn a_run_that_failed_is_told_the_next_step_down_and_whether_it_can_go_on() {
        let of = |changes: &[&str]| next_smaller(&Case::new(changes, 80, 64).inputs(), BackendKind::Cuda);
        let kept = of(&["train.recompute=none"]);
        assert!(kept.settings.as_ref().unwrap().starts_with("--set train.recompute=selective,") && kept.resumable);
        let halved = of(&[]);
        assert!(halved.settings.as_ref().unwrap().starts_with("--set train.micro_batch_size=4") && !halved.resumable);
        assert!(halved.table.contains("converted weights"), "{}", halved.table);
        assert_eq!(of(&["train.micro_batch_size=1"]).settings, None);
    }
}
