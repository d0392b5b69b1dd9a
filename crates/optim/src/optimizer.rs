//! The optimizer of a run: clips gradients to their global norm, applies a rule to groups of parameters, and keeps the state by name.
//!
//! Nothing is read back from the device in a step: norm and clip coefficient stay there.
//!
//! Gradients with NaNs or infinities: an element whose gradient is not finite is treated as the rule says (8-bit AdamW keeps the
//! parameter and sets both moments to zero, as bitsandbytes does; f32 AdamW makes the parameter NaN, as torch does). With clipping, the
//! global norm is then not finite either, and the coefficient is 0: all other elements take the step with a gradient of zero. (torch's
//! coefficient is 0 for an infinite norm, too, but NaN for a norm that is NaN, which destroys every parameter.)
//! Trade-off: all gradients of a step exist at the same time.

use std::collections::BTreeMap;
use std::sync::Arc;

use burn_tensor::Tensor;
use firebrick_kernels::{GradientMap, Kernels, Parameter};

use crate::config::OptimizerConfig;
use crate::error::OptimError;
use crate::groups::{Group, by_weight_decay};
use crate::rules::{self, Rule, StepNumbers, Update};
use crate::state::{ParameterState, StateDict, StateSpec, StateTensor};

/// What a step leaves for the log, still on the device.
pub struct StepReport<B: Kernels> {
    /// Global norm of the gradients before clipping, `[1]`.
    pub grad_norm: Tensor<B, 1>,
}

/// An optimizer over named parameters.
pub struct Optimizer<B: Kernels> {
    config: OptimizerConfig,
    rule: Box<dyn Rule<B>>,
    steps: u64,
    /// By parameter name.
    state: BTreeMap<Arc<str>, ParameterState<B>>,
}

impl<B: Kernels> Optimizer<B> {
    /// An optimizer that has taken no step.
    pub fn new(config: OptimizerConfig) -> Self {
        Self { rule: rules::rule(&config), config, steps: 0, state: BTreeMap::new() }
    }

    /// Steps taken so far.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Updates every parameter from its gradient.
    ///
    /// # Panics
    /// If a parameter has no gradient, or a gradient has no parameter: both come from the same model.
    pub fn step(
        &mut self,
        parameters: Vec<&mut Parameter<B>>,
        mut gradients: GradientMap<B>,
        learning_rate: f64,
    ) -> StepReport<B> {
        assert_eq!(
            parameters.len(),
            gradients.len(),
            "every trained parameter needs a gradient, and only those have one"
        );
        self.steps += 1;
        let grad_norm = global_norm(&gradients);
        let scale = self.clip_coefficient(&grad_norm);
        for group in by_weight_decay(parameters, self.config.weight_decay) {
            self.update(group, &mut gradients, scale.clone(), learning_rate);
        }
        StepReport { grad_norm }
    }

    /// One call of the rule for a whole group: an adapter is hundreds of small parameters.
    fn update(&mut self, group: Group<'_, B>, gradients: &mut GradientMap<B>, scale: Tensor<B, 1>, learning_rate: f64) {
        let numbers = StepNumbers { learning_rate, weight_decay: group.weight_decay, step: self.steps };
        let (owners, updates): (Vec<_>, Vec<_>) = group
            .parameters
            .into_iter()
            .map(|owner| {
                let gradient = gradients.remove(&owner.name);
                let gradient = gradient.unwrap_or_else(|| panic!("parameter {} has no gradient", owner.name));
                let state = self.state.remove(&owner.name).unwrap_or_else(|| self.initial_state(owner));
                let parameter = take_value(owner, &gradient);
                ((owner, state.layout), Update { parameter, gradient, state: state.tensors })
            })
            .unzip();
        for ((owner, layout), (value, tensors)) in owners.into_iter().zip(self.rule.step(updates, scale, &numbers)) {
            owner.value = value;
            self.state.insert(owner.name.clone(), ParameterState { layout, tensors });
        }
    }

