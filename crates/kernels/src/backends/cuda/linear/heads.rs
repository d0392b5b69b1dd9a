//! The heads epilogue on CUDA: converts the GEMM's joined `[q | k | v]` to dense queries, keys and values, and back.
//!
//! One launch per direction runs RMSNorm per head and rotation if the model has them, and copies values. Groups of other parts, such as queries alone,
//! have a launch per part, and so have values that are normalized. The joined rows are scratch memory, unless the backward needs heads before their
//! norm. Kernels: `heads.cu`. Norms over all heads of a token together run before it, from dense copies, by the kernels of `norm`.
//! Trade-off: values are copied so that attention always reads dense rows, which reads and writes 2 bytes per value of
//! `v`, and once more before they are normalized. Norms over all heads cost four more launches per direction.
//! Not supported: heads wider than 512 with norm weights that train.

use std::ops::Range;

use burn_tensor::{DType, Tensor};
use firebrick_cuda::{Arguments, LaunchShape};

use crate::backends::cuda::device::Device;
use crate::backends::cuda::engine::{
    BlockArguments, Cuda, DeviceBlock, MatrixView, Primitive, ScratchSlot, Source, arguments, grid, tensor,
};
use crate::{HeadPart, HeadRole, HeadsEpilogue, NormWeight, RotaryTables};

/// Fewer tokens leave multiprocessors idle if a block has all heads of its own.
const FEW_TOKENS: usize = 1024;
/// Heads that a block has of each token if tokens are few: every thread then loads two of 128 columns at a time.
const HEADS_OF_BLOCK: usize = 16;

/// Heads of a launch: queries, or another part alone, which the kernels treat like queries.
#[derive(Clone, Copy, Debug)]
struct HeadCounts {
    query: usize,
    key_value: usize,
    width: usize,
    /// Dense gates that lie after the queries in the joined rows, or 0.
    gate: u64,
}

impl HeadCounts {
    /// Takes the widths of dense queries, keys and values, or of one part.
    fn of(outputs: &[usize], width: usize, gate: u64) -> Self {
        let (q, k) = match outputs {
            [q] => (q, &0),
            [q, k, v] if k == v => (q, k),
            _ => panic!("a launch takes queries, keys and values, or one part, got {outputs:?}"),
        };
        assert!(q % width == 0 && k % width == 0, "outputs {outputs:?} of heads of width {width}");
        Self { query: q / width, key_value: k / width, width, gate }
    }

