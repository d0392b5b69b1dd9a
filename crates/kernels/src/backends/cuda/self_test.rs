//! Runs one small case of every operation in its usual variant, before a run trusts the device.
//! Trade-off: errors that only larger sizes or rare variants show are not found here; the GPU test suite looks for those.

use burn_flex::Flex;
use burn_tensor::{DType, Tensor, TensorData};
use cubecl::cuda::CudaDevice;
use firebrick_precision::difference::{is_within, relative_difference};

use super::attention::library::CudnnLimits;
use super::device::{Device, limit_cudnn};
use super::engine::{Cuda, DeviceFailure};
use crate::backends::SelfTest;
use crate::conformance::{Case, attention, begin_attention, usual_operations, verdict};
use crate::linear::{reference, stacked};
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

/// Implements [`crate::BackendKind::self_test`]. Documents of one length, and of several short or long lengths, use
/// different attention kernels: all of them run.
pub(in crate::backends) fn self_test(device: &CudaDevice, test: SelfTest) -> Result<(), String> {
    let SelfTest { dtype, gemms, head_dim, has_experts } = test;
    let case = Case { has_experts, ..Case::small(dtype, head_dim) };
    let of = DeviceFailure::catch(|| Device::of(device)).map_err(|failure| failure.to_string())?;
    // Packed documents, if short, go to the flash kernels even if cuDNN is installed; those of this case do.
    let of_experts = if has_experts { of.expert_sources() } else { Vec::new() };
    let in_half = [of.usual_low_rank(), of_experts].concat();
    of.programs.prepare(dtype, head_dim, of.flash_programs(dtype, head_dim), in_half);
    let uniform = Case { documents: vec![64, 64], ..case.clone() };
    let findings = DeviceFailure::catch(|| {
        let limits = limit_cudnn(device, CudnnLimits { min_mean_tokens: 0, ..CudnnLimits::default() });
        begin_attention::<Cuda>(&case, device);
        begin_attention::<Cuda>(&uniform, device);
        let mut findings = usual_operations::<Cuda>(&case, device);
        findings.extend(attention::<Cuda>(&uniform, device));
        limit_cudnn(device, limits);
        findings.extend(attention::<Cuda>(&case, device));
        findings
    });
    // All sources for later launches are ready, and no thread compiles when a short process ends.
    of.programs.finish();
    of.library.finish();
    verdict(dtype, findings.map_err(|failure| failure.to_string())?)?;
    match gemms {
        GemmFormat::Compute => Ok(()),
        GemmFormat::Fp8 => {
            DeviceFailure::catch(|| fp8_groups(device, dtype, has_experts)).map_err(|failure| failure.to_string())?
        }
    }
}

/// Tests groups, and a stack if the model has experts, forward and backward. The reference runs on the CPU, so nothing is compiled for it.
fn fp8_groups(device: &CudaDevice, dtype: DType, has_experts: bool) -> Result<(), String> {
    for (rank, shape, counts) in FP8_GROUPS.into_iter().filter(|(.., counts)| has_experts || counts.is_empty()) {
        let Operands { group, x, dy } = Operands::<Cuda>::new(rank, shape, counts, dtype, device);
        let (mut y, saved) = Cuda::project(x, &group, Epilogue::None, Keep::Inputs);
        let saved = *saved.expect("inputs are kept");
        let dx = Cuda::project_backward(saved, group, vec![dy], None).input.plain();
        let found = [y.remove(0), dx].map(host);
        let same = Operands::<Flex>::new(rank, shape, counts, DType::F32, &Default::default());
        let expected = same.reference();
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

    /// Computes the output and the gradient of the input by the reference.
    fn reference(self) -> [Vec<f32>; 2] {
        let Self { group, x, dy } = self;
        let is_stack = group.rows.is_some();
        let (mut y, saved) = match is_stack {
            false => reference::project(x, &group, Epilogue::None, Keep::Inputs),
            true => stacked::project(x, &group, Epilogue::None, Keep::Inputs),
        };
        let saved = *saved.expect("inputs are kept");
        let gradients = match is_stack {
            false => reference::project_backward(saved, group, vec![dy], None),
            true => stacked::project_backward(saved, group, vec![dy], None),
        };
        [y.remove(0), gradients.input.plain()].map(host)
    }
}

fn host<B: LinearOps>(values: Tensor<B, 2>) -> Vec<f32> {
    values.into_data().convert::<f32>().to_vec().unwrap_or_default()
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
                Operands { group: Group { gemms, ..operands.group }, ..operands }.reference()
            });
            for (rounded, exact) in rounded.iter().zip(&exact) {
                let error = relative_difference(rounded, exact, 0.0);
                assert!((0.005..FP8_TOLERANCE / 2.0).contains(&error), "{shape:?}: {error}");
            }
        }
    }
}
