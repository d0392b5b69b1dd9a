//! The values of a tensor for its consumer: pieces that are read ahead, or a buffer in memory.

use std::collections::VecDeque;
use std::ops::Range;

use burn_tensor::DType;
use firebrick_kernels::HostBuffer;
use firebrick_precision::{BlockScales, HostScales, NarrowFloat, QuantFormat, QuantizedTensor};

use super::queue::Queue;
use super::read::{Job, Ready};
use crate::error::ModelError;

/// A tensor's finite elements, row by row: pieces on the host, in order, some of which may not have been read yet.
#[derive(Debug)]
pub(crate) struct Values<'a> {
    /// The number format of the elements: F32, BF16 or F16.
    pub(crate) dtype: DType,
    source: Source<'a>,
}

#[derive(Debug)]
enum Source<'a> {
    /// All elements; `None` once they were taken.
    Here(Option<HostBuffer>),
    /// Pieces that threads read: those that are not taken yet, and whether they may be codes.
    Ahead { queue: &'a Queue<'a>, left: Range<usize>, keeps: bool },
    /// Several tensors below each other: those that are not taken yet.
    Several(VecDeque<Values<'a>>),
}

#[derive(Debug)]
pub(crate) enum CodesOrValues<'a> {
    /// Codes in the requested format, padded to whole blocks with the codes of zero, and their scales.
    Codes {
        codes: HostBuffer,
        scales: HostScales,
    },
    Values(Values<'a>),
}

