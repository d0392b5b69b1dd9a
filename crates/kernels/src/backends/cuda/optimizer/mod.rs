//! The optimizer on CUDA: the global norm, AdamW, and AdamW with moments in 8 bits; `bf16.rs` has parameters in bf16. Kernels: `optimizer.cu`.
//!
//! Adapters are hundreds of small tensors, so a launch takes up to 64 of them. Parameters and moments are updated in
//! place if their memory is not shared.
//! Not supported: parameters of 2^31 elements or more.

mod bf16;

use burn_tensor::{DType, Tensor};
use bytemuck::{NoUninit, Zeroable};
use firebrick_cuda::LaunchShape;

use crate::backends::cuda::device::{Device, in_section};
use crate::backends::cuda::engine::{
    ADAMW_PIECE, BlockArguments, Cuda, Launch, MAX_TENSORS, MOMENT_BLOCK, MatrixView, NORM_PIECE, Primitive,
    RANGE_PIECE, ScratchSlot, Source, arguments, float, grid, int_tensor, tensor,
};
use crate::{AdamW, AdamWState, EightBitMoments, Moments, OptimizerOps, RangeGradient, Rounding};

/// `NormTable` of `optimizer.cu`.
#[repr(C)]
#[derive(Clone, Copy, NoUninit, Zeroable)]
struct NormTable {
    x: [u64; MAX_TENSORS],
    n: [i64; MAX_TENSORS],
    first_piece: [i32; MAX_TENSORS],
    tensors: i32,
    unused: i32,
}

/// `RangesTable` of `optimizer.cu`.
#[repr(C)]
#[derive(Clone, Copy, NoUninit, Zeroable)]
struct RangesTable {
    to: [u64; MAX_TENSORS],
    from: [u64; MAX_TENSORS],
    n: [i64; MAX_TENSORS],
    first_piece: [i32; MAX_TENSORS],
    tensors: i32,
    adds: [u8; MAX_TENSORS],
    unused: i32,
}

/// `AdamWTable` of `optimizer.cu`.
#[repr(C)]
#[derive(Clone, Copy, NoUninit, Zeroable)]
struct AdamWTable {
    p: [u64; MAX_TENSORS],
    g: [u64; MAX_TENSORS],
    m: [u64; MAX_TENSORS],
    v: [u64; MAX_TENSORS],
    n: [i64; MAX_TENSORS],
    first_piece: [i32; MAX_TENSORS],
    tensors: i32,
    unused: i32,
}

/// `EightBitTable` of `optimizer.cu`.
#[repr(C)]
#[derive(Clone, Copy, NoUninit, Zeroable)]
struct EightBitTable {
    p: [u64; MAX_TENSORS],
    g: [u64; MAX_TENSORS],
    m_codes: [u64; MAX_TENSORS],
    m_absmax: [u64; MAX_TENSORS],
    v_codes: [u64; MAX_TENSORS],
    v_absmax: [u64; MAX_TENSORS],
    n: [i32; MAX_TENSORS],
    first_block: [i32; MAX_TENSORS],
    tensors: i32,
    blocks: i32,
}

/// `Rates` of `optimizer.cu`.
#[repr(C)]
#[derive(Clone, Copy, NoUninit)]
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
            root_correction: hyper.corrections().1 as f32,
        }
    }
}

impl OptimizerOps for Cuda {
    fn accumulate(sum: Tensor<Self, 1>, gradient: Tensor<Self, 1>) -> Tensor<Self, 1> {
        in_section(&sum.device(), |device| {
            let gradient = device.flat(gradient);
            let sum = device.view_of(device.owned(float(sum)));
            device.add_to(sum.block, gradient.block);
            tensor(sum.tensor)
        })
    }

    fn accumulate_ranges(
        sum: Option<Tensor<Self, 1>>,
        length: usize,
        gradients: Vec<RangeGradient<Self>>,
    ) -> Tensor<Self, 1> {
        in_section(&gradients[0].gradient.device(), |device| {
            let sum = match sum {
                Some(sum) => device.view_of(device.owned(float(sum))),
                None => device.view_of(device.empty([length], DType::F32)),
            };
            assert_eq!((sum.dtype, sum.count()), (DType::F32, length), "a sum is f32, of the length of its ranges");
            gradients.chunks(MAX_TENSORS).for_each(|group| device.add_to_ranges(&sum, group));
            tensor(sum.tensor)
        })
    }

