//! One backend of the matrix: its peaks, then its cases until its share of the time is spent.
//!
//! Trade-off: a failed case is a row and the next one runs; after a CUDA error without recovery, the other cases fail too.

use std::collections::BTreeMap;
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use firebrick_hwprofile::nvidia::ConditionsReader;
use firebrick_hwprofile::{AdapterKind, HardwareProfile};
use firebrick_kernels::{BackendKind, GemmFormat, Kernels};
use firebrick_precision::difference::is_within;
use firebrick_train::bench::Spread;
use firebrick_trainer::RunError;
use firebrick_trainer::run::device::catch_failure;
use firebrick_trainer::run::peaks::{Probe, has_fp8};

use crate::case::{self, Case, Effort, Samples};
use crate::options::MatrixOptions;
use crate::results::{BackendResults, MatrixResults, Outcome, Row, Timing};
use crate::show::progress;
use crate::subjects::{Scale, Setting, StepReference, cases};

/// Bytes of inputs that exceed the cache of any GPU.
const GPU_CACHES: f64 = 256e6;
/// Minimum calls of a case: the checked one, its reference, and one sample.
const CALLS_OF_A_CASE: f64 = 3.0;
/// The same for processors that do not report their caches.
const CPU_CACHES: f64 = 64e6;

/// The backend and cases to run.
pub(crate) struct Request<'a> {
    pub(crate) kind: BackendKind,
    pub(crate) options: &'a MatrixOptions,
    pub(crate) profile: &'a HardwareProfile,
    pub(crate) reference: Option<StepReference>,
    pub(crate) deadline: Instant,
    pub(crate) print: &'a dyn Fn(&str),
}

/// Runs a backend and adds its peaks and rows.
pub(crate) fn run_backend<B: Kernels>(request: &Request<'_>, results: &mut MatrixResults) {
    let Request { kind, options, profile, print, .. } = *request;
    let (started, device) = (Instant::now(), B::device_of(0));
    let setting = Setting::<B> {
        kind,
        scale: scale(kind, profile),
        quick: options.quick,
        has_fp8: has_fp8(kind, profile),
        reference: request.reference,
        device: device.clone(),
    };
    print(&format!("{kind}: measuring peaks on {}", device_name(kind, profile)));
    let peaks = catch_failure(|| peaks(&setting)).unwrap_or_else(|failure| {
        Err(RunError::DeviceFailed {
            operation: failure.operation,
            message: failure.message,
            advice: format!("Leave {kind} out with --backends."),
        })
    });
    let mut backend = match peaks {
        Ok(backend) => BackendResults { device: device_name(kind, profile), ..backend },
        Err(error) => {
            results.notes.push(format!("{kind} was left out: {error}"));
            return;
        }
    };
    let reader = card_reader(kind, profile);
    let effort = effort(setting.scale, request);
    let (mut pace, mut rows) = (Pace::default(), Vec::new());
    let wanted = cases(&setting).into_iter().filter(|case| options.includes(&case.key.subject)).collect();
    for (index, case) in in_turns(wanted, |case: &Case<B>| case.key.subject.clone()) {
        let left = request.deadline.saturating_duration_since(Instant::now()).as_secs_f64();
        let outcome = match pace.refusal(&case.key.subject, case.work.flops, left) {
            Some(reason) => Outcome::Skipped { reason: format!("{reason} {kind}") },
            None => outcome(&case, effort, &device, reader.as_ref()),
        };
        let mut row = Row { key: case.key, work: case.work, axis: case.axis, outcome };
        row.key.backend = kind.to_string();
        pace.learn(&row);
        raise_peak(&mut backend, &row);
        print(&progress(&row));
        rows.push((index, row));
    }
    rows.sort_by_key(|(index, _)| *index);
    results.rows.extend(rows.into_iter().map(|(_, row)| row));
    backend.seconds = started.elapsed().as_secs_f64();
    results.backends.push(backend);
}

