//! The held-out prompts that an evaluation answers, and the records that were skipped.
//!
//! Trade-off: the first prompts of the held-out data are taken, so that all evaluations of a run answer the same ones.

use firebrick_data::{DocumentSet, EvalPrompt, Example, Tokenizer};

use crate::config::Extraction;
use crate::error::RunError;

/// Prompts with one reference answer each.
#[derive(Clone, Debug, Default)]
pub struct EvalPrompts {
    prompts: Vec<EvalPrompt>,
    skipped: Skipped,
}

/// Held-out records that yield no prompt, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Skipped {
    /// Every token counts in the loss, as in plain text: the answer cannot be distinguished from the prompt.
    no_prompt: usize,
    /// The answer was cut at `max_seq_len`, or the token that ends it does not count in the loss.
    no_end: usize,
    /// The reference has more tokens than an answer may have.
    too_long: usize,
    /// The reference lacks the part that is compared.
    no_part: usize,
}

impl Skipped {
    fn total(self) -> usize {
        self.no_prompt + self.no_end + self.too_long + self.no_part
    }

    fn reasons(self) -> String {
        let reasons = [
            (self.no_prompt, "have no prompt before the answer"),
            (self.no_end, "have no complete last answer (cut at max_seq_len, or its end is not trained)"),
            (self.too_long, "have an answer of more than eval.max_new_tokens"),
            (self.no_part, "have an answer in which eval.extract finds nothing"),
        ];
        let written = reasons.iter().filter(|(count, _)| *count > 0).map(|(count, why)| format!("{count} {why}"));
        written.collect::<Vec<_>>().join(", ")
    }
}

impl EvalPrompts {
    /// Finds the first `limit` prompts of some documents, in order, whose answers have at most `max_new_tokens` tokens and contain the part that is
    /// compared.
    ///
    /// # Errors
    /// No prompt was found although some were requested; an answer that the tokenizer cannot decode.
    pub fn find(
        documents: &DocumentSet,
        tokenizer: &Tokenizer,
        limit: usize,
        max_new_tokens: usize,
        extraction: &Extraction,
    ) -> Result<Self, RunError> {
        let mut found = Self::default();
        for example in documents.examples() {
            if found.prompts.len() == limit {
                break;
            }
            match EvalPrompt::from_example(&example, tokenizer)? {
                Some(prompt) if answer_tokens(&example, &prompt) > max_new_tokens => found.skipped.too_long += 1,
                Some(prompt) if extraction.part(&prompt.answer).is_none() => found.skipped.no_part += 1,
                Some(prompt) => found.prompts.push(prompt),
                None if example.loss_mask.iter().skip(1).all(|&counts| counts) => found.skipped.no_prompt += 1,
                None => found.skipped.no_end += 1,
            }
        }
        if limit > 0 && found.prompts.is_empty() {
            let (records, reasons) = (found.skipped.total(), found.skipped.reasons());
            return Err(RunError::Refused(format!(
                "eval.exact_match_prompts: none of the {records} held-out records has a prompt and a complete answer: {reasons}. Hold out chat \
                 records, raise max_seq_len or eval.max_new_tokens, or set the key to 0"
            )));
        }
        Ok(found)
    }

    /// Returns the number of prompts.
    pub fn len(&self) -> usize {
        self.prompts.len()
    }

    /// Returns whether there are no prompts.
    pub fn is_empty(&self) -> bool {
        self.prompts.is_empty()
    }

    /// Returns a sentence about what is answered and what was skipped; `None` if nothing is answered.
    pub fn note(&self) -> Option<String> {
        let skipped = match self.skipped.total() {
            0 => String::new(),
            total => format!("; {total} records before them were skipped: {}", self.skipped.reasons()),
        };
        (!self.is_empty()).then(|| format!("exact match: {} held-out prompts{skipped}", self.len()))
    }

    /// Splits the prompts into groups of at most `max_prompts` whose texts, with their answers, have at most `max_tokens` together; a longer prompt
    /// forms a group of its own.
    pub fn groups(
        &self,
        max_tokens: usize,
        max_prompts: usize,
        max_new_tokens: usize,
    ) -> impl Iterator<Item = &[EvalPrompt]> {
        let mut rest = self.prompts.as_slice();
        std::iter::from_fn(move || {
            let mut tokens = 0;
            let fits = |prompt: &&EvalPrompt| {
                tokens += prompt.prompt.len() + max_new_tokens;
                tokens <= max_tokens
            };
            let count = rest.iter().take(max_prompts).take_while(fits).count().max(1).min(rest.len());
            let (group, after) = rest.split_at(count);
            rest = after;
            (!group.is_empty()).then_some(group)
        })
    }
}

/// Counts the tokens of the reference answer, without the token that ends it and what follows, such as a line break.
fn answer_tokens(example: &Example, prompt: &EvalPrompt) -> usize {
    let after = example.loss_mask.iter().rev().take_while(|&&counts| !counts).count();
    example.tokens.len() - prompt.prompt.len() - after - 1
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prompts(lengths: &[usize]) -> EvalPrompts {
        let prompt = |&length: &usize| EvalPrompt { prompt: vec![0; length], answer: String::new() };
        EvalPrompts { prompts: lengths.iter().map(prompt).collect(), skipped: Skipped::default() }
    }

    #[test]
    fn groups_keep_every_prompt_in_order_within_both_bounds() {
        let sizes = |lengths: &[usize], max_tokens, max_prompts| -> Vec<usize> {
            let prompts = prompts(lengths);
            let groups: Vec<&[EvalPrompt]> = prompts.groups(max_tokens, max_prompts, 2).collect();
            let joined: Vec<usize> = groups.concat().iter().map(|prompt| prompt.prompt.len()).collect();
            assert_eq!(joined, lengths);
            groups.into_iter().map(<[_]>::len).collect()
        };
        assert_eq!(sizes(&[1, 1, 1, 1, 1], 9, 64), [3, 2]);
        assert_eq!(sizes(&[1, 1, 1, 1, 1], 900, 2), [2, 2, 1]);
        assert_eq!(sizes(&[50, 1, 50], 9, 64), [1, 1, 1]);
        assert_eq!(sizes(&[], 9, 64), [0; 0]);
    }

    #[test]
    fn what_was_skipped_is_said_with_its_reasons() {
        let skipped = Skipped { no_prompt: 2, too_long: 1, ..Skipped::default() };
        let note = EvalPrompts { skipped, ..prompts(&[1]) }.note().unwrap();
        assert!(note.contains("1 held-out prompts; 3 records"), "{note}");
        assert!(
            note.contains("2 have no prompt") && note.contains("1 have an answer") && !note.contains("cut"),
            "{note}"
        );
        assert_eq!(EvalPrompts::default().note(), None);
    }
}
