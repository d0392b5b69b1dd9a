//! What a training run holds at its peak, line by line, as host arithmetic that needs no device.
//!
//! The lines of weights, gradients, optimizer state and saved activations follow from the model and how it is trained; the working
//! set of a layer's backward, of the loss and of libraries is the backend's own: each backend states it next to the code that
//! allocates (`backends/reference_memory.rs`, `backends/cuda_memory.rs`), compiled whether or not the backend is.
//! Trade-off: what depends on the machine and not on the run, such as an allocator's rounding, is left out.

use std::collections::BTreeMap;

use firebrick_arch::{
    EMBEDDING, GroupKind, GroupSpec, HEAD, LoraConfig, MlpSpec, ModelSpec, NormNames, QkNorm, Role, TensorSpec,
};
use firebrick_hwprofile::memory::MemoryLine;
use firebrick_precision::Format;
use serde::{Deserialize, Serialize};

use super::evaluation::EvaluationShape;
use crate::GemmFormat;

pub use firebrick_hwprofile::memory::MemoryEstimate;

/// What the forward pass of a layer saves for its backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Recompute {
    /// Only the layer's input; the layer runs forward a second time, its last GEMM left out unless a norm follows it.
    Full,
    /// The layer's input, attention's output, and the sum after attention; the projections before attention and the MLP's first ones are
    /// computed again, attention and its output projection are not (unless a norm follows that).
    Projections,
    /// Outputs of GEMMs and of attention; norms and activation functions are computed again.
    Selective,
    /// Everything the backward reads.
    None,
}

impl Recompute {
    /// Whether GEMMs run forward a second time: gradient checkpointing.
    #[must_use]
    pub fn repeats_gemms(self) -> bool {
        matches!(self, Self::Full | Self::Projections)
    }

    /// Whether a group of a layer with these norms runs forward a second time: what only the next half of the layer reads does not, unless
    /// a norm follows it.
    #[must_use]
    pub fn repeats(self, kind: GroupKind, norms: &NormNames) -> bool {
        match (self, kind) {
            (Self::Full | Self::Projections, GroupKind::Down) => norms.after_mlp.is_some(),
            (Self::Projections, GroupKind::AttentionOutput) => norms.after_attention.is_some(),
            (Self::Full | Self::Projections, _) => true,
            (Self::Selective | Self::None, _) => false,
        }
    }

    /// Whether what a layer saves may wait in host memory: the inputs of its halves and attention's output are few enough bytes.
    #[must_use]
    pub fn may_offload(self) -> bool {
        self.repeats_gemms()
    }
}

/// How the base weights live on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BaseStorage {
    /// Every weight trains, in f32.
    Trained,
    /// Frozen, in this format: projections quantized where it is a quantized one, everything else in the compute format.
    Frozen(Format),
}

impl BaseStorage {
    /// How the weights of linear modules are stored, next to adapters or without any.
    #[must_use]
    pub fn stored_format(self, has_adapters: bool) -> Format {
        match self {
            Self::Frozen(format) if has_adapters => format,
            Self::Frozen(_) | Self::Trained => Format::F32,
        }
    }
}

/// How a model is trained, as far as memory depends on it.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainingShape {
    /// How the base weights live on the device.
    pub base: BaseStorage,
    /// The adapter; `None`: every parameter trains.
    pub lora: Option<LoraConfig>,
    /// Format of activations.
    pub compute: Format,
    /// What the GEMMs of the layers multiply.
    pub gemms: GemmFormat,
    /// Bytes of converted frozen weights that stay on the device, for the forward and for the backward.
    pub kept_bytes: [u64; 2],
    /// Bytes of optimizer state, from the optimizer itself.
    pub optimizer_bytes: u64,
    /// Bytes of it that wait in host memory.
    pub paged_bytes: u64,
    /// Maximum bytes of paged state on the device at the same time.
    pub paging_bytes: u64,
    /// Packed sequences of a micro-batch.
    pub micro_batch_size: usize,
    /// Tokens of a packed sequence.
    pub row_len: usize,
    /// Tokens of the longest document.
    pub longest_document: usize,
    /// Documents of a micro-batch, padding included; 1 per sequence where each is one document.
    pub documents: usize,
    /// What layers save.
    pub recompute: Recompute,
    /// Whether what layers save waits in host memory, where [`Recompute::may_offload`].
    pub offload: bool,
    /// Rows of logits that exist at a time.
    pub loss_chunk_tokens: usize,
    /// What is computed between steps.
    pub evaluation: EvaluationShape,
    /// What is on other ranks instead.
    pub divided: DividedBytes,
    /// What pairs of answers add to a step; `None`: documents are trained on one by one.
    pub pairs: Option<PairPasses>,
}

