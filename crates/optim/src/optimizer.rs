//! The optimizer of a run: clips gradients to their global norm, applies a rule to groups of parameters, and keeps the state by name.
//!
//! Nothing is waited for in a step: norm and clip coefficient stay on the device. With loss scaling, what became of the preceding step is
//! read, which the device has computed by then.
//!
//! Gradients with NaNs or infinities: with loss scaling the whole step is skipped. Without, an element whose gradient is not finite is
//! treated as the rule says (8-bit AdamW keeps the parameter and sets both moments to zero, as bitsandbytes does; f32 AdamW makes the
//! parameter NaN, as torch does). With clipping, the global norm is then not finite either, and the coefficient is 0: all other elements
//! take the step with a gradient of zero. (torch's coefficient is 0 for an infinite norm, too, but NaN for a norm that is NaN, which
//! destroys every parameter.)
//! Trade-off: all gradients of a step exist at the same time.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use burn_tensor::Tensor;
use firebrick_kernels::memory::prefetch::Schedule;
use firebrick_kernels::{GradientMap, Kernels, Parameter};

use crate::config::OptimizerConfig;
use crate::error::OptimError;
use crate::groups::{Group, by_numbers};
use crate::loss_scale::{LossScaleState, LossScaler, LossScaling};
use crate::paging::{self, BUCKETS_AHEAD, PagedState};
use crate::rules::{self, Rule, StepNumbers, Update};
use crate::state::{ParameterState, StateDict, StateSpec, StateTensor};

/// What a step leaves for the log, still on the device.
pub struct StepReport<B: Kernels> {
    /// Global norm of the gradients before clipping, `[1]`. With loss scaling it is that of the gradients without the scale, and not
    /// finite if the step was skipped.
    pub grad_norm: Tensor<B, 1>,
    /// The scale of this step's gradients, `[1]`, with loss scaling.
    pub loss_scale: Option<Tensor<B, 1>>,
}

/// An optimizer over named parameters.
pub struct Optimizer<B: Kernels> {
    config: OptimizerConfig,
    rule: Box<dyn Rule<B>>,
    steps: u64,
    /// By parameter name.
    state: BTreeMap<Arc<str>, ParameterState<B>>,
    /// Bytes of state that stay on the device; `None`: all.
    resident_bytes: Option<u64>,
    /// The parameters whose state is paged, once they are known.
    paged: Option<BTreeSet<Arc<str>>>,
    loss_scaler: Option<LossScaler<B>>,
    /// The parameters that are updated here; `None`: all.
    owned: Option<BTreeSet<Arc<str>>>,
    /// Factor of the learning rate of LoRA's B.
    loraplus_lr_ratio: f64,
}

/// Parameters on their way through an update, with the layouts of their state.
type Owners<'a, B> = Vec<(&'a mut Parameter<B>, Vec<StateSpec>)>;

impl<B: Kernels> Optimizer<B> {
    /// An optimizer that has taken no step.
    pub fn new(config: OptimizerConfig) -> Self {
        Self {
            rule: rules::rule(&config),
            config,
            steps: 0,
            state: BTreeMap::new(),
            resident_bytes: None,
            paged: None,
            loss_scaler: None,
            owned: None,
            loraplus_lr_ratio: 1.0,
        }
    }

    /// The same optimizer, in which B and trained vectors learn at `ratio` times the learning rate (LoRA+).
    #[must_use]
    pub fn with_loraplus(self, ratio: f64) -> Self {
        Self { loraplus_lr_ratio: ratio, ..self }
    }

    /// The same optimizer, which updates only these parameters, and has no state of the others. The norm is still that of all gradients.
    #[must_use]
    pub fn owning(self, names: impl IntoIterator<Item = Arc<str>>) -> Self {
        Self { owned: Some(names.into_iter().collect()), ..self }
    }

    /// Whether it updates only some of the parameters.
    pub fn is_partial(&self) -> bool {
        self.owned.is_some()
    }

    fn owns(&self, name: &str) -> bool {
        self.owned.as_ref().is_none_or(|owned| owned.contains(name))
    }

