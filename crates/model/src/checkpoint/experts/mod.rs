//! Splits a stacked expert weight into per-expert tensors, and joins them.
//!
//! A run has one tensor per module of a mixture; files are those of PEFT and Hugging Face, with one tensor per expert, or PEFT's pair of a parameter
//! of experts.

pub(crate) mod fuse;
pub(crate) mod fused;

use std::collections::BTreeMap;
use std::ops::Range;

use firebrick_arch::{OutputOrder, Role, lora_tensor_names};
use firebrick_kernels::{Kernels, Parameter};

use crate::checkpoint::tensor::TensorF32;
use crate::decoder::Decoder;
use crate::linear::Linear;

/// What the parameters of stacks are on disk, by their names.
#[derive(Clone, Debug, Default)]
pub struct StoredParts(BTreeMap<String, Stored>);

/// What a parameter of a stack is on disk.
#[derive(Clone, Debug)]
enum Stored {
    /// One tensor per matrix, in order and with equally many rows each.
    Rows(Vec<String>),
    /// LoRA's A of a parameter of experts.
    A(String),
    /// LoRA's B of a parameter of experts.
    B(String, ParameterB),
}

impl<B: Kernels> Decoder<B> {
    /// Lists the tensors on disk of all trained stacks.
    pub fn stored_parts(&self) -> StoredParts {
        let linears = self.layers.iter().flat_map(|layer| layer.linears());
        let of_linear = |linear| {
            let of = move |parameter: &Parameter<B>| Some((parameter.name.to_string(), stored(linear, parameter)?));
            Linear::parameters(linear).filter_map(of)
        };
        StoredParts(linears.flat_map(of_linear).collect())
    }
}

/// Returns what a parameter is on disk, if it is a stack.
fn stored<B: Kernels>(linear: &Linear<B>, parameter: &Parameter<B>) -> Option<Stored> {
    let stack = linear.stack.as_ref()?;
    let rows = || Some(Stored::Rows(linear.stored_names(parameter)?));
    let Some(adapter) = &stack.adapter else { return rows() };
    let (a, b) = lora_tensor_names(&adapter.path);
    match parameter.role {
        Role::LoraA => Some(Stored::A(a)),
        Role::LoraB => {
            Some(Stored::B(b, ParameterB { experts: stack.experts, r: parameter.shape[1], order: adapter.order }))
        }
        _ => rows(),
    }
}

impl StoredParts {
    /// Returns the names on disk of a parameter's parts: its own if it is no stack.
    pub fn of<'a>(&'a self, parameter: &'a str) -> Vec<&'a str> {
        match self.0.get(parameter) {
            None => vec![parameter],
            Some(Stored::Rows(parts)) => parts.iter().map(String::as_str).collect(),
            Some(Stored::A(name) | Stored::B(name, _)) => vec![name],
        }
    }

    /// Returns the shape of each of the parts of a parameter of this shape.
    pub(crate) fn shape_of(&self, parameter: &str, shape: &[usize]) -> Vec<usize> {
        match self.0.get(parameter) {
            None | Some(Stored::A(_)) => shape.to_vec(),
            Some(Stored::Rows(parts)) => [&[shape[0] / parts.len()], &shape[1..]].concat(),
            Some(Stored::B(_, b)) => vec![shape[0] / b.experts, shape[1] * b.experts],
        }
    }

    /// Returns for each tensor on disk that is a part of a stack the stack's parameter, and which part of how many it is.
    pub(crate) fn places(&self) -> BTreeMap<&str, (&str, usize, usize)> {
        let mut places = BTreeMap::new();
        for (stack, stored) in &self.0 {
            let Stored::Rows(parts) = stored else { continue };
            for (index, part) in parts.iter().enumerate() {
                places.insert(part.as_str(), (stack.as_str(), index, parts.len()));
            }
        }
        places
    }

    /// Divides a parameter into the tensors that are saved.
    pub fn divided(&self, name: String, tensor: TensorF32) -> Vec<(String, TensorF32)> {
        let shape = self.shape_of(&name, &tensor.shape);
        match self.0.get(&name) {
            None => vec![(name, tensor)],
            Some(Stored::A(stored)) => vec![(stored.clone(), tensor)],
            Some(Stored::B(stored, b)) => {
                vec![(stored.clone(), TensorF32 { shape, values: b.of_file(&tensor.values) })]
            }
            Some(Stored::Rows(parts)) => {
                let values = tensor.values.chunks(tensor.values.len() / parts.len());
                let tensor = |values: &[f32]| TensorF32 { shape: shape.clone(), values: values.to_vec() };
                parts.iter().cloned().zip(values.map(tensor)).collect()
            }
        }
    }

    /// Puts the values of a parameter's parts, one after the other, in the order of the run.
    pub(crate) fn put_together(&self, parameter: &str, values: Vec<f32>) -> Vec<f32> {
        match self.0.get(parameter) {
            Some(Stored::B(_, b)) => {
                let all = values.len() / (b.experts * b.r);
                (0..b.experts).flat_map(|expert| b.rows_of(&values, expert, 0..all)).collect()
            }
            _ => values,
        }
    }
}

/// B of a parameter of experts, from its file and back.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ParameterB {
    /// Number of experts: the fastest axis of the columns of the file's `[out, r * experts]`.
    pub(crate) experts: usize,
    pub(crate) r: usize,
    /// Order of the file's rows.
    pub(crate) order: OutputOrder,
}

impl ParameterB {
    /// Returns where the file has the values of a row of an expert, rank by rank; an expert has `rows`.
    fn places(self, expert: usize, row: usize, rows: usize) -> impl Iterator<Item = usize> {
        let output = self.order.output_of(row, rows);
        (0..self.r).map(move |rank| (output * self.r + rank) * self.experts + expert)
    }

    /// Returns these rows of an expert, `[rows, r]`, of the values of a file.
    pub(crate) fn rows_of(self, stored: &[f32], expert: usize, rows: Range<usize>) -> Vec<f32> {
        let all = stored.len() / (self.experts * self.r);
        rows.flat_map(|row| self.places(expert, row, all)).map(|place| stored[place]).collect()
    }

    fn of_file(self, run: &[f32]) -> Vec<f32> {
        let all = run.len() / (self.experts * self.r);
        let mut stored = vec![0.0; run.len()];
        let rows = (0..self.experts).flat_map(|expert| (0..all).map(move |row| (expert, row)));
        for (place, &value) in rows.flat_map(|(expert, row)| self.places(expert, row, all)).zip(run) {
            stored[place] = value;
        }
        stored
    }
}
