//! Work of one optimizer step, for the roofline: operations of GEMMs and of attention, and bytes moved.
//!
//! A GEMM over `N` parameters takes `2 N` operations per token in each of forward, recomputed forward, input gradient,
//! and (if the weight trains) weight gradient. [`Recompute::repeats`] determines what is recomputed; the head never is.
//! The backward of attention has five GEMMs to the forward's two, since it recomputes the scores.
//! Trade-off: traffic is a lower bound, where each operation reads its inputs and writes its results once.

use firebrick_arch::{GroupSpec, LoraConfig, ModelSpec, ModuleSpec, Role, TensorSpec, Value, ValueKind};
use firebrick_hwprofile::roofline::Work;
use firebrick_precision::Format;

use super::evaluation::Answers;
use super::training_shape::{Recompute, TrainingShape, scaled_widths};
use crate::GemmFormat;

/// Computes the work of one step of `micro_batches` micro-batches, including recomputation. `document_tokens` is the
/// mean length of a document: the length of a packed sequence if it is one document.
pub fn step_work(model: &ModelSpec, training: &TrainingShape, micro_batches: usize, document_tokens: f64) -> Work {
    let tokens = training.tokens() as f64 * micro_batches as f64;
    let weight_gradient = if training.lora.is_some() { 0.0 } else { 1.0 };
    let head = (model.vocab_size * model.hidden_size) as f64;
    let (forward, repeated) = (all_projections(model), recomputed(model, training));
    let reference = reference_passes(training);
    // Pairs take a second pass over the head, and a third for their reference.
    let heads = if training.pairs.is_some() { 1.0 + reference } else { 0.0 };
    // Both the forward and the input gradient multiply by the frozen weights.
    let frozen = 2.0 * tokens * ((2.0 + reference) * forward + repeated);
    let head = head * (2.0 + weight_gradient + heads);
    let others = 2.0 * tokens * (forward * weight_gradient + head + adapter(model, training));
    let [of_tokens, of_steps] = dora(model, training);
    let others = others + 2.0 * tokens * of_tokens + 2.0 * of_steps;
    let (fp8_flops, matmul_flops) = match training.gemms {
        GemmFormat::Fp8 => (frozen, others),
        GemmFormat::Compute | GemmFormat::F16 => (0.0, frozen + others),
    };
    let attention = model.mixer_forward_flops_per_token(document_tokens);
    let attention_forwards = if training.recompute == Recompute::Full { 2.0 } else { 1.0 };
    Work {
        matmul_flops,
        fp8_flops,
        attention_flops: tokens * attention * (attention_forwards + reference + 2.5),
        bytes: (weight_bytes(model, training)
            + activation_traffic(model, training)
            + dropout_traffic(model, training)
            + magnitude_traffic(model, training))
            * micro_batches as f64
            + optimizer_bytes(model, training),
    }
}

/// Computes the work of answering prompts together: the prompts in one forward, then a pass for each of the `new` tokens of an answer. Weights are read as
/// they are stored, once per pass; keys and values of all earlier tokens for each answer, also those that layers no longer see.
pub fn answering_work(model: &ModelSpec, training: &TrainingShape, answers: &Answers, new: usize) -> Work {
    let (sequences, written) = (answers.prompts as f64, (answers.prompts * new) as f64);
    let read = answers.tokens.saturating_sub(answers.prompts * new) as f64;
    let caches = model.layers.iter().map(|layer| layer.mixer.cache().per_token);
    let per_token = caches.sum::<usize>() as f64 * training.activation_bytes() as f64;
    // Keys that a new token sees on average; attention over a whole document sees half of it.
    let seen = answers.longest as f64 - new as f64 / 2.0;
    let head = (model.vocab_size * model.hidden_size) as f64;
    let storage = training.storage();
    let bytes = |tensor: &TensorSpec| {
        let format = storage.storage_of(model, &tensor.name, tensor.role);
        tensor.elements() as f64 * format.bits_per_value() / 8.0
    };
    let projections = model.stacked_tensors().into_iter().filter(|tensor| tensor.role == Role::Projection);
    let weights = projections.map(|tensor| bytes(&tensor)).sum::<f64>() + head * training.activation_bytes() as f64;
    Work {
        matmul_flops: 2.0 * ((written + read) * all_projections(model) + written * head),
        fp8_flops: 0.0,
        attention_flops: written * model.mixer_forward_flops_per_token(2.0 * seen),
        bytes: new as f64 * (weights + sequences * seen * per_token),
    }
}

