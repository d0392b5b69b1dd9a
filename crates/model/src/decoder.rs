//! The decoder: forward, loss and backward as three public calls.
//!
//! ```text
//! let (hidden, tape) = model.forward(&batch, pass);
//! let loss = model.loss(hidden, &batch.targets, options, &mut sink);
//! model.backward(tape, loss.d_hidden_nd, &mut sink);
//! ```
//!
//! A caller opens one section around the three ([`Decoder::loss_and_gradients`] does). A custom loss is a function from the hidden states to their
//! gradient. Peak memory is what the recompute policy saves of each layer, plus one layer. Parameters carry Hugging Face's names.

use std::collections::BTreeMap;

use burn_tensor::{DType, Int, Tensor};
use firebrick_arch::{ModelConfig, ModelSpec, rope};
use firebrick_kernels::memory::prefetch::Schedule;
use firebrick_kernels::{
    Contributions, CrossEntropy, CrossEntropyOptions, Documents, GradientSink, Hint, Keep, Kernels, LossTargets,
    RotaryTables, Weight, WeightGradient, loss,
};

use crate::division::{Blocks, Division};
use crate::error::ModelError;
use crate::experts::ExpertChoices;
use crate::experts::router_loss::{RouterLoss, RouterSums, with_router_loss};
use crate::layer::{Context, Layer, Mlp};
use crate::layer_inputs::{LayerInputs, SavedInputs, TokenInputs, rounded};
use crate::linear::{AdapterPass, Base, add_matrix, times_transposed, weight_gradient};
use crate::mixer::{self, Published};
use crate::norm::Norm;
use crate::pass::{BackwardItems, PassOptions, SavedLayer, backward_layer, forward_layer};
use crate::tile::Tile;
use crate::token_rows::TokenRows;

/// Settings of the cross entropy over the vocabulary.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossOptions {
    /// Rows of logits that exist at a time.
    pub chunk_tokens: usize,
    /// Factor of the gradients: usually one over the loss tokens of the whole step, so that micro-batches add up to the mean. `None`: the
    /// loss only.
    pub gradient_scale: Option<f64>,
    /// Whether to return the log-probability of each target.
    pub log_probs: bool,
    /// Divisor of the logits, after their factor and soft cap; 1 unless the probabilities are those of sampling.
    pub temperature: f64,
}

/// One micro-batch on the device.
#[derive(Clone, Debug)]
pub struct MicroBatch<B: Kernels> {
    /// Token ids, `[n]`.
    pub ids_n: Tensor<B, 1, Int>,
    /// For each token the index of its row among the embedding's trained rows, -1 if it has none, `[n]`; `None` if no rows train.
    pub slots_n: Option<Tensor<B, 1, Int>>,
    pub(crate) layer_inputs: Option<TokenInputs<B>>,
    /// Document boundaries and rotary angles.
    pub context: Context<B>,
    /// The targets that count in the loss.
    pub targets: LossTargets<B>,
    /// The auxiliary loss that balances experts; see [`Decoder::add_router_loss`].
    pub(crate) router_loss: Option<RouterLoss<B>>,
}

/// Result of [`Decoder::loss`].
#[derive(Clone, Debug)]
pub struct Loss<B: Kernels> {
    /// Weighted sum of the cross entropies of the targets, `[1]` f32, not scaled.
    pub loss_sum: Tensor<B, 1>,
    /// Log-probability of each target, `[m]` f32, where requested.
    pub log_probs_m: Option<Tensor<B, 1>>,
    /// Gradient of the hidden states `[n, d]`, scaled; `None` without a gradient scale.
    pub d_hidden_nd: Option<Tensor<B, 2>>,
}

/// The state that a forward pass leaves for its backward.
pub struct Tape<B: Kernels> {
    saved: Vec<Option<SavedLayer<B>>>,
    /// The last layer's output: the final norm's input.
    last_nd: Tensor<B, 2>,
    ids_n: Tensor<B, 1, Int>,
    slots_n: Option<Tensor<B, 1, Int>>,
    context: Context<B>,
    published: Published<B>,
    layer_inputs: Option<(SavedInputs<B>, TokenInputs<B>)>,
    adapters: AdapterPass,
    router_loss: Option<Tensor<B, 1>>,
}

