//! 4-bit weights of bitsandbytes, as its `Linear4bit` saves them (QuantState.as_dict of bitsandbytes/functional.py).
//!
//! | tensor | dtype | content |
//! |---|---|---|
//! | `X.weight` | U8 `[n / 2, 1]`, or another dtype of the same bytes | codes, the earlier one in the high nibble |
//! | `X.weight.absmax` | F32 `[n / 64]`, U8 if double-quantized | scales |
//! | `X.weight.quant_map` | F32 `[16]` | values of the codes |
//! | `X.weight.nested_absmax` | F32 `[n / 64 / 256]` | scales of the scales, if double-quantized |
//! | `X.weight.nested_quant_map` | F32 `[256]` | values of the codes of scales |
//! | `X.weight.quant_state.bitsandbytes__nf4` (or `__fp4`) | U8 | JSON: block sizes, dtype and shape of the values, offset |
//!
//! Trade-off: blocks of 64 and nested blocks of 256 only. Values of `nested_quant_map` may differ from ours in their last bits, as
//! versions of PyTorch do; such a scale differs by as much.

use std::fmt;
use std::str::FromStr;

use firebrick_arch::python_json::repr;
use firebrick_precision::{BlockScales, DynamicMap, Error as FormatError, QuantFormat, blockwise, fp4, nf4};
use safetensors::Dtype;
use serde::Deserialize;

use super::{Part, QuantizedWeight, Scheme, Unclaimed, matrix};
use crate::error::ModelError;

/// A tensor of the file: the suffix of its name after the weight's, its dtype and shape, and its bytes.
pub(crate) type EncodedPart = (String, Dtype, Vec<usize>, Vec<u8>);

/// The part of the JSON tensor's name between the weight's name and the format's.
const STATE: &str = ".quant_state.bitsandbytes__";
/// The JSON takes about 170 bytes.
const MAX_STATE_BYTES: usize = 4096;
/// Largest relative difference of a value of `nested_quant_map` from ours: a few roundings.
const MAP_TOLERANCE: f32 = 1e-6;

/// A 4-bit format of bitsandbytes: its `quant_type`, and whether the block scales are quantized as well
/// (`bnb_4bit_use_double_quant`). Its name is `nf4`, `fp4`, `nf4_double_quant` or `fp4_double_quant`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bnb4bit {
    /// 4-bit NormalFloat.
    Nf4 {
        /// `bnb_4bit_use_double_quant`.
        double_quant: bool,
    },
    /// A sign and eight magnitudes.
    Fp4 {
        /// `bnb_4bit_use_double_quant`.
        double_quant: bool,
    },
}

impl Bnb4bit {
    /// All of them; the first is what QLoRA trains on by default.
    pub const ALL: [Self; 4] = [
        Self::Nf4 { double_quant: true },
        Self::Nf4 { double_quant: false },
        Self::Fp4 { double_quant: true },
        Self::Fp4 { double_quant: false },
    ];

    /// Returns the name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Nf4 { double_quant: true } => "nf4_double_quant",
            Self::Nf4 { double_quant: false } => "nf4",
            Self::Fp4 { double_quant: true } => "fp4_double_quant",
            Self::Fp4 { double_quant: false } => "fp4",
        }
    }

    /// Returns `bnb_4bit_quant_type` and the 16 values.
    fn quant_type(self) -> (&'static str, &'static [f32; 16]) {
        match self {
            Self::Nf4 { .. } => ("nf4", &nf4::LEVELS),
            Self::Fp4 { .. } => ("fp4", &fp4::LEVELS),
        }
    }

    fn double_quant(self) -> bool {
        let (Self::Nf4 { double_quant } | Self::Fp4 { double_quant }) = self;
        double_quant
    }

    /// Returns our format with the same bytes.
    pub(crate) fn format(self) -> Option<QuantFormat> {
        match self {
            Self::Nf4 { double_quant } => Some(QuantFormat::Nf4 { double_quant }),
            Self::Fp4 { .. } => None,
        }
    }

    /// Builds `quantization_config` as transformers writes it, for weights of this dtype. `skipped` are modules that stay unquantized.
    pub(crate) fn config(self, dtype: &str, skipped: Option<Vec<String>>) -> serde_json::Value {
        serde_json::json!({
            "_load_in_4bit": true,
            "_load_in_8bit": false,
            "bnb_4bit_compute_dtype": dtype,
            "bnb_4bit_quant_storage": "uint8",
            "bnb_4bit_quant_type": self.quant_type().0,
            "bnb_4bit_use_double_quant": self.double_quant(),
            "llm_int8_enable_fp32_cpu_offload": false,
            "llm_int8_has_fp16_weight": false,
            "llm_int8_skip_modules": skipped,
            "llm_int8_threshold": 6.0,
            "load_in_4bit": true,
            "load_in_8bit": false,
            "quant_method": "bitsandbytes",
        })
    }
}

