//! Attention by cuDNN on a GPU compared with a plain computation on the host.
//!
//! Without a driver or cuDNN, every test returns early. All cases are run and reported before a test fails, each in its own
//! process, since each uses another kernel, and a kernel that fails would break the others.
#![allow(unsafe_code, reason = "calls on device memory")]
#![allow(clippy::print_stdout, reason = "the test reports each case")]

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
#[path = "device/mod.rs"]
mod memory;
#[path = "cudnn_gpu/reference.rs"]
mod reference;

use cases::Case;
use firebrick_cuda::{CudaError, Cudnn};
use memory::Device;

#[test]
fn attention_equals_the_plain_computation() {
    run_all(&cases::kinds());
}

#[test]
fn packed_documents_may_have_any_arrangement() {
    run_all(&cases::arrangements());
}

/// Returns early unless the tests above started this process for one of their cases.
#[test]
fn the_case_of_this_process() {
    let Some(name) = isolate::case_of_this_process() else { return };
    let case = cases::kinds().into_iter().chain(cases::arrangements()).find(|case| case.name == name);
    let case = case.expect("the parent names one of the cases");
    let device = Device::find().expect("the parent has a driver");
    match check::check(device, &case, isolate::tell) {
        Ok(()) => isolate::tell_passed(),
        Err(report) => {
            isolate::tell(&report);
            panic!("{report}");
        }
    }
}

#[test]
fn a_case_that_crashes_fails_alone() {
    // No case has this name, so its process panics before it touches a device.
    let names = ["a case that crashes on purpose".to_string()];
    assert_eq!(isolate::run_each("the_case_of_this_process", &names, |_| false), names);
    let why = |report: &str| report.contains("the parent names one of the cases");
    assert!(isolate::run_each("the_case_of_this_process", &names, why).is_empty());
}

#[test]
fn no_two_cases_have_the_same_name() {
    let mut names: Vec<String> =
        cases::kinds().into_iter().chain(cases::arrangements()).map(|case| case.name).collect();
    names.sort();
    let count = names.len();
    names.dedup();
    assert_eq!(names.len(), count);
}

/// Returns the first device and its cuDNN, if both exist.
fn load() -> Option<(Device, Cudnn)> {
    let device = Device::find()?;
    match Cudnn::load(&device.context) {
        Ok(cudnn) => Some((device, cudnn)),
        Err(CudaError::CudnnNotFound { .. } | CudaError::LibrariesNotFound { .. }) => None,
        Err(error) => panic!("{error}"),
    }
}

fn run_all(cases: &[Case]) {
    let Some((device, cudnn)) = load() else { return };
    let device = device.context.driver().device(0).expect("device 0");
    println!("cuDNN {:?} on {device:?}", cudnn.version());
    // Hopper with a recent cuDNN supports all cases; other GPUs lack some, such as wide heads, and older versions packed
    // documents.
    let complete = device.compute_capability.0 == 9 && cudnn.version() >= (9, 18, 0);
    let names: Vec<String> = cases.iter().map(|case| case.name.clone()).collect();
    let unsupported = |report: &str| !complete && report.starts_with("cuDNN does not support");
    let failed = isolate::run_each("the_case_of_this_process", &names, unsupported);
    assert!(failed.is_empty(), "{} of {} failed: {}", failed.len(), names.len(), failed.join(", "));
}
