//! A fully trained model, to and from a Hugging Face folder.

use std::collections::BTreeMap;
use std::path::Path;

use firebrick_kernels::{Kernels, Parameter};

use crate::error::ModelError;
use crate::llama::Llama;
use crate::weights::{HfFolder, SavedDtype, write_hf_folder};

impl<B: Kernels> Llama<B> {
    /// Writes a model whose every weight trains as a Hugging Face folder, with the tokenizer files of `companions_from`.
    ///
    /// # Errors
    /// The folder already holds something, or cannot be written.
    ///
    /// # Panics
    /// If part of the model is frozen: adapters are saved by [`Llama::save_adapter`].
    pub fn save_model(
        &mut self,
        dir: &Path,
        dtype: SavedDtype,
        companions_from: Option<&Path>,
    ) -> Result<(), ModelError> {
        let config = self.config.clone();
        let parameters: BTreeMap<_, _> = self
            .parameters_mut()
            .into_iter()
            .map(|parameter| (parameter.name.clone(), parameter.value.clone()))
            .collect();
        write_hf_folder(dir, &config, dtype, companions_from, |name| {
            let value =
                parameters.get(name).unwrap_or_else(|| panic!("{name} is frozen, so the model is not saved whole"));
            Ok(value.to_data().to_vec::<f32>().expect("parameters are f32"))
        })
    }

    /// Takes the values of every trained parameter from a folder that [`Llama::save_model`] wrote in f32.
    ///
    /// # Errors
    /// A folder that lacks a parameter or holds it in another shape.
    pub fn load_model(&mut self, folder: &HfFolder) -> Result<(), ModelError> {
        let device = self.device.clone();
        for parameter in self.parameters_mut() {
            let values = folder.read_f32(&parameter.name, &parameter.shape)?;
            *parameter = Parameter::from_host(parameter.name.clone(), &parameter.shape, &values, &device);
        }
        Ok(())
    }
}
