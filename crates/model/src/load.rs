//! Building a model on a device: from a Hugging Face folder, quantised while it is read, or from random numbers.
//!
//! Threads read tensors ahead, in the number format that the device is to have, while this thread hands them to the device
//! one after the other: packed there if the base is to be 4-bit and the backend can, else packed before the upload. LoRA pairs
//! start as PEFT starts them (A uniform in ±1/sqrt(in), B zero), each from a random stream of its own name, so that the adapted
//! set of modules does not change anyone's start. Gives up running a model before its last tensor has come.

mod random;

use std::num::NonZero;
use std::thread::available_parallelism;

use burn_tensor::{DType, Tensor};
use firebrick_kernels::{Kernels, Nf4Weight, Parameter, RotaryTables, Weight};
use firebrick_precision::{Format, nf4};
use rand::Rng;

use self::random::{normal, stream};
use crate::block::{Block, Norm};
use crate::config::{LlamaConfig, PROJECTIONS};
use crate::error::ModelError;
use crate::linear::{Base, Linear, Lora};
use crate::llama::Llama;
use crate::peft::LoraConfig;
use crate::rope;
use crate::weights::{HfFolder, Limits, Request, Values, expected_tensors, read_ahead};

/// Threads that read weights: a few keep up with any link to a device, and more only take turns at the memory.
const MAX_READERS: usize = 8;
/// Bytes read ahead of a device that packs: enough to go on reading while it takes in a large tensor.
const LOOK_AHEAD: usize = 1 << 30;
/// Bytes read ahead where packing is the host's work, which is slower than reading: a few tensors.
const LOOK_AHEAD_OF_HOST: usize = 256 << 20;

/// How the base weights live on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BaseStorage {
    /// Every weight trains, in f32.
    Trained,
    /// Frozen, in the compute dtype.
    Frozen,
    /// The seven projections frozen in NF4, the rest frozen in the compute dtype.
    Nf4 {
        /// Whether block scales are quantised too.
        double_quant: bool,
    },
}

/// What to build beside what the checkpoint says.
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
    /// Positions the rotary table covers: the longest row, or the longest generated text.
    pub max_positions: usize,
}

impl<B: Kernels> Llama<B> {
    /// Reads a model from its folder. `progress` is called with the name of each tensor, in the order of
    /// [`expected_tensors`], once its upload has begun.
    ///
    /// # Errors
    /// Anything wrong with the folder (all missing or misshapen tensors are reported before the first one is read), a weight
    /// that is not finite, or a LoRA target that the model does not have.
    pub fn load(
        folder: &HfFolder,
        config: LlamaConfig,
        options: &BuildOptions,
        device: &B::Device,
        progress: &mut dyn FnMut(&str),
    ) -> Result<Self, ModelError> {
        let readers = available_parallelism().map_or(1, NonZero::get).min(MAX_READERS);
        let packs_on_device = B::packs_on_device();
        let limits = Limits { readers, bytes: if packs_on_device { LOOK_AHEAD } else { LOOK_AHEAD_OF_HOST } };
        Self::load_within(folder, &config, options, device, packs_on_device, limits, progress)
    }

    fn load_within(
        folder: &HfFolder,
        config: &LlamaConfig,
        options: &BuildOptions,
        device: &B::Device,
        packs_on_device: bool,
        limits: Limits,
        progress: &mut dyn FnMut(&str),
    ) -> Result<Self, ModelError> {
        folder.check_complete(config)?;
        let request = |(name, shape): (String, Vec<usize>)| {
            let dtype = options.dtype_to_read(&name, &shape, packs_on_device);
            Request { name, shape, dtype }
        };
        let requests: Vec<_> = expected_tensors(config).into_iter().map(request).collect();
        let allocate = |bytes| B::host_buffer(device, bytes);
        read_ahead(folder, &requests, limits, &allocate, |ahead| {
            let mut read = |name: &str, _: &[usize]| ahead.take(name);
            Builder { config, options, device, packs_on_device, read: &mut read, progress }.build()
        })?
    }

