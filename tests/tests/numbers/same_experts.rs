//! Routers that send every token to the same experts and leave the others empty: such a mixture is a dense MLP, which other code computes.
//!
//! Where the router's weights are zero, all experts have one score and the first ones are chosen, with equal weights. Their gate and up projections
//! below each other, and their down projections side by side, are the dense MLP.
//! Trade-off: the router's gradient with several experts per token has no counterpart there; the tests of `firebrick_kernels::moe` compare it.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use firebrick_kernels::Kernels;
use firebrick_model::{HfFolder, PassOptions, Recompute};
use firebrick_tests::{
    Golden, TRAINED, every_next_token, fixture, load, loss_and_gradients, on_every_backend, relative_difference,
};
use safetensors::Dtype;
use safetensors::tensor::{TensorView, serialize};
use serde_json::{Map, Value, from_str, json};
use tempfile::tempdir;

use crate::forward::TOKENS;

const MODEL: &str = "tiny-mixtral";
const EXPERTS: usize = 4;
const HIDDEN: usize = 64;
/// Hidden width of an expert.
const WIDTH: usize = 48;
/// Mixtral's names of gate, up and down, and those of a Llama.
const PROJECTIONS: [(&str, &str); 3] = [("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj")];

type Values = BTreeMap<String, Vec<f32>>;

fn expert(layer: usize, expert: usize, name: &str) -> String {
    format!("model.layers.{layer}.block_sparse_moe.experts.{expert}.{name}.weight")
}

fn dense(layer: usize, name: &str) -> String {
    format!("model.layers.{layer}.mlp.{name}.weight")
}

/// Returns the columns of expert `expert` of `count` in a down projection `[hidden, count * width]`.
fn columns(values: &[f32], expert: usize, count: usize) -> Vec<f32> {
    values.chunks(count * WIDTH).flat_map(|row| &row[expert * WIDTH..][..WIDTH]).copied().collect()
}

fn write_model(folder: &Path, values: &Values, shapes: &BTreeMap<String, Vec<usize>>, changes: &[(&str, Value)]) {
    fs::create_dir(folder).expect("it is new");
    let text = fs::read_to_string(fixture(MODEL).join("config.json")).expect("the fixture has one");
    let mut config: Map<String, Value> = from_str(&text).expect("it is an object");
    config.extend(changes.iter().map(|(key, value)| ((*key).to_owned(), value.clone())));
    fs::write(folder.join("config.json"), Value::Object(config).to_string()).expect("it is written");
    let bytes = |values: &[f32]| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>();
    let tensors: BTreeMap<&String, Vec<u8>> = values.iter().map(|(name, values)| (name, bytes(values))).collect();
    let views = tensors.iter().map(|(name, bytes)| {
        let view = TensorView::new(Dtype::F32, shapes[*name].clone(), bytes).expect("the shape has as many values");
        (name.as_str(), view)
    });
    let file = serialize(views, None).expect("names are unique");
    fs::write(folder.join("model.safetensors"), file).expect("it is written");
}

