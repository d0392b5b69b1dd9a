//! The self-test of groups of linear modules in 8-bit floats.

use burn_flex::Flex;
use burn_tensor::{DType, Tensor, TensorData};
use firebrick_precision::difference::{is_within, relative_difference};

use crate::backends::kind::SelfTest;
use crate::{
    Adapter, Epilogue, ExpertRows, GemmFormat, Group, Keep, LinearOps, Module, Prologue, Weight, WeightGradient,
};

/// Maximum error of a GEMM in 8-bit floats relative to the reference, which rounds in the same way. A wrong scale or
/// order has a larger error, and codes under powers of two have half of it.
const FP8_TOLERANCE: f64 = 0.1;

/// Groups of one module for the self-test of 8-bit floats: the rank, the shape of a matrix, and the rows of each expert, if it is a stack. One has an adapter,
/// one fills its rows.
const FP8_GROUPS: [(Option<usize>, [usize; 2], &[usize]); 3] =
    [(Some(8), [144, 272], &[]), (None, [80, 48], &[]), (Some(8), [144, 272], &[33, 0, 7])];

/// Tests groups in 8-bit floats, and a stack if the model has experts, forward and backward. The reference runs on the CPU, so nothing is
/// compiled for it.
pub(super) fn fp8_groups<B: LinearOps>(test: SelfTest, device: &B::Device) -> Result<(), String> {
    let SelfTest { dtype, has_experts, .. } = test;
    for (rank, shape, counts) in FP8_GROUPS.into_iter().filter(|(.., counts)| has_experts || counts.is_empty()) {
        let found = Operands::<B>::new(rank, shape, counts, dtype, device).run();
        let expected = Operands::<Flex>::new(rank, shape, counts, DType::F32, &Default::default()).run();
        for ((what, found), expected) in ["forward", "gradient of the input"].into_iter().zip(found).zip(expected) {
            let error = relative_difference(&found, &expected, 0.0);
            if !is_within(error, FP8_TOLERANCE) {
                return Err(format!(
                    "a group of linear modules in 8-bit floats ({what}) is wrong on this device: relative error {error:.1e}, at \
                     most {FP8_TOLERANCE:.0e} is rounding"
                ));
            }
        }
    }
    Ok(())
}

/// The same values on every backend, with activations in bf16.
struct Operands<B: LinearOps> {
    group: Group<B>,
    x: Prologue<B>,
    dy: Tensor<B, 2>,
}

impl<B: LinearOps> Operands<B> {
    fn new(
        rank: Option<usize>,
        [outputs, inputs]: [usize; 2],
        counts: &[usize],
        dtype: DType,
        device: &B::Device,
    ) -> Self {
        let matrices = counts.len().max(1);
        let mut random = 1_u64;
        let mut values = |[rows, columns]: [usize; 2], size: f32| {
            let mut next = || {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                size * ((random >> 40) as f32 / (1_u64 << 23) as f32 - 1.0)
            };
            let values: Vec<f32> = (0..rows * columns).map(|_| next()).collect();
            Tensor::<B, 2>::from_data(TensorData::new(values, [rows, columns]), (device, DType::F32))
        };
        let adapter = rank.map(|rank| Adapter {
            a: values([matrices * rank, inputs], 0.05),
            b: values([matrices * outputs, rank], 0.02),
            scale: 2.0,
            magnitude: None,
        });
        let module = Module {
            columns: 0..outputs,
            weight: Weight::Dense(values([matrices * outputs, inputs], 0.02)),
            weight_gradient: WeightGradient::Frozen,
            bias: None,
            adapter,
        };
        Self {
            group: Group {
                modules: vec![module],
                parts: vec![outputs],
                gemms: GemmFormat::Fp8,
                dropout: None,
                rows: (!counts.is_empty()).then(|| ExpertRows::of_counts(counts.to_vec(), device)),
            },
            x: Prologue::None { x: values([40, inputs], 1.0).cast(DType::BF16).cast(dtype) },
            dy: values([40, outputs], 1e-3).cast(DType::BF16).cast(dtype),
        }
    }

    fn run(self) -> [Vec<f32>; 2] {
        let Self { group, x, dy } = self;
        let (mut y, saved) = B::project(x, &group, Epilogue::None, Keep::Inputs);
        let gradients = B::project_backward(*saved.expect("inputs are kept"), group, vec![dy], None);
        let host = |values: Tensor<B, 2>| values.into_data().convert::<f32>().to_vec().unwrap_or_default();
        [y.remove(0), gradients.input.plain()].map(host)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A wrong scale is found, and rounding is not.
    #[test]
    fn products_in_8_bit_floats_are_as_far_from_exact_ones_as_rounding_is() {
        for (rank, shape, counts) in FP8_GROUPS {
            let [rounded, exact] = [GemmFormat::Fp8, GemmFormat::Compute].map(|gemms| {
                let operands = Operands::<Flex>::new(rank, shape, counts, DType::F32, &Default::default());
                Operands { group: Group { gemms, ..operands.group }, ..operands }.run()
            });
            for (rounded, exact) in rounded.iter().zip(&exact) {
                let error = relative_difference(rounded, exact, 0.0);
                assert!((0.005..FP8_TOLERANCE / 2.0).contains(&error), "{shape:?}: {error}");
            }
        }
    }
}