    /// A model with random weights: normal with the config's `initializer_range`, norms one.
    ///
    /// # Errors
    /// A LoRA target that the model does not have.
    pub fn random(config: LlamaConfig, options: &BuildOptions, device: &B::Device) -> Result<Self, ModelError> {
        let (deviation, seed) = (config.initializer_range as f32, options.seed);
        let mut read = |name: &str, shape: &[usize]| {
            let elements = shape.iter().product();
            let values = if shape.len() == 1 {
                vec![1.0; elements]
            } else {
                normal(elements, deviation, &mut stream(seed, name))
            };
            let mut buffer = B::host_buffer(device, elements * size_of::<f32>());
            for (bytes, value) in buffer.as_chunks_mut().0.iter_mut().zip(values) {
                *bytes = value.to_ne_bytes();
            }
            Ok(Values { buffer, dtype: DType::F32 })
        };
        let (packs_on_device, progress) = (B::packs_on_device(), &mut |_: &str| ());
        Builder { config: &config, options, device, packs_on_device, read: &mut read, progress }.build()
    }
}

impl BuildOptions {
    /// The number format in which a tensor is read; `None`: as it is stored.
    fn dtype_to_read(&self, name: &str, shape: &[usize], packs_on_device: bool) -> Option<DType> {
        match self.storage {
            _ if shape.len() == 1 => Some(DType::F32),
            BaseStorage::Nf4 { .. } if is_projection(name) => None,
            // Widened by the device, it is half the bytes to upload.
            BaseStorage::Trained => (!packs_on_device).then_some(DType::F32),
            BaseStorage::Frozen | BaseStorage::Nf4 { .. } => Some(match self.compute_dtype {
                dtype @ (DType::BF16 | DType::F16) => dtype,
                _ => DType::F32,
            }),
        }
    }
}

/// Whether a tensor is the weight of one of the seven projections, which are what is quantised.
fn is_projection(name: &str) -> bool {
    let module = name.strip_suffix(".weight").unwrap_or(name);
    PROJECTIONS.iter().any(|projection| module.ends_with(projection))
}

/// Where the values of a named tensor of a shape come from. A folder's come in the order of [`expected_tensors`] only.
type Read<'a> = &'a mut dyn FnMut(&str, &[usize]) -> Result<Values, ModelError>;

struct Builder<'a, B: Kernels> {
    config: &'a LlamaConfig,
    options: &'a BuildOptions,
    device: &'a B::Device,
    packs_on_device: bool,
    read: Read<'a>,
    progress: &'a mut dyn FnMut(&str),
}

