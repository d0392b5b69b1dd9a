//! Building a model on a device: from a Hugging Face folder, quantized while it is read, or from random numbers.
//!
//! Threads read tensors ahead, in the number format for the device, while this thread hands them to the device in the order of `ModelSpec::tensors`:
//! quantized there if the base is to be quantized and the backend can, else quantized before the upload. LoRA pairs start as in PEFT (A uniform in
//! ±1/sqrt(in), B zero, magnitudes the norms of the rows). Each has its own random stream, seeded by its name, so the set of adapted modules changes
//! no other start. Weights that the folder stores in the format of the base are uploaded unchanged. The matrices of a mixture's experts are put
//! together on the way.

mod layers;
mod new_tokens;
mod on_device;
mod pissa;
mod synthetic;

use std::collections::BTreeSet;
use std::num::NonZero;
use std::thread::available_parallelism;

use burn_tensor::DType;
use firebrick_arch::{
    EMBEDDING, HEAD, LoraConfig, ModelConfig, ModelSpec, PER_LAYER_EMBEDDING, Role, TensorSpec, saved_tensor_name,
};
use firebrick_kernels::{BaseStorage, GemmFormat, Kernels, Storage};
use firebrick_precision::{FloatType, Format, QuantFormat};

use self::new_tokens::with_new_rows;
use crate::checkpoint::{HfFolder, Limits, Request, Shard, Values, read_ahead};
use crate::decoder::Decoder;
use crate::division::Division;
use crate::error::ModelError;
use crate::host_table::TableSource;
use crate::peft::without_ignored;

/// Threads that read weights: a few saturate any link to a device, and more only compete for memory bandwidth.
const MAX_READERS: usize = 8;
/// Bytes read ahead of a device that quantizes: two pieces for each reader, and codes of a few weights, in pinned memory.
const LOOK_AHEAD: usize = 384 << 20;
/// Bytes read ahead where quantizing is the host's work, which is slower than reading.
const LOOK_AHEAD_OF_HOST: usize = 256 << 20;
/// Bytes that one reader reads of a tensor at a time, and one hash covers: another number changes hashes of larger tensors, which checkpoints compare.
const HASHED_PIECE: usize = 16 << 20;

/// Build settings in addition to the checkpoint's description.
#[derive(Clone, Debug)]
pub struct BuildOptions {
    /// Storage of the base weights on the device.
    pub storage: BaseStorage,
    /// The adapter to add.
    pub lora: Option<LoraConfig>,
    /// Seed of random weights and of LoRA's A.
    pub seed: u64,
    /// Dtype of activations and of frozen dense weights.
    pub compute_dtype: DType,
    /// Operand format of the layers' GEMMs.
    pub gemms: GemmFormat,
    /// Positions the rotary tables cover: the longest packed sequence, or the longest generated text.
    pub max_positions: usize,
    /// Tokens of the sequence that chooses the factors of longrope: `max_seq_len` of a run, whatever is generated after it.
    pub sequence_tokens: usize,
}

impl BuildOptions {
    /// Builds a model without an adapter, for packed sequences and texts of this many tokens.
    pub fn new(storage: BaseStorage, compute_dtype: DType, tokens: usize) -> Self {
        Self {
            storage,
            lora: None,
            seed: 0,
            compute_dtype,
            gemms: GemmFormat::Compute,
            max_positions: tokens,
            sequence_tokens: tokens,
        }
    }
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

    /// Reads a model as [`Decoder::load`] does, with the layer weights divided over ranks. Every rank reads all of them, and uploads only its own.
    pub fn load_divided(
        folder: &HfFolder,
        mut config: ModelConfig,
        options: &BuildOptions,
        division: Option<Division>,
        device: &B::Device,
        progress: &mut dyn FnMut(&str),
    ) -> Result<Self, ModelError> {
        let lora = options.lora.as_ref().map(|lora| without_ignored(lora, &config.spec));
        let options = &BuildOptions { lora, ..options.clone() };
        config.unquantized = folder.unquantized(&config.spec);
        let readers = available_parallelism().map_or(1, NonZero::get).min(MAX_READERS);
        let quantizes_on_device = B::QUANTIZES_ON_DEVICE;
        let bytes = if quantizes_on_device { LOOK_AHEAD } else { LOOK_AHEAD_OF_HOST };
        let limits = Limits { readers, bytes, piece: HASHED_PIECE };
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
        folder.check_complete(config)?;
        let tensors = config.stored_spec().tensors();
        let dense = config.dense_weights();
        let storage = options.formats(&dense);
        let request = |tensor: &TensorSpec| {
            let (format, dtype) = to_read(storage, &config.spec, tensor, quantizes_on_device);
            Request { name: tensor.name.clone(), shape: tensor.shape.clone(), dtype, format }
        };
        let mut requests: Vec<_> = tensors.iter().map(request).collect();
        if options.unties(&config.spec) {
            // The head starts as the table that it shared with the embedding.
            let head = TensorSpec { name: HEAD.to_owned(), ..tensors[0].clone() };
            let (_, dtype) = to_read(storage, &config.spec, &head, quantizes_on_device);
            requests.push(Request { dtype, ..request(&tensors[0]) });
        }
        let allocate = |bytes| B::host_buffer(device, bytes);
        read_ahead(folder, &requests, limits, &allocate, |ahead| {
            let mut read = |tensor: &TensorSpec| {
                let is_untied_head = tensor.name == HEAD && config.spec.tie_word_embeddings;
                let stored_name = if is_untied_head { EMBEDDING } else { &tensor.name };
                let values = ahead.take(stored_name);
                match tensor.role {
                    Role::Embedding | Role::Head => with_new_rows(values, stored_name, config, options.seed, &allocate),
                    _ => Ok(values),
                }
            };
            let (read, starts) = (&mut read, None);
            let table = config.spec.per_layer_inputs.map(|_| folder.shard_of(PER_LAYER_EMBEDDING)).transpose()?;
            let table = table.map(TableSource::File);
            let builder = Builder {
                config,
                options,
                division,
                dense,
                device,
                quantizes_on_device,
                read,
                table,
                progress,
                starts,
            };
            let mut decoder = builder.build()?;
            decoder.base_hash = Some(ahead.hash());
            Ok(decoder)
        })?
    }
}

