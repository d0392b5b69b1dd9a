//! The heads epilogue on CUDA: converts the GEMM's joined `[q | k | v]` to dense queries, keys and values, and back.
//!
//! One launch per direction runs RMSNorm per head and rotation if the model has them, and copies values. The joined
//! rows are scratch memory, unless the backward needs queries and keys before their norm. Kernels: `heads.cu`. Norms
//! over all heads of a token together run before it, from dense copies of queries and keys, by the kernels of `norm`.
//! Trade-off: values are copied so that attention always reads dense rows, which reads and writes 2 bytes per value of
//! `v`. Norms over all heads cost four more launches per direction.
//! Not supported: heads wider than 512 with norm weights that train.

use burn_tensor::{DType, Tensor};
use firebrick_cuda::{Arguments, LaunchShape};

use crate::backends::cuda::device::Device;
use crate::backends::cuda::engine::{
    BlockArguments, Cuda, DeviceBlock, MatrixView, Primitive, ScratchSlot, Source, arguments, grid, tensor,
};
use crate::{HeadRole, HeadsEpilogue, NormWeight, RotaryTables};

/// Query, key and value heads of a launch.
#[derive(Clone, Copy, Debug)]
struct HeadCounts {
    query: usize,
    key_value: usize,
    width: usize,
    /// Dense gates that lie after the queries in the joined rows, or 0.
    gate: u64,
}

impl HeadCounts {
    /// Takes the widths of dense queries, keys, values and perhaps gates.
    fn of(outputs: &[usize], width: usize, gate: u64) -> Self {
        let [q, k, v, ..] = outputs else { panic!("a heads epilogue needs queries, keys and values, got {outputs:?}") };
        assert!(k == v && q % width == 0 && k % width == 0, "outputs {outputs:?} of heads of width {width}");
        Self { query: q / width, key_value: k / width, width, gate }
    }

    /// Returns the columns from one query to the next in the joined rows.
    fn query_step(&self) -> usize {
        if self.gate == 0 { self.width } else { 2 * self.width }
    }

    fn arguments(&self, arguments: Arguments, tokens: usize) -> Arguments {
        arguments! {
            arguments =>
            n: long(tokens), q_heads: int(self.query), kv_heads: int(self.key_value), head_dim: int(self.width),
            gate: address(self.gate), q_step: int(self.query_step()),
        }
    }
}

/// Returns the widths of the outputs of a group with these parts: gates among the queries are one more.
fn output_widths(parts: &[usize], epilogue: &HeadsEpilogue<Cuda>) -> Vec<usize> {
    let mut widths = parts.to_vec();
    if epilogue.gates_in_queries {
        widths[0] /= 2;
        widths.push(widths[0]);
    }
    widths
}

/// Further inputs of the kernels; holds their memory.
struct Constants {
    /// Weights, their offsets, and epsilons.
    norms: Option<([MatrixView; 2], [f32; 4])>,
    tables: Option<[MatrixView; 2]>,
    /// Factors of rotated queries.
    query_scale: Option<MatrixView>,
    /// Rotated column pairs of a head; all of them without tables.
    rotated: usize,
    interleaved: bool,
}

impl Constants {
    fn new(
        device: &Device,
        norms: Option<[&NormWeight<Cuda>; 2]>,
        rotary: Option<&RotaryTables<Cuda>>,
        [tokens, width]: [usize; 2],
    ) -> Self {
        assert!(width.is_multiple_of(2), "heads have an even width, got {width}");
        let norms = norms.map(|[q, k]| {
            let scalars = [q.offset, k.offset, q.epsilon, k.epsilon].map(|value| value as f32);
            ([q, k].map(|norm| device.norm_weight(norm, width)), scalars)
        });
        let tables = rotary.map(|tables| [&tables.cos, &tables.sin].map(|table| device.flat(table.clone())));
        let rotated = tables.as_ref().map_or(width / 2, |[cos, _]| cos.width);
        assert!(rotated <= width / 2, "rotary tables of {rotated} angles for heads of {width} columns");
        for table in tables.iter().flatten() {
            let found = (table.rows, table.width, table.dtype);
            assert_eq!(found, (tokens, rotated, DType::F32), "rotary tables: tokens, angles, f32");
        }
        let query_scale = rotary.and_then(|tables| tables.query_scale.clone());
        let query_scale = query_scale.map(|scale| device.flat_as(scale, DType::F32));
        if let Some(scale) = &query_scale {
            let found = (scale.rows * scale.width, rotated);
            assert_eq!(found, (tokens, width / 2), "factors of queries: tokens, all pairs of a head rotated");
        }
        let interleaved = rotary.is_some_and(|tables| tables.interleaved);
        Self { norms, tables, query_scale, rotated, interleaved }
    }

