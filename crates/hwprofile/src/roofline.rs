//! How long a step must take: the time that arithmetic needs, and the time that memory traffic needs, at given rates.
//!
//! ```text
//! t_math   = matmul operations / matmul rate + attention operations / attention rate
//! t_memory = bytes moved / bandwidth
//! lower    = max(t_math, t_memory)    everything overlaps: no implementation is faster
//! upper    = t_math + t_memory        nothing overlaps: a good implementation is not slower
//! ```
//!
//! Gives up: launch overheads, caches, communication between devices. A bound is as good as its rates: ask for measured
//! ones where there is time to measure.

use serde::Serialize;

use crate::GpuSpec;
use crate::memory::{BaseStorage, LinearLayer, LoraShape, ModelShape, Recompute, TrainingShape};

/// Where rates come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RateSource {
    /// Timed on this machine.
    Measured,
    /// The maker's peak: real rates are lower.
    Spec,
}

/// What a device does per second.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Rates {
    /// Operations per second in matrix products.
    pub matmul_flops_per_s: f64,
    /// Operations per second in attention's products.
    pub attention_flops_per_s: f64,
    /// Bytes per second to and from memory.
    pub bytes_per_s: f64,
    /// Where the numbers come from.
    pub source: RateSource,
}

impl Rates {
    /// The maker's peak in bf16, attention included.
    pub fn of_spec(spec: &GpuSpec) -> Self {
        let flops = spec.bf16_tflops * 1e12;
        Self {
            matmul_flops_per_s: flops,
            attention_flops_per_s: flops,
            bytes_per_s: spec.memory_bandwidth_tb_s * 1e12,
            source: RateSource::Spec,
        }
    }
}

/// What a piece of work consists of.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Work {
    /// Operations in matrix products.
    pub matmul_flops: f64,
    /// Operations in attention's products.
    pub attention_flops: f64,
    /// Bytes to and from memory.
    pub bytes: f64,
}

/// The last projection of a block.
const DOWN: LinearLayer = LinearLayer::DownProj;

/// What binds a piece of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Bound {
    /// Arithmetic.
    Math,
    /// Memory traffic.
    Memory,
}

/// How long a piece of work takes at the roof.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct RoofTime {
    /// Seconds of arithmetic.
    pub t_math: f64,
    /// Seconds of memory traffic.
    pub t_memory: f64,
    /// Whose rates these are.
    pub source: RateSource,
}

impl RoofTime {
    /// The time of `work` at `rates`.
    pub fn of(work: &Work, rates: &Rates) -> Self {
        Self {
            t_math: work.matmul_flops / rates.matmul_flops_per_s + work.attention_flops / rates.attention_flops_per_s,
            t_memory: work.bytes / rates.bytes_per_s,
            source: rates.source,
        }
    }

    /// Seconds if all traffic hides behind arithmetic, or the other way round.
    pub fn lower(&self) -> f64 {
        self.t_math.max(self.t_memory)
    }

    /// Seconds if nothing overlaps.
    pub fn upper(&self) -> f64 {
        self.t_math + self.t_memory
    }

    /// The larger of the two.
    pub fn bound(&self) -> Bound {
        if self.t_math >= self.t_memory { Bound::Math } else { Bound::Memory }
    }
}

/// Work that one optimizer step does, recomputation included.
///
/// Arithmetic: a product of `N` parameters takes `2 N` operations a token in each of forward, recomputed forward, gradient of
/// the input, and (where the weight trains) gradient of the weight. The head and a block's last projection are never
/// recomputed. Attention's backward has five products to the forward's two, since it computes the scores again.
///
/// Traffic: what cannot be avoided when each op reads its inputs and writes its results once. `document_tokens` is the mean
/// length of a document; a row's length if rows are not packed.
pub fn step_work(model: &ModelShape, training: &TrainingShape, micro_batches: usize, document_tokens: f64) -> Work {
    let tokens = training.tokens() as f64 * micro_batches as f64;
    let weight_gradient = if training.lora.is_some() { 0.0 } else { 1.0 };
    let head = model.embedding_parameters() as f64;
    let (forward, again) = (block_parameters(model), recomputed(model, training));
    let matmul_flops = 2.0
        * tokens
        * (forward * (2.0 + weight_gradient) + again + head * (2.0 + weight_gradient) + adapter(model, training));
    let attention = model.attention_forward_flops_per_token(document_tokens);
    let attention_forwards = if training.recompute == Recompute::Full { 2.0 } else { 1.0 };
    Work {
        matmul_flops,
        attention_flops: tokens * attention * (attention_forwards + 2.5),
        bytes: weight_bytes(model, training) * micro_batches as f64
            + activation_bytes(model, training) * micro_batches as f64
            + optimizer_bytes(model, training),
    }
}