impl BuildOptions {
    /// Returns the format of frozen weights that are not quantized.
    pub(crate) fn frozen_dtype(&self) -> DType {
        match self.gemms.of_frozen(FloatType::F32) {
            FloatType::F16 => DType::F16,
            _ => self.compute_dtype,
        }
    }

    /// Returns the settings that determine the format of each tensor; the weights named in `dense` are not quantized.
    pub(crate) fn formats<'a>(&'a self, dense: &'a BTreeSet<String>) -> Storage<'a> {
        let compute = float_type(self.frozen_dtype());
        Storage { base: self.storage, lora: self.lora.as_ref(), compute, dense }
    }

    /// Returns whether embedding and head are separate, although they share one table on disk.
    fn unties(&self, spec: &ModelSpec) -> bool {
        spec.tie_word_embeddings && self.lora.as_ref().is_some_and(LoraConfig::unties)
    }

    /// Returns the name under which a trained tensor of the base is saved.
    fn saved_name(&self, name: &str) -> String {
        if self.lora.as_ref().is_some_and(|lora| lora.saves_tensor(name)) {
            saved_tensor_name(name)
        } else {
            name.to_owned()
        }
    }
}

fn float_type(dtype: DType) -> FloatType {
    match dtype {
        DType::BF16 => FloatType::Bf16,
        DType::F16 => FloatType::F16,
        _ => FloatType::F32,
    }
}

/// Returns the quantized format of a tensor, and the dtype in which to read it; `None`: as it is stored.
fn to_read(
    storage: Storage<'_>,
    spec: &ModelSpec,
    tensor: &TensorSpec,
    quantizes_on_device: bool,
) -> (Option<QuantFormat>, Option<DType>) {
    match storage.storage_of(spec, &tensor.name, tensor.role) {
        // It stays on the host.
        _ if tensor.role == Role::PerLayerEmbedding => (None, None),
        _ if tensor.role == Role::LayerScalar => (None, Some(DType::F32)),
        Format::Quantized(format) => (Some(format), None),
        // Widening on the device halves the bytes to upload.
        Format::Float(FloatType::F32)
            if quantizes_on_device && tensor.shape.len() == 2 && storage.trains(&tensor.name) =>
        {
            (None, None)
        }
        Format::Float(FloatType::F32) => (None, Some(DType::F32)),
        Format::Float(FloatType::Bf16) => (None, Some(DType::BF16)),
        Format::Float(FloatType::F16) => (None, Some(DType::F16)),
    }
}

/// Source of a tensor's values. A folder's tensors come only in the order of `ModelSpec::tensors`.
type Read<'a, 'v> = &'a mut dyn FnMut(&TensorSpec) -> Result<Values<'v>, ModelError>;

pub(crate) struct Builder<'a, 'v, B: Kernels> {
    config: &'a ModelConfig,
    options: &'a BuildOptions,
    division: Option<Division>,
    /// Projections that stay unquantized, as they are in the folder; a stack does if one of its matrices does.
    dense: BTreeSet<String>,
    device: &'a B::Device,
    quantizes_on_device: bool,
    read: Read<'a, 'v>,
    /// The table of the layers' own inputs.
    table: Option<TableSource>,
    progress: &'a mut dyn FnMut(&str),
    /// The adapter that the run continues, if its modules started as parts of their weights; opened for the first of them.
    starts: Option<Shard>,
}

impl<B: Kernels> Builder<'_, '_, B> {
    pub(crate) fn formats(&self) -> Storage<'_> {
        self.options.formats(&self.dense)
    }
}

#[cfg(test)]
mod tests;