/// The passes of a step over pairs of answers, in addition to those of plain training and a second one over the head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PairPasses {
    /// A forward pass without adapters, head included: the reference.
    pub reference: bool,
}

/// What ranks divide instead of having all of it each, and what that takes, on the rank that has most; nothing by default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DividedBytes {
    /// Gradients that other ranks keep (ZeRO stage 2).
    pub gradients_elsewhere: u64,
    /// Gradients that wait to be sent, and that are on their way.
    pub gradients_leaving: u64,
    /// Weights of the layers that other ranks have (ZeRO stage 3).
    pub weights_elsewhere: u64,
    /// Weights of other ranks that are here at the same time: those of the layer that computes and of the next.
    pub weights_borrowed: u64,
}

/// Bytes of a trained parameter, and of its gradient: both are f32.
pub const TRAINED_BYTES: u64 = 4;

/// Values per target of a pair: log-probabilities, the document, weights, and whether it belongs to the answer.
const PAIR_VALUES: u64 = 4;

/// Offloaded layer inputs that are on the device at the same time in the backward: the one in use, and one on its way back.
const INPUTS_ON_DEVICE: usize = 2;

impl TrainingShape {
    /// Tokens of a micro-batch.
    pub fn tokens(&self) -> u64 {
        self.micro_batch_size as u64 * self.row_len as u64
    }

    /// Parameters that get a gradient and optimizer state.
    pub fn trained_parameters(&self, model: &ModelSpec) -> u64 {
        self.lora.as_ref().map_or_else(|| model.parameters(), |lora| adapter_parameters(model, lora))
    }

    /// Bytes of one value of an activation.
    pub(crate) fn activation_bytes(&self) -> u64 {
        self.compute.bytes(&[1]) as u64
    }

    /// Whether the weights of linear modules are stored in another format than the one they are multiplied in.
    pub(crate) fn needs_conversion(&self) -> bool {
        self.stored_format() != self.compute
    }

    /// How the weights of linear modules are stored.
    pub(crate) fn stored_format(&self) -> Format {
        self.base.stored_format(self.lora.is_some())
    }

    /// Bytes of the frozen base; 0 where every parameter trains.
    pub(crate) fn base_bytes(&self, model: &ModelSpec) -> u64 {
        let Some(lora) = &self.lora else { return 0 };
        let stored = self.stored_format();
        let other = if matches!(stored, Format::Quantized(_)) { self.compute } else { stored };
        let bytes = |tensor: &TensorSpec| {
            let format = if tensor.role == Role::Projection { stored } else { other };
            format.bytes(&tensor.shape) as u64
        };
        let tensors = model.tensors();
        let frozen: u64 = tensors.iter().filter(|tensor| !lora.saves_tensor(&tensor.name)).map(bytes).sum();
        // A table that embedding and head shared: the head stays as it was where the embedding alone trains.
        let keeps_head = model.tie_word_embeddings && lora.saves_tensor(EMBEDDING) && !lora.saves_tensor(HEAD);
        frozen + if keeps_head { other.bytes(&[model.vocab_size, model.hidden_size]) as u64 } else { 0 }
    }

