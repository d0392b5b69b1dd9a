//! The weights that train as they are now, which any thread can write while the model trains on: a copy in host memory, or tensors on the device from
//! which that thread makes one.
//!
//! Trade-off: as much host memory as the weights have bytes in f32, given back tensor by tensor while a whole model is written.

use std::collections::BTreeMap;
use std::path::Path;

use firebrick_kernels::Kernels;
use firebrick_precision::FloatType;

use crate::adapter::write_adapter_folder;
use crate::checkpoint::write::companions::Companions;
use crate::checkpoint::{Fetched, write_hf_folder};
use crate::decoder::Decoder;
use crate::error::ModelError;
use crate::peft::{LoraConfig, TensorF32};

/// Writes such weights, with their companions, as a folder.
pub type WriteWeights = Box<dyn FnOnce(&Path) -> Result<(), ModelError> + Send>;

impl<B: Kernels> Decoder<B> {
    /// Copies the weights that train to the host: those of an adapter with these settings, or every weight. Waits for the device, so the thread that
    /// owns the device calls it; if `holds`, they are left to the thread that writes, and are held on the device until it has copied them.
    /// Returns what writes the folder of [`Decoder::save_adapter`] or, in f32 and without a base, [`Decoder::save_model`].
    ///
    /// # Panics
    /// If part of a whole model is frozen, or ranks divide it: then when it is written.
    pub fn snapshot(&self, adapter: Option<&LoraConfig>, companions: &Companions, holds: bool) -> WriteWeights {
        let (config, companions) = (self.config.clone(), companions.clone());
        let read: Box<dyn FnOnce() -> BTreeMap<String, TensorF32> + Send> = match adapter {
            Some(_) => Box::new(self.hold_adapter()),
            None => Box::new(self.hold(self.parameters().into_iter().chain(self.router_vectors()).collect())),
        };
        let (held, copied) = if holds { (Some(read), BTreeMap::new()) } else { (None, read()) };
        let tensors = move || held.map_or(copied, |read| read());
        if let Some(lora) = adapter.cloned() {
            return Box::new(move |dir| write_adapter_folder(dir, &lora, &config, &tensors(), Some(&companions)));
        }
        let untrained = self.untrained(FloatType::F32);
        Box::new(move |dir| {
            let mut tensors = tensors();
            write_hf_folder(dir, &config, FloatType::F32, Some(&companions), None, |name| {
                let trained = || tensors.remove(name).map(|tensor| Ok(Fetched::Values(tensor.values)));
                untrained(name)
                    .or_else(trained)
                    .unwrap_or_else(|| panic!("{name} is frozen, so the model is not saved whole"))
            })
        })
    }
}
