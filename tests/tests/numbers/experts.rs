//! Special cases of mixtures of experts: adapters on experts, and experts that no token reaches.
//!
//! Trade-off: the gradient of an adapter is derived from the golden gradient of its weight, so only adapters with B zero are tested.

use std::fs::read;
use std::path::Path;

use burn_tensor::DType;
use firebrick_arch::{ByPattern, LoraInit, Role, TensorSpec};
use firebrick_kernels::backends::Flex;
use firebrick_kernels::{Kernels, Weight, WeightOps};
use firebrick_model::peft::{read_adapter, read_adapter_config};
use firebrick_model::{
    BaseStorage, BuildOptions, Companions, Decoder, HfFolder, LoraConfig, Merge, ModelConfig, PassOptions, Recompute,
    TargetModules, merge_adapter,
};
use firebrick_precision::{FloatType, Format, QuantFormat};
use firebrick_tests::{
    FROZEN, Golden, MIXTURES, TRAINED, every_next_token, fixture, host, load, loss_and_gradients, on_every_backend,
    relative_difference,
};
use safetensors::SafeTensors;
use tempfile::tempdir;

use crate::forward::TOKENS;

/// Models with what the paths of their experts have in common, and names of linear modules of experts, shared ones included.
const PAIRS: [(&str, &str, &[&str]); 4] = [
    ("tiny-mixtral", "block_sparse_moe.experts", &["w1", "w3", "w2"]),
    ("tiny-qwen3-moe", "mlp.experts", &["gate_proj", "up_proj", "down_proj"]),
    ("tiny-qwen2-moe", "mlp.experts", &["gate_proj", "up_proj", "down_proj", "shared_expert_gate"]),
    ("tiny-glm4-moe", "mlp.experts", &["gate_proj", "up_proj", "down_proj"]),
];

/// Adapters of parameters of experts, each with its base.
const PARAMETERS: [(&str, &str); 5] = [
    ("tiny-qwen3-moe-parameters", "tiny-qwen3-moe"),
    ("tiny-mixtral-parameters", "tiny-mixtral"),
    ("tiny-gpt-oss-parameters", "tiny-gpt-oss"),
    ("tiny-gpt-oss-parameters", "quant-mxfp4-gpt-oss"),
    ("tiny-gemma4-moe-parameters", "tiny-gemma4-moe"),
];

/// Returns settings of an adapter on these modules.
fn settings(targets: &[&str]) -> LoraConfig {
    let target_modules = TargetModules::from_names(targets.iter().map(|&name| name.to_owned()).collect());
    LoraConfig { r: 4, lora_alpha: 12.0, target_modules, ..LoraConfig::default() }
}

/// Returns settings of a plain adapter, of DoRA and of PiSSA, for which the gate of a shared expert has too few rows.
fn forms(targets: &[&str]) -> [LoraConfig; 3] {
    let wide: Vec<_> = targets.iter().copied().filter(|&name| name != "shared_expert_gate").collect();
    let dora = LoraConfig { use_dora: true, ..settings(targets) };
    let pissa = LoraConfig { init_lora_weights: LoraInit::Pissa { niter: None }, ..settings(&wide) };
    [settings(targets), dora, pissa]
}

/// Returns settings of an adapter on these parameters of experts and on queries.
fn of_parameters(names: &[&str]) -> LoraConfig {
    let target_parameters = Some(names.iter().map(|&name| name.to_owned()).collect());
    LoraConfig { target_parameters, ..settings(&["q_proj"]) }
}

