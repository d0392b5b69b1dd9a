//! Trainable parameters by name, and the destination of their gradients during the backward.
//!
//! Values are stored flat, so that the code that updates, reduces or saves parameters is written once for every shape. A [`GradientSink`] is passed
//! down the backward: a map keeps everything until the step; other sinks reduce over ranks, check for non-finite values, or update on the spot.

use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use burn_tensor::{DType, Tensor, TensorData, backend::Backend};
use firebrick_arch::Role;

use crate::Kernels;
use crate::dtype::to_dtype;

/// A trainable tensor: a flat value, its shape and role, and the Hugging Face (or PEFT) name it is saved under.
#[derive(Clone, Debug)]
pub struct Parameter<B: Backend> {
    /// Name on disk, e.g. `base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight`.
    pub name: Arc<str>,
    /// Shape on disk.
    pub shape: Vec<usize>,
    /// Role by which optimizers group parameters.
    pub role: Role,
    /// The values, row-major, `[elements]`, f32 or bf16.
    pub value: Tensor<B, 1>,
}

impl<B: Backend> Parameter<B> {
    /// Uploads `values`, row-major in `shape`, as f32.
    ///
    /// # Panics
    /// If the length of `values` differs from the elements of `shape`.
    pub fn from_host(
        name: impl Into<Arc<str>>,
        shape: &[usize],
        role: Role,
        values: impl Into<Vec<f32>>,
        device: &B::Device,
    ) -> Self {
        let (name, values) = (name.into(), values.into());
        let elements: usize = shape.iter().product();
        assert_eq!(values.len(), elements, "parameter {name}: {} values for shape {shape:?}", values.len());
        let value = Tensor::from_data(TensorData::new(values, [elements]), (device, DType::F32));
        Self { name, shape: shape.to_vec(), role, value }
    }

    /// Creates zeros in `shape`.
    pub fn zeros(name: impl Into<Arc<str>>, shape: &[usize], role: Role, device: &B::Device) -> Self {
        let value = Tensor::zeros([shape.iter().product::<usize>()], (device, DType::F32));
        Self { name: name.into(), shape: shape.to_vec(), role, value }
    }

    /// Rounds the values to another format.
    #[must_use]
    pub fn in_format(self, dtype: DType) -> Self {
        Self { value: to_dtype(self.value, dtype), ..self }
    }

    /// Returns the value as a matrix.
    ///
    /// # Panics
    /// If the parameter is not two-dimensional.
    pub fn matrix(&self) -> Tensor<B, 2> {
        assert_eq!(self.shape.len(), 2, "parameter {} has shape {:?}, expected a matrix", self.name, self.shape);
        self.value.clone().reshape([self.shape[0], self.shape[1]])
    }

    /// Returns the number of elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }
}

/// Receives gradients as the backward computes them.
///
/// A parameter gets [`Contributions::of`] contributions per micro-batch: one, or two where a tied head adds to the embedding. After
/// the last contribution of the last micro-batch of a step its gradient is complete.
pub trait GradientSink<B: Kernels> {
    /// Begins a micro-batch; `is_last` if no further micro-batch of this step follows.
    fn begin_micro_batch(&mut self, is_last: bool);

    /// Adds a contribution, f32, `[elements]`.
    fn add(&mut self, parameter: &Parameter<B>, gradient: Tensor<B, 1>);

    /// Lends the running sum of a parameter, so that a GEMM can add to it in place. The caller returns the new sum through
    /// [`GradientSink::give_back`], which counts as one contribution. `None`: there is no sum yet, and the caller uses [`GradientSink::add`]. A sum in
    /// bf16 is there from the start, so that no gradient exists in f32.
    fn lend(&mut self, parameter: &Parameter<B>) -> Option<Tensor<B, 1>> {
        let _ = parameter;
        None
    }

    /// Takes back a lent sum, with one more contribution in it.
    fn give_back(&mut self, parameter: &Parameter<B>, sum: Tensor<B, 1>) {
        let _ = (parameter, sum);
        unreachable!("this sink lends nothing");
    }
}

/// Number of contributions that each parameter gets per micro-batch, and how many have arrived.
#[derive(Clone, Debug, Default)]
pub struct Contributions {
    twice: Vec<Arc<str>>,
    arrived: BTreeMap<Arc<str>, usize>,
    is_last: bool,
}

impl Contributions {
    /// Expects two contributions per micro-batch for the named parameters and one for all others.
    pub fn with_twice(twice: Vec<Arc<str>>) -> Self {
        Self { twice, ..Self::default() }
    }

    /// Returns the contributions of a parameter per micro-batch.
    pub fn of(&self, name: &str) -> usize {
        if self.twice.iter().any(|twice| twice.as_ref() == name) { 2 } else { 1 }
    }

