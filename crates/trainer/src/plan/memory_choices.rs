//! Decides together what layers save, where that waits, and which weights stay converted.
//!
//! Where the recipe leaves `train.recompute` open, the fastest that fits is taken of all policies, with and without offloading where that is open too,
//! each with as much optimizer state and as many converted weights on the device as then fit. What fits goes by all memory of the card, so that a
//! run does not depend on what else used the card when it began; where less is free, by that, with a warning.
//! Trade-off: times are those of the forecast's model, with assumed rates on machines that are not in its table. Nothing is measured.

use firebrick_arch::TensorSpec;
use firebrick_hwprofile::memory::human_bytes;
use firebrick_kernels::{BackendKind, Recompute, TrainingShape};
use firebrick_precision::FloatType;

use crate::config::{Auto, to_name};
use crate::plan::backend::offload;
use crate::plan::fit::{Case, UsableMemory};
use crate::plan::paging::Paging;
use crate::plan::shapes::Basis;
use crate::plan::wish::Wish;
use crate::plan::{Chosen, answers, forecast, kept_weights, paging};

/// All policies, fastest first where memory is no matter.
const POLICIES: [Recompute; 4] = [Recompute::None, Recompute::Selective, Recompute::Projections, Recompute::Full];

#[derive(Clone)]
pub(super) struct MemoryChoices {
    pub(super) recompute: Chosen<Recompute>,
    pub(super) offload: Chosen<bool>,
    pub(super) answer_tokens: Chosen<usize>,
    pub(super) paging: Paging,
    pub(super) kept_weights_bytes: Option<Chosen<u64>>,
    /// What the user should know of the memory that others use.
    pub(super) warning: Option<String>,
}

struct Candidate {
    choices: MemoryChoices,
    training: TrainingShape,
    bytes: u64,
    fits: bool,
    /// The modeled time of a micro-batch.
    seconds: f64,
}

/// Chooses what a run keeps where, and returns the run with that.
pub(super) fn decide(case: &Case<'_>, basis: &Basis<'_>) -> (MemoryChoices, TrainingShape) {
    if let Auto::Given(recompute) = basis.wish.recompute {
        let Candidate { choices, training, .. } = Candidate::new(case, basis, recompute, basis.wish.offload);
        return (choices, training);
    }
    let whole = case.whole();
    let all = candidates(&whole, basis);
    let planned = fastest(&all);
    if let Some(best) = planned.filter(|best| case.fits(&best.training)) {
        return best.chosen(&whole, &all, None);
    }
    let of_free = candidates(case, basis);
    match fastest(&of_free) {
        Some(best) => best.chosen(case, &of_free, planned),
        // The refusal that follows says what is missing and what would fit.
        None => {
            let smallest = of_free.into_iter().min_by_key(|candidate| candidate.bytes).expect("there are policies");
            (smallest.choices, smallest.training)
        }
    }
}

/// Returns how many times as long a micro-batch takes with what is chosen on the whole card next to sums of gradients in f32 as with what is chosen next
/// to sums in bf16, the traffic of the sums aside; `None` if nothing fits next to sums in f32.
pub(super) fn slowdown_of_f32_sums(case: &Case<'_>, basis: &mut Basis<'_>, trained: &[TensorSpec]) -> Option<f64> {
    let whole = case.whole();
    let [wide, narrow] = [FloatType::F32, FloatType::Bf16].map(|sums| {
        basis.sum_in(sums, trained);
        match basis.wish.recompute {
            Auto::Given(recompute) => vec![Candidate::new(&whole, basis, recompute, basis.wish.offload)],
            Auto::Auto => candidates(&whole, basis),
        }
    });
    let choice = |candidate: &Candidate| (candidate.choices.recompute.value, candidate.choices.offload.value);
    let best = choice(fastest(&narrow)?);
    let same = wide.iter().find(|candidate| choice(candidate) == best)?;
    Some(fastest(&wide)?.seconds / same.seconds)
}

/// Returns the fastest candidate that fits; of equally fast ones the smallest.
fn fastest(candidates: &[Candidate]) -> Option<&Candidate> {
    let fitting = candidates.iter().filter(|candidate| candidate.fits);
    fitting.min_by(|a, b| a.seconds.total_cmp(&b.seconds).then(a.bytes.cmp(&b.bytes)))
}

