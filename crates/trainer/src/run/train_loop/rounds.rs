//! Rounds of learning from rewards: prompts are completed, completions scored, and some steps learn from them.
//!
//! ```text
//! prompts          the next rows of the data, groups whole on their rank
//! completions      a random stream each, numbered over the run: a resumed run samples the same
//! rewards          asked once: those of a killed run are read from its files
//! rounds/          completions, rewards and log-probabilities, written before the first update
//! steps            num_iterations passes over steps_per_generation parts
//! ```
//!
//! Trade-off: the device waits while rewards are computed.

use std::collections::{BTreeMap, HashMap};
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::time::Instant;

use firebrick_data::{Cursor, RowOrder, Tokenizer};
use firebrick_kernels::{Hint, Kernels};
use firebrick_model::{BatchLimits, Completion, Decoder, GenerateOptions, Sampler, Sampling};
use firebrick_parallel::{ParallelError, Ranks};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::Run;
use crate::config::GrpoSection;
use crate::error::RunError;
use crate::grpo::reward::{Request, Rewards, Scores};
use crate::grpo::{Denominators, Sums, advantages, reward_of};
use crate::metrics::{Evaluation, PolicyMetrics};
use crate::run::prepare::Prepared;
use crate::run::prepare::prompts::PromptColumns;
use crate::run::step::evaluate::Stage;
use crate::run::step::policy::{PolicyStep, PolicySums, Sample, micro_batches};
use crate::run::step::search::StepContent;
use crate::run::step::{StepOutcome, Trainer};
use crate::run::text::generate::stop_tokens;
use crate::storage::{StorageError, write_atomically};

/// Folder of the files of rounds in a run's folder.
const FOLDER: &str = "rounds";

/// What a run that learns from rewards keeps between its steps.
pub(super) struct Learner {
    section: GrpoSection,
    rewards: Rewards,
    order: RowOrder,
    options: GenerateOptions,
    /// Chooses the tokens of held-out prompts.
    held_out: Sampler,
    folder: PathBuf,
    round: Option<Round>,
    /// Whether the warning that training and sampling differ was printed.
    pub(super) has_warned: bool,
}

/// A completion with what is known of it, as in the files of rounds.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
struct Rollout {
    /// Number of the completion in the run.
    id: u64,
    document: usize,
    /// The prompt as rewards see it; none in files of earlier versions.
    #[serde(default, skip_serializing_if = "Value::is_null")]
    prompt: Value,
    text: String,
    tokens: Vec<u32>,
    is_truncated: bool,
    /// Rewards in the order of the recipe.
    parts: Vec<Option<f64>>,
    reward: Option<f64>,
    advantage: f64,
    sampled: Vec<f32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    old: Option<Vec<f32>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reference: Option<Vec<f32>>,
    /// As in [`Completion::experts`].
    #[serde(skip)]
    experts: Vec<u32>,
}

/// The completions of one rank in a round.
struct Round {
    /// Steps before its first one.
    begins: u64,
    rollouts: Vec<Rollout>,
    samples: Vec<Sample>,
    after: Cursor,
    /// Tokens that all ranks sampled, and the seconds until the last one had; none in a round that an earlier process sampled.
    sampled_tokens: u64,
    sampling_s: f64,
    scores: RoundScores,
}

/// What is known of a round's rewards besides the completions.
#[derive(Clone, Debug, Default)]
struct RoundScores {
    seconds: f64,
    timeouts: u64,
    named: BTreeMap<String, f64>,
}

