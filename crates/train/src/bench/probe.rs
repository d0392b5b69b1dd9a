//! The peaks of this machine on one backend, in every format that it multiplies there: what `profile --measure` times and keeps.
//!
//! Trade-off: GEMMs and copies alone, a second or two on a GPU; attention is taken at a fixed share of GEMMs, as in forecasts.

use std::time::{SystemTime, UNIX_EPOCH};

use burn_tensor::DType;
use firebrick_hwprofile::HardwareProfile;
use firebrick_hwprofile::peaks::{MeasuredGemm, MeasuredPeaks, processor_key};
use firebrick_hwprofile::spec::{HardwareKind, MathFormat};
use firebrick_kernels::{BackendKind, CommOps, GemmFormat, Kernels};
use firebrick_precision::Format;
use firebrick_trainer::RunError;
use firebrick_trainer::plan::compute_format;
use firebrick_trainer::run::device::device_work;
use firebrick_trainer::with_backend;

use super::peaks::{Peaks, Probe};

/// Times GEMMs of each format and copies on the device that a run of rank 0 would use.
///
/// # Errors
/// The device failed, or the machine has no such device.
pub fn measure_peaks(
    backend: BackendKind,
    profile: &HardwareProfile,
    print: &dyn Fn(&str),
) -> Result<MeasuredPeaks, RunError> {
    with_backend!(backend, B => device_work(|| of_backend::<B>(backend, profile, print)))
}

fn of_backend<B: Kernels>(
    backend: BackendKind,
    profile: &HardwareProfile,
    print: &dyn Fn(&str),
) -> Result<MeasuredPeaks, RunError> {
    let device = <B as CommOps>::device_of(0);
    let probe = Probe::of(backend.is_cpu());
    let mut gemms = Vec::new();
    for (format, dtype, kind) in formats(backend, profile) {
        let tflops = match device_work(|| Peaks::gemm_tflops::<B>(probe, dtype, kind, &device)) {
            // Not tried on every generation that should have them; the other peaks are worth having.
            Err(error @ RunError::DeviceFailed { .. }) if kind == GemmFormat::Fp8 => {
                print(&format!("{} GEMM: {error}", format.name()));
                continue;
            }
            measured => measured?,
        };
        print(&format!("{} GEMM of {}: {tflops:.3} TFLOP/s", format.name(), probe.gemm_size));
        gemms.push(MeasuredGemm { format, tflops });
    }
    let copy_tb_s = Peaks::copy_tb_s::<B>(probe, &device)?;
    print(&format!("copy: {copy_tb_s:.3} TB/s"));
    let (device, driver) = key(backend, profile);
    let measured_at = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    let gemm_size = probe.gemm_size;
    Ok(MeasuredPeaks { backend: backend.to_string(), device, driver, measured_at, gemm_size, gemms, copy_tb_s })
}

/// What the backend multiplies on this machine.
fn formats(backend: BackendKind, profile: &HardwareProfile) -> Vec<(MathFormat, DType, GemmFormat)> {
    let mut formats = vec![(MathFormat::F32, DType::F32, GemmFormat::Compute)];
    let half = [(Format::F16, MathFormat::F16, DType::F16), (Format::Bf16, MathFormat::Bf16, DType::BF16)];
    for (format, math, dtype) in half {
        if compute_format(format, backend).value == format {
            formats.push((math, dtype, GemmFormat::Compute));
        }
    }
    if has_fp8(backend, profile) {
        formats.push((MathFormat::Fp8, DType::BF16, GemmFormat::Fp8));
    }
    formats
}

/// Whether the device that the backend computes on multiplies 8-bit floats.
pub(super) fn has_fp8(backend: BackendKind, profile: &HardwareProfile) -> bool {
    let capability = profile.cuda_card().and_then(|card| card.compute_capability);
    let has_them = |capability| HardwareKind::of_compute_capability(capability).has_fp8();
    backend == BackendKind::Cuda && capability.is_some_and(has_them)
}

/// Name and driver of the device that the backend computes on.
fn key(backend: BackendKind, profile: &HardwareProfile) -> (String, String) {
    let card = match backend {
        BackendKind::Cuda => profile.cuda_card(),
        BackendKind::Wgpu => profile.gpus.first(),
        BackendKind::Flex | BackendKind::Candle => return (processor_key(profile), String::new()),
    };
    let adapter = || profile.adapters.first().map(|adapter| (adapter.name.clone(), adapter.driver.clone()));
    card.map(|card| (card.name.clone(), card.driver_version.clone()))
        .or_else(adapter)
        .unwrap_or_else(|| (backend.to_string(), String::new()))
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;

    #[test]
    fn a_processor_is_measured_in_f32_and_known_by_its_name_and_threads() {
        let profile = HardwareProfile::described(2, 1 << 34, Vec::new());
        let peaks = measure_peaks(BackendKind::Flex, &profile, &|_| ()).unwrap();
        assert_eq!((peaks.backend.as_str(), peaks.device.as_str()), ("flex", "a processor, 2 threads"));
        assert_eq!(peaks.gemms.iter().map(|gemm| gemm.format).collect::<Vec<_>>(), [MathFormat::F32]);
        assert!(peaks.gemms[0].tflops > 0.0 && peaks.copy_tb_s > 0.0, "{peaks:?}");
        assert!(peaks.is_of(&profile));
    }
}
