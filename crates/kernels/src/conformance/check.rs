//! Shared parts of all subjects' checks: input sizes, random values on both devices, and the comparison of two results.
//!
//! Trade-off: values are uniform and of order one, so overflow and cancellation of large values are not tested.

use std::ops::Range;

use burn_flex::Flex;
use burn_tensor::{DType, Int, IntDType, Tensor, TensorData};
use firebrick_arch::AttentionSpec;
use firebrick_precision::difference::relative_difference;

use crate::GemmFormat;
use crate::Kernels;
use crate::attention::Documents;

/// Sizes of the input, all at least 1; `heads` is a multiple of `kv_heads`, and `head_dim` is even.
#[derive(Clone, Debug, PartialEq)]
pub struct Case {
    /// Format of activations.
    pub dtype: DType,
    /// Format of GEMMs.
    pub gemms: GemmFormat,
    /// Lengths of the documents of one packed sequence.
    pub documents: Vec<usize>,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Number of keys that a query attends to; `None`: all earlier ones.
    pub window: Option<usize>,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// Rows of embedding and head.
    pub vocab_size: usize,
    /// Rank of the adapters.
    pub rank: usize,
    /// Whether experts are among the operations.
    pub has_experts: bool,
}

impl Case {
    /// Returns a small case that runs every kernel of a run with this format and head width.
    pub fn small(dtype: DType, head_dim: usize) -> Self {
        Self {
            dtype,
            gemms: GemmFormat::Compute,
            documents: vec![23, 1, 40],
            heads: 4,
            kv_heads: 2,
            head_dim,
            window: None,
            hidden_size: 256,
            intermediate_size: 192,
            vocab_size: 320,
            rank: 8,
            has_experts: true,
        }
    }

    pub(crate) fn tokens(&self) -> usize {
        self.documents.iter().sum()
    }

    pub(crate) fn attention(&self) -> AttentionSpec {
        AttentionSpec { window: self.window, ..AttentionSpec::new(self.heads, self.kv_heads, self.head_dim) }
    }
}

/// Error of an operation relative to its reference.
#[derive(Clone, Debug, PartialEq)]
pub struct Finding {
    /// The operation, and the compared part of its result.
    pub what: String,
    /// `‖got − expected‖ / ‖expected‖`; infinite where a value is not finite.
    pub relative_error: f64,
}

/// Returns the largest relative error that rounding explains, by format. In f32 it allows for TF32, in which Burn's own
/// GEMMs on CUDA compute; the reference attention uses them for head widths without a kernel.
pub fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => 1e-2,
        DType::F16 => 2e-3,
        _ => 1e-3,
    }
}

/// A tensor on the device under test, and the same values on the CPU in f32.
pub(crate) type Pair<B, const D: usize> = (Tensor<B, D>, Tensor<Flex, D>);

/// Number of variants of each operation that run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// All of them.
    All,
    /// The first of each list, the most likely in a training run: fast enough before a run starts.
    First,
}

pub(crate) struct Check<'a, B: Kernels> {
    pub(crate) case: &'a Case,
    pub(crate) device: &'a B::Device,
    pub(crate) cpu: <Flex as burn_tensor::backend::BackendTypes>::Device,
    extent: Extent,
    random: u64,
    pub(super) findings: Vec<Finding>,
}

impl<'a, B: Kernels> Check<'a, B> {
    pub(super) fn new(case: &'a Case, device: &'a B::Device, extent: Extent) -> Self {
        Self { case, device, cpu: Default::default(), extent, random: 7, findings: Vec::new() }
    }

    /// Returns the variants to run, from a list that starts with the most usual one.
    pub(crate) fn variants<T>(&self, all: impl IntoIterator<Item = T>) -> Vec<T> {
        let count = if self.extent == Extent::All { usize::MAX } else { 1 };
        all.into_iter().take(count).collect()
    }