impl Learner {
    /// Opens the rewards of a plan; `None` if it does not learn from rewards.
    pub(super) fn open<B: Kernels>(
        prepared: &Prepared,
        model: &Decoder<B>,
        folder: PathBuf,
    ) -> Result<Option<Self>, RunError> {
        let (plan, Some(section)) = (&prepared.plan, &prepared.plan.grpo) else { return Ok(None) };
        let section = section.value.clone();
        let folder = folder.join(FOLDER);
        std::fs::create_dir_all(&folder).map_err(|error| StorageError::io("create", &folder, error))?;
        let rewards = Rewards::open(&section.rewards, &folder.join("rewards.log"))?;
        let sampling = |temperature: f64| Sampling {
            temperature: temperature as f32,
            top_p: section.top_p as f32,
            min_p: section.min_p as f32,
            ..Sampling::GREEDY
        };
        let options = GenerateOptions {
            max_new_tokens: section.max_completion_length,
            stop_tokens: stop_tokens(model, &prepared.tokenizer, prepared.tokenizer.chat_template().is_ok())?,
            sampler: Sampler::new(sampling(section.temperature), plan.seed.value)?,
            limits: BatchLimits::NONE,
        };
        let held_out = Sampler::new(sampling(section.eval_temperature), plan.seed.value)?;
        let order = RowOrder::new(prepared.train.clone(), plan.data_seed.value, plan.shuffle.value);
        Ok(Some(Self { section, rewards, order, options, held_out, folder, round: None, has_warned: false }))
    }

    /// Samples and scores the completions of the round that begins after so many steps, or takes them from the file of a run that was stopped in it.
    fn begin<B: Kernels>(
        &mut self,
        trainer: &Trainer<B>,
        prepared: &Prepared,
        begins: u64,
        (cursor, is_continued): (Cursor, bool),
    ) -> Result<(), RunError> {
        let ranks = &trainer.ranks;
        let generations = self.section.num_generations;
        let prompts_per_step = prepared.plan.rows_per_step() / generations / ranks.world_size();
        let prompts = prompts_per_step * self.section.steps_per_generation;
        let (rows, after) = self.order.take(cursor, prompts * ranks.world_size());
        let rows = &rows[prompts * ranks.rank()..][..prompts];
        let documents: Vec<usize> = rows.iter().flat_map(|&row| prepared.train.row_documents(row)).collect();
        let first = (begins / self.section.steps_per_round()) * (prompts * ranks.world_size() * generations) as u64;
        let first = first + (ranks.rank() * prompts * generations) as u64;
        let file = self.folder.join(format!("step-{:08}-rank-{}.jsonl", begins + 1, ranks.rank()));
        let known: Vec<Rollout> = std::fs::read_to_string(&file).map_or_else(
            |_| Vec::new(),
            |text| text.lines().map_while(|line| serde_json::from_str(line).ok()).collect(),
        );
        let prompt = |document: usize| prepared.train.documents().document(document).to_example().tokens;
        let (mut sampled_tokens, mut sampling_s, mut scores) = (0, 0.0, RoundScores::default());
        let mut rollouts = known;
        if is_continued && rollouts.len() != documents.len() * generations {
            return Err(RunError::Refused(format!(
                "{} has not the {} completions of the round that the checkpoint lies in: start the run again, or resume it from an earlier \
                 checkpoint",
                file.display(),
                documents.len() * generations
            )));
        }
        if !is_continued {
            let started = Instant::now();
            let repeated: Vec<Vec<u32>> =
                documents.iter().flat_map(|&document| std::iter::repeat_n(prompt(document), generations)).collect();
            // Sampling and training have tensors of other sizes.
            B::hint(trainer.model.device(), Hint::NewSizes);
            let completions = trainer.model.complete(&repeated, &self.options, first)?;
            B::hint(trainer.model.device(), Hint::NewSizes);
            let tokens: usize = completions.iter().map(|completion| completion.tokens.len()).sum();
            sampled_tokens = ranks.all_reduce_count(tokens as u64)?;
            sampling_s = started.elapsed().as_secs_f64();
            let of = |index: usize| documents[index / generations];
            let new = completions.into_iter().enumerate();
            let new = new.map(|(index, completion)| {
                self.rollout(&prepared.tokenizer, first + index as u64, of(index), completion)
            });
            let new = new.collect::<Result<Vec<_>, _>>()?;
            let columns = &prepared.prompts.as_ref().expect("there are prompts").train;
            (rollouts, scores) = self.scored((new, rollouts), begins + 1, ranks, columns)?;
        }
        let sample = |rollout: &Rollout| {
            let Rollout { document, tokens, sampled, old, reference, advantage, experts, .. } = rollout.clone();
            Sample { prompt: prompt(document), tokens, sampled, old, reference, advantage, experts }
        };
        let mut samples: Vec<Sample> = rollouts.iter().map(sample).collect();
        if !is_continued {
            self.add_log_probs(trainer, prepared, &mut samples)?;
            for (rollout, sample) in rollouts.iter_mut().zip(&samples) {
                (rollout.old, rollout.reference) = (sample.old.clone(), sample.reference.clone());
            }
            let line = |rollout: &Rollout| serde_json::to_string(rollout).expect("numbers and texts are JSON") + "\n";
            write_atomically(&file, rollouts.iter().map(line).collect::<String>().as_bytes())?;
        }
        self.round = Some(Round { begins, rollouts, samples, after, sampled_tokens, sampling_s, scores });
        Ok(())
    }

