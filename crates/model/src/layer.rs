//! One transformer layer: forward, what it saves, and backward, side by side in the same order.
//!
//! A layer has two halves, the mixer and the MLP, which can be recomputed and run backward one at a time. Five calls forward, five back: the mixer's
//! first group, its operation (`mixer/`), its output projection, the gate and up group, the down projection; or a mixture of experts (`experts.rs`)
//! in place of the last two. Two more calls follow where layers have inputs of their own (`per_layer.rs`). Norms and activations are prologues of the
//! GEMM that reads them; rotation, norms of outputs and residual sums are epilogues. Training, recomputation and the cached forward of generation are
//! one function, which differs in how it attends. Inside a section only operations of `Kernels` touch the device. Tensor suffixes as in
//! `firebrick_kernels::linear`.

use std::ops::Range;

use burn_tensor::Tensor;
use firebrick_arch::LayerSpec;
use firebrick_kernels::linear::{into_parts, into_single};
use firebrick_kernels::{Documents, Epilogue, GradientSink, Keep, Kernels, ProjectSaved, Prologue, RotaryTables};

use crate::experts::router_loss::{RouterGradient, RouterSums};
use crate::experts::{Experts, MlpNorms, SavedExperts};
use crate::linear::{AdapterPass, Linear, LinearGroup, mlp_backward};
use crate::mixer::{Attend, Mixed, Mixer, Published, SavedMixer};
use crate::norm::{Norm, add_gradient, added_to, input};
use crate::per_layer::{PerLayer, SavedPerLayer};
use crate::shared_expert::SharedExpert;
use crate::tile::{Passing, Tile, rows_of};

/// Inputs that all layers share for one micro-batch.
#[derive(Clone, Debug)]
pub struct Context<B: Kernels> {
    /// Document boundaries.
    pub documents: Documents<B>,
    /// Cosines and sines by token, one pair per rope of the model.
    pub rotary: Vec<RotaryTables<B>>,
    /// The tiles of a long pass over a model that has layers without attention; else none.
    pub(crate) tiles: Vec<Tile<B>>,
    /// Tokens of a tile of an MLP.
    pub(crate) tile_tokens: usize,
    /// After a forward pass with an auxiliary loss: its gradient.
    pub(crate) router_gradient: Option<RouterGradient<B>>,
}

/// A decoder layer.
#[derive(Clone, Debug)]
pub struct Layer<B: Kernels> {
    /// Its sizes and constants.
    pub spec: LayerSpec,
    /// Norm of the mixer's input.
    pub before_mixer: Option<Norm<B>>,
    /// Attention, or a short convolution.
    pub mixer: Mixer<B>,
    /// Norm of the mixer's output.
    pub after_mixer: Option<Norm<B>>,
    /// Norm of the MLP's input.
    pub before_mlp: Option<Norm<B>>,
    /// A gated MLP, or a mixture of experts.
    pub mlp: Mlp<B>,
    /// Norm of the MLP's output.
    pub after_mlp: Option<Norm<B>>,
    /// What reads the layer's own input.
    pub per_layer: Option<Box<PerLayer<B>>>,
    /// Factor of the output; it never trains.
    pub scalar: Option<f32>,
}

/// The MLP of a layer.
#[derive(Clone, Debug)]
pub enum Mlp<B: Kernels> {
    /// Gate and up projections, then the down projection.
    Gated {
        /// Gate and up, `[width, hidden]` each.
        gate_up: LinearGroup<B>,
        /// Down, `[hidden, width]`.
        down: LinearGroup<B>,
    },
    /// A mixture of experts.
    Experts(Box<Experts<B>>),
}

impl<B: Kernels> Mlp<B> {
    /// Returns the groups of linear modules, without a router.
    fn groups(&self) -> Vec<&LinearGroup<B>> {
        match self {
            Self::Gated { gate_up, down } => vec![gate_up, down],
            Self::Experts(experts) => {
                let Experts { gate_up, down, shared, .. } = experts.as_ref();
                [gate_up, down].into_iter().chain(shared.iter().flat_map(SharedExpert::groups)).collect()
            }
        }
    }

