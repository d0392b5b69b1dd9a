//! One tensor on its way to the device: quantized, cast, trained, or left to another rank; and the start of a LoRA pair.
//!
//! Trade-off: a tensor of another rank is read and dropped, because a folder is read in order.

use burn_tensor::{DType, Tensor};
use firebrick_arch::{LoraConfig, Role, TensorSpec, lora_tensor_names, magnitude_tensor_name};
use firebrick_kernels::{Kernels, Parameter, QuantizedWeight, Weight};
use firebrick_precision::{FloatType, QuantFormat};
use rand::Rng;

use super::Builder;
use super::synthetic::stream;
use crate::error::ModelError;
use crate::linear::{Base, Lora, LoraMagnitude};
use crate::weights::{CodesOrValues, Values};

impl<B: Kernels> Builder<'_, '_, B> {
    pub(super) fn base(&mut self, tensor: &TensorSpec) -> Result<Base<B>, ModelError> {
        let values = (self.read)(tensor)?;
        let &[rows, columns] = tensor.shape.as_slice() else { unreachable!("a base weight is a matrix") };
        let is_elsewhere = self.division.as_ref().is_some_and(|division| division.is_elsewhere(&tensor.name));
        let base = match (self.options.storage, self.format_of(tensor)) {
            _ if is_elsewhere => {
                values.skip()?;
                self.placeholder(tensor, columns)?
            }
            _ if self.options.trains(&tensor.name) => Base::Trained(self.parameter(tensor, values)?),
            (_, Some(format)) => {
                Base::Frozen(Weight::Quantized(self.quantize(&tensor.name, [rows, columns], values, format)?))
            }
            (_, None) => {
                Base::Frozen(Weight::Dense(self.upload([rows, columns], values, self.options.compute_dtype)?))
            }
        };
        (self.progress)(&tensor.name);
        Ok(base)
    }

    pub(super) fn vector(&mut self, tensor: &TensorSpec) -> Result<Parameter<B>, ModelError> {
        let values = (self.read)(tensor)?;
        let parameter = self.parameter(tensor, values)?;
        (self.progress)(&tensor.name);
        Ok(parameter)
    }

    /// Returns the quantization format of a base weight.
    pub(super) fn format_of(&self, tensor: &TensorSpec) -> Option<QuantFormat> {
        self.options.quantized(tensor.role).filter(|_| !self.dense.contains(&tensor.name))
    }

    /// Builds a base whose values are on another rank. A quantized placeholder is one quantized row, which has the tables and the layout of all.
    fn placeholder(&self, tensor: &TensorSpec, columns: usize) -> Result<Base<B>, ModelError> {
        if self.options.trains(&tensor.name) {
            let (name, shape, role) = (self.options.saved_name(&tensor.name).into(), tensor.shape.clone(), tensor.role);
            let value = Tensor::zeros([1], (self.device, DType::F32));
            return Ok(Base::Trained(Parameter { name, shape, role, value }));
        }
        let Some(format) = self.format_of(tensor) else {
            let nothing = Tensor::zeros([1, 1], (self.device, self.options.compute_dtype));
            return Ok(Base::Frozen(Weight::Dense(nothing)));
        };
        let mut buffer = B::host_buffer(self.device, columns * size_of::<f32>());
        buffer.as_chunks_mut().0.iter_mut().for_each(|bytes| *bytes = 1.0f32.to_ne_bytes());
        let row = Values::here(buffer, DType::F32);
        Ok(Base::Frozen(Weight::Quantized(self.quantize(&tensor.name, [1, columns], row, format)?)))
    }

    /// Quantizes a weight where the backend is faster, unless the folder stores it quantized so.
    pub(super) fn quantize(
        &self,
        name: &str,
        shape: [usize; 2],
        values: Values<'_>,
        format: QuantFormat,
    ) -> Result<QuantizedWeight<B>, ModelError> {
        let refused = |source| ModelError::Quantize { name: name.to_owned(), source };
        format.check_columns(shape[1]).map_err(refused)?;
        let values = match values.into_codes_or_values()? {
            CodesOrValues::Codes { codes, scales } => {
                return Ok(B::upload_codes(codes, &scales, format, shape, self.device));
            }
            CodesOrValues::Values(values) => values,
        };
        let dtype = values.dtype;
        if self.quantizes_on_device {
            return Ok(B::quantize_weight(B::upload(values, shape, dtype, self.device)?, format));
        }
        let stored = match dtype {
            DType::BF16 => FloatType::Bf16,
            DType::F16 => FloatType::F16,
            _ => FloatType::F32,
        };
        let buffer = values.into_buffer(&|bytes| B::host_buffer(self.device, bytes))?;
        let quantized = format.quantize_bytes(&buffer, stored, &shape).map_err(refused)?;
        Ok(QuantizedWeight::<B>::upload(&quantized, self.device))
    }

    pub(super) fn upload(
        &self,
        shape: [usize; 2],
        values: Values<'_>,
        dtype: DType,
    ) -> Result<Tensor<B, 2>, ModelError> {
        let stored = values.dtype;
        let uploaded = B::upload(values, shape, stored, self.device)?;
        Ok(if stored == dtype { uploaded } else { uploaded.cast(dtype) })
    }

    pub(super) fn parameter(&self, tensor: &TensorSpec, values: Values<'_>) -> Result<Parameter<B>, ModelError> {
        let elements = tensor.elements();
        let value = self.upload([1, elements], values, DType::F32)?.reshape([elements]);
        let (name, shape, role) = (self.options.saved_name(&tensor.name).into(), tensor.shape.clone(), tensor.role);
        Ok(Parameter { name, shape, role, value })
    }

    pub(super) fn lora(&self, path: &str, [out_features, in_features]: [usize; 2], config: &LoraConfig) -> Lora<B> {
        let (a_name, b_name) = lora_tensor_names(path);
        let bound = 1.0 / (in_features as f32).sqrt();
        let mut random = stream(self.options.seed, &a_name);
        let r = config.rank_of(path);
        let a: Vec<f32> = (0..r * in_features).map(|_| random.random_range(-bound..bound)).collect();
        Lora {
            a: Parameter::from_host(a_name, &[r, in_features], Role::LoraA, a, self.device),
            b: Parameter::zeros(b_name, &[out_features, r], Role::LoraB, self.device),
            scale: config.scaling_of(path),
            start: None,
            magnitude: config.use_dora.then(|| {
                let (name, shape) = (magnitude_tensor_name(path), [out_features]);
                let start = vec![1.0; out_features];
                let parameter = Parameter::from_host(name, &shape, Role::LoraMagnitude, start, self.device);
                LoraMagnitude { parameter, norms: None }
            }),
        }
    }
}
