//! The matrices of a stack on disk: a module of a mixture is one tensor of a run, and one tensor per expert in folders of models and adapters.
//!
//! A parameter of a stack is divided where it is saved and put together where it is read, so files are those of PEFT and Hugging Face.
//! Trade-off: a stack that is put together is in host memory twice for a moment.

use std::collections::BTreeMap;

use firebrick_kernels::{Kernels, Parameter};

use crate::decoder::Decoder;
use crate::linear::Linear;
use crate::weights::TensorF32;

/// The tensors on disk that the rows of each parameter are, in order and equally many rows each, for those that are stacks; by the parameter's name.
#[derive(Clone, Debug, Default)]
pub struct StoredParts(BTreeMap<String, Vec<String>>);

impl<B: Kernels> Decoder<B> {
    /// Lists the tensors on disk of all trained stacks.
    pub fn stored_parts(&self) -> StoredParts {
        let linears = self.layers.iter().flat_map(|layer| layer.linears());
        let of_linear = |linear| {
            let of = move |parameter: &Parameter<B>| {
                Some((parameter.name.to_string(), Linear::stored_names(linear, parameter)?))
            };
            linear.parameters().filter_map(of)
        };
        StoredParts(linears.flat_map(of_linear).collect())
    }
}

impl StoredParts {
    /// Returns the names on disk of a parameter's parts: its own if it is no stack.
    pub fn of<'a>(&'a self, parameter: &'a str) -> Vec<&'a str> {
        self.0.get(parameter).map_or_else(|| vec![parameter], |parts| parts.iter().map(String::as_str).collect())
    }

    /// Returns for each tensor on disk that is a part of a stack the stack's parameter, and which part of how many it is.
    pub(crate) fn places(&self) -> BTreeMap<&str, (&str, usize, usize)> {
        let mut places = BTreeMap::new();
        for (stack, parts) in &self.0 {
            for (index, part) in parts.iter().enumerate() {
                places.insert(part.as_str(), (stack.as_str(), index, parts.len()));
            }
        }
        places
    }

    /// Divides a parameter into the tensors that are saved.
    pub(crate) fn divided(&self, name: String, tensor: TensorF32) -> Vec<(String, TensorF32)> {
        let Some(parts) = self.0.get(&name) else { return vec![(name, tensor)] };
        let shape = shape_of_part(&tensor.shape, parts.len());
        let each = tensor.values.len() / parts.len();
        let values =
            tensor.values.chunks(each).map(|values| TensorF32 { shape: shape.clone(), values: values.to_vec() });
        parts.iter().cloned().zip(values).collect()
    }
}

/// Returns the shape of one of the parts of a parameter.
pub(crate) fn shape_of_part(shape: &[usize], parts: usize) -> Vec<usize> {
    [&[shape[0] / parts], &shape[1..]].concat()
}