    fn groups_mut(&mut self) -> Vec<&mut LinearGroup<B>> {
        match self {
            Self::Gated { gate_up, down } => vec![gate_up, down],
            Self::Experts(experts) => {
                let Experts { gate_up, down, shared, .. } = experts.as_mut();
                [gate_up, down].into_iter().chain(shared.iter_mut().flat_map(SharedExpert::groups_mut)).collect()
            }
        }
    }
}

/// What the forward left for the backward of a mixer's half, which recomputes the rest.
pub(crate) enum MixerHalf<B: Kernels> {
    /// All that it needs, except for what is cheap to compute.
    Activations(Box<SavedMixer<B>>),
    /// The layer's input, the operation's result, and the low-rank result of the output projection.
    Inputs { x_nd: Tensor<B, 2>, mixed: Mixed<B>, low_rank: LowRank<B> },
}

/// What the forward left for the backward of an MLP's half, which recomputes the rest.
pub(crate) enum MlpHalf<B: Kernels> {
    /// All that it needs, except for what is cheap to compute.
    Activations(SavedMlpHalf<B>),
    /// The sum after the mixer, and the low-rank result of the down projection.
    Input { h_nd: Tensor<B, 2>, low_rank: LowRank<B> },
}

#[derive(Clone, Debug)]
pub(crate) enum SavedMlp<B: Kernels> {
    Gated { gate_up: Box<ProjectSaved<B>>, down: Box<ProjectSaved<B>> },
    Experts(Box<SavedExperts<B>>),
}

#[derive(Clone, Debug)]
pub(crate) struct SavedMlpHalf<B: Kernels> {
    mlp: SavedMlp<B>,
    per_layer: Option<SavedPerLayer<B>>,
}

/// The results of the mixer's half.
pub(crate) struct AfterMixer<B: Kernels> {
    pub(crate) input: Option<Box<ProjectSaved<B>>>,
    pub(crate) parts: Vec<Tensor<B, 2>>,
    /// `None` over a cache.
    pub(crate) mixed: Option<Mixed<B>>,
    pub(crate) output: Option<Box<ProjectSaved<B>>>,
    /// The residual stream.
    pub(crate) h_nd: Tensor<B, 2>,
}

impl<B: Kernels> AfterMixer<B> {
    /// Returns what the mixer's half saved.
    ///
    /// # Panics
    /// If it kept nothing.
    pub(crate) fn into_saved(self) -> Box<SavedMixer<B>> {
        let Self { input, parts, mixed, output, .. } = self;
        let all = input.zip(mixed).zip(output);
        let ((input, mixed), mut output) = all.expect(KEPT);
        if output.prologue_output.is_none() {
            // The backward builds it again.
            output.prologue = Prologue::None { x: mixed.values_nm.clone() };
        }
        Box::new(SavedMixer { input, parts, mixed, output })
    }

    /// Returns the mixer's result, the saved low-rank GEMM of its output projection, and the residual stream, which is the MLP's input.
    pub(crate) fn into_outputs(self) -> (Mixed<B>, LowRank<B>, Tensor<B, 2>) {
        let mixed = self.mixed.expect("a mixer over documents returns what its backward reads");
        (mixed, self.output.and_then(|saved| saved.low_rank), self.h_nd)
    }
}

/// `x Aᵀ` of a group's adapters `[n, ranks]`, if there are any and the backend saves it.
pub(crate) type LowRank<B> = Option<Tensor<B, 2>>;

/// Returns what to save of a group whose inputs are recomputed before the backward; `runs_again` says whether its forward is, too.
fn kept_of_inputs(runs_again: bool) -> Keep {
    if runs_again { Keep::Nothing } else { Keep::LowRank }
}

/// Message for results that exist under [`Keep::Inputs`] and [`Keep::Everything`].
const KEPT: &str = "a group keeps what its backward needs";

