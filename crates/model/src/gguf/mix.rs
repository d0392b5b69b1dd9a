//! The types of files, and the type that each of a file's tensors is stored in.
//!
//! Norms and biases stay in f32. Trade-off: the types are chosen from names and shapes, not from values.

use std::fmt;
use std::str::FromStr;

use firebrick_arch::{EMBEDDING, HEAD, TensorSpec};

use super::blocks::{BLOCK, GgmlType};

/// The type of a file: that of most of its matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GgufType {
    /// float32.
    F32,
    /// float16.
    F16,
    /// bfloat16.
    Bf16,
    /// 8 bits and a scale per 32 values.
    Q8_0,
    /// 4 bits and a scale per 32 values; embedding and head are `q8_0`.
    Q4_0,
}

impl GgufType {
    /// The types that are offered.
    pub const OFFERED: [Self; 4] = [Self::F16, Self::Bf16, Self::Q8_0, Self::Q4_0];

    /// Returns llama.cpp's name and number of the type.
    const fn known_as(self) -> (&'static str, u32) {
        match self {
            Self::F32 => ("f32", 0),
            Self::F16 => ("f16", 1),
            Self::Q4_0 => ("q4_0", 2),
            Self::Q8_0 => ("q8_0", 7),
            Self::Bf16 => ("bf16", 32),
        }
    }

    /// Returns llama.cpp's name of the type.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.known_as().0
    }

    /// Returns llama.cpp's number of the type.
    pub(super) fn number(self) -> u32 {
        self.known_as().1
    }

    /// Returns the storage type of a tensor in a file of this type.
    pub(super) fn type_of(self, tensor: &TensorSpec) -> GgmlType {
        let [_, columns] = tensor.shape[..] else { return GgmlType::F32 };
        let is_table = tensor.name == EMBEDDING || tensor.name == HEAD;
        match self {
            Self::F32 => GgmlType::F32,
            Self::F16 => GgmlType::F16,
            Self::Bf16 => GgmlType::Bf16,
            _ if !columns.is_multiple_of(BLOCK) => GgmlType::F16,
            Self::Q4_0 if !is_table => GgmlType::Q4_0,
            Self::Q8_0 | Self::Q4_0 => GgmlType::Q8_0,
        }
    }
}

impl fmt::Display for GgufType {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

impl FromStr for GgufType {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let found = Self::OFFERED.into_iter().find(|kind| kind.name() == name.to_lowercase());
        found.ok_or_else(|| format!("'{name}' is not one of {}", Self::OFFERED.map(Self::name).join(", ")))
    }
}
