//! One optimizer step, from host batches to updated parameters. Nothing here waits for this step's own work.
//!
//! The loss is the sum over all loss tokens of the step divided by their number, over every micro-batch and every rank, so 8 rows at once and 8 rows
//! one by one give the same update. Gradients are summed in f32 (or bf16), reduced over ranks during the last micro-batch, clipped to a global norm, and passed
//! to the optimizer. In float16 the loss is multiplied by a dynamic scale. Each micro-batch has its own loss that balances experts; a step takes
//! their mean.
//! Trade-off: the number of loss tokens is agreed on before the first forward pass, which costs one small reduction.

pub mod assemble;
pub mod eval_prompts;
pub mod evaluate;
mod outcome;
pub mod policy;
pub mod preference;
pub(in crate::run) mod search;

use std::collections::BTreeMap;
use std::sync::Arc;

use burn_tensor::Tensor;
use firebrick_data::{Batch, IGNORE_INDEX};
use firebrick_kernels::{DeviceTime, GradientMap, GradientSink, Kernels, PAIR_NUMBERS};
use firebrick_model::{Decoder, DropoutMasks, LossOptions, MicroBatch, PassOptions};
use firebrick_optim::{Optimizer, Schedule, StepReport, squared_norm};
use firebrick_parallel::{BUCKET_BYTES, Ranks, ReducingSink, ShardingSink};
use firebrick_precision::FloatType;
use xxhash_rust::xxh3::xxh3_64;

use self::preference::{PairObjective, StepCounts};
use crate::config::{PlannedTrain, ZeroStage};
use crate::error::RunError;
use crate::plan::Plan;

pub use outcome::{StepNumbers, StepOutcome};

/// A model with everything needed to train it step by step.
pub struct Trainer<B: Kernels> {
    /// The model.
    pub model: Decoder<B>,
    /// State of its parameters.
    pub optimizer: Optimizer<B>,
    /// Learning rate by step.
    pub schedule: Schedule,
    /// The processes that train together.
    pub ranks: Ranks,
    /// What a step does.
    pub settings: StepSettings,
}

/// The decisions of a plan that a step follows.
#[derive(Clone, Debug, Default)]
pub struct StepSettings {
    /// The keys of `[train]` that are taken as they are.
    pub train: PlannedTrain,
    /// What the ranks divide (ZeRO).
    pub zero_stage: ZeroStage,
    /// What the forward pass saves, and where; its dropout masks are those of each micro-batch.
    pub pass: PassOptions,
    /// The run's seed of dropout masks; `None`: nothing is dropped.
    pub dropout_seed: Option<u64>,
    /// Rows of logits at a time.
    pub loss_chunk_tokens: usize,
    /// Whether the gradients of parameters in bf16 are summed in bf16.
    pub has_bf16_sums: bool,
    /// The objective for pairs of answers; `None`: the cross entropy of single documents.
    pub pairs: Option<PairObjective>,
    /// Whether the loss is summed without the loss scale, as one that the host computes.
    pub is_scaled_apart: bool,
    /// Weight of the auxiliary loss that balances experts; `None`: the model is trained without it.
    pub router_aux_loss: Option<f64>,
    /// A step that is run again in place of the next one, by a rank of so many: what masks and the weights of losses follow from.
    pub again: Option<(u64, usize, usize)>,
}

impl StepSettings {
    /// Reads them in a plan.
    pub fn planned(plan: &Plan) -> Self {
        let (recompute, offload) = (plan.recompute.value, plan.offload.value);
        Self {
            train: plan.train.clone(),
            zero_stage: plan.zero_stage.value,
            pass: PassOptions { recompute, offload, adapters: true, dropout: None },
            dropout_seed: plan.adapter_dropout.as_ref().map(|_| plan.seed.value),
            loss_chunk_tokens: plan.loss_chunk_tokens.value,
            has_bf16_sums: plan.training.gradients == FloatType::Bf16,
            pairs: PairObjective::planned(plan),
            is_scaled_apart: plan.grpo.is_some(),
            router_aux_loss: plan.router_aux_loss.as_ref().map(|weight| weight.value),
            again: None,
        }
    }
}

