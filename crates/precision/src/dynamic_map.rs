//! bitsandbytes' 8-bit dynamic maps: 256 sorted values in [-1, 1] (signed) or [0, 1] (unsigned), finer towards zero.
//!
//! The map of `create_dynamic_map` in bitsandbytes/functional.py. For each decade from 1e-6 to 1, the range from 0.1 to
//! 1 is divided into equal parts, twice as many as in the decade below. The midpoints of the parts, times the decade, are
//! the values (with both signs if the map is signed), and 0 and 1 are added. The values are bit-identical to those of
//! PyTorch 2.15 with AVX2 or AVX-512, whose `linspace` rounds once per value (fused multiply-add). PyTorch without AVX2
//! rounds twice, and some values differ in the last bit.
//!
//! Not supported: other bit widths than 8.

use std::sync::LazyLock;

/// Decades of the map: 1e-6 up to 1.
const DECADES: usize = 7;

/// Leading bits of a number that identify its cell: sign, exponent and 7 bits of the mantissa, so that no cell has numbers of three codes.
const CELL_BITS: u32 = 16;

/// A sorted table of 256 values, with the decision points between them.
#[derive(Debug, Clone, PartialEq)]
pub struct DynamicMap {
    values: [f32; 256],
    midpoints: [f32; 255],
    /// The lowest number of each code from 1 on, followed by NaN, which no number reaches.
    starts: [f32; 256],
    /// For each cell, the code of its lowest number.
    lowest: Box<[u8; 1 << CELL_BITS]>,
}

static SIGNED: LazyLock<DynamicMap> = LazyLock::new(|| DynamicMap::new(true));
static UNSIGNED: LazyLock<DynamicMap> = LazyLock::new(|| DynamicMap::new(false));

impl DynamicMap {
    /// Returns the map of signed quantities: the first moment, and the block scales of NF4.
    pub fn signed() -> &'static Self {
        &SIGNED
    }

    /// Returns the map of nonnegative quantities: the second moment.
    pub fn unsigned() -> &'static Self {
        &UNSIGNED
    }

    fn new(signed: bool) -> Self {
        let mut values = vec![0.0, 1.0];
        for decade in 0..DECADES {
            // The signed map spends half of its codes on the sign.
            let parts = 1 << if signed { decade } else { decade + 1 };
            let scale = 10_f64.powi(decade as i32 - (DECADES as i32 - 1)) as f32;
            for part in 0..parts {
                let value = scale * ((boundary(part, parts) + boundary(part + 1, parts)) / 2.0);
                values.push(value);
                if signed {
                    values.push(-value);
                }
            }
        }
        values.sort_by(f32::total_cmp);
        let values: [f32; 256] = values.try_into().expect("the parts of all decades, 0 and 1 make 256");
        let midpoints: [f32; 255] = midpoints(&values);
        let mut starts = [f32::NAN; 256];
        for (code, &midpoint) in midpoints.iter().enumerate() {
            // A tie goes to the even code of `code` and `code + 1`.
            starts[code] = if code % 2 == 1 { midpoint } else { midpoint.next_up() };
        }
        let code = |cell| starts.partition_point(|&start| start <= cell_ends(cell)[0]) as u8;
        let lowest: Box<[u8]> = (0..=u16::MAX).map(code).collect();
        Self { values, midpoints, starts, lowest: lowest.try_into().expect("a code for each cell") }
    }

    /// Returns the 256 values, ascending.
    #[inline]
    pub fn values(&self) -> &[f32; 256] {
        &self.values
    }

    /// Returns the 255 decision points between neighbors, ascending, each rounded to f32.
    pub fn midpoints(&self) -> &[f32; 255] {
        &self.midpoints
    }

    /// Returns the code of the value nearest to `x`. A tie goes to the even code, as in bitsandbytes' CUDA kernels (whose search ends on an even code
    /// and leaves it only for a strictly nearer neighbor). Values outside the map get its first or last code, NaN gets code 0.
    #[inline]
    pub fn nearest(&self, x: f32) -> u8 {
        // This compiles to one instruction, unlike `max`. NaN becomes -1 too.
        let x = if x > -1.0 { x } else { -1.0 };
        let lowest = self.lowest[usize::from(cell_of(x))];
        lowest + u8::from(self.starts[usize::from(lowest)] <= x)
    }
}

