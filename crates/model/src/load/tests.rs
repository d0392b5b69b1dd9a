//! Tests of the contents of a loaded model on the device, for each way that its tensors took there.

use std::collections::{BTreeMap, BTreeSet};

use burn_tensor::{Tensor, TensorData};
use firebrick_kernels::backends::Flex;
use firebrick_kernels::{BlockScales, Parameter, QuantizedWeight, Weight};
use firebrick_precision::FloatType;
use safetensors::Dtype;
use serde_json::json;
use tempfile::{TempDir, tempdir};

use super::synthetic::{normal, stream};
use super::*;
use crate::checkpoint::{TensorInfo, WEIGHTS_FILE, write_safetensors};
use crate::linear::Base;
use crate::mixer::MixerKind;
use crate::test_config::{build_options, encode, shapes, tiny};

fn storages() -> impl Iterator<Item = BaseStorage> {
    let quantized = QuantFormat::ALL.map(|format| BaseStorage::Frozen(Format::Quantized(format)));
    [BaseStorage::Trained, BaseStorage::Frozen(Format::Float(FloatType::F32))].into_iter().chain(quantized)
}

/// Larger tensors are several pieces, a few of which are read at once.
const NARROW: Limits = Limits { readers: 8, bytes: 4_000, piece: 600 };
const WIDE: Limits = Limits { readers: 8, bytes: 1 << 30, piece: 1 << 20 };

fn options(storage: BaseStorage, compute_dtype: DType) -> BuildOptions {
    BuildOptions { seed: 0, compute_dtype, ..build_options(storage, 4) }
}

/// Creates the tiny model with biases and an MLP of this width, stored in a format.
fn folder(width: usize, stored: Dtype) -> (TempDir, HfFolder, ModelConfig) {
    let (temp, sizes) = (tempdir().unwrap(), [("hidden_size", json!(32)), ("intermediate_size", json!(width))]);
    let biases = [("attention_bias", json!(true)), ("mlp_bias", json!(true))];
    let config = tiny(&[&sizes[..], &biases].concat()).unwrap();
    let info = |(name, shape): (String, Vec<usize>)| (name, TensorInfo { dtype: stored, shape });
    let infos: BTreeMap<_, _> = shapes(&config).into_iter().map(info).collect();
    let bytes = |name: &str| {
        let values = normal(infos[name].shape.iter().product(), 1.0, &mut stream(3, name));
        Ok(encode(&values, stored))
    };
    write_safetensors(&temp.path().join(WEIGHTS_FILE), &infos, bytes).unwrap();
    let folder = HfFolder::open(temp.path()).unwrap();
    (temp, folder, config)
}

fn load(
    (_, folder, config): &(TempDir, HfFolder, ModelConfig),
    options: &BuildOptions,
    quantizes_on_device: bool,
    limits: Limits,
) -> Result<Decoder<Flex>, ModelError> {
    Decoder::load_within(folder, config, options, None, &Default::default(), quantizes_on_device, limits, &mut |_| ())
}

fn data_of_weight(weight: Weight<Flex>) -> Vec<TensorData> {
    match weight {
        Weight::Dense(weight) => vec![weight.into_data()],
        Weight::Quantized(weight) => {
            let mut data = vec![weight.codes.into_data(), weight.table.into_data()];
            match weight.scales {
                BlockScales::Float(absmax) => data.push(absmax.into_data()),
                BlockScales::Narrow { codes, map } => data.extend([codes.into_data(), map.into_data()]),
                BlockScales::Nested { codes, absmax, map, offset, .. } => {
                    data.extend([codes.into_data(), absmax.into_data(), map.into_data(), offset.into_data()]);
                }
            }
            data
        }
    }
}

