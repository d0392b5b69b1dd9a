//! Dropout on the adapters' input, as a function of a key and a value's position: no mask is stored, so a recomputed
//! layer, a backward and a resumed run use the mask of the first forward.
//!
//! Two bytes of a 32-bit hash decide whether a value is dropped. The hash applies the finalizer "lowbias32" (Wellons, Prospecting for
//! Hash Functions, 2018) twice, to a counter and both halves of the key: 32-bit arithmetic, which every device has.
//! A value's position follows from its row in the training step, so a step has the same masks however its rows are divided into micro-batches
//! and over ranks, and however far they are padded. Rows that are sorted by expert have the place of their token, once for each of its experts.
//! Trade-off: probabilities are multiples of 1/65,536. Modules that share an input share its mask, so that it is read once.

use burn_tensor::{Int, Tensor, backend::Backend};

/// Where each row of a matrix comes from, if the rows are sorted by expert.
#[derive(Clone, Debug)]
pub struct RowChoices<B: Backend> {
    /// `token * per_token + rank of the expert` for each row, `[rows]` i32.
    pub rows: Tensor<B, 1, Int>,
    /// Rows of each token.
    pub per_token: usize,
}

/// The mask of a matrix: by the order of its rows, or by their choices.
#[derive(Clone, Debug)]
pub struct Mask<B: Backend> {
    /// Key, probability and place in the step.
    pub dropout: Dropout,
    /// The tokens that the rows come from; `None`: each row is the next token.
    pub choices: Option<RowChoices<B>>,
}

impl<B: Backend> Mask<B> {
    /// Returns the mask of the rows from `start` on.
    #[must_use]
    pub fn narrow(&self, start: usize, count: usize) -> Self {
        match &self.choices {
            None => Self::from(self.dropout.from_token(start)),
            Some(RowChoices { rows, per_token }) => {
                let choices = RowChoices { rows: rows.clone().narrow(0, start, count), per_token: *per_token };
                Self { choices: Some(choices), ..self.clone() }
            }
        }
    }
}

impl<B: Backend> From<Dropout> for Mask<B> {
    fn from(dropout: Dropout) -> Self {
        Self { dropout, choices: None }
    }
}

/// A dropout mask, determined by its key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dropout {
    /// Values whose 16 bits are below this are dropped.
    threshold: u32,
    /// Key of the mask; equal keys give equal masks.
    key: u64,
    /// Tokens of the micro-batch before the first one of the matrix.
    first_token: u64,
    /// Rows of the step before those of the micro-batch.
    first_row: u64,
    /// Tokens of a row, padding included.
    row_len: u64,
}

/// Tokens from one row to the next in a mask: more than a row can have.
const ROW_PITCH: u64 = 1 << 24;

/// Number of values of 16 bits.
const OUTCOMES: u32 = 1 << 16;

impl Dropout {
    /// Creates a mask of one row that drops values with this probability; `None` if that rounds to 0.
    ///
    /// # Panics
    /// If the probability is not in `[0, 1)`; recipes are checked.
    pub fn new(probability: f64, key: u64) -> Option<Self> {
        assert!((0.0..1.0).contains(&probability), "values cannot be dropped with probability {probability}");
        let threshold = ((probability * f64::from(OUTCOMES)).round() as u32).min(OUTCOMES - 1);
        (threshold > 0).then_some(Self { threshold, key, first_token: 0, first_row: 0, row_len: u64::from(u32::MAX) })
    }

    /// Returns the mask of a micro-batch whose rows of `row_len` tokens are those of the step from `first_row` on.
    ///
    /// # Panics
    /// If there are no tokens in a row, or more than a mask has room for.
    #[must_use]
    pub fn of_rows(self, first_row: u64, row_len: usize) -> Self {
        let row_len = row_len as u64;
        assert!((1..=ROW_PITCH).contains(&row_len), "a row of {row_len} tokens has no mask");
        Self { first_row, row_len, ..self }
    }

    /// Returns the same mask for the tokens from this one on: rows in the middle of a matrix.
    #[must_use]
    pub fn from_token(self, token: usize) -> Self {
        Self { first_token: self.first_token + token as u64, ..self }
    }

    /// Returns what a kernel computes the position of a token from: the tokens before the matrix, the rows before the micro-batch, and the tokens
    /// of a row.
    pub fn place(&self) -> [u64; 3] {
        [self.first_token, self.first_row, self.row_len]
    }

    /// Returns the factor of kept values: one over the probability of being kept.
    pub fn scale(&self) -> f32 {
        OUTCOMES as f32 / (OUTCOMES - self.threshold) as f32
    }

    /// Returns the threshold: values whose 16 bits are below it are dropped.
    pub fn threshold(&self) -> u32 {
        self.threshold
    }

    /// Returns the key of the mask.
    pub fn key(&self) -> u64 {
        self.key
    }

    /// Returns where a token's values begin in the mask, in tokens.
    fn position(&self, token: u64) -> u64 {
        let token = self.first_token + token;
        (self.first_row + token / self.row_len) * ROW_PITCH + token % self.row_len
    }

