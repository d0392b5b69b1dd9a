//! Tensors on the host: what a file says of one, its bytes, or its values in f32.

use safetensors::Dtype;

/// Number format and shape of a stored tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Number format of the elements.
    pub dtype: Dtype,
    /// Rows first, as in PyTorch.
    pub shape: Vec<usize>,
}

impl TensorInfo {
    /// Returns the bytes that the tensor takes in a file.
    pub fn byte_len(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.bitsize() / 8
    }
}

/// A tensor as stored: little-endian bytes, row by row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorBytes {
    /// Number format of the elements.
    pub dtype: Dtype,
    /// Rows first, as in PyTorch.
    pub shape: Vec<usize>,
    /// `shape`'s elements, row by row.
    pub bytes: Vec<u8>,
}

/// A tensor in f32 on the host, row by row.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorF32 {
    /// Rows first, as in PyTorch.
    pub shape: Vec<usize>,
    /// The elements; as many as the product of `shape`.
    pub values: Vec<f32>,
}
