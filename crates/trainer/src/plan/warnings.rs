//! Warnings about settings that a recipe may have but hardly anybody intends. The run uses them all the same.
//!
//! Trade-off: limits are rules of thumb; impossible settings are refused elsewhere.

use firebrick_arch::{Mixer, counted};
use firebrick_kernels::BackendKind;
use firebrick_kernels::delta::has_cuda_kernels;

use crate::config::{Auto, RunConfig, SourceConfig, ZeroStage};
use crate::plan::wish::Wish;
use crate::plan::{Made, schedule, size};

/// The highest learning rate without a warning: a hundred times a usual rate of adapters.
const HIGH_RATE: f64 = 0.02;

/// Runs of fewer steps hardly change a model.
const FEW_STEPS: u64 = 10;

/// Returns sentences about such settings of a recipe.
pub(super) fn of(made: &Made<'_>) -> Vec<String> {
    let config = made.wish.recipe;
    let all = [
        positions(made.wish),
        step(made),
        few_steps(made),
        zero_stage(made.wish),
        keys_of_cuda(made),
        learning_rate(config),
        held_out(config),
        evaluations(made),
        delta_rule(made),
        made.memory.warning.clone(),
    ];
    all.into_iter().flatten().collect()
}

/// Warns if a step has more rows than the data: it computes some of them several times.
fn step(made: &Made<'_>) -> Option<String> {
    let Wish { rows_per_step, world_size, .. } = *made.wish;
    let (of_step, rows) = (made.rows_per_step(), made.wish.data.rows);
    let (times, most) = (of_step as f64 / rows as f64, (rows / world_size).max(1));
    let what = match rows_per_step {
        Some(_) => format!("train.rows_per_step to {}", most * world_size),
        None => format!("train.micro_batch_size x train.gradient_accumulation to {most}"),
    };
    (of_step > rows).then(|| {
        let of_step = counted(of_step, "row");
        format!("a step has {of_step} and the data has {rows}: each is in it {times:.1} times; set {what} or less")
    })
}

/// Warns if passes over the data are so few, or steps so large, that the run is over before anything is learned.
fn few_steps(made: &Made<'_>) -> Option<String> {
    let (config, steps, rows) = (made.wish.recipe, made.steps.value, made.wish.data.rows);
    let of_step = made.rows_per_step();
    // Steps that the recipe counts are meant, and a step with more rows than the data has a warning of its own.
    let is_meant = config.train.steps.is_some() || config.grpo.is_some() || of_step > rows;
    let epochs = size::epochs(rows, of_step);
    (steps < FEW_STEPS && !is_meant).then(|| {
        let smaller = if of_step > 1 { format!(", or fewer rows per step than {of_step}") } else { String::new() };
        format!(
            "the whole run takes only {steps} steps, in which little is learned: set train.epochs to {epochs}{smaller}"
        )
    })
}

/// Warns if documents exceed what the model was made for. Positions count within a document, so longer rows are no reason.
fn positions(wish: &Wish<'_>) -> Option<String> {
    let (longest, positions) = (wish.data.longest_document, wish.model.spec.max_position_embeddings);
    (longest > positions).then(|| {
        format!(
            "the longest document has {longest} tokens, but the model is made for {positions} (max_position_embeddings in its \
             config.json): beyond them it has learned nothing; lower max_seq_len, or give the config a rope_scaling"
        )
    })
}

/// Warns if the data to evaluate on is trained on.
fn held_out(config: &RunConfig) -> Option<String> {
    let trained = config.data.training_sources();
    let parts = |source: &SourceConfig| (source.path.clone(), source.config.clone(), source.split.clone());
    let held_out = config.data.held_out_sources();
    let same = held_out.iter().find(|source| trained.iter().any(|other| parts(other) == parts(source)))?;
    Some(format!(
        "{} is trained on and evaluated on: its held-out loss says nothing about other data; set data.eval_fraction instead",
        same.path
    ))
}

/// Warns if the recipe evaluates at intervals, and the run ends before the first.
fn evaluations(made: &Made<'_>) -> Option<String> {
    let (config, steps) = (made.wish.recipe, made.steps.value);
    let every = schedule::every(made, RunConfig::eval_interval).value;
    let key = if config.eval.every_steps.is_some() { "eval.every_steps" } else { "eval.every_epochs" };
    let best = if config.best.is_some() { ", and [best] has nothing to compare" } else { "" };
    let (usual, every_steps, of_run) = ((steps / 4).max(1), counted(every, "step"), counted(steps, "step"));
    let what =
        format!("{key} means every {every_steps}, and the run has {of_run}: it is evaluated at its end only{best}");
    (every > steps && config.has_eval_data()).then(|| format!("{what}; write eval.every_steps = {usual}"))
}

fn zero_stage(wish: &Wish<'_>) -> Option<String> {
    let stage = wish.recipe.train.zero_stage;
    (wish.world_size == 1 && stage != ZeroStage::NONE).then(|| {
        format!(
            "train.zero_stage = {stage} divides nothing on one rank: start several with --ranks, or leave the key out"
        )
    })
}

/// Warns of keys that only CUDA reads.
fn keys_of_cuda(made: &Made<'_>) -> Option<String> {
    let (train, backend) = (&made.wish.recipe.train, made.backend.value);
    let there = [
        ("optimizer_device_gib", train.optimizer_device_gib != Auto::Auto),
        ("kept_weights_gib", train.kept_weights_gib != Auto::Auto),
        ("tune_gemms", train.tune_gemms.is_some()),
    ];
    let there: Vec<&str> = there.into_iter().filter(|(_, is_there)| *is_there).map(|(key, _)| key).collect();
    let is_other = backend != BackendKind::Cuda && !there.is_empty();
    is_other.then(|| format!("[train] has keys of CUDA alone, which do nothing on {backend}: {}", there.join(", ")))
}