    fn rollout(
        &self,
        tokenizer: &Tokenizer,
        id: u64,
        document: usize,
        completion: Completion,
    ) -> Result<Rollout, RunError> {
        let Completion { tokens, log_probs: sampled, is_truncated, experts } = completion;
        let written = if is_truncated { &tokens[..] } else { &tokens[..tokens.len() - 1] };
        let text = tokenizer.decode(written, true)?;
        Ok(Rollout { id, document, text, tokens, is_truncated, sampled, experts, ..Rollout::default() })
    }

    /// Scores completions, except for those whose rewards an earlier process has written.
    fn scored(
        &mut self,
        (mut rollouts, known): (Vec<Rollout>, Vec<Rollout>),
        step: u64,
        ranks: &Ranks,
        columns: &[PromptColumns],
    ) -> Result<(Vec<Rollout>, RoundScores), RunError> {
        let started = Instant::now();
        let known: HashMap<u64, Rollout> = known.into_iter().map(|rollout| (rollout.id, rollout)).collect();
        let same = |rollout: &Rollout| known.get(&rollout.id).filter(|known| known.tokens == rollout.tokens);
        let is_new: Vec<bool> = rollouts.iter().map(|rollout| same(rollout).is_none()).collect();
        let generations = self.section.num_generations as u64;
        let new = rollouts.iter().zip(&is_new).filter(|(_, is_new)| **is_new);
        let request = new.map(|(rollout, _)| request_of(rollout, step, generations, &columns[rollout.document]));
        let requests: Vec<Request<'_>> = request.collect();
        let Scores { parts, timeouts, metrics } = self.rewards.score(&requests)?;
        let mut parts = parts.into_iter();
        let found: Vec<Vec<Option<f64>>> = rollouts
            .iter()
            .map(|rollout| match same(rollout) {
                Some(known) => known.parts.clone(),
                None => parts.next().expect("each completion is scored"),
            })
            .collect();
        let weights = self.rewards.weights();
        let rewards: Vec<Option<f64>> = found.iter().map(|parts| reward_of(parts, &weights)).collect();
        // A deviation may be that of the batch of all ranks.
        let of_all = gathered(ranks, rewards.iter().map(|reward| reward.unwrap_or(f64::NAN)).collect())?;
        let of_all: Vec<Option<f64>> = of_all.into_iter().map(known_number).collect();
        let scored = advantages(&of_all, self.section.num_generations, self.section.scale_rewards).advantages;
        let scored = scored.into_iter().skip(ranks.rank() * rewards.len());
        for (rollout, ((parts, reward), advantage)) in
            rollouts.iter_mut().zip(found.into_iter().zip(rewards).zip(scored))
        {
            (rollout.parts, rollout.reward, rollout.advantage) = (parts, reward, advantage);
            rollout.prompt = columns[rollout.document].prompt.clone();
        }
        let scores = RoundScores {
            timeouts: ranks.all_reduce_count(timeouts as u64)?,
            named: metrics.into_iter().map(|(name, value)| (format!("reward_metrics/{name}"), value)).collect(),
            seconds: started.elapsed().as_secs_f64(),
        };
        Ok((rollouts, scores))
    }