/// Estimates the kernels that [`answering_work`] launches on CUDA: a forward, which is a third of a step's that repeats none, for each new token.
pub fn answering_launches(model: &ModelSpec, training: &TrainingShape, new: usize) -> f64 {
    let saved = TrainingShape { recompute: Recompute::None, ..training.clone() };
    cuda_launches(model, &saved, new) / 3.0
}

struct Linear {
    /// Rows per token that read it.
    rows: f64,
    module: ModuleSpec,
    inputs: usize,
    is_repeated: bool,
}

impl Linear {
    fn parameters(&self) -> f64 {
        self.rows * (self.module.out_features() * self.inputs) as f64
    }

    /// Returns the rank of its adapter; `None` without one.
    fn rank(&self, lora: Option<&LoraConfig>) -> Option<usize> {
        let path = self.module.lora_path();
        lora.filter(|lora| lora.adapts(path)).map(|lora| lora.rank_of(path))
    }
}

fn modules(model: &ModelSpec, recompute: Recompute) -> impl Iterator<Item = Linear> + '_ {
    groups(model, recompute).flat_map(|(group, is_repeated)| {
        let (rows, inputs) = (group.rows as f64, group.in_features);
        group.modules.into_iter().map(move |module| Linear { rows, module, inputs, is_repeated })
    })
}

/// Iterates over the groups of all layers, and whether each runs forward again.
fn groups(model: &ModelSpec, recompute: Recompute) -> impl Iterator<Item = (GroupSpec, bool)> + '_ {
    (0..model.layers.len()).flat_map(move |layer| {
        let norms = model.layers[layer].norms.names();
        let of_group = move |group: GroupSpec| {
            let is_repeated = recompute.repeats(group.kind, &norms);
            (group, is_repeated)
        };
        model.groups(layer).into_iter().map(of_group)
    })
}

/// Counts the parameters of linear modules in all layers that a token is multiplied with.
fn all_projections(model: &ModelSpec) -> f64 {
    modules(model, Recompute::None).map(|linear| linear.parameters()).sum()
}

/// Counts the parameters of linear modules that run forward a second time.
fn recomputed(model: &ModelSpec, training: &TrainingShape) -> f64 {
    modules(model, training.recompute).filter(|linear| linear.is_repeated).map(|linear| linear.parameters()).sum()
}

/// Counts the adapter's own GEMMs, in passes over its parameters: forward, recomputed forward, and two for the
/// gradients of input and adapter. The zeros of appended ranks are not counted.
fn adapter(model: &ModelSpec, training: &TrainingShape) -> f64 {
    let of_module = |linear: Linear| {
        let rank = linear.rank(training.lora.as_ref()).unwrap_or(0);
        let passes = if linear.is_repeated { 4.0 } else { 3.0 };
        passes * linear.rows * (rank * (linear.module.out_features() + linear.inputs)) as f64
    };
    modules(model, training.recompute).map(of_module).sum()
}

/// Counts DoRA's own GEMMs, in passes over parameters: per token, and once per step for the norms. Per token these are
/// projection outputs that a recomputed layer skips but magnitudes need; and under dropout a second GEMM with the
/// weight over the masked input, and another one for the gradient.
fn dora(model: &ModelSpec, training: &TrainingShape) -> [f64; 2] {
    let lora = training.lora.as_ref().filter(|lora| lora.use_dora);
    let has_dropout = lora.is_some_and(|lora| lora.lora_dropout > 0.0);
    let (mut of_tokens, mut of_steps) = (0.0, 0.0);
    let repeats = training.recompute.repeats_gemms();
    for linear in modules(model, training.recompute) {
        let Some(rank) = linear.rank(lora) else { continue };
        let forwards = if repeats { 2.0 } else { 1.0 };
        let missing = if repeats && !linear.is_repeated { 1.0 } else { 0.0 };
        let dropped = if has_dropout { forwards - missing + 1.0 } else { 0.0 };
        of_tokens += linear.parameters() * (missing + dropped);
        // Norms are those of all experts.
        of_steps += (linear.module.rows() * linear.inputs * rank) as f64;
    }
    [of_tokens, of_steps]
}

/// Returns magnitude traffic: each forward reads and writes scaled outputs again; the backward reads them, and reads and writes their gradient.
fn magnitude_traffic(model: &ModelSpec, training: &TrainingShape) -> f64 {
    let passes = if training.recompute.repeats_gemms() { 7.0 } else { 5.0 };
    let widths = (0..model.layers.len()).flat_map(|layer| scaled_widths(model, training, layer));
    passes * widths.sum::<u64>() as f64 * (training.tokens() * training.activation_bytes()) as f64
}

