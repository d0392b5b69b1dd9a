//! NVFP4 weights as compressed-tensors packs them (`nvfp4-pack-quantized`).
//!
//! `X.weight_packed` is U8 `[out, in / 2]` with E2M1 codes, the earlier one in the low nibble; `X.weight_scale` F8_E4M3 `[out, in / 16]`;
//! `X.weight_global_scale` F32 `[1]`. A value is its code's value times (scale / global scale), in f32. `X.input_global_scale`, which
//! scales activations, is not used: activations are not quantized here.
//! Trade-off: our format multiplies by a tensor's scale where this one divides, so the codes are kept only if both give the same scales: if the
//! global scale is a power of two, or rounding happens to agree.

use firebrick_precision::{BlockScales, NarrowFloat, QuantFormat, narrow_map};
use safetensors::Dtype;

use super::{Part, QuantizedWeight, Scheme, Unclaimed, matrix};
use crate::error::ModelError;

/// Values that share a scale.
const BLOCK: usize = 16;
const SUFFIX: &str = ".weight_packed";

#[derive(Debug)]
pub(super) struct Parts {
    pub(super) codes: Part,
    scales: Part,
    /// Scales are divided by it.
    global_scale: f32,
}

pub(super) fn is_mark(name: &str) -> bool {
    name.ends_with(SUFFIX)
}

/// Finds the weight with these codes.
pub(super) fn find(mark: &str, unclaimed: &mut Unclaimed<'_>) -> Result<QuantizedWeight, ModelError> {
    let module = mark.strip_suffix(SUFFIX).expect("a mark has it");
    let name = format!("{module}.weight");
    let codes = unclaimed.take(&name, mark.to_owned())?;
    let scales = unclaimed.take(&name, format!("{module}.weight_scale"))?;
    let global = unclaimed.take(&name, format!("{module}.weight_global_scale"))?;
    unclaimed.take_if_there(&format!("{module}.input_global_scale"));
    let (codes_info, scales_info, global_info) = (codes.info(), scales.info(), global.info());
    let shape = match matrix(&codes_info.shape) {
        Some(([rows, bytes], count)) if count.checked_mul(2).is_some() => [rows, 2 * bytes],
        _ => return Err(unclaimed.bad(&name, format!("its codes have shape {:?}", codes_info.shape))),
    };
    let is_right = codes_info.dtype == Dtype::U8
        && scales_info.dtype == Dtype::F8_E4M3
        && shape[1].is_multiple_of(BLOCK)
        && scales_info.shape == [shape[0], shape[1] / BLOCK]
        && global_info.dtype == Dtype::F32
        && global_info.shape.iter().product::<usize>() == 1;
    if !is_right {
        let problem = format!(
            "codes {:?} {:?}, scales {:?} {:?} and global scale {:?} {:?} do not belong together",
            codes_info.dtype,
            codes_info.shape,
            scales_info.dtype,
            scales_info.shape,
            global_info.dtype,
            global_info.shape
        );
        return Err(unclaimed.bad(&name, problem));
    }
    let global_scale = global.floats()?[0];
    if !(global_scale.is_finite() && global_scale > 0.0) {
        return Err(unclaimed.bad(&name, format!("its global scale is {global_scale}")));
    }
    let parts = Parts { codes, scales, global_scale };
    Ok(QuantizedWeight { name, shape: shape.to_vec(), scheme: Scheme::Nvfp4(parts) })
}

impl Parts {
    /// Returns NVFP4 if multiplying by `1 / global_scale` gives the same scales as dividing.
    pub(super) fn format(&self) -> Option<QuantFormat> {
        let [ours, theirs] = [narrow_map(NarrowFloat::Ue4m3, Some(1.0 / self.global_scale)), self.map()];
        let same = ours.iter().zip(&theirs).take(SIGN).all(|(a, b)| a.to_bits() == b.to_bits() || a.is_nan());
        same.then_some(QuantFormat::Nvfp4)
    }

    /// Returns the value of each scale code.
    fn map(&self) -> [f32; 256] {
        NarrowFloat::E4m3.table().map(|scale| scale / self.global_scale)
    }

    /// Returns the scales in our NVFP4 format; `None` if they do not fit, because one is negative for example.
    pub(super) fn scales(&self) -> Result<Option<BlockScales>, ModelError> {
        let codes = self.scales.bytes()?;
        let are_ours = self.format().is_some() && codes.iter().all(|&scale| usize::from(scale) < SIGN);
        let tensor = Some(1.0 / self.global_scale);
        Ok(are_ours.then_some(BlockScales::Narrow { codes, format: NarrowFloat::Ue4m3, tensor }))
    }

    pub(super) fn values(&self) -> Result<Vec<f32>, ModelError> {
        let (codes, scales) = (self.codes.bytes()?, self.scales.bytes()?);
        let (levels, map) = (QuantFormat::Nvfp4.levels(), self.map());
        let packing = QuantFormat::Nvfp4.packing();
        let mut values = Vec::with_capacity(2 * codes.len());
        for (codes, scale) in codes.chunks(BLOCK / 2).zip(scales) {
            let scale = map[usize::from(scale)];
            values.extend(codes.iter().flat_map(|&byte| packing.codes(byte).map(|code| levels[code] * scale)));
        }
        Ok(values)
    }
}

/// Scale codes from here on are negative.
const SIGN: usize = 0x80;