impl<B: Kernels> Layer<B> {
    /// Computes the layer's output without saving anything for a backward.
    pub(crate) fn forward(
        &self,
        x_nd: Tensor<B, 2>,
        rotary: &[RotaryTables<B>],
        attend: Attend<'_, B>,
        published: &mut Published<B>,
        adapters: AdapterPass,
    ) -> Tensor<B, 2> {
        let after = self.forward_mixer(x_nd, rotary, attend, published, Keep::Nothing, adapters);
        self.forward_mlp(after.h_nd.clone(), self.own_input(published), Keep::Nothing, adapters, None).0
    }

    /// Returns the layer's own input in a pass, `[n, p]`.
    pub(crate) fn own_input(&self, published: &Published<B>) -> Option<Tensor<B, 2>> {
        self.per_layer.as_ref().map(|per_layer| published.inputs[per_layer.layer].clone())
    }

    /// Multiplies the output, or its gradient, by the layer's factor.
    fn scaled(&self, x_nd: Tensor<B, 2>) -> Tensor<B, 2> {
        match self.scalar {
            Some(factor) => B::scaled(x_nd, factor),
            None => x_nd,
        }
    }

    /// Computes the first half of the layer: from its input to the sum after the mixer. Under [`Keep::LowRank`] its first group runs again.
    pub(crate) fn forward_mixer(
        &self,
        x_nd: Tensor<B, 2>,
        rotary: &[RotaryTables<B>],
        attend: Attend<'_, B>,
        published: &mut Published<B>,
        keep: Keep,
        adapters: AdapterPass,
    ) -> AfterMixer<B> {
        let [of_input, of_output] = match keep {
            Keep::LowRank => [Keep::Nothing, kept_of_inputs(self.after_mixer.is_some())],
            keep => [keep; 2],
        };
        let prologue = input(x_nd.clone(), self.before_mixer.as_ref());
        let (parts, of_input) =
            B::project(prologue, &self.mixer.input.frozen(adapters), self.mixer.epilogue(rotary), of_input);
        let (x, mixed) = self.mixer.forward(&parts, rotary, attend, published);
        let epilogue = added_to(x_nd, self.after_mixer.as_ref());
        let prologue = self.mixer.prologue(&parts, x);
        let (h_nd, output) = B::project(prologue, &self.mixer.output.frozen(adapters), epilogue, of_output);
        AfterMixer { input: of_input, parts, mixed, output, h_nd: into_single(h_nd) }
    }

    /// Computes the second half: from the sum after the mixer, and the layer's own input if any, to the output. A mixture adds its choices to `sums`.
    pub(crate) fn forward_mlp(
        &self,
        h_nd: Tensor<B, 2>,
        input_np: Option<Tensor<B, 2>>,
        keep: Keep,
        adapters: AdapterPass,
        sums: Option<&mut RouterSums<B>>,
    ) -> (Tensor<B, 2>, Option<SavedMlpHalf<B>>) {
        let (y_nd, saved) = self.forward_unscaled(h_nd, input_np, keep, adapters, sums);
        (self.scaled(y_nd), saved)
    }

    /// Computes the same before the factor of the output.
    fn forward_unscaled(
        &self,
        h_nd: Tensor<B, 2>,
        input_np: Option<Tensor<B, 2>>,
        keep: Keep,
        adapters: AdapterPass,
        sums: Option<&mut RouterSums<B>>,
    ) -> (Tensor<B, 2>, Option<SavedMlpHalf<B>>) {
        let (y_nd, mlp) = match &self.mlp {
            Mlp::Gated { gate_up, down } => {
                let (gated, gate_up) = self.forward_gate(gate_up, h_nd.clone(), keep, adapters);
                let epilogue = added_to(h_nd, self.after_mlp.as_ref());
                let (y_nd, down) = B::project(gated, &down.frozen(adapters), epilogue, keep);
                (into_single(y_nd), gate_up.zip(down).map(|(gate_up, down)| SavedMlp::Gated { gate_up, down }))
            }
            Mlp::Experts(experts) => {
                let (y_nd, saved) = experts.forward(h_nd, self.experts_norms(), keep, adapters, sums);
                (y_nd, saved.map(|saved| SavedMlp::Experts(Box::new(saved))))
            }
        };
        let (y_nd, per_layer) = self.forward_per_layer(y_nd, input_np, keep, adapters);
        (y_nd, mlp.map(|mlp| SavedMlpHalf { mlp, per_layer }))
    }

