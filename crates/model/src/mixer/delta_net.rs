//! Gated DeltaNet as a mixer: its convolution, the delta rule, and the norm and the gates before the output projection.

use burn_tensor::Tensor;
use firebrick_arch::{Activation, DeltaNetSpec, DeltaProjections};
use firebrick_kernels::{
    ConvInputs, DeltaInputs, DeltaOutput, DeltaParameters, GradientSink, InputGradient, Kernels, Parameter, Prologue,
};

use super::{Attend, Cache, Kept, Mixed};
use crate::norm::Norm;
use crate::tile::{Passing, Tile, rows_of};

/// Gated DeltaNet between its two groups of projections.
#[derive(Clone, Debug)]
pub struct DeltaNet<B: Kernels> {
    /// Its sizes.
    pub spec: DeltaNetSpec,
    /// The filters of the convolution, f32: of all channels, or of queries, keys and values.
    pub filters: Vec<Parameter<B>>,
    /// Added to the inputs of the decay, `[heads]` f32.
    pub dt_bias: Parameter<B>,
    /// Logarithm of the largest decay, `[heads]` f32.
    pub a_log: Parameter<B>,
    /// Norm of each head's result.
    pub norm: Norm<B>,
    /// Full fine-tuning trains all of them, LoRA none.
    pub trains: bool,
}

impl<B: Kernels> DeltaNet<B> {
    pub(super) fn forward(&self, parts: &[Tensor<B, 2>], attend: Attend<'_, B>) -> (Tensor<B, 2>, Option<Mixed<B>>) {
        match attend {
            Attend::Documents(documents) => self.forward_tile(parts, &Tile::whole(documents), &mut None),
            Attend::Cached { tokens, cache: Cache::States(convolved, states), .. } => {
                let [qkv, b, a] = self.inputs(parts);
                let inputs = ConvInputs { gates: None, x: qkv };
                let qkv = B::cached_causal_conv(&inputs, self.filters_dk(), convolved, tokens);
                let inputs = DeltaInputs { qkv, a, b };
                (B::cached_gated_delta(&inputs, &self.decay(), &self.spec, states, tokens), None)
            }
            Attend::Cached { .. } => unreachable!("a delta rule has two states"),
        }
    }

    pub(super) fn forward_tile(
        &self,
        parts: &[Tensor<B, 2>],
        tile: &Tile<B>,
        state: &mut Passing<B>,
    ) -> (Tensor<B, 2>, Option<Mixed<B>>) {
        let (_, inputs) = self.convolved(parts, tile);
        let output = B::gated_delta(&inputs, &self.decay(), &self.spec, &tile.documents, state.take());
        let DeltaOutput { o, states, end } = output;
        *state = end;
        (o.clone(), Some(Mixed { values_nm: o, kept: Some(Kept::States(states)) }))
    }

    /// Returns what the convolution reads of a tile and its lead, and what the rule reads of the tile.
    fn convolved(&self, parts: &[Tensor<B, 2>], tile: &Tile<B>) -> (ConvInputs<B>, DeltaInputs<B>) {
        let [qkv, b, a] = self.inputs(parts);
        let inputs = ConvInputs { gates: None, x: qkv };
        let qkv = B::causal_conv(&inputs, self.filters_dk(), &tile.with_lead);
        (inputs, DeltaInputs { qkv: tile.own(&qkv), a: tile.own(&a), b: tile.own(&b) })
    }

    /// Builds the input of the output projection: each head of the result normalized, times its gates.
    pub(super) fn gated(&self, parts: &[Tensor<B, 2>], o_nv: Tensor<B, 2>) -> Prologue<B> {
        let (gate, shape) = (self.gates(parts), o_nv.dims());
        let lead = gate.dims()[0] - shape[0];
        let gate = if lead == 0 { gate } else { rows_of(&gate, lead..lead + shape[0]) };
        let up = self.norm.forward(self.by_head(o_nv)).reshape(shape);
        Prologue::Gated { gate, up, activation: Activation::Silu }
    }

    pub(super) fn backward(
        &self,
        parts: Vec<Tensor<B, 2>>,
        mixed: Mixed<B>,
        d_input: InputGradient<B>,
        tile: &Tile<B>,
        d_state: &mut Passing<B>,
        sink: &mut dyn GradientSink<B>,
    ) -> Vec<Tensor<B, 2>> {
        let Some(Kept::States(states)) = mixed.kept else { unreachable!("a delta rule keeps its states") };
        let InputGradient::Gated { d_gate, d_up } = d_input else { unreachable!("the output projection has gates") };
        let shape = d_up.dims();
        // Half of a buffer that the gates' gradient has, too: without gaps.
        let d_normed = self.by_head(B::join_rows(vec![d_up]));
        let d_o = self.norm.backward(self.by_head(mixed.values_nm), d_normed, None, sink).reshape(shape);
        let (convolution, inputs) = self.convolved(&parts, tile);
        let (decay, documents) = (self.decay(), &tile.documents);
        let gradients =
            B::gated_delta_backward(inputs, &decay, &self.spec, states, d_o, d_state.take(), documents, self.trains);
        *d_state = gradients.start;
        if let Some(DeltaParameters { a_log, dt_bias }) = gradients.parameters {
            sink.add(&self.a_log, a_log);
            sink.add(&self.dt_bias, dt_bias);
        }
        let DeltaInputs { qkv, a, b } = gradients.inputs;
        let d_qkv = tile.padded(qkv);
        let (d_convolution, d_filters) =
            B::causal_conv_backward(convolution, self.filters_dk(), d_qkv, &tile.with_lead, self.trains);
        if let Some(d_filters) = d_filters {
            self.add_filters(d_filters, sink);
        }
        let [d_gate, b, a] = [d_gate, b, a].map(|gradient| tile.padded(gradient));
        self.d_parts([d_convolution.x, d_gate, b, a])
    }

