//! Merges an adapter into its base: writes a model folder that needs no adapter, one tensor at a time.
//!
//! Every adapted weight becomes `W + scale B A`, computed in f32 and rounded once to the format of the folder; with DoRA its rows are scaled to the
//! norms in the magnitudes. The written folder is read again and multiplied with a few test vectors next to base and adapter, so a folder is reported
//! as done only if both compute the same.
//! Trade-off: rounding to a half format costs part of a small adapter; how much is measured on the same vectors and returned. The test vectors are
//! smooth, not activations of the model.

pub(crate) mod noise;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use firebrick_arch::{
    EMBEDDING, HEAD, LoraConfig, ModelSpec, ModuleSpec, PER_LAYER_EMBEDDING, generation_eos_token_ids,
    generation_pad_token_id, lora_tensor_names, magnitude_tensor_name, saved_tensor_name, token_rows_name,
};
use firebrick_precision::difference::{is_within, worst};
use firebrick_precision::{FloatType, QuantFormat};
use rayon::prelude::*;

use crate::checkpoint::experts::ParameterB;
use crate::checkpoint::write::companions::Companions;
use crate::checkpoint::{
    Bnb4bit, Fetched, HfFolder, TensorF32, float_type_of, stored_as, stored_format, write_bnb_folder, write_hf_folder,
    write_mxfp4_folder,
};
use crate::error::ModelError;
use crate::host_table::RowMean;
use crate::merge::noise::{Mxfp4Noise, NoiseSums};
use crate::peft::{check_adapter, check_layers, grow_for_adapter, leave_ignored, read_adapter, without_ignored};

/// Vectors that the written weights are tested with.
const PROBES: usize = 4;
/// Columns that one thread updates at a time: they fit into its L1 cache, next to the source matrix.
const COLUMNS: usize = 2048;
/// Rows that one processor works on at a time.
const ROWS: usize = 16;

/// Largest relative difference between outputs of a merged 4-bit weight (bitsandbytes or MXFP4) and those of base and adapter: several times what the
/// rounding of normally distributed weights explains.
const FOUR_BIT_BOUND: f64 = 0.4;

/// Inputs and settings of a merge.
#[derive(Debug)]
pub struct Merge<'a> {
    /// Folder of the base model.
    pub model: &'a Path,
    /// Folder of the adapter, in PEFT's format.
    pub adapter: &'a Path,
    /// Quantizes and dequantizes every adapted weight before the adapter is added: the weights that QLoRA trained on.
    pub requantized: Option<QuantFormat>,
    /// Number format of the merged weights; `None`: the base's.
    pub dtype: Option<FloatType>,
    /// Quantizes the projections of the merged model; the rest has `dtype`.
    pub bnb_4bit: Option<Bnb4bit>,
    /// Writes the experts in MXFP4, as the base has them; without it in `dtype`.
    pub mxfp4: bool,
    /// Files to write next to the weights besides the base's own.
    pub companions: Companions,
}

/// Measured results of a merge.
#[derive(Clone, Debug, PartialEq)]
pub struct MergeReport {
    /// Modules that have another weight now.
    pub modules: usize,
    /// Largest difference between the outputs of a merged weight and those of base and adapter, relative to the output.
    pub largest_error: f64,
    /// The same difference relative to the adapter's contribution, over all modules but experts in MXFP4: the part of the adapter that rounding lost.
    pub lost_of_adapter: f64,
    /// Number format of the merged weights.
    pub dtype: FloatType,
    /// The format of the projections, if they are quantized.
    pub bnb_4bit: Option<Bnb4bit>,
    /// What rounding did to experts in MXFP4 that have an adapter, if there are any.
    pub mxfp4: Option<Mxfp4Noise>,
}

/// Writes the model of a folder to `to` with its projections in 4 bits and everything else in the format that config.json names.
/// Projections that are in this format already keep their bytes. Returns their number.
///
/// # Errors
/// A folder that cannot be read, a folder `to` that holds something, a weight that is not finite, a mixture of experts.
pub fn quantize_folder(model: &Path, to: &Path, format: Bnb4bit, companions: &Companions) -> Result<usize, ModelError> {
    let base = HfFolder::open(model)?;
    let config = base.read_config()?;
    base.check_complete(&config)?;
    let dtype = float_type_of(&config);
    write_bnb_folder(to, &config, format, dtype, Some(companions), &base, |_| Ok(None))?;
    let written = HfFolder::open(to)?;
    written.check_complete(&config)?;
    Ok(written.quantized_weights().values().sum())
}

