//! Completions in a step: their micro-batches, log-probabilities and gradients.
//!
//! Trade-off: a step has as many micro-batches as its completions fill, and ranks wait for the one with the most.

use burn_tensor::Tensor;
use firebrick_data::{Batch, DocumentSet, Example, IGNORE_INDEX, PackOptions, PackedDataset};
use firebrick_kernels::{GradientSink, Kernels};
use firebrick_model::{LossOptions, PassOptions};
use serde::{Deserialize, Serialize};

use crate::error::RunError;
use crate::grpo::{Completion, Denominators, Objective, Sums};
use crate::run::step::preference::StepCounts;
use crate::run::step::{StepOutcome, Trainer};

/// A completion that a step learns from.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// Tokens of its prompt.
    pub prompt: Vec<u32>,
    /// Its tokens.
    pub tokens: Vec<u32>,
    /// Log-probability of each token when it was sampled.
    pub sampled: Vec<f32>,
    /// The same by the kernels of training before the first step of its round; none where the round has one step.
    pub old: Option<Vec<f32>>,
    /// Those of the reference, if there is one.
    pub reference: Option<Vec<f32>>,
    /// How much better it is than the others of its prompt.
    pub advantage: f64,
    /// The experts of its tokens when it was sampled ([`firebrick_model::Completion::experts`]); none if a step is not compared with that.
    pub experts: Vec<u32>,
}

/// Which completions a micro-batch has, in the order of its targets.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PolicyBatch {
    pub(super) batch: Batch,
    samples: Vec<usize>,
}

/// How completions are learned from.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct PolicyStep {
    /// The loss.
    pub objective: Objective,
    /// The temperature of sampling.
    pub temperature: f64,
    /// What the loss is divided by, over all ranks.
    pub denominators: Denominators,
}

/// What the host knows of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PolicySums {
    /// Of the loss.
    pub loss: Sums,
    /// Sum of the log-probabilities of tokens: minus this by their number estimates the entropy.
    pub log_probs: f64,
    /// Sum of the distances between log-probabilities of training and of sampling, before the first update of a round.
    pub drift: f64,
    /// The largest of these.
    pub max_drift: f64,
    /// Tokens whose experts are compared with those of sampling, and of these the ones of which a router chose others.
    pub routed: [u64; 2],
}

/// Packs completions with their prompts into micro-batches of `rows` rows of `row_len` tokens.
///
/// # Panics
/// If one is longer than a row.
pub fn micro_batches(samples: &[Sample], row_len: usize, rows: usize, pack: bool) -> Vec<PolicyBatch> {
    if samples.is_empty() {
        return Vec::new();
    }
    let example = |Sample { prompt, tokens, .. }: &Sample| Example {
        tokens: [&prompt[..], tokens].concat(),
        loss_mask: [vec![false; prompt.len()], vec![true; tokens.len()]].concat(),
    };
    let examples: Vec<Example> = samples.iter().map(example).collect();
    let options = PackOptions { pack, length_group: None, ..PackOptions::new(row_len) };
    let packed = PackedDataset::new(DocumentSet::from_examples(&examples), options);
    let all: Vec<usize> = (0..packed.rows()).collect();
    let of_rows = |rows: &[usize]| PolicyBatch {
        batch: packed.batch(rows),
        samples: rows.iter().flat_map(|&row| packed.row_documents(row)).collect(),
    };
    all.chunks(rows).map(of_rows).collect()
}

impl<B: Kernels> Trainer<B> {
    /// Computes the log-probabilities of completions, in their order, with or without adapters.
    ///
    /// # Errors
    /// A token outside the model's vocabulary.
    pub fn log_probs(
        &self,
        samples: &[Sample],
        batches: &[PolicyBatch],
        adapters: bool,
        temperature: f64,
    ) -> Result<Vec<Vec<f32>>, RunError> {
        let mut found = vec![Vec::new(); samples.len()];
        for PolicyBatch { batch, samples: own } in batches {
            let on_device = self.model.upload(&batch.input_ids, &batch.targets, &batch.positions, &batch.cu_seqlens)?;
            let chunk_tokens = self.settings.loss_chunk_tokens;
            let mut rest = self.model.log_probs(&on_device, adapters, chunk_tokens, temperature);
            self.experts_of_targets(batch);
            for &sample in own {
                let after = rest.split_off(samples[sample].tokens.len());
                found[sample] = std::mem::replace(&mut rest, after);
            }
        }
        Ok(found)
    }

