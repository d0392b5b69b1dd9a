//! Experts of a layer that a folder stores in one tensor, as gpt-oss, Qwen3.5 and Gemma 4 do: found by their names, and read as the tensors of single
//! experts.
//!
//! With biases (gpt-oss), `X.experts.gate_up_proj` is `[experts, in, 2 * out]` with the columns of gate and up in turn, `X.experts.down_proj` `[experts,
//! in, out]`, and `_bias` after either name is `[experts, 2 * out]` and `[experts, out]`. Without them (Qwen3.5; Gemma 4, where X is the layer), they are
//! `[experts, 2 * out, in]`, with gate's rows and then up's, and `[experts, out, in]`. The model knows them as `X.experts.N.gate_proj.weight` `[out, in]`
//! and so on, so the rest of this crate sees what other mixtures store.
//! Trade-off: gate and up of an expert are read with one another's columns, so those bytes are read twice.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use burn_tensor::DType;
use rayon::prelude::*;
use safetensors::Dtype;
use xxhash_rust::xxh3::xxh3_64;

use crate::checkpoint::read::shard::Shard;
use crate::checkpoint::tensor::TensorBytes;
use crate::error::ModelError;

/// The part of a path before the name of a projection.
const EXPERTS: &str = ".experts.";
const BIAS: &str = "_bias";
/// Columns that are gathered together, so that they come from few cache lines at a time.
const TILE: usize = 16;

/// The rows of one projection among those of its fused tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Interleaved {
    /// The projection's name in the model.
    pub(crate) name: &'static str,
    pub(crate) first: usize,
    /// Rows from one of its rows to the next.
    pub(crate) step: usize,
}

impl Interleaved {
    /// Returns the place of a projection of this many rows where each has its rows together.
    pub(crate) fn in_rows(self, rows: usize) -> Self {
        Self { first: self.first * rows, step: 1, ..self }
    }
}

/// Returns the projections that a fused tensor holds, in turn; `None` for another name.
pub(crate) fn projections(fused: &str) -> Option<&'static [Interleaved]> {
    const GATE_UP: [Interleaved; 2] =
        [Interleaved { name: "gate_proj", first: 0, step: 2 }, Interleaved { name: "up_proj", first: 1, step: 2 }];
    const DOWN: [Interleaved; 1] = [Interleaved { name: "down_proj", first: 0, step: 1 }];
    match fused {
        "gate_up_proj" => Some(&GATE_UP),
        "down_proj" => Some(&DOWN),
        _ => None,
    }
}

/// Splits the name of a fused tensor, without what follows the projection's name: the path of the experts, and its projections.
pub(crate) fn split(name: &str) -> Option<(&str, &'static [Interleaved])> {
    let (block, fused) = name.rsplit_once(EXPERTS)?;
    Some((block, projections(fused)?))
}

/// Returns the model's name for a tensor of one expert, `kind` being "weight" or "bias".
pub(crate) fn name_of(block: &str, expert: usize, projection: &str, kind: &str) -> String {
    format!("{block}{EXPERTS}{expert}.{projection}.{kind}")
}

/// A tensor of one expert, inside a tensor of all experts.
#[derive(Debug)]
pub(crate) struct ExpertSlice {
    shard: Arc<Shard>,
    /// The fused tensor.
    stored: String,
    /// Its shape in the model.
    pub(crate) shape: Vec<usize>,
    /// Elements of one expert in the fused tensor, and where they begin.
    count: usize,
    begin: usize,
    /// Offset of the first element among them, and the steps to the next row and column.
    first: usize,
    steps: [usize; 2],
}

/// Replaces fused tensors in `places`, which maps tensors to shards, by those of their experts.
pub(crate) fn find(places: &mut BTreeMap<String, Arc<Shard>>) -> Vec<(String, ExpertSlice)> {
    let is_fused = |name: &&String| split(name.strip_suffix(BIAS).unwrap_or(name)).is_some();
    // Biases, which are found by their weights, are the last.
    let mut fused: Vec<String> = places.keys().filter(is_fused).cloned().collect();
    fused.sort_by_key(|name| name.ends_with(BIAS));
    let mut slices = Vec::new();
    for name in fused {
        let has_biases = name.ends_with(BIAS) || places.contains_key(&format!("{name}{BIAS}"));
        let found = slices_of(&name, &places[&name], !has_biases);
        // A tensor of another shape keeps its name, and is refused with all tensors that do not fit.
        if !found.is_empty() {
            places.remove(&name);
            slices.extend(found);
        }
    }
    slices
}

