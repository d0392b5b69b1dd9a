//! Weight matrices as the linear ops see them: dense, or 4-bit NF4; and the LoRA pair beside them.
//!
//! Weights stay as stored on disk, `[out, in]`. An NF4 weight is what bitsandbytes packs, byte for byte, laid out on the
//! device as each backend likes it: two codes a byte where the backend stores bytes, eight codes a word elsewhere.

use burn_tensor::{DType, Int, Tensor, backend::Backend};

/// A weight matrix `[out, in]` that is read, not trained, by the op it is handed to.
#[derive(Clone, Debug)]
pub enum Weight<B: Backend> {
    /// Values as they are.
    Dense(Tensor<B, 2>),
    /// 4-bit NormalFloat codes with block scales.
    Nf4(Nf4Weight<B>),
}

impl<B: Backend> Weight<B> {
    /// `[out, in]`.
    pub fn shape(&self) -> [usize; 2] {
        match self {
            Self::Dense(weight) => weight.dims(),
            Self::Nf4(weight) => weight.shape,
        }
    }

    /// Bytes this weight holds on the device.
    pub fn bytes(&self) -> usize {
        match self {
            Self::Dense(weight) => weight.shape().num_elements() * weight.dtype().size(),
            Self::Nf4(weight) => weight.bytes(),
        }
    }
}

/// An NF4 weight on the device (Dettmers et al., QLoRA, 2023; layout of bitsandbytes, block size 64).
#[derive(Clone, Debug)]
pub struct Nf4Weight<B: Backend> {
    /// Codes, high nibble first, padded to whole blocks with the code of zero. `[bytes]` u8, or `[words]` i32
    /// of eight codes each where the backend has no bytes.
    pub codes: Tensor<B, 1, Int>,
    /// Block scales.
    pub absmax: Nf4Absmax<B>,
    /// What codes are looked up in: the two values of each byte, `[256, 2]` f32, or the 16 levels `[16, 1]` where words are
    /// unpacked by an own kernel.
    pub table: Tensor<B, 2>,
    /// `[out, in]`.
    pub shape: [usize; 2],
    /// Values per block.
    pub block_size: usize,
}

/// Block scales of an NF4 weight: one f32 a block, or (double quantisation) one 8-bit code a block.
#[derive(Clone, Debug)]
pub enum Nf4Absmax<B: Backend> {
    /// `[blocks]` f32.
    Float(Tensor<B, 1>),
    /// Quantised to the 8-bit dynamic map in nested blocks of 256, around an offset (the mean).
    Nested {
        /// `[nested blocks * 256]` codes.
        codes: Tensor<B, 1, Int>,
        /// `[nested blocks]` f32.
        absmax: Tensor<B, 1>,
        /// The dynamic map, `[256]` f32.
        map: Tensor<B, 1>,
        /// Added to every decoded scale, `[1]` f32.
        offset: Tensor<B, 1>,
        /// Number of blocks (the codes are padded to whole nested blocks).
        blocks: usize,
    },
}

impl<B: Backend> Nf4Weight<B> {
    /// Number of scale blocks.
    pub fn blocks(&self) -> usize {
        (self.shape[0] * self.shape[1]).div_ceil(self.block_size)
    }

    /// Bytes held on the device, the shared tables left out.
    pub fn bytes(&self) -> usize {
        let stored = |elements: usize, dtype: DType| elements * dtype.size();
        let codes = stored(self.codes.shape().num_elements(), self.codes.dtype());
        codes
            + match &self.absmax {
                Nf4Absmax::Float(absmax) => stored(absmax.shape().num_elements(), absmax.dtype()),
                Nf4Absmax::Nested { codes, absmax, .. } => {
                    stored(codes.shape().num_elements(), codes.dtype())
                        + stored(absmax.shape().num_elements(), absmax.dtype())
                }
            }
    }
}

/// The low-rank pair of a linear layer: `y += scale * (x Aᵀ) Bᵀ` (Hu et al., LoRA, 2021).
#[derive(Clone, Debug)]
pub struct LoraPair<B: Backend> {
    /// `[r, in]`.
    pub a: Tensor<B, 2>,
    /// `[out, r]`.
    pub b: Tensor<B, 2>,
    /// `alpha / r`, or `alpha / sqrt(r)` for rank-stabilised LoRA.
    pub scale: f64,
}
