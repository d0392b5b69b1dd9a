//! AdamW (Loshchilov and Hutter, Decoupled weight decay regularization, 2019) with moments in f32 or in 8 bits.
//!
//! The 8-bit form is that of bitsandbytes: dynamic maps and blocks of 256. As there and in Hugging Face's trainer, parameters of fewer
//! than 4,096 elements and the embedding keep f32 moments. A tied head is the embedding.
//! The state of a matrix whose upper half alone is the parameter ends with the lower halves of its values.

use burn_tensor::{DType, Tensor};
use firebrick_arch::Role;
use firebrick_kernels::{AdamW, AdamWState, EightBitMoments, Kernels, Moments, Rounding};
use firebrick_precision::{DynamicMap, FloatType, blockwise::BLOCK_SIZE};

use super::{Rule, StateLayout, StepNumbers, Update};
use crate::config::{OptimizerConfig, OptimizerKind, TrainedWeights};
use crate::state::{StateInit, StateSpec, StateTensor};

/// Parameters with fewer elements keep f32 moments in the 8-bit optimizer (`min_8bit_size` of bitsandbytes).
pub const MIN_8BIT_ELEMENTS: usize = 4096;

pub(crate) struct AdamWRule {
    constants: OptimizerConfig,
    in_8_bits: bool,
}

impl AdamWRule {
    pub(crate) fn new(config: &OptimizerConfig) -> Self {
        Self { constants: *config, in_8_bits: config.kind != OptimizerKind::AdamW }
    }

    fn moments(&self, role: Role, elements: usize) -> Vec<StateSpec> {
        let zeros = |part, elements| StateSpec { part, elements, init: StateInit::F32(0.0) };
        if !self.in_8_bits || role == Role::Embedding || elements < MIN_8BIT_ELEMENTS {
            return vec![zeros("exp_avg", elements), zeros("exp_avg_sq", elements)];
        }
        let blocks = elements.div_ceil(BLOCK_SIZE);
        let codes = |part, map: &DynamicMap| StateSpec {
            part,
            elements: blocks * BLOCK_SIZE,
            init: StateInit::Code(map.nearest(0.0)),
        };
        vec![
            codes("exp_avg.codes", DynamicMap::signed()),
            zeros("exp_avg.absmax", blocks),
            codes("exp_avg_sq.codes", DynamicMap::unsigned()),
            zeros("exp_avg_sq.absmax", blocks),
        ]
    }
}

impl StateLayout for AdamWRule {
    fn state(&self, role: Role, shape: &[usize]) -> Vec<StateSpec> {
        let (elements, weights) = (shape.iter().product(), self.constants.weights);
        let mut state = self.moments(role, elements);
        let is_bf16 = weights.storage().trained_format(role) == FloatType::Bf16;
        if is_bf16 && weights == TrainedWeights::Bf16Exact {
            state.push(StateSpec { part: "low_bits", elements: 2 * elements, init: StateInit::Code(0) });
        }
        state
    }
}

impl<B: Kernels> Rule<B> for AdamWRule {
    fn step(
        &self,
        updates: Vec<Update<B>>,
        gradient_scale: Tensor<B, 1>,
        numbers: &StepNumbers,
    ) -> Vec<(Tensor<B, 1>, Vec<StateTensor<B>>)> {
        let OptimizerConfig { beta1, beta2, epsilon, .. } = self.constants;
        let &StepNumbers { learning_rate, weight_decay, step, .. } = numbers;
        let hyper = AdamW { learning_rate, beta1, beta2, epsilon, weight_decay, step };
        if updates.iter().any(|update| update.parameter.dtype() == DType::BF16) {
            let take = |Update { parameter, gradient, mut state, key }: Update<B>| {
                let rounding = match self.constants.weights {
                    TrainedWeights::Bf16Exact => match state.pop() {
                        Some(StateTensor::Codes(lower)) => Rounding::Exact(lower),
                        _ => panic!("the state of a matrix ends with its lower halves"),
                    },
                    TrainedWeights::Bf16Stochastic | TrainedWeights::Float32 => Rounding::Stochastic(key),
                };
                ((AdamWState { parameter, moments: moments(state) }, rounding), gradient)
            };
            let (states, gradients) = updates.into_iter().map(take).unzip();
            let updated = B::adamw_bf16_foreach(states, gradients, gradient_scale, &hyper);
            let give = |(AdamWState { parameter, moments }, rounding)| {
                let mut state = into_state(moments);
                if let Rounding::Exact(lower) = rounding {
                    state.push(StateTensor::Codes(lower));
                }
                (parameter, state)
            };
            return updated.into_iter().map(give).collect();
        }
        let (mut states, mut gradients) = (Vec::with_capacity(updates.len()), Vec::with_capacity(updates.len()));
        for Update { parameter, gradient, state, .. } in updates {
            states.push(AdamWState { parameter, moments: moments(state) });
            gradients.push(gradient);
        }
        let updated = B::adamw_foreach(states, gradients, gradient_scale, &hyper);
        updated.into_iter().map(|AdamWState { parameter, moments }| (parameter, into_state(moments))).collect()
    }
}

/// Takes the moments from tensors in the order of [`AdamWRule::state`].
fn moments<B: Kernels>(state: Vec<StateTensor<B>>) -> Moments<B> {
    use StateTensor::{Codes, F32};
    let mut tensors = state.into_iter();
    match (tensors.next(), tensors.next(), tensors.next(), tensors.next()) {
        (Some(F32(first)), Some(F32(second)), None, None) => Moments::F32 { first, second },
        (Some(Codes(first_codes)), Some(F32(first_absmax)), Some(Codes(second_codes)), Some(F32(second_absmax))) => {
            let moments = EightBitMoments { first_codes, first_absmax, second_codes, second_absmax };
            Moments::EightBit(Box::new(moments))
        }
        _ => panic!("AdamW's state has two f32 tensors, or codes and scales of two moments"),
    }
}

fn into_state<B: Kernels>(moments: Moments<B>) -> Vec<StateTensor<B>> {
    use StateTensor::{Codes, F32};
    match moments {
        Moments::F32 { first, second } => vec![F32(first), F32(second)],
        Moments::EightBit(moments) => {
            let EightBitMoments { first_codes, first_absmax, second_codes, second_absmax } = *moments;
            vec![Codes(first_codes), F32(first_absmax), Codes(second_codes), F32(second_absmax)]
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::tests::config;

    fn rule() -> AdamWRule {
        AdamWRule::new(&config(OptimizerKind::AdamW8bit))
    }

    fn has_8bit_moments(role: Role, shape: &[usize]) -> bool {
        rule().state(role, shape).iter().any(|state| matches!(state.init, StateInit::Code(_)))
    }

    #[test]
    fn the_8_bit_embedding_keeps_f32_moments() {
        let parts: Vec<_> = rule().state(Role::Embedding, &[1000, 64]).iter().map(|state| state.part).collect();
        assert_eq!(parts, ["exp_avg", "exp_avg_sq"]);
        for role in [Role::Head, Role::Projection, Role::LoraA, Role::LoraB] {
            assert!(has_8bit_moments(role, &[1000, 64]), "{role:?}");
        }
    }

    #[test]
    fn small_parameters_keep_f32_moments() {
        assert!(!has_8bit_moments(Role::Projection, &[MIN_8BIT_ELEMENTS - 1]));
        assert!(has_8bit_moments(Role::Projection, &[MIN_8BIT_ELEMENTS]));
    }
}
