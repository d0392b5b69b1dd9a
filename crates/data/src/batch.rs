//! One micro-batch on the host. The training step copies it to the device.
//!
//! Documents are copied once, from the store (a mapped file) into the batch. Trade-off: every row of a batch has the same length; the rest of a row
//! is padding.

use serde::{Deserialize, Serialize};

use crate::cache::Document;

/// The target of positions without loss, as in PyTorch's cross entropy.
pub const IGNORE_INDEX: i64 = -100;

/// `rows` rows of `row_len` tokens, flattened row by row. `input_ids`, `targets` and `positions` have `rows * row_len` entries.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Batch {
    /// Number of rows.
    pub rows: usize,
    /// Tokens per row, padding included.
    pub row_len: usize,
    /// Token ids; the pad id (or 0) in the padding at the end of a row.
    pub input_ids: Vec<u32>,
    /// The next token of the same document if it counts in the loss, else [`IGNORE_INDEX`].
    pub targets: Vec<i64>,
    /// Position in the document, starting at 0; padding is counted from 0 too.
    pub positions: Vec<u32>,
    /// Starts of the documents in the flattened tokens, and the end: `0, ..., rows * row_len`, strictly ascending. The padding at the end of a row is
    /// a separate document; no document crosses a row.
    pub cu_seqlens: Vec<u32>,
    /// Number of padding tokens.
    pub padding: usize,
    /// Additional data of a batch of pairs; `None` for single documents.
    pub pairs: Option<BatchPairs>,
}

/// Pairs of answers: chosen and rejected documents alternate. Padding is not a document.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BatchPairs {
    /// The documents, as indices into their set.
    pub documents: Vec<u32>,
    /// For each token, whether its target belongs to an answer; `None` if no other targets count.
    pub is_answer: Option<Vec<bool>>,
    /// Targets of chosen documents that count in the loss.
    pub chosen_targets: usize,
}

impl Batch {
    pub(crate) fn with_capacity(rows: usize, row_len: usize) -> Self {
        let tokens = rows * row_len;
        Self {
            rows: 0,
            row_len,
            input_ids: Vec::with_capacity(tokens),
            targets: Vec::with_capacity(tokens),
            positions: Vec::with_capacity(tokens),
            cu_seqlens: vec![0],
            padding: 0,
            pairs: None,
        }
    }

