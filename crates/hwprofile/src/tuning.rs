//! Programming and start settings for each kind of hardware: `get_optimal_config` and its table, `HARDWARE_CONFIGS`.
//!
//! `use_*`, `tile_size`, `precision`, `batch_size` and `enable_compression` suit the hardware in general, in any framework; the other fields describe
//! this framework. If the two differ, `notes` says why.
//! Trade-off: these are start values for a search, not its result: the plan checks memory, and `train bench` measures.

use std::fmt;
use std::sync::LazyLock;

use serde::Deserialize;

use crate::spec::HardwareKind;

/// Generation of fused attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FlashAttention {
    /// Scores are materialized.
    None,
    /// FlashAttention 1.
    V1,
    /// FlashAttention 2.
    V2,
    /// FlashAttention 3: Hopper's asynchronous copies and warp groups.
    V3,
}

impl fmt::Display for FlashAttention {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::None => "attention without fused kernels",
            Self::V1 => "FlashAttention 1",
            Self::V2 => "FlashAttention 2",
            Self::V3 => "FlashAttention 3",
        })
    }
}

/// The multiples that rows and widths are padded to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PaddingRule {
    /// Rows of a micro-batch.
    pub rows: usize,
    /// Tokens per row, and widths of matrices.
    pub width: usize,
}

/// Programming and start settings for one kind of hardware.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HardwareConfig {
    /// The kind.
    pub kind: HardwareKind,
    /// Fused attention to prefer there.
    pub use_flash_attention: FlashAttention,
    /// Whether FP8 matmuls are worth it for training there; [`HardwareKind::has_fp8`] says whether the hardware has them.
    pub use_fp8: bool,
    /// Whether FP4 matmuls are worth it (for inference).
    pub use_fp4: bool,
    /// Side of the output tile of a matmul that suits its shared memory.
    pub tile_size: usize,
    /// Preferred format, to print: `Fp8`, `Bf16`, `Fp16` or `Fp32`.
    pub precision: String,
    /// Batch size that suits it in general, for short sequences.
    pub batch_size: usize,
    /// Whether the accelerator decompresses data.
    pub enable_compression: bool,
    /// Attention that this framework runs there.
    pub attention_here: String,
    /// Attention that this framework runs there on documents of several lengths: among data center GPUs, cuDNN supports those from Hopper on.
    pub packed_attention_here: String,
    /// Compute format of this framework there, to print: `Bf16`, `Fp16` or `Fp32`.
    pub compute_here: String,
    /// Rows of 4,096 tokens to start with.
    pub micro_batch_start: usize,
    /// Padding.
    pub padding: PaddingRule,
    /// Why the settings of this framework differ from the general ones, and further remarks.
    pub notes: String,
}

/// Returns the configuration of a kind of hardware. Every kind has one; that of an NVIDIA card follows from its compute capability
/// ([`HardwareKind::of_compute_capability`]).
pub fn get_optimal_config(kind: HardwareKind) -> &'static HardwareConfig {
    // Invariant: a test finds every kind in the table.
    HARDWARE_CONFIGS.iter().find(|config| config.kind == kind).expect("every kind of hardware has a row")
}

/// One row per kind, from `tuning.json`.
pub static HARDWARE_CONFIGS: LazyLock<Vec<HardwareConfig>> = LazyLock::new(|| {
    // Invariant: the file is part of the program, and a test reads it.
    serde_json::from_str(include_str!("tuning.json")).expect("tuning.json has configurations")
});

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::{AcceleratorSpec, Engine, Feature};

    #[test]
    fn every_accelerator_and_the_cpu_have_a_row() {
        for spec in AcceleratorSpec::all() {
            assert_eq!(get_optimal_config(spec.kind).kind, spec.kind, "{}", spec.name);
        }
        for kind in [HardwareKind::Cpu, HardwareKind::OlderNvidia] {
            assert_eq!(get_optimal_config(kind).kind, kind);
        }
        let mut kinds: Vec<_> = HARDWARE_CONFIGS.iter().map(|config| config.kind).collect();
        kinds.dedup();
        assert_eq!(kinds.len(), HARDWARE_CONFIGS.len());
    }

    #[test]
    fn cudnn_packs_on_data_center_gpus_since_hopper_alone() {
        for config in HARDWARE_CONFIGS.iter() {
            let takes = matches!(config.kind, HardwareKind::Hopper | HardwareKind::Blackwell);
            assert_eq!(config.packed_attention_here.contains("cuDNN"), takes, "{:?}", config.kind);
            // cuDNN's fused attention begins with compute capability 8.0.
            let has_it = config.kind.engine() == Engine::Cuda && config.kind != HardwareKind::Turing;
            assert_eq!(config.attention_here.contains("cuDNN"), has_it, "{:?}", config.kind);
        }
    }

    #[test]
    fn formats_are_used_where_the_hardware_has_them() {
        for spec in AcceleratorSpec::all() {
            let config = get_optimal_config(spec.kind);
            assert!(!config.use_fp8 || spec.has(Feature::Fp8), "{}", spec.name);
            // Among Google's, only the v5p has a documented rate, and nothing runs there.
            let is_tpu = spec.kind == HardwareKind::Tpu;
            assert!(is_tpu || spec.kind.has_fp8() == spec.has(Feature::Fp8), "{}", spec.name);
            assert!(!config.enable_compression || spec.has(Feature::DecompressionEngine), "{}", spec.name);
            assert!(!config.use_fp4 || spec.has(Feature::Fp4), "{}", spec.name);
        }
        assert!(get_optimal_config(HardwareKind::Blackwell).enable_compression);
    }
}