    /// The same optimizer, which keeps only `resident_bytes` of its state on the device between two steps, as far as that can be met,
    /// and the rest in host memory, on backends that can copy while other work runs. Its numbers are the same bit for bit.
    #[must_use]
    pub fn with_paging(self, resident_bytes: u64) -> Self {
        Self { resident_bytes: Some(resident_bytes), ..self }
    }

    /// The same optimizer, for gradients that were multiplied by [`Optimizer::loss_scale`].
    #[must_use]
    pub fn with_loss_scaling(self, scaling: LossScaling, device: &B::Device) -> Self {
        Self { loss_scaler: Some(LossScaler::new(scaling, device)), ..self }
    }

    /// Steps so far, those included that were skipped.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// The number of the next update, from 1: skipped steps do not count. Waits for the end of the last step if there is loss scaling.
    pub fn next_update(&mut self) -> u64 {
        let skipped = self.loss_scaler.as_mut().map_or(0, LossScaler::skipped_steps);
        self.steps - skipped + 1
    }

    /// What the gradients of the next step must be multiplied by, `[1]`; `None`: by nothing.
    pub fn loss_scale(&self) -> Option<Tensor<B, 1>> {
        self.loss_scaler.as_ref().map(LossScaler::scale)
    }

    /// Where loss scaling stands, for a checkpoint; `None` without it. Waits for the device.
    pub fn loss_scale_state(&mut self) -> Option<LossScaleState> {
        self.loss_scaler.as_mut().map(LossScaler::state)
    }

    /// Continues loss scaling from a checkpoint.
    ///
    /// # Panics
    /// Without loss scaling.
    pub fn restore_loss_scale(&mut self, state: LossScaleState) {
        let scaler = self.loss_scaler.as_mut();
        scaler.expect("only an optimizer with loss scaling has such a state").restore(state);
    }

    /// Bytes of state in host memory.
    pub fn paged_bytes(&self) -> u64 {
        let paged = self.paged.iter().flatten().filter_map(|name| self.state.get(name));
        paged.map(|state| paging::paged_bytes(&state.layout)).sum()
    }

    /// Updates every parameter from its gradient.
    ///
    /// # Panics
    /// If a parameter has no gradient, or a gradient has no parameter: both come from the same model.
    pub fn step(
        &mut self,
        parameters: Vec<&mut Parameter<B>>,
        gradients: GradientMap<B>,
        learning_rate: f64,
    ) -> StepReport<B> {
        let squared_norm = squared_norm(&gradients).expect("a step has gradients");
        self.step_of_share(parameters, gradients, squared_norm, learning_rate)
    }

    /// As [`Optimizer::step`], where ranks divide the gradients: `parameters` are those that have one here, and `squared_norm` `[1]` is
    /// that of the gradients of all ranks.
    ///
    /// # Panics
    /// As [`Optimizer::step`].
    pub fn step_of_share(
        &mut self,
        parameters: Vec<&mut Parameter<B>>,
        mut gradients: GradientMap<B>,
        squared_norm: Tensor<B, 1>,
        learning_rate: f64,
    ) -> StepReport<B> {
        assert_eq!(
            parameters.len(),
            gradients.len(),
            "every trained parameter needs a gradient, and only those have one"
        );
        let update = self.next_update();
        self.steps += 1;
        let loss_scale = self.loss_scale();
        let (grad_norm, scale) = self.gradient_scale(squared_norm.sqrt());
        let parameters = parameters.into_iter().filter(|parameter| self.owns(&parameter.name)).collect::<Vec<_>>();
        self.prepare(&parameters);
        for group in by_numbers(parameters, self.config.weight_decay, self.loraplus_lr_ratio) {
            let learning_rate = learning_rate * group.rate_factor;
            let numbers = StepNumbers { learning_rate, weight_decay: group.weight_decay, step: update };
            self.update(group, &mut gradients, &scale, &numbers);
        }
        if let Some(scaler) = &mut self.loss_scaler {
            scaler.end_step(grad_norm.clone().is_finite());
        }
        StepReport { grad_norm, loss_scale }
    }