/// Writes the merged model to `to`, which appears only when it is complete, and checks it.
///
/// # Errors
/// Folders that cannot be read or do not fit each other; a folder `to` that is not empty; [`ModelError::MergedWrong`] if the written weights do not
/// compute what base and adapter do.
pub fn merge_adapter(merge: &Merge<'_>, to: &Path) -> Result<MergeReport, ModelError> {
    let base = HfFolder::open(merge.model)?;
    let config = base.read_config()?;
    base.check_complete(&config)?;
    if merge.mxfp4 && !base.names().any(|name| config.spec.is_mxfp4(name)) {
        return Err(ModelError::NotMxfp4 { dir: merge.model.to_path_buf() });
    }
    let (settings, mut tensors) = read_adapter(merge.adapter)?;
    let mut config = grow_for_adapter(config, merge.adapter)?;
    let settings = without_ignored(&settings, &config.spec);
    leave_ignored(&mut tensors, &config.spec, merge.adapter);
    check_layers(merge.adapter, &tensors, config.spec.layers.len(), &settings)?;
    check_adapter(merge.adapter, &config.spec, &settings)?;
    config.add_eos_token_ids(generation_eos_token_ids(merge.adapter)?);
    let pad = generation_pad_token_id(merge.adapter)?;
    if pad != generation_pad_token_id(merge.model)? {
        pad.into_iter().for_each(|id| config.set_pad_token_id(id));
    }
    let dtype = merge.dtype.unwrap_or_else(|| float_type_of(&config));
    if config.spec.tie_word_embeddings && settings.unties() {
        config.set_tied(false);
    }
    let shapes: BTreeMap<String, Vec<usize>> =
        config.spec.tensors().into_iter().map(|tensor| (tensor.name, tensor.shape)).collect();
    let parameters = parameters_of(&config.spec, &settings);
    let (spec, settings) = (&config.spec, &settings);
    let source = Source { base: &base, tensors: &tensors, shapes: &shapes, merge, settings, spec, parameters };
    let companions = Some(&merge.companions);
    // Nothing: as the base has it.
    let fetch = |name: &str, is_kept: bool| match source.merged(name)? {
        Some(values) => Ok(Some(Fetched::Values(values))),
        None if is_kept => Ok(None),
        None => source.unchanged(name, dtype).map(Some),
    };
    match merge.bnb_4bit {
        None if merge.mxfp4 => {
            write_mxfp4_folder(to, &config, dtype, companions, &base, |name| fetch(name, spec.is_mxfp4(name)))?;
        }
        None => write_hf_folder(to, &config, dtype, companions, Some(&base), |name| {
            fetch(name, false).map(|fetched| fetched.expect("nothing is kept"))
        })?,
        Some(format) => {
            write_bnb_folder(to, &config, format, dtype, companions, &base, |name| fetch(name, base.contains(name)))?;
        }
    }
    source.check(&HfFolder::open(to)?, dtype)
}

struct PartOfParameter {
    parameter: Arc<ModuleSpec>,
    experts: usize,
    /// Which of the parameter's matrices it is.
    index: usize,
}

/// Returns the matrices of all parameters of experts that have an adapter, by their paths in a checkpoint.
fn parameters_of(spec: &ModelSpec, settings: &LoraConfig) -> BTreeMap<String, PartOfParameter> {
    let mut parts = BTreeMap::new();
    for (module, experts) in spec.stacks() {
        if module.parameter.is_none() || !settings.adapts(&module.path) {
            continue;
        }
        let parameter = Arc::new(module);
        for (index, piece) in parameter.pieces.iter().enumerate() {
            let part = PartOfParameter { parameter: Arc::clone(&parameter), experts, index };
            parts.insert(piece.path.clone(), part);
        }
    }
    parts
}

struct ModuleAdapter<'a> {
    a: Cow<'a, TensorF32>,
    b: Cow<'a, TensorF32>,
    scale: f64,
    /// DoRA's.
    magnitude: Option<&'a TensorF32>,
}

