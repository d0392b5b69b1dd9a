//! Layers with a gated short convolution, and with keys and values of another layer: documents, policies, generation and adapters.

use std::collections::BTreeMap;

use firebrick_arch::{KeysAndValues, LoraConfig, Mixer, ModelConfig, ShortConvSpec, TargetModules};
use firebrick_kernels::backends::Flex;
use firebrick_kernels::{BaseStorage, GradientMap, GradientSink, Recompute};

use crate::test_config::{build_options, tiny};
use crate::{BatchLimits, Decoder, GenerateOptions, LossOptions, PassOptions, Sampler};

/// Describes a convolution in the first of two layers, and attention in the second.
fn config() -> ModelConfig {
    let mut config = tiny(&[]).unwrap();
    config.spec.initializer_range = 0.3;
    config.spec.layers[0].mixer = Mixer::ShortConv(ShortConvSpec { channels: 8, width: 3 });
    config
}

fn model(lora: Option<LoraConfig>) -> Decoder<Flex> {
    model_of(config(), lora)
}

fn model_of(config: ModelConfig, lora: Option<LoraConfig>) -> Decoder<Flex> {
    let storage = if lora.is_some() { BaseStorage::Frozen(FLOAT) } else { BaseStorage::Trained };
    let options = crate::BuildOptions { lora, ..build_options(storage, 64) };
    Decoder::random(config, &options, None, &Default::default()).unwrap()
}

const FLOAT: firebrick_precision::Format = firebrick_precision::Format::Float(firebrick_precision::FloatType::F32);

/// Describes two layers of attention, the second of which reads the keys and values of the first; values are normalized.
fn sharing() -> ModelConfig {
    let mut config = tiny(&[]).unwrap();
    config.spec.initializer_range = 0.3;
    let sharing = [KeysAndValues::Published(0), KeysAndValues::OfLayer(0)];
    config
        .spec
        .attentions_mut()
        .zip(sharing)
        .for_each(|(attention, from)| (attention.keys_and_values, attention.value_norm) = (from, true));
    config
}

/// Returns the loss of documents in one row, and the gradients by name.
fn gradients(model: &Decoder<Flex>, documents: &[&[u32]], recompute: Recompute) -> (f32, BTreeMap<String, Vec<f32>>) {
    let ids = documents.concat();
    let targets: Vec<i64> = ids.iter().map(|&id| i64::from((id * 3 + 1) % 11)).collect();
    let positions: Vec<u32> = documents.iter().flat_map(|document| 0..document.len() as u32).collect();
    let mut ends = vec![0];
    documents.iter().for_each(|document| ends.push(ends[ends.len() - 1] + document.len() as u32));
    let batch = model.upload(&ids, &targets, &positions, &ends).unwrap();
    let loss = LossOptions { chunk_tokens: 4, gradient_scale: Some(1.0), log_probs: false, temperature: 1.0 };
    let mut sink = GradientMap::default();
    sink.begin_micro_batch(true);
    let pass = PassOptions { recompute, ..PassOptions::default() };
    let loss = model.loss_and_gradients(&batch, pass, loss, &mut sink).into_data().to_vec::<f32>().unwrap()[0];
    let values = |tensor: &burn_tensor::Tensor<Flex, 1>| tensor.to_data().to_vec::<f32>().unwrap();
    (loss, sink.iter().map(|(name, gradient)| (name.to_string(), values(gradient))).collect())
}

fn assert_near(found: &[f32], expected: &[f32], what: &str) {
    let difference = firebrick_precision::difference::largest_difference(found, expected);
    assert!(difference < 1e-5, "{what}: {difference}");
}

#[test]
fn packed_documents_train_as_by_themselves() {
    packed_as_by_themselves(&model(None), "model.layers.0.conv.conv.weight");
    packed_as_by_themselves(&model_of(sharing(), None), "model.layers.0.self_attn.v_proj.weight");
}

fn packed_as_by_themselves(model: &Decoder<Flex>, name: &str) {
    let documents: [&[u32]; 3] = [&[1, 5, 2, 8, 3], &[4], &[9, 7, 7, 2]];
    let mut loss = 0.0;
    let mut expected: BTreeMap<String, Vec<f32>> = BTreeMap::new();
    for document in documents {
        let (of_document, gradients) = gradients(model, &[document], Recompute::None);
        loss += of_document;
        for (name, gradient) in gradients {
            let sum = expected.entry(name).or_insert_with(|| vec![0.0; gradient.len()]);
            sum.iter_mut().zip(gradient).for_each(|(sum, value)| *sum += value);
        }
    }
    assert!(expected[name].iter().all(|value| *value != 0.0));
    assert_eq!(expected.contains_key("model.layers.1.self_attn.k_proj.weight"), name.contains("conv"));
    for recompute in [Recompute::None, Recompute::Selective, Recompute::Projections, Recompute::Full] {
        let (packed, found) = gradients(model, &documents, recompute);
        assert!((packed - loss).abs() < 1e-4, "{recompute:?}: {packed}, {loss}");
        assert_eq!(found.len(), expected.len());
        found.iter().for_each(|(name, values)| assert_near(values, &expected[name], name));
    }
}