    /// The global norm without the loss scale, and the factor of the gradients in the update: not finite if the step is skipped.
    fn gradient_scale(&self, norm: Tensor<B, 1>) -> (Tensor<B, 1>, Tensor<B, 1>) {
        let Some(scaler) = &self.loss_scaler else {
            let coefficient = self.clip_coefficient(&norm);
            return (norm, coefficient);
        };
        let inverse = scaler.scale().recip();
        let norm = norm.mul(inverse.clone());
        let coefficient = self.clip_coefficient(&norm).mul(inverse);
        let is_skipped = norm.clone().is_finite().bool_not();
        (norm, coefficient.mask_fill(is_skipped, f32::NAN))
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

    /// Decides what is paged, and creates the state of parameters that have none.
    fn prepare(&mut self, parameters: &[&mut Parameter<B>]) {
        if self.paged.is_none() {
            self.paged = Some(self.choose_paged(parameters.iter().map(|parameter| &**parameter)));
        }
        for parameter in parameters {
            if !self.state.contains_key(&parameter.name) {
                let (layout, device) = (self.layout(parameter), parameter.value.device());
                let tensors = layout.iter().map(|spec| spec.initial(&device)).collect();
                self.keep(parameter.name.clone(), ParameterState::new(layout, tensors));
            }
        }
    }

    fn choose_paged<'a>(&self, parameters: impl Iterator<Item = &'a Parameter<B>>) -> BTreeSet<Arc<str>> {
        let Some(resident_bytes) = self.resident_bytes else { return BTreeSet::new() };
        let layouts = parameters.map(|parameter| (parameter.name.as_ref(), self.layout(parameter))).collect();
        paging::choose(&layouts, resident_bytes).into_iter().map(Arc::from).collect()
    }

    fn is_paged(&self, name: &str) -> bool {
        self.paged.as_ref().is_some_and(|paged| paged.contains(name))
    }

    /// Keeps state where it belongs between two steps.
    fn keep(&mut self, name: Arc<str>, state: ParameterState<B>) {
        let state = if self.is_paged(&name) { state.paged() } else { state };
        self.state.insert(name, state);
    }

    /// One call of the rule for all state of a group that is on the device, since an adapter is hundreds of small parameters, and one
    /// per bucket of paged state, while the next buckets are on their way. In one section: copies to the host are waited for at its
    /// end.
    fn update(
        &mut self,
        group: Group<'_, B>,
        gradients: &mut GradientMap<B>,
        scale: &Tensor<B, 1>,
        numbers: &StepNumbers,
    ) {
        let (paged, resident): (Vec<_>, Vec<_>) =
            group.parameters.into_iter().partition(|parameter| self.is_paged(&parameter.name));
        let rule = &self.rule;
        let buckets =
            paging::buckets(paged, |parameter| paging::paged_bytes(&rule.state(parameter.role, &parameter.shape)));
        let mut take = |parameter: &Parameter<B>| self.state.remove(&parameter.name).expect("state was prepared");
        let resident = resident.into_iter().map(|parameter| (take(parameter), parameter)).collect::<Vec<_>>();
        let (device, state) = (scale.device(), &mut self.state);
        let names = |bucket: &Vec<&mut Parameter<B>>| bucket.iter().map(|parameter| parameter.name.clone()).collect();
        let mut store = PagedState { state, buckets: buckets.iter().map(names).collect(), device: device.clone() };
        let updated = B::section(&device, || {
            let mut schedule = Schedule::new(&mut store, 0..buckets.len(), BUCKETS_AHEAD);
            let updated = step_parameters(rule.as_ref(), resident, gradients, scale, numbers);
            for bucket in buckets {
                let (index, states) = schedule.next_item().expect("the schedule has one item per bucket");
                let parameters = states.into_iter().zip(bucket).collect();
                let states = step_parameters(rule.as_ref(), parameters, gradients, scale, numbers);
                schedule.put(index, states.into_iter().map(|(_, state)| state).collect());
            }
            updated
        });
        self.state.extend(updated);
    }

