//! A fully trained model, to and from a Hugging Face folder.

use std::collections::BTreeMap;
use std::path::Path;

use firebrick_kernels::{Kernels, Parameter};

use crate::companions::Companions;
use crate::decoder::Decoder;
use crate::error::ModelError;
use crate::weights::{Fetched, HfFolder, SavedDtype, write_hf_folder};

impl<B: Kernels> Decoder<B> {
    /// Writes a model whose every weight trains as a Hugging Face folder, with its companions: tokenizer, chat template, generation
    /// settings, license.
    ///
    /// # Errors
    /// The folder already holds something, or cannot be written.
    ///
    /// # Panics
    /// If part of the model is frozen: adapters are saved by [`Decoder::save_adapter`].
    pub fn save_model(&self, dir: &Path, dtype: SavedDtype, companions: Option<&Companions>) -> Result<(), ModelError> {
        let parameters: BTreeMap<_, _> =
            self.parameters().into_iter().map(|parameter| (parameter.name.as_ref(), &parameter.value)).collect();
        write_hf_folder(dir, &self.config, dtype, companions, |name| {
            let value =
                parameters.get(name).unwrap_or_else(|| panic!("{name} is frozen, so the model is not saved whole"));
            Ok(Fetched::Values(value.to_data().to_vec::<f32>().expect("parameters are f32")))
        })
    }

    /// Takes the values of every trained parameter from a folder that [`Decoder::save_model`] wrote in f32.
    ///
    /// # Errors
    /// A folder that lacks a parameter or holds it in another shape.
    pub fn load_model(&mut self, folder: &HfFolder) -> Result<(), ModelError> {
        let device = self.device.clone();
        for parameter in self.parameters_mut() {
            let values = folder.read_f32(&parameter.name, &parameter.shape)?;
            let name = parameter.name.clone();
            *parameter = Parameter::from_host(name, &parameter.shape, parameter.role, &values, &device);
        }
        Ok(())
    }
}
