//! Optimizer state: on the device in training, or in host memory between two updates, and by name on the host, as a checkpoint stores it.
//!
//! A parameter has the state tensors that its rule lists. On the host a state tensor is named `<parameter name>.<part>`, for example
//! `model.norm.weight.exp_avg`. Saving and loading keep every bit.
//! Trade-off: a tensor that is saved is copied to the host even where it is in host memory already, one at a time.

use std::collections::BTreeMap;

use burn_tensor::{BasicOps, DType, Int, Tensor, TensorData};
use firebrick_kernels::{Kernels, Offloaded, Payload};

/// Smaller state tensors stay on the device, as in bitsandbytes: copying them would cost more than it saves.
const MIN_PAGED_ELEMENTS: usize = 100_000;

/// The values of one stored tensor.
#[derive(Clone, Debug, PartialEq)]
pub enum HostTensor {
    /// Moments in f32, and scales.
    F32(Vec<f32>),
    /// Codes of 8-bit moments.
    U8(Vec<u8>),
}

/// State tensors by name: `<parameter name>.<part>`.
pub type StateDict = BTreeMap<String, HostTensor>;

/// A saved optimizer state that does not fit the run.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "messages say what variants and their fields are")]
pub enum OptimError {
    #[error(
        "the optimizer state lacks `{name}`: the checkpoint was written with another recipe (LoRA targets or optimizer)"
    )]
    Missing { name: String },
    #[error("the optimizer state's `{name}` has {got}, expected {expected}: resume with the recipe that wrote it")]
    Mismatch { name: String, expected: String, got: String },
    #[error(
        "the optimizer state has `{name}`, which no parameter of this run needs: resume with the recipe that wrote it"
    )]
    Unexpected { name: String },
}

/// A state tensor that a checkpoint stores.
pub struct SavedTensor<'a, B: Kernels> {
    /// Its name in a [`StateDict`].
    pub name: String,
    /// Number of its elements.
    pub elements: usize,
    /// Whether its elements are bytes; otherwise they are f32 values.
    pub is_bytes: bool,
    stored: &'a StoredTensor<B>,
}

impl<B: Kernels> SavedTensor<'_, B> {
    /// Copies its bytes to the host, little-endian as they are in memory. Waits for the device.
    pub fn bytes(&self) -> Vec<u8> {
        let data = self.fetch();
        if self.is_bytes { B::unpacked_codes(data) } else { data.as_bytes().to_vec() }
    }

    /// Copies it to the host in the form in which the backend reads it.
    pub(crate) fn fetch(&self) -> TensorData {
        match self.stored {
            StoredTensor::Paged(paged) => paged.to_data(),
            StoredTensor::Resident(_) => self.held().to_data(),
        }
    }

    /// Returns a handle of it, which keeps its values.
    ///
    /// # Panics
    /// If it is paged.
    pub(crate) fn held(&self) -> Payload<B> {
        match self.stored {
            StoredTensor::Resident(StateTensor::F32(values)) => Payload::Values(values.clone()),
            StoredTensor::Resident(StateTensor::Codes(codes)) => Payload::Codes(codes.clone()),
            StoredTensor::Paged(_) => panic!("{} is paged", self.name),
        }
    }
}

impl HostTensor {
    /// Takes over what was fetched, on any thread.
    pub(crate) fn from_fetched<B: Kernels>(data: TensorData, is_bytes: bool) -> Self {
        match is_bytes {
            true => Self::U8(B::unpacked_codes(data)),
            false => Self::F32(data.into_vec().expect("rules keep f32 state in f32")),
        }
    }
}

/// The format of a state tensor and the value that each of its elements starts with.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum StateInit {
    F32(f32),
    /// 8-bit codes.
    Code(u8),
}

/// One state tensor of a parameter, as its rule describes it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct StateSpec {
    /// Last part of its name, for example `exp_avg`.
    pub(crate) part: &'static str,
    pub(crate) elements: usize,
    pub(crate) init: StateInit,
}

/// One state tensor on the device, flat.
#[derive(Clone, Debug)]
pub(crate) enum StateTensor<B: Kernels> {
    F32(Tensor<B, 1>),
    /// In the form of [`OptimizerOps::packed_codes`](firebrick_kernels::OptimizerOps::packed_codes).
    Codes(Tensor<B, 1, Int>),
}

impl HostTensor {
    /// Describes format and number of elements, for messages.
    pub fn describe(&self) -> String {
        match self {
            Self::F32(values) => describe_f32(values.len()),
            Self::U8(codes) => describe_u8(codes.len()),
        }
    }
}

fn describe_f32(elements: usize) -> String {
    format!("{elements} f32 values")
}

fn describe_u8(elements: usize) -> String {
    format!("{elements} bytes")
}

impl StateSpec {
    pub(crate) fn bytes(&self) -> u64 {
        let element_bytes = match self.init {
            StateInit::F32(_) => size_of::<f32>() as u64,
            StateInit::Code(_) => 1,
        };
        self.elements as u64 * element_bytes
    }

    /// Returns whether the tensor waits in host memory when its parameter's state is paged.
    pub(crate) fn is_paged(&self) -> bool {
        self.elements >= MIN_PAGED_ELEMENTS
    }