    /// `min(1, max / (norm + 1e-6))`, as in torch's `clip_grad_norm_`; 0 if the norm is not finite.
    fn clip_coefficient(&self, grad_norm: &Tensor<B, 1>) -> Tensor<B, 1> {
        match self.config.max_grad_norm {
            Some(max) => {
                let coefficient = grad_norm.clone().add_scalar(1e-6).recip().mul_scalar(max).clamp_max(1.0);
                coefficient.mask_fill(grad_norm.clone().is_finite().bool_not(), 0.0)
            }
            None => Tensor::ones([1], &grad_norm.device()),
        }
    }

    fn layout(&self, parameter: &Parameter<B>) -> Vec<StateSpec> {
        self.rule.state(parameter.role, &parameter.shape)
    }

    fn initial_state(&self, parameter: &Parameter<B>) -> ParameterState<B> {
        let (layout, device) = (self.layout(parameter), parameter.value.device());
        ParameterState { tensors: layout.iter().map(|spec| spec.initial(&device)).collect(), layout }
    }

    /// The state by name, for a checkpoint. Waits for the device.
    pub fn save(&self) -> StateDict {
        let mut saved = StateDict::new();
        for (parameter, state) in &self.state {
            for (spec, tensor) in state.layout.iter().zip(&state.tensors) {
                saved.insert(spec.name(parameter), tensor.download());
            }
        }
        saved
    }

    /// Takes over a saved state for all parameters of the run, after `steps` steps.
    ///
    /// # Errors
    /// A state that lacks a tensor, holds one of another size or format, or holds one that no parameter needs. The optimizer is then
    /// unchanged.
    pub fn load(&mut self, parameters: &[&Parameter<B>], mut saved: StateDict, steps: u64) -> Result<(), OptimError> {
        let mut state = BTreeMap::new();
        for parameter in parameters {
            let (layout, device) = (self.layout(parameter), parameter.value.device());
            let load = |spec: &StateSpec| {
                let name = spec.name(&parameter.name);
                match saved.remove(&name) {
                    Some(stored) if spec.matches(&stored) => Ok(StateTensor::upload(stored, &device)),
                    Some(other) => Err(OptimError::Mismatch { name, expected: spec.describe(), got: other.describe() }),
                    None => Err(OptimError::Missing { name }),
                }
            };
            let tensors = layout.iter().map(load).collect::<Result<Vec<_>, _>>()?;
            state.insert(parameter.name.clone(), ParameterState { layout, tensors });
        }
        if let Some((name, _)) = saved.pop_first() {
            return Err(OptimError::Unexpected { name });
        }
        (self.state, self.steps) = (state, steps);
        Ok(())
    }
}

fn global_norm<B: Kernels>(gradients: &GradientMap<B>) -> Tensor<B, 1> {
    let gradients: Vec<_> = gradients.iter().map(|(_, gradient)| gradient.clone()).collect();
    B::squared_norm(&gradients).sqrt()
}

/// Takes the value out and leaves a handle of the gradient in its place. The update then holds the only handle of the value, so that a
/// backend can write in place.
fn take_value<B: Kernels>(parameter: &mut Parameter<B>, gradient: &Tensor<B, 1>) -> Tensor<B, 1> {
    std::mem::replace(&mut parameter.value, gradient.clone())
}

#[cfg(test)]
mod tests {
    use burn_flex::Flex;
    use firebrick_arch::Role;
    use firebrick_kernels::GradientSink;

    use super::*;
    use crate::config::OptimizerKind;
    use crate::state::HostTensor;

    fn config(kind: OptimizerKind, max_grad_norm: Option<f64>) -> OptimizerConfig {
        OptimizerConfig { kind, beta1: 0.9, beta2: 0.999, epsilon: 1e-8, weight_decay: 0.1, max_grad_norm }
    }

    /// A large matrix, a small one, a norm and an embedding that is large enough for 8-bit moments.
    fn parameters() -> Vec<Parameter<Flex>> {
        [
            ("large", vec![80, 64], Role::Projection),
            ("small", vec![4, 4], Role::LoraA),
            ("vector", vec![64], Role::Norm),
            ("table", vec![100, 64], Role::Embedding),
        ]
        .into_iter()
        .map(|(name, shape, role)| {
            let values: Vec<f32> = (0..shape.iter().product()).map(|index| (index as f32 * 0.37).sin()).collect();
            Parameter::from_host(name, &shape, role, &values, &Default::default())
        })
        .collect()
    }

