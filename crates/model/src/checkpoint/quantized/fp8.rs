//! E4M3 weights with scales for the whole matrix, for each row, or for each block of 128 x 128.
//!
//! `X.weight` is F8_E4M3 `[out, in]`. Its scales are F32, BF16 or F16 under one of two names: `X.weight_scale_inv` (DeepSeek-V3 and Qwen3 in blocks,
//! Mistral for the matrix) or `X.weight_scale` (compressed-tensors). Their shape says what shares one: `[]` or `[1]` the matrix, `[out, 1]` a row,
//! `[out / 128, in / 128]`, rounded up, a block. A value is its code's value times its scale, in f32: despite the name of the first, scales
//! multiply. `X.activation_scale` and `X.input_scale` are left out: activations are not quantized here.

use std::collections::BTreeMap;
use std::sync::Arc;

use firebrick_precision::NarrowFloat;
use safetensors::Dtype;

use super::{Part, QuantizedWeight, Scheme, Shard, Unclaimed, matrix};
use crate::error::ModelError;

/// Rows and columns of a block that shares a scale.
const BLOCK: usize = 128;
/// Suffix of the scales' name after the weight's: it marks a weight.
const SCALE_INV: &str = "_scale_inv";
/// The same in compressed-tensors, where other formats than this one have it too.
const SCALE: &str = "_scale";
/// The scales of activations, after the module's name.
const OF_ACTIVATIONS: [&str; 2] = ["activation_scale", "input_scale"];

#[derive(Debug)]
pub(super) struct Parts {
    pub(super) codes: Part,
    scales: Part,
    /// Rows and columns that share a scale.
    block: [usize; 2],
    scales_activations: bool,
}

/// Returns whether a tensor of these holds the scales of a weight.
pub(super) fn is_mark(name: &str, places: &BTreeMap<String, Arc<Shard>>) -> bool {
    let of_weight = |weight: &str| weight.ends_with(".weight") && places.contains_key(weight);
    name.ends_with(".weight_scale_inv") || name.strip_suffix(SCALE).is_some_and(of_weight)
}

/// Finds the weight with these scales.
pub(super) fn find(mark: &str, unclaimed: &mut Unclaimed<'_>) -> Result<QuantizedWeight, ModelError> {
    let name = mark.strip_suffix(SCALE_INV).or_else(|| mark.strip_suffix(SCALE)).expect("a mark has one of them");
    let (codes, scales) = (unclaimed.take(name, name.to_owned())?, unclaimed.take(name, mark.to_owned())?);
    let (codes_info, scales_info) = (codes.info(), scales.info());
    let shape = codes_info.shape.clone();
    let problem = match matrix(&shape) {
        _ if codes_info.dtype != Dtype::F8_E4M3 => format!("it has scales but is stored as {:?}", codes_info.dtype),
        _ if !matches!(scales_info.dtype, Dtype::F32 | Dtype::BF16 | Dtype::F16) => {
            format!("its scales are stored as {:?}", scales_info.dtype)
        }
        None => format!("its shape is {shape:?}, which is no matrix"),
        Some((sides, _)) => match block_of(sides, &scales_info.shape) {
            None => format!("its shape is {shape:?}, and that of its scales {:?}", scales_info.shape),
            Some(block) => {
                let module = name.strip_suffix("weight").expect("a mark is that of a weight");
                let others = OF_ACTIVATIONS.map(|part| unclaimed.take_if_there(&format!("{module}{part}")).is_some());
                let parts = Parts { codes, scales, block, scales_activations: others.contains(&true) };
                return Ok(QuantizedWeight { name: name.to_owned(), shape, scheme: Scheme::Fp8(parts) });
            }
        },
    };
    Err(unclaimed.bad(name, problem))
}

/// Returns the rows and columns that share a scale, by the shape of the scales. Shapes that two of the layouts give mean the same in both.
fn block_of([rows, columns]: [usize; 2], scales: &[usize]) -> Option<[usize; 2]> {
    match *scales {
        [] | [1] => Some([rows, columns]),
        [of_rows] | [of_rows, 1] if of_rows == rows => Some([1, columns]),
        [down, across] if [down, across] == [rows.div_ceil(BLOCK), columns.div_ceil(BLOCK)] => Some([BLOCK; 2]),
        _ => None,
    }
}

impl Parts {
    /// Names the stored format, for messages.
    pub(super) fn stored_as(&self) -> &'static str {
        match self.block {
            _ if self.scales_activations => "fp8 with scales of activations, which are not used",
            [BLOCK, BLOCK] => "fp8 in blocks of 128 x 128",
            [1, _] => "fp8 with a scale per row",
            _ => "fp8 with a scale per tensor",
        }
    }

    pub(super) fn values(&self, shape: &[usize]) -> Result<Vec<f32>, ModelError> {
        let (codes, scales) = (self.codes.bytes()?, self.scales.floats()?);
        let (columns, table, [high, wide]) = (shape[1], NarrowFloat::E4m3.table(), self.block);
        let rows = codes.chunks(columns * high).zip(scales.chunks(columns.div_ceil(wide)));
        let mut values = Vec::with_capacity(codes.len());
        for (rows, scales) in rows {
            for row in rows.chunks(columns) {
                for (codes, scale) in row.chunks(wide).zip(scales) {
                    values.extend(codes.iter().map(|&code| table[usize::from(code)] * scale));
                }
            }
        }
        Ok(values)
    }
}

#[cfg(test)]
mod tests {
    use super::block_of;

    #[test]
    fn the_shape_of_the_scales_says_what_shares_one() {
        for (sides, scales, block) in [
            ([136, 144], &[][..], Some([136, 144])),
            ([136, 144], &[1][..], Some([136, 144])),
            ([136, 144], &[136, 1][..], Some([1, 144])),
            ([136, 144], &[136][..], Some([1, 144])),
            ([136, 144], &[2, 2][..], Some([128, 128])),
            ([256, 128], &[2, 1][..], Some([128, 128])),
            ([136, 144], &[2, 1][..], None),
            ([136, 144], &[136, 9][..], None),
            ([136, 144], &[144][..], None),
            ([136, 144], &[1, 136, 1][..], None),
        ] {
            assert_eq!(block_of(sides, scales), block, "{sides:?} {scales:?}");
        }
    }
}
