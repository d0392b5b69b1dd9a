//! Converts adapters that started as a part of their base (PiSSA) into ones for the original base: A is stacked on its start value, and B is next to
//! minus its start value. That is PEFT's conversion (`subtract_mutated_init`).
//!
//! The saved adapter contains both pairs, so a checkpoint needs no other file.

use std::collections::BTreeMap;

use firebrick_arch::lora_tensor_names;

use crate::checkpoint::{Shard, TensorF32};
use crate::error::ModelError;
use crate::linear::StartPair;

/// Combines a module's pair with its start pair.
pub(crate) fn add_start(tensors: &mut BTreeMap<String, TensorF32>, path: &str, start: &StartPair) {
    let (a_name, b_name) = lora_tensor_names(path);
    let mut of = |name: &str| tensors.remove(name).expect("an adapted module has both matrices");
    let (mut a, b) = (of(&a_name), of(&b_name));
    let (rank, outputs) = (a.shape[0], b.shape[0]);
    a.values.extend(&start.a);
    a.shape[0] = 2 * rank;
    let rows = b.values.chunks(rank).zip(start.b.chunks(rank));
    let values = rows.flat_map(|(now, start)| now.iter().copied().chain(start.iter().map(|value| -value))).collect();
    tensors.insert(a_name, a);
    tensors.insert(b_name, TensorF32 { shape: vec![outputs, 2 * rank], values });
}

/// Reverses [`add_start`]: leaves the trained pair in `tensors` and returns the start pair; `None` if the tensors do not have twice this rank.
pub(crate) fn take_start(tensors: &mut BTreeMap<String, TensorF32>, path: &str, rank: usize) -> Option<StartPair> {
    let (a_name, b_name) = lora_tensor_names(path);
    let (a, b) = (tensors.get(&a_name)?, tensors.get(&b_name)?);
    if a.shape.first() != Some(&(2 * rank)) || b.shape.get(1) != Some(&(2 * rank)) {
        return None;
    }
    let ([inputs, outputs], rows) = ([a.shape[1], b.shape[0]], b.values.chunks(2 * rank));
    let (now_a, start_a) = a.values.split_at(rank * inputs);
    let (now_a, start_a) = (now_a.to_vec(), start_a.to_vec());
    let now_b = rows.clone().flat_map(|row| row[..rank].to_vec()).collect();
    let start_b = rows.flat_map(|row| row[rank..].iter().map(|value| -value).collect::<Vec<_>>()).collect();
    tensors.insert(a_name, TensorF32 { shape: vec![rank, inputs], values: now_a });
    tensors.insert(b_name, TensorF32 { shape: vec![outputs, rank], values: now_b });
    Some(StartPair { a: start_a, b: start_b })
}

/// Reads the start pair of the module at `path`, whose weight has this shape.
pub(crate) fn read_start(shard: &Shard, path: &str, shape: [usize; 2], rank: usize) -> Result<StartPair, ModelError> {
    let (a_name, b_name) = lora_tensor_names(path);
    let mut tensors = BTreeMap::new();
    for (name, shape) in [(a_name, [2 * rank, shape[1]]), (b_name, [shape[0], 2 * rank])] {
        if shard.info(&name).is_none_or(|info| info.shape != shape) {
            let problem = format!("is missing, or has another shape than {shape:?}: two pairs of rank {rank}");
            return Err(ModelError::adapter_tensor(&shard.path, name, problem));
        }
        let values = shard.read_f32(&name)?;
        tensors.insert(name, TensorF32 { shape: shape.to_vec(), values });
    }
    Ok(take_start(&mut tensors, path, rank).expect("the shapes were checked"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_start_that_is_added_is_taken_again() {
        let (a_name, b_name) = lora_tensor_names("model.layers.0.mlp.up_proj");
        let values = |start: f32, count: usize| (0..count).map(|at| start + at as f32).collect::<Vec<f32>>();
        let tensors = BTreeMap::from([
            (a_name.clone(), TensorF32 { shape: vec![2, 3], values: values(0.0, 6) }),
            (b_name.clone(), TensorF32 { shape: vec![4, 2], values: values(10.0, 8) }),
        ]);
        let start = StartPair { a: values(20.0, 6), b: values(30.0, 8) };
        let mut both = tensors.clone();
        assert_eq!(take_start(&mut both, "model.layers.0.mlp.up_proj", 2), None);
        add_start(&mut both, "model.layers.0.mlp.up_proj", &start);
        assert_eq!((&both[&a_name].shape, &both[&b_name].shape), (&vec![4, 3], &vec![4, 4]));
        assert_eq!(both[&b_name].values[..4], [10.0, 11.0, -30.0, -31.0]);
        assert_eq!(take_start(&mut both, "model.layers.0.mlp.up_proj", 2), Some(start));
        assert_eq!(both, tensors);
    }
}
