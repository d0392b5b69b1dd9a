//! How each kind of hardware is programmed and started: `get_optimal_config` and its table, `HARDWARE_CONFIGS`.
//!
//! `use_*`, `tile_size`, `precision`, `batch_size` and `enable_compression` are what suits the hardware in general, whatever framework runs
//! there; the other fields say what this framework does there. Where the two differ, `notes` says why.
//! Trade-off: a start is where a search begins, not its result: the plan checks memory, and `train bench` measures.

use serde::Serialize;

use crate::spec::HardwareKind;

/// Generation of fused attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
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

/// Format that a kind of hardware trains in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum TrainingPrecision {
    /// 8-bit float products, bf16 between them.
    Fp8,
    /// bfloat16.
    Bf16,
    /// binary16.
    Fp16,
    /// binary32.
    Fp32,
}

/// What runs there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Engine {
    /// Backend `cuda`.
    Cuda,
    /// Backend `wgpu`.
    Wgpu,
    /// Backend `flex`.
    Cpu,
    /// Burn has no backend for it: a plan answers, a run cannot.
    NoBackend,
}

/// The multiples that rows and widths are padded to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct PaddingRule {
    /// Rows of a micro-batch.
    pub rows: usize,
    /// Tokens per row, and widths of matrices.
    pub width: usize,
}

/// How one kind of hardware is programmed and started.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct HardwareConfig {
    /// The kind.
    pub kind: HardwareKind,
    /// Fused attention to prefer there.
    pub use_flash_attention: FlashAttention,
    /// Whether FP8 products are worth it for training there; [`HardwareKind::has_fp8`] says whether there are any.
    pub use_fp8: bool,
    /// Whether FP4 products are worth it (for inference).
    pub use_fp4: bool,
    /// Side of the output tile of a matrix product that suits its shared memory.
    pub tile_size: usize,
    /// Format to prefer there.
    pub precision: TrainingPrecision,
    /// Batch that suits it in general, in short rows.
    pub batch_size: usize,
    /// Whether data are decompressed by the accelerator.
    pub enable_compression: bool,
    /// What runs there.
    pub engine: Engine,
    /// Attention that this framework runs there.
    pub attention_here: &'static str,
    /// Format that this framework computes in there.
    pub compute_here: TrainingPrecision,
    /// Rows of 4,096 tokens to start with.
    pub micro_batch_start: usize,
    /// Padding.
    pub padding: PaddingRule,
    /// Why what runs here differs from what suits the hardware, and what else to know.
    pub notes: &'static str,
}

impl HardwareConfig {
    /// Attention that this framework runs there on documents of several lengths: cuDNN takes those on data center GPUs since Hopper alone.
    pub fn packed_attention_here(&self) -> &'static str {
        match self.kind {
            HardwareKind::Blackwell | HardwareKind::Hopper => PACKED_CUDA,
            HardwareKind::BlackwellRtx | HardwareKind::Ada | HardwareKind::Ampere => OWN_CUDA,
            _ => self.attention_here,
        }
    }
}

/// The configuration of a kind of hardware. Every kind has one; that of an NVIDIA card follows from its compute capability
/// ([`HardwareKind::of_compute_capability`]).
pub fn get_optimal_config(kind: HardwareKind) -> &'static HardwareConfig {
    // Invariant: a test finds every kind in the table.
    HARDWARE_CONFIGS.iter().find(|config| config.kind == kind).expect("every kind of hardware has a row")
}

const TENSOR_CORES: PaddingRule = PaddingRule { rows: 1, width: 16 };
const NO_PADDING: PaddingRule = PaddingRule { rows: 1, width: 1 };
const FUSED_CUDA: &str = "cuDNN's fused attention, or this framework's own where cuDNN is missing";
const FUSED_CUDA_ONE_LENGTH: &str =
    "cuDNN's fused attention for documents of one length, this framework's own for others and where cuDNN is missing";
const PACKED_CUDA: &str =
    "cuDNN's fused attention for long packed documents, this framework's own for short ones and where cuDNN is missing";
const OWN_CUDA: &str = "this framework's own fused attention";
const REFERENCE: &str = "reference bodies: scores are materialized per document";