    fn arguments(&self, arguments: Arguments, tokens: usize) -> Arguments {
        let query_step = if self.gate == 0 { self.width } else { 2 * self.width };
        arguments! {
            arguments =>
            n: long(tokens), q_heads: int(self.query), kv_heads: int(self.key_value), head_dim: int(self.width),
            gate: address(self.gate), q_step: int(query_step),
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

/// Returns the columns of some of the parts in the joined rows: the first, and how many.
fn columns_of(parts: &[usize], taken: &Range<usize>) -> [usize; 2] {
    [&parts[..taken.start], &parts[taken.clone()]].map(|parts| parts.iter().sum())
}

/// Further inputs of the kernels; holds their memory.
struct Constants {
    /// Weights of queries and keys, their offsets, and epsilons.
    norms: [Option<MatrixView>; 2],
    scalars: [[f32; 2]; 2],
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
        norms: [Option<&NormWeight<Cuda>>; 2],
        rotary: Option<&RotaryTables<Cuda>>,
        [tokens, width]: [usize; 2],
    ) -> Self {
        assert!(width.is_multiple_of(2), "heads have an even width, got {width}");
        let scalars =
            norms.map(|norm| norm.map_or([0.0; 2], |norm| [norm.offset, norm.epsilon].map(|value| value as f32)));
        let norms = norms.map(|norm| norm.map(|norm| device.norm_weight(norm, width)));
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
        Self { norms, scalars, tables, query_scale, rotated, interleaved }
    }

    /// Makes those of a launch that takes these parts of an epilogue.
    fn of(device: &Device, epilogue: &HeadsEpilogue<Cuda>, taken: &Range<usize>, tokens: usize) -> Self {
        let norms = head_norms(epilogue);
        let of_keys = if taken.len() > 1 { norms[taken.start + 1] } else { None };
        let rotary = rotation_of(epilogue, taken.start);
        Self::new(device, [norms[taken.start], of_keys], rotary.as_ref(), [tokens, epilogue.head_dim])
    }

    fn norm_arguments(&self, arguments: Arguments) -> Arguments {
        let [q, k] = self.norms.each_ref().map(|norm| norm.as_ref().map_or(0, |weight| weight.address));
        let [[q_offset, q_epsilon], [k_offset, k_epsilon]] = self.scalars;
        arguments! {
            arguments =>
            q_weight: address(q), k_weight: address(k), q_offset: f32(q_offset), k_offset: f32(k_offset),
            q_epsilon: f32(q_epsilon), k_epsilon: f32(k_epsilon),
        }
    }

    fn table_arguments(&self, arguments: Arguments) -> Arguments {
        let [cos, sin] = self.tables.as_ref().map_or([0; 2], |tables| [tables[0].address, tables[1].address]);
        let query_scale = self.query_scale.as_ref().map_or(0, |scale| scale.address);
        arguments! {
            arguments =>
            cos: address(cos), sin: address(sin), query_scale: address(query_scale), rotated: int(self.rotated),
            interleaved: i32(i32::from(self.interleaved)),
        }
    }
}

/// Lists which parts each launch takes, given the role of each and whether its heads are normalized: queries, keys and values together if the first two
/// are normalized alike, other parts one by one. Normalized values have a launch of their own in any case, after they were copied.
fn launches(parts: &[(HeadRole, bool)]) -> Vec<Range<usize>> {
    let together = match parts {
        [(HeadRole::Query, q), (HeadRole::Key, k), (HeadRole::Value, _), ..] if q == k => 3,
        _ => 0,
    };
    let is_alone = |&index: &usize| match parts[index] {
        (HeadRole::Query | HeadRole::Key, _) => index >= together,
        (HeadRole::Value | HeadRole::Gate, is_normalized) => is_normalized,
    };
    let alone = (0..parts.len()).filter(is_alone).map(|index| index..index + 1);
    (together > 0).then_some(0..together).into_iter().chain(alone).collect()
}

/// What runs for an epilogue: the parts that each launch takes, and those that are copied.
fn work_of(epilogue: &HeadsEpilogue<Cuda>) -> (Vec<Range<usize>>, Vec<usize>) {
    let normalized = head_norms(epilogue).into_iter().map(|norm| norm.is_some());
    let parts: Vec<_> = epilogue.parts.iter().map(|part| part.role).zip(normalized).collect();
    let launches = launches(&parts);
    // Gates among the queries go with these.
    let others = parts.len() - usize::from(epilogue.gates_in_queries);
    let copied = (0..others).filter(|part| !launches.iter().any(|taken| taken.contains(part))).collect();
    (launches, copied)
}

fn rotation_of(epilogue: &HeadsEpilogue<Cuda>, part: usize) -> Option<RotaryTables<Cuda>> {
    let tables = epilogue.rotary.clone();
    match epilogue.parts[part].role {
        HeadRole::Query => tables,
        HeadRole::Key => tables.map(|tables| RotaryTables { query_scale: None, ..tables }),
        HeadRole::Value | HeadRole::Gate => None,
    }
}

/// Returns whether no norm is over all heads of a token together.
fn is_per_head(epilogue: &HeadsEpilogue<Cuda>) -> bool {
    epilogue.parts.iter().filter_map(|part| part.norm.as_ref()).all(|norm| norm.weight.dims() == [epilogue.head_dim])
}

/// Returns the norm of each part's heads; that of all heads together is none.
fn head_norms(epilogue: &HeadsEpilogue<Cuda>) -> Vec<Option<&NormWeight<Cuda>>> {
    let is_per_head = is_per_head(epilogue);
    epilogue.parts.iter().map(|part| part.norm.as_ref().filter(|_| is_per_head)).collect()
}

/// Returns whether the joined rows themselves are saved for the backward: heads before the norm of each.
pub(super) fn saves_joined(epilogue: &HeadsEpilogue<Cuda>) -> bool {
    head_norms(epilogue).iter().any(Option::is_some)
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
            return (joined.block, Some(joined));
        }
        (self.scratch_rows([rows, width], 0, dtype), None)
    }

    /// Normalizes the parts in joined rows whose norms are over all heads of a token; returns dense copies of these before the norm.
    pub(super) fn normalize_projections(
        &self,
        joined: DeviceBlock,
        parts: &[usize],
        epilogue: &HeadsEpilogue<Cuda>,
    ) -> Vec<Option<MatrixView>> {
        if is_per_head(epilogue) {
            return vec![None; parts.len()];
        }
        let normalize = |(index, norm): (usize, &NormWeight<Cuda>)| {
            let [start, width] = columns_of(parts, &(index..index + 1));
            let columns = joined.columns(start, width);
            let raw = self.empty_matrix(columns.rows, columns.width, columns.dtype);
            self.copy_rows(columns, raw.block);
            self.rms_norm_to(columns, &raw, norm, None);
            raw
        };
        let of_parts = epilogue.parts.iter().take(parts.len()).enumerate();
        of_parts.map(|(index, part)| part.norm.as_ref().map(|norm| normalize((index, norm)))).collect()
    }

