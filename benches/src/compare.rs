//! Compares two runs of the matrix: which changes exceed the noise.
//!
//! A change counts if the medians differ by more than [`NOISE_FACTOR`] times the joint spread of both runs' samples and by more than [`SMALLEST`].
//! The spread is the distance of the quartiles; for independent samples, spreads add in squares.
//! Trade-off: variation between runs but not between samples (memory layout, clocks) is only covered by the smallest change.

use std::collections::BTreeMap;
use std::fmt;

use firebrick_train::bench::Spread;

use crate::case::FEWEST;
use crate::numbers::{percent, seconds_text};
use crate::results::{Key, MatrixResults, Row};

/// Minimum change in joint spreads.
const NOISE_FACTOR: f64 = 2.0;
/// The smallest change that counts, relative to the earlier run.
const SMALLEST: f64 = 0.05;

/// A case whose time changed.
#[derive(Clone, Debug, PartialEq)]
struct Change {
    key: Key,
    /// Median seconds before and now.
    seconds: [f64; 2],
    /// The change that noise explains, relative to the earlier median.
    noise: f64,
}

impl Change {
    /// Returns the relative change of the time: below 0 is faster.
    fn relative(&self) -> f64 {
        self.seconds[1] / self.seconds[0] - 1.0
    }
}

/// The differences between two runs.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Comparison {
    /// Cases that became slower, the worst first, and those that became faster, the best first.
    slower: Vec<Change>,
    faster: Vec<Change>,
    unchanged: usize,
    /// Cases that were timed only in the earlier run.
    lost: Vec<Key>,
    /// Number of cases that were timed only in this run.
    new: usize,
    /// Reasons why the runs are not comparable, in sentences.
    warnings: Vec<String>,
}

/// Compares a run with an earlier one.
pub(crate) fn compare(earlier: &MatrixResults, now: &MatrixResults) -> Comparison {
    fn timed(results: &MatrixResults) -> BTreeMap<&Key, &Row> {
        results.rows.iter().filter(|row| row.timing().is_some()).map(|row| (&row.key, row)).collect()
    }
    let (before, after) = (timed(earlier), timed(now));
    let mut comparison = Comparison { warnings: warnings(earlier, now), ..Comparison::default() };
    for (key, old) in &before {
        let Some(new) = after.get(key) else {
            comparison.lost.push((*key).clone());
            continue;
        };
        match change(old, new) {
            Some(change) if change.relative() > 0.0 => comparison.slower.push(change),
            Some(change) => comparison.faster.push(change),
            None => comparison.unchanged += 1,
        }
    }
    comparison.new = after.keys().filter(|key| !before.contains_key(*key)).count();
    comparison.slower.sort_by(|a, b| b.relative().total_cmp(&a.relative()));
    comparison.faster.sort_by(|a, b| a.relative().total_cmp(&b.relative()));
    comparison
}

/// Compares the times of a case; `None` within the noise.
fn change(old: &Row, new: &Row) -> Option<Change> {
    let (before, after) = (old.timing()?, new.timing()?);
    if before.samples.min(after.samples) < FEWEST {
        // The time ran out: there are too few samples to know the noise.
        return None;
    }
    let (before, after) = (before.seconds, after.seconds);
    let spread = |seconds: Spread| seconds.p75 - seconds.p25;
    let joint = (spread(before).powi(2) + spread(after).powi(2)).sqrt() / before.median;
    let noise = (NOISE_FACTOR * joint).max(SMALLEST);
    let change = Change { key: old.key.clone(), seconds: [before.median, after.median], noise };
    (change.relative().abs() > noise).then_some(change)
}

fn warnings(earlier: &MatrixResults, now: &MatrixResults) -> Vec<String> {
    let mut warnings = Vec::new();
    if earlier.machine != now.machine {
        let [before, now] = [earlier, now].map(|run| run.machine.join("; "));
        warnings.push(format!("the machines differ, so the times do too: {before} and now {now}"));
    }
    if earlier.optimized != now.optimized {
        warnings.push("one of the two builds is not optimized".to_owned());
    }
    warnings
}

impl fmt::Display for Comparison {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { slower, faster, unchanged, lost, new, warnings } = self;
        for warning in warnings {
            writeln!(out, "note: {warning}")?;
        }
        writeln!(
            out,
            "compared with the earlier run: {} slower, {} faster, {unchanged} within the noise, {} not timed any more, {new} new",
            slower.len(),
            faster.len(),
            lost.len()
        )?;
        for change in slower.iter().chain(faster) {
            let [before, now] = change.seconds.map(seconds_text);
            let (word, relative) =
                if change.relative() > 0.0 { ("slower", change.relative()) } else { ("faster", -change.relative()) };
            let (relative, noise) = (percent(relative), percent(change.noise));
            writeln!(out, "  {word} by {relative:>6} (noise {noise}): {before} to {now}  {}", change.key)?;
        }
        for key in lost {
            writeln!(out, "  not timed any more: {key}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::Outcome;
    use crate::results::tests::{results, row};

    /// Compares two runs, where the first row of the earlier one takes `factor` times as long.
    fn changed(factor: f64) -> Comparison {
        let (earlier, mut now) = (results(), results());
        now.rows[0] = row("flex", "gemm", 64, 1e-2 * factor);
        compare(&earlier, &now)
    }

    #[test]
    fn a_run_does_not_differ_from_itself() {
        let same = compare(&results(), &results());
        assert_eq!((same.slower.len(), same.faster.len(), same.unchanged, same.new), (0, 0, 4, 0));
        assert!(same.lost.is_empty() && same.warnings.is_empty());
    }

    #[test]
    fn changes_beyond_the_noise_are_reported_and_others_are_not() {
        // Quartiles are 1 % to both sides in both runs: the joint spread is 2.8 %, and twice that is the noise.
        assert_eq!(changed(1.05).slower.len(), 0);
        let slower = changed(1.10);
        assert_eq!((slower.slower.len(), slower.faster.len(), slower.unchanged), (1, 0, 3));
        assert!((slower.slower[0].relative() - 0.10).abs() < 1e-9 && (slower.slower[0].noise - 0.0595).abs() < 1e-3);
        let faster = changed(0.8);
        assert_eq!((faster.slower.len(), faster.faster.len()), (0, 1));
        assert!(faster.to_string().contains("faster by   20 %"), "{faster}");
    }

    #[test]
    fn noisy_samples_hide_a_change_that_quiet_ones_show() {
        let (earlier, mut now) = (results(), results());
        now.rows[0] = row("flex", "gemm", 64, 1.3e-2);
        assert_eq!(compare(&earlier, &now).slower.len(), 1);
        if let Outcome::Timed(timing) = &mut now.rows[0].outcome {
            timing.seconds.p75 *= 1.3;
        }
        assert_eq!(compare(&earlier, &now).slower.len(), 0);
    }

    #[test]
    fn a_case_that_is_wrong_now_is_lost_and_another_machine_is_named() {
        let (earlier, mut now) = (results(), results());
        now.rows[0].outcome = Outcome::Wrong { what: "x".to_owned(), error: 1.0, tolerance: 0.1 };
        now.rows.push(row("flex", "rotary", 64, 1.0));
        now.machine = vec!["another".to_owned()];
        let comparison = compare(&earlier, &now);
        assert_eq!((comparison.lost.len(), comparison.new, comparison.unchanged), (1, 1, 3));
        let text = comparison.to_string();
        assert!(text.contains("the machines differ") && text.contains("not timed any more: flex/gemm"), "{text}");
    }
}