    /// Bytes of the pairs that adapters started as, where their base lost them (PiSSA): on the host, where they stay.
    pub fn start_bytes(&self, model: &ModelSpec) -> u64 {
        let Some(lora) = self.lora.as_ref().filter(|lora| !lora.init_lora_weights.is_uniform()) else { return 0 };
        let pairs =
            model.tensors_of(lora).into_iter().filter(|tensor| matches!(tensor.role, Role::LoraA | Role::LoraB));
        pairs.map(|tensor| 4 * tensor.elements() as u64).sum()
    }

    /// Tensors that wait in host memory, as their number and their values per token: what the last layer's backward reads first stays.
    #[must_use]
    pub fn offloaded_tensors(&self, model: &ModelSpec) -> Vec<[usize; 2]> {
        let layers = model.layers.len();
        let inputs = [layers.saturating_sub(1), model.hidden_size];
        match self.recompute {
            _ if !self.is_offloaded() => Vec::new(),
            Recompute::Projections => {
                let mut outputs: BTreeMap<usize, usize> = BTreeMap::new();
                for layer in &model.layers {
                    *outputs.entry(layer.attention.query_size()).or_default() += 1;
                }
                let sums = [layers, model.hidden_size];
                [inputs, sums].into_iter().chain(outputs.into_iter().map(|(width, count)| [count, width])).collect()
            }
            _ => vec![inputs],
        }
    }

    fn is_offloaded(&self) -> bool {
        self.offload && self.recompute.may_offload()
    }

    /// The lines that follow from the model, with a backend's working set after them.
    pub(crate) fn with_working_set(&self, model: &ModelSpec, working_set: Vec<MemoryLine>) -> MemoryEstimate {
        let mut lines = Vec::from(parameter_lines(model, self));
        lines.push(adapted_norms(model, self));
        lines.push(saved_activations(model, self));
        lines.push(pair_values(self));
        lines.extend(working_set);
        let mut host_lines = vec![offloaded_activations(model, self), paged_state(self)];
        for lines in [&mut lines, &mut host_lines] {
            lines.retain(|line| line.bytes > 0);
        }
        MemoryEstimate { peak: "at the peak of a step", lines, host_lines }
    }

    /// Bytes of parameters, gradients and optimizer state.
    pub(crate) fn parameter_bytes(&self, model: &ModelSpec) -> u64 {
        sum(&parameter_lines(model, self))
    }

    /// The lines of what stays between steps: parameters and optimizer state.
    pub(crate) fn resident_lines(&self, model: &ModelSpec) -> Vec<MemoryLine> {
        let [base, trained, _, state, _, borrowed, _] = parameter_lines(model, self);
        vec![base, trained, adapted_norms(model, self), state, borrowed]
    }
}

/// Parameters of all that an adapter trains.
pub(crate) fn adapter_parameters(model: &ModelSpec, lora: &LoraConfig) -> u64 {
    model.tensors_of(lora).iter().map(|tensor| tensor.elements() as u64).sum()
}

/// Columns of the widest input that adapters read under dropout; 0 without it.
pub(crate) fn widest_dropped(model: &ModelSpec, training: &TrainingShape) -> u64 {
    let Some(lora) = training.lora.as_ref().filter(|lora| lora.lora_dropout > 0.0) else { return 0 };
    let adapted = model.modules().filter(|(module, _)| lora.adapts(&module.path));
    adapted.map(|(_, in_features)| in_features as u64).max().unwrap_or(0)
}

/// Widths of the outputs of a layer that DoRA scales: of each group with an adapted module, in the order of the forward pass.
pub(crate) fn scaled_widths(model: &ModelSpec, training: &TrainingShape, layer: usize) -> Vec<u64> {
    let Some(lora) = training.lora.as_ref().filter(|lora| lora.use_dora) else { return Vec::new() };
    let groups = model.groups(layer);
    let scaled = groups.iter().filter(|group| group.modules.iter().any(|module| lora.adapts(&module.path)));
    scaled.map(|group| group.out_features() as u64).collect()
}