    fn norm_arguments(&self, arguments: Arguments) -> Arguments {
        let ([q, k], [q_offset, k_offset, q_epsilon, k_epsilon]) = match &self.norms {
            Some((weights, scalars)) => ([weights[0].address, weights[1].address], *scalars),
            None => ([0; 2], [0.0; 4]),
        };
        arguments! {
            arguments =>
            q_weight: address(q), k_weight: address(k), q_offset: f32(q_offset), k_offset: f32(k_offset),
            q_epsilon: f32(q_epsilon), k_epsilon: f32(k_epsilon),
        }
    }

    /// Adds the tables; without `has_queries` no factor of queries.
    fn table_arguments(&self, arguments: Arguments, has_queries: bool) -> Arguments {
        let [cos, sin] = self.tables.as_ref().map_or([0; 2], |tables| [tables[0].address, tables[1].address]);
        let query_scale = self.query_scale.as_ref().filter(|_| has_queries).map_or(0, |scale| scale.address);
        arguments! {
            arguments =>
            cos: address(cos), sin: address(sin), query_scale: address(query_scale), rotated: int(self.rotated),
            interleaved: i32(i32::from(self.interleaved)),
        }
    }
}

/// Returns the norms of queries and keys of an epilogue.
///
/// # Panics
/// If its parts are not queries, keys, values and perhaps gates, or only one of the first two is normalized: the kernels know no other groups.
fn qk_norms(epilogue: &HeadsEpilogue<Cuda>) -> Option<[&NormWeight<Cuda>; 2]> {
    let roles: Vec<_> = epilogue.parts.iter().map(|part| part.role).collect();
    let known = [HeadRole::Query, HeadRole::Key, HeadRole::Value, HeadRole::Gate];
    assert!(roles.len() >= 3 && known.starts_with(&roles), "parts of a heads epilogue on CUDA: {roles:?}");
    match [0, 1, 2].map(|part: usize| epilogue.parts[part].norm.as_ref()) {
        [None, None, None] => None,
        [Some(q), Some(k), None] => Some([q, k]),
        _ => panic!("queries and keys are normalized, or nothing is"),
    }
}

fn head_norms(epilogue: &HeadsEpilogue<Cuda>) -> Option<[&NormWeight<Cuda>; 2]> {
    qk_norms(epilogue).filter(|norms| norm_widths(norms) == [epilogue.head_dim; 2])
}

/// Returns the norms of an epilogue that normalizes all heads of a token together.
fn projection_norms(epilogue: &HeadsEpilogue<Cuda>) -> Option<[&NormWeight<Cuda>; 2]> {
    qk_norms(epilogue).filter(|norms| norm_widths(norms) != [epilogue.head_dim; 2])
}

/// Returns whether the joined rows themselves are saved for the backward: queries and keys before the norm of each head.
pub(super) fn saves_joined(epilogue: &HeadsEpilogue<Cuda>) -> bool {
    head_norms(epilogue).is_some()
}

fn norm_widths(norms: &[&NormWeight<Cuda>; 2]) -> [usize; 2] {
    norms.map(|norm| norm.weight.dims()[0])
}

/// Returns a grid of four tokens per block of 256 threads.
fn token_grid(tokens: usize) -> LaunchShape {
    LaunchShape { block: [64, 4, 1], ..grid(tokens.div_ceil(4), 1) }
}

impl Device {
    /// Allocates the joined output of the GEMM: a tensor if the backward reads it again, else scratch memory.
    pub(super) fn joined_rows(
        &self,
        [rows, width]: [usize; 2],
        dtype: DType,
        saved: bool,
    ) -> (DeviceBlock, Option<MatrixView>) {
        if saved {
            let joined = self.empty_matrix(rows, width, dtype);
            return (joined.block(), Some(joined));
        }
        (self.scratch_rows([rows, width], 0, dtype), None)
    }

    /// Normalizes queries and keys in joined rows, if the norms are over all heads of a token; returns dense copies of both before the norm.
    pub(super) fn normalize_projections(
        &self,
        joined: DeviceBlock,
        parts: &[usize],
        epilogue: &HeadsEpilogue<Cuda>,
    ) -> Option<[MatrixView; 2]> {
        let [q_norm, k_norm] = projection_norms(epilogue)?;
        let columns = [joined.columns(0, parts[0]), joined.columns(parts[0], parts[1])];
        let normalize = |(columns, norm): (DeviceBlock, &NormWeight<Cuda>)| {
            let raw = self.empty_matrix(columns.rows, columns.width, columns.dtype);
            self.copy_rows(columns, raw.block());
            self.rms_norm_to(columns, &raw, norm, None);
            raw
        };
        let [q, k] = columns;
        Some([normalize((q, q_norm)), normalize((k, k_norm))])
    }