    /// Adds the log-probabilities that later steps of the round, and the distance from the reference, need.
    fn add_log_probs<B: Kernels>(
        &self,
        trainer: &Trainer<B>,
        prepared: &Prepared,
        samples: &mut [Sample],
    ) -> Result<(), RunError> {
        let plan = &prepared.plan;
        let (needs_old, needs_reference) = (self.section.steps_per_round() > 1, self.section.beta != 0.0);
        if !needs_old && !needs_reference {
            return Ok(());
        }
        let batches = micro_batches(samples, plan.max_seq_len.value, plan.micro_batch_size.value, plan.pack.value);
        for adapters in [true, false] {
            if !(if adapters { needs_old } else { needs_reference }) {
                continue;
            }
            let found = trainer.log_probs(samples, &batches, adapters, self.section.temperature)?;
            for (sample, log_probs) in samples.iter_mut().zip(found) {
                *(if adapters { &mut sample.old } else { &mut sample.reference }) = Some(log_probs);
            }
        }
        Ok(())
    }

    /// Completes held-out prompts, a part of them on each rank, and returns their mean reward; `None` if `watch` broke off on a rank.
    pub(super) fn evaluate<B: Kernels>(
        &mut self,
        trainer: &Trainer<B>,
        prepared: &Prepared,
        step: u64,
        watch: &mut dyn FnMut(Stage) -> ControlFlow<()>,
    ) -> Result<Option<Evaluation>, RunError> {
        let Some((documents, columns)) = prepared.prompts.as_ref().and_then(|prompts| prompts.held_out.as_ref()) else {
            return Ok(Some(Evaluation::default()));
        };
        let at_once = crate::plan::MAX_PROMPTS_AT_ONCE;
        let limits = BatchLimits { sequences: at_once, tokens: prepared.plan.answer_tokens.value };
        let options = GenerateOptions { sampler: self.held_out.clone(), limits, ..self.options.clone() };
        let (mut sum, mut count, weights, ranks) = (0.0, 0.0, self.rewards.weights(), &trainer.ranks);
        let all = documents.len();
        B::hint(trainer.model.device(), Hint::NewSizes);
        for first in (0..all).step_by(at_once * ranks.world_size()) {
            let breaks = watch(Stage::Answers(first, all)).is_break();
            if ranks.all_reduce_count(u64::from(breaks))? > 0 {
                return Ok(None);
            }
            let own = first + at_once * ranks.rank();
            let group = all.min(own)..all.min(own + at_once);
            let prompts: Vec<Vec<u32>> =
                group.clone().map(|document| documents.document(document).to_example().tokens).collect();
            let completions = trainer.model.complete(&prompts, &options, group.start as u64)?;
            let rollout =
                |(document, completion)| self.rollout(&prepared.tokenizer, document as u64, document, completion);
            let rollouts = group.zip(completions).map(rollout).collect::<Result<Vec<_>, _>>()?;
            let request = rollouts.iter().map(|rollout| request_of(rollout, step, 1, &columns[rollout.document]));
            let requests: Vec<Request<'_>> = request.collect();
            let parts = self.rewards.score(&requests)?.parts;
            let rewards = parts.iter().filter_map(|parts| reward_of(parts, &weights));
            (sum, count) = rewards.fold((sum, count), |(sum, count), reward| (sum + reward, count + 1.0));
        }
        B::hint(trainer.model.device(), Hint::NewSizes);
        let of_ranks = gathered(ranks, vec![sum, count])?;
        let (sum, count) = of_ranks.chunks(2).fold((0.0, 0.0), |all, own| (all.0 + own[0], all.1 + own[1]));
        let reward = (count > 0.0).then(|| sum / count);
        Ok(Some(Evaluation { reward, ..Evaluation::default() }))
    }
}

