//! Parameters in bf16: how the f32 that an update computes becomes 16 bits.
//!
//! [`Rounding::Exact`] keeps all of the f32: its upper half, rounded to the nearest, is the parameter that GEMMs read, and its lower half is state of
//! the optimizer. Any number of steps then equals that many steps of a parameter in f32, bit for bit. Ties round away from zero: to even, a value
//! would have two ties with the same lower half.
//! [`Rounding::Stochastic`] keeps the upper half alone, and rounds up with the probability that the lower half says, so that updates far below a
//! rounding step count on average. The random bits are a hash of a key and the element's index: the same on any number of ranks and after resuming.
//! Trade-off: the bodies here go through host memory, since Burn has no operations on the bits of a float.

use burn_tensor::{DType, Int, IntDType, Tensor, TensorData, backend::Backend, bf16};

use super::{AdamW, AdamWState, OptimizerOps};
use crate::dtype::to_f32;
use crate::linear::dropout::random_bits;

/// How an update of a parameter in bf16 is rounded.
#[derive(Clone, Debug)]
pub enum Rounding<B: Backend> {
    /// Up or down at random, by the stream of this key ([`rounding_key`]).
    Stochastic(u64),
    /// To the nearest; the lower half of the f32 is kept: bytes of little-endian words, `[2 * elements]`, in the form of
    /// [`OptimizerOps::packed_codes`].
    Exact(Tensor<B, 1, Int>),
}

