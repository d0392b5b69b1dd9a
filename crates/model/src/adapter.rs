//! The adapter of a model on the device, to and from PEFT's folder format.

use std::collections::BTreeMap;
use std::path::Path;

use firebrick_arch::{ModelConfig, lora_tensor_names};
use firebrick_kernels::memory::prefetch::Schedule;
use firebrick_kernels::{Kernels, Parameter, Payload};

use crate::checkpoint::write::companions::Companions;
use crate::decoder::Decoder;
use crate::error::ModelError;
use crate::linear::Linear;
use crate::peft::{self, LoraConfig, TensorF32};

impl<B: Kernels> Decoder<B> {
    /// Computes the norms in DoRA's denominator, and the copies of trained embedding and head rows in the format of their tables. Call it after every
    /// change of the trained parameters, so once per optimizer step; if ranks divide weights, all of them call it together. It waits for nothing.
    pub fn refresh_adapter(&mut self) {
        if let Some(rows) = &self.embed_rows {
            rows.write_to(&mut self.embed_tokens);
        }
        if let Some((rows, head)) = self.head_rows.as_ref().zip(self.lm_head.as_mut()) {
            rows.write_to(head);
        }
        self.refresh_norms();
    }

    fn refresh_norms(&mut self) {
        let all = |linear: &Linear<B>| linear.lora.as_ref().is_some_and(|lora| lora.magnitude.is_some());
        if !self.layers.iter().any(|layer| layer.linears().any(all)) {
            return;
        }
        let mut norms = Vec::new();
        let mut blocks = self.blocks();
        let mut schedule = Schedule::new(&mut blocks, 0..self.layers.len(), 1);
        while let Some((_, layer)) = schedule.next_item() {
            norms.extend(layer.linears().map(|linear| linear.adapted_norms(self.compute_dtype)));
        }
        let linears = self.layers.iter_mut().flat_map(|layer| layer.linears_mut());
        for (linear, norms) in linears.zip(norms) {
            if let Some(magnitude) = linear.lora.as_mut().and_then(|lora| lora.magnitude.as_mut()) {
                magnitude.norms = norms;
            }
        }
    }

    /// Sets DoRA's magnitudes to the norms of their rows, so that every output stays as it is.
    pub(crate) fn start_magnitudes(&mut self) {
        self.refresh_norms();
        for linear in self.layers.iter_mut().flat_map(|layer| layer.linears_mut()) {
            if let Some(magnitude) = linear.lora.as_mut().and_then(|lora| lora.magnitude.as_mut()) {
                let norms = magnitude.norms.as_ref().expect("norms were computed above");
                magnitude.parameter.value = norms.norm.clone();
            }
        }
    }

    /// Replaces the values of the model's LoRA pairs and of modules that train whole by those of a PEFT adapter folder.
    ///
    /// # Errors
    /// A folder that is not a readable adapter, or one whose modules or ranks are not the ones this model was built with.
    pub fn load_adapter(&mut self, dir: &Path) -> Result<(), ModelError> {
        let (config, mut tensors) = peft::read_adapter(dir)?;
        peft::leave_ignored(&mut tensors, &self.config.spec, dir);
        peft::check_layers(dir, &tensors, self.config.spec.layers.len(), &config)?;
        let path = &dir.join(peft::ADAPTER_WEIGHTS_FILE);
        let device = self.device.clone();
        for linear in self.layers.iter_mut().flat_map(|layer| layer.linears_mut()) {
            let paths: Vec<String> = linear.lora_paths().into_iter().map(str::to_owned).collect();
            let Some(lora) = &mut linear.lora else { continue };
            if lora.starts.is_empty() {
                lora.scale = config.scaling_of(&paths[0]);
            }
            let rank = lora.b.shape[1];
            for (module, start) in paths.iter().zip(&lora.starts) {
                if peft::take_start(&mut tensors, module, rank).as_ref() != Some(&**start) {
                    let name = lora_tensor_names(module).0;
                    return Err(ModelError::adapter_tensor(
                        path,
                        name,
                        "started as another part of the base than this run's",
                    ));
                }
            }
        }
        let parts = self.stored_parts();
        for parameter in self.parameters_mut() {
            let name = parameter.name.clone();
            let stored = parts.of(&name);
            let shape = parts.shape_of(&name, &parameter.shape);
            let mut values = Vec::with_capacity(parameter.elements());
            for stored in stored {
                let problem = match tensors.remove(stored) {
                    Some(tensor) if tensor.shape == shape => {
                        values.extend(tensor.values);
                        continue;
                    }
                    Some(TensorF32 { shape: found, .. }) => {
                        format!("has shape {found:?}, but this model needs {shape:?}{}", peft::of_base(&config))
                    }
                    None => "is missing".to_owned(),
                };
                return Err(ModelError::adapter_tensor(path, stored, problem));
            }
            let shape = parameter.shape.clone();
            let values = parts.put_together(&name, values);
            *parameter = Parameter::from_host(name, &shape, parameter.role, values, &device);
        }
        self.refresh_adapter();
        match tensors.into_keys().next() {
            Some(name) => {
                Err(ModelError::adapter_tensor(path, name, "belongs to a module that this run does not adapt"))
            }
            None => Ok(()),
        }
    }