/// Returns a candidate of each policy, with and without offloading where the recipe leaves that open.
fn candidates(case: &Case<'_>, basis: &Basis<'_>) -> Vec<Candidate> {
    let wanted = basis.wish.offload;
    let offloads: &[Option<bool>] = match (case.backend, wanted) {
        (BackendKind::Cuda, None) => &[Some(false), Some(true)],
        _ => &[wanted],
    };
    let policies = POLICIES.into_iter().filter(|policy| wanted != Some(true) || policy.may_offload());
    let both = policies.flat_map(|policy| {
        let count = if policy.may_offload() { offloads.len() } else { 1 };
        offloads[..count].iter().map(move |offload| (policy, *offload))
    });
    both.map(|(policy, offload)| Candidate::new(case, basis, policy, offload)).collect()
}

impl Candidate {
    fn new(case: &Case<'_>, basis: &Basis<'_>, recompute: Recompute, wanted: Option<bool>) -> Self {
        let Wish { recipe: config, data, .. } = basis.wish;
        let offload = offload(wanted, recompute, case.backend);
        let training = basis.training(case, recompute, offload.value);
        let (answer_tokens, training) = answers::decide(case, config, data, training);
        let (paging, training) = paging::decide(case, config, &basis.stated, training);
        let (kept_weights_bytes, training) = kept_weights::decide(case, basis.wish, training);
        let recompute = Chosen::new(recompute, description(recompute));
        let (bytes, fits) = case.bytes_and_fit(&training);
        Self {
            choices: MemoryChoices { recompute, offload, answer_tokens, paging, kept_weights_bytes, warning: None },
            bytes,
            fits,
            seconds: forecast::compared_seconds(case, &training, data.documents_per_row),
            training,
        }
    }

    /// Returns these choices as the best of all of a case. `planned`: what would be the best on the whole card, if it was decided by what is free.
    fn chosen(&self, case: &Case<'_>, all: &[Self], planned: Option<&Self>) -> (MemoryChoices, TrainingShape) {
        let (recompute, others) = (self.choices.recompute.value, self.others(all));
        let (room, place) = case.available();
        let by = match case.room {
            UsableMemory::Whole | UsableMemory::Total => format!("of {} {place}", human_bytes(room)),
            UsableMemory::Free => format!("of {} that are free {place}", human_bytes(room)),
        };
        let why = format!("auto: the fastest that fits, {by}; {}. {others}", description(recompute));
        let warning = planned.map(|planned| {
            format!(
                "other programs use memory {place}: with all of it, recompute = \"{}\" would be the fastest, and this run takes {} times as \
                 long",
                to_name(&planned.choices.recompute.value),
                times(self.seconds / planned.seconds)
            )
        });
        let choices = MemoryChoices { recompute: Chosen::new(recompute, why), warning, ..self.choices.clone() };
        (choices, self.training.clone())
    }

    /// Returns a sentence about what the other policies would cost: the fastest choice of each, or the smallest if none fits.
    fn others(&self, all: &[Self]) -> String {
        let others = POLICIES.into_iter().filter(|&policy| policy != self.choices.recompute.value);
        let costs = others.filter_map(|policy| {
            let of_policy = || all.iter().filter(move |candidate| candidate.choices.recompute.value == policy);
            let fitting = of_policy().filter(|candidate| candidate.fits);
            let best = fitting.min_by(|a, b| a.seconds.total_cmp(&b.seconds));
            let bytes = |candidate: &Self| human_bytes(candidate.bytes);
            Some(match best {
                Some(best) => {
                    format!(
                        "\"{}\" {} times as long in {}",
                        to_name(&policy),
                        times(best.seconds / self.seconds),
                        bytes(best)
                    )
                }
                None => {
                    let smallest = of_policy().min_by_key(|candidate| candidate.bytes)?;
                    format!("\"{}\" would need {}", to_name(&policy), bytes(smallest))
                }
            })
        });
        format!("The others by the model: {}", costs.collect::<Vec<_>>().join(", "))
    }
}

fn times(ratio: f64) -> String {
    format!("{ratio:.2}")
}

