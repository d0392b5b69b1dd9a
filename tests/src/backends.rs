//! Runs a generic test function on each backend that needs no card, and selects what a test skips on wgpu.
//!
//! Trade-off: CUDA is left out; its tests are in `tests/gpu`, with their own tolerances.

use firebrick_kernels::Kernels;

use crate::{FAMILIES, SAMPLED, is_slow, some_in_turn};

/// Tests `function::<B>()` on flex and candle, if they are compiled in, and makes a function `name::on_wgpu` for `share_wgpu`.
#[macro_export]
macro_rules! on_every_backend {
    ($(#[$meta:meta])* $name:ident, $function:ident) => {
        $(#[$meta])*
        pub(crate) mod $name {
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
            pub(crate) fn on_wgpu() {
                super::$function::<firebrick_kernels::backends::Wgpu>();
            }
        }
    };
}

/// Makes a test of several of `on_every_backend` on wgpu, as `file::name`. They share a process, because each process opens the device and compiles its
/// shaders again, which with a software driver takes most of the time. If wgpu finds no adapter, the test prints that and returns; with the variable
/// `CI` set it fails.
#[macro_export]
macro_rules! share_wgpu {
    ($test:ident, $($file:ident::$name:ident),+ $(,)?) => {
        #[cfg(feature = "wgpu")]
        #[test]
        fn $test() {
            if $crate::has_wgpu() {
                $crate::run_all(&[$((concat!(stringify!($file), "::", stringify!($name)), $file::$name::on_wgpu)),+]);
            }
        }
    };
}

/// Runs tests of one process, and names those that failed, whose reasons were printed.
///
/// # Panics
/// If one failed.
pub fn run_all(tests: &[(&str, fn())]) {
    let failed = tests.iter().filter(|(_, test)| std::panic::catch_unwind(test).is_err());
    let failed: Vec<&str> = failed.map(|(name, _)| *name).collect();
    assert!(failed.is_empty(), "{failed:?} failed on wgpu");
}

/// Returns whether wgpu finds an adapter. Prints why not.
///
/// # Panics
/// Without an adapter if the variable `CI` is set: CI must not pass unnoticed without a software Vulkan driver.
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

/// Returns whether `B` is wgpu. Without a GPU, its launches take a software driver many times as long as other backends.
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

/// Returns the families that a test takes on `B`: all of them, but on wgpu those that differ most, unless every case is requested.
pub fn families<B: Kernels>() -> Vec<&'static str> {
    if is_wgpu::<B>() && !is_slow() { SAMPLED.to_vec() } else { FAMILIES.to_vec() }
}

/// Returns whether `B` is flex, the backend that takes every case.
fn is_flex<B: Kernels>() -> bool {
    #[cfg(feature = "flex")]
    {
        std::any::TypeId::of::<B>() == std::any::TypeId::of::<firebrick_kernels::backends::Flex>()
    }
    #[cfg(not(feature = "flex"))]
    {
        false
    }
}

/// Returns the cases for a test's `turn`-th model: all of them, but one on other backends than flex, so that there its models take the cases in turn,
/// unless every case is requested. For cases that launch the same kernels and differ on the host alone, such as recompute policies.
pub fn in_turn<B: Kernels, T: Clone>(cases: &[T], turn: usize) -> Vec<T> {
    if is_flex::<B>() { cases.to_vec() } else { some_in_turn(cases, 1, turn) }
}