    /// Writes LoRA pairs and modules that train whole as a PEFT adapter folder for the original base. Each file replaces an earlier one only once it
    /// is on disk. With companions the folder also holds tokenizer, chat template, generation settings and license: all that a prompt needs.
    pub fn save_adapter(
        &self,
        dir: &Path,
        config: &LoraConfig,
        companions: Option<&Companions>,
    ) -> Result<(), ModelError> {
        write_adapter_folder(dir, config, &self.config, &self.hold_adapter()(), companions)
    }

    /// Returns what copies the tensors of an adapter's file as they are now to the host, as [`Self::hold`] does.
    pub(crate) fn hold_adapter(&self) -> impl FnOnce() -> BTreeMap<String, TensorF32> + Send + use<B> {
        let (read, mut starts) = (self.hold(self.parameters()), Vec::new());
        for linear in self.layers.iter().flat_map(|layer| layer.linears()) {
            let of_linear = linear.lora.iter().flat_map(|lora| lora.starts.clone());
            starts.extend(linear.lora_paths().into_iter().map(str::to_owned).zip(of_linear));
        }
        move || {
            let mut tensors = read();
            starts.iter().for_each(|(path, start)| peft::add_start(&mut tensors, path, start));
            tensors
        }
    }

    /// Returns what copies parameters as they are now to the host in f32, by their names in files. Another thread may call it while steps go on, which
    /// give what they change new memory.
    pub(crate) fn hold(
        &self,
        parameters: Vec<&Parameter<B>>,
    ) -> impl FnOnce() -> BTreeMap<String, TensorF32> + Send + use<B> {
        let parts = self.stored_parts();
        let named: Vec<_> = parameters.iter().map(|held| (held.name.to_string(), held.shape.clone())).collect();
        let held = parameters.into_iter().map(|parameter| Payload::Values(parameter.value.clone())).collect();
        move || {
            let (mut named, mut tensors) = (named.into_iter(), BTreeMap::new());
            B::read_alongside(held, |data| {
                let (name, shape) = named.next().expect("each tensor has a name");
                let values = data.convert::<f32>().into_vec::<f32>().expect("just converted to f32");
                tensors.extend(parts.divided(name, TensorF32 { shape, values }));
            });
            tensors
        }
    }
}

/// Writes the tensors of an adapter as a PEFT folder for the original base, with its companions.
pub(crate) fn write_adapter_folder(
    dir: &Path,
    lora: &LoraConfig,
    model: &ModelConfig,
    tensors: &BTreeMap<String, TensorF32>,
    companions: Option<&Companions>,
) -> Result<(), ModelError> {
    match lora.init_lora_weights.is_uniform() {
        true => peft::write_adapter(dir, lora, model, tensors)?,
        false => peft::write_adapter(dir, &lora.with_start(), model, tensors)?,
    }
    let ModelConfig { eos_token_ids, pad_token_id, .. } = model;
    companions.map_or(Ok(()), |companions| companions.write(dir, eos_token_ids, *pad_token_id))
}
