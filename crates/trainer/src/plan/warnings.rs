//! Warnings about settings that a recipe may have but hardly anybody intends. The run uses them all the same.
//!
//! Trade-off: limits are rules of thumb; impossible settings are refused elsewhere.

use firebrick_arch::Mixer;
use firebrick_kernels::BackendKind;
use firebrick_kernels::delta::has_cuda_kernels;

use crate::config::{RunConfig, ZeroStage};
use crate::plan::Made;
use crate::plan::wish::Wish;

/// The highest learning rate without a warning: a hundred times a usual rate of adapters.
const HIGH_RATE: f64 = 0.02;

/// Returns sentences about such settings of a recipe.
pub(super) fn of(made: &Made<'_>) -> Vec<String> {
    let config = made.wish.recipe;
    let all = [
        positions(made.wish),
        step(made),
        zero_stage(made.wish),
        learning_rate(config),
        delta_rule(made),
        made.memory.warning.clone(),
    ];
    all.into_iter().flatten().collect()
}

/// Warns if a step has more rows than the data: it computes some of them several times.
fn step(made: &Made<'_>) -> Option<String> {
    let Wish { recipe: config, world_size, .. } = *made.wish;
    let (of_step, rows) = (made.rows_per_step(), made.wish.data.rows);
    let (times, most) = (of_step as f64 / rows as f64, (rows / world_size).max(1));
    let what = match config.train.rows_per_step {
        Some(_) => format!("train.rows_per_step to {}", most * world_size),
        None => format!("train.micro_batch_size x train.gradient_accumulation to {most}"),
    };
    (of_step > rows).then(|| {
        format!("a step has {of_step} rows and the data has {rows}: each is in it {times:.1} times; set {what} or less")
    })
}

/// Warns if documents, or their maximum length, exceed what the model was made for.
fn positions(wish: &Wish<'_>) -> Option<String> {
    let (config, positions) = (wish.recipe, wish.model.spec.max_position_embeddings);
    let longest = wish.data.longest_document;
    let what = match (longest > positions, config.max_seq_len > positions) {
        (true, _) => format!("the longest document has {longest} tokens"),
        (false, true) => format!("max_seq_len is {} and the longest document has {longest} tokens", config.max_seq_len),
        (false, false) => return None,
    };
    Some(format!(
        "{what}, but the model is made for {positions} (max_position_embeddings in its config.json): beyond them it has learned \
         nothing; lower max_seq_len, or give the config a rope_scaling"
    ))
}

fn zero_stage(wish: &Wish<'_>) -> Option<String> {
    let stage = wish.recipe.train.zero_stage;
    (wish.world_size == 1 && stage != ZeroStage::NONE).then(|| {
        format!(
            "train.zero_stage = {stage} divides nothing on one rank: start several with --ranks, or leave the key out"
        )
    })
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
        assert!(warning(&["max_seq_len=129"]).starts_with("max_seq_len is 129 and the longest document has 20 tokens"));
        assert!(warning(&["train.zero_stage=3"]).starts_with("train.zero_stage = 3 divides nothing on one rank"));
        let rate = warning(&["train.learning_rate=0.05"]);
        assert!(rate.starts_with("train.learning_rate = 0.05 is above 0.02, and the default is 2e-4"), "{rate}");
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
        assert_eq!(resolve(&["train.micro_batch_size=100"]).unwrap().warnings, [""; 0]);
    }

    #[test]
    fn what_is_usual_is_not_warned_of() {
        let usual = ["max_seq_len=128", "train.learning_rate=0.02", "train.zero_stage=0"];
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
