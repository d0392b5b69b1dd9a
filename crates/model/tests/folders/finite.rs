//! No NaN and no infinity passes: neither in a folder that is read, nor in one that is written.
//!
//! Every float tensor of every fixture is damaged in turn, in the file: a third of them, and all with `cargo xtask test --slow`.

use std::fmt::Debug;
use std::fs::{copy, create_dir_all, read, read_dir, write};
use std::path::Path;

use firebrick_arch::folder::{ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE, TOKENIZER_FILE, WEIGHTS_FILE};
use firebrick_arch::{CONFIG_FILE, is_other_part};
use firebrick_model::peft::read_adapter;
use firebrick_model::{GgufEnds, HfFolder, Merge, ModelError, merge_adapter, write_gguf};
use firebrick_precision::FloatType;
use safetensors::{Dtype, SafeTensors};
use tempfile::tempdir;

use crate::{fixture, plain_merge, stored, write_stored};

/// Scales of activations, which no GEMM reads here. The other parts of vision checkpoints are copied as they are.
const NOT_READ: [&str; 2] = ["input_scale", "activation_scale"];

/// Copies the files of `from` that exist.
fn copied(from: &Path, to: &Path, files: &[&str]) {
    create_dir_all(to).unwrap();
    for file in files.iter().filter(|file| from.join(file).is_file()) {
        copy(from.join(file), to.join(file)).unwrap();
    }
}

/// Returns the tensors of a file that hold floats, each with the file in which one value of it is a NaN, and that in which it is an infinity.
fn damaged(file: &[u8]) -> Vec<(String, Vec<u8>)> {
    let mut damaged = Vec::new();
    for (name, view) in SafeTensors::deserialize(file).unwrap().tensors() {
        let bad: &[&[u8]] = match view.dtype() {
            _ if is_other_part(&name) || NOT_READ.iter().any(|part| name.ends_with(part)) => &[],
            Dtype::F32 => &[&[0, 0, 0xC0, 0x7F], &[0, 0, 0x80, 0xFF]],
            Dtype::BF16 => &[&[0xC0, 0x7F], &[0x80, 0xFF]],
            Dtype::F16 => &[&[0, 0x7E], &[0, 0xFC]],
            Dtype::F8_E4M3 => &[&[0x7F]],
            Dtype::U8 if name.ends_with("_scales") => &[&[0xFF]],
            _ => &[],
        };
        let start = view.data().as_ptr() as usize - file.as_ptr() as usize;
        for bad in bad {
            let element = name.len() * 7919 % (view.data().len() / bad.len());
            let mut bytes = file.to_vec();
            bytes[start + element * bad.len()..][..bad.len()].copy_from_slice(bad);
            damaged.push((name.clone(), bytes));
        }
    }
    damaged
}

/// Returns the distance of the damaged tensors that are read: NaN and infinity alternate in them.
fn step() -> usize {
    if std::env::var_os("FIREBRICK_SLOW_TESTS").is_some() { 1 } else { 3 }
}

/// Reads every fixture that has this file, as it is and damaged in each way, which has to be refused. Returns how often it was.
fn refusals(file: &str, read_folder: impl Fn(&Path) -> Result<(), ModelError>) -> usize {
    let mut count = 0;
    let folders = read_dir(fixture("")).unwrap().map(|entry| entry.unwrap().path());
    for fixture in folders.filter(|folder| folder.join(file).is_file()) {
        let temp = tempdir().unwrap();
        copied(&fixture, temp.path(), &[file, ADAPTER_CONFIG_FILE]);
        read_folder(temp.path()).unwrap();
        for (name, bytes) in damaged(&read(fixture.join(file)).unwrap()).into_iter().step_by(step()) {
            write(temp.path().join(file), bytes).unwrap();
            assert!(read_folder(temp.path()).is_err(), "{}: `{name}`", fixture.display());
            count += 1;
        }
    }
    count
}

/// Reads all tensors of the model, each in every way.
fn read_all(folder: &HfFolder) -> Result<(), ModelError> {
    for name in folder.names() {
        folder.read_f32(name, &folder.info(name)?.shape)?;
        folder.read(name)?;
        folder.read_quantized(name)?;
    }
    Ok(())
}

#[test]
fn values_that_are_not_finite_are_refused() {
    let count = refusals(WEIGHTS_FILE, |folder| read_all(&HfFolder::open(folder)?));
    assert!(count > 2_000 / step(), "{count} damaged tensors of models");
    let is_named = |error: &ModelError| assert!(matches!(error, ModelError::NotFiniteWeight { .. }), "{error}");
    let count = refusals(ADAPTER_WEIGHTS_FILE, |folder| read_adapter(folder).map(drop).inspect_err(is_named));
    assert!(count > 500 / step(), "{count} damaged tensors of adapters");
}

/// Writes an adapter of tiny-llama whose B is this large everywhere; A stays as it is.
fn adapter_of_size(to: &Path, size: f32) {
    let from = fixture("tiny-llama-lora");
    copied(&from, to, &[ADAPTER_CONFIG_FILE]);
    let mut tensors = stored(&from.join(ADAPTER_WEIGHTS_FILE));
    for (_, tensor) in tensors.iter_mut().filter(|(name, _)| name.contains("lora_B")) {
        tensor.bytes = size.to_le_bytes().repeat(tensor.bytes.len() / 4);
    }
    write_stored(&to.join(ADAPTER_WEIGHTS_FILE), &tensors);
}

/// Checks that something is there if its values fit the format, and that it was refused otherwise.
fn assert_written(result: &Result<impl Debug, ModelError>, to: &Path, fits: bool) {
    assert_eq!((result.is_ok(), to.exists()), (fits, fits), "{}: {result:?}", to.display());
    assert!(matches!(result, Ok(_) | Err(ModelError::NotWritable { .. })), "{}: {result:?}", to.display());
}

#[test]
fn values_too_large_for_the_format_are_never_written() {
    let temp = tempdir().unwrap();
    let (adapter, model) = (temp.path().join("adapter"), temp.path().join("model"));
    let files = [CONFIG_FILE, WEIGHTS_FILE, TOKENIZER_FILE, "tokenizer_config.json"];
    copied(&fixture("tiny-llama"), &model, &files);
    for (size, dtype, fits) in [
        (1e5, FloatType::F16, false),
        (1e5, FloatType::Bf16, true),
        (1e30, FloatType::Bf16, true),
        (f32::MAX, FloatType::Bf16, false),
        (f32::MAX, FloatType::F32, false),
    ] {
        adapter_of_size(&adapter, size);
        let to = temp.path().join(format!("{size:e}-{}", dtype.name()));
        let merge = Merge { dtype: Some(dtype), ..plain_merge(&model, &adapter) };
        assert_written(&merge_adapter(&merge, &to), &to, fits);
    }
    // Scales of blocks are halves, at most 65504 times the largest code, and so are minima (q5_1).
    for (name, fits) in
        [("1e5-bfloat16", ["bf16", "q8_0", "q4_0", "q4_k_m", "q6_k"].as_slice()), ("1e30-bfloat16", &["bf16"])]
    {
        for kind in ["f16", "bf16", "q8_0", "q4_0", "q4_k_m", "q5_k_m", "q6_k"] {
            let to = temp.path().join(format!("{name}-{kind}.gguf"));
            let written = write_gguf(&temp.path().join(name), &to, kind.parse().unwrap(), GgufEnds::default());
            assert_written(&written, &to, fits.contains(&kind));
        }
    }
}