impl<B: Kernels> Builder<'_, B> {
    fn build(mut self) -> Result<Llama<B>, ModelError> {
        let config = self.config;
        let table = [config.vocab_size, config.hidden_size];
        let embed_tokens = self.base("model.embed_tokens.weight", table)?;
        let blocks = (0..config.num_hidden_layers).map(|layer| self.block(layer)).collect::<Result<_, _>>()?;
        let norm = self.norm("model.norm.weight")?;
        let lm_head = if config.tie_word_embeddings { None } else { Some(self.base("lm_head.weight", table)?) };
        Ok(Llama {
            embed_tokens,
            blocks,
            norm,
            lm_head,
            rotary: self.rotary(),
            compute_dtype: self.options.compute_dtype,
            device: self.device.clone(),
            config: config.clone(),
        })
    }

    fn block(&mut self, layer: usize) -> Result<Block<B>, ModelError> {
        let path = |module: &str| format!("model.layers.{layer}.{module}");
        let [q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj] = PROJECTIONS;
        // Fields are read as they are written: both norms first, as in `expected_tensors`.
        Ok(Block {
            input_layernorm: self.norm(&path("input_layernorm.weight"))?,
            post_attention_layernorm: self.norm(&path("post_attention_layernorm.weight"))?,
            q_proj: self.linear(path(q_proj), q_proj)?,
            k_proj: self.linear(path(k_proj), k_proj)?,
            v_proj: self.linear(path(v_proj), v_proj)?,
            o_proj: self.linear(path(o_proj), o_proj)?,
            gate_proj: self.linear(path(gate_proj), gate_proj)?,
            up_proj: self.linear(path(up_proj), up_proj)?,
            down_proj: self.linear(path(down_proj), down_proj)?,
            head_dim: self.config.head_dim,
        })
    }

    fn linear(&mut self, path: String, projection: &str) -> Result<Linear<B>, ModelError> {
        let shape = self.config.projection_shape(projection);
        let base = self.base(&format!("{path}.weight"), shape)?;
        let lora = match &self.options.lora {
            Some(lora) if lora.target_modules.matches(&path) => Some(self.lora(&path, shape, lora)),
            _ => None,
        };
        Ok(Linear { path, base, lora })
    }

    fn base(&mut self, name: &str, shape: [usize; 2]) -> Result<Base<B>, ModelError> {
        let values = (self.read)(name, &shape)?;
        let base = match self.options.storage {
            BaseStorage::Trained => Base::Trained(self.parameter(name, &shape, values)),
            BaseStorage::Nf4 { double_quant } if is_projection(name) => {
                Base::Frozen(Weight::Nf4(self.pack(name, shape, values, double_quant)?))
            }
            BaseStorage::Frozen | BaseStorage::Nf4 { .. } => {
                Base::Frozen(Weight::Dense(self.upload(shape, values, self.options.compute_dtype)))
            }
        };
        (self.progress)(name);
        Ok(base)
    }

    fn norm(&mut self, name: &str) -> Result<Norm<B>, ModelError> {
        let shape = [self.config.hidden_size];
        let values = (self.read)(name, &shape)?;
        let weight = self.parameter(name, &shape, values);
        (self.progress)(name);
        Ok(Norm { weight, trained: self.options.storage == BaseStorage::Trained, epsilon: self.config.rms_norm_eps })
    }

    /// Packs a weight to NF4, where the backend does that faster.
    fn pack(
        &self,
        name: &str,
        shape: [usize; 2],
        values: Values,
        double_quant: bool,
    ) -> Result<Nf4Weight<B>, ModelError> {
        if self.packs_on_device {
            let values_oi = B::upload(values.buffer, shape, values.dtype, self.device);
            return Ok(B::nf4_quantize(values_oi, double_quant));
        }
        let stored = match values.dtype {
            DType::BF16 => Format::Bf16,
            DType::F16 => Format::F16,
            _ => Format::F32,
        };
        let packed = nf4::quantize_bytes(&values.buffer, stored, &shape, double_quant.into())
            .map_err(|source| ModelError::Quantize { name: name.to_owned(), source })?;
        Ok(B::nf4_upload(&packed, self.device))
    }

    fn upload(&self, shape: [usize; 2], values: Values, dtype: DType) -> Tensor<B, 2> {
        let uploaded = B::upload(values.buffer, shape, values.dtype, self.device);
        if values.dtype == dtype { uploaded } else { uploaded.cast(dtype) }
    }

    fn parameter(&self, name: &str, shape: &[usize], values: Values) -> Parameter<B> {
        let elements = shape.iter().product();
        let value = self.upload([1, elements], values, DType::F32).reshape([elements]);
        Parameter { name: name.into(), shape: shape.to_vec(), value }
    }

    fn lora(&self, path: &str, [out_features, in_features]: [usize; 2], config: &LoraConfig) -> Lora<B> {
        let (a_name, b_name) = crate::peft::tensor_names(path);
        let bound = 1.0 / (in_features as f32).sqrt();
        let mut random = stream(self.options.seed, &a_name);
        let a: Vec<f32> = (0..config.r * in_features).map(|_| random.random_range(-bound..bound)).collect();
        let b = vec![0.0; out_features * config.r];
        Lora {
            a: Parameter::from_host(a_name, &[config.r, in_features], &a, self.device),
            b: Parameter::from_host(b_name, &[out_features, config.r], &b, self.device),
            scale: config.scaling(),
        }
    }

    fn rotary(&self) -> RotaryTables<B> {
        let positions: Vec<u32> = (0..self.options.max_positions as u32).collect();
        let (frequencies, attention_scaling) = rope::inverse_frequencies(self.config);
        let (cos, sin) = rope::tables(&positions, &frequencies, attention_scaling);
        let table = |values: Vec<f32>| {
            Tensor::<B, 1>::from_floats(values.as_slice(), self.device).reshape([positions.len(), frequencies.len()])
        };
        RotaryTables { cos: table(cos), sin: table(sin) }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::fs::OpenOptions;

    use burn_flex::Flex;
    use burn_tensor::TensorData;
    use firebrick_kernels::{Nf4Absmax, Parameter};
    use half::{bf16, f16};
    use safetensors::Dtype;
    use tempfile::{TempDir, tempdir};

    use super::*;
    use crate::config::tests::tiny;
    use crate::weights::{TensorInfo, WEIGHTS_FILE, write_safetensors};

    const STORAGES: [BaseStorage; 4] = [
        BaseStorage::Trained,
        BaseStorage::Frozen,
        BaseStorage::Nf4 { double_quant: false },
        BaseStorage::Nf4 { double_quant: true },
    ];
    /// So little room that every tensor is read by several threads.
    const NARROW: Limits = Limits { readers: 8, bytes: 64 };

    fn options(storage: BaseStorage, compute_dtype: DType) -> BuildOptions {
        BuildOptions { storage, lora: None, seed: 0, compute_dtype, max_positions: 4 }
    }

    /// The tiny model stored in a format; `damage` may change a tensor's values.
    fn folder(stored: Dtype, damage: impl Fn(&str, &mut Vec<f32>)) -> (TempDir, HfFolder, LlamaConfig) {
        let (temp, config) = (tempdir().unwrap(), tiny(&[]).unwrap());
        let infos: BTreeMap<_, _> = expected_tensors(&config)
            .into_iter()
            .map(|(name, shape)| (name, TensorInfo { dtype: stored, shape }))
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
        (_, folder, config): &(TempDir, HfFolder, LlamaConfig),
        options: &BuildOptions,
        packs_on_device: bool,
        limits: Limits,
    ) -> Result<Llama<Flex>, ModelError> {
        Llama::load_within(folder, config, options, &Default::default(), packs_on_device, limits, &mut |_| ())
    }

    fn data_of_weight(weight: Weight<Flex>) -> Vec<TensorData> {
        match weight {
            Weight::Dense(weight) => vec![weight.into_data()],
            Weight::Nf4(weight) => {
                let mut data = vec![weight.codes.into_data(), weight.table.into_data()];
                match weight.absmax {
                    Nf4Absmax::Float(absmax) => data.push(absmax.into_data()),
                    Nf4Absmax::Nested { codes, absmax, map, offset, .. } => {
                        data.extend([codes.into_data(), absmax.into_data(), map.into_data(), offset.into_data()]);
                    }
                }
                data
            }
        }
    }

    /// Every base tensor of the model as it lies on the device, by name.
    fn data(model: &Llama<Flex>) -> BTreeMap<String, Vec<TensorData>> {
        let norm = |norm: &Norm<Flex>| (norm.weight.name.to_string(), vec![norm.weight.value.to_data()]);
        let base = |name: String, base: &Base<Flex>| (name, data_of_weight(base.weight()));
        let mut all = BTreeMap::from([norm(&model.norm)]);
        all.extend([base("model.embed_tokens.weight".to_owned(), &model.embed_tokens)]);
        all.extend(model.lm_head.iter().map(|head| base("lm_head.weight".to_owned(), head)));
        for block in &model.blocks {
            all.extend([norm(&block.input_layernorm), norm(&block.post_attention_layernorm)]);
            let attention = [&block.q_proj, &block.k_proj, &block.v_proj, &block.o_proj];
            for linear in attention.into_iter().chain([&block.gate_proj, &block.up_proj, &block.down_proj]) {
                all.extend([base(format!("{}.weight", linear.path), &linear.base)]);
            }
        }
        all
    }

    /// What a tensor is on the device when it is read whole as f32 and brought there by itself.
    fn one_by_one(folder: &HfFolder, name: &str, shape: &[usize], options: &BuildOptions) -> Vec<TensorData> {
        let (values, device) = (folder.read_f32(name, shape).unwrap(), Default::default());
        match options.storage {
            BaseStorage::Nf4 { double_quant } if is_projection(name) => {
                let packed = nf4::quantize(&values, shape, double_quant.into()).unwrap();
                data_of_weight(Weight::Nf4(Flex::nf4_upload(&packed, &device)))
            }
            BaseStorage::Frozen | BaseStorage::Nf4 { .. } if shape.len() == 2 => {
                let flat = Tensor::<Flex, 1>::from_floats(values.as_slice(), &device);
                data_of_weight(Weight::Dense(flat.reshape([shape[0], shape[1]]).cast(options.compute_dtype)))
            }
            _ => {
                let parameter = Parameter::<Flex>::from_host(name, shape, &values, &device);
                vec![if shape.len() == 2 { parameter.matrix().into_data() } else { parameter.value.into_data() }]
            }
        }
    }

    #[test]
    fn every_tensor_is_what_it_would_be_by_itself_with_any_readers_and_packed_on_either_side() {
        for stored in [Dtype::F32, Dtype::BF16, Dtype::F16] {
            let source = folder(stored, |_, _| ());
            for (storage, compute) in STORAGES.into_iter().flat_map(|s| [(s, DType::F32), (s, DType::BF16)]) {
                let options = options(storage, compute);
                let expected: BTreeMap<_, _> = expected_tensors(&source.2)
                    .into_iter()
                    .map(|(name, shape)| (name.clone(), one_by_one(&source.1, &name, &shape, &options)))
                    .collect();
                for limits in [NARROW, Limits { readers: 1, bytes: 1 << 30 }, Limits { readers: 8, bytes: 1 << 30 }] {
                    for packs_on_device in [false, true] {
                        let loaded = data(&load(&source, &options, packs_on_device, limits).unwrap());
                        let context = format!("{stored:?}, {options:?}, {limits:?}, on device: {packs_on_device}");
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
        for (name, storage) in names.into_iter().flat_map(|name| STORAGES.map(|storage| (name, storage))) {
            let source = folder(Dtype::BF16, |tensor, values| {
                if tensor == name {
                    values[5] = f32::NAN;
                }
            });
            for packs_on_device in [false, true] {
                let error = load(&source, &options(storage, DType::BF16), packs_on_device, NARROW).unwrap_err();
                assert!(error.to_string().contains(&format!("value 5 of `{name}`")), "{error}");
            }
        }
    }

    #[test]
    fn progress_names_every_tensor_in_the_order_of_the_model() {
        let (_temp, folder, config) = folder(Dtype::F32, |_, _| ());
        let (options, mut seen) = (options(BaseStorage::Frozen, DType::F32), Vec::new());
        let mut progress = |name: &str| seen.push(name.to_owned());
        Llama::<Flex>::load(&folder, config.clone(), &options, &Default::default(), &mut progress).unwrap();
        let expected: Vec<_> = expected_tensors(&config).into_iter().map(|(name, _)| name).collect();
        assert_eq!(seen, expected);
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
