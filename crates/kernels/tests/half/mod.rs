//! The 16-bit formats of a card, for the test programs that run in them.
//! Trade-off: next to `card` and not in it, since each program compiles everything in a module that it includes.

use burn_tensor::DType;

use super::card::Device;

/// Returns the 16-bit formats that a card computes in: bf16 only from compute capability 8.0 on.
///
/// # Panics
/// If the driver does not report the card's properties although the device was opened.
pub(crate) fn halves(device: &Device) -> &'static [DType] {
    let card = firebrick_cuda::Driver::load().and_then(|driver| driver.device(device.index));
    if card.unwrap().compute_capability < (8, 0) { &[DType::F16] } else { &[DType::BF16, DType::F16] }
}

/// Returns the 16-bit format in which a card usually computes.
pub(crate) fn half(device: &Device) -> DType {
    halves(device)[0]
}