/// Creates the model with a new adapter.
fn adapted<B: Kernels>(model: &str, lora: LoraConfig, storage: BaseStorage) -> Decoder<B> {
    let folder = fixture(model);
    let config = ModelConfig::read(&folder).expect("the model has a readable config").for_adapter(Some(&lora));
    let options = BuildOptions { lora: Some(lora), seed: 1, ..BuildOptions::new(storage, DType::F32, TOKENS) };
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
        let model = adapted::<B>(name, settings(targets), FROZEN);
        let batch = every_next_token(&golden.ids("input_ids"), TOKENS);
        for recompute in [Recompute::Full, Recompute::Projections, Recompute::None] {
            let pass = PassOptions { recompute, ..PassOptions::default() };
            let (_, gradients) = loss_and_gradients(&model, &batch, pass);
            let on_experts = gradients.keys().filter(|name| name.contains(experts)).count();
            assert!(on_experts >= 2 * 3 * 4, "{name}: {on_experts} gradients of adapters on experts");
            let parts = model.stored_parts();
            for parameter in model.parameters().into_iter().filter(|parameter| parameter.role == Role::LoraA) {
                let (inputs, a) = (parameter.shape[1], host(parameter.value.clone()));
                // The pair of each expert, or of the whole module, has a rank of 4.
                for (a_name, a) in parts.of(&parameter.name).into_iter().zip(a.chunks(4 * inputs)) {
                    let path = a_name.strip_suffix(".lora_A.weight").expect("PEFT ends its name so");
                    let weight = path.strip_prefix("base_model.model.").expect("PEFT puts this before every name");
                    let d_weight = golden.f32s(&format!("grad.{weight}.weight"));
                    let expected = gradient_of_b(&d_weight, a, inputs, 3.0);
                    let difference = relative_difference(&gradients[&format!("{path}.lora_B.weight")], &expected);
                    assert!(difference < 1e-3, "{name}, {recompute:?}, {path}: {difference:e}");
                    assert!(gradients[a_name].iter().all(|&value| value == 0.0), "B is zero");
                }
            }
        }
    }
}

on_every_backend!(gradients_of_adapters_on_experts_follow_from_those_of_the_weights, adapters_on_experts);

/// Returns the gradients of a sequence.
fn gradients(model: &Decoder<Flex>, golden: &str) -> Vec<f32> {
    loss_and_all_gradients(model, golden).1
}

/// Returns the loss of a sequence, and all gradients.
fn loss_and_all_gradients(model: &Decoder<Flex>, golden: &str) -> (f32, Vec<f32>) {
    let ids = Golden::open(golden).ids("input_ids");
    let batch = every_next_token(&ids, TOKENS);
    let (loss, gradients) = loss_and_gradients(model, &batch, PassOptions::default());
    (loss, gradients.into_values().flatten().collect())
}

#[test]
fn adapters_of_stacks_are_saved_by_expert_and_load_again_with_magnitudes_and_principal_parts_too() {
    for (model, _, targets) in PAIRS {
        for lora in forms(targets) {
            let mut first = adapted::<Flex>(model, lora.clone(), FROZEN);
            // No value stays as it started.
            for (index, parameter) in first.parameters_mut().into_iter().enumerate() {
                let moved = (parameter.value.clone() * 1.25).add_scalar(0.001 * (index % 7) as f32);
                parameter.value = moved;
            }
            first.refresh_adapter();
            let folder = tempdir().unwrap();
            first.save_adapter(folder.path(), &lora, None).unwrap();
            let bytes = read(folder.path().join("adapter_model.safetensors")).unwrap();
            let saved = SafeTensors::deserialize(&bytes).unwrap();
            let mut names: Vec<_> = saved.names().into_iter().map(str::to_owned).collect();
            let tensors = first.config.spec.adapter_tensors(&lora).unwrap();
            let mut expected: Vec<_> = tensors.into_iter().map(|tensor| tensor.name).collect();
            names.sort();
            expected.sort();
            assert_eq!(names, expected, "{model}");
            let mut second = adapted::<Flex>(model, lora.clone(), FROZEN);
            second.load_adapter(folder.path()).unwrap();
            for (first, second) in first.parameters().into_iter().zip(second.parameters()) {
                assert_eq!(host(first.value.clone()), host(second.value.clone()), "{model}, {}", first.name);
            }
            assert_eq!(gradients(&first, model), gradients(&second, model), "{model}");
        }
    }
}

#[test]
fn an_adapter_that_starts_on_experts_leaves_every_output_as_it_is_in_every_form() {
    for (model, _, targets) in PAIRS {
        let ids = Golden::open(model).ids("input_ids");
        let batch = every_next_token(&ids, TOKENS);
        let loss = |model: &Decoder<Flex>| loss_and_gradients(model, &batch, PassOptions::default()).0;
        let expected = loss(&load(model, None, FROZEN));
        for lora in forms(targets) {
            let found = loss(&adapted::<Flex>(model, lora.clone(), FROZEN));
            assert!((found - expected).abs() < 1e-3 * expected, "{model}, {lora:?}: {found}, not {expected}");
        }
    }
}