impl<B: Kernels> Trainer<B> {
    /// Takes one step on this rank's micro-batches.
    ///
    /// # Errors
    /// A token outside the model's vocabulary, or the other ranks could not be reached.
    ///
    /// # Panics
    /// If no micro-batch has a loss token: the data crate refuses such rows.
    pub fn step(&mut self, micro_batches: &[Batch]) -> Result<StepOutcome, RunError> {
        let own = StepCounts::of(micro_batches);
        let counts = StepCounts {
            loss_tokens: self.ranks.all_reduce_count(own.loss_tokens)?,
            pairs: self.ranks.all_reduce_count(own.pairs)?,
            chosen_targets: self.ranks.all_reduce_count(own.chosen_targets)?,
        };
        self.step_of(micro_batches, counts)
    }

    /// Takes a step as [`Trainer::step`] does, after the ranks have agreed on these counts.
    pub fn step_of(&mut self, micro_batches: &[Batch], counts: StepCounts) -> Result<StepOutcome, RunError> {
        assert!(counts.loss_tokens > 0, "a step needs at least one loss token");
        assert!(self.settings.pairs.is_none() || counts.pairs > 0, "a step of preference training needs a pair");
        self.step_with(counts, micro_batches.len(), |trainer, sink| trainer.micro_batches(micro_batches, counts, sink))
    }

    /// Takes a step. `passes` runs this rank's `count` micro-batches, gives their gradients to the sink, and returns what [`Trainer::micro_batches`]
    /// returns.
    fn step_with(
        &mut self,
        counts: StepCounts,
        count: usize,
        passes: impl FnOnce(&Self, &mut dyn GradientSink<B>) -> Result<Tensor<B, 1>, RunError>,
    ) -> Result<StepOutcome, RunError> {
        // Waits of an evaluation before this step do not belong to the step.
        drop(B::device_time(self.model.device(), DeviceTime::RankWait));
        let loss_scale = self.optimizer.loss_scale();
        let owners = self.owners();
        let (loss_sum, gradients) = if self.divides_gradients() {
            let contributions = self.model.contributions();
            let sink = ShardingSink::<B>::new(&self.ranks, owners.clone(), contributions, BUCKET_BYTES);
            let mut sink = sink.with_bf16_sums(self.settings.has_bf16_sums);
            let loss_sum = passes(self, &mut sink)?;
            (loss_sum, sink.finish()?)
        } else {
            let (parameters, contributions) = (self.model.parameters(), self.model.contributions());
            let sink = ReducingSink::for_parameters(&self.ranks, contributions, &parameters);
            let mut sink = sink.with_bf16_sums(self.settings.has_bf16_sums);
            let loss_sum = passes(self, &mut sink)?;
            (loss_sum, sink.finish()?)
        };

        // With loss scaling this waits for the preceding step; the forward and backward passes above are already queued.
        let learning_rate = self.schedule.rate(self.optimizer.next_update());
        let (loss_sum, report) = self.update(loss_sum, gradients, owners, learning_rate)?;
        let (loss_sum, aux_loss_sum) = match (self.settings.router_aux_loss, loss_sum.dims()) {
            (Some(_), [count]) => (loss_sum.clone().narrow(0, 0, count - 1), Some(loss_sum.narrow(0, count - 1, 1))),
            (None, _) => (loss_sum, None),
        };
        let sums: Vec<Tensor<B, 1>> = match self.settings.pairs {
            // The loss scale is only in the weights of the targets.
            Some(_) => (0..PAIR_NUMBERS).map(|number| loss_sum.clone().narrow(0, number, 1)).collect(),
            None if self.settings.is_scaled_apart => vec![loss_sum],
            None => vec![loss_scale.into_iter().fold(loss_sum, Tensor::div)],
        };
        let numbers = [report.grad_norm].into_iter().chain(sums).chain(aux_loss_sum).chain(report.loss_scale).collect();
        let device = self.model.device();
        let between_ranks = |of| if self.ranks.world_size() > 1 { B::device_time(device, of) } else { None };
        Ok(StepOutcome {
            step: self.optimizer.steps(),
            loss_tokens: counts.loss_tokens,
            counts,
            balanced: self.settings.router_aux_loss.map(|_| count * self.ranks.world_size()),
            nll_weight: self.settings.pairs.as_ref().map_or(0.0, |pairs| pairs.nll_weight),
            learning_rate,
            numbers: B::read_later(numbers),
            restore_wait: B::device_time(device, DeviceTime::RestoreWait),
            comm_wait: between_ranks(DeviceTime::RankWait),
            comm_time: between_ranks(DeviceTime::Collectives),
        })
    }

