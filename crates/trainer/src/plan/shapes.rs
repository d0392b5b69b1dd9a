//! Converts the recipe to the shapes that memory and work depend on.

use std::collections::BTreeSet;

use firebrick_arch::{LoraConfig, ModelSpec, TensorSpec};
use firebrick_kernels::{BaseStorage, DividedBytes, GemmFormat, Recompute, Storage, TrainingShape};
use firebrick_optim::OptimizerConfig;
use firebrick_parallel::owners;
use firebrick_precision::FloatType;

use crate::config::RunConfig;
use crate::error::RunError;
use crate::plan::fit::Case;
use crate::plan::wish::Wish;
use crate::plan::{Chosen, adapter, answers, divided, fp8};

/// Returns the tensors that train, as a run has them: the experts of a module are one tensor.
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

/// What all ways to train a model have in common, whatever layers save and wherever that waits.
pub(super) struct Basis<'a> {
    pub(super) wish: &'a Wish<'a>,
    pub(super) base: BaseStorage,
    pub(super) gemms: GemmFormat,
    /// The tensors whose optimizer state a rank has.
    pub(super) stated: Vec<TensorSpec>,
    pub(super) compute: FloatType,
    pub(super) dense: BTreeSet<String>,
    divided: DividedBytes,
    /// Format of the sums of gradients of parameters in bf16.
    gradients: FloatType,
    micro_batch_size: usize,
}

impl<'a> Basis<'a> {
    /// Decides the formats of weights and GEMMs, and what ranks divide. `trained`: the tensors that train.
    pub(super) fn new(
        wish: &'a Wish<'a>,
        case: &Case<'_>,
        compute: FloatType,
        trained: &[TensorSpec],
        micro_batch_size: usize,
    ) -> Result<(Self, Chosen<GemmFormat>), RunError> {
        let (config, spec, ranks) = (wish.recipe, &wish.model.spec, wish.world_size);
        let dense = wish.model.dense_weights();
        // On wgpu, the format of GEMMs decides that of frozen weights; where ranks borrow weights, these decide that of GEMMs.
        let of_frozen = fp8::half(wish, case).map_or(compute, |half| half.value.of_frozen(compute));
        let base = adapter::storage(config, of_frozen);
        let storage = Storage { base, lora: wish.lora.as_ref(), compute: of_frozen, dense: &dense };
        let divided = divided::divided_bytes(config.train.zero_stage, ranks, spec, storage, FloatType::F32, trained);
        let stated = largest_share(config, trained, ranks);
        let tokens = (micro_batch_size * wish.data.row_len) as u64;
        let gemms = fp8::gemms(wish, case, tokens, divided.weights_elsewhere > 0)?;
        let format = gemms.value;
        let gradients = FloatType::F32;
        Ok((Self { wish, base, gemms: format, stated, compute, dense, divided, gradients, micro_batch_size }, gemms))
    }

    /// Sums the gradients of parameters in bf16 in this format. `trained`: the tensors that train.
    pub(super) fn sum_in(&mut self, sums: FloatType, trained: &[TensorSpec]) {
        let (config, spec, ranks) = (self.wish.recipe, &self.wish.model.spec, self.wish.world_size);
        let storage = Storage { base: self.base, lora: None, compute: self.compute, dense: &self.dense };
        self.divided = divided::divided_bytes(config.train.zero_stage, ranks, spec, storage, sums, trained);
        self.gradients = sums;
    }

    /// Returns how the model is trained when layers save and offload this, with all optimizer state on the device and no converted weights kept.
    pub(super) fn training(&self, case: &Case<'_>, recompute: Recompute, offload: bool) -> TrainingShape {
        let Self { wish: Wish { recipe: config, data, lora, .. }, micro_batch_size, .. } = *self;
        TrainingShape {
            base: self.base,
            dense: self.dense.clone(),
            lora: lora.clone(),
            compute: self.compute,
            gemms: self.gemms,
            shared_bytes: case.shared_bytes(),
            has_wgmma: case.has_wgmma(),
            gradients: self.gradients,
            kept_bytes: [0; 2],
            optimizer_bytes: optimizer(config).state_bytes(&self.stated),
            paged_bytes: 0,
            paging_bytes: 0,
            micro_batch_size,
            row_len: data.row_len,
            longest_document: data.longest_document,
            documents: micro_batch_size * data.documents_per_row,
            recompute,
            offload,
            loss_tokens_per_row: data.loss_tokens_per_row,
            loss_chunk_tokens: config.train.loss_chunk_tokens,
            evaluation: answers::evaluation(self.wish),
            divided: self.divided,
            pairs: adapter::passes(config),
            deterministic: config.train.deterministic,
        }
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
        weights: train.weights,
        max_grad_norm: None,
    }
}