/// Parameters of all blocks' linear layers.
fn block_parameters(model: &ModelShape) -> f64 {
    (model.num_hidden_layers as u64 * model.block_linear_parameters()) as f64
}

/// Parameters of the linear layers that run forward a second time: a recomputed block stops before its down projection, whose
/// output nobody reads again.
fn recomputed(model: &ModelShape, training: &TrainingShape) -> f64 {
    let [rows, columns] = model.linear_shape(DOWN);
    let down = (rows * columns * model.num_hidden_layers) as f64;
    if training.recompute == Recompute::Full { block_parameters(model) - down } else { 0.0 }
}

/// The adapter's own products, in passes over its parameters: forward, recomputed forward, and two for the gradients of input
/// and adapter. Where adapters are merged into converted weights, only the gradient of the adapter is left, which takes two
/// (its low-rank inputs are computed again).
fn adapter(model: &ModelShape, training: &TrainingShape) -> f64 {
    let Some(lora) = &training.lora else { return 0.0 };
    let all = lora.parameters(model) as f64;
    if training.fused && matches!(training.base, BaseStorage::Nf4 { .. }) {
        return 2.0 * all;
    }
    let down = LoraShape { r: lora.r, targets: Vec::from_iter(lora.targets.contains(&DOWN).then_some(DOWN)) };
    let again = if training.recompute == Recompute::Full { all - down.parameters(model) as f64 } else { 0.0 };
    3.0 * all + again
}

/// Each pass reads the weights; a stored form that must be converted is written and read once more in compute precision.
fn weight_bytes(model: &ModelShape, training: &TrainingShape) -> f64 {
    let passes = 2.0 + recomputed(model, training) / block_parameters(model);
    let trained = (training.trained_parameters(model) * training.trainable_bytes as u64) as f64;
    let converted = match (&training.lora, training.base) {
        (Some(_), BaseStorage::Nf4 { .. }) => 2.0 * block_parameters(model) * training.activation_bytes as f64,
        _ => 0.0,
    };
    let accumulated = 2.0 * trained;
    passes * (training.base_bytes(model) as f64 + trained + converted) + accumulated
}

/// Each value of a block is written and read in a forward, read in the backward, and has a gradient written and read; a
/// recomputed block stops before the product of gate and up. Logits are written, read, and have a gradient.
fn activation_bytes(model: &ModelShape, training: &TrainingShape) -> f64 {
    let tokens = training.tokens() as f64;
    let block = training.block_bytes_per_token(model) as f64;
    let again = match training.recompute {
        Recompute::Full => block - (model.intermediate_size * training.activation_bytes) as f64,
        Recompute::Selective | Recompute::None => 0.0,
    };
    let logits = 4.0 * model.vocab_size as f64;
    tokens * ((5.0 * block + 2.0 * again) * model.num_hidden_layers as f64 + 3.0 * logits)
}

/// Parameters and state are read and written, gradients read.
fn optimizer_bytes(model: &ModelShape, training: &TrainingShape) -> f64 {
    let trained = training.trained_parameters(model) as f64;
    trained * (3.0 * training.trainable_bytes as f64 + 2.0 * training.optimizer_bytes_per_parameter)
}

