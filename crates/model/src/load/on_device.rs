//! One tensor on its way to the device, put together from the matrices of experts if it is a stack: quantized, cast, trained, or left to another rank; and the start of a LoRA pair.
//!
//! Trade-off: a tensor of another rank is read and dropped, because a folder is read in order.

use burn_tensor::{DType, Tensor};
use firebrick_arch::{
    GroupSpec, LoraConfig, ModuleSpec, PieceSpec, Role, TensorSpec, lora_tensor_names, magnitude_tensor_name,
};
use firebrick_kernels::{BlockScales, Kernels, MatrixScales, Parameter, QuantizedWeight, Weight, matrix_scales};
use firebrick_precision::{
    BlockScales as HostBlockScales, FloatType, Format, HostScales, QuantFormat, QuantizedTensor,
};
use rand::Rng;

use super::synthetic::stream;
use super::{Builder, float_type};
use crate::checkpoint::{CodesOrValues, Values, keeps_narrow_scales};
use crate::error::ModelError;
use crate::linear::{Base, Lora, LoraMagnitude};

/// A base weight, and what the folder stores its rows as.
pub(super) struct BaseSpec<'a> {
    /// The weight of the run.
    pub(super) tensor: TensorSpec,
    /// The tensors on disk, in order; empty: the weight itself.
    pub(super) pieces: &'a [PieceSpec],
    /// Number of matrices below each other, if it is a stack.
    pub(super) experts: Option<usize>,
}

impl From<TensorSpec> for BaseSpec<'_> {
    fn from(tensor: TensorSpec) -> Self {
        Self { tensor, pieces: &[], experts: None }
    }
}

impl BaseSpec<'_> {
    pub(super) fn stored(&self) -> Vec<TensorSpec> {
        let columns = self.tensor.shape[1];
        let piece = |piece: &PieceSpec| TensorSpec {
            name: piece.weight_name(),
            shape: vec![piece.rows, columns],
            ..self.tensor.clone()
        };
        match self.pieces {
            [] => vec![self.tensor.clone()],
            pieces => pieces.iter().map(piece).collect(),
        }
    }

    /// Returns the scales that the weight has in a format.
    ///
    /// # Errors
    /// A row that is not whole blocks, or a stack of matrices that are not.
    fn scales(&self, format: QuantFormat) -> Result<MatrixScales, ModelError> {
        let (name, &[rows, columns]) = (&self.tensor.name, self.tensor.shape.as_slice()) else {
            unreachable!("a base weight is a matrix")
        };
        format.check_columns(columns).map_err(|source| ModelError::Quantize { name: name.clone(), source })?;
        let Some(experts) = self.experts else { return Ok(MatrixScales::OfFormat) };
        let shape = [rows / experts, columns];
        match matrix_scales(format, shape) {
            MatrixScales::None => Err(ModelError::ExpertBlocks { name: name.clone(), shape, format }),
            scales => Ok(scales),
        }
    }
}

