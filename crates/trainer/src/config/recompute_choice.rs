//! What the backward recomputes, or "auto", which the plan decides: `train.recompute`; and what a plan decided, for the run that goes on.
//!
//! Trade-off: the words of [`Recompute`] are listed a second time, so that a message and the schema name all five.

use firebrick_kernels::Recompute;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::config::{DeviceBudget, MicroBatchSize, RunConfig};

/// The value of `train.recompute`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum RecomputeChoice {
    /// The fastest that fits.
    Auto,
    /// Save the input of each layer.
    Full,
    /// Save the inputs of attention and of the MLP, and attention's output.
    Projections,
    /// Save the outputs of matrix multiplications and of attention.
    Selective,
    /// Save all that the backward reads.
    None,
}

impl RecomputeChoice {
    /// Returns the choice of the recipe; `None`: the plan decides.
    pub(super) fn fixed(self) -> Option<Recompute> {
        match self {
            Self::Auto => None,
            Self::Full => Some(Recompute::Full),
            Self::Projections => Some(Recompute::Projections),
            Self::Selective => Some(Recompute::Selective),
            Self::None => Some(Recompute::None),
        }
    }
}

impl From<Option<Recompute>> for RecomputeChoice {
    fn from(recompute: Option<Recompute>) -> Self {
        match recompute {
            None => Self::Auto,
            Some(Recompute::Full) => Self::Full,
            Some(Recompute::Projections) => Self::Projections,
            Some(Recompute::Selective) => Self::Selective,
            Some(Recompute::None) => Self::None,
        }
    }
}

/// What a run saves, copies and keeps converted, as its plan decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DecidedMix {
    /// What the backward of a layer recomputes.
    pub recompute: Recompute,
    /// Whether what layers save waits in host memory.
    pub offload: bool,
    /// Bytes of weights that stay as GEMMs read them; `None` if none are converted.
    pub kept_weights_bytes: Option<u64>,
    /// Rows of a micro-batch. Checkpoints of earlier versions lack it.
    #[serde(default)]
    pub micro_batch_size: Option<usize>,
}

impl RunConfig {
    /// Lets the recipe of a resumed run of `ranks` go on as the run was planned, in what the recipe leaves to the plan.
    pub fn go_on_as(&mut self, decided: DecidedMix, ranks: usize) {
        let of_ranks = |rows: usize| self.train.rows_per_step.is_some_and(|all| all.is_multiple_of(rows * ranks));
        if let (MicroBatchSize::Auto, Some(rows)) = (self.train.micro_batch_size, decided.micro_batch_size)
            && of_ranks(rows)
        {
            self.train.micro_batch_size = MicroBatchSize::Rows(rows);
        }
        if self.recompute().is_some() {
            return;
        }
        let train = &mut self.train;
        train.recompute = Some(Some(decided.recompute).into());
        if decided.recompute.may_offload() {
            train.offload.get_or_insert(decided.offload);
        }
        if let (DeviceBudget::Auto, Some(bytes)) = (train.kept_weights_gib, decided.kept_weights_bytes) {
            train.kept_weights_gib = DeviceBudget::Gib(bytes as f64 / (1u64 << 30) as f64);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn a_resumed_run_keeps_what_was_decided_where_its_recipe_says_nothing() {
        let recipe = |key: &str| {
            let text = format!("model='m'\nmode='full'\n[data]\npath='d'\n[train]\n{key}\n");
            RunConfig::from_toml(&text, Path::new("recipe.toml"), &[]).unwrap()
        };
        let decided = DecidedMix {
            recompute: Recompute::Projections,
            offload: true,
            kept_weights_bytes: Some((5 << 30) + 1),
            micro_batch_size: Some(4),
        };
        let gone_on = |key| {
            let mut config = recipe(key);
            config.go_on_as(decided, 2);
            let bytes = match config.train.kept_weights_gib {
                DeviceBudget::Gib(gib) => Some((gib * (1u64 << 30) as f64) as u64),
                DeviceBudget::Auto => None,
            };
            (config.recompute(), config.train.offload, bytes)
        };
        let all = (Some(Recompute::Projections), Some(true), decided.kept_weights_bytes);
        assert_eq!([gone_on(""), gone_on("recompute='auto'")], [all; 2]);
        assert_eq!(gone_on("offload=false"), (all.0, Some(false), all.2));
        assert_eq!(gone_on("kept_weights_gib=1"), (all.0, all.1, Some(1 << 30)));
        assert_eq!(gone_on("recompute='full'"), (Some(Recompute::Full), None, None));
        assert_eq!(gone_on("grad_checkpointing=false"), (Some(Recompute::None), None, None));
        let rows = |keys: &str| {
            let mut config = recipe(&format!("micro_batch_size='auto'\n{keys}"));
            config.go_on_as(decided, 2);
            config.train.micro_batch_size
        };
        assert_eq!(rows("rows_per_step=24"), MicroBatchSize::Rows(4));
        assert_eq!(rows("rows_per_step=12"), MicroBatchSize::Auto, "two ranks have six rows each");
    }
}
