//! From a plan to the trainer it describes: model, optimizer, schedule, ranks, and the loader that feeds them.
//!
//! The one place where the recipe's words become the types of the crates below. Benches build their trainers here too, so that
//! what is timed is what runs.

use burn_tensor::DType;
use firebrick_data::{Cursor, Loader, LoaderConfig};
use firebrick_kernels::Kernels;
use firebrick_model::peft::TargetModules;
use firebrick_model::{BaseStorage, BuildOptions, HfFolder, Llama, LlamaConfig, LoraConfig, Recompute};
use firebrick_optim::{AdamWConfig, MomentFormat, Optimizer, Schedule, ScheduleKind};
use firebrick_parallel::SingleRank;

use crate::config::{self, ComputeDtype, Init, LoraTarget, RunConfig};
use crate::error::RunError;
use crate::plan::{BasePlan, MomentPlan, Plan, model_shape};
use crate::prepare::Prepared;
use crate::step::Trainer;

/// Batches made ahead of the step.
const PREFETCH: usize = 4;

/// The recipe's adapter; `None` where every weight trains.
///
/// # Errors
/// A target that is no projection.
pub fn adapter(config: &RunConfig) -> Result<Option<LoraConfig>, RunError> {
    let Some(lora) = &config.lora else { return Ok(None) };
    let target_modules = match &lora.target {
        LoraTarget::AllLinear => TargetModules::AllLinear,
        LoraTarget::Modules(names) => TargetModules::from_names(names.clone())?,
    };
    Ok(Some(LoraConfig {
        r: lora.r,
        lora_alpha: lora.alpha,
        use_rslora: lora.use_rslora,
        target_modules,
        base_model_name_or_path: Some(config.model.clone()),
    }))
}

/// Builds what the plan says of a model of this description, with weights from `init`.
///
/// # Errors
/// A model folder that cannot be read, or a LoRA target that the model does not have.
pub fn trainer<B: Kernels>(
    config: &RunConfig,
    plan: &Plan,
    model: &LlamaConfig,
    init: Init,
    device: &B::Device,
) -> Result<Trainer<B>, RunError> {
    let build = build_options(config, plan)?;
    if plan.offload.value && config.pack {
        // Before weights are read: locking pages takes seconds, which pass beside the reading. Unpacked micro-batches differ in
        // size, and each size takes buffers of its own.
        let input_bytes =
            plan.training_shape.tokens() * plan.training_shape.stored_bytes_per_token(&model_shape(model));
        B::reserve_offload(device, model.num_hidden_layers.saturating_sub(1), input_bytes as usize);
    }
    let model = match init {
        Init::Random => Llama::random(model.clone(), &build, device)?,
        Init::Pretrained => {
            let folder = HfFolder::open(&config.model_folder()?)?;
            Llama::load(&folder, model.clone(), &build, device, &mut |_| ())?
        }
    };
    Ok(Trainer {
        model,
        optimizer: Optimizer::new(optimizer(config, plan)),
        schedule: schedule(config, plan),
        collective: Box::new(SingleRank),
        recompute: match plan.recompute.value {
            config::Recompute::Full => Recompute::Full,
            config::Recompute::Selective => Recompute::Selective,
            config::Recompute::None => Recompute::None,
        },
        offload: plan.offload.value,
        loss_chunk_tokens: plan.loss_chunk_tokens.value,
    })
}

/// The loader of the training rows: shuffled, without end, from the cursor on.
pub fn loader(prepared: &Prepared, start: Cursor) -> Loader {
    let config = LoaderConfig {
        rows_per_batch: prepared.plan.micro_batch_size.value,
        seed: prepared.config.seed,
        shuffle: true,
        epochs: None,
        rank: 0,
        world_size: 1,
        prefetch: PREFETCH,
        workers: prepared.plan.loader_workers.value,
    };
    Loader::new(prepared.train.clone(), config, start)
}

/// Format of activations and matrix products.
pub fn compute_dtype(plan: &Plan) -> DType {
    match plan.compute_dtype.value {
        ComputeDtype::Bfloat16 => DType::BF16,
        ComputeDtype::Float16 => DType::F16,
        ComputeDtype::Float32 => DType::F32,
    }
}

fn build_options(config: &RunConfig, plan: &Plan) -> Result<BuildOptions, RunError> {
    let longest_row = plan.row_len.value.max(config.max_seq_len);
    Ok(BuildOptions {
        storage: match plan.base.value {
            BasePlan::Trained => BaseStorage::Trained,
            BasePlan::Frozen => BaseStorage::Frozen,
            BasePlan::Nf4 => BaseStorage::Nf4 { double_quant: false },
            BasePlan::Nf4DoubleQuant => BaseStorage::Nf4 { double_quant: true },
        },
        lora: adapter(config)?,
        seed: config.seed,
        compute_dtype: compute_dtype(plan),
        max_positions: longest_row + config.eval.max_new_tokens,
    })
}

fn optimizer(config: &RunConfig, plan: &Plan) -> AdamWConfig {
    AdamWConfig {
        beta1: config.train.adam_beta1,
        beta2: config.train.adam_beta2,
        epsilon: config.train.adam_epsilon,
        weight_decay: config.train.weight_decay,
        max_grad_norm: (config.train.max_grad_norm > 0.0).then_some(config.train.max_grad_norm),
        moments: match plan.optimizer.value {
            MomentPlan::Float32 => MomentFormat::Float32,
            MomentPlan::EightBit => MomentFormat::EightBit,
        },
    }
}

fn schedule(config: &RunConfig, plan: &Plan) -> Schedule {
    Schedule {
        kind: match plan.schedule.value {
            config::ScheduleKind::Constant => ScheduleKind::Constant,
            config::ScheduleKind::Linear => ScheduleKind::Linear,
            config::ScheduleKind::Cosine => ScheduleKind::Cosine,
        },
        peak: config.train.learning_rate,
        warmup_steps: plan.warmup_steps.value,
        total_steps: plan.steps.value,
    }
}
