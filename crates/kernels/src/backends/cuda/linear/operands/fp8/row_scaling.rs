//! Where the scales of 8-bit rows get into a product, by the generation of the card; `scaling.rs` does it.
//! Trade-off: by compute capability alone; whether a library does it right is what the self-test of a run in 8-bit floats finds out.

/// How a device multiplies rows of codes that have a scale each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowScaling {
    /// The GEMM reads an f32 per row.
    InGemm {
        /// Whether they are powers of two nevertheless, as [`RowScaling::InBlocks`] needs them: for tests on cards without blocks.
        powers_of_two: bool,
    },
    /// The GEMM reads a power of two for each 32 codes.
    InBlocks,
    /// A pass over the result multiplies by the scales.
    Afterwards,
}

impl RowScaling {
    /// What a device of this compute capability does, if it has 8-bit floats.
    pub(crate) fn of((major, _): (u32, u32)) -> Self {
        match major {
            9 => Self::InGemm { powers_of_two: false },
            0..9 => Self::Afterwards,
            _ => Self::InBlocks,
        }
    }

    /// Whether the scales of rows are powers of two.
    pub(super) fn has_powers_of_two(self) -> bool {
        matches!(self, Self::InGemm { powers_of_two: true } | Self::InBlocks)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_go_where_each_generation_of_cards_takes_them() {
        let of = RowScaling::of;
        assert_eq!([of((8, 9)), of((9, 0))], [RowScaling::Afterwards, RowScaling::InGemm { powers_of_two: false }]);
        assert_eq!([of((10, 0)), of((10, 3)), of((12, 0))], [RowScaling::InBlocks; 3]);
        assert!(of((12, 0)).has_powers_of_two() && !of((9, 0)).has_powers_of_two());
    }
}