    fn filters_dk(&self) -> Tensor<B, 2> {
        let filters = match &self.filters[..] {
            [all] => all.value.clone(),
            each => B::pause(&each[0].value.device(), || {
                Tensor::cat(each.iter().map(|filters| filters.value.clone()).collect(), 0)
            }),
        };
        filters.reshape([self.spec.channels(), self.spec.conv_width])
    }

    fn add_filters(&self, d_filters_dk: Tensor<B, 2>, sink: &mut dyn GradientSink<B>) {
        if let [all] = &self.filters[..] {
            return sink.add(all, d_filters_dk.reshape([self.spec.channels() * self.spec.conv_width]));
        }
        let mut start = 0;
        for (filters, (_, channels)) in self.filters.iter().zip(self.spec.filters()) {
            let own = B::pause(&d_filters_dk.device(), || d_filters_dk.clone().narrow(0, start, channels));
            sink.add(filters, own.reshape([channels * self.spec.conv_width]));
            start += channels;
        }
    }

    fn decay(&self) -> DeltaParameters<B> {
        DeltaParameters { a_log: self.a_log.value.clone(), dt_bias: self.dt_bias.value.clone() }
    }

    /// Returns one row per head of values.
    fn by_head(&self, x_nv: Tensor<B, 2>) -> Tensor<B, 2> {
        let ([tokens, _], spec) = (x_nv.dims(), &self.spec);
        x_nv.reshape([tokens * spec.value_heads, spec.value_head_dim])
    }

    /// Returns queries, keys and values side by side, and what beta and the decay are computed from. Those by key head are put in order.
    fn inputs(&self, parts: &[Tensor<B, 2>]) -> [Tensor<B, 2>; 3] {
        if !self.is_by_key_head() {
            return [0, 2, 3].map(|part: usize| parts[part].clone());
        }
        let ([key, values], heads) = (self.widths_of_a_key_head(), self.heads_of_a_key_head());
        B::pause(&parts[0].device(), || {
            let [q, k, v] = [(0, key), (key, key), (2 * key, values)].map(|columns| self.columns(&parts[0], columns));
            let [b, a] = [(0, heads), (heads, heads)].map(|columns| self.columns(&parts[1], columns));
            [Tensor::cat(vec![q, k, v], 1), b, a]
        })
    }

    fn gates(&self, parts: &[Tensor<B, 2>]) -> Tensor<B, 2> {
        if !self.is_by_key_head() {
            return parts[1].clone();
        }
        let [key, values] = self.widths_of_a_key_head();
        B::pause(&parts[0].device(), || self.columns(&parts[0], (2 * key + values, values)))
    }

    /// Returns the gradients of the outputs of the first group from those of [`Self::inputs`], with the gates' after the first.
    fn d_parts(&self, [qkv, z, b, a]: [Tensor<B, 2>; 4]) -> Vec<Tensor<B, 2>> {
        if !self.is_by_key_head() {
            return vec![qkv, z, b, a];
        }
        let (keys, values) = (self.spec.key_size(), self.spec.value_size());
        B::pause(&qkv.device(), || {
            let part = |start, width| qkv.clone().narrow(1, start, width);
            let qkvz = self.joined(vec![part(0, keys), part(keys, keys), part(2 * keys, values), z.clone()]);
            vec![qkvz, self.joined(vec![b.clone(), a.clone()])]
        })
    }

    fn is_by_key_head(&self) -> bool {
        self.spec.projections == DeltaProjections::ByKeyHead
    }

    fn heads_of_a_key_head(&self) -> usize {
        self.spec.value_heads / self.spec.key_heads
    }

    /// Returns the widths of a key head's query, which is its key's, too, and of its values, which is its gates'.
    fn widths_of_a_key_head(&self) -> [usize; 2] {
        [self.spec.key_head_dim, self.heads_of_a_key_head() * self.spec.value_head_dim]
    }

    /// Returns columns of each key head, by the first and their number.
    fn columns(&self, x: &Tensor<B, 2>, (start, width): (usize, usize)) -> Tensor<B, 2> {
        let ([tokens, all], heads) = (x.dims(), self.spec.key_heads);
        x.clone().reshape([tokens, heads, all / heads]).narrow(2, start, width).reshape([tokens, heads * width])
    }

    /// Puts the columns of each key head next to each other: the reverse of [`Self::columns`].
    fn joined(&self, parts: Vec<Tensor<B, 2>>) -> Tensor<B, 2> {
        let (tokens, heads) = (parts[0].dims()[0], self.spec.key_heads);
        let width = parts.iter().map(|part| part.dims()[1]).sum();
        let by_head = |part: Tensor<B, 2>| {
            let width = part.dims()[1] / heads;
            part.reshape([tokens, heads, width])
        };
        Tensor::cat(parts.into_iter().map(by_head).collect(), 2).reshape([tokens, width])
    }
}
