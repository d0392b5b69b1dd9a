//! The gradients of adapters in one flat sum, which ranks add up in one exchange.
//!
//! An adapter is hundreds of small tensors. From the first micro-batch on, each has its range in one flat tensor; the backward writes or adds
//! gradients there as it computes them, many in one launch. Ranks exchange that tensor once, and the optimizer gets its ranges. Ranges follow the
//! order of the model's parameters, so they are the same on every rank.
//! Trade-off: one more pass over each gradient than with buckets, and nothing is exchanged before the end of the backward.

use std::collections::BTreeMap;
use std::sync::Arc;

use burn_tensor::Tensor;
use firebrick_arch::Role;
use firebrick_kernels::memory::slices;
use firebrick_kernels::{GradientMap, Kernels, Parameter, RangeGradient};

use crate::error::ParallelError;
use crate::ranks::Ranks;

/// Gradients that are added at once, as many as a launch of the CUDA backend takes.
const TOGETHER: usize = 64;
/// Ranges begin at multiples of this many elements: 16 bytes, as vector loads require.
const ALIGNMENT: usize = 4;

pub(crate) fn are_adapters<B: Kernels>(parameters: &[&Parameter<B>]) -> bool {
    parameters.iter().all(|parameter| matches!(parameter.role, Role::LoraA | Role::LoraB | Role::LoraMagnitude))
}

/// Gradients of the adapters as ranges of one flat tensor.
pub(crate) struct FlatGradients<B: Kernels> {
    ranges: BTreeMap<Arc<str>, Range>,
    /// Elements of the sum.
    length: usize,
    /// `None` before the first gradients.
    sum: Option<Tensor<B, 1>>,
    waiting: Vec<RangeGradient<B>>,
}

struct Range {
    start: usize,
    elements: usize,
    was_written: bool,
}

impl<B: Kernels> FlatGradients<B> {
    /// Allocates the flat tensor for the gradients of these parameters.
    pub(crate) fn new(parameters: &[&Parameter<B>]) -> Self {
        let (mut ranges, mut length) = (BTreeMap::new(), 0);
        for parameter in parameters {
            let range = Range { start: length, elements: parameter.elements(), was_written: false };
            length += range.elements.next_multiple_of(ALIGNMENT);
            ranges.insert(parameter.name.clone(), range);
        }
        Self { ranges, length, sum: None, waiting: Vec::new() }
    }

    pub(crate) fn add(&mut self, parameter: &Parameter<B>, gradient: Tensor<B, 1>) {
        let range = self.ranges.get_mut(&parameter.name).expect("a gradient belongs to a parameter that trains");
        assert_eq!(gradient.dims()[0], range.elements, "elements of the gradient of {}", parameter.name);
        let (start, is_first) = (range.start, !std::mem::replace(&mut range.was_written, true));
        if self.waiting.iter().any(|waiting| waiting.start == start) {
            self.flush();
        }
        self.waiting.push(RangeGradient { start, gradient, is_first });
        if self.waiting.len() == TOGETHER {
            self.flush();
        }
    }

    /// Adds what waits.
    fn flush(&mut self) {
        if !self.waiting.is_empty() {
            let waiting = std::mem::take(&mut self.waiting);
            self.sum = Some(B::accumulate_ranges(self.sum.take(), self.length, waiting));
        }
    }

    /// Sums over all ranks and returns the gradients by name.
    pub(crate) fn finish(mut self, ranks: &Ranks) -> Result<GradientMap<B>, ParallelError> {
        self.flush();
        for (name, range) in &self.ranges {
            assert!(range.was_written, "{name} has no gradient");
        }
        let mut gradients = GradientMap::default();
        let Some(sum) = self.sum else { return Ok(gradients) };
        let sum = ranks.all_reduce_sum::<B>(vec![sum])?.pop().expect("one tensor was summed");
        let (names, ranges): (Vec<_>, Vec<_>) =
            self.ranges.into_iter().map(|(name, range)| (name, (range.start, range.elements))).unzip();
        for (name, gradient) in names.into_iter().zip(slices(sum, &ranges)) {
            gradients.insert(name, gradient);
        }
        Ok(gradients)
    }
}
