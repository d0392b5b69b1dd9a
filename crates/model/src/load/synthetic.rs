//! Models without a folder: with random weights to train from, and with weights that repeat a few to measure.
//!
//! Trade-off: random weights pass through host memory as f32, one tensor at a time.

use std::collections::BTreeSet;

use burn_tensor::DType;
use firebrick_arch::{ModelConfig, Role, TensorSpec};
use firebrick_kernels::Kernels;
use half::bf16;
use rayon::prelude::*;

use super::random::{normal, stream};
use super::{BuildOptions, Builder, Read};
use crate::decoder::Decoder;
use crate::division::Division;
use crate::error::ModelError;
use crate::weights::Values;

/// Numbers that the weights of a synthetic model repeat.
const TILE: usize = (1 << 20) + 7;

impl<B: Kernels> Decoder<B> {
    /// A model with random weights: normal with the config's `initializer_range`, norms that multiply by one, biases zero.
    ///
    /// # Errors
    /// A LoRA target that the model does not have.
    pub fn random(config: ModelConfig, options: &BuildOptions, device: &B::Device) -> Result<Self, ModelError> {
        Self::random_divided(config, options, None, device)
    }

    /// As [`Decoder::random`], where ranks divide the weights of the layers.
    ///
    /// # Errors
    /// As [`Decoder::random`].
    pub fn random_divided(
        config: ModelConfig,
        options: &BuildOptions,
        division: Option<Division>,
        device: &B::Device,
    ) -> Result<Self, ModelError> {
        let (deviation, seed) = (config.spec.initializer_range as f32, options.seed);
        let norm = 1.0 - config.spec.norm_offset as f32;
        let mut read = |tensor: &TensorSpec| {
            let elements = tensor.elements();
            let values = match tensor.role {
                Role::Norm => vec![norm; elements],
                Role::Bias => vec![0.0; elements],
                _ => normal(elements, deviation, &mut stream(seed, &tensor.name)),
            };
            let mut buffer = B::host_buffer(device, elements * size_of::<f32>());
            for (bytes, value) in buffer.as_chunks_mut().0.iter_mut().zip(values) {
                *bytes = value.to_ne_bytes();
            }
            Ok(Values::here(buffer, DType::F32))
        };
        from_values(&config, options, division, device, &mut read)
    }

    /// A model to measure, not to train: its weights repeat `TILE` random numbers, so that they are there as fast as they can be copied,
    /// and one tensor of the base as it is stored exists at a time.
    ///
    /// # Errors
    /// As [`Decoder::random`].
    pub fn synthetic(
        config: ModelConfig,
        options: &BuildOptions,
        division: Option<Division>,
        device: &B::Device,
    ) -> Result<Self, ModelError> {
        let norm = 1.0 - config.spec.norm_offset as f32;
        let bytes = |tile: Vec<f32>| -> Vec<u8> {
            tile.into_iter().flat_map(|value| bf16::from_f32(value).to_ne_bytes()).collect()
        };
        let deviation = config.spec.initializer_range as f32;
        let random = bytes(normal(TILE, deviation, &mut stream(options.seed, "tile")));
        let [norms, zeros] = [norm, 0.0].map(|value| bytes(vec![value; TILE]));
        let elsewhere = division.clone();
        let mut read = |tensor: &TensorSpec| {
            let tile = match tensor.role {
                Role::Norm => &norms,
                Role::Bias => &zeros,
                _ => &random,
            };
            // What is on another rank is not looked at.
            let is_here = !elsewhere.as_ref().is_some_and(|division| division.is_elsewhere(&tensor.name));
            let elements = if is_here { tensor.elements() } else { 1 };
            let mut buffer = B::host_buffer(device, elements * size_of::<bf16>());
            buffer.par_chunks_mut(tile.len()).for_each(|part| part.copy_from_slice(&tile[..part.len()]));
            Ok(Values::here(buffer, DType::BF16))
        };
        let model = from_values(&config, options, division, device, &mut read);
        // Tensors as they were before they were quantized.
        B::release_memory(device);
        model
    }
}

fn from_values<B: Kernels>(
    config: &ModelConfig,
    options: &BuildOptions,
    division: Option<Division>,
    device: &B::Device,
    read: Read<'_, '_>,
) -> Result<Decoder<B>, ModelError> {
    let (dense, quantizes_on_device) = (BTreeSet::new(), B::QUANTIZES_ON_DEVICE);
    let (progress, starts) = (&mut |_: &str| (), None);
    Builder { config, options, division, dense, device, quantizes_on_device, read, progress, starts }.build()
}
