#![doc = include_str!("../README.md")]

pub mod attention;
pub mod backends;
pub mod comm;
#[cfg(feature = "flex")]
pub mod conformance;
pub mod conv;
pub mod delta;
mod dtype;
pub mod embedding;
mod gemm_format;
mod gradient;
pub mod linear;
pub mod loss;
pub mod memory;
pub mod moe;
pub mod norm;
pub mod optimizer;
pub mod payload;
pub mod session;
#[cfg(all(test, feature = "flex"))]
mod testing;
pub mod weights;

pub use attention::{
    AttentionOps, AttentionOutput, CachedTokens, Documents, KvCache, NewTokens, PAGE_ROWS, Qkv, Sinks,
    SoftmaxStatistics, StatisticsLayout,
};
pub use backends::{BackendKind, PLANNED_SHARED_BYTES, SelfTest, converted_weights_bytes, estimate, fp8_refusal};
pub use comm::{COLLECTIVE, CommError, Communicator};
pub use conv::{ConvInputs, ConvOps, ConvState};
pub use delta::{DeltaGradients, DeltaInputs, DeltaOps, DeltaOutput, DeltaParameters, DeltaState};
pub use embedding::EmbeddingOps;
pub use gradient::{Contributions, GradientMap, GradientSink, Parameter};
pub use linear::{
    Adapter, Bias, Dropout, Epilogue, ExpertRows, GemmFormat, Group, HeadPart, HeadRole, HeadsEpilogue, InputGradient,
    Keep, LinearOps, Magnitude, Mask, Module, ModuleGradients, ProjectGradients, ProjectSaved, Prologue, RotaryTables,
    RowChoices, WeightGradient,
};
pub use loss::draw::{Draw, Drawn, row_token};
pub use loss::pairs::{PAIR_NUMBERS, PairLogProbs, PairLoss, PairLossKind, PairResult, PairTargets, PairWeights};
pub use loss::{CrossEntropy, CrossEntropyOptions, LossOps, LossTargets};
pub use memory::evaluation::{Answers, EvaluatedRows, EvaluationShape};
pub use memory::training_shape::{
    DividedBytes, PairPasses, Recompute, TILE_TOKENS, TRAINED_BYTES, TrainingShape, tile_rows,
};
pub use memory::work::{answering_launches, answering_work, cuda_launches, step_work};
pub use memory::{HostBuffer, MemoryOps, Offloaded, Readback};
pub use moe::{Combined, MoeOps, Routing};
pub use norm::{NormOps, NormWeight};
pub use optimizer::rounding::{Rounding, rounding_key};
pub use optimizer::{AdamW, AdamWState, EightBitMoments, Moments, OptimizerOps, RangeGradient};
pub use payload::{Exchange, Loan, Payload, PayloadLayout};
pub use session::{DeviceTime, GemmAlgorithms, Hint, RunShape, Session};
pub use weights::{
    BaseStorage, BlockScales, MatrixScales, QuantizedWeight, Storage, Weight, WeightOps, evenly, matrix_scales,
    padded_codes,
};

/// Device time of one launch, with its unavoidable work: FLOPs and bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TracedOperation {
    /// Name of the launched operation.
    pub name: &'static str,
    /// Milliseconds from the start of the trace until the device started the operation.
    pub start_ms: f64,
    /// Device time in milliseconds.
    pub milliseconds: f64,
    /// FLOPs of the matrix units; 0 for an operation that only moves memory.
    pub flops: f64,
    /// Bytes read and written, each counted once.
    pub bytes: f64,
    /// `m`, `n` and `k` of a GEMM.
    pub gemm: Option<[usize; 3]>,
}

/// All operations of a training step, by subject.
///
/// Inputs may be f32 or a half format; reductions, norms and exponentials are computed in f32, and results come back in the dtype of
/// the first input unless an operation states otherwise. CubeCL does not check dtypes, so operations cast mixed operands themselves.
pub trait Kernels:
    Session
    + MemoryOps
    + WeightOps
    + NormOps
    + LinearOps
    + MoeOps
    + AttentionOps
    + ConvOps
    + DeltaOps
    + EmbeddingOps
    + LossOps
    + OptimizerOps
{
    /// Runs `work` and records when and for how long the device runs each of its operations; the list is empty where
    /// the backend cannot trace. Waits for the device before and after `work`, not in between.
    fn trace<R>(device: &Self::Device, work: impl FnOnce() -> R) -> (R, Vec<TracedOperation>) {
        let _ = device;
        (work(), Vec::new())
    }
}