#[inline]
fn cell_of(x: f32) -> u16 {
    (x.to_bits() >> (u32::BITS - CELL_BITS)) as u16
}

fn cell_ends(cell: u16) -> [f32; 2] {
    let first = u32::from(cell) << (u32::BITS - CELL_BITS);
    let [near, far] = [first, first | (u32::MAX >> CELL_BITS)].map(f32::from_bits);
    if near.is_sign_negative() { [far, near] } else { [near, far] }
}

/// Returns boundary `index` of the range from 0.1 to 1 divided into `parts`, computed from the nearer end with one rounding.
fn boundary(index: usize, parts: usize) -> f32 {
    let (start, end) = (0.1_f32, 1.0_f32);
    let step = (end - start) / parts as f32;
    if index < parts.div_ceil(2) {
        step.mul_add(index as f32, start)
    } else {
        (-step).mul_add((parts - index) as f32, end)
    }
}

/// Computes the midpoints between neighbors of a sorted table: their sum, rounded to f32, then halved.
pub const fn midpoints<const VALUES: usize, const MIDPOINTS: usize>(values: &[f32; VALUES]) -> [f32; MIDPOINTS] {
    const { assert!(MIDPOINTS + 1 == VALUES, "one midpoint between two neighbors") };
    let mut midpoints = [0.0; MIDPOINTS];
    let mut index = 0;
    while index < MIDPOINTS {
        midpoints[index] = (values[index] + values[index + 1]) / 2.0;
        index += 1;
    }
    midpoints
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_values::Draws;

    /// Finds the nearest code by comparing with all midpoints: few assumptions, slow.
    fn nearest_by_midpoints(map: &DynamicMap, x: f32) -> u8 {
        let below = map.midpoints().iter().filter(|&&midpoint| midpoint < x).count();
        let at = map.midpoints().iter().position(|&midpoint| midpoint == x);
        at.map_or(below as u8, |tie| (tie + tie % 2) as u8)
    }

    #[test]
    fn no_cell_has_numbers_of_three_codes() {
        for map in [DynamicMap::signed(), DynamicMap::unsigned()] {
            for cell in 0..=u16::MAX {
                let [low, high] = cell_ends(cell).map(|x| nearest_by_midpoints(map, x));
                assert!(high.saturating_sub(low) <= 1, "{:?} have codes {low} and {high}", cell_ends(cell));
            }
        }
    }

    #[test]
    fn codes_equal_counting_all_midpoints() {
        let mut draws = Draws(3);
        for map in [DynamicMap::signed(), DynamicMap::unsigned()] {
            for _ in 0..20_000 {
                let x = draws.uniform() * 10_f32.powi(-(draws.below(8) as i32)) * 1.1;
                assert_eq!(map.nearest(x), nearest_by_midpoints(map, x), "{x:e}");
            }
            // One number of each cell, and NaN among them.
            for x in (0..=u32::MAX).step_by((1 << CELL_BITS) + 1).map(f32::from_bits) {
                assert_eq!(map.nearest(x), nearest_by_midpoints(map, x), "{x:e}");
            }
            for &midpoint in map.midpoints() {
                for x in [midpoint.next_down(), midpoint, midpoint.next_up()] {
                    assert_eq!(map.nearest(x), nearest_by_midpoints(map, x), "{x:e}");
                }
            }
        }
    }

    #[test]
    fn values_out_of_range_get_the_end_and_nan_gets_code_zero() {
        let map = DynamicMap::signed();
        let codes = [f32::INFINITY, 2.0, f32::NEG_INFINITY, -2.0, f32::NAN].map(|x| map.nearest(x));
        assert_eq!(codes, [255, 255, 0, 0, 0]);
    }
}
