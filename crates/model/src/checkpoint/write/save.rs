//! Writes a fully trained model to a Hugging Face folder, and reads it back.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use firebrick_arch::PER_LAYER_EMBEDDING;
use firebrick_kernels::memory::prefetch::Schedule;
use firebrick_kernels::memory::slices;
use firebrick_kernels::{Kernels, Parameter};
use firebrick_precision::FloatType;

use crate::checkpoint::write::companions::Companions;
use crate::checkpoint::{Fetched, HfFolder, stored_format, write_hf_folder};
use crate::decoder::Decoder;
use crate::error::ModelError;
use crate::layer::{Layer, Mlp};

/// Values of the trained parameters that ranks divide, in host memory, by their names on disk.
pub type CollectedWeights = BTreeMap<Arc<str>, Vec<f32>>;

impl<B: Kernels> Decoder<B> {
    /// Writes a model in which every weight trains as a Hugging Face folder, with its companions: tokenizer, chat template, generation settings,
    /// license. `collected` is what [`Decoder::collect_weights`] returned on rank 0. If the model is the text model of a larger checkpoint, the
    /// folder is such a checkpoint too, with the other parts of `base`; without a base it holds the text model alone.
    ///
    /// # Errors
    /// The folder already holds something, or cannot be written, or the table of the layers' own inputs cannot be read.
    ///
    /// # Panics
    /// If part of the model is frozen: adapters are saved by [`Decoder::save_adapter`].
    pub fn save_model(
        &self,
        mut collected: CollectedWeights,
        dir: &Path,
        dtype: FloatType,
        companions: Option<&Companions>,
        base: Option<&HfFolder>,
    ) -> Result<(), ModelError> {
        let parameters = self.parameters().into_iter().chain(self.router_vectors());
        let parameters: BTreeMap<_, _> =
            parameters.map(|parameter| (parameter.name.as_ref(), &parameter.value)).collect();
        let parts = self.stored_parts();
        let (places, untrained) = (parts.places(), self.untrained(dtype));
        write_hf_folder(dir, &self.config, dtype, companions, base, |name| {
            if let Some(values) = collected.remove(name) {
                return Ok(Fetched::Values(values));
            }
            if let Some(fetched) = untrained(name) {
                return fetched;
            }
            let frozen = || panic!("{name} is frozen, so the model is not saved whole");
            let value = |name: &str| (*parameters.get(name).unwrap_or_else(frozen)).clone();
            let value = match places.get(name) {
                None => value(name),
                Some(&(stack, index, parts)) => {
                    let stack = value(stack);
                    let elements = stack.dims()[0] / parts;
                    slices(stack, &[(index * elements, elements)]).remove(0)
                }
            };
            Ok(Fetched::Values(value.into_data().convert::<f32>().into_vec().expect("just converted to f32")))
        })
    }

    /// Returns what reads the tensors that are on the host and never train: factors of the layers' outputs, and the table of their own inputs.
    pub(crate) fn untrained(
        &self,
        dtype: FloatType,
    ) -> impl Fn(&str) -> Option<Result<Fetched, ModelError>> + Send + use<B> {
        let spec = &self.config.spec;
        let each = self.layers.iter().enumerate();
        let scalars = each.filter_map(|(index, layer)| Some((spec.layer_scalar(index)?.name, layer.scalar?)));
        let scalars: BTreeMap<String, f32> = scalars.collect();
        let rows = spec.per_layer_inputs.map_or(0, |inputs| inputs.vocab_size);
        let table = self.layer_inputs.as_ref().map(|own| own.table.clone());
        move |name: &str| match (scalars.get(name), &table) {
            (Some(scalar), _) => Some(Ok(Fetched::Values(vec![*scalar]))),
            (None, Some(table)) if name == PER_LAYER_EMBEDDING => Some(table.fetched(rows, stored_format(name, dtype))),
            _ => None,
        }
    }

    /// Iterates over the vectors of routers, which never train.
    pub(crate) fn router_vectors(&self) -> impl Iterator<Item = &Parameter<B>> {
        let experts = self.layers.iter().filter_map(|layer| match &layer.mlp {
            Mlp::Gated { .. } => None,
            Mlp::Experts(experts) => Some(experts),
        });
        experts.flat_map(|experts| experts.router_vectors())
    }

    /// Collects the trained weights that ranks divide on rank 0, which then has a copy of them in host memory. Returns nothing on the others, or if
    /// nothing is divided. Every rank calls it.
    pub fn collect_weights(&self) -> CollectedWeights {
        let mut collected = CollectedWeights::new();
        let Some(division) = &self.division else { return collected };
        if self.layers.iter().flat_map(Layer::linears).all(|linear| linear.base.trained().is_none()) {
            return collected;
        }
        let mut blocks = self.blocks();
        let mut schedule = Schedule::new(&mut blocks, 0..self.layers.len(), 1);
        while let Some((_, layer)) = schedule.next_item() {
            if division.communicator.rank() == 0 {
                for linear in layer.linears() {
                    let Some(parameter) = linear.base.trained() else { continue };
                    let values = parameter.value.to_data().convert::<f32>();
                    let values = values.into_vec::<f32>().expect("just converted to f32");
                    let names = linear.stored_names(parameter).unwrap_or_else(|| vec![parameter.name.to_string()]);
                    let each = values.len() / names.len();
                    let parts = values.chunks(each).map(<[f32]>::to_vec);
                    collected.extend(names.into_iter().map(Arc::from).zip(parts));
                }
            }
        }
        collected
    }

    /// Reads the values of every trained parameter on this rank from a folder that [`Decoder::save_model`] wrote in f32, which holds those in bf16
    /// unchanged.
    ///
    /// # Errors
    /// A folder that lacks a parameter or holds it in another shape.
    pub fn load_model(&mut self, folder: &HfFolder) -> Result<(), ModelError> {
        let (device, division, parts) = (self.device.clone(), self.division.clone(), self.stored_parts());
        for parameter in self.parameters_mut() {
            if division.as_ref().is_some_and(|division| division.is_elsewhere(&parameter.name)) {
                continue;
            }
            let stored = parts.of(&parameter.name);
            let shape = parts.shape_of(&parameter.name, &parameter.shape);
            let values = match stored.as_slice() {
                [name] => folder.read_f32(name, &shape)?,
                names => {
                    let mut values = Vec::with_capacity(parameter.elements());
                    for name in names {
                        values.extend(folder.read_f32(name, &shape)?);
                    }
                    values
                }
            };
            let (name, dtype) = (parameter.name.clone(), parameter.value.dtype());
            let read = Parameter::from_host(name, &parameter.shape, parameter.role, values, &device);
            *parameter = read.in_format(dtype);
        }
        Ok(())
    }
}
