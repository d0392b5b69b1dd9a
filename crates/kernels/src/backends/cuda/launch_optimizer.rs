//! Launches of the optimizer: the global norm, AdamW, and AdamW with moments in 8 bits.

#![allow(unsafe_code, reason = "launching device work is unsafe; the launch files are where it is answered for")]

use burn_tensor::{DType, Tensor};
use firebrick_cuda::{Arguments, LaunchShape};

use super::Cuda;
use super::engine::{Engine, engine};
use super::launch::Launch;
use super::launch_rows::{at, grid};
use super::program::Source;
use super::scratch::Purpose;
use super::tensor::{Primitive, address, float, int_tensor, tensor};
use crate::{AdamW, EightBitMoments, EightBitUpdate};

/// Tensors of one launch, as `optimizer.cu` has it.
const MANY: usize = 64;
/// Values that one block of the norm sums.
const NORM_PIECE: usize = 16_384;

/// `NormTable` of `optimizer.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct NormTable {
    x: [u64; MANY],
    n: [i64; MANY],
    first_piece: [i32; MANY],
    tensors: i32,
}

/// `Rates` of `optimizer.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Rates {
    beta1: f32,
    rest1: f32,
    beta2: f32,
    rest2: f32,
    step_size: f32,
    kept: f32,
    epsilon: f32,
    root_correction: f32,
}

/// Bias corrections `1 - beta1^t` and `sqrt(1 - beta2^t)`.
fn corrections(hyper: &AdamW) -> (f64, f64) {
    let after = |beta: f64| 1.0 - beta.powf(hyper.step as f64);
    (after(hyper.beta1), after(hyper.beta2).sqrt())
}

impl Rates {
    fn new(hyper: &AdamW, step_size: f64, epsilon: f64) -> Self {
        Self {
            beta1: hyper.beta1 as f32,
            rest1: (1.0 - hyper.beta1) as f32,
            beta2: hyper.beta2 as f32,
            rest2: (1.0 - hyper.beta2) as f32,
            step_size: step_size as f32,
            kept: (1.0 - hyper.learning_rate * hyper.weight_decay) as f32,
            epsilon: epsilon as f32,
            root_correction: corrections(hyper).1 as f32,
        }
    }
}

/// See [`crate::Kernels::squared_norm`].
pub(super) fn squared_norm(tensors: &[Tensor<Cuda, 1>]) -> Tensor<Cuda, 1> {
    let engine = engine(&tensors[0].device());
    engine.section(|| {
        let pieces: usize = tensors.iter().map(|values| values.dims()[0].div_ceil(NORM_PIECE)).sum();
        let partial = engine.scratch.take(Purpose::Partial, pieces * 4);
        let mut first = 0;
        for group in tensors.chunks(MANY) {
            first += norm_of_some(&engine, group, partial, first);
        }
        let out = engine.empty([1], DType::F32);
        let sum = Arguments::new().pointer(at(address(&out))).pointer(at(partial)).i32(pieces as i32);
        // SAFETY: the partial sums were all written above; out is one f32.
        unsafe { engine.launch(own("sum_partials", grid(1, 1024), pieces * 4), &sum) };
        tensor(out)
    })
}

/// Partial sums of up to [`MANY`] tensors; how many there were.
fn norm_of_some(engine: &Engine, group: &[Tensor<Cuda, 1>], partial: u64, first: usize) -> usize {
    let mut table = NormTable { x: [0; MANY], n: [0; MANY], first_piece: [0; MANY], tensors: group.len() as i32 };
    let (mut pieces, mut values) = (0, 0);
    for (index, values_of_one) in group.iter().enumerate() {
        let matrix = engine.flat(values_of_one.clone());
        assert_eq!(matrix.dtype, DType::F32, "gradients are f32");
        table.x[index] = matrix.address;
        table.n[index] = matrix.width as i64;
        table.first_piece[index] = pieces as i32;
        pieces += matrix.width.div_ceil(NORM_PIECE);
        values += matrix.width;
    }
    let arguments = Arguments::new().pointer(at(partial)).i32(first as i32).value(&table);
    // SAFETY: the table lists f32 tensors that the caller holds; the partial sums have room behind `first`.
    unsafe { engine.launch(own("squared_norm_partial", grid(pieces, 256), values * 4), &arguments) };
    pieces
}