    fn forward_per_layer(
        &self,
        y_nd: Tensor<B, 2>,
        input_np: Option<Tensor<B, 2>>,
        keep: Keep,
        adapters: AdapterPass,
    ) -> (Tensor<B, 2>, Option<SavedPerLayer<B>>) {
        let Some(per_layer) = &self.per_layer else { return (y_nd, None) };
        per_layer.forward(y_nd, input_np.expect("a pass has the input of each layer"), keep, adapters)
    }

    /// Computes [`Self::forward_mlp`] when only its input is saved, and returns the low-rank result of the down projection's adapter.
    pub(crate) fn forward_mlp_of_inputs(
        &self,
        h_nd: Tensor<B, 2>,
        input_np: Option<Tensor<B, 2>>,
        context: &Context<B>,
        adapters: AdapterPass,
        sums: Option<&mut RouterSums<B>>,
    ) -> (Tensor<B, 2>, LowRank<B>) {
        if let Some(tiles) = self.tiles_of_mlp(&h_nd, context, adapters) {
            let of_tile = |rows: Range<usize>| {
                let input_np = input_np.as_ref().map(|input_np| rows_of(input_np, rows.clone()));
                self.forward_mlp_of_inputs(rows_of(&h_nd, rows), input_np, context, adapters, None).0
            };
            return (B::join_rows(tiles.map(of_tile).collect()), None);
        }
        match &self.mlp {
            Mlp::Gated { gate_up, down } => {
                let (gated, _) = self.forward_gate(gate_up, h_nd.clone(), Keep::Nothing, adapters);
                let (epilogue, keep) =
                    (added_to(h_nd, self.after_mlp.as_ref()), kept_of_inputs(self.reads_output_of_mlp()));
                let (y_nd, saved) = B::project(gated, &down.frozen(adapters), epilogue, keep);
                let (y_nd, _) = self.forward_per_layer(into_single(y_nd), input_np, Keep::Nothing, adapters);
                (self.scaled(y_nd), saved.and_then(|saved| saved.low_rank))
            }
            Mlp::Experts(_) => (self.forward_mlp(h_nd, input_np, Keep::Nothing, adapters, sums).0, None),
        }
    }

    /// Returns whether the backward reads the MLP's output, before or after its norm.
    fn reads_output_of_mlp(&self) -> bool {
        self.after_mlp.is_some() || self.per_layer.is_some()
    }

    /// Computes the input of the down projection, and what gate and up save.
    fn forward_gate(
        &self,
        gate_up: &LinearGroup<B>,
        h_nd: Tensor<B, 2>,
        keep: Keep,
        adapters: AdapterPass,
    ) -> (Prologue<B>, Option<Box<ProjectSaved<B>>>) {
        let prologue = input(h_nd, self.before_mlp.as_ref());
        let (outputs, saved) = B::project(prologue, &gate_up.frozen(adapters), Epilogue::None, keep);
        let [gate, up] = into_parts(outputs);
        (Prologue::Gated { gate, up, activation: self.spec.mlp.activation() }, saved)
    }