impl<B: Kernels> Tape<B> {
    /// Returns the auxiliary loss that balances experts, `[1]` f32, without a factor; `None` if the micro-batch has none.
    pub fn router_loss(&self) -> Option<Tensor<B, 1>> {
        self.router_loss.clone()
    }
}

/// A decoder-only transformer.
#[derive(Clone, Debug)]
pub struct Decoder<B: Kernels> {
    /// What config.json says of the model.
    pub config: ModelConfig,
    pub(crate) embed_tokens: Base<B>,
    /// Rows of the embedding that train alone; also the head's if it is tied.
    pub(crate) embed_rows: Option<TokenRows<B>>,
    pub(crate) layer_inputs: Option<LayerInputs<B>>,
    pub(crate) layers: Vec<Layer<B>>,
    pub(crate) choices: Option<ExpertChoices<B>>,
    pub(crate) norm: Norm<B>,
    /// Absent where the head is tied to the embedding.
    pub(crate) lm_head: Option<Base<B>>,
    /// Rows of it that train alone.
    pub(crate) head_rows: Option<TokenRows<B>>,
    /// Angles by position, one pair of tables per rope.
    pub(crate) rotary: Vec<RotaryTables<B>>,
    pub(crate) max_positions: usize,
    /// The sequence length that selected longrope's factors.
    pub(crate) sequence_tokens: usize,
    pub(crate) compute_dtype: DType,
    /// Tokens of a tile of a long pass under full recomputation.
    pub tile_tokens: usize,
    pub(crate) base_hash: Option<u64>,
    /// The owners of the layer weights, if ranks divide them.
    pub(crate) division: Option<Division>,
    pub(crate) device: B::Device,
}

impl<B: Kernels> Decoder<B> {
    /// Uploads a micro-batch: token ids, targets (negative: not in the loss), positions inside documents, and document boundaries, all
    /// over the flattened packed sequences.
    ///
    /// # Errors
    /// A token or target outside the vocabulary, or a failed read of the table of the layers' own inputs.
    ///
    /// # Panics
    /// If lengths disagree, or a position lies outside the rotary table: the packer computes them.
    pub fn upload(
        &self,
        input_ids: &[u32],
        targets: &[i64],
        positions: &[u32],
        cu_seqlens: &[u32],
    ) -> Result<MicroBatch<B>, ModelError> {
        assert!(
            input_ids.len() == targets.len() && input_ids.len() == positions.len(),
            "a micro-batch of {} ids has {} targets and {} positions",
            input_ids.len(),
            targets.len(),
            positions.len()
        );
        self.check_ids(input_ids.iter().map(|&id| u64::from(id)))?;
        self.check_ids(targets.iter().filter_map(|&target| u64::try_from(target).ok()))?;
        let counted: Vec<(i32, i32)> =
            (0..).zip(targets).filter(|&(_, &target)| target >= 0).map(|(i, &target)| (i, target as i32)).collect();
        let (rows, targets): (Vec<i32>, Vec<i32>) = counted.into_iter().unzip();
        B::hint(&self.device, Hint::Pass { tokens: input_ids.len() });
        let documents = Documents::new(cu_seqlens, &self.device);
        assert_eq!(documents.tokens(), input_ids.len(), "cu_seqlens must end at the number of tokens");
        Ok(MicroBatch {
            ids_n: self.indices(input_ids),
            slots_n: self.embed_rows.as_ref().map(|rows| rows.slots(input_ids, &self.device)),
            layer_inputs: self.token_inputs(input_ids)?,
            context: Context {
                tiles: Tile::all(&self.config.spec, &documents, self.tile_tokens, &self.device),
                tile_tokens: self.tile_tokens,
                documents,
                rotary: self.rotary_at(positions),
                router_gradient: None,
            },
            targets: LossTargets {
                count: rows.len(),
                positions_m: Tensor::from_ints(rows.as_slice(), &self.device),
                targets_m: Tensor::from_ints(targets.as_slice(), &self.device),
                weights_m: None,
            },
            router_loss: None,
        })
    }

