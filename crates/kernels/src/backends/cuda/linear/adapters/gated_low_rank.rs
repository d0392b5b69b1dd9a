//! Gated activations on CUDA, fused with the low-rank GEMMs that read the same values: forward, `x Aᵀ` of the adapter that reads the
//! activation; backward, the low-rank gradients and `dB` of gate and up, and `dA` of that adapter. Kernels: `gated_low_rank.cu`.
//!
//! Gate, up and their gradients are the widest values of a layer. Separate GEMMs would read each of them again, and the
//! gated activation would be written a second time just for them.
//! Trade-off: GEMMs in the compute format, ranks up to 16, no dropout and no magnitudes; backward, all three modules
//! must be adapted, and the gradients replace gate and up in place. Other groups run the passes one by one.

use std::ops::Range;

use burn_tensor::DType;
use firebrick_arch::Activation;

use super::low_rank::{AdapterArgument, AdaptersArgument, LowRankKernel};
use super::{Adapters, GateUp, LowRankGradient, PreparedFactors};
use crate::backends::cuda::device::Device;
use crate::backends::cuda::engine::{BlockArguments, DeviceBlock, MatrixView, Source, arguments};
use crate::backends::cuda::linear::gated::{GatedOperands, gate_and_up};
use crate::backends::cuda::linear::modules::Routed;
use crate::backends::planning::passes::{GATED_STAGES, GATED_TILE, LowRankPass, gated_tokens};

/// Adapter gradients that [`Device::gated_backward_low_rank`] computes.
pub(crate) struct GatedFactors {
    /// Gradients of gate and up, side by side, with their low-rank gradients after them.
    pub both: MatrixView,
    /// `dA` of the adapter that read the gated activation, `[rank, width]`.
    pub d_a: MatrixView,
    /// `dB` of gate and up.
    pub of_gate_up: PreparedFactors,
}

/// The adapters around a gated activation, all of which fit into one pass.
pub(crate) struct GatedAdapters {
    pieces: usize,
    down: AdapterArgument,
    d_a: MatrixView,
    /// `x Aᵀ` of gate and up.
    low: MatrixView,
    adapters: Adapters,
}

impl Device {
    /// Computes `activation(gate) * up`, with `x Aᵀ` of the one adapter that reads it in the columns after it. Returns
    /// `None` and writes nothing if this takes two passes.
    pub(crate) fn gated_low_rank(
        &self,
        [gate, up]: [&MatrixView; 2],
        activation: Activation,
        group: &Routed<'_>,
    ) -> Option<MatrixView> {
        let adapters = self.input_adapters(gate.block, group)?;
        let pieces = group.route.gated_pass.filter(|_| up.begins_on_vectors())?;
        let room = group.route.room();
        let y = self.empty_with_room([gate.rows, gate.width], room, gate.dtype);
        let kernel = kernel(LowRankPass::gated(pieces), activation, pieces);
        let mut of_adapters = AdaptersArgument::new(&[AdapterArgument::of_input(&adapters, kernel.pass)]);
        for tokens in rounds(kernel.pass, &gate.block) {
            let [gate, up, y] = [gate.block, up.block, y.block].map(|block| block.rows(tokens.start, tokens.len()));
            let sums = self.sums(&kernel, &mut of_adapters, kernel.pass.chunks(gate.width), gate.rows);
            let arguments = arguments! { y: rows(&y), y_stride: long(y.stride) };
            let arguments = arguments! {
                gate_and_up(arguments, [gate, up]) =>
                low_parts: address(sums.over_columns), adapters: value(&of_adapters), n: int(gate.rows),
            };
            let launch = kernel.launch("gated_low_rank", gate.dtype, &sums, 3 * gate.bytes());
            // SAFETY: y, gate and up are rows of this width at the strides given, on 16 bytes; A has a row of that width for each rank; the
            // scratch memory has room for the sums.
            unsafe { self.launch(launch, &arguments) };
            self.add_over_columns(&kernel, y.columns_after(room), &of_adapters, &sums);
        }
        Some(y)
    }

    /// Returns the further operands of [`Self::gated_backward_low_rank`] besides `operands` and the gradient of the gated activation,
    /// `dy`; `None` if several passes are needed. `group` read the gated activation, and `gradient` is that of its outputs.
    pub(crate) fn gated_adapters(
        &self,
        operands: &GatedOperands,
        dy: &MatrixView,
        group: &Routed<'_>,
        gradient: &LowRankGradient,
        next: &GateUp<'_>,
    ) -> Option<GatedAdapters> {
        let is_in_vectors = dy.begins_on_vectors() && gradient.d_low.begins_on_vectors();
        if group.route.d_a_pass.is_none() || !gradient.has_b_gradients() || !is_in_vectors {
            return None;
        }
        // The gradients of gate and up need room for their adapters'.
        let room = next.group.route.room();
        let has_room = room > 0 && self.has_room_in_place(&operands.target, room);
        if !has_room || !operands.blocks.iter().all(DeviceBlock::begins_on_vectors) {
            return None;
        }
        let (low, dtype) = (self.matrix(next.low_rank?.clone()), operands.target.dtype);
        // The group's weight, which contains the adapters, is materialized first.
        let weight = self.group_weight(next.group, dtype);
        let adapters = self.adapters(next.group, dtype, weight.as_ref(), None)?;
        let pieces = next.group.route.gated_backward(&group.route).filter(|_| low.begins_on_vectors())?;
        let d_a = self.empty_matrix(gradient.d_low.width, dy.width, DType::F32);
        Some(GatedAdapters { pieces, down: down_adapter(gradient, &d_a), d_a, low, adapters })
    }