    /// Backward of [`Device::normalize_projections`], in place on the joined gradients; returns the gradients of norm weights that train.
    fn normalize_projections_backward(
        &self,
        joined: DeviceBlock,
        raw: &[MatrixView; 2],
        [q_norm, k_norm]: [&NormWeight<Cuda>; 2],
    ) -> [Option<Primitive>; 2] {
        let [q, k] = raw;
        let columns = [joined.columns(0, q.width), joined.columns(q.width, k.width)];
        [
            self.rms_norm_backward(columns[0], q, q_norm, columns[0], None, None),
            self.rms_norm_backward(columns[1], k, k_norm, columns[1], None, None),
        ]
    }

    /// Returns dense queries, keys and values of joined rows.
    pub(super) fn heads_forward(
        &self,
        joined: DeviceBlock,
        parts: &[usize],
        epilogue: &HeadsEpilogue<Cuda>,
    ) -> Vec<Tensor<Cuda, 2>> {
        let widths = output_widths(parts, epilogue);
        let sizes = [joined.rows, epilogue.head_dim];
        let constants = Constants::new(self, head_norms(epilogue), epilogue.rotary.as_ref(), sizes);
        let outputs: Vec<_> = widths.iter().map(|&width| self.empty_matrix(joined.rows, width, joined.dtype)).collect();
        let addresses = [0, 1, 2].map(|part: usize| outputs[part].address);
        let gate = outputs.get(3).filter(|_| epilogue.gates_in_queries).map_or(0, |gate| gate.address);
        let heads = HeadCounts::of(&widths, epilogue.head_dim, gate);
        if let (Some(gates), 0) = (outputs.get(3), gate) {
            self.copy_rows(joined.columns(parts[..3].iter().sum(), gates.width), gates.block());
        }
        self.launch_heads(addresses, joined, &constants, heads, false);
        outputs.into_iter().map(|output| tensor(output.tensor)).collect()
    }

    fn launch_heads(
        &self,
        [q, k, v]: [u64; 3],
        x: DeviceBlock,
        constants: &Constants,
        heads: HeadCounts,
        inverse: bool,
    ) {
        let arguments = arguments! {
            q: address(q), k: address(k), v: address(v), x: rows(&x), x_stride: long(x.stride),
        };
        let arguments = constants.table_arguments(constants.norm_arguments(arguments), true);
        let arguments = arguments! { arguments => inverse: i32(i32::from(inverse)) };
        let launch = Source::Heads.launch(x.dtype, "heads_forward", token_grid(x.rows), 2 * x.bytes());
        // SAFETY: x has rows of all heads at its stride; each output is dense and has the rows of x and the heads of its part;
        // the tables are [rows, rotated] f32 with at most half a head's columns, factors of queries [rows] f32, and the weights [width] f32.
        unsafe { self.launch(launch, &heads.arguments(arguments, x.rows)) };
    }

