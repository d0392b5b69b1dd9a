//! Decisions about the course of a run: its steps, the intervals between events, the learning rate, and the order of rows.

use firebrick_arch::{counted, plural};

use crate::config::{Interval, Mode, RunConfig, Warmup};
use crate::plan::{Chosen, Made, size};

/// Returns the number of optimizer steps of a run over so many rows.
pub(super) fn steps(config: &RunConfig, rows: usize, per_step: usize) -> Chosen<u64> {
    let of_epochs = |epochs: f64, why: &str| {
        let steps = (epochs * rows as f64 / per_step as f64).ceil().max(1.0) as u64;
        Chosen::new(steps, format!("{}, rounded up{why}", in_rows(epochs, rows, per_step)))
    };
    match config.length() {
        Some(Interval::Steps(steps)) => {
            let epochs = steps as f64 * per_step as f64 / rows as f64;
            Chosen::new(steps, format!("the recipe: {epochs:.2} epochs of {}", counted(rows, "row")))
        }
        Some(Interval::Epochs(epochs)) => of_epochs(epochs, ""),
        None => {
            let epochs = size::epochs(rows, per_step);
            let several = "; train.epochs is open, and so little data is read several times";
            of_epochs(epochs, if epochs > 1.0 { several } else { "" })
        }
    }
}

/// Returns the number of steps between two evaluations, checkpoints or lines of metrics.
pub(super) fn every(made: &Made<'_>, interval: fn(&RunConfig) -> Interval) -> Chosen<u64> {
    let (own, default) = (interval(made.wish.recipe), interval(&made.default));
    let (rows, per_step) = (made.wish.data.rows, made.rows_per_step());
    let steps = whole_steps(own, rows, per_step);
    match own {
        Interval::Steps(_) => Chosen::new(steps, Chosen::key(own, &default).reason),
        Interval::Epochs(epochs) => Chosen::new(steps, format!("{}, rounded", in_rows(epochs, rows, per_step))),
    }
}

/// Writes a length in epochs with what it is counted in.
fn in_rows(epochs: f64, rows: usize, per_step: usize) -> String {
    let epoch = plural(epochs == 1.0, "epoch");
    format!("{epochs} {epoch} of {}, {} per step", counted(rows, "row"), counted(per_step, "row"))
}

pub(super) fn whole_steps(interval: Interval, rows: usize, per_step: usize) -> u64 {
    match interval {
        Interval::Steps(steps) => steps,
        Interval::Epochs(epochs) => (epochs * rows as f64 / per_step as f64).round().max(1.0) as u64,
    }
}

/// Returns the number of steps with increasing learning rate.
pub(super) fn warmup(config: &RunConfig, steps: u64) -> Chosen<u64> {
    match config.warmup() {
        Warmup::Steps(warmup) => Chosen::recipe(warmup),
        Warmup::Ratio(ratio) => {
            // Subtracts the rounding error of the product, which must not add a step.
            let warmup = (ratio * steps as f64 - 1e-9).ceil().max(0.0) as u64;
            Chosen::new(warmup, format!("{:.1} % of the steps, rounded up", 100.0 * ratio))
        }
    }
}

pub(super) fn learning_rate(made: &Made<'_>) -> Chosen<f64> {
    let config = made.wish.recipe;
    let (rate, usual) = (config.learning_rate(), made.default.learning_rate());
    if rate != usual {
        return Chosen::recipe(rate);
    }
    let trains = if config.mode() == Mode::Full { "all weights" } else { "adapters" };
    let on = if config.preference.is_some() { " on pairs of answers" } else { "" };
    Chosen::new(rate, format!("the usual rate for {trains}{on}"))
}

pub(super) fn data_seed(config: &RunConfig) -> Chosen<u64> {
    let seed = config.data_seed();
    Chosen::new(seed, if config.data.data_seed.is_some() { "the recipe" } else { "as seed" })
}

/// Returns the micro-batches per step; the reason counts the rows of all ranks.
pub(super) fn accumulation(made: &Made<'_>) -> Chosen<usize> {
    let (own, rows, world_size) = (made.rows.of_rank(), made.rows_per_step(), made.wish.world_size);
    let ranks = if world_size == 1 { String::new() } else { format!(" ({own} on each of {world_size} ranks)") };
    let by = if made.wish.recipe.leaves_rows_open() { " by the size of the data" } else { "" };
    Chosen::new(
        made.rows.accumulation,
        format!("{} per step{by}{ranks}, one loss denominator over all of them", counted(rows, "row")),
    )
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use crate::plan::fixtures::{Example, resolve};

    #[test]
    fn a_recipe_without_epochs_reads_small_data_several_times_and_its_own_number_stands() {
        let steps = |changes: &[&str]| resolve(changes).unwrap().steps;
        // 100 rows in steps of 1, 2, 10 and 50.
        let rows = ["1", "2", "10", "50"].map(|rows| format!("train.micro_batch_size={rows}"));
        let by_size = rows.map(|rows| steps(&["train.epochs=", &rows]));
        assert_eq!(by_size.each_ref().map(|steps| steps.value), [300, 150, 80, 20]);
        let why = &by_size[0].reason;
        assert!(
            why.starts_with("3 epochs of 100 rows, 1 row per step") && why.contains("train.epochs is open"),
            "{why}"
        );
        assert_eq!((steps(&["train.epochs=1"]).value, steps(&["train.steps=7"]).value), (100, 7));
        assert_eq!(steps(&["train.epochs=", "init=random", "lora="]).value, 100, "pretraining reads its data once");
        assert_eq!(Example::new(&[], 80, 512).plan().steps.value, 600, "large data is read once");
    }

    #[test]
    fn intervals_in_epochs_become_whole_steps_and_warmup_is_rounded_up() {
        let plan = resolve(&[
            "train.micro_batch_size=6",
            "train.log_every_epochs=0.001",
            "eval.every_epochs=0.5",
            "data.eval_fraction=0.1",
            "checkpoint.every_epochs=2",
            "train.steps=10",
            "train.warmup_ratio=0.03",
        ])
        .unwrap();
        let found = [plan.log_every, plan.eval_every_steps, plan.checkpoint_every_steps].map(|every| every.value);
        // 100 rows in steps of 6.
        assert_eq!((found, plan.warmup_steps.value), ([1, 8, 33], 1));
        let exact = resolve(&["train.steps=100", "train.warmup_ratio=0.07"]).unwrap();
        assert_eq!(exact.warmup_steps.value, 7, "0.07 x 100 is a little above 7 in floating point");
        assert_eq!(resolve(&["train.schedule=constant"]).unwrap().warmup_steps.value, 0);
    }
}