    /// Starts a micro-batch.
    ///
    /// # Panics
    /// If a contribution to the previous micro-batch is missing.
    pub fn begin_micro_batch(&mut self, is_last: bool) {
        for (name, &arrived) in &self.arrived {
            let expected = self.of(name);
            assert_eq!(arrived, expected, "{name} got {arrived} of {expected} contributions");
        }
        self.arrived.clear();
        self.is_last = is_last;
    }

    /// Counts one contribution; returns whether the parameter's gradient is now complete for the whole step.
    ///
    /// # Panics
    /// If the parameter gets more contributions than expected.
    pub fn arrive(&mut self, name: &Arc<str>) -> bool {
        let expected = self.of(name);
        let arrived = self.arrived.entry(name.clone()).or_insert(0);
        *arrived += 1;
        assert!(*arrived <= expected, "{name} got {arrived} contributions, expected {expected}");
        self.is_last && *arrived == expected
    }
}

/// Gradients by parameter name, flat and in f32, summed over everything that was added; in an order that is the same on every rank.
#[derive(Clone, Debug)]
pub struct GradientMap<B: Backend> {
    by_name: BTreeMap<Arc<str>, Tensor<B, 1>>,
    /// Whether sums of parameters in bf16 are in bf16.
    has_bf16_sums: bool,
}

impl<B: Backend> Default for GradientMap<B> {
    fn default() -> Self {
        Self { by_name: BTreeMap::new(), has_bf16_sums: false }
    }
}

impl<B: Backend> GradientMap<B> {
    /// Creates a map in which the gradients of parameters in bf16 are summed in bf16 too, if `are_bf16`.
    pub fn with_bf16_sums(are_bf16: bool) -> Self {
        Self { has_bf16_sums: are_bf16, ..Self::default() }
    }
}

impl<B: Kernels> GradientMap<B> {
    /// Returns zeros for the first contribution to a sum in bf16; `None` for sums in f32, which begin as their first contribution.
    fn first_sum(&self, parameter: &Parameter<B>) -> Option<Tensor<B, 1>> {
        let (dtype, elements) = (parameter.value.dtype(), parameter.elements());
        let is_narrow = self.has_bf16_sums && dtype == DType::BF16;
        is_narrow.then(|| B::zeros([1, elements], dtype, &parameter.value.device()).reshape([elements]))
    }
}

impl<B: Kernels> GradientSink<B> for GradientMap<B> {
    fn begin_micro_batch(&mut self, _is_last: bool) {}

    fn add(&mut self, parameter: &Parameter<B>, gradient: Tensor<B, 1>) {
        let elements = gradient.shape().num_elements();
        assert_eq!(elements, parameter.elements(), "gradient of {} has {elements} elements", parameter.name);
        assert_eq!(gradient.dtype(), DType::F32, "gradient of {}", parameter.name);
        let sum = match self.by_name.remove(&parameter.name).or_else(|| self.first_sum(parameter)) {
            Some(earlier) => B::accumulate(earlier, gradient),
            None => gradient,
        };
        self.by_name.insert(parameter.name.clone(), sum);
    }

    fn lend(&mut self, parameter: &Parameter<B>) -> Option<Tensor<B, 1>> {
        self.by_name.remove(&parameter.name).or_else(|| self.first_sum(parameter))
    }

    fn give_back(&mut self, parameter: &Parameter<B>, sum: Tensor<B, 1>) {
        let earlier = self.by_name.insert(parameter.name.clone(), sum);
        assert!(earlier.is_none(), "{} was given back while another sum was there", parameter.name);
    }
}

impl<B: Backend> Deref for GradientMap<B> {
    type Target = BTreeMap<Arc<str>, Tensor<B, 1>>;

    fn deref(&self) -> &Self::Target {
        &self.by_name
    }
}

