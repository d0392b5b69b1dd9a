//! Divides the rows of a step into micro-batches: `train.rows_per_step`, with a `train.micro_batch_size` that is given or "auto".
//!
//! Trade-off: every division up to the first that does not fit is planned whole, with its own choice of what is saved and where, which takes milliseconds
//! each; times are those of the forecast's model, and nothing is tried.

use firebrick_hwprofile::HardwareProfile;

use crate::config::Auto;
use crate::error::RunError;
use crate::plan::fit::{self, Case, UsableMemory};
use crate::plan::inputs::PlanRequest;
use crate::plan::wish::Wish;
use crate::plan::{Chosen, Made, forecast};

/// Divisions that take at most this much longer than the fastest count as equally fast, since the model is no more accurate; the one that takes
/// the least memory is chosen.
const AS_FAST: f64 = 0.02;

/// How a rank divides the rows of a step.
#[derive(Clone)]
pub(super) struct Rows {
    pub(super) micro_batch_size: Chosen<usize>,
    /// Micro-batches per step.
    pub(super) accumulation: usize,
}

impl Rows {
    /// Returns the rows per step of a rank.
    pub(super) fn of_rank(&self) -> usize {
        self.micro_batch_size.value * self.accumulation
    }
}

/// Decides everything, with the micro-batches that the recipe says or those that fit best.
///
/// # Errors
/// Rows that cannot be divided over the ranks, or into micro-batches of the size that is given; no division fits into memory.
pub(super) fn decide<'a>(
    wish: &'a Wish<'a>,
    profile: &'a HardwareProfile,
    request: &PlanRequest,
) -> Result<Made<'a>, RunError> {
    let mut made = divide(wish, profile, request)?;
    if made.case.room == UsableMemory::Total {
        // Nothing was decided by what is free, but the run still needs it.
        let free = Case { room: UsableMemory::Free, ..made.case };
        made.forced = fit::check(&free, &made.training, made.rows.accumulation, request.force)?.1;
    }
    Ok(made)
}

fn divide<'a>(wish: &'a Wish<'a>, profile: &'a HardwareProfile, request: &PlanRequest) -> Result<Made<'a>, RunError> {
    let made = |rows, own, why: &str| {
        let rows = Rows { micro_batch_size: Chosen::new(rows, why), accumulation: own / rows };
        Made::of(wish, profile, request, rows)
    };
    match (wish.rows_per_step, wish.micro_batch_size) {
        (None, Auto::Auto) => {
            unreachable!("next to \"auto\", the recipe or the size of the data decides the rows per step")
        }
        (None, Auto::Given(rows)) => {
            made(rows, rows * wish.recipe.gradient_accumulation(), &Chosen::key(rows, &1).reason)
        }
        (Some(all), Auto::Given(rows)) => {
            let own = of_one_rank(all, wish.world_size)?;
            if !own.is_multiple_of(rows) {
                return Err(RunError::Refused(format!(
                    "train.rows_per_step = {all} are {own} rows of each rank, which are not divided into micro-batches of {rows}: write a \
                     train.micro_batch_size that divides {own}, or \"auto\""
                )));
            }
            made(rows, own, "the recipe")
        }
        (Some(all), Auto::Auto) => {
            let own = of_one_rank(all, wish.world_size)?;
            fastest(own, |rows| made(rows, own, ""))
        }
    }
}

/// Plans `own` rows in micro-batches of each size that divides them, and returns the smallest of the fastest plans.
fn fastest<'a>(own: usize, made: impl Fn(usize) -> Result<Made<'a>, RunError>) -> Result<Made<'a>, RunError> {
    let mut fitting: Vec<Made<'a>> = Vec::new();
    for rows in (1..=own).filter(|rows| own.is_multiple_of(*rows)) {
        match made(rows) {
            Ok(made) => fitting.push(made),
            // The refusal of single rows says what is missing.
            Err(error) if fitting.is_empty() => return Err(error),
            // More rows take more memory.
            Err(_) => break,
        }
    }
    let rows = |made: &Made<'_>| made.rows.micro_batch_size.value;
    let seconds_per_row = |made: &Made<'_>| {
        let documents = made.wish.data.documents_per_row;
        forecast::compared_seconds(&made.case, &made.training, documents) / rows(made) as f64
    };
    let seconds: Vec<f64> = fitting.iter().map(seconds_per_row).collect();
    let fastest = seconds.iter().copied().min_by(f64::total_cmp).expect("a number has a divisor");
    let as_fast = (0..fitting.len()).filter(|&index| seconds[index] <= (1.0 + AS_FAST) * fastest);
    let chosen = as_fast.min_by_key(|&index| fitting[index].estimate.total_bytes());
    let chosen = chosen.expect("the fastest is as fast as itself");
    let others = (0..fitting.len()).filter(|&index| index != chosen);
    let others: Vec<String> = others
        .map(|index| format!("{} {:.2} times as long", rows(&fitting[index]), seconds[index] / seconds[chosen]))
        .collect();
    let largest = fitting.iter().map(rows).max().unwrap_or(1);
    let rest = if largest < own { format!("; more than {largest} do not fit") } else { String::new() };
    let mut chosen = fitting.swap_remove(chosen);
    chosen.rows.micro_batch_size.reason = format!(
        "auto: the least memory among the fastest that fit; the others by the model: {}{rest}",
        if others.is_empty() { "none".to_owned() } else { others.join(", ") }
    );
    Ok(chosen)
}