/// What DoRA's magnitudes stand over: the norms of adapted rows, and the squares of those of the base.
fn adapted_norms(model: &ModelSpec, training: &TrainingShape) -> MemoryLine {
    let lora = training.lora.as_ref().filter(|lora| lora.use_dora);
    let of_lora = |lora: &LoraConfig| {
        let magnitudes = model.tensors_of(lora).into_iter().filter(|tensor| tensor.role == Role::LoraMagnitude);
        2 * TRAINED_BYTES * magnitudes.map(|tensor| tensor.elements() as u64).sum::<u64>()
    };
    line("norms of adapted rows", lora.map_or(0, of_lora), "two f32 values per magnitude".to_owned())
}

/// Values per token that a layer's forward computes and its backward reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LayerValues {
    /// The layer's input; the sum after attention is as wide.
    input: u64,
    /// Attention's output.
    attended: u64,
    /// What GEMMs and attention compute: queries, keys and values (once more before their norm), attention output, outputs before a
    /// norm after them, the sum after attention, gate and up.
    computed: u64,
    /// Both normalized inputs, and the product of gate and up.
    elementwise: u64,
    /// f32 log-sum-exp values of attention, one per head.
    log_sums: u64,
}

/// The values of layer `layer`, from the parts of its groups.
pub(crate) fn layer_values(model: &ModelSpec, layer: usize) -> LayerValues {
    let groups = model.layer_groups(layer);
    let (qkv, output, [gate_up, down]) = (&groups.qkv, &groups.attention_output, groups.mlp_shapes());
    let (attention, mlp) = (&model.layers[layer].attention, &model.layers[layer].mlp);
    let norms = model.layers[layer].norms.names();
    let before_norm = match attention.qk_norm {
        QkNorm::None => 0,
        QkNorm::PerHead | QkNorm::WholeProjection => attention.query_size() + attention.kv_size(),
    };
    let before_norm = before_norm + norms.outputs() * model.hidden_size;
    let (rows, routed) = match mlp {
        MlpSpec::Gated { .. } => (1, 0),
        // The router's input; rows as they are dispatched and as they come back; two f32 per expert, in 2-byte values. Memory of experts'
        // rows is rounded up to powers of two on CUDA: an upper bound elsewhere.
        MlpSpec::Experts { count, top_k, .. } => (2 * top_k, (1 + 2 * top_k) * model.hidden_size + 4 * count),
    };
    let computed = qkv.out_features()
        + before_norm
        + output.in_features
        + gate_up.in_features
        + rows * gate_up.out_features()
        + routed;
    let normed = |name: Option<&str>, group: &GroupSpec| if name.is_some() { group.in_features } else { 0 };
    LayerValues {
        input: qkv.in_features as u64,
        attended: output.in_features as u64,
        computed: computed as u64,
        elementwise: (normed(norms.before_attention, qkv) + normed(norms.before_mlp, gate_up) + rows * down.in_features)
            as u64,
        log_sums: attention.heads as u64,
    }
}

impl LayerValues {
    /// Bytes per token that the forward saves until the backward, with `value` bytes per value.
    pub(crate) fn saved(&self, recompute: Recompute, value: u64) -> u64 {
        match recompute {
            Recompute::Full => self.input * value,
            Recompute::Projections => self.half_inputs() * value + 4 * self.log_sums,
            Recompute::Selective => self.selective(value),
            Recompute::None => self.everything(value),
        }
    }

    /// Inputs of both halves of the layer, attention and the MLP, and attention's output.
    fn half_inputs(&self) -> u64 {
        2 * self.input + self.attended
    }

    /// Bytes per token of the input and of what GEMMs and attention compute.
    pub(crate) fn selective(&self, value: u64) -> u64 {
        (self.input + self.computed) * value + 4 * self.log_sums
    }

    /// Bytes per token of everything that the backward reads.
    pub(crate) fn everything(&self, value: u64) -> u64 {
        self.selective(value) + self.elementwise * value
    }
}

pub(crate) fn line(what: &'static str, bytes: u64, why: String) -> MemoryLine {
    MemoryLine { what, bytes, why }
}