impl<B: Backend> DerefMut for GradientMap<B> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.by_name
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use crate::testing::{Plain, assert_close, random};

    const MICRO_BATCHES: u64 = 3;

    fn parameter(name: &str, elements: usize) -> Parameter<Plain> {
        Parameter::from_host(name, &[elements], Role::Embedding, vec![0.0; elements], &Default::default())
    }

    fn gradient(seed: u64, elements: usize) -> Tensor<Plain, 1> {
        random(seed, [elements])
    }

    /// Accumulates several micro-batches of a model with a tied embedding (two contributions per micro-batch, one of
    /// them added in place if a sum is lent) and an ordinary parameter.
    fn accumulate(sink: &mut dyn GradientSink<Plain>, mut arrive: impl FnMut(&Arc<str>, bool)) {
        let (tied, plain) = (parameter("tied", 6), parameter("plain", 4));
        for micro_batch in 0..MICRO_BATCHES {
            let is_last = micro_batch + 1 == MICRO_BATCHES;
            sink.begin_micro_batch(is_last);
            match sink.lend(&tied) {
                Some(sum) => sink.give_back(&tied, sum.add(gradient(micro_batch, 6))),
                None => sink.add(&tied, gradient(micro_batch, 6)),
            }
            arrive(&tied.name, is_last);
            sink.add(&plain, gradient(20 + micro_batch, 4));
            arrive(&plain.name, is_last);
            sink.add(&tied, gradient(10 + micro_batch, 6));
            arrive(&tied.name, is_last);
        }
    }

    #[test]
    fn a_map_sums_both_contributions_of_a_tied_parameter_over_all_micro_batches() {
        let mut gradients = GradientMap::<Plain>::default();
        accumulate(&mut gradients, |_, _| {});
        let sum = |seeds: &[u64], elements| seeds.iter().map(|&seed| gradient(seed, elements)).reduce(Tensor::add);
        let tied = sum(&[0, 10, 1, 11, 2, 12], 6).unwrap();
        assert_close(gradients.get("tied").unwrap().clone(), tied, 1e-6);
        assert_close(gradients.get("plain").unwrap().clone(), sum(&[20, 21, 22], 4).unwrap(), 1e-6);
        let names: Vec<_> = gradients.keys().map(|name| name.to_string()).collect();
        assert_eq!((names, gradients.len()), (vec!["plain".to_owned(), "tied".to_owned()], 2));
        assert!(gradients.remove("tied").is_some() && gradients.get("tied").is_none() && !gradients.is_empty());
    }

    #[test]
    fn a_gradient_is_complete_after_the_last_contribution_of_the_last_micro_batch() {
        let mut contributions = Contributions::with_twice(vec!["tied".into()]);
        let (mut micro_batch, mut complete) = (0, Vec::new());
        let mut arrivals = 0;
        accumulate(&mut GradientMap::default(), |name, is_last| {
            if arrivals % 3 == 0 {
                contributions.begin_micro_batch(is_last);
                micro_batch += 1;
            }
            arrivals += 1;
            if contributions.arrive(name) {
                complete.push((micro_batch, arrivals, name.to_string()));
            }
        });
        assert_eq!(complete, [(3, 8, "plain".to_owned()), (3, 9, "tied".to_owned())]);
        contributions.begin_micro_batch(true);
    }

    #[test]
    #[should_panic(expected = "tied got 1 of 2 contributions")]
    fn a_missing_contribution_is_a_bug() {
        let mut contributions = Contributions::with_twice(vec!["tied".into()]);
        contributions.begin_micro_batch(false);
        contributions.arrive(&"tied".into());
        contributions.begin_micro_batch(true);
    }

    #[test]
    #[should_panic(expected = "plain got 2 contributions, expected 1")]
    fn a_contribution_too_many_is_a_bug() {
        let mut contributions = Contributions::default();
        contributions.begin_micro_batch(true);
        contributions.arrive(&"plain".into());
        contributions.arrive(&"plain".into());
    }

    #[test]
    fn sums_of_parameters_in_bf16_are_in_bf16_where_that_is_requested_from_the_start() {
        let narrow = parameter("narrow", 4).in_format(DType::BF16);
        for (are_bf16, dtype) in [(false, DType::F32), (true, DType::BF16)] {
            let mut gradients = GradientMap::with_bf16_sums(are_bf16);
            let lent = gradients.lend(&narrow);
            assert_eq!(lent.is_some(), are_bf16);
            for seed in [1, 2] {
                gradients.add(&narrow, gradient(seed, 4));
                gradients.add(&parameter("plain", 4), gradient(seed, 4));
            }
            let sum = gradients.lend(&narrow).unwrap();
            assert_eq!((sum.dtype(), gradients["plain"].dtype()), (dtype, DType::F32));
            // Each of two sums of values below 1 is off by a rounding step of bf16 at most.
            assert_close(to_dtype(sum, DType::F32), gradients["plain"].clone(), 1e-2);
        }
    }

    #[test]
    #[should_panic(expected = "gradient of plain has 3 elements")]
    fn a_gradient_of_another_size_is_a_bug() {
        GradientMap::default().add(&parameter("plain", 4), gradient(1, 3));
    }

    #[test]
    fn a_parameter_is_a_matrix_of_its_shape() {
        let values = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
        let parameter =
            Parameter::<Plain>::from_host("p", &[2, 3], Role::LoraA, values.as_slice(), &Default::default());
        let expected = Tensor::<Plain, 2>::from_floats([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], &Default::default());
        assert_eq!((parameter.matrix().into_data(), parameter.elements()), (expected.into_data(), 6));
    }
}
