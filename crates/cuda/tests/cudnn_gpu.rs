//! Attention by cuDNN against a plain computation on the host, on a GPU.
//!
//! Passes at once where there is no driver or no cuDNN. Every case is run and reported before a test fails, each in a process
//! of its own, since each reaches another kernel and one that fails would take the others with it. `FIREBRICK_BENCH=1` also
//! times a few large calls; run with `--nocapture` to see them.
#![allow(unsafe_code, reason = "calls on device memory")]
#![allow(clippy::print_stdout, reason = "the report of each case is what the test is run for")]

#[path = "cudnn_gpu/bench.rs"]
mod bench;
#[path = "cudnn_gpu/buffers.rs"]
mod buffers;
#[path = "cudnn_gpu/cases.rs"]
mod cases;
#[path = "cudnn_gpu/check.rs"]
mod check;
#[path = "cudnn_gpu/device.rs"]
mod device;
#[path = "cudnn_gpu/isolate.rs"]
mod isolate;
#[path = "cudnn_gpu/reference.rs"]
mod reference;

use cases::Case;
use firebrick_cuda::{Context, CudaError, Cudnn, Driver};

#[test]
fn attention_and_its_gradients_equal_the_plain_computation() {
    run_all(&cases::kinds());
    if std::env::var_os("FIREBRICK_BENCH").is_some()
        && let Some((context, cudnn)) = load()
    {
        bench::bench(&device::Gpu::new(&context, 0).expect("a stream"), &cudnn);
    }
}

#[test]
fn packed_documents_may_lie_in_any_arrangement() {
    run_all(&cases::arrangements());
}

/// Does nothing unless the tests above started this process for one of their cases.
#[test]
fn the_case_of_this_process() {
    let Some(name) = isolate::case_of_this_process() else { return };
    let case = cases::kinds().into_iter().chain(cases::arrangements()).find(|case| case.name == name);
    let case = case.expect("the parent names one of the cases");
    let driver = Driver::load().expect("the parent has a driver");
    let context = Context::retain(&driver, 0).expect("device 0 of a loaded driver");
    match check::check(&context, &case, isolate::tell) {
        Ok(()) => isolate::tell_passed(),
        Err(report) => {
            isolate::tell(&report);
            panic!("{report}");
        }
    }
}

#[test]
fn a_case_that_dies_is_a_failure_of_that_case_alone() {
    // No case has this name, so its process panics before it touches a device.
    let names = ["a case that dies on purpose".to_string()];
    assert_eq!(isolate::run_each("the_case_of_this_process", &names, |_| false), names);
    let why = |report: &str| report.contains("the parent names one of the cases");
    assert!(isolate::run_each("the_case_of_this_process", &names, why).is_empty());
}

#[test]
fn no_two_cases_have_a_name() {
    let mut names: Vec<String> =
        cases::kinds().into_iter().chain(cases::arrangements()).map(|case| case.name).collect();
    names.sort();
    let count = names.len();
    names.dedup();
    assert_eq!(names.len(), count);
}

/// The first device and its cuDNN, if there are.
fn load() -> Option<(Context, Cudnn)> {
    let driver = Driver::load().ok()?;
    let context = Context::retain(&driver, 0).expect("device 0 of a loaded driver");
    match Cudnn::load(&context) {
        Ok(cudnn) => Some((context, cudnn)),
        Err(CudaError::CudnnNotFound { .. }) => None,
        Err(error) => panic!("{error}"),
    }
}

fn run_all(cases: &[Case]) {
    let Some((context, cudnn)) = load() else { return };
    let device = context.driver().device(0).expect("device 0");
    println!("cuDNN {:?} on {device:?}", cudnn.version());
    // The cases are what cuDNN does on Hopper; other GPUs lack some, such as wide heads.
    let hopper = device.compute_capability.0 == 9;
    let names: Vec<String> = cases.iter().map(|case| case.name.clone()).collect();
    let unsupported = |report: &str| !hopper && report.starts_with("cuDNN does not do");
    let failed = isolate::run_each("the_case_of_this_process", &names, unsupported);
    assert!(failed.is_empty(), "{} of {} failed: {}", failed.len(), names.len(), failed.join(", "));
}
