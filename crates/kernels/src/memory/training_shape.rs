//! How a model is trained, as far as memory and work depend on it: the trained parts, formats, what layers save, and
//! what other ranks or the host store.
//!
//! Trade-off: one struct with a field per decision, all of which the caller fills in, even for backends that read half of them.

use std::collections::{BTreeMap, BTreeSet};

pub use firebrick_arch::Recompute;
use firebrick_arch::{
    EMBEDDING, GroupKind, LayerSpec, LoraConfig, Mixer, ModelSpec, Role, TensorSpec, Value, ValueKind,
};
use firebrick_precision::FloatType;

use super::evaluation::EvaluationShape;
use crate::GemmFormat;
use crate::delta::{CHUNK, chunk_room};
use crate::weights::{BaseStorage, Storage};

/// The most tokens of a tile. As fast as whole rows: GEMMs of 8,192 to 16,384 rows fill any card.
pub const TILE_TOKENS: usize = 16_384;

/// Returns the tokens of each tile of a pass under full recomputation, of which at most `most` are in memory at once where layers run in tiles; `None` if
/// the pass is not twice as long. All tiles have one size if the tokens can be divided so, because memory is kept by exact sizes.
pub fn tile_rows(tokens: usize, most: usize) -> Option<usize> {
    let least = tokens.div_ceil(most);
    let equal = (least..2 * least).find(|count| tokens.is_multiple_of(*count));
    (tokens >= 2 * most).then(|| tokens.div_ceil(equal.unwrap_or(least)))
}

/// How a model is trained, as far as memory depends on it.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainingShape {
    /// Storage of the base weights on the device.
    pub base: BaseStorage,
    /// Projections that stay unquantized, as they are in the folder.
    pub dense: BTreeSet<String>,
    /// The adapter; `None`: every parameter trains.
    pub lora: Option<LoraConfig>,
    /// Format of activations.
    pub compute: FloatType,
    /// Operand format of the layers' GEMMs.
    pub gemms: GemmFormat,
    /// Shared memory of a block, in bytes, that tiles and passes of backend `cuda` are planned for:
    /// [`PLANNED_SHARED_BYTES`](crate::PLANNED_SHARED_BYTES), or what a smaller card has.
    pub shared_bytes: usize,
    /// Whether the card is a Hopper, whose hand-written kernels of backend `cuda` multiply all experts in 8-bit floats in one launch.
    pub has_wgmma: bool,
    /// Format in which gradients of parameters in bf16 are summed; those of others are summed in f32.
    pub gradients: FloatType,
    /// Bytes of converted frozen weights that stay on the device, for the forward and for the backward.
    pub kept_bytes: [u64; 2],
    /// Bytes of optimizer state, from the optimizer itself.
    pub optimizer_bytes: u64,
    /// Bytes of optimizer state that wait in host memory.
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
    /// The values that layers save.
    pub recompute: Recompute,
    /// Whether saved values wait in host memory, if [`Recompute::may_offload`].
    pub offload: bool,
    /// Maximum number of loss tokens in a packed sequence.
    pub loss_tokens_per_row: usize,
    /// Rows of logits that are computed at a time.
    pub loss_chunk_tokens: usize,
    /// Evaluation and answers between steps.
    pub evaluation: EvaluationShape,
    /// Memory that ranks divide.
    pub divided: DividedBytes,
    /// Additional passes for pairs of answers; `None`: documents are trained on one by one.
    pub pairs: Option<PairPasses>,
    /// Whether sums have a fixed order ([`RunShape::deterministic`](crate::RunShape)).
    pub deterministic: bool,
}

/// Additional passes of a step over pairs of answers, besides a second pass over the head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PairPasses {
    /// Whether there is a forward pass without adapters, including the head: the reference.
    pub reference: bool,
}

/// Memory that ranks divide instead of replicating it, and the cost of dividing, on the rank that has most; zero by default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DividedBytes {
    /// Gradients that other ranks store (ZeRO stage 2).
    pub gradients_elsewhere: u64,
    /// Gradients that wait to be sent or are being sent.
    pub gradients_leaving: u64,
    /// Layer weights that other ranks own (ZeRO stage 3).
    pub weights_elsewhere: u64,
    /// Weights of other ranks that are gathered at the same time: those of the current layer and of the next.
    pub weights_borrowed: u64,
}