/// Reads every base tensor of the model from the device, by name.
fn data(model: &Decoder<Flex>) -> BTreeMap<String, Vec<TensorData>> {
    let vector = |parameter: &Parameter<Flex>| (parameter.name.to_string(), vec![parameter.value.to_data()]);
    let base = |name: String, base: &Base<Flex>| (name, data_of_weight(base.weight()));
    let mut all = BTreeMap::from([vector(&model.norm.weight)]);
    all.extend([base(EMBEDDING.to_owned(), &model.embed_tokens)]);
    all.extend(model.lm_head.iter().map(|head| base(HEAD.to_owned(), head)));
    for layer in &model.layers {
        let norms = [&layer.before_mixer, &layer.after_mixer, &layer.before_mlp, &layer.after_mlp];
        all.extend(norms.into_iter().flatten().map(|norm| vector(&norm.weight)));
        let MixerKind::Attention(attention) = &layer.mixer.kind else { unreachable!("tiny models have attention") };
        all.extend(attention.qk_norm.iter().map(|norm| vector(&norm.weight)));
        all.extend(attention.sinks.iter().map(|sinks| vector(&sinks.logits)));
        for linear in layer.linears() {
            all.extend([base(format!("{}.weight", linear.path), &linear.base)]);
            all.extend(linear.bias.iter().map(|bias| vector(&bias.parameter)));
        }
    }
    all
}

/// Returns a tensor as it is on the device when it is read whole as f32 and uploaded alone.
fn one_by_one(
    (_, folder, config): &(TempDir, HfFolder, ModelConfig),
    tensor: &TensorSpec,
    options: &BuildOptions,
) -> Vec<TensorData> {
    let TensorSpec { name, shape, .. } = tensor;
    let (values, device) = (folder.read_f32(name, shape).unwrap(), Default::default());
    let dense = BTreeSet::new();
    if let Format::Quantized(format) = options.formats(&dense).storage_of(&config.spec, name, tensor.role) {
        let quantized = format.quantize(&values, shape).unwrap();
        return data_of_weight(Weight::Quantized(QuantizedWeight::<Flex>::upload(&quantized, &device)));
    }
    let flat = Tensor::<Flex, 1>::from_floats(values.as_slice(), &device);
    match (options.storage, shape.as_slice()) {
        // Ties to even; burn-flex rounds ties differently.
        (BaseStorage::Frozen(_), &[rows, columns]) => {
            vec![TensorData::new(values, [rows, columns]).convert_dtype(options.compute_dtype)]
        }
        (BaseStorage::Trained, &[rows, columns]) => vec![flat.reshape([rows, columns]).into_data()],
        _ => vec![flat.into_data()],
    }
}

#[test]
fn every_tensor_loads_as_by_itself() {
    for stored in [Dtype::F32, Dtype::BF16, Dtype::F16] {
        // Rows of whole blocks in every format.
        let source = folder(64, stored);
        for (storage, compute) in storages().flat_map(|s| [(s, DType::F32), (s, DType::BF16)]) {
            let options = options(storage, compute);
            let expected: BTreeMap<_, _> = source
                .2
                .spec
                .tensors()
                .into_iter()
                .map(|tensor| (tensor.name.clone(), one_by_one(&source, &tensor, &options)))
                .collect();
            for limits in [NARROW, Limits { readers: 1, ..WIDE }, WIDE] {
                for quantizes_on_device in [false, true] {
                    let loaded = data(&load(&source, &options, quantizes_on_device, limits).unwrap());
                    let context = format!("{stored:?}, {options:?}, {limits:?}, on device: {quantizes_on_device}");
                    assert!(loaded.keys().eq(expected.keys()), "{context}");
                    for (name, expected) in &expected {
                        assert_eq!(&loaded[name], expected, "{name}: {context}");
                    }
                }
            }
        }
    }
}

#[test]
fn rows_of_no_whole_blocks_are_refused_by_name() {
    let source = folder(48, Dtype::BF16);
    for quantizes_on_device in [false, true] {
        let storage = BaseStorage::Frozen(Format::Quantized(QuantFormat::Mxfp4));
        let error = load(&source, &options(storage, DType::F32), quantizes_on_device, NARROW).unwrap_err();
        let message = format!("{error} {:?}", std::error::Error::source(&error).map(ToString::to_string));
        assert!(message.contains("layers.0.mlp.down_proj.weight") && message.contains("blocks of 32"), "{message}");
    }
}

#[test]
fn progress_names_every_tensor_in_order() {
    let (_temp, folder, config) = folder(64, Dtype::F32);
    let (options, mut seen) = (options(BaseStorage::Frozen(Format::Float(FloatType::F32)), DType::F32), Vec::new());
    let mut progress = |name: &str| seen.push(name.to_owned());
    Decoder::<Flex>::load(&folder, config.clone(), &options, &Default::default(), &mut progress).unwrap();
    let expected: Vec<_> = config.spec.tensors().into_iter().map(|tensor| tensor.name).collect();
    assert_eq!(seen, expected);
}
