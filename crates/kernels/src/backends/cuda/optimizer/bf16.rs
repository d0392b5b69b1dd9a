//! Steps of parameters in bf16: their halves of 16 bits are read and written by the launch that updates them.
//!
//! Trade-off: tables of their own, because there are more pointers for each tensor, and adapters never are in bf16.

use burn_tensor::{DType, Tensor};
use bytemuck::{NoUninit, Zeroable};

use super::{Rates, eight_bit_rates, in_groups};
use crate::backends::cuda::device::Device;
use crate::backends::cuda::engine::{
    ADAMW_PIECE, BlockArguments, Cuda, MOMENT_BLOCK, MatrixView, NARROW_TENSORS, Primitive, Source, arguments, float,
    grid, int_tensor, tensor,
};
use crate::{AdamW, AdamWState, EightBitMoments, Moments, Rounding};

/// `NarrowTable` of `optimizer.cu`.
#[repr(C)]
#[derive(Clone, Copy, NoUninit, Zeroable)]
struct NarrowTable {
    upper: [u64; NARROW_TENSORS],
    lower: [u64; NARROW_TENSORS],
    key: [u64; NARROW_TENSORS],
    g: [u64; NARROW_TENSORS],
    m: [u64; NARROW_TENSORS],
    v: [u64; NARROW_TENSORS],
    n: [i64; NARROW_TENSORS],
    first_piece: [i32; NARROW_TENSORS],
    tensors: i32,
    unused: i32,
}

/// `NarrowEightBitTable` of `optimizer.cu`.
#[repr(C)]
#[derive(Clone, Copy, NoUninit, Zeroable)]
struct NarrowEightBitTable {
    upper: [u64; NARROW_TENSORS],
    lower: [u64; NARROW_TENSORS],
    key: [u64; NARROW_TENSORS],
    g: [u64; NARROW_TENSORS],
    m_codes: [u64; NARROW_TENSORS],
    m_absmax: [u64; NARROW_TENSORS],
    v_codes: [u64; NARROW_TENSORS],
    v_absmax: [u64; NARROW_TENSORS],
    n: [i32; NARROW_TENSORS],
    first_block: [i32; NARROW_TENSORS],
    tensors: i32,
    blocks: i32,
}

/// A parameter with its moments and its gradient.
type Operands<M> = (Narrow, M, MatrixView);
/// What an update returns.
type Updated = (AdamWState<Cuda>, Rounding<Cuda>);

/// A parameter whose halves a launch may write in place.
struct Narrow {
    upper: Primitive,
    /// `None`: rounded by the random stream of `key`.
    lower: Option<Primitive>,
    key: u64,
}

impl Narrow {
    fn new(device: &Device, parameter: Tensor<Cuda, 1>, rounding: Rounding<Cuda>, elements: usize) -> Self {
        let upper = device.owned(float(parameter));
        assert_eq!(
            (upper.dtype, device.view_of(upper.clone()).count()),
            (DType::BF16, elements),
            "a value per gradient"
        );
        let (lower, key) = match rounding {
            Rounding::Stochastic(key) => (None, key),
            Rounding::Exact(lower) => (Some(device.owned(lower.into_primitive())), 0),
        };
        Self { upper, lower, key }
    }

    /// Returns the addresses of both halves and the key, as a table has them.
    fn entry(&self, device: &Device) -> [u64; 3] {
        [device.address(&self.upper), self.lower.as_ref().map_or(0, |lower| device.address(lower)), self.key]
    }

    fn into_updated(self, moments: Moments<Cuda>) -> Updated {
        let rounding = match self.lower {
            None => Rounding::Stochastic(self.key),
            Some(lower) => Rounding::Exact(int_tensor(lower)),
        };
        (AdamWState { parameter: tensor(self.upper), moments }, rounding)
    }
}

/// Implements [`OptimizerOps::adamw_bf16_foreach`](crate::OptimizerOps::adamw_bf16_foreach).
pub(super) fn adamw_foreach(
    states: Vec<(AdamWState<Cuda>, Rounding<Cuda>)>,
    gradients: Vec<Tensor<Cuda, 1>>,
    scale: &Tensor<Cuda, 1>,
    hyper: &AdamW,
) -> Vec<Updated> {
    assert_eq!(states.len(), gradients.len(), "every parameter has a gradient");
    let device = Device::of(&scale.device());
    device.section(|| {
        let mut updated: Vec<Option<Updated>> = states.iter().map(|_| None).collect();
        let (mut in_f32, mut in_8_bits) = (Vec::new(), Vec::new());
        for (place, ((AdamWState { parameter, moments }, rounding), gradient)) in
            states.into_iter().zip(gradients).enumerate()
        {
            let gradient = device.flat(gradient);
            let narrow = Narrow::new(&device, parameter, rounding, gradient.count());
            match moments {
                Moments::F32 { first, second } => in_f32.push((place, (narrow, [first, second], gradient))),
                Moments::EightBit(moments) => in_8_bits.push((place, (narrow, *moments, gradient))),
            }
        }
        let (in_f32, in_8_bits) = ((in_f32, NARROW_TENSORS), (in_8_bits, NARROW_TENSORS));
        in_groups(&device, in_f32, &mut updated, |group| device.adamw_bf16_group(group, scale, hyper));
        in_groups(&device, in_8_bits, &mut updated, |group| device.adamw_8bit_bf16_group(group, scale, hyper));
        updated.into_iter().map(|state| state.expect("every state was updated")).collect()
    })
}