/// Bytes per value of a trained parameter and of its gradient where both are f32.
pub const TRAINED_BYTES: u64 = 4;

impl TrainingShape {
    /// Returns the tokens of a micro-batch.
    pub fn tokens(&self) -> u64 {
        self.micro_batch_size as u64 * self.row_len as u64
    }

    /// Returns the maximum number of tokens whose logits exist at a time.
    pub(crate) fn loss_chunk(&self) -> u64 {
        let counted = self.micro_batch_size as u64 * self.loss_tokens_per_row.min(self.row_len) as u64;
        counted.min(self.loss_chunk_tokens as u64)
    }

    /// Returns the number of parameters that get a gradient and optimizer state.
    pub fn trained_parameters(&self, model: &ModelSpec) -> u64 {
        self.lora.as_ref().map_or_else(|| model.trainable_parameters(), |lora| adapter_parameters(model, lora))
    }

    /// Returns the bytes of a rank's trained parameters and of their gradients, if nothing is divided.
    pub fn trained_bytes(&self, model: &ModelSpec) -> [u64; 2] {
        let all = TRAINED_BYTES * self.trained_parameters(model);
        if self.base != BaseStorage::TrainedBf16 {
            return [all; 2];
        }
        let tensors = model.stacked_tensors().into_iter().filter(TensorSpec::may_train);
        let is_narrow = |tensor: &TensorSpec| self.base.trained_format(tensor.role) == FloatType::Bf16;
        let narrow: u64 = tensors.filter(is_narrow).map(|tensor| tensor.elements() as u64).sum();
        [FloatType::Bf16, self.gradients].map(|float| all - (TRAINED_BYTES - float.bytes() as u64) * narrow)
    }

    pub(crate) fn activation_bytes(&self) -> u64 {
        self.compute.bytes() as u64
    }

