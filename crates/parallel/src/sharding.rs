//! A gradient sink that keeps only this rank's share of the gradients (ZeRO stage 2; Rajbhandari et al., 2020).
//!
//! In every micro-batch a bucket of complete gradients is summed over all ranks, each for the rank that updates its parameter, and only that rank
//! keeps the sum. A bucket is on its way while the next one fills; its sums are added when that one is full. The order of buckets follows from the
//! model alone, so it is the same on every rank.
//! Trade-off: gradients travel in every micro-batch, where [`ReducingSink`](crate::ReducingSink) sends only those of the last one; a bucket holds
//! whole parameters, so it can be as large as the embedding.

use std::collections::BTreeMap;
use std::sync::Arc;

use burn_tensor::Tensor;
use firebrick_kernels::{Contributions, Exchange, GradientMap, GradientSink, Kernels, Parameter};

use crate::error::ParallelError;
use crate::ranks::Ranks;

/// Collects the gradients of a step; each rank gets the sums of the parameters that it owns.
pub struct ShardingSink<B: Kernels> {
    ranks: Ranks,
    owners: BTreeMap<Arc<str>, usize>,
    contributions: Contributions,
    in_last_micro_batch: bool,
    /// Gradients that wait for another contribution of the same micro-batch.
    incomplete: GradientMap<B>,
    capacity: usize,
    bytes: usize,
    /// Complete gradients of this micro-batch, in the order of completion.
    bucket: Vec<(Arc<str>, Tensor<B, 1>)>,
    /// The bucket that is being summed.
    under_way: Option<(Vec<Arc<str>>, Exchange<B>)>,
    /// This rank's share, summed over the micro-batches so far, or the error that prevented it.
    sums: Result<GradientMap<B>, ParallelError>,
}

impl<B: Kernels> ShardingSink<B> {
    /// Creates a sink for one step. `owners` maps parameter names to ranks, as [`Ranks::owners`] returns it; a bucket is sent once it has
    /// `bucket_bytes` bytes.
    pub fn new(
        ranks: &Ranks,
        owners: BTreeMap<Arc<str>, usize>,
        contributions: Contributions,
        bucket_bytes: usize,
    ) -> Self {
        Self {
            ranks: ranks.clone(),
            owners,
            contributions,
            in_last_micro_batch: false,
            incomplete: GradientMap::default(),
            capacity: bucket_bytes,
            bytes: 0,
            bucket: Vec::new(),
            under_way: None,
            sums: Ok(GradientMap::default()),
        }
    }

    /// Sums the gradients of parameters in bf16 in bf16 too, if `are_bf16`, on this rank and over ranks.
    #[must_use]
    pub fn with_bf16_sums(self, are_bf16: bool) -> Self {
        Self { incomplete: GradientMap::with_bf16_sums(are_bf16), ..self }
    }

    /// Sums the remaining gradients and returns those that this rank owns.
    ///
    /// # Errors
    /// The first exchange that failed, here or inside the backward. The step must not be taken.
    ///
    /// # Panics
    /// If the last micro-batch is not over.
    pub fn finish(mut self) -> Result<GradientMap<B>, ParallelError> {
        assert!(self.in_last_micro_batch, "the last micro-batch of the step has not begun");
        self.end_micro_batch();
        self.sums
    }

    /// Checks that every contribution has arrived, and adds the sums that are under way.
    fn end_micro_batch(&mut self) {
        self.contributions.begin_micro_batch(true);
        assert!(self.incomplete.is_empty(), "{} gradients are not complete", self.incomplete.len());
        self.send_bucket();
        self.add_arrived();
    }

    /// Records a contribution that `incomplete` already contains, and passes the gradient on if it was the last one of the micro-batch.
    fn arrive(&mut self, parameter: &Parameter<B>) {
        if !self.contributions.arrive(&parameter.name) {
            return;
        }
        let gradient = self.incomplete.remove(&parameter.name).expect("the contribution was just added");
        self.bytes += parameter.elements() * gradient.dtype().size();
        self.bucket.push((parameter.name.clone(), gradient));
        if self.bytes >= self.capacity {
            self.send_bucket();
        }
    }

    /// Starts to sum the bucket, once the previous one has arrived. After an error nothing is exchanged any more.
    fn send_bucket(&mut self) {
        self.add_arrived();
        let bucket = std::mem::take(&mut self.bucket);
        self.bytes = 0;
        if self.sums.is_err() || bucket.is_empty() {
            return;
        }
        let owned = |(name, gradient): (Arc<str>, _)| {
            let owner = self.owners[&name];
            (name, (gradient, owner))
        };
        let (names, tensors) = bucket.into_iter().map(owned).unzip();
        match self.ranks.communicator().start_reduce(tensors) {
            Ok(exchange) => self.under_way = Some((names, exchange)),
            Err(error) => self.sums = Err(error.into()),
        }
    }

    /// Adds this rank's part of the bucket that was under way.
    fn add_arrived(&mut self) {
        let Some((names, exchange)) = self.under_way.take() else { return };
        let arrived = exchange.finish();
        let Ok(sums) = &mut self.sums else { return };
        for (name, gradient) in names.into_iter().zip(arrived) {
            if self.owners[&name] == self.ranks.rank() {
                let gradient = gradient.into_values();
                let sum = match sums.remove(&name) {
                    Some(earlier) => B::accumulate(earlier, gradient),
                    None => gradient,
                };
                sums.insert(name, sum);
            }
        }
    }
}

impl<B: Kernels> GradientSink<B> for ShardingSink<B> {
    fn begin_micro_batch(&mut self, is_last: bool) {
        assert!(!self.in_last_micro_batch, "a micro-batch follows the last one of the step");
        self.end_micro_batch();
        self.in_last_micro_batch = is_last;
    }

    fn add(&mut self, parameter: &Parameter<B>, gradient: Tensor<B, 1>) {
        self.incomplete.add(parameter, gradient);
        self.arrive(parameter);
    }

    fn lend(&mut self, parameter: &Parameter<B>) -> Option<Tensor<B, 1>> {
        self.incomplete.lend(parameter)
    }

    fn give_back(&mut self, parameter: &Parameter<B>, sum: Tensor<B, 1>) {
        self.incomplete.give_back(parameter, sum);
        self.arrive(parameter);
    }
}
