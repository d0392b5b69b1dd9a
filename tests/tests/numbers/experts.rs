//! Special cases of mixtures of experts: adapters on experts, and experts that no token reaches.
//!
//! Trade-off: the gradient of an adapter is derived from the golden gradient of its weight, so only adapters with B zero are tested.

use burn_tensor::DType;
use firebrick_kernels::backends::Flex;
use firebrick_kernels::{GemmFormat, Kernels};
use firebrick_model::{
    BuildOptions, Decoder, HfFolder, LoraConfig, ModelConfig, PassOptions, Recompute, TargetModules,
};
use firebrick_tests::{
    FROZEN, Golden, TRAINED, every_next_token, fixture, host, load, loss_and_gradients, on_every_backend,
    relative_difference,
};

use crate::forward::TOKENS;

const PAIRS: [(&str, &str, [&str; 3]); 2] = [
    ("tiny-mixtral", "block_sparse_moe.experts", ["w1", "w3", "w2"]),
    ("tiny-qwen3-moe", "mlp.experts", ["gate_proj", "up_proj", "down_proj"]),
];

/// Creates the model with new adapters on these modules.
fn adapted<B: Kernels>(model: &str, targets: &[&str]) -> Decoder<B> {
    let target_modules = TargetModules::from_names(targets.iter().map(|&name| name.to_owned()).collect());
    let lora = LoraConfig { r: 4, lora_alpha: 12.0, target_modules, ..LoraConfig::default() };
    let options = BuildOptions {
        storage: FROZEN,
        lora: Some(lora),
        seed: 1,
        compute_dtype: DType::F32,
        gemms: GemmFormat::Compute,
        max_positions: TOKENS,
        sequence_tokens: TOKENS,
    };
    let folder = fixture(model);
    let config = ModelConfig::read(&folder).expect("the model has a readable config");
    let weights = HfFolder::open(&folder).expect("the model has weights");
    Decoder::load(&weights, config, &options, &B::Device::default(), &mut |_| ()).expect("it loads")
}

/// Computes `scale dW Aᵀ` of `dW [o, i]` and `A [r, i]`: the gradient of B if B is zero.
fn gradient_of_b(d_weight: &[f32], a: &[f32], inputs: usize, scale: f32) -> Vec<f32> {
    let dot = |row: &[f32], other: &[f32]| scale * row.iter().zip(other).map(|(x, y)| x * y).sum::<f32>();
    d_weight.chunks(inputs).flat_map(|row| a.chunks(inputs).map(move |other| dot(row, other))).collect()
}

fn adapters_on_experts<B: Kernels>() {
    for (name, experts, targets) in PAIRS {
        let golden = Golden::open(&format!("{name}-full-gradients"));
        let model = adapted::<B>(name, &targets);
        let batch = every_next_token(&golden.ids("input_ids"), TOKENS);
        for recompute in [Recompute::Full, Recompute::Projections, Recompute::None] {
            let pass = PassOptions { recompute, ..PassOptions::default() };
            let (_, gradients) = loss_and_gradients(&model, &batch, pass);
            let on_experts = gradients.keys().filter(|name| name.contains(experts)).count();
            assert!(on_experts >= 2 * 3 * 4, "{name}: {on_experts} gradients of adapters on experts");
            for parameter in model.parameters() {
                let Some(path) = parameter.name.strip_suffix(".lora_A.weight") else { continue };
                let weight = path.strip_prefix("base_model.model.").expect("PEFT puts this before every name");
                let d_weight = golden.f32s(&format!("grad.{weight}.weight"));
                let a = host(parameter.value.clone());
                let expected = gradient_of_b(&d_weight, &a, parameter.shape[1], 3.0);
                let difference = relative_difference(&gradients[&format!("{path}.lora_B.weight")], &expected);
                assert!(difference < 1e-3, "{name}, {recompute:?}, {path}: {difference:e}");
                assert!(gradients[parameter.name.as_ref()].iter().all(|&value| value == 0.0), "B is zero");
            }
        }
    }
}

on_every_backend!(gradients_of_adapters_on_experts_follow_from_those_of_the_weights, adapters_on_experts);

#[test]
fn experts_without_tokens_have_gradients_of_zero_for_all_their_parameters() {
    for (name, experts, _) in PAIRS {
        let model = load::<Flex>(name, None, TRAINED);
        let ids = Golden::open(name).ids("input_ids");
        let batch = every_next_token(&ids[..2], 2);
        for recompute in [Recompute::Full, Recompute::Projections, Recompute::Selective, Recompute::None] {
            let pass = PassOptions { recompute, ..PassOptions::default() };
            let (_, gradients) = loss_and_gradients(&model, &batch, pass);
            assert_eq!(gradients.len(), model.parameters().len(), "{name}, {recompute:?}");
            let of_experts: Vec<_> = gradients.iter().filter(|(name, _)| name.contains(experts)).collect();
            let zero = of_experts.iter().filter(|(_, values)| values.iter().all(|&value| value == 0.0)).count();
            assert!(zero >= 3 && zero < of_experts.len(), "{name}, {recompute:?}: {zero} of {}", of_experts.len());
        }
    }
}
