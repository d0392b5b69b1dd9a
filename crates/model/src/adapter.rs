//! The adapter of a model on the device, to and from PEFT's folder format.
//! Trade-off: every matrix passes through host memory in f32, also where it is stored in 16 bits.

use std::collections::BTreeMap;
use std::path::Path;

use firebrick_kernels::{Kernels, Parameter};

use crate::companions::Companions;
use crate::decoder::Decoder;
use crate::error::ModelError;
use crate::peft::{self, LoraConfig, TensorF32};

impl<B: Kernels> Decoder<B> {
    /// Replaces the values of the model's LoRA pairs and of what trains whole by those of a PEFT adapter folder.
    ///
    /// # Errors
    /// A folder that is not a readable adapter, or one whose modules or ranks are not the ones this model was built with.
    pub fn load_adapter(&mut self, dir: &Path) -> Result<(), ModelError> {
        let (config, mut tensors) = peft::read_adapter(dir)?;
        let device = self.device.clone();
        for linear in self.layers.iter_mut().flat_map(|layer| layer.linears_mut()) {
            if let Some(lora) = &mut linear.lora {
                lora.scale = config.scaling_of(&linear.path);
            }
        }
        for parameter in self.parameters_mut() {
            let found = tensors.remove(parameter.name.as_ref());
            *parameter = replaced(dir, parameter, found, &device)?;
        }
        match tensors.into_keys().next() {
            Some(name) => Err(adapter_problem(dir, &name, "belongs to a module that this run does not adapt")),
            None => Ok(()),
        }
    }

    /// Writes the model's LoRA pairs and what trains whole as a PEFT adapter folder, each file replacing an earlier one only once it is on disk. With
    /// companions the folder also holds tokenizer, chat template, generation settings and license: all that a prompt needs.
    ///
    /// # Errors
    /// The folder cannot be written, or a companion cannot be read.
    pub fn save_adapter(
        &self,
        dir: &Path,
        config: &LoraConfig,
        companions: Option<&Companions>,
    ) -> Result<(), ModelError> {
        let tensors: BTreeMap<String, TensorF32> = self.parameters().into_iter().map(host_tensor).collect();
        peft::write_adapter(dir, config, &tensors)?;
        companions.map_or(Ok(()), |companions| companions.write(dir, &self.config.eos_token_ids))
    }
}

fn host_tensor<B: Kernels>(parameter: &Parameter<B>) -> (String, TensorF32) {
    let values = parameter.value.to_data().to_vec::<f32>().expect("parameters are f32");
    (parameter.name.to_string(), TensorF32 { shape: parameter.shape.clone(), values })
}

fn replaced<B: Kernels>(
    dir: &Path,
    parameter: &Parameter<B>,
    found: Option<TensorF32>,
    device: &B::Device,
) -> Result<Parameter<B>, ModelError> {
    match found {
        Some(tensor) if tensor.shape == parameter.shape => {
            let (name, role) = (parameter.name.clone(), parameter.role);
            Ok(Parameter::from_host(name, &tensor.shape, role, &tensor.values, device))
        }
        Some(tensor) => {
            let problem = format!("has shape {:?}, expected {:?}", tensor.shape, parameter.shape);
            Err(adapter_problem(dir, &parameter.name, &problem))
        }
        None => Err(adapter_problem(dir, &parameter.name, "is missing")),
    }
}

fn adapter_problem(dir: &Path, name: &str, problem: &str) -> ModelError {
    ModelError::AdapterTensor {
        path: dir.join(peft::ADAPTER_WEIGHTS_FILE),
        name: name.to_owned(),
        problem: problem.to_owned(),
    }
}
