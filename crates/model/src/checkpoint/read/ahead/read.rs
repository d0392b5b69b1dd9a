//! The work of one reader: a piece of an unquantized tensor, or a whole quantized weight, is read, converted, checked and hashed.

use std::ops::Range;

use burn_tensor::DType;
use firebrick_kernels::{HostBuffer, padded_codes};
use firebrick_precision::{HostScales, QuantFormat};
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use crate::checkpoint::quantized::QuantizedWeight;
use crate::checkpoint::read::{Holder, convert};
use crate::error::ModelError;

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Request {
    /// Its name in the folder.
    pub(crate) name: String,
    /// Its shape by config.json.
    pub(crate) shape: Vec<usize>,
    /// F32, BF16 or F16; `None`: as it is stored, or F32 for a quantized weight.
    pub(crate) dtype: Option<DType>,
    /// The format in which the codes of a quantized weight are kept, if that is how the folder stores it.
    pub(crate) format: Option<QuantFormat>,
}

/// Allocates the buffers that a device copies from fastest.
pub(super) type Allocate<'a> = &'a (dyn Fn(usize) -> HostBuffer + Sync);

/// A tensor to be read, and the format it is converted to.
pub(super) struct Job<'a> {
    pub(super) name: &'a str,
    pub(super) holder: &'a Holder,
    pub(super) shape: &'a [usize],
    pub(super) dtype: DType,
    /// The format in which codes are kept.
    pub(super) keeps: Option<QuantFormat>,
    /// Its pieces among those of all tensors.
    pub(super) pieces: Range<usize>,
}

/// A part of a tensor that one reader reads: these bytes, elements from `first` on. A quantized weight is one piece.
pub(super) struct Piece {
    pub(super) job: usize,
    pub(super) first: usize,
    pub(super) bytes: usize,
}

pub(super) struct Ready {
    /// Elements, or codes that are padded to whole blocks with the codes of zero.
    pub(super) buffer: HostBuffer,
    pub(super) scales: Option<HostScales>,
    /// XXH3 of the elements in their format, or of codes and scales.
    pub(super) hash: u64,
}

impl Job<'_> {
    fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Splits the tensor into pieces that readers claim; `index` is this job's.
    pub(super) fn pieces(&self, index: usize, piece_bytes: usize) -> impl Iterator<Item = Piece> {
        let (all, size) = (self.elements(), self.dtype.size());
        let kept_bytes = self.keeps.map(|format| format.bytes(self.shape));
        let per_piece = match self.holder {
            Holder::Plain(_) => (piece_bytes / size).max(1),
            Holder::OfExpert(_) | Holder::Quantized(_) => all.max(1),
        };
        // A tensor without elements is one piece, too.
        (0..all.max(1)).step_by(per_piece).map(move |first| Piece {
            job: index,
            first,
            bytes: kept_bytes.unwrap_or(per_piece.min(all - first) * size),
        })
    }

    /// Builds the error for a block whose scale is not finite, or a value outside the requested format.
    fn not_finite(&self, weight: &QuantizedWeight, index: usize, value: f32) -> ModelError {
        convert::not_finite(self.name, weight.path(), index, value, &format!("{:?}", self.dtype))
    }

    /// Reads a piece of this tensor into a buffer from `allocate`.
    pub(super) fn read(&self, piece: &Piece, allocate: Allocate<'_>) -> Result<Ready, ModelError> {
        match self.holder {
            Holder::Plain(shard) => {
                let mut buffer = new_buffer(allocate, piece.bytes);
                let hash = shard.read_elements(self.name, piece.first, self.dtype, &mut buffer)?;
                Ok(Ready { buffer, scales: None, hash })
            }
            Holder::OfExpert(slice) => {
                let mut buffer = new_buffer(allocate, piece.bytes);
                let hash = slice.read_elements(self.dtype, &mut buffer)?;
                Ok(Ready { buffer, scales: None, hash })
            }
            Holder::Quantized(weight) => {
                let codes = match self.keeps {
                    Some(format) => self.read_codes(format, weight, allocate)?,
                    None => None,
                };
                codes.map_or_else(|| self.read_dequantized(weight, allocate), Ok)
            }
        }
    }

    /// Reads the codes and scales; `None` if they are not those of the format.
    fn read_codes(
        &self,
        format: QuantFormat,
        weight: &QuantizedWeight,
        allocate: Allocate<'_>,
    ) -> Result<Option<Ready>, ModelError> {
        let (bytes, fill) = padded_codes(format, self.shape);
        let mut buffer = new_buffer(allocate, bytes);
        let (codes, padding) = buffer.split_at_mut(weight.code_bytes());
        padding.fill(fill);
        let Some(block) = weight.read_codes(codes)? else { return Ok(None) };
        let scales = block.values();
        if let Some(index) = scales.iter().position(|scale| !scale.is_finite()) {
            let first = index * format.block_size(self.shape[1]);
            return Err(self.not_finite(weight, first, scales[index]));
        }
        let mut hash = Xxh3::new();
        hash.update(codes);
        hash.update(&scales.iter().flat_map(|scale| scale.to_le_bytes()).collect::<Vec<_>>());
        Ok(Some(Ready { hash: hash.digest(), buffer, scales: Some(HostScales { block }) }))
    }

    /// Reads a quantized weight in the format of the request.
    fn read_dequantized(&self, weight: &QuantizedWeight, allocate: Allocate<'_>) -> Result<Ready, ModelError> {
        let values = weight.values()?;
        let bytes: &[u8] = bytemuck::cast_slice(&values);
        let mut buffer = new_buffer(allocate, self.elements() * self.dtype.size());
        match self.dtype {
            DType::F32 => buffer.copy_from_slice(bytes),
            dtype => convert::convert(DType::F32, bytes, dtype, &mut buffer),
        }
        if let Some(index) = convert::first_not_finite(&buffer, self.dtype) {
            return Err(self.not_finite(weight, index, values[index]));
        }
        let hash = xxh3_64(&buffer);
        Ok(Ready { buffer, scales: None, hash })
    }
}

fn new_buffer(allocate: Allocate<'_>, bytes: usize) -> HostBuffer {
    let buffer = allocate(bytes);
    assert_eq!(buffer.len(), bytes, "a host buffer has the requested size");
    buffer
}
