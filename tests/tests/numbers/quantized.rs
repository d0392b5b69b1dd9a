//! Folders whose weights are quantized already: values equal those that the libraries of the formats read, codes that agree with ours are kept, and
//! written folders equal those of bitsandbytes.

use std::collections::BTreeMap;
use std::fs::{copy, create_dir, read, read_to_string, write};
use std::path::Path;

use firebrick_kernels::backends::Flex;
use firebrick_kernels::{BlockScales, Kernels, Weight};
use firebrick_model::checkpoint::{TensorInfo, write_safetensors};
use firebrick_model::{
    BaseStorage, Bnb4bit, Companions, HfFolder, Merge, ModelConfig, ModelError, float_type_of, merge_adapter,
    quantize_folder,
};
use firebrick_precision::{FloatType, Format, QuantFormat};
use firebrick_tests::{
    FROZEN, Golden, MIXTURES, NF4, TRAINED, every_next_token, fixture, host, largest_difference, load,
    on_every_backend, upload,
};
use safetensors::Dtype;
use serde_json::{Value, json};
use tempfile::{TempDir, tempdir};

use crate::forward::{TOKENS, differences};
use crate::saved::save_new_adapter;

const BNB: [&str; 4] = ["quant-bnb-nf4-double-quant", "quant-bnb-nf4", "quant-bnb-fp4-double-quant", "quant-bnb-fp4"];
const OTHERS: [&str; 6] = [FP8[0], FP8[1], FP8[2], FP8[3], FP8[4], "quant-nvfp4"];
/// E4M3 with a scale per block, per matrix (under Mistral's names, then those of compressed-tensors, both with scales of activations), and per row;
/// last a Ministral 3 as published, with a vision tower in bf16.
const FP8: [&str; 5] =
    ["quant-fp8", "quant-fp8-tensor", "quant-fp8-static", "quant-fp8-channel", "quant-fp8-ministral3"];

/// A gpt-oss with experts in MXFP4, as published.
const MXFP4: &str = "quant-mxfp4-gpt-oss";

/// The base in NF4 without double quantization, frozen.
const PLAIN_NF4: BaseStorage = BaseStorage::Frozen(Format::Quantized(QuantFormat::Nf4 { double_quant: false }));

fn open(name: &str) -> HfFolder {
    HfFolder::open(&fixture(name)).expect("the fixture has weights")
}

#[test]
fn dequantized_weights_equal_those_of_the_defining_library_bit_for_bit() {
    for name in BNB.into_iter().chain(OTHERS) {
        let (folder, golden) = (open(name), Golden::open(name));
        let config = ModelConfig::read(&fixture(name)).expect("the fixture has a config");
        folder.check_complete(&config).expect("every part belongs to a weight");
        for weight in ["model.layers.0.self_attn.k_proj.weight", "model.layers.0.mlp.down_proj.weight"] {
            let shape = folder.info(weight).unwrap().shape;
            let values = folder.read_f32(weight, &shape).unwrap();
            assert_eq!(values, golden.f32s(&format!("weight.{weight}")), "{name}: {weight}");
        }
    }
}

#[test]
fn experts_in_mxfp4_keep_their_codes_and_have_the_values_of_transformers() {
    let (folder, golden) = (open(MXFP4), Golden::open(MXFP4));
    folder.check_complete(&ModelConfig::read(&fixture(MXFP4)).unwrap()).expect("every part belongs to a weight");
    for projection in ["gate_proj", "down_proj"] {
        let weight = format!("model.layers.0.mlp.experts.1.{projection}.weight");
        let shape = folder.info(&weight).unwrap().shape;
        assert_eq!(folder.read_f32(&weight, &shape).unwrap(), golden.f32s(&format!("weight.{weight}")), "{weight}");
        assert_eq!(folder.stored_format(&weight), Some(QuantFormat::Mxfp4));
    }
    // Whatever the others are: the recipe's format is not that of the experts.
    for storage in [FROZEN, NF4] {
        let model = load::<Flex>(MXFP4, None, storage);
        let formats = model.layers()[0].linears().filter(|linear| linear.path.contains(".experts.")).map(|linear| {
            let Weight::Quantized(weight) = linear.base.weight() else { panic!("{} is dense", linear.path) };
            (weight.format, matches!(weight.scales, BlockScales::Narrow { .. }))
        });
        assert_eq!(formats.collect::<Vec<_>>(), [(QuantFormat::Mxfp4, true); 3], "{storage:?}");
    }
}