    fn squared_norm(tensors: &[Tensor<Self, 1>]) -> Tensor<Self, 1> {
        in_section(&tensors[0].device(), |device| {
            let pieces: usize = tensors.iter().map(|values| values.dims()[0].div_ceil(NORM_PIECE)).sum();
            let partial = device.scratch.take(ScratchSlot::Partial, pieces * 4);
            let mut first = 0;
            let (wide, narrow): (Vec<_>, Vec<_>) = tensors.iter().partition(|values| values.dtype() == DType::F32);
            for group in wide.chunks(MAX_TENSORS).chain(narrow.chunks(MAX_TENSORS)) {
                first += device.partial_norms(group, partial, first);
            }
            let out = device.empty([1], DType::F32);
            let sum = arguments! { out: address(device.address(&out)), partial: address(partial), count: int(pieces) };
            // SAFETY: the partial sums were all written above; out is one f32.
            unsafe { device.launch(plain("sum_partials", grid(1, 1024), pieces * 4), &sum) };
            tensor(out)
        })
    }

    fn clip(squared_norm: Tensor<Self, 1>, max_norm: f64, limit: f32) -> (Tensor<Self, 1>, Tensor<Self, 1>) {
        in_section(&squared_norm.device(), |device| {
            let squared_norm = device.f32_values(squared_norm);
            let [norm, factor] = [0, 1].map(|_: usize| device.empty([1], DType::F32));
            let arguments = arguments! {
                norm: address(device.address(&norm)), factor: address(device.address(&factor)),
                squared_norm: rows(&squared_norm), max_norm: float(max_norm), limit: float(f64::from(limit)),
            };
            // SAFETY: all three are one f32.
            unsafe { device.launch(plain("clip", grid(1, 1), 12), &arguments) };
            (tensor(norm), tensor(factor))
        })
    }