/// Orders the cases in turns: the first of each subject, then the second of each, and so on, with their places, so that every subject has cases when
/// the time ends.
fn in_turns<C>(cases: Vec<C>, subject: impl Fn(&C) -> String) -> Vec<(usize, C)> {
    let mut seen: BTreeMap<String, usize> = BTreeMap::new();
    let mut turns: Vec<(usize, usize, C)> = Vec::new();
    for (index, case) in cases.into_iter().enumerate() {
        let turn = seen.entry(subject(&case)).or_default();
        turns.push((*turn, index, case));
        *turn += 1;
    }
    turns.sort_by_key(|(turn, index, _)| (*turn, *index));
    turns.into_iter().map(|(_, index, case)| (index, case)).collect()
}

/// The lowest operations per second of each subject, from which the time of its next case is estimated.
#[derive(Default)]
struct Pace(BTreeMap<String, f64>);

impl Pace {
    fn learn(&mut self, row: &Row) {
        if let Some(rate) = row.flops_per_s().filter(|rate| *rate > 0.0) {
            let slowest = self.0.entry(row.key.subject.clone()).or_insert(rate);
            *slowest = slowest.min(rate);
        }
    }

    /// Returns why a case does not start with this many seconds left: none are, or the checked call and a sample would take longer.
    fn refusal(&self, subject: &str, flops: f64, left: f64) -> Option<String> {
        if left <= 0.0 {
            return Some("the time was spent of".to_owned());
        }
        // Before its first case, a subject is assumed to be as fast as GEMMs.
        let rate = self.0.get(subject).or_else(|| self.0.get("gemm"))?;
        let needed = CALLS_OF_A_CASE * flops / rate;
        (needed > left).then(|| format!("about {needed:.0} s would be needed, {left:.0} s were left of"))
    }
}

/// Raises the peak to the fastest GEMM of the run, because a case's GEMM may be faster than the square one.
fn raise_peak(backend: &mut BackendResults, row: &Row) {
    if let (true, Some(rate)) = (row.key.subject == "gemm", row.flops_per_s()) {
        let peak = backend.flops_per_s.entry(row.key.format.clone()).or_insert(rate);
        *peak = peak.max(rate);
    }
}

fn outcome<B: Kernels>(
    case: &Case<B>,
    effort: Effort,
    device: &B::Device,
    reader: Option<&ConditionsReader>,
) -> Outcome {
    let run = || {
        catch_failure(|| {
            let samples = case::run(case, effort, device);
            B::release_memory(device);
            samples
        })
    };
    let message = match catch_unwind(AssertUnwindSafe(run)) {
        Ok(Ok(Ok(samples))) => return judged(case.tolerance, samples, reader),
        Ok(Ok(Err(error))) => error.to_string(),
        Ok(Err(failure)) => format!("{}: {}", failure.operation, failure.message),
        Err(panic) => panic_text(&*panic),
    };
    Outcome::Failed { message }
}

/// Judges a case by its largest error.
fn judged(tolerance: f64, samples: Samples, reader: Option<&ConditionsReader>) -> Outcome {
    let worst = samples.comparisons.iter().max_by(|a, b| a.error.total_cmp(&b.error));
    let worst = worst.expect("every case compares something");
    if !is_within(worst.error, tolerance) {
        return Outcome::Wrong { what: worst.what.to_owned(), error: worst.error.min(f64::MAX), tolerance };
    }
    Outcome::Timed(Timing {
        samples: samples.seconds.len(),
        seconds: Spread::of(samples.seconds),
        calls: samples.calls,
        input_sets: samples.input_sets,
        error: worst.error,
        tolerance,
        conditions: reader.and_then(ConditionsReader::read),
    })
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()))
        .unwrap_or_else(|| "a panic without words".to_owned())
}

