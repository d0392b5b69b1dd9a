//! Building a model on a device: from a Hugging Face folder, quantized while it is read, or from random numbers.
//!
//! Threads read tensors ahead, in the number format for the device, while this thread hands them to the device in the order of `ModelSpec::tensors`:
//! quantized there if the base is to be quantized and the backend can, else quantized before the upload. LoRA pairs start as in PEFT (A uniform in
//! ±1/sqrt(in), B zero, magnitudes the norms of the rows). Each has its own random stream, seeded by its name, so the set of adapted modules changes
//! no other start. Weights that the folder stores in the format of the base are uploaded unchanged. The matrices of a mixture's experts are put
//! together on the way.
//! Trade-off: the model cannot run before its last tensor has arrived.

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
    EMBEDDING, HEAD, LoraConfig, ModelConfig, ModelSpec, PieceSpec, Role, TensorSpec, saved_tensor_name,
};
use firebrick_kernels::{BaseStorage, GemmFormat, Kernels};
use firebrick_precision::{Format, QuantFormat};

use self::new_tokens::with_new_rows;
use crate::decoder::Decoder;
use crate::division::Division;
use crate::error::ModelError;
use crate::weights::{HfFolder, Limits, Request, Shard, Values, read_ahead};

/// Threads that read weights: a few saturate any link to a device, and more only compete for memory bandwidth.
const MAX_READERS: usize = 8;
/// Bytes read ahead of a device that quantizes: two pieces for each reader, and codes of a few weights, in pinned memory.
const LOOK_AHEAD: usize = 384 << 20;
/// Bytes read ahead where quantizing is the host's work, which is slower than reading.
const LOOK_AHEAD_OF_HOST: usize = 256 << 20;
/// Bytes that one reader reads of a tensor at a time, and that one hash covers. Another number gives other hashes of larger tensors, so a checkpoint
/// records this number next to the hash of its base.
pub const HASHED_PIECE: usize = 16 << 20;

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
        config: ModelConfig,
        options: &BuildOptions,
        division: Option<Division>,
        device: &B::Device,
        progress: &mut dyn FnMut(&str),
    ) -> Result<Self, ModelError> {
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
        let is_dense = |tensor: &&TensorSpec| tensor.role == Role::Projection && folder.skips(&tensor.name);
        let mut dense: BTreeSet<String> = tensors.iter().filter(is_dense).map(|tensor| tensor.name.clone()).collect();
        for (stack, _) in config.spec.stacks() {
            let pieces: Vec<String> = stack.pieces.iter().map(PieceSpec::weight_name).collect();
            if pieces.iter().any(|piece| dense.contains(piece)) {
                dense.extend(pieces.into_iter().chain([stack.weight_name()]));
            }
        }
        let request = |tensor: &TensorSpec| {
            let stays_dense = dense.contains(&tensor.name) || options.trains(&tensor.name);
            let format = options.quantized(&config.spec, tensor).filter(|_| !stays_dense);
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
            let builder =
                Builder { config, options, division, dense, device, quantizes_on_device, read, progress, starts };
            let mut decoder = builder.build()?;
            decoder.base_hash = Some(ahead.hash());
            Ok(decoder)
        })?
    }
}

impl BuildOptions {
    /// Returns the number format in which to read a tensor that is quantized to `format`; `None`: as it is stored.
    fn dtype_to_read(
        &self,
        tensor: &TensorSpec,
        format: Option<QuantFormat>,
        quantizes_on_device: bool,
    ) -> Option<DType> {
        match tensor.role {
            Role::Norm | Role::Bias | Role::RouterCorrection | Role::Sinks => Some(DType::F32),
            // Widening on the device halves the bytes to upload.
            _ if self.trains(&tensor.name) => (!quantizes_on_device).then_some(DType::F32),
            _ if format.is_some() => None,
            _ => Some(match self.compute_dtype {
                dtype @ (DType::BF16 | DType::F16) => dtype,
                _ => DType::F32,
            }),
        }
    }

    /// Returns the quantization format of a tensor of this model.
    fn quantized(&self, spec: &ModelSpec, tensor: &TensorSpec) -> Option<QuantFormat> {
        match self.storage {
            BaseStorage::Frozen(_) if spec.is_mxfp4(&tensor.name) => Some(QuantFormat::Mxfp4),
            BaseStorage::Frozen(Format::Quantized(format)) if tensor.role == Role::Projection => Some(format),
            BaseStorage::Frozen(_) | BaseStorage::Trained => None,
        }
    }

    /// Returns whether a tensor of the base trains.
    fn trains(&self, name: &str) -> bool {
        self.storage == BaseStorage::Trained || self.lora.as_ref().is_some_and(|lora| lora.saves_tensor(name))
    }

    /// Returns whether embedding and head are separate, although they share one table on disk.
    fn unties(&self, spec: &ModelSpec) -> bool {
        spec.tie_word_embeddings && self.lora.as_ref().is_some_and(LoraConfig::unties)
    }

    /// Returns the name under which a trained tensor of the base is saved.
    fn saved_name(&self, name: &str) -> String {
        if self.lora.is_some() && self.trains(name) { saved_tensor_name(name) } else { name.to_owned() }
    }
}

/// Source of a tensor's values. A folder's tensors come only in the order of `ModelSpec::tensors`.
type Read<'a, 'v> = &'a mut dyn FnMut(&TensorSpec) -> Result<Values<'v>, ModelError>;

struct Builder<'a, 'v, B: Kernels> {
    config: &'a ModelConfig,
    options: &'a BuildOptions,
    division: Option<Division>,
    /// Projections that stay unquantized, as they are in the folder; a stack does if one of its matrices does.
    dense: BTreeSet<String>,
    device: &'a B::Device,
    quantizes_on_device: bool,
    read: Read<'a, 'v>,
    progress: &'a mut dyn FnMut(&str),
    /// The adapter that the run continues, if its modules started as parts of their weights; opened for the first of them.
    starts: Option<Shard>,
}

#[cfg(test)]
mod tests;