/// Warns of layers that run in ordinary operations.
fn delta_rule(made: &Made<'_>) -> Option<String> {
    let mut mixers = made.wish.model.spec.layers.iter().map(|layer| &layer.mixer);
    let is_cuda = made.backend.value == BackendKind::Cuda;
    let without = |mixer: &Mixer| matches!(mixer, Mixer::DeltaNet(spec) if !is_cuda || !has_cuda_kernels(spec));
    let which = if is_cuda { "for heads of 16, 32, .. 128 and beta below 1" } else { "on cuda alone" };
    mixers.any(without).then(|| {
        format!(
            "Gated DeltaNet has kernels {which}: here its layers run in ordinary operations, which take most of a step's time and \
             more memory than this plan says"
        )
    })
}

fn learning_rate(config: &RunConfig) -> Option<String> {
    let (rate, usual) = (config.learning_rate(), config.with_default_keys().learning_rate());
    (rate > HIGH_RATE).then(|| {
        format!(
            "train.learning_rate = {rate} is above {HIGH_RATE}, and the default is {usual:e}: most models diverge at it"
        )
    })
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use crate::plan::fixtures::{TINY, resolve, resolve_for};

    /// Returns the plan's only warning.
    fn warning(changes: &[&str]) -> String {
        let plan = resolve(changes).unwrap();
        let [warning] = &plan.warnings[..] else { panic!("one warning is expected: {:?}", plan.warnings) };
        assert!(plan.to_string().contains(&format!("\n  WARNING: {warning}\n")), "{plan}");
        warning.clone()
    }

    #[test]
    fn settings_that_hardly_anybody_means_are_warned_of() {
        let same = warning(&["data.path=a.jsonl", "data.eval_path=a.jsonl"]);
        assert!(
            same.starts_with("a.jsonl is trained on and evaluated on") && same.contains("data.eval_fraction"),
            "{same}"
        );
        let of_cuda = warning(&["train.kept_weights_gib=4", "train.tune_gemms=true"]);
        assert!(of_cuda.ends_with("which do nothing on flex: kept_weights_gib, tune_gemms"), "{of_cuda}");
        assert!(warning(&["train.zero_stage=3"]).starts_with("train.zero_stage = 3 divides nothing on one rank"));
        let rate = warning(&["train.learning_rate=0.05"]);
        assert!(rate.starts_with("train.learning_rate = 0.05 is above 0.02, and the default is 2e-4"), "{rate}");
        let late = ["train.steps=3", "data.eval_path=e", "eval.every_steps=100", "best.patience=2"];
        let expected = "eval.every_steps means every 100 steps, and the run has 3 steps: it is evaluated at its end only, and [best] has \
                        nothing to compare; write eval.every_steps = 1";
        assert_eq!(warning(&late), expected);
    }

    #[test]
    fn a_step_with_more_rows_than_the_data_is_warned_of_with_both_numbers_and_what_to_set() {
        let warned = |ranks: usize, changes: &[&str], start: &str, advice: &str| {
            let warnings = resolve_for(TINY, ranks, changes).unwrap().warnings;
            assert!(warnings[0].starts_with(start) && warnings[0].contains(advice), "{warnings:?}");
        };
        let start = "a step has 250 rows and the data has 100: each is in it 2.5 times; set train.micro_batch_size x";
        warned(1, &["train.micro_batch_size=250"], start, "train.gradient_accumulation to 100 or less");
        warned(1, &["train.micro_batch_size=8", "train.gradient_accumulation=16"], "a step has 128 rows", "to 100");
        warned(2, &["train.micro_batch_size=64"], "a step has 128 rows", "train.gradient_accumulation to 50 or less");
        let auto = ["train.micro_batch_size=auto", "train.rows_per_step=102"];
        warned(3, &auto, "a step has 102 rows", "set train.rows_per_step to 99 or less");
        assert_eq!(resolve(&["train.micro_batch_size=100", "train.steps=10"]).unwrap().warnings, [""; 0]);
    }

    #[test]
    fn a_run_that_is_over_after_a_handful_of_steps_is_warned_of_with_what_to_set() {
        let few = warning(&["train.micro_batch_size=25"]);
        let start =
            "the whole run takes only 4 steps, in which little is learned: set train.epochs to 10, or fewer rows";
        assert!(few.starts_with(start) && few.ends_with("than 25"), "{few}");
        let part = warning(&["train.epochs=0.05"]);
        assert!(part.contains("only 5 steps") && part.ends_with("set train.epochs to 3"), "{part}");
        for meant in
            [&["train.steps=3"][..], &["train.micro_batch_size=25", "train.epochs="], &["train.micro_batch_size=10"]]
        {
            assert_eq!(resolve(meant).unwrap().warnings, [""; 0], "{meant:?}");
        }
    }

    #[test]
    fn what_is_usual_is_not_warned_of() {
        let usual = ["max_seq_len=129", "train.learning_rate=0.02", "train.zero_stage=0"];
        assert_eq!(resolve(&usual).unwrap().warnings, [""; 0]);
        assert_eq!(resolve_for(TINY, 2, &["train.zero_stage=3"]).unwrap().warnings, [""; 0]);
    }

    #[test]
    fn documents_beyond_the_models_positions_are_warned_of_with_their_length() {
        let short = TINY.replace("\"max_position_embeddings\": 128", "\"max_position_embeddings\": 16");
        let plan = resolve_for(&short, 1, &[]).unwrap();
        assert!(plan.warnings[0].starts_with("the longest document has 20 tokens, but the model is made for 16"));
    }
}