    /// Returns the dense parts of joined rows.
    pub(super) fn heads_forward(
        &self,
        joined: DeviceBlock,
        parts: &[usize],
        epilogue: &HeadsEpilogue<Cuda>,
    ) -> Vec<Tensor<Cuda, 2>> {
        let widths = output_widths(parts, epilogue);
        let outputs: Vec<_> = widths.iter().map(|&width| self.empty_matrix(joined.rows, width, joined.dtype)).collect();
        let (launches, copied) = work_of(epilogue);
        for part in copied {
            let [start, width] = columns_of(parts, &(part..part + 1));
            self.copy_rows(joined.columns(start, width), outputs[part].block);
        }
        for taken in launches {
            let constants = Constants::of(self, epilogue, &taken, joined.rows);
            let gate = gate_of(&outputs, &taken, epilogue);
            let heads = HeadCounts::of(&widths[taken.clone()], epilogue.head_dim, gate);
            let [start, width] = columns_of(parts, &taken);
            self.launch_heads(&outputs[taken], joined.columns(start, width), &constants, heads, false);
        }
        outputs.into_iter().map(|output| tensor(output.tensor)).collect()
    }

    fn launch_heads(
        &self,
        outputs: &[MatrixView],
        x: DeviceBlock,
        constants: &Constants,
        heads: HeadCounts,
        inverse: bool,
    ) {
        let [q, k, v] = [0, 1, 2].map(|part: usize| outputs.get(part).map_or(0, |output| output.address));
        let arguments = arguments! {
            q: address(q), k: address(k), v: address(v), x: rows(&x), x_stride: long(x.stride),
        };
        let arguments = constants.table_arguments(constants.norm_arguments(arguments));
        let arguments = arguments! { arguments => inverse: i32(i32::from(inverse)) };
        let mut launch = Source::Heads.launch(x.dtype, "heads_forward", token_grid(x.rows), 2 * x.bytes());
        if x.rows < FEW_TOKENS {
            // Their heads are divided among blocks as well.
            launch.shape.grid[1] = (heads.query + 2 * heads.key_value).div_ceil(HEADS_OF_BLOCK) as u32;
            launch = launch.early();
        }
        // SAFETY: x has rows of all heads at its stride; each output is dense and has the rows of x and the heads of its part;
        // the tables are [rows, rotated] f32 with at most half a head's columns, factors of queries [rows] f32, and the weights [width] f32.
        unsafe { self.launch(launch, &heads.arguments(arguments, x.rows)) };
    }

