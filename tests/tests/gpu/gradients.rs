//! Gradients on a card in bf16 (float16 on cards without it) and FP8, tensor by tensor, against f32 on the same card.
//!
//! With `FIREBRICK_TEST_MODEL` the model is that folder (a Hugging Face model with its tokenizer) and the tokens are real text; without it, a small
//! random model and synthetic tokens. With `FIREBRICK_TEST_GRADIENTS` full gradients are compared with PyTorch's in that file
//! (`golden/make_model_gradients.py`), ours in f32 as well.
//! Trade-off: without the file, f32 is our engine's, which other tests compare with the CPU.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use burn_tensor::DType;
use firebrick_arch::{LoraConfig, TargetModules};
use firebrick_data::{Batch, Tokenizer};
use firebrick_kernels::backends::Cuda;
use firebrick_kernels::{GemmFormat, Parameter};
use firebrick_model::{BaseStorage, BuildOptions, Decoder, HfFolder, ModelConfig, PassOptions};
use firebrick_precision::difference;
use firebrick_tests::{FROZEN, Golden, NF4, TRAINED, fixture, packed};

use super::{half, has_card, has_fp8, loss_and_gradients, random_model, sequence_of};

/// The minimum cosine, its minimum mean, and the maximum relative difference of a norm from f32.
struct Bounds {
    lowest: f64,
    mean: f64,
    norms: f64,
}

/// Ours in f32 next to PyTorch's.
const IN_F32: Bounds = Bounds { lowest: 0.9999, mean: 0.9999, norms: 0.005 };
/// bf16 on a real model. PyTorch's own bf16 has 0.995, 0.9993 and 0.05 on SmolLM2-135M.
const IN_BF16: Bounds = Bounds { lowest: 0.995, mean: 0.999, norms: 0.06 };
/// bf16 with random weights and 200 tokens, which average over less.
const IN_BF16_RANDOM: Bounds = Bounds { lowest: 0.99, mean: 0.99, norms: 0.06 };
/// PyTorch with the same roundings to E4M3 and f32 otherwise has 0.68, 0.967 and 0.66 (`benches/results/smollm2-fp8-gradients.json`).
const IN_FP8: Bounds = Bounds { lowest: 0.6, mean: 0.95, norms: 0.8 };
/// The same for adapters.
const IN_FP8_LORA: Bounds = Bounds { lowest: 0.75, mean: 0.95, norms: 0.5 };

/// Tokens of the batch of real text, in four documents of unequal length.
const TOKENS: usize = 2048;

/// Agreement of a parameter's gradient with the expected one.
struct Agreement {
    name: String,
    cosine: f64,
    norm_ratio: f64,
}

/// Creates the model under test, in a compute format, with an adapter without zeros unless every weight trains.
fn model(storage: BaseStorage, dtype: DType, gemms: GemmFormat) -> Decoder<Cuda> {
    let Some(folder) = real_model() else {
        let mut model = random_model::<Cuda>("tiny-llama", 64, dtype, storage);
        fill_adapters(&mut model);
        return model;
    };
    let lora =
        LoraConfig { r: 16, lora_alpha: 32.0, target_modules: TargetModules::AllLinear, ..LoraConfig::default() };
    let lora = (storage != TRAINED).then_some(lora);
    let options = BuildOptions { lora, seed: 3, gemms, ..BuildOptions::new(storage, dtype, TOKENS) };
    let config = ModelConfig::read(&folder).expect("the model has a readable config");
    let weights = HfFolder::open(&folder).expect("the model has weights");
    let mut model =
        Decoder::load(&weights, config, &options, &Default::default(), &mut |_| ()).expect("the model loads");
    fill_adapters(&mut model);
    model
}

fn real_model() -> Option<PathBuf> {
    std::env::var_os("FIREBRICK_TEST_MODEL").map(PathBuf::from)
}

/// Fills `B` as after some training: A has no gradient while B is zero.
pub(super) fn fill_adapters(model: &mut Decoder<Cuda>) {
    for parameter in model.parameters_mut() {
        if parameter.name.contains("lora_B") {
            let elements = parameter.shape.iter().product::<usize>() as u32;
            let value = |index: u32| (f64::from(index.wrapping_mul(2_654_435_761)) / f64::from(u32::MAX) - 0.5) * 0.02;
            let values: Vec<f32> = (0..elements).map(|index| value(index) as f32).collect();
            let (name, shape) = (parameter.name.clone(), parameter.shape.clone());
            *parameter = Parameter::from_host(name, &shape, parameter.role, values, &Default::default());
        }
    }
}

