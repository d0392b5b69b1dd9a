//! Feeds libFuzzer's bytes to the target `hub_listing`, which src/targets describes.
#![no_main]

libfuzzer_sys::fuzz_target!(init: firebrick_data_fuzz::quiet(), |bytes: &[u8]| firebrick_data_fuzz::run("hub_listing", bytes));
