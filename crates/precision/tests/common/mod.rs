//! Reads the golden files, generates their inputs from integers exactly as `golden/make_goldens.py` does, and measures the difference of results.

use std::collections::HashMap;
use std::path::Path;

use firebrick_precision::difference::largest_difference;
use safetensors::SafeTensors;

/// A golden file, with its tensors as raw bytes.
pub(crate) struct Golden(HashMap<String, Vec<u8>>);

impl Golden {
    pub(crate) fn read(name: &str) -> Self {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name).with_extension("safetensors");
        let bytes = std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let file = SafeTensors::deserialize(&bytes).unwrap();
        Self(file.iter().map(|(name, tensor)| (name.to_owned(), tensor.data().to_vec())).collect())
    }

    pub(crate) fn bytes(&self, name: &str) -> &[u8] {
        self.0.get(name).unwrap_or_else(|| panic!("no golden tensor {name}"))
    }

    pub(crate) fn floats(&self, name: &str) -> Vec<f32> {
        self.bytes(name).as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect()
    }

    pub(crate) fn assert_input(&self, case: &str, values: &[f32]) {
        let expected = i64::from_le_bytes(self.bytes(&format!("{case}.input_checksum")).try_into().unwrap());
        assert_eq!(checksum(values), expected, "{case}: the input is not that of the golden file");
    }

    pub(crate) fn codes(&self, name: &str) -> Vec<u16> {
        self.bytes(name).as_chunks().0.iter().map(|&bytes| u16::from_le_bytes(bytes)).collect()
    }
}

/// Returns SplitMix64 (Steele, Lea and Flood, 2014) of the counters after `seed`, as integers in [-2^23, 2^23).
fn uniform_integers(seed: u64, count: usize) -> impl Iterator<Item = i64> {
    (1..=count as u64).map(move |counter| {
        let mut z = seed.wrapping_add(counter.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) >> 40) as i64 - (1 << 23)
    })
}

/// Returns numbers that are uniform in [-1, 1).
pub(crate) fn uniform(seed: u64, count: usize) -> Vec<f32> {
    uniform_integers(seed, count).map(|draw| draw as f32 / (1 << 23) as f32).collect()
}

/// Returns nearly normal numbers: sums of four uniform draws, halved.
pub(crate) fn bell(seed: u64, count: usize) -> Vec<f32> {
    let mut totals = vec![0_i64; count];
    for part in 0..4 {
        totals.iter_mut().zip(uniform_integers(seed + 1000 * part, count)).for_each(|(total, draw)| *total += draw);
    }
    totals.into_iter().map(|total| (total as f64 / f64::from(1 << 24)) as f32).collect()
}

/// Returns `values` times `scale`, in f32.
pub(crate) fn scaled(values: Vec<f32>, scale: f32) -> Vec<f32> {
    values.into_iter().map(|value| value * scale).collect()
}

/// Returns each point and its two neighboring floats, then 1, then zeros up to `length`.
pub(crate) fn around(points: &[f32], length: usize) -> Vec<f32> {
    let mut values: Vec<f32> = points.iter().flat_map(|point| [*point, point.next_down(), point.next_up()]).collect();
    values.push(1.0);
    values.resize(length, 0.0);
    values
}

/// Returns the sum of the bit patterns, modulo 2^63.
pub(crate) fn checksum(values: &[f32]) -> i64 {
    let sum: u64 = values.iter().map(|value| u64::from(value.to_bits())).sum();
    (sum & (u64::MAX >> 1)) as i64
}

/// Returns the largest difference, relative to the largest magnitude of `expected`.
pub(crate) fn relative_difference(got: &[f32], expected: &[f32]) -> f64 {
    let largest = expected.iter().fold(f32::MIN_POSITIVE, |largest, value| largest.max(value.abs()));
    largest_difference(got, expected) / f64::from(largest)
}
