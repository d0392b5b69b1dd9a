//! Runs that repeat bit by bit (`train.deterministic`): what is decided for them, what that costs, and what cannot repeat.
//!
//! Trade-off: what such a run costs is said in words; it was not measured.

use std::env;

use firebrick_kernels::BackendKind;

use crate::config::RunConfig;
use crate::error::RunError;
use crate::plan::fit::UsableMemory;
use crate::plan::{Chosen, Made, Plan};

/// Ranks from which on a sum depends on its order.
const SUMMED_IN_ORDER: usize = 3;

/// Says why runs repeat and what it costs; `None` if the recipe does not ask for it.
pub(super) fn decide(made: &Made<'_>) -> Option<Chosen<bool>> {
    let config = made.wish.recipe;
    config.train.deterministic.then(|| Chosen::new(true, why(made.backend.value, config.pack)))
}

fn why(backend: BackendKind, pack: bool) -> String {
    let attention = if pack {
        "gradients of attention inside packed rows come from the flash kernels, which take longer than cuDNN's for long documents"
    } else {
        "gradients of attention come from the flash kernels, which take longer than cuDNN's, except for rows of one length whose scores' gradients \
         take up to 1 GiB"
    };
    match backend {
        BackendKind::Cuda => format!(
            "the recipe: sums have a fixed order, algorithms of GEMMs are not measured, and memory is decided by all that the machine has. \
             What it costs: {attention}"
        ),
        BackendKind::Wgpu => "the recipe: sums have a fixed order on this backend anyway, but what the recipe leaves open is decided by the memory \
                              that is free; no two runs were compared"
            .to_owned(),
        BackendKind::Flex | BackendKind::Candle => "the recipe: runs repeat on this backend anyway".to_owned(),
    }
}

/// Returns the memory by which a run is decided.
pub(super) fn room(config: &RunConfig, backend: BackendKind) -> UsableMemory {
    if config.train.deterministic && backend == BackendKind::Cuda { UsableMemory::Total } else { UsableMemory::Free }
}

/// Refuses ranks whose sums have no fixed order, if the plan asks for one.
///
/// # Errors
/// NCCL may let switches add (NVLink SHARP), in an order that it does not promise.
pub(crate) fn check_ranks(plan: &Plan) -> Result<(), RunError> {
    let ranks = plan.world_size.value;
    let matters = plan.deterministic.is_some() && plan.backend.value == BackendKind::Cuda && ranks >= SUMMED_IN_ORDER;
    if !matters || fixes_order(|name| env::var(name).ok()) {
        return Ok(());
    }
    Err(RunError::Refused(format!(
        "train.deterministic: NCCL may add the gradients of {ranks} ranks inside NVLink's switches, in an order that differs from run to run. Set \
         NCCL_NVLS_ENABLE=0 or NCCL_ALGO=Ring for every rank, or FIREBRICK_COLLECTIVES=host, which is slow; or remove this key"
    )))
}

/// Returns whether variables of the environment leave NCCL only algorithms that add in a fixed order.
fn fixes_order(variable: impl Fn(&str) -> Option<String>) -> bool {
    let is = |name: &str, value: &str| variable(name).is_some_and(|found| found.trim().eq_ignore_ascii_case(value));
    let one_by_one = |name: &str| ["ring", "tree"].contains(&name.trim().to_ascii_lowercase().as_str());
    is("FIREBRICK_COLLECTIVES", "host")
        || is("NCCL_NVLS_ENABLE", "0")
        || variable("NCCL_ALGO").is_some_and(|names| names.split(',').all(one_by_one))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::PlanInputs;
    use crate::plan::fixtures::Example;

    #[test]
    fn a_run_is_decided_by_what_the_card_has_and_refused_where_less_is_free() {
        let keys = ["pack=true", "train.micro_batch_size=auto", "train.rows_per_step=8", "train.deterministic=true"];
        let planned = |free_gib: u64| {
            let mut example = Example::on("h100", &keys);
            example.profile.gpus[0].memory_free_bytes = free_gib << 30;
            Plan::resolve(example.inputs())
        };
        let [whole, less] = [80, 79].map(|free| planned(free).unwrap());
        assert_eq!((less.decided(), &less.recompute), (whole.decided(), &whole.recompute));
        let refusal = planned(12).unwrap_err().to_string();
        assert!(refusal.contains("12.0 GiB are free"), "{refusal}");
        let chosen = whole.deterministic.unwrap();
        assert!(chosen.value && chosen.reason.contains("What it costs"), "{}", chosen.reason);
        assert_eq!(Example::on("h100", &["pack=true"]).plan().deterministic, None);
    }

    #[test]
    fn sums_over_more_than_two_ranks_need_an_order_that_the_environment_fixes() {
        let with = |name: &'static str, value: &'static str| {
            fixes_order(move |asked| (asked == name).then(|| value.to_owned()))
        };
        for (name, value) in [("FIREBRICK_COLLECTIVES", "host"), ("NCCL_NVLS_ENABLE", "0"), ("NCCL_ALGO", "Ring,Tree")]
        {
            assert!(with(name, value), "{name}={value}");
        }
        assert!(!with("NCCL_ALGO", "Ring,NVLS") && !with("NCCL_NVLS_ENABLE", "2") && !with("NCCL_PROTO", "Simple"));
        let example = Example::on("h100", &["pack=true", "train.deterministic=true"]);
        let of_ranks = |world_size| Plan::resolve(PlanInputs { world_size, ..example.inputs() }).unwrap();
        assert!(check_ranks(&of_ranks(2)).is_ok(), "the sum of two values has one order");
        if !fixes_order(|name| env::var(name).ok()) {
            let message = check_ranks(&of_ranks(4)).unwrap_err().to_string();
            assert!(message.contains("4 ranks") && message.contains("NCCL_NVLS_ENABLE=0"), "{message}");
        }
    }
}
