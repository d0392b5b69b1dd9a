//! Searches a step for the first value that is not finite, by running it again without an update.
//!
//! The order is that of the computation: weights, the outputs of layers, the loss, and gradients as the backward makes them. Steps pay nothing for
//! it: what they learn from stays on the host until their numbers have arrived.
//! Trade-off: a size is the root of a sum of squares in f32, so values beyond 1.8e19 count as not finite, as in the norm of the gradients.

use burn_tensor::Tensor;
use firebrick_data::Batch;
use firebrick_kernels::{GradientSink, Kernels, Parameter};
use serde::{Deserialize, Serialize};

use super::Trainer;
use super::policy::{PolicyBatch, PolicyStep, PolicySums, Sample};
use super::preference::StepCounts;
use crate::error::RunError;

/// What one rank learns from in a step.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(in crate::run) enum StepContent {
    /// Micro-batches of rows of data, with the denominators of the step.
    Rows(Vec<Batch>, StepCounts),
    /// Completions, with their micro-batches.
    Completions(Vec<Sample>, Vec<PolicyBatch>, PolicyStep),
}

impl StepContent {
    pub(in crate::run) fn batches(&self) -> Vec<&Batch> {
        match self {
            Self::Rows(batches, _) => batches.iter().collect(),
            Self::Completions(_, batches, _) => batches.iter().map(|PolicyBatch { batch, .. }| batch).collect(),
        }
    }
}

/// Places of a step in the order in which they are computed, with the norms of their values; those of gradients with the loss scale.
pub(in crate::run) type Sizes = Vec<(String, f32)>;

/// Returns whether a place is not finite, and describes the first such place; else that of the largest gradient.
pub(in crate::run) fn first_not_finite(sizes: &[(String, f32)]) -> (bool, String) {
    if let Some((place, _)) = sizes.iter().find(|(_, size)| !size.is_finite()) {
        return (true, format!("the first value that is not finite, or is too large to be squared, is in {place}"));
    }
    let gradients = sizes.iter().filter(|(place, _)| place.starts_with("the gradient"));
    let largest = gradients.max_by(|(_, one), (_, other)| one.total_cmp(other));
    let largest = largest.map_or("nothing", |(place, _)| place.as_str());
    (false, format!("run again, all of its values are finite, and the largest are in {largest}"))
}

impl<B: Kernels> Trainer<B> {
    /// Runs the step that the settings name again, with the weights as they are, and measures it everywhere. Where ranks divide weights, all of them
    /// do it together.
    pub(in crate::run) fn sizes(&self, content: &StepContent) -> Result<Sizes, RunError> {
        let mut found = Squares::<B> { micro_batch: 0, places: Vec::new() };
        for Parameter { name, value, .. } in self.model.parameters() {
            found.places.push((format!("the value of {name}"), B::squared_norm(std::slice::from_ref(value))));
        }
        for (index, batch) in content.batches().into_iter().enumerate() {
            let Batch { input_ids, targets, positions, cu_seqlens, .. } = batch;
            let outputs = self.model.output_squares(&self.model.upload(input_ids, targets, positions, cu_seqlens)?);
            let layers = (0..outputs.len() - 2).map(|layer| format!("layer {layer}"));
            let names = ["the embedding".to_owned()].into_iter().chain(layers).chain(["the final norm".to_owned()]);
            let place = |of: String| format!("the output of {of} in micro-batch {}", index + 1);
            found.places.extend(names.map(place).zip(outputs));
        }
        let outputs = found.places.len();
        let loss = match content {
            StepContent::Rows(batches, counts) => self.micro_batches(batches, *counts, &mut found)?,
            StepContent::Completions(samples, batches, policy) => {
                self.policy_batches(samples, batches, *policy, &mut PolicySums::default(), &mut found)?
            }
        };
        found.places.insert(outputs, ("the loss".to_owned(), B::squared_norm(&[loss])));
        let (places, squares): (Vec<_>, Vec<_>) = found.places.into_iter().unzip();
        Ok(places.into_iter().zip(B::read_later(squares).wait().into_iter().map(f32::sqrt)).collect())
    }
}

/// Keeps the sum of squares of each gradient, in the order of the backward, and drops the gradient.
struct Squares<B: Kernels> {
    /// From 1.
    micro_batch: usize,
    places: Vec<(String, Tensor<B, 1>)>,
}

impl<B: Kernels> GradientSink<B> for Squares<B> {
    fn begin_micro_batch(&mut self, _is_last: bool) {
        self.micro_batch += 1;
    }

    fn add(&mut self, parameter: &Parameter<B>, gradient: Tensor<B, 1>) {
        let place = format!("the gradient of {} in micro-batch {}", parameter.name, self.micro_batch);
        self.places.push((place, B::squared_norm(&[gradient])));
    }
}
