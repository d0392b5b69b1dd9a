//! Named tensors that train, and their gradients: the one noun that model and optimizer share.
//!
//! Values are stored flat, so that whoever updates, reduces or saves parameters is written once for every rank of tensor.

use std::collections::BTreeMap;
use std::sync::Arc;

use burn_tensor::{DType, Tensor, backend::Backend};

use crate::Kernels;

/// A trainable tensor: a flat f32 value, its shape, and the Hugging Face (or PEFT) name it is saved under.
#[derive(Clone, Debug)]
pub struct Parameter<B: Backend> {
    /// Name on disk, e.g. `model.layers.0.self_attn.q_proj.lora_A.weight`.
    pub name: Arc<str>,
    /// Shape on disk.
    pub shape: Vec<usize>,
    /// The values, row-major, `[elements]`, f32.
    pub value: Tensor<B, 1>,
}

impl<B: Backend> Parameter<B> {
    /// Uploads `values`, row-major in `shape`.
    ///
    /// # Panics
    /// If `values` does not have the number of elements that `shape` says.
    pub fn from_host(name: impl Into<Arc<str>>, shape: &[usize], values: &[f32], device: &B::Device) -> Self {
        let name = name.into();
        let elements: usize = shape.iter().product();
        assert_eq!(values.len(), elements, "parameter {name}: {} values for shape {shape:?}", values.len());
        Self { name, shape: shape.to_vec(), value: Tensor::from_floats(values, device) }
    }

    /// The value as a matrix.
    ///
    /// # Panics
    /// If the parameter is not two-dimensional.
    pub fn matrix(&self) -> Tensor<B, 2> {
        assert_eq!(self.shape.len(), 2, "parameter {} has shape {:?}, a matrix is wanted", self.name, self.shape);
        self.value.clone().reshape([self.shape[0], self.shape[1]])
    }

    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }
}

/// Gradients by parameter name, flat and in f32, summed over everything that was added.
#[derive(Clone, Debug)]
pub struct GradientMap<B: Backend> {
    by_name: BTreeMap<Arc<str>, Tensor<B, 1>>,
}

impl<B: Backend> Default for GradientMap<B> {
    fn default() -> Self {
        Self { by_name: BTreeMap::new() }
    }
}

impl<B: Kernels> GradientMap<B> {
    /// Adds an f32 gradient of any rank to what is there for `parameter`.
    ///
    /// # Panics
    /// If the gradient is not f32, or does not have the parameter's number of elements.
    pub fn add<const D: usize>(&mut self, parameter: &Parameter<B>, gradient: Tensor<B, D>) {
        let elements = gradient.shape().num_elements();
        assert_eq!(elements, parameter.elements(), "gradient of {} has {elements} elements", parameter.name);
        assert_eq!(gradient.dtype(), DType::F32, "gradient of {}", parameter.name);
        let gradient = gradient.reshape([elements]);
        let sum = match self.by_name.remove(&parameter.name) {
            Some(earlier) => B::accumulate(earlier, gradient),
            None => gradient,
        };
        self.by_name.insert(parameter.name.clone(), sum);
    }

    /// The gradient of a parameter, if anything was added.
    pub fn get(&self, name: &str) -> Option<&Tensor<B, 1>> {
        self.by_name.get(name)
    }

    /// Takes the gradient of a parameter out.
    pub fn remove(&mut self, name: &str) -> Option<Tensor<B, 1>> {
        self.by_name.remove(name)
    }

    /// Gradients in name order, which is the same on every rank.
    pub fn iter(&self) -> impl Iterator<Item = (&Arc<str>, &Tensor<B, 1>)> {
        self.by_name.iter()
    }

    /// Replaces each gradient by what `reduce` returns for all of them, in name order (an all-reduce over ranks).
    ///
    /// # Errors
    /// Whatever `reduce` says; the gradients are then gone and the step must not be taken.
    pub fn try_map<E>(
        &mut self,
        reduce: impl FnOnce(Vec<Tensor<B, 1>>) -> Result<Vec<Tensor<B, 1>>, E>,
    ) -> Result<(), E> {
        let (names, gradients): (Vec<_>, Vec<_>) = std::mem::take(&mut self.by_name).into_iter().unzip();
        let count = gradients.len();
        let reduced = reduce(gradients)?;
        assert_eq!(reduced.len(), count, "a reduction must return as many gradients as it was given");
        self.by_name = names.into_iter().zip(reduced).collect();
        Ok(())
    }

    /// Number of parameters with a gradient.
    pub fn len(&self) -> usize {
        self.by_name.len()
    }

    /// Whether nothing was added yet.
    pub fn is_empty(&self) -> bool {
        self.by_name.is_empty()
    }
}