fn of_one_rank(all: usize, ranks: usize) -> Result<usize, RunError> {
    if all.is_multiple_of(ranks) {
        return Ok(all / ranks);
    }
    Err(RunError::Refused(format!(
        "train.rows_per_step = {all} cannot be divided over {ranks} ranks: write a multiple of {ranks}, such as {}",
        all.next_multiple_of(ranks)
    )))
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use crate::plan::fixtures::{Example, TINY, resolve, resolve_for};
    use crate::plan::{Chosen, Plan};

    const AUTO: [&str; 2] = ["train.micro_batch_size=auto", "train.rows_per_step=12"];

    #[test]
    fn a_step_has_the_requested_rows_in_micro_batches_that_divide_it() {
        let plan = resolve(&AUTO).unwrap();
        let (rows, passes) = (plan.micro_batch_size.value, plan.gradient_accumulation.value);
        assert_eq!((rows * passes, plan.rows_per_step()), (12, 12));
        assert!(plan.micro_batch_size.reason.starts_with("auto: "), "{}", plan.micro_batch_size.reason);
        let given = resolve(&["train.micro_batch_size=3", "train.rows_per_step=12"]).unwrap();
        assert_eq!((given.micro_batch_size.value, given.gradient_accumulation.value), (3, 4));
        assert_eq!(given.micro_batch_size.reason, "the recipe");
    }

    #[test]
    fn without_a_number_a_step_has_rows_by_the_size_of_the_data() {
        for ranks in [1, 2] {
            let plan = resolve_for(TINY, ranks, &AUTO[..1]).unwrap();
            assert_eq!(plan.rows_per_step(), ranks);
            assert!(plan.gradient_accumulation.reason.contains("per step by the size of the data"));
        }
        let large = Example::on("h100", &["train.micro_batch_size=auto"]).plan();
        assert_eq!(large.rows_per_step(), 16, "4,800 rows make 200 steps of 24, and 16 are the most");
    }

    /// Plans 16 rows of 4,096 tokens of an 8B model on an H100 with this much memory.
    fn on_a_card(gib: u64) -> Plan {
        let keys = ["pack=true", "train.micro_batch_size=auto", "train.rows_per_step=16"];
        let limit = format!("train.device_memory_gib={gib}");
        Example::on("h100", &[&keys[..], &[limit.as_str()]].concat()).plan()
    }

    #[test]
    fn a_card_of_any_size_gets_the_same_step_and_hears_what_does_not_fit() {
        let [large, small] = [80, 12].map(on_a_card);
        for plan in [&large, &small] {
            let Chosen { value: rows, reason } = &plan.micro_batch_size;
            assert_eq!(plan.rows_per_step(), 16, "{reason}");
            assert!(reason.starts_with("auto: ") && reason.contains("times as long"), "{reason}");
            let evaluated = plan.eval_micro_batch_size.value;
            assert!(*rows > 1 && evaluated == *rows, "evaluations have {rows} rows per pass too");
        }
        assert!(small.micro_batch_size.reason.contains("do not fit"), "{}", small.micro_batch_size.reason);
    }

    #[test]
    fn rows_that_cannot_be_divided_are_refused_with_what_can() {
        let refused = |changes: &[&str]| resolve(changes).unwrap_err().to_string();
        assert!(refused(&["train.micro_batch_size=5", "train.rows_per_step=12"]).contains("divides 12"));
        assert!(super::of_one_rank(10, 4).unwrap_err().to_string().contains("a multiple of 4, such as 12"));
        assert_eq!(super::of_one_rank(12, 4).unwrap(), 3);
    }
}
