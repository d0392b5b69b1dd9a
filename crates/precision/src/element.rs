//! The formats whose codes a GEMM multiplies, each with a scale per group: E4M3, E5M2 and E2M1.
//!
//! Trade-off: an enum of its own next to [`FloatFormat`], so that a matrix of bf16 or of scales with scales cannot be
//! written down.

use std::fmt;

use crate::float::FloatFormat;

/// The format of the elements of a scaled matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ElementFormat {
    /// 8 bits, up to 448, 3 mantissa bits.
    E4m3,
    /// 8 bits, up to 57,344, 2 mantissa bits.
    E5m2,
    /// 4 bits, up to 6, 1 mantissa bit. Two codes per byte, the earlier one in the LOW nibble, as the hardware reads them
    /// (NF4 has it in the high nibble).
    E2m1,
}

impl ElementFormat {
    /// All element formats.
    pub const ALL: [Self; 3] = [Self::E4m3, Self::E5m2, Self::E2m1];

    /// The format, with its limits and codec.
    pub const fn format(self) -> FloatFormat {
        match self {
            Self::E4m3 => FloatFormat::E4m3,
            Self::E5m2 => FloatFormat::E5m2,
            Self::E2m1 => FloatFormat::E2m1,
        }
    }

    /// Bits per value: 8 or 4.
    pub const fn bits(self) -> usize {
        self.format().bits() as usize
    }

    /// Half the distance between two neighboring normal numbers, relative to the smaller one, at most: 2^-4, 2^-3, 2^-2.
    pub const fn relative_error(self) -> f32 {
        1.0 / (2 << self.format().mantissa_bits()) as f32
    }
}

impl fmt::Display for ElementFormat {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.format().name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn relative_errors_are_half_a_unit_in_the_last_place() {
        assert_eq!(ElementFormat::ALL.map(ElementFormat::relative_error), [0.0625, 0.125, 0.25]);
        for element in ElementFormat::ALL {
            let (format, table) = (element.format(), element.format().table());
            let numbers = table.iter().take_while(|value| **value <= format.max()).collect::<Vec<_>>();
            let normal = numbers.windows(2).filter(|pair| *pair[0] >= format.min_normal() && *pair[0] < *pair[1]);
            let worst = normal.map(|pair| (pair[1] - pair[0]) / pair[0] / 2.0).fold(0.0, f32::max);
            assert_eq!(worst, element.relative_error(), "{element}");
        }
    }
}
