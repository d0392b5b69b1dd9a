//! A pass without the adapter, and a custom loss that needs one.

use firebrick_kernels::backends::Flex;
use firebrick_kernels::{GradientMap, GradientSink, Kernels};
use firebrick_model::{Decoder, LossOptions, PassOptions, Recompute};
use firebrick_tests::{
    FROZEN, Golden, every_next_token, families, host, host_gradients, load, on_every_backend, packed, preference_loss,
    upload,
};

const WITHOUT_ADAPTER: PassOptions =
    PassOptions { recompute: Recompute::Full, offload: false, adapters: false, dropout: None };

/// Computes the log-probabilities of all targets of the golden batch.
fn log_probs<B: Kernels>(model: &Decoder<B>, golden: &Golden, pass: PassOptions) -> Vec<f32> {
    let batch = upload(model, &every_next_token(&golden.ids("input_ids"), 48));
    let options = LossOptions { chunk_tokens: 20, gradient_scale: None, log_probs: true, temperature: 1.0 };
    let mut sink = GradientMap::default();
    let log_probs = B::section(model.device(), || {
        let (hidden_nd, _) = model.forward(&batch, pass);
        model.loss(hidden_nd, &batch.targets, options, &mut sink).log_probs_m.expect("they were requested")
    });
    assert!(sink.is_empty(), "a loss without a gradient scale adds no gradient");
    host(log_probs)
}

fn adapter_off<B: Kernels>() {
    for family in families::<B>() {
        let golden = Golden::open(family);
        let base = load::<B>(family, None, FROZEN);
        let adapted = load::<B>(family, Some(&format!("{family}-lora")), FROZEN);
        let expected = log_probs(&base, &golden, PassOptions::default());
        assert_eq!(log_probs(&adapted, &golden, WITHOUT_ADAPTER), expected, "{family}");
        assert_ne!(
            log_probs(&adapted, &golden, PassOptions::default()),
            expected,
            "{family}: the adapter has an effect"
        );
    }
}

on_every_backend!(a_pass_without_the_adapter_equals_the_base_model_to_the_bit, adapter_off);

/// Computes the custom loss of a chosen and a rejected document, and the gradients of the adapter.
fn preference<B: Kernels>(model: &Decoder<B>) -> (f32, GradientMap<B>) {
    let golden = Golden::open("tiny-llama-packed");
    let documents = [golden.ids("doc0.input_ids"), golden.ids("doc1.input_ids")];
    let batch = upload(model, &packed(&[&documents[0], &documents[1]]));
    let mut gradients = GradientMap::default();
    gradients.begin_micro_batch(true);
    let loss = host(preference_loss(model, &batch, documents[0].len() - 1, 0.05, &mut gradients))[0];
    (loss, gradients)
}

/// A step along the gradient changes the loss by the length of the gradient, as central differences measure it.
#[test]
fn gradients_of_a_custom_loss_equal_its_finite_differences() {
    let load = || load::<Flex>("tiny-llama", Some("tiny-llama-lora"), FROZEN);
    let (loss, gradients) = preference(&load());
    assert!(loss.is_finite() && loss > 0.0, "{loss}");
    let values = host_gradients(&gradients);
    assert_eq!(values.len(), load().parameters().len());
    let norm = values.values().flatten().map(|&value| f64::from(value).powi(2)).sum::<f64>().sqrt();
    // Much smaller than the distance over which the sigmoid bends.
    let step = 1e-2;
    let loss_at = |distance: f64| {
        let mut model = load();
        for parameter in model.parameters_mut() {
            let gradient =
                gradients.get(&parameter.name).expect("every parameter of the adapter has a gradient").clone();
            parameter.value = parameter.value.clone().add(gradient.mul_scalar(distance / norm));
        }
        f64::from(preference(&model).0)
    };
    let slope = (loss_at(step) - loss_at(-step)) / (2.0 * step);
    assert!((slope / norm - 1.0).abs() < 1e-2, "slope {slope}, norm of the gradient {norm}");
}

fn same_as_flex<B: Kernels>() {
    let expected = preference(&load::<Flex>("tiny-llama", Some("tiny-llama-lora"), FROZEN));
    let ours = preference(&load::<B>("tiny-llama", Some("tiny-llama-lora"), FROZEN));
    assert!((ours.0 - expected.0).abs() < 1e-4, "{} {}", ours.0, expected.0);
    let (ours, expected) = (host_gradients(&ours.1), host_gradients(&expected.1));
    assert!(ours.keys().eq(expected.keys()));
    for (name, expected) in &expected {
        let difference = firebrick_tests::relative_difference(&ours[name], expected);
        assert!(difference < 1e-3, "{name}: {difference:e}");
    }
}

on_every_backend!(a_custom_loss_gives_the_same_gradients_as_on_flex, same_as_flex);