fn request_of<'a>(rollout: &'a Rollout, step: u64, generations: u64, columns: &'a PromptColumns) -> Request<'a> {
    let Rollout { id, text, is_truncated, tokens, .. } = rollout;
    Request {
        id: *id,
        group: id / generations,
        step,
        prompt: &columns.prompt,
        completion: text,
        is_truncated: *is_truncated,
        tokens: tokens.len(),
        completion_ids: tokens,
        row: &columns.row,
    }
}

impl<B: Kernels> Run<B> {
    /// Takes the next step of a round, and begins the round before its first one. Returns what [`Trainer::step_of`] does with what the step learned
    /// from, its tokens, and its numbers.
    pub(super) fn step_of_round(&mut self) -> Result<((StepOutcome, StepContent), u64, PolicyMetrics), RunError> {
        let learner = self.learner.as_mut().expect("the run learns from rewards");
        let (step, per_round) = (self.state.step, learner.section.steps_per_round());
        let started = Instant::now();
        let (begins, index) = (step / per_round * per_round, (step % per_round) as usize);
        if learner.round.as_ref().is_none_or(|round| round.begins != begins) {
            // A cursor is that after the round that a checkpoint lies in, so such a round is in its file.
            learner.begin(&self.trainer, &self.prepared, begins, (self.state.cursor, index > 0))?;
        }
        let round = learner.round.as_ref().expect("it has begun");
        let round_s = started.elapsed().as_secs_f64();
        let times = self.state.rounds.get_or_insert_default();
        times.all_s += round_s;
        if index == 0 {
            self.state.cursor = round.after;
            times.sampled_tokens += round.sampled_tokens;
            times.sampling_s += round.sampling_s;
        }
        let parts = learner.section.steps_per_generation;
        let size = round.samples.len() / parts;
        let own = index % parts * size..(index % parts + 1) * size;
        let (rollouts, plan) = (&round.rollouts[own.clone()], &self.prepared.plan);
        let learns = |rollout: &Rollout| !(learner.section.mask_truncated_completions && rollout.is_truncated);
        let kept = rollouts.iter().zip(&round.samples[own]).filter(|(rollout, _)| learns(rollout));
        // After an update other weights choose the experts.
        let experts = |sample: &Sample| if index == 0 { sample.experts.clone() } else { Vec::new() };
        let samples: Vec<Sample> =
            kept.map(|(_, sample)| Sample { experts: experts(sample), ..sample.clone() }).collect();
        let tokens: usize = samples.iter().map(|sample| sample.tokens.len()).sum();
        let ranks = &self.trainer.ranks;
        let denominators = Denominators {
            tokens: ranks.all_reduce_count(tokens as u64)?,
            completions: (rollouts.len() * ranks.world_size()) as u64,
        };
        let batches = micro_batches(&samples, plan.max_seq_len.value, plan.micro_batch_size.value, plan.pack.value);
        let policy = PolicyStep {
            objective: learner.section.objective(),
            temperature: learner.section.temperature,
            denominators,
        };
        let (outcome, sums) = self.trainer.policy_step(&samples, &batches, policy)?;
        let mut metrics =
            of_rollouts(rollouts, &learner.rewards.names(), learner.section.num_generations, &self.trainer.ranks)?;
        let RoundScores { seconds: reward_s, timeouts, ref named } = round.scores;
        let sampled_per_s = if round.sampling_s > 0.0 { round.sampled_tokens as f64 / round.sampling_s } else { 0.0 };
        metrics = PolicyMetrics { sampled_per_s, round_s, reward_s, timeouts, named: named.clone(), ..metrics };
        add_sums(&mut metrics, &sums, &self.trainer.ranks)?;
        let tokens = samples.iter().map(|sample| (sample.prompt.len() + sample.tokens.len()) as u64).sum();
        Ok(((outcome, StepContent::Completions(samples, batches, policy)), tokens, metrics))
    }
}

