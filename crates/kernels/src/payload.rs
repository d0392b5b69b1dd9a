//! Payloads of exchanges between ranks: tensors, flat and in their storage format, and exchanges in progress.
//!
//! Separate calls start and finish an exchange, so that a backend with a side stream computes in between. Codes of
//! quantized weights are sent as codes.

use burn_tensor::{DType, Int, IntDType, Tensor, TensorData, backend::Backend};

/// A tensor in its storage format: flat between ranks, as rows to host memory and back.
#[derive(Clone, Debug)]
pub enum Payload<B: Backend, const D: usize = 1> {
    /// Values, in any float format.
    Values(Tensor<B, D>),
    /// Codes, in bytes or in words of several codes.
    Codes(Tensor<B, D, Int>),
}

/// The properties of a payload that a rank must know to receive it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PayloadLayout {
    /// Whether the payload is [`Payload::Codes`].
    pub is_codes: bool,
    /// Format of the elements on the device.
    pub dtype: DType,
    /// Number of elements.
    pub elements: usize,
}

/// A payload of an exchange, and its root: the rank that sends it to all others, or gets their sum.
#[derive(Clone, Debug)]
pub struct Loan<B: Backend> {
    /// The root.
    pub root: usize,
    /// The layout of the payload.
    pub layout: PayloadLayout,
    /// The payload; in a broadcast only on its root.
    pub own: Option<Payload<B>>,
}

/// An exchange in progress.
#[must_use]
pub struct Exchange<B: Backend> {
    /// Destinations of the results, in the order of the request.
    pub(crate) payloads: Vec<Payload<B>>,
    /// Makes later work on the device wait for the exchange; `None` if it is done.
    pub(crate) wait: Option<Box<dyn FnOnce() + Send>>,
}

impl<B: Backend> Payload<B> {
    /// Returns the properties that another rank must know to receive it.
    pub fn layout(&self) -> PayloadLayout {
        let (is_codes, dtype, elements) = match self {
            Self::Values(values) => (false, values.dtype(), values.dims()[0]),
            Self::Codes(codes) => (true, codes.dtype(), codes.dims()[0]),
        };
        PayloadLayout { is_codes, dtype, elements }
    }

    /// Returns the bytes to send through host memory: elements in their storage format.
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        match self {
            Self::Values(values) => values.to_data().as_bytes().to_vec(),
            Self::Codes(codes) if codes.dtype().size() == 1 => {
                self.to_data().convert::<u8>().into_vec().expect("codes were just converted to bytes")
            }
            Self::Codes(words) => words.to_data().as_bytes().to_vec(),
        }
    }

    pub(crate) fn from_bytes(bytes: &[u8], layout: PayloadLayout, device: &B::Device) -> Self {
        let PayloadLayout { is_codes, dtype, elements } = layout;
        let data = TensorData::from_bytes_vec(bytes.to_vec(), [elements], dtype);
        if is_codes {
            Self::Codes(Tensor::from_data(data, (device, dtype)))
        } else {
            Self::Values(Tensor::from_data(data, (device, dtype)))
        }
    }
}

impl<B: Backend, const D: usize> Payload<B, D> {
    /// Copies it to the host; codes as words where they are bytes, because not every backend can read back bytes. Waits for the device.
    pub fn to_data(&self) -> TensorData {
        match self {
            Self::Values(values) => values.to_data(),
            Self::Codes(codes) => codes.clone().cast(IntDType::I32).into_data(),
        }
    }

    /// Returns the values.
    ///
    /// # Panics
    /// If it contains codes; sender and receiver list the same parts.
    pub fn into_values(self) -> Tensor<B, D> {
        match self {
            Self::Values(values) => values,
            Self::Codes(_) => panic!("expected values, got codes"),
        }
    }

    /// Returns the codes.
    ///
    /// # Panics
    /// If it contains values; sender and receiver list the same parts.
    pub fn into_codes(self) -> Tensor<B, D, Int> {
        match self {
            Self::Codes(codes) => codes,
            Self::Values(_) => panic!("expected codes, got values"),
        }
    }
}

impl PayloadLayout {
    pub(crate) fn bytes(&self) -> usize {
        self.elements * self.dtype.size()
    }
}

impl<B: Backend> Loan<B> {
    /// Wraps a payload that this rank has.
    pub fn of(payload: Payload<B>, root: usize) -> Self {
        Self { root, layout: payload.layout(), own: Some(payload) }
    }
}

impl<B: Backend> Exchange<B> {
    pub(crate) fn done(payloads: Vec<Payload<B>>) -> Self {
        Self { payloads, wait: None }
    }

    /// Returns the results, in the order of the request. Operations of the same section may read them.
    pub fn finish(self) -> Vec<Payload<B>> {
        if let Some(wait) = self.wait {
            wait();
        }
        self.payloads
    }
}