#[test]
fn the_matrices_of_a_quantized_stack_are_those_of_single_matrices() {
    for (name, _, targets) in PAIRS {
        let folder = HfFolder::open(&fixture(name)).unwrap();
        for format in QuantFormat::ALL {
            let storage = BaseStorage::Frozen(Format::Quantized(format));
            let refused = ModelConfig::read(&fixture(name))
                .unwrap()
                .spec
                .modules()
                .any(|(_, i)| format.check_columns(i).is_err());
            if refused {
                continue;
            }
            let model = adapted::<Flex>(name, settings(targets), storage);
            for linear in model.layers().iter().flat_map(|layer| layer.linears()) {
                let Some(stack) = &linear.stack else { continue };
                let shape = [linear.shape[0] / stack.experts, linear.shape[1]];
                for (piece, matrix) in stack.pieces.iter().zip(linear.base.weight().matrices(stack.experts)) {
                    let Weight::Quantized(matrix) = matrix else { panic!("{} is quantized", linear.path) };
                    let found = host(Flex::dequantize_weight(&matrix));
                    let values = folder.read_f32(&piece.weight_name(), &shape).unwrap();
                    let expected = format.quantize(&values, &shape).unwrap().dequantize();
                    let error = |found: &[f32]| -> f64 {
                        found.iter().zip(&values).map(|(found, value)| f64::from(found - value).powi(2)).sum()
                    };
                    // The mean of nested scales, and the scale of a whole tensor in NVFP4, are those of the stack.
                    let is_same = !format.double_quant() && format != QuantFormat::Nvfp4;
                    let is_close = error(&found) <= 1.25 * error(&expected);
                    assert!(if is_same { found == expected } else { is_close }, "{format}, {}", piece.path);
                }
            }
        }
    }
}

#[test]
fn an_adapter_of_parameters_is_written_as_peft_wrote_it_and_merges_into_its_base() {
    for (adapter, base) in PARAMETERS {
        let model = load::<Flex>(base, Some(adapter), FROZEN);
        let config = read_adapter_config(&fixture(adapter)).unwrap();
        let folder = tempdir().unwrap();
        let saved = folder.path().join("adapter");
        model.save_adapter(&saved, &config, None).unwrap();
        let tensors = |dir: &Path| read_adapter(dir).unwrap();
        let (written, original) = (tensors(&saved), tensors(&fixture(adapter)));
        assert_eq!(written.1, original.1, "{adapter}");
        assert_eq!(written.0, original.0, "{adapter}");
        let merged = folder.path().join("merged");
        let merge = Merge {
            model: &fixture(base),
            adapter: &saved,
            requantized: None,
            dtype: Some(FloatType::F32),
            bnb_4bit: None,
            mxfp4: false,
            companions: Companions { from: fixture(base), ..Companions::default() },
        };
        let report = merge_adapter(&merge, &merged).unwrap();
        let spec = ModelConfig::read(&fixture(base)).unwrap().spec;
        assert!(report.modules > spec.stacks().count() && report.largest_error < 1e-5, "{report:?}");
        let ids = Golden::open(adapter).ids("input_ids");
        let batch = every_next_token(&ids, TOKENS);
        let loss = |model: &Decoder<Flex>| loss_and_gradients(model, &batch, PassOptions::default()).0;
        let merged = loss(&load(merged.to_str().unwrap(), None, TRAINED));
        let expected = loss(&model);
        assert!((merged - expected).abs() < 1e-4 * expected, "{adapter}: {merged}, not {expected}");
    }
}

