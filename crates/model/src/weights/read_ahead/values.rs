//! The values of a tensor for its consumer: pieces that are read ahead, or a buffer in memory.
//!
//! Trade-off: the caller takes all values of a tensor, in order, before it takes the next tensor.

use std::ops::Range;

use burn_tensor::DType;
use firebrick_kernels::HostBuffer;
use firebrick_precision::HostScales;

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
}

/// The contents of a tensor after reading.
#[derive(Debug)]
pub(crate) enum CodesOrValues<'a> {
    /// Codes in the requested format, padded to whole blocks with the codes of zero, and their scales.
    Codes { codes: HostBuffer, scales: HostScales },
    /// Elements.
    Values(Values<'a>),
}

impl<'a> Values<'a> {
    /// Returns codes if the folder stores the requested ones. Waits for them.
    pub(crate) fn into_codes_or_values(mut self) -> Result<CodesOrValues<'a>, ModelError> {
        if !matches!(self.source, Source::Ahead { keeps: true, .. }) {
            return Ok(CodesOrValues::Values(self));
        }
        let Ready { buffer, scales, .. } = self.next_ready().expect("values are taken once")?;
        Ok(match scales {
            Some(scales) => CodesOrValues::Codes { codes: buffer, scales },
            None => CodesOrValues::Values(Values::here(buffer, self.dtype)),
        })
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

    /// Returns all elements in one buffer.
    pub(crate) fn into_buffer(mut self, allocate: &dyn Fn(usize) -> HostBuffer) -> Result<HostBuffer, ModelError> {
        let bytes = match &self.source {
            Source::Ahead { queue, left, .. } if left.len() > 1 => {
                queue.pieces[left.clone()].iter().map(|piece| piece.bytes).sum()
            }
            _ => return self.next().expect("values are taken once"),
        };
        let mut all = allocate(bytes);
        self.read_into(&mut all)?;
        Ok(all)
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

    /// Reads the tensor without a use for it.
    pub(crate) fn skip(mut self) -> Result<(), ModelError> {
        while let Some(ready) = self.next_ready() {
            drop(ready?);
        }
        Ok(())
    }

    fn next_ready(&mut self) -> Option<Result<Ready, ModelError>> {
        match &mut self.source {
            Source::Here(buffer) => buffer.take().map(|buffer| Ok(Ready { buffer, scales: None, hash: 0 })),
            Source::Ahead { queue, left, .. } => left.next().map(|piece| queue.wait_for(piece)),
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