/// Returns the key of the random stream that rounds the update of a parameter in a step: a hash (FNV-1a) of all three.
pub fn rounding_key(seed: u64, step: u64, name: &str) -> u64 {
    let bytes = [seed, step].into_iter().flat_map(u64::to_le_bytes).chain(name.bytes());
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

/// Divides an f32 into its upper half, rounded to the nearest with ties away from zero, and its lower half. A NaN has no lower half.
fn halves(value: f32) -> [u16; 2] {
    let bits = value.to_bits();
    if value.is_nan() { [nan(bits), 0] } else { [(bits.wrapping_add(0x8000) >> 16) as u16, bits as u16] }
}

/// Undoes [`halves`]: a lower half from 0x8000 on had rounded the upper one up.
fn joined([upper, lower]: [u16; 2]) -> f32 {
    let upper = u32::from(upper).wrapping_sub(u32::from(lower >> 15));
    f32::from_bits((upper << 16) | u32::from(lower))
}

/// Returns the upper half of an f32, one step further from zero with a probability of its lower half over 65,536.
fn at_random(value: f32, key: u64, index: u64) -> u16 {
    let (bits, random) = (value.to_bits(), (random_bits(index / 2, key) >> (16 * (index % 2))) & 0xffff);
    if value.is_nan() { nan(bits) } else { (bits.wrapping_add(random) >> 16) as u16 }
}

/// Returns the upper half of a NaN, which stays one without its lower half.
fn nan(bits: u32) -> u16 {
    (bits >> 16) as u16 | 0x40
}

/// Returns the f32 that a parameter in bf16 stands for.
///
/// # Panics
/// If the parameter is not bf16, or has another number of lower halves.
pub fn widened<B: OptimizerOps>(parameter: Tensor<B, 1>, rounding: &Rounding<B>) -> Tensor<B, 1> {
    let Rounding::Exact(lower) = rounding else { return to_f32(parameter) };
    let device = parameter.device();
    let upper = parameter.into_data().to_vec::<bf16>().expect("a parameter with a lower half is bf16");
    let lower = B::unpacked_codes(lower.clone().cast(IntDType::I32).into_data());
    let lower = lower.as_chunks::<2>().0;
    assert_eq!(upper.len(), lower.len(), "a lower half per value");
    let join = |(upper, lower): (&bf16, &[u8; 2])| joined([upper.to_bits(), u16::from_le_bytes(*lower)]);
    let values: Vec<f32> = upper.iter().zip(lower).map(join).collect();
    let count = values.len();
    Tensor::from_data(TensorData::new(values, [count]), (&device, DType::F32))
}

/// Rounds the values of an update to bf16; an exact rounding gets their lower halves.
pub(crate) fn narrowed<B: OptimizerOps>(values: Tensor<B, 1>, rounding: Rounding<B>) -> (Tensor<B, 1>, Rounding<B>) {
    let device = values.device();
    let values = values.into_data().to_vec::<f32>().expect("an update computes f32");
    let (upper, rounding): (Vec<u16>, _) = match rounding {
        Rounding::Stochastic(key) => {
            let round = |(index, &value): (u64, &f32)| at_random(value, key, index);
            ((0..).zip(&values).map(round).collect(), Rounding::Stochastic(key))
        }
        Rounding::Exact(_) => {
            let (upper, lower): (Vec<u16>, Vec<u16>) =
                values.iter().map(|&value| halves(value)).map(|[upper, lower]| (upper, lower)).unzip();
            let lower = B::packed_codes(lower.into_iter().flat_map(u16::to_le_bytes).collect());
            let dtype = lower.dtype;
            (upper, Rounding::Exact(Tensor::from_data(lower, (&device, dtype))))
        }
    };
    let upper: Vec<bf16> = upper.into_iter().map(bf16::from_bits).collect();
    let count = upper.len();
    (Tensor::from_data(TensorData::new(upper, [count]), (&device, DType::BF16)), rounding)
}

/// Implements [`OptimizerOps::adamw_bf16_foreach`] by the backend's step in f32.
pub fn adamw_bf16_foreach<B: OptimizerOps>(
    states: Vec<(AdamWState<B>, Rounding<B>)>,
    gradients: Vec<Tensor<B, 1>>,
    gradient_scale: Tensor<B, 1>,
    hyper: &AdamW,
) -> Vec<(AdamWState<B>, Rounding<B>)> {
    let widen = |(AdamWState { parameter, moments }, rounding): (AdamWState<B>, Rounding<B>)| {
        (AdamWState { parameter: widened(parameter, &rounding), moments }, rounding)
    };
    let (states, roundings): (Vec<_>, Vec<_>) = states.into_iter().map(widen).unzip();
    let gradients = gradients.into_iter().map(to_f32).collect();
    let updated = B::adamw_foreach(states, gradients, gradient_scale, hyper);
    let round = |(AdamWState { parameter, moments }, rounding)| {
        let (parameter, rounding) = narrowed(parameter, rounding);
        (AdamWState { parameter, moments }, rounding)
    };
    updated.into_iter().zip(roundings).map(round).collect()
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;

    /// Values of every kind: zeros, subnormals, ties, the last before infinity, and others.
    fn values() -> Vec<f32> {
        let special = [0x0000_8000, 0x8000_8000, 0x3f80_8000, 0x3f81_8000, 0x3f80_7fff, 0x7f7f_ffff, 0x0000_0001];
        let special = special.into_iter().map(f32::from_bits);
        let others = (0..10_000u32).map(|index| f32::from_bits(index.wrapping_mul(0x9e37_79b9)));
        [0.0, -0.0, 1.0, f32::INFINITY, f32::NEG_INFINITY].into_iter().chain(special).chain(others).collect()
    }

    #[test]
    fn both_halves_are_the_value_and_the_upper_one_is_the_nearest() {
        for value in values().into_iter().filter(|value| !value.is_nan()) {
            let [upper, lower] = halves(value);
            assert_eq!(joined([upper, lower]).to_bits(), value.to_bits(), "{value:e}");
            let is_tie = value.to_bits() & 0xffff == 0x8000;
            let nearest = if is_tie { (value.to_bits() >> 16) as u16 + 1 } else { bf16::from_f32(value).to_bits() };
            assert_eq!(upper, nearest, "{value:e}");
        }
        for nan in [f32::NAN, f32::from_bits(0x7f80_0001), f32::from_bits(0xffff_ffff)] {
            assert!(bf16::from_bits(halves(nan)[0]).is_nan() && joined(halves(nan)).is_nan());
            assert!(bf16::from_bits(at_random(nan, 3, 1)).is_nan());
        }
    }

    #[test]
    fn values_of_16_bits_stay_and_others_are_rounded_to_a_neighbor_with_the_mean_of_the_value() {
        for value in values().into_iter().filter(|value| !value.is_nan()) {
            let exact = f32::from_bits(value.to_bits() & 0xffff_0000);
            let [same, near] = [exact, value].map(|value| at_random(value, 17, 5));
            assert_eq!(u32::from(same), exact.to_bits() >> 16);
            assert!([0, 1].contains(&(u32::from(near) - (value.to_bits() >> 16))), "{value:e}");
        }
        const COUNT: u64 = 1 << 18;
        for value in [1.0 + 1.0 / 1024.0, -3.0e-5_f32, 0.1, 7.003] {
            let round = |index| f64::from(bf16::from_bits(at_random(value, rounding_key(1, 2, "w"), index)).to_f32());
            let mean = (0..COUNT).map(round).sum::<f64>() / COUNT as f64;
            // Four standard deviations of the mean, where as many are rounded up as down.
            let step = f64::from(value.abs()) / 128.0;
            assert!((mean - f64::from(value)).abs() < 4e-3 * step, "{mean} of {value}");
        }
    }

    #[test]
    fn a_key_follows_from_seed_step_and_name() {
        let key = rounding_key(7, 3, "model.norm.weight");
        assert_eq!(key, rounding_key(7, 3, "model.norm.weight"));
        let others =
            [rounding_key(8, 3, "model.norm.weight"), rounding_key(7, 4, "model.norm.weight"), rounding_key(7, 3, "x")];
        let bits = |key| (0..64).map(|index| at_random(1.003, key, index)).collect::<Vec<_>>();
        assert!(others.into_iter().all(|other| bits(other) != bits(key)));
    }
}