impl fmt::Display for Bnb4bit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Bnb4bit {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let names = || Self::ALL.map(Self::name).join(", ");
        Self::ALL.into_iter().find(|format| format.name() == text).ok_or_else(|| format!("expected one of {}", names()))
    }
}

#[derive(Debug, Deserialize)]
struct State {
    quant_type: String,
    blocksize: usize,
    shape: Vec<usize>,
    nested_blocksize: Option<usize>,
    nested_offset: Option<f64>,
}

#[derive(Debug)]
pub(super) struct Parts {
    pub(super) format: Bnb4bit,
    pub(super) codes: Part,
    absmax: Part,
    /// Scales of the scales, and the offset of each scale.
    nested: Option<(Part, f32)>,
}

pub(super) fn is_mark(name: &str) -> bool {
    name.contains(STATE)
}

/// Finds the weight with this `quant_state`.
pub(super) fn find(mark: &str, unclaimed: &mut Unclaimed<'_>) -> Result<QuantizedWeight, ModelError> {
    let (name, kind) = mark.split_once(STATE).expect("a mark has it");
    let state = unclaimed.take(name, mark.to_owned())?;
    if state.byte_len() > MAX_STATE_BYTES {
        return Err(unclaimed.bad(name, format!("`{mark}` has {} bytes", state.byte_len())));
    }
    let parsed = serde_json::from_slice(&state.bytes()?);
    let state: State = parsed.map_err(|error| unclaimed.bad(name, format!("`{mark}` is invalid: {error}")))?;
    let part = |suffix: &str| format!("{name}.{suffix}");
    let double_quant = unclaimed.places.contains_key(&part("nested_absmax"));
    let format = match kind {
        "nf4" if state.quant_type == kind => Bnb4bit::Nf4 { double_quant },
        "fp4" if state.quant_type == kind => Bnb4bit::Fp4 { double_quant },
        _ => return Err(unclaimed.bad(name, format!("its quant_type is {}; supported: nf4, fp4", state.quant_type))),
    };
    let (codes, absmax) = (unclaimed.take(name, name.to_owned())?, unclaimed.take(name, part("absmax"))?);
    let map = unclaimed.take(name, part("quant_map"))?;
    let nested = match double_quant {
        false => None,
        true => {
            let nested = (unclaimed.take(name, part("nested_absmax"))?, state.nested_offset.unwrap_or(0.0) as f32);
            let map = unclaimed.take(name, part("nested_quant_map"))?;
            let is_near =
                |(stored, ours): (&f32, &f32)| (stored - ours).abs() <= MAP_TOLERANCE * ours.abs() || stored == ours;
            let ours = DynamicMap::signed();
            if map.info().shape != [256] || !map.floats()?.iter().zip(ours.values()).all(is_near) {
                return Err(unclaimed.bad(name, "its nested_quant_map is not the dynamic map".to_owned()));
            }
            Some(nested)
        }
    };
    if map.info().shape != [16] || map.floats()? != format.quant_type().1[..] {
        return Err(unclaimed.bad(name, format!("its quant_map is not that of {kind}")));
    }
    let parts = Parts { format, codes, absmax, nested };
    parts.check(&state).map_err(|problem| unclaimed.bad(name, problem))?;
    Ok(QuantizedWeight { name: name.to_owned(), shape: state.shape, scheme: Scheme::Bnb(parts) })
}

impl Parts {
    /// Checks that all parts have the sizes that follow from the state.
    fn check(&self, state: &State) -> Result<(), String> {
        let &State { blocksize, nested_blocksize, ref shape, .. } = state;
        if blocksize != nf4::BLOCK_SIZE || nested_blocksize.is_some_and(|size| size != blockwise::BLOCK_SIZE) {
            let nested = nested_blocksize.map_or(String::new(), |size| format!(", its nested blocksize {size}"));
            return Err(format!("its blocksize is {blocksize}{nested}; supported: 64 and 256"));
        }
        let Some((_, count)) = matrix(shape) else { return Err(format!("its shape is {shape:?}, which is no matrix")) };
        let blocks = count.div_ceil(blocksize);
        let mut expected = vec![(&self.codes, None, count.div_ceil(2))];
        match &self.nested {
            None => expected.push((&self.absmax, Some(Dtype::F32), 4 * blocks)),
            Some((nested, _)) => {
                expected.push((&self.absmax, Some(Dtype::U8), blocks));
                expected.push((nested, Some(Dtype::F32), 4 * blocks.div_ceil(blockwise::BLOCK_SIZE)));
            }
        }
        for (part, dtype, bytes) in expected {
            let (info, got) = (part.info(), part.byte_len());
            if got != bytes || dtype.is_some_and(|dtype| dtype != info.dtype) {
                return Err(format!(
                    "`{}` is {got} bytes of {:?}, but its shape {shape:?} takes {bytes}",
                    part.name, info.dtype
                ));
            }
        }
        Ok(())
    }