/// Returns the traffic of weights. Each pass reads them; a stored form that GEMMs do not read is converted: written and
/// read once more. A converted weight that stays on the device ([`TrainingShape::kept_bytes`]) is only read.
fn weight_bytes(model: &ModelSpec, training: &TrainingShape) -> f64 {
    let [forwards, backwards] =
        [1.0 + reference_passes(training) + recomputed(model, training) / all_projections(model), 1.0];
    let [trained, gradients] = training.trained_bytes(model).map(|bytes| bytes as f64);
    // Every expert is converted, however many tokens it gets.
    let storage = training.storage();
    let (mut stored, mut converted) = (0.0, 0.0);
    for tensor in model.stacked_tensors().iter().filter(|tensor| tensor.role == Role::Projection) {
        let (format, values) = (storage.storage_of(model, &tensor.name, tensor.role), tensor.elements() as f64);
        stored += values * format.bits_per_value() / 8.0;
        if format != Format::Float(training.compute) || training.gemms == GemmFormat::Fp8 {
            converted += values * converted_value_bytes(training);
        }
    }
    let passes = forwards + backwards;
    let everything = passes * (training.base_bytes(model) as f64 + trained + 2.0 * converted);
    let [forward, backward] = kept_shares(model, training);
    // Kept weights need neither a read of their stored form nor a write of their converted form.
    let saved = (forwards * forward + backwards * backward) * (stored + converted);
    everything - saved + 2.0 * gradients
}

/// Estimates the kernels that a step launches on CUDA: a trace of 16 layers counted 958, or 805 where no weight was converted. A
/// recomputed layer launches its forward twice, which is a third of them; under [`Recompute::Projections`] a little less.
pub fn cuda_launches(model: &ModelSpec, training: &TrainingShape, micro_batches: usize) -> f64 {
    let [forward, backward] = kept_shares(model, training);
    let per_layer = 50.0 + 10.0 * (1.0 - 0.5 * (forward + backward));
    let recompute_factor = if training.recompute.repeats_gemms() { 4.0 / 3.0 } else { 1.0 };
    per_layer * recompute_factor * (model.layers.len() * micro_batches) as f64
}

/// Returns the bytes of a weight value as the layers' GEMMs read it.
fn converted_value_bytes(training: &TrainingShape) -> f64 {
    match training.gemms {
        GemmFormat::Fp8 => 1.0,
        GemmFormat::F16 => 2.0,
        GemmFormat::Compute => training.activation_bytes() as f64,
    }
}

/// Returns the shares of the converted weights that stay on the device for forward passes and for the backward; in the
/// compute format both read the same ones. Adapters and scales next to them count as a part of them.
fn kept_shares(model: &ModelSpec, training: &TrainingShape) -> [f64; 2] {
    let all = model.parameters_of(Role::Projection) as f64 * converted_value_bytes(training);
    let [forward, backward] = training.kept_bytes.map(|kept| (kept as f64 / all).min(1.0));
    match training.gemms {
        GemmFormat::Fp8 => [forward, backward],
        GemmFormat::Compute | GemmFormat::F16 => [forward, forward],
    }
}

/// Returns the traffic of activations. Each value of a layer is written and read in a forward, read in the backward, and has a
/// gradient written and read; a recomputed layer stops before the gated activation. Logits are written, read, and have a gradient.
fn activation_traffic(model: &ModelSpec, training: &TrainingShape) -> f64 {
    let of_layer = |layer: usize| {
        let of = |counts: &dyn Fn(&Value) -> bool| training.bytes_of(model, layer, counts) as f64;
        let everything = of(&|value| Recompute::None.saves(value));
        // A mixture of experts is recomputed as a whole.
        let is_last = |value: &Value| value.kind == ValueKind::Activated && !model.layers[layer].mlp.is_mixture();
        let recomputed_values = match training.recompute {
            Recompute::Full => everything - of(&is_last),
            Recompute::Projections => everything - of(&|value| is_last(value) || training.recompute.saves(value)),
            Recompute::Selective | Recompute::None => 0.0,
        };
        5.0 * everything + 2.0 * (recomputed_values + reference_passes(training) * everything)
    };
    let layers: f64 = (0..model.layers.len()).map(of_layer).sum();
    let logits = 4.0 * model.vocab_size as f64;
    let heads = 3.0 + training.pairs.map_or(0.0, |_| 0.5 * (1.0 + reference_passes(training)));
    training.tokens() as f64 * (layers + heads * logits)
}

/// Returns the forward passes without adapters in a micro-batch.
fn reference_passes(training: &TrainingShape) -> f64 {
    if training.pairs.is_some_and(|pairs| pairs.reference) { 1.0 } else { 0.0 }
}

