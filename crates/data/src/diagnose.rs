//! What was odd about the records of a set, counted, with the first places; and when it is too much.
//!
//! Each worker has its own [`Diagnosis`]; merged ones say the same in whatever order. Gives up keeping every place: the
//! first few of each kind are enough to look at.

use std::collections::BTreeMap;
use std::fmt::{Display, Formatter, Result as FormatResult};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::encoder::Encoded;
use crate::error::{DataError, Place};
use crate::shape::{Percent, ShapeError};

/// Places that are kept of each kind of finding.
const PLACES: usize = 5;
/// Rows before [`Diagnosis::check_early`] judges.
const EARLY_ROWS: u64 = 1000;

/// What can be odd about a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FindingKind {
    /// Dropped: blank text, no messages.
    Empty,
    /// Dropped: no token would be trained.
    NothingToTrain,
    /// Dropped: only flagged messages are to be trained, and none has a flag.
    NoFlags,
    /// Dropped: every trained token is behind `max_seq_len`.
    CutToNothing,
    /// Dropped: the chat template refuses the messages.
    TemplateRefused,
    /// Dropped: the text that is to be trained cannot be told apart.
    MaskNotFound,
    /// Dropped: the beginning-of-text token is there twice.
    DoubledBos,
    /// Dropped by choice: longer than `max_seq_len`.
    TooLong,
    /// Kept: cut at `max_seq_len`.
    Truncated,
    /// Kept: split at `max_seq_len`.
    Split,
    /// Kept: the chat template leaves the system message out.
    SystemIgnored,
    /// Kept: every token is trained though only the assistant's were asked for.
    AllTrained,
}

impl FindingKind {
    /// Whether it counts against the share of bad rows. What was asked for does not.
    pub fn is_bad(self) -> bool {
        !matches!(self, Self::Empty | Self::TooLong | Self::Truncated | Self::Split)
    }

    fn says(self) -> &'static str {
        match self {
            Self::Empty => "dropped, empty",
            Self::NothingToTrain => "dropped, nothing to train",
            Self::NoFlags => "dropped, no message says itself whether it is trained (train_on = \"flags\")",
            Self::CutToNothing => {
                "dropped, every trained token is behind max_seq_len (raise it, or set overflow = \"split\")"
            }
            Self::TemplateRefused => "dropped, the chat template refuses the messages",
            Self::MaskNotFound => "dropped, the trained text cannot be told apart",
            Self::DoubledBos => "dropped, the beginning-of-text token is there twice",
            Self::TooLong => "dropped, longer than max_seq_len",
            Self::Truncated => "cut at max_seq_len",
            Self::Split => "split at max_seq_len",
            Self::SystemIgnored => "trained without their system message",
            Self::AllTrained => "trained whole, the user's text too",
        }
    }
}

/// Something odd about a record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// What.
    pub kind: FindingKind,
    /// What exactly, with what to do.
    pub detail: String,
}

/// Findings of one kind.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seen {
    /// Records that have it.
    pub count: u64,
    /// The first of them, by file and line, with what was found.
    pub first: Vec<(Place, String)>,
}

/// What was found in the records of a set.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Diagnosis {
    /// Records.
    pub rows: u64,
    /// Records of which something is trained.
    pub rows_kept: u64,
    /// Examples that came of them.
    pub examples: u64,
    /// Tokens of the examples.
    pub tokens: u64,
    /// Tokens that are targets.
    pub trained_tokens: u64,
    /// Tokens of the longest example.
    pub longest: usize,
    /// Tokens lost to `max_seq_len`.
    pub tokens_cut: u64,
    /// Kept records that are conversations.
    pub chats: u64,
    /// Of those, the ones that train a token which ends a turn.
    pub chats_ended: u64,
    /// Records with a finding that counts as bad.
    pub bad_rows: u64,
    /// What was found, by kind.
    pub findings: BTreeMap<FindingKind, Seen>,
}

impl Diagnosis {
    /// Adds a record.
    pub fn add(&mut self, encoded: &Encoded, place: &Place) {
        self.rows += 1;
        self.tokens_cut += encoded.tokens_cut as u64;
        if !encoded.examples.is_empty() {
            self.rows_kept += 1;
            self.chats += u64::from(encoded.is_chat);
            self.chats_ended += u64::from(encoded.is_chat && encoded.end_trained);
        }
        for example in &encoded.examples {
            self.examples += 1;
            self.tokens += example.tokens.len() as u64;
            self.trained_tokens += example.trained_tokens() as u64;
            self.longest = self.longest.max(example.tokens.len());
        }
        self.bad_rows += u64::from(encoded.findings.iter().any(|finding| finding.kind.is_bad()));
        for finding in &encoded.findings {
            let seen = self.findings.entry(finding.kind).or_default();
            seen.count += 1;
            seen.keep(place, &finding.detail);
        }
    }

