//! Experts in MXFP4 as gpt-oss is published: all experts of a projection in two tensors.
//!
//! `X.experts.P_blocks` is U8 `[experts, rows, in / 32, 16]` with E2M1 codes, the earlier one in the low nibble, and `X.experts.P_scales` U8
//! `[experts, rows, in / 32]` with E8M0 scales; `P` is `gate_up_proj`, whose rows are gate's and up's in turn, or `down_proj`. Each expert's
//! projection is one weight, whose rows are gathered. A value is its code's value times the scale: our MXFP4, so codes and scales are kept.
//! Trade-off: gate and up of an expert are read with one another's rows, so those bytes are read twice.

use firebrick_precision::{BlockScales, NarrowFloat};
use safetensors::Dtype;

use super::{Part, QuantizedWeight, Scheme, Unclaimed};
use crate::checkpoint::experts::fused::{Interleaved, name_of, split};
use crate::error::ModelError;

/// Values that share a scale.
pub(crate) const BLOCK: usize = 32;
const BLOCK_BYTES: usize = BLOCK / 2;
/// Suffixes of the names of codes and scales.
pub(crate) const CODES: &str = "_blocks";
pub(crate) const SCALES: &str = "_scales";

/// The place of a weight in the tensors of all experts.
#[derive(Debug)]
pub(super) struct Parts {
    pub(super) codes: Part,
    scales: Part,
    expert: usize,
    /// Rows of one expert in the tensors.
    fused_rows: usize,
    projection: Interleaved,
    /// Rows and columns of the weight.
    shape: [usize; 2],
}

pub(super) fn is_mark(name: &str) -> bool {
    name.strip_suffix(CODES).and_then(split).is_some()
}

/// Finds the weights with these codes.
pub(super) fn find(mark: &str, unclaimed: &mut Unclaimed<'_>) -> Result<Vec<QuantizedWeight>, ModelError> {
    let fused = mark.strip_suffix(CODES).expect("a mark has it");
    let (block, projections) = split(fused).expect("a mark is that of experts");
    let (codes, scales) = (unclaimed.take(fused, mark.to_owned())?, unclaimed.take(fused, format!("{fused}{SCALES}"))?);
    let (codes_info, scales_info) = (codes.info(), scales.info());
    let [experts, fused_rows, columns] = match *codes_info.shape.as_slice() {
        [experts, rows, blocks, BLOCK_BYTES]
            if codes_info.dtype == Dtype::U8
                && scales_info.dtype == Dtype::U8
                && scales_info.shape == [experts, rows, blocks]
                && rows.is_multiple_of(projections.len())
                && experts * rows * blocks > 0 =>
        {
            [experts, rows, blocks * BLOCK]
        }
        _ => {
            let problem = format!(
                "codes {:?} {:?} and scales {:?} {:?} do not belong together",
                codes_info.dtype, codes_info.shape, scales_info.dtype, scales_info.shape
            );
            return Err(unclaimed.bad(fused, problem));
        }
    };
    let shape = [fused_rows / projections.len(), columns];
    let weight = |expert: usize, projection: &Interleaved| {
        let (codes, scales, projection) = (codes.clone(), scales.clone(), *projection);
        let parts = Parts { codes, scales, expert, fused_rows, projection, shape };
        let name = name_of(block, expert, projection.name, "weight");
        QuantizedWeight { name, shape: shape.to_vec(), scheme: Scheme::Mxfp4(parts) }
    };
    Ok((0..experts).flat_map(|expert| projections.iter().map(move |of| weight(expert, of))).collect())
}

impl Parts {
    pub(super) fn code_bytes(&self) -> usize {
        self.shape[0] * self.row_blocks() * BLOCK_BYTES
    }

    pub(super) fn read_codes(&self, out: &mut [u8]) -> Result<(), ModelError> {
        self.gather(&self.codes, self.row_blocks() * BLOCK_BYTES, out)
    }

    pub(super) fn scales(&self) -> Result<BlockScales, ModelError> {
        let mut codes = vec![0; self.shape[0] * self.row_blocks()];
        self.gather(&self.scales, self.row_blocks(), &mut codes)?;
        Ok(BlockScales::Narrow { codes, format: NarrowFloat::E8m0, tensor: None })
    }

    fn row_blocks(&self) -> usize {
        self.shape[1] / BLOCK
    }

    /// Reads the expert's rows of a tensor, of `row_bytes` each, and keeps those of the projection.
    fn gather(&self, part: &Part, row_bytes: usize, out: &mut [u8]) -> Result<(), ModelError> {
        let mut of_expert = vec![0; self.fused_rows * row_bytes];
        let begin = self.expert * of_expert.len();
        part.read_from(begin, &mut of_expert)?;
        let rows = of_expert.chunks_exact(row_bytes).skip(self.projection.first).step_by(self.projection.step);
        out.chunks_exact_mut(row_bytes).zip(rows).for_each(|(out, row)| out.copy_from_slice(row));
        Ok(())
    }
}
