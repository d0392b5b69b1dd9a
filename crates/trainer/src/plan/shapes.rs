//! Converts the recipe to the shapes that memory and work depend on.

use firebrick_arch::{LoraConfig, ModelConfig, ModelSpec, TensorSpec};
use firebrick_kernels::{BackendKind, DividedBytes, GemmFormat, PLANNED_SHARED_BYTES, Recompute, TrainingShape};
use firebrick_optim::OptimizerConfig;
use firebrick_parallel::owners;
use firebrick_precision::FloatType;

use crate::config::RunConfig;
use crate::error::RunError;
use crate::plan::backend::offload;
use crate::plan::inputs::DataShape;
use crate::plan::{adapter, answers};

/// Returns the recipe's adapter; `None` if every weight trains.
pub(super) fn lora(config: &RunConfig) -> Option<LoraConfig> {
    config.adapter(config.model.as_ref())
}

/// Returns the tensors that train, as a run has them: the experts of a module are one tensor.
///
/// # Errors
/// A LoRA target that matches no module of the model.
pub(super) fn trained_tensors(spec: &ModelSpec, lora: Option<&LoraConfig>) -> Result<Vec<TensorSpec>, RunError> {
    Ok(match lora {
        Some(lora) => spec.stacked_tensors_of(&lora.resolve(spec)?),
        None => spec.stacked_tensors().into_iter().filter(TensorSpec::may_train).collect(),
    })
}

/// Returns the trained tensors whose optimizer state is on the rank with the largest share.
pub(super) fn largest_share(config: &RunConfig, trained: &[TensorSpec], world_size: usize) -> Vec<TensorSpec> {
    if !config.train.zero_stage.divides_state() || world_size == 1 {
        return trained.to_vec();
    }
    let owners = owners(trained.iter().map(|tensor| (tensor.name.as_str(), tensor.elements())), world_size);
    let of = |rank: usize| -> Vec<TensorSpec> {
        let pairs = trained.iter().zip(&owners).filter(|(_, owner)| **owner == rank);
        pairs.map(|(tensor, _)| tensor.clone()).collect()
    };
    let elements = |share: &Vec<TensorSpec>| share.iter().map(TensorSpec::elements).sum::<usize>();
    (0..world_size).map(of).max_by_key(elements).unwrap_or_default()
}

/// Returns how a recipe's model is trained on a backend, with all optimizer state there.
pub(super) fn training(
    config: &RunConfig,
    model: &ModelConfig,
    compute: FloatType,
    backend: BackendKind,
    data: &DataShape,
    trained: &[TensorSpec],
) -> TrainingShape {
    // What is left open is decided later, with all that takes memory.
    let recompute = config.recompute().unwrap_or(Recompute::Full);
    TrainingShape {
        base: adapter::storage(config, compute),
        dense: model.dense_weights(),
        lora: lora(config),
        compute,
        gemms: GemmFormat::Compute,
        shared_bytes: PLANNED_SHARED_BYTES,
        has_wgmma: false,
        kept_bytes: [0; 2],
        optimizer_bytes: optimizer(config).state_bytes(trained, backend.code_bytes()),
        paged_bytes: 0,
        paging_bytes: 0,
        micro_batch_size: config.train.micro_batch_size.rows(),
        row_len: data.row_len,
        longest_document: data.longest_document,
        documents: config.train.micro_batch_size.rows() * data.documents_per_row,
        recompute,
        offload: offload(config.train.offload, recompute, backend).value,
        loss_tokens_per_row: data.loss_tokens_per_row,
        loss_chunk_tokens: config.train.loss_chunk_tokens,
        evaluation: answers::evaluation(config),
        divided: DividedBytes::default(),
        pairs: adapter::passes(config),
    }
}

/// Returns the recipe's optimizer, as far as its state depends on it.
pub(super) fn optimizer(config: &RunConfig) -> OptimizerConfig {
    let train = &config.train;
    OptimizerConfig {
        kind: train.optimizer,
        beta1: train.adam_beta1,
        beta2: train.adam_beta2,
        epsilon: train.adam_epsilon,
        weight_decay: train.weight_decay,
        max_grad_norm: None,
    }
}
