//! Statistics of document lengths and of how well documents fill rows, for the report before a run and for `inspect`.

use std::fmt::{Display, Formatter, Result as FormatResult};

use firebrick_arch::{counted, grouped};

/// How well documents fill rows.
#[derive(Debug, Clone, PartialEq)]
pub struct PackReport {
    /// Number of documents.
    pub documents: usize,
    /// Number of rows.
    pub rows: usize,
    /// Tokens of the documents.
    pub tokens: usize,
    /// Tokens that count in the loss.
    pub loss_tokens: usize,
    /// Tokens divided by token slots, 0 to 1. Without packing an estimate: each row is counted as long as the longest
    /// of its group in the order of the data, or without groups as the longest of all.
    pub efficiency: f64,
    /// Documents by length.
    pub lengths: LengthHistogram,
}

impl PackReport {
    /// Returns the loss tokens divided by tokens, 0 to 1.
    pub fn loss_share(&self) -> f64 {
        self.loss_tokens as f64 / self.tokens as f64
    }
}

impl Display for PackReport {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> FormatResult {
        let percent = 100.0 * self.efficiency;
        let [documents, rows, tokens] = [(self.documents, "document"), (self.rows, "row"), (self.tokens, "token")]
            .map(|(count, noun)| counted(count, noun));
        let in_loss = grouped(self.loss_tokens as u64);
        write!(formatter, "{documents} in {rows}, {tokens} ({in_loss} in the loss), {percent:.1} % full")
    }
}

/// Documents counted by length, in steps of half an octave: up to 1, 2, 3, 4, 6, 8, 12, 16, ... tokens.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LengthHistogram {
    /// From the shortest step to that of the longest document, without gaps.
    pub steps: Vec<LengthStep>,
    /// Tokens of the shortest document, 0 if there is none.
    pub shortest: usize,
    /// Tokens of the longest document, 0 if there is none.
    pub longest: usize,
}

/// The documents of one step of lengths.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LengthStep {
    /// The maximum length of this step; the minimum is one more than the maximum of the previous step.
    pub up_to: usize,
    /// Number of documents.
    pub documents: usize,
    /// Tokens of these documents.
    pub tokens: usize,
}

impl LengthHistogram {
    /// Counts a document of at least one token.
    pub fn add(&mut self, tokens: usize) {
        while self.steps.last().is_none_or(|step| step.up_to < tokens) {
            let up_to = match self.steps.as_slice() {
                [] => 1,
                [.., last] if last.up_to.is_power_of_two() && last.up_to > 1 => last.up_to / 2 * 3,
                [.., last] => (last.up_to + 1).next_power_of_two(),
            };
            self.steps.push(LengthStep { up_to, ..LengthStep::default() });
        }
        let step = self.steps.partition_point(|step| step.up_to < tokens);
        self.steps[step].documents += 1;
        self.steps[step].tokens += tokens;
        self.longest = self.longest.max(tokens);
        self.shortest = if self.shortest == 0 { tokens } else { self.shortest.min(tokens) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn histogram_counts_every_length_in_its_half_octave() {
        let mut histogram = LengthHistogram::default();
        (2..=50).rev().for_each(|tokens| histogram.add(tokens));
        let up_to: Vec<usize> = histogram.steps.iter().map(|step| step.up_to).collect();
        assert_eq!(up_to, [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]);
        let documents: Vec<usize> = histogram.steps.iter().map(|step| step.documents).collect();
        assert_eq!(documents, [0, 1, 1, 1, 2, 2, 4, 4, 8, 8, 16, 2]);
        assert_eq!(histogram.steps.iter().map(|step| step.tokens).sum::<usize>(), (2..=50).sum::<usize>());
        assert_eq!((histogram.shortest, histogram.longest), (2, 50));
    }
}