/// Returns the format of these gradients.
fn format_of<'a>(mut gradients: impl Iterator<Item = &'a MatrixView>) -> DType {
    let dtype = gradients.next().expect("a launch has a tensor").dtype;
    assert!([DType::F32, DType::BF16].contains(&dtype), "gradients are f32 or bf16, not {dtype:?}");
    assert!(gradients.all(|gradient| gradient.dtype == dtype), "gradients of one format");
    dtype
}

impl Device {
    /// Takes one AdamW step of up to [`NARROW_TENSORS`] parameters, in one launch.
    fn adamw_bf16_group(
        &self,
        group: &mut dyn Iterator<Item = Operands<[Tensor<Cuda, 1>; 2]>>,
        gradient_scale: &Tensor<Cuda, 1>,
        hyper: &AdamW,
    ) -> Vec<Updated> {
        let (mut table, scale) = (NarrowTable::zeroed(), self.flat(gradient_scale.clone()));
        let (mut pieces, mut values) = (0, 0);
        // Gradients are held until the launch is queued.
        let (mut updated, mut held) = (Vec::new(), Vec::new());
        for (index, (narrow, moments, gradient)) in group.enumerate() {
            let moments = moments.map(|values| self.owned(float(values)));
            [table.upper[index], table.lower[index], table.key[index]] = narrow.entry(self);
            [table.m[index], table.v[index]] = moments.each_ref().map(|values| self.address(values));
            table.g[index] = gradient.address;
            table.n[index] = gradient.count() as i64;
            table.first_piece[index] = pieces as i32;
            pieces += gradient.count().div_ceil(ADAMW_PIECE);
            values += gradient.count();
            let [first, second] = moments.map(tensor);
            updated.push(narrow.into_updated(Moments::F32 { first, second }));
            held.push(gradient);
        }
        table.tensors = updated.len() as i32;
        let rates = Rates::new(hyper, hyper.learning_rate / hyper.corrections().0, hyper.epsilon);
        let arguments = arguments! { table: value(&table), scale: rows(&scale), rates: value(&rates) };
        let dtype = format_of(held.iter());
        let launch = Source::Optimizer.launch(dtype, "adamw_bf16_foreach", grid(pieces, 256), values * 26);
        // SAFETY: the table lists tensors of `n` values that are held until the launch is queued: gradients of this format, f32 moments, and halves
        // of 16 bits; what is written is owned.
        unsafe { self.launch(launch, &arguments) };
        updated
    }

    /// Takes one 8-bit step of up to [`NARROW_TENSORS`] parameters, in one launch.
    fn adamw_8bit_bf16_group(
        &self,
        group: &mut dyn Iterator<Item = Operands<EightBitMoments<Cuda>>>,
        gradient_scale: &Tensor<Cuda, 1>,
        hyper: &AdamW,
    ) -> Vec<Updated> {
        let (mut table, scale) = (NarrowEightBitTable::zeroed(), self.flat(gradient_scale.clone()));
        let mut values = 0;
        // Gradients are held until the launch is queued.
        let (mut updated, mut held) = (Vec::new(), Vec::new());
        for (index, (narrow, moments, gradient)) in group.enumerate() {
            let EightBitMoments { first_codes, first_absmax, second_codes, second_absmax } = moments;
            let codes = [first_codes, second_codes].map(|codes| self.owned(codes.into_primitive()));
            let absmax = [first_absmax, second_absmax].map(|absmax| self.owned(float(absmax)));
            let count = gradient.count();
            [table.upper[index], table.lower[index], table.key[index]] = narrow.entry(self);
            table.g[index] = gradient.address;
            [table.m_codes[index], table.v_codes[index]] = codes.each_ref().map(|codes| self.address(codes));
            [table.m_absmax[index], table.v_absmax[index]] = absmax.each_ref().map(|absmax| self.address(absmax));
            table.n[index] = i32::try_from(count).expect("a parameter has fewer than 2^31 values");
            table.first_block[index] = table.blocks;
            table.blocks += count.div_ceil(MOMENT_BLOCK) as i32;
            values += count;
            let ([first_codes, second_codes], [first_absmax, second_absmax]) =
                (codes.map(int_tensor), absmax.map(tensor));
            let moments = EightBitMoments { first_codes, first_absmax, second_codes, second_absmax };
            updated.push(narrow.into_updated(Moments::EightBit(Box::new(moments))));
            held.push(gradient);
        }
        table.tensors = updated.len() as i32;
        let maps = [self.tables.signed(), self.tables.unsigned()].map(|map| self.flat(map));
        let arguments = arguments! {
            table: value(&table), map_signed: address(maps[0].address), map_unsigned: address(maps[1].address),
            scale: rows(&scale), rates: value(&eight_bit_rates(hyper)),
        };
        let blocks = (table.blocks as usize).div_ceil(16).min(2 * self.multiprocessors);
        let dtype = format_of(held.iter());
        let launch = Source::Optimizer.launch(dtype, "adamw_8bit_bf16_foreach", grid(blocks, 512), values * 14);
        // SAFETY: the table lists tensors that are held until the launch is queued: gradients of this format, halves of 16 bits, and whole blocks of
        // codes with one f32 each; what is written is owned.
        unsafe { self.launch(launch, &arguments) };
        updated
    }
}
