//! Shared inputs for tests of plans: an 8B and a tiny model, rows, the inputs of a plan, and a QLoRA run on a card of any size.
//!
//! Trade-off: an [`Example`] is sized for CUDA wherever tests run, so it does not test the choice of a backend.

use std::path::Path;

use firebrick_arch::{ModelConfig, TensorSpec};
use firebrick_hwprofile::peaks::{MeasuredGemm, MeasuredPeaks};
use firebrick_hwprofile::spec::{Maker, MathFormat};
use firebrick_hwprofile::{AcceleratorSpec, Gpu, HardwareProfile};
use firebrick_kernels::{BackendKind, Recompute, TrainingShape};
use firebrick_precision::FloatType;
use serde_json::{Value, json};

use crate::config::RunConfig;
#[cfg(feature = "flex")]
use crate::error::RunError;
use crate::plan::fit::{Case, UsableMemory};
use crate::plan::shapes::{self, Basis};
use crate::plan::wish::Wish;
use crate::plan::{DataShape, Plan, PlanInputs, PlanRequest, backend};

/// The config.json of a model with two tiny layers.
#[cfg(feature = "flex")]
pub(super) const TINY: &str = r#"{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64, "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 128, "rope_theta": 10000.0, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "tie_word_embeddings": true}"#;

const RECIPE: &str = "model='m'\nmax_seq_len=4096\n[bnb_4bit]\n[lora]\n[data]\npath='d'\n[train]\n\
                      optimizer='adamw_8bit'\nmicro_batch_size=8\n";

pub(super) fn read_recipe(text: &str, changes: &[&str]) -> RunConfig {
    let changes: Vec<String> = changes.iter().map(ToString::to_string).collect();
    RunConfig::from_toml(text, Path::new("recipe.toml"), &changes).unwrap()
}

pub(super) fn read_model(text: &str) -> ModelConfig {
    ModelConfig::parse(text, Path::new("config.json")).unwrap()
}

/// Returns the config of Llama-3.1-8B with these values in it.
pub(super) fn llama(changes: &Value) -> ModelConfig {
    let mut config = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "max_position_embeddings": 131072, "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "tie_word_embeddings": false,
    });
    changes.as_object().unwrap().iter().for_each(|(key, value)| config[key] = value.clone());
    read_model(&config.to_string())
}

/// Returns rows of one document each.
pub(super) fn full_rows(row_len: usize) -> DataShape {
    DataShape {
        rows: 4800,
        row_len,
        longest_document: row_len,
        documents_per_row: 1,
        loss_tokens_per_row: row_len,
        has_chats: false,
        report: "full".to_owned(),
    }
}

/// Returns the inputs of a plan for one rank, of a command that requests nothing.
pub(super) fn inputs<'a>(
    config: &'a RunConfig,
    profile: &'a HardwareProfile,
    model: &'a ModelConfig,
    data: &'a DataShape,
) -> PlanInputs<'a> {
    const NOTHING: PlanRequest =
        PlanRequest { machine: None, force: false, price_per_hour: None, local_ranks: 0, decided: None };
    PlanInputs { config, profile, model, data, world_size: 1, request: &NOTHING }
}

/// Plans the tiny model on one rank of a small processor, for a short recipe with these overrides.
#[cfg(feature = "flex")]
pub(super) fn resolve(changes: &[&str]) -> Result<Plan, RunError> {
    resolve_for(TINY, 1, changes)
}

/// Plans another model or number of ranks in the same way.
#[cfg(feature = "flex")]
pub(super) fn resolve_for(model: &str, world_size: usize, changes: &[&str]) -> Result<Plan, RunError> {
    let recipe =
        "name='n'\nmodel='m'\nbackend='flex'\nmax_seq_len=64\n[lora]\nr=4\n[data]\npath='d'\n[train]\nepochs=1\n";
    let (config, model) = (read_recipe(recipe, changes), read_model(model));
    let profile = HardwareProfile::described(4, 8 << 30, Vec::new());
    let data = DataShape { rows: 100, longest_document: 20, documents_per_row: 4, has_chats: true, ..full_rows(64) };
    Plan::resolve(PlanInputs { world_size, ..inputs(&config, &profile, &model, &data) })
}

/// QLoRA of an 8B model on one card.
pub(super) struct Example {
    pub(super) config: RunConfig,
    pub(super) profile: HardwareProfile,
    pub(super) model: ModelConfig,
    pub(super) data: DataShape,
}

impl Example {
    /// Creates the example on a card and a host with this much memory.
    pub(super) fn new(changes: &[&str], card_gib: u64, host_gib: u64) -> Self {
        let card = Gpu::described(Maker::Nvidia, "card", card_gib << 30);
        Self {
            config: read_recipe(RECIPE, changes),
            profile: HardwareProfile::described(1, host_gib << 30, vec![card]),
            model: llama(&json!({})),
            data: full_rows(4096),
        }
    }

    /// Creates the example on a machine of the table.
    pub(super) fn on(machine: &str, changes: &[&str]) -> Self {
        Self::of(RECIPE, machine, changes)
    }

    pub(super) fn of(recipe: &str, machine: &str, changes: &[&str]) -> Self {
        let profile = HardwareProfile::of_machine(AcceleratorSpec::named(machine).unwrap());
        Self { config: read_recipe(recipe, changes), profile, ..Self::new(&[], 80, 512) }
    }

    /// Gives the card measured rates of GEMMs and of copies.
    pub(super) fn measure(&mut self, tflops: &[(MathFormat, f64)], copy_tb_s: f64) {
        self.profile.measured = vec![MeasuredPeaks {
            backend: "cuda".to_owned(),
            device: self.profile.gpus[0].name.clone(),
            driver: String::new(),
            measured_at: 0,
            gemm_size: 8192,
            gemms: tflops.iter().map(|&(format, tflops)| MeasuredGemm { format, tflops }).collect(),
            copy_tb_s,
        }];
    }

    pub(super) fn case(&self) -> Case<'_> {
        let may_offload = self.config.train.offload != Some(false);
        let (profile, spec, room) = (&self.profile, &self.model.spec, UsableMemory::Free);
        Case { profile, backend: BackendKind::Cuda, spec, may_offload, ranks: 1, limit: None, room }
    }

    pub(super) fn inputs(&self) -> PlanInputs<'_> {
        inputs(&self.config, &self.profile, &self.model, &self.data)
    }

    pub(super) fn plan(&self) -> Plan {
        Plan::resolve(self.inputs()).unwrap()
    }

    pub(super) fn wish(&self) -> Wish<'_> {
        Wish::new(&self.inputs()).unwrap()
    }

    pub(super) fn trained(&self) -> Vec<TensorSpec> {
        shapes::trained_tensors(&self.model.spec, self.wish().lora.as_ref()).unwrap()
    }

    pub(super) fn basis<'a>(&self, wish: &'a Wish<'a>, case: &Case<'_>) -> Basis<'a> {
        let rows = wish.micro_batch_size.given().unwrap();
        Basis::new(wish, case, FloatType::Bf16, &self.trained(), rows).unwrap().0
    }

    pub(super) fn training(&self) -> TrainingShape {
        self.training_in(&self.case())
    }

    /// Returns how the example is trained in another case; all is recomputed where the recipe leaves that open.
    pub(super) fn training_in(&self, case: &Case<'_>) -> TrainingShape {
        let wish = self.wish();
        let recompute = wish.recompute.given().unwrap_or(Recompute::Full);
        let offload = backend::offload(wish.offload, recompute, case.backend).value;
        self.basis(&wish, case).training(case, recompute, offload)
    }
}
