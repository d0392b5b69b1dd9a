//! The hand-written backward pass: gradients of adapters and of whole models.

use burn_tensor::DType;
use firebrick_arch::TensorSpec;
use firebrick_kernels::Kernels;
use firebrick_kernels::backends::Flex;
use firebrick_model::{BuildOptions, Decoder, DropoutMasks, HfFolder, LoraConfig, ModelConfig, PassOptions, Recompute};
use firebrick_tests::{
    FAMILIES, FROZEN, Golden, NF4, TRAINED, every_next_token, families, fixture, in_turn, load, loss_and_gradients,
    on_every_backend, relative_difference,
};

use crate::forward::{ADAPTERS, TOKENS};

pub(crate) const POLICIES: [Recompute; 4] =
    [Recompute::Full, Recompute::Projections, Recompute::Selective, Recompute::None];

fn pass(recompute: Recompute) -> PassOptions {
    PassOptions { recompute, offload: recompute.may_offload(), adapters: true, dropout: None }
}

/// Asserts that under every recompute policy, the gradients are those of the golden file and no others. On other
/// backends than flex the models take the policies in turn.
fn assert_gradients_agree<B: Kernels>(golden_name: &str, model: &Decoder<B>, turn: usize) {
    let golden = Golden::open(golden_name);
    let batch = every_next_token(&golden.ids("input_ids"), TOKENS);
    let names = trained_names(&golden, model);
    for policy in in_turn::<B, _>(&POLICIES, turn) {
        let (loss_sum, gradients) = loss_and_gradients(model, &batch, pass(policy));
        let loss = loss_sum / batch.loss_tokens() as f32;
        assert!((loss - golden.f32s("loss")[0]).abs() < 1e-5, "{golden_name}, {policy:?}: loss {loss}");
        assert_eq!(names, gradients.keys().cloned().collect::<Vec<_>>(), "{golden_name}, {policy:?}");
        for name in &names {
            let difference = relative_difference(&gradients[name], &golden.f32s(&format!("grad.{name}")));
            assert!(difference < 1e-3, "{golden_name}, {policy:?}, {name}: {difference:e}");
        }
    }
}

/// Returns the golden file's gradients without those of tensors that never train here (the scales of Gemma 4's router).
fn trained_names<B: Kernels>(golden: &Golden, model: &Decoder<B>) -> Vec<String> {
    let never: Vec<_> = model.config.spec.tensors().into_iter().filter(|tensor| !tensor.may_train()).collect();
    let mut names = golden.keys("grad.");
    names.retain(|name| never.iter().all(|tensor| *tensor.name != **name));
    names
}

fn gradients_of_adapters<B: Kernels>() {
    for (turn, family) in families::<B>().into_iter().enumerate() {
        let adapter = format!("{family}-lora");
        assert_gradients_agree(&adapter, &load::<B>(family, Some(&adapter), FROZEN), turn);
    }
    for (turn, (adapter, model)) in ADAPTERS.into_iter().enumerate() {
        assert_gradients_agree(adapter, &load::<B>(model, Some(adapter), FROZEN), turn);
    }
}

on_every_backend!(lora_gradients_equal_those_of_peft_under_every_recompute_policy, gradients_of_adapters);

/// Loads a model whose adapters drop a quarter of their inputs.
fn with_dropout<B: Kernels>() -> Decoder<B> {
    let lora = LoraConfig { lora_dropout: 0.25, r: 4, ..LoraConfig::default() };
    let folder = fixture("tiny-llama");
    let options = BuildOptions { lora: Some(lora), ..BuildOptions::new(FROZEN, DType::F32, TOKENS) };
    let config = ModelConfig::read(&folder).expect("the model has a readable config");
    let weights = HfFolder::open(&folder).expect("the model has weights");
    let mut model = Decoder::load(&weights, config, &options, &B::Device::default(), &mut |_| ()).expect("it loads");
    model.load_adapter(&fixture("tiny-llama-lora")).expect("it has the same matrices");
    model
}

/// Checks that loss and gradients depend on the seed of the masks and on nothing else: neither on the recompute policy nor on the backend.
fn dropout_in_training<B: Kernels>() {
    let (model, reference) = (with_dropout::<B>(), with_dropout::<Flex>());
    let batch = every_next_token(&Golden::open("tiny-llama-lora").ids("input_ids"), TOKENS);
    let pass = |recompute, seed: Option<u64>| {
        let masks = |seed| DropoutMasks { seed, first_row: 0, row_len: TOKENS };
        PassOptions { dropout: seed.map(masks), ..pass(recompute) }
    };
    let (expected, expected_gradients) = loss_and_gradients(&reference, &batch, pass(Recompute::None, Some(5)));
    for policy in POLICIES {
        let (loss, gradients) = loss_and_gradients(&model, &batch, pass(policy, Some(5)));
        assert!((loss - expected).abs() < 1e-4 * expected, "{policy:?}: {loss}, not {expected}");
        for (name, gradient) in &gradients {
            let difference = relative_difference(gradient, &expected_gradients[name]);
            assert!(difference < 1e-3, "{policy:?}, {name}: {difference:e}");
        }
    }
    // The losses above are those of the masks of seed 5 under each policy.
    let losses = [Some(6), None].map(|seed| loss_and_gradients(&model, &batch, pass(Recompute::Full, seed)).0);
    assert!(losses.iter().all(|other| (other - expected).abs() > 1e-3), "{losses:?} {expected}");
}

on_every_backend!(dropout_depends_on_its_seed_and_on_nothing_else, dropout_in_training);

fn gradients_of_all_weights<B: Kernels>() {
    for (turn, family) in families::<B>().into_iter().enumerate() {
        let model = load::<B>(family, None, TRAINED);
        // Uses another policy than for the family's adapter.
        assert_gradients_agree(&format!("{family}-full-gradients"), &model, turn + 2);
    }
}

on_every_backend!(gradients_of_all_weights_equal_those_of_torch_under_every_recompute_policy, gradients_of_all_weights);

#[test]
fn parameters_of_a_model_that_trains_are_the_tensors_of_its_spec() {
    for family in FAMILIES {
        let model = load::<Flex>(family, None, TRAINED);
        let (parts, parameters) = (model.stored_parts(), model.parameters());
        let mut trained: Vec<_> = parameters.iter().flat_map(|parameter| parts.of(&parameter.name)).collect();
        let tensors = model.config.spec.tensors().into_iter().filter(TensorSpec::may_train);
        let mut expected: Vec<_> = tensors.map(|tensor| tensor.name).collect();
        let stacked = model.config.spec.stacked_tensors().into_iter().filter(TensorSpec::may_train).count();
        assert_eq!(parameters.len(), stacked, "{family}");
        trained.sort_unstable();
        expected.sort();
        assert_eq!(trained, expected, "{family}");
    }
    assert_eq!(load::<Flex>("tiny-llama", None, TRAINED).parameters().len(), 21);
}

#[test]
fn recomputing_layers_changes_no_bit() {
    let batch = every_next_token(&Golden::open("tiny-llama-lora").ids("input_ids"), TOKENS);
    for (adapter, storage) in [(Some("tiny-llama-lora"), NF4), (Some("tiny-llama-lora"), FROZEN), (None, TRAINED)] {
        let model = load::<Flex>("tiny-llama", adapter, storage);
        let saved = loss_and_gradients(&model, &batch, pass(Recompute::None));
        for policy in POLICIES {
            assert!(loss_and_gradients(&model, &batch, pass(policy)) == saved, "{storage:?}, {policy:?}");
        }
    }
}
