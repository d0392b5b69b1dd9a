//! Counts unusual records of a source, keeps the first places, and refuses a source with too many bad records.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt::{Display, Formatter, Result as FormatResult};
use std::path::{Path, PathBuf};

use firebrick_arch::{counted, grouped};
use serde::{Deserialize, Serialize};

use crate::encoder::Encoded;
use crate::error::DataError;
use crate::finding::FindingKind;
use crate::source::RecordPlace;

/// Places kept per kind of finding.
const PLACES: usize = 5;
/// Maximum number of keys that [`Diagnosis::unread_line`] names.
const NAMED_KEYS: usize = 24;
/// Maximum characters shown of a key.
const KEY_CHARACTERS: usize = 40;
/// Records before [`Diagnosis::check_early`] decides.
const EARLY_ROWS: u64 = 1000;
/// Share of a source's records or tokens that may be lost to `max_seq_len` without a warning.
const ALLOWED_LOSS: f64 = 0.2;

/// Findings of one kind.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FindingCount {
    /// Number of records.
    pub count: u64,
    /// The first of them, with the finding.
    pub first: Vec<(RecordPlace, String)>,
}

/// The findings in the records of a source.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Diagnosis {
    /// Records read.
    pub rows: u64,
    /// Records that gave at least one example.
    pub rows_kept: u64,
    /// Examples that the records gave.
    pub examples: u64,
    /// Tokens of the examples.
    pub tokens: u64,
    /// Tokens that count in the loss.
    pub loss_tokens: u64,
    /// Tokens of the longest example.
    pub longest: usize,
    /// Tokens lost to `max_seq_len`.
    pub tokens_cut: u64,
    /// Kept records that are conversations.
    pub chats: u64,
    /// Kept conversations whose loss includes an end-of-turn token.
    pub chats_ended: u64,
    /// Records with a finding that counts as bad.
    pub bad_rows: u64,
    /// The findings, by kind.
    pub findings: BTreeMap<FindingKind, FindingCount>,
    /// Keys that the records' format does not read, with the number of records in which they have a value: the first
    /// such keys, one more than are named.
    pub unread_keys: BTreeMap<String, u64>,
}

