//! No NaN and no infinity passes: neither in a folder that is read, nor in one that is written.
//!
//! Every float tensor of every fixture is damaged in turn, in the file.
//! Trade-off: one value per tensor; that it is found at every place is tested with the function that looks for it.

use std::fs::{copy, create_dir_all, read, read_dir, write};
use std::path::{Path, PathBuf};

use firebrick_arch::folder::{ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE, TOKENIZER_FILE, WEIGHTS_FILE};
use firebrick_arch::{CONFIG_FILE, is_other_part};
use firebrick_model::peft::read_adapter;
use firebrick_model::{Companions, GgufEnds, HfFolder, Merge, ModelError, merge_adapter, write_gguf};
use firebrick_precision::FloatType;
use safetensors::{Dtype, SafeTensors};
use tempfile::tempdir;

/// Scales of activations, which no GEMM reads here. The other parts of vision checkpoints are copied as they are.
const NOT_READ: [&str; 2] = ["input_scale", "activation_scale"];

fn fixtures(file: &str) -> Vec<PathBuf> {
    let all = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures");
    let mut found: Vec<_> = read_dir(all).unwrap().map(|entry| entry.unwrap().path()).collect();
    found.retain(|folder| folder.join(file).is_file());
    found.sort();
    found
}

/// Copies the files of `from` that exist.
fn copied(from: &Path, to: &Path, files: &[&str]) {
    create_dir_all(to).unwrap();
    for file in files.iter().filter(|file| from.join(file).is_file()) {
        copy(from.join(file), to.join(file)).unwrap();
    }
}

