//! Weights that a folder stores quantized: found by the names of their parts, read as codes or as values.
//!
//! A quantized weight is several tensors of the file (codes, scales, tables). [`find`] combines them under the model's name for the weight, so that
//! the rest of this crate sees the tensors of an unquantized checkpoint. If codes and scales are bit for bit those of one of our formats, they are
//! kept; otherwise the weight is dequantized in f32 with the arithmetic of its format.

mod bnb;
mod fp8;
mod mxfp4;
mod nvfp4;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use firebrick_precision::{BlockScales, HostScales, QuantFormat, QuantizedTensor};

pub use self::bnb::Bnb4bit;
pub(crate) use self::bnb::{EncodedPart, encode as encode_bnb, encode_codes as encode_bnb_codes};
pub(crate) use self::mxfp4::{BLOCK as MXFP4_BLOCK, CODES as MXFP4_CODES, SCALES as MXFP4_SCALES};
use crate::checkpoint::read::shard::Shard;
use crate::checkpoint::tensor::TensorBytes;
use crate::error::ModelError;

/// A weight that consists of several tensors.
#[derive(Debug)]
pub(crate) struct QuantizedWeight {
    /// Its name in the model.
    pub(super) name: String,
    /// `[out, in]`.
    pub(super) shape: Vec<usize>,
    scheme: Scheme,
}

#[derive(Debug)]
enum Scheme {
    Bnb(bnb::Parts),
    Fp8(fp8::Parts),
    Mxfp4(mxfp4::Parts),
    Nvfp4(nvfp4::Parts),
}

impl QuantizedWeight {
    /// Returns our format with bit for bit the same codes and scales.
    pub(super) fn format(&self) -> Option<QuantFormat> {
        match &self.scheme {
            Scheme::Bnb(parts) => parts.format.format(),
            Scheme::Fp8(_) => None,
            Scheme::Mxfp4(_) => Some(QuantFormat::Mxfp4),
            Scheme::Nvfp4(parts) => parts.format(),
        }
    }

    /// Names the stored format, for messages.
    pub(super) fn stored_as(&self) -> &'static str {
        match &self.scheme {
            Scheme::Bnb(parts) => parts.format.name(),
            Scheme::Fp8(parts) => parts.stored_as(),
            Scheme::Mxfp4(_) => "mxfp4",
            Scheme::Nvfp4(_) => "nvfp4",
        }
    }

    pub(super) fn is_bnb(&self) -> bool {
        matches!(self.scheme, Scheme::Bnb(_))
    }

    /// Reads format, codes and scales of a bitsandbytes weight.
    pub(super) fn read_bnb(&self) -> Result<Option<(Bnb4bit, Vec<u8>, BlockScales)>, ModelError> {
        match &self.scheme {
            Scheme::Bnb(parts) => parts.stored().map(Some),
            Scheme::Fp8(_) | Scheme::Mxfp4(_) | Scheme::Nvfp4(_) => Ok(None),
        }
    }

    pub(super) fn path(&self) -> &Path {
        &self.codes().shard.path
    }

    fn codes(&self) -> &Part {
        let (Scheme::Bnb(bnb::Parts { codes, .. })
        | Scheme::Fp8(fp8::Parts { codes, .. })
        | Scheme::Mxfp4(mxfp4::Parts { codes, .. })
        | Scheme::Nvfp4(nvfp4::Parts { codes, .. })) = &self.scheme;
        codes
    }

    pub(super) fn code_bytes(&self) -> usize {
        match &self.scheme {
            Scheme::Mxfp4(parts) => parts.code_bytes(),
            _ => self.codes().byte_len(),
        }
    }

    /// Reads its codes into `codes`, which has room for them, and returns its scales; `None` if they differ from those of [`QuantizedWeight::format`].
    pub(super) fn read_codes(&self, codes: &mut [u8]) -> Result<Option<BlockScales>, ModelError> {
        let scales = match &self.scheme {
            Scheme::Bnb(parts) => Some(parts.scales()?),
            Scheme::Fp8(_) => None,
            Scheme::Mxfp4(parts) => {
                parts.read_codes(codes)?;
                return parts.scales().map(Some);
            }
            Scheme::Nvfp4(parts) => parts.scales()?,
        };
        if scales.is_some() {
            self.codes().read_from(0, codes)?;
        }
        Ok(scales)
    }

    /// Reads codes and scales, if they are bit for bit those of [`QuantizedWeight::format`].
    pub(super) fn read(&self) -> Result<Option<QuantizedTensor>, ModelError> {
        let Some(format) = self.format() else { return Ok(None) };
        let mut codes = vec![0; self.code_bytes()];
        let Some(block) = self.read_codes(&mut codes)? else { return Ok(None) };
        Ok(Some(QuantizedTensor { format, codes, scales: HostScales { block }, shape: self.shape.clone() }))
    }

    pub(super) fn values(&self) -> Result<Vec<f32>, ModelError> {
        if let Some(codes) = self.read()? {
            return Ok(codes.dequantize());
        }
        match &self.scheme {
            Scheme::Bnb(parts) => parts.values(&self.shape),
            Scheme::Fp8(parts) => parts.values(&self.shape),
            Scheme::Mxfp4(_) => unreachable!("its codes are ours"),
            Scheme::Nvfp4(parts) => parts.values(),
        }
    }
}