    /// Computes the gradient of the sum after the mixer from that of the output; gradients of parameters go to the sink, and that of the layer's own input
    /// to `published` if that collects them.
    pub(crate) fn backward_mlp(
        &self,
        half: MlpHalf<B>,
        context: &Context<B>,
        published: &mut Published<B>,
        dy_nd: Tensor<B, 2>,
        adapters: AdapterPass,
        sink: &mut dyn GradientSink<B>,
    ) -> Tensor<B, 2> {
        let input_np = self.own_input(published);
        let (dh_nd, d_input_np) = self.backward_mlp_rows(half, input_np, context, dy_nd, adapters, sink);
        let collected = published.input_gradients.as_mut().zip(self.per_layer.as_ref());
        if let (Some((gradients, per_layer)), Some(d_input_np)) = (collected, d_input_np) {
            gradients.insert(per_layer.layer, d_input_np);
        }
        dh_nd
    }

    /// Computes the gradients of the sum after the mixer and of these rows of the layer's own input.
    pub(crate) fn backward_mlp_rows(
        &self,
        half: MlpHalf<B>,
        input_np: Option<Tensor<B, 2>>,
        context: &Context<B>,
        dy_nd: Tensor<B, 2>,
        adapters: AdapterPass,
        sink: &mut dyn GradientSink<B>,
    ) -> (Tensor<B, 2>, Option<Tensor<B, 2>>) {
        let SavedMlpHalf { mlp, per_layer } = match half {
            MlpHalf::Activations(saved) => saved,
            MlpHalf::Input { h_nd, low_rank } => {
                if let Some(tiles) = self.tiles_of_mlp(&h_nd, context, adapters) {
                    let inputs = (&h_nd, input_np.as_ref());
                    return self.backward_tiles_of_mlp(tiles, inputs, context, &dy_nd, adapters, sink);
                }
                // The output of a gated MLP is computed only if the backward reads it.
                match &self.mlp {
                    Mlp::Gated { gate_up, .. } if !self.reads_output_of_mlp() => {
                        let (gated, gate_up) = self.forward_gate(gate_up, h_nd, Keep::Inputs, adapters);
                        let (gate_up, down) = (gate_up.expect(KEPT), ProjectSaved::of_inputs(gated, low_rank));
                        SavedMlpHalf { mlp: SavedMlp::Gated { gate_up, down }, per_layer: None }
                    }
                    _ => self.forward_unscaled(h_nd, input_np, Keep::Inputs, adapters, None).1.expect(KEPT),
                }
            }
        };
        let dy_nd = self.scaled(dy_nd);
        let Some((of_layer, saved)) = self.per_layer.as_ref().zip(per_layer) else {
            return (self.backward_mlp_alone(mlp, context, dy_nd, adapters, sink), None);
        };
        let [dy_nd, d_input_np] = of_layer.backward(saved, dy_nd, adapters, sink);
        (self.backward_mlp_alone(mlp, context, dy_nd, adapters, sink), Some(d_input_np))
    }

    fn backward_mlp_alone(
        &self,
        saved: SavedMlp<B>,
        context: &Context<B>,
        dy_nd: Tensor<B, 2>,
        adapters: AdapterPass,
        sink: &mut dyn GradientSink<B>,
    ) -> Tensor<B, 2> {
        match (&self.mlp, saved) {
            (Mlp::Gated { gate_up, down }, SavedMlp::Gated { gate_up: saved_gate_up, down: saved_down }) => {
                let groups = [(gate_up, *saved_gate_up), (down, *saved_down)];
                let after = self.after_mlp.as_ref();
                let grads = mlp_backward(groups, None, after, dy_nd.clone(), Some(dy_nd), adapters, sink);
                add_gradient(self.before_mlp.as_ref(), grads.norm, sink);
                grads.input.plain()
            }
            (Mlp::Experts(experts), SavedMlp::Experts(saved)) => {
                let router_gradient = context.router_gradient.as_ref();
                experts.backward(*saved, self.experts_norms(), router_gradient, dy_nd, adapters, sink)
            }
            _ => unreachable!("a layer saves what its own MLP computed"),
        }
    }

