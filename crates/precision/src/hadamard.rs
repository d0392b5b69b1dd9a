//! The random Hadamard transform of NVFP4 training: rows of 16 values are multiplied with signs and a 16x16 Hadamard
//! matrix over 4. It is a rotation, so `(x R) · (y R) = x · y`: both operands of a GEMM are rotated along the axis that it
//! sums over, the result stays, and an outlier is spread over 16 values.
//!
//! `R = diag(signs) H / 4` with Sylvester's H (`H[i][j] = (-1)^popcount(i & j)`), as in TransformerEngine, which
//! transforms only the operands of the weight gradient.
//!
//! Trade-off: sums of 16 in f32 by butterflies. A device that multiplies with the matrix adds in another order, so last
//! bits differ.

use crate::error::{Error, Result};

/// Values that are transformed together.
pub const HADAMARD_SIZE: usize = 16;

/// A random Hadamard transform.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RandomHadamard {
    /// Bit i is set if value i of each 16 changes its sign.
    pub signs: u16,
}

impl RandomHadamard {
    /// The fixed signs of TransformerEngine: `+ + + - + - - - - - - + - + - -`.
    pub const TRANSFORMER_ENGINE: Self = Self { signs: 0xD7E8 };

    /// Transforms each 16 values, in place.
    ///
    /// # Errors
    /// [`Error::Indivisible`] by 16.
    pub fn apply(self, values: &mut [f32]) -> Result<()> {
        for group in groups(values)? {
            self.flip(group);
            hadamard(group);
        }
        Ok(())
    }

    /// Undoes [`Self::apply`], but for rounding.
    ///
    /// # Errors
    /// [`Error::Indivisible`] by 16.
    pub fn invert(self, values: &mut [f32]) -> Result<()> {
        for group in groups(values)? {
            hadamard(group);
            self.flip(group);
        }
        Ok(())
    }

    fn flip(self, group: &mut [f32; HADAMARD_SIZE]) {
        for (index, value) in group.iter_mut().enumerate() {
            *value = f32::from_bits(value.to_bits() ^ u32::from(self.signs >> index & 1) << 31);
        }
    }
}

fn groups(values: &mut [f32]) -> Result<&mut [[f32; HADAMARD_SIZE]]> {
    let got = values.len();
    match values.as_chunks_mut() {
        (groups, []) => Ok(groups),
        _ => Err(Error::Indivisible { what: "values", got, by: HADAMARD_SIZE }),
    }
}

/// Times H / 4: sums and differences of values 1, 2, 4 and 8 apart. H is its own inverse.
fn hadamard(group: &mut [f32; HADAMARD_SIZE]) {
    for distance in [1, 2, 4, 8] {
        for low in (0..HADAMARD_SIZE).filter(|index| index & distance == 0) {
            let (a, b) = (group[low], group[low + distance]);
            (group[low], group[low + distance]) = (a + b, a - b);
        }
    }
    group.iter_mut().for_each(|value| *value *= 0.25);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_values::Draws;

    const TRANSFORM: RandomHadamard = RandomHadamard::TRANSFORMER_ENGINE;

    #[test]
    fn a_unit_vector_becomes_its_row_of_the_matrix() {
        for row in 0..HADAMARD_SIZE {
            let mut values = [0.0; HADAMARD_SIZE];
            values[row] = 1.0;
            TRANSFORM.apply(&mut values).unwrap();
            let sign = [1.0, 1.0, 1.0, -1.0, 1.0, -1.0, -1.0, -1.0, -1.0, -1.0, -1.0, 1.0, -1.0, 1.0, -1.0, -1.0][row];
            for (column, value) in values.into_iter().enumerate() {
                let entry = if (row & column).count_ones().is_multiple_of(2) { 0.25 } else { -0.25 };
                assert_eq!(value, sign * entry, "row {row}, column {column}");
            }
        }
    }

    #[test]
    fn dot_products_stay_and_the_inverse_restores_the_values() {
        let mut draws = Draws(61);
        for signs in [0, 0xD7E8, 0xFFFF, 0x1234] {
            let transform = RandomHadamard { signs };
            let original = [draws.vector(64, 1.0), draws.vector(64, 1.0)];
            let mut rotated = original.clone();
            rotated.iter_mut().for_each(|values| transform.apply(values).unwrap());
            let dot = |[x, y]: &[Vec<f32>; 2]| x.iter().zip(y).map(|(x, y)| f64::from(x * y)).sum::<f64>();
            assert!((dot(&original) - dot(&rotated)).abs() < 1e-4, "{signs:#x}");
            rotated.iter_mut().for_each(|values| transform.invert(values).unwrap());
            for (value, back) in original.iter().flatten().zip(rotated.iter().flatten()) {
                assert!((value - back).abs() < 1e-6, "{value} came back as {back}");
            }
        }
    }

    #[test]
    fn an_outlier_is_spread_evenly() {
        let mut values = [0.0; 32];
        values[20] = 100.0;
        TRANSFORM.apply(&mut values).unwrap();
        assert!(values[..16].iter().all(|&value| value == 0.0));
        assert!(values[16..].iter().all(|&value| value.abs() == 25.0));
    }

    #[test]
    fn a_length_that_16_does_not_divide_is_refused() {
        let error = TRANSFORM.apply(&mut [0.0; 24]).unwrap_err();
        assert_eq!(error, Error::Indivisible { what: "values", got: 24, by: 16 });
    }
}