impl Diagnosis {
    /// Adds a record.
    pub fn add(&mut self, encoded: &Encoded, place: &RecordPlace) {
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
            self.loss_tokens += example.loss_tokens() as u64;
            self.longest = self.longest.max(example.tokens.len());
        }
        self.bad_rows += u64::from(encoded.findings.iter().any(|finding| finding.kind.is_bad()));
        for finding in &encoded.findings {
            let found = self.findings.entry(finding.kind).or_default();
            found.count += 1;
            if found.first.len() < PLACES {
                found.first.push((place.clone(), finding.detail.clone()));
            }
        }
        for key in &encoded.unread_keys {
            if let Some(rows) = self.unread_keys.get_mut(key) {
                *rows += 1;
            } else if self.unread_keys.len() <= NAMED_KEYS {
                self.unread_keys.insert(key.clone(), 1);
            }
        }
    }

    /// Returns the number of records with a finding of this kind.
    pub fn count(&self, kind: FindingKind) -> u64 {
        self.findings.get(&kind).map_or(0, |found| found.count)
    }

    /// Returns the tokens lost to `max_seq_len`, as a share of all, 0 to 1.
    pub fn cut_share(&self) -> f64 {
        self.tokens_cut as f64 / (self.tokens + self.tokens_cut).max(1) as f64
    }

    pub(crate) fn rows_too_long(&self) -> u64 {
        self.count(FindingKind::TooLong) + self.count(FindingKind::CutToNothing)
    }

    /// Returns a warning, with its remedy, if more than a fifth of the records or of the tokens are lost to `max_seq_len`.
    pub fn loss_warning(&self) -> Option<String> {
        let rows = self.rows_too_long();
        let (of_rows, of_tokens) = (rows as f64 / self.rows.max(1) as f64, self.cut_share());
        if of_rows.max(of_tokens) <= ALLOWED_LOSS {
            return None;
        }
        let (all, percent) = (counted(self.rows, "record"), 100.0 * of_rows);
        let dropped = match rows {
            0 => String::new(),
            rows => format!(", and {rows} of {all} ({percent:.1} %) are dropped whole"),
        };
        let ends = match self.count(FindingKind::Truncated) {
            0 => String::new(),
            cut => format!(", and the ends of {cut} of {all}"),
        };
        // Splitting does not help data that is already split, nor pairs.
        let is_split = [FindingKind::Split, FindingKind::PromptCut].iter().any(|&kind| self.count(kind) > 0);
        let split = if is_split { "" } else { ", or set data.overflow = \"split\" (not for pairs of answers)" };
        Some(format!(
            "records longer than max_seq_len lose {:.1} % of all tokens{ends}{dropped}: raise max_seq_len{split}",
            100.0 * of_tokens,
        ))
    }

    /// Returns a line about the keys that the records' format does not read, the most frequent first; `None` if there are none.
    pub fn unread_line(&self) -> Option<String> {
        let mut keys: Vec<(&String, &u64)> = self.unread_keys.iter().collect();
        keys.sort_by_key(|(_, rows)| Reverse(**rows));
        let shown = keys.iter().take(NAMED_KEYS).map(|(key, rows)| {
            let cut = key.chars().nth(KEY_CHARACTERS).map_or("", |_| "…");
            let key: String = key.chars().take(KEY_CHARACTERS).collect();
            format!("{}{cut} ({})", key.escape_debug(), counted(**rows, "row"))
        });
        let more = if keys.len() > NAMED_KEYS { ", and more" } else { "" };
        (!keys.is_empty()).then(|| format!("keys not read: {}{more}", shown.collect::<Vec<_>>().join(", ")))
    }

    /// Replaces the path of every place; `None` if one has none.
    pub(crate) fn with_paths(mut self, path: impl Fn(&Path) -> Option<PathBuf>) -> Option<Self> {
        for (place, _) in self.findings.values_mut().flat_map(|found| &mut found.first) {
            place.path = path(&place.path)?;
        }
        Some(self)
    }

    /// Checks a whole source. Refuses it if only flagged messages are trained on and no record has a flag; if more than `max_bad_share` (0 to 1) of
    /// its records are bad; or if conversations are kept but the loss never includes an end-of-turn token. `train_end_of_turn` is the encoder's
    /// option. Errors: [`DataError::NoFlags`], [`DataError::TooManyBadRows`], [`DataError::EndNeverTrained`].
    pub fn check(&self, max_bad_share: f64, train_end_of_turn: bool) -> Result<(), DataError> {
        if self.has_no_flags() {
            return Err(DataError::NoFlags(self.rows));
        }
        self.check_share(max_bad_share)?;
        if train_end_of_turn && self.chats > 0 && self.chats_ended == 0 {
            let why = if self.count(FindingKind::Truncated) >= self.chats {
                "all of them are cut before it. Raise max_seq_len"
            } else {
                "the chat template writes no special token after the assistant's text, or only outside of its \
                 {% generation %} blocks and not directly after them. Change the template, or set \
                 train_end_of_turn = false if that is intended"
            };
            return Err(DataError::EndNeverTrained { chats: self.chats, why });
        }
        Ok(())
    }

    /// Checks as [`Diagnosis::check`] does, while records are still being read. Accepts everything until enough records were seen, so that a hopeless
    /// source is refused early. Errors: those of [`Diagnosis::check`].
    pub fn check_early(&self, max_bad_share: f64) -> Result<(), DataError> {
        let is_hopeless = self.rows >= EARLY_ROWS && self.bad_rows as f64 > 0.5 * self.rows as f64;
        if is_hopeless { self.check_share(max_bad_share) } else { Ok(()) }
    }

    /// Returns whether no record has a flag although flags are required.
    fn has_no_flags(&self) -> bool {
        let without = self.count(FindingKind::NoFlags);
        without > 0 && without + self.count(FindingKind::Empty) == self.rows
    }

    fn check_share(&self, max_bad_share: f64) -> Result<(), DataError> {
        if self.bad_rows as f64 > max_bad_share * self.rows as f64 {
            if self.has_no_flags() {
                return Err(DataError::NoFlags(self.rows));
            }
            let (bad, rows, report) = (self.bad_rows, self.rows, self.to_string());
            return Err(DataError::TooManyBadRows { bad, rows, allowed: max_bad_share, report });
        }
        Ok(())
    }
}

impl Display for Diagnosis {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> FormatResult {
        let [kept, in_loss, longest] = [self.rows_kept, self.loss_tokens, self.longest as u64].map(grouped);
        write!(formatter, "{}", counted(self.rows, "record"))?;
        if self.rows_kept != self.rows {
            write!(formatter, ", {kept} of them kept")?;
        }
        if self.examples != self.rows_kept {
            write!(formatter, ", {}", counted(self.examples, "example"))?;
        }
        write!(formatter, ", {} ({in_loss} in the loss), longest {longest}", counted(self.tokens, "token"))?;
        // A source without any kept record is an error, which has its own remedy.
        let warning = self.loss_warning().filter(|_| self.rows_kept > 0);
        if self.tokens_cut > 0 && warning.is_none() {
            write!(formatter, ", {} cut ({:.1} %)", counted(self.tokens_cut, "token"), 100.0 * self.cut_share())?;
        }
        for (kind, found) in &self.findings {
            let mark = if *kind == FindingKind::AnswerFirst { "WARNING: " } else { "" };
            write!(formatter, "\n  {mark}{} {}", counted(found.count, "record"), kind.description())?;
            if let Some((place, detail)) = found.first.first() {
                write!(formatter, "; first {place}: {detail}")?;
            }
            let others: Vec<String> = found.first.iter().skip(1).map(|(place, _)| place.line.to_string()).collect();
            if !others.is_empty() {
                write!(formatter, " (then at {})", others.join(", "))?;
            }
        }
        if let Some(unread) = self.unread_line() {
            write!(formatter, "\n  {unread}")?;
        }
        match warning {
            Some(warning) => write!(formatter, "\n  WARNING: {warning}"),
            None => Ok(()),
        }
    }
}
