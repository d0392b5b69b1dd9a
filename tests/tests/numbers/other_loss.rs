//! A loss operation that replaces the fused cross entropy: its gradients reach the head, the hidden states and every weight.

use burn_autodiff::Autodiff;
use burn_tensor::{Int, Tensor, TensorData};
use firebrick_kernels::backends::Flex;
use firebrick_kernels::{GradientMap, GradientSink, Kernels};
use firebrick_model::{Decoder, MicroBatch, PassOptions};
use firebrick_tests::{
    Golden, TRAINED, batch, host, load, loss_options, on_every_backend, relative_difference, upload, z_loss,
};

/// Large enough that the penalty changes every gradient by more than the tolerance.
const PENALTY: f64 = 0.02;
/// Factor of the gradients.
const SCALE: f64 = 0.25;

/// Uploads the golden batch; every third token has no target.
fn micro_batch<B: Kernels>(model: &Decoder<B>) -> MicroBatch<B> {
    let rows: Vec<Vec<u32>> = Golden::open("tiny-llama").ids("input_ids").chunks(48).map(<[u32]>::to_vec).collect();
    upload(model, &batch(&rows, |_, index| index % 3 > 0))
}

/// Returns the loss, the gradient of the hidden states, and the hidden states. Gradients of parameters go to the sink.
fn loss<B: Kernels>(model: &Decoder<B>, sink: &mut GradientMap<B>) -> [Vec<f32>; 3] {
    let batch = micro_batch(model);
    B::section(model.device(), || {
        let (hidden_nd, tape) = model.forward(&batch, PassOptions::default());
        let loss = model.loss_with(hidden_nd.clone(), &batch.targets, loss_options(SCALE), sink, z_loss(PENALTY));
        let d_hidden_nd = loss.d_hidden_nd.expect("there is a gradient scale");
        model.backward(tape, d_hidden_nd.clone(), sink);
        [host(loss.loss_sum), host(d_hidden_nd), host(hidden_nd)]
    })
}

/// Computes the same loss of the same hidden states and head, differentiated by Burn: loss, gradient of the hidden states, of the head.
fn recorded(hidden: &[f32], head: &[f32], batch: &MicroBatch<Flex>, [width, vocabulary]: [usize; 2]) -> [Vec<f32>; 3] {
    type Recorded = Autodiff<Flex>;
    let device = Default::default();
    let matrix = |values: &[f32], columns: usize| {
        let shape = [values.len() / columns, columns];
        Tensor::<Recorded, 2>::from_data(TensorData::new(values.to_vec(), shape), &device).require_grad()
    };
    let indices = |tensor: &Tensor<Flex, 1, Int>| Tensor::<Recorded, 1, Int>::from_data(tensor.to_data(), &device);
    let (hidden_nd, head_vd) = (matrix(hidden, width), matrix(head, width));
    assert_eq!(head_vd.dims()[0], vocabulary);
    let logits_mv =
        hidden_nd.clone().select(0, indices(&batch.targets.positions_m)).matmul(head_vd.clone().transpose());
    let targets_m1 = indices(&batch.targets.targets_m).reshape([batch.targets.count, 1]);
    let log_sum_m1 = logits_mv.clone().exp().sum_dim(1).log();
    let cross_entropy = log_sum_m1.clone().sub(logits_mv.gather(1, targets_m1)).sum();
    let loss = cross_entropy.add(log_sum_m1.clone().mul(log_sum_m1).sum().mul_scalar(PENALTY));
    let gradients = loss.clone().mul_scalar(SCALE).backward();
    let gradient = |tensor: &Tensor<Recorded, 2>| host(tensor.grad(&gradients).expect("the loss depends on it"));
    [host(loss.inner()), gradient(&hidden_nd), gradient(&head_vd)]
}

fn equals_autodiff<B: Kernels>() {
    let reference = load::<Flex>("tiny-llama", None, TRAINED);
    let model = load::<B>("tiny-llama", None, TRAINED);
    let mut sink = GradientMap::default();
    sink.begin_micro_batch(true);
    let [loss_sum, d_hidden, hidden] = loss(&model, &mut sink);
    let head = |model: &Decoder<Flex>| {
        let parameters = model.parameters();
        host(parameters.iter().find(|parameter| &*parameter.name == "lm_head.weight").expect("it trains").value.clone())
    };
    let spec = &reference.config.spec;
    let expected = recorded(&hidden, &head(&reference), &micro_batch(&reference), [spec.hidden_size, spec.vocab_size]);
    let d_head = host(sink.get("lm_head.weight").expect("the head trains").clone());
    for ((ours, expected), what) in [loss_sum, d_hidden, d_head].iter().zip(&expected).zip(["loss", "hidden", "head"]) {
        let difference = relative_difference(ours, expected);
        assert!(difference < 1e-4, "{what}: {difference:e}");
    }
}

on_every_backend!(the_gradients_of_another_loss_operation_equal_those_of_autodiff, equals_autodiff);

/// The head of a tied model gets its gradient from this loss and from the embedding, and a second micro-batch adds to both.
#[test]
fn gradients_of_another_loss_operation_equal_its_finite_differences_for_tied_and_separate_heads() {
    for name in ["tiny-llama", "tiny-qwen2"] {
        let model = load::<Flex>(name, None, TRAINED);
        let mut sink = GradientMap::default();
        for last in [false, true] {
            sink.begin_micro_batch(last);
            loss(&model, &mut sink);
        }
        let gradient =
            |name: &str| sink.get(name).expect("every weight has a gradient").clone().mul_scalar(0.5 / SCALE);
        let squares = |name: &str| host(gradient(name)).iter().map(|&value| f64::from(value).powi(2)).sum::<f64>();
        let norm = model.parameters().iter().map(|parameter| squares(&parameter.name)).sum::<f64>().sqrt();
        let step = 1e-2;
        let loss_at = |distance: f64| {
            let mut moved = load::<Flex>(name, None, TRAINED);
            for parameter in moved.parameters_mut() {
                let along = gradient(&parameter.name).mul_scalar(distance / norm);
                parameter.value = parameter.value.clone().add(along);
            }
            f64::from(loss(&moved, &mut GradientMap::default())[0][0])
        };
        let slope = (loss_at(step) - loss_at(-step)) / (2.0 * step);
        assert!((slope / norm - 1.0).abs() < 1e-2, "{name}: slope {slope}, norm of the gradient {norm}");
    }
}
