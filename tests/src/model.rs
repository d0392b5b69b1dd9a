//! Fixture models on a device, batches built by hand, and the results of a batch.
//!
//! Trade-off: models compute in f32, so that their numbers compare with the golden files, unless a test names another format.

use std::collections::BTreeMap;
use std::path::Path;
use std::thread::spawn;

use burn_tensor::{DType, Tensor};
use firebrick_data::{Batch, IGNORE_INDEX};
use firebrick_kernels::{GemmFormat, GradientMap, GradientSink, Kernels};
use firebrick_model::peft::{TensorF32, grow_for_adapter, read_adapter_config};
use firebrick_model::{
    BaseStorage, BuildOptions, Companions, Decoder, Division, HfFolder, LossOptions, MicroBatch, PassOptions,
    read_config,
};
use firebrick_optim::{Optimizer, OptimizerConfig, OptimizerKind, Schedule, ScheduleKind, TrainedWeights};
use firebrick_parallel::Ranks;
use firebrick_precision::{FloatType, Format, QuantFormat};
use firebrick_trainer::run::step::{StepSettings, Trainer};

use crate::fixture;
use crate::recipe::snapshot;

/// Number of positions in the rotary tables of the models loaded here.
pub const POSITIONS: usize = 128;

/// The base as it is stored, frozen.
pub const FROZEN: BaseStorage = BaseStorage::Frozen(Format::Float(FloatType::F32));
/// The base in NF4 with double quantization, frozen.
pub const NF4: BaseStorage = BaseStorage::Frozen(Format::Quantized(QuantFormat::Nf4 { double_quant: true }));
/// Every weight trains.
pub const TRAINED: BaseStorage = BaseStorage::Trained;

/// Loads a fixture model in f32, with a fixture adapter on it. An absolute path works as a name too.
pub fn load<B: Kernels>(model: &str, adapter: Option<&str>, storage: BaseStorage) -> Decoder<B> {
    load_in(model, adapter, storage, DType::F32)
}

/// Does the same as [`load`] in a compute format.
pub fn load_in<B: Kernels>(
    model: &str,
    adapter: Option<&str>,
    storage: BaseStorage,
    compute_dtype: DType,
) -> Decoder<B> {
    load_divided(model, adapter, storage, compute_dtype, None)
}

/// Does the same as [`load_in`] with the layer weights divided over ranks.
pub fn load_divided<B: Kernels>(
    model: &str,
    adapter: Option<&str>,
    storage: BaseStorage,
    compute_dtype: DType,
    division: Option<Division>,
) -> Decoder<B> {
    load_as(model, adapter, storage, compute_dtype, GemmFormat::Compute, division)
}

fn load_as<B: Kernels>(
    model: &str,
    adapter: Option<&str>,
    storage: BaseStorage,
    compute_dtype: DType,
    gemms: GemmFormat,
    division: Option<Division>,
) -> Decoder<B> {
    let (folder, adapter) = (fixture(model), adapter.map(fixture));
    let lora = adapter.as_ref().map(|dir| read_adapter_config(dir).expect("the adapter has a readable config"));
    let options = BuildOptions { lora, gemms, ..BuildOptions::new(storage, compute_dtype, POSITIONS) };
    let mut config = read_config(&folder).expect("the model has a readable config");
    if let Some(dir) = &adapter {
        config = grow_for_adapter(config, dir).expect("the adapter has the rows that the model lacks");
    }
    let weights = HfFolder::open(&folder).expect("the model has weights");
    let device = B::Device::default();
    let loaded = Decoder::load_divided(&weights, config, &options, division, &device, &mut |_| ());
    let mut loaded = loaded.expect("it loads");
    if let Some(dir) = adapter {
        loaded.load_adapter(&dir).expect("the adapter fits the model");
    }
    loaded
}

/// Creates a trainer for the model that [`load_in`] returns, with this operand format of its GEMMs.
pub fn trainer<B: Kernels>(
    model: &str,
    adapter: Option<&str>,
    storage: BaseStorage,
    dtype: DType,
    gemms: GemmFormat,
    pass: PassOptions,
) -> Trainer<B> {
    trainer_of(load_as(model, adapter, storage, dtype, gemms, None), pass)
}