/// Returns the traffic of dropout. The inputs of adapted groups are read and masked copies written in each forward and
/// for the gradient of A; the adapters' part of the input gradient is written, then read and added under the mask.
fn dropout_traffic(model: &ModelSpec, training: &TrainingShape) -> f64 {
    let Some(lora) = training.lora.as_ref().filter(|lora| lora.lora_dropout > 0.0) else { return 0.0 };
    let is_adapted = |group: &GroupSpec| group.modules.iter().any(|module| lora.adapts(module.lora_path()));
    let adapted = groups(model, training.recompute).filter(|(group, _)| is_adapted(group));
    let passes = |is_repeated| if is_repeated { 10.0 } else { 8.0 };
    let values = adapted.map(|(group, is_repeated)| passes(is_repeated) * (group.rows * group.in_features) as f64);
    let values: f64 = values.sum();
    values * (training.tokens() * training.activation_bytes()) as f64
}

/// Returns the traffic of the optimizer: parameters and state are read and written, gradients read.
fn optimizer_bytes(model: &ModelSpec, training: &TrainingShape) -> f64 {
    let [trained, gradients] = training.trained_bytes(model).map(|bytes| bytes as f64);
    2.0 * trained + gradients + 2.0 * training.optimizer_bytes as f64
}

#[cfg(test)]
mod tests {
    use firebrick_arch::LayerNorms;
    use firebrick_arch::shapes::llama_3_1_8b;
    use firebrick_hwprofile::roofline::{Bound, RateSource, Rates, RooflineTime};

    use super::*;
    use crate::PairPasses;
    use crate::memory::training_shape::tests::qlora;

    /// Library rates measured on one H100 SXM: cuBLASLt, cuDNN (forward and backward together), a device copy.
    const H100_MEASURED: Rates = Rates {
        matmul_flops_per_s: 735e12,
        fp8_flops_per_s: 735e12,
        attention_flops_per_s: 490e12,
        bytes_per_s: 2.98e12,
        source: RateSource::Measured,
    };

    fn work(training: &TrainingShape, micro_batches: usize) -> Work {
        step_work(&llama_3_1_8b(), training, micro_batches, 4096.0)
    }

    #[test]
    fn qlora_of_llama_8b_on_an_h100_meets_the_roofline_counted_by_hand() {
        // Tokens/s with full recomputation and with none, from arithmetic alone.
        for (recompute, micro_batch_size, by_hand) in [(Recompute::Full, 8, 15_400.0), (Recompute::None, 2, 20_600.0)] {
            let training = qlora(micro_batch_size, recompute);
            let time = RooflineTime::of(&work(&training, 1), &H100_MEASURED);
            let tokens_per_s = training.tokens() as f64 / time.t_math;
            assert!((tokens_per_s / by_hand - 1.0).abs() < 0.03, "{recompute:?}: {tokens_per_s:.0} against {by_hand}");
            assert_eq!(time.bound(), Bound::Math);
        }
    }

    #[test]
    fn gemms_run_again_but_for_those_that_no_backward_and_no_norm_reads() {
        let flops = |norms, recompute| {
            let mut model = llama_3_1_8b();
            model.layers.iter_mut().for_each(|layer| layer.norms = norms);
            step_work(&model, &qlora(1, recompute), 1, 4096.0).matmul_flops / (2.0 * 4096.0)
        };
        // With adapters of rank 16.
        let all = 218_103_808.0 * 32.0 + 41_943_040.0;
        let down = (4096.0 * 14_336.0 + (4096.0 + 14_336.0) * 16.0) * 32.0;
        let output = (4096.0 * 4096.0 + 2.0 * 4096.0 * 16.0) * 32.0;
        for (norms, recompute, once_more) in [
            (LayerNorms::Pre, Recompute::Full, all - down),
            (LayerNorms::Pre, Recompute::Projections, all - down - output),
            (LayerNorms::Pre, Recompute::Selective, 0.0),
            (LayerNorms::PreAndPost, Recompute::Full, all),
            (LayerNorms::PreAndPost, Recompute::Projections, all),
        ] {
            assert_eq!(flops(norms, recompute) - flops(norms, Recompute::None), once_more, "{norms:?} {recompute:?}");
        }
    }

