//! A base in every storage format: exactly the values of the host codec, and a loss near the dense one.
//!
//! Trade-off: the bounds hold for this fixture with random weights; `docs/decisions.md` has the errors of a trained model.

use std::collections::BTreeMap;
use std::fs;

use firebrick_arch::Role;
use firebrick_kernels::Kernels;
use firebrick_model::{BaseStorage, HfFolder, ModelConfig};
use firebrick_precision::{Format, QuantFormat};
use firebrick_tests::{
    FROZEN, Golden, every_next_token, fixture, host, largest_difference, load, on_every_backend, upload,
};
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use tempfile::{TempDir, tempdir};

use crate::forward::TOKENS;

/// Writes `tiny-llama` with each projection replaced by the values of its codes, from the host codec.
fn dequantized(format: QuantFormat) -> TempDir {
    let (source, folder) = (fixture("tiny-llama"), tempdir().unwrap());
    let weights = HfFolder::open(&source).expect("the fixture has weights");
    let tensors = ModelConfig::read(&source).expect("the fixture has a config").spec.tensors();
    let bytes: BTreeMap<String, (Vec<usize>, Vec<u8>)> = tensors
        .into_iter()
        .map(|tensor| {
            let mut values = weights.read_f32(&tensor.name, &tensor.shape).expect("the weight is there");
            if tensor.role == Role::Projection {
                values = format.quantize(&values, &tensor.shape).expect("the weights are finite").dequantize();
            }
            (tensor.name, (tensor.shape, values.iter().flat_map(|value| value.to_le_bytes()).collect()))
        })
        .collect();
    let views = bytes.iter().map(|(name, (shape, bytes))| {
        (name.clone(), TensorView::new(Dtype::F32, shape.clone(), bytes).expect("the bytes are those of the shape"))
    });
    safetensors::serialize_to_file(views, None, &folder.path().join("model.safetensors")).unwrap();
    fs::copy(source.join("config.json"), folder.path().join("config.json")).unwrap();
    folder
}

fn loss_and_logits<B: Kernels>(model: &str, storage: BaseStorage) -> (f32, Vec<f32>) {
    let golden = Golden::open("tiny-llama");
    let model = load::<B>(model, None, storage);
    let batch = every_next_token(&golden.ids("input_ids"), TOKENS);
    let on_device = upload(&model, &batch);
    let loss = host(model.loss_only(&on_device, 20))[0] / batch.loss_tokens() as f32;
    (loss, host(model.logits(&on_device)))
}

/// Checks that a weight is dequantized to the values of the host codec in every format; only double quantization may differ, in a last bit.
fn the_values_of_the_host_codec<B: Kernels>() {
    for format in QuantFormat::ALL {
        let folder = dequantized(format);
        let (loss, logits) = loss_and_logits::<B>("tiny-llama", BaseStorage::Frozen(Format::Quantized(format)));
        let (expected, expected_logits) = loss_and_logits::<B>(folder.path().to_str().unwrap(), FROZEN);
        let difference = largest_difference(&logits, &expected_logits);
        let tolerance = if format.double_quant() { 1e-5 } else { 0.0 };
        assert!(difference <= tolerance, "{format}: a logit differs by {difference:e}");
        assert!((loss - expected).abs() <= tolerance, "{format}: loss {loss} {expected}");
    }
}

on_every_backend!(a_base_in_every_format_computes_with_the_values_of_the_host_codec, the_values_of_the_host_codec);

/// Relative to the dense loss, with room for a factor of two; none of them is a bias that a wrong scale would give.
#[test]
fn the_loss_over_a_quantized_base_is_near_the_dense_one() {
    use firebrick_kernels::backends::Flex;
    let (dense, _) = loss_and_logits::<Flex>("tiny-llama", FROZEN);
    let bounds = [("nf4", 0.02), ("nf4_double_quant", 0.02), ("nvfp4", 0.015), ("mxfp4", 0.015), ("fp8", 0.0025)];
    let differences = bounds.map(|(name, bound)| {
        let format: QuantFormat = name.parse().unwrap();
        let (loss, _) = loss_and_logits::<Flex>("tiny-llama", BaseStorage::Frozen(Format::Quantized(format)));
        (name, (loss / dense - 1.0).abs(), bound)
    });
    assert!(differences.iter().all(|(_, difference, bound)| difference < bound), "dense {dense}: {differences:?}");
}