fn description(recompute: Recompute) -> &'static str {
    match recompute {
        Recompute::Full => {
            "layers save their input and run forward twice, except for their last GEMM: the least is saved"
        }
        Recompute::Projections => {
            "layers save the inputs of attention and of the MLP, and attention's output; attention does not run twice"
        }
        Recompute::Selective => {
            "layers save the outputs of GEMMs and attention; norms and activation functions are computed again, which costs little"
        }
        Recompute::None => "layers save all that their backward reads: maximum memory, minimum work",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::fixtures::Example;

    /// Decides for QLoRA of an 8B model on an H100 with this much memory free.
    fn decided(changes: &[&str], free_gib: u64) -> (MemoryChoices, TrainingShape) {
        let mut example = Example::on("h100", &[&["pack=true"], changes].concat());
        example.profile.gpus[0].memory_free_bytes = free_gib << 30;
        let limit = example.config.train.device_memory_gib.map(|gib| (gib as u64) << 30);
        let (wish, case) = (example.wish(), Case { limit, ..example.case() });
        decide(&case, &example.basis(&wish, &case))
    }

    #[test]
    fn the_fastest_policy_that_fits_is_taken_and_the_others_costs_are_said() {
        let of = |rows: usize| decided(&[&format!("train.micro_batch_size={rows}")], 80).0.recompute;
        let [one, three, eight] = [1, 3, 8].map(of);
        assert!(!one.value.repeats_gemms() && !three.value.repeats_gemms(), "{one:?} {three:?}");
        assert!(eight.value.repeats_gemms(), "{eight:?}");
        assert!(eight.reason.starts_with("auto: the fastest that fits, of 79.6 GiB on the card"), "{}", eight.reason);
        for part in ["\"none\" would need", "\"selective\" would need", "times as long in"] {
            assert!(eight.reason.contains(part), "{}", eight.reason);
        }
    }

    #[test]
    fn what_the_recipe_says_is_kept_and_only_the_rest_is_decided() {
        let rows = "train.micro_batch_size=8";
        let (choices, training) = decided(&[rows, "train.offload=false", "train.kept_weights_gib=0"], 80);
        assert!(!training.offload && training.kept_bytes == [0; 2], "{:?}", choices.recompute);
        let (choices, training) = decided(&["train.micro_batch_size=1", "train.offload=true"], 80);
        assert!(training.offload && choices.recompute.value.may_offload(), "{:?}", choices.recompute);
        let (choices, _) = decided(&[rows, "train.recompute=full"], 80);
        assert!(choices.recompute.value == Recompute::Full && !choices.recompute.reason.contains("auto"));
    }

    #[test]
    fn memory_that_others_use_changes_a_run_only_where_it_would_not_fit() {
        let rows = "train.micro_batch_size=3";
        let [whole, most, little] = [80, 70, 24].map(|free| decided(&[rows], free));
        let needed = |training: &TrainingShape| {
            let example = Example::on("h100", &[rows]);
            example.case().bytes(training)
        };
        assert_eq!(whole.0.warning, None);
        if needed(&whole.1) as f64 <= 0.9 * 70.0 * (1u64 << 30) as f64 {
            assert_eq!((&most.1, &most.0.warning), (&whole.1, &None));
        } else {
            assert!(most.0.warning.is_some());
        }
        let warning = little.0.warning.expect("a run that saves less");
        assert!(
            warning.contains("other programs use memory on the card") && warning.contains("times as long"),
            "{warning}"
        );
        assert!(needed(&little.1) < needed(&whole.1) && little.0.recompute.value.repeats_gemms());
    }

    #[test]
    fn a_limit_makes_a_large_card_a_small_one() {
        let rows = "train.micro_batch_size=3";
        let (limited, training) = decided(&[rows, "train.device_memory_gib=24"], 80);
        let (little, of_little) = decided(&[rows], 24);
        assert_eq!((limited.recompute.value, &training), (little.recompute.value, &of_little));
        assert_eq!(limited.warning, None, "no other program uses the rest");
    }

    #[test]
    fn a_run_for_which_nothing_fits_is_the_smallest() {
        let (choices, training) = decided(&["train.micro_batch_size=64"], 80);
        assert!(choices.recompute.value.repeats_gemms() && training.offload, "{:?}", choices.recompute);
    }
}
