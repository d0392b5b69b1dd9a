//! From spans of characters to a loss mask of tokens.
//!
//! Masks go by position in the text, never by token id, so a padding token that is also the end-of-text token counts in the
//! loss where the assistant wrote it. Trade-off: a token that crosses the edge of a span counts as a whole.

use std::ops::Range;

use crate::selection::Span;
use crate::tokenizer::Tokenizer;

/// A text with its tokens, for mapping characters to tokens.
pub(crate) struct TokenOffsets<'a> {
    pub(crate) tokenizer: &'a Tokenizer,
    pub(crate) text: &'a str,
    pub(crate) ids: &'a [u32],
    /// Byte range of each token.
    pub(crate) offsets: &'a [(usize, usize)],
}

impl TokenOffsets<'_> {
    /// The tokens of a span, and the token that ends the turn, if there is one.
    ///
    /// A token that crosses the edge of the span belongs to it. The span ends with the special token that ends the
    /// turn: the white space after it belongs to the template, and an end token directly after the span belongs to the
    /// assistant even where the template's block leaves it out.
    pub(crate) fn of_span(&self, span: &Span) -> (Range<usize>, Option<usize>) {
        let range = &span.range;
        let is_special = |&index: &usize| self.tokenizer.is_special(self.ids[index]);
        let mut first = self.offsets.partition_point(|&(_, end)| end <= range.start);
        let last = self.offsets.partition_point(|&(start, _)| start < range.end).max(first);
        // A header's token may include the white space that an answer begins with; it still belongs to the header.
        while first < last && self.offsets[first].0 < range.start && is_special(&first) {
            first += 1;
        }
        let is_blank = |from: usize, to: usize| self.text.get(from..to).is_none_or(|text| text.trim().is_empty());
        if let Some(end) = span.content_end {
            let after = self.offsets.partition_point(|&(start, _)| start < end).max(first);
            let closing = (after..last).find(is_special).filter(|&closing| is_blank(end, self.offsets[closing].0));
            if closing.is_some() {
                return (first..closing.map_or(last, |closing| closing + 1), closing);
            }
        }
        let closing = (first..last).rev().find(is_special);
        if let Some(closing) = closing.filter(|&closing| is_blank(self.offsets[closing].1, range.end)) {
            return (first..closing + 1, Some(closing));
        }
        let closes_after = last < self.ids.len() && is_special(&last);
        if closes_after { (first..last + 1, Some(last)) } else { (first..last, None) }
    }

    /// Computes the loss mask of spans and the tokens that end a selected turn.
    pub(crate) fn mask(&self, spans: &[Span], inverted: bool, end_of_turn: bool) -> (Vec<bool>, Vec<usize>) {
        let mut loss_mask = vec![inverted; self.ids.len()];
        let mut closings = Vec::new();
        for span in spans.iter().filter(|span| !span.range.is_empty()) {
            let (range, closing) = self.of_span(span);
            loss_mask[range].fill(!inverted);
            if let Some(closing) = closing.filter(|_| !inverted) {
                loss_mask[closing] = end_of_turn;
                closings.push(closing);
            }
        }
        if let Some(first) = loss_mask.first_mut() {
            *first = false;
        }
        (loss_mask, closings)
    }
}
