//! The optimizer's state by name: to a checkpoint and back.
//!
//! Trade-off: all of the state is in host memory at once.

use std::collections::BTreeSet;

use firebrick_kernels::{Kernels, Parameter};

use super::Optimizer;
use crate::error::OptimError;
use crate::state::{ParameterState, StateDict, StateSpec, StateTensor};

impl<B: Kernels> Optimizer<B> {
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
