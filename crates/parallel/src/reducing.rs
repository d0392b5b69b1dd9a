//! A gradient sink that sums gradients over ranks while the backward still runs.
//!
//! A gradient is complete after its last contribution in the last micro-batch of a step. Complete gradients go into a bucket, and a full bucket is
//! summed over all ranks at once, inside the backward: few large exchanges instead of one per parameter, and all but the last while later layers are
//! still computed. (PyTorch's DistributedDataParallel does the same; Li et al., 2020.)
//!
//! The order of buckets is the order in which gradients become complete. It follows from the model alone, so it is the same on every rank, as
//! collectives require. Gradients of adapters are exchanged differently (`flat.rs`).
//! Trade-off: only the last micro-batch overlaps with communication, and every rank holds all gradients.

use std::sync::Arc;

use burn_tensor::Tensor;
use firebrick_kernels::{Contributions, GradientMap, GradientSink, Kernels, Parameter};

use crate::error::ParallelError;
use crate::flat::{FlatGradients, are_adapters};
use crate::ranks::Ranks;

/// Bytes of gradients that are summed at once, as in PyTorch's DistributedDataParallel.
pub const BUCKET_BYTES: usize = 25 << 20;

/// Collects the gradients of a step and sums them over all ranks. With one rank it is a [`GradientMap`].
pub struct ReducingSink<B: Kernels> {
    ranks: Ranks,
    contributions: Contributions,
    in_last_micro_batch: bool,
    /// Sums over this rank's contributions; with one rank, all gradients until the end.
    local: GradientMap<B>,
    capacity: usize,
    bytes: usize,
    /// Complete gradients that wait to be summed, in the order of completion.
    bucket: Vec<(Arc<str>, Tensor<B, 1>)>,
    /// All gradients, instead of `local` and `bucket`, if only adapters train on several ranks.
    flat: Option<FlatGradients<B>>,
    /// Sums over all ranks, or the error that prevented them.
    reduced: Result<GradientMap<B>, ParallelError>,
}

impl<B: Kernels> ReducingSink<B> {
    /// Creates a sink for one step, with buckets of [`BUCKET_BYTES`].
    pub fn new(ranks: &Ranks, contributions: Contributions) -> Self {
        Self::with_bucket_bytes(ranks, contributions, BUCKET_BYTES)
    }

    /// Creates a sink for one step of these parameters: with buckets of [`BUCKET_BYTES`], or, if only adapters train, with one exchange of all
    /// gradients at the end. Those are small: several exchanges would slow the backward down by more than they hide.
    pub fn for_parameters(ranks: &Ranks, contributions: Contributions, parameters: &[&Parameter<B>]) -> Self {
        let is_flat = ranks.world_size() > 1 && are_adapters(parameters);
        let flat = is_flat.then(|| FlatGradients::new(parameters));
        Self { flat, ..Self::new(ranks, contributions) }
    }

    /// Sums the gradients of parameters in bf16 in bf16 too, if `are_bf16`, on this rank and over ranks.
    #[must_use]
    pub fn with_bf16_sums(self, are_bf16: bool) -> Self {
        Self { local: GradientMap::with_bf16_sums(are_bf16), ..self }
    }

    /// Creates a sink for one step that sums gradients once `bucket_bytes` bytes of them are complete.
    pub fn with_bucket_bytes(ranks: &Ranks, contributions: Contributions, bucket_bytes: usize) -> Self {
        Self {
            ranks: ranks.clone(),
            contributions,
            in_last_micro_batch: false,
            local: GradientMap::default(),
            capacity: bucket_bytes,
            bytes: 0,
            bucket: Vec::new(),
            flat: None,
            reduced: Ok(GradientMap::default()),
        }
    }

    /// Sums the remaining gradients and returns those of the step, the same bits on every rank.
    ///
    /// # Errors
    /// The first exchange that failed, here or inside the backward. The step must not be taken.
    ///
    /// # Panics
    /// If the last micro-batch is not over.
    pub fn finish(mut self) -> Result<GradientMap<B>, ParallelError> {
        assert!(self.in_last_micro_batch, "the last micro-batch of the step has not begun");
        // Checks that every contribution of the last micro-batch has arrived.
        self.contributions.begin_micro_batch(false);
        if self.ranks.world_size() == 1 {
            return Ok(self.local);
        }
        if let Some(flat) = self.flat {
            return flat.finish(&self.ranks);
        }
        assert!(self.local.is_empty(), "{} gradients are not complete", self.local.len());
        self.reduce_bucket();
        self.reduced
    }

    /// Records a contribution that `local` already contains, and passes the gradient on if it was the last one.
    fn arrive(&mut self, parameter: &Parameter<B>) {
        let is_complete = self.contributions.arrive(&parameter.name);
        if !is_complete || self.ranks.world_size() == 1 {
            return;
        }
        let gradient = self.local.remove(&parameter.name).expect("the contribution was just added");
        self.bytes += parameter.elements() * gradient.dtype().size();
        self.bucket.push((parameter.name.clone(), gradient));
        if self.bytes >= self.capacity {
            self.reduce_bucket();
        }
    }

    /// Sums the bucket over all ranks and empties it. After an error nothing is exchanged any more.
    fn reduce_bucket(&mut self) {
        let (names, gradients): (Vec<_>, Vec<_>) = std::mem::take(&mut self.bucket).into_iter().unzip();
        self.bytes = 0;
        let Ok(reduced) = &mut self.reduced else { return };
        if gradients.is_empty() {
            return;
        }
        match self.ranks.all_reduce_sum::<B>(gradients) {
            Ok(sums) => reduced.extend(names.into_iter().zip(sums)),
            Err(error) => self.reduced = Err(error),
        }
    }
}

impl<B: Kernels> GradientSink<B> for ReducingSink<B> {
    fn begin_micro_batch(&mut self, is_last: bool) {
        assert!(!self.in_last_micro_batch, "a micro-batch follows the last one of the step");
        self.in_last_micro_batch = is_last;
        self.contributions.begin_micro_batch(is_last);
        self.local.begin_micro_batch(is_last);
    }

    fn add(&mut self, parameter: &Parameter<B>, gradient: Tensor<B, 1>) {
        if let Some(flat) = &mut self.flat {
            flat.add(parameter, gradient);
            self.contributions.arrive(&parameter.name);
            return;
        }
        self.local.add(parameter, gradient);
        self.arrive(parameter);
    }

    fn lend(&mut self, parameter: &Parameter<B>) -> Option<Tensor<B, 1>> {
        self.local.lend(parameter)
    }

    fn give_back(&mut self, parameter: &Parameter<B>, sum: Tensor<B, 1>) {
        self.local.give_back(parameter, sum);
        self.arrive(parameter);
    }
}
