//! Long rows under full recomputation: a layer without attention runs tile by tile over the tokens, mixer and MLP, and so do the MLPs of the other layers,
//! so that what is alive at once does not grow with the row.
//!
//! A mixer gets the state of a document that began before from the tile before; in the backward, which takes the tiles in reverse, the gradient of that
//! state goes the other way. What a convolution reads of the tokens before, its lead, is computed again with the tile. Parameters get the sums of all
//! tiles' gradients as one contribution. All tiles have one size, because memory is kept by exact sizes.
//! Trade-off: every output of a tile is copied once more, where the tiles are joined.

use std::ops::Range;

use burn_tensor::Tensor;
use firebrick_kernels::linear::into_single;
use firebrick_kernels::{Epilogue, GradientMap, GradientSink, Keep, Kernels, tile_rows};

use crate::layer::{AfterMixer, Context, Layer, Mlp, MlpHalf};
use crate::linear::AdapterPass;
use crate::mixer::{Attend, Published};
use crate::norm::{added_to, input};
use crate::tile::{Passing, Tile, rows_of};

impl<B: Kernels> Layer<B> {
    /// Returns whether the whole layer runs in the tiles of a pass. Masks of dropout are made for whole passes.
    pub(crate) fn runs_in_tiles(&self, context: &Context<B>, adapters: AdapterPass) -> bool {
        let has_tiles = !context.tiles.is_empty() && adapters.dropout.is_none();
        let is_plain = matches!(self.mlp, Mlp::Gated { .. }) && self.per_layer.is_none();
        has_tiles && self.spec.mixer.attention().is_none() && is_plain
    }

    /// Cuts the rows of a long pass into tiles for a gated MLP; `None` if they are too few.
    pub(crate) fn tiles_of_mlp(
        &self,
        h_nd: &Tensor<B, 2>,
        context: &Context<B>,
        adapters: AdapterPass,
    ) -> Option<impl Iterator<Item = Range<usize>> + use<B>> {
        let ([all, _], may_be_cut) = (h_nd.dims(), adapters.dropout.is_none() && matches!(self.mlp, Mlp::Gated { .. }));
        let rows = tile_rows(all, context.tile_tokens).filter(|_| may_be_cut)?;
        Some((0..all).step_by(rows).map(move |start| start..all.min(start + rows)))
    }

    /// Computes the gradients of the sum after the mixer and of the layer's own input, if it reads one, from that of the output, tile by tile.
    pub(crate) fn backward_tiles_of_mlp(
        &self,
        tiles: impl Iterator<Item = Range<usize>>,
        (h_nd, input_np): (&Tensor<B, 2>, Option<&Tensor<B, 2>>),
        context: &Context<B>,
        dy_nd: &Tensor<B, 2>,
        adapters: AdapterPass,
        sink: &mut dyn GradientSink<B>,
    ) -> (Tensor<B, 2>, Option<Tensor<B, 2>>) {
        let (mut parts, mut of_input) = (Vec::new(), Vec::new());
        self.add_sums(sink, |sums| {
            for rows in tiles {
                let half = MlpHalf::Input { h_nd: rows_of(h_nd, rows.clone()), low_rank: None };
                let input_np = input_np.map(|input_np| rows_of(input_np, rows.clone()));
                let (dh_nd, d_input_np) =
                    self.backward_mlp_rows(half, input_np, context, rows_of(dy_nd, rows), adapters, sums);
                parts.push(dh_nd);
                of_input.extend(d_input_np);
            }
        });
        (B::join_rows(parts), (!of_input.is_empty()).then(|| B::join_rows(of_input)))
    }

    /// Computes the layer's output for the documents of a pass without saving anything for a backward.
    pub(crate) fn forward_pass(
        &self,
        x_nd: Tensor<B, 2>,
        context: &Context<B>,
        published: &mut Published<B>,
        adapters: AdapterPass,
    ) -> Tensor<B, 2> {
        if self.runs_in_tiles(context, adapters) {
            return self.forward_tiles(&x_nd, context, adapters).0;
        }
        let attend = Attend::Documents(&context.documents);
        let after = self.forward_mixer(x_nd, &context.rotary, attend, published, Keep::Nothing, adapters);
        let input_np = self.own_input(published);
        if let Some(tiles) = self.tiles_of_mlp(&after.h_nd, context, adapters) {
            let of_tile = |rows: Range<usize>| {
                let input_np = input_np.as_ref().map(|input_np| rows_of(input_np, rows.clone()));
                self.forward_mlp(rows_of(&after.h_nd, rows), input_np, Keep::Nothing, adapters, None).0
            };
            return B::join_rows(tiles.map(of_tile).collect());
        }
        self.forward_mlp(after.h_nd.clone(), input_np, Keep::Nothing, adapters, None).0
    }

