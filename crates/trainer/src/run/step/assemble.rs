//! Builds the trainer that a plan describes: model, optimizer, schedule, ranks, and the loader that feeds them.
//!
//! Benchmarks build their trainers here too, so they time what runs.

use std::sync::Arc;

use firebrick_arch::{ModelConfig, ModelSpec};
use firebrick_data::{Cursor, Loader, LoaderConfig, PackedDataset};
use firebrick_kernels::{Kernels, RunShape};
use firebrick_model::{BuildOptions, Decoder, Division, HfFolder};
use firebrick_optim::{LossScaling, Optimizer};
use firebrick_parallel::Ranks;
use firebrick_precision::FloatType;

use crate::config::Init;
use crate::error::RunError;
use crate::plan::{Plan, check_ranks, weight_owners};
use crate::run::device::dtype_of;
use crate::run::step::{StepSettings, Trainer};

const PREFETCH: usize = 4;

/// The source of the base weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightSource {
    /// The model folder.
    Folder,
    /// The seed.
    Seed,
    /// Repeated random numbers, for a measurement.
    Synthetic,
}

impl From<Init> for WeightSource {
    fn from(init: Init) -> Self {
        match init {
            Init::Random => Self::Seed,
            Init::Pretrained => Self::Folder,
        }
    }
}

/// Builds the trainer of a plan for a model of this config, with weights from `source`. Calls `progress` with the name of each tensor that is read.
///
/// # Errors
/// A model folder that cannot be read, a LoRA target that the model does not have, or ranks whose sums have no fixed order, if the plan asks for that.
pub fn trainer<B: Kernels>(
    plan: &Plan,
    model_config: &ModelConfig,
    source: WeightSource,
    ranks: Ranks,
    device: &B::Device,
    progress: &mut dyn FnMut(&str),
) -> Result<Trainer<B>, RunError> {
    check_ranks(plan)?;
    let build = BuildOptions {
        storage: plan.base.value,
        lora: plan.lora.value.clone(),
        seed: plan.seed.value,
        compute_dtype: dtype_of(plan.compute.value),
        gemms: plan.gemms.value,
        max_positions: plan.max_positions.value,
        sequence_tokens: plan.max_seq_len.value,
    };
    // Opened before weights are read: locking pages takes a second or two, which pass during the reading.
    B::open(device, &run_shape(plan, &model_config.spec));
    let (config, division) = (model_config.clone(), division(plan, &model_config.spec, &ranks));
    let model = match source {
        WeightSource::Seed => Decoder::random(config, &build, division, device)?,
        WeightSource::Synthetic => Decoder::synthetic(config, &build, division, device)?,
        WeightSource::Folder => {
            let folder = HfFolder::open(&plan.model_folder.value)?;
            Decoder::load_divided(&folder, config, &build, division, device, progress)?
        }
    };
    let optimizer = optimizer(plan, &model, &ranks);
    Ok(Trainer {
        model,
        optimizer,
        schedule: plan.learning_rate_schedule(),
        ranks,
        settings: StepSettings::planned(plan),
    })
}

/// Returns how a run of the plan uses the device.
fn run_shape(plan: &Plan, spec: &ModelSpec) -> RunShape {
    let tokens = plan.training.tokens() as usize;
    let bytes = |[count, width]: [usize; 2]| [count, tokens * width * plan.compute.value.bytes()];
    // Unpacked micro-batches differ in size, and each size takes its own buffers.
    let offloads = plan.offload.value && plan.pack.value;
    RunShape {
        kept_bytes: plan.training.kept_bytes,
        gemms: plan.gemms.value,
        gemm_algorithms: plan.gemm_algorithms.as_ref().map_or_else(Default::default, |algorithms| algorithms.value),
        pass_bytes: plan.backend.value.pass_bytes(spec, &plan.training),
        pass_tokens: tokens,
        deterministic: plan.deterministic.is_some(),
        offloaded: if offloads {
            plan.training.offloaded_tensors(spec).into_iter().map(bytes).collect()
        } else {
            Vec::new()
        },
    }
}

/// Creates the optimizer of a plan, with the state of this rank's share of the parameters.
fn optimizer<B: Kernels>(plan: &Plan, model: &Decoder<B>, ranks: &Ranks) -> Optimizer<B> {
    let mut optimizer = Optimizer::new(plan.optimizer_config()).with_seed(plan.seed.value);
    if let Some(ratio) = &plan.loraplus_lr_ratio {
        optimizer = optimizer.with_loraplus(ratio.value);
    }
    if plan.paged_state_bytes.value > 0 {
        optimizer = optimizer.with_paging(plan.resident_state_bytes.value);
    }
    if plan.compute.value == FloatType::F16 {
        optimizer = optimizer.with_loss_scaling(LossScaling::default(), model.device());
    }
    if plan.zero_stage.value.divides_state() && ranks.world_size() > 1 {
        let owned = ranks.owners(&model.parameters()).into_iter().filter(|(_, owner)| *owner == ranks.rank());
        optimizer = optimizer.owning(owned.map(|(name, _)| name));
    }
    optimizer
}

/// Returns the owner of each layer weight, if the plan divides them. A trained weight is on the rank that has its optimizer state.
fn division(plan: &Plan, spec: &ModelSpec, ranks: &Ranks) -> Option<Division> {
    if !plan.zero_stage.value.divides_weights() || ranks.world_size() == 1 {
        return None;
    }
    let owners = weight_owners(spec, plan.lora.value.is_none(), ranks.world_size());
    Some(Division { communicator: ranks.communicator().clone(), owners })
}

/// Creates an endless loader of the training rows, starting at the cursor.
pub fn loader(plan: &Plan, rows: Arc<PackedDataset>, ranks: &Ranks, start: Cursor) -> Loader {
    let config = LoaderConfig {
        rows_per_batch: plan.micro_batch_size.value,
        seed: plan.data_seed.value,
        shuffle: plan.shuffle.value,
        epochs: None,
        rank: ranks.rank(),
        world_size: ranks.world_size(),
        prefetch: PREFETCH,
        workers: plan.loader_workers.value,
    };
    Loader::new(rows, config, start)
}

/// Creates the loader of a rank's share of rows that are read once, in order.
pub(in crate::run) fn loader_once(
    rows: &Arc<PackedDataset>,
    rows_per_batch: usize,
    rank: usize,
    world_size: usize,
) -> Loader {
    let (seed, shuffle, epochs) = (0, false, Some(1));
    let config = LoaderConfig { rows_per_batch, seed, shuffle, epochs, rank, world_size, prefetch: 1, workers: 1 };
    Loader::new(Arc::clone(rows), config, Cursor::default())
}