    /// Joins dense gradients in rows of scratch memory with room for `room` more columns; also returns the gradients of
    /// norm weights that train, by part. `raw` are the normalized parts before their norm.
    pub(super) fn heads_backward(
        &self,
        gradients: &[MatrixView],
        parts: &[usize],
        epilogue: &HeadsEpilogue<Cuda>,
        raw: &[Option<MatrixView>],
        room: usize,
    ) -> (DeviceBlock, Vec<Option<Primitive>>) {
        let (first, is_per_head) = (&gradients[0], is_per_head(epilogue));
        let widths: Vec<usize> = gradients.iter().map(|gradient| gradient.width).collect();
        assert_eq!(widths, output_widths(parts, epilogue), "gradients of all parts");
        let are_dense = gradients.iter().all(|gradient| gradient.is_dense() && gradient.dtype == first.dtype);
        assert!(are_dense, "gradients of heads are dense");
        let raw_of = |part: usize| raw.get(part).and_then(Option::as_ref);
        let mut normed = epilogue.parts.iter().map(|part| part.norm.is_some()).enumerate();
        let is_saved = normed.all(|(part, is_normed)| is_normed == raw_of(part).is_some());
        assert!(is_saved, "normalized heads are saved before their norm");
        let joined = self.scratch_rows([first.rows, parts.iter().sum()], room, first.dtype);
        let (launches, copied) = work_of(epilogue);
        for taken in launches {
            let [start, width] = columns_of(parts, &taken);
            let constants = Constants::of(self, epilogue, &taken, joined.rows);
            let heads = HeadCounts::of(&widths[taken.clone()], epilogue.head_dim, gate_of(gradients, &taken, epilogue));
            let raw = [0, 1].map(|index| raw_of(taken.start + index).filter(|_| is_per_head && index < taken.len()));
            let (dx, of_launch) = (joined.columns(start, width), &gradients[taken]);
            let [dk, dv] = [1, 2].map(|part: usize| of_launch.get(part).map_or(0, |gradient| gradient.address));
            let [(raw_q, raw_q_stride), (raw_k, raw_k_stride)] =
                raw.map(|raw| raw.map_or((0, 0), |raw| (raw.address, raw.stride)));
            let arguments = arguments! {
                dx: rows(&dx), dx_stride: long(dx.stride), dq: rows(&of_launch[0]), dk: address(dk), dv: address(dv),
                raw_q: address(raw_q), raw_q_stride: long(raw_q_stride), raw_k: address(raw_k),
                raw_k_stride: long(raw_k_stride),
            };
            let arguments = constants.table_arguments(constants.norm_arguments(arguments));
            let bytes = 2 * dx.bytes() + raw.iter().flatten().map(|raw| raw.bytes()).sum::<usize>();
            let launch = Source::Heads.launch(dx.dtype, "heads_backward", token_grid(dx.rows), bytes);
            // SAFETY: the gradients are dense with the heads of their part; the joined rows have room for all of them; raw rows have
            // their strides; constants are as for the forward pass.
            unsafe { self.launch(launch, &heads.arguments(arguments, dx.rows)) };
        }
        for part in copied {
            let [start, width] = columns_of(parts, &(part..part + 1));
            self.copy_rows(gradients[part].block, joined.columns(start, width));
        }
        if !is_per_head {
            // The backward of `normalize_projections`, in place on the joined gradients.
            let of_part = |(part, of_heads): (usize, &HeadPart<Cuda>)| {
                let (norm, raw) = of_heads.norm.as_ref().zip(raw_of(part))?;
                let [start, width] = columns_of(parts, &(part..part + 1));
                let columns = joined.columns(start, width);
                self.rms_norm_backward(columns, raw, norm, columns, None, None)
            };
            return (joined, epilogue.parts.iter().enumerate().map(of_part).collect());
        }
        let of_part = |(part, gradient): (usize, &MatrixView)| {
            let norm = epilogue.parts[part].norm.as_ref().filter(|norm| norm.trains)?;
            let rotary = rotation_of(epilogue, part);
            let constants = Constants::new(self, [None; 2], rotary.as_ref(), [joined.rows, epilogue.head_dim]);
            let step = parts[part] * epilogue.head_dim / gradient.width;
            Some(self.heads_norm_gradient([gradient, raw_of(part)?], norm, &constants, step))
        };
        (joined, gradients.iter().enumerate().map(of_part).collect())
    }

    /// Computes the gradient of a norm's weight, `[width]` f32, from the gradient of heads and the heads before their norm.
    fn heads_norm_gradient(
        &self,
        [gradient, raw]: [&MatrixView; 2],
        norm: &NormWeight<Cuda>,
        constants: &Constants,
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
            constants.table_arguments(arguments) =>
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
        let constants = Constants::new(self, [None; 2], Some(&rotation), [x.rows, head_dim]);
        let y = self.empty_matrix(x.rows, x.width, x.dtype);
        let heads = HeadCounts::of(&[x.width], head_dim, 0);
        self.launch_heads(std::slice::from_ref(&y), x.block, &constants, heads, inverse);
        y
    }
}

/// Returns the address of dense gates, the last of the outputs or their gradients, for the launch of queries that have them in their columns, or 0.
fn gate_of(outputs: &[MatrixView], taken: &Range<usize>, epilogue: &HeadsEpilogue<Cuda>) -> u64 {
    let of_queries = epilogue.gates_in_queries && taken.start == 0;
    outputs.last().filter(|_| of_queries).map_or(0, |gate| gate.address)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_whole_heads() {
        let heads = HeadCounts::of(&[4096, 1024, 1024], 128, 0);
        assert_eq!((heads.query, heads.key_value), (32, 8));
    }

    #[test]
    fn queries_keys_and_values_go_together_and_others_one_by_one() {
        use HeadRole::{Gate, Key, Query, Value};
        let of = |parts: &[(HeadRole, bool)]| -> Vec<(usize, usize)> {
            launches(parts).into_iter().map(|taken| (taken.start, taken.end)).collect()
        };
        assert_eq!(of(&[(Query, false), (Key, false), (Value, false)]), [(0, 3)]);
        assert_eq!(of(&[(Query, true), (Key, true), (Value, false), (Gate, false)]), [(0, 3)]);
        assert_eq!(of(&[(Query, true), (Key, true), (Value, true)]), [(0, 3), (2, 3)]);
        assert_eq!(of(&[(Query, true), (Key, false), (Value, false)]), [(0, 1), (1, 2)]);
        assert_eq!([of(&[(Query, true), (Value, false)]), of(&[(Query, true)])], [[(0, 1)], [(0, 1)]]);
    }
}
