//! Vectorizable building blocks: sums in 16 lanes, maxima, and an exponential without a library call.
//!
//! Everything is `inline(always)`, so that a caller inside `pulp`'s dispatch compiles it for the machine's vector extension.
//! Trade-off: sums add in another order than a plain loop, the same order on every call.

const LANES: usize = 16;

/// Computes `Σ a b`.
#[inline(always)]
pub(super) fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let (chunks_a, chunks_b) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let rest: f32 = chunks_a.remainder().iter().zip(chunks_b.remainder()).map(|(a, b)| a * b).sum();
    for (a, b) in chunks_a.zip(chunks_b) {
        for lane in 0..LANES {
            lanes[lane] += a[lane] * b[lane];
        }
    }
    lanes.iter().sum::<f32>() + rest
}

/// Computes `Σ a`.
#[inline(always)]
pub(super) fn sum(a: &[f32]) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let chunks = a.chunks_exact(LANES);
    let rest: f32 = chunks.remainder().iter().sum();
    for a in chunks {
        for lane in 0..LANES {
            lanes[lane] += a[lane];
        }
    }
    lanes.iter().sum::<f32>() + rest
}

#[inline(always)]
pub(super) fn max(a: &[f32]) -> f32 {
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let chunks = a.chunks_exact(LANES);
    let rest = chunks.remainder().iter().fold(f32::NEG_INFINITY, |a, &b| larger(a, b));
    for a in chunks {
        for lane in 0..LANES {
            lanes[lane] = larger(lanes[lane], a[lane]);
        }
    }
    lanes.iter().fold(rest, |a, &b| larger(a, b))
}

/// Computes `e^x` to within 2 units in the last place for `x` in `-87..88`; outside, the value at the nearer end.
///
/// `x = n ln 2 + f` with `|f| <= ln 2 / 2`; the power of two is written into the exponent bits, `e^f` is its Taylor
/// polynomial of degree 7.
#[inline(always)]
pub(super) fn exp(x: f32) -> f32 {
    /// Adding this rounds to an integer and leaves that integer in the low bits.
    const ROUND: f32 = 12_582_912.0;
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let x = if x < -87.0 { -87.0 } else { x };
    let x = if x > 88.0 { 88.0 } else { x };
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let f = x - n * LN2_HIGH - n * LN2_LOW;
    let tail = 1.0 / 120.0 + f * (1.0 / 720.0 + f * (1.0 / 5040.0));
    let polynomial = 1.0 + f * (1.0 + f * (0.5 + f * (1.0 / 6.0 + f * (1.0 / 24.0 + f * tail))));
    let exponent = shifted.to_bits().wrapping_sub(ROUND.to_bits()).wrapping_add(127) << 23;
    f32::from_bits(exponent) * polynomial
}

/// Computes `1 / (1 + e^-x)`.
#[inline(always)]
pub(super) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

#[cfg(test)]
mod tests {
    use firebrick_precision::difference::worst;

    use super::*;

    #[test]
    fn exp_is_within_two_units_in_the_last_place() {
        let relative = |step: i32| {
            let x = step as f32 * 1e-4;
            let exact = f64::from(x).exp();
            ((f64::from(exp(x)) - exact) / exact).abs()
        };
        let worst = worst((-870_000..=880_000).map(relative));
        assert!(worst < 2.4e-7, "largest relative error {worst:e}");
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-1e30), exp(-87.0));
    }

    #[test]
    fn sums_and_maxima_cover_every_length() {
        for length in 0..70usize {
            let values: Vec<f32> = (0..length).map(|index| (index * 7 % 13) as f32 - 5.0).collect();
            let expected: f32 = values.iter().sum();
            assert_eq!(sum(&values), expected);
            assert_eq!(dot(&values, &values), values.iter().map(|value| value * value).sum::<f32>());
            assert_eq!(max(&values), values.iter().copied().fold(f32::NEG_INFINITY, f32::max));
        }
    }
}