impl<'a> Values<'a> {
    /// Returns codes if the folder stores the requested ones, in this format with rows of so many columns. Waits for them. Those of several tensors
    /// are put together, with scales in f32 unless [`keeps_narrow_scales`] says otherwise; where some are not codes, all become values.
    pub(crate) fn into_codes_or_values(
        mut self,
        format: QuantFormat,
        columns: usize,
        allocate: &dyn Fn(usize) -> HostBuffer,
    ) -> Result<CodesOrValues<'a>, ModelError> {
        if !self.may_be_codes() {
            return Ok(CodesOrValues::Values(self));
        }
        if let Source::Several(parts) = self.source {
            let read = |part: Values<'a>| part.into_codes_or_values(format, columns, allocate);
            return joined(parts.into_iter().map(read).collect::<Result<_, _>>()?, format, columns, allocate);
        }
        let Ready { buffer, scales, .. } = self.next_ready().expect("values are taken once")?;
        Ok(match scales {
            Some(scales) => CodesOrValues::Codes { codes: buffer, scales },
            None => CodesOrValues::Values(Values::here(buffer, self.dtype)),
        })
    }

    /// Returns whether the folder stores codes in the requested format.
    pub(crate) fn may_be_codes(&self) -> bool {
        match &self.source {
            Source::Here(_) => false,
            Source::Ahead { keeps, .. } => *keeps,
            Source::Several(parts) => parts.iter().any(Self::may_be_codes),
        }
    }

    /// Puts tensors with one number format below each other.
    pub(crate) fn joined(parts: Vec<Self>) -> Self {
        Self { dtype: parts[0].dtype, source: Source::Several(parts.into()) }
    }

    /// Wraps the pieces of a tensor that are read ahead.
    pub(super) fn ahead(queue: &'a Queue<'a>, job: &Job<'a>) -> Self {
        let (left, keeps) = (job.pieces.clone(), job.keeps.is_some());
        Self { dtype: job.dtype, source: Source::Ahead { queue, left, keeps } }
    }

    /// Wraps elements in this format that are on the host.
    pub(crate) fn here(buffer: HostBuffer, dtype: DType) -> Self {
        Self { dtype, source: Source::Here(Some(buffer)) }
    }

    /// Wraps a copy of these elements.
    pub(crate) fn of_f32(values: &[f32], allocate: &dyn Fn(usize) -> HostBuffer) -> Self {
        let mut buffer = allocate(size_of_val(values));
        buffer.copy_from_slice(bytemuck::cast_slice(values));
        Self::here(buffer, DType::F32)
    }

    pub(crate) fn into_buffer(mut self, allocate: &dyn Fn(usize) -> HostBuffer) -> Result<HostBuffer, ModelError> {
        if self.pieces() == 1 {
            return self.next().expect("values are taken once");
        }
        let mut all = allocate(self.bytes());
        self.read_into(&mut all)?;
        Ok(all)
    }

    /// Counts the pieces that are not taken yet.
    fn pieces(&self) -> usize {
        match &self.source {
            Source::Here(buffer) => usize::from(buffer.is_some()),
            Source::Ahead { left, .. } => left.len(),
            Source::Several(parts) => parts.iter().map(Self::pieces).sum(),
        }
    }

    fn bytes(&self) -> usize {
        match &self.source {
            Source::Here(buffer) => buffer.as_ref().map_or(0, |buffer| buffer.len()),
            Source::Ahead { queue, left, .. } => queue.pieces[left.clone()].iter().map(|piece| piece.bytes).sum(),
            Source::Several(parts) => parts.iter().map(Self::bytes).sum(),
        }
    }

    /// Writes all elements to the beginning of `out`, and returns the number of their bytes.
    pub(crate) fn read_into(self, out: &mut [u8]) -> Result<usize, ModelError> {
        let mut filled = 0;
        for piece in self {
            let piece = piece?;
            out[filled..][..piece.len()].copy_from_slice(&piece);
            filled += piece.len();
        }
        Ok(filled)
    }

    /// Reads the tensor without a use for it; returns whether all of it was codes.
    pub(crate) fn skip(mut self) -> Result<bool, ModelError> {
        let mut are_codes = true;
        while let Some(ready) = self.next_ready() {
            are_codes &= ready?.scales.is_some();
        }
        Ok(are_codes)
    }

    fn next_ready(&mut self) -> Option<Result<Ready, ModelError>> {
        match &mut self.source {
            Source::Here(buffer) => buffer.take().map(|buffer| Ok(Ready { buffer, scales: None, hash: 0 })),
            Source::Ahead { queue, left, .. } => left.next().map(|piece| queue.wait_for(piece)),
            Source::Several(parts) => loop {
                let ready = parts.front_mut()?.next_ready();
                if ready.is_some() {
                    return ready;
                }
                parts.pop_front();
            },
        }
    }
}

/// The pieces of the elements, in order.
impl Iterator for Values<'_> {
    type Item = Result<HostBuffer, ModelError>;

    fn next(&mut self) -> Option<Self::Item> {
        Some(self.next_ready()?.map(|ready| {
            assert!(ready.scales.is_none(), "what may be codes is taken by into_codes_or_values");
            ready.buffer
        }))
    }
}

/// Returns whether the stored scales of several tensors in this format remain codes when the tensors are put together: those of MXFP4, which
/// no number of the whole tensor multiplies.
pub(crate) fn keeps_narrow_scales(format: QuantFormat) -> bool {
    format == QuantFormat::Mxfp4
}

fn joined_scales(format: QuantFormat, scales: Vec<BlockScales>) -> BlockScales {
    if !keeps_narrow_scales(format) {
        return BlockScales::Float(scales.iter().flat_map(BlockScales::values).collect());
    }
    let of_tensor = |scales| match scales {
        BlockScales::Narrow { codes, .. } => codes,
        BlockScales::Float(_) | BlockScales::Nested { .. } => unreachable!("MXFP4 is read with E8M0 scales"),
    };
    let codes = scales.into_iter().flat_map(of_tensor).collect();
    BlockScales::Narrow { codes, format: NarrowFloat::E8m0, tensor: None }
}