    fn adamw_foreach(
        states: Vec<AdamWState<Self>>,
        gradients: Vec<Tensor<Self, 1>>,
        gradient_scale: Tensor<Self, 1>,
        hyper: &AdamW,
    ) -> Vec<AdamWState<Self>> {
        assert_eq!(states.len(), gradients.len(), "every parameter has a gradient");
        let device = Device::of(&gradient_scale.device());
        let mut updated: Vec<Option<AdamWState<Self>>> = states.iter().map(|_| None).collect();
        let (mut in_f32, mut in_8_bits) = (Vec::new(), Vec::new());
        for (place, (AdamWState { parameter, moments }, gradient)) in states.into_iter().zip(gradients).enumerate() {
            match moments {
                Moments::F32 { first, second } => in_f32.push((place, (parameter, [first, second], gradient))),
                Moments::EightBit(moments) => in_8_bits.push((place, (parameter, moments, gradient))),
            }
        }
        let (in_f32, in_8_bits) = ((in_f32, MAX_TENSORS), (in_8_bits, MAX_TENSORS));
        in_groups(&device, in_f32, &mut updated, |group| {
            let (mut table, scale) = (AdamWTable::zeroed(), device.flat(gradient_scale.clone()));
            let (mut pieces, mut values) = (0, 0);
            // Gradients are held until the launch is queued.
            let (mut updated, mut held) = (Vec::new(), Vec::new());
            for (index, (parameter, [first, second], gradient)) in group.enumerate() {
                let gradient = device.f32_values(gradient);
                let owned = [parameter, first, second].map(|values| device.owned(float(values)));
                [table.p[index], table.m[index], table.v[index]] =
                    owned.each_ref().map(|values| device.address(values));
                table.g[index] = gradient.address;
                table.n[index] = gradient.width as i64;
                table.first_piece[index] = pieces as i32;
                pieces += gradient.width.div_ceil(ADAMW_PIECE);
                values += gradient.width;
                let [parameter, first, second] = owned.map(tensor);
                updated.push(AdamWState { parameter, moments: Moments::F32 { first, second } });
                held.push(gradient);
            }
            table.tensors = updated.len() as i32;
            let rates = Rates::new(hyper, hyper.learning_rate / hyper.corrections().0, hyper.epsilon);
            let arguments = arguments! { table: value(&table), scale: rows(&scale), rates: value(&rates) };
            // SAFETY: the table lists f32 tensors of `n` values that are held until the launch is queued; what is written is owned.
            unsafe { device.launch(plain("adamw_foreach", grid(pieces, 256), values * 28), &arguments) };
            updated
        });
        in_groups(&device, in_8_bits, &mut updated, |group| {
            let (mut table, scale) = (EightBitTable::zeroed(), device.flat(gradient_scale.clone()));
            let mut values = 0;
            // Gradients are held until the launch is queued.
            let (mut updated, mut held) = (Vec::new(), Vec::new());
            for (index, (parameter, moments, gradient)) in group.enumerate() {
                let gradient = device.f32_values(gradient);
                let count = gradient.width;
                let (owned, parameter) = (OwnedMoments::new(&device, *moments), device.owned(float(parameter)));
                table.p[index] = device.address(&parameter);
                table.g[index] = gradient.address;
                [table.m_codes[index], table.v_codes[index]] =
                    owned.codes.each_ref().map(|codes| device.address(codes));
                [table.m_absmax[index], table.v_absmax[index]] =
                    owned.absmax.each_ref().map(|absmax| device.address(absmax));
                table.n[index] = i32::try_from(count).expect("a parameter has fewer than 2^31 values");
                table.first_block[index] = table.blocks;
                table.blocks += count.div_ceil(MOMENT_BLOCK) as i32;
                values += count;
                updated.push(AdamWState { parameter: tensor(parameter), moments: owned.into_moments() });
                held.push(gradient);
            }
            table.tensors = updated.len() as i32;
            let maps = [device.tables.signed(), device.tables.unsigned()].map(|map| device.flat(map));
            let arguments = arguments! {
                table: value(&table), map_signed: address(maps[0].address), map_unsigned: address(maps[1].address),
                scale: rows(&scale), rates: value(&eight_bit_rates(hyper)),
            };
            let blocks = (table.blocks as usize).div_ceil(16).min(2 * device.multiprocessors);
            // SAFETY: the table lists tensors that are held until the launch is queued: f32 values with their gradients, and whole
            // blocks of codes with one f32 each; what is written is owned.
            unsafe { device.launch(plain("adamw_8bit_foreach", grid(blocks, 512), values * 16), &arguments) };
            updated
        });
        updated.into_iter().map(|state| state.expect("every state was updated")).collect()
    }

    fn adamw_bf16_foreach(
        states: Vec<(AdamWState<Self>, Rounding<Self>)>,
        gradients: Vec<Tensor<Self, 1>>,
        gradient_scale: Tensor<Self, 1>,
        hyper: &AdamW,
    ) -> Vec<(AdamWState<Self>, Rounding<Self>)> {
        bf16::adamw_foreach(states, gradients, &gradient_scale, hyper)
    }
}

/// Updates states, some at a time, and stores them at their indices.
fn in_groups<S, R>(
    device: &Device,
    (states, most): (Vec<(usize, S)>, usize),
    updated: &mut [Option<R>],
    update: impl Fn(&mut dyn Iterator<Item = S>) -> Vec<R>,
) {
    if states.is_empty() {
        return;
    }
    let (places, states): (Vec<usize>, Vec<S>) = states.into_iter().unzip();
    device.section(|| {
        let (mut places, mut remaining) = (places.into_iter(), states.into_iter().peekable());
        while remaining.peek().is_some() {
            let group = update(&mut remaining.by_ref().take(most));
            group.into_iter().zip(places.by_ref()).for_each(|(state, place)| updated[place] = Some(state));
        }
    });
}