impl ModuleAdapter<'_> {
    /// Returns the factors of the rows of `W + scale B A`, in f64: magnitude over norm, or 1.
    fn row_factors(&self, base: &[f32]) -> Vec<f64> {
        let Some(magnitude) = self.magnitude else { return vec![1.0; self.b.shape[0]] };
        let (mut values, inputs) = (base.to_vec(), self.a.shape[1]);
        add_product(&mut values, &self.a, &self.b, self.scale as f32);
        let norms = values.chunks(inputs).map(norm);
        norms.zip(&magnitude.values).map(|(norm, &magnitude)| f64::from(magnitude) / norm).collect()
    }
}

struct Source<'a> {
    base: &'a HfFolder,
    tensors: &'a BTreeMap<String, TensorF32>,
    shapes: &'a BTreeMap<String, Vec<usize>>,
    merge: &'a Merge<'a>,
    settings: &'a LoraConfig,
    spec: &'a ModelSpec,
    /// The matrices of experts whose parameter has an adapter, by their paths.
    parameters: BTreeMap<String, PartOfParameter>,
}

impl Source<'_> {
    fn adapter_of(&self, name: &str) -> Option<ModuleAdapter<'_>> {
        let path = name.strip_suffix(".weight")?;
        if let Some(part) = self.parameters.get(path) {
            return self.adapter_of_part(part);
        }
        let (a, b) = lora_tensor_names(path);
        Some(ModuleAdapter {
            a: Cow::Borrowed(self.tensors.get(&a)?),
            b: Cow::Borrowed(self.tensors.get(&b)?),
            scale: self.settings.scaling_of(path),
            magnitude: self.tensors.get(&magnitude_tensor_name(path)),
        })
    }

    /// Returns the part of a parameter's adapter for one of the matrices that a checkpoint stores.
    fn adapter_of_part(&self, part: &PartOfParameter) -> Option<ModuleAdapter<'_>> {
        let PartOfParameter { parameter: module, experts, index } = part;
        let (a, b) = lora_tensor_names(&self.settings.parameter_adapter(&module.path));
        let (a, b) = (self.tensors.get(&a)?, self.tensors.get(&b)?);
        let (r, inputs, rows) = (a.shape[0] / experts, a.shape[1], module.pieces[*index].rows);
        let (expert, first) = (index * rows / module.out_features(), index * rows % module.out_features());
        let of_expert = a.values[expert * r * inputs..][..r * inputs].to_vec();
        let stored = ParameterB { experts: *experts, r, order: module.parameter? };
        let of_rows = stored.rows_of(&b.values, expert, first..first + rows);
        Some(ModuleAdapter {
            a: Cow::Owned(TensorF32 { shape: vec![r, inputs], values: of_expert }),
            b: Cow::Owned(TensorF32 { shape: vec![rows, r], values: of_rows }),
            scale: self.settings.scaling_of(&module.path),
            magnitude: None,
        })
    }

    /// Computes the values of a tensor that the adapter changes.
    fn merged(&self, name: &str) -> Result<Option<Vec<f32>>, ModelError> {
        if let Some(trained) = self.tensors.get(&saved_tensor_name(name)) {
            return Ok(Some(trained.values.clone()));
        }
        if let Some(rows) = self.tensors.get(&token_rows_name(name)) {
            return self.with_rows(name, rows).map(Some);
        }
        if name == PER_LAYER_EMBEDDING && self.base.info(name)?.shape != self.shapes[name] {
            return self.with_mean_rows(name).map(Some);
        }
        let Some(adapter) = self.adapter_of(name) else { return Ok(None) };
        let mut values = self.base_weight(name)?;
        add_product(&mut values, &adapter.a, &adapter.b, adapter.scale as f32);
        if let Some(magnitude) = adapter.magnitude {
            set_norms(&mut values, &magnitude.values);
        }
        Ok(Some(values))
    }

    /// Reads a tensor without an adapter: byte for byte if the format stays.
    fn unchanged(&self, name: &str, dtype: FloatType) -> Result<Fetched, ModelError> {
        // An untied head that does not train is still the table that it shared.
        let name = if name == HEAD && self.base.info(name).is_err() { EMBEDDING } else { name };
        if self.base.info(name)?.dtype == stored_as(stored_format(name, dtype)) {
            return Ok(Fetched::Bytes(self.base.read(name)?.bytes));
        }
        Ok(Fetched::Values(self.base.read_f32(name, &self.shapes[name])?))
    }

    /// Reads a table of the base and replaces the rows that trained alone.
    fn with_rows(&self, name: &str, rows: &TensorF32) -> Result<Vec<f32>, ModelError> {
        let stored = if name == HEAD && self.base.info(name).is_err() { EMBEDDING } else { name };
        let mut values = self.base.read_f32(stored, &self.base.info(stored)?.shape)?;
        let width = self.spec.hidden_size;
        values.resize(self.spec.vocab_size * width, 0.0);
        for (&id, row) in self.settings.token_rows(name, self.spec).iter().zip(rows.values.chunks(width)) {
            values[id * width..][..width].copy_from_slice(row);
        }
        Ok(values)
    }

    /// Reads a table of the base and adds the missing rows, which are the mean of the others.
    fn with_mean_rows(&self, name: &str) -> Result<Vec<f32>, ModelError> {
        let (stored, [rows, width]) = (self.base.info(name)?.shape, [0, 1].map(|axis: usize| self.shapes[name][axis]));
        let mut values = self.base.read_f32(name, &stored)?;
        let mut mean = RowMean::new(width);
        mean.add(values.iter().copied());
        let mean = mean.finish();
        (stored[0]..rows).for_each(|_| values.extend(&mean));
        Ok(values)
    }

    /// Reads a weight of the base as the adapter was trained on it.
    fn base_weight(&self, name: &str) -> Result<Vec<f32>, ModelError> {
        let shape = &self.shapes[name];
        let values = self.base.read_f32(name, shape)?;
        match self.merge.requantized.filter(|format| {
            self.adapter_of(name).is_some() && !self.base.skips(name) && self.base.stored_format(name) != Some(*format)
        }) {
            Some(format) => {
                let quantized = format.quantize(&values, shape);
                Ok(quantized
                    .map_err(|source| ModelError::NotQuantizable { name: name.to_owned(), source })?
                    .dequantize())
            }
            None => Ok(values),
        }
    }

    /// Multiplies test vectors with the written weights, and with base and adapter.
    fn check(&self, written: &HfFolder, dtype: FloatType) -> Result<MergeReport, ModelError> {
        let bnb_4bit = self.merge.bnb_4bit;
        let mut report =
            MergeReport { modules: 0, largest_error: 0.0, lost_of_adapter: 0.0, dtype, bnb_4bit, mxfp4: None };
        let (mut lost, mut contributed, mut noise) = (0.0, 0.0, NoiseSums::default());
        for (name, shape) in self.shapes {
            let Some(adapter) = self.adapter_of(name) else { continue };
            let x = probes(shape[1]);
            let is_mxfp4 = self.merge.mxfp4 && self.spec.is_mxfp4(name);
            let bound = if bnb_4bit.is_some() || is_mxfp4 { FOUR_BIT_BOUND } else { merge_bound(dtype) };
            let (values, weight) = (written.read_f32(name, shape)?, self.base_weight(name)?);
            if is_mxfp4 {
                let exact = self.merged(name)?.expect("the weight has an adapter");
                noise.add(&weight, &exact, &values);
            }
            let merged = product(&values, shape, &x);
            let base = product(&weight, shape, &x);
            let low = product(&adapter.a.values, &adapter.a.shape, &x);
            let low: Vec<Vec<f64>> = (0..PROBES).map(|probe| low.iter().map(|row| row[probe]).collect()).collect();
            let low = product(&adapter.b.values, &adapter.b.shape, &low);
            let factors = adapter.row_factors(&weight);
            let (mut wrong, mut size, mut of_adapter) = (0.0, 0.0, 0.0);
            for (((merged, base), low), factor) in merged.iter().zip(&base).zip(&low).zip(factors) {
                for ((merged, base), low) in merged.iter().zip(base).zip(low) {
                    let expected = factor * (base + adapter.scale * low);
                    wrong += (merged - expected).powi(2);
                    size += expected * expected;
                    of_adapter += (expected - base).powi(2);
                }
            }
            if !is_mxfp4 {
                (lost, contributed) = (lost + wrong, contributed + of_adapter);
            }
            let error = worst([(wrong / size.max(f64::MIN_POSITIVE)).sqrt()]);
            if !is_within(error, bound) {
                let (dir, name) = (written.dir().to_path_buf(), name.clone());
                return Err(ModelError::MergedWrong { dir, name, error, bound });
            }
            report.largest_error = worst([report.largest_error, error]);
            report.modules += 1;
        }
        report.mxfp4 = noise.noise();
        report.lost_of_adapter = if contributed > 0.0 { (lost / contributed).sqrt() } else { 0.0 };
        Ok(report)
    }
}

