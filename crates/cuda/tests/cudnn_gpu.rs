//! Attention by cuDNN on a GPU compared with a plain computation on the host.
//!
//! Without a driver or cuDNN, the test returns early. All cases are run and reported before it fails. A kernel that ends in an error leaves a context in
//! which nothing else can run, so the first failure may be the cause of all later ones.
#![allow(unsafe_code, reason = "calls on device memory")]
#![allow(clippy::print_stdout, reason = "the test reports each case")]

#[path = "cudnn_gpu/cases.rs"]
mod cases;
#[path = "cudnn_gpu/check.rs"]
mod check;
mod device;
#[path = "cudnn_gpu/reference.rs"]
mod reference;

use device::Device;
use firebrick_cuda::{CudaError, Cudnn};

#[test]
fn attention_equals_the_plain_computation() {
    let Some((device, cudnn)) = load() else { return };
    let card = device.context.driver().device(0).expect("device 0");
    println!("cuDNN {:?} on {card:?}", cudnn.version());
    // Hopper with a recent cuDNN supports all cases; other GPUs lack some, such as wide heads, and older versions packed
    // documents. No version has to have kernels that add in a fixed order.
    let is_complete = card.compute_capability.0 == 9 && cudnn.version() >= (9, 18, 0);
    let (cases, mut failed) = (cases::all(), Vec::new());
    cases.iter().for_each(|case| cudnn.begin(&case.shape, &case.shape));
    for case in &cases {
        let may_lack = !is_complete || case.shape.in_order;
        match check::check(&device, &cudnn, case) {
            Ok(report) => println!("PASS {}: {report}", case.name),
            Err(report) if may_lack && report.starts_with("cuDNN does not support") => {
                println!("SKIP {}: {report}", case.name);
            }
            Err(report) => {
                println!("FAIL {}: {report}", case.name);
                failed.push(&*case.name);
            }
        }
    }
    assert!(failed.is_empty(), "{} of {} failed: {}", failed.len(), cases.len(), failed.join(", "));
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
