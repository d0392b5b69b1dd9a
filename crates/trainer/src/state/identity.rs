//! Values that identify a run, and values that may change between a checkpoint and the run that resumes it.
//!
//! Both are values of the plan under the recipe's keys, which the plan's rows name, and are compared key by key. The model itself is compared by the
//! content of its weight files, once they are loaded.
//! Trade-off: `micro_batch_size` and `gradient_accumulation` may change as long as their product stays; sums are then rounded in another order, so
//! the result is equal up to rounding, not bit for bit.

use firebrick_arch::{LoraConfig, counted};
use firebrick_optim::Schedule;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::chosen::OnResume;
use crate::error::RunError;
use crate::plan::Plan;

/// What stands between the fingerprint of rows and the number of their documents.
const OF: &str = " of ";

/// Values that a resumed run must share with the run it continues.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RunIdentity(Map<String, Value>);

/// Values that may change when a run is resumed. Each change is reported.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RunSettings(Map<String, Value>);

/// A value that differs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// Key of the recipe, such as `data.data_seed`.
    pub key: String,
    /// Its value in the checkpoint.
    pub saved: String,
    /// Its value in the recipe.
    pub now: String,
}

/// Returns the settings of an adapter that a continued run must share.
pub(super) fn adapter_identity(lora: &LoraConfig) -> LoraConfig {
    let lora = lora.clone();
    LoraConfig { lora_dropout: 0.0, loraplus_lr_ratio: None, init_from: None, base_model_name_or_path: None, ..lora }
}

impl RunIdentity {
    /// Creates the identity of a planned run on packed rows with this fingerprint, of so many documents.
    pub fn new(plan: &Plan, data_fingerprint: u64, documents: usize) -> Self {
        let mut values = plan.values(OnResume::Identifies);
        values["lora"] = json!(plan.lora.value.as_ref().map(adapter_identity));
        if values["data.data_seed"] == values["seed"] {
            values["data.data_seed"] = Value::Null;
        }
        values.insert("train.micro_batch_size x train.gradient_accumulation".to_owned(), plan.rows_per_step().into());
        let documents = counted(documents, "document");
        values.insert("data".to_owned(), format!("rows {data_fingerprint:016x}{OF}{documents}").into());
        Self(values)
    }

    /// Compares a saved identity with that of the run that continues.
    ///
    /// # Errors
    /// The first key that differs.
    pub fn check(&self, now: &Self) -> Result<(), RunError> {
        // The number of documents is only for the message.
        let rows = |text: &str| text.split(OF).next().unwrap_or_default().to_owned();
        let differs = |found: &Difference| found.key != "data" || rows(&found.saved) != rows(&found.now);
        match differences(self, now).into_iter().find(differs).map(innermost) {
            Some(Difference { key, saved, now }) => Err(changed(&key, &saved, &now)),
            None => Ok(()),
        }
    }
}

impl RunSettings {
    /// Creates the settings of a planned run.
    pub fn new(plan: &Plan) -> Self {
        let mut values = plan.values(OnResume::MayChange);
        if values["lora.dropout"].is_null() {
            values["lora.dropout"] = 0.0.into();
        }
        Self(values)
    }

    /// Returns a sentence about the changes from these saved settings to those of the run that continues; `None` if there are none. Keys that did not
    /// exist when they were saved are no changes.
    pub fn changes(&self, now: &Self) -> Option<String> {
        let changes: Vec<String> = differences(self, now)
            .into_iter()
            .filter(|difference| self.0.contains_key(&difference.key))
            .map(|Difference { key, saved, now }| format!("{key} {saved} -> {now}"))
            .collect();
        (!changes.is_empty()).then(|| format!("changed since the checkpoint: {}", changes.join(", ")))
    }

    /// Returns a sentence about the learning rate after `step`, if the schedule of the run that continues is not that of these saved settings:
    /// a longer run does not go on from the rate that the shorter one ended with.
    pub fn rate_change(&self, now: &Schedule, step: u64) -> Option<String> {
        let saved = self.schedule().filter(|saved| saved != now && step > 0 && step < now.total_steps)?;
        Some(format!(
            "the learning rate was {:.3e} in step {step} of {}; by the schedule of this run it is {:.3e} in step {}, and {:.3e} in step {}, \
             the last one",
            saved.rate(step),
            saved.total_steps,
            now.rate(step + 1),
            step + 1,
            now.rate(now.total_steps),
            now.total_steps
        ))
    }

    /// Returns the schedule of these settings; `None` in a checkpoint that does not have all of it.
    fn schedule(&self) -> Option<Schedule> {
        Some(Schedule {
            kind: serde_json::from_value(self.0.get("train.schedule")?.clone()).ok()?,
            peak: self.0.get("train.learning_rate")?.as_f64()?,
            lowest: self.0.get("train.min_lr")?.as_f64()?,
            warmup_steps: self.0.get("train.warmup_steps")?.as_u64()?,
            total_steps: self.0.get("train.steps")?.as_u64()?,
        })
    }
}

/// Compares the base model of a checkpoint with the one that was loaded, by the hash of its weights.
///
/// # Errors
/// They differ.
pub fn check_model(saved: Option<u64>, now: Option<u64>) -> Result<(), RunError> {
    let shown = |hash: Option<u64>| hash.map_or("random weights".to_owned(), |hash| format!("weights {hash:016x}"));
    if saved == now {
        return Ok(());
    }
    Err(RunError::Refused(format!(
        "the model has other weights ({}) than the run began with ({}): its files were changed or replaced. Put the former ones back, or \
         name their folder as the model; on these weights start a new run, without --resume and under another name",
        shown(now),
        shown(saved)
    )))
}