    /// Refuses ids without a row in embedding and head: a device does not check them, and would read other memory.
    pub(crate) fn check_ids(&self, ids: impl Iterator<Item = u64>) -> Result<(), ModelError> {
        let spec = &self.config.spec;
        let vocabulary = spec.per_layer_inputs.map_or(usize::MAX, |inputs| inputs.vocab_size).min(spec.vocab_size);
        match ids.max().filter(|&id| id >= vocabulary as u64) {
            Some(id) => Err(ModelError::TokenOutsideVocabulary { id, vocabulary }),
            None => Ok(()),
        }
    }

    /// Runs forward, loss and backward of a micro-batch in one section. Returns the sum of the cross entropies `[1]`, and after it the auxiliary loss
    /// if the micro-batch has one, `[2]`; the gradients of that sum times the gradient scale, plus those of that loss, go to the sink.
    ///
    /// # Panics
    /// If the loss options have no gradient scale.
    pub fn loss_and_gradients(
        &self,
        batch: &MicroBatch<B>,
        pass: PassOptions,
        loss: LossOptions,
        sink: &mut dyn GradientSink<B>,
    ) -> Tensor<B, 1> {
        self.begin_mixers(batch);
        let (loss_sum, router_loss) = B::section(&self.device, || {
            let (hidden_nd, tape) = self.forward(batch, pass);
            let (loss, router_loss) = (self.loss(hidden_nd, &batch.targets, loss, sink), tape.router_loss());
            let d_hidden_nd = loss.d_hidden_nd.expect("gradients need a gradient scale");
            self.backward(tape, d_hidden_nd, sink);
            (loss.loss_sum, router_loss)
        });
        with_router_loss(loss_sum, router_loss)
    }

    /// Gives a micro-batch the auxiliary loss that balances experts. Its gradients, times `gradient_scale` `[1]` f32, are added to those of the
    /// logits of all routers. `is_token` says which tokens are no padding; `None`: all.
    ///
    /// # Panics
    /// If the model has no router whose scores are probabilities, in the forward pass.
    pub fn add_router_loss(&self, batch: &mut MicroBatch<B>, is_token: Option<&[bool]>, gradient_scale: Tensor<B, 1>) {
        let [all] = batch.ids_n.dims();
        batch.router_loss = Some(RouterLoss::new(all, is_token, gradient_scale, &self.device));
    }

    /// Starts the slow preparations for the mixers in both passes over a micro-batch.
    pub(crate) fn begin_mixers(&self, batch: &MicroBatch<B>) {
        let layers = &self.config.spec.layers;
        for (index, layer) in layers.iter().enumerate() {
            // Consecutive layers mostly have the same mixer.
            if index == 0 || layers[index - 1].mixer != layer.mixer {
                mixer::prepare(&layer.mixer, self.compute_dtype, &batch.context.documents, &self.device);
            }
        }
    }

    /// Returns the hidden states after the final norm, `[n, d]`, and what the backward needs.
    pub fn forward(&self, batch: &MicroBatch<B>, pass: PassOptions) -> (Tensor<B, 2>, Tape<B>) {
        let mut x_nd = self.embed(batch.ids_n.clone());
        let context = &batch.context;
        let mut saved = Vec::with_capacity(self.layers.len());
        let mut sums = batch.router_loss.clone().map(RouterSums::new);
        let keep = if self.input_gradients_are_needed() { Keep::Inputs } else { Keep::Nothing };
        let (mut published, saved_inputs) = self.published(&x_nd, batch.layer_inputs.as_ref(), keep);
        x_nd = self.each_layer(x_nd, |index, layer, x_nd| {
            let is_last = index + 1 == self.layers.len();
            let (y_nd, of_layer) = forward_layer(layer, x_nd, context, &mut published, pass, is_last, sums.as_mut());
            saved.push(Some(of_layer));
            y_nd
        });
        if pass.offload {
            // The last copies ran next to the last layer.
            B::hint(&self.device, Hint::ForwardDone);
        }
        let (router_loss, router_gradient) = sums.map(RouterSums::finish).unzip();
        let tape = Tape {
            saved,
            last_nd: x_nd.clone(),
            ids_n: batch.ids_n.clone(),
            slots_n: batch.slots_n.clone(),
            context: Context { router_gradient, ..context.clone() },
            published,
            layer_inputs: saved_inputs.zip(batch.layer_inputs.clone()),
            adapters: pass.adapter_pass(),
            router_loss,
        };
        (self.norm.forward(x_nd), tape)
    }