/// Returns the means over the completions of all ranks.
fn of_rollouts(
    rollouts: &[Rollout],
    names: &[&str],
    generations: usize,
    ranks: &Ranks,
) -> Result<PolicyMetrics, RunError> {
    let numbers = |rollout: &Rollout| {
        let truncated = f64::from(u8::from(rollout.is_truncated));
        let own = [rollout.reward.unwrap_or(f64::NAN), rollout.tokens.len() as f64, truncated];
        own.into_iter().chain(rollout.parts.iter().map(|part| part.unwrap_or(f64::NAN))).collect::<Vec<_>>()
    };
    let all = gathered(ranks, rollouts.iter().flat_map(numbers).collect())?;
    let column = |index: usize| all.iter().skip(index).step_by(3 + names.len()).copied().map(known_number);
    let mean = |values: &mut dyn Iterator<Item = f64>| {
        let (sum, count) = values.fold((0.0, 0.0), |(sum, count), value| (sum + value, count + 1.0));
        sum / f64::max(count, 1.0)
    };
    let rewards: Vec<Option<f64>> = column(0).collect();
    let reward = mean(&mut column(0).flatten());
    let part = |(index, name): (usize, &&str)| (format!("rewards/{name}"), mean(&mut column(3 + index).flatten()));
    Ok(PolicyMetrics {
        reward,
        reward_std: mean(&mut column(0).flatten().map(|value| (value - reward).powi(2))).sqrt(),
        parts: names.iter().enumerate().map(part).collect(),
        frac_reward_zero_std: advantages(&rewards, generations, Default::default()).equal_groups,
        unscored: mean(&mut rewards.iter().map(|reward| f64::from(u8::from(reward.is_none())))),
        mean_length: mean(&mut column(1).flatten()),
        truncated: mean(&mut column(2).flatten()),
        ..PolicyMetrics::default()
    })
}

/// Returns the numbers of all ranks, in their order; NaN stands for none.
fn gathered(ranks: &Ranks, own: Vec<f64>) -> Result<Vec<f64>, RunError> {
    if ranks.world_size() == 1 {
        return Ok(own);
    }
    let bytes = own.into_iter().flat_map(f64::to_le_bytes).collect();
    let all = ranks.communicator().all_gather_bytes("rewards", bytes).map_err(ParallelError::from)?;
    Ok(all.iter().flat_map(|bytes| bytes.as_chunks::<8>().0.iter().map(|&bytes| f64::from_le_bytes(bytes))).collect())
}

fn known_number(value: f64) -> Option<f64> {
    (!value.is_nan()).then_some(value)
}

/// Adds what the step's passes have summed, over all ranks.
fn add_sums(metrics: &mut PolicyMetrics, sums: &PolicySums, ranks: &Ranks) -> Result<(), RunError> {
    let Sums { kl, clipped: [low, high], ratios, tokens, .. } = sums.loss;
    let [routed, differing] = sums.routed.map(|count| count as f64);
    let own = [kl, low, high, ratios, tokens, sums.log_probs, sums.drift, sums.max_drift, routed, differing];
    let all = gathered(ranks, own.to_vec())?;
    let sum = |index: usize| all.iter().skip(index).step_by(own.len()).sum::<f64>();
    let (ratios, tokens) = (sum(3).max(1.0), sum(4).max(1.0));
    (metrics.kl, metrics.clipped_low, metrics.clipped_high) = (sum(0) / tokens, sum(1) / ratios, sum(2) / ratios);
    (metrics.entropy, metrics.drift) = (-sum(5) / tokens, sum(6) / tokens);
    metrics.max_drift = all.iter().skip(7).step_by(own.len()).copied().fold(0.0, f64::max);
    metrics.experts_differ = (sum(8) > 0.0).then(|| sum(9) / sum(8));
    Ok(())
}