    fn gradient_values(parameter: &Parameter<Flex>, step: u64) -> Vec<f32> {
        (0..parameter.elements()).map(|index| (index as f32 * 0.11 + step as f32).cos()).collect()
    }

    /// The gradients of a step, after `change` was applied to those of `large`.
    fn gradients_with(parameters: &[Parameter<Flex>], step: u64, change: impl Fn(&mut [f32])) -> GradientMap<Flex> {
        let mut gradients = GradientMap::default();
        for parameter in parameters {
            let mut values = gradient_values(parameter, step);
            if parameter.name.as_ref() == "large" {
                change(&mut values);
            }
            gradients.add(parameter, Tensor::<Flex, 1>::from_floats(values.as_slice(), &Default::default()));
        }
        gradients
    }

    fn take_steps(optimizer: &mut Optimizer<Flex>, parameters: &mut [Parameter<Flex>], steps: std::ops::Range<u64>) {
        for step in steps {
            let gradients = gradients_with(parameters, step, |_| {});
            optimizer.step(parameters.iter_mut().collect(), gradients, 1e-2);
        }
    }

    fn values(parameters: &[Parameter<Flex>]) -> Vec<Vec<f32>> {
        parameters.iter().map(|parameter| parameter.value.to_data().to_vec().unwrap()).collect()
    }

    fn load(
        optimizer: &mut Optimizer<Flex>,
        parameters: &[Parameter<Flex>],
        state: StateDict,
    ) -> Result<(), OptimError> {
        optimizer.load(&parameters.iter().collect::<Vec<_>>(), state, 3)
    }

    #[test]
    fn a_saved_and_loaded_optimizer_continues_bit_for_bit() {
        for kind in [OptimizerKind::AdamW, OptimizerKind::AdamW8bit] {
            let new = || Optimizer::new(config(kind, Some(1.0)));
            let (mut uninterrupted, mut expected) = (new(), parameters());
            take_steps(&mut uninterrupted, &mut expected, 0..6);

            let (mut first, mut resumed) = (new(), parameters());
            take_steps(&mut first, &mut resumed, 0..3);
            assert_eq!(first.steps(), 3);
            let mut second = new();
            load(&mut second, &resumed, first.save()).unwrap();
            take_steps(&mut second, &mut resumed, 3..6);
            assert_eq!(values(&expected), values(&resumed));
            assert_eq!(uninterrupted.save(), second.save());
        }
    }

    #[test]
    fn state_tensors_are_named_by_parameter_and_part() {
        let (mut optimizer, mut parameters) = (Optimizer::new(config(OptimizerKind::AdamW8bit, None)), parameters());
        take_steps(&mut optimizer, &mut parameters, 0..1);
        let state = optimizer.save();
        let names: Vec<&str> = state.keys().map(String::as_str).collect();
        let expected = [
            "large.exp_avg.absmax",
            "large.exp_avg.codes",
            "large.exp_avg_sq.absmax",
            "large.exp_avg_sq.codes",
            "small.exp_avg",
            "small.exp_avg_sq",
            "table.exp_avg",
            "table.exp_avg_sq",
            "vector.exp_avg",
            "vector.exp_avg_sq",
        ];
        assert_eq!(names, expected);
        assert!(matches!(state["large.exp_avg.codes"], HostTensor::U8(ref codes) if codes.len() == 80 * 64));
        assert!(matches!(state["small.exp_avg"], HostTensor::F32(ref values) if values.len() == 16));
        assert!(matches!(state["table.exp_avg"], HostTensor::F32(ref values) if values.len() == 6400));
    }

    #[test]
    fn clipping_scales_gradients_to_the_largest_allowed_norm() {
        // The first step depends on the scale of the gradient only through epsilon: compare first moments.
        let first_step = |max_grad_norm| {
            let mut parameters = parameters();
            let mut optimizer = Optimizer::new(config(OptimizerKind::AdamW, max_grad_norm));
            let gradients = gradients_with(&parameters, 0, |_| {});
            let report = optimizer.step(parameters.iter_mut().collect(), gradients, 1e-2);
            let norm: f32 = report.grad_norm.into_scalar();
            let Some(HostTensor::F32(values)) = optimizer.save().remove("large.exp_avg") else {
                panic!("AdamW has f32 moments")
            };
            (norm, values[0])
        };
        let ((norm, unscaled), (same_norm, clipped)) = (first_step(None), first_step(Some(2.0)));
        assert_eq!(norm, same_norm, "the reported norm is that before clipping");
        assert!((clipped / unscaled - 2.0 / norm).abs() < 1e-5 && norm > 2.0);
        let (_, below_the_limit) = first_step(Some(1e6));
        assert_eq!(below_the_limit, unscaled);
    }

