//! Plans what a run writes to the disk, and checks whether there is room for it.
//!
//! Trade-off: only what grows with the model counts; metrics, texts and cached tokens come on top.

use firebrick_arch::{EMBEDDING, HEAD, ModelConfig, TensorSpec};
use firebrick_hwprofile::memory::human_bytes;
use firebrick_kernels::TRAINED_BYTES;
use firebrick_model::float_type_of;

use crate::config::RunConfig;
use crate::error::RunError;
use crate::plan::{Chosen, Plan, shapes};

/// The largest whole number of TOML, in which a plan is saved.
const MOST: u64 = i64::MAX as u64;

/// The interval of checkpoints, and the number that stays.
pub(super) struct Saves {
    pub(super) steps: u64,
    /// Steps between two checkpoints; 0: only at the end.
    pub(super) every: u64,
    pub(super) keep: usize,
    /// Bytes of the completions that the run learns from, if all are as long as they may be.
    pub(super) completions: u64,
}

impl Saves {
    /// Returns the maximum number of checkpoints on the disk at the same time: an old one is removed when the new one is complete.
    fn at_once(&self) -> u64 {
        let saved = if self.every == 0 { 1 } else { self.steps.div_ceil(self.every).max(1) };
        saved.min((self.keep.max(1) as u64).saturating_add(1))
    }
}

/// Returns the bytes of a checkpoint, and of the whole run folder at the end.
pub(super) fn decide(
    config: &RunConfig,
    model: &ModelConfig,
    trained: &[TensorSpec],
    saves: &Saves,
) -> [Chosen<u64>; 2] {
    let weights = TRAINED_BYTES * trained.iter().map(|tensor| tensor.elements() as u64).sum::<u64>();
    // A code takes a byte in the file, whatever the backend uses.
    let state = shapes::optimizer(config).state_bytes(trained);
    let checkpoint = weights + state;
    let why = format!("{} of trained weights, {} of optimizer state", human_bytes(weights), human_bytes(state));
    let count = match &config.best {
        None => saves.at_once(),
        // Any evaluation may be saved, and the best one stays next to the newest.
        Some(_) => saves.steps.min((saves.keep.max(2) as u64).saturating_add(1)),
    };
    let (result, later) =
        if config.lora.is_some() { (weights, exports(model)) } else { (model_bytes(model), ggufs(model)) };
    // While a result replaces that of an earlier end, both are there; the earlier one is no part of what is free then.
    let run = count.saturating_mul(checkpoint).saturating_add(result).saturating_add(saves.completions).min(MOST);
    let checkpoints = if count == 1 { "a checkpoint".to_owned() } else { format!("{count} checkpoints") };
    let what = match (&config.lora, model.wrapper) {
        (Some(_), _) => "adapter".to_owned(),
        (None, None) => "model".to_owned(),
        (None, Some(wrapper)) => format!("text model without the {}", wrapper.other_part),
    };
    let completions = match saves.completions {
        0 => String::new(),
        bytes => format!(", completions of up to {}", human_bytes(bytes)),
    };
    let whole = format!("{checkpoints} of {}{completions}, and the {what}; {later}", human_bytes(checkpoint));
    [Chosen::new(checkpoint, why), Chosen::new(run, whole)]
}

/// Returns the size in bytes of the model as a Hugging Face folder, in the format that its config names.
fn model_bytes(model: &ModelConfig) -> u64 {
    float_type_of(model).bytes() as u64 * model.spec.parameters()
}

/// Describes the sizes of files exported from an adapter.
fn exports(model: &ModelConfig) -> String {
    let more = model.wrapper.map_or(String::new(), |wrapper| format!(" and its {}", wrapper.other_part));
    format!("merged it is a model of {}{more}, {}", human_bytes(model_bytes(model)), ggufs(model))
}