/// Returns the largest allowed difference of a merged weight's outputs: several times what its rounding explains.
fn merge_bound(dtype: FloatType) -> f64 {
    match dtype {
        FloatType::F32 => 1e-5,
        FloatType::F16 => 2e-3,
        FloatType::Bf16 => 1e-2,
    }
}

fn norm(row: &[f32]) -> f64 {
    row.iter().map(|&value| f64::from(value).powi(2)).sum::<f64>().sqrt()
}

/// Scales rows to these norms; a norm may be negative, as DoRA's magnitudes may.
fn set_norms(values: &mut [f32], norms: &[f32]) {
    let inputs = values.len() / norms.len().max(1);
    for (row, &target) in values.chunks_mut(inputs.max(1)).zip(norms) {
        let factor = f64::from(target) / norm(row);
        row.iter_mut().for_each(|value| *value = (f64::from(*value) * factor) as f32);
    }
}

/// Computes `values += scale b a`, rows on all processors. `values` is `[out, in]`, `b` `[out, r]`, `a` `[r, in]`.
fn add_product(values: &mut [f32], a: &TensorF32, b: &TensorF32, scale: f32) {
    let [r, inputs] = [a.shape[0], a.shape[1]];
    values.par_chunks_mut(ROWS * inputs).zip(b.values.par_chunks(ROWS * r)).for_each(|(values, b)| {
        for first in (0..inputs).step_by(COLUMNS) {
            let columns = first..(first + COLUMNS).min(inputs);
            for (row, b) in values.chunks_mut(inputs).zip(b.chunks(r)) {
                let row = &mut row[columns.clone()];
                for (factor, a) in b.iter().zip(a.values.chunks(inputs)) {
                    let factor = factor * scale;
                    row.iter_mut().zip(&a[columns.clone()]).for_each(|(sum, a)| *sum += factor * a);
                }
            }
        }
    });
}

