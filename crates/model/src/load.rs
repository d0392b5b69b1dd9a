//! Building a model on a device: from a Hugging Face folder, quantized while it is read, or from random numbers.
//!
//! Threads read tensors ahead, in the number format that the device is to have, while this thread hands them to the device in the order
//! of `ModelSpec::tensors`: quantized there if the base is to be quantized and the backend can, else quantized before the upload. LoRA
//! pairs start as PEFT starts them (A uniform in ±1/sqrt(in), B zero, magnitudes the norms of the rows), each from a random stream of its
//! own name, so that the set of adapted modules changes no other start. Weights that the folder stores in the format of the base are
//! uploaded as they are.
//! Trade-off: the model cannot run before its last tensor has arrived.

mod new_tokens;
mod pissa;
mod random;

use std::collections::BTreeSet;
use std::num::NonZero;
use std::thread::available_parallelism;

use burn_tensor::{DType, Tensor};
use firebrick_arch::{
    EMBEDDING, FINAL_NORM, GroupKind, GroupSpec, HEAD, LayerGroups, LayerSpec, LoraConfig, MlpGroups, MlpSpec,
    ModelConfig, ModelSpec, ModuleSpec, Role, TensorSpec, layer_norm_name, lora_tensor_names, magnitude_tensor_name,
    rope, saved_tensor_name,
};
use firebrick_kernels::{BaseStorage, GemmFormat, Kernels, Parameter, QuantizedWeight, RotaryTables, Weight};
use firebrick_precision::{Format, QuantFormat};
use half::bf16;
use rand::Rng;
use xxhash_rust::xxh3::Xxh3;

use self::new_tokens::with_new_rows;
use self::random::{normal, stream};
use crate::decoder::Decoder;
use crate::division::Division;
use crate::error::ModelError;
use crate::experts::Experts;
use crate::layer::{Layer, Mlp};
use crate::linear::{Base, Linear, LinearGroup, Lora, LoraMagnitude, ModuleBias};
use crate::norm::Norm;
use crate::token_rows::TokenRows;
use crate::weights::{HfFolder, Limits, Request, Values, read_ahead};

/// Threads that read weights: a few keep up with any link to a device, and more only take turns at the memory.
const MAX_READERS: usize = 8;
/// Bytes read ahead of a device that quantizes: enough to go on reading while it takes in a large tensor.
const LOOK_AHEAD: usize = 1 << 30;
/// Bytes read ahead where quantizing is the host's work, which is slower than reading: a few tensors.
const LOOK_AHEAD_OF_HOST: usize = 256 << 20;

/// Numbers that the weights of a synthetic model repeat.
const TILE: usize = (1 << 20) + 7;

/// What to build in addition to what the checkpoint describes.
#[derive(Clone, Debug)]
pub struct BuildOptions {
    /// How the base weights live on the device.
    pub storage: BaseStorage,
    /// The adapter to add.
    pub lora: Option<LoraConfig>,
    /// Seed of random weights and of LoRA's A.
    pub seed: u64,
    /// Dtype of activations and of frozen dense weights.
    pub compute_dtype: DType,
    /// What the GEMMs of the layers multiply.
    pub gemms: GemmFormat,
    /// Positions the rotary tables cover: the longest packed sequence, or the longest generated text.
    pub max_positions: usize,
    /// Tokens of the longest sequence that the model is built for. It chooses the factors of longrope, once: `max_seq_len` of a run,
    /// whatever is generated after it.
    pub sequence_tokens: usize,
}

impl<B: Kernels> Decoder<B> {
    /// Reads a model from its folder. `progress` is called with the name of each tensor, in the order of `ModelSpec::tensors`, once its
    /// upload has begun.
    ///
    /// # Errors
    /// Anything wrong with the folder (all missing or misshapen tensors are reported before the first one is read), a weight that is
    /// not finite, or a LoRA target that the model does not have.
    pub fn load(
        folder: &HfFolder,
        config: ModelConfig,
        options: &BuildOptions,
        device: &B::Device,
        progress: &mut dyn FnMut(&str),
    ) -> Result<Self, ModelError> {
        Self::load_divided(folder, config, options, None, device, progress)
    }

