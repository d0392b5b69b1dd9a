//! The floating-point formats whose codes take at most 8 bits: E4M3, E2M1, and the scale formats E8M0 and UE4M3.
//! This file defines the value of each code; `rounding.rs` defines the code of each value.
//!
//! | format | sign, exponent, mantissa bits | bias | largest | smallest normal | smallest | beyond the largest |
//! |---|---|---:|---:|---:|---:|---|
//! | E4M3 ("fn") | 1, 4, 3 | 7 | 448 | 2^-6 | 2^-9 | NaN (0x7F, 0xFF); no infinity |
//! | E2M1 | 1, 2, 1 | 1 | 6 | 1 | 0.5 | nothing: neither infinity nor NaN |
//! | E8M0 | 0, 8, 0 | 127 | 2^127 | 2^-127 | 2^-127 | NaN (0xFF); no zero, no sign |
//! | UE4M3 | 0, 4, 3 | 7 | 448 | 2^-6 | 2^-9 | NaN (0x7F); no sign |
//!
//! E2M1 has one mantissa bit: ±{0, 0.5, 1, 1.5, 2, 3, 4, 6}. (Some texts say two. Four bits are a sign, two of exponent
//! and one of mantissa.)
//!
//! Sources: OCP 8-bit Floating Point Specification 1.0 (E4M3), OCP Microscaling Formats 1.0 (E2M1, E8M0), and
//! NVIDIA's PTX (UE4M3).
//!
//! Trade-off: the formats are one enum, so that one loop can test and document all of them. Hot loops call the functions
//! of `rounding.rs` with a constant format, and the compiler removes the branches.

use std::fmt;

use crate::e8m0::{self, power_of_two};

/// A floating-point format whose codes take at most 8 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum NarrowFloat {
    /// OCP E4M3 ("fn": finite and NaN only): weights, activations.
    E4m3,
    /// OCP E2M1: 4 bits.
    E2m1,
    /// OCP E8M0: a power of two, the scale of 32 values in MXFP8 and MXFP4.
    E8m0,
    /// E4M3 without sign: the scale of 16 values in NVFP4.
    Ue4m3,
}

/// The bit fields of a format with a sign or at least a mantissa, that is, of all but E8M0.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Fields {
    pub(crate) exponent_bits: u32,
    pub(crate) mantissa_bits: u32,
    pub(crate) bias: u32,
    pub(crate) signed: bool,
    /// Whether the code with all bits set is a NaN; otherwise every code is a number.
    pub(crate) has_nan: bool,
}

impl Fields {
    const fn new(exponent_bits: u32, mantissa_bits: u32, bias: u32, signed: bool, has_nan: bool) -> Self {
        Self { exponent_bits, mantissa_bits, bias, signed, has_nan }
    }

    pub(crate) const E4M3: Self = Self::new(4, 3, 7, true, true);
    pub(crate) const E2M1: Self = Self::new(2, 1, 1, true, false);
    pub(crate) const UE4M3: Self = Self::new(4, 3, 7, false, true);

    /// Returns all bits but the sign.
    pub(crate) const fn magnitude_mask(self) -> u32 {
        (1 << (self.exponent_bits + self.mantissa_bits)) - 1
    }

    /// Returns the sign bit; 0 if there is none.
    pub(crate) const fn sign_mask(self) -> u32 {
        if self.signed { self.magnitude_mask() + 1 } else { 0 }
    }

    /// Returns the code of the largest finite number.
    pub(crate) const fn largest_code(self) -> u32 {
        self.magnitude_mask() - self.has_nan as u32
    }

    const fn decode(self, code: u32) -> f32 {
        let magnitude = code & self.magnitude_mask();
        let negative = code & self.sign_mask() != 0;
        let value = if magnitude > self.largest_code() {
            f32::NAN
        } else if magnitude >> self.mantissa_bits == 0 {
            // A multiple of the smallest number is exact, since both factors have few bits.
            magnitude as f32 * power_of_two(1 - self.bias as i32 - self.mantissa_bits as i32)
        } else {
            f32::from_bits((magnitude << (23 - self.mantissa_bits)) + ((127 - self.bias) << 23))
        };
        if negative { -value } else { value }
    }
}

impl NarrowFloat {
    /// All formats, in the order of their declaration.
    pub const ALL: [Self; 4] = [Self::E4m3, Self::E2m1, Self::E8m0, Self::Ue4m3];

    /// Returns the bit fields; `None` for E8M0, which has no sign, zero or mantissa and different rounding rules.
    pub(crate) const fn fields(self) -> Option<Fields> {
        match self {
            Self::E4m3 => Some(Fields::E4M3),
            Self::E2m1 => Some(Fields::E2M1),
            Self::Ue4m3 => Some(Fields::UE4M3),
            Self::E8m0 => None,
        }
    }

    /// Returns the name in text: `e4m3`, `e2m1`, `e8m0`, `ue4m3`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::E4m3 => "e4m3",
            Self::E2m1 => "e2m1",
            Self::E8m0 => "e8m0",
            Self::Ue4m3 => "ue4m3",
        }
    }

    /// Returns the number of codes: 16, 128 or 256. Codes are the numbers below it.
    pub const fn codes(self) -> u32 {
        match self.fields() {
            Some(fields) => (fields.magnitude_mask() + 1) << fields.signed as u32,
            None => e8m0::CODES,
        }
    }

    /// Returns the exact value of a code. NaN codes give a NaN; bits above those of the format are ignored.
    pub const fn decode(self, code: u8) -> f32 {
        match self.fields() {
            Some(fields) => fields.decode(code as u32),
            None => e8m0::decode(code),
        }
    }

    /// Returns the largest finite number.
    pub const fn max(self) -> f32 {
        match self.fields() {
            Some(fields) => fields.decode(fields.largest_code()),
            None => e8m0::MAX,
        }
    }

    /// Returns the values of its codes.
    pub(crate) const fn levels(self) -> &'static [f32] {
        TABLES[self as usize].split_at(self.codes() as usize).0
    }

    /// Returns the values by code. The table is repeated beyond the codes of the format.
    pub const fn table(self) -> [f32; 256] {
        let mut table = [0.0; 256];
        let mut code = 0;
        while code < 256 {
            table[code] = self.decode(code as u8);
            code += 1;
        }
        table
    }
}

static TABLES: [[f32; 256]; NarrowFloat::ALL.len()] = {
    let mut tables = [[0.0; 256]; NarrowFloat::ALL.len()];
    let mut index = 0;
    while index < tables.len() {
        tables[index] = NarrowFloat::ALL[index].table();
        index += 1;
    }
    tables
};

impl fmt::Display for NarrowFloat {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.name())
    }
}
