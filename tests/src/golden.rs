//! Golden files, read by key, and measures of a result's distance from them.
//!
//! Trade-off: each access parses the file's header again; the files are small.

use firebrick_precision::difference;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};

use crate::golden_file;

/// A golden safetensors file.
pub struct Golden {
    name: String,
    bytes: Vec<u8>,
}

impl Golden {
    /// Reads `tests/golden/<name>.safetensors`.
    pub fn open(name: &str) -> Self {
        let path = golden_file(&format!("{name}.safetensors"));
        let bytes = std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        Self { name: name.to_owned(), bytes }
    }

    fn file(&self) -> SafeTensors<'_> {
        SafeTensors::deserialize(&self.bytes).unwrap_or_else(|error| panic!("{}: {error}", self.name))
    }

    fn bytes(&self, key: &str, dtype: Dtype) -> Vec<u8> {
        let file = self.file();
        let view: TensorView<'_> = file.tensor(key).unwrap_or_else(|error| panic!("{}: {key}: {error}", self.name));
        assert_eq!(view.dtype(), dtype, "{}: {key}", self.name);
        view.data().to_vec()
    }

    /// Lists the keys that begin with `prefix`, in order, without it.
    pub fn keys(&self, prefix: &str) -> Vec<String> {
        let mut keys: Vec<String> =
            self.file().names().iter().filter_map(|key| key.strip_prefix(prefix)).map(str::to_owned).collect();
        keys.sort();
        keys
    }

    /// Returns the values of an f32 tensor.
    pub fn f32s(&self, key: &str) -> Vec<f32> {
        let value = |bytes: &[u8]| f32::from_le_bytes(bytes.try_into().expect("chunks of four bytes"));
        self.bytes(key, Dtype::F32).chunks_exact(4).map(value).collect()
    }

    /// Returns the bytes of a u8 tensor.
    pub fn u8s(&self, key: &str) -> Vec<u8> {
        self.bytes(key, Dtype::U8)
    }

    /// Returns the values of an i64 tensor, such as targets, which are negative outside of the loss.
    pub fn i64s(&self, key: &str) -> Vec<i64> {
        let value = |bytes: &[u8]| i64::from_le_bytes(bytes.try_into().expect("chunks of eight bytes"));
        self.bytes(key, Dtype::I64).chunks_exact(8).map(value).collect()
    }

    /// Returns the values of an i64 tensor of token ids or positions.
    pub fn ids(&self, key: &str) -> Vec<u32> {
        let id = |value| u32::try_from(value).expect("ids and positions are not negative");
        self.i64s(key).into_iter().map(id).collect()
    }
}

/// Computes `‖ours − expected‖ / ‖expected‖`.
pub fn relative_difference(ours: &[f32], expected: &[f32]) -> f64 {
    assert_eq!(ours.len(), expected.len(), "different numbers of values");
    difference::relative_difference(ours, expected, 0.0)
}

/// Returns the largest absolute difference of two values at the same place.
pub fn largest_difference(ours: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(ours.len(), expected.len(), "different numbers of values");
    difference::largest_difference(ours, expected) as f32
}