fn slices_of(stored: &str, shard: &Arc<Shard>, in_rows: bool) -> Vec<(String, ExpertSlice)> {
    let is_bias = stored.ends_with(BIAS);
    let Some((block, projections)) = split(stored.strip_suffix(BIAS).unwrap_or(stored)) else { return Vec::new() };
    let (experts, inputs, width) = match (is_bias, shard.known(stored).shape.as_slice()) {
        (false, &[experts, width, inputs]) if in_rows => (experts, inputs, width),
        (false, &[experts, inputs, width]) => (experts, inputs, width),
        (true, &[experts, width]) => (experts, 1, width),
        _ => return Vec::new(),
    };
    if !width.is_multiple_of(projections.len()) {
        return Vec::new();
    }
    let (rows, count, kind) = (width / projections.len(), inputs * width, if is_bias { "bias" } else { "weight" });
    let slice = |expert: usize, of: &Interleaved| {
        let shape = if is_bias { vec![rows] } else { vec![rows, inputs] };
        let (shard, stored) = (Arc::clone(shard), stored.to_owned());
        let begin = expert * count;
        let (first, steps) = match in_rows {
            true => (of.in_rows(rows).first * inputs, [inputs, 1]),
            false => (of.first, [of.step, width]),
        };
        let slice = ExpertSlice { shard, stored, shape, count, begin, first, steps };
        (name_of(block, expert, of.name, kind), slice)
    };
    (0..experts).flat_map(|expert| projections.iter().map(move |of| slice(expert, of))).collect()
}

impl ExpertSlice {
    pub(crate) fn path(&self) -> &Path {
        &self.shard.path
    }

    pub(crate) fn dtype(&self) -> Dtype {
        self.shard.known(&self.stored).dtype
    }

    /// Reads it in the format `dtype`, into `out`, and checks that all of the expert's elements are finite. Returns the XXH3 of `out`.
    pub(crate) fn read_elements(&self, dtype: DType, out: &mut [u8]) -> Result<u64, ModelError> {
        let mut of_expert = vec![0; self.count * dtype.size()];
        self.shard.read_elements(&self.stored, self.begin, dtype, &mut of_expert)?;
        match dtype.size() {
            4 => self.gather::<4>(&of_expert, out),
            2 => self.gather::<2>(&of_expert, out),
            size => unreachable!("weights are f32, bf16 or f16, not {size} bytes"),
        }
        Ok(xxh3_64(out))
    }

    pub(crate) fn read(&self, name: &str) -> Result<TensorBytes, ModelError> {
        let (stored, shape) = (self.weight_dtype(name)?, self.shape.clone());
        let mut bytes = vec![0; shape.iter().product::<usize>() * stored.size()];
        self.read_elements(stored, &mut bytes)?;
        Ok(TensorBytes { dtype: self.dtype(), shape, bytes })
    }

    /// Returns the format of its elements on a device.
    pub(crate) fn weight_dtype(&self, name: &str) -> Result<DType, ModelError> {
        self.shard.weight_dtype(&self.stored, name)
    }

    pub(crate) fn read_f32(&self, name: &str) -> Result<Vec<f32>, ModelError> {
        self.weight_dtype(name)?;
        let mut values = vec![0.0; self.shape.iter().product()];
        self.read_elements(DType::F32, bytemuck::cast_slice_mut(&mut values))?;
        Ok(values)
    }

    fn gather<const N: usize>(&self, of_expert: &[u8], out: &mut [u8]) {
        let (from, columns) = (of_expert.as_chunks::<N>().0, self.shape.get(1).copied().unwrap_or(1));
        let [row_step, column_step] = self.steps;
        let rows_at_once = (1 << 14) / columns.max(1) + 1;
        let parts = out.as_chunks_mut::<N>().0.par_chunks_mut(rows_at_once * columns).enumerate();
        parts.for_each(|(part, out)| {
            for tile in (0..columns).step_by(TILE) {
                for (row, out) in out.chunks_exact_mut(columns).enumerate() {
                    let first = self.first + (part * rows_at_once + row) * row_step;
                    for (column, out) in out.iter_mut().enumerate().skip(tile).take(TILE) {
                        *out = from[first + column * column_step];
                    }
                }
            }
        });
    }
}