    fn layout(&self, parameter: &Parameter<B>) -> Vec<StateSpec> {
        self.rule.state(parameter.role, &parameter.shape)
    }

    /// The state by name, for a checkpoint. Waits for the device.
    pub fn save(&self) -> StateDict {
        let mut saved = StateDict::new();
        for (parameter, state) in &self.state {
            saved.extend(state.download().map(|(spec, tensor)| (spec.name(parameter), tensor)));
        }
        saved
    }

    /// Takes over a saved state for all parameters of the run, after `steps` steps.
    ///
    /// # Errors
    /// A state that lacks a tensor, holds one of another size or format, or holds one that no parameter needs. The optimizer is then
    /// unchanged.
    pub fn load(&mut self, parameters: &[&Parameter<B>], saved: StateDict, steps: u64) -> Result<(), OptimError> {
        self.check(parameters, &saved)?;
        let parameters: Vec<_> = parameters.iter().copied().filter(|parameter| self.owns(&parameter.name)).collect();
        self.paged = Some(self.choose_paged(parameters.iter().copied()));
        self.state.clear();
        let mut saved = saved;
        for parameter in parameters {
            let (layout, device) = (self.layout(parameter), parameter.value.device());
            let upload = |spec: &StateSpec| {
                let stored = saved.remove(&spec.name(&parameter.name)).expect("checked above");
                StateTensor::upload(stored, &device)
            };
            let tensors = layout.iter().map(upload).collect();
            self.keep(parameter.name.clone(), ParameterState::new(layout, tensors));
        }
        self.steps = steps;
        Ok(())
    }

    /// Refuses a saved state that is not that of these parameters.
    fn check(&self, parameters: &[&Parameter<B>], saved: &StateDict) -> Result<(), OptimError> {
        let mut needed = BTreeSet::new();
        for parameter in parameters {
            for spec in self.layout(parameter) {
                let name = spec.name(&parameter.name);
                match saved.get(&name) {
                    Some(stored) if spec.matches(stored) => needed.insert(name),
                    Some(other) => {
                        return Err(OptimError::Mismatch { name, expected: spec.describe(), got: other.describe() });
                    }
                    None if !self.owns(&parameter.name) => continue,
                    None => return Err(OptimError::Missing { name }),
                };
            }
        }
        match saved.keys().find(|name| !needed.contains(*name)) {
            Some(name) => Err(OptimError::Unexpected { name: name.clone() }),
            None => Ok(()),
        }
    }
}

