//! Divides the rows of a step into micro-batches: `train.rows_per_step`, with a `train.micro_batch_size` that is given or "auto".
//!
//! Trade-off: every division up to the first that does not fit is planned whole, with its own mix of what is saved and where, which takes milliseconds
//! each; times are those of the forecast's model, and nothing is tried.

use crate::config::{MicroBatchSize, RunConfig};
use crate::error::RunError;
use crate::plan::inputs::PlanInputs;
use crate::plan::{Made, forecast};

/// Divisions that take at most this much longer than the fastest count as equally fast, since the model is no more accurate; the one that takes
/// the least memory is chosen.
const AS_FAST: f64 = 0.02;

/// A division of a step.
struct Division {
    config: RunConfig,
    rows: usize,
    seconds_per_row: f64,
    bytes: u64,
}

/// Returns the recipe with the micro-batches of a rank, and the reason for their size; `None` if it says how many there are.
///
/// # Errors
/// Rows that cannot be divided over the ranks, or into micro-batches of the size that is given; no division fits into memory.
pub(super) fn divided(inputs: PlanInputs<'_>) -> Result<Option<(RunConfig, String)>, RunError> {
    let PlanInputs { config, world_size, .. } = inputs;
    let Some(all) = config.train.rows_per_step else { return Ok(None) };
    let own = of_one_rank(all, world_size)?;
    if let MicroBatchSize::Rows(rows) = config.train.micro_batch_size {
        if !own.is_multiple_of(rows) {
            return Err(RunError::Refused(format!(
                "train.rows_per_step = {all} are {own} rows of each rank, which are not divided into micro-batches of {rows}: write a \
                 train.micro_batch_size that divides {own}, or \"auto\""
            )));
        }
        return Ok(Some((in_micro_batches(config, rows, own), "the recipe".to_owned())));
    }
    let mut fitting: Vec<Division> = Vec::new();
    for rows in (1..=own).filter(|rows| own.is_multiple_of(*rows)) {
        match division(inputs, rows, own) {
            Ok(division) => fitting.push(division),
            // The refusal of single rows says what is missing.
            Err(error) if fitting.is_empty() => return Err(error),
            // More rows take more memory.
            Err(_) => break,
        }
    }
    let fastest = fitting.iter().map(|division| division.seconds_per_row).min_by(f64::total_cmp);
    let fastest = fastest.expect("a number has a divisor");
    let as_fast = fitting.iter().filter(|division| division.seconds_per_row <= (1.0 + AS_FAST) * fastest);
    let chosen = as_fast.min_by_key(|division| division.bytes).expect("the fastest is as fast as itself");
    let others = fitting.iter().filter(|division| division.rows != chosen.rows);
    let others: Vec<String> = others
        .map(|of| format!("{} {:.2} times as long", of.rows, of.seconds_per_row / chosen.seconds_per_row))
        .collect();
    let largest = fitting.iter().map(|division| division.rows).max().unwrap_or(1);
    let rest = if largest < own { format!("; more than {largest} do not fit") } else { String::new() };
    let reason = format!(
        "auto: the least memory among the fastest that fit; the others by the model: {}{rest}",
        if others.is_empty() { "none".to_owned() } else { others.join(", ") }
    );
    Ok(Some((chosen.config.clone(), reason)))
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

/// Plans the step with micro-batches of this size.
fn division(inputs: PlanInputs<'_>, rows: usize, own: usize) -> Result<Division, RunError> {
    let config = in_micro_batches(inputs.config, rows, own);
    let made = Made::of(PlanInputs { config: &config, ..inputs })?;
    let seconds = forecast::compared_seconds(&made.case, &made.training, made.data.documents_per_row);
    let bytes = made.estimate.total_bytes();
    Ok(Division { rows, seconds_per_row: seconds / rows as f64, bytes, config })
}

fn in_micro_batches(config: &RunConfig, rows: usize, own: usize) -> RunConfig {
    let mut config = config.clone();
    config.train.micro_batch_size = MicroBatchSize::Rows(rows);
    config.train.gradient_accumulation = Some(own / rows);
    config
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use crate::config::RunConfig;
    use crate::plan::fixtures::{Example, resolve};

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

    /// Divides 16 rows of 4,096 tokens of an 8B model on an H100 with this much memory.
    fn on_a_card(gib: u64) -> (RunConfig, String) {
        let keys = ["pack=true", "train.micro_batch_size=auto", "train.rows_per_step=16"];
        let limit = format!("train.device_memory_gib={gib}");
        let example = Example::on("h100", &[&keys[..], &[limit.as_str()]].concat());
        super::divided(example.inputs()).unwrap().unwrap()
    }

    #[test]
    fn a_card_of_any_size_gets_the_same_step_and_hears_what_does_not_fit() {
        let [large, small] = [80, 12].map(on_a_card);
        for (config, reason) in [&large, &small] {
            assert_eq!(config.rows_per_step(), 16, "{reason}");
            assert!(reason.starts_with("auto: ") && reason.contains("times as long"), "{reason}");
            let rows = config.train.micro_batch_size.rows();
            assert!(rows > 1 && config.eval_micro_batch_size() == rows, "evaluations have {rows} rows per pass too");
        }
        assert!(small.1.contains("do not fit"), "{}", small.1);
    }

    #[test]
    fn rows_that_cannot_be_divided_are_refused_with_what_can() {
        let refused = |changes: &[&str]| resolve(changes).unwrap_err().to_string();
        assert!(refused(&["train.micro_batch_size=5", "train.rows_per_step=12"]).contains("divides 12"));
        assert!(super::of_one_rank(10, 4).unwrap_err().to_string().contains("a multiple of 4, such as 12"));
        assert_eq!(super::of_one_rank(12, 4).unwrap(), 3);
    }
}
