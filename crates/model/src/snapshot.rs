//! A copy in host memory of the weights that train, which any thread can write while the model trains on.
//!
//! Trade-off: as much host memory as the weights have bytes in f32, given back tensor by tensor while a whole model is written.

use std::path::Path;

use firebrick_kernels::Kernels;
use firebrick_precision::FloatType;

use crate::adapter::write_adapter_folder;
use crate::checkpoint::write::companions::Companions;
use crate::checkpoint::{Fetched, write_hf_folder};
use crate::decoder::Decoder;
use crate::error::ModelError;
use crate::peft::LoraConfig;

/// Writes copied weights, with their companions, as a folder.
pub type WriteWeights = Box<dyn FnOnce(&Path) -> Result<(), ModelError> + Send>;

impl<B: Kernels> Decoder<B> {
    /// Copies the weights that train to the host: those of an adapter with these settings, or every weight. Waits for the device, so the thread that
    /// owns the device calls it. Returns what writes the folder of [`Decoder::save_adapter`] or, in f32 and without a base, [`Decoder::save_model`].
    ///
    /// # Panics
    /// If part of a whole model is frozen, or ranks divide it: then when it is written.
    pub fn snapshot(&self, adapter: Option<&LoraConfig>, companions: &Companions) -> WriteWeights {
        let (config, companions) = (self.config.clone(), companions.clone());
        if let Some(lora) = adapter.cloned() {
            let tensors = self.adapter_tensors();
            return Box::new(move |dir| write_adapter_folder(dir, &lora, &config, &tensors, Some(&companions)));
        }
        let mut tensors = self.host_tensors(self.parameters().into_iter().chain(self.router_vectors()).collect());
        let untrained = self.untrained(FloatType::F32);
        Box::new(move |dir| {
            write_hf_folder(dir, &config, FloatType::F32, Some(&companions), None, |name| {
                let trained = || tensors.remove(name).map(|tensor| Ok(Fetched::Values(tensor.values)));
                untrained(name)
                    .or_else(trained)
                    .unwrap_or_else(|| panic!("{name} is frozen, so the model is not saved whole"))
            })
        })
    }
}
