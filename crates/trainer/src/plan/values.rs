//! Converts the plan to the types of the crates below, and to text.

use firebrick_optim::{OptimizerConfig, Schedule, TrainedWeights};
use serde_json::{Map, Value};

use crate::chosen::OnResume;
use crate::plan::Plan;

impl Plan {
    /// Returns the optimizer's settings.
    pub fn optimizer_config(&self) -> OptimizerConfig {
        OptimizerConfig {
            kind: self.optimizer.value,
            beta1: self.train.adam_beta1.value,
            beta2: self.train.adam_beta2.value,
            epsilon: self.train.adam_epsilon.value,
            weight_decay: self.train.weight_decay.value,
            weights: self.trained_weights.as_ref().map_or_else(TrainedWeights::default, |weights| weights.value),
            max_grad_norm: Some(self.train.max_grad_norm.value).filter(|norm| *norm > 0.0),
        }
    }

    /// Returns the learning rate by step.
    pub fn learning_rate_schedule(&self) -> Schedule {
        Schedule {
            kind: self.schedule.value,
            peak: self.learning_rate.value,
            lowest: self.min_lr.value,
            warmup_steps: self.warmup_steps.value,
            total_steps: self.steps.value,
        }
    }

    /// Returns the number of rows per step over all ranks.
    pub fn rows_per_step(&self) -> usize {
        self.micro_batch_size.value * self.gradient_accumulation.value * self.world_size.value
    }

    /// Returns the decisions that a resumed run must share with the run that it continues, or those that may change, under the recipe's keys.
    pub(crate) fn values(&self, wanted: OnResume) -> Map<String, Value> {
        let plan = self.serialized();
        let rows = Self::KEYS.iter().copied().flatten().filter(|(.., on_resume)| *on_resume == wanted);
        rows.map(|(name, key, _)| ((*key).to_owned(), plan[name]["value"].clone())).collect()
    }

    /// Returns every decision by name: an object with its value and reason, or null if the run does not take it.
    pub(super) fn serialized(&self) -> Value {
        // Invariant: as in `to_toml`.
        serde_json::to_value(self).expect("a plan of plain fields is expressible as JSON")
    }

    /// Returns every decision as words, for a tracking server: its name, and its value as in plan.toml.
    pub fn parameters(&self) -> Vec<(String, String)> {
        // Invariant: as in `to_toml`.
        let table = toml::Table::try_from(self).expect("a plan of plain fields is expressible as TOML");
        let value = |(name, decision): (String, toml::Value)| {
            let value = decision.get("value")?;
            Some((name, value.as_str().map_or_else(|| value.to_string(), str::to_owned)))
        };
        table.into_iter().filter_map(value).collect()
    }

    /// Returns the text of `plan.toml`.
    pub fn to_toml(&self) -> String {
        // Invariant: a plan is plain strings, numbers, lists and tables, and TOML can hold all of them.
        toml::to_string(self).expect("a plan of plain fields is expressible as TOML")
    }
}
