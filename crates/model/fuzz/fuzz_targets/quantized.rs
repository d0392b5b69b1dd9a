//! Feeds libFuzzer's bytes to the target `quantized`, which src/targets.rs describes.
//!
//! Trade-off: one program per target, because libFuzzer runs one.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| firebrick_model_fuzz::run("quantized", bytes));