    /// Returns the settings that determine the format of each tensor of the base.
    pub fn storage(&self) -> Storage<'_> {
        let compute = self.gemms.of_frozen(self.compute);
        Storage { base: self.base, lora: self.lora.as_ref(), compute, dense: &self.dense }
    }

    /// Returns the bytes of the frozen base; 0 if every parameter trains.
    pub(crate) fn base_bytes(&self, model: &ModelSpec) -> u64 {
        self.storage().frozen_bytes(model)
    }

    /// Returns the bytes of the initial adapters that were subtracted from their base (PiSSA); they stay in host memory.
    pub fn start_bytes(&self, model: &ModelSpec) -> u64 {
        let Some(lora) = self.lora.as_ref().filter(|lora| !lora.init_lora_weights.is_uniform()) else { return 0 };
        let pairs =
            model.tensors_of(lora).into_iter().filter(|tensor| matches!(tensor.role, Role::LoraA | Role::LoraB));
        pairs.map(|tensor| 4 * tensor.elements() as u64).sum()
    }

    /// Returns the width of what each chunk of a document has, given that of a document of whole chunks, in memory for more of them.
    pub(crate) fn of_chunks(&self, width: usize) -> usize {
        let (tokens, documents) = (self.tokens().max(1) as usize, self.documents.max(1));
        let chunks = if documents > self.micro_batch_size {
            // The last chunk of a document is half full.
            tokens.div_ceil(CHUNK) + documents / 2
        } else {
            documents * (tokens / documents).div_ceil(CHUNK)
        };
        (width * CHUNK * chunk_room(tokens, chunks)).div_ceil(tokens)
    }

    /// Lists the values of a layer, with the states of the chunks that its documents have.
    pub(crate) fn values(&self, model: &ModelSpec, layer: usize) -> Vec<Value> {
        let mut values = model.values(layer);
        for value in values.iter_mut().filter(|value| value.kind == ValueKind::States) {
            value.width = self.of_chunks(value.width);
        }
        values
    }

    /// Returns the bytes per token of the values of a layer that `counts`.
    pub(crate) fn bytes_of(&self, model: &ModelSpec, layer: usize, counts: impl Fn(&Value) -> bool) -> u64 {
        let values = self.values(model, layer).into_iter().filter(counts);
        values.map(|value| value.bytes(self.activation_bytes())).sum()
    }

    /// Returns the tensors that wait in host memory, as counts and values per token. Those that the last layer's backward reads first stay.
    pub fn offloaded_tensors(&self, model: &ModelSpec) -> Vec<[usize; 2]> {
        let mut tensors: BTreeMap<(ValueKind, usize), usize> = BTreeMap::new();
        for layer in (0..model.layers.len()).filter(|_| self.is_offloaded()) {
            for value in self.values(model, layer).iter().filter(|value| value.may_wait && self.recompute.saves(value))
            {
                let stays = value.kind == ValueKind::Input && layer + 1 == model.layers.len();
                *tensors.entry((value.kind, value.rows * value.width)).or_default() += usize::from(!stays);
            }
        }
        tensors.into_iter().map(|((_, width), count)| [count, width]).collect()
    }

    /// Returns the tokens of a tile if a pass is so long that its layers run in tiles where they can. Masks of dropout are made for whole passes.
    pub(crate) fn tile_rows(&self) -> Option<usize> {
        let drops = self.lora.as_ref().is_some_and(|lora| lora.lora_dropout > 0.0);
        tile_rows(self.tokens() as usize, TILE_TOKENS).filter(|_| self.recompute.repeats_gemms() && !drops)
    }

    /// Returns whether a whole layer runs in tiles, not its MLP alone.
    pub(crate) fn runs_in_tiles(&self, layer: &LayerSpec) -> bool {
        let is_full = self.recompute == Recompute::Full;
        self.tile_rows().is_some() && is_full && layer.mixer.attention().is_none() && !layer.mlp.is_mixture()
    }

    /// Returns the tokens that a group multiplies at once.
    pub(crate) fn rows_of_group(&self, layer: &LayerSpec, kind: GroupKind) -> u64 {
        let of_mlp = matches!(kind, GroupKind::GateUp | GroupKind::Down);
        let tile = self.tile_rows().filter(|_| of_mlp || self.runs_in_tiles(layer));
        tile.map_or(self.tokens(), |rows| rows as u64)
    }

    /// Returns the bytes of the layers' own inputs on the device: the rows of the table and the inputs for a whole pass, and a third copy while these are
    /// computed. If a backward needs their gradients, what was projected is saved, too; the gradients of all layers wait next to those of the
    /// gates until they are joined, and are reordered then.
    pub(crate) fn layer_input_bytes(&self, model: &ModelSpec, has_backward: bool) -> u64 {
        let Some(inputs) = model.per_layer_inputs else { return 0 };
        let copies = if has_backward && self.trains_layer_inputs(model) { 7 } else { 3 };
        let values = copies * (model.layers.len() * inputs.width) as u64;
        self.tokens() * values * self.activation_bytes()
    }

    /// Returns whether what computes the layers' own inputs trains, or the embedding.
    fn trains_layer_inputs(&self, model: &ModelSpec) -> bool {
        let (storage, tensors) = (self.storage(), model.per_layer_tensors());
        let computes = tensors.iter().flatten().filter(|tensor| tensor.may_train()).map(|tensor| tensor.name.as_str());
        let has_rows = self.lora.as_ref().is_some_and(|lora| !lora.token_rows(EMBEDDING, model).is_empty());
        has_rows || computes.chain([EMBEDDING]).any(|name| storage.trains(name))
    }

    /// Returns the bytes of what passes between tiles: states before each, f32, and the sums of a layer's gradients where base weights train.
    pub(crate) fn bytes_between_tiles(&self, model: &ModelSpec) -> u64 {
        let Some(rows) = self.tile_rows() else { return 0 };
        let tiles = self.tokens().div_ceil(rows as u64);
        let state = |layer: &LayerSpec| match &layer.mixer {
            Mixer::DeltaNet(delta) if self.runs_in_tiles(layer) => 4 * tiles * delta.state_size() as u64,
            _ => 0,
        };
        let mut of_layers: BTreeMap<usize, u64> = BTreeMap::new();
        for tensor in model.tensors().into_iter().filter(|_| self.lora.is_none()) {
            if let Some(layer) = tensor.layer {
                *of_layers.entry(layer).or_default() += 4 * tensor.elements() as u64;
            }
        }
        let sums = of_layers.into_values().max().unwrap_or(0);
        model.layers.iter().map(state).sum::<u64>() + sums
    }

    /// Returns whether saved values wait in host memory.
    pub(crate) fn is_offloaded(&self) -> bool {
        self.offload && self.recompute.may_offload()
    }
}

fn adapter_parameters(model: &ModelSpec, lora: &LoraConfig) -> u64 {
    model.tensors_of(lora).iter().map(|tensor| tensor.elements() as u64).sum()
}

