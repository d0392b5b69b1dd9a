//! `quantization_config` of a `config.json`: reads the supported methods and refuses all others by name.
//!
//! The tensors in the folder show how a weight is stored; this decides whether its arithmetic is supported.
//! Trade-off: only keys that decide the arithmetic of weights are read, not those of activations and compute formats.

use serde_json::{Value, json};

use crate::error::ArchError;
use crate::json::JsonObject;

/// The key of `config.json`.
pub const QUANTIZATION_CONFIG: &str = "quantization_config";
/// The supported methods, for messages.
const SUPPORTED: &str = "Supported: bitsandbytes in 4 bits (nf4 and fp4), fp8 (e4m3) with weight_block_size [128, 128] \
                         or null, mxfp4 (gpt-oss), compressed-tensors with format float-quantized or nvfp4-pack-quantized. Use such a \
                         checkpoint, or the unquantized one: the base is quantized while it is read, if the run asks for \
                         it";

/// The quantization method of a checkpoint's weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quantization {
    /// 4-bit blocks of bitsandbytes.
    Bnb4bit,
    /// E4M3 with a scale per 128 x 128 weights, per row or per tensor.
    Fp8,
    /// Experts in MXFP4, as gpt-oss is published.
    Mxfp4,
    /// NVFP4 as compressed-tensors packs it.
    Nvfp4,
}

impl Quantization {
    /// Reads `quantization_config` of a `config.json`; `None` if there is none.
    ///
    /// # Errors
    /// A method, or a variant of one, that is not supported.
    pub fn parse(json: &JsonObject) -> Result<Option<Self>, ArchError> {
        let Some(config) = json.object(QUANTIZATION_CONFIG)? else { return Ok(None) };
        let refused = |got: String| Err(json.unsupported(QUANTIZATION_CONFIG, got, SUPPORTED));
        match config.str("quant_method")? {
            Some("bitsandbytes") => {
                if config.bool("load_in_8bit")? == Some(true) || config.bool("load_in_4bit")? != Some(true) {
                    return refused("bitsandbytes, but not in 4 bits (load_in_4bit)".to_owned());
                }
                Ok(Some(Self::Bnb4bit))
            }
            Some("fp8") => match (config.get("weight_block_size"), config.str("fmt")?.unwrap_or("e4m3")) {
                (None, "e4m3") => Ok(Some(Self::Fp8)),
                (Some(block), "e4m3") if *block == json!([128, 128]) => Ok(Some(Self::Fp8)),
                (block, fmt) => {
                    let block = block.unwrap_or(&Value::Null);
                    refused(format!("fp8 ({fmt}) with weight_block_size {block}"))
                }
            },
            Some("mxfp4") => Ok(Some(Self::Mxfp4)),
            Some("compressed-tensors") => {
                let transforms = config.get("transform_config").and_then(Value::as_object);
                match config.str("format")? {
                    _ if transforms.is_some_and(|transforms| !transforms.is_empty()) => {
                        refused("compressed-tensors with a transform_config, by which weights are rotated".to_owned())
                    }
                    Some("float-quantized") => Ok(Some(Self::Fp8)),
                    Some("nvfp4-pack-quantized") => Ok(Some(Self::Nvfp4)),
                    format => refused(format!("compressed-tensors with format {}", format.unwrap_or("not named"))),
                }
            }
            method => refused(format!("there (quant_method: {})", method.unwrap_or("not named"))),
        }
    }
}
