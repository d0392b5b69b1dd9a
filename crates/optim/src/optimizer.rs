//! The optimizer of a run: clips gradients to their global norm, applies a rule to groups of parameters, and keeps the state by name.
//!
//! A step waits for nothing: norm and clip coefficient stay on the device. With loss scaling it reads whether the preceding step was skipped, which
//! the device has computed by then.
//!
//! A step whose gradients have NaNs or infinities, or a norm above the limit, changes no parameter and no state: the factor of its gradients is NaN,
//! which every update skips. (torch's coefficient is 0 for an infinite norm, and NaN for a norm that is NaN, which destroys every parameter.)
//! Trade-off: all gradients of a step exist at the same time.
//! Weight decay and learning rate of a parameter follow from its role alone; a recipe cannot set them by name.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use burn_tensor::{DType, Tensor};
use firebrick_arch::Role;
use firebrick_kernels::memory::prefetch::Schedule;
use firebrick_kernels::{GradientMap, Kernels, Parameter, rounding_key};

use crate::config::OptimizerConfig;
use crate::loss_scale::{LossScaleState, LossScaler, LossScaling};
use crate::paging::{self, BUCKETS_AHEAD, PagedState};
use crate::rules::{self, Rule, StepNumbers, Update};
use crate::state::{HostTensor, OptimError, ParameterState, SavedTensor, StateDict, StateSpec, StateTensor};

/// Results of a step for the log, still on the device.
pub struct StepReport<B: Kernels> {
    /// Global norm of the gradients before clipping, `[1]`. With loss scaling it is that of the gradients without the scale, and not
    /// finite if the step overflowed.
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
    /// The highest norm of a step that is taken.
    norm_limit: f32,
    /// The parameters that are updated here; `None`: all.
    owned: Option<BTreeSet<Arc<str>>>,
    /// Factor of the learning rate of LoRA's B.
    loraplus_lr_ratio: f64,
    seed: u64,
}

/// Parameters during an update, with the layouts of their state.
type Owners<'a, B> = Vec<(&'a mut Parameter<B>, Vec<StateSpec>)>;

impl<B: Kernels> Optimizer<B> {
    /// Creates an optimizer that has taken no step.
    pub fn new(config: OptimizerConfig) -> Self {
        Self {
            rule: rules::rule(&config),
            config,
            steps: 0,
            state: BTreeMap::new(),
            resident_bytes: None,
            paged: None,
            loss_scaler: None,
            norm_limit: f32::MAX,
            owned: None,
            loraplus_lr_ratio: 1.0,
            seed: 0,
        }
    }

    /// Sets the learning rate of B and trained vectors to `ratio` times the learning rate (LoRA+).
    #[must_use]
    pub fn with_loraplus(self, ratio: f64) -> Self {
        Self { loraplus_lr_ratio: ratio, ..self }
    }

    /// Sets the seed of random rounding; the bits follow from it, from the step, and from a parameter's name.
    #[must_use]
    pub fn with_seed(self, seed: u64) -> Self {
        Self { seed, ..self }
    }

    /// Restricts updates and state to these parameters. The norm is still that of all gradients.
    #[must_use]
    pub fn owning(self, names: impl IntoIterator<Item = Arc<str>>) -> Self {
        Self { owned: Some(names.into_iter().collect()), ..self }
    }

    /// Returns whether the optimizer updates only some of the parameters.
    pub fn is_partial(&self) -> bool {
        self.owned.is_some()
    }

    fn owns(&self, name: &str) -> bool {
        self.owned.as_ref().is_none_or(|owned| owned.contains(name))
    }

    /// Keeps only `resident_bytes` of the state on the device between two steps, as far as possible, and the rest in host memory, on backends that
    /// can copy while other work runs. The results are the same bit for bit.
    #[must_use]
    pub fn with_paging(self, resident_bytes: u64) -> Self {
        Self { resident_bytes: Some(resident_bytes), ..self }
    }

