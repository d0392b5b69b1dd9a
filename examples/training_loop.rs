//! Trains a LoRA adapter in a loop of its own, with a loss that Firebrick does not have: the focal loss (Lin et al., Focal loss for dense
//! object detection, 2017), `-(1 - p)^gamma log p`, which counts a token less the better the model knows it.
//!
//! Usage: `training_loop [<steps>]`. Any loss of the log-probabilities is written like `focal_loss`; a loss of the hidden states is a
//! function from `hidden_nd` to its gradient.
//! Trade-off: no checkpoints, no log file, no evaluation. `firebrick-trainer` has them.
#![expect(clippy::print_stdout, reason = "the losses are the output of this program")]

use std::error::Error;
use std::path::Path;
use std::sync::Arc;

use burn_tensor::{DType, Tensor};
use firebrick_data::{
    Corpus, Cursor, DocumentSet, EncodeOptions, Hub, Loader, LoaderConfig, Mix, MixUntil, Mixture, PackOptions,
    PackedDataset, SourceSpec, Tokenizer,
};
use firebrick_kernels::backends::Flex;
use firebrick_kernels::{GemmFormat, GradientMap, GradientSink, Kernels, LossTargets};
use firebrick_model::{
    BaseStorage, BuildOptions, Decoder, HfFolder, LoraConfig, LossOptions, MicroBatch, PassOptions, TargetModules,
    read_config,
};
use firebrick_optim::{Optimizer, OptimizerConfig, OptimizerKind, TrainedWeights};
use firebrick_precision::{Format, QuantFormat};

const QUICKSTART: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../assets/quickstart");
const TOKENS: usize = 256;
const GAMMA: i32 = 2;

fn main() -> Result<(), Box<dyn Error>> {
    let steps = std::env::args().nth(1).map_or(Ok(20), |steps| steps.parse())?;
    let (mut model, mut loader) = (model::<Flex>()?, loader()?);
    let mut optimizer = Optimizer::new(OptimizerConfig {
        kind: OptimizerKind::AdamW,
        beta1: 0.9,
        beta2: 0.999,
        epsilon: 1e-8,
        weight_decay: 0.0,
        weights: TrainedWeights::default(),
        max_grad_norm: Some(1.0),
    });
    for step in 1..=steps {
        let (batch, _) = loader.next_batch().ok_or("the data is over")?;
        let on_device = model.upload(&batch.input_ids, &batch.targets, &batch.positions, &batch.cu_seqlens)?;
        let mut gradients = GradientMap::default();
        gradients.begin_micro_batch(true);
        let loss = focal_loss(&model, &on_device, &mut gradients);
        optimizer.step(model.parameters_mut(), gradients, 5e-3);
        println!("step {step}: loss {:.4}", loss.into_scalar());
    }
    Ok(())
}

/// Mean focal loss of a micro-batch, `[1]`; the gradients of the adapter go to the sink.
fn focal_loss<B: Kernels>(model: &Decoder<B>, batch: &MicroBatch<B>, sink: &mut dyn GradientSink<B>) -> Tensor<B, 1> {
    let device = model.device();
    // Inside a section only operations of `Kernels` touch the device; ordinary Burn operations run in `pause`.
    B::section(device, || {
        let (hidden_nd, tape) = model.forward(batch, PassOptions::default());
        let options = LossOptions { chunk_tokens: 256, gradient_scale: None, log_probs: true, temperature: 1.0 };
        let loss = model.loss(hidden_nd.clone(), &batch.targets, options, sink);
        let log_probs = loss.log_probs_m.expect("log-probabilities were requested");

        let (loss, weights_m) = B::pause(device, || {
            let p = log_probs.clone().exp();
            let rest = p.clone().neg().add_scalar(1.0);
            let power = |exponent| rest.clone().powi_scalar(exponent);
            let loss = power(GAMMA).mul(log_probs.clone()).mean().neg();
            // The weight of a token in the cross entropy is minus the derivative of the loss by its log-probability.
            let slope = power(GAMMA - 1).mul(p).mul(log_probs).mul_scalar(GAMMA);
            (loss, power(GAMMA).sub(slope))
        });

        let targets = LossTargets { weights_m: Some(weights_m), ..batch.targets.clone() };
        let scale = 1.0 / batch.targets.count as f64;
        let options = LossOptions { gradient_scale: Some(scale), log_probs: false, ..options };
        let d_hidden_nd = model.loss(hidden_nd, &targets, options, sink).d_hidden_nd;
        model.backward(tape, d_hidden_nd.expect("there is a gradient scale"), sink);
        loss
    })
}

/// The quickstart model in NF4 with an adapter of rank 8 on every projection.
fn model<B: Kernels>() -> Result<Decoder<B>, Box<dyn Error>> {
    let folder = format!("{QUICKSTART}/base");
    let lora = LoraConfig { r: 8, lora_alpha: 16.0, target_modules: TargetModules::AllLinear, ..LoraConfig::default() };
    let options = BuildOptions {
        storage: BaseStorage::Frozen(Format::Quantized(QuantFormat::Nf4 { double_quant: true })),
        lora: Some(lora),
        seed: 0,
        compute_dtype: DType::F32,
        gemms: GemmFormat::Compute,
        max_positions: TOKENS,
        sequence_tokens: TOKENS,
    };
    let (config, weights) = (read_config(Path::new(&folder))?, HfFolder::open(Path::new(&folder))?);
    Ok(Decoder::load(&weights, config, &options, &B::device_of(0), &mut |_| ())?)
}

/// Micro-batches of two packed sequences, without end.
fn loader() -> Result<Loader, Box<dyn Error>> {
    let tokenizer = Tokenizer::from_folder(Path::new(&format!("{QUICKSTART}/base")))?;
    let source = SourceSpec::new(format!("{QUICKSTART}/train.jsonl")).resolve(&Hub::from_environment())?;
    let mixture = Mixture::new(vec![source], Mix::Concatenate, MixUntil::First, 0)?;
    let tokenized = Corpus::new(&tokenizer, mixture, vec![EncodeOptions::new(TOKENS)])?.in_memory()?;
    let documents = DocumentSet::all(Arc::new(tokenized.store));
    let packed = Arc::new(PackedDataset::new(documents, PackOptions::new(TOKENS)));
    let config = LoaderConfig {
        rows_per_batch: 2,
        seed: 0,
        shuffle: true,
        epochs: None,
        rank: 0,
        world_size: 1,
        prefetch: 2,
        workers: 1,
    };
    Ok(Loader::new(packed, config, Cursor::default()))
}
