//! Values of a matrix to the codes of a [`ScaledTensor`](crate::ScaledTensor), group by group, on all cores.
//!
//! Trade-off: values of any type are widened where they are read, so each of them is widened twice: once for the amax.

use crate::element::ElementFormat;
use crate::float::Fields;
use crate::random::random_bits;
use crate::rounding::{self, Overflow};
use crate::workers;

/// How values become codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Rounding {
    /// To the nearest, ties to even.
    Nearest,
    /// To one of the two neighbors, by [`random_bits`] of this seed and the value's flat index.
    Stochastic {
        /// Another one for each tensor and step.
        seed: u64,
    },
}

#[inline(always)]
fn encode(fields: Fields, value: f32, random: Option<u32>) -> u8 {
    (match random {
        None => rounding::encode(fields, value, Overflow::Saturate),
        Some(random) => rounding::encode_stochastic(fields, value, random),
    }) as u8
}

/// Turns values into codes, groups of `group` rows and columns by the factors of the grid.
#[derive(Clone, Copy)]
pub(crate) struct Encoder<'a> {
    pub(crate) group: [usize; 2],
    pub(crate) columns: usize,
    pub(crate) factors: &'a [f32],
    pub(crate) rounding: Rounding,
}

impl Encoder<'_> {
    pub(crate) fn encode<T: Copy + Sync>(
        self,
        element: ElementFormat,
        values: &[T],
        widen: impl Fn(T) -> f32 + Copy + Send + Sync,
    ) -> Vec<u8> {
        match element {
            ElementFormat::E4m3 => {
                self.codes(values, |value, factor, random| encode(Fields::E4M3, widen(value) * factor, random))
            }
            ElementFormat::E5m2 => {
                self.codes(values, |value, factor, random| encode(Fields::E5M2, widen(value) * factor, random))
            }
            ElementFormat::E2m1 => {
                self.packed_codes(values, |value, factor, random| encode(Fields::E2M1, widen(value) * factor, random))
            }
        }
    }

    /// One code per byte. `code` takes a value, its factor, and random bits if rounding is stochastic.
    fn codes<T: Copy + Sync>(
        self,
        values: &[T],
        code: impl Fn(T, f32, Option<u32>) -> u8 + Copy + Send + Sync,
    ) -> Vec<u8> {
        self.run(values, 1, |values, factor, start, codes| match self.rounding {
            Rounding::Nearest => {
                values.iter().zip(codes).for_each(|(value, byte)| *byte = code(*value, factor, None));
            }
            Rounding::Stochastic { seed } => {
                for (index, (value, byte)) in values.iter().zip(codes).enumerate() {
                    *byte = code(*value, factor, Some(random_bits(seed, (start + index) as u64)));
                }
            }
        })
    }

    /// Two codes of four bits per byte, the earlier one in the low nibble.
    fn packed_codes<T: Copy + Sync>(
        self,
        values: &[T],
        code: impl Fn(T, f32, Option<u32>) -> u8 + Copy + Send + Sync,
    ) -> Vec<u8> {
        self.run(values, 2, |values, factor, start, codes| {
            let pairs = values.as_chunks::<2>().0.iter().zip(codes);
            match self.rounding {
                Rounding::Nearest => pairs.for_each(|([low, high], byte)| {
                    *byte = code(*low, factor, None) | code(*high, factor, None) << 4;
                }),
                Rounding::Stochastic { seed } => pairs.enumerate().for_each(|(pair, ([low, high], byte))| {
                    let random = [0, 1].map(|within| Some(random_bits(seed, (start + 2 * pair + within) as u64)));
                    *byte = code(*low, factor, random[0]) | code(*high, factor, random[1]) << 4;
                }),
            }
        })
    }

    /// Calls `encode` with the values that one row has of one group, their factor, the flat index of the first, and
    /// where their codes go.
    fn run<T: Copy + Sync>(
        self,
        values: &[T],
        per_byte: usize,
        encode: impl Fn(&[T], f32, usize, &mut [u8]) + Copy + Send + Sync,
    ) -> Vec<u8> {
        let Self { group: [group_rows, group_columns], columns, factors, .. } = self;
        let (rows, grid_columns) = (values.len() / columns, columns.div_ceil(group_columns));
        let mut codes = vec![0; values.len() / per_byte];
        let span = workers::blocks_per_worker(rows, columns);
        let spans = values.chunks(span * columns).zip(codes.chunks_mut(span * columns / per_byte)).enumerate();
        workers::run(spans.map(|(worker, (values, codes))| {
            move || {
                let rows = values.chunks(columns).zip(codes.chunks_mut(columns / per_byte));
                for (row, (values, codes)) in (worker * span..).zip(rows) {
                    let factors = &factors[row / group_rows * grid_columns..][..grid_columns];
                    let groups = values.chunks(group_columns).zip(codes.chunks_mut(group_columns.div_ceil(per_byte)));
                    for (group, ((values, codes), &factor)) in groups.zip(factors).enumerate() {
                        encode(values, factor, row * columns + group * group_columns, codes);
                    }
                }
            }
        }));
        codes
    }
}
