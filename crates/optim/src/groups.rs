//! Groups of parameters that a rule updates with the same numbers.
//!
//! Weight decay applies to the parameters that transformers' `Trainer.get_decay_parameter_names` selects: all but norms and biases.
//! Trade-off: a group follows from the role alone; a recipe cannot set numbers by parameter name.

use firebrick_arch::Role;
use firebrick_kernels::{Kernels, Parameter};

/// Parameters with the same weight decay.
pub(crate) struct Group<'a, B: Kernels> {
    /// Decoupled weight decay of all of them.
    pub(crate) weight_decay: f64,
    /// In the order in which they were given.
    pub(crate) parameters: Vec<&'a mut Parameter<B>>,
}

/// Groups by weight decay, none of them empty.
pub(crate) fn by_weight_decay<B: Kernels>(parameters: Vec<&mut Parameter<B>>, weight_decay: f64) -> Vec<Group<'_, B>> {
    let (decayed, others): (Vec<_>, Vec<_>) = parameters.into_iter().partition(|parameter| decays(parameter.role));
    [(weight_decay, decayed), (0.0, others)]
        .into_iter()
        .filter(|(_, parameters)| !parameters.is_empty())
        .map(|(weight_decay, parameters)| Group { weight_decay, parameters })
        .collect()
}

/// Whether weight decay applies to parameters of this role.
fn decays(role: Role) -> bool {
    match role {
        Role::Embedding | Role::Projection | Role::Head | Role::LoraA | Role::LoraB => true,
        Role::Norm | Role::Bias => false,
    }
}