    /// Adds what another worker found.
    pub fn merge(&mut self, other: Self) {
        self.rows += other.rows;
        self.rows_kept += other.rows_kept;
        self.examples += other.examples;
        self.tokens += other.tokens;
        self.trained_tokens += other.trained_tokens;
        self.longest = self.longest.max(other.longest);
        self.tokens_cut += other.tokens_cut;
        self.chats += other.chats;
        self.chats_ended += other.chats_ended;
        self.bad_rows += other.bad_rows;
        for (kind, theirs) in other.findings {
            let seen = self.findings.entry(kind).or_default();
            seen.count += theirs.count;
            theirs.first.iter().for_each(|(place, detail)| seen.keep(place, detail));
        }
    }

    /// How many records have a finding.
    pub fn count(&self, kind: FindingKind) -> u64 {
        self.findings.get(&kind).map_or(0, |seen| seen.count)
    }

    /// The same with other paths.
    pub(crate) fn with_paths(mut self, path: impl Fn(&Path) -> PathBuf) -> Self {
        for (place, _) in self.findings.values_mut().flat_map(|seen| &mut seen.first) {
            place.path = path(&place.path);
        }
        self
    }

    /// Judges a whole set: refused if no record has a flag where only flagged messages are to be trained; if more than
    /// `max_bad_share` (a share, 0 to 1) of its records are bad; or if conversations are trained but never the token that
    /// ends a turn. `train_end_of_turn` is what the options say.
    ///
    /// # Errors
    /// [`DataError::NoFlags`], [`ShapeError::TooManyBadRows`], [`ShapeError::EndNeverTrained`].
    pub fn check(&self, max_bad_share: f64, train_end_of_turn: bool) -> Result<(), DataError> {
        if self.has_no_flags() {
            return Err(DataError::NoFlags { rows: self.rows });
        }
        self.check_share(max_bad_share)?;
        if train_end_of_turn && self.chats > 0 && self.chats_ended == 0 {
            let why = if self.count(FindingKind::Truncated) >= self.chats {
                "every one is cut before it. Raise max_seq_len"
            } else {
                "the chat template writes no special token behind the assistant's text, or only outside of its \
                 {% generation %} blocks and not right behind them. Change the template, or set \
                 train_end_of_turn = false if that is meant"
            };
            return Err(ShapeError::EndNeverTrained { chats: self.chats, why: why.to_owned() }.into());
        }
        Ok(())
    }

    /// As [`Diagnosis::check`], in the middle of a set: says nothing before enough rows were seen, so that a set of which
    /// everything is wrong is refused at once.
    ///
    /// # Errors
    /// As [`Diagnosis::check`].
    pub fn check_early(&self, max_bad_share: f64) -> Result<(), DataError> {
        if self.rows < EARLY_ROWS { Ok(()) } else { self.check_share(max_bad_share.max(0.5)) }
    }

    /// No record has a flag, and some should.
    fn has_no_flags(&self) -> bool {
        let without = self.count(FindingKind::NoFlags);
        without > 0 && without + self.count(FindingKind::Empty) == self.rows
    }

    fn check_share(&self, max_bad_share: f64) -> Result<(), DataError> {
        if self.bad_rows as f64 > max_bad_share * self.rows as f64 {
            if self.has_no_flags() {
                return Err(DataError::NoFlags { rows: self.rows });
            }
            let percent = |share: f64| Percent(100.0 * share);
            let too_many = ShapeError::TooManyBadRows {
                bad: self.bad_rows,
                rows: self.rows,
                percent: percent(self.bad_rows as f64 / self.rows as f64),
                allowed: percent(max_bad_share),
                report: self.to_string(),
            };
            return Err(too_many.into());
        }
        Ok(())
    }
}

impl Seen {
    fn keep(&mut self, place: &Place, detail: &str) {
        let before = |(kept, _): &(Place, String)| (&kept.path, kept.line) <= (&place.path, place.line);
        let at = self.first.partition_point(before);
        if at < PLACES {
            self.first.insert(at, (place.clone(), detail.to_owned()));
            self.first.truncate(PLACES);
        }
    }
}

impl Display for Diagnosis {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> FormatResult {
        write!(
            formatter,
            "{} rows, {} of them kept, {} examples, {} tokens ({} trained), longest {}, {} tokens cut",
            self.rows, self.rows_kept, self.examples, self.tokens, self.trained_tokens, self.longest, self.tokens_cut
        )?;
        for (kind, seen) in &self.findings {
            write!(formatter, "\n  {} rows {}", seen.count, kind.says())?;
            if let Some((place, detail)) = seen.first.first() {
                write!(formatter, "; first {place}: {detail}")?;
            }
            let others: Vec<String> = seen.first.iter().skip(1).map(|(place, _)| place.line.to_string()).collect();
            if !others.is_empty() {
                write!(formatter, " (then at {})", others.join(", "))?;
            }
        }
        Ok(())
    }
}
