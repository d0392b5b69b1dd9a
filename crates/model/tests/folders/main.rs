//! Tests of folders that transformers and PEFT wrote: what is read of them, what is merged, and what is refused.

mod finite;
mod mxfp4;
mod wrapper;

use std::collections::BTreeMap;
use std::fs::read;
use std::path::{Path, PathBuf};

use firebrick_model::checkpoint::{TensorBytes, TensorInfo, write_safetensors};
use firebrick_model::{Companions, Merge};
use safetensors::SafeTensors;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures").join(name)
}

fn stored(path: &Path) -> BTreeMap<String, TensorBytes> {
    let bytes = read(path).unwrap();
    let tensor = |(name, view): (String, safetensors::tensor::TensorView<'_>)| {
        (name, TensorBytes { dtype: view.dtype(), shape: view.shape().to_vec(), bytes: view.data().to_vec() })
    };
    SafeTensors::deserialize(&bytes).unwrap().tensors().into_iter().map(tensor).collect()
}

fn write_stored(path: &Path, tensors: &BTreeMap<String, TensorBytes>) {
    let info = |tensor: &TensorBytes| TensorInfo { dtype: tensor.dtype, shape: tensor.shape.clone() };
    let infos = tensors.iter().map(|(name, tensor)| (name.clone(), info(tensor))).collect();
    write_safetensors(path, &infos, |name| Ok(tensors[name].bytes.clone())).unwrap();
}

/// Describes a merge in the formats of the model.
fn plain_merge<'a>(model: &'a Path, adapter: &'a Path) -> Merge<'a> {
    let companions = Companions { from: model.to_owned(), ..Companions::default() };
    Merge { model, adapter, requantized: None, dtype: None, bnb_4bit: None, mxfp4: false, companions }
}