fn every_format<B: Kernels>() {
    for name in BNB.into_iter().chain(OTHERS).chain([MXFP4]) {
        let (logits, loss) = differences::<B>(name, name, None, FROZEN);
        assert!(logits < 2e-4, "{name}: a logit differs by {logits:e}");
        assert!(loss < 1e-5, "{name}: the loss differs by {loss:e}");
    }
}

on_every_backend!(logits_of_quantized_folders_equal_those_of_transformers, every_format);

fn kept_codes<B: Kernels>() {
    for (name, storage) in [(BNB[0], NF4), (BNB[1], PLAIN_NF4)] {
        let (logits, loss) = differences::<B>(name, name, None, storage);
        assert!(logits < 2e-4, "{name}: a logit differs by {logits:e}");
        assert!(loss < 1e-5, "{name}: the loss differs by {loss:e}");
    }
}

on_every_backend!(logits_over_codes_that_are_kept_equal_those_of_transformers, kept_codes);

/// Finds the bytes of a tensor in a safetensors file.
fn place(bytes: &[u8], name: &str) -> usize {
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let infos: Value = serde_json::from_slice(&bytes[8..header]).unwrap();
    header + infos[name]["data_offsets"][0].as_u64().unwrap() as usize
}

/// Copies the NVFP4 folder; one weight gets a global scale that is a power of two, so that its codes can be kept, and a first block scale of this
/// sign.
fn nvfp4_folder(weight: &str, is_negative: bool) -> TempDir {
    let (temp, stored) = (tempdir().unwrap(), fixture("quant-nvfp4"));
    copy(stored.join("config.json"), temp.path().join("config.json")).unwrap();
    let mut bytes = read(stored.join("model.safetensors")).unwrap();
    let [scale, global] = ["_scale", "_global_scale"].map(|part| place(&bytes, &format!("{weight}{part}")));
    bytes[scale] |= if is_negative { 0x80 } else { 0 };
    bytes[global..][..4].copy_from_slice(&256.0f32.to_le_bytes());
    write(temp.path().join("model.safetensors"), bytes).unwrap();
    temp
}

#[test]
fn an_nvfp4_weight_with_a_negative_scale_is_quantized_from_its_values() {
    let weight = "model.layers.0.self_attn.k_proj.weight";
    let temps = [false, true].map(|is_negative| nvfp4_folder(weight, is_negative));
    let folders = temps.each_ref().map(|temp| HfFolder::open(temp.path()).unwrap());
    assert!(folders.iter().all(|folder| folder.stored_format(weight) == Some(QuantFormat::Nvfp4)));
    let shape = folders[0].info(weight).unwrap().shape;
    let [before, after] = folders.each_ref().map(|folder| folder.read_f32(weight, &shape).unwrap());
    assert!(before[..16].iter().zip(&after).all(|(before, after)| *before == -after) && before[16..] == after[16..]);

    let [positive, negative] = temps.each_ref().map(|temp| temp.path().to_str().unwrap());
    let batch = every_next_token(&Golden::open("quant-nvfp4").ids("input_ids"), TOKENS);
    let nvfp4 = BaseStorage::Frozen(Format::Quantized(QuantFormat::Nvfp4));
    let cases = [(negative, FROZEN), (negative, nvfp4), (positive, nvfp4)];
    let [dense, quantized, unchanged] = cases.map(|(folder, storage)| {
        let model = load::<Flex>(folder, None, storage);
        host(model.logits(&upload(&model, &batch)))
    });
    let (rounding, change) = (largest_difference(&quantized, &dense), largest_difference(&quantized, &unchanged));
    assert!(
        rounding < 0.2 * change,
        "rounding to NVFP4 changes logits by {rounding:e}, the scale's sign by {change:e}"
    );
}