    /// Turns on loss scaling, for gradients that were multiplied by [`Optimizer::loss_scale`].
    #[must_use]
    pub fn with_loss_scaling(self, scaling: LossScaling, device: &B::Device) -> Self {
        Self { loss_scaler: Some(LossScaler::new(scaling, device)), ..self }
    }

    /// Skips the next steps if the norm of their gradients, without the loss scale, is above the limit, which is finite.
    pub fn set_norm_limit(&mut self, limit: f32) {
        self.norm_limit = limit;
    }

    /// Returns the number of steps so far, including skipped ones.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Returns the number of the next update, from 1; steps that overflowed under loss scaling do not count, and it waits for the end of the last step
    /// then.
    pub fn next_update(&mut self) -> u64 {
        let skipped = self.loss_scaler.as_mut().map_or(0, LossScaler::skipped_steps);
        self.steps - skipped + 1
    }

    /// Returns the factor for the gradients of the next step, `[1]`; `None`: 1.
    pub fn loss_scale(&self) -> Option<Tensor<B, 1>> {
        self.loss_scaler.as_ref().map(|scaler| scaler.scale.clone())
    }

    /// Returns the state of loss scaling for a checkpoint; `None` without it. Waits for the device.
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

    /// Counts the bytes of state in host memory.
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

    /// Does the same as [`Optimizer::step`] when ranks divide the gradients: `parameters` are those with a gradient on this rank, and `squared_norm`
    /// `[1]` covers the gradients of all ranks.
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
        let (grad_norm, scale) = self.gradient_scale(squared_norm);
        let parameters = parameters.into_iter().filter(|parameter| self.owns(&parameter.name)).collect::<Vec<_>>();
        self.prepare(&parameters);
        let mut groups: Vec<Group<'_, B>> = Vec::new();
        for parameter in parameters {
            let weight_decay = if decays(parameter.role) { self.config.weight_decay } else { 0.0 };
            // The factor of LoRA+ (Hayou et al., 2024) for B and for vectors, as in PEFT's `create_loraplus_optimizer`.
            let is_fast = parameter.role == Role::LoraB || parameter.shape.len() == 1;
            let rate_factor = if is_fast { self.loraplus_lr_ratio } else { 1.0 };
            let dtype = parameter.value.dtype();
            let key = (weight_decay, rate_factor, dtype);
            let same = |group: &&mut Group<'_, B>| (group.weight_decay, group.rate_factor, group.dtype) == key;
            match groups.iter_mut().find(same) {
                Some(group) => group.parameters.push(parameter),
                None => groups.push(Group { weight_decay, rate_factor, dtype, parameters: vec![parameter] }),
            }
        }
        for group in groups {
            let learning_rate = learning_rate * group.rate_factor;
            let numbers =
                StepNumbers { learning_rate, weight_decay: group.weight_decay, step: update, seed: self.seed };
            self.update(group, &mut gradients, &scale, &numbers);
        }
        if let Some(scaler) = &mut self.loss_scaler {
            scaler.end_step(grad_norm.clone().is_finite());
        }
        StepReport { grad_norm, loss_scale }
    }

    /// Returns the global norm without the loss scale, and the factor of the gradients in the update: not finite if the step is skipped.
    fn gradient_scale(&self, squared_norm: Tensor<B, 1>) -> (Tensor<B, 1>, Tensor<B, 1>) {
        // A norm that clips nothing: f32 cannot hold the square of a larger one.
        let max_norm = self.config.max_grad_norm.unwrap_or(1e30);
        let Some(scaler) = &self.loss_scaler else { return B::clip(squared_norm, max_norm, self.norm_limit) };
        let inverse = scaler.scale.clone().recip();
        let squared_norm = squared_norm.mul(inverse.clone()).mul(inverse.clone());
        let (norm, factor) = B::clip(squared_norm, max_norm, self.norm_limit);
        (norm, factor.mul(inverse))
    }

    /// Decides which state is paged, and creates the state of new parameters.
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

    /// Stores state where it belongs between two steps.
    fn keep(&mut self, name: Arc<str>, state: ParameterState<B>) {
        let state = if self.is_paged(&name) { state.paged() } else { state };
        self.state.insert(name, state);
    }

    /// Calls the rule once for all state of a group that is on the device, since an adapter is hundreds of small parameters, and once per bucket of
    /// paged state, while the next buckets are on their way. Runs in one section, because its end waits for the copies to the host.
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

    /// Lists the tensors of the state, for a checkpoint that copies them to the host one by one.
    pub fn saved(&self) -> impl Iterator<Item = SavedTensor<'_, B>> {
        self.state.iter().flat_map(|(parameter, state)| state.saved(parameter))
    }

    /// Returns a copy of the state by name, all of it in host memory. Waits for the device.
    pub fn save(&self) -> StateDict {
        let fetch = |tensor: SavedTensor<'_, B>| HostTensor::from_fetched::<B>(tensor.fetch(), tensor.is_bytes);
        self.saved().map(|tensor| (tensor.name.clone(), fetch(tensor))).collect()
    }

    /// Returns what copies the state as it is now to the host. Another thread may call it while steps go on, which give what they change new memory.
    ///
    /// # Panics
    /// If some state is paged.
    pub fn hold(&self) -> impl FnOnce() -> StateDict + Send + use<B> {
        let held = self.saved().map(|tensor| (tensor.held(), (tensor.is_bytes, tensor.name)));
        let (tensors, named): (Vec<_>, Vec<_>) = held.unzip();
        move || {
            let (mut named, mut state) = (named.into_iter(), StateDict::new());
            B::read_alongside(tensors, |data| {
                let (is_bytes, name) = named.next().expect("each tensor has a name");
                state.insert(name, HostTensor::from_fetched::<B>(data, is_bytes));
            });
            state
        }
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

    /// Refuses a saved state that does not fit these parameters.
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

/// Parameters with the same weight decay, learning rate and format.
struct Group<'a, B: Kernels> {
    /// Decoupled weight decay of all of them.
    weight_decay: f64,
    rate_factor: f64,
    dtype: DType,
    /// In the order in which they were given.
    parameters: Vec<&'a mut Parameter<B>>,
}

