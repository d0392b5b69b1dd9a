//! What follows from the size of the data where a recipe leaves it open: tokens per row, rows per step, passes, and the share that is held out.
//!
//! A model learns from updates and from repetition, so small data gets short rows, small steps and several passes, and everything else stays at its
//! default. Trade-off: none of it depends on what the data says; a larger run shows whether more passes help.

/// Packed rows of an epoch, if the data has enough tokens for full ones.
const ROWS_PER_EPOCH: usize = 50;
/// Packed rows have a multiple of this many tokens, which suits matrix units.
const ROW_MULTIPLE: usize = 64;
/// Steps of an epoch before a step gets more rows.
const STEPS_PER_EPOCH: usize = 200;
/// Rows of the largest step.
const MAX_ROWS: usize = 16;
/// Least steps of a run over small data, and passes over the smallest.
const STEPS: f64 = 75.0;
const MAX_EPOCHS: f64 = 10.0;
/// Passes over data of a usual size, and the rows up to which at least one more than one is made.
const EPOCHS: f64 = 3.0;
const REPEATED_ROWS: f64 = 1500.0;
/// Fewer records are all trained on.
pub(crate) const FEWEST_TO_HOLD_OUT: usize = 20;
/// The largest share that is held out, and about how many records that may be.
const HELD_OUT: (f64, f64) = (0.1, 200.0);

/// Returns the tokens of a packed row, at most `most`, for so many documents with so many tokens in all, of which the longest has `longest`. A row has
/// room for the longest document, and for two common ones.
pub(crate) fn row_len(documents: usize, tokens: usize, longest: usize, most: usize) -> usize {
    let least = longest.max(2 * tokens / documents.max(1)).max(1);
    (tokens / ROWS_PER_EPOCH).max(least).next_multiple_of(ROW_MULTIPLE).min(most)
}

/// Returns the rows per step of so many ranks together, where an epoch has `rows`.
pub(crate) fn rows_per_step(rows: usize, ranks: usize) -> usize {
    (rows / STEPS_PER_EPOCH).clamp(1, MAX_ROWS).next_multiple_of(ranks)
}

/// Returns the passes over so many rows. SmolLM2-135M learned a repeated fact from 60 chats in four, where three were too few and five made its loss on
/// others rise, and from 2,000 in three, where two were too few.
pub(crate) fn epochs(rows: usize, rows_per_step: usize) -> f64 {
    let rows = rows as f64;
    (STEPS * rows_per_step as f64 / rows).max(EPOCHS.min(REPEATED_ROWS / rows)).round().clamp(1.0, MAX_EPOCHS)
}

/// Returns the share of so many records that is held out; `None` if they are too few.
pub(crate) fn held_out(records: usize) -> Option<f64> {
    let (share, most) = HELD_OUT;
    (records >= FEWEST_TO_HOLD_OUT).then(|| share.min(most / records as f64))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a recipe that leaves everything open becomes: records held out, tokens per row, rows per step, passes, and steps of the run.
    fn course(documents: usize, mean: usize, longest: usize) -> (usize, usize, usize, f64, usize) {
        let held_out = held_out(documents).map_or(0, |share| (share * documents as f64).round() as usize);
        let trained = documents - held_out;
        let row_len = row_len(trained, trained * mean, longest, 2048);
        let rows = (trained * mean).div_ceil(row_len);
        let per_step = rows_per_step(rows, 1);
        let epochs = epochs(rows, per_step);
        (held_out, row_len, per_step, epochs, (epochs * rows as f64 / per_step as f64).ceil() as usize)
    }

    #[test]
    fn small_data_becomes_short_rows_and_several_passes_and_large_data_full_rows_and_one() {
        // Chats of 150 tokens, the longest of 300.
        let expected = [
            (20, (2, 320, 1, 8.0, 72)),
            (60, (6, 320, 1, 3.0, 78)),
            (200, (20, 576, 1, 3.0, 141)),
            (2_000, (200, 2048, 1, 3.0, 396)),
            (20_000, (200, 2048, 7, 1.0, 208)),
            (200_000, (200, 2048, 16, 1.0, 915)),
        ];
        for (documents, course_of) in expected {
            assert_eq!(course(documents, 150, 300), course_of, "{documents}");
        }
    }

    #[test]
    fn data_of_any_shape_takes_enough_steps_or_ten_passes_in_rows_that_hold_every_document() {
        for documents in [1, 7, 20, 60, 200, 2_000, 200_000] {
            for (mean, longest) in [(20, 30), (150, 300), (400, 1900), (2048, 2048)] {
                let (held_out, row_len, per_step, epochs, steps) = course(documents, mean, longest);
                let case = format!("{documents} of {mean}: {:?}", (held_out, row_len, per_step, epochs, steps));
                assert!(10 * held_out <= documents && (held_out > 0) == (documents >= 20), "{case}");
                assert!((longest..=2048).contains(&row_len) && (1..=16).contains(&per_step), "{case}");
                assert!(steps >= 60 || epochs == MAX_EPOCHS, "{case}");
                assert!(steps <= 1200 || epochs == 1.0, "{case}");
                let of_a_step = (per_step * row_len) as f64 / mean as f64;
                assert!(!(20..=2_000).contains(&documents) || of_a_step <= 0.25 * documents as f64, "{case}");
            }
        }
    }
}