/// Returns the tensors of a file that hold floats, each with the file in which a value of it is `bits` of infinity or NaN.
fn damaged(file: &[u8], is_nan: bool) -> Vec<(String, Vec<u8>)> {
    let tensors = SafeTensors::deserialize(file).unwrap();
    let damage = |(name, view): (String, safetensors::tensor::TensorView<'_>)| {
        let bad: &[u8] = match (view.dtype(), is_nan) {
            (Dtype::F32, true) => &[0, 0, 0xC0, 0x7F],
            (Dtype::F32, false) => &[0, 0, 0x80, 0xFF],
            (Dtype::BF16, true) => &[0xC0, 0x7F],
            (Dtype::BF16, false) => &[0x80, 0xFF],
            (Dtype::F16, true) => &[0, 0x7E],
            (Dtype::F16, false) => &[0, 0xFC],
            (Dtype::F8_E4M3, true) => &[0x7F],
            (Dtype::U8, true) if name.ends_with("_scales") => &[0xFF],
            _ => return None,
        };
        let start = view.data().as_ptr() as usize - file.as_ptr() as usize;
        let element = name.len() * 7919 % (view.data().len() / bad.len());
        let mut bytes = file.to_vec();
        bytes[start + element * bad.len()..][..bad.len()].copy_from_slice(bad);
        Some((name, bytes))
    };
    tensors.tensors().into_iter().filter_map(damage).collect()
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
fn a_base_with_a_value_that_is_not_finite_is_refused_by_name() {
    let mut count = 0;
    for fixture in fixtures(WEIGHTS_FILE) {
        let temp = tempdir().unwrap();
        let file = read(fixture.join(WEIGHTS_FILE)).unwrap();
        write(temp.path().join(WEIGHTS_FILE), &file).unwrap();
        read_all(&HfFolder::open(temp.path()).unwrap()).unwrap();
        for is_nan in [true, false] {
            for (name, bytes) in damaged(&file, is_nan) {
                if is_other_part(&name) || NOT_READ.iter().any(|part| name.ends_with(part)) {
                    continue;
                }
                write(temp.path().join(WEIGHTS_FILE), bytes).unwrap();
                let read = HfFolder::open(temp.path()).and_then(|folder| read_all(&folder));
                assert!(read.is_err(), "{}: `{name}` {is_nan}", fixture.display());
                count += 1;
            }
        }
    }
    assert!(count > 2_000, "{count} damaged tensors");
}

#[test]
fn an_adapter_with_a_value_that_is_not_finite_is_refused_by_name() {
    let mut count = 0;
    for fixture in fixtures(ADAPTER_WEIGHTS_FILE) {
        let temp = tempdir().unwrap();
        copied(&fixture, temp.path(), &[ADAPTER_CONFIG_FILE]);
        for is_nan in [true, false] {
            for (name, bytes) in damaged(&read(fixture.join(ADAPTER_WEIGHTS_FILE)).unwrap(), is_nan) {
                write(temp.path().join(ADAPTER_WEIGHTS_FILE), bytes).unwrap();
                let error = read_adapter(temp.path()).unwrap_err();
                assert!(matches!(error, ModelError::NotFiniteWeight { .. }), "{}: {name}: {error}", fixture.display());
                count += 1;
            }
        }
    }
    assert!(count > 500, "{count} damaged tensors");
}

/// Writes an adapter of tiny-llama whose B is this large everywhere; A stays as it is.
fn adapter_of_size(to: &Path, size: f32) {
    let fixture = fixtures(ADAPTER_WEIGHTS_FILE).into_iter().find(|path| path.ends_with("tiny-llama-lora")).unwrap();
    copied(&fixture, to, &[ADAPTER_CONFIG_FILE]);
    let mut file = read(fixture.join(ADAPTER_WEIGHTS_FILE)).unwrap();
    let places: Vec<_> = {
        let tensors = SafeTensors::deserialize(&file).unwrap();
        let of_b = tensors.tensors().into_iter().filter(|(name, _)| name.contains("lora_B"));
        of_b.map(|(_, view)| (view.data().as_ptr() as usize - file.as_ptr() as usize, view.data().len())).collect()
    };
    for (start, length) in places {
        file[start..][..length].chunks_exact_mut(4).for_each(|value| value.copy_from_slice(&size.to_le_bytes()));
    }
    write(to.join(ADAPTER_WEIGHTS_FILE), file).unwrap();
}

#[test]
fn values_too_large_for_the_format_are_never_written() {
    let temp = tempdir().unwrap();
    let (adapter, model) = (temp.path().join("adapter"), temp.path().join("model"));
    let fixture = fixtures(CONFIG_FILE).into_iter().find(|path| path.ends_with("tiny-llama")).unwrap();
    copied(&fixture, &model, &[CONFIG_FILE, WEIGHTS_FILE, TOKENIZER_FILE, "tokenizer_config.json"]);
    for (size, dtype, fits) in [
        (1e5, FloatType::F16, false),
        (1e5, FloatType::Bf16, true),
        (1e30, FloatType::Bf16, true),
        (f32::MAX, FloatType::Bf16, false),
        (f32::MAX, FloatType::F32, false),
    ] {
        adapter_of_size(&adapter, size);
        let to = temp.path().join(format!("{size:e}-{}", dtype.name()));
        let merge = Merge {
            model: &model,
            adapter: &adapter,
            requantized: None,
            dtype: Some(dtype),
            bnb_4bit: None,
            mxfp4: false,
            companions: Companions { from: model.clone(), ..Companions::default() },
        };
        match merge_adapter(&merge, &to) {
            Ok(_) => assert!(fits && to.is_dir(), "{size} in {dtype:?}"),
            Err(error) => {
                assert!(!fits && matches!(error, ModelError::NotWritable { .. }), "{size} in {dtype:?}: {error}");
                assert!(!to.exists());
            }
        }
    }
    // Scales of blocks are halves, at most 65504 times the largest code, and so are minima (q5_1).
    for (name, fits) in
        [("1e5-bfloat16", ["bf16", "q8_0", "q4_0", "q4_k_m", "q6_k"].as_slice()), ("1e30-bfloat16", &["bf16"])]
    {
        for kind in ["f16", "bf16", "q8_0", "q4_0", "q4_k_m", "q5_k_m", "q6_k"] {
            let file = temp.path().join(format!("{name}-{kind}.gguf"));
            let written = write_gguf(&temp.path().join(name), &file, kind.parse().unwrap(), GgufEnds::default());
            assert_eq!(written.is_ok(), fits.contains(&kind), "{name} {kind}: {written:?}");
            assert_eq!(file.exists(), written.is_ok());
            assert!(written.map_or_else(|error| matches!(error, ModelError::NotWritable { .. }), |_| true));
        }
    }
}