/// Returns whether weight decay applies to this role, as in transformers' `Trainer.get_decay_parameter_names`.
fn decays(role: Role) -> bool {
    match role {
        Role::Embedding
        | Role::Projection
        | Role::Router
        | Role::RouterScale
        | Role::PerLayerEmbedding
        | Role::Head
        | Role::LoraA
        | Role::LoraB
        | Role::LoraMagnitude
        | Role::TokenRows
        | Role::Filters => true,
        Role::Norm
        | Role::GatedNorm
        | Role::Bias
        | Role::RouterCorrection
        | Role::LayerScalar
        | Role::Sinks
        | Role::DecayLog
        | Role::DecayBias => false,
    }
}

/// Calls the rule once; returns names with the new state, in order.
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
        // With the gradient in its place, the update has the only handle of the value, so that a backend can write in place.
        let parameter = std::mem::replace(&mut owner.value, gradient.clone());
        let (layout, state) = ParameterState::into_parts(state);
        let is_rounded = parameter.dtype() == DType::BF16;
        let key = if is_rounded { rounding_key(numbers.seed, numbers.step, &owner.name) } else { 0 };
        ((owner, layout), Update { parameter, gradient, state, key })
    };
    let (owners, updates): (Owners<'_, B>, Vec<_>) = parameters.into_iter().map(&mut prepare).unzip();
    let keep = |((owner, layout), (value, tensors))| {
        let (owner, layout): (&mut Parameter<B>, Vec<StateSpec>) = (owner, layout);
        owner.value = value;
        (owner.name.clone(), ParameterState::new(layout, tensors))
    };
    owners.into_iter().zip(rule.step(updates, scale.clone(), numbers)).map(keep).collect()
}

/// Sums the squares of all gradients, `[1]`; `None` if there are none.
pub fn squared_norm<B: Kernels>(gradients: &GradientMap<B>) -> Option<Tensor<B, 1>> {
    let gradients: Vec<_> = gradients.values().cloned().collect();
    (!gradients.is_empty()).then(|| B::squared_norm(&gradients))
}

#[cfg(test)]
mod tests;
