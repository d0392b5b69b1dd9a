//! What rounding to MXFP4 does to merged experts, in the unit of what their adapter does.
//!
//! Trade-off: one number over all experts with an adapter. A layer whose adapter is smaller than the others' loses more of it.

use rayon::prelude::*;

/// Root mean squares over all weights of experts with an adapter, relative to that of the merged weights.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mxfp4Noise {
    /// Difference of the written weights from the merged ones.
    pub rounding: f64,
    /// Difference of the merged weights from the base's: what the adapter does.
    pub change: f64,
}

impl Mxfp4Noise {
    /// Returns whether rounding takes more than half of the adapter's change, in squares. The base is on the grid of MXFP4, so a small change rounds
    /// back to it: the rounding is then as large as the change and no larger.
    pub fn is_mostly_lost(self) -> bool {
        2.0 * self.rounding.powi(2) > self.change.powi(2)
    }
}

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct NoiseSums {
    merged: f64,
    rounding: f64,
    change: f64,
}

impl NoiseSums {
    /// Adds a weight: that of the base, the merged one, and the written one.
    pub(crate) fn add(&mut self, base: &[f32], merged: &[f32], written: &[f32]) {
        self.merged += sum_of_squares(merged, &vec![0.0; merged.len()]);
        self.rounding += sum_of_squares(written, merged);
        self.change += sum_of_squares(merged, base);
    }

    /// Returns the noise; `None` if there was no weight.
    pub(crate) fn noise(self) -> Option<Mxfp4Noise> {
        let relative = |squares: f64| (squares / self.merged).sqrt();
        (self.merged > 0.0).then(|| Mxfp4Noise { rounding: relative(self.rounding), change: relative(self.change) })
    }
}

/// Values that one processor sums at a time, so that sums do not depend on the number of processors.
const CHUNK: usize = 1 << 14;

/// Returns the sum of the squares of `a - b`.
fn sum_of_squares(a: &[f32], b: &[f32]) -> f64 {
    let of_chunk = |(a, b): (&[f32], &[f32])| -> f64 {
        a.iter().zip(b).map(|(a, b)| (f64::from(*a) - f64::from(*b)).powi(2)).sum()
    };
    let sums: Vec<f64> = a.par_chunks(CHUNK).zip(b.par_chunks(CHUNK)).map(of_chunk).collect();
    sums.iter().sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn noise_is_relative_to_the_merged_weights() {
        assert_eq!(NoiseSums::default().noise(), None);
        let mut sums = NoiseSums::default();
        // The first weight rounds back to the base, the second keeps its change.
        sums.add(&[3.0, 0.0], &[3.0, 4.0], &[3.0, 0.0]);
        assert_eq!(sums.noise(), Some(Mxfp4Noise { rounding: 0.8, change: 0.8 }));
        assert!(sums.noise().unwrap().is_mostly_lost());
        sums.add(&[0.0; 3], &[3.0, 4.0, 5.0], &[3.0, 4.0, 5.0]);
        let noise = sums.noise().unwrap();
        assert_eq!(noise, Mxfp4Noise { rounding: (16.0_f64 / 75.0).sqrt(), change: (66.0_f64 / 75.0).sqrt() });
        assert!(!noise.is_mostly_lost());
    }
}