/// See [`crate::Kernels::adamw`].
pub(super) fn adamw(
    parameter: Tensor<Cuda, 1>,
    gradient: Tensor<Cuda, 1>,
    moments: (Tensor<Cuda, 1>, Tensor<Cuda, 1>),
    gradient_scale: Tensor<Cuda, 1>,
    hyper: &AdamW,
) -> (Tensor<Cuda, 1>, (Tensor<Cuda, 1>, Tensor<Cuda, 1>)) {
    let engine = engine(&parameter.device());
    let count = parameter.dims()[0];
    let rates = Rates::new(hyper, hyper.learning_rate / corrections(hyper).0, hyper.epsilon);
    engine.section(|| {
        let gradient = engine.flat(gradient);
        let [p, m, v] = [parameter, moments.0, moments.1].map(|values| engine.owned(float(values)));
        let scale = engine.flat(gradient_scale);
        let arguments = Arguments::new()
            .pointer(at(address(&p)))
            .pointer(at(gradient.address))
            .pointer(at(address(&m)))
            .pointer(at(address(&v)))
            .pointer(at(scale.address))
            .value(&rates)
            .i64(count as i64);
        // SAFETY: four f32 tensors of `count` values, three of them owned here, and a scale of one value.
        unsafe { engine.launch(own("adamw", grid(count.div_ceil(2048), 256), count * 28), &arguments) };
        (tensor(p), (tensor(m), tensor(v)))
    })
}

/// `EightBitTable` of `optimizer.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct EightBitTable {
    p: [u64; MANY],
    g: [u64; MANY],
    m_codes: [u64; MANY],
    m_absmax: [u64; MANY],
    v_codes: [u64; MANY],
    v_absmax: [u64; MANY],
    n: [i32; MANY],
    first_block: [i32; MANY],
    tensors: i32,
    blocks: i32,
}

/// Values that share a scale.
const MOMENT_BLOCK: usize = 256;

/// Parameter and moments that a launch may write in place.
struct Owned {
    parameter: Primitive,
    codes: [Primitive; 2],
    absmax: [Primitive; 2],
}

impl Owned {
    fn new(engine: &Engine, parameter: Tensor<Cuda, 1>, moments: EightBitMoments<Cuda>) -> Self {
        Self {
            parameter: engine.owned(float(parameter)),
            codes: [moments.first_codes, moments.second_codes].map(|codes| engine.owned(codes.into_primitive())),
            absmax: [moments.first_absmax, moments.second_absmax].map(|absmax| engine.owned(float(absmax))),
        }
    }

    fn into_tensors(self) -> (Tensor<Cuda, 1>, EightBitMoments<Cuda>) {
        let [first_codes, second_codes] = self.codes.map(int_tensor);
        let [first_absmax, second_absmax] = self.absmax.map(tensor);
        (tensor(self.parameter), EightBitMoments { first_codes, first_absmax, second_codes, second_absmax })
    }
}

/// The numbers of a step in 8 bits, where the corrections are folded into rate and epsilon.
fn eight_bit_rates(hyper: &AdamW) -> Rates {
    let (first, root) = corrections(hyper);
    Rates::new(hyper, hyper.learning_rate * root / first, root * hyper.epsilon)
}

/// See [`crate::Kernels::adamw_8bit`].
pub(super) fn adamw_8bit(
    parameter: Tensor<Cuda, 1>,
    gradient: Tensor<Cuda, 1>,
    moments: EightBitMoments<Cuda>,
    gradient_scale: Tensor<Cuda, 1>,
    hyper: &AdamW,
) -> (Tensor<Cuda, 1>, EightBitMoments<Cuda>) {
    let engine = engine(&parameter.device());
    let count = parameter.dims()[0];
    let rates = eight_bit_rates(hyper);
    let (signed, unsigned) = (engine.tables.signed(), engine.tables.unsigned());
    engine.section(|| {
        let gradient = engine.flat(gradient);
        let scale = engine.flat(gradient_scale);
        let owned = Owned::new(&engine, parameter, moments);
        let arguments = Arguments::new()
            .pointer(at(address(&owned.parameter)))
            .pointer(at(gradient.address))
            .pointer(at(address(&owned.codes[0])))
            .pointer(at(address(&owned.absmax[0])))
            .pointer(at(address(&owned.codes[1])))
            .pointer(at(address(&owned.absmax[1])))
            .pointer(at(address(&float(signed))))
            .pointer(at(address(&float(unsigned))))
            .pointer(at(scale.address))
            .value(&rates)
            .i64(count as i64);
        let blocks = count.div_ceil(4096).min(2 * engine.multiprocessors());
        // SAFETY: parameter and gradient have `count` f32, the moments whole blocks of 256 codes with one f32 each; the maps
        // have 256 values; all that is written is owned here.
        unsafe { engine.launch(own("adamw_8bit", grid(blocks, 512), count * 16), &arguments) };
        owned.into_tensors()
    })
}