    /// Appends a pair, whose indices in its set are `numbers`. With `prompt_loss` the prompt of the chosen document is a target too: everything
    /// before its first loss token. Text that a template writes after the answer never is.
    pub(crate) fn push_pair(&mut self, pair: [&Document<'_>; 2], numbers: [u32; 2], prompt_loss: bool) {
        let start = self.targets.len();
        self.push_document(pair[0]);
        let middle = self.targets.len();
        self.push_document(pair[1]);
        let pairs = self.pairs.get_or_insert_default();
        pairs.documents.extend(numbers);
        if prompt_loss {
            let is_answer = pairs.is_answer.get_or_insert_default();
            is_answer.resize(start, false);
            is_answer.extend(self.targets[start..].iter().map(|&target| target != IGNORE_INDEX));
            let answer = self.targets[start..middle].iter().position(|&target| target != IGNORE_INDEX).unwrap_or(0);
            for token in start..start + answer {
                self.targets[token] = i64::from(self.input_ids[token + 1]);
            }
        }
        let chosen = &self.targets[start..middle];
        pairs.chosen_targets += chosen.iter().filter(|&&target| target != IGNORE_INDEX).count();
    }

    /// Appends a document. The caller ends the row with [`Batch::pad_row`].
    pub(crate) fn push_document(&mut self, document: &Document<'_>) {
        let start = self.input_ids.len();
        document.append_tokens(&mut self.input_ids);
        append_targets(&self.input_ids[start..], document.mask, &mut self.targets);
        self.close_document(document.len());
    }

    pub(crate) fn pad_row(&mut self, pad_token_id: u32) {
        self.rows += 1;
        let missing = self.rows * self.row_len - self.input_ids.len();
        if missing > 0 {
            self.input_ids.resize(self.input_ids.len() + missing, pad_token_id);
            self.targets.resize(self.targets.len() + missing, IGNORE_INDEX);
            self.close_document(missing);
            self.padding += missing;
        }
        if let Some(is_answer) = self.pairs.as_mut().and_then(|pairs| pairs.is_answer.as_mut()) {
            is_answer.resize(self.targets.len(), false);
        }
    }

    /// Appends positions and boundary of a document of `len` tokens that was just appended.
    fn close_document(&mut self, len: usize) {
        self.positions.extend(0..len as u32);
        self.cu_seqlens.push(self.input_ids.len() as u32);
    }

    /// Returns the number of targets that count in the loss.
    pub fn loss_tokens(&self) -> usize {
        self.targets.iter().filter(|&&target| target != IGNORE_INDEX).count()
    }

    /// Returns the number of pairs of answers.
    pub fn pair_count(&self) -> usize {
        self.pairs.as_ref().map_or(0, |pairs| pairs.documents.len() / 2)
    }

    /// Returns the number of tokens without padding.
    pub fn tokens(&self) -> usize {
        self.input_ids.len() - self.padding
    }
}

/// Appends the target of each token: the next token if that counts in the loss; the last token has none. `mask` has one bit per token.
fn append_targets(tokens: &[u32], mask: &[u32], targets: &mut Vec<i64>) {
    for (word, (chunk, &bits)) in tokens.chunks(32).zip(mask).enumerate() {
        // The first token of a document is never a target.
        let skipped = usize::from(word == 0);
        let chunk = &chunk[skipped..];
        match bits {
            0 => targets.resize(targets.len() + chunk.len(), IGNORE_INDEX),
            u32::MAX => targets.extend(chunk.iter().map(|&token| i64::from(token))),
            _ => targets.extend(chunk.iter().enumerate().map(|(index, &token)| {
                let counts = bits >> (index + skipped) & 1 == 1;
                if counts { i64::from(token) } else { IGNORE_INDEX }
            })),
        }
    }
    targets.push(IGNORE_INDEX);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::{Example, TokenStore};

    #[test]
    fn a_pair_trains_answers_and_on_demand_its_prompt() {
        // A token of the template follows the answers, and one of another turn is inside the chosen answer.
        let chosen =
            Example { tokens: vec![1, 2, 3, 6, 7, 8], loss_mask: vec![false, false, true, false, true, false] };
        let rejected = Example { tokens: vec![1, 2, 4, 8], loss_mask: vec![false, false, true, false] };
        let store = TokenStore::from_examples(&[chosen, rejected]);
        let pushed = |prompt_loss| {
            let mut batch = Batch::with_capacity(1, 11);
            batch.push_pair([&store.document(0), &store.document(1)], [4, 5], prompt_loss);
            batch.pad_row(9);
            batch
        };
        let (plain, with_prompt) = (pushed(false), pushed(true));
        let none = IGNORE_INDEX;
        assert_eq!(plain.targets, [none, 3, none, 7, none, none, none, 4, none, none, none]);
        assert_eq!(with_prompt.targets, [2, 3, none, 7, none, none, none, 4, none, none, none]);
        let pairs = BatchPairs { documents: vec![4, 5], is_answer: None, chosen_targets: 2 };
        assert_eq!((plain.pairs, plain.cu_seqlens), (Some(pairs), vec![0, 6, 10, 11]));
        let is_answer = vec![false, true, false, true, false, false, false, true, false, false, false];
        let pairs = BatchPairs { documents: vec![4, 5], is_answer: Some(is_answer), chosen_targets: 3 };
        assert_eq!((with_prompt.pair_count(), with_prompt.pairs), (1, Some(pairs)));
    }

    #[test]
    fn targets_are_the_next_loss_tokens_at_every_length_and_mask() {
        for len in [1, 2, 31, 32, 33, 64, 65, 100] {
            for counts in [|_| true, |_| false, |index| index % 3 == 0, |index| index >= 40] as [fn(usize) -> bool; 4] {
                let loss_mask: Vec<bool> = (0..len).map(counts).collect();
                let store = TokenStore::from_examples(&[Example {
                    tokens: (0..len as u32).collect(),
                    loss_mask: loss_mask.clone(),
                }]);
                let mut batch = Batch::with_capacity(1, len);
                batch.push_document(&store.document(0));
                let next = |index| if loss_mask[index] { index as i64 } else { IGNORE_INDEX };
                let expected: Vec<i64> = (1..len).map(next).chain([IGNORE_INDEX]).collect();
                assert_eq!(batch.targets, expected);
                assert_eq!(batch.loss_tokens(), store.entry(0).loss_tokens as usize);
            }
        }
    }
}
