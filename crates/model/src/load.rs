//! Building a model on a device: from a Hugging Face folder, quantised while it is read, or from random numbers.
//!
//! One tensor is on the host at a time: read, packed if the base is to be 4-bit, uploaded, dropped. LoRA pairs start as PEFT
//! starts them (A uniform in ±1/sqrt(in), B zero), each from a random stream of its own name, so that the adapted set of
//! modules does not change anyone's start.

use burn_tensor::{DType, Tensor};
use firebrick_kernels::{Kernels, Parameter, RotaryTables, Weight};
use firebrick_precision::nf4;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::block::{Block, Norm};
use crate::config::{LlamaConfig, PROJECTIONS};
use crate::error::ModelError;
use crate::linear::{Base, Linear, Lora};
use crate::llama::Llama;
use crate::peft::LoraConfig;
use crate::rope;
use crate::weights::HfFolder;

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
    /// Reads a model from its folder. `progress` is called with the name of each tensor once it is on the device.
    ///
    /// # Errors
    /// Anything wrong with the folder (all missing or misshapen tensors are reported before the first one is read), or a LoRA
    /// target that the model does not have.
    pub fn load(
        folder: &HfFolder,
        config: LlamaConfig,
        options: &BuildOptions,
        device: &B::Device,
        progress: &mut dyn FnMut(&str),
    ) -> Result<Self, ModelError> {
        folder.check_complete(&config)?;
        let mut read = |name: &str, shape: &[usize]| {
            let values = folder.read_f32(name, shape)?;
            progress(name);
            Ok(values)
        };
        Builder { config: &config, options, device, read: &mut read }.build()
    }

    /// A model with random weights: normal with the config's `initializer_range`, norms one.
    ///
    /// # Errors
    /// A LoRA target that the model does not have.
    pub fn random(config: LlamaConfig, options: &BuildOptions, device: &B::Device) -> Result<Self, ModelError> {
        let (deviation, seed) = (config.initializer_range as f32, options.seed);
        let mut read = |name: &str, shape: &[usize]| {
            let elements = shape.iter().product();
            Ok(if shape.len() == 1 {
                vec![1.0; elements]
            } else {
                normal(elements, deviation, &mut stream(seed, name))
            })
        };
        Builder { config: &config, options, device, read: &mut read }.build()
    }
}

/// Where the values of a named tensor come from.
type Read<'a> = &'a mut dyn FnMut(&str, &[usize]) -> Result<Vec<f32>, ModelError>;

struct Builder<'a, B: Kernels> {
    config: &'a LlamaConfig,
    options: &'a BuildOptions,
    device: &'a B::Device,
    read: Read<'a>,
}

impl<B: Kernels> Builder<'_, B> {
    fn build(mut self) -> Result<Llama<B>, ModelError> {
        let config = self.config;
        let table = [config.vocab_size, config.hidden_size];
        let embed_tokens = self.base("model.embed_tokens.weight", table, false)?;
        let blocks = (0..config.num_hidden_layers).map(|layer| self.block(layer)).collect::<Result<_, _>>()?;
        let norm = self.norm("model.norm.weight")?;
        let lm_head =
            if config.tie_word_embeddings { None } else { Some(self.base("lm_head.weight", table, false)?) };
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
        Ok(Block {
            input_layernorm: self.norm(&path("input_layernorm.weight"))?,
            q_proj: self.linear(path(q_proj), q_proj)?,
            k_proj: self.linear(path(k_proj), k_proj)?,
            v_proj: self.linear(path(v_proj), v_proj)?,
            o_proj: self.linear(path(o_proj), o_proj)?,
            post_attention_layernorm: self.norm(&path("post_attention_layernorm.weight"))?,
            gate_proj: self.linear(path(gate_proj), gate_proj)?,
            up_proj: self.linear(path(up_proj), up_proj)?,
            down_proj: self.linear(path(down_proj), down_proj)?,
            head_dim: self.config.head_dim,
        })
    }

    fn linear(&mut self, path: String, projection: &str) -> Result<Linear<B>, ModelError> {
        let shape = self.config.projection_shape(projection);
        let base = self.base(&format!("{path}.weight"), shape, true)?;
        let lora = match &self.options.lora {
            Some(lora) if lora.target_modules.matches(&path) => Some(self.lora(&path, shape, lora)),
            _ => None,
        };
        Ok(Linear { path, base, lora })
    }

    fn base(&mut self, name: &str, shape: [usize; 2], quantisable: bool) -> Result<Base<B>, ModelError> {
        let values = (self.read)(name, &shape)?;
        Ok(match self.options.storage {
            BaseStorage::Trained => Base::Trained(Parameter::from_host(name, &shape, &values, self.device)),
            BaseStorage::Nf4 { double_quant } if quantisable => {
                let packed = nf4::quantize(&values, &shape, double_quant.into())
                    .map_err(|source| ModelError::Quantize { name: name.to_owned(), source })?;
                Base::Frozen(Weight::Nf4(B::nf4_upload(&packed, self.device)))
            }
            BaseStorage::Frozen | BaseStorage::Nf4 { .. } => {
                let flat = Tensor::<B, 1>::from_floats(values.as_slice(), self.device);
                Base::Frozen(Weight::Dense(flat.reshape(shape).cast(self.options.compute_dtype)))
            }
        })
    }

    fn norm(&mut self, name: &str) -> Result<Norm<B>, ModelError> {
        let shape = [self.config.hidden_size];
        let values = (self.read)(name, &shape)?;
        Ok(Norm {
            weight: Parameter::from_host(name, &shape, &values, self.device),
            trained: self.options.storage == BaseStorage::Trained,
            epsilon: self.config.rms_norm_eps,
        })
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

/// A random stream of its own for each seed and name (FNV-1a of the name, so that it is the same on every machine).
fn stream(seed: u64, name: &str) -> ChaCha8Rng {
    let hash = name
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3));
    ChaCha8Rng::seed_from_u64(seed ^ hash)
}

/// Normal random numbers by the Box-Muller transform.
fn normal(elements: usize, deviation: f32, random: &mut ChaCha8Rng) -> Vec<f32> {
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
