//! The hand-written backward pass: gradients of adapters and of whole models.

use firebrick_kernels::GradientMap;
use firebrick_kernels::backend::Flex;
use firebrick_model::{BaseStorage, Llama, PassOptions, Recompute};
use firebrick_tests::{Golden, every_next_token, host, load, relative_difference};

const TOKENS: usize = 48;
/// Not a divisor of the 96 tokens of a batch, so that the last chunk of the loss is a short one.
const CHUNK: usize = 20;

/// Mean loss and gradients of the golden file's batch.
fn loss_and_gradients(model: &Llama<Flex>, golden: &Golden, recompute: Recompute) -> (f32, GradientMap<Flex>) {
    let batch = every_next_token(&golden.ids("input_ids"), TOKENS);
    let scale = 1.0 / batch.trained_tokens() as f64;
    let on_device = model.upload(&batch.input_ids, &batch.targets, &batch.positions, &batch.cu_seqlens);
    let mut gradients = GradientMap::default();
    let options = PassOptions { recompute, offload: true, gradient_scale: scale, chunk_tokens: CHUNK };
    let loss = host(model.loss_and_gradients(&on_device, options, &mut gradients))[0];
    (loss * scale as f32, gradients)
}

fn gradient(gradients: &GradientMap<Flex>, name: &str) -> Vec<f32> {
    host(gradients.get(name).unwrap_or_else(|| panic!("{name} has no gradient")).clone())
}

/// Every gradient of the golden file is ours, and we have no other.
fn assert_gradients_agree(golden: &str, model: &Llama<Flex>) {
    let golden = Golden::open(golden);
    let (loss, gradients) = loss_and_gradients(model, &golden, Recompute::Full);
    assert!((loss - golden.f32s("loss")[0]).abs() < 1e-5, "loss {loss}");
    let names = golden.keys("grad.");
    assert_eq!(names.len(), gradients.len());
    for name in names {
        let apart = relative_difference(&gradient(&gradients, &name), &golden.f32s(&format!("grad.{name}")));
        assert!(apart < 1e-3, "{name}: {apart:e}");
    }
}

#[test]
fn lora_gradients_equal_those_of_peft() {
    let cases = [
        ("tiny-llama-lora", "tiny-llama"),
        ("tiny-llama-rslora", "tiny-llama"),
        ("tiny-llama-tied-lora", "tiny-llama-tied"),
    ];
    for (adapter, model) in cases {
        assert_gradients_agree(adapter, &load(model, Some(adapter), BaseStorage::Frozen));
    }
}

#[test]
fn gradients_of_all_weights_equal_those_of_torch() {
    let mut model = load("tiny-llama", None, BaseStorage::Trained);
    assert_eq!(model.parameters_mut().len(), 21);
    assert_gradients_agree("tiny-llama-full-gradients", &model);
}

#[test]
fn recomputing_blocks_changes_no_bit() {
    let golden = Golden::open("tiny-llama-lora");
    for (adapter, storage) in [
        (Some("tiny-llama-lora"), BaseStorage::Nf4 { double_quant: true }),
        (Some("tiny-llama-lora"), BaseStorage::Frozen),
        (None, BaseStorage::Trained),
    ] {
        let model = load("tiny-llama", adapter, storage);
        let (kept_loss, kept) = loss_and_gradients(&model, &golden, Recompute::None);
        for policy in [Recompute::Full, Recompute::Selective] {
            let (loss, recomputed) = loss_and_gradients(&model, &golden, policy);
            assert_eq!(loss, kept_loss);
            assert_eq!(kept.len(), recomputed.len());
            for (name, _) in kept.iter() {
                assert_eq!(gradient(&recomputed, name), gradient(&kept, name), "{policy:?}: {name}");
            }
        }
    }
}
