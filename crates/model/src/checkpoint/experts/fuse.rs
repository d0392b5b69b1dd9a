//! Puts the tensors of single experts together for a folder that stores all of a layer in one: the other direction of `fused`.
//!
//! Trade-off: the tensor of all experts of a layer is in memory at once, up to a few GB.

use std::collections::{BTreeMap, BTreeSet};

use firebrick_arch::{ExpertNames, MlpSpec, ModelSpec, TensorSpec};
use firebrick_precision::{BlockScales, QuantizedTensor};

use crate::checkpoint::HfFolder;
use crate::checkpoint::experts::fused::{Interleaved, name_of, projections};
use crate::error::ModelError;

/// The tensors of a model that hold all experts of a layer, by their names on disk.
#[derive(Default)]
pub(crate) struct FusedTensors {
    tensors: BTreeMap<String, FusedTensor>,
    /// The fused tensor of each tensor of one expert.
    of_parts: BTreeMap<String, String>,
}

struct FusedTensor {
    /// Experts, inputs (1 for a bias) and outputs.
    sizes: [usize; 3],
    /// Whether the matrices of experts are as the model has them, with gate's rows and then up's.
    in_rows: bool,
    parts: Vec<FusedPart>,
}

struct FusedPart {
    name: String,
    expert: usize,
    projection: Interleaved,
}

impl FusedTensors {
    /// Lists those of a model; none unless its family always stores them, or `base` does.
    pub(crate) fn of(spec: &ModelSpec, base: Option<&HfFolder>) -> Self {
        let mut all = Self::default();
        let is_fused = base.is_some_and(HfFolder::has_fused_experts);
        for (layer, of_layer) in spec.layers.iter().enumerate() {
            let MlpSpec::Experts { count, intermediate_size, names, .. } = of_layer.mlp else { continue };
            let in_turn = names == ExpertNames::GptOss;
            if !is_fused && !names.are_in_one_tensor() {
                continue;
            }
            let block = format!("model.layers.{layer}.{}", names.block());
            // The block may be the layer itself.
            let block = block.trim_end_matches('.');
            let sides = [
                ("gate_up_proj", [spec.hidden_size, 2 * intermediate_size]),
                ("down_proj", [intermediate_size, spec.hidden_size]),
            ];
            for (name, [inputs, outputs]) in sides {
                all.add(block, name, "weight", [count, inputs, outputs], !in_turn);
                if in_turn {
                    all.add(block, name, "bias", [count, 1, outputs], false);
                }
            }
        }
        all
    }

    fn add(&mut self, block: &str, fused: &str, kind: &str, sizes: [usize; 3], in_rows: bool) {
        let name = format!("{block}.experts.{fused}{}", if kind == "bias" { "_bias" } else { "" });
        let projections = projections(fused).expect("the names above are those of fused tensors");
        let part = |expert: usize, projection: &Interleaved| {
            let name = name_of(block, expert, projection.name, kind);
            let rows = sizes[2] / projections.len();
            let projection = if in_rows { projection.in_rows(rows) } else { *projection };
            FusedPart { name, expert, projection }
        };
        let parts: Vec<_> = (0..sizes[0])
            .flat_map(|expert| projections.iter().map(move |projection| part(expert, projection)))
            .collect();
        self.of_parts.extend(parts.iter().map(|part| (part.name.clone(), name.clone())));
        self.tensors.insert(name, FusedTensor { sizes, in_rows, parts });
    }

    /// Returns names and shapes on disk of a model's tensors, in their order, each once.
    pub(crate) fn stored(&self, tensors: Vec<TensorSpec>) -> Vec<(String, Vec<usize>)> {
        let mut seen = BTreeSet::new();
        let stored = tensors.into_iter().filter_map(|TensorSpec { name, shape, .. }| {
            let Some(fused) = self.of_parts.get(&name) else { return Some((name, shape)) };
            let FusedTensor { sizes: [experts, inputs, outputs], in_rows, .. } = self.tensors[fused];
            let shape = match (fused.ends_with("_bias"), in_rows) {
                (true, _) => vec![experts, outputs],
                (false, true) => vec![experts, outputs, inputs],
                (false, false) => vec![experts, inputs, outputs],
            };
            seen.insert(fused).then(|| (fused.clone(), shape))
        });
        stored.collect()
    }

    /// Reads a tensor on disk by its parts, each of which `read` returns as bytes; by itself if it is not fused.
    pub(crate) fn read(
        &self,
        stored: &str,
        read: &mut impl FnMut(&str) -> Result<Vec<u8>, ModelError>,
    ) -> Result<Vec<u8>, ModelError> {
        let Some(fused) = self.tensors.get(stored) else { return read(stored) };
        let mut all = Vec::new();
        for part in &fused.parts {
            let bytes = read(&part.name)?;
            let [experts, inputs, outputs] = fused.sizes;
            let projections = fused.parts.len() / experts;
            let size = bytes.len() / (inputs * outputs / projections);
            all.resize(experts * inputs * outputs * size, 0);
            fused.place(part, &bytes, &mut all, size);
        }
        Ok(all)
    }

    /// Returns whether a tensor on disk holds weights of all experts of a layer, which are no biases.
    pub(crate) fn is_weight(&self, stored: &str) -> bool {
        self.tensors.get(stored).is_some_and(|fused| fused.sizes[1] > 1)
    }

    /// Reads codes and scales of the weights of all experts by those of each, which `read` returns in MXFP4.
    pub(crate) fn read_mxfp4(
        &self,
        stored: &str,
        mut read: impl FnMut(&str) -> Result<QuantizedTensor, ModelError>,
    ) -> Result<[Vec<u8>; 2], ModelError> {
        let (fused, mut all) = (&self.tensors[stored], [Vec::new(), Vec::new()]);
        for part in &fused.parts {
            let tensor = read(&part.name)?;
            let BlockScales::Narrow { codes: scales, .. } = tensor.scales.block else {
                unreachable!("scales of MXFP4 are a narrow float's")
            };
            for (all, rows) in all.iter_mut().zip([tensor.codes, scales]) {
                fused.place_rows(part, &rows, all);
            }
        }
        Ok(all)
    }
}

impl FusedTensor {
    /// Copies the elements of a part, of `size` bytes each, to their places.
    fn place(&self, part: &FusedPart, bytes: &[u8], all: &mut [u8], size: usize) {
        let ([_, inputs, outputs], Interleaved { first, step, .. }) = (self.sizes, part.projection);
        for (index, element) in bytes.chunks_exact(size).enumerate() {
            let (row, column) = (index / inputs, index % inputs);
            let row = first + row * step;
            let place = match self.in_rows {
                true => (part.expert * outputs + row) * inputs + column,
                false => (part.expert * inputs + column) * outputs + row,
            };
            all[place * size..][..size].copy_from_slice(element);
        }
    }

    /// Copies the rows of a part, of any number of bytes each, to their places.
    fn place_rows(&self, part: &FusedPart, rows: &[u8], all: &mut Vec<u8>) {
        let ([experts, _, outputs], Interleaved { first, step, .. }) = (self.sizes, part.projection);
        let width = rows.len() * step / outputs;
        all.resize(experts * outputs * width, 0);
        for (index, row) in rows.chunks_exact(width).enumerate() {
            all[(part.expert * outputs + first + index * step) * width..][..width].copy_from_slice(row);
        }
    }
}