    /// Computes the gradient of the input from that of the sum after the mixer.
    pub(crate) fn backward_mixer(
        &self,
        half: MixerHalf<B>,
        context: &Context<B>,
        published: &mut Published<B>,
        dh_nd: Tensor<B, 2>,
        adapters: AdapterPass,
        sink: &mut dyn GradientSink<B>,
    ) -> Tensor<B, 2> {
        let saved = match half {
            MixerHalf::Activations(saved) => *saved,
            MixerHalf::Inputs { x_nd, mixed, low_rank } => {
                let prologue = input(x_nd.clone(), self.before_mixer.as_ref());
                let epilogue = self.mixer.epilogue(&context.rotary);
                let (parts, of_input) =
                    B::project(prologue, &self.mixer.input.frozen(adapters), epilogue, Keep::Inputs);
                // The output projection runs again only if its output is normalized: otherwise no caller reads that.
                let output = match &self.after_mixer {
                    None => ProjectSaved::of_inputs(Prologue::None { x: mixed.values_nm.clone() }, low_rank),
                    norm @ Some(_) => {
                        let epilogue = added_to(x_nd, norm.as_ref());
                        let prologue = self.mixer.prologue(&parts, mixed.values_nm.clone());
                        B::project(prologue, &self.mixer.output.frozen(adapters), epilogue, Keep::Inputs).1.expect(KEPT)
                    }
                };
                SavedMixer { input: of_input.expect(KEPT), parts, mixed, output }
            }
        };
        let tile = Tile::whole(&context.documents);
        self.backward_saved(saved, &tile, &mut None, &context.rotary, published, dh_nd, adapters, sink)
    }

    /// Computes the gradient of the input of a tile and its lead from that of the sum after the mixer. The gradient of the state after the tile becomes
    /// that of the state before it.
    pub(crate) fn backward_saved(
        &self,
        saved: SavedMixer<B>,
        tile: &Tile<B>,
        d_state: &mut Passing<B>,
        rotary: &[RotaryTables<B>],
        published: &mut Published<B>,
        dh_nd: Tensor<B, 2>,
        adapters: AdapterPass,
        sink: &mut dyn GradientSink<B>,
    ) -> Tensor<B, 2> {
        let SavedMixer { input, parts, mixed, mut output } = saved;
        if output.prologue_output.is_none() {
            output.prologue = self.mixer.prologue(&parts, mixed.values_nm.clone());
        }
        let grads = self.mixer.output.backward(*output, vec![dh_nd.clone()], None, adapters, sink);
        add_gradient(self.after_mixer.as_ref(), grads.output_norm, sink);
        let d_parts = self.mixer.backward(parts, mixed, grads.input, tile, d_state, rotary, published, sink);

        let grads = self.mixer.input.backward(*input, d_parts, Some(tile.padded(dh_nd)), adapters, sink);
        add_gradient(self.before_mixer.as_ref(), grads.norm, sink);
        self.mixer.add_gradients(grads.head_norms, sink);
        grads.input.plain()
    }

    fn experts_norms(&self) -> MlpNorms<'_, B> {
        let before = self.before_mlp.as_ref().expect("every family with experts normalizes the input of its MLP");
        (before, self.after_mlp.as_ref())
    }

    /// Iterates over the linear modules in the order of the forward pass, without a router.
    pub fn linears(&self) -> impl Iterator<Item = &Linear<B>> {
        let own = self.per_layer.iter().flat_map(|per_layer| [&per_layer.gate, &per_layer.projection]);
        let groups = [&self.mixer.input, &self.mixer.output].into_iter().chain(self.mlp.groups()).chain(own);
        groups.flat_map(|group| &group.modules)
    }

    pub(crate) fn linears_mut(&mut self) -> impl Iterator<Item = &mut Linear<B>> {
        let own = self.per_layer.iter_mut().flat_map(|per_layer| {
            let PerLayer { gate, projection, .. } = per_layer.as_mut();
            [gate, projection]
        });
        let groups =
            [&mut self.mixer.input, &mut self.mixer.output].into_iter().chain(self.mlp.groups_mut()).chain(own);
        groups.flat_map(|group| &mut group.modules)
    }
}