    /// As [`Decoder::load`], where ranks divide the weights of the layers. Every rank reads all of them; those of another rank are not
    /// brought to the device.
    ///
    /// # Errors
    /// As [`Decoder::load`].
    pub fn load_divided(
        folder: &HfFolder,
        config: ModelConfig,
        options: &BuildOptions,
        division: Option<Division>,
        device: &B::Device,
        progress: &mut dyn FnMut(&str),
    ) -> Result<Self, ModelError> {
        let readers = available_parallelism().map_or(1, NonZero::get).min(MAX_READERS);
        let quantizes_on_device = B::quantizes_on_device();
        let bytes = if quantizes_on_device { LOOK_AHEAD } else { LOOK_AHEAD_OF_HOST };
        let limits = Limits { readers, bytes };
        Self::load_within(folder, &config, options, division, device, quantizes_on_device, limits, progress)
    }

    fn load_within(
        folder: &HfFolder,
        config: &ModelConfig,
        options: &BuildOptions,
        division: Option<Division>,
        device: &B::Device,
        quantizes_on_device: bool,
        limits: Limits,
        progress: &mut dyn FnMut(&str),
    ) -> Result<Self, ModelError> {
        let stored = config.stored_spec();
        folder.check_complete(&stored)?;
        let tensors = stored.tensors();
        let is_dense = |tensor: &&TensorSpec| tensor.role == Role::Projection && folder.skips(&tensor.name);
        let dense: BTreeSet<String> = tensors.iter().filter(is_dense).map(|tensor| tensor.name.clone()).collect();
        let request = |tensor: &TensorSpec| {
            let stays_dense = dense.contains(&tensor.name) || options.trains(&tensor.name);
            let format = options.quantized(tensor.role).filter(|_| !stays_dense);
            let dtype = options.dtype_to_read(tensor, format, quantizes_on_device);
            Request { name: tensor.name.clone(), shape: tensor.shape.clone(), dtype, format }
        };
        let mut requests: Vec<_> = tensors.iter().map(request).collect();
        if options.unties(&config.spec) {
            // The head starts as the table that it shared with the embedding.
            let head = TensorSpec { name: HEAD.to_owned(), ..tensors[0].clone() };
            let dtype = options.dtype_to_read(&head, None, quantizes_on_device);
            requests.push(Request { dtype, ..request(&tensors[0]) });
        }
        let allocate = |bytes| B::host_buffer(device, bytes);
        let mut hash = Xxh3::new();
        let mut decoder = read_ahead(folder, &requests, limits, &allocate, |ahead| {
            let mut read = |tensor: &TensorSpec| {
                let is_untied_head = tensor.name == HEAD && config.spec.tie_word_embeddings;
                let stored_name = if is_untied_head { EMBEDDING } else { &tensor.name };
                let values = ahead.take(stored_name)?;
                if !is_untied_head {
                    hash.update(tensor.name.as_bytes());
                    hash.update(&values.hash.to_le_bytes());
                }
                Ok(match tensor.role {
                    Role::Embedding | Role::Head => with_new_rows(values, stored_name, config, options.seed, &allocate),
                    _ => values,
                })
            };
            Builder { config, options, division, dense, device, quantizes_on_device, read: &mut read, progress }.build()
        })??;
        decoder.base_hash = Some(hash.digest());
        Ok(decoder)
    }

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
            Ok(Values { buffer, dtype: DType::F32, kept: None, hash: 0 })
        };
        let (quantizes_on_device, progress) = (B::quantizes_on_device(), &mut |_: &str| ());
        let dense = BTreeSet::new();
        Builder { config: &config, options, division, dense, device, quantizes_on_device, read: &mut read, progress }
            .build()
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
        let random = normal(TILE, config.spec.initializer_range as f32, &mut stream(options.seed, "tile"));
        let elsewhere = division.clone();
        let mut read = |tensor: &TensorSpec| {
            let tile = match tensor.role {
                Role::Norm => vec![bf16::from_f32(norm); TILE],
                Role::Bias => vec![bf16::ZERO; TILE],
                _ => random.iter().map(|&value| bf16::from_f32(value)).collect(),
            };
            let tile: Vec<u8> = tile.into_iter().flat_map(bf16::to_ne_bytes).collect();
            // What is on another rank is not looked at.
            let is_here = !elsewhere.as_ref().is_some_and(|division| division.is_elsewhere(&tensor.name));
            let elements = if is_here { tensor.elements() } else { 1 };
            let mut buffer = B::host_buffer(device, elements * size_of::<bf16>());
            buffer.chunks_mut(tile.len()).for_each(|part| part.copy_from_slice(&tile[..part.len()]));
            Ok(Values { buffer, dtype: DType::BF16, kept: None, hash: 0 })
        };
        let (quantizes_on_device, progress) = (B::quantizes_on_device(), &mut |_: &str| ());
        let dense = BTreeSet::new();
        let model = Builder {
            config: &config,
            options,
            division,
            dense,
            device,
            quantizes_on_device,
            read: &mut read,
            progress,
        }
        .build();
        // Tensors as they were before they were quantized.
        B::release_memory(device);
        model
    }
}