    /// Reads the format, the codes and the scales as they are stored.
    pub(super) fn stored(&self) -> Result<(Bnb4bit, Vec<u8>, BlockScales), ModelError> {
        let scales = self.scales()?;
        Ok((self.format, self.codes.bytes()?, scales))
    }

    pub(super) fn scales(&self) -> Result<BlockScales, ModelError> {
        Ok(match &self.nested {
            None => BlockScales::Float(self.absmax.floats()?),
            Some((nested, offset)) => {
                BlockScales::Nested { codes: self.absmax.bytes()?, absmax: nested.floats()?, offset: *offset }
            }
        })
    }

    /// Reads the values of `fp4`; codes of `nf4` are ours.
    pub(super) fn values(&self, shape: &[usize]) -> Result<Vec<f32>, ModelError> {
        let (_, codes, block) = self.stored()?;
        Ok(fp4::dequantize(&codes, &block.values(), shape.iter().product()))
    }
}

/// Quantizes a weight to the tensors of this format, by the suffixes of their names. `dtype` is torch's name for the format of the values.
pub(crate) fn encode(
    format: Bnb4bit,
    values: &[f32],
    shape: &[usize],
    dtype: &str,
) -> Result<Vec<EncodedPart>, FormatError> {
    // The scales of both types are the largest magnitudes of their blocks.
    let nf4 = QuantFormat::Nf4 { double_quant: format.double_quant() }.quantize(values, shape)?;
    let (codes, scales) = match format {
        Bnb4bit::Nf4 { .. } => (nf4.codes, nf4.scales.block),
        Bnb4bit::Fp4 { .. } => (fp4::quantize(values)?.0, nf4.scales.block),
    };
    Ok(encode_codes(format, codes, &scales, shape, dtype))
}

/// Encodes a weight that is quantized already.
pub(crate) fn encode_codes(
    format: Bnb4bit,
    codes: Vec<u8>,
    scales: &BlockScales,
    shape: &[usize],
    dtype: &str,
) -> Vec<EncodedPart> {
    let floats = |values: &[f32]| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>();
    let (kind, levels) = format.quant_type();
    let mut state = format!(
        "{{\"quant_type\": \"{kind}\", \"blocksize\": {}, \"dtype\": \"{dtype}\", \"shape\": {shape:?}",
        nf4::BLOCK_SIZE
    );
    // bitsandbytes stores the second zero of fp4 without its sign.
    let map = floats(&levels.map(|level| level + 0.0));
    let mut parts = vec![("quant_map", Dtype::F32, vec![16], map)];
    match scales {
        BlockScales::Nested { codes, absmax, offset } => {
            let map = floats(DynamicMap::signed().values());
            parts.push(("absmax", Dtype::U8, vec![codes.len()], codes.clone()));
            parts.push(("nested_absmax", Dtype::F32, vec![absmax.len()], floats(absmax)));
            parts.push(("nested_quant_map", Dtype::F32, vec![256], map));
            let offset = repr(f64::from(*offset));
            let size = blockwise::BLOCK_SIZE;
            state +=
                &format!(", \"nested_blocksize\": {size}, \"nested_dtype\": \"float32\", \"nested_offset\": {offset}");
        }
        scales => {
            let values = scales.values();
            parts.push(("absmax", Dtype::F32, vec![values.len()], floats(&values)));
        }
    }
    state.push('}');
    let mark = format!("{STATE}{kind}");
    let parts = parts.into_iter().map(|(name, dtype, shape, bytes)| (format!(".{name}"), dtype, shape, bytes));
    let codes = (String::new(), Dtype::U8, vec![codes.len(), 1], codes);
    let state = (mark, Dtype::U8, vec![state.len()], state.into_bytes());
    [codes, state].into_iter().chain(parts).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_read_back_from_their_names() {
        for format in Bnb4bit::ALL {
            assert_eq!(format.name().parse(), Ok(format));
        }
        assert!("int4".parse::<Bnb4bit>().unwrap_err().contains("nf4_double_quant, nf4, fp4_double_quant, fp4"));
    }
}
