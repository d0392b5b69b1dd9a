//! One small case of every operation in its usual variant, before a run trusts the device.
//! Trade-off: a wrong result that only larger sizes or rare variants show is not found here; the GPU test suite looks for those.

use burn_tensor::{DType, Tensor, TensorData};
use cubecl::cuda::CudaDevice;

use super::cudnn_limits::CudnnLimits;
use super::engine::{engine, limit_cudnn};
use super::failure::DeviceFailure;
use super::low_rank::stages;
use super::matrix::Cuda;
use super::program::USUAL_RANKS;
use crate::conformance::{Case, attention, begin_attention, usual_operations, verdict};
use crate::linear::reference;
use crate::{
    Adapter, Epilogue, GemmFormat, Group, Keep, LinearOps, Module, ProjectGradients, Prologue, Weight, WeightGradient,
};

/// How far a product in 8-bit floats may be from the reference, which rounds as they do: a wrong scale or order is further off, and codes
/// under powers of two are half as far.
const FP8_TOLERANCE: f64 = 0.1;

/// See [`crate::Kernels::self_test`]. Documents of one length, and of several lengths that are long or short, take different ways through
/// attention: all run.
pub(super) fn run(device: &CudaDevice, dtype: DType, gemms: GemmFormat, head_dim: usize) -> Result<(), String> {
    let case = Case::small(dtype, head_dim);
    let engine = DeviceFailure::catch(|| engine(device)).map_err(|failure| failure.to_string())?;
    // Packed documents may go to the flash kernels even where cuDNN is installed: short ones do, and those of the case are.
    let stages = stages(USUAL_RANKS, engine.shared_bytes());
    engine.programs.prepare(dtype, head_dim, super::flash::takes(dtype, head_dim), stages);
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
    // What a later launch needs is ready, and no thread compiles when a short process ends.
    engine.programs.finish();
    engine.library.finish();
    verdict(dtype, findings.map_err(|failure| failure.to_string())?)?;
    match gemms {
        GemmFormat::Compute => Ok(()),
        GemmFormat::Fp8 => DeviceFailure::catch(|| fp8_groups(device, dtype)).map_err(|failure| failure.to_string())?,
    }
}

/// A group with an adapter, and one that fills its rows up, forward and backward.
fn fp8_groups(device: &CudaDevice, dtype: DType) -> Result<(), String> {
    for (rank, [outputs, inputs]) in [(Some(8), [144, 272]), (None, [80, 48])] {
        let values = |[rows, columns]: [usize; 2], size: f64, seed: usize| {
            let value = |at: usize| size * ((at * (7 + 2 * seed) + at / columns * 5) as f64 * 0.37).sin();
            let values: Vec<f32> = (0..rows * columns).map(|at| value(at) as f32).collect();
            Tensor::<Cuda, 2>::from_data(TensorData::new(values, [rows, columns]), (device, DType::F32))
        };
        let adapter = |rank| Adapter {
            a: values([rank, inputs], 0.05, 1),
            b: values([outputs, rank], 0.02, 2),
            scale: 2.0,
            magnitude: None,
        };
        let module = Module {
            columns: 0..outputs,
            weight: Weight::Dense(values([outputs, inputs], 0.02, 3)),
            weight_gradient: WeightGradient::Frozen,
            bias: None,
            adapter: rank.map(adapter),
        };
        let group = Group { modules: vec![module], parts: vec![outputs], gemms: GemmFormat::Fp8, dropout: None };
        let x = Prologue::None { x: values([40, inputs], 1.0, 4).cast(dtype) };
        let dy = vec![values([40, outputs], 1e-3, 5).cast(dtype)];
        let (y, saved) = Cuda::project(x.clone(), &group, Epilogue::None, Keep::Inputs);
        let (expected_y, expected) = reference::project(x, &group, Epilogue::None, Keep::Inputs);
        let (Some(saved), Some(expected)) = (saved, expected) else { unreachable!("inputs are kept") };
        let dx = |gradients: ProjectGradients<Cuda>| gradients.input.plain();
        let found = dx(Cuda::project_backward(*saved, group.clone(), dy.clone(), None, None));
        let expected_dx = dx(reference::project_backward(*expected, group, dy, None));
        for (what, found, expected) in
            [("forward", y[0].clone(), expected_y[0].clone()), ("gradient of the input", found, expected_dx)]
        {
            let error = relative_error(found, expected);
            if error.is_nan() || error > FP8_TOLERANCE {
                return Err(format!(
                    "a group of linear modules in 8-bit floats ({what}) is wrong on this device: relative error {error:.1e}, at \
                     most {FP8_TOLERANCE:.0e} is rounding"
                ));
            }
        }
    }
    Ok(())
}

/// The root of the squared differences over that of the squares.
fn relative_error(found: Tensor<Cuda, 2>, expected: Tensor<Cuda, 2>) -> f64 {
    let host = |values: Tensor<Cuda, 2>| values.into_data().convert::<f32>().to_vec::<f32>().unwrap_or_default();
    let (found, expected) = (host(found), host(expected));
    let sum = |values: &mut dyn Iterator<Item = f32>| values.map(|value| f64::from(value).powi(2)).sum::<f64>();
    let off = sum(&mut found.iter().zip(&expected).map(|(found, expected)| found - expected));
    (off / sum(&mut expected.iter().copied())).sqrt()
}
