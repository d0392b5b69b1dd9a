//! Fixture models on a device, and batches made by hand.

use burn_tensor::{DType, Tensor};
use firebrick_data::{Batch, IGNORE_INDEX};
use firebrick_kernels::Kernels;
use firebrick_model::peft::read_adapter_config;
use firebrick_model::{BaseStorage, BuildOptions, HfFolder, Llama, LlamaConfig};

use crate::fixture;

/// Positions that the models loaded here have rotary angles for.
pub const POSITIONS: usize = 128;

/// Loads a fixture model in f32, with a fixture adapter on it. An absolute path works as a name too.
pub fn load<B: Kernels>(model: &str, adapter: Option<&str>, storage: BaseStorage) -> Llama<B> {
    let (folder, adapter) = (fixture(model), adapter.map(fixture));
    let options = BuildOptions {
        storage,
        lora: adapter.as_ref().map(|dir| read_adapter_config(dir).expect("the adapter has a readable config")),
        seed: 0,
        compute_dtype: DType::F32,
        max_positions: POSITIONS,
    };
    let config = LlamaConfig::read(&folder).expect("the model has a readable config");
    let weights = HfFolder::open(&folder).expect("the model has weights");
    let mut loaded = Llama::load(&weights, config, &options, &B::Device::default(), &mut |_| ()).expect("it loads");
    if let Some(dir) = adapter {
        loaded.load_adapter(&dir).expect("the adapter fits the model");
    }
    loaded
}

/// Values of a tensor on the host.
pub fn host<B: Kernels, const D: usize>(tensor: Tensor<B, D>) -> Vec<f32> {
    tensor.into_data().convert::<f32>().to_vec().expect("values were just converted to f32")
}

/// Rows of equal length, each one document. `is_trained(row, index)` says whether the token at `index` counts in the loss.
pub fn batch(rows: &[Vec<u32>], is_trained: impl Fn(usize, usize) -> bool) -> Batch {
    let row_len = rows[0].len();
    assert!(rows.iter().all(|row| row.len() == row_len), "rows of one batch have one length");
    let mut targets = Vec::new();
    for (number, row) in rows.iter().enumerate() {
        let next = |index: usize| match row.get(index) {
            Some(&id) if is_trained(number, index) => i64::from(id),
            _ => IGNORE_INDEX,
        };
        targets.extend((1..=row_len).map(next));
    }
    Batch {
        rows: rows.len(),
        row_len,
        input_ids: rows.concat(),
        targets,
        positions: rows.iter().flat_map(|_| 0..row_len as u32).collect(),
        cu_seqlens: (0..=rows.len()).map(|row| (row * row_len) as u32).collect(),
        padding: 0,
    }
}

/// The golden files' batch: `row_len` tokens a row, every next token trained.
pub fn every_next_token(input_ids: &[u32], row_len: usize) -> Batch {
    let rows: Vec<Vec<u32>> = input_ids.chunks(row_len).map(<[u32]>::to_vec).collect();
    batch(&rows, |_, _| true)
}
