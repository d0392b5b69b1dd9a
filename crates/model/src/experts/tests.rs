//! Experts next to a dense MLP, as Gemma 4 has them: gradients, policies, and their names in a folder.

use burn_tensor::Tensor;
use firebrick_arch::{
    Activation, ExpertNames, LayerNorms, MlpSpec, ModelConfig, RouterSpec, SharedExpertSpec, TensorSpec,
};
use firebrick_kernels::Recompute;
use firebrick_kernels::backends::Flex;
use firebrick_precision::FloatType;
use tempfile::tempdir;

use crate::Decoder;
use crate::checkpoint::{HfFolder, WEIGHTS_FILE, safetensors_names};
use crate::layer::Mlp;
use crate::mixer::tests::{are_slopes, assert_near, gradients, model_of};
use crate::test_config::{tiny, write_folder_of};

/// Describes two layers of three experts next to a dense MLP.
fn config(top_k: usize) -> ModelConfig {
    let mut config = tiny(&[]).unwrap();
    config.spec.initializer_range = 0.3;
    for layer in &mut config.spec.layers {
        layer.norms = LayerNorms::PreAndPost;
        let router = RouterSpec { scaled: true, ..RouterSpec::softmax(true) };
        let shared = Some(SharedExpertSpec { intermediate_size: 12, gated: false, normed: true });
        layer.mlp = MlpSpec::experts(ExpertNames::Gemma4, [3, top_k, 6], Activation::GeluTanh, router, shared);
    }
    config
}

/// Creates such a model, whose experts have different scales.
fn model(top_k: usize) -> Decoder<Flex> {
    let mut model = model_of(config(top_k), None);
    let scales = Tensor::<Flex, 1>::from_floats([0.5, 2.0, 1.5], &model.device);
    for layer in &mut model.layers {
        let Mlp::Experts(experts) = &mut layer.mlp else { unreachable!("every layer is a mixture") };
        experts.scale.as_mut().expect("experts have scales").value = scales.clone();
    }
    model
}

#[test]
fn gradients_are_the_slopes_of_the_loss() {
    // Every expert is chosen, so that no step changes the choice.
    for names in [
        ["router.proj", "pre_feedforward_layernorm"],
        ["pre_feedforward_layernorm_2", "post_feedforward_layernorm_2"],
        ["post_feedforward_layernorm_1", "post_feedforward_layernorm"],
        ["experts.down_proj", "mlp.gate_proj"],
    ] {
        let names = names.map(|name| format!("model.layers.0.{name}.weight"));
        are_slopes(model(3), [&names[0], &names[1]]);
    }
}

#[test]
fn every_policy_computes_the_same_gradients_of_all_that_trains() {
    let model = model(2);
    let documents: [&[u32]; 2] = [&[1, 5, 2, 8, 3], &[9, 7, 7, 2]];
    let (_, expected) = gradients(&model, &documents, Recompute::None);
    let trained = model.config.spec.stacked_tensors().into_iter().filter(TensorSpec::may_train).count();
    assert_eq!((expected.len(), model.parameters().len()), (trained, trained));
    for recompute in [Recompute::Selective, Recompute::Projections, Recompute::Full] {
        let (_, found) = gradients(&model, &documents, recompute);
        found.iter().for_each(|(name, values)| assert_near(values, &expected[name], name));
    }
}

#[test]
fn experts_are_in_one_tensor_right_under_their_layer() {
    let (config, temp) = (config(2), tempdir().unwrap());
    let path = temp.path().join("model");
    write_folder_of(0.5, &path, &config, FloatType::F32, None).unwrap();
    let stored = safetensors_names(&path.join(WEIGHTS_FILE)).unwrap();
    let of_experts: Vec<_> = stored.iter().filter(|name| name.contains("experts.")).collect();
    assert_eq!(of_experts.len(), 2 * 2);
    assert!(stored.contains(&"model.layers.1.experts.gate_up_proj".to_owned()), "{stored:?}");
    let folder = HfFolder::open(&path).unwrap();
    let mut expected: Vec<_> = config.spec.tensors().into_iter().map(|tensor| tensor.name).collect();
    expected.sort();
    assert_eq!(folder.names().collect::<Vec<_>>(), expected);
    assert_eq!(folder.read_f32("model.layers.1.experts.2.up_proj.weight", &[6, 8]).unwrap(), [0.5; 48]);
}
