//! What the whole-system tests share: golden files, fixture models, and recipes that are run from start to end.
//!
//! The laws stand in `tests/`, few binaries because each links every backend: `numbers` (our numbers are the reference
//! implementations'), `runs` (what a run leaves behind, how it goes on, what it refuses), `backends` (all backends train
//! alike). Everything here panics with a sentence where a test cannot go on.

mod golden;
mod model;
mod recipe;

use std::path::PathBuf;

pub use golden::{Golden, largest_difference, relative_difference};
pub use model::{POSITIONS, batch, every_next_token, host, load};
pub use recipe::{checkpoint_folder, finish, metrics, recipe, refusal, snapshot, step_losses, train};

/// A path in this package, or in the folder that `FIREBRICK_TESTS` names: where the GPU suite was unpacked.
fn here(parts: &[&str]) -> PathBuf {
    let package = || PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let mut path = std::env::var_os("FIREBRICK_TESTS").map_or_else(package, PathBuf::from);
    path.extend(parts);
    path
}

/// A model, an adapter or a data file in `tests/fixtures`.
pub fn fixture(name: &str) -> PathBuf {
    here(&["fixtures", name])
}

/// A file in `tests/golden`.
pub fn golden_file(name: &str) -> PathBuf {
    here(&["golden", name])
}