    #[test]
    fn weight_decay_applies_to_all_roles_but_norms_and_biases() {
        let roles = [
            (Role::Embedding, true),
            (Role::Projection, true),
            (Role::Head, true),
            (Role::LoraA, true),
            (Role::LoraB, true),
            (Role::Norm, false),
            (Role::Bias, false),
        ];
        let device = Default::default();
        let mut parameters: Vec<Parameter<Flex>> = roles
            .map(|(role, _)| Parameter::from_host(format!("{role:?}"), &[1, 2], role, &[0.5, -2.0], &device))
            .into();
        let mut gradients = GradientMap::default();
        for parameter in &parameters {
            gradients.add(parameter, Tensor::<Flex, 1>::zeros([2], &device));
        }
        let mut optimizer = Optimizer::new(config(OptimizerKind::AdamW, None));
        optimizer.step(parameters.iter_mut().collect(), gradients, 1e-2);
        for ((role, decays), values) in roles.into_iter().zip(values(&parameters)) {
            let factor = if decays { 1.0 - 1e-2 * 0.1 } else { 1.0 };
            assert!((values[0] - 0.5 * factor).abs() < 1e-7 && (values[1] + 2.0 * factor).abs() < 1e-6, "{role:?}");
        }
    }

    #[test]
    fn a_non_finite_gradient_leaves_its_parameter_as_it_was_and_all_others_finite() {
        for max_grad_norm in [None, Some(1.0)] {
            for bad in [f32::NAN, f32::INFINITY] {
                let mut parameters = parameters();
                let mut optimizer = Optimizer::new(config(OptimizerKind::AdamW8bit, max_grad_norm));
                take_steps(&mut optimizer, &mut parameters, 0..1);
                let before = values(&parameters);
                let gradients = gradients_with(&parameters, 1, |values| values[300] = bad);
                let report = optimizer.step(parameters.iter_mut().collect(), gradients, 1e-2);
                let norm: f32 = report.grad_norm.into_scalar();
                assert!(!norm.is_finite(), "the report shows the norm as it is");
                let after = values(&parameters);
                assert_eq!(after[0][300], before[0][300]);
                assert_ne!(after[0][301], before[0][301]);
                assert!(after.iter().flatten().all(|value| value.is_finite()));
                assert!(optimizer.save().values().all(|tensor| match tensor {
                    HostTensor::F32(values) => values.iter().all(|value| value.is_finite()),
                    HostTensor::U8(_) => true,
                }));
            }
        }
    }

    #[test]
    fn a_state_of_another_recipe_is_refused_by_name() {
        let mut parameters = parameters();
        let mut adamw = Optimizer::new(config(OptimizerKind::AdamW, None));
        take_steps(&mut adamw, &mut parameters, 0..1);
        let mut in_8_bits = Optimizer::new(config(OptimizerKind::AdamW8bit, None));
        let message = load(&mut in_8_bits, &parameters, adamw.save()).unwrap_err().to_string();
        assert!(message.contains("lacks `large.exp_avg.codes`"), "{message}");
        assert_eq!((in_8_bits.steps(), in_8_bits.save().len()), (0, 0), "a state that is refused changes nothing");

        let mut short = adamw.save();
        short.insert("small.exp_avg".into(), HostTensor::F32(vec![0.0; 3]));
        let message = load(&mut adamw, &parameters, short).unwrap_err().to_string();
        assert!(message.contains("`small.exp_avg` has 3 f32 values, expected 16 f32 values"), "{message}");

        let mut foreign = adamw.save();
        foreign.insert("other.exp_avg".into(), HostTensor::F32(vec![0.0]));
        let message = load(&mut adamw, &parameters, foreign).unwrap_err().to_string();
        assert!(message.contains("`other.exp_avg`"), "{message}");
    }
}