/// Describes a launch over values in f32.
fn plain(name: &'static str, shape: LaunchShape, bytes: usize) -> Launch {
    Source::Optimizer.launch(DType::F32, name, shape, bytes)
}

impl Device {
    /// Computes partial sums of squares of up to [`MAX_TENSORS`] tensors of one format; returns their number.
    fn partial_norms(&self, group: &[&Tensor<Cuda, 1>], partial: u64, first: usize) -> usize {
        let mut table = NormTable { tensors: group.len() as i32, ..NormTable::zeroed() };
        let (mut pieces, mut values) = (0, 0);
        let held: Vec<_> = group.iter().map(|&values| self.flat(values.clone())).collect();
        let dtype = held[0].dtype;
        for (index, matrix) in held.iter().enumerate() {
            assert_eq!(matrix.dtype, dtype, "tensors of one format");
            table.x[index] = matrix.address;
            table.n[index] = matrix.width as i64;
            table.first_piece[index] = pieces as i32;
            pieces += matrix.width.div_ceil(NORM_PIECE);
            values += matrix.width;
        }
        let arguments = arguments! { partial: address(partial), first_partial: int(first), table: value(&table) };
        let (shape, bytes) = (grid(pieces, 256), values * dtype.size());
        // SAFETY: the table lists tensors of this format that are held here; the partial sums have room from `first` on.
        unsafe { self.launch(Source::Optimizer.launch(dtype, "squared_norm_partial", shape, bytes), &arguments) };
        pieces
    }

    /// Writes or adds up to [`MAX_TENSORS`] gradients to their ranges, in one launch.
    fn add_to_ranges(&self, sum: &MatrixView, group: &[RangeGradient<Cuda>]) {
        let mut table = RangesTable { tensors: group.len() as i32, ..RangesTable::zeroed() };
        let held: Vec<_> = group.iter().map(|range| self.f32_values(range.gradient.clone())).collect();
        let (mut pieces, mut values) = (0, 0);
        for (index, (range, gradient)) in group.iter().zip(&held).enumerate() {
            assert!(range.start + gradient.width <= sum.count(), "a range lies in its sum");
            table.to[index] = sum.address + 4 * range.start as u64;
            table.from[index] = gradient.address;
            table.n[index] = gradient.width as i64;
            table.first_piece[index] = pieces as i32;
            table.adds[index] = u8::from(!range.is_first);
            pieces += gradient.width.div_ceil(RANGE_PIECE);
            values += gradient.width;
        }
        let launch = plain("accumulate_ranges", grid(pieces, 256), values * 12);
        // SAFETY: the table lists f32 gradients that are held until the launch is queued, and as many values of the sum, which is owned,
        // in ranges that are disjoint.
        unsafe { self.launch(launch, &arguments! { table: value(&table) }) };
    }

    fn f32_values(&self, values: Tensor<Cuda, 1>) -> MatrixView {
        let matrix = self.flat(values);
        assert_eq!(matrix.dtype, DType::F32, "gradients and optimizer state are f32");
        matrix
    }
}

/// Moments that a launch may write in place.
struct OwnedMoments {
    codes: [Primitive; 2],
    absmax: [Primitive; 2],
}

impl OwnedMoments {
    fn new(device: &Device, moments: EightBitMoments<Cuda>) -> Self {
        Self {
            codes: [moments.first_codes, moments.second_codes].map(|codes| device.owned(codes.into_primitive())),
            absmax: [moments.first_absmax, moments.second_absmax].map(|absmax| device.owned(float(absmax))),
        }
    }

    fn into_moments(self) -> Moments<Cuda> {
        let [first_codes, second_codes] = self.codes.map(int_tensor);
        let [first_absmax, second_absmax] = self.absmax.map(tensor);
        Moments::EightBit(Box::new(EightBitMoments { first_codes, first_absmax, second_codes, second_absmax }))
    }
}

/// Returns the rates of an 8-bit step, with the bias corrections folded into the learning rate and epsilon.
fn eight_bit_rates(hyper: &AdamW) -> Rates {
    let (first, root) = hyper.corrections();
    Rates::new(hyper, hyper.learning_rate * root / first, root * hyper.epsilon)
}