impl BuildOptions {
    /// The number format in which a tensor is read that is quantized to `format`; `None`: as it is stored.
    fn dtype_to_read(
        &self,
        tensor: &TensorSpec,
        format: Option<QuantFormat>,
        quantizes_on_device: bool,
    ) -> Option<DType> {
        match tensor.role {
            Role::Norm | Role::Bias => Some(DType::F32),
            // Widened by the device, it is half the bytes to upload.
            _ if self.trains(&tensor.name) => (!quantizes_on_device).then_some(DType::F32),
            _ if format.is_some() => None,
            _ => Some(match self.compute_dtype {
                dtype @ (DType::BF16 | DType::F16) => dtype,
                _ => DType::F32,
            }),
        }
    }

    /// The format that tensors of this role are quantized to.
    fn quantized(&self, role: Role) -> Option<QuantFormat> {
        match self.storage {
            BaseStorage::Frozen(Format::Quantized(format)) if role == Role::Projection => Some(format),
            BaseStorage::Frozen(_) | BaseStorage::Trained => None,
        }
    }

    /// Whether a tensor of the base trains.
    fn trains(&self, name: &str) -> bool {
        self.storage == BaseStorage::Trained || self.lora.as_ref().is_some_and(|lora| lora.saves_tensor(name))
    }

    /// Whether embedding and head, which share one table on disk, are two.
    fn unties(&self, spec: &ModelSpec) -> bool {
        spec.tie_word_embeddings && self.lora.as_ref().is_some_and(LoraConfig::unties)
    }

    /// The name under which a trained tensor of the base is saved.
    fn saved_name(&self, name: &str) -> String {
        if self.lora.is_some() && self.trains(name) { saved_tensor_name(name) } else { name.to_owned() }
    }
}

/// Where the values of a tensor come from. A folder's come in the order of `ModelSpec::tensors` only.
type Read<'a> = &'a mut dyn FnMut(&TensorSpec) -> Result<Values, ModelError>;

struct Builder<'a, B: Kernels> {
    config: &'a ModelConfig,
    options: &'a BuildOptions,
    division: Option<Division>,
    /// Projections that stay unquantized, because the folder leaves them so.
    dense: BTreeSet<String>,
    device: &'a B::Device,
    quantizes_on_device: bool,
    read: Read<'a>,
    progress: &'a mut dyn FnMut(&str),
}

/// Shorthand for a tensor to be read.
fn tensor(name: &str, shape: &[usize], role: Role) -> TensorSpec {
    TensorSpec { name: name.to_owned(), shape: shape.to_vec(), role, layer: None }
}

