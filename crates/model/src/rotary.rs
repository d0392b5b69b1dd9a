//! The rotary tables of a decoder: cosines and sines of every position, one pair of tables per rope.
//!
//! Trade-off: all positions are computed on the host when a model is built, also where few are used.

use burn_tensor::Tensor;
use firebrick_arch::{ModelSpec, rope};
use firebrick_kernels::{Kernels, RotaryTables};

/// Tables of `max_positions` positions, with the frequencies of sequences of `sequence_tokens` tokens.
pub(crate) fn rotary_tables<B: Kernels>(
    spec: &ModelSpec,
    max_positions: usize,
    sequence_tokens: usize,
    device: &B::Device,
) -> Vec<RotaryTables<B>> {
    let positions: Vec<u32> = (0..max_positions as u32).collect();
    let tables = |rope: &rope::Rope| {
        let (frequencies, attention_scaling) = rope.inverse_frequencies(sequence_tokens);
        let (cos, sin) = rope::tables(&positions, &frequencies, attention_scaling);
        let table = |values: Vec<f32>| {
            let flat = Tensor::<B, 1>::from_floats(values.as_slice(), device);
            flat.reshape([positions.len(), frequencies.len()])
        };
        RotaryTables { cos: table(cos), sin: table(sin) }
    };
    spec.ropes.iter().map(tables).collect()
}
