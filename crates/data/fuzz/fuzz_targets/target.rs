//! Passes libFuzzer's bytes to the target with this binary's name, which src/targets describes.
//!
//! Trade-off: cargo warns that several binaries share this file.
#![no_main]

libfuzzer_sys::fuzz_target!(init: firebrick_data_fuzz::quiet(), |bytes: &[u8]| {
    firebrick_data_fuzz::run(env!("CARGO_BIN_NAME"), bytes)
});