impl<B: Kernels> Builder<'_, B> {
    fn build(mut self) -> Result<Decoder<B>, ModelError> {
        let spec = &self.config.spec;
        if let Some(lora) = &self.options.lora {
            // Refuses a target that the model does not have.
            spec.adapter_tensors(lora)?;
        }
        let table = [spec.vocab_size, spec.hidden_size];
        let embed_tokens = self.base(&tensor(EMBEDDING, &table, Role::Embedding))?;
        let layers = (0..spec.layers.len()).map(|index| self.layer(spec, index)).collect::<Result<_, _>>()?;
        let norm = self.norm(FINAL_NORM, spec.hidden_size)?;
        let lm_head = if spec.tie_word_embeddings && !self.options.unties(spec) {
            None
        } else {
            Some(self.base(&tensor(HEAD, &table, Role::Head))?)
        };
        let lora = self.options.lora.as_ref();
        let embed_rows = TokenRows::new(EMBEDDING, &embed_tokens, spec, lora);
        let head_rows = lm_head.as_ref().and_then(|head| TokenRows::new(HEAD, head, spec, lora));
        let mut decoder = Decoder {
            embed_tokens,
            embed_rows,
            head_rows,
            layers,
            norm,
            lm_head,
            rotary: self.rotary(),
            max_positions: self.options.max_positions,
            compute_dtype: self.options.compute_dtype,
            base_hash: None,
            division: self.division,
            device: self.device.clone(),
            config: self.config.clone(),
        };
        decoder.start_magnitudes();
        Ok(decoder)
    }

    /// Reads a layer's tensors in the order of `ModelSpec::tensors`: each norm where the forward pass meets it.
    fn layer(&mut self, spec: &ModelSpec, index: usize) -> Result<Layer<B>, ModelError> {
        let LayerGroups { qkv, attention_output, mlp } = spec.layer_groups(index);
        let layer: &LayerSpec = &spec.layers[index];
        let names = layer.norms.names();
        let hidden = spec.hidden_size;
        // Fields are read in the order in which they are written.
        Ok(Layer {
            spec: layer.clone(),
            before_attention: self.layer_norm(index, names.before_attention, hidden)?,
            qkv: self.group(&qkv)?,
            qk_norm: match layer.attention.qk_norm.widths(&layer.attention) {
                None => None,
                Some([q, k]) => Some([
                    self.norm(&layer_norm_name(index, "self_attn.q_norm"), q)?,
                    self.norm(&layer_norm_name(index, "self_attn.k_norm"), k)?,
                ]),
            },
            attention_output: self.group(&attention_output)?,
            after_attention: self.layer_norm(index, names.after_attention, hidden)?,
            before_mlp: self.layer_norm(index, names.before_mlp, hidden)?,
            mlp: self.mlp(&layer.mlp, &mlp)?,
            after_mlp: self.layer_norm(index, names.after_mlp, hidden)?,
        })
    }

    fn mlp(&mut self, spec: &MlpSpec, groups: &MlpGroups) -> Result<Mlp<B>, ModelError> {
        match (spec, groups) {
            (_, MlpGroups::Gated(groups)) => {
                let [gate_up, down] = groups.as_ref();
                Ok(Mlp::Gated { gate_up: self.group(gate_up)?, down: self.group(down)? })
            }
            (
                &MlpSpec::Experts { top_k, normalizes_weights, activation, .. },
                MlpGroups::Experts { router, experts },
            ) => Ok(Mlp::Experts(Experts {
                router: self.group(router)?,
                experts: experts
                    .iter()
                    .map(|[gate_up, down]| Ok([self.group(gate_up)?, self.group(down)?]))
                    .collect::<Result<_, ModelError>>()?,
                top_k,
                normalizes_weights,
                activation,
            })),
            (MlpSpec::Gated { .. }, MlpGroups::Experts { .. }) => unreachable!("groups follow from the spec"),
        }
    }

    fn layer_norm(&mut self, layer: usize, name: Option<&str>, size: usize) -> Result<Option<Norm<B>>, ModelError> {
        name.map(|name| self.norm(&layer_norm_name(layer, name), size)).transpose()
    }

    fn group(&mut self, group: &GroupSpec) -> Result<LinearGroup<B>, ModelError> {
        let modules = group.modules.iter().map(|module| self.linear(module, group)).collect::<Result<_, _>>()?;
        let dropout = self.options.lora.as_ref().map_or(0.0, |lora| lora.lora_dropout);
        Ok(LinearGroup { modules, parts: group.parts.clone(), gemms: self.options.gemms, dropout })
    }

    fn linear(&mut self, module: &ModuleSpec, group: &GroupSpec) -> Result<Linear<B>, ModelError> {
        let shape = [module.out_features(), group.in_features];
        let weight = tensor(&module.weight_name(), &shape, group.kind.weight_role());
        let adapts = |lora: &&LoraConfig| group.kind != GroupKind::Router && lora.adapts(&module.path);
        let (base, lora) = match self.options.lora.as_ref().filter(adapts) {
            Some(lora) if !lora.init_lora_weights.is_uniform() => {
                self.divided_at_its_principal_part(&weight, module, lora)?
            }
            Some(lora) => (self.base(&weight)?, Some(self.lora(&module.path, shape, lora))),
            None => (self.base(&weight)?, None),
        };
        let bias = if module.bias { Some(self.bias(module)?) } else { None };
        Ok(Linear { path: module.path.clone(), columns: module.columns.clone(), shape, base, bias, lora })
    }

    fn base(&mut self, tensor: &TensorSpec) -> Result<Base<B>, ModelError> {
        let values = (self.read)(tensor)?;
        let &[rows, columns] = tensor.shape.as_slice() else { unreachable!("a base weight is a matrix") };
        let is_elsewhere = self.division.as_ref().is_some_and(|division| division.is_elsewhere(&tensor.name));
        let base = match (self.options.storage, self.format_of(tensor)) {
            _ if is_elsewhere => {
                drop(values);
                self.placeholder(tensor, columns)?
            }
            _ if self.options.trains(&tensor.name) => Base::Trained(self.parameter(tensor, values)),
            (_, Some(format)) => {
                Base::Frozen(Weight::Quantized(self.quantize(&tensor.name, [rows, columns], values, format)?))
            }
            (_, None) => Base::Frozen(Weight::Dense(self.upload([rows, columns], values, self.options.compute_dtype))),
        };
        (self.progress)(&tensor.name);
        Ok(base)
    }

    /// The format that a base weight is quantized to.
    fn format_of(&self, tensor: &TensorSpec) -> Option<QuantFormat> {
        self.options.quantized(tensor.role).filter(|_| !self.dense.contains(&tensor.name))
    }

    /// A base whose values another rank has. What is quantized is quantized as one row, which has the tables and the layout of all.
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
        let row = Values { buffer, dtype: DType::F32, kept: None, hash: 0 };
        Ok(Base::Frozen(Weight::Quantized(self.quantize(&tensor.name, [1, columns], row, format)?)))
    }

    fn norm(&mut self, name: &str, size: usize) -> Result<Norm<B>, ModelError> {
        let weight = self.vector(&tensor(name, &[size], Role::Norm))?;
        let ModelSpec { rms_norm_eps, norm_offset, .. } = self.config.spec;
        Ok(Norm { weight, trains: self.options.trains(name), offset: norm_offset, epsilon: rms_norm_eps })
    }

    fn bias(&mut self, module: &ModuleSpec) -> Result<ModuleBias<B>, ModelError> {
        let name = module.bias_name();
        let parameter = self.vector(&tensor(&name, &[module.out_features()], Role::Bias))?;
        Ok(ModuleBias { parameter, trains: self.options.trains(&name) })
    }

    fn vector(&mut self, tensor: &TensorSpec) -> Result<Parameter<B>, ModelError> {
        let values = (self.read)(tensor)?;
        let parameter = self.parameter(tensor, values);
        (self.progress)(&tensor.name);
        Ok(parameter)
    }

    /// Quantizes a weight, where the backend does that faster, unless the folder stores it so.
    fn quantize(
        &self,
        name: &str,
        shape: [usize; 2],
        values: Values,
        format: QuantFormat,
    ) -> Result<QuantizedWeight<B>, ModelError> {
        let refused = |source| ModelError::Quantize { name: name.to_owned(), source };
        format.check_columns(shape[1]).map_err(refused)?;
        if let Some(kept) = &values.kept {
            return Ok(B::upload_quantized(kept, self.device));
        }
        if self.quantizes_on_device {
            let values_oi = B::upload(values.buffer, shape, values.dtype, self.device);
            return Ok(B::quantize_weight(values_oi, format));
        }
        let stored = match values.dtype {
            DType::BF16 => Format::Bf16,
            DType::F16 => Format::F16,
            _ => Format::F32,
        };
        let quantized = format.quantize_bytes(&values.buffer, stored, &shape).map_err(refused)?;
        Ok(B::upload_quantized(&quantized, self.device))
    }

    fn upload(&self, shape: [usize; 2], values: Values, dtype: DType) -> Tensor<B, 2> {
        let uploaded = B::upload(values.buffer, shape, values.dtype, self.device);
        if values.dtype == dtype { uploaded } else { uploaded.cast(dtype) }
    }

    fn parameter(&self, tensor: &TensorSpec, values: Values) -> Parameter<B> {
        let elements = tensor.elements();
        let value = self.upload([1, elements], values, DType::F32).reshape([elements]);
        Parameter {
            name: self.options.saved_name(&tensor.name).into(),
            shape: tensor.shape.clone(),
            role: tensor.role,
            value,
        }
    }

    fn lora(&self, path: &str, [out_features, in_features]: [usize; 2], config: &LoraConfig) -> Lora<B> {
        let (a_name, b_name) = lora_tensor_names(path);
        let bound = 1.0 / (in_features as f32).sqrt();
        let mut random = stream(self.options.seed, &a_name);
        let r = config.rank_of(path);
        let a: Vec<f32> = (0..r * in_features).map(|_| random.random_range(-bound..bound)).collect();
        let b = vec![0.0; out_features * r];
        Lora {
            a: Parameter::from_host(a_name, &[r, in_features], Role::LoraA, &a, self.device),
            b: Parameter::from_host(b_name, &[out_features, r], Role::LoraB, &b, self.device),
            scale: config.scaling_of(path),
            start: None,
            magnitude: config.use_dora.then(|| {
                let (name, shape) = (magnitude_tensor_name(path), [out_features]);
                let start = vec![1.0; out_features];
                let parameter = Parameter::from_host(name, &shape, Role::LoraMagnitude, &start, self.device);
                LoraMagnitude { parameter, norms: None }
            }),
        }
    }

    fn rotary(&self) -> Vec<RotaryTables<B>> {
        let positions: Vec<u32> = (0..self.options.max_positions as u32).collect();
        let tables = |rope: &rope::Rope| {
            let (frequencies, attention_scaling) = rope.inverse_frequencies(self.options.sequence_tokens);
            let (cos, sin) = rope::tables(&positions, &frequencies, attention_scaling);
            let table = |values: Vec<f32>| {
                let flat = Tensor::<B, 1>::from_floats(values.as_slice(), self.device);
                flat.reshape([positions.len(), frequencies.len()])
            };
            RotaryTables { cos: table(cos), sin: table(sin) }
        };
        self.config.spec.ropes.iter().map(tables).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::fs::OpenOptions;

    use burn_tensor::TensorData;
    use firebrick_kernels::backends::Flex;
    use firebrick_kernels::{BlockScales, WeightOps};
    use half::{bf16, f16};
    use safetensors::Dtype;
    use tempfile::{TempDir, tempdir};

    use super::*;
    use crate::test_config::tiny;
    use crate::weights::{TensorInfo, WEIGHTS_FILE, write_safetensors};

    fn storages() -> impl Iterator<Item = BaseStorage> {
        let quantized = QuantFormat::ALL.map(|format| BaseStorage::Frozen(Format::Quantized(format)));
        [BaseStorage::Trained, BaseStorage::Frozen(Format::F32)].into_iter().chain(quantized)
    }

    /// So little room that every tensor is read by several threads.
    const NARROW: Limits = Limits { readers: 8, bytes: 64 };

    fn options(storage: BaseStorage, compute_dtype: DType) -> BuildOptions {
        BuildOptions {
            storage,
            lora: None,
            seed: 0,
            compute_dtype,
            gemms: GemmFormat::Compute,
            max_positions: 4,
            sequence_tokens: 4,
        }
    }

    /// The tiny model, with biases, stored in a format; `damage` may change a tensor's values.
    fn folder(stored: Dtype, damage: impl Fn(&str, &mut Vec<f32>)) -> (TempDir, HfFolder, ModelConfig) {
        // Rows of whole blocks in every format.
        folder_of_width(64, stored, damage)
    }

    /// The same with an MLP of this width.
    fn folder_of_width(
        width: usize,
        stored: Dtype,
        damage: impl Fn(&str, &mut Vec<f32>),
    ) -> (TempDir, HfFolder, ModelConfig) {
        let widths = [("hidden_size", 32.into()), ("intermediate_size", width.into())];
        let biases = [("attention_bias", true.into()), ("mlp_bias", true.into())];
        let changes: Vec<_> = widths.into_iter().chain(biases).collect();
        let (temp, config) = (tempdir().unwrap(), tiny(&changes).unwrap());
        let infos: BTreeMap<_, _> = config
            .spec
            .tensors()
            .into_iter()
            .map(|tensor| (tensor.name, TensorInfo { dtype: stored, shape: tensor.shape }))
            .collect();
        let bytes = |name: &str| {
            let mut values = normal(infos[name].shape.iter().product(), 1.0, &mut stream(3, name));
            damage(name, &mut values);
            Ok(match stored {
                Dtype::F32 => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
                Dtype::BF16 => values.iter().flat_map(|&value| bf16::from_f32(value).to_le_bytes()).collect(),
                _ => values.iter().flat_map(|&value| f16::from_f32(value).to_le_bytes()).collect(),
            })
        };
        write_safetensors(&temp.path().join(WEIGHTS_FILE), &infos, &BTreeMap::new(), bytes).unwrap();
        let folder = HfFolder::open(temp.path()).unwrap();
        (temp, folder, config)
    }

    fn load(
        (_, folder, config): &(TempDir, HfFolder, ModelConfig),
        options: &BuildOptions,
        quantizes_on_device: bool,
        limits: Limits,
    ) -> Result<Decoder<Flex>, ModelError> {
        Decoder::load_within(
            folder,
            config,
            options,
            None,
            &Default::default(),
            quantizes_on_device,
            limits,
            &mut |_| (),
        )
    }

    fn data_of_weight(weight: Weight<Flex>) -> Vec<TensorData> {
        match weight {
            Weight::Dense(weight) => vec![weight.into_data()],
            Weight::Quantized(weight) => {
                let mut data = vec![weight.codes.into_data(), weight.table.into_data()];
                match weight.scales.block {
                    BlockScales::Float(absmax) => data.push(absmax.into_data()),
                    BlockScales::Narrow { codes, map } => data.extend([codes.into_data(), map.into_data()]),
                    BlockScales::Nested { codes, absmax, map, offset, .. } => {
                        data.extend([codes.into_data(), absmax.into_data(), map.into_data(), offset.into_data()]);
                    }
                }
                data
            }
        }
    }

    /// Every base tensor of the model as it lies on the device, by name.
    fn data(model: &Decoder<Flex>) -> BTreeMap<String, Vec<TensorData>> {
        let vector = |parameter: &Parameter<Flex>| (parameter.name.to_string(), vec![parameter.value.to_data()]);
        let base = |name: String, base: &Base<Flex>| (name, data_of_weight(base.weight()));
        let mut all = BTreeMap::from([vector(&model.norm.weight)]);
        all.extend([base(EMBEDDING.to_owned(), &model.embed_tokens)]);
        all.extend(model.lm_head.iter().map(|head| base(HEAD.to_owned(), head)));
        for layer in &model.layers {
            all.extend(layer.hidden_norms().map(|norm| vector(&norm.weight)));
            all.extend(layer.qk_norm.iter().flatten().map(|norm| vector(&norm.weight)));
            for linear in layer.linears() {
                all.extend([base(format!("{}.weight", linear.path), &linear.base)]);
                all.extend(linear.bias.iter().map(|bias| vector(&bias.parameter)));
            }
        }
        all
    }

    /// What a tensor is on the device when it is read whole as f32 and brought there by itself.
    fn one_by_one(folder: &HfFolder, tensor: &TensorSpec, options: &BuildOptions) -> Vec<TensorData> {
        let TensorSpec { name, shape, role, .. } = tensor;
        let (values, device) = (folder.read_f32(name, shape).unwrap(), Default::default());
        if let Some(format) = options.quantized(*role) {
            let quantized = format.quantize(&values, shape).unwrap();
            return data_of_weight(Weight::Quantized(Flex::upload_quantized(&quantized, &device)));
        }
        let flat = Tensor::<Flex, 1>::from_floats(values.as_slice(), &device);
        match (options.storage, shape.as_slice()) {
            // Ties to even; burn-flex rounds them otherwise.
            (BaseStorage::Frozen(_), &[rows, columns]) => {
                vec![TensorData::new(values, [rows, columns]).convert_dtype(options.compute_dtype)]
            }
            (BaseStorage::Trained, &[rows, columns]) => vec![flat.reshape([rows, columns]).into_data()],
            _ => vec![flat.into_data()],
        }
    }

    #[test]
    fn every_tensor_is_what_it_would_be_by_itself_with_any_readers_and_packed_on_either_side() {
        for stored in [Dtype::F32, Dtype::BF16, Dtype::F16] {
            let source = folder(stored, |_, _| ());
            for (storage, compute) in storages().flat_map(|s| [(s, DType::F32), (s, DType::BF16)]) {
                let options = options(storage, compute);
                let expected: BTreeMap<_, _> = source
                    .2
                    .spec
                    .tensors()
                    .into_iter()
                    .map(|tensor| (tensor.name.clone(), one_by_one(&source.1, &tensor, &options)))
                    .collect();
                for limits in [NARROW, Limits { readers: 1, bytes: 1 << 30 }, Limits { readers: 8, bytes: 1 << 30 }] {
                    for quantizes_on_device in [false, true] {
                        let loaded = data(&load(&source, &options, quantizes_on_device, limits).unwrap());
                        let context = format!("{stored:?}, {options:?}, {limits:?}, on device: {quantizes_on_device}");
                        assert!(loaded.keys().eq(expected.keys()), "{context}");
                        for (name, expected) in &expected {
                            assert_eq!(&loaded[name], expected, "{name}: {context}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn a_nan_in_any_tensor_is_refused_by_its_name() {
        let names = ["model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight", "model.norm.weight"];
        for (name, storage) in names.into_iter().flat_map(|name| storages().map(move |storage| (name, storage))) {
            let source = folder(Dtype::BF16, |tensor, values| {
                if tensor == name {
                    values[5] = f32::NAN;
                }
            });
            for quantizes_on_device in [false, true] {
                let error = load(&source, &options(storage, DType::BF16), quantizes_on_device, NARROW).unwrap_err();
                assert!(error.to_string().contains(&format!("value 5 of `{name}`")), "{error}");
            }
        }
    }

    #[test]
    fn rows_that_are_not_whole_blocks_are_refused_by_the_name_of_the_tensor() {
        let source = folder_of_width(48, Dtype::BF16, |_, _| ());
        for quantizes_on_device in [false, true] {
            let storage = BaseStorage::Frozen(Format::Quantized(QuantFormat::Mxfp4));
            let error = load(&source, &options(storage, DType::F32), quantizes_on_device, NARROW).unwrap_err();
            let message = format!("{error} {:?}", std::error::Error::source(&error).map(ToString::to_string));
            assert!(message.contains("layers.0.mlp.down_proj.weight") && message.contains("blocks of 32"), "{message}");
        }
    }

    #[test]
    fn progress_names_every_tensor_in_the_order_of_the_model() {
        let (_temp, folder, config) = folder(Dtype::F32, |_, _| ());
        let (options, mut seen) = (options(BaseStorage::Frozen(Format::F32), DType::F32), Vec::new());
        let mut progress = |name: &str| seen.push(name.to_owned());
        Decoder::<Flex>::load(&folder, config.clone(), &options, &Default::default(), &mut progress).unwrap();
        let expected: Vec<_> = config.spec.tensors().into_iter().map(|tensor| tensor.name).collect();
        assert_eq!(seen, expected);
    }

    #[test]
    fn the_base_hash_depends_on_names_and_values_and_not_on_how_they_are_read() {
        let hash = |damage: f32, limits| {
            let source = folder(Dtype::F32, |name, values| {
                if name == EMBEDDING {
                    values[3] += damage;
                }
            });
            let options = options(BaseStorage::Frozen(Format::F32), DType::F32);
            load(&source, &options, false, limits).unwrap().base_hash().expect("a loaded model has a hash")
        };
        let one_reader = Limits { readers: 1, bytes: 1 << 30 };
        assert_eq!(hash(0.0, NARROW), hash(0.0, one_reader));
        assert_ne!(hash(0.0, one_reader), hash(1.0, one_reader));
    }

    #[test]
    fn a_file_cut_short_after_it_was_opened_is_named_with_a_tensor() {
        let source = folder(Dtype::F32, |_, _| ());
        let path = source.0.path().join(WEIGHTS_FILE);
        let length = path.metadata().unwrap().len();
        OpenOptions::new().write(true).open(&path).unwrap().set_len(length / 2).unwrap();
        let error = load(&source, &options(BaseStorage::Trained, DType::F32), false, NARROW).unwrap_err();
        let message = error.to_string();
        assert!(message.contains("model.") && message.contains(&path.display().to_string()), "{message}");
        assert!(matches!(error, ModelError::ReadTensor { .. }), "{message}");
    }
}
