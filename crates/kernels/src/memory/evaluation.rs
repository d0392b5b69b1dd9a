//! Work between a run's steps, as far as it affects memory: forward passes over held-out rows, and answers to prompts.
//!
//! Trade-off: prompts that are answered together count as equally long.

use crate::attention::PAGE_ROWS;

/// Rows to evaluate and prompts to answer; none by default.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EvaluationShape {
    /// Rows of a forward pass over held-out data.
    pub rows: EvaluatedRows,
    /// Groups of prompts that are answered at the same time; the most demanding group determines the memory.
    pub answers: Vec<Answers>,
}

/// Rows of a forward pass over held-out data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EvaluatedRows {
    /// There is no held-out data.
    #[default]
    None,
    /// The number of a training micro-batch.
    LikeTraining,
    /// A fixed number.
    Fixed(usize),
}

/// A group of prompts that are answered at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answers {
    /// Number of prompts.
    pub prompts: usize,
    /// Tokens of all prompts and their answers together, as caches hold them.
    pub tokens: usize,
    /// Tokens of prompts that are read in one pass at most.
    pub read: usize,
    /// Tokens of the longest prompt and its answer.
    pub longest: usize,
}

impl Answers {
    /// Returns `groups` prompts with `each` answers, where a prompt and an answer have so many tokens. If `shares`, the answers of a group have the pages
    /// that their prompt fills in common, as generation without states has them.
    pub fn in_groups(groups: usize, each: usize, [prompt, answer]: [usize; 2], shares: bool) -> Self {
        let (prompts, longest, shares) = (groups * each, prompt + answer, shares && each > 1);
        let common = if shares { prompt.saturating_sub(1) / PAGE_ROWS } else { 0 };
        let pages = groups * common + prompts * (longest.div_ceil(PAGE_ROWS) - common);
        // A prompt that is shared is read alone, then the rest of it with every answer; those that fill no page are read together.
        let read = if shares { prompt + prompts * prompt.min(PAGE_ROWS) } else { prompts * prompt };
        Self { prompts, tokens: pages * PAGE_ROWS, read: read.min(prompts * prompt), longest }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prompt_is_held_once_per_group_as_far_as_it_fills_pages() {
        let of = |each, prompt, shares| Answers::in_groups(8, each, [prompt, 500], shares);
        let [alone, shared] = [false, true].map(|shares| of(16, 1000, shares));
        assert_eq!(alone.tokens - shared.tokens, 8 * 15 * (999 / PAGE_ROWS) * PAGE_ROWS);
        assert!(shared.tokens >= 8 * 1000 + 128 * 500 && alone.tokens >= 128 * 1500);
        assert_eq!((alone.read, shared.read), (128 * 1000, 1000 + 128 * PAGE_ROWS));
        // A short prompt, and the only answer to one, share nothing.
        assert_eq!(of(16, PAGE_ROWS, true).tokens, of(16, PAGE_ROWS, false).tokens);
        assert_eq!(of(1, 1000, true).tokens, of(1, 1000, false).tokens);
        assert!(of(17, 1000, true).tokens > shared.tokens);
    }
}