    /// Joins dense gradients in rows of scratch memory with room for `room` more columns; also returns the gradients of
    /// norm weights that train. `raw` are queries and keys before their norm.
    pub(super) fn heads_backward(
        &self,
        gradients: &[MatrixView],
        epilogue: &HeadsEpilogue<Cuda>,
        raw: Option<&[MatrixView; 2]>,
        room: usize,
    ) -> (DeviceBlock, [Option<Primitive>; 2]) {
        let [dq, dk, dv, gates @ ..] = gradients else { panic!("gradients of queries, keys and values") };
        let widths: Vec<usize> = gradients.iter().map(|gradient| gradient.width).collect();
        assert_eq!(qk_norms(epilogue).is_some(), raw.is_some(), "normalized heads are saved before their norm");
        let gate = gates.first().filter(|_| epilogue.gates_in_queries).map_or(0, |gate| gate.address);
        let heads = HeadCounts::of(&widths, epilogue.head_dim, gate);
        let sizes = [dq.rows, epilogue.head_dim];
        let constants = Constants::new(self, head_norms(epilogue), epilogue.rotary.as_ref(), sizes);
        let raw_of_heads = raw.filter(|_| head_norms(epilogue).is_some());
        let joined = self.scratch_rows([dq.rows, widths.iter().sum()], room, dq.dtype);
        let are_dense = gradients.iter().all(|gradient| gradient.is_dense() && gradient.dtype == dq.dtype);
        assert!(are_dense, "gradients of heads are dense");
        let raw_at = |part: usize| raw_of_heads.map_or((0, 0), |raw| (raw[part].address, raw[part].stride));
        let ((raw_q, raw_q_stride), (raw_k, raw_k_stride)) = (raw_at(0), raw_at(1));
        let arguments = arguments! {
            dx: rows(&joined), dx_stride: long(joined.stride), dq: rows(dq), dk: rows(dk), dv: rows(dv),
            raw_q: address(raw_q), raw_q_stride: long(raw_q_stride), raw_k: address(raw_k),
            raw_k_stride: long(raw_k_stride),
        };
        let arguments = constants.table_arguments(constants.norm_arguments(arguments), true);
        let bytes = 2 * joined.bytes() + raw_of_heads.map_or(0, |raw| raw[0].bytes() + raw[1].bytes());
        let launch = Source::Heads.launch(joined.dtype, "heads_backward", token_grid(joined.rows), bytes);
        // SAFETY: the gradients are dense with the heads of their part; the joined rows have room for all of them; raw rows have
        // their strides; constants are as for the forward pass.
        unsafe { self.launch(launch, &heads.arguments(arguments, joined.rows)) };
        if let (Some(gates), 0) = (gates.first(), gate) {
            self.copy_rows(gates.block(), joined.columns(widths[..3].iter().sum(), gates.width));
        }
        if let (Some(norms), Some(raw)) = (projection_norms(epilogue), raw) {
            return (joined, self.normalize_projections_backward(joined, raw, norms));
        }
        let d_norms = match (raw_of_heads, head_norms(epilogue)) {
            (Some([q, k]), Some([q_norm, k_norm])) => {
                let of = |(gradient, raw, norm): (_, _, &NormWeight<Cuda>), of_queries| {
                    let step = if of_queries { heads.query_step() } else { heads.width };
                    let compute = || self.heads_norm_gradient([gradient, raw], norm, &constants, of_queries, step);
                    norm.trains.then(compute)
                };
                [of((dq, q, q_norm), true), of((dk, k, k_norm), false)]
            }
            _ => [None, None],
        };
        (joined, d_norms)
    }

    /// Computes the gradient of a norm's weight, `[width]` f32, from the gradient of heads and the heads before their norm.
    fn heads_norm_gradient(
        &self,
        [gradient, raw]: [&MatrixView; 2],
        norm: &NormWeight<Cuda>,
        constants: &Constants,
        of_queries: bool,
        head_step: usize,
    ) -> Primitive {
        let [width] = norm.weight.dims();
        assert!(width <= 512, "the gradient of a head's norm is summed for widths of at most 512, got {width}");
        let heads = gradient.width / width;
        let blocks = (gradient.rows * heads).div_ceil(8).clamp(1, 4 * self.multiprocessors);
        let partial = self.scratch.take(ScratchSlot::Partial, blocks * width * 4);
        let arguments = arguments! {
            partial: address(partial), dy: rows(gradient), x: rows(raw), x_stride: long(raw.stride),
            epsilon: float(norm.epsilon),
        };
        let arguments = arguments! {
            constants.table_arguments(arguments, of_queries) =>
            n: long(gradient.rows), heads: int(heads), head_dim: int(width), head_step: int(head_step),
        };
        let bytes = 2 * gradient.bytes();
        let launch = Source::Heads.launch(gradient.dtype, "heads_norm_gradient", grid(blocks, 256), bytes);
        // SAFETY: the gradient is dense, raw heads have their stride, and the partial sums are [blocks, width] f32.
        unsafe { self.launch(launch, &arguments) };
        self.sum_partial_rows(partial, blocks, width)
    }

    /// Rotates heads of `x`, queries or keys, into a new matrix.
    pub(super) fn rotate(
        &self,
        x: &MatrixView,
        tables: &RotaryTables<Cuda>,
        head_dim: usize,
        inverse: bool,
    ) -> MatrixView {
        assert!(x.width.is_multiple_of(head_dim), "{} columns are no whole heads of {head_dim}", x.width);
        let rotation = RotaryTables { query_scale: None, ..tables.clone() };
        let constants = Constants::new(self, None, Some(&rotation), [x.rows, head_dim]);
        let y = self.empty_matrix(x.rows, x.width, x.dtype);
        let heads = HeadCounts { query: x.width / head_dim, key_value: 0, width: head_dim, gate: 0 };
        self.launch_heads([y.address, 0, 0], x.block(), &constants, heads, inverse);
        y
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_whole_heads() {
        let heads = HeadCounts::of(&[4096, 1024, 1024], 128, 0);
        assert_eq!((heads.query, heads.key_value), (32, 8));
    }
}