    /// Returns a uniform value in -1..1 (a multiplicative congruential generator, sufficient for varied input).
    fn uniform(&mut self) -> f32 {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.random >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    fn values(&mut self, count: usize, scale: f32) -> Vec<f32> {
        (0..count).map(|_| self.uniform() * scale).collect()
    }

    /// Returns the formats of sums: a backend that stores codes in words has no bf16.
    pub(crate) fn sums(&self) -> Vec<DType> {
        let has_bf16 = B::CODE_DTYPE == IntDType::U8;
        [DType::F32].into_iter().chain(has_bf16.then_some(DType::BF16)).collect()
    }

    /// Returns random values in the format under test.
    pub(crate) fn random<const D: usize>(&mut self, shape: [usize; D], scale: f32) -> Pair<B, D> {
        self.random_in(self.case.dtype, shape, scale)
    }

    /// Returns random f32 values: the dtype of norm weights, adapters, gradients and moments.
    pub(crate) fn random_f32<const D: usize>(&mut self, shape: [usize; D], scale: f32) -> Pair<B, D> {
        self.random_in(DType::F32, shape, scale)
    }

    /// Returns random f32 values in a range. They are generated on the host, since device operations would be compiled for this alone.
    pub(crate) fn random_within<const D: usize>(&mut self, shape: [usize; D], range: Range<f32>) -> Pair<B, D> {
        let half = (range.end - range.start) / 2.0;
        let values = self.values(shape.iter().product(), half).into_iter().map(|value| range.start + half + value);
        self.on_both(DType::F32, shape, values.collect())
    }

    pub(crate) fn random_in<const D: usize>(&mut self, dtype: DType, shape: [usize; D], scale: f32) -> Pair<B, D> {
        let values = self.values(shape.iter().product(), scale);
        self.on_both(dtype, shape, values)
    }

    /// Returns these values in a format on the device, and as it rounds them on the CPU.
    pub(crate) fn on_both<const D: usize>(&self, dtype: DType, shape: [usize; D], values: Vec<f32>) -> Pair<B, D> {
        let data = TensorData::new(values, shape).convert_dtype(dtype);
        let on_cpu = Tensor::from_data(data.clone().convert_dtype(DType::F32), (&self.cpu, DType::F32));
        (Tensor::from_data(data, (self.device, dtype)), on_cpu)
    }

    pub(crate) fn ints(&self, values: &[i32]) -> (Tensor<B, 1, Int>, Tensor<Flex, 1, Int>) {
        (Tensor::from_ints(values, self.device), Tensor::from_ints(values, &self.cpu))
    }

    pub(crate) fn documents(&self) -> (Documents<B>, Documents<Flex>) {
        let mut boundaries = vec![0];
        boundaries.extend(self.case.documents.iter().scan(0, |end, &length| {
            *end += length as u32;
            Some(*end)
        }));
        (Documents::new(&boundaries, self.device), Documents::new(&boundaries, &self.cpu))
    }

    /// Records `‖got − expected‖ / ‖expected‖`. Inputs are of order one, so expected values with a root mean square below 1e-3 are residues of
    /// cancellation (the attention gradients of a document of one token are exactly zero): then the difference is divided by 1e-3.
    pub(crate) fn compare<const D: usize>(&mut self, what: &str, got: Tensor<B, D>, expected: Tensor<Flex, D>) {
        let smallest = 1e-3 * (expected.shape().num_elements() as f64).sqrt();
        self.compare_from(what, got, expected, smallest);
    }

    /// Compares sums with their terms, which are rounded and may cancel: the difference is divided by the norm of the terms where that is larger.
    pub(crate) fn compare_sums_of<const D: usize, const E: usize>(
        &mut self,
        what: &str,
        got: Tensor<B, D>,
        expected: Tensor<Flex, D>,
        terms: Tensor<Flex, E>,
    ) {
        let of_terms = f64::from(terms.square().sum().sqrt().into_scalar());
        let smallest = 1e-3 * (expected.shape().num_elements() as f64).sqrt();
        self.compare_from(what, got, expected, of_terms.max(smallest));
    }

    /// Records the error, with `smallest` in place of smaller norms of what is expected.
    fn compare_from<const D: usize>(
        &mut self,
        what: &str,
        got: Tensor<B, D>,
        expected: Tensor<Flex, D>,
        smallest: f64,
    ) {
        let same_shape = got.dims() == expected.dims();
        if same_shape && got.shape().num_elements() == 0 {
            // CubeCL on CUDA cannot read a tensor without elements.
            return self.same(what, true);
        }
        let host = |data: TensorData| data.convert_dtype(DType::F32).to_vec::<f32>().expect("just converted to f32");
        let (got, expected) = (host(got.into_data()), host(expected.into_data()));
        let relative_error = if same_shape { relative_difference(&got, &expected, smallest) } else { f64::INFINITY };
        self.findings.push(Finding { what: what.to_owned(), relative_error });
    }

    /// Compares sums of rounded values, in which large ones cancel, within three times the usual tolerance.
    pub(crate) fn compare_sums<const D: usize>(&mut self, what: &str, got: Tensor<B, D>, expected: Tensor<Flex, D>) {
        self.compare(what, got, expected);
        self.findings.last_mut().expect("it was just compared").relative_error /= 3.0;
    }

    /// Compares results that are both there or both missing.
    pub(crate) fn compare_optional<const D: usize>(
        &mut self,
        what: &str,
        got: Option<Tensor<B, D>>,
        expected: Option<Tensor<Flex, D>>,
    ) {
        self.same(what, got.is_some() == expected.is_some());
        if let Some((got, expected)) = got.zip(expected) {
            self.compare(what, got, expected);
        }
    }

    /// Records whether a result equals the reference, bit for bit.
    pub(crate) fn same(&mut self, what: &str, equal: bool) {
        let relative_error = if equal { 0.0 } else { f64::INFINITY };
        self.findings.push(Finding { what: what.to_owned(), relative_error });
    }
}