fn changed(key: &str, saved: &str, now: &str) -> RunError {
    RunError::Refused(format!(
        "the checkpoint was made with {key} = {saved}, now it is {now}: a resumed run must be the same run. Undo the change, or \
         start a new run under another name, which goes on from this one's adapter with lora.init_from = \"runs/NAME/adapter\""
    ))
}

/// Returns the difference of the first key that differs in two tables, instead of the whole tables of a section.
fn innermost(found: Difference) -> Difference {
    const SECTIONS: [&str; 4] = ["lora", "preference", "grpo", "best"];
    let table = |text: &str| serde_json::from_str::<Map<String, Value>>(text).ok();
    let tables = table(&found.saved).zip(table(&found.now)).filter(|_| SECTIONS.contains(&found.key.as_str()));
    match tables.and_then(|(saved, now)| differences(&saved, &now).into_iter().next()) {
        Some(inner) => Difference { key: format!("{}.{}", found.key, inner.key), ..inner },
        None => found,
    }
}

/// Returns the fields whose values differ, in order. A field that is null, or an empty list, counts as absent.
pub(super) fn differences<T: Serialize>(saved: &T, now: &T) -> Vec<Difference> {
    let fields = |value: &T| match serde_json::to_value(value) {
        Ok(Value::Object(mut fields)) => {
            fields.retain(|_, value| !value.is_null() && *value != json!([]));
            fields
        }
        other => unreachable!("a struct of plain fields is a JSON object: {other:?}"),
    };
    let shown = |value: Option<&Value>| match value {
        None => "nothing".to_owned(),
        Some(Value::String(text)) => text.clone(),
        Some(value) => value.to_string(),
    };
    let (saved, now) = (fields(saved), fields(now));
    let gone = saved.keys().filter(|key| !now.contains_key(*key));
    let differ = now.keys().chain(gone).filter(|key| saved.get(*key) != now.get(*key));
    differ.map(|key| Difference { key: key.clone(), saved: shown(saved.get(key)), now: shown(now.get(key)) }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROWS: &str = "train.micro_batch_size x train.gradient_accumulation";

    fn identity() -> RunIdentity {
        let values = json!({
            "init": "pretrained", "seed": 0, "data.data_seed": null, "lora": {"r": 4, "alpha": 32.0}, "data.new_tokens": [],
            "base": {"frozen": "bfloat16"}, "train.optimizer": "adamw", ROWS: 8, "data": "rows 1",
        });
        serde_json::from_value(values).unwrap()
    }

    fn with(key: &str, value: Value) -> RunIdentity {
        let mut other = identity();
        other.0.insert(key.to_owned(), value);
        other
    }

    #[test]
    fn what_one_of_two_states_does_not_say_has_no_value() {
        identity().check(&with("preference", Value::Null)).unwrap();
        with("data.new_tokens", Value::Null).check(&identity()).unwrap();
        let (plain, pairs) = (identity(), with("preference", json!({"loss": "dpo"})));
        for (saved, now, words) in [(&plain, &pairs, "preference = nothing"), (&pairs, &plain, "now it is nothing")] {
            let message = saved.check(now).unwrap_err().to_string();
            assert!(message.contains(words), "{message}");
        }
    }

    #[test]
    fn a_longer_run_says_where_the_rate_goes() {
        let settings = |steps: u64| {
            let values = json!({
                "train.schedule": "linear", "train.learning_rate": 0.01, "train.min_lr": 0.0, "train.warmup_steps": 0, "train.steps": steps,
            });
            serde_json::from_value::<RunSettings>(values).unwrap()
        };
        let longer = settings(200).schedule().unwrap();
        let note = settings(100).rate_change(&longer, 100).unwrap();
        for part in ["1.000e-4 in step 100 of 100", "5.000e-3 in step 101", "5.000e-5 in step 200"] {
            assert!(note.contains(part), "{part}: {note}");
        }
        assert_eq!(settings(200).rate_change(&longer, 100), None);
        assert_eq!(settings(100).rate_change(&longer, 200), None, "there is no step after the last");
        assert_eq!(serde_json::from_value::<RunSettings>(json!({})).unwrap().rate_change(&longer, 100), None);
    }

    #[test]
    fn the_first_difference_is_named_by_its_key() {
        for (key, value, parts) in [
            ("train.optimizer", json!("adamw_8bit"), &["made with train.optimizer = adamw, now it is adamw_8bit"][..]),
            (ROWS, json!(4), &["train.micro_batch_size x train.gradient_accumulation = 8, now it is 4"]),
            ("lora", Value::Null, &["made with lora = {\"r\":4", "now it is nothing"]),
            ("lora", json!({"r": 8, "alpha": 32.0}), &["made with lora.r = 4, now it is 8:"]),
            ("data", json!("rows 2 of 100 documents"), &["data = rows 1, now it is rows 2 of 100 documents"]),
        ] {
            let message = identity().check(&with(key, value)).unwrap_err().to_string();
            assert!(parts.iter().all(|part| message.contains(part)), "{message}");
        }
        identity().check(&with("data", json!("rows 1 of 9 documents"))).unwrap();
    }

    #[test]
    fn models_are_compared_by_content() {
        check_model(Some(7), Some(7)).unwrap();
        check_model(None, None).unwrap();
        check_model(None, Some(7)).unwrap_err();
        check_model(Some(7), None).unwrap_err();
        let message = check_model(Some(7), Some(8)).unwrap_err().to_string();
        assert!(message.contains("than the run began with (weights 0000000000000007)"), "{message}");
    }
}
