//! The largest magnitude ("amax") of each group of a matrix.
//!
//! Trade-off: one pass of its own over the values. Kernels take the amax where the values are written.

use crate::workers;

/// The largest magnitude of each group, or an infinity or NaN if there is one; row-major over the grid.
pub(crate) fn group_amax<T: Copy + Sync>(
    values: &[T],
    widen: impl Fn(T) -> f32 + Copy + Send,
    [group_rows, group_columns]: [usize; 2],
    [rows, columns]: [usize; 2],
) -> Vec<f32> {
    // A group of all rows is split by rows for the workers and joined at the end.
    let band_rows = if group_rows == rows { 1 } else { group_rows };
    let (bands, grid_columns) = (rows.div_ceil(band_rows), columns.div_ceil(group_columns));
    let mut amax = vec![0.0; bands * grid_columns];
    let (band, span) = (band_rows * columns, workers::blocks_per_worker(bands, band_rows * columns));
    let spans = values.chunks(span * band).zip(amax.chunks_mut(span * grid_columns));
    workers::run(spans.map(|(values, amax)| {
        move || {
            for (band, amax) in values.chunks(band).zip(amax.chunks_mut(grid_columns)) {
                for row in band.chunks(columns) {
                    row.chunks(group_columns).zip(&mut *amax).for_each(|(group, amax)| {
                        *amax = larger_of(*amax, group.iter().map(|&value| widen(value)));
                    });
                }
            }
        }
    }));
    if group_rows == rows {
        for band in 1..bands {
            for column in 0..grid_columns {
                amax[column] = larger(amax[column], &[amax[band * grid_columns + column]]);
            }
        }
        amax.truncate(grid_columns);
    }
    amax
}

/// The largest of an amax and the magnitudes of `values`, where infinity and NaN are the largest.
#[inline(always)]
pub(crate) fn larger(amax: f32, values: &[f32]) -> f32 {
    larger_of(amax, values.iter().copied())
}

#[inline(always)]
fn larger_of(amax: f32, values: impl Iterator<Item = f32>) -> f32 {
    // Without their sign, the bits of floats are ordered as the floats are, with infinity and NaN on top.
    f32::from_bits(values.fold(amax.to_bits(), |largest, value| value.abs().to_bits().max(largest)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_values::Draws;

    #[test]
    fn each_group_has_the_largest_of_its_magnitudes() {
        let (rows, columns) = (700, 301);
        let values = Draws(45).vector(rows * columns, 1.0);
        for [height, width] in [[1, 301], [700, 301], [1, 32], [128, 128], [16, 16], [699, 300]] {
            let amax = group_amax(&values, |value| value, [height, width], [rows, columns]);
            let mut expected = vec![0.0_f32; rows.div_ceil(height) * columns.div_ceil(width)];
            for (index, value) in values.iter().enumerate() {
                let group = index / columns / height * columns.div_ceil(width) + index % columns / width;
                expected[group] = expected[group].max(value.abs());
            }
            assert_eq!(amax, expected, "{height} x {width}");
        }
    }

    #[test]
    fn infinity_is_larger_than_any_number_and_nan_larger_than_infinity() {
        assert_eq!(larger(0.0, &[1.0, -3.0, 2.0]), 3.0);
        assert_eq!(larger(5.0, &[f32::NEG_INFINITY, f32::MAX]), f32::INFINITY);
        assert!(larger(f32::INFINITY, &[-f32::NAN, 1.0]).is_nan() && larger(f32::NAN, &[f32::INFINITY]).is_nan());
    }
}
