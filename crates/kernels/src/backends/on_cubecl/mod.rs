//! What the backends on CubeCL share: how their operations fail, numbers of memory handles, and memory that sections use again.

mod failure;
mod handle_number;
mod recycled;

use cubecl::config::memory::PersistentMemory;
use cubecl::config::{CubeClRuntimeConfig, RuntimeConfig};

pub use failure::DeviceFailure;
pub(super) use failure::suppressed_message;
#[cfg(feature = "wgpu")]
pub(super) use failure::{loss, note_loss, note_message};
#[cfg(feature = "cuda")]
pub(super) use handle_number::{Owner, is_only_handle};
pub(super) use handle_number::{handle_number, prepare};
#[cfg(feature = "cuda")]
pub(super) use recycled::uses;
pub(super) use recycled::{Recycled, Taken};

/// Configures CubeCL for training, before anything else uses it: one stream for all threads, and buffers of exactly the requested
/// size, kept for the next tensor of that size. CubeCL's default pools round up to pages of a quarter of the card. Where buffers are small, they
/// share one, and wgpu cannot bind one buffer for reading and for writing.
pub(super) fn configure() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        let mut config = CubeClRuntimeConfig::default();
        config.streaming.max_streams = 1;
        config.memory.persistent_memory = PersistentMemory::Enforced;
        CubeClRuntimeConfig::set(config);
    });
}
