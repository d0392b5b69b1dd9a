//! One test of a generic function for each backend that runs without a card, and what a test leaves out on wgpu.
//!
//! Trade-off: CUDA is left out; its tests are in `tests/gpu.rs`, with its own tolerances.

use firebrick_kernels::Kernels;

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

/// Whether `B` is wgpu. Without a GPU, each of its launches takes a software driver many times as long as the other backends take.
pub fn is_wgpu<B: Kernels>() -> bool {
    #[cfg(feature = "wgpu")]
    {
        std::any::TypeId::of::<B>() == std::any::TypeId::of::<firebrick_kernels::backends::Wgpu>()
    }
    #[cfg(not(feature = "wgpu"))]
    {
        false
    }
}

/// The cases that a test tries with its `turn`-th model: all of them, but on wgpu one, so that there its models take the cases in turn.
/// For cases that launch the same kernels and that the host alone distinguishes, such as what is recomputed.
pub fn in_turn<B: Kernels, T: Clone>(cases: &[T], turn: usize) -> Vec<T> {
    if is_wgpu::<B>() { vec![cases[turn % cases.len()].clone()] } else { cases.to_vec() }
}
