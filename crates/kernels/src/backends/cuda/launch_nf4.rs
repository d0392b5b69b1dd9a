//! Launches over 4-bit weights: writing them out with their adapter, and packing them.

#![allow(unsafe_code, reason = "launching device work is unsafe; the launch files are where it is answered for")]

use burn_tensor::{DType, Tensor};
use firebrick_cuda::{Arguments, LaunchShape};

use super::Cuda;
use super::engine::{Engine, engine};
use super::gemm::Block;
use super::launch::Launch;
use super::launch_rows::{at, grid};
use super::program::Source;
use super::scratch::Purpose;
use super::tensor::{address, float, int_tensor, tensor};
use crate::{LoraPair, Nf4Absmax, Nf4Weight};

/// Largest rank of the kernel on matrix units.
const FASTEST_RANK: usize = 64;

/// The arguments that say what a weight is: codes, then scales.
fn packed(weight: &Nf4Weight<Cuda>, arguments: Arguments) -> Arguments {
    let codes = at(address(&weight.codes.clone().into_primitive()));
    let of = |values: &Tensor<Cuda, 1>| at(address(&float(values.clone())));
    let none = || at(0);
    match &weight.absmax {
        Nf4Absmax::Float(absmax) => {
            arguments.pointer(codes).pointer(of(absmax)).pointer(none()).pointer(none()).pointer(none()).pointer(none())
        }
        Nf4Absmax::Nested { codes: scales, absmax, map, offset, .. } => arguments
            .pointer(codes)
            .pointer(none())
            .pointer(at(address(&scales.clone().into_primitive())))
            .pointer(of(absmax))
            .pointer(of(map))
            .pointer(of(offset)),
    }
}

/// Writes `W + scale B A` into `out`, rows without gaps.
pub(super) fn merge(engine: &Engine, weight: &Nf4Weight<Cuda>, pair: Option<&LoraPair<Cuda>>, out: Block) {
    let [rows, inputs] = weight.shape;
    assert_eq!((out.stride, weight.block_size), (inputs, 64), "a merged weight is dense, of blocks of 64");
    let rank = pair.map_or(0, |pair| pair.a.dims()[0]);
    let (a, b) = pair.map_or((0, 0), |pair| (engine.flat(pair.a.clone()).address, engine.flat(pair.b.clone()).address));
    let (name, shape) = merge_kernel(out, [rows, inputs], rank);
    let values = rows * inputs;
    let launch = Launch {
        source: Source::Nf4,
        dtype: out.dtype,
        name,
        shape,
        bytes: values * out.dtype.size() + weight.bytes(),
    };
    let arguments = packed(weight, Arguments::new().pointer(at(out.address)))
        .pointer(at(a))
        .pointer(at(b))
        .f32(pair.map_or(0.0, |pair| pair.scale as f32))
        .i32(rows as i32)
        .i32(inputs as i32)
        .i32(rank as i32);
    // SAFETY: out holds [rows, inputs]; codes and scales are those of a weight of this shape; A is [rank, inputs] and B
    // [rows, rank], f32, or null with rank 0.
    unsafe { engine.launch(launch, &arguments) };
}

/// The kernel for a weight of this shape and rank, and its grid.
fn merge_kernel(out: Block, [rows, inputs]: [usize; 2], rank: usize) -> (&'static str, LaunchShape) {
    let aligned = out.dtype != DType::F32 && inputs.is_multiple_of(8) && out.address.is_multiple_of(16);
    if !aligned || rank > FASTEST_RANK {
        let shape = LaunchShape {
            grid: [inputs.div_ceil(256) as u32, rows.div_ceil(64).min(65_535) as u32, 1],
            block: [256, 1, 1],
            shared_bytes: 0,
        };
        return ("nf4_merge", shape);
    }
    // Tiles of 64 rows that a block takes: more of them read A less often, fewer keep more loads in flight. As timed for
    // weights of 1024 to 14336 rows.
    let (name, columns, tiles) = match rank {
        0..=16 => ("nf4_merge_r16", 256, 1),
        17..=32 => ("nf4_merge_r32", 256, 2),
        _ => ("nf4_merge_r64", 128, 3),
    };
    let across = inputs.div_ceil(columns);
    let down = rows.div_ceil(64 * tiles).min(65_535);
    (name, LaunchShape { grid: [across as u32, down as u32, 1], block: [128, 1, 1], shared_bytes: 0 })
}