fn peaks<B: Kernels>(setting: &Setting<B>) -> Result<BackendResults, RunError> {
    let on_cpu = setting.scale == Scale::Small;
    // Autotuning tries many kernels at the size of the peak, where wgpu's kernels are slow.
    let probe = match setting.scale {
        Scale::Small => Probe::SMALL,
        Scale::Medium => Probe::MEDIUM,
        Scale::Large => Probe::LARGE,
    };
    let mut backend = BackendResults {
        backend: setting.kind.to_string(),
        device: String::new(),
        on_cpu,
        bytes_per_s: 0.0,
        flops_per_s: Default::default(),
        seconds: 0.0,
    };
    for (dtype, name) in setting.formats() {
        let gemms =
            if setting.has_fp8 && backend.flops_per_s.is_empty() { GemmFormat::Fp8 } else { GemmFormat::Compute };
        let peaks = probe.peaks::<B>(&setting.device, dtype, gemms)?;
        backend.flops_per_s.insert(name.to_owned(), peaks.gemm_tflops * 1e12);
        backend.flops_per_s.extend(peaks.fp8_gemm_tflops.map(|rate| ("fp8".to_owned(), rate * 1e12)));
        backend.bytes_per_s = backend.bytes_per_s.max(peaks.copy_tb_s * 1e12);
        B::release_memory(&setting.device);
    }
    Ok(backend)
}

/// Returns the scale of a backend's cases on this machine.
fn scale(kind: BackendKind, profile: &HardwareProfile) -> Scale {
    match kind {
        BackendKind::Flex | BackendKind::Candle => Scale::Small,
        BackendKind::Cuda => Scale::Large,
        BackendKind::Wgpu if runs_in_software(profile) => Scale::Small,
        BackendKind::Wgpu => Scale::Medium,
    }
}

/// Returns whether wgpu has only a driver that computes on the processor, such as Mesa's lavapipe.
fn runs_in_software(profile: &HardwareProfile) -> bool {
    !profile.adapters.iter().any(|adapter| adapter.kind != AdapterKind::Software)
}

fn device_name(kind: BackendKind, profile: &HardwareProfile) -> String {
    let cpu = format!("{}, {} threads", profile.cpu.name, profile.cpu.logical_cores);
    match kind {
        BackendKind::Flex | BackendKind::Candle => cpu,
        BackendKind::Cuda => profile.cuda_card().map_or_else(|| "an NVIDIA card".to_owned(), |card| card.name.clone()),
        BackendKind::Wgpu => match profile.adapters.iter().find(|adapter| adapter.kind != AdapterKind::Software) {
            Some(adapter) => format!("{} through {}", adapter.name, adapter.interface),
            None => {
                let driver = profile.adapters.first().map_or("a software driver", |adapter| &adapter.name);
                format!("CPU driver {driver} on {cpu}")
            }
        },
    }
}

/// Opens the card that CUDA computes on, or wgpu if it has a real NVIDIA GPU.
fn card_reader(kind: BackendKind, profile: &HardwareProfile) -> Option<ConditionsReader> {
    let on_card = kind == BackendKind::Cuda || (kind == BackendKind::Wgpu && !runs_in_software(profile));
    let card = profile.cuda_card().filter(|_| on_card)?;
    ConditionsReader::of_card(card.uuid.as_deref()?)
}

fn effort(scale: Scale, request: &Request<'_>) -> Effort {
    let quick = request.options.quick;
    let fresh_bytes = match scale {
        // A shared machine shows the cache of the whole processor: filling more than 128 MB would only take time.
        Scale::Small => largest_cache().map_or(CPU_CACHES, |bytes| 2.0 * bytes).min(128e6),
        Scale::Medium | Scale::Large => GPU_CACHES,
    };
    let (target, longest, min_samples) = if quick {
        (Duration::from_millis(80), Duration::from_secs(4), 5)
    } else {
        (Duration::from_millis(500), Duration::from_secs(15), 20)
    };
    Effort { target, longest, min_samples, fresh_bytes, deadline: request.deadline }
}