/// One call of the rule; names with the new state, in order.
fn step_parameters<B: Kernels>(
    rule: &dyn Rule<B>,
    parameters: Vec<(ParameterState<B>, &mut Parameter<B>)>,
    gradients: &mut GradientMap<B>,
    scale: &Tensor<B, 1>,
    numbers: &StepNumbers,
) -> Vec<(Arc<str>, ParameterState<B>)> {
    if parameters.is_empty() {
        return Vec::new();
    }
    let mut prepare = |(state, owner)| {
        let owner: &mut Parameter<B> = owner;
        let gradient = gradients.remove(&owner.name);
        let gradient = gradient.unwrap_or_else(|| panic!("parameter {} has no gradient", owner.name));
        let parameter = take_value(owner, &gradient);
        let (layout, state) = ParameterState::into_parts(state);
        ((owner, layout), Update { parameter, gradient, state })
    };
    let (owners, updates): (Owners<'_, B>, Vec<_>) = parameters.into_iter().map(&mut prepare).unzip();
    let keep = |((owner, layout), (value, tensors))| {
        let (owner, layout): (&mut Parameter<B>, Vec<StateSpec>) = (owner, layout);
        owner.value = value;
        (owner.name.clone(), ParameterState::new(layout, tensors))
    };
    owners.into_iter().zip(rule.step(updates, scale.clone(), numbers)).map(keep).collect()
}

/// The sum of the squares of all gradients, `[1]`; `None` if there are none.
pub fn squared_norm<B: Kernels>(gradients: &GradientMap<B>) -> Option<Tensor<B, 1>> {
    let gradients: Vec<_> = gradients.iter().map(|(_, gradient)| gradient.clone()).collect();
    (!gradients.is_empty()).then(|| B::squared_norm(&gradients))
}

/// Takes the value out and leaves a handle of the gradient in its place. The update then holds the only handle of the value, so that a
/// backend can write in place.
fn take_value<B: Kernels>(parameter: &mut Parameter<B>, gradient: &Tensor<B, 1>) -> Tensor<B, 1> {
    std::mem::replace(&mut parameter.value, gradient.clone())
}

#[cfg(test)]
mod tests {
    use burn_flex::Flex;
    use firebrick_arch::{Role, TensorSpec};
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
    fn optimizers_that_own_parts_make_the_update_and_the_state_of_one_that_owns_all() {
        for kind in [OptimizerKind::AdamW, OptimizerKind::AdamW8bit] {
            let (mut whole, mut expected) = (Optimizer::new(config(kind, Some(1.0))), parameters());
            take_steps(&mut whole, &mut expected, 0..3);
            let parts = [&["large", "vector"][..], &["small", "table"]];
            let mut saved = StateDict::new();
            for part in parts {
                let owned = part.iter().map(|&name| Arc::from(name));
                let mut optimizer = Optimizer::new(config(kind, Some(1.0))).owning(owned);
                let mut found = parameters();
                take_steps(&mut optimizer, &mut found, 0..3);
                for ((found, expected), first) in found.iter().zip(&expected).zip(parameters()) {
                    let is_owned = part.contains(&found.name.as_ref());
                    let expected = if is_owned { expected } else { &first };
                    assert_eq!(values(std::slice::from_ref(found)), values(std::slice::from_ref(expected)));
                }
                saved.extend(optimizer.save());
            }
            assert_eq!(saved, whole.save());
            // Each takes its part of the whole state.
            let mut part = Optimizer::new(config(kind, Some(1.0))).owning(["table".into()]);
            load(&mut part, &expected, saved).unwrap();
            assert!(part.is_partial() && part.save().keys().all(|name| name.starts_with("table.")));
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
    fn with_loraplus_b_and_vectors_move_by_the_ratio_and_everything_else_as_before() {
        let device = Default::default();
        let shapes =
            [(Role::LoraA, vec![1, 2]), (Role::LoraB, vec![2, 1]), (Role::Head, vec![1, 2]), (Role::Norm, vec![2])];
        let mut parameters: Vec<Parameter<Flex>> = shapes
            .map(|(role, shape)| Parameter::from_host(format!("{role:?}"), &shape, role, &[0.0, 0.0], &device))
            .into();
        let mut gradients = GradientMap::default();
        for parameter in &parameters {
            gradients.add(parameter, Tensor::<Flex, 1>::ones([2], &device));
        }
        let mut optimizer = Optimizer::new(config(OptimizerKind::AdamW, None)).with_loraplus(16.0);
        optimizer.step(parameters.iter_mut().collect(), gradients, 1e-2);
        // The first update of Adam is the learning rate, whatever the gradient.
        let moved: Vec<f32> = values(&parameters).iter().map(|values| -values[0] / 1e-2).collect();
        for (moved, expected) in moved.into_iter().zip([1.0, 16.0, 1.0, 16.0]) {
            assert!((moved - expected).abs() < 1e-4, "{moved} instead of {expected}");
        }
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

    /// Two matrices whose 8-bit state is large enough to be paged, an embedding with f32 moments that are, and small ones.
    fn large_parameters() -> Vec<Parameter<Flex>> {
        [
            ("embedding", vec![400, 256], Role::Embedding),
            ("first", vec![500, 256], Role::Projection),
            ("norm", vec![256], Role::Norm),
            ("second", vec![256, 500], Role::Projection),
            ("small", vec![64, 80], Role::Projection),
        ]
        .into_iter()
        .map(|(name, shape, role)| {
            let values: Vec<f32> = (0..shape.iter().product()).map(|index| (index as f32 * 0.37).sin()).collect();
            Parameter::from_host(name, &shape, role, &values, &Default::default())
        })
        .collect()
    }

    #[test]
    fn paging_changes_no_bit_of_parameters_or_state_and_pages_what_the_plan_says() {
        let config = config(OptimizerKind::PagedAdamW8bit, Some(1.0));
        let tensors: Vec<_> = large_parameters()
            .iter()
            .map(|parameter| TensorSpec {
                name: parameter.name.to_string(),
                shape: parameter.shape.clone(),
                role: parameter.role,
                layer: None,
            })
            .collect();
        let all = config.state_bytes(&tensors, 1);
        let run = |resident_bytes: u64| {
            let (mut optimizer, mut parameters) =
                (Optimizer::new(config).with_paging(resident_bytes), large_parameters());
            take_steps(&mut optimizer, &mut parameters, 0..3);
            // A checkpoint in the middle, loaded into another optimizer that pages as much.
            let mut resumed = Optimizer::new(config).with_paging(resident_bytes);
            resumed.load(&parameters.iter().collect::<Vec<_>>(), optimizer.save(), 3).unwrap();
            assert_eq!(resumed.paged_bytes(), optimizer.paged_bytes());
            take_steps(&mut resumed, &mut parameters, 3..5);
            assert_eq!(resumed.paged_bytes(), config.paging(&tensors, resident_bytes).host);
            (values(&parameters), resumed.save(), resumed.paged_bytes())
        };
        let (parameters, state, paged) = run(all);
        assert_eq!(paged, 0);
        for (resident_bytes, expected) in [(all - 300_000, 4 * 128_000), (0, 4 * 128_000 + 8 * 102_400)] {
            let (paged_parameters, paged_state, paged) = run(resident_bytes);
            assert_eq!(paged, expected, "{resident_bytes} of {all} bytes stay");
            assert!(paged_parameters == parameters && paged_state == state, "{resident_bytes} of {all} bytes stay");
        }
    }

    fn scaled(gradients: &GradientMap<Flex>, parameters: &[Parameter<Flex>], by: f32) -> GradientMap<Flex> {
        let mut scaled = GradientMap::default();
        for parameter in parameters {
            scaled.add(parameter, gradients.get(&parameter.name).unwrap().clone().mul_scalar(by));
        }
        scaled
    }

    #[test]
    fn steps_with_loss_scaling_are_those_without_and_skip_overflows_whole() {
        for kind in [OptimizerKind::AdamW, OptimizerKind::AdamW8bit] {
            let config = config(kind, Some(1.0));
            let (mut plain, mut expected) = (Optimizer::<Flex>::new(config), parameters());
            let device = Default::default();
            let new = || Optimizer::<Flex>::new(config).with_loss_scaling(LossScaling::default(), &device);
            let (mut optimizer, mut scaled_parameters) = (new(), parameters());
            for step in 0..6u64 {
                let scale: f32 = optimizer.loss_scale().unwrap().into_scalar();
                let gradients = gradients_with(&scaled_parameters, step, |values| {
                    if [1, 4].contains(&step) {
                        values[7] = f32::INFINITY;
                    }
                });
                let gradients = scaled(&gradients, &scaled_parameters, scale);
                let before = (values(&scaled_parameters), optimizer.save());
                let report = optimizer.step(scaled_parameters.iter_mut().collect(), gradients, 1e-2);
                let is_finite = report.grad_norm.into_scalar().is_finite();
                if [1, 4].contains(&step) {
                    assert!(!is_finite);
                    assert_eq!((values(&scaled_parameters), optimizer.save()), before, "step {step}");
                } else {
                    assert!(is_finite);
                    take_steps(&mut plain, &mut expected, step..step + 1);
                    assert_eq!(values(&scaled_parameters), values(&expected), "step {step}");
                }
            }
            assert_eq!(optimizer.save(), plain.save());
            assert_eq!((optimizer.steps(), optimizer.next_update()), (6, 5));
            let state = LossScaleState { scale: 65_536.0 / 4.0, good_steps: 1, skipped_steps: 2 };
            assert_eq!(optimizer.loss_scale_state(), Some(state));
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
