//! Shared helpers of the reference bodies' tests: seeded tensors, closeness, and Burn's autodiff to compare backwards with.

use burn_autodiff::Autodiff;
use burn_flex::Flex;
use burn_tensor::backend::AutodiffBackend;
use burn_tensor::{Tensor, TensorData, backend::Backend};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// The backend under test.
pub(crate) type Plain = Flex;
/// The same backend under autodiff: gradients by decomposition into Burn's own operations.
pub(crate) type Recorded = Autodiff<Flex>;

crate::backends::by_default! {
    Recorded: Session, MemoryOps, WeightOps, NormOps, LinearOps, AttentionOps, MoeOps, ConvOps, DeltaOps, EmbeddingOps, LossOps,
    OptimizerOps, Kernels,
}

/// Returns uniform numbers in `-1..1`, the same on every run.
pub(crate) fn random<B: Backend, const D: usize>(seed: u64, shape: [usize; D]) -> Tensor<B, D> {
    let mut stream = ChaCha8Rng::seed_from_u64(seed);
    let values: Vec<f32> = (0..shape.iter().product()).map(|_| stream.random_range(-1.0..1.0)).collect();
    Tensor::from_data(TensorData::new(values, shape), &B::Device::default())
}

/// Returns a recorded copy that tracks its gradient.
pub(crate) fn leaf<const D: usize>(tensor: &Tensor<Plain, D>) -> Tensor<Recorded, D> {
    Tensor::from_inner(tensor.clone()).require_grad()
}

/// Computes the gradients of `sum(y * dy)`.
pub(crate) fn backward<const D: usize>(
    y: Tensor<Recorded, D>,
    dy: &Tensor<Plain, D>,
) -> <Recorded as AutodiffBackend>::Gradients {
    y.mul(Tensor::from_inner(dy.clone())).sum().backward()
}

/// Fails where two tensors differ by more than `tolerance` relative to the largest value.
#[track_caller]
pub(crate) fn assert_close<const D: usize>(got: Tensor<Plain, D>, expected: Tensor<Plain, D>, tolerance: f32) {
    assert_eq!(got.dims(), expected.dims());
    let expected = expected.into_data().to_vec::<f32>().expect("tests run in f32");
    let got = got.into_data().to_vec::<f32>().expect("tests run in f32");
    let size = expected.iter().fold(1e-3f32, |size, value| size.max(value.abs()));
    for (index, (g, e)) in got.iter().zip(&expected).enumerate() {
        assert!((g - e).abs() <= tolerance * size, "element {index}: got {g}, expected {e} (largest value {size})");
    }
}
