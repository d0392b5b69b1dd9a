//! Cuts pairs of answers that are too long for a row.
//!
//! Both answers with their prompt share a row. Excess tokens are cut first from the beginning of the prompt, equally many on both sides, so that both
//! still answer the same prompt (the end of a prompt says most, as TRL's `keep_end` has it); then from the ends of the answers, the longer one first.
//! Trade-off: a beginning-of-text token or a system message is cut with the prompt's beginning.

use crate::cache::Example;

/// A pair that fits.
pub(crate) struct PairCut {
    pub(crate) examples: [Example; 2],
    /// Tokens that were cut from the beginnings of both prompts.
    pub(crate) of_prompt: usize,
    /// Tokens that were cut from the ends of the answers.
    pub(crate) of_answers: usize,
}

/// Cuts two examples to `limit` tokens together. An example may be left without loss tokens: the caller drops the pair.
pub(crate) fn cut_pair(mut examples: [Example; 2], limit: usize) -> PairCut {
    let length = |examples: &[Example; 2]| examples[0].tokens.len() + examples[1].tokens.len();
    let excess = length(&examples).saturating_sub(limit);
    // One token stays before the first loss token, because it predicts that token.
    let context =
        |example: &Example| example.loss_mask.iter().position(|&counts| counts).unwrap_or(1).saturating_sub(1);
    let shared = context(&examples[0]).min(context(&examples[1])).min(excess.div_ceil(2));
    for example in &mut examples {
        example.tokens.drain(..shared);
        example.loss_mask.drain(..shared);
    }
    let before = length(&examples);
    let ends = lengths_within([examples[0].tokens.len(), examples[1].tokens.len()], limit);
    for (example, end) in examples.iter_mut().zip(ends) {
        example.tokens.truncate(end);
        example.loss_mask.truncate(end);
    }
    let of_answers = before - length(&examples);
    PairCut { examples, of_prompt: 2 * shared, of_answers }
}

/// Cuts two lengths to a sum of at most `limit`, the longer one first.
fn lengths_within([one, other]: [usize; 2], limit: usize) -> [usize; 2] {
    let half = limit / 2;
    match (one + other <= limit, one <= half, other <= half) {
        (true, ..) => [one, other],
        (false, true, _) => [one, limit - one],
        (false, _, true) => [limit - other, other],
        (false, false, false) => [half, half],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example(prompt: u32, answer: u32) -> Example {
        let tokens = (0..prompt).chain(100..100 + answer).collect();
        Example { tokens, loss_mask: (0..prompt + answer).map(|index| index >= prompt).collect() }
    }

    fn cut(lengths: [[u32; 2]; 2], limit: usize) -> (Vec<(usize, usize)>, usize, usize) {
        let examples = lengths.map(|[prompt, answer]| example(prompt, answer));
        let PairCut { examples, of_prompt, of_answers } = cut_pair(examples, limit);
        assert!(examples[0].tokens.len() + examples[1].tokens.len() <= limit);
        let sizes = examples.iter().map(|example| (example.tokens.len(), example.loss_tokens()));
        (sizes.collect(), of_prompt, of_answers)
    }

    #[test]
    fn the_beginning_of_both_prompts_goes_first() {
        assert_eq!(cut([[10, 4], [10, 7]], 24), (vec![(10, 4), (13, 7)], 8, 0));
        assert_eq!(cut([[10, 4], [10, 7]], 31), (vec![(14, 4), (17, 7)], 0, 0));
        // An odd excess takes one token more.
        assert_eq!(cut([[10, 4], [10, 7]], 30), (vec![(13, 4), (16, 7)], 2, 0));
    }

    #[test]
    fn one_token_of_the_prompt_stays_and_the_longer_answer_is_cut() {
        assert_eq!(cut([[10, 4], [10, 20]], 16), (vec![(5, 4), (11, 10)], 18, 10));
        assert_eq!(cut([[10, 30], [10, 20]], 16), (vec![(8, 7), (8, 7)], 18, 36));
    }

    #[test]
    fn the_end_of_the_prompt_is_kept() {
        let PairCut { examples, .. } = cut_pair([example(10, 4), example(10, 7)], 24);
        assert_eq!(examples[0].tokens[..6], [4, 5, 6, 7, 8, 9]);
        assert_eq!(examples[0].tokens[6], 100);
    }
}
