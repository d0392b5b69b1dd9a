//! Tensors as they travel between ranks: flat, in the format in which they are stored, and the exchanges of them that are under way.
//!
//! An exchange is started and finished by separate calls, so that a backend with a side stream computes in between. Codes of quantized
//! weights travel as codes.
//! Trade-off: a list of tensors is one exchange, finished as a whole.

use burn_tensor::{DType, Int, IntDType, Tensor, TensorData, backend::Backend};

/// A flat tensor that is exchanged as it is stored.
#[derive(Clone, Debug)]
pub enum Payload<B: Backend> {
    /// Values, in any float format.
    Values(Tensor<B, 1>),
    /// Codes, in bytes or in words that hold several.
    Codes(Tensor<B, 1, Int>),
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

/// A payload that one rank gives to all others.
#[derive(Clone, Debug)]
pub struct Loan<B: Backend> {
    /// The rank that has it.
    pub root: usize,
    /// What it is.
    pub layout: PayloadLayout,
    /// The payload: on its root, and nowhere else.
    pub own: Option<Payload<B>>,
}

/// An exchange under way; [`CommOps::finish`](crate::CommOps::finish) waits for it.
#[must_use]
#[derive(Debug)]
pub struct Exchange<B: Backend> {
    /// What will hold the results, in the order of the request.
    pub(crate) payloads: Vec<Payload<B>>,
    /// Number of the operation on the backend's side stream; `None` where it is done.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "only CUDA exchanges while it computes"))]
    pub(crate) ticket: Option<u64>,
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

    /// The values.
    ///
    /// # Panics
    /// If it is codes: sender and receiver list the same parts.
    pub fn into_values(self) -> Tensor<B, 1> {
        match self {
            Self::Values(values) => values,
            Self::Codes(_) => panic!("expected values, got codes"),
        }
    }

    /// The codes.
    ///
    /// # Panics
    /// If it is values: sender and receiver list the same parts.
    pub fn into_codes(self) -> Tensor<B, 1, Int> {
        match self {
            Self::Codes(codes) => codes,
            Self::Values(_) => panic!("expected codes, got values"),
        }
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

impl PayloadLayout {
    /// Bytes of all elements.
    pub(crate) fn bytes(&self) -> usize {
        self.elements * self.dtype.size()
    }
}

impl<B: Backend> Exchange<B> {
    /// An exchange that is done.
    pub(crate) fn done(payloads: Vec<Payload<B>>) -> Self {
        Self { payloads, ticket: None }
    }
}