/// One tensor of a quantized weight, or of several.
#[derive(Clone, Debug)]
struct Part {
    shard: Arc<Shard>,
    name: String,
}

impl Part {
    fn info(&self) -> &safetensors::tensor::TensorInfo {
        self.shard.known(&self.name)
    }

    fn bytes(&self) -> Result<Vec<u8>, ModelError> {
        let TensorBytes { bytes, .. } = self.shard.read(&self.name)?;
        Ok(bytes)
    }

    /// Reads its bytes from `begin` on, as many as fit into `out`.
    fn read_from(&self, begin: usize, out: &mut [u8]) -> Result<(), ModelError> {
        self.shard.read_from(&self.name, begin, out)
    }

    fn floats(&self) -> Result<Vec<f32>, ModelError> {
        self.shard.read_f32(&self.name)
    }

    fn byte_len(&self) -> usize {
        let (start, end) = self.info().data_offsets;
        end - start
    }
}

/// The tensors of a folder that belong to no weight yet.
struct Unclaimed<'a> {
    dir: &'a Path,
    places: &'a mut BTreeMap<String, Arc<Shard>>,
}

impl Unclaimed<'_> {
    fn take(&mut self, weight: &str, name: String) -> Result<Part, ModelError> {
        self.take_if_there(&name).ok_or_else(|| self.bad(weight, format!("its part `{name}` is missing")))
    }

    fn take_if_there(&mut self, name: &str) -> Option<Part> {
        let (name, shard) = self.places.remove_entry(name)?;
        Some(Part { shard, name })
    }

    fn bad(&self, weight: &str, problem: String) -> ModelError {
        ModelError::QuantizedWeight { dir: PathBuf::from(self.dir), name: weight.to_owned(), problem }
    }
}

/// Combines the parts of quantized weights and removes them from `places`, which maps tensors to shards.
pub(super) fn find(dir: &Path, places: &mut BTreeMap<String, Arc<Shard>>) -> Result<Vec<QuantizedWeight>, ModelError> {
    let is_mark = |name: &&String| {
        bnb::is_mark(name) || fp8::is_mark(name, places) || mxfp4::is_mark(name) || nvfp4::is_mark(name)
    };
    let marks: Vec<String> = places.keys().filter(is_mark).cloned().collect();
    let mut unclaimed = Unclaimed { dir, places };
    let mut weights = Vec::new();
    for mark in marks {
        let found = if mxfp4::is_mark(&mark) {
            mxfp4::find(&mark, &mut unclaimed)?
        } else if bnb::is_mark(&mark) {
            vec![bnb::find(&mark, &mut unclaimed)?]
        } else if nvfp4::is_mark(&mark) {
            vec![nvfp4::find(&mark, &mut unclaimed)?]
        } else {
            vec![fp8::find(&mark, &mut unclaimed)?]
        };
        if let Some(QuantizedWeight { name, .. }) =
            found.iter().find(|weight| unclaimed.places.contains_key(&weight.name))
        {
            return Err(unclaimed.bad(name, "it is stored unquantized as well".to_owned()));
        }
        weights.extend(found);
    }
    Ok(weights)
}

/// Returns the dimensions and the element count of a matrix; `None` for other shapes, or if the count is 0 or overflows.
fn matrix(shape: &[usize]) -> Option<([usize; 2], usize)> {
    let &[rows, columns] = shape else { return None };
    let count = rows.checked_mul(columns)?;
    (count > 0).then_some(([rows, columns], count))
}
