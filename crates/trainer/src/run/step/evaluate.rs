//! Evaluation: held-out loss and token accuracy through the same chunked loss as training, and exact match of greedy answers.
//!
//! The loss is the mean over all loss tokens; transformers reports the mean of the batches' means, which gives tokens of short batches more weight.
//! Rows are read again for each evaluation, and prompts are answered in groups of bounded length, so memory does not grow with the held-out data.
//! Several ranks take turns at batches and groups of answers, and sum their counts. The batches are those of a single rank, so the numbers are the
//! same. Sets that have names are scored one after the other, and `loss` is that of all of them together. If ranks divide the weights too, every pass involves all ranks: each answers all prompts, and counts only its share.
//! Trade-off: every rank builds all batches on its host, and the slowest one decides when the evaluation is over.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;
use std::sync::Arc;

use firebrick_data::{DocumentSet, PackOptions, PackedDataset, Tokenizer};
use firebrick_kernels::{Hint, Kernels, PAIR_NUMBERS};
use firebrick_model::{Decoder, Sampler};
use firebrick_parallel::Ranks;

use crate::config::Extraction;
use crate::error::RunError;
use crate::metrics::{Evaluation, PairMetrics};
use crate::plan::{MAX_PROMPTS_AT_ONCE, Plan};
use crate::run::step::assemble::loader_once;
use crate::run::step::eval_prompts::EvalPrompts;
use crate::run::step::preference::{PairObjective, Reference, StepCounts};
use crate::run::step::scalar;
use crate::run::text::generate::continue_prompts;

/// The data that a run is evaluated on.
#[derive(Clone, Debug, Default)]
pub struct EvaluationSet {
    held_out: Option<HeldOut>,
}

#[derive(Clone, Debug)]
struct HeldOut {
    /// The sets in the order of their sources: one that may have no name, and one for each name.
    sets: Vec<HeldOutSet>,
    rows_per_batch: usize,
    max_batches: usize,
    prompts: EvalPrompts,
    extraction: Extraction,
    max_new_tokens: usize,
    answer_tokens: usize,
    loss_chunk_tokens: usize,
    /// The loss of pairs; `None` for single documents.
    pairs: Option<PairObjective>,
}

/// Rows that are scored by themselves.
#[derive(Clone, Debug)]
struct HeldOutSet {
    name: Option<String>,
    rows: Arc<PackedDataset>,
}

impl HeldOutSet {
    /// Divides documents by the names of their sources.
    fn of(documents: &DocumentSet, names: &[Option<String>], packing: &PackOptions) -> Result<Vec<Self>, RunError> {
        let pack = |documents| Arc::new(PackedDataset::new(documents, packing.clone()));
        if names.iter().all(Option::is_none) {
            return Ok(vec![Self { name: None, rows: pack(documents.clone()) }]);
        }
        let mut distinct: Vec<&Option<String>> = names.iter().collect();
        let mut seen = BTreeSet::new();
        distinct.retain(|name| seen.insert(*name));
        let set = |name: &Option<String>| {
            let documents = documents.of_sources(|source| names[source as usize] == *name);
            if documents.is_empty() {
                let shown = name.as_deref().unwrap_or("without a name");
                return Err(RunError::Refused(format!(
                    "data.eval_sources: the set {shown:?} has no document to evaluate on; see its records above, or leave it out"
                )));
            }
            Ok(Self { name: name.clone(), rows: pack(documents) })
        };
        distinct.into_iter().map(set).collect()
    }
}

/// The progress of an evaluation, for a display.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Batches of the loss: done, and total.
    Loss(usize, usize),
    /// Prompts: answered, and total.
    Answers(usize, usize),
}

impl std::fmt::Display for Stage {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Loss(done, all) => write!(formatter, "evaluating: batch {} of {all}", done + 1),
            Self::Answers(done, all) => write!(formatter, "evaluating: answer {} of {all}", done + 1),
        }
    }
}

/// Called before each batch and each group of answers; a break ends the evaluation.
pub type Watch<'a> = &'a mut dyn FnMut(Stage) -> ControlFlow<()>;

impl EvaluationSet {
    /// Prepares the evaluation that a plan describes, of these held-out documents. `names` are those of their sources.
    ///
    /// # Errors
    /// The plan wants answers, and no document has a prompt with a complete answer; the tokenizer cannot decode an answer; or a set has no documents.
    pub fn new(
        plan: &Plan,
        documents: &DocumentSet,
        names: &[Option<String>],
        packing: &PackOptions,
        tokenizer: &Tokenizer,
    ) -> Result<Self, RunError> {
        let (limit, max_new_tokens) = (plan.exact_match_prompts.value, plan.max_new_tokens.value);
        let extraction = Extraction::parse(&plan.extract.value).expect("it was checked when the recipe was read");
        let prompts = EvalPrompts::find(documents, tokenizer, limit, max_new_tokens, &extraction)?;
        let max_batches = match plan.eval_max_batches.value {
            0 => usize::MAX,
            limit => limit,
        };
        let held_out = HeldOut {
            sets: HeldOutSet::of(documents, names, packing)?,
            rows_per_batch: plan.eval_micro_batch_size.value,
            max_batches,
            prompts,
            extraction,
            max_new_tokens,
            answer_tokens: plan.answer_tokens.value,
            loss_chunk_tokens: plan.loss_chunk_tokens.value,
            pairs: PairObjective::planned(plan),
        };
        Ok(Self { held_out: Some(held_out) })
    }