/// Creates test vectors of this width: cosines with different frequencies, so that values of every size and sign occur.
fn probes(width: usize) -> Vec<Vec<f64>> {
    let probe = |index: usize| {
        let frequency = 0.37 + 1.13 * index as f64;
        (0..width).map(|at| (frequency * (at as f64 + 1.0).powf(1.1)).cos()).collect()
    };
    (0..PROBES).map(probe).collect()
}

/// Computes `W x` of each vector in f64, rows on all processors: `[row][vector]`.
fn product(values: &[f32], shape: &[usize], x: &[Vec<f64>]) -> Vec<Vec<f64>> {
    values.par_chunks(shape[1]).with_min_len(ROWS).map(|row| x.iter().map(|x| dot(row, x)).collect()).collect()
}

/// Uses eight partial sums, so that they can be computed at once.
fn dot(a: &[f32], b: &[f64]) -> f64 {
    let mut sums = [0.0; 8];
    for (a, b) in a.chunks(8).zip(b.chunks(8)) {
        for (sum, (a, b)) in sums.iter_mut().zip(a.iter().zip(b)) {
            *sum += f64::from(*a) * b;
        }
    }
    sums.iter().sum()
}

#[cfg(test)]
mod tests {
    use std::fs::{read_to_string, write};

    use tempfile::{TempDir, tempdir};

    use super::*;
    use crate::peft::write_adapter;
    use crate::test_config::{shapes, tiny};

    /// Creates values of every size that half formats have to round.
    fn values(name: &str, count: usize, size: f32) -> Vec<f32> {
        let seed = name.bytes().fold(1_u32, |seed, byte| seed.wrapping_mul(31).wrapping_add(byte.into()));
        (0..count).map(|at| size * (0.7 * at as f32 + seed as f32 % 91.0).sin()).collect()
    }