#[test]
fn gradients_are_the_slopes_of_the_loss() {
    are_slopes(model(None), ["model.layers.0.conv.conv.weight", "model.layers.0.conv.in_proj.weight"]);
    let of_publisher = ["model.layers.0.self_attn.k_proj.weight", "model.layers.0.self_attn.v_proj.weight"];
    are_slopes(model_of(sharing(), None), of_publisher);
}

fn are_slopes(mut model: Decoder<Flex>, names: [&str; 2]) {
    let document: [&[u32]; 1] = [&[1, 5, 2, 8, 3, 3]];
    let (_, gradients_of) = gradients(&model, &document, Recompute::Full);
    for name in names {
        let norm = gradients_of[name].iter().map(|value| value * value).sum::<f32>().sqrt();
        let mut losses = Vec::new();
        for step in [1e-2, -2e-2, 1e-2] {
            for parameter in model.parameters_mut().into_iter().filter(|parameter| &*parameter.name == name) {
                let (shape, device) = (parameter.value.shape(), parameter.value.device());
                let along: Vec<f32> = gradients_of[name].iter().map(|value| value / norm * step).collect();
                let along = burn_tensor::Tensor::from_data(burn_tensor::TensorData::new(along, shape), &device);
                parameter.value = parameter.value.clone().add(along);
            }
            losses.push(gradients(&model, &document, Recompute::Full).0);
        }
        let slope = (losses[0] - losses[1]) / 2e-2;
        assert!((slope / norm - 1.0).abs() < 2e-2, "{name}: slope {slope}, gradient {norm}");
    }
}

#[test]
fn text_is_written_as_the_whole_text_would_be_read() {
    [model(None), model_of(sharing(), None)].iter().for_each(is_written_as_read);
}

fn is_written_as_read(model: &Decoder<Flex>) {
    let options = GenerateOptions {
        max_new_tokens: 6,
        stop_tokens: Vec::new(),
        sampler: Sampler::greedy(),
        limits: BatchLimits::NONE,
    };
    let prompts = [vec![1, 5, 2], vec![4], vec![9, 7, 7, 2, 2]];
    let written = model.generate(&prompts, &options).unwrap();
    for (prompt, answer) in prompts.iter().zip(&written) {
        let mut text = prompt.clone();
        for &token in answer {
            let positions: Vec<u32> = (0..text.len() as u32).collect();
            let batch = model.upload(&text, &vec![-100; text.len()], &positions, &[0, text.len() as u32]).unwrap();
            let best: Vec<i64> = model.logits(&batch).argmax(1).into_data().iter::<i64>().collect();
            assert_eq!(best[text.len() - 1], i64::from(token), "{prompt:?}");
            text.push(token);
        }
    }
}

#[test]
fn a_conversation_goes_on_or_starts_again() {
    let model = model(None);
    let options = |max_new_tokens| GenerateOptions {
        max_new_tokens,
        stop_tokens: Vec::new(),
        sampler: Sampler::greedy(),
        limits: BatchLimits::NONE,
    };
    let mut conversation = model.conversation(32);
    let mut answer = |prompt: &[u32]| {
        let mut written = Vec::new();
        let go_on = &mut |token| {
            written.push(token);
            std::ops::ControlFlow::Continue(())
        };
        model.converse(&mut conversation, prompt, &options(4), go_on).unwrap();
        written
    };
    let alone = |prompt: &[u32]| model.generate(&[prompt.to_vec()], &options(4)).unwrap().remove(0);
    let first = answer(&[1, 5, 2]);
    let longer = [&[1, 5, 2][..], &first, &[3, 8]].concat();
    let edited = [1, 5, 2, (first[0] + 1) % 11, 4];
    for prompt in [longer.as_slice(), &edited, &[1, 5, 3, 3], &[1, 5]] {
        assert_eq!(answer(prompt), alone(prompt), "{prompt:?}");
    }
}

#[test]
fn an_edited_answer_is_read_on_from_the_prompt_before_it() {
    let model = model(None);
    let options = GenerateOptions {
        max_new_tokens: 4,
        stop_tokens: Vec::new(),
        sampler: Sampler::greedy(),
        limits: BatchLimits::NONE,
    };
    let mut conversation = model.conversation(32);
    for prompt in [&[1, 5, 2][..], &[1, 5, 2, 4, 4]] {
        model.converse(&mut conversation, prompt, &options, &mut |_| std::ops::ControlFlow::Continue(())).unwrap();
    }
    assert_eq!([5, 4, 2].map(|common| conversation.go_back(common)), [5, 3, 0]);
}

#[test]
fn adapters_are_on_both_projections() {
    let lora = LoraConfig { r: 2, target_modules: TargetModules::AllLinear, ..LoraConfig::default() };
    let model = model(Some(lora));
    let (_, found) = gradients(&model, &[&[1, 5, 2, 8]], Recompute::Full);
    for module in ["in_proj", "out_proj"] {
        let adapted = found.keys().filter(|name| name.contains(&format!("layers.0.conv.{module}")));
        assert_eq!(adapted.count(), 2, "{found:?}");
    }
    assert!(!found.contains_key("model.layers.0.conv.conv.weight"));
}