impl<'v, B: Kernels> Builder<'_, 'v, B> {
    pub(super) fn base(&mut self, weight: &BaseSpec<'_>) -> Result<Base<B>, ModelError> {
        let (tensor, stored) = (&weight.tensor, weight.stored());
        let values = self.read_all(tensor, &stored)?;
        let &[rows, columns] = tensor.shape.as_slice() else { unreachable!("a base weight is a matrix") };
        let is_elsewhere = self.division.as_ref().is_some_and(|division| division.is_elsewhere(&tensor.name));
        let base = match self.format_of(tensor) {
            _ if is_elsewhere => {
                let has_codes = values.skip()?;
                self.placeholder(weight, columns, has_codes)?
            }
            _ if self.formats().trains(&tensor.name) => Base::Trained(self.parameter(tensor, values)?),
            Some(format) => Base::Frozen(Weight::Quantized(self.quantize(weight, values, format)?)),
            None => Base::Frozen(Weight::Dense(self.upload([rows, columns], values, self.options.frozen_dtype())?)),
        };
        stored.iter().for_each(|stored| (self.progress)(&stored.name));
        Ok(base)
    }

    /// Reads the tensors that a tensor of the run is put together from.
    fn read_all(&mut self, tensor: &TensorSpec, stored: &[TensorSpec]) -> Result<Values<'v>, ModelError> {
        let mut parts = stored.iter().map(|stored| (self.read)(stored)).collect::<Result<Vec<_>, _>>()?;
        if let [_] = parts.as_slice() {
            return Ok(parts.remove(0));
        }
        let dtype = parts[0].dtype;
        match parts.iter().position(|part| part.dtype != dtype) {
            None => Ok(Values::joined(parts)),
            Some(other) => {
                let (first, other) = (stored[0].name.clone(), stored[other].name.clone());
                Err(ModelError::MixedExperts { name: tensor.name.clone(), first, other })
            }
        }
    }

    pub(crate) fn vector(&mut self, tensor: &TensorSpec) -> Result<Parameter<B>, ModelError> {
        self.vector_of(tensor, std::slice::from_ref(tensor))
    }

    /// Reads a vector that the folder stores as these parts.
    pub(super) fn vector_of(&mut self, tensor: &TensorSpec, stored: &[TensorSpec]) -> Result<Parameter<B>, ModelError> {
        let values = self.read_all(tensor, stored)?;
        let parameter = self.parameter(tensor, values)?;
        stored.iter().for_each(|stored| (self.progress)(&stored.name));
        Ok(parameter)
    }

    pub(super) fn format_of(&self, tensor: &TensorSpec) -> Option<QuantFormat> {
        match self.formats().storage_of(&self.config.spec, &tensor.name, tensor.role) {
            Format::Quantized(format) => Some(format),
            Format::Float(_) => None,
        }
    }

    /// Builds a base whose values are on another rank. A quantized placeholder is one quantized row, which has the tables and the layout of all.
    /// `has_codes` says whether the folder stores codes that are kept.
    fn placeholder(&self, weight: &BaseSpec<'_>, columns: usize, has_codes: bool) -> Result<Base<B>, ModelError> {
        let tensor = &weight.tensor;
        if self.formats().trains(&tensor.name) {
            let (name, shape, role) = (self.options.saved_name(&tensor.name).into(), tensor.shape.clone(), tensor.role);
            let value = Tensor::zeros([1], (self.device, self.trained_dtype(role)));
            return Ok(Base::Trained(Parameter { name, shape, role, value }));
        }
        let Some(format) = self.format_of(tensor) else {
            let nothing = Tensor::zeros([1, 1], (self.device, self.options.frozen_dtype()));
            return Ok(Base::Frozen(Weight::Dense(nothing)));
        };
        let is_float = weight.scales(format)? == MatrixScales::Float
            || (has_codes && weight.pieces.len() > 1 && !keeps_narrow_scales(format));
        let ones = Values::of_f32(&vec![1.0; columns], &|bytes| B::host_buffer(self.device, bytes));
        let row = TensorSpec { shape: vec![1, columns], ..tensor.clone() };
        let mut row = self.quantize(&row.into(), ones, format)?;
        if is_float && !matches!(row.scales, BlockScales::Float(_)) {
            row.scales = BlockScales::Float(Tensor::ones([row.blocks()], (self.device, DType::F32)));
        }
        Ok(Base::Frozen(Weight::Quantized(row)))
    }

    /// Quantizes a weight where the backend is faster, unless the folder stores it quantized so. A stack is quantized as one matrix: its blocks are
    /// those of its matrices, but double quantization has one mean for all of them, and NVFP4 one scale. Stored codes of several matrices are put
    /// together unchanged, with scales in f32 unless [`keeps_narrow_scales`] says otherwise.
    pub(super) fn quantize(
        &self,
        weight: &BaseSpec<'_>,
        values: Values<'_>,
        format: QuantFormat,
    ) -> Result<QuantizedWeight<B>, ModelError> {
        let scales = weight.scales(format)?;
        let &[rows, columns] = weight.tensor.shape.as_slice() else { unreachable!("a base weight is a matrix") };
        let shape = [rows, columns];
        let allocate = |bytes| B::host_buffer(self.device, bytes);
        let values = match values.into_codes_or_values(format, columns, &allocate)? {
            CodesOrValues::Codes { codes, scales: stored } => {
                return Ok(B::upload_codes(codes, &in_form(stored, scales), format, shape, self.device));
            }
            CodesOrValues::Values(values) => values,
        };
        let dtype = values.dtype;
        if self.quantizes_on_device && scales == MatrixScales::OfFormat {
            return Ok(B::quantize_weight(B::upload(values, shape, dtype, self.device)?, format));
        }
        let stored = float_type(dtype);
        let buffer = values.into_buffer(&allocate)?;
        let refused = |source| ModelError::Quantize { name: weight.tensor.name.clone(), source };
        let quantized = format.quantize_bytes(&buffer, stored, &shape).map_err(refused)?;
        let quantized = QuantizedTensor { scales: in_form(quantized.scales, scales), ..quantized };
        Ok(QuantizedWeight::<B>::upload(&quantized, self.device))
    }

    /// Quantizes a weight that is on the device, on whichever side is faster.
    pub(super) fn quantize_on_either_side(
        &self,
        weight: &BaseSpec<'_>,
        weight_oi: Tensor<B, 2>,
        format: QuantFormat,
    ) -> Result<Weight<B>, ModelError> {
        if self.quantizes_on_device && weight.scales(format)? == MatrixScales::OfFormat {
            return Ok(Weight::Quantized(B::quantize_weight(weight_oi, format)));
        }
        let values = weight_oi.into_data().to_vec::<f32>().expect("the remainder of a weight is f32");
        let values = Values::of_f32(&values, &|bytes| B::host_buffer(self.device, bytes));
        Ok(Weight::Quantized(self.quantize(weight, values, format)?))
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
        let value = self.upload([1, elements], values, self.trained_dtype(tensor.role))?.reshape([elements]);
        let (name, shape, role) = (self.options.saved_name(&tensor.name).into(), tensor.shape.clone(), tensor.role);
        Ok(Parameter { name, shape, role, value })
    }

    fn trained_dtype(&self, role: Role) -> DType {
        match self.options.storage.trained_format(role) {
            FloatType::Bf16 => DType::BF16,
            FloatType::F16 | FloatType::F32 => DType::F32,
        }
    }

    /// Starts a pair. Each matrix of a stack has its own random stream, so it starts as it would by itself; a parameter of experts has one.
    pub(super) fn lora(&self, module: &ModuleSpec, group: &GroupSpec, config: &LoraConfig) -> Lora<B> {
        let (a_name, b_name) = lora_tensor_names(&module.path);
        let in_features = group.in_features;
        let bound = 1.0 / (in_features as f32).sqrt();
        let (r, rows) = (config.rank_of(module.lora_path()), module.rows());
        let a_shape = [group.matrices() * r, in_features];
        let singles = module.single_modules();
        let each = a_shape[0] / singles.len() * in_features;
        let mut a: Vec<f32> = Vec::with_capacity(a_shape[0] * in_features);
        for single in singles {
            let mut random = stream(self.options.seed, &lora_tensor_names(&single.path).0);
            a.extend((0..each).map(|_| random.random_range(-bound..bound)));
        }
        Lora {
            a: Parameter::from_host(a_name, &a_shape, Role::LoraA, a, self.device),
            b: Parameter::zeros(b_name, &[rows, r], Role::LoraB, self.device),
            scale: config.scaling_of(module.lora_path()),
            starts: Vec::new(),
            magnitude: config.use_dora.then(|| {
                let (name, start) = (magnitude_tensor_name(&module.path), vec![1.0; rows]);
                let parameter = Parameter::from_host(name, &[rows], Role::LoraMagnitude, start, self.device);
                LoraMagnitude { parameter, norms: None }
            }),
        }
    }
}

/// Returns scales as a stack has them.
fn in_form(scales: HostScales, form: MatrixScales) -> HostScales {
    match form {
        MatrixScales::Float => HostScales { block: HostBlockScales::Float(scales.block.values()) },
        MatrixScales::OfFormat | MatrixScales::None => scales,
    }
}
