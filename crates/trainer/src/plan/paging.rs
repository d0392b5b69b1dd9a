//! Decides how much optimizer state a run pages to host memory: the amount in the recipe, or as much as does not fit on the device.
//!
//! Trade-off: with "auto", cards with different free memory page differently. The numbers are the same bit for bit.

use firebrick_arch::TensorSpec;
use firebrick_hwprofile::memory::human_bytes;
use firebrick_kernels::{BackendKind, TrainingShape};
use firebrick_optim::{OptimizerKind, PagedBytes};

use crate::config::{Auto, RunConfig};
use crate::plan::{Chosen, fit, shapes, wish};

#[derive(Clone)]
pub(super) struct Paging {
    /// Bytes of state that stay on the device.
    pub(super) resident: Chosen<u64>,
    /// Bytes of state in host memory.
    pub(super) paged: Chosen<u64>,
}

/// Returns the rule and state format.
pub(super) fn optimizer(kind: OptimizerKind, backend: BackendKind) -> Chosen<OptimizerKind> {
    match kind.is_paged() && backend != BackendKind::Cuda {
        true => Chosen::new(kind, format!("{}; {backend} pages nothing", OptimizerKind::AdamW8bit.state())),
        false => Chosen::new(kind, kind.state()),
    }
}

/// Decides what is paged, and returns the run with it.
pub(super) fn decide(
    case: &fit::Case<'_>,
    config: &RunConfig,
    trained: &[TensorSpec],
    training: TrainingShape,
) -> (Paging, TrainingShape) {
    let all = training.optimizer_bytes;
    let why = match (config.train.optimizer.is_paged(), case.backend) {
        (false, _) => Some("this optimizer does not page".to_owned()),
        (true, BackendKind::Cuda) => None,
        (true, other) => Some(format!("paging means nothing on {other}: it does not copy while other work runs")),
    };
    if let Some(why) = why {
        return (Paging { resident: Chosen::new(all, why), paged: Chosen::new(0, "nothing") }, training);
    }
    let optimizer = shapes::optimizer(config);
    let (budget, why) = match config.train.optimizer_device_gib {
        Auto::Given(gib) => (wish::bytes(gib), "train.optimizer_device_gib".to_owned()),
        Auto::Auto => automatic(case, &training, |budget| optimizer.paging(trained, budget)),
    };
    let PagedBytes { host, staging } = optimizer.paging(trained, budget);
    let paged = match host {
        0 => "all state fits on the device".to_owned(),
        host => format!(
            "in pinned host memory; each step copies it to the device and back, {}, next to other work (restore_wait_ms in the \
             metrics is what that costs)",
            human_bytes(2 * host)
        ),
    };
    let paging = Paging { resident: Chosen::new(all - host, why), paged: Chosen::new(host, paged) };
    (paging, TrainingShape { paged_bytes: host, paging_bytes: staging, ..training })
}

/// Returns the largest budget with which the run fits, in steps of a sixteenth of the state.
fn automatic(case: &fit::Case<'_>, training: &TrainingShape, paging: impl Fn(u64) -> PagedBytes) -> (u64, String) {
    let all = training.optimizer_bytes;
    let fits = |budget: &u64| {
        let PagedBytes { host, staging } = paging(*budget);
        case.fits(&TrainingShape { paged_bytes: host, paging_bytes: staging, ..training.clone() })
    };
    let budgets = (0..=SHARES).rev().map(|share| all / SHARES * share + if share == SHARES { all % SHARES } else { 0 });
    match budgets.into_iter().find(fits) {
        Some(budget) if budget == all => (all, "auto: all of it fits".to_owned()),
        Some(budget) => (budget, format!("auto: at most {} of {} fit", human_bytes(budget), human_bytes(all))),
        // The refusal that follows names the missing memory.
        None => (0, "auto: not even without it the run fits".to_owned()),
    }
}

/// Number of parts of the state that "auto" chooses among.
const SHARES: u64 = 16;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::fixtures::Example;

    fn paging(changes: &[&str], backend: BackendKind, card_gib: u64) -> (u64, u64, String, TrainingShape) {
        let full = ["mode=full", "lora=", "bnb_4bit=", "train.micro_batch_size=1", "train.optimizer=paged_adamw_8bit"];
        let example = Example::new(&[&full, changes].concat(), card_gib, 512);
        let case = fit::Case { backend, ..example.case() };
        let trained = example.trained();
        let training = example.training_in(&case);
        let (Paging { resident, paged }, training) = decide(&case, &example.config, &trained, training);
        (resident.value, paged.value, resident.reason + " / " + &paged.reason, training)
    }

    #[test]
    fn a_budget_is_kept_and_the_rest_is_paged() {
        let (resident, paged, why, training) = paging(&["train.optimizer_device_gib=10"], BackendKind::Cuda, 141);
        assert_eq!(resident + paged, training.optimizer_bytes);
        assert!(resident <= 10 << 30 && resident > 9 << 30, "{resident}: {why}");
        assert_eq!((training.paged_bytes, why.contains("restore_wait_ms")), (paged, true), "{why}");
        assert!(training.paging_bytes > 0 && training.paging_bytes < 2 << 30);
    }

    #[test]
    fn auto_pages_what_does_not_fit() {
        let (_, paged, why, _) = paging(&[], BackendKind::Cuda, 141);
        assert_eq!(paged, 0, "{why}");
        // Weights and gradients of the 8B in f32 take 60 GiB, its state 19 GiB.
        let (resident, paged, why, _) = paging(&[], BackendKind::Cuda, 88);
        assert!(paged > 0 && resident > 0 && why.contains("auto: at most"), "{why}");
    }

    #[test]
    fn moments_in_8_bits_take_a_quarter_on_every_backend() {
        for backend in BackendKind::ALL {
            let state = |optimizer: &str| {
                let (resident, _, _, training) = paging(&[&format!("train.optimizer={optimizer}")], backend, 141);
                assert_eq!(resident, training.optimizer_bytes);
                resident
            };
            assert!(3 * state("adamw_8bit") < state("adamw"), "{backend}");
        }
    }

    #[test]
    fn backends_that_do_not_copy_page_nothing_and_say_so() {
        for backend in [BackendKind::Flex, BackendKind::Candle, BackendKind::Wgpu] {
            let (_, paged, why, training) = paging(&["train.optimizer_device_gib=0"], backend, 141);
            assert_eq!((paged, training.paged_bytes), (0, 0));
            assert!(why.contains("paging means nothing on") && why.contains(backend.name()), "{why}");
        }
        let (_, paged, why, _) = paging(&["train.optimizer=adamw_8bit"], BackendKind::Cuda, 141);
        assert!(paged == 0 && why.contains("does not page"), "{why}");
    }
}