#[test]
fn settings_that_parameters_cannot_have_and_names_that_are_none_are_refused() {
    let both = of_parameters(&["experts.gate_up_proj", "experts.down_proj"]);
    let spec = ModelConfig::read(&fixture("tiny-qwen3-moe")).unwrap().for_adapter(Some(&both)).spec;
    let target = |name: &str| settings(&[name]).target_modules;
    assert_eq!(spec.adapter_tensors(&both).unwrap().len(), 2 * 2 + 2 * 2, "two attention layers, one mixture");
    for (lora, part) in [
        (of_parameters(&["mlp.experts.up_proj"]), "`mlp.experts.up_proj`"),
        (LoraConfig { target_modules: target("experts.down_proj"), ..both.clone() }, "`experts.down_proj`"),
        (LoraConfig { modules_to_save: Some(vec!["experts.down_proj".to_owned()]), ..both.clone() }, "modules_to_save"),
        (LoraConfig { lora_dropout: 0.1, ..both.clone() }, "lora.dropout"),
        (LoraConfig { use_dora: true, ..both.clone() }, "lora.use_dora"),
        (LoraConfig { init_lora_weights: LoraInit::Pissa { niter: None }, ..both }, "lora.init_lora_weights"),
    ] {
        let message = spec.adapter_tensors(&lora).unwrap_err().to_string();
        assert!(message.contains(part), "{message}");
    }
    let gpt_oss = ModelConfig::read(&fixture("tiny-gpt-oss")).unwrap().spec;
    let message = gpt_oss.adapter_tensors(&settings(&["q_proj", "up_proj"])).unwrap_err().to_string();
    assert!(message.contains("experts.0.up_proj`") && message.contains("lora.target_parameters"), "{message}");
    assert!(gpt_oss.adapter_tensors(&LoraConfig::default()).is_ok(), "the default leaves experts alone");
}

#[test]
fn an_adapter_of_parameters_starts_without_effect_and_loads_again_in_every_family() {
    for model in MIXTURES {
        let lora = of_parameters(&["experts.gate_up_proj", "experts.down_proj"]);
        let mut first = adapted::<Flex>(model, lora.clone(), FROZEN);
        let of_base = loss_and_all_gradients(&load(model, None, FROZEN), model).0;
        let difference = (loss_and_all_gradients(&first, model).0 - of_base).abs();
        assert!(difference < 1e-5 * of_base, "{model}: {difference:e}");
        for parameter in first.parameters_mut() {
            parameter.value = (parameter.value.clone() * 1.25).add_scalar(0.01);
        }
        let folder = tempdir().unwrap();
        first.save_adapter(folder.path(), &lora, None).unwrap();
        let mut second = adapted::<Flex>(model, lora, FROZEN);
        second.load_adapter(folder.path()).unwrap();
        assert_eq!(loss_and_all_gradients(&first, model), loss_and_all_gradients(&second, model), "{model}");
    }
}

#[test]
fn settings_that_differ_between_experts_are_refused_by_both_names() {
    let spec = ModelConfig::read(&fixture("tiny-qwen3-moe")).unwrap().spec;
    let one = settings(&["experts.1.up_proj"]);
    let ranks = ByPattern::new([("experts.2.up_proj".to_owned(), 8)]).unwrap();
    let other_rank = LoraConfig { rank_pattern: ranks, ..settings(&["up_proj"]) };
    let saved = LoraConfig { modules_to_save: Some(vec!["experts.0.up_proj".to_owned()]), ..settings(&["q_proj"]) };
    for (lora, other) in [(one, 1), (other_rank, 2), (saved, 1)] {
        let message = spec.adapter_tensors(&lora).unwrap_err().to_string();
        let named = [0, other].map(|expert| format!("experts.{expert}.up_proj`"));
        assert!(named.iter().all(|name| message.contains(name)), "{message}");
    }
}

#[test]
fn experts_without_tokens_have_gradients_of_zero_for_all_their_parameters() {
    for (name, experts, _) in PAIRS {
        let model = load::<Flex>(name, None, TRAINED);
        let ids = Golden::open(name).ids("input_ids");
        let batch = every_next_token(&ids[..2], 2);
        for recompute in [Recompute::Full, Recompute::Projections, Recompute::Selective, Recompute::None] {
            let pass = PassOptions { recompute, ..PassOptions::default() };
            let (_, gradients) = loss_and_gradients(&model, &batch, pass);
            let trained = model.config.spec.tensors().into_iter().filter(TensorSpec::may_train).count();
            assert_eq!(gradients.len(), trained, "{name}, {recompute:?}");
            let of_experts: Vec<_> = gradients.iter().filter(|(name, _)| name.contains(experts)).collect();
            let zero = of_experts.iter().filter(|(_, values)| values.iter().all(|&value| value == 0.0)).count();
            assert!(zero >= 3 && zero < of_experts.len(), "{name}, {recompute:?}: {zero} of {}", of_experts.len());
        }
    }
}
