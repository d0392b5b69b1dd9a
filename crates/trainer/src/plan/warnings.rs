//! Warnings about settings that a recipe may have but hardly anybody intends. The run uses them all the same.
//!
//! Trade-off: limits are rules of thumb; impossible settings are refused elsewhere.

use firebrick_arch::ModelSpec;

use crate::config::{RunConfig, ZeroStage};
use crate::plan::Made;
use crate::plan::inputs::DataShape;

/// The highest learning rate without a warning: a hundred times a usual rate of adapters.
const HIGH_RATE: f64 = 0.02;

/// Returns sentences about such settings of a recipe.
pub(super) fn of(made: &Made<'_>) -> Vec<String> {
    let Made { config, model, data, world_size, mix, .. } = made;
    [positions(config, &model.spec, data), zero_stage(config, *world_size), learning_rate(config), mix.warning.clone()]
        .into_iter()
        .flatten()
        .collect()
}

/// Warns if documents, or their maximum length, exceed what the model was made for.
fn positions(config: &RunConfig, spec: &ModelSpec, data: &DataShape) -> Option<String> {
    let (longest, positions) = (data.longest_document, spec.max_position_embeddings);
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

fn zero_stage(config: &RunConfig, world_size: usize) -> Option<String> {
    let stage = config.train.zero_stage;
    (world_size == 1 && stage != ZeroStage::NONE).then(|| {
        format!(
            "train.zero_stage = {stage} divides nothing on one rank: start several with --ranks, or leave the key out"
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