/// See [`crate::Kernels::nf4_dequantize`].
pub(super) fn dequantize(weight: &Nf4Weight<Cuda>) -> Tensor<Cuda, 2> {
    let engine = engine(&weight.codes.device());
    engine.section(|| {
        let [rows, inputs] = weight.shape;
        let out = engine.empty_matrix(rows, inputs, DType::F32);
        let values = rows * inputs;
        let launch = Launch {
            source: Source::Nf4,
            dtype: DType::F32,
            name: "nf4_dequantize_f32",
            shape: grid(values.div_ceil(4096), 256),
            bytes: values * 4 + weight.bytes(),
        };
        let arguments = packed(weight, Arguments::new().pointer(at(out.address))).i64(values as i64);
        // SAFETY: out holds all values of the weight in f32; codes and scales are those of the weight.
        unsafe { engine.launch(launch, &arguments) };
        tensor(out.tensor)
    })
}

/// See [`crate::Kernels::nf4_quantize`].
pub(super) fn quantize(values: Tensor<Cuda, 2>, double_quant: bool) -> Nf4Weight<Cuda> {
    let engine = engine(&values.device());
    let shape = values.dims();
    let (map, table) = (engine.tables.signed(), engine.tables.nf4());
    engine.section(|| {
        let values = engine.flat(values);
        let count = shape[0] * shape[1];
        let blocks = count.div_ceil(64);
        let codes = engine.empty([blocks * 32], DType::U8);
        let absmax = engine.empty([blocks], DType::F32);
        let name = match values.dtype {
            DType::BF16 => "nf4_quantize_bf16",
            DType::F16 => "nf4_quantize_f16",
            _ => "nf4_quantize_f32",
        };
        let arguments = Arguments::new()
            .pointer(at(address(&codes)))
            .pointer(at(address(&absmax)))
            .pointer(at(values.address))
            .i64(count as i64);
        let bytes = count * values.element_bytes() + count / 2;
        // SAFETY: codes hold half a byte and absmax an f32 for every block of 64 of the values, which are dense.
        unsafe { engine.launch(own(name, grid(count.div_ceil(4096), 256), bytes), &arguments) };
        let absmax = if double_quant { nest(&engine, &absmax, blocks, map) } else { Nf4Absmax::Float(tensor(absmax)) };
        Nf4Weight { codes: int_tensor(codes), absmax, table, shape, block_size: 64 }
    })
}

/// Block scales in 8 bits around their mean.
fn nest(engine: &Engine, absmax: &super::tensor::Primitive, blocks: usize, map: Tensor<Cuda, 1>) -> Nf4Absmax<Cuda> {
    let nested = blocks.div_ceil(256);
    let codes = engine.empty([nested * 256], DType::U8);
    let nested_absmax = engine.empty([nested], DType::F32);
    let offset = engine.empty([1], DType::F32);
    let parts = blocks.div_ceil(4096).min(1024);
    let partial = at(engine.scratch.take(Purpose::Partial, 1024 * 8));
    let (from, mean) = (at(address(absmax)), at(address(&offset)));
    let sum = Arguments::new().pointer(partial).pointer(from).i64(blocks as i64);
    let divide = Arguments::new().pointer(mean).pointer(partial).i32(parts as i32).i64(blocks as i64);
    let quantize = Arguments::new()
        .pointer(at(address(&codes)))
        .pointer(at(address(&nested_absmax)))
        .pointer(from)
        .pointer(mean)
        .pointer(at(address(&float(map.clone()))))
        .i64(blocks as i64);
    // SAFETY: the partial sums have room for 1024 f64; one code a block and one f32 for every 256; the map has 256 values.
    unsafe {
        engine.launch(own("absmax_sum", grid(parts, 256), blocks * 4), &sum);
        engine.launch(own("absmax_mean", grid(1, 256), parts * 8), &divide);
        engine.launch(own("absmax_quantize", grid(blocks.div_ceil(256), 256), blocks * 5), &quantize);
    }
    Nf4Absmax::Nested { codes: int_tensor(codes), absmax: tensor(nested_absmax), map, offset: tensor(offset), blocks }
}

/// A launch that does not depend on the format of activations.
fn own(name: &'static str, shape: LaunchShape, bytes: usize) -> Launch {
    Launch { source: Source::Nf4, dtype: DType::F32, name, shape, bytes }
}