    /// Computes head and cross entropy of hidden states `[n, d]`: the loss, and with a gradient scale the gradient of the hidden states. The gradient
    /// of a trained head goes to the sink.
    pub fn loss(
        &self,
        hidden_nd: Tensor<B, 2>,
        targets: &LossTargets<B>,
        options: LossOptions,
        sink: &mut dyn GradientSink<B>,
    ) -> Loss<B> {
        self.loss_with(hidden_nd, targets, options, sink, B::linear_cross_entropy)
    }

    /// Computes [`Decoder::loss`] with another operation over hidden states, head and targets than [`LossOps::linear_cross_entropy`]. If the options
    /// have a factor of the logits or a soft cap, the operation must apply it.
    ///
    /// [`LossOps::linear_cross_entropy`]: firebrick_kernels::LossOps::linear_cross_entropy
    pub fn loss_with(
        &self,
        hidden_nd: Tensor<B, 2>,
        targets: &LossTargets<B>,
        options: LossOptions,
        sink: &mut dyn GradientSink<B>,
        operation: impl FnOnce(Tensor<B, 2>, &Weight<B>, &LossTargets<B>, CrossEntropyOptions<B>) -> CrossEntropy<B>,
    ) -> Loss<B> {
        let rows = if self.lm_head.is_some() { self.head_rows.as_ref() } else { self.embed_rows.as_ref() };
        let head = self.lm_head.as_ref().unwrap_or(&self.embed_tokens).trained();
        let head = head.or(rows.map(|rows| &rows.parameter)).filter(|_| options.gradient_scale.is_some());
        let (weight_gradient, lent) = weight_gradient(head, sink);
        let options = CrossEntropyOptions {
            gradient_scale: options.gradient_scale,
            weight_gradient,
            weight_rows: rows.map(TokenRows::runs),
            log_probs: options.log_probs,
            ..self.without_gradients(options.chunk_tokens, options.temperature)
        };
        let loss = operation(hidden_nd, &self.head(), targets, options);
        if let (Some(head), Some(d_weight)) = (head, loss.d_weight_vd) {
            add_matrix(head, d_weight, lent, sink);
        }
        Loss { loss_sum: loss.loss_sum, log_probs_m: loss.log_probs_m, d_hidden_nd: loss.d_hidden_nd }
    }

    /// Returns the options of a cross entropy of which only the sum is needed. A capped logit divided by a temperature is one with both divided by it.
    pub(crate) fn without_gradients(&self, chunk_tokens: usize, temperature: f64) -> CrossEntropyOptions<B> {
        CrossEntropyOptions {
            logit_scale: self.logit_scale() / temperature,
            soft_cap: self.config.spec.logit_soft_cap.map(|cap| cap / temperature),
            ..CrossEntropyOptions::new(chunk_tokens)
        }
    }

