//! Tensors of bytes as kernels copy them box by box to shared memory (Hopper's tensor memory accelerator).
//!
//! A kernel takes a map as a `__grid_constant__` parameter. Boxes have rows of 128 bytes, whose 16-byte chunks are swizzled as the matrix units
//! read them without conflicts, and zeros where they reach beyond the tensor.
//! Trade-off: bytes alone, rows of 128 bytes, at most three dimensions.

use std::ffi::c_void;
use std::ptr;

use bytemuck::NoUninit;

use crate::context::Context;
use crate::error::CudaError;

/// Bytes of a row of a box.
const BOX_ROW: u32 = 128;

/// The driver's description of a tensor: `CUtensorMap`.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, NoUninit)]
pub struct TensorMap([u64; 16]);

/// Where the driver writes one: arguments of launches are copied, so only this has its alignment.
#[repr(C, align(64))]
struct EncodedMap(TensorMap);

/// Matrices of bytes in device memory, one after the other, and the rows of a matrix that one copy takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ByteMatrices {
    /// The first byte, on the 16-byte grid.
    pub address: u64,
    /// Number of matrices.
    pub matrices: usize,
    /// Rows of a matrix.
    pub rows: usize,
    /// Bytes of a row.
    pub width: usize,
    /// Bytes from one row to the next, and from one matrix to the next: multiples of 16.
    pub strides: [usize; 2],
    /// Rows of a box, at most 256.
    pub box_rows: u32,
}

impl Context {
    /// Describes matrices for copies of boxes of 128 bytes of so many rows. A kernel names a box by its first byte, row and matrix.
    ///
    /// # Errors
    /// The driver's, where an address, stride or size is none that it takes.
    pub fn tensor_map(&self, of: ByteMatrices) -> Result<TensorMap, CudaError> {
        // Bytes; no interleaving; swizzled by 128 bytes; reads fill 128 bytes of the level 2 cache; zeros beyond the tensor.
        let [bytes, plain, swizzled, fill, zeros] = [0, 0, 3, 2, 0];
        let sizes = [of.width, of.rows, of.matrices].map(|size| size as u64);
        let (strides, boxes) = (of.strides.map(|stride| stride as u64), [BOX_ROW, of.box_rows, 1]);
        let address = ptr::without_provenance_mut::<c_void>(of.address as usize);
        let mut map = EncodedMap(TensorMap([0; 16]));
        let driver = self.driver();
        let encode = || {
            // SAFETY: the function's declaration is that of cuda.h; the arrays have three sizes, two strides, three extents and steps of a box. It
            // stores the address and does not read it.
            let status = unsafe {
                (driver.encode_tiled())(
                    ptr::from_mut(&mut map).cast(),
                    bytes,
                    3,
                    address,
                    sizes.as_ptr(),
                    strides.as_ptr(),
                    boxes.as_ptr(),
                    [1, 1, 1].as_ptr(),
                    plain,
                    swizzled,
                    fill,
                    zeros,
                )
            };
            driver.status("cuTensorMapEncodeTiled", status)
        };
        self.with_current(encode)?;
        Ok(map.0)
    }
}
