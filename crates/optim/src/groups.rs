//! Groups of parameters that a rule updates with the same numbers.
//!
//! Weight decay applies to the parameters that transformers' `Trainer.get_decay_parameter_names` selects: all but norms and biases.
//! Trade-off: a group follows from the role alone; a recipe cannot set numbers by parameter name.

use firebrick_arch::Role;
use firebrick_kernels::{Kernels, Parameter};

/// Parameters with the same weight decay and learning rate.
pub(crate) struct Group<'a, B: Kernels> {
    /// Decoupled weight decay of all of them.
    pub(crate) weight_decay: f64,
    /// Factor of the learning rate.
    pub(crate) rate_factor: f64,
    /// In the order in which they were given.
    pub(crate) parameters: Vec<&'a mut Parameter<B>>,
}

/// Groups by weight decay and learning rate, none of them empty. `loraplus_lr_ratio` is the factor of LoRA+ (Hayou et al., 2024) for B and
/// for vectors, as PEFT's `create_loraplus_optimizer` groups them.
pub(crate) fn by_numbers<B: Kernels>(
    parameters: Vec<&mut Parameter<B>>,
    weight_decay: f64,
    loraplus_lr_ratio: f64,
) -> Vec<Group<'_, B>> {
    let mut groups: Vec<Group<'_, B>> = Vec::new();
    for parameter in parameters {
        let weight_decay = if decays(parameter.role) { weight_decay } else { 0.0 };
        let is_fast = parameter.role == Role::LoraB || parameter.shape.len() == 1;
        let rate_factor = if is_fast { loraplus_lr_ratio } else { 1.0 };
        let same = |group: &&mut Group<'_, B>| (group.weight_decay, group.rate_factor) == (weight_decay, rate_factor);
        match groups.iter_mut().find(same) {
            Some(group) => group.parameters.push(parameter),
            None => groups.push(Group { weight_decay, rate_factor, parameters: vec![parameter] }),
        }
    }
    groups
}

/// Whether weight decay applies to parameters of this role.
fn decays(role: Role) -> bool {
    match role {
        Role::Embedding
        | Role::Projection
        | Role::Router
        | Role::Head
        | Role::LoraA
        | Role::LoraB
        | Role::LoraMagnitude
        | Role::TokenRows => true,
        Role::Norm | Role::Bias => false,
    }
}