/// Returns the bytes of the processor's largest cache, as far as Linux reports it.
fn largest_cache() -> Option<f64> {
    let caches = fs::read_dir("/sys/devices/system/cpu/cpu0/cache").ok()?;
    let bytes = caches.flatten().filter_map(|cache| {
        let size = fs::read_to_string(cache.path().join("size")).ok()?;
        Some(1024.0 * size.trim().strip_suffix('K')?.parse::<f64>().ok()?)
    });
    bytes.reduce(f64::max)
}

#[cfg(test)]
mod tests {
    use firebrick_hwprofile::Adapter;

    use super::*;
    use crate::case::Comparison;
    use crate::results::tests::row;

    fn samples(error: f64) -> Samples {
        let comparisons = vec![Comparison { what: "a", error: 0.0 }, Comparison { what: "b", error }];
        Samples { seconds: vec![1.0, 2.0, 3.0], calls: 1, input_sets: 2, comparisons }
    }

    #[test]
    fn the_largest_error_decides_and_a_wrong_result_has_no_time() {
        let Outcome::Timed(timing) = judged(1e-3, samples(9e-4), None) else { panic!("within the tolerance") };
        assert_eq!((timing.seconds.median, timing.samples, timing.error), (2.0, 3, 9e-4));
        let wrong = Outcome::Wrong { what: "b".to_owned(), error: 2e-3, tolerance: 1e-3 };
        assert_eq!(judged(1e-3, samples(2e-3), None), wrong);
        let Outcome::Wrong { error, .. } = judged(1e-3, samples(f64::INFINITY), None) else { panic!("not finite") };
        assert!(error.is_finite(), "JSON has no infinity");
    }

    #[test]
    fn every_subject_has_its_first_case_before_any_has_its_second() {
        let turns = in_turns(vec!["a1", "a2", "a3", "b1", "c1", "c2"], |case: &&str| case[..1].to_owned());
        let order: Vec<&str> = turns.iter().map(|(_, case)| *case).collect();
        assert_eq!(order, ["a1", "b1", "c1", "a2", "c2", "a3"]);
        assert_eq!(turns.iter().map(|(index, _)| *index).collect::<Vec<_>>(), [0, 3, 4, 1, 5, 2]);
    }

    #[test]
    fn a_case_that_would_not_end_in_time_is_not_begun() {
        let mut pace = Pace::default();
        assert_eq!(pace.refusal("step", 1e12, 1.0), None, "nothing is known yet");
        assert!(pace.refusal("step", 1e12, 0.0).is_some());
        // 10 s for each 1e12 operations.
        let mut row = row("flex", "step", 64, 10.0);
        row.work.flops = 1e12;
        pace.learn(&row);
        assert_eq!(pace.refusal("step", 1e12, 31.0), None);
        let reason = pace.refusal("step", 4e12, 31.0).unwrap();
        assert_eq!(reason, "about 120 s would be needed, 31 s were left of");
        assert_eq!(pace.refusal("gemm", 4e12, 31.0), None, "another subject");
        row.key.subject = "gemm".to_owned();
        pace.learn(&row);
        assert!(pace.refusal("attention", 4e12, 31.0).is_some(), "as fast as GEMMs at first");
    }

    #[test]
    fn a_software_driver_is_named_as_one_of_the_processor() {
        let mut profile = HardwareProfile::described(2, 1 << 30, Vec::new());
        let adapter = |kind| Adapter {
            name: "llvmpipe".to_owned(),
            interface: "vulkan".to_owned(),
            kind,
            vendor: 0,
            driver: String::new(),
            max_buffer_bytes: 0,
        };
        profile.adapters = vec![adapter(AdapterKind::Software)];
        assert!(device_name(BackendKind::Wgpu, &profile).starts_with("CPU driver llvmpipe on "));
        assert_eq!(scale(BackendKind::Wgpu, &profile), Scale::Small);
        profile.adapters.push(adapter(AdapterKind::Discrete));
        assert_eq!(device_name(BackendKind::Wgpu, &profile), "llvmpipe through vulkan");
        assert_eq!(scale(BackendKind::Wgpu, &profile), Scale::Medium);
    }
}