#[test]
fn a_base_that_is_quantized_while_it_is_read_is_the_one_that_bitsandbytes_saved() {
    let batch = every_next_token(&Golden::open(BNB[0]).ids("input_ids"), TOKENS);
    for (name, storage) in [(BNB[0], NF4), (BNB[1], PLAIN_NF4)] {
        let [stored, quantized] = [name, "quant-source"].map(|name| {
            let model = load::<Flex>(name, None, storage);
            host(model.logits(&upload(&model, &batch)))
        });
        assert_eq!(stored, quantized, "{name}");
    }
}

/// Writes a folder with the values of a quantized one, whose other tensors keep their bytes.
fn dequantized(name: &str) -> TempDir {
    let (temp, folder) = (tempdir().unwrap(), open(name));
    let infos = folder.names().map(|tensor| (tensor.to_owned(), folder.info(tensor).unwrap())).collect();
    let bytes = |tensor: &str| folder.read(tensor).map(|stored| stored.bytes);
    write_safetensors(&temp.path().join("model.safetensors"), &infos, bytes).unwrap();
    let mut config = config(&fixture(name));
    config.as_object_mut().unwrap().remove("quantization_config");
    write(temp.path().join("config.json"), config.to_string()).unwrap();
    temp
}

#[test]
fn a_base_in_nf4_of_an_fp8_folder_is_that_of_its_dequantized_values() {
    for name in FP8 {
        let plain = dequantized(name);
        let batch = every_next_token(&Golden::open(name).ids("input_ids"), TOKENS);
        let [from_codes, from_values, dense] = [(name, NF4), (plain.path().to_str().unwrap(), NF4), (name, FROZEN)]
            .map(|(folder, storage)| {
                let model = load::<Flex>(folder, None, storage);
                host(model.logits(&upload(&model, &batch)))
            });
        assert_eq!(from_codes, from_values, "{name}");
        assert_ne!(from_codes, dense, "{name}: NF4 rounds");
    }
}