/// Model FLOPs utilisation: progress per second over what the matrix unit could do. `tokens_per_s` counts all tokens of the
/// rows; recomputation does not count as progress.
pub fn model_flops_utilisation(
    model: &ModelShape,
    lora: bool,
    document_tokens: f64,
    tokens_per_s: f64,
    rates: &Rates,
) -> f64 {
    model.model_flops_per_token(lora, document_tokens) * tokens_per_s / rates.matmul_flops_per_s
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::llama_3_1_8b;

    /// Library rates timed on one H100 SXM: cuBLASLt, cuDNN (forward and backward together), a device copy.
    const H100_MEASURED: Rates = Rates {
        matmul_flops_per_s: 735e12,
        attention_flops_per_s: 490e12,
        bytes_per_s: 2.98e12,
        source: RateSource::Measured,
    };

    fn qlora(micro_batch_size: usize, recompute: Recompute) -> TrainingShape {
        TrainingShape {
            base: BaseStorage::Nf4 { double_quant: true },
            lora: Some(LoraShape::all_linear(16)),
            optimizer_bytes_per_parameter: 2.03,
            micro_batch_size,
            row_len: 4096,
            recompute,
            offload: false,
            fused: true,
            activation_bytes: 2,
            trainable_bytes: 4,
            loss_chunk_tokens: 4096,
            score_tokens: 0,
        }
    }

    #[test]
    fn qlora_of_llama_8b_on_an_h100_meets_the_roof_counted_by_hand() {
        // Tokens/s with full recomputation and with none, arithmetic alone.
        for (recompute, micro_batch_size, by_hand) in [(Recompute::Full, 8, 15_400.0), (Recompute::None, 2, 20_600.0)] {
            let training = qlora(micro_batch_size, recompute);
            let work = step_work(&llama_3_1_8b(), &training, 1, 4096.0);
            let time = RoofTime::of(&work, &H100_MEASURED);
            let tokens_per_s = training.tokens() as f64 / time.t_math;
            assert!((tokens_per_s / by_hand - 1.0).abs() < 0.03, "{recompute:?}: {tokens_per_s:.0} against {by_hand}");
            assert_eq!(time.bound(), Bound::Math);
        }
    }

    #[test]
    fn a_recomputed_block_leaves_out_its_last_projection() {
        let model = llama_3_1_8b();
        for fused in [false, true] {
            let work = |recompute| {
                step_work(&model, &TrainingShape { fused, ..qlora(1, recompute) }, 1, 4096.0).matmul_flops
                    / (2.0 * 4096.0)
            };
            let adapter = if fused { 0.0 } else { 41_943_040.0 - (4096.0 + 14_336.0) * 16.0 * 32.0 };
            let once_more = (218_103_808.0 - 4096.0 * 14_336.0) * 32.0 + adapter;
            assert_eq!(work(Recompute::Full) - work(Recompute::None), once_more);
            assert_eq!(work(Recompute::Selective), work(Recompute::None));
        }
    }

    #[test]
    fn bounds_are_ordered_and_accumulation_is_linear() {
        let (model, training) = (llama_3_1_8b(), qlora(1, Recompute::None));
        let (one, four) = (step_work(&model, &training, 1, 4096.0), step_work(&model, &training, 4, 4096.0));
        assert_eq!(four.matmul_flops, 4.0 * one.matmul_flops);
        assert!(four.bytes < 4.0 * one.bytes, "the optimizer runs once a step");
        let time = RoofTime::of(&one, &H100_MEASURED);
        assert!(time.lower() <= time.upper() && time.upper() <= 2.0 * time.lower());
    }

    #[test]
    fn one_token_is_bound_by_memory() {
        let training = TrainingShape { row_len: 1, ..qlora(1, Recompute::None) };
        let work = step_work(&llama_3_1_8b(), &training, 1, 1.0);
        assert_eq!(RoofTime::of(&work, &H100_MEASURED).bound(), Bound::Memory);
    }

    #[test]
    fn running_at_the_arithmetic_roof_without_recomputation_is_full_utilisation() {
        let spec = GpuSpec::find("NVIDIA H100 80GB HBM3").expect("in the table");
        let (model, rates) = (llama_3_1_8b(), Rates::of_spec(spec));
        let tokens_per_s = rates.matmul_flops_per_s / model.model_flops_per_token(true, 4096.0);
        let utilisation = model_flops_utilisation(&model, true, 4096.0, tokens_per_s, &rates);
        assert!((utilisation - 1.0).abs() < 1e-12);
    }
}