/// Describes the sizes of GGUF files of the model: f16 has 2 bytes per weight; q4_0 18 per 32, and 34 where it stores tables in q8_0.
fn ggufs(model: &ModelConfig) -> String {
    let (all, tensors) = (model.spec.parameters(), model.spec.tensors());
    let tables = tensors.iter().filter(|tensor| [EMBEDDING, HEAD].contains(&tensor.name.as_str()));
    let tables: u64 = tables.map(|tensor| tensor.elements() as u64).sum();
    let small = tables * 34 / 32 + (all - tables) * 18 / 32;
    format!("as GGUF {} (f16) to {} (q4_0)", human_bytes(2 * all), human_bytes(small))
}

impl Plan {
    /// Checks the `free` bytes of the disk of the run folder. Returns a warning if they are too few for all that the run keeps.
    ///
    /// # Errors
    /// The disk has no room for one checkpoint: the run would train and could save nothing.
    pub(crate) fn check_free(&self, free: u64) -> Result<Option<String>, RunError> {
        let (one, all, folder) = (self.checkpoint_bytes.value, self.disk_bytes.value, &self.output_dir.value);
        if free < one {
            let (needed, free) = (human_bytes(one), human_bytes(free));
            return Err(RunError::Refused(format!(
                "the disk of output_dir = \"{}\" has {free} free, and one checkpoint of this run takes {needed}: it would train and could save \
                 nothing. Free some space, or set output_dir to a folder on another disk",
                folder.display()
            )));
        }
        Ok((free < all).then(|| {
            let (needed, free) = (human_bytes(all), human_bytes(free));
            format!(
                "the run folder grows to {needed}, and {free} are free on the disk of {}: lower checkpoint.keep, or set output_dir to a \
                 folder on another disk",
                folder.display()
            )
        }))
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use crate::plan::fixtures::resolve;

    #[test]
    fn checkpoints_and_results_are_counted_with_the_one_that_is_being_written() {
        let at_once = |steps, every, keep| Saves { steps, every, keep, completions: 0 }.at_once();
        assert_eq!([at_once(10, 0, 2), at_once(10, 10, 2), at_once(10, 5, 2), at_once(10, 1, 2)], [1, 1, 2, 3]);
        assert_eq!([at_once(10, 1, 0), at_once(u64::MAX, 1, usize::MAX)], [2, u64::MAX]);
        let settings = ["train.optimizer=adamw", "train.steps=10", "checkpoint.every_steps=2", "checkpoint.keep=3"];
        let plan = resolve(&settings).unwrap();
        let trained = plan.trained_parameters.value;
        assert_eq!((plan.checkpoint_bytes.value, plan.disk_bytes.value), (12 * trained, (4 * 12 + 4) * trained));
        let full = resolve(&[&settings[..], &["lora=", "mode=full"]].concat()).unwrap();
        let parameters = full.trained_parameters.value;
        // The config of the tiny model names no format, so the result is f32.
        assert_eq!(full.disk_bytes.value, (4 * 12 + 4) * parameters);
        let line = |plan: &Plan| plan.to_string().lines().find(|line| line.contains("GGUF")).unwrap().to_owned();
        assert!(line(&plan).contains("merged it is a model of") && line(&plan).contains("4 checkpoints of"));
        assert!(!line(&full).contains("merged"), "{}", line(&full));
    }

    #[test]
    fn a_disk_without_room_for_one_checkpoint_is_refused_and_one_for_too_few_is_warned_of() {
        let plan = resolve(&["checkpoint.every_steps=1", "output_dir=out"]).unwrap();
        let (one, all) = (plan.checkpoint_bytes.value, plan.disk_bytes.value);
        let message = plan.check_free(one - 1).unwrap_err().to_string();
        assert!(message.contains(&human_bytes(one)) && message.contains("output_dir"), "{message}");
        let warning = plan.check_free(all - 1).unwrap().expect("there is room for some of them");
        assert!(warning.contains(&human_bytes(all)) && warning.contains("checkpoint.keep"), "{warning}");
        assert!(plan.check_free(one).unwrap().is_some());
        assert_eq!(plan.check_free(all).unwrap(), None);
    }
}
