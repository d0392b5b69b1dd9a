//! Optimizer state on the host, by name: what a checkpoint stores and a resumed run reads back, bit for bit.

use std::collections::BTreeMap;

/// The values of one stored tensor.
#[derive(Clone, Debug, PartialEq)]
pub enum StateData {
    /// f32 moments and scales.
    F32(Vec<f32>),
    /// Codes of 8-bit moments.
    U8(Vec<u8>),
}

impl StateData {
    /// Format and number of elements, for messages.
    pub fn describe(&self) -> String {
        match self {
            Self::F32(values) => format!("{} f32 values", values.len()),
            Self::U8(values) => format!("{} bytes", values.len()),
        }
    }
}

/// Tensors by name: `<parameter name>.<part>`.
pub type HostTensor = BTreeMap<String, StateData>;
