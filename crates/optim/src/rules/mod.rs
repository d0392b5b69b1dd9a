//! Optimizer rules: the update of a parameter in one step, and the state tensors that it needs.
//!
//! A rule is two traits. [`StateLayout`] lists the state tensors of a parameter and depends on no backend, so that a plan can compute the cost of an
//! optimizer. [`Rule`] takes a step over a list of parameters, all with the same [`StepNumbers`]. A new optimizer is a file here, a line in the
//! registry below, and a variant of [`OptimizerKind`](crate::OptimizerKind).

pub(crate) mod adamw;

use std::collections::BTreeMap;

use burn_tensor::Tensor;
use firebrick_arch::{Role, TensorSpec};
use firebrick_kernels::Kernels;

use crate::config::{OptimizerConfig, OptimizerKind};
use crate::paging;
use crate::state::{StateSpec, StateTensor};
use adamw::AdamWRule;

macro_rules! registry {
    ($($($kind:ident)|+ => $rule:expr;)+) => {
        /// Returns the state layout of the configured rule, independent of a backend.
        pub(crate) fn layout(config: &OptimizerConfig) -> Box<dyn StateLayout> {
            match config.kind {
                $($(OptimizerKind::$kind)|+ => Box::new($rule(config)),)+
            }
        }

        pub(crate) fn rule<B: Kernels>(config: &OptimizerConfig) -> Box<dyn Rule<B>> {
            match config.kind {
                $($(OptimizerKind::$kind)|+ => Box::new($rule(config)),)+
            }
        }
    };
}

registry! {
    AdamW | AdamW8bit | PagedAdamW8bit => AdamWRule::new;
}

/// Memory of paged optimizer state, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PagedBytes {
    /// State in host memory.
    pub host: u64,
    /// Maximum device bytes for paged state at the same time.
    pub staging: u64,
}

impl OptimizerConfig {
    /// Returns the device bytes of these parameters' state.
    pub fn state_bytes(&self, tensors: &[TensorSpec]) -> u64 {
        let layout = layout(self);
        let states = tensors.iter().flat_map(|tensor| layout.state(tensor.role, &tensor.shape));
        states.map(|state| state.bytes()).sum()
    }

    /// Returns the cost of paging these parameters' state if `resident_bytes` of it stay on the device, as [`Optimizer::with_paging`] does.
    ///
    /// [`Optimizer::with_paging`]: crate::Optimizer::with_paging
    pub fn paging(&self, tensors: &[TensorSpec], resident_bytes: u64) -> PagedBytes {
        let layout = layout(self);
        let layouts: BTreeMap<_, _> =
            tensors.iter().map(|tensor| (tensor.name.as_str(), layout.state(tensor.role, &tensor.shape))).collect();
        let paged = paging::choose(&layouts, resident_bytes);
        let bytes: Vec<u64> = paged.iter().map(|name| paging::paged_bytes(&layouts[name])).collect();
        let host = bytes.iter().sum();
        let largest = bytes.into_iter().max().unwrap_or(0);
        PagedBytes { host, staging: paging::staging_bytes(host, largest) }
    }
}

pub(crate) trait StateLayout: Send + Sync {
    /// Returns the state tensors of a parameter, in the order in which [`Rule::step`] gets them.
    fn state(&self, role: Role, shape: &[usize]) -> Vec<StateSpec>;
}

pub(crate) trait Rule<B: Kernels>: StateLayout {
    /// Updates parameters that have the same numbers and format; results are in the order of `updates`. Each gradient is first multiplied by
    /// `gradient_scale` `[1]`, which stays on the device.
    ///
    /// Parameters and state arrive with their only handle, so that a backend can update them in place.
    fn step(
        &self,
        updates: Vec<Update<B>>,
        gradient_scale: Tensor<B, 1>,
        numbers: &StepNumbers,
    ) -> Vec<(Tensor<B, 1>, Vec<StateTensor<B>>)>;
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct StepNumbers {
    pub(crate) learning_rate: f64,
    pub(crate) weight_decay: f64,
    /// Number of the step, from 1.
    pub(crate) step: u64,
    pub(crate) seed: u64,
}

/// A parameter with its gradient, both flat, and its state.
pub(crate) struct Update<B: Kernels> {
    pub(crate) parameter: Tensor<B, 1>,
    pub(crate) gradient: Tensor<B, 1>,
    pub(crate) state: Vec<StateTensor<B>>,
    /// Key of the random stream of this parameter in this step.
    pub(crate) key: u64,
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::config::TrainedWeights;

    pub(crate) fn config(kind: OptimizerKind) -> OptimizerConfig {
        let weights = TrainedWeights::default();
        OptimizerConfig {
            kind,
            beta1: 0.9,
            beta2: 0.999,
            epsilon: 1e-8,
            weight_decay: 0.0,
            weights,
            max_grad_norm: None,
        }
    }

    fn tensor(role: Role, shape: &[usize]) -> TensorSpec {
        TensorSpec { name: format!("{role:?}"), shape: shape.to_vec(), role, layer: None }
    }

    #[test]
    fn lower_halves_are_state_of_matrices_alone() {
        let tensors = [tensor(Role::Projection, &[100, 50]), tensor(Role::Norm, &[64]), tensor(Role::Router, &[8, 16])];
        let with = |weights| OptimizerConfig { weights, ..config(OptimizerKind::AdamW8bit) }.state_bytes(&tensors);
        let [exact, others @ ..] =
            [TrainedWeights::Bf16Exact, TrainedWeights::Bf16Stochastic, TrainedWeights::Float32].map(with);
        assert_eq!(others, [exact - 2 * 5000; 2]);
    }

    #[test]
    fn state_bytes_count_moments_scales_and_whole_blocks() {
        let tensors = [tensor(Role::Projection, &[100, 50]), tensor(Role::Norm, &[64])];
        assert_eq!(config(OptimizerKind::AdamW).state_bytes(&tensors), (5000 + 64) * 8);
        // 5,000 elements are 20 blocks of 256.
        for kind in [OptimizerKind::AdamW8bit, OptimizerKind::PagedAdamW8bit] {
            assert_eq!(config(kind).state_bytes(&tensors), 2 * (20 * 256 + 20 * 4) + 64 * 8);
        }
    }
}
