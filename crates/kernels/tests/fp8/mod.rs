//! Checks whether a card multiplies 8-bit floats, for the test programs that need to know.
//! Trade-off: next to `card` and not in it, since each program compiles everything in a module that it includes.

use super::card::Device;

/// Returns an error that names what the card lacks.
///
/// # Panics
/// If the driver does not report the card's properties although the device was opened.
pub(crate) fn has_fp8(device: &Device) -> Result<(), String> {
    let card = firebrick_cuda::Driver::load().and_then(|driver| driver.device(device.index));
    let capability = card.unwrap().compute_capability;
    if capability < (8, 9) {
        return Err(format!("8-bit floats need compute capability 8.9, this is {capability:?}"));
    }
    Ok(())
}
