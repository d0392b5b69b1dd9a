//! One test of a generic function for each backend that runs without a card.
//!
//! Trade-off: CUDA is left out; its tests are in `tests/gpu.rs`, with its own tolerances.

/// Tests `function::<B>()` on flex, on candle and on wgpu, as far as they are compiled. Where wgpu finds no adapter its test prints that
/// and returns; with the variable `CI` set it fails.
#[macro_export]
macro_rules! on_every_backend {
    ($(#[$meta:meta])* $name:ident, $function:ident) => {
        $(#[$meta])*
        mod $name {
            #[cfg(feature = "flex")]
            #[test]
            fn on_flex() {
                super::$function::<firebrick_kernels::backends::Flex>();
            }

            #[cfg(feature = "candle")]
            #[test]
            fn on_candle() {
                super::$function::<firebrick_kernels::backends::Candle>();
            }

            #[cfg(feature = "wgpu")]
            #[test]
            fn on_wgpu() {
                if $crate::has_wgpu() {
                    super::$function::<firebrick_kernels::backends::Wgpu>();
                }
            }
        }
    };
}

/// Whether wgpu finds an adapter. Prints why not.
///
/// # Panics
/// Without an adapter where the variable `CI` is set: where tests decide over a change, a missing software Vulkan driver must not pass
/// unseen.
#[cfg(feature = "wgpu")]
#[expect(clippy::print_stderr, reason = "a test that does not run must be seen")]
pub fn has_wgpu() -> bool {
    match firebrick_kernels::backends::BackendKind::Wgpu.probe() {
        Ok(()) => true,
        Err(reason) => {
            assert!(std::env::var_os("CI").is_none(), "wgpu finds no adapter: {reason}");
            eprintln!("SKIPPED on wgpu: {reason}");
            false
        }
    }
}
