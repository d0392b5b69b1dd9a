//! Steps of parameters in bf16: their halves of 16 bits are read and written by the launch that updates them.
//!
//! Trade-off: tables of their own, because there are more pointers for each tensor, and adapters never are in bf16.

use burn_tensor::{DType, Tensor};
use bytemuck::{NoUninit, Zeroable};

use super::{OwnedMoments, Rates, eight_bit_rates, in_groups};
use crate::backends::cuda::device::Device;
use crate::backends::cuda::engine::{
    ADAMW_PIECE, BlockArguments, Cuda, MOMENT_BLOCK, MatrixView, NARROW_TENSORS, Primitive, Source, arguments, float,
    grid, int_tensor, tensor,
};
use crate::{AdamW, AdamWState, Moments, Rounding};

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
                Moments::EightBit(moments) => in_8_bits.push((place, (narrow, moments, gradient))),
            }
        }
        let (in_f32, in_8_bits) = ((in_f32, NARROW_TENSORS), (in_8_bits, NARROW_TENSORS));
        in_groups(&device, in_f32, &mut updated, |group| {
            let (mut table, scale) = (NarrowTable::zeroed(), device.flat(scale.clone()));
            let (mut pieces, mut values) = (0, 0);
            // Gradients are held until the launch is queued.
            let (mut updated, mut held) = (Vec::new(), Vec::new());
            for (index, (narrow, moments, gradient)) in group.enumerate() {
                let moments = moments.map(|values| device.owned(float(values)));
                [table.upper[index], table.lower[index], table.key[index]] = narrow.entry(&device);
                [table.m[index], table.v[index]] = moments.each_ref().map(|values| device.address(values));
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
            unsafe { device.launch(launch, &arguments) };
            updated
        });
        in_groups(&device, in_8_bits, &mut updated, |group| {
            let (mut table, scale) = (NarrowEightBitTable::zeroed(), device.flat(scale.clone()));
            let mut values = 0;
            // Gradients are held until the launch is queued.
            let (mut updated, mut held) = (Vec::new(), Vec::new());
            for (index, (narrow, moments, gradient)) in group.enumerate() {
                let owned = OwnedMoments::new(&device, *moments);
                let count = gradient.count();
                [table.upper[index], table.lower[index], table.key[index]] = narrow.entry(&device);
                table.g[index] = gradient.address;
                [table.m_codes[index], table.v_codes[index]] =
                    owned.codes.each_ref().map(|codes| device.address(codes));
                [table.m_absmax[index], table.v_absmax[index]] =
                    owned.absmax.each_ref().map(|absmax| device.address(absmax));
                table.n[index] = i32::try_from(count).expect("a parameter has fewer than 2^31 values");
                table.first_block[index] = table.blocks;
                table.blocks += count.div_ceil(MOMENT_BLOCK) as i32;
                values += count;
                updated.push(narrow.into_updated(owned.into_moments()));
                held.push(gradient);
            }
            table.tensors = updated.len() as i32;
            let maps = [device.tables.signed(), device.tables.unsigned()].map(|map| device.flat(map));
            let arguments = arguments! {
                table: value(&table), map_signed: address(maps[0].address), map_unsigned: address(maps[1].address),
                scale: rows(&scale), rates: value(&eight_bit_rates(hyper)),
            };
            let blocks = (table.blocks as usize).div_ceil(16).min(2 * device.multiprocessors);
            let dtype = format_of(held.iter());
            let launch = Source::Optimizer.launch(dtype, "adamw_8bit_bf16_foreach", grid(blocks, 512), values * 14);
            // SAFETY: the table lists tensors that are held until the launch is queued: gradients of this format, halves of 16 bits, and whole blocks of
            // codes with one f32 each; what is written is owned.
            unsafe { device.launch(launch, &arguments) };
            updated
        });
        updated.into_iter().map(|state| state.expect("every state was updated")).collect()
    })
}

fn format_of<'a>(mut gradients: impl Iterator<Item = &'a MatrixView>) -> DType {
    let dtype = gradients.next().expect("a launch has a tensor").dtype;
    assert!([DType::F32, DType::BF16].contains(&dtype), "gradients are f32 or bf16, not {dtype:?}");
    assert!(gradients.all(|gradient| gradient.dtype == dtype), "gradients of one format");
    dtype
}