    fn divides_gradients(&self) -> bool {
        self.settings.zero_stage.divides_gradients() && self.ranks.world_size() > 1
    }

    /// Returns the rank that updates each parameter, by name, if ranks divide the updates; else nothing.
    fn owners(&self) -> BTreeMap<Arc<str>, usize> {
        if self.optimizer.is_partial() { self.ranks.owners(&self.model.parameters()) } else { BTreeMap::new() }
    }

    /// Runs forward and backward of all micro-batches. Returns the sum of the cross entropies times the loss scale, or the sums of pairs, and after
    /// them the sum of the auxiliary losses if there are any.
    fn micro_batches(
        &self,
        micro_batches: &[Batch],
        counts: StepCounts,
        sink: &mut dyn GradientSink<B>,
    ) -> Result<Tensor<B, 1>, RunError> {
        let mut sum: Option<Tensor<B, 1>> = None;
        for (index, batch) in micro_batches.iter().enumerate() {
            sink.begin_micro_batch(index + 1 == micro_batches.len());
            let pass = PassOptions { dropout: self.dropout(index, batch), ..self.settings.pass };
            let (chunk_tokens, scale) = (self.settings.loss_chunk_tokens, self.optimizer.loss_scale());
            let of_batch = if let Some(pairs) = &self.settings.pairs {
                let mut on_device = pairs.upload(&self.model, batch)?;
                self.balance(&mut on_device.batch, batch, micro_batches.len());
                pairs.loss_and_gradients(&self.model, &on_device, counts, (pass, chunk_tokens, scale), sink)
            } else {
                let Batch { input_ids, targets, positions, cu_seqlens, .. } = batch;
                let mut on_device = self.model.upload(input_ids, targets, positions, cu_seqlens)?;
                self.balance(&mut on_device, batch, micro_batches.len());
                let count = on_device.targets.count;
                // The loss scale is a weight, so that it stays on the device: the loss multiplies it by one over the loss tokens in f32
                // before anything is rounded to the compute format.
                let repeated = |scale: Tensor<B, 1>| Tensor::<B, 1>::ones([count], &scale.device()).mul(scale);
                on_device.targets.weights_m = scale.filter(|_| count > 0).map(repeated);
                let gradient_scale = Some(1.0 / counts.loss_tokens as f64);
                let options = LossOptions { chunk_tokens, gradient_scale, log_probs: false, temperature: 1.0 };
                self.model.loss_and_gradients(&on_device, pass, options, sink)
            };
            sum = Some(match sum {
                Some(sum) => sum.add(of_batch),
                None => of_batch,
            });
        }
        Ok(sum.expect("a step has a micro-batch"))
    }