/// Rounds to nearest, ties to even.
fn rounded_to_bf16(value: f32) -> f32 {
    let bits = value.to_bits();
    f32::from_bits((bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff_0000)
}

#[test]
fn what_is_saved_and_merged_of_an_fp8_folder_is_bf16_without_quantization() {
    for name in &FP8[1..] {
        let (temp, base, folder) = (tempdir().unwrap(), fixture(name), open(name));
        let [adapter, merged, saved] = ["adapter", "merged", "saved"].map(|name| temp.path().join(name));
        let dtype = float_type_of(&ModelConfig::read(&base).unwrap());
        save_new_adapter(&base, &adapter);
        let companions = Companions { from: base.clone(), ..Companions::default() };
        let merge = Merge {
            model: &base,
            adapter: &adapter,
            requantized: None,
            dtype: None,
            bnb_4bit: None,
            mxfp4: false,
            companions,
        };
        assert_eq!((merge_adapter(&merge, &merged).unwrap().dtype, dtype), (FloatType::Bf16, FloatType::Bf16));
        load::<Flex>(name, None, TRAINED).save_model(Default::default(), &saved, dtype, None, None).unwrap();
        for written in [merged, saved] {
            let (settings, written) = (config(&written), HfFolder::open(&written).unwrap());
            assert_eq!((settings.get("quantization_config"), &settings["dtype"]), (None, &json!("bfloat16")), "{name}");
            assert!(written.quantized_weights().is_empty() && written.names().eq(folder.names()), "{name}");
            for tensor in folder.names() {
                // B starts at zero, so the values of the base are only rounded.
                let info = written.info(tensor).unwrap();
                let values = folder.read_f32(tensor, &info.shape).unwrap();
                let rounded: Vec<f32> = values.into_iter().map(rounded_to_bf16).collect();
                assert_eq!(info.dtype, Dtype::BF16, "{name}: {tensor}");
                assert_eq!(written.read_f32(tensor, &info.shape).unwrap(), rounded, "{name}: {tensor}");
            }
        }
    }
}

#[test]
fn scales_of_activations_are_named_and_left_out() {
    let stored = FP8.map(|name| open(name).quantized_weights().into_keys().collect::<Vec<_>>().join(" and "));
    let unused = "fp8 with scales of activations, which are not used";
    assert_eq!(stored, ["fp8 in blocks of 128 x 128", unused, unused, "fp8 with a scale per row", unused]);
}

fn try_quantized(from: &Path, to: &Path, format: Bnb4bit) -> Result<usize, ModelError> {
    let companions = Companions {
        from: from.to_owned(),
        chat_template: None,
        chat_settings: Default::default(),
        tokenizer: Default::default(),
    };
    quantize_folder(from, to, format, &companions)
}

fn quantized(from: &Path, to: &Path, format: Bnb4bit) -> usize {
    try_quantized(from, to, format).unwrap()
}

#[test]
fn a_mixture_of_experts_is_not_written_in_4_bits() {
    let temp = tempdir().unwrap();
    for name in MIXTURES {
        let message = try_quantized(&fixture(name), &temp.path().join(name), Bnb4bit::ALL[0]).unwrap_err().to_string();
        assert!(message.contains("a mixture of experts") && message.contains("transformers 5"), "{message}");
        assert!(!temp.path().join(name).exists());
    }
}

fn config(dir: &Path) -> Value {
    serde_json::from_str(&read_to_string(dir.join("config.json")).unwrap()).unwrap()
}

fn quantization_config(dir: &Path) -> Value {
    config(dir)["quantization_config"].clone()
}

#[test]
fn written_folders_have_the_bytes_that_transformers_and_bitsandbytes_write() {
    let temp = tempdir().unwrap();
    for (name, format) in BNB.into_iter().zip(Bnb4bit::ALL) {
        let theirs = fixture(name);
        // Weights that are already in this format are written unchanged. The codes of fp4 are those of the CUDA kernel, not of the CPU's.
        let is_nf4 = format.name().starts_with("nf4");
        for source in [is_nf4.then(|| fixture("quant-source")), Some(theirs.clone())].into_iter().flatten() {
            let ours = temp.path().join(format!("{name}-{}", source.file_name().unwrap().to_string_lossy()));
            assert_eq!(quantized(&source, &ours, format), 7);
            let [written, expected] = [&ours, &theirs].map(|dir| read(dir.join("model.safetensors")).unwrap());
            assert!(written == expected, "{name} from {}", source.display());
            assert_eq!(quantization_config(&ours), quantization_config(&theirs));
        }
    }
}

#[test]
fn modules_that_a_folder_leaves_unquantized_stay_so() {
    let name = "model.layers.0.self_attn.o_proj.weight";
    let temp = tempdir().unwrap();
    let dir = temp.path().join("mixed");
    create_dir(&dir).unwrap();
    copy(fixture(BNB[0]).join("config.json"), dir.join("config.json")).unwrap();
    // The file of bitsandbytes with one unquantized projection.
    let [source, bnb] = ["quant-source", BNB[0]].map(|name| {
        let bytes = read(fixture(name).join("model.safetensors")).unwrap();
        safetensors::SafeTensors::deserialize(&bytes)
            .unwrap()
            .tensors()
            .into_iter()
            .map(|(name, view)| {
                (name, (TensorInfo { dtype: view.dtype(), shape: view.shape().to_vec() }, view.data().to_vec()))
            })
            .collect::<BTreeMap<_, _>>()
    });
    let mut tensors = bnb;
    tensors.retain(|part, _| !part.starts_with(name));
    tensors.insert(name.to_owned(), source[name].clone());
    let infos = tensors.iter().map(|(name, (info, _))| (name.clone(), info.clone())).collect();
    let bytes = |name: &str| Ok(tensors[name].1.clone());
    write_safetensors(&dir.join("model.safetensors"), &infos, bytes).unwrap();

    let batch = every_next_token(&Golden::open(BNB[0]).ids("input_ids"), TOKENS);
    let path = dir.display().to_string();
    let [kept, dequantized] = [NF4, FROZEN].map(|storage| {
        let model = load::<Flex>(&path, None, storage);
        host(model.logits(&upload(&model, &batch)))
    });
    let difference = largest_difference(&kept, &dequantized);
    assert!(difference < 1e-4, "the projection was quantized: {difference:e}");

    let again = temp.path().join("again");
    assert_eq!(quantized(&dir, &again, Bnb4bit::ALL[0]), 6);
    assert!(read(dir.join("model.safetensors")).unwrap() == read(again.join("model.safetensors")).unwrap());
    let skipped = json!(["model.layers.0.self_attn.o_proj", "lm_head"]);
    assert_eq!(quantization_config(&again)["llm_int8_skip_modules"], skipped);
}
