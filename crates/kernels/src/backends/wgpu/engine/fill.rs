//! Filling and copies of memory. Kernel: `fill.wgsl`.

use burn_tensor::TensorMetadata;

use super::Engine;
use super::launch::{Operand, in_a_row};
use super::program::Kernel;
use super::tensor::{Matrix, Primitive};
use super::trace::Cost;

impl Engine {
    pub(super) fn fill(&self, tensor: &Primitive, word: u32) {
        let count = (tensor.shape().num_elements() * tensor.dtype.size()).div_ceil(4);
        let matrix = Matrix { rows: 1, width: count, stride: count, offset: 0, tensor: tensor.clone() };
        let kernel = Kernel { name: "fill", template: include_str!("fill.wgsl"), constants: vec![("COPY", 0)] };
        let operands = [Operand::Write(&matrix)];
        self.launch(&kernel, &operands, &[count as u32, word], in_a_row(count.div_ceil(256)), Cost::default());
    }

    pub(crate) fn zeros(&self, rows: usize, width: usize) -> Matrix {
        let zeros = self.empty_matrix(rows, width);
        self.fill(&zeros.tensor, 0);
        zeros
    }

    /// Returns the tensor itself if no other has its memory, so that a launch may write there; else a copy. It must be without gaps.
    pub(crate) fn owned(&self, tensor: Primitive) -> Matrix {
        let given = self.values_of(tensor);
        if self.is_unshared(&given.tensor) {
            return given;
        }
        let new = self.values_of(self.empty(given.tensor.shape(), given.tensor.dtype));
        let kernel = Kernel { name: "copy", template: include_str!("fill.wgsl"), constants: vec![("COPY", 1)] };
        let operands = [Operand::Read(&given), Operand::Write(&new)];
        let count = new.count() * new.dtype().size() / 4;
        let at = given.offset * new.dtype().size() / 4;
        let cost = Cost { bytes: 2.0 * new.bytes(), flops: 0.0 };
        self.launch(&kernel, &operands, &[count as u32, at as u32], in_a_row(count.div_ceil(256)), cost);
        new
    }
}
