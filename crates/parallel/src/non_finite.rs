//! A gradient sink that finds the parameter whose gradient is the first with a NaN or an infinity.
//!
//! For each contribution it keeps one number on the device, the sum of its squares, which is not finite if any value is not. Nothing is
//! read back until [`NonFiniteSink::first_non_finite`] is called.
//! Trade-off: one more pass over every gradient. It lends no sums, so a GEMM cannot add to a gradient in place: an earlier NaN of a sum
//! would hide where a later one comes from. A finite gradient whose squares overflow f32 (a norm above 1.8e19) counts as not finite.

use std::sync::Arc;

use burn_tensor::Tensor;
use firebrick_kernels::{GradientSink, Kernels, Parameter};

/// Passes every contribution on to another sink, and remembers whether it was finite.
pub struct NonFiniteSink<B: Kernels, S> {
    inner: S,
    /// In the order in which contributions arrive in each micro-batch.
    flags: Vec<Flag<B>>,
    /// The flag of the next contribution.
    next: usize,
}

/// Whether one contribution of a parameter was finite in every micro-batch so far.
struct Flag<B: Kernels> {
    name: Arc<str>,
    /// Sums of squares over all micro-batches, `[1]`: not finite once one of them was not.
    squares: Tensor<B, 1>,
}

impl<B: Kernels, S: GradientSink<B>> NonFiniteSink<B, S> {
    /// Passes contributions on to `inner`.
    pub fn new(inner: S) -> Self {
        Self { inner, flags: Vec::new(), next: 0 }
    }

    /// The sink that got all contributions.
    pub fn into_inner(self) -> S {
        self.inner
    }

    /// The name of the first parameter, in the order of the backward, with a contribution that holds a NaN or an infinity. Waits for
    /// the device; call it outside of a section.
    pub fn first_non_finite(&self) -> Option<Arc<str>> {
        if self.flags.is_empty() {
            return None;
        }
        let squares = Tensor::cat(self.flags.iter().map(|flag| flag.squares.clone()).collect(), 0);
        let squares: Vec<f32> = squares.into_data().to_vec().expect("a squared norm is f32");
        let first = squares.iter().position(|squares| !squares.is_finite())?;
        Some(self.flags[first].name.clone())
    }
}

impl<B: Kernels, S: GradientSink<B>> GradientSink<B> for NonFiniteSink<B, S> {
    fn begin_micro_batch(&mut self, is_last: bool) {
        self.next = 0;
        self.inner.begin_micro_batch(is_last);
    }

    fn add(&mut self, parameter: &Parameter<B>, gradient: Tensor<B, 1>) {
        let squares = B::squared_norm(std::slice::from_ref(&gradient));
        match self.flags.get_mut(self.next) {
            Some(flag) => {
                assert_eq!(flag.name, parameter.name, "contributions arrive in the same order in every micro-batch");
                flag.squares = B::accumulate(flag.squares.clone(), squares);
            }
            None => self.flags.push(Flag { name: parameter.name.clone(), squares }),
        }
        self.next += 1;
        self.inner.add(parameter, gradient);
    }
}
