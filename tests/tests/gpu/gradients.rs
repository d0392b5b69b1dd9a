//! Gradients of a card in bf16 and FP8, tensor by tensor, against f32 on the same card.
//!
//! With `FIREBRICK_TEST_MODEL` the model is that folder (a Hugging Face model with its tokenizer) and the tokens are real text; without
//! it, a small random model and synthetic tokens.
//! Trade-off: f32 is the engine's own, which other tests compare with the CPU.

use std::path::{Path, PathBuf};

use burn_tensor::DType;
use firebrick_arch::{LoraConfig, TargetModules};
use firebrick_data::{Batch, Tokenizer};
use firebrick_kernels::backends::Cuda;
use firebrick_kernels::{GemmFormat, Parameter};
use firebrick_model::{BaseStorage, BuildOptions, Decoder, HfFolder, ModelConfig, PassOptions};
use firebrick_tests::{FROZEN, NF4, TRAINED, fixture, loss_and_gradients, packed};

use super::{has_card, has_fp8, random_model, sequence_of};

/// How far the norm of a gradient may be from that in f32.
const NORM_BOUND: f64 = 0.06;
/// Tokens of the batch of real text, in four documents of unequal length.
const TOKENS: usize = 2048;

/// How the gradient of a parameter compares with the expected one.
struct Agreement {
    name: String,
    cosine: f64,
    norm_ratio: f64,
}

/// The model under test, in a compute format, with an adapter of which nothing is zero unless every weight trains.
fn model(storage: BaseStorage, dtype: DType, gemms: GemmFormat) -> Decoder<Cuda> {
    let Some(folder) = real_model() else {
        let mut model = random_model::<Cuda>("tiny-llama", 64, dtype, storage);
        fill_adapters(&mut model);
        return model;
    };
    let lora =
        LoraConfig { r: 16, lora_alpha: 32.0, target_modules: TargetModules::AllLinear, ..LoraConfig::default() };
    let options = BuildOptions {
        storage,
        lora: (storage != TRAINED).then_some(lora),
        seed: 3,
        compute_dtype: dtype,
        gemms,
        max_positions: TOKENS,
        sequence_tokens: TOKENS,
    };
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

/// `B` as it is after some training: A has no gradient while B is zero.
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

/// Four documents of text in one row, or of synthetic tokens.
fn text() -> Batch {
    let Some(folder) = real_model() else { return sequence_of(&[40, 100, 61], None, 0) };
    let tokenizer = Tokenizer::from_folder(&folder).expect("the model has a tokenizer");
    let text =
        std::fs::read_to_string(fixture("../..").join(Path::new("docs/decisions.md"))).expect("the docs are there");
    let ids = tokenizer.encode(&text, false).expect("text has tokens");
    assert!(ids.len() >= TOKENS, "{} tokens of text", ids.len());
    packed(&[&ids[..300], &ids[300..1100], &ids[1100..1250], &ids[1250..TOKENS]])
}

fn agreements(storage: BaseStorage, dtype: DType, gemms: GemmFormat) -> Vec<Agreement> {
    let batch = text();
    let gradients = |dtype, gemms| loss_and_gradients(&model(storage, dtype, gemms), &batch, PassOptions::default()).1;
    let (expected, found) = (gradients(DType::F32, GemmFormat::Compute), gradients(dtype, gemms));
    assert!(expected.keys().eq(found.keys()));
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum::<f64>();
    let compare = |(name, expected): (String, Vec<f32>)| {
        let found = &found[&name];
        let (square, product) = (dot(&expected, &expected), dot(&expected, found));
        let square_found = dot(found, found);
        let norms = (square * square_found).sqrt();
        Agreement { name, cosine: product / norms, norm_ratio: (square_found / square).sqrt() }
    };
    expected.into_iter().map(compare).collect()
}

/// Prints the worst tensor and the mean; whether both are within the bounds.
#[expect(clippy::print_stderr, reason = "the figures are what the test is run for")]
fn agree(context: &str, agreements: &[Agreement], lowest: f64, mean: f64) -> bool {
    let by_cosine = |a: &&Agreement, b: &&Agreement| a.cosine.total_cmp(&b.cosine);
    let worst = agreements.iter().min_by(by_cosine).expect("a model has parameters");
    let average = agreements.iter().map(|one| one.cosine).sum::<f64>() / agreements.len() as f64;
    let furthest = agreements.iter().map(|one| (one.norm_ratio - 1.0).abs()).fold(0.0, f64::max);
    eprintln!(
        "{context}: {} tensors, cosine at least {:.5} ({}), {average:.5} on average, norms within {:.2} %",
        agreements.len(),
        worst.cosine,
        worst.name,
        furthest * 100.0
    );
    worst.cosine >= lowest && average >= mean && furthest <= NORM_BOUND
}

#[test]
fn gradients_in_bf16_and_fp8_point_where_those_in_f32_point() {
    if !has_card() {
        return;
    }
    let mut all_agree = true;
    for (mode, storage) in [("full", TRAINED), ("LoRA", FROZEN), ("QLoRA", NF4)] {
        let found = agreements(storage, DType::BF16, GemmFormat::Compute);
        // Random weights and 200 tokens average over less.
        let [lowest, mean] = if real_model().is_some() { [0.995, 0.999] } else { [0.99; 2] };
        all_agree &= agree(&format!("{mode}, bf16"), &found, lowest, mean);
        if has_fp8() && real_model().is_some() {
            let found = agreements(storage, DType::BF16, GemmFormat::Fp8);
            all_agree &= agree(&format!("{mode}, fp8"), &found, 0.95, 0.98);
        }
    }
    assert!(all_agree, "what was printed says which is off");
}