    #[test]
    fn dropout_moves_the_inputs_of_what_runs_again_once_more() {
        let bytes = |recompute, dropout| {
            let mut training = qlora(1, recompute);
            training.lora.as_mut().unwrap().lora_dropout = dropout;
            work(&training, 1).bytes
        };
        let dropped = |recompute| bytes(recompute, 0.1) - bytes(recompute, 0.0);
        let values = |widths: f64| 2.0 * widths * 32.0 * 4096.0 * 2.0;
        let none = dropped(Recompute::None);
        assert_eq!(dropped(Recompute::Full) - none, values(3.0 * 4096.0), "qkv, attention's output, gate and up");
        assert_eq!(dropped(Recompute::Projections) - none, values(2.0 * 4096.0), "without attention's output");
    }

    #[test]
    fn gradients_of_weights_head_and_adapters_are_not_in_8_bits() {
        let in_bf16 = work(&qlora(1, Recompute::None), 1);
        let in_fp8 = work(&TrainingShape { gemms: GemmFormat::Fp8, ..qlora(1, Recompute::None) }, 1);
        assert_eq!(in_fp8.fp8_flops, 2.0 * 4096.0 * 2.0 * 6_979_321_856.0);
        assert_eq!(in_fp8.matmul_flops + in_fp8.fp8_flops, in_bf16.matmul_flops);
        assert!((0.80..0.84).contains(&in_fp8.fp8_share()), "{}", in_fp8.fp8_share());
        assert_eq!(in_bf16.fp8_share(), 0.0);
    }

    #[test]
    fn weights_that_stay_are_neither_read_as_stored_nor_written_again() {
        let bytes = |training: &TrainingShape| work(training, 1).bytes;
        let values = 6_979_321_856.0;
        let stored = values * 4.126953125 / 8.0;
        for (gemms, value_bytes) in [(GemmFormat::Compute, 2.0), (GemmFormat::Fp8, 1.0)] {
            let converted = TrainingShape { gemms, ..qlora(1, Recompute::None) };
            let all = (values * value_bytes) as u64;
            let with = |kept_bytes| bytes(&TrainingShape { kept_bytes, ..converted.clone() });
            let backward = if gemms == GemmFormat::Fp8 { all } else { 0 };
            let saved = (with([0; 2]) - with([all, backward])) / (2.0 * (stored + values * value_bytes));
            assert!((saved - 1.0).abs() < 1e-9, "{gemms:?}: {saved}");
            let half = (with([0; 2]) - with([all / 2, backward / 2])) / (stored + values * value_bytes);
            assert!((half - 1.0).abs() < 1e-9, "{gemms:?}: {half}");
            assert_eq!(
                with([2 * all, 2 * backward]),
                with([all, backward]),
                "adapters around them are not more weights"
            );
        }
    }

    #[test]
    fn launches_are_those_of_the_traced_steps() {
        let model = firebrick_arch::shapes::llama_3_2_1b();
        let training = qlora(1, Recompute::Selective);
        let launches = |training: &TrainingShape| cuda_launches(&model, training, 1);
        assert!((launches(&training) / 958.0 - 1.0).abs() < 0.01);
        let kept = TrainingShape { kept_bytes: [1 << 34, 0], ..training.clone() };
        assert!((launches(&kept) / 805.0 - 1.0).abs() < 0.01);
        let recomputing = TrainingShape { recompute: Recompute::Full, ..training };
        assert!(launches(&recomputing) > launches(&kept));
        assert_eq!(cuda_launches(&model, &recomputing, 2), 2.0 * launches(&recomputing));
    }

    #[test]
    fn pairs_add_a_pass_over_the_head_and_their_reference_a_forward() {
        let plain = qlora(1, Recompute::None);
        let flops = |reference| {
            let pairs = Some(PairPasses { reference });
            work(&TrainingShape { pairs, ..plain.clone() }, 1).matmul_flops - work(&plain, 1).matmul_flops
        };
        let head = 128_256.0 * 4096.0;
        assert_eq!(flops(false), 2.0 * 4096.0 * head);
        assert_eq!(flops(true), 2.0 * 4096.0 * (2.0 * head + 218_103_808.0 * 32.0));
    }

    #[test]
    fn bounds_are_ordered_and_accumulation_is_linear() {
        let training = qlora(1, Recompute::None);
        let (one, four) = (work(&training, 1), work(&training, 4));
        assert_eq!(four.matmul_flops, 4.0 * one.matmul_flops);
        assert!(four.bytes < 4.0 * one.bytes, "the optimizer runs once per step");
        let time = RooflineTime::of(&one, &H100_MEASURED);
        assert!(time.lower() <= time.upper() && time.upper() <= 2.0 * time.lower());
        let of_a_token = RooflineTime::of(&work(&TrainingShape { row_len: 1, ..training }, 1), &H100_MEASURED);
        assert_eq!(of_a_token.bound(), Bound::Memory);
    }
}
