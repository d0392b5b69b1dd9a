//! Shared code of the whole-system tests: golden files, fixture models, and recipes that run from start to end.
//!
//! The tests are in `tests/`, in few binaries because each links every backend: `numbers` (our numbers equal those of the reference implementations,
//! on every backend), `runs` (a run's files, resuming and refusals), `program` (what starts processes), `backends` (all backends train alike) and `gpu`
//! (the same on a card).
//! Trade-off: everything here panics with a sentence if a test cannot go on.

mod backends;
mod curve;
mod custom_loss;
mod golden;
mod model;
mod recipe;
mod sample;

use std::path::PathBuf;

#[cfg(feature = "wgpu")]
pub use backends::has_wgpu;
pub use backends::{families, in_turn, is_wgpu, run_all};
pub use curve::loss_curves;
pub use custom_loss::{preference_loss, z_loss};
pub use golden::{Golden, largest_difference, relative_difference};
pub use model::{
    FROZEN, NF4, POSITIONS, TRAINED, assert_held_is_of_its_step, batch, every_next_token, host, host_gradients, load,
    load_divided, load_in, loss_and_gradients, loss_and_scaled_gradients, loss_options, numbers_and_gradients, packed,
    trainer, trainer_of, upload,
};
pub use recipe::{
    NEW, NEWEST, checkpoint_folder, finish, finish_traced, metrics, one_step, recipe, refusal, snapshot, step_losses,
    train,
};
pub use sample::{is_slow, sample, some_in_turn};

/// One checkpoint per family. Each has an adapter `<name>-lora` on all projections but experts, and the golden files `<name>`, `<name>-lora`,
/// `<name>-full-gradients`, `<name>-packed` and `<name>-generation`. A new family is one more line here.
pub const FAMILIES: [&str; 40] = [
    "tiny-llama",
    "tiny-llama-bias",        // biases on all projections
    "tiny-mistral",           // sliding window, head_dim 24
    "tiny-qwen2",             // biases on q, k and v; tied head
    "tiny-qwen3",             // norms of q and k; head_dim 32
    "tiny-olmo2",             // norms after attention and MLP, and of all heads of q and of k
    "tiny-phi3",              // fused projections, 12 of 16 columns rotated, longrope
    "tiny-smollm3",           // one of two layers without rotation
    "tiny-gemma2",            // norms around attention and MLP, soft caps, scaled embedding, gated GELU
    "tiny-gemma3",            // norms of q and k; a rope per type of layer
    "tiny-mixtral",           // experts in both layers, weights that add up to one
    "tiny-qwen3-moe",         // a dense layer and one of experts, norms of q and k
    "tiny-qwen2-moe",         // experts in both layers, a shared one behind a gate, biases on q, k and v
    "tiny-glm4-moe", // sigmoid router with corrections and groups, a shared expert, norms of q and k, biases, half of each head rotated
    "tiny-gpt-oss",  // experts with biases and clamped gates, sinks, a window in one layer, biases on all projections
    "tiny-olmo3",    // as OLMo 2; a window in one layer, a scaled rope in the other
    "tiny-granite",  // factors of embedding, scores, residual stream and logits; biases on all projections
    "tiny-gemma",    // scaled embedding, gated GELU, one key head
    "tiny-glm4",     // neighbors rotated in half of each head, norms around attention and MLP, fused gate and up
    "tiny-glm",      // the same without norms of outputs, whole heads rotated
    "tiny-ministral3", // yarn, queries that grow with their position
    "tiny-lfm2",     // gated short convolutions in two of four layers, norms of q and k, other names
    "tiny-lfm2-moe", // the same with experts in two of three layers, a sigmoid router with corrections
    "tiny-lfm3", // short convolutions, a window, a rope per type of attention, norms around both halves, gates of heads
    "tiny-qwen3-5", // Gated DeltaNet in three of four layers; gates among the queries, a quarter of each head rotated
    "tiny-qwen3-5-moe", // the same with experts and a shared one in both layers
    "tiny-olmo-hybrid", // Gated DeltaNet that corrects up to twice the error, a projection for each input; attention without a rope
    "tiny-qwen3-next",  // projections by key head, a dense layer and one of experts
    "tiny-gemma3-vl",   // the text model of a checkpoint with a vision tower, as are the next
    "tiny-mistral3",    // an untied head, head_dim 24
    "tiny-qwen2-5-vl",  // stored under the text model's own names
    "tiny-qwen3-vl",    // stored under the names of transformers' modules
    "tiny-qwen3-5-vl",  // Gated DeltaNet, and layers that predict more tokens next to the tower
    "tiny-qwen3-5-moe-vl", // the same with all experts of a layer in one tensor
    "tiny-gemma4", // a table of inputs of layers, keys and values of earlier layers, MLPs of two widths, heads of two widths
    "tiny-gemma4-dense", // keys as values and fewer key heads in the layer without a window
    "tiny-gemma4-moe", // the same with experts next to the dense MLP, each with norms of its own
    "tiny-gemma4-unified", // the same without experts, the text model of 12B
    "tiny-gemma4-vl", // the text model of tiny-gemma4 next to towers for images and sound
    "tiny-gemma4-unified-vl", // that of tiny-gemma4-unified next to embedders
];

/// Those of [`FAMILIES`] with experts.
pub const MIXTURES: [&str; 10] = [
    "tiny-mixtral",
    "tiny-qwen3-moe",
    "tiny-qwen2-moe",
    "tiny-glm4-moe",
    "tiny-gpt-oss",
    "tiny-lfm2-moe",
    "tiny-qwen3-5-moe",
    "tiny-qwen3-next",
    "tiny-qwen3-5-moe-vl",
    "tiny-gemma4-moe",
];

/// Those of [`FAMILIES`] whose layers differ most from each other, for tests that take a sample.
pub const SAMPLED: [&str; 9] = [
    "tiny-llama-bias",
    "tiny-phi3",
    "tiny-gemma2",
    "tiny-glm4",
    "tiny-glm4-moe",
    "tiny-gpt-oss",
    "tiny-lfm2",
    "tiny-qwen3-5",
    "tiny-gemma4",
];

/// Returns a path in this package, or in the folder that `FIREBRICK_TESTS` names: the unpacked GPU suite.
fn here(parts: &[&str]) -> PathBuf {
    let package = || PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let mut path = std::env::var_os("FIREBRICK_TESTS").map_or_else(package, PathBuf::from);
    path.extend(parts);
    path
}

/// Returns the path of a model, an adapter or a data file in `tests/fixtures`.
pub fn fixture(name: &str) -> PathBuf {
    fixtures().join(name)
}

/// Returns the path of the fixtures.
pub fn fixtures() -> PathBuf {
    here(&["fixtures"])
}

/// Returns the path of a file in `tests/golden`.
pub fn golden_file(name: &str) -> PathBuf {
    here(&["golden", name])
}
