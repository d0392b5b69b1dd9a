//! Whether a backend finds a device, asked without starting it where that could panic.

/// Looks for a device that wgpu can compute on.
///
/// # Errors
/// What was looked for, in the library's words.
#[cfg(feature = "wgpu")]
pub fn wgpu() -> Result<(), String> {
    crate::backends::wgpu::probe()
}

/// Looks for an NVIDIA driver and card.
///
/// # Errors
/// What was looked for, in the library's words.
#[cfg(feature = "cuda")]
pub fn cuda() -> Result<(), String> {
    crate::backends::cuda::probe()
}
