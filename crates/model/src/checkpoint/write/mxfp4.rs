//! Model folders whose experts are in MXFP4, as gpt-oss is published; the layout is that of `quantized::mxfp4`.
//!
//! Experts that do not change keep codes and scales of the base; others are quantized with the scales of least error.
//! Trade-off: the codes of all experts of a projection are in memory at once, about 1 GB for gpt-oss 120B.

use std::collections::BTreeMap;
use std::path::Path;

use firebrick_arch::ModelConfig;
use firebrick_precision::{FloatType, QuantizedTensor};
use safetensors::Dtype;

use crate::checkpoint::experts::fuse::FusedTensors;
use crate::checkpoint::quantized::{MXFP4_BLOCK, MXFP4_CODES, MXFP4_SCALES};
use crate::checkpoint::read::convert::{bytes_of, stored_as};
use crate::checkpoint::write::companions::Companions;
use crate::checkpoint::write::{MAX_SHARD_BYTES, in_shards, write_companions, write_shards};
use crate::checkpoint::{Fetched, HfFolder, TensorInfo, stored_format, write_folder};
use crate::error::ModelError;

/// Writes a model whose experts `base` has in MXFP4 as such a folder, with the `quantization_config` of the base; all other tensors in `dtype`.
/// `fetch` is called once for each tensor of the model; for weights of experts it returns values, or `None` for those of the base.
pub(crate) fn write_mxfp4_folder(
    dir: &Path,
    config: &ModelConfig,
    dtype: FloatType,
    companions: Option<&Companions>,
    base: &HfFolder,
    mut fetch: impl FnMut(&str) -> Result<Option<Fetched>, ModelError>,
) -> Result<(), ModelError> {
    let fused = FusedTensors::of(&config.spec, None);
    let stored = fused.stored(config.spec.tensors());
    let infos = stored.iter().flat_map(|(name, shape)| infos(&fused, name, shape, dtype));
    let shards = in_shards(infos, MAX_SHARD_BYTES);
    // Codes come before their scales in a shard, and no later shard.
    let mut scales = BTreeMap::new();
    let mut read = |stored: &str| {
        if let Some(scales) = scales.remove(stored) {
            return Ok(scales);
        }
        if let Some(name) = stored.strip_suffix(MXFP4_CODES).filter(|name| fused.is_weight(name)) {
            let [codes, of_codes] = fused.read_mxfp4(name, |part| match fetch(part)? {
                Some(Fetched::Values(values)) => {
                    let shape = base.info(part)?.shape;
                    let refused = |source| ModelError::NotQuantizable { name: part.to_owned(), source };
                    QuantizedTensor::mxfp4_of_least_error(&values, &shape).map_err(refused)
                }
                Some(Fetched::Bytes(_)) => unreachable!("a weight of experts in MXFP4 is no bytes of one tensor"),
                None => {
                    assert!(config.spec.is_mxfp4(part), "`{part}` is copied");
                    Ok(base.read_quantized(part)?.expect("the base was compared with its config.json"))
                }
            })?;
            scales.insert(format!("{name}{MXFP4_SCALES}"), of_codes);
            return Ok(codes);
        }
        let mut of_model = |name: &str| match fetch(name)?.expect("only weights of experts are copied from the base") {
            Fetched::Values(values) => bytes_of(name, &values, stored_format(name, dtype)),
            Fetched::Bytes(bytes) => Ok(bytes),
        };
        fused.read(stored, &mut of_model)
    };
    write_folder(dir, |partial| {
        write_shards(partial, &shards, &mut read)?;
        write_companions(partial, config, companions, &config.text_with(dtype.name(), config.quantization_config()))
    })
}

/// Returns the tensors of the file for one of [`FusedTensors::stored`].
fn infos(fused: &FusedTensors, name: &str, shape: &[usize], dtype: FloatType) -> Vec<(String, TensorInfo)> {
    if !fused.is_weight(name) {
        let dtype = stored_as(stored_format(name, dtype));
        return vec![(name.to_owned(), TensorInfo { dtype, shape: shape.to_vec() })];
    }
    let &[experts, inputs, outputs] = shape else { unreachable!("`{name}` has three dimensions") };
    let scales = vec![experts, outputs, inputs / MXFP4_BLOCK];
    let codes = [&scales[..], &[MXFP4_BLOCK / 2]].concat();
    let parts = [(MXFP4_CODES, codes), (MXFP4_SCALES, scales)];
    parts.map(|(suffix, shape)| (format!("{name}{suffix}"), TensorInfo { dtype: Dtype::U8, shape })).into()
}