    /// Computes the gradients of all parameters below the head from the gradient of the hidden states that [`Decoder::forward`] returned.
    pub fn backward(&self, tape: Tape<B>, d_hidden_nd: Tensor<B, 2>, sink: &mut dyn GradientSink<B>) {
        let Tape { saved, last_nd, ids_n, slots_n, context, mut published, layer_inputs, adapters, .. } = tape;
        let mut dx_nd = self.norm.backward(last_nd, d_hidden_nd, None, sink);
        let mut items = BackwardItems { blocks: self.blocks(), saved };
        let mut schedule = Schedule::new(&mut items, (0..self.layers.len()).rev(), 1);
        while let Some((_, (layer, saved))) = schedule.next_item() {
            dx_nd = backward_layer(&layer, saved, &context, &mut published, dx_nd, adapters, sink);
        }
        if let (Some(own), Some((saved, tokens))) = (&self.layer_inputs, layer_inputs) {
            let gradients = published.input_gradients.take().unwrap_or_default();
            dx_nd = own.backward(saved, tokens, gradients, dx_nd, sink);
        }
        if let Some(table) = self.embed_tokens.trained() {
            let (scale, rows) = (self.embedding_scale(), self.config.spec.vocab_size);
            let (gradient, lent) = match weight_gradient(Some(table), sink) {
                (WeightGradient::AddTo(sum_vd), lent) => (B::add_embed_backward(sum_vd, ids_n, dx_nd, scale), lent),
                (_, lent) => (B::embed_backward(ids_n, dx_nd, scale, rows, false), lent),
            };
            add_matrix(table, gradient, lent, sink);
        } else if let Some((rows, slots_n)) = self.embed_rows.as_ref().zip(slots_n) {
            let (parameter, scale) = (&rows.parameter, self.embedding_scale());
            add_matrix(parameter, B::embed_backward(slots_n, dx_nd, scale, parameter.shape[0], true), false, sink);
        }
    }

    /// Computes the logits of every token, `[n, v]` f32: for verification of small inputs, not for training.
    pub fn logits(&self, batch: &MicroBatch<B>) -> Tensor<B, 2> {
        self.head_logits(self.hidden(batch, true))
    }

    /// Computes the hidden states after the final norm, `[n, d]`, with or without adapters.
    pub(crate) fn hidden(&self, batch: &MicroBatch<B>, adapters: bool) -> Tensor<B, 2> {
        self.hidden_watched(batch, adapters, &mut |_| ())
    }

    /// Does the same; `watch` sees what the embedding, each layer and the final norm return, in this order.
    fn hidden_watched(
        &self,
        batch: &MicroBatch<B>,
        adapters: bool,
        watch: &mut dyn FnMut(&Tensor<B, 2>),
    ) -> Tensor<B, 2> {
        let adapters = AdapterPass { are_on: adapters, ..AdapterPass::PLAIN };
        let (context, x_nd) = (&batch.context, self.embed(batch.ids_n.clone()));
        watch(&x_nd);
        let (mut published, _) = self.published(&x_nd, batch.layer_inputs.as_ref(), Keep::Nothing);
        let x_nd = self.each_layer(x_nd, |_, layer, x_nd| {
            let y_nd = layer.forward_pass(x_nd, context, &mut published, adapters);
            watch(&y_nd);
            y_nd
        });
        let x_nd = self.norm.forward(x_nd);
        watch(&x_nd);
        x_nd
    }

    /// Computes the sum of squares `[1]` of what the embedding, each layer and the final norm return, in this order: for a search, not for training.
    pub fn output_squares(&self, batch: &MicroBatch<B>) -> Vec<Tensor<B, 1>> {
        self.begin_mixers(batch);
        let mut squares = Vec::new();
        let mut note = |x_nd: &Tensor<B, 2>| {
            let values = B::pause(&self.device, || {
                let count = x_nd.shape().num_elements();
                let x_nd = x_nd.clone();
                if x_nd.dtype() == DType::F32 { x_nd.reshape([count]) } else { x_nd.cast(DType::F32).reshape([count]) }
            });
            squares.push(B::squared_norm(&[values]));
        };
        B::section(&self.device, || self.hidden_watched(batch, true, &mut note));
        squares
    }

    /// Runs the layers one after the other, gathered where ranks divide them; `run` computes the output of a layer from its input.
    pub(crate) fn each_layer(
        &self,
        mut x_nd: Tensor<B, 2>,
        mut run: impl FnMut(usize, &Layer<B>, Tensor<B, 2>) -> Tensor<B, 2>,
    ) -> Tensor<B, 2> {
        let mut blocks = self.blocks();
        let mut schedule = Schedule::new(&mut blocks, 0..self.layers.len(), 1);
        while let Some((index, layer)) = schedule.next_item() {
            x_nd = run(index, &layer, x_nd);
        }
        x_nd
    }

