//! Marks that are put into rendered text to find where its parts come from, and the search for them.
//!
//! The marks are code points that Unicode guarantees never to assign. Trade-off: a text that contains them itself is not located.

use std::ops::Range;

use crate::record_format::Turn;

/// Around a `{% generation %}` block.
pub(crate) const BLOCK_START: char = '\u{FDD0}';
pub(crate) const BLOCK_END: char = '\u{FDD1}';
/// Around a content: a kind, the message's number, an end.
pub(crate) const CONTENT_START: char = '\u{FDD2}';
pub(crate) const CONTENT_END: char = '\u{FDD3}';
pub(crate) const MARK_END: char = '\u{FDD5}';

/// Ends the reasoning inside a content. Templates split contents there.
const THOUGHT_END: &str = "</think>";

/// Returns the first position of some marks in a text. All marks begin with one rare byte, so this searches for that byte.
pub(crate) fn find_mark(text: &str, marks: &[char]) -> Option<usize> {
    const LEAD: u8 = 0xef;
    let mut from = 0;
    while let Some(at) = text.as_bytes()[from..].iter().position(|&byte| byte == LEAD) {
        from += at;
        if text[from..].starts_with(marks) {
            return Some(from);
        }
        from += 1;
    }
    None
}

/// Returns the part of a content that no template trims or splits: without white space at the ends and without reasoning. `None` if nothing is left,
/// or if it contains the marks themselves.
pub(crate) fn trimmed(turn: &Turn) -> Option<Range<usize>> {
    let content = turn.content()?;
    let thought = content.rfind(THOUGHT_END).map_or(0, |thought| thought + THOUGHT_END.len());
    let answer = content[thought..].trim_start_matches(is_space);
    let start = content.len() - answer.len();
    let end = start + answer.trim_end_matches(is_space).len();
    let has_marks = find_mark(content, &[CONTENT_START, CONTENT_END, MARK_END]).is_some();
    (start < end && !has_marks).then_some(start..end)
}

/// Implements Python's `str.isspace`: Unicode's white space and the four separators of ASCII.
pub(crate) fn is_space(character: char) -> bool {
    character.is_whitespace() || matches!(character, '\u{1c}'..='\u{1f}')
}

/// Returns the length in bytes of the common prefix of two texts, in whole characters.
pub(crate) fn common_prefix(left: &str, right: &str) -> usize {
    let same = left.chars().zip(right.chars()).take_while(|(left, right)| left == right);
    same.map(|(character, _)| character.len_utf8()).sum()
}