    pub(crate) fn name(&self, parameter: &str) -> String {
        format!("{parameter}.{}", self.part)
    }

    pub(crate) fn matches(&self, stored: &HostTensor) -> bool {
        match (self.init, stored) {
            (StateInit::F32(_), HostTensor::F32(values)) => values.len() == self.elements,
            (StateInit::Code(_), HostTensor::U8(codes)) => codes.len() == self.elements,
            (StateInit::F32(_), HostTensor::U8(_)) | (StateInit::Code(_), HostTensor::F32(_)) => false,
        }
    }

    /// Describes format and number of elements, for messages.
    pub(crate) fn describe(&self) -> String {
        match self.init {
            StateInit::F32(_) => describe_f32(self.elements),
            StateInit::Code(_) => describe_u8(self.elements),
        }
    }

    /// Creates the tensor before the first step.
    pub(crate) fn initial<B: Kernels>(&self, device: &B::Device) -> StateTensor<B> {
        match self.init {
            StateInit::F32(value) => StateTensor::F32(Tensor::full([self.elements], value, (device, DType::F32))),
            StateInit::Code(code) => StateTensor::upload(HostTensor::U8(vec![code; self.elements]), device),
        }
    }
}

/// The state of one parameter: tensors in the order of the layout.
pub(crate) struct ParameterState<B: Kernels> {
    pub(crate) layout: Vec<StateSpec>,
    tensors: Vec<StoredTensor<B>>,
}

/// A state tensor between two updates.
enum StoredTensor<B: Kernels> {
    Resident(StateTensor<B>),
    Paged(Offloaded<B>),
}

impl<B: Kernels> ParameterState<B> {
    pub(crate) fn new(layout: Vec<StateSpec>, tensors: Vec<StateTensor<B>>) -> Self {
        Self { layout, tensors: tensors.into_iter().map(StoredTensor::Resident).collect() }
    }

    pub(crate) fn into_parts(self) -> (Vec<StateSpec>, Vec<StateTensor<B>>) {
        let resident = |stored| match stored {
            StoredTensor::Resident(tensor) => tensor,
            StoredTensor::Paged(_) => panic!("state is fetched before its update"),
        };
        (self.layout, self.tensors.into_iter().map(resident).collect())
    }

    /// Moves the tensors that are worth it into host memory.
    pub(crate) fn paged(self) -> Self {
        let page = |(spec, stored): (&StateSpec, _)| match stored {
            StoredTensor::Resident(tensor) if spec.is_paged() => tensor.page(),
            stored => stored,
        };
        let tensors = self.layout.iter().zip(self.tensors).map(page).collect();
        Self { tensors, layout: self.layout }
    }

    /// Starts copying the tensors back to the device.
    pub(crate) fn prefetch(&mut self, device: &B::Device) {
        for stored in &mut self.tensors {
            match stored {
                StoredTensor::Resident(_) => {}
                StoredTensor::Paged(paged) => paged.prefetch(device),
            }
        }
    }

    pub(crate) fn fetched(self, device: &B::Device) -> Self {
        let fetch = |stored| match stored {
            StoredTensor::Resident(tensor) => tensor,
            StoredTensor::Paged(paged) => match paged.restore(device) {
                Payload::Values(values) => StateTensor::F32(flat(values)),
                Payload::Codes(codes) => StateTensor::Codes(flat(codes)),
            },
        };
        Self::new(self.layout, self.tensors.into_iter().map(fetch).collect())
    }

    /// Lists the tensors as a checkpoint stores them.
    pub(crate) fn saved(&self, parameter: &str) -> impl Iterator<Item = SavedTensor<'_, B>> {
        self.layout.iter().zip(&self.tensors).map(move |(spec, stored)| SavedTensor {
            name: spec.name(parameter),
            elements: spec.elements,
            is_bytes: matches!(spec.init, StateInit::Code(_)),
            stored,
        })
    }
}

fn flat<B: Kernels, K: BasicOps<B>>(tensor: Tensor<B, 2, K>) -> Tensor<B, 1, K> {
    let elements = tensor.shape().num_elements();
    tensor.reshape([elements])
}

impl<B: Kernels> StateTensor<B> {
    pub(crate) fn upload(stored: HostTensor, device: &B::Device) -> Self {
        match stored {
            HostTensor::F32(values) => {
                let shape = [values.len()];
                Self::F32(Tensor::from_data(TensorData::new(values, shape), (device, DType::F32)))
            }
            HostTensor::U8(codes) => {
                let codes = B::packed_codes(codes);
                let dtype = codes.dtype;
                Self::Codes(Tensor::from_data(codes, (device, dtype)))
            }
        }
    }

    fn page(self) -> StoredTensor<B> {
        StoredTensor::Paged(B::offload(match self {
            Self::F32(values) => Payload::Values(row(values)),
            Self::Codes(codes) => Payload::Codes(row(codes)),
        }))
    }
}

fn row<B: Kernels, K: BasicOps<B>>(tensor: Tensor<B, 1, K>) -> Tensor<B, 2, K> {
    let elements = tensor.shape().num_elements();
    tensor.reshape([1, elements])
}