/// One row per kind.
pub static HARDWARE_CONFIGS: [HardwareConfig; 13] = [
    HardwareConfig {
        kind: HardwareKind::Blackwell,
        use_flash_attention: FlashAttention::V3,
        use_fp8: true,
        use_fp4: true,
        tile_size: 512,
        precision: TrainingPrecision::Fp8,
        batch_size: 64,
        enable_compression: true,
        engine: Engine::Cuda,
        attention_here: FUSED_CUDA,
        compute_here: TrainingPrecision::Bf16,
        micro_batch_start: 16,
        padding: TENSOR_CORES,
        notes: "FlashAttention 3 itself runs on Hopper alone; compute = \"fp8\" multiplies in MXFP8, untried on a card; bf16 is the default",
    },
    HardwareConfig {
        kind: HardwareKind::BlackwellRtx,
        use_flash_attention: FlashAttention::V2,
        use_fp8: true,
        use_fp4: true,
        tile_size: 128,
        precision: TrainingPrecision::Bf16,
        batch_size: 32,
        enable_compression: false,
        engine: Engine::Cuda,
        attention_here: FUSED_CUDA_ONE_LENGTH,
        compute_here: TrainingPrecision::Bf16,
        micro_batch_start: 2,
        padding: TENSOR_CORES,
        notes: "unlike a B200 it has an RTX 40's shared memory and no tensor memory, so an RTX 40's tiles; compute = \"fp8\" as on a B200",
    },
    HardwareConfig {
        kind: HardwareKind::Hopper,
        use_flash_attention: FlashAttention::V3,
        use_fp8: true,
        use_fp4: false,
        tile_size: 256,
        precision: TrainingPrecision::Fp8,
        batch_size: 64,
        enable_compression: false,
        engine: Engine::Cuda,
        attention_here: FUSED_CUDA,
        compute_here: TrainingPrecision::Bf16,
        micro_batch_start: 8,
        padding: TENSOR_CORES,
        notes: "8 rows are those of configs/h100.toml; compute = \"fp8\" multiplies in 8 bits, bf16 is the default",
    },
    HardwareConfig {
        kind: HardwareKind::Ada,
        use_flash_attention: FlashAttention::V2,
        use_fp8: true,
        use_fp4: false,
        tile_size: 128,
        precision: TrainingPrecision::Bf16,
        batch_size: 32,
        enable_compression: false,
        engine: Engine::Cuda,
        attention_here: FUSED_CUDA_ONE_LENGTH,
        compute_here: TrainingPrecision::Bf16,
        micro_batch_start: 2,
        padding: TENSOR_CORES,
        notes: "unlike an A100 it has FP8 units; 24 or 48 GB leave room for fewer rows; compute = \"fp8\" is untried on a card",
    },
    HardwareConfig {
        kind: HardwareKind::Ampere,
        use_flash_attention: FlashAttention::V2,
        use_fp8: false,
        use_fp4: false,
        tile_size: 128,
        precision: TrainingPrecision::Bf16,
        batch_size: 32,
        enable_compression: false,
        engine: Engine::Cuda,
        attention_here: FUSED_CUDA_ONE_LENGTH,
        compute_here: TrainingPrecision::Bf16,
        micro_batch_start: 4,
        padding: TENSOR_CORES,
        notes: "4 rows are those of configs/a100.toml",
    },
    HardwareConfig {
        kind: HardwareKind::OlderNvidia,
        use_flash_attention: FlashAttention::V1,
        use_fp8: false,
        use_fp4: false,
        tile_size: 64,
        precision: TrainingPrecision::Fp16,
        batch_size: 16,
        enable_compression: false,
        engine: Engine::Wgpu,
        attention_here: REFERENCE,
        compute_here: TrainingPrecision::Fp32,
        micro_batch_start: 1,
        padding: PaddingRule { rows: 1, width: 8 },
        notes: "no bf16 units, which backend cuda needs",
    },
    HardwareConfig {
        kind: HardwareKind::Cdna3,
        use_flash_attention: FlashAttention::V2,
        use_fp8: false,
        use_fp4: false,
        tile_size: 256,
        precision: TrainingPrecision::Bf16,
        batch_size: 48,
        enable_compression: false,
        engine: Engine::Wgpu,
        attention_here: REFERENCE,
        compute_here: TrainingPrecision::Fp32,
        micro_batch_start: 12,
        padding: TENSOR_CORES,
        notes: "192 GB and more leave room for larger batches; through Vulkan there is no bf16 and no matrix core",
    },
    HardwareConfig {
        kind: HardwareKind::Cdna4,
        use_flash_attention: FlashAttention::V2,
        use_fp8: false,
        use_fp4: false,
        tile_size: 256,
        precision: TrainingPrecision::Bf16,
        batch_size: 48,
        enable_compression: false,
        engine: Engine::Wgpu,
        attention_here: REFERENCE,
        compute_here: TrainingPrecision::Fp32,
        micro_batch_start: 16,
        padding: TENSOR_CORES,
        notes: "288 GB leave room for larger batches; through Vulkan there is no bf16 and no matrix core",
    },
    HardwareConfig {
        kind: HardwareKind::Gaudi,
        use_flash_attention: FlashAttention::V2,
        use_fp8: true,
        use_fp4: false,
        tile_size: 256,
        precision: TrainingPrecision::Bf16,
        batch_size: 32,
        enable_compression: false,
        engine: Engine::NoBackend,
        attention_here: "none: Burn has no backend for it",
        compute_here: TrainingPrecision::Bf16,
        micro_batch_start: 8,
        padding: PaddingRule { rows: 1, width: 128 },
        notes: "its matrix engines are 256 x 256 arrays; sizes stay fixed, because each new shape is compiled again",
    },
    HardwareConfig {
        kind: HardwareKind::PonteVecchio,
        use_flash_attention: FlashAttention::V2,
        use_fp8: false,
        use_fp4: false,
        tile_size: 128,
        precision: TrainingPrecision::Bf16,
        batch_size: 32,
        enable_compression: false,
        engine: Engine::Wgpu,
        attention_here: REFERENCE,
        compute_here: TrainingPrecision::Fp32,
        micro_batch_start: 8,
        padding: TENSOR_CORES,
        notes: "two stacks, which a driver may show as two devices; through Vulkan there is no matrix engine",
    },
    HardwareConfig {
        kind: HardwareKind::AppleSilicon,
        use_flash_attention: FlashAttention::None,
        use_fp8: false,
        use_fp4: false,
        tile_size: 32,
        precision: TrainingPrecision::Fp16,
        batch_size: 16,
        enable_compression: false,
        engine: Engine::Wgpu,
        attention_here: REFERENCE,
        compute_here: TrainingPrecision::Fp32,
        micro_batch_start: 1,
        padding: NO_PADDING,
        notes: "little bandwidth makes small batches right; compute = \"float16\" runs through Metal, f32 is the default",
    },
    HardwareConfig {
        kind: HardwareKind::Tpu,
        use_flash_attention: FlashAttention::V2,
        use_fp8: false,
        use_fp4: false,
        tile_size: 128,
        precision: TrainingPrecision::Bf16,
        batch_size: 128,
        enable_compression: false,
        engine: Engine::NoBackend,
        attention_here: "none: programs are compiled by XLA, and Burn has no backend for it",
        compute_here: TrainingPrecision::Bf16,
        micro_batch_start: 8,
        padding: PaddingRule { rows: 8, width: 128 },
        notes: "rows in multiples of 8 and widths in multiples of 128 fill its vector lanes and systolic arrays",
    },
    HardwareConfig {
        kind: HardwareKind::Cpu,
        use_flash_attention: FlashAttention::V2,
        use_fp8: false,
        use_fp4: false,
        tile_size: 32,
        precision: TrainingPrecision::Fp32,
        batch_size: 8,
        enable_compression: false,
        engine: Engine::Cpu,
        attention_here: "fused in blocks over keys (flex)",
        compute_here: TrainingPrecision::Fp32,
        micro_batch_start: 1,
        padding: NO_PADDING,
        notes: "training takes every core, so one thread loads",
    },
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::{AcceleratorSpec, Feature};

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
    fn compute_capability_and_kind_find_their_values() {
        let of = |major, minor| get_optimal_config(HardwareKind::of_compute_capability((major, minor)));
        let config = |c: &HardwareConfig| (c.use_fp8, c.tile_size, c.use_flash_attention);
        assert_eq!(config(of(10, 0)), (true, 512, FlashAttention::V3));
        assert!(of(10, 0).use_fp4 && of(10, 0).enable_compression);
        assert_eq!(config(of(9, 0)), (true, 256, FlashAttention::V3));
        assert_eq!(config(of(8, 0)), (false, 128, FlashAttention::V2));
        assert_eq!(config(of(7, 5)), (false, 64, FlashAttention::V1));
        let named = |kind| {
            let row = get_optimal_config(kind);
            (row.precision, row.batch_size, row.use_flash_attention)
        };
        assert_eq!(named(HardwareKind::Hopper), (TrainingPrecision::Fp8, 64, FlashAttention::V3));
        assert_eq!(named(HardwareKind::Ampere), (TrainingPrecision::Bf16, 32, FlashAttention::V2));
        assert_eq!(named(HardwareKind::Cdna3), (TrainingPrecision::Bf16, 48, FlashAttention::V2));
        assert_eq!(named(HardwareKind::AppleSilicon), (TrainingPrecision::Fp16, 16, FlashAttention::None));
        assert_eq!(get_optimal_config(HardwareKind::Tpu).padding, PaddingRule { rows: 8, width: 128 });
    }

    #[test]
    fn cudnn_takes_packed_documents_on_data_center_gpus_since_hopper_alone() {
        for config in &HARDWARE_CONFIGS {
            let takes = matches!(config.kind, HardwareKind::Hopper | HardwareKind::Blackwell);
            assert_eq!(config.packed_attention_here().contains("cuDNN"), takes, "{:?}", config.kind);
            assert_eq!(config.attention_here.contains("cuDNN"), config.engine == Engine::Cuda, "{:?}", config.kind);
        }
    }

    #[test]
    fn formats_are_used_where_the_hardware_has_them() {
        for spec in AcceleratorSpec::all() {
            let config = get_optimal_config(spec.kind);
            assert!(!config.use_fp8 || spec.has(Feature::Fp8), "{}", spec.name);
            // Of Google's the v5p alone states such a rate, and nothing runs there.
            let is_tpu = spec.kind == HardwareKind::Tpu;
            assert!(is_tpu || spec.kind.has_fp8() == spec.has(Feature::Fp8), "{}", spec.name);
            assert!(!config.enable_compression || spec.has(Feature::DecompressionEngine), "{}", spec.name);
            assert!(!config.use_fp4 || spec.has(Feature::Fp4), "{}", spec.name);
            assert_eq!(
                config.engine == Engine::NoBackend,
                matches!(spec.kind, HardwareKind::Tpu | HardwareKind::Gaudi)
            );
        }
    }
}
