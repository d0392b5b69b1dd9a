//! What a run is asked to be: the recipe as typed, with everything resolved that its model, its data, its ranks and the checkpoint that it goes on from
//! say. It is made once, and nothing edits it; the plan decides the rest.
//!
//! Trade-off: keys that mean what they say stay in the recipe, so that a new one needs no field here.

use firebrick_arch::{ArchError, LoraConfig, ModelConfig};
use firebrick_kernels::Recompute;
use firebrick_precision::FloatType;

use crate::config::{Auto, RunConfig};
use crate::error::RunError;
use crate::plan::inputs::{DataShape, PlanInputs};
use crate::plan::size;

const GIB: f64 = (1_u64 << 30) as f64;

/// What a run is asked to be.
#[derive(Debug)]
pub(super) struct Wish<'a> {
    /// The recipe as typed. What has a field below is read there.
    pub(super) recipe: &'a RunConfig,
    pub(super) model: &'a ModelConfig,
    pub(super) data: &'a DataShape,
    pub(super) world_size: usize,
    /// The adapter, with the rows of new tokens; `None`: every weight trains.
    pub(super) lora: Option<LoraConfig>,
    pub(super) recompute: Auto<Recompute>,
    /// `None`: the plan decides.
    pub(super) offload: Option<bool>,
    pub(super) kept_weights_bytes: Auto<u64>,
    pub(super) micro_batch_size: Auto<usize>,
    /// Format of the sums of gradients of parameters in bf16; `None`: the plan decides.
    pub(super) gradients: Option<FloatType>,
    /// Over all ranks; `None`: those of the micro-batches.
    pub(super) rows_per_step: Option<usize>,
}

impl<'a> Wish<'a> {
    /// Resolves what the recipe says, and what it leaves to a run that is continued.
    pub(super) fn new(inputs: &PlanInputs<'a>) -> Result<Self, RunError> {
        let &PlanInputs { config: recipe, model, data, world_size, request, .. } = inputs;
        let (train, decided) = (&recipe.train, request.decided);
        let by_size = || recipe.leaves_rows_open().then(|| size::rows_per_step(data.rows, world_size));
        let rows_per_step = train.rows_per_step.or_else(by_size);
        let divides = |rows: &usize| rows_per_step.is_some_and(|all| all.is_multiple_of(rows * world_size));
        let rows = decided.map(|decided| decided.micro_batch_size).filter(divides);
        let memory = decided.filter(|_| recipe.recompute().is_none());
        let kept = train.kept_weights_gib.given().map(bytes);
        Ok(Self {
            recipe,
            model,
            data,
            world_size,
            lora: recipe.adapter_of(model)?,
            recompute: recipe.recompute().or(memory.map(|memory| memory.recompute)).into(),
            offload: train
                .offload
                .or(memory.filter(|memory| memory.recompute.may_offload()).map(|memory| memory.offload)),
            kept_weights_bytes: kept.or(memory.and_then(|memory| memory.kept_weights_bytes)).into(),
            micro_batch_size: train.micro_batch_size.given().or(rows).into(),
            gradients: train.gradients.given().or(decided.and_then(|decided| decided.gradients)),
            rows_per_step,
        })
    }

    /// Returns whether the recipe allows what layers save to wait in host memory.
    pub(super) fn may_offload(&self) -> bool {
        self.offload != Some(false)
    }
}

/// Returns whole bytes of so many GiB.
pub(super) fn bytes(gib: f64) -> u64 {
    (gib * GIB) as u64
}

impl RunConfig {
    /// Returns the adapter on a model, with the rows of its new tokens; `None` if every weight trains.
    ///
    /// # Errors
    /// `lora.modules_to_save` names one of two tied tables.
    pub fn adapter_of(&self, model: &ModelConfig) -> Result<Option<LoraConfig>, ArchError> {
        let lora = self.adapter(self.model.as_ref());
        lora.map(|lora| lora.with_new_tokens(&model.new_tokens, &model.spec)).transpose()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::fixtures::Example;
    use crate::plan::{DecidedMemory, PlanRequest};

    #[test]
    fn a_resumed_run_keeps_what_was_decided_where_its_recipe_says_nothing() {
        let decided = DecidedMemory {
            recompute: Recompute::Projections,
            offload: true,
            kept_weights_bytes: Some((5 << 30) + 1),
            micro_batch_size: 4,
            gradients: None,
        };
        let resumed = |changes: &[&str]| {
            let example = Example::new(changes, 80, 512);
            let request = PlanRequest { decided: Some(decided), ..PlanRequest::default() };
            let wish = Wish::new(&PlanInputs { world_size: 2, request: &request, ..example.inputs() }).unwrap();
            (wish.recompute.given(), wish.offload, wish.kept_weights_bytes.given(), wish.micro_batch_size)
        };
        let mix = |change: &str| {
            let (recompute, offload, kept, _) = resumed(&[change]);
            (recompute, offload, kept)
        };
        let all = (Some(Recompute::Projections), Some(true), decided.kept_weights_bytes);
        assert_eq!([mix("train.recompute="), mix("train.recompute=auto")], [all; 2]);
        assert_eq!(mix("train.offload=false"), (all.0, Some(false), all.2));
        assert_eq!(mix("train.kept_weights_gib=1"), (all.0, all.1, Some(1 << 30)));
        assert_eq!(mix("train.recompute=full"), (Some(Recompute::Full), None, None));
        assert_eq!(mix("train.grad_checkpointing=false"), (Some(Recompute::None), None, None));
        let rows = |all: &str| resumed(&["train.micro_batch_size=auto", all]).3;
        assert_eq!(rows("train.rows_per_step=24"), Auto::Given(4));
        assert_eq!(rows("train.rows_per_step=12"), Auto::Auto, "two ranks have six rows each");
        assert_eq!(rows("train.rows_per_step="), Auto::Given(4), "4,800 rows make steps of 16");
    }
}