/// Puts the codes of several tensors together, or their values where some have no codes. Every tensor is whole blocks.
fn joined<'a>(
    parts: Vec<CodesOrValues<'a>>,
    format: QuantFormat,
    columns: usize,
    allocate: &dyn Fn(usize) -> HostBuffer,
) -> Result<CodesOrValues<'a>, ModelError> {
    if parts.iter().all(|part| matches!(part, CodesOrValues::Codes { .. })) {
        let codes = |part| match part {
            CodesOrValues::Codes { codes, scales } => (codes, scales.block),
            CodesOrValues::Values(_) => unreachable!("all are codes"),
        };
        let (parts, scales): (Vec<HostBuffer>, Vec<BlockScales>) = parts.into_iter().map(codes).unzip();
        let mut all = allocate(parts.iter().map(|part| part.len()).sum());
        let mut filled = 0;
        for part in parts {
            all[filled..][..part.len()].copy_from_slice(&part);
            filled += part.len();
        }
        return Ok(CodesOrValues::Codes { codes: all, scales: HostScales { block: joined_scales(format, scales) } });
    }
    let values = |part| match part {
        CodesOrValues::Values(values) => values,
        CodesOrValues::Codes { codes, scales } => {
            let count = scales.block.values().len() * format.block_size(columns);
            let shape = vec![count / columns, columns];
            let tensor = QuantizedTensor { format, codes: codes.to_vec(), scales, shape };
            Values::of_f32(&tensor.dequantize(), allocate)
        }
    };
    Ok(CodesOrValues::Values(Values::joined(parts.into_iter().map(values).collect())))
}

#[cfg(test)]
mod tests {
    use firebrick_kernels::MemoryOps;
    use firebrick_kernels::backends::Flex;

    use super::*;

    const SHAPE: [usize; 2] = [4, 32];

    fn allocate(bytes: usize) -> HostBuffer {
        Flex::host_buffer(&Default::default(), bytes)
    }

    fn quantized(format: QuantFormat, index: usize) -> QuantizedTensor {
        let values: Vec<f32> = (0..SHAPE[0] * SHAPE[1]).map(|at| ((at + 37 * index) as f32 * 0.7).sin()).collect();
        format.quantize(&values, &SHAPE).unwrap()
    }

    fn codes(tensor: &QuantizedTensor) -> CodesOrValues<'static> {
        let mut codes = allocate(tensor.codes.len());
        codes.copy_from_slice(&tensor.codes);
        CodesOrValues::Codes { codes, scales: tensor.scales.clone() }
    }

    #[test]
    fn joined_codes_keep_their_values() {
        for format in QuantFormat::ALL {
            let parts = [0, 1, 2].map(|index| quantized(format, index));
            let joined = joined(parts.iter().map(codes).collect(), format, SHAPE[1], &allocate).unwrap();
            let CodesOrValues::Codes { codes, scales } = joined else { panic!("all are codes") };
            let shape = vec![3 * SHAPE[0], SHAPE[1]];
            let found = QuantizedTensor { format, codes: codes.to_vec(), scales, shape }.dequantize();
            let expected: Vec<f32> = parts.iter().flat_map(QuantizedTensor::dequantize).collect();
            assert_eq!(found, expected, "{format}");
        }
    }

    #[test]
    fn matrices_of_which_some_have_no_codes_become_values() {
        let format = QuantFormat::Nvfp4;
        let first = quantized(format, 0);
        let values = vec![0.5f32; SHAPE[0] * SHAPE[1]];
        let parts = vec![codes(&first), CodesOrValues::Values(Values::of_f32(&values, &allocate))];
        let joined = joined(parts, format, SHAPE[1], &allocate).unwrap();
        let CodesOrValues::Values(joined) = joined else { panic!("some are values") };
        let found = joined.into_buffer(&allocate).unwrap();
        let found: Vec<f32> = found.as_chunks().0.iter().map(|&bytes| f32::from_ne_bytes(bytes)).collect();
        assert_eq!(found, [first.dequantize(), values].concat());
    }
}