    /// Computes the layer's output, and the state before each tile.
    pub(crate) fn forward_tiles(
        &self,
        x_nd: &Tensor<B, 2>,
        context: &Context<B>,
        adapters: AdapterPass,
    ) -> (Tensor<B, 2>, Vec<Passing<B>>) {
        let (mut state, mut starts, mut tiles) = (None, Vec::new(), Vec::new());
        for tile in &context.tiles {
            starts.push(state.clone());
            let after = self.forward_tile(x_nd, tile, &mut state, Keep::Nothing, adapters);
            tiles.push(self.forward_mlp_of_inputs(after.h_nd, None, context, adapters, None).0);
        }
        (B::join_rows(tiles), starts)
    }

    /// Computes the mixer's half for a tile, and replaces the state before it by that after it.
    fn forward_tile(
        &self,
        x_nd: &Tensor<B, 2>,
        tile: &Tile<B>,
        state: &mut Passing<B>,
        keep: Keep,
        adapters: AdapterPass,
    ) -> AfterMixer<B> {
        let x_nd = tile.with_lead(x_nd);
        let (group, prologue) = (self.mixer.input.frozen(adapters), input(x_nd.clone(), self.before_mixer.as_ref()));
        let (parts, of_input) = B::project(prologue, &group, Epilogue::None, keep);
        let (x, mixed) = self.mixer.forward_tile(&parts, tile, state);
        let epilogue = added_to(tile.own(&x_nd), self.after_mixer.as_ref());
        let group = self.mixer.output.frozen(adapters);
        let (h_nd, output) = B::project(self.mixer.prologue(&parts, x), &group, epilogue, keep);
        AfterMixer { input: of_input, parts, mixed, output, h_nd: into_single(h_nd) }
    }

    /// Computes the gradient of the layer's input, tile by tile from the last to the first.
    pub(crate) fn backward_tiles(
        &self,
        x_nd: &Tensor<B, 2>,
        starts: Vec<Passing<B>>,
        context: &Context<B>,
        dy_nd: &Tensor<B, 2>,
        adapters: AdapterPass,
        sink: &mut dyn GradientSink<B>,
    ) -> Tensor<B, 2> {
        let (mut d_state, mut d_lead, mut parts) = (None, None, Vec::new());
        let published = &mut Published::default();
        self.add_sums(sink, |sums| {
            for (tile, mut state) in context.tiles.iter().zip(starts).rev() {
                let after = self.forward_tile(x_nd, tile, &mut state, Keep::Inputs, adapters);
                let dy_nd = rows_of(dy_nd, tile.rows.clone());
                let half = MlpHalf::Input { h_nd: after.h_nd.clone(), low_rank: None };
                let (dh_nd, _) = self.backward_mlp_rows(half, None, context, dy_nd, adapters, sums);
                let (saved, rotary) = (*after.into_saved(), &context.rotary);
                let dx_nd = self.backward_saved(saved, tile, &mut d_state, rotary, published, dh_nd, adapters, sums);
                // Of the rows that the tile after this one read, too.
                let own = tile.own(&dx_nd);
                match d_lead.take() {
                    None => parts.push(own),
                    Some(d_lead) => {
                        let [rows, lead] = [&own, &d_lead].map(|x: &Tensor<B, 2>| x.dims()[0]);
                        let last = rows_of(&own, rows - lead..rows);
                        parts.push(B::pause(&last.device(), || last.clone().add(d_lead.clone())));
                        parts.push(rows_of(&own, 0..rows - lead));
                    }
                }
                d_lead = Some(rows_of(&dx_nd, 0..tile.lead)).filter(|_| tile.documents.begins_before);
            }
        });
        parts.reverse();
        B::join_rows(parts)
    }

    /// Gives the sink what `work` adds to sums: one contribution per parameter.
    pub(crate) fn add_sums(&self, sink: &mut dyn GradientSink<B>, work: impl FnOnce(&mut GradientMap<B>)) {
        let mut sums = GradientMap::default();
        work(&mut sums);
        for parameter in self.parameters() {
            if let Some(sum) = sums.remove(&parameter.name) {
                sink.add(parameter, sum);
            }
        }
        assert!(sums.is_empty(), "gradients of parameters of another layer: {:?}", sums.keys());
    }
}