    /// Computes the gradients of gate and up from that of the gated activation, and those of all adapters around them.
    pub(crate) fn gated_backward_low_rank(
        &self,
        operands: GatedOperands,
        activation: Activation,
        dy: &MatrixView,
        found: GatedAdapters,
    ) -> GatedFactors {
        let GatedAdapters { pieces, down, d_a, low, adapters } = found;
        let kernel = kernel(LowRankPass::gated_backward(pieces), activation, pieces);
        let (mut of_adapters, d_b) = self.output_adapters(&adapters, low.block, kernel.pass);
        // The down adapter reads the same columns; its sums over tokens come after those of gate and up.
        of_adapters.push((AdapterArgument { first_column: operands.target.width as i32, ..down }, 0));
        let of_adapters = AdaptersArgument::new(&of_adapters);
        for tokens in rounds(kernel.pass, &operands.blocks[0]) {
            let here = |block: DeviceBlock| block.rows(tokens.start, tokens.len());
            let [gate, up, d_gate, d_up] = operands.blocks.map(here);
            let dy = here(dy.block);
            let mut of_adapters = of_adapters;
            of_adapters.move_to(tokens.start);
            let sums = self.sums(&kernel, &mut of_adapters, kernel.pass.chunks(gate.width), gate.rows);
            let arguments = arguments! { dgate: rows(&d_gate), dup: rows(&d_up), d_stride: long(d_gate.stride) };
            let arguments = arguments! {
                gate_and_up(arguments, [gate, up]) =>
                dy: rows(&dy), dy_stride: long(dy.stride), low_parts: address(sums.over_columns),
                parts: address(sums.over_tokens), adapters: value(&of_adapters), n: int(gate.rows),
            };
            let launch = kernel.launch("gated_backward_low_rank", gate.dtype, &sums, 5 * gate.bytes());
            // SAFETY: all matrices are rows of this width at the strides given, on 16 bytes; gate and up lie in the target, which is held, since only
            // a buffer of theirs has room for low-rank gradients; low-rank values have these rows and the ranks of their adapters; B is
            // [width, rank] at its strides; the scratch memory has room for the sums.
            unsafe { self.launch(launch, &arguments) };
            let of_gate_up = of_adapters.first(2);
            let d_low = here(operands.target.block.columns_after(of_gate_up.ranks()));
            self.add_over_columns(&kernel, d_low, &of_gate_up, &sums);
            self.add_over_tokens(&kernel, gate.dtype, &of_adapters, &sums, tokens.start > 0);
        }
        let both = operands.target;
        let of_gate_up = PreparedFactors { dy: both.block, d_b };
        GatedFactors { both, d_a, of_gate_up }
    }
}

fn down_adapter(gradient: &LowRankGradient, d_a: &MatrixView) -> AdapterArgument {
    AdapterArgument {
        low: gradient.d_low.address,
        low_stride: gradient.d_low.stride as i64,
        gradient: d_a.address,
        gradient_column: 1,
        gradient_rank: d_a.width as i64,
        width: d_a.width as i32,
        rank: d_a.rows as i32,
        scale: 1.0,
        ..AdapterArgument::default()
    }
}

fn kernel(pass: LowRankPass, activation: Activation, pieces: usize) -> LowRankKernel {
    let source = Source::GatedLowRank { activation, pieces, stages: GATED_STAGES };
    LowRankKernel { pass, source, tile: GATED_TILE, stages: GATED_STAGES }
}

/// Iterates over the row ranges of gate that a pass processes at a time.
fn rounds(pass: LowRankPass, gate: &DeviceBlock) -> impl Iterator<Item = Range<usize>> + use<> {
    let tokens = gate.rows;
    let at_once = gated_tokens(pass, tokens, gate.width);
    (0..tokens).step_by(at_once).map(move |start| start..tokens.min(start + at_once))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_are_as_long_as_each_other_and_cover_all_tokens() {
        let rows = |tokens| DeviceBlock::dense(0, [tokens, 14_336], DType::BF16);
        let ends = |tokens| {
            let rounds = rounds(LowRankPass::gated_backward(2), &rows(tokens));
            rounds.map(|round| (round.start, round.end)).collect::<Vec<_>>()
        };
        assert_eq!(ends(12_288), [(0, 12_288)]);
        assert_eq!(ends(32_760), [(0, 10_928), (10_928, 21_856), (21_856, 32_760)]);
        assert_eq!(ends(3), [(0, 3)]);
    }
}
