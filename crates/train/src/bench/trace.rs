//! Shows where the time of a step goes, operation by operation, and how close each operation is to its peak rate.

use std::collections::BTreeMap;

use firebrick_hwprofile::roofline::Bound;
use firebrick_kernels::TracedOperation;
use serde::Serialize;

use firebrick_trainer::run::peaks::Peaks;

/// All launches with one name; for GEMMs, also with one size.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct OperationTime {
    pub(super) name: &'static str,
    pub(super) gemm: Option<[usize; 3]>,
    pub(super) calls: usize,
    pub(super) ms: f64,
    /// Fraction of the untraced step's time.
    pub(super) share: f64,
    /// 1e12 operations per second; 0 for operations that only move memory.
    pub(super) tflops: f64,
    /// 1e9 bytes per second, each byte counted once.
    pub(super) gb_s: f64,
    pub(super) bound: Bound,
    /// Fraction of that peak that was reached: time at the peak over measured time.
    pub(super) roofline_share: f64,
}

/// One step, operation by operation.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct StepTrace {
    /// Longest first; empty if the backend cannot trace.
    pub(super) operations: Vec<OperationTime>,
    /// Fraction of the untraced step without any operation, slightly low since traced launches take longer; `None` without a trace.
    pub(super) idle: Option<f64>,
}

/// Sums the launches with the same key and counts them, the longest first.
pub(crate) fn sums<K: Ord>(
    launches: &[TracedOperation],
    key: impl Fn(&TracedOperation) -> K,
) -> Vec<(usize, TracedOperation)> {
    let mut sums = BTreeMap::<K, (usize, TracedOperation)>::new();
    for launch in launches {
        let none = TracedOperation { milliseconds: 0.0, flops: 0.0, bytes: 0.0, ..*launch };
        let (calls, sum) = sums.entry(key(launch)).or_insert((0, none));
        *calls += 1;
        sum.milliseconds += launch.milliseconds;
        sum.flops += launch.flops;
        sum.bytes += launch.bytes;
    }
    let mut sums: Vec<_> = sums.into_values().collect();
    sums.sort_by(|(_, a), (_, b)| b.milliseconds.total_cmp(&a.milliseconds));
    sums
}

impl StepTrace {
    /// Adds up the launches of one step whose untraced median is `step_s`.
    pub(super) fn new(launches: &[TracedOperation], step_s: f64, peaks: &Peaks) -> Self {
        // Keyed by name, and for GEMMs also by size.
        let sums = sums(launches, |launch| (launch.name, launch.gemm));
        let operations: Vec<_> =
            sums.iter().map(|(calls, sum)| OperationTime::new(*calls, sum, step_s, peaks)).collect();
        let busy: f64 = operations.iter().map(|operation| operation.share).sum();
        Self { idle: (!operations.is_empty()).then_some(1.0 - busy), operations }
    }
}

impl OperationTime {
    fn new(calls: usize, sum: &TracedOperation, step_s: f64, peaks: &Peaks) -> Self {
        let seconds = sum.milliseconds / 1e3;
        // An operation too short for the device's clock has an unknown rate.
        let per_second = |amount: f64| if seconds > 0.0 { amount / seconds } else { 0.0 };
        let (math_s, memory_s) = (sum.flops / (peaks.gemm_tflops * 1e12), sum.bytes / (peaks.copy_tb_s * 1e12));
        Self {
            name: sum.name,
            gemm: sum.gemm,
            calls,
            ms: sum.milliseconds,
            share: seconds / step_s,
            tflops: per_second(sum.flops) / 1e12,
            gb_s: per_second(sum.bytes) / 1e9,
            bound: if math_s >= memory_s { Bound::Math } else { Bound::Memory },
            roofline_share: per_second(math_s.max(memory_s)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOFS: Peaks = Peaks { gemm_tflops: 1.0, fp8_gemm_tflops: None, gemm_size: 8, copy_tb_s: 0.1 };

    fn launch(name: &'static str, milliseconds: f64, flops: f64, bytes: f64) -> TracedOperation {
        TracedOperation { name, start_ms: 0.0, milliseconds, flops, bytes, gemm: None }
    }

    #[test]
    fn launches_of_a_name_add_up() {
        let launches =
            [launch("linear", 2.0, 1e9, 1e6), launch("norm", 1.0, 0.0, 5e7), launch("linear", 2.0, 1e9, 1e6)];
        let trace = StepTrace::new(&launches, 0.01, &ROOFS);
        let [linear, norm] = &trace.operations[..] else { panic!("two names: {trace:?}") };
        assert_eq!((linear.name, linear.calls, linear.ms, linear.bound), ("linear", 2, 4.0, Bound::Math));
        assert!((linear.roofline_share - 0.5).abs() < 1e-12 && (linear.tflops - 0.5).abs() < 1e-12);
        assert_eq!((norm.bound, norm.tflops), (Bound::Memory, 0.0));
        assert!((norm.roofline_share - 0.5).abs() < 1e-12 && (norm.gb_s - 50.0).abs() < 1e-9);
        assert!((trace.idle.unwrap() - 0.5).abs() < 1e-12);
    }

    #[test]
    fn gemms_of_different_sizes_are_distinguished() {
        let gemm = |m, ms| TracedOperation { gemm: Some([m, 8, 8]), ..launch("linear", ms, 1e9, 1e6) };
        let trace = StepTrace::new(&[gemm(64, 1.0), gemm(128, 0.0), gemm(64, 1.0)], 0.01, &ROOFS);
        let found: Vec<_> = trace.operations.iter().map(|operation| (operation.gemm, operation.calls)).collect();
        assert_eq!(found, [(Some([64, 8, 8]), 2), (Some([128, 8, 8]), 1)]);
        assert_eq!((trace.operations[1].gb_s, trace.operations[1].roofline_share), (0.0, 0.0));
    }

    #[test]
    fn a_backend_that_cannot_trace_reports_no_idle_time() {
        assert_eq!(StepTrace::new(&[], 1.0, &ROOFS), StepTrace { operations: Vec::new(), idle: None });
    }
}
