//! Decides how many prompts are answered at a time: as many as need no more memory than the rest of the run. Completions that are learned from are
//! answers too, all of a rank's round at a time.
//!
//! Trade-off: a prompt may be as long as the longest document, so short prompts could sometimes be answered in larger groups.

use firebrick_kernels::{Answers, EvaluatedRows, EvaluationShape, TrainingShape};

use crate::config::{GrpoSection, RunConfig};
use crate::plan::inputs::DataShape;
use crate::plan::wish::Wish;
use crate::plan::{Chosen, fit};

/// Maximum number of prompts that are answered at the same time.
pub const MAX_PROMPTS_AT_ONCE: usize = 64;

/// Approximate number of tokens that a chat template adds to a sample prompt.
const TEMPLATE_TOKENS: usize = 64;

/// The completions that a rank samples at a time, to learn from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Round {
    pub(super) answers: Answers,
    /// Maximum tokens of a completion.
    pub(super) new_tokens: usize,
    /// Optimizer steps that learn from them.
    pub(super) steps: u64,
}

impl Round {
    /// Returns the rounds of a run; `None` if it does not learn from completions.
    pub(super) fn of(wish: &Wish<'_>) -> Option<Self> {
        let grpo = wish.recipe.grpo.as_ref()?;
        let (each, new_tokens) = (grpo.num_generations, grpo.max_completion_length);
        let completions = wish.recipe.rows_per_step(wish.world_size) / wish.world_size * grpo.steps_per_generation;
        let prompt = wish.data.longest_document.saturating_sub(new_tokens).max(1);
        let has_states = wish.model.spec.layers.iter().any(|layer| layer.mixer.cache().per_sequence > 0);
        let answers = Answers::in_groups(completions.div_ceil(each), each, [prompt, new_tokens], !has_states);
        Some(Self { answers, new_tokens, steps: grpo.steps_per_round() })
    }
}

/// Returns the most bytes of the files of a run's completions: of each token its number and text, and its log-probabilities in decimal.
pub(super) fn file_bytes(grpo: &GrpoSection, steps: u64, completions: usize) -> u64 {
    let log_probs = 1 + u64::from(grpo.steps_per_round() > 1) + u64::from(grpo.beta != 0.0);
    let sampled = steps.saturating_mul(completions as u64) / grpo.num_iterations as u64;
    sampled.saturating_mul(grpo.max_completion_length as u64 * (12 + 13 * log_probs))
}

/// Returns what a run evaluates and samples, without the held-out prompts whose answers are compared.
pub(super) fn evaluation(wish: &Wish<'_>) -> EvaluationShape {
    let config = wish.recipe;
    let rows = match (config.has_eval_data(), config.eval.micro_batch_size) {
        (false, _) => EvaluatedRows::None,
        (true, None) => EvaluatedRows::LikeTraining,
        (true, Some(rows)) => EvaluatedRows::Fixed(rows),
    };
    // A prompt has at most one token per byte. All prompts are answered together.
    let lengths = config.eval.prompts.iter().map(|prompt| prompt.len() + TEMPLATE_TOKENS + config.eval.max_new_tokens);
    let samples = lengths.fold(Answers { prompts: 0, tokens: 0, read: 0, longest: 0 }, |all, length| Answers {
        prompts: all.prompts + 1,
        tokens: all.tokens + length,
        read: all.read + length,
        longest: all.longest.max(length),
    });
    let samples = (samples.prompts > 0).then_some(samples);
    let round = Round::of(wish).map(|round| round.answers);
    EvaluationShape { rows, answers: samples.into_iter().chain(round).collect() }
}