pub(crate) fn sum(lines: &[MemoryLine]) -> u64 {
    lines.iter().map(|line| line.bytes).sum()
}

fn parameter_lines(model: &ModelSpec, training: &TrainingShape) -> [MemoryLine; 7] {
    let trained = training.trained_parameters(model);
    let base = match training.stored_format() {
        Format::Quantized(format) => format!(
            "projections in {format}, {:.3} bits per parameter; the rest in {}",
            format.bits_per_value(),
            training.compute
        ),
        format => format!("every parameter in {format}"),
    };
    let per_parameter = training.optimizer_bytes as f64 / trained.max(1) as f64;
    let paged = if training.paged_bytes > 0 { ", without what is paged" } else { "" };
    let state = format!("{per_parameter:.2} bytes per trained parameter{paged}");
    let divided = &training.divided;
    let [frozen_elsewhere, trained_elsewhere] =
        if training.lora.is_some() { [divided.weights_elsewhere, 0] } else { [0, divided.weights_elsewhere] };
    let share = |bytes: u64| if bytes > 0 { ", without what other ranks have" } else { "" };
    [
        line(
            "base weights",
            training.base_bytes(model) - frozen_elsewhere,
            format!("{base}{}", share(frozen_elsewhere)),
        ),
        line(
            if training.lora.is_some() { "adapter weights" } else { "trained weights" },
            trained * TRAINED_BYTES - trained_elsewhere,
            format!("{trained} parameters in f32{}", share(trained_elsewhere)),
        ),
        line(
            "gradients",
            trained * TRAINED_BYTES - divided.gradients_elsewhere,
            format!("one f32 value per trained parameter{}", share(divided.gradients_elsewhere)),
        ),
        line("optimizer state", training.optimizer_bytes - training.paged_bytes, state),
        line(
            "paged state passing through",
            training.paging_bytes,
            "buckets that are updated, or on their way".to_owned(),
        ),
        line(
            "weights of other ranks",
            divided.weights_borrowed,
            "of the layer that computes, and of the next".to_owned(),
        ),
        line(
            "gradients for other ranks",
            divided.gradients_leaving,
            "a bucket that fills, and one on its way".to_owned(),
        ),
    ]
}

/// Moments of the optimizer that are copied to the device for their update and back.
fn paged_state(training: &TrainingShape) -> MemoryLine {
    line("paged optimizer state", training.paged_bytes, "pinned; copied to the device and back in each step".to_owned())
}

/// What adapters started as, in host memory.
pub(crate) fn adapter_starts(model: &ModelSpec, training: &TrainingShape) -> MemoryLine {
    line("starts of adapters", training.start_bytes(model), "f32; saved next to the trained pairs".to_owned())
}

fn saved_activations(model: &ModelSpec, training: &TrainingShape) -> MemoryLine {
    let (tokens, value) = (training.tokens(), training.activation_bytes());
    let values = || (0..model.layers.len()).map(|layer| layer_values(model, layer));
    let of_layers = |count| values().take(count).map(|layer| layer.saved(training.recompute, value)).sum::<u64>();
    let all = model.layers.len();
    let is_offloaded = training.is_offloaded();
    let (layers, per_token) = match training.recompute {
        Recompute::Projections if is_offloaded => {
            let widest = values().map(|layer| layer.half_inputs()).max().unwrap_or(0);
            (1, widest * value + 4 * values().map(|layer| layer.log_sums).sum::<u64>())
        }
        _ if is_offloaded => (all.min(INPUTS_ON_DEVICE), of_layers(INPUTS_ON_DEVICE)),
        _ => (all, of_layers(all)),
    };
    let what_is_saved = match training.recompute {
        Recompute::Full => "the input",
        Recompute::Projections if is_offloaded => {
            "sums of the softmax of all layers, attention's output and the inputs of both halves"
        }
        Recompute::Projections => "attention's output and the inputs of both halves",
        Recompute::Selective => "outputs of GEMMs and attention",
        Recompute::None => "everything that the backward reads",
    };
    let layers = if layers == 1 { "one layer".to_owned() } else { format!("{layers} layers") };
    let why = format!("{what_is_saved} of {layers}, {per_token} bytes per token, {tokens} tokens");
    line("saved activations", tokens * per_token, why)
}