/// See [`crate::Kernels::adamw_8bit_many`].
pub(super) fn adamw_8bit_many(
    updates: Vec<EightBitUpdate<Cuda>>,
    gradient_scale: Tensor<Cuda, 1>,
    hyper: &AdamW,
) -> Vec<(Tensor<Cuda, 1>, EightBitMoments<Cuda>)> {
    let engine = engine(&gradient_scale.device());
    let mut updates = updates.into_iter().peekable();
    let mut updated = Vec::with_capacity(updates.len());
    engine.section(|| {
        while updates.peek().is_some() {
            let group: Vec<_> = updates.by_ref().take(MANY).collect();
            updated.extend(some_in_8_bits(&engine, group, &gradient_scale, hyper));
        }
    });
    updated
}

/// One step of up to [`MANY`] parameters, in one launch.
fn some_in_8_bits(
    engine: &Engine,
    group: Vec<EightBitUpdate<Cuda>>,
    gradient_scale: &Tensor<Cuda, 1>,
    hyper: &AdamW,
) -> Vec<(Tensor<Cuda, 1>, EightBitMoments<Cuda>)> {
    let none = [0; MANY];
    let mut table = EightBitTable {
        p: none,
        g: none,
        m_codes: none,
        m_absmax: none,
        v_codes: none,
        v_absmax: none,
        n: [0; MANY],
        first_block: [0; MANY],
        tensors: group.len() as i32,
        blocks: 0,
    };
    let mut values = 0;
    let mut held = Vec::with_capacity(group.len());
    for (index, update) in group.into_iter().enumerate() {
        let gradient = engine.flat(update.gradient);
        let count = gradient.rows * gradient.width;
        let owned = Owned::new(engine, update.parameter, update.moments);
        table.p[index] = address(&owned.parameter);
        table.g[index] = gradient.address;
        [table.m_codes[index], table.v_codes[index]] = [0, 1].map(|moment| address(&owned.codes[moment]));
        [table.m_absmax[index], table.v_absmax[index]] = [0, 1].map(|moment| address(&owned.absmax[moment]));
        table.n[index] = i32::try_from(count).expect("a parameter has fewer than 2^31 values");
        table.first_block[index] = table.blocks;
        table.blocks += count.div_ceil(MOMENT_BLOCK) as i32;
        values += count;
        held.push((owned, gradient));
    }
    let (signed, unsigned) = (engine.tables.signed(), engine.tables.unsigned());
    let scale = engine.flat(gradient_scale.clone());
    let arguments = Arguments::new()
        .value(&table)
        .pointer(at(address(&float(signed))))
        .pointer(at(address(&float(unsigned))))
        .pointer(at(scale.address))
        .value(&eight_bit_rates(hyper));
    let blocks = (table.blocks as usize).div_ceil(16).min(2 * engine.multiprocessors());
    // SAFETY: the table lists tensors that are held until the launch is queued: f32 values with their gradients, and whole
    // blocks of codes with one f32 each; what is written is owned here.
    unsafe { engine.launch(own("adamw_8bit_many", grid(blocks, 512), values * 16), &arguments) };
    held.into_iter().map(|(owned, _)| owned.into_tensors()).collect()
}

/// A launch that does not depend on the format of activations.
fn own(name: &'static str, shape: LaunchShape, bytes: usize) -> Launch {
    Launch { source: Source::Optimizer, dtype: DType::F32, name, shape, bytes }
}
