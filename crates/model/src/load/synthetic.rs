//! Models without a folder: with random weights for training, or with repeated weights for measurements; and the random numbers that every model
//! starts from.

use std::collections::{BTreeMap, BTreeSet};

use burn_tensor::DType;
use firebrick_arch::{ModelConfig, ModuleSpec, Role, TensorSpec};
use firebrick_kernels::Kernels;
use half::{bf16, f16};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rayon::prelude::*;

use super::{BuildOptions, Builder, Read};
use crate::checkpoint::Values;
use crate::decoder::Decoder;
use crate::division::Division;
use crate::error::ModelError;
use crate::host_table::TableSource;

/// Number of values that the weights of a synthetic model repeat.
const TILE: usize = (1 << 20) + 7;

impl<B: Kernels> Decoder<B> {
    /// Creates a model with random weights: normal with the config's `initializer_range`, norms that multiply by one, biases zero. Ranks may divide
    /// the weights of its layers.
    ///
    /// # Errors
    /// A LoRA target that the model does not have.
    pub fn random(
        config: ModelConfig,
        options: &BuildOptions,
        division: Option<Division>,
        device: &B::Device,
    ) -> Result<Self, ModelError> {
        let (deviation, seed) = (config.spec.initializer_range as f32, options.seed);
        let (spec, table) = (config.spec.clone(), repeated_table(&config, seed));
        let mut read = |tensor: &TensorSpec| {
            let elements = tensor.elements();
            let values = match tensor.role {
                Role::Norm | Role::GatedNorm => vec![1.0 - spec.norm_offset_of(tensor) as f32; elements],
                Role::DecayBias | Role::RouterScale | Role::LayerScalar => vec![1.0; elements],
                // As in transformers: the decays are as if drawn from 0 to 16.
                Role::DecayLog => {
                    let mut random = stream(seed, &tensor.name);
                    (0..elements).map(|_| (16.0 * (1.0 - random.random::<f32>())).ln()).collect()
                }
                Role::Bias | Role::RouterCorrection => vec![0.0; elements],
                _ => normal(elements, deviation, &mut stream(seed, &tensor.name)),
            };
            Ok(Values::of_f32(&values, &|bytes| B::host_buffer(device, bytes)))
        };
        from_values(&config, options, division, device, &mut read, table)
    }

    /// Creates a model for measurements, not for training: its weights repeat `TILE` random numbers, so they are created as fast as they can be
    /// copied, and only one stored base tensor exists at a time.
    pub fn synthetic(
        config: ModelConfig,
        options: &BuildOptions,
        division: Option<Division>,
        device: &B::Device,
    ) -> Result<Self, ModelError> {
        let spec = config.spec.clone();
        let dtype = if options.frozen_dtype() == DType::F16 { DType::F16 } else { DType::BF16 };
        // float16 has all of these values in bfloat16.
        let bytes = |tile: Vec<f32>| -> Vec<u8> {
            let values = tile.into_iter().map(bf16::from_f32);
            match dtype {
                DType::F16 => values.flat_map(|value| f16::from_f32(value.to_f32()).to_ne_bytes()).collect(),
                _ => values.flat_map(bf16::to_ne_bytes).collect(),
            }
        };
        let deviation = config.spec.initializer_range as f32;
        let random = bytes(normal(TILE, deviation, &mut stream(options.seed, "tile")));
        let zeros = bytes(vec![0.0; TILE]);
        let (elsewhere, stacks) = (division.clone(), stacks_of_pieces(&config));
        let table = repeated_table(&config, options.seed);
        let mut read = |tensor: &TensorSpec| {
            let norms;
            let tile = match tensor.role {
                Role::Norm | Role::GatedNorm | Role::DecayBias | Role::RouterScale | Role::LayerScalar => {
                    norms = bytes(vec![1.0 - spec.norm_offset_of(tensor) as f32; tensor.elements()]);
                    &norms
                }
                Role::Bias | Role::RouterCorrection | Role::DecayLog => &zeros,
                _ => &random,
            };
            // Nothing reads the values of weights on another rank.
            let weight = stacks.get(&tensor.name).unwrap_or(&tensor.name);
            let is_here = !elsewhere.as_ref().is_some_and(|division| division.is_elsewhere(weight));
            let elements = if is_here { tensor.elements() } else { 1 };
            let mut buffer = B::host_buffer(device, elements * size_of::<bf16>());
            buffer.par_chunks_mut(tile.len()).for_each(|part| part.copy_from_slice(&tile[..part.len()]));
            Ok(Values::here(buffer, dtype))
        };
        let model = from_values(&config, options, division, device, &mut read, table);
        // Frees the tensors that were quantized.
        B::release_memory(device);
        model
    }
}

/// Returns the stack of each matrix of an expert, by the names of their weights.
fn stacks_of_pieces(config: &ModelConfig) -> BTreeMap<String, String> {
    let of_stack = |(stack, _): (ModuleSpec, usize)| {
        let name = stack.weight_name();
        stack.pieces.into_iter().map(move |piece| (piece.weight_name(), name.clone()))
    };
    config.spec.stacks().flat_map(of_stack).collect()
}

fn from_values<B: Kernels>(
    config: &ModelConfig,
    options: &BuildOptions,
    division: Option<Division>,
    device: &B::Device,
    read: Read<'_, '_>,
    table: Option<TableSource>,
) -> Result<Decoder<B>, ModelError> {
    let (dense, quantizes_on_device) = (BTreeSet::new(), B::QUANTIZES_ON_DEVICE);
    let (progress, starts) = (&mut |_: &str| (), None);
    Builder { config, options, division, dense, device, quantizes_on_device, read, table, progress, starts }.build()
}

/// Creates the table of the layers' own inputs, which never trains, and of which `TILE` numbers are enough.
fn repeated_table(config: &ModelConfig, seed: u64) -> Option<TableSource> {
    let [table, ..] = config.spec.per_layer_tensors()?;
    let deviation = config.spec.initializer_range as f32;
    Some(TableSource::Repeated(normal(table.elements().min(TILE), deviation, &mut stream(seed, &table.name))))
}

/// Creates a separate random stream for each seed and name (FNV-1a of the name; another hash would change the numbers of a seed).
pub(super) fn stream(seed: u64, name: &str) -> ChaCha8Rng {
    let hash = name
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3));
    ChaCha8Rng::seed_from_u64(seed ^ hash)
}

/// Generates normal random numbers by the Box-Muller transform.
pub(super) fn normal(elements: usize, deviation: f32, random: &mut ChaCha8Rng) -> Vec<f32> {
    let mut values = Vec::with_capacity(elements + 1);
    while values.len() < elements {
        // 1 - u lies in (0, 1], so its logarithm is finite.
        let (radius, angle): (f32, f32) = ((1.0 - random.random::<f32>()), random.random());
        let radius = (-2.0 * radius.ln()).sqrt() * deviation;
        let (sin, cos) = (angle * std::f32::consts::TAU).sin_cos();
        values.extend([radius * cos, radius * sin]);
    }
    values.truncate(elements);
    values
}