/// Vectors over the targets of pairs. The pass of a reference is over before anything is saved for the backward, so it needs no line.
fn pair_values(training: &TrainingShape) -> MemoryLine {
    let bytes = training.pairs.map_or(0, |_| PAIR_VALUES * 4 * training.tokens());
    line("values of pairs", bytes, format!("{PAIR_VALUES} f32 values per token: log-probabilities, weights, marks"))
}

fn offloaded_activations(model: &ModelSpec, training: &TrainingShape) -> MemoryLine {
    let tensors = training.offloaded_tensors(model);
    let bytes = tensors.iter().map(|[count, width]| (count * width) as u64).sum::<u64>();
    let what = match training.recompute {
        Recompute::Projections => "the inputs of both halves of each layer, and attention's output",
        _ => "the input of each layer but the last",
    };
    let why = format!("{what}, {} tokens, pinned", training.tokens());
    line("offloaded activations", bytes * training.tokens() * training.activation_bytes(), why)
}

#[cfg(test)]
pub(crate) mod tests {
    use firebrick_arch::shapes::{llama_3_1_8b, llama_3_2_1b, qwen3_8b};
    use firebrick_arch::{LayerNorms, LoraConfig, TargetModules};
    use firebrick_precision::QuantFormat;

    use super::*;

    pub(crate) fn qlora(micro_batch_size: usize, recompute: Recompute) -> TrainingShape {
        TrainingShape {
            base: BaseStorage::Frozen(Format::Quantized(QuantFormat::Nf4 { double_quant: true })),
            lora: Some(lora(TargetModules::AllLinear)),
            compute: Format::Bf16,
            gemms: GemmFormat::Compute,
            kept_bytes: [0; 2],
            // 8-bit AdamW: both moments of 41,943,040 parameters with their scales.
            optimizer_bytes: (41_943_040.0f64 * 2.03).ceil() as u64,
            paged_bytes: 0,
            paging_bytes: 0,
            micro_batch_size,
            row_len: 4096,
            longest_document: 0,
            documents: micro_batch_size,
            recompute,
            offload: false,
            loss_chunk_tokens: 1024,
            evaluation: EvaluationShape::default(),
            divided: DividedBytes::default(),
            pairs: None,
        }
    }

    pub(crate) fn dense(format: Format) -> TrainingShape {
        TrainingShape { base: BaseStorage::Frozen(format), ..qlora(1, Recompute::Full) }
    }

    pub(crate) fn full(compute: Format) -> TrainingShape {
        let optimizer_bytes = 8 * llama_3_1_8b().parameters();
        TrainingShape { base: BaseStorage::Trained, lora: None, compute, optimizer_bytes, ..qlora(1, Recompute::Full) }
    }

    fn lora(target_modules: TargetModules) -> LoraConfig {
        LoraConfig { lora_alpha: 16.0, target_modules, ..LoraConfig::default() }
    }

    pub(crate) fn bytes_of(estimate: &MemoryEstimate, what: &str) -> u64 {
        estimate.lines.iter().filter(|line| line.what == what).map(|line| line.bytes).sum()
    }

    #[test]
    fn what_other_ranks_have_is_not_counted_and_what_is_borrowed_is() {
        let model = llama_3_1_8b();
        let divided = DividedBytes {
            gradients_elsewhere: 1 << 20,
            gradients_leaving: 1 << 10,
            weights_elsewhere: 1 << 30,
            weights_borrowed: 1 << 25,
        };
        for (whole, weights) in [(qlora(1, Recompute::Full), "base weights"), (full(Format::F32), "trained weights")] {
            let part = TrainingShape { divided, ..whole.clone() };
            let [whole, part] = [whole, part].map(|shape| shape.with_working_set(&model, Vec::new()));
            assert_eq!(bytes_of(&whole, weights) - bytes_of(&part, weights), 1 << 30);
            assert_eq!(bytes_of(&whole, "gradients") - bytes_of(&part, "gradients"), 1 << 20);
            let more = (1 << 25) + (1 << 10);
            assert_eq!(whole.total_bytes() + more, part.total_bytes() + (1 << 30) + (1 << 20));
        }
    }