    pub(in crate::run) fn rows(&self) -> impl Iterator<Item = &Arc<PackedDataset>> {
        self.held_out.iter().flat_map(|held_out| &held_out.sets).map(|set| &set.rows)
    }

    pub(in crate::run) fn set_reference(&mut self, reference: Reference) {
        if let Some(pairs) = self.held_out.as_mut().and_then(|held_out| held_out.pairs.as_mut()) {
            pairs.reference = reference;
        }
    }

    /// Returns a short text that identifies the held-out rows.
    pub fn fingerprint(&self) -> String {
        let sets: Vec<String> = self.rows().map(|rows| format!("{:016x}", rows.fingerprint())).collect();
        if sets.is_empty() { "none".to_owned() } else { format!("rows {}", sets.join(" ")) }
    }

    /// Returns a sentence about what is answered, and what was skipped and why; `None` if nothing is answered.
    pub fn note(&self) -> Option<String> {
        self.held_out.as_ref().and_then(|held_out| held_out.prompts.note())
    }

    /// Evaluates the model as it is.
    pub fn evaluate<B: Kernels>(&self, model: &Decoder<B>, tokenizer: &Tokenizer) -> Result<Evaluation, RunError> {
        let evaluation =
            self.evaluate_watched(model, tokenizer, &Ranks::single(), &mut |_| ControlFlow::Continue(()))?;
        Ok(evaluation.expect("an evaluation that nothing stops has a result"))
    }

    /// Evaluates as [`EvaluationSet::evaluate`] does, on all ranks together; `None` if `watch` ended it on one of them.
    pub fn evaluate_watched<B: Kernels>(
        &self,
        model: &Decoder<B>,
        tokenizer: &Tokenizer,
        ranks: &Ranks,
        watch: Watch<'_>,
    ) -> Result<Option<Evaluation>, RunError> {
        let Some(held_out) = &self.held_out else { return Ok(Some(Evaluation::default())) };
        // Buffers that the last step left for reuse have other sizes than those of the evaluation, and vice versa.
        B::hint(model.device(), Hint::NewSizes);
        let evaluation = held_out.evaluate(model, tokenizer, ranks, watch);
        B::hint(model.device(), Hint::NewSizes);
        evaluation
    }
}

/// Counts from some batches and answers.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Tally {
    loss_sum: f64,
    correct: f64,
    tokens: u64,
    right_answers: u64,
    /// Sums over pairs, and their denominators.
    pair_sums: [f64; PAIR_NUMBERS],
    counts: StepCounts,
    /// Whether the evaluation was ended before all of it was counted.
    is_stopped: bool,
}

impl Tally {
    fn add(&mut self, other: &Self) {
        self.loss_sum += other.loss_sum;
        self.correct += other.correct;
        self.tokens += other.tokens;
        self.pair_sums.iter_mut().zip(other.pair_sums).for_each(|(sum, part)| *sum += part);
        self.counts = self.counts.plus(other.counts);
        self.is_stopped |= other.is_stopped;
    }

    /// Sums over all ranks, in rank order.
    fn over(self, ranks: &Ranks) -> Result<Self, RunError> {
        if ranks.world_size() == 1 {
            return Ok(self);
        }
        let Self { loss_sum, correct, tokens, right_answers, pair_sums, counts, is_stopped } = self;
        let StepCounts { loss_tokens, pairs, chosen_targets } = counts;
        let own = [loss_sum.to_bits(), correct.to_bits(), tokens, right_answers, is_stopped.into()];
        let mut sum = Self::default();
        for [loss_sum, correct, tokens, right_answers, is_stopped] in ranks.all_gather_numbers("evaluation", own)? {
            sum.loss_sum += f64::from_bits(loss_sum);
            sum.correct += f64::from_bits(correct);
            sum.tokens += tokens;
            sum.right_answers += right_answers;
            sum.is_stopped |= is_stopped != 0;
        }
        for sums in ranks.all_gather_numbers("evaluation", pair_sums.map(f64::to_bits))? {
            sum.pair_sums.iter_mut().zip(sums).for_each(|(sum, part)| *sum += f64::from_bits(part));
        }
        for [loss_tokens, pairs, chosen_targets] in
            ranks.all_gather_numbers("evaluation", [loss_tokens, pairs, chosen_targets])?
        {
            sum.counts = sum.counts.plus(StepCounts { loss_tokens, pairs, chosen_targets });
        }
        Ok(sum)
    }
}

