//! Every operation of a backend against the portable bodies on the CPU, on small random input.
//!
//! A backend's self-test runs one [`Case`] before training; test suites run many, with odd sizes. The reference computes in
//! f32 from the same values, already rounded to the format under test, so what is measured is the operation alone.

mod attention;
mod linear;
mod optimizer;
mod rows;

use burn_flex::Flex;
use burn_tensor::{DType, Int, Tensor, TensorData};

use crate::{Documents, Kernels, LoraPair, Projection, RotaryTables, Weight};

/// Sizes of the input. All of them at least 1; `query_heads` a multiple of `key_value_heads`, `head_dim` even.
#[derive(Clone, Debug, PartialEq)]
pub struct Case {
    /// Format of activations.
    pub dtype: DType,
    /// Lengths of the documents of one packed row.
    pub documents: Vec<usize>,
    /// Heads of the queries.
    pub query_heads: usize,
    /// Heads of keys and values.
    pub key_value_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Width of the model.
    pub width: usize,
    /// Width of the feed-forward part.
    pub feed_forward: usize,
    /// Rows of embedding and head.
    pub vocabulary: usize,
    /// Rank of the adapters.
    pub rank: usize,
    /// Seed of the values.
    pub seed: u64,
}

impl Case {
    /// A small case that touches every kernel of a run with this format and head width.
    pub fn small(dtype: DType, head_dim: usize) -> Self {
        Self {
            dtype,
            documents: vec![23, 1, 40],
            query_heads: 4,
            key_value_heads: 2,
            head_dim,
            width: 128,
            feed_forward: 192,
            vocabulary: 320,
            rank: 16,
            seed: 7,
        }
    }

    fn tokens(&self) -> usize {
        self.documents.iter().sum()
    }
}

/// How far an operation is from its reference.
#[derive(Clone, Debug, PartialEq)]
pub struct Finding {
    /// The operation, and what of its result.
    pub what: String,
    /// `‖got − expected‖ / ‖expected‖`; infinite where a value is not finite.
    pub relative_error: f64,
}

/// Largest relative error that rounding explains, by format. In f32 it allows for TF32: Burn's own products on CUDA, which the
/// portable attention falls back on for head widths that no kernel takes, compute in it.
pub fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => 1e-2,
        DType::F16 => 2e-3,
        _ => 1e-3,
    }
}

/// Runs every operation once. In the order of a training step.
pub fn every_operation<B: Kernels>(case: &Case, device: &B::Device) -> Vec<Finding> {
    let mut check = Check::<B>::new(case, device);
    rows::check(&mut check);
    linear::check(&mut check);
    attention::check(&mut check);
    optimizer::check(&mut check);
    check.findings
}

/// Runs attention alone: documents of one length may take another way than packed ones.
pub fn attention<B: Kernels>(case: &Case, device: &B::Device) -> Vec<Finding> {
    let mut check = Check::<B>::new(case, device);
    attention::check(&mut check);
    check.findings
}

/// Names the first operation of a format that is further off than [`tolerance`].
///
/// # Errors
/// The operation, its error and the tolerance, in words.
pub fn verdict(dtype: DType, findings: Vec<Finding>) -> Result<(), String> {
    let tolerance = tolerance(dtype);
    let wrong = findings.into_iter().find(|finding| finding.relative_error > tolerance);
    wrong.map_or(Ok(()), |finding| {
        Err(format!(
            "{} is wrong on this device: relative error {:.1e}, at most {tolerance:.0e} is rounding",
            finding.what, finding.relative_error
        ))
    })
}

/// A tensor on the device under test and the same values on the CPU, in f32.
type Pair<B, const D: usize> = (Tensor<B, D>, Tensor<Flex, D>);

struct Check<'a, B: Kernels> {
    case: &'a Case,
    device: &'a B::Device,
    cpu: <Flex as burn_tensor::backend::BackendTypes>::Device,
    random: u64,
    findings: Vec<Finding>,
}

impl<'a, B: Kernels> Check<'a, B> {
    fn new(case: &'a Case, device: &'a B::Device) -> Self {
        Self { case, device, cpu: Default::default(), random: case.seed, findings: Vec::new() }
    }