    /// Begins a pass: returns the scaled rows of tokens in the embedding.
    pub(crate) fn embed(&self, ids_n: Tensor<B, 1, Int>) -> Tensor<B, 2> {
        if let Some(choices) = &self.choices {
            choices.clear();
        }
        let Weight::Dense(table_vd) = self.embed_tokens.weight() else {
            unreachable!("the embedding is never quantized")
        };
        B::embed(table_vd, ids_n, self.embedding_scale(), self.compute_dtype)
    }

    /// Gathers and uploads what the layers' own inputs need of tokens; `None` if they have none.
    pub(crate) fn token_inputs(&self, ids: &[u32]) -> Result<Option<TokenInputs<B>>, ModelError> {
        let upload = |own: &LayerInputs<B>| own.upload(ids, self.compute_dtype, &self.device);
        self.layer_inputs.as_ref().map(upload).transpose()
    }

    /// Returns whether something that trains needs the gradients of the layers' own inputs: what computes them, or the embedding.
    fn input_gradients_are_needed(&self) -> bool {
        let trains_below = self.embed_tokens.trained().is_some() || self.embed_rows.is_some();
        self.layer_inputs.as_ref().is_some_and(|own| trains_below || own.trains())
    }

    /// Starts what passes between layers, with their own inputs if they have any; also returns what the backward of these needs, unless nothing is kept.
    pub(crate) fn published(
        &self,
        x_nd: &Tensor<B, 2>,
        tokens: Option<&TokenInputs<B>>,
        keep: Keep,
    ) -> (Published<B>, Option<SavedInputs<B>>) {
        let Some((own, tokens)) = self.layer_inputs.as_ref().zip(tokens) else { return (Published::default(), None) };
        let (inputs, saved) = own.forward(x_nd.clone(), tokens, keep);
        let input_gradients = saved.as_ref().map(|_| BTreeMap::new());
        (Published { inputs, input_gradients, ..Published::default() }, saved)
    }

    /// Returns the factor of the embedding, in Gemma rounded to the compute format (transformers rounds it to the format of the weights).
    fn embedding_scale(&self) -> f32 {
        let spec = &self.config.spec;
        let scale = spec.embedding_scale.unwrap_or(1.0) as f32;
        if spec.rounds_embedding_scale { rounded(scale, self.compute_dtype) } else { scale }
    }

    pub(crate) fn logit_scale(&self) -> f64 {
        1.0 / self.config.spec.logits_scaling
    }

    /// Computes the logits `[c, v]` of hidden states, in f32, scaled and with their soft cap. Call it outside of sections.
    pub(crate) fn head_logits(&self, hidden_cd: Tensor<B, 2>) -> Tensor<B, 2> {
        let logits_cv = self.rounded_logits(hidden_cd);
        let logits_cv = if logits_cv.dtype() == DType::F32 { logits_cv } else { logits_cv.cast(DType::F32) };
        let logits_cv = loss::reference::scaled(logits_cv, self.logit_scale());
        loss::reference::capped(logits_cv, self.config.spec.logit_soft_cap)
    }

    /// Computes the logits `[c, v]` of hidden states, in the compute format, before any factor and soft cap.
    pub(crate) fn rounded_logits(&self, hidden_cd: Tensor<B, 2>) -> Tensor<B, 2> {
        times_transposed(hidden_cd, self.head(), self.config.spec.vocab_size)
    }

    pub(crate) fn head(&self) -> Weight<B> {
        self.lm_head.as_ref().unwrap_or(&self.embed_tokens).weight()
    }

    pub(crate) fn indices(&self, ids: &[u32]) -> Tensor<B, 1, Int> {
        let ids: Vec<i32> = ids.iter().map(|&id| id as i32).collect();
        Tensor::from_ints(ids.as_slice(), &self.device)
    }

