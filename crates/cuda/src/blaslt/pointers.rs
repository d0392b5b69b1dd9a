//! The device addresses of one GEMM, and their alignment.

use super::matmul::{Matmul, Scaling};
use crate::error::CudaError;

/// The device addresses of one call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Pointers {
    /// A, as stored.
    pub a: u64,
    /// B, as stored.
    pub b: u64,
    /// C: may be D itself. Not read if beta is 0, and may then be 0.
    pub c: u64,
    /// D: `m` rows, `c_leading` elements apart.
    pub d: u64,
    /// The bias, `n` elements; 0 without one. Any beta may be combined with a bias.
    pub bias: u64,
    /// Scales of A, in the layout of [`Scaling`]; 0 without.
    pub a_scale: u64,
    /// Scales of B, in the layout of [`Scaling`]; 0 without.
    pub b_scale: u64,
}

impl Pointers {
    /// Creates pointers to the four matrices, without bias and scales.
    pub const fn new(a: u64, b: u64, c: u64, d: u64) -> Self {
        Self { a, b, c, d, bias: 0, a_scale: 0, b_scale: 0 }
    }

    /// Sets C to D if C is not read, because the library checks the pointer even then.
    pub(super) fn completed(mut self, beta: f32) -> Self {
        if beta == 0.0 {
            self.c = self.d;
        }
        self
    }

    /// Rejects null and misaligned addresses, which would cause a fault on the device or in the library.
    pub(super) fn check(&self, matmul: &Matmul) -> Result<(), CudaError> {
        let output = matmul.output.bytes();
        let scaled = matmul.scaling != Scaling::None;
        let all = [
            ("A", self.a, matmul.a.element.bytes(), true),
            ("B", self.b, matmul.b.element.bytes(), true),
            ("C", self.c, output, true),
            ("D", self.d, output, true),
            ("the bias", self.bias, output, matmul.bias),
            ("the scale of A", self.a_scale, matmul.scaling.address_multiple(), scaled),
            ("the scale of B", self.b_scale, matmul.scaling.address_multiple(), scaled),
        ];
        let wrong = |&(_, address, bytes, used): &(_, u64, usize, bool)| {
            used && (address == 0 || !address.is_multiple_of(bytes as u64))
        };
        match all.into_iter().find(wrong) {
            None => Ok(()),
            Some((name, address, bytes, _)) => Err(CudaError::InvalidMatmul {
                requested: matmul.to_string(),
                reason: format!("{name} is at address {address:#x}, expected a non-null multiple of {bytes} bytes"),
            }),
        }
    }
}

/// The alignment of the addresses of a call: for each, the largest power of two, up to 256, that divides it. Kernels with wide
/// loads need 16 bytes. cuBLASLt assumes 256 unless told otherwise, and fails or faults with less.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Alignment {
    pub(super) a: u16,
    pub(super) b: u16,
    pub(super) c: u16,
    pub(super) d: u16,
    /// Alignment of the bias, in bytes; 256 without one.
    pub(super) bias: u16,
}

impl Alignment {
    /// The alignment of fresh allocations.
    #[cfg(test)]
    pub(super) const BEST: Self = Self { a: 256, b: 256, c: 256, d: 256, bias: 256 };

    pub(super) fn of(pointers: &Pointers) -> Self {
        // For 0, which means none, this is 256.
        let of = |address: u64| 1 << address.trailing_zeros().min(8);
        Self { a: of(pointers.a), b: of(pointers.b), c: of(pointers.c), d: of(pointers.d), bias: of(pointers.bias) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::blaslt::matmul::ElementType::{Bf16, F32};

    #[test]
    fn alignment_is_a_power_of_two_up_to_256() {
        let pointers = Pointers::new(0x7000_0000_0100, 0x7000_0000_0010, 0x7000_0000_0006, 1 << 40);
        assert_eq!(Alignment::of(&pointers), Alignment { b: 16, c: 2, ..Alignment::BEST });
    }

    #[test]
    fn bad_addresses_are_refused_only_if_used() {
        let matmul = Matmul::dense([4, 6, 8], Bf16, [false, false], F32);
        let good = Pointers::new(256, 258, 0, 512).completed(0.0);
        assert_eq!(good.c, 512);
        assert_eq!(good.check(&matmul), Ok(()));
        assert!(Pointers::new(256, 258, 0, 512).completed(1.0).check(&matmul).is_err(), "C is read when beta is 1");
        assert!(Pointers { a: 257, ..good }.check(&matmul).is_err());
        assert!(Pointers { d: 514, ..good }.check(&matmul).is_err(), "f32 at an odd multiple of two");
        let with_bias = Matmul { bias: true, ..matmul };
        assert!(good.check(&with_bias).is_err());
        assert_eq!(Pointers { bias: 1024, ..good }.check(&with_bias), Ok(()));
        let added = Pointers { bias: 1024, ..Pointers::new(256, 258, 768, 512) }.completed(1.0);
        assert_eq!((added.c, added.check(&with_bias)), (768, Ok(())), "a bias and C together");
    }
}
