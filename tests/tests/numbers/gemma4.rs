//! Files of Gemma 4 with keys and values of layers that read those of earlier layers: they take no part.
//!
//! The last three layers of tiny-gemma4 do so: two with heads of 16, and one with heads of 32.

use std::fs;
use std::path::Path;

use firebrick_kernels::backends::Flex;
use firebrick_tests::{FROZEN, fixture};
use safetensors::tensor::{TensorView, serialize};
use safetensors::{Dtype, SafeTensors};
use tempfile::tempdir;

use crate::forward::differences;

const MODEL: &str = "tiny-gemma4";

/// Copies a folder of the fixtures, with more tensors in one file, all of whose values are these bytes.
fn copy_with(from: &str, to: &Path, file: &str, (dtype, value): (Dtype, &[u8]), more: &[(String, Vec<usize>)]) {
    let from = fixture(from);
    for entry in fs::read_dir(&from).expect("the fixture is there") {
        let path = entry.expect("the fixture can be listed").path();
        fs::copy(&path, to.join(path.file_name().expect("a file has a name"))).expect("it is copied");
    }
    let bytes = fs::read(from.join(file)).expect("the fixture has tensors");
    let stored = SafeTensors::deserialize(&bytes).expect("a safetensors file").tensors();
    let values: Vec<Vec<u8>> = more.iter().map(|(_, shape)| value.repeat(shape.iter().product())).collect();
    let views = more.iter().zip(&values).map(|((name, shape), values)| {
        (name.clone(), TensorView::new(dtype, shape.clone(), values).expect("the shape has as many values"))
    });
    let all = serialize(stored.into_iter().chain(views), None).expect("names are unique");
    fs::write(to.join(file), all).expect("it is written");
}

fn assert_same(golden: &str, model: &str, adapter: Option<&str>) {
    let (logits, loss) = differences::<Flex>(golden, model, adapter, FROZEN);
    assert!(logits < 2e-4 && loss < 1e-5, "{golden}: a logit differs by {logits:e}, the loss by {loss:e}");
}

#[test]
fn projections_of_keys_and_values_that_no_layer_reads_are_ignored() {
    let folder = tempdir().expect("a temporary folder");
    let of_layer = |(layer, width): (usize, usize)| {
        let name = |part| format!("model.layers.{layer}.self_attn.{part}.weight");
        [(name("k_proj"), vec![width, 64]), (name("v_proj"), vec![width, 64]), (name("k_norm"), vec![width])]
    };
    let more: Vec<_> = [(3, 16), (4, 16), (5, 32)].into_iter().flat_map(of_layer).collect();
    copy_with(MODEL, folder.path(), "model.safetensors", (Dtype::BF16, &[0x80, 0x3f]), &more);
    assert_same(MODEL, folder.path().to_str().expect("a plain path"), None);
}

#[test]
fn an_adapter_with_matrices_for_them_loads_without_these() {
    let (folder, golden) = (tempdir().expect("a temporary folder"), "tiny-gemma4-lora");
    let of_part = |part: &str| {
        let name = |matrix| format!("base_model.model.model.layers.3.self_attn.{part}.lora_{matrix}.weight");
        [(name("A"), vec![4, 64]), (name("B"), vec![16, 4])]
    };
    let more: Vec<_> = ["k_proj", "v_proj"].into_iter().flat_map(of_part).collect();
    let one = 1.0_f32.to_le_bytes();
    copy_with(golden, folder.path(), "adapter_model.safetensors", (Dtype::F32, &one), &more);
    assert_same(golden, MODEL, Some(folder.path().to_str().expect("a plain path")));
}
