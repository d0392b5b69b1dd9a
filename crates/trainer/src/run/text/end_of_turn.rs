//! Finds the tokens that end a turn in the training data: generation stops at them, in the run and wherever its result is used.
//!
//! Trade-off: at most `MAX_DOCUMENTS` documents are inspected, spread over the data.

use std::collections::BTreeMap;

use firebrick_data::{Chat, DocumentSet, Tokenizer};

use crate::error::RunError;

/// Maximum number of documents that are inspected.
const MAX_DOCUMENTS: usize = 512;
/// A token that ends fewer than one in this many spans of loss tokens does so by accident, where a text was cut.
const RARE: usize = 20;
/// An answer that no template contains.
const ANSWER: &str = "zqxj";

/// Returns the special tokens that end the spans of loss tokens, most frequent first; empty if the data trains none. The last token of a document
/// that `is_cut` ends nothing.
pub(in crate::run) fn trained(
    documents: &DocumentSet,
    tokenizer: &Tokenizer,
    is_cut: impl Fn(usize) -> bool,
) -> Vec<u32> {
    let step = documents.len().div_ceil(MAX_DOCUMENTS).max(1);
    let (mut spans, mut ends) = (0, BTreeMap::<u32, usize>::new());
    for index in (0..documents.len()).step_by(step) {
        let example = documents.document(index).to_example();
        let counts = |at: usize| example.loss_mask.get(at).copied().unwrap_or(false);
        for last in (0..example.tokens.len()).filter(|&at| counts(at) && !counts(at + 1)) {
            if last + 1 == example.tokens.len() && is_cut(index) {
                continue;
            }
            spans += 1;
            if tokenizer.is_special(example.tokens[last]) {
                *ends.entry(example.tokens[last]).or_default() += 1;
            }
        }
    }
    let mut ends: Vec<(u32, usize)> = ends.into_iter().filter(|(_, count)| count * RARE >= spans).collect();
    ends.sort_by_key(|&(_, count)| std::cmp::Reverse(count));
    ends.into_iter().map(|(token, _)| token).collect()
}

/// Returns the special token that the chat template writes after an assistant's answer; `None` if there is none. If every token counts in the loss,
/// the spans do not show it.
///
/// # Errors
/// The tokenizer fails on the rendered text. A template that refuses the conversation is none.
pub fn in_template(tokenizer: &Tokenizer) -> Result<Option<u32>, RunError> {
    let chat = Chat::new(&[("user", "a"), ("assistant", ANSWER)]);
    let rendered = tokenizer.chat_template().and_then(|template| template.render(&chat, false));
    let Ok(rendered) = rendered else { return Ok(None) };
    let Some((_, after)) = rendered.rsplit_once(ANSWER) else { return Ok(None) };
    let first = tokenizer.encode(after, false)?.first().copied();
    Ok(first.filter(|&token| tokenizer.is_special(token)))
}

/// Returns a sentence about these tokens and where they were found; `None` if there are none.
pub(in crate::run) fn note(ends: &[u32], found: &str, tokenizer: &Tokenizer) -> Result<Option<String>, RunError> {
    let shown: Vec<String> = ends.iter().map(|&id| tokenizer.decode(&[id], false)).collect::<Result<_, _>>()?;
    Ok((!shown.is_empty()).then(|| format!("generation stops at {}, {found}", shown.join(", "))))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use firebrick_data::Example;

    use super::*;

    const EOS: u32 = 257;
    const END: u32 = 261;

    #[test]
    fn special_tokens_that_end_loss_tokens_are_found_most_frequent_first() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/tiny-llama");
        let tokenizer = Tokenizer::from_folder(Path::new(folder)).unwrap();
        let example = |ending: &&[u32]| {
            let tokens: Vec<u32> = [&[256, 259, 65], *ending].concat();
            let loss_mask = (0..tokens.len()).map(|index| index > 2).collect();
            Example { tokens, loss_mask }
        };
        let found = |endings: &[&[u32]]| {
            let examples: Vec<Example> = endings.iter().map(example).collect();
            trained(&DocumentSet::from_examples(&examples), &tokenizer, |document| examples[document].tokens.len() > 6)
        };
        assert_eq!(found(&[&[66, END], &[67, 68, END], &[69, EOS]]), [END, EOS]);
        assert_eq!(found(&[&[66], &[67, 68]]), Vec::<u32>::new());
        assert_eq!(found(&[&[66, END], &[66, 67, 68, EOS]]), [END]);
        // Cut texts end anywhere.
        let mut cut = vec![&[66, END][..]; 40];
        cut.push(&[66, EOS]);
        assert_eq!(found(&cut), [END]);
    }
}