impl HeldOut {
    fn evaluate<B: Kernels>(
        &self,
        model: &Decoder<B>,
        tokenizer: &Tokenizer,
        ranks: &Ranks,
        watch: Watch<'_>,
    ) -> Result<Option<Evaluation>, RunError> {
        let (mut tally, mut set_losses) = (Tally::default(), BTreeMap::new());
        for set in &self.sets {
            let of_set = self.score(&set.rows, model, ranks, watch)?;
            tally.add(&of_set);
            if let Some(name) = &set.name {
                let Tally { loss_sum, tokens, .. } = of_set.over(ranks)?;
                set_losses.insert(name.clone(), loss_sum / tokens as f64);
            }
        }
        if !tally.is_stopped {
            self.answer(model, tokenizer, ranks, watch, &mut tally)?;
        }
        let Tally { loss_sum, correct, tokens, right_answers, pair_sums, counts, is_stopped } = tally.over(ranks)?;
        if let Some(pairs) = &self.pairs {
            let counts = [counts.pairs, counts.chosen_targets];
            let (loss, pairs) = PairMetrics::new(pair_sums, counts, pairs.nll_weight);
            let evaluation = Evaluation { loss: Some(loss), pairs: Some(pairs), ..Evaluation::default() };
            return Ok((!is_stopped).then_some(evaluation));
        }
        let exact_match = (!self.prompts.is_empty()).then(|| right_answers as f64 / self.prompts.len() as f64);
        let (loss, token_accuracy) = (Some(loss_sum / tokens as f64), Some(correct / tokens as f64));
        Ok((!is_stopped).then_some(Evaluation {
            loss,
            token_accuracy,
            exact_match,
            set_losses,
            ..Evaluation::default()
        }))
    }

    /// Scores this rank's share of a set's batches: sums the loss and counts the right tokens.
    fn score<B: Kernels>(
        &self,
        rows: &Arc<PackedDataset>,
        model: &Decoder<B>,
        ranks: &Ranks,
        watch: Watch<'_>,
    ) -> Result<Tally, RunError> {
        let batches = rows.rows().div_ceil(self.rows_per_batch).min(self.max_batches);
        let mut loader = loader_once(rows, self.rows_per_batch, 0, 1);
        let mut tally = Tally::default();
        for done in 0..batches {
            if watch(Stage::Loss(done, batches)).is_break() && !model.is_divided() {
                return Ok(Tally { is_stopped: true, ..tally });
            }
            let Some((batch, _)) = loader.next_batch() else { break };
            let is_own = done % ranks.world_size() == ranks.rank();
            // Ranks that divide the weights pass through them together; a rank without a batch left joins with one that is not counted.
            let of_last_round = batches - done / ranks.world_size() * ranks.world_size();
            let joins = model.is_divided() && done + 1 == batches && ranks.rank() >= of_last_round;
            if !is_own && !joins {
                continue;
            }
            if let Some(pairs) = &self.pairs {
                let numbers = model.pair_score(&pairs.upload(model, &batch)?, pairs.loss, self.loss_chunk_tokens);
                if is_own {
                    let numbers = numbers.into_data();
                    let sums = tally.pair_sums.iter_mut().zip(numbers.iter::<f32>());
                    sums.for_each(|(sum, number)| *sum += f64::from(number));
                    tally.counts = tally.counts.plus(StepCounts::of(std::slice::from_ref(&batch)));
                }
                continue;
            }
            let on_device = model.upload(&batch.input_ids, &batch.targets, &batch.positions, &batch.cu_seqlens)?;
            let score = model.score(&on_device, self.loss_chunk_tokens);
            if !is_own {
                continue;
            }
            tally.loss_sum += f64::from(scalar(score.loss_sum));
            tally.correct += f64::from(scalar(score.correct));
            tally.tokens += batch.loss_tokens() as u64;
        }
        Ok(tally)
    }

    /// Answers this rank's share of the prompts, and counts the right answers.
    fn answer<B: Kernels>(
        &self,
        model: &Decoder<B>,
        tokenizer: &Tokenizer,
        ranks: &Ranks,
        watch: Watch<'_>,
        tally: &mut Tally,
    ) -> Result<(), RunError> {
        let mut done = 0;
        let at_once = self.prompts.len().div_ceil(ranks.world_size()).clamp(1, MAX_PROMPTS_AT_ONCE);
        let groups = self.prompts.groups(self.answer_tokens, at_once, self.max_new_tokens);
        for (number, group) in groups.enumerate() {
            if watch(Stage::Answers(done, self.prompts.len())).is_break() && !model.is_divided() {
                tally.is_stopped = true;
                return Ok(());
            }
            done += group.len();
            let is_own = number % ranks.world_size() == ranks.rank();
            if !is_own && !model.is_divided() {
                continue;
            }
            let prompts: Vec<Vec<u32>> = group.iter().map(|prompt| prompt.prompt.clone()).collect();
            let answers =
                continue_prompts(model, tokenizer, (&prompts, false), self.max_new_tokens, Sampler::greedy())?;
            let is_right = |(prompt, answer): &(&firebrick_data::EvalPrompt, &String)| {
                self.extraction.matches(answer, &prompt.answer)
            };
            if !is_own {
                continue;
            }
            tally.right_answers += group.iter().zip(&answers).filter(is_right).count() as u64;
        }
        Ok(())
    }
}