/// Writes the mixture whose tokens all go to the first `top_k` experts as `mixture`, and the same model without experts as `dense`.
fn write_both(folder: &Path, top_k: usize) {
    let source = HfFolder::open(&fixture(MODEL)).expect("the fixture is a model");
    let (mut values, mut shapes) = (Values::new(), BTreeMap::new());
    for name in source.names() {
        let shape = source.info(name).expect("it is there").shape;
        values.insert(name.to_owned(), source.read_f32(name, &shape).expect("it is readable"));
        shapes.insert(name.to_owned(), shape);
    }
    values.iter_mut().filter(|(name, _)| name.ends_with("moe.gate.weight")).for_each(|(_, values)| values.fill(0.0));
    write_model(&folder.join("mixture"), &values, &shapes, &[("num_experts_per_tok", json!(top_k))]);

    for layer in 0..2 {
        for (name, new_name) in PROJECTIONS {
            let parts = (0..top_k).map(|index| &values[&expert(layer, index, name)][..]);
            let (joined, shape) = if name == "w2" {
                let parts: Vec<_> = parts.map(|part| part.chunks(WIDTH)).collect();
                let row = |row: usize| parts.iter().flat_map(move |part| part.clone().nth(row).expect("a row"));
                let scaled =
                    (0..HIDDEN).flat_map(|index| row(index).map(|value| value / top_k as f32).collect::<Vec<_>>());
                (scaled.collect(), vec![HIDDEN, top_k * WIDTH])
            } else {
                (parts.collect::<Vec<_>>().concat(), vec![top_k * WIDTH, HIDDEN])
            };
            values.insert(dense(layer, new_name), joined);
            shapes.insert(dense(layer, new_name), shape);
        }
    }
    values.retain(|name, _| !name.contains("block_sparse_moe"));
    let changes = [
        ("architectures", json!(["LlamaForCausalLM"])),
        ("model_type", json!("llama")),
        ("intermediate_size", json!(top_k * WIDTH)),
        ("num_local_experts", Value::Null),
    ];
    write_model(&folder.join("dense"), &values, &shapes, &changes);
}

/// Returns the gradients of the mixture that follow from those of the dense model.
fn expected(mut gradients: Values, top_k: usize) -> Values {
    for layer in 0..2 {
        for (name, old_name) in PROJECTIONS {
            let all = gradients.remove(&dense(layer, old_name)).expect("every weight has a gradient");
            for index in 0..EXPERTS {
                let of_expert = match name {
                    _ if index >= top_k => vec![0.0; HIDDEN * WIDTH],
                    "w2" => columns(&all, index, top_k).iter().map(|value| value / top_k as f32).collect(),
                    _ => all[index * WIDTH * HIDDEN..][..WIDTH * HIDDEN].to_vec(),
                };
                gradients.insert(expert(layer, index, name), of_expert);
            }
        }
    }
    gradients
}

fn mixture_is_a_dense_mlp<B: Kernels>() {
    let ids = Golden::open(MODEL).ids("input_ids");
    let batch = every_next_token(&ids, TOKENS);
    for top_k in [1, 2] {
        let temp = tempdir().expect("a temporary folder");
        write_both(temp.path(), top_k);
        let [mixture, dense] = ["mixture", "dense"]
            .map(|name| load::<B>(temp.path().join(name).to_str().expect("its path is text"), None, TRAINED));
        let (expected_loss, gradients) = loss_and_gradients(&dense, &batch, PassOptions::default());
        let expected = expected(gradients, top_k);
        for recompute in [Recompute::Full, Recompute::Projections, Recompute::Selective, Recompute::None] {
            let pass = PassOptions { recompute, ..PassOptions::default() };
            let (loss, got) = loss_and_gradients(&mixture, &batch, pass);
            assert!((loss / expected_loss - 1.0).abs() < 1e-5, "{top_k}, {recompute:?}: {loss}, {expected_loss}");
            assert_eq!(got.len(), expected.len() + 2, "the routers have gradients too");
            for (name, expected) in &expected {
                let is_zero = expected.iter().all(|&value| value == 0.0);
                let is_right =
                    if is_zero { got[name] == *expected } else { relative_difference(&got[name], expected) < 1e-3 };
                assert!(is_right, "{top_k} experts per token, {recompute:?}, {name}");
            }
            let routers = got.iter().filter(|(name, _)| name.ends_with("moe.gate.weight"));
            let is_zero = routers.flat_map(|(_, values)| values).all(|&value| value.abs() < 1e-6);
            assert_eq!(is_zero, top_k == 1, "one expert's weight is always one");
        }
    }
}

on_every_backend!(a_router_that_sends_all_tokens_to_the_same_experts_makes_a_dense_mlp, mixture_is_a_dense_mlp);
