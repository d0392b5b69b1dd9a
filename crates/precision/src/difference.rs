//! How far results are from their reference, and whether that is close enough: the only code that answers either.
//!
//! A value that is not finite, on either side, is infinitely far from everything, and no tolerance allows it: a NaN neither vanishes in a maximum nor
//! passes a comparison. `cargo xtask tidy` finds code that compares with a tolerance in another way.
//! Trade-off: infinities that are there on purpose, such as masked logits, have to be left out by the caller.

/// Returns the largest absolute difference of two values in the same place; infinite for lists of different lengths.
pub fn largest_difference<T: Copy + Into<f64>>(ours: &[T], expected: &[T]) -> f64 {
    if ours.len() != expected.len() {
        return f64::INFINITY;
    }
    worst(ours.iter().zip(expected).map(|(&ours, &expected)| (ours.into() - expected.into()).abs()))
}

/// Computes `‖ours − expected‖ / max(‖expected‖, smallest)`; infinite for lists of different lengths. With `smallest` 0, anything but zeros is
/// infinitely far from a reference of zeros.
pub fn relative_difference<T: Copy + Into<f64>>(ours: &[T], expected: &[T], smallest: f64) -> f64 {
    if ours.len() != expected.len() {
        return f64::INFINITY;
    }
    let (mut difference, mut size) = (0.0, 0.0);
    for (&ours, &expected) in ours.iter().zip(expected) {
        let expected = expected.into();
        difference += (ours.into() - expected).powi(2);
        size += expected * expected;
    }
    if difference == 0.0 { 0.0 } else { worst([(difference.sqrt() / size.sqrt().max(smallest))]) }
}

/// Returns the largest of measured differences, and 0 for none; infinite if one of them is not finite.
pub fn worst(differences: impl IntoIterator<Item = f64>) -> f64 {
    differences.into_iter().fold(0.0, |worst, next| if next.is_finite() { worst.max(next) } else { f64::INFINITY })
}

/// Returns whether a measured difference is as small as the tolerance requires. A difference or tolerance that is not finite never is.
pub fn is_within(difference: f64, tolerance: f64) -> bool {
    difference.is_finite() && tolerance.is_finite() && difference <= tolerance
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_finite_is_infinitely_far_on_either_side() {
        for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for place in 0..3 {
                let (mut one, two) = ([1.0, 2.0, 3.0], [1.0, 2.0, 3.5]);
                one[place] = bad;
                for (ours, expected) in [(one, two), (two, one), (one, one)] {
                    assert_eq!(largest_difference(&ours, &expected), f64::INFINITY, "{bad} at {place}");
                    assert_eq!(relative_difference(&ours, &expected, 0.0), f64::INFINITY, "{bad} at {place}");
                }
            }
            assert_eq!(worst([0.5, f64::from(bad), 0.25]), f64::INFINITY);
            assert!(!is_within(f64::from(bad), 1.0) && !is_within(0.5, f64::from(bad)));
        }
        assert_eq!(largest_difference(&[1.0_f32], &[]), f64::INFINITY);
        assert_eq!(relative_difference(&[1.0_f64], &[0.0], 0.0), f64::INFINITY);
    }

    #[test]
    fn finite_values_are_measured() {
        assert_eq!(largest_difference(&[1.0_f32, -2.0, 0.0], &[1.0, 2.0, 0.5]), 4.0);
        assert_eq!(relative_difference(&[3.0_f64, 4.0], &[3.0, 0.0], 0.0), 4.0 / 3.0);
        assert_eq!(relative_difference(&[0.5_f32], &[0.0], 2.0), 0.25);
        assert_eq!((relative_difference::<f32>(&[], &[], 0.0), worst([])), (0.0, 0.0));
        assert!(is_within(0.5, 0.5) && !is_within(0.6, 0.5) && !is_within(0.0, -1.0));
    }
}