/// Creates a trainer for a model: 8-bit AdamW at a rate of 1e-3.
pub fn trainer_of<B: Kernels>(model: Decoder<B>, pass: PassOptions) -> Trainer<B> {
    Trainer {
        model,
        optimizer: Optimizer::new(OptimizerConfig {
            kind: OptimizerKind::AdamW8bit,
            beta1: 0.9,
            beta2: 0.999,
            epsilon: 1e-8,
            weight_decay: 0.01,
            weights: TrainedWeights::default(),
            max_grad_norm: Some(1.0),
        }),
        schedule: Schedule { kind: ScheduleKind::Constant, peak: 1e-3, lowest: 0.0, warmup_steps: 0, total_steps: 9 },
        ranks: Ranks::single(),
        settings: StepSettings { pass, loss_chunk_tokens: 20, ..StepSettings::default() },
    }
}

/// Uploads a batch.
pub fn upload<B: Kernels>(model: &Decoder<B>, batch: &Batch) -> MicroBatch<B> {
    let on_device = model.upload(&batch.input_ids, &batch.targets, &batch.positions, &batch.cu_seqlens);
    on_device.expect("the batch has tokens of the model")
}

/// Copies the values of a tensor to the host.
pub fn host<B: Kernels, const D: usize>(tensor: Tensor<B, D>) -> Vec<f32> {
    tensor.into_data().convert::<f32>().to_vec().expect("values were just converted to f32")
}

/// Copies the gradients to the host, by name.
pub fn host_gradients<B: Kernels>(gradients: &GradientMap<B>) -> BTreeMap<String, Vec<f32>> {
    gradients.iter().map(|(name, values)| (name.to_string(), host(values.clone()))).collect()
}

/// Returns the loss options of most tests. The chunk does not divide the tokens of the golden batches, so the last chunk of the loss is a short one.
pub fn loss_options(gradient_scale: f64) -> LossOptions {
    LossOptions { chunk_tokens: 20, gradient_scale: Some(gradient_scale), log_probs: false, temperature: 1.0 }
}

/// Returns the sum of the losses of a batch, and the gradients of the mean loss by the names of the tensors on disk.
pub fn loss_and_gradients<B: Kernels>(
    model: &Decoder<B>,
    batch: &Batch,
    pass: PassOptions,
) -> (f32, BTreeMap<String, Vec<f32>>) {
    loss_and_scaled_gradients(model, batch, pass, 1.0)
}

/// Does the same as [`loss_and_gradients`] with gradients that are `scale` times as large on the device, so that they do not underflow in float16.
pub fn loss_and_scaled_gradients<B: Kernels>(
    model: &Decoder<B>,
    batch: &Batch,
    pass: PassOptions,
    scale: f32,
) -> (f32, BTreeMap<String, Vec<f32>>) {
    let options = loss_options(f64::from(scale) / batch.loss_tokens() as f64);
    let (numbers, mut gradients) = numbers_and_gradients(model, &upload(model, batch), pass, options);
    gradients.values_mut().flatten().for_each(|value| *value /= scale);
    (numbers[0], gradients)
}

/// Checks that a checkpoint that is held on the device, of every weight or of an adapter, has the values of its step, though steps go on before it is
/// read and meanwhile. `folder` is empty.
pub fn assert_held_is_of_its_step<B: Kernels>(adapter: Option<&str>, dtype: DType, folder: &Path) {
    let (pass, storage) = (PassOptions::default(), adapter.map_or(TRAINED, |_| FROZEN));
    let lora = adapter.map(|name| read_adapter_config(&fixture(name)).expect("the adapter has a readable config"));
    let mut trainer = trainer::<B>("tiny-llama", adapter, storage, dtype, GemmFormat::Compute, pass);
    let batch = [packed(&[&[1, 5, 10, 7, 3, 8, 2, 4]])];
    let step = |trainer: &mut Trainer<B>| trainer.step(&batch).expect("one rank reaches itself").read();
    step(&mut trainer);
    let companions = Companions { from: fixture("tiny-llama"), ..Companions::default() };
    let [copied, held, later] = ["copied", "held", "later"].map(|name| folder.join(name));
    let save = |trainer: &Trainer<B>, to: &Path| {
        let saved = match &lora {
            Some(lora) => trainer.model.save_adapter(to, lora, Some(&companions)),
            None => trainer.model.save_model(Default::default(), to, FloatType::F32, Some(&companions), None),
        };
        saved.expect("it is written");
    };
    save(&trainer, &copied);
    let state = trainer.optimizer.save();
    let (read, write, to) =
        (trainer.optimizer.hold(), trainer.model.snapshot(lora.as_ref(), &companions, true), held.clone());
    step(&mut trainer);
    let thread = spawn(move || (read(), write(&to)));
    for _ in 0..3 {
        step(&mut trainer);
    }
    let (held_state, written) = thread.join().expect("no panic");
    written.expect("the held model is written");
    save(&trainer, &later);
    assert!(held_state == state && trainer.optimizer.save() != state, "optimizer state");
    let [copied, held, later] = [copied, held, later].map(|folder| snapshot(&folder));
    assert!(held == copied && later != copied, "weights");
}