    #[test]
    fn adapters_have_the_parameters_of_their_targets() {
        let model = llama_3_1_8b();
        assert_eq!(adapter_parameters(&model, &lora(TargetModules::AllLinear)), 41_943_040);
        let named = TargetModules::Named(vec!["q_proj".to_owned(), "v_proj".to_owned()]);
        assert_eq!(adapter_parameters(&model, &LoraConfig { r: 8, ..lora(named) }), 3_407_872);
        let listed: usize =
            model.adapter_tensors(&lora(TargetModules::AllLinear)).unwrap().iter().map(TensorSpec::elements).sum();
        assert_eq!(listed, 41_943_040);
    }

    #[test]
    fn the_frozen_base_has_the_bytes_of_its_tensors() {
        let model = llama_3_1_8b();
        for (format, per_parameter) in [(Format::F32, 4), (Format::Bf16, 2)] {
            assert_eq!(dense(format).base_bytes(&model), per_parameter * 8_030_261_248);
        }
        let quantized = qlora(1, Recompute::Full).base_bytes(&model);
        let others = model.parameters() - model.parameters_of(Role::Projection);
        let bits = 8.0 * (quantized - 2 * others) as f64 / model.parameters_of(Role::Projection) as f64;
        assert!((bits - 4.127).abs() < 1e-3, "{bits}");
    }

    #[test]
    fn paged_state_moves_from_the_device_to_the_host() {
        let resident = full(Format::Bf16);
        let paged = TrainingShape { paged_bytes: 1 << 30, paging_bytes: 1 << 20, ..resident.clone() };
        let estimate = |training: &TrainingShape| training.with_working_set(&llama_3_1_8b(), Vec::new());
        let (before, after) = (estimate(&resident), estimate(&paged));
        assert_eq!(before.total_bytes() - after.total_bytes(), (1 << 30) - (1 << 20));
        assert_eq!(after.host_bytes() - before.host_bytes(), 1 << 30);
    }

    #[test]
    fn a_tied_head_counts_once() {
        let training = TrainingShape { lora: None, ..full(Format::F32) };
        assert_eq!(training.trained_parameters(&llama_3_2_1b()), 1_235_814_400);
    }

    #[test]
    fn selective_recomputation_saves_less_than_100_kb_per_token_and_layer_of_the_8b_shape() {
        assert_eq!(layer_values(&llama_3_1_8b(), 0).saved(Recompute::Selective, 2), 94_336);
    }

    #[test]
    fn normalized_queries_and_keys_are_saved_twice() {
        let mut plain = qwen3_8b();
        for layer in &mut plain.layers {
            layer.attention.qk_norm = QkNorm::None;
        }
        let saved = |model: &ModelSpec| layer_values(model, 0).saved(Recompute::Selective, 2);
        assert_eq!(saved(&qwen3_8b()) - saved(&plain), 2 * (4096 + 1024));
    }

    #[test]
    fn outputs_that_are_normalized_are_saved_as_they_were_before() {
        let with = |norms| {
            let mut model = llama_3_1_8b();
            model.layers.iter_mut().for_each(|layer| layer.norms = norms);
            [Recompute::Selective, Recompute::None].map(|recompute| layer_values(&model, 0).saved(recompute, 2))
        };
        let ([before, all_before], [after, all_after]) = (with(LayerNorms::Pre), with(LayerNorms::Post));
        assert_eq!(after - before, 2 * 2 * 4096);
        // Without norms of inputs there are no normalized inputs to save.
        assert_eq!(all_after, all_before);
        assert_eq!(with(LayerNorms::PreAndPost), [after, all_before + 2 * 2 * 4096]);
    }
}