/// Returns four documents in one row, of real text or of synthetic tokens.
fn text() -> Batch {
    let Some(folder) = real_model() else { return sequence_of(&[40, 100, 61], None, 0) };
    let tokenizer = Tokenizer::from_folder(&folder).expect("the model has a tokenizer");
    let text =
        std::fs::read_to_string(fixture("../..").join(Path::new("docs/decisions.md"))).expect("the docs are there");
    let ids = tokenizer.encode(&text, false).expect("text has tokens");
    assert!(ids.len() >= TOKENS, "{} tokens of text", ids.len());
    packed(&[&ids[..300], &ids[300..1100], &ids[1100..1250], &ids[1250..TOKENS]])
}

/// Gradients by name.
type Gradients = BTreeMap<String, Vec<f32>>;

fn gradients(storage: BaseStorage, dtype: DType, gemms: GemmFormat) -> Gradients {
    loss_and_gradients(&model(storage, dtype, gemms), &text(), PassOptions::default()).1
}

/// Reads PyTorch's full gradients in f32 for our parameters.
fn of_torch(ours: &Gradients) -> Option<Gradients> {
    let file = std::env::var("FIREBRICK_TEST_GRADIENTS").ok()?;
    let golden = Golden::open(file.trim_end_matches(".safetensors"));
    assert_eq!(golden.ids("input_ids"), text().input_ids, "the file is of the same text");
    Some(ours.keys().map(|name| (name.clone(), golden.f32s(&format!("grad.{name}")))).collect())
}

fn agreements(expected: &Gradients, found: &Gradients) -> Vec<Agreement> {
    assert!(expected.keys().eq(found.keys()));
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum::<f64>();
    let compare = |(name, expected): (&String, &Vec<f32>)| {
        let found = &found[name];
        let (square, product) = (dot(expected, expected), dot(expected, found));
        let square_found = dot(found, found);
        let norms = (square * square_found).sqrt();
        Agreement { name: name.clone(), cosine: product / norms, norm_ratio: (square_found / square).sqrt() }
    };
    expected.iter().map(compare).collect()
}

/// Prints the worst tensor and the mean; returns whether both are within the bounds.
#[expect(clippy::print_stderr, reason = "the figures are what the test is run for")]
fn agree(context: &str, agreements: &[Agreement], bounds: &Bounds) -> bool {
    let by_cosine = |a: &&Agreement, b: &&Agreement| a.cosine.total_cmp(&b.cosine);
    let worst = agreements.iter().min_by(by_cosine).expect("a model has parameters");
    let average = agreements.iter().map(|one| one.cosine).sum::<f64>() / agreements.len() as f64;
    let furthest = difference::worst(agreements.iter().map(|one| (one.norm_ratio - 1.0).abs()));
    eprintln!(
        "{context}: {} tensors, cosine at least {:.5} ({}), {average:.5} on average, norms within {:.2} %",
        agreements.len(),
        worst.cosine,
        worst.name,
        furthest * 100.0
    );
    worst.cosine >= bounds.lowest && average >= bounds.mean && furthest <= bounds.norms
}

#[test]
fn gradients_in_bf16_and_fp8_point_where_those_in_f32_point() {
    if !has_card() {
        return;
    }
    let mut all_agree = true;
    for (mode, storage) in [("full", TRAINED), ("LoRA", FROZEN), ("QLoRA", NF4)] {
        let mut expected = gradients(storage, DType::F32, GemmFormat::Compute);
        if let Some(of_torch) = (storage == TRAINED).then(|| of_torch(&expected)).flatten() {
            all_agree &= agree("full, f32", &agreements(&of_torch, &expected), &IN_F32);
            expected = of_torch;
        }
        let bounds = if real_model().is_some() { IN_BF16 } else { IN_BF16_RANDOM };
        let found = gradients(storage, half(), GemmFormat::Compute);
        all_agree &= agree(&format!("{mode}, {:?}", half()), &agreements(&expected, &found), &bounds);
        if has_fp8() && real_model().is_some() {
            let found = gradients(storage, DType::BF16, GemmFormat::Fp8);
            let bounds = if storage == TRAINED { &IN_FP8 } else { &IN_FP8_LORA };
            all_agree &= agree(&format!("{mode}, fp8"), &agreements(&expected, &found), bounds);
        }
    }
    assert!(all_agree, "what was printed says which is off");
}
