//! Feeds libFuzzer's bytes to the target of this binary's name, which src/targets.rs describes.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| firebrick_model_fuzz::run(env!("CARGO_BIN_NAME"), bytes));