    /// Returns whether the value at this index of the mask is kept.
    fn keeps(&self, index: u64) -> bool {
        let bits = random_bits(index / 2, self.key) >> (16 * (index % 2));
        bits % OUTCOMES >= self.threshold
    }

    /// Returns the factors of all values of a matrix `[tokens, width]`, row by row: 0 or [`Dropout::scale`].
    pub fn factors(&self, [tokens, width]: [usize; 2]) -> Vec<f32> {
        self.factors_of(0..tokens as u64, 1, width)
    }

    /// Returns the same for rows with these choices, `per_token` of each token.
    pub fn factors_of(&self, choices: impl Iterator<Item = u64>, per_token: usize, width: usize) -> Vec<f32> {
        let (scale, per_token) = (self.scale(), per_token as u64);
        let factor = |index| if self.keeps(index) { scale } else { 0.0 };
        let of_choice = |choice| {
            let first = (self.position(choice / per_token) * per_token + choice % per_token) * width as u64;
            (first..first + width as u64).map(factor)
        };
        choices.flat_map(of_choice).collect()
    }
}

/// Returns the hash bits for a pair of adjacent values of the stream with this key.
pub(crate) fn random_bits(pair: u64, key: u64) -> u32 {
    let halves = |value: u64| (value as u32, (value >> 32) as u32);
    let ((low, high), (key_low, key_high)) = (halves(pair), halves(key));
    mixed(mixed(low ^ key_low) ^ key_high ^ high.wrapping_mul(0x9e37_79b9))
}

fn mixed(mut value: u32) -> u32 {
    value ^= value >> 16;
    value = value.wrapping_mul(0x7feb_352d);
    value ^= value >> 15;
    value = value.wrapping_mul(0x846c_a68b);
    value ^ (value >> 16)
}

#[cfg(test)]
mod tests {
    use super::*;

    const VALUES: u64 = 1 << 18;

    fn dropout(key: u64) -> Dropout {
        Dropout::new(0.1, key).unwrap()
    }

    #[test]
    fn as_many_values_are_dropped_as_the_probability_says_and_the_mean_stays() {
        for key in [0, 1, u64::MAX] {
            let factors = dropout(key).factors([1, VALUES as usize]);
            let dropped = factors.iter().filter(|&&factor| factor == 0.0).count() as f64 / VALUES as f64;
            assert!((dropped - 0.1).abs() < 0.003, "{dropped}");
            let mean = factors.iter().map(|&factor| f64::from(factor)).sum::<f64>() / VALUES as f64;
            assert!((mean - 1.0).abs() < 0.004, "{mean}");
        }
        assert_eq!(Dropout::new(0.0, 7), None);
    }

    #[test]
    fn masks_of_different_keys_and_neighboring_values_are_independent() {
        let both = |other: &dyn Fn(u64) -> bool| {
            let both_dropped = (0..VALUES).filter(|&index| !dropout(3).keeps(index) && !other(index)).count();
            both_dropped as f64 / VALUES as f64
        };
        for key in [4, 3 << 32, 3 ^ (1 << 63)] {
            assert!((both(&|index| dropout(key).keeps(index)) - 0.01).abs() < 0.001, "key {key}");
        }
        for distance in [1, 2, 64, 4096, 1 << 33] {
            let shared = both(&|index| dropout(3).keeps(index + distance));
            assert!((shared - 0.01).abs() < 0.001, "{shared} at distance {distance}");
        }
    }

    #[test]
    fn a_mask_follows_from_its_key_and_is_the_same_in_every_version() {
        let dropped: Vec<u64> = (0..64).filter(|&index| !Dropout::new(0.25, 42).unwrap().keeps(index)).collect();
        assert_eq!(dropout(5).factors([10, 10]), dropout(5).factors([10, 10]));
        assert_eq!(dropped, EXPECTED);
        let rest = dropout(5).from_token(3).from_token(4);
        assert_eq!(dropout(5).factors([10, 10])[70..], rest.factors([3, 10]));
    }

    #[test]
    fn a_row_has_the_mask_of_its_place_in_the_step_in_any_micro_batch_and_at_any_length() {
        let (width, row) =
            (6, |factors: &[f32], row: usize, len: usize| factors[row * len * 6..(row * len + 4) * 6].to_vec());
        let whole = dropout(9).of_rows(0, 5).factors([8 * 5, width]);
        for (first_row, rows, len) in [(0, 8, 4), (2, 2, 7), (6, 2, 5), (7, 1, 4096)] {
            let part = dropout(9).of_rows(first_row, len).factors([rows * len, width]);
            for index in 0..rows {
                assert_eq!(
                    row(&part, index, len),
                    row(&whole, first_row as usize + index, 5),
                    "row {index} from {first_row}"
                );
            }
            let middle = dropout(9).of_rows(first_row, len).from_token(3);
            assert_eq!(middle.factors([rows * len - 3, width]), part[3 * width..]);
        }
        assert_ne!(row(&whole, 0, 5), row(&whole, 1, 5));
    }

    /// Indices of the dropped values among the first 64, computed in Python from the definition at the top of this file.
    const EXPECTED: [u64; 11] = [9, 12, 15, 17, 18, 20, 23, 42, 47, 51, 56];
}
