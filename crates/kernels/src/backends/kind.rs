//! [`BackendKind`] names the backends in recipes, plans and messages, where no tensor is involved.

use std::fmt;
use std::str::FromStr;

use burn_tensor::DType;
use serde::{Deserialize, Serialize};

use crate::linear::GemmFormat;

/// A backend, by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum BackendKind {
    /// CPU, burn-flex.
    Flex,
    /// CPU, burn-candle.
    Candle,
    /// Vulkan, Metal, DirectX, WebGPU.
    Wgpu,
    /// NVIDIA.
    Cuda,
}

/// Error for a word that names no backend.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown backend `{got}`, expected one of: flex, candle, wgpu, cuda")]
pub struct UnknownBackend {
    /// The word.
    pub got: String,
}

impl BackendKind {
    /// All backends.
    pub const ALL: [Self; 4] = [Self::Flex, Self::Candle, Self::Wgpu, Self::Cuda];

    /// Returns the name, as recipes and messages write it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Flex => "flex",
            Self::Candle => "candle",
            Self::Wgpu => "wgpu",
            Self::Cuda => "cuda",
        }
    }

    /// Returns whether this build includes the backend, by the cargo feature of the same name.
    pub fn is_compiled(self) -> bool {
        match self {
            Self::Flex => cfg!(feature = "flex"),
            Self::Candle => cfg!(feature = "candle"),
            Self::Wgpu => cfg!(feature = "wgpu"),
            Self::Cuda => cfg!(feature = "cuda"),
        }
    }

    /// Returns whether it runs on the CPU, with its tensors in host memory.
    pub fn is_cpu(self) -> bool {
        matches!(self, Self::Flex | Self::Candle)
    }
}

impl fmt::Display for BackendKind {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.name())
    }
}

impl FromStr for BackendKind {
    type Err = UnknownBackend;

    fn from_str(text: &str) -> Result<Self, UnknownBackend> {
        let unknown = || UnknownBackend { got: text.to_owned() };
        Self::ALL.into_iter().find(|kind| kind.name() == text).ok_or_else(unknown)
    }
}

/// What a [self-test](BackendKind::self_test) runs: operations in these formats that a model of this kind needs.
#[derive(Clone, Copy, Debug)]
pub struct SelfTest {
    /// Format of activations.
    pub dtype: DType,
    /// Format of GEMMs.
    pub gemms: GemmFormat,
    /// Width of an attention head.
    pub head_dim: usize,
    /// Whether the model has experts, whose kernels take the longest to compile.
    pub has_experts: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_backend_is_written_and_read_under_one_name() {
        for kind in BackendKind::ALL {
            assert_eq!(kind.to_string().parse(), Ok(kind));
            assert_eq!(serde_json::to_value(kind).unwrap(), kind.name());
        }
        let error = "metal".parse::<BackendKind>().unwrap_err().to_string();
        assert_eq!(error, "unknown backend `metal`, expected one of: flex, candle, wgpu, cuda");
    }
}