/// Returns the tokens of the held-out prompts that are answered at a time, with their answers, and the run with them.
pub(super) fn decide(
    case: &fit::Case<'_>,
    config: &RunConfig,
    data: &DataShape,
    training: TrainingShape,
) -> (Chosen<usize>, TrainingShape) {
    let (limit, new, longest) = match &config.grpo {
        // A document is a prompt with its completion.
        Some(grpo) if config.has_eval_data() => {
            (MAX_PROMPTS_AT_ONCE, grpo.max_completion_length, data.longest_document)
        }
        _ => {
            let new = config.eval.max_new_tokens;
            (config.eval.exact_match_prompts.min(MAX_PROMPTS_AT_ONCE), new, data.longest_document + new)
        }
    };
    if limit == 0 {
        return (Chosen::new(0, "no held-out prompts are answered"), training);
    }
    let with = |tokens: usize| {
        let prompts = limit.min(tokens / (new + 1)).max(1);
        let tokens = tokens.min(prompts * longest);
        let answers = Answers { prompts, tokens, read: tokens, longest };
        let mut training = training.clone();
        training.evaluation.answers.push(answers);
        training
    };
    let whole = (config.eval.micro_batch_size.unwrap_or(training.micro_batch_size) * data.row_len).max(longest);
    let needed = case.bytes(&training);
    let mut tokens = whole;
    while tokens > longest && case.bytes(&with(tokens)) > needed {
        tokens = (tokens / 2).max(longest);
    }
    let training = with(tokens);
    let why = if tokens == whole {
        "of prompts and their answers at a time: as a batch of held-out rows has"
    } else if case.bytes(&training) > needed {
        "of prompts and their answers at a time: the longest prompt alone"
    } else {
        "of prompts and their answers at a time: more would need more memory than the rest of the run"
    };
    (Chosen::new(tokens, why), training)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::GrpoSection;
    use crate::plan::fixtures::Example;

    fn decided(changes: &[&str]) -> (usize, u64, u64) {
        let example = Example::new(changes, 80, 64);
        let before = example.case().bytes(&example.training());
        let (tokens, training) = decide(&example.case(), &example.config, &example.data, example.training());
        (tokens.value, before, example.case().bytes(&training))
    }

    #[test]
    fn groups_of_answers_shrink_until_they_need_no_more_than_training() {
        let eval = ["data.eval_fraction=0.1", "eval.exact_match_prompts=200", "eval.max_new_tokens=32"];
        let (tokens, before, after) = decided(&[&eval[..], &["train.micro_batch_size=32"]].concat());
        assert_eq!(before, after);
        assert!((4096 + 32..32 * 4096).contains(&tokens), "{tokens}");
    }

    /// Returns the completions of a round of an 8B, with the bytes of the run that samples them.
    fn sampled(generations: usize, rows: usize, ranks: usize) -> (Answers, u64) {
        let rows = format!("train.gradient_accumulation={rows}");
        let mut example = Example::new(&["train.micro_batch_size=1", &rows], 80, 64);
        let grpo = GrpoSection { num_generations: generations, max_completion_length: 1024, ..GrpoSection::default() };
        example.config.grpo = Some(grpo);
        let wish = Wish { world_size: ranks, ..example.wish() };
        let round = Round::of(&wish).unwrap();
        assert_eq!(evaluation(&wish).answers, [round.answers]);
        (round.answers, example.case().bytes(&example.training()))
    }

    #[test]
    fn a_round_grows_with_completions_and_shrinks_with_what_they_share() {
        let [few, many, more] = [32, 64, 128].map(|rows| sampled(8, rows, 1));
        assert_eq!((few.0.prompts, many.0.prompts, few.0.longest), (32, 64, 4096));
        assert!(few.1 < many.1 && many.1 < more.1, "{few:?} {many:?} {more:?}");
        let grouped = sampled(64, 64, 1);
        assert!(grouped.0.tokens < many.0.tokens && grouped.1 < many.1, "one prompt of 64 is held once: {grouped:?}");
        assert_eq!(sampled(8, 64, 2).0, many.0, "each rank samples its own rows");
    }

    #[test]
    fn without_held_out_prompts_nothing_is_added() {
        let (tokens, before, after) = decided(&["data.eval_fraction=0.1"]);
        assert_eq!((tokens, before), (0, after));
    }

    #[test]
    fn a_prompt_that_needs_more_than_training_is_counted() {
        let eval = ["data.eval_fraction=0.1", "eval.exact_match_prompts=8", "train.micro_batch_size=1"];
        let (tokens, before, after) = decided(&[&eval[..], &["eval.max_new_tokens=60000"]].concat());
        assert_eq!(tokens, 4096 + 60_000);
        assert!(after > before, "{before} {after}");
    }
}
