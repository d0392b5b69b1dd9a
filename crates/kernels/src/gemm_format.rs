//! [`GemmFormat`] names what GEMMs multiply.

use firebrick_precision::FloatType;
use serde::{Deserialize, Serialize};

/// Operand format of a group's weight GEMMs, in the forward and for the input gradient. GEMMs accumulate in f32 and return the compute format.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum GemmFormat {
    /// Both operands in the compute format.
    #[default]
    Compute,
    /// Both operands in E4M3, with one scale per row of weights, activations and gradients.
    Fp8,
    /// Both operands in float16, activations and gradients divided by a power of two each: matrix units of GPUs on wgpu, where the compute format is
    /// f32. So do attention and the head. Groups without kernels there multiply in f32.
    F16,
}

impl GemmFormat {
    /// Returns the format of frozen weights that are not quantized, where activations have this one.
    pub fn of_frozen(self, compute: FloatType) -> FloatType {
        if self == Self::F16 { FloatType::F16 } else { compute }
    }
}