/// Returns the columns of the widest adapter input under dropout; 0 without dropout.
pub(crate) fn widest_dropped(model: &ModelSpec, training: &TrainingShape) -> u64 {
    let Some(lora) = training.lora.as_ref().filter(|lora| lora.lora_dropout > 0.0) else { return 0 };
    let adapted = model.modules().filter(|(module, _)| lora.adapts(&module.path));
    adapted.map(|(_, in_features)| in_features as u64).max().unwrap_or(0)
}

/// Returns the output widths that DoRA scales in a layer: of each group with an adapted module, in forward order.
pub(crate) fn scaled_widths(model: &ModelSpec, training: &TrainingShape, layer: usize) -> Vec<u64> {
    let Some(lora) = training.lora.as_ref().filter(|lora| lora.use_dora) else { return Vec::new() };
    let groups = model.groups(layer);
    let scaled = groups.iter().filter(|group| group.modules.iter().any(|module| lora.adapts(module.lora_path())));
    scaled.map(|group| (group.rows * group.out_features()) as u64).collect()
}

#[cfg(test)]
pub(crate) mod tests {
    use firebrick_arch::TargetModules;
    use firebrick_arch::shapes::{llama_3_1_8b, llama_3_2_1b};
    use firebrick_precision::{Format, QuantFormat};

    use super::*;
    use crate::PLANNED_SHARED_BYTES;

    pub(crate) fn qlora(micro_batch_size: usize, recompute: Recompute) -> TrainingShape {
        TrainingShape {
            base: BaseStorage::Frozen(Format::Quantized(QuantFormat::Nf4 { double_quant: true })),
            dense: BTreeSet::new(),
            lora: Some(lora(TargetModules::AllLinear)),
            compute: FloatType::Bf16,
            gemms: GemmFormat::Compute,
            shared_bytes: PLANNED_SHARED_BYTES,
            has_wgmma: true,
            gradients: FloatType::F32,
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
            loss_tokens_per_row: 4096,
            loss_chunk_tokens: 1024,
            evaluation: EvaluationShape::default(),
            divided: DividedBytes::default(),
            pairs: None,
            deterministic: false,
        }
    }

    pub(crate) fn dense(format: FloatType) -> TrainingShape {
        TrainingShape { base: BaseStorage::Frozen(Format::Float(format)), compute: format, ..qlora(1, Recompute::Full) }
    }

    pub(crate) fn full(compute: FloatType) -> TrainingShape {
        let optimizer_bytes = 8 * llama_3_1_8b().parameters();
        TrainingShape { base: BaseStorage::Trained, lora: None, compute, optimizer_bytes, ..qlora(1, Recompute::Full) }
    }

    fn lora(target_modules: TargetModules) -> LoraConfig {
        LoraConfig { lora_alpha: 16.0, target_modules, ..LoraConfig::default() }
    }

    #[test]
    fn trained_parameters_are_those_of_targets_or_all() {
        let model = llama_3_1_8b();
        assert_eq!(adapter_parameters(&model, &lora(TargetModules::AllLinear)), 41_943_040);
        let named = TargetModules::Named(vec!["q_proj".to_owned(), "v_proj".to_owned()]);
        assert_eq!(adapter_parameters(&model, &LoraConfig { r: 8, ..lora(named) }), 3_407_872);
        let listed: usize =
            model.adapter_tensors(&lora(TargetModules::AllLinear)).unwrap().iter().map(TensorSpec::elements).sum();
        assert_eq!(listed, 41_943_040);
        assert_eq!(full(FloatType::F32).trained_parameters(&llama_3_2_1b()), 1_235_814_400, "a tied head counts once");
    }

    #[test]
    fn the_frozen_base_has_the_bytes_of_its_tensors() {
        let model = llama_3_1_8b();
        for (format, per_parameter) in [(FloatType::F32, 4), (FloatType::Bf16, 2)] {
            let norms = model.parameters_of(Role::Norm);
            assert_eq!(dense(format).base_bytes(&model), per_parameter * (8_030_261_248 - norms) + 4 * norms);
        }
        let quantized = qlora(1, Recompute::Full).base_bytes(&model);
        let others = model.parameters() - model.parameters_of(Role::Projection);
        let bits = 8.0 * (quantized - 2 * others) as f64 / model.parameters_of(Role::Projection) as f64;
        assert!((bits - 4.127).abs() < 1e-3, "{bits}");
    }
}
