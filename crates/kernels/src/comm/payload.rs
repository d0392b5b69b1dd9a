//! Tensors as they travel between ranks, flat and in the format in which they are stored, and the exchanges of them
//! that are under way.
//!
//! An exchange is started and finished by separate calls, so that a backend with a side stream computes in between. Codes of quantized
//! weights travel as codes.
//! Trade-off: a list of tensors is one exchange, finished as a whole.

use burn_tensor::{DType, Int, IntDType, Tensor, TensorData, backend::Backend};

/// A tensor that travels as it is stored: between ranks flat, to host memory and back as rows.
#[derive(Clone, Debug)]
pub enum Payload<B: Backend, const D: usize = 1> {
    /// Values, in any float format.
    Values(Tensor<B, D>),
    /// Codes, in bytes or in words that hold several.
    Codes(Tensor<B, D, Int>),
}

/// What a rank must know of a payload to receive it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PayloadLayout {
    /// Whether it is [`Payload::Codes`].
    pub is_codes: bool,
    /// Format of its elements on the device.
    pub dtype: DType,
    /// Number of elements.
    pub elements: usize,
}

/// A payload of an exchange, with the rank that gives it to all others, or gets their sum.
#[derive(Clone, Debug)]
pub struct Loan<B: Backend> {
    /// That rank.
    pub root: usize,
    /// What it is.
    pub layout: PayloadLayout,
    /// The payload. Of one that is lent, on its root and nowhere else.
    pub own: Option<Payload<B>>,
}

/// An exchange under way.
#[must_use]
pub struct Exchange<B: Backend> {
    /// What will hold the results, in the order of the request.
    pub(crate) payloads: Vec<Payload<B>>,
    /// Has later work on the device wait for it; `None` where it is done.
    pub(crate) wait: Option<Box<dyn FnOnce() + Send>>,
}

impl<B: Backend> Payload<B> {
    /// What another rank must know to receive it.
    pub fn layout(&self) -> PayloadLayout {
        let (is_codes, dtype, elements) = match self {
            Self::Values(values) => (false, values.dtype(), values.dims()[0]),
            Self::Codes(codes) => (true, codes.dtype(), codes.dims()[0]),
        };
        PayloadLayout { is_codes, dtype, elements }
    }

    /// The bytes that travel through host memory: elements as they are stored.
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        match self {
            Self::Values(values) => values.to_data().as_bytes().to_vec(),
            // Not every backend can read bytes back, but all can read i32.
            Self::Codes(codes) if codes.dtype().size() == 1 => {
                let codes = codes.clone().cast(IntDType::I32).into_data().convert::<u8>();
                codes.into_vec().expect("codes were just converted to bytes")
            }
            Self::Codes(words) => words.to_data().as_bytes().to_vec(),
        }
    }

    /// The payload of [`Payload::to_bytes`].
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
    /// The values.
    ///
    /// # Panics
    /// If it is codes: sender and receiver list the same parts.
    pub fn into_values(self) -> Tensor<B, D> {
        match self {
            Self::Values(values) => values,
            Self::Codes(_) => panic!("expected values, got codes"),
        }
    }

    /// The codes.
    ///
    /// # Panics
    /// If it is values: sender and receiver list the same parts.
    pub fn into_codes(self) -> Tensor<B, D, Int> {
        match self {
            Self::Codes(codes) => codes,
            Self::Values(_) => panic!("expected codes, got values"),
        }
    }
}

impl PayloadLayout {
    /// Bytes of all elements.
    pub(crate) fn bytes(&self) -> usize {
        self.elements * self.dtype.size()
    }
}

impl<B: Backend> Loan<B> {
    /// Of a payload that this rank has.
    pub fn of(payload: Payload<B>, root: usize) -> Self {
        Self { root, layout: payload.layout(), own: Some(payload) }
    }
}

impl<B: Backend> Exchange<B> {
    /// An exchange that is done.
    pub(crate) fn done(payloads: Vec<Payload<B>>) -> Self {
        Self { payloads, wait: None }
    }

    /// The results, in the order in which it was started. Operations of the same section may read them.
    pub fn finish(self) -> Vec<Payload<B>> {
        if let Some(wait) = self.wait {
            wait();
        }
        self.payloads
    }
}
