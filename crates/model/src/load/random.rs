//! Random numbers that a model starts from: the same for a seed and a name on every machine.
//!
//! Trade-off: the numbers of one name come from one thread.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// A random stream of its own for each seed and name (FNV-1a of the name; another hash would change what a
/// seed gives).
pub(super) fn stream(seed: u64, name: &str) -> ChaCha8Rng {
    let hash = name
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3));
    ChaCha8Rng::seed_from_u64(seed ^ hash)
}

/// Normal random numbers by the Box-Muller transform.
pub(super) fn normal(elements: usize, deviation: f32, random: &mut ChaCha8Rng) -> Vec<f32> {
    let mut values = Vec::with_capacity(elements + 1);
    while values.len() < elements {
        // 1 - u lies in (0, 1], so its logarithm is finite.
        let (radius, angle): (f32, f32) = ((1.0 - random.random::<f32>()), random.random());
        let radius = (-2.0 * radius.ln()).sqrt() * deviation;
        let (sin, cos) = (angle * std::f32::consts::TAU).sin_cos();
        values.extend([radius * cos, radius * sin]);
    }
    values.truncate(elements);
    values
}