/// Returns the numbers of an uploaded batch, and its gradients by the names of the tensors on disk.
pub fn numbers_and_gradients<B: Kernels>(
    model: &Decoder<B>,
    batch: &MicroBatch<B>,
    pass: PassOptions,
    options: LossOptions,
) -> (Vec<f32>, BTreeMap<String, Vec<f32>>) {
    let mut gradients = GradientMap::default();
    gradients.begin_micro_batch(true);
    let numbers = host(model.loss_and_gradients(batch, pass, options, &mut gradients));
    let (parts, mut stored) = (model.stored_parts(), BTreeMap::new());
    let shapes: BTreeMap<_, _> =
        model.parameters().into_iter().map(|parameter| (parameter.name.to_string(), parameter.shape.clone())).collect();
    for (name, values) in host_gradients(&gradients) {
        let shape = shapes[&name].clone();
        let tensors = parts.divided(name, TensorF32 { shape, values });
        stored.extend(tensors.into_iter().map(|(name, tensor)| (name, tensor.values)));
    }
    (numbers, stored)
}

/// Builds a batch of sequences of equal length, each one document. `counts(sequence, index)` decides whether the token at `index` counts in the loss.
pub fn batch(rows: &[Vec<u32>], counts: impl Fn(usize, usize) -> bool) -> Batch {
    let row_len = rows[0].len();
    assert!(rows.iter().all(|row| row.len() == row_len), "sequences of one batch have one length");
    let mut targets = Vec::new();
    for (number, row) in rows.iter().enumerate() {
        let next = |index: usize| match row.get(index) {
            Some(&id) if counts(number, index) => i64::from(id),
            _ => IGNORE_INDEX,
        };
        targets.extend((1..=row_len).map(next));
    }
    Batch {
        rows: rows.len(),
        row_len,
        input_ids: rows.concat(),
        targets,
        positions: rows.iter().flat_map(|_| 0..row_len as u32).collect(),
        cu_seqlens: (0..=rows.len()).map(|row| (row * row_len) as u32).collect(),
        padding: 0,
        pairs: None,
    }
}

/// Builds the golden files' batch: `row_len` tokens per sequence, every next token counts in the loss.
pub fn every_next_token(input_ids: &[u32], row_len: usize) -> Batch {
    let rows: Vec<Vec<u32>> = input_ids.chunks(row_len).map(<[u32]>::to_vec).collect();
    batch(&rows, |_, _| true)
}

/// Packs documents one after the other into one sequence; every next token inside a document counts in the loss.
pub fn packed(documents: &[&[u32]]) -> Batch {
    let tokens = documents.iter().map(|document| document.len()).sum();
    let mut batch = Batch {
        rows: 1,
        row_len: tokens,
        input_ids: documents.concat(),
        targets: Vec::new(),
        positions: Vec::new(),
        cu_seqlens: vec![0],
        padding: 0,
        pairs: None,
    };
    for document in documents {
        let alone = every_next_token(document, document.len());
        batch.targets.extend(alone.targets);
        batch.positions.extend(alone.positions);
        batch.cu_seqlens.push(batch.positions.len() as u32);
    }
    batch
}
