//! Decides how many prompts are answered at a time: as many as need no more memory than the rest of the run.
//!
//! Trade-off: a prompt may be as long as the longest document, so short prompts could sometimes be answered in larger groups.

use firebrick_kernels::{Answers, EvaluatedRows, EvaluationShape, TrainingShape};

use crate::config::RunConfig;
use crate::plan::inputs::DataShape;
use crate::plan::{Chosen, fit};

/// Maximum number of prompts that are answered at the same time.
pub const MAX_PROMPTS_AT_ONCE: usize = 64;

/// Approximate number of tokens that a chat template adds to a sample prompt.
const TEMPLATE_TOKENS: usize = 64;

/// Returns what a recipe evaluates, without the held-out prompts that are answered.
pub(super) fn evaluation(config: &RunConfig) -> EvaluationShape {
    let rows = match (config.has_eval_data(), config.eval.micro_batch_size) {
        (false, _) => EvaluatedRows::None,
        (true, None) => EvaluatedRows::LikeTraining,
        (true, Some(rows)) => EvaluatedRows::Fixed(rows),
    };
    // A prompt has at most one token per byte. All prompts are answered together.
    let lengths = config.eval.prompts.iter().map(|prompt| prompt.len() + TEMPLATE_TOKENS + config.eval.max_new_tokens);
    let samples = lengths.fold(Answers { prompts: 0, tokens: 0, longest: 0 }, |all, length| Answers {
        prompts: all.prompts + 1,
        tokens: all.tokens + length,
        longest: all.longest.max(length),
    });
    EvaluationShape { rows, answers: Vec::from_iter((samples.prompts > 0).then_some(samples)) }
}

/// Returns the tokens of the held-out prompts that are answered at a time, with their answers, and the run with them.
pub(super) fn decide(
    case: &fit::Case<'_>,
    config: &RunConfig,
    data: &DataShape,
    training: TrainingShape,
) -> (Chosen<usize>, TrainingShape) {
    let (limit, new) = (config.eval.exact_match_prompts.min(MAX_PROMPTS_AT_ONCE), config.eval.max_new_tokens);
    if limit == 0 {
        return (Chosen::new(0, "no held-out prompts are answered"), training);
    }
    let longest = data.longest_document + new;
    let with = |tokens: usize| {
        let prompts = limit.min(tokens / (new + 1)).max(1);
        let answers = Answers { prompts, tokens: tokens.min(prompts * longest), longest };
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