    /// Creates a base and an adapter for every projection, whose contribution has this size.
    fn folders(dtype: FloatType, size: f32) -> TempDir {
        let temp = tempdir().unwrap();
        let config = tiny(&[]).unwrap();
        let shapes = shapes(&config);
        let count = |shape: &[usize]| shape.iter().product::<usize>();
        let fetch = |name: &str| Ok(Fetched::Values(values(name, count(&shapes[name]), 0.5)));
        write_hf_folder(&temp.path().join("base"), &config, dtype, None, None, fetch).unwrap();
        let lora = LoraConfig { r: 4, lora_alpha: 8.0, ..LoraConfig::default() };
        let tensors = config.spec.adapter_tensors(&lora).unwrap().into_iter().map(|tensor| {
            let values = values(&tensor.name, count(&tensor.shape), size);
            (tensor.name, TensorF32 { shape: tensor.shape, values })
        });
        write_adapter(&temp.path().join("adapter"), &lora, &config, &tensors.collect()).unwrap();
        temp
    }

    fn merged(
        folder: &Path,
        dtype: Option<FloatType>,
        requantized: Option<QuantFormat>,
    ) -> Result<MergeReport, ModelError> {
        let (model, adapter) = (folder.join("base"), folder.join("adapter"));
        let companions = Companions { from: model.clone(), ..Companions::default() };
        let merge =
            Merge { model: &model, adapter: &adapter, requantized, dtype, bnb_4bit: None, mxfp4: false, companions };
        merge_adapter(&merge, &folder.join("merged"))
    }

    #[test]
    fn a_merge_computes_what_base_and_adapter_do() {
        for dtype in [FloatType::F32, FloatType::Bf16, FloatType::F16] {
            let temp = folders(dtype, 0.1);
            let report = merged(temp.path(), None, None).unwrap();
            assert_eq!((report.modules, report.dtype), (14, dtype));
            assert!(report.largest_error < merge_bound(dtype) / 2.0, "{report:?}");
            let [base, merged] = ["base", "merged"].map(|name| HfFolder::open(&temp.path().join(name)).unwrap());
            for name in base.names() {
                let is_adapted = name.contains("_proj");
                assert_eq!(base.read(name).unwrap() == merged.read(name).unwrap(), !is_adapted, "{name}");
            }
        }
    }

    #[test]
    fn what_rounding_takes_of_a_small_adapter_is_reported() {
        let lost = |size, dtype| {
            let temp = folders(FloatType::Bf16, size);
            merged(temp.path(), Some(dtype), None).unwrap().lost_of_adapter
        };
        assert!(lost(0.1, FloatType::Bf16) < 0.1);
        assert!(lost(0.01, FloatType::Bf16) > 0.5, "far below a rounding step of the weights");
        assert!(lost(0.01, FloatType::F32) < 1e-3);
    }

    #[test]
    fn a_merge_may_be_into_the_dequantized_base() {
        let (name, shape) = ("model.layers.0.self_attn.o_proj.weight", [8, 8]);
        for format in QuantFormat::ALL.into_iter().filter(|format| format.check_columns(8).is_ok()) {
            let temp = folders(FloatType::F32, 0.1);
            merged(temp.path(), None, Some(format)).unwrap();
            let [base, merged] = ["base", "merged"].map(|name| HfFolder::open(&temp.path().join(name)).unwrap());
            let dequantized = format.quantize(&base.read_f32(name, &shape).unwrap(), &shape).unwrap().dequantize();
            let (_, tensors) = read_adapter(&temp.path().join("adapter")).unwrap();
            let (a, b) = lora_tensor_names("model.layers.0.self_attn.o_proj");
            let mut expected = dequantized;
            add_product(&mut expected, &tensors[&a], &tensors[&b], 2.0);
            assert_eq!(merged.read_f32(name, &shape).unwrap(), expected, "{format}");
        }
    }

    #[test]
    fn nothing_is_written_of_what_does_not_fit() {
        let temp = folders(FloatType::F32, 0.1);
        let path = temp.path().join("base/config.json");
        let text = read_to_string(&path).unwrap();
        write(path, text.replace("\"intermediate_size\": 12", "\"intermediate_size\": 16")).unwrap();
        assert!(merged(temp.path(), None, None).is_err());
        assert!(!temp.path().join("merged").exists());
    }
}
