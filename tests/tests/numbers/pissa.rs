//! Adapters that start as the principal part of their base (PiSSA), compared with PEFT's.

use std::collections::BTreeMap;

use burn_tensor::DType;
use firebrick_arch::LoraInit;
use firebrick_kernels::backends::Flex;
use firebrick_kernels::{GemmFormat, Kernels, Parameter};
use firebrick_model::peft::read_adapter_config;
use firebrick_model::{BaseStorage, BuildOptions, Decoder, HfFolder, LoraConfig, ModelConfig};
use firebrick_tests::{
    FROZEN, Golden, NF4, every_next_token, fixture, host, largest_difference, load, on_every_backend, upload,
};
use tempfile::tempdir;

use crate::forward::TOKENS;

fn lora(niter: Option<usize>) -> LoraConfig {
    LoraConfig { r: 4, lora_alpha: 8.0, init_lora_weights: LoraInit::Pissa { niter }, ..LoraConfig::default() }
}

fn build<B: Kernels>(lora: LoraConfig, storage: BaseStorage) -> Decoder<B> {
    let folder = fixture("tiny-llama");
    let options = BuildOptions {
        storage,
        lora: Some(lora),
        seed: 3,
        compute_dtype: DType::F32,
        gemms: GemmFormat::Compute,
        max_positions: TOKENS,
        sequence_tokens: TOKENS,
    };
    let config = ModelConfig::read(&folder).expect("the model has a config");
    let weights = HfFolder::open(&folder).expect("the model has weights");
    Decoder::load(&weights, config, &options, &Default::default(), &mut |_| ()).expect("it loads")
}

fn logits<B: Kernels>(model: &Decoder<B>, golden: &Golden) -> Vec<f32> {
    let batch = every_next_token(&golden.ids("input_ids"), TOKENS);
    host(model.logits(&upload(model, &batch)))
}

/// Computes `scale B A` of a module, `[out, in]`.
fn product<B: Kernels>(model: &Decoder<B>, path: &str, scale: f32) -> Vec<f32> {
    let by_name: BTreeMap<&str, &Parameter<B>> =
        model.parameters().into_iter().map(|parameter| (parameter.name.as_ref(), parameter)).collect();
    let matrix = |side: &str| by_name[format!("base_model.model.{path}.lora_{side}.weight").as_str()].matrix();
    host(matrix("B").matmul(matrix("A")) * scale)
}

fn principal_parts<B: Kernels>() {
    let golden = Golden::open("tiny-llama-pissa");
    let model = build::<B>(lora(None), FROZEN);
    for name in golden.keys("principal.") {
        let path = name.trim_start_matches("principal.").trim_end_matches(".weight").to_owned();
        let (ours, theirs) = (product(&model, &path, 2.0), golden.f32s(&format!("principal.{path}.weight")));
        let size = theirs.iter().fold(0.0f32, |size, value| size.max(value.abs()));
        let difference = largest_difference(&ours, &theirs);
        assert!(difference < 1e-3 * size, "{path}: {difference:e} of {size:e}");
    }
    for niter in [None, Some(1)] {
        let model = build::<B>(lora(niter), FROZEN);
        let difference = largest_difference(&logits(&model, &golden), &golden.f32s("start.logits"));
        assert!(difference < 2e-4, "{niter:?}: at the start a logit differs by {difference:e}");
    }
}

on_every_backend!(a_base_and_its_principal_part_are_those_of_peft_and_give_its_logits, principal_parts);

#[test]
fn an_adapter_that_moved_is_saved_for_the_original_base() {
    let golden = Golden::open("tiny-llama-pissa");
    for lora in [lora(None), LoraConfig { use_rslora: true, ..lora(Some(2)) }] {
        let mut model = build::<Flex>(lora.clone(), FROZEN);
        for parameter in model.parameters_mut() {
            let moved: Vec<f32> = host(parameter.value.clone())
                .iter()
                .enumerate()
                .map(|(at, value)| value + 0.05 * (at as f32).sin())
                .collect();
            *parameter = Parameter::from_host(
                parameter.name.clone(),
                &parameter.shape,
                parameter.role,
                moved,
                &Default::default(),
            );
        }
        let folder = tempdir().expect("a temporary folder");
        model.save_adapter(folder.path(), &lora, None).expect("it is saved");
        let saved = read_adapter_config(folder.path()).expect("it is an adapter");
        assert_eq!((saved.r, saved.init_lora_weights), (8, LoraInit::Uniform));
        let on_base = load::<Flex>("tiny-llama", folder.path().to_str(), FROZEN);
        let difference = largest_difference(&logits(&on_base, &golden), &logits(&model, &golden));
        assert!(difference < 5e-4, "a logit on the original base differs by {difference:e}");
        let unmoved = largest_difference(&logits(&model, &golden), &golden.f32s("start.logits"));
        assert!(unmoved > 0.01, "the adapter moved the logits by {unmoved:e} only");
    }
}

/// Only the remainder is quantized; the principal part stays in f32, so the start is nearer to the unquantized model.
#[test]
fn the_rest_is_quantized_and_the_start_is_nearer_to_the_base_than_a_quantized_base_is() {
    let golden = Golden::open("tiny-llama-pissa");
    let expected = golden.f32s("start.logits");
    let error = |lora: LoraConfig| {
        let ours = logits(&build::<Flex>(lora, NF4), &golden);
        ours.iter().zip(&expected).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>().sqrt()
    };
    let plain = LoraConfig { init_lora_weights: LoraInit::Uniform, ..lora(None) };
    let of_rank = |r| LoraConfig { r, lora_alpha: 2.0 * r as f64, ..lora(None) };
    let [plain, low, high] = [plain, of_rank(4), of_rank(24)].map(error);
    assert!(low < plain && high < 0.8 * plain, "{low} and {high}, without {plain}");
}