    /// Uniform in -1..1 (a multiplicative congruential generator: only variety is asked of it).
    fn uniform(&mut self) -> f32 {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.random >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    fn values(&mut self, count: usize, scale: f32) -> Vec<f32> {
        (0..count).map(|_| self.uniform() * scale).collect()
    }

    /// Random values of the format under test.
    fn random<const D: usize>(&mut self, shape: [usize; D], scale: f32) -> Pair<B, D> {
        self.random_in(self.case.dtype, shape, scale)
    }

    /// Random f32 values: what weights of norms and adapters, gradients and moments are.
    fn random_f32<const D: usize>(&mut self, shape: [usize; D], scale: f32) -> Pair<B, D> {
        self.random_in(DType::F32, shape, scale)
    }

    fn random_in<const D: usize>(&mut self, dtype: DType, shape: [usize; D], scale: f32) -> Pair<B, D> {
        let values = self.values(shape.iter().product(), scale);
        let data = TensorData::new(values, shape).convert_dtype(dtype);
        let on_cpu = Tensor::from_data(data.clone().convert_dtype(DType::F32), (&self.cpu, DType::F32));
        (Tensor::from_data(data, (self.device, dtype)), on_cpu)
    }

    fn ints(&self, values: &[i32]) -> (Tensor<B, 1, Int>, Tensor<Flex, 1, Int>) {
        (Tensor::from_ints(values, self.device), Tensor::from_ints(values, &self.cpu))
    }

    fn documents(&self) -> (Documents<B>, Documents<Flex>) {
        let mut boundaries = vec![0];
        boundaries.extend(self.case.documents.iter().scan(0, |end, &length| {
            *end += length as u32;
            Some(*end)
        }));
        (Documents::new(&boundaries, self.device), Documents::new(&boundaries, &self.cpu))
    }

    fn tables(&mut self) -> (RotaryTables<B>, RotaryTables<Flex>) {
        let shape = [self.case.tokens(), self.case.head_dim / 2];
        let (cos, sin) = (self.random_f32(shape, 1.0), self.random_f32(shape, 1.0));
        (RotaryTables { cos: cos.0, sin: sin.0 }, RotaryTables { cos: cos.1, sin: sin.1 })
    }

    fn pair(&mut self, [outputs, inputs]: [usize; 2]) -> (LoraPair<B>, LoraPair<Flex>) {
        let rank = self.case.rank;
        let a = self.random_f32([rank, inputs], 0.2);
        let b = self.random_f32([outputs, rank], 0.2);
        let scale = 1.5;
        (LoraPair { a: a.0, b: b.0, scale }, LoraPair { a: a.1, b: b.1, scale })
    }

    /// A 4-bit base with an adapter.
    fn packed_projection(&mut self, shape: [usize; 2], lora: bool) -> (Projection<B>, Projection<Flex>) {
        let (values, _) = self.random_f32(shape, 0.1);
        let host: Vec<f32> = values.into_data().to_vec().expect("the values are f32");
        let packed = firebrick_precision::nf4::quantize(&host, &shape, firebrick_precision::DoubleQuant::On)
            .expect("random values can be packed");
        let weights = (B::nf4_upload(&packed, self.device), Flex::nf4_upload(&packed, &self.cpu));
        let pairs = lora.then(|| self.pair(shape)).unzip();
        (
            Projection { weight: Weight::Nf4(weights.0), lora: pairs.0, weight_gradient: false },
            Projection { weight: Weight::Nf4(weights.1), lora: pairs.1, weight_gradient: false },
        )
    }

    /// A dense base in the format under test, or one that trains, with or without an adapter.
    fn dense_projection(&mut self, shape: [usize; 2], lora: bool, trains: bool) -> (Projection<B>, Projection<Flex>) {
        let dtype = if trains { DType::F32 } else { self.case.dtype };
        let (weight, reference) = self.random_in(dtype, shape, 0.1);
        let pairs = lora.then(|| self.pair(shape)).unzip();
        (
            Projection { weight: Weight::Dense(weight), lora: pairs.0, weight_gradient: trains },
            Projection { weight: Weight::Dense(reference), lora: pairs.1, weight_gradient: trains },
        )
    }

    /// Notes how far a result is from its reference.
    fn compare<const D: usize>(&mut self, what: &str, got: Tensor<B, D>, expected: Tensor<Flex, D>) {
        let same_shape = got.dims() == expected.dims();
        let host = |data: TensorData| data.convert_dtype(DType::F32).to_vec::<f32>().expect("just converted to f32");
        let (got, expected) = (host(got.into_data()), host(expected.into_data()));
        let relative_error = if same_shape { relative_error(&got, &expected) } else { f64::INFINITY };
        self.findings.push(Finding { what: what.to_owned(), relative_error });
    }

    /// Notes that a result must be the reference, bit for bit.
    fn same(&mut self, what: &str, equal: bool) {
        let relative_error = if equal { 0.0 } else { f64::INFINITY };
        self.findings.push(Finding { what: what.to_owned(), relative_error });
    }
}

/// `‖got − expected‖ / ‖expected‖` in f64. Inputs are of order one, so expected values below a root mean square of 1e-3 are
/// what is left of larger ones that cancel (the attention gradients of a document of one token are exactly zero): then the
/// difference is held against that.
fn relative_error(got: &[f32], expected: &[f32]) -> f64 {
    let square = |value: f64| value * value;
    let apart: f64 = got.iter().zip(expected).map(|(&g, &e)| square(f64::from(g) - f64::from(e))).sum();
    let size: f64 = expected.iter().map(|&e| square(f64::from(e))).sum();
    let error = (apart / size.max(expected.len() as f64 * 1e-6)).sqrt();
    match error {
        _ if expected.is_empty() => 0.0,
        error if error.is_finite() => error,
        _ => f64::INFINITY,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cpu_agrees_with_itself_on_every_operation() {
        let case = Case::small(DType::F32, 32);
        let findings = every_operation::<Flex>(&case, &Default::default());
        assert!(findings.len() > 30, "{} operations", findings.len());
        for finding in findings {
            assert!(finding.relative_error < 1e-5, "{finding:?}");
        }
    }

    #[test]
    fn a_value_that_is_not_finite_is_never_close() {
        assert_eq!(relative_error(&[1.0, f32::NAN], &[1.0, 2.0]), f64::INFINITY);
        assert_eq!(relative_error(&[1.0, 2.0], &[1.0, 2.0]), 0.0);
        assert!(relative_error(&[1e-3, 0.0], &[0.0, 0.0]) > 0.5);
        assert_eq!(relative_error(&[], &[]), 0.0);
    }
}
