//! Feeds libFuzzer's bytes to the target `csv`, which src/targets describes.
#![no_main]

libfuzzer_sys::fuzz_target!(init: firebrick_data_fuzz::quiet(), |bytes: &[u8]| firebrick_data_fuzz::run("csv", bytes));
