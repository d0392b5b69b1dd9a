//! Layers with a gated short convolution, with keys and values of another layer, and with what else Gemma 4 has: documents, policies, generation and
//! adapters.

use std::collections::BTreeMap;

use firebrick_arch::{
    KeysAndValues, LayerNorms, LoraConfig, Mixer, ModelConfig, PER_LAYER_EMBEDDING, PerLayerInputs, QkNorm,
    ShortConvSpec, TargetModules,
};
use firebrick_kernels::backends::Flex;
use firebrick_kernels::{BaseStorage, GradientMap, GradientSink, Recompute};
use firebrick_precision::FloatType;
use tempfile::tempdir;

use crate::peft::read_adapter_config;
use crate::test_config::{build_options, tiny};
use crate::{BatchLimits, Decoder, GenerateOptions, HfFolder, LossOptions, PassOptions, Sampler};

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

pub(crate) fn model_of(config: ModelConfig, lora: Option<LoraConfig>) -> Decoder<Flex> {
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

/// Describes layers with inputs of their own and factors of their outputs; keys and values of the first are made of one projection.
fn like_gemma4() -> ModelConfig {
    let mut config = sharing();
    config.spec.attentions_mut().for_each(|attention| attention.qk_norm = QkNorm::PerHead);
    config.spec.layers[0].mixer.attention_mut().unwrap().values_are_keys = true;
    config.spec.layers[1].norms = LayerNorms::PreAndPost;
    config.spec.layers.iter_mut().for_each(|layer| layer.has_scalar = true);
    config.spec.per_layer_inputs = Some(PerLayerInputs { width: 4, vocab_size: 11 });
    config.stored_per_layer_inputs = config.spec.per_layer_inputs;
    config
}

/// Returns such a model with factors that are not 1.
fn gemma4(lora: Option<LoraConfig>) -> Decoder<Flex> {
    let mut model = model_of(like_gemma4(), lora);
    model.layers.iter_mut().zip([0.7, 1.3]).for_each(|(layer, scalar)| layer.scalar = Some(scalar));
    model
}

/// Returns the loss of documents in one row, and the gradients by name.
pub(crate) fn gradients(
    model: &Decoder<Flex>,
    documents: &[&[u32]],
    recompute: Recompute,
) -> (f32, BTreeMap<String, Vec<f32>>) {
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

pub(crate) fn assert_near(found: &[f32], expected: &[f32], what: &str) {
    let difference = firebrick_precision::difference::relative_difference(found, expected, 1.0);
    assert!(difference < 1e-5, "{what}: {difference}");
}

#[test]
fn packed_documents_train_as_by_themselves() {
    packed_as_by_themselves(&model(None), "model.layers.0.conv.conv.weight");
    packed_as_by_themselves(&model_of(sharing(), None), "model.layers.0.self_attn.v_proj.weight");
    packed_as_by_themselves(&gemma4(None), "model.layers.0.self_attn.k_proj.weight");
    // In tiles of the MLP and what follows it.
    packed_as_by_themselves(&Decoder { tile_tokens: 3, ..gemma4(None) }, "model.per_layer_model_projection.weight");
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
    let of_shared = ["model.layers.0.self_attn.k_proj.weight", "model.layers.0.self_attn.k_norm.weight"];
    are_slopes(gemma4(None), of_shared);
    let of_layer = ["model.layers.1.per_layer_input_gate.weight", "model.layers.0.post_per_layer_input_norm.weight"];
    are_slopes(gemma4(None), of_layer);
    are_slopes(gemma4(None), ["model.per_layer_model_projection.weight", "model.per_layer_projection_norm.weight"]);
    are_slopes(gemma4(None), ["model.embed_tokens.weight", "model.layers.0.per_layer_projection.weight"]);
}

pub(crate) fn are_slopes(mut model: Decoder<Flex>, names: [&str; 2]) {
    let document: [&[u32]; 1] = [&[1, 5, 2, 8, 3, 3]];
    let (_, gradients_of) = gradients(&model, &document, Recompute::Full);
    for name in names {
        let norm = gradients_of[name].iter().map(|value| value * value).sum::<f32>().sqrt();
        let mut losses = Vec::new();
        for step in [1e-3, -2e-3, 1e-3] {
            for parameter in model.parameters_mut().into_iter().filter(|parameter| &*parameter.name == name) {
                let (shape, device) = (parameter.value.shape(), parameter.value.device());
                let along: Vec<f32> = gradients_of[name].iter().map(|value| value / norm * step).collect();
                let along = burn_tensor::Tensor::from_data(burn_tensor::TensorData::new(along, shape), &device);
                parameter.value = parameter.value.clone().add(along);
            }
            losses.push(gradients(&model, &document, Recompute::Full).0);
        }
        let slope = (losses[0] - losses[1]) / 2e-3;
        assert!((slope / norm - 1.0).abs() < 2e-2, "{name}: slope {slope}, gradient {norm}");
    }
}

#[test]
fn text_is_written_as_the_whole_text_would_be_read() {
    [model(None), model_of(sharing(), None), gemma4(None)].iter().for_each(is_written_as_read);
}

#[test]
fn a_saved_model_has_the_table_and_the_factors_of_the_layers_and_loads() {
    let temp = tempdir().unwrap();
    let (model, dir) = (gemma4(None), temp.path().join("saved"));
    model.save_model(model.collect_weights(), &dir, FloatType::F32, None, None).unwrap();
    let folder = HfFolder::open(&dir).unwrap();
    let options = build_options(BaseStorage::Frozen(FLOAT), 64);
    let loaded = Decoder::<Flex>::load(&folder, like_gemma4(), &options, &Default::default(), &mut |_| ()).unwrap();
    let logits = |model: &Decoder<Flex>| {
        let batch = model.upload(&[1, 5, 10], &[-100; 3], &[0, 1, 2], &[0, 3]).unwrap();
        model.logits(&batch).into_data().to_vec::<f32>().unwrap()
    };
    assert_near(&logits(&loaded), &logits(&model), "logits");
    // What is loaded is written as it was read.
    let again = temp.path().join("again");
    let trained = build_options(BaseStorage::Trained, 64);
    let loaded = Decoder::<Flex>::load(&folder, like_gemma4(), &trained, &Default::default(), &mut |_| ()).unwrap();
    loaded.save_model(loaded.collect_weights(), &again, FloatType::F32, None, None).unwrap();
    let again = HfFolder::open(&again).unwrap();
    for name in [PER_LAYER_EMBEDDING, "model.layers.1.layer_scalar"] {
        assert_eq!(again.read(name).unwrap(), folder.read(name).unwrap(), "{name}");
    }
}

#[test]
fn pairs_of_keys_that_a_layer_does_not_compute_are_left_out_of_an_adapter() {
    let temp = tempdir().unwrap();
    let named = ["q_proj", "k_proj"].map(str::to_owned).to_vec();
    let lora = LoraConfig { r: 2, target_modules: TargetModules::Named(named), ..LoraConfig::default() };
    model_of(tiny(&[]).unwrap(), Some(lora.clone())).save_adapter(temp.path(), &lora, None).unwrap();
    let found = read_adapter_config(temp.path()).unwrap();
    let mut model = model_of(sharing(), Some(found));
    model.load_adapter(temp.path()).unwrap();
    let adapted = model.parameters().into_iter().filter(|parameter| parameter.name.contains("k_proj.lora_A"));
    assert_eq!(adapted.count(), 1);
}

fn greedy(max_new_tokens: usize) -> GenerateOptions {
    let (stop_tokens, sampler) = (Vec::new(), Sampler::greedy());
    GenerateOptions { max_new_tokens, stop_tokens, sampler, limits: BatchLimits::NONE }
}

fn is_written_as_read(model: &Decoder<Flex>) {
    let options = greedy(6);
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
    let options = greedy(4);
    let mut conversation = model.conversation(32);
    let mut answer = |prompt: &[u32]| {
        let mut written = Vec::new();
        let go_on = &mut |token| {
            written.push(token);
            std::ops::ControlFlow::Continue(())
        };
        model.converse(&mut conversation, prompt, &options, go_on).unwrap();
        written
    };
    let alone = |prompt: &[u32]| model.generate(&[prompt.to_vec()], &options).unwrap().remove(0);
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
    let options = greedy(4);
    let mut conversation = model.conversation(32);
    for prompt in [&[1, 5, 2][..], &[1, 5, 2, 4, 4]] {
        model.converse(&mut conversation, prompt, &options, &mut |_| std::ops::ControlFlow::Continue(())).unwrap();
    }
    assert_eq!([5, 4, 2].map(|common| conversation.go_back(common)), [5, 3, 0]);
}

#[test]
fn adapters_are_on_both_projections() {
    let lora = LoraConfig { r: 2, target_modules: TargetModules::AllLinear, ..LoraConfig::default() };
    let model = model(Some(lora.clone()));
    let (_, found) = gradients(&model, &[&[1, 5, 2, 8]], Recompute::Full);
    for module in ["in_proj", "out_proj"] {
        let adapted = found.keys().filter(|name| name.contains(&format!("layers.0.conv.{module}")));
        assert_eq!(adapted.count(), 2, "{found:?}");
    }
    assert!(!found.contains_key("model.layers.0.conv.conv.weight"));
    let (_, found) = gradients(&gemma4(Some(lora)), &[&[1, 5, 2, 8]], Recompute::Full);
    let count = |module: &str| found.keys().filter(|name| name.contains(module)).count();
    assert_eq!(["per_layer_input_gate", "per_layer_projection", "per_layer_model"].map(count), [4, 4, 0]);
}
