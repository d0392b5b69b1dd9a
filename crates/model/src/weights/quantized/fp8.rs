//! E4M3 weights with one scale per block of 128 x 128, as DeepSeek-V3 and Qwen3's FP8 checkpoints store them.
//!
//! `X.weight` is F8_E4M3 `[out, in]`, `X.weight_scale_inv` F32 (or BF16) `[out / 128, in / 128]`, rounded up; a value is its code's value
//! times the scale of its block, in f32. Despite its name the scale multiplies.
//! Trade-off: none of our formats has such blocks, so the codes are never kept.

use firebrick_precision::NarrowFloat;
use safetensors::Dtype;

use super::{Part, QuantizedWeight, Scheme, Shard, Unclaimed, matrix};
use crate::error::ModelError;

/// Rows and columns that share a scale.
const BLOCK: usize = 128;
/// Suffix of the scales' name after the weight's.
const SUFFIX: &str = "_scale_inv";

/// The tensors of a weight.
#[derive(Debug)]
pub(super) struct Parts {
    pub(super) codes: Part,
    scales: Part,
}

pub(super) fn is_mark(name: &str) -> bool {
    name.ends_with(".weight_scale_inv")
}

/// Finds the weight with these scales.
pub(super) fn find(mark: &str, unclaimed: &mut Unclaimed<'_>) -> Result<QuantizedWeight, ModelError> {
    let shards = unclaimed.shards;
    let name = mark.strip_suffix(SUFFIX).expect("a mark has it");
    let parts = Parts { codes: unclaimed.take(name, name.to_owned())?, scales: unclaimed.take(name, mark.to_owned())? };
    let (codes, scales) = (parts.codes.info(shards), parts.scales.info(shards));
    let problem = match matrix(&codes.shape) {
        _ if codes.dtype != Dtype::F8_E4M3 => format!("it has scales but is stored as {:?}", codes.dtype),
        _ if !matches!(scales.dtype, Dtype::F32 | Dtype::BF16 | Dtype::F16) => {
            format!("its scales are stored as {:?}", scales.dtype)
        }
        None => format!("its shape is {:?}, which is no matrix", codes.shape),
        Some(([rows, columns], _)) if scales.shape != [rows.div_ceil(BLOCK), columns.div_ceil(BLOCK)] => {
            format!("its shape is {:?}, and that of its scales {:?}", codes.shape, scales.shape)
        }
        Some(_) => {
            let (name, shape) = (name.to_owned(), codes.shape.clone());
            return Ok(QuantizedWeight { name, shape, scheme: Scheme::Fp8(parts) });
        }
    };
    Err(unclaimed.bad(name, problem))
}

impl Parts {
    pub(super) fn read(&self, shape: &[usize], shards: &[Shard]) -> Result<Vec<f32>, ModelError> {
        let (codes, scales) = (self.codes.bytes(shards)?, self.scales.floats(shards)?);
        let (columns, table) = (shape[1], NarrowFloat::E4m3.table());
        let scale_rows = scales.chunks(columns.div_ceil(BLOCK));
        let rows = codes.chunks(columns * BLOCK).zip(scale_rows);
        let mut values = Vec::with_capacity(codes.len());
        for (rows, scales) in rows {
            for row in rows.chunks(columns) {
                for (codes, scale) in row.chunks(BLOCK).zip(scales) {
                    values.extend(codes.iter().map(|&code| table[usize::from(code)] * scale));
                }
            }
        }
        Ok(values)
    }
}