    /// Gives one of this rank's `count` micro-batches the auxiliary loss that balances experts, if the model trains with it. A micro-batch of nothing
    /// but padding, as a rank without rows has, counts as one whose loss is zero.
    fn balance(&self, on_device: &mut MicroBatch<B>, batch: &Batch, count: usize) {
        let Some(weight) = self.settings.router_aux_loss else { return };
        let (_, _, world_size) = self.place();
        let of_each = weight / (count * world_size) as f64;
        let gradient_scale = match self.optimizer.loss_scale() {
            Some(loss_scale) => loss_scale.mul_scalar(of_each),
            None => Tensor::from_floats([of_each as f32], self.model.device()),
        };
        // Padding is a document of its own, and the only one without a target.
        let is_token = (batch.padding > 0).then(|| {
            let document = |bounds: &[u32]| {
                let tokens = bounds[0] as usize..bounds[1] as usize;
                let has_target = batch.targets[tokens.clone()].iter().any(|&target| target != IGNORE_INDEX);
                tokens.map(move |_| has_target)
            };
            let is_token: Vec<bool> = batch.cu_seqlens.windows(2).flat_map(document).collect();
            let tokens = is_token.iter().filter(|&&is_token| is_token).count();
            assert_eq!(tokens, batch.tokens(), "every document has a target, and padding has none");
            is_token
        });
        self.model.add_router_loss(on_device, is_token.as_deref(), gradient_scale);
    }

    /// Sums the loss over all ranks, updates this rank's parameters, and broadcasts them to the other ranks.
    fn update(
        &mut self,
        loss_sum: Tensor<B, 1>,
        gradients: GradientMap<B>,
        mut owners: BTreeMap<Arc<str>, usize>,
        learning_rate: f64,
    ) -> Result<(Tensor<B, 1>, StepReport<B>), RunError> {
        let (loss_sum, report) = if self.divides_gradients() {
            let zero = || Tensor::zeros([1], self.model.device());
            let squares = squared_norm(&gradients).unwrap_or_else(zero);
            let mut sums = self.ranks.all_reduce_sum::<B>(vec![loss_sum, squares])?;
            let squared_norm = sums.pop().expect("a sum over ranks has as many tensors as it was given");
            let loss_sum = sums.pop().expect("a sum over ranks has as many tensors as it was given");
            let mut own = self.model.parameters_mut();
            own.retain(|parameter| owners[&parameter.name] == self.ranks.rank());
            (loss_sum, self.optimizer.step_of_share(own, gradients, squared_norm, learning_rate))
        } else {
            let loss_sum = self.ranks.all_reduce_scalar(loss_sum)?;
            (loss_sum, self.optimizer.step(self.model.parameters_mut(), gradients, learning_rate))
        };
        if self.optimizer.is_partial() {
            // Divided weights stay on their rank.
            owners.retain(|name, _| !self.model.divides(name));
            let shared = self.model.parameters_mut().into_iter();
            let shared = shared.filter_map(|parameter| {
                let owner = *owners.get(&parameter.name)?;
                Some((parameter, owner))
            });
            self.ranks.share_updates(shared.collect())?;
        }
        self.model.refresh_adapter();
        Ok((loss_sum, report))
    }

    /// Returns the coming step, this rank in it, and the number of ranks.
    fn place(&self) -> (u64, usize, usize) {
        let next = (self.optimizer.steps() + 1, self.ranks.rank(), self.ranks.world_size());
        self.settings.again.unwrap_or(next)
    }

    /// Returns the masks of a micro-batch in the coming step. Their seed follows from the run's seed and the step, and the place of a row in them from
    /// its place in the step over all micro-batches and ranks; none of it is state, so a resumed run has the masks of an uninterrupted one.
    fn dropout(&self, micro_batch: usize, batch: &Batch) -> Option<DropoutMasks> {
        let (step, rank, world_size) = self.place();
        let seeds = [self.settings.dropout_seed?, step];
        let micro_batch = micro_batch * world_size + rank;
        Some(DropoutMasks {
            seed: xxh3_64(&seeds.map(u64::to_le_bytes).concat()),
            first_row: (micro_batch * batch.rows) as u64,
            row_len: batch.row_len,
        })
    }
}

/// Reads one f32 back from the device, waiting for everything queued before it.
pub fn scalar<B: Kernels>(tensor: Tensor<B, 1>) -> f32 {
    tensor.into_data().convert::<f32>().to_vec::<f32>().expect("the value was just converted to f32")[0]
}