    pub(crate) fn rotary_at(&self, positions: &[u32]) -> Vec<RotaryTables<B>> {
        let highest = positions.iter().copied().max().unwrap_or(0) as usize;
        let rows = self.max_positions;
        assert!(highest < rows, "position {highest} lies outside the rotary table of {rows} rows");
        let index = self.indices(positions);
        let rows = |table: &Tensor<B, 2>| table.clone().select(0, index.clone());
        let of_positions = |tables: &RotaryTables<B>| RotaryTables {
            cos: rows(&tables.cos),
            sin: rows(&tables.sin),
            interleaved: tables.interleaved,
            query_scale: tables.query_scale.as_ref().map(|table| table.clone().select(0, index.clone())),
        };
        self.rotary.iter().map(of_positions).collect()
    }

    /// Returns the number of positions the rotary tables were built for.
    pub fn max_positions(&self) -> usize {
        self.max_positions
    }

    /// Returns the device of the model.
    pub fn device(&self) -> &B::Device {
        &self.device
    }

    /// Returns the hash of the content of all weights, computed while they were loaded; `None` for a model of random weights.
    pub fn base_hash(&self) -> Option<u64> {
        self.base_hash
    }

    /// Notes from now on which experts each pass chooses, for [`ExpertChoices::take`] after it; does nothing in a model without experts.
    pub fn note_choices(&mut self) {
        let choices = ExpertChoices::default();
        for layer in &mut self.layers {
            if let Mlp::Experts(experts) = &mut layer.mlp {
                experts.choices = Some(choices.clone());
                self.choices = Some(choices.clone());
            }
        }
    }

    /// Returns where choices of experts are noted, if they are.
    pub fn choices(&self) -> Option<&ExpertChoices<B>> {
        self.choices.as_ref()
    }

    /// Returns the decoder layers.
    pub fn layers(&self) -> &[Layer<B>] {
        &self.layers
    }

    /// Returns the layers, for a pass.
    pub(crate) fn blocks(&self) -> Blocks<'_, B> {
        let (layers, division, device) = (&self.layers, self.division.as_ref(), &self.device);
        Blocks { layers, division, device, coming: BTreeMap::new() }
    }

    /// Returns whether ranks divide the layer weights. Then every pass needs all ranks.
    pub fn is_divided(&self) -> bool {
        self.division.is_some()
    }

    /// Returns whether a tensor is on one rank alone.
    pub fn divides(&self, name: &str) -> bool {
        self.division.as_ref().is_some_and(|division| division.owners.contains_key(name))
    }

    /// Counts the gradient contributions of each parameter per micro-batch: a tied head adds to the embedding a second time.
    pub fn contributions(&self) -> Contributions {
        let rows = self.embed_rows.as_ref().map(|rows| &rows.parameter);
        let shared = self.embed_tokens.trained().or(rows).filter(|_| self.lm_head.is_none());
        Contributions::with_twice(shared.map(|parameter| parameter.name.clone()).into_iter().collect())
    }
}

/// Computes the cosines and sines of `max_positions` positions, one pair of tables per rope, with the frequencies for sequences of `sequence_tokens`
/// tokens.
pub(crate) fn rotary_tables<B: Kernels>(
    spec: &ModelSpec,
    max_positions: usize,
    sequence_tokens: usize,
    device: &B::Device,
) -> Vec<RotaryTables<B>> {
    let positions: Vec<u32> = (0..max_positions as u32).collect();
    let tables = |rope: &rope::Rope| {
        let (frequencies, attention_scaling) = rope.inverse_frequencies(sequence_tokens);
        let (cos, sin) = rope::tables(&positions, &frequencies, attention_scaling);
        let table = |values: Vec<f32>| {
            let flat = Tensor::<B, 1>::from_floats(values.as_slice(), device);
            flat.reshape([positions.len(), frequencies.len()])
        };
        let query_scale = rope.query_scale.map(|scale| {
            let values: Vec<f32> = positions.iter().map(|&position| scale.at(position)).collect();
            Tensor::from_floats(values.as_slice(), device)
        });
        RotaryTables { cos: table(cos), sin: table(sin), interleaved: rope.interleaved, query_scale }
    };
    spec.ropes.iter().map(tables).collect()
}