    /// Takes a step on this rank's completions, of which those of `batches` are learned from.
    ///
    /// # Errors
    /// A token outside the model's vocabulary, or the other ranks could not be reached.
    pub fn policy_step(
        &mut self,
        samples: &[Sample],
        batches: &[PolicyBatch],
        step: PolicyStep,
    ) -> Result<(StepOutcome, PolicySums), RunError> {
        let counts = StepCounts { loss_tokens: step.denominators.tokens.max(1), ..StepCounts::default() };
        let mut sums = PolicySums::default();
        let outcome = self.step_with(counts, batches.len(), |trainer, sink| {
            trainer.policy_batches(samples, batches, step, &mut sums, sink)
        })?;
        Ok((outcome, sums))
    }

    /// Runs forward and backward of all micro-batches. Returns what [`Trainer::micro_batches`] does.
    pub(super) fn policy_batches(
        &self,
        samples: &[Sample],
        batches: &[PolicyBatch],
        step: PolicyStep,
        sums: &mut PolicySums,
        sink: &mut dyn GradientSink<B>,
    ) -> Result<Tensor<B, 1>, RunError> {
        let PolicyStep { objective, temperature, denominators } = step;
        let (mut aux_loss, chunk_tokens) = (None, self.settings.loss_chunk_tokens);
        for (index, PolicyBatch { batch, samples: own }) in batches.iter().enumerate() {
            sink.begin_micro_batch(index + 1 == batches.len());
            let mut on_device =
                self.model.upload(&batch.input_ids, &batch.targets, &batch.positions, &batch.cu_seqlens)?;
            self.balance(&mut on_device, batch, batches.len());
            let loss = LossOptions { chunk_tokens, gradient_scale: Some(1.0), log_probs: false, temperature };
            let derivatives = |log_probs: &[f32]| {
                let (mut at, mut d_log_probs) = (0, vec![0.0; log_probs.len()]);
                let experts = self.experts_of_targets(batch);
                let routers = experts.len() / log_probs.len().max(1);
                for sample in own.iter().map(|&sample| &samples[sample]) {
                    let tokens = at..at + sample.tokens.len();
                    at = tokens.end;
                    let found = &log_probs[tokens.clone()];
                    sums.note(sample, found);
                    sums.note_experts(sample, &experts[routers * tokens.start..routers * tokens.end], routers);
                    let completion = Completion {
                        log_probs: found,
                        old: sample.old.as_deref(),
                        reference: sample.reference.as_deref(),
                        advantage: sample.advantage,
                    };
                    sums.loss.add(&objective.part(&completion, denominators, &mut d_log_probs[tokens]));
                }
                d_log_probs
            };
            let pass = PassOptions { dropout: None, ..self.settings.pass };
            let factor = self.optimizer.loss_scale();
            let of_batch = self.model.policy_gradients(&on_device, pass, loss, factor, derivatives, sink);
            aux_loss = aux_loss.into_iter().chain(of_batch).reduce(Tensor::add);
        }
        // The outcome divides by the tokens again.
        let loss = (sums.loss.loss * denominators.tokens.max(1) as f64) as f32;
        let loss_sum = Tensor::from_floats([loss], self.model.device());
        Ok(match aux_loss {
            Some(aux_loss) => Tensor::cat(vec![loss_sum, aux_loss], 0),
            None => loss_sum,
        })
    }
}

impl<B: Kernels> Trainer<B> {
    /// Takes the experts of the tokens that predict targets in the last pass; none unless the model notes them.
    fn experts_of_targets(&self, batch: &Batch) -> Vec<u32> {
        let Some(choices) = self.model.choices() else { return Vec::new() };
        let predicts = |(row, target): (usize, &i64)| (*target != IGNORE_INDEX).then_some(row);
        let rows: Vec<usize> = batch.targets.iter().enumerate().filter_map(predicts).collect();
        choices.take(batch.input_ids.len(), &rows)
    }
}

impl PolicySums {
    fn note_experts(&mut self, sample: &Sample, experts: &[u32], routers: usize) {
        if routers == 0 || sample.experts.len() != experts.len() {
            return;
        }
        let differ = |(one, other): &(&[u32], &[u32])| one != other;
        let pairs = sample.experts.chunks(routers).zip(experts.chunks(routers));
        self.routed[0] += sample.tokens.len() as u64;
        self.routed[1] += pairs.filter(differ).count() as u64;
    }

    fn note(&mut self, sample: &Sample, log_probs: &[f32]) {
        let before = sample.old.as_deref().unwrap_or(log_probs);
        for ((&now, &before), &sampled) in log_probs.iter().zip(before).zip(&sample.sampled) {
            let drift = f64::from((before - sampled).abs());
            self.log_probs += f64::from(now);
            self.drift += drift;
            self.max_drift = self.max_drift.max(drift);
        }
    }
}
