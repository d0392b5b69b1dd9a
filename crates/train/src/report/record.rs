//! Reads the content of a run folder: the lines of metrics, the plan, the summary of a finished run or the last state of another, and samples.
//!
//! Files are read as plain data rather than as the types that wrote them, so that folders of other versions can be shown too.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use firebrick_trainer::RunError;
use firebrick_trainer::console::date_and_time;
use firebrick_trainer::state::checkpoint_folder::latest;
use serde_json::{Value, json};

use super::samples::{self, Round};

/// Returns the first folder in this one, by name, that is of a kind.
pub(crate) fn folder_in(folder: &Path, is_one: impl Fn(&Path) -> bool) -> Option<PathBuf> {
    fs::read_dir(folder).ok()?.flatten().map(|entry| entry.path()).filter(|path| is_one(path)).min()
}

/// The record of a run in its folder.
#[derive(Clone, Debug)]
pub struct RunRecord {
    /// Name of the folder.
    pub name: String,
    /// The lines of metrics.jsonl, in order.
    pub lines: Vec<Value>,
    /// plan.toml; empty if there is none.
    pub plan: toml::Table,
    /// Date and time of its beginning, which its first TensorBoard file has in its name.
    pub began: Option<String>,
    /// summary.json; `None` for a run that has not finished.
    pub summary: Option<Value>,
    /// state.json of the newest checkpoint; null if there is none.
    pub state: Value,
    /// config.toml, as saved.
    pub recipe: Option<String>,
    /// Completions with their rewards, of a run that learns from them.
    pub rounds: Vec<Round>,
}

impl RunRecord {
    /// Reads a run folder.
    ///
    /// # Errors
    /// There are no metrics, or a file's content does not match its name. An incomplete last line, as of a running run, is left out.
    pub fn read(run: &Path) -> Result<Self, RunError> {
        const METRICS: &str = "metrics.jsonl";
        let text = fs::read_to_string(run.join(METRICS)).map_err(|error| {
            let example =
                folder_in(run, |folder| folder.join(METRICS).is_file()).unwrap_or_else(|| "runs/my-run".into());
            let problem = "no metrics.jsonl to report on; give the folder of a run, such as";
            RunError::Refused(format!("{}: {problem} {} ({error})", run.display(), example.display()))
        })?;
        let whole = text.rfind('\n').map_or("", |end| &text[..end]);
        let malformed = |name: &str, expected: &str, problem: &str| {
            RunError::Refused(format!("{}: expected {expected}: {problem}", run.join(name).display()))
        };
        let lines: Result<Vec<Value>, _> = whole.lines().map(serde_json::from_str).collect();
        let lines = lines.map_err(|error| malformed(METRICS, "one JSON object per line", &error.to_string()))?;
        let optional = |name| fs::read_to_string(run.join::<&str>(name)).ok();
        let plan = optional("plan.toml")
            .map(|text| text.parse::<toml::Table>().map_err(|error| malformed("plan.toml", "TOML", error.message())));
        let summary = optional("summary.json").map(|text| {
            serde_json::from_str(&text)
                .map_err(|error| malformed("summary.json", "one JSON object", &error.to_string()))
        });
        let seconds = |entry: fs::DirEntry| entry.file_name().to_str()?.split('.').nth(3)?.parse::<i64>().ok();
        let events = fs::read_dir(run.join("tensorboard")).into_iter().flatten().flatten();
        let newest = latest(run).ok().flatten().and_then(|(_, folder)| fs::read(folder.join("state.json")).ok());
        let folder = fs::canonicalize(run).unwrap_or_else(|_| run.to_owned());
        Ok(Self {
            name: folder.file_name().map_or_else(|| "run".to_owned(), |name| name.to_string_lossy().into_owned()),
            lines,
            plan: plan.transpose()?.unwrap_or_default(),
            began: events.filter_map(seconds).min().map(date_and_time),
            summary: summary.transpose()?,
            state: newest.and_then(|bytes| serde_json::from_slice(&bytes).ok()).unwrap_or_default(),
            recipe: optional("config.toml"),
            rounds: samples::read(run),
        })
    }

    /// Returns the points (step, value) of a key, without values that are not finite.
    pub fn series(&self, key: &str) -> Vec<(f64, f64)> {
        let point = |line: &Value| Some((line.get("step")?.as_f64()?, line.get(key)?.as_f64()?));
        self.lines.iter().filter_map(point).filter(|(_, value)| value.is_finite()).collect()
    }

    /// Returns the last step in the metrics.
    pub fn last_step(&self) -> Option<u64> {
        self.lines.iter().filter_map(|line| line.get("step")?.as_u64()).max()
    }

    /// Returns the joules of the accelerator over all parts of the run; each part's meter begins at 0.
    pub fn energy_j(&self) -> Option<f64> {
        let meter = self.series("energy_j");
        let (_, first) = meter.first()?;
        let growth = |pair: &[(f64, f64)]| if pair[1].1 < pair[0].1 { pair[1].1 } else { pair[1].1 - pair[0].1 };
        Some(first + meter.windows(2).map(growth).sum::<f64>())
    }

    /// Counts the steps at which the card ran below its highest clocks, and collects the reasons.
    pub fn throttled(&self) -> (usize, BTreeSet<String>) {
        let found = self.lines.iter().filter_map(|line| line.get("throttle")?.as_array());
        let reasons = found.clone().flatten().filter_map(|reason| Some(reason.as_str()?.replace('_', " ")));
        (found.count(), reasons.collect())
    }

    /// Returns a number of the plan: the `value` of a decision, or a key inside it.
    pub fn planned(&self, path: &[&str]) -> Option<f64> {
        let mut at = self.plan.get(*path.first()?)?;
        for key in &path[1..] {
            at = at.get(key)?;
        }
        let at = at.get("value").unwrap_or(at);
        at.as_float().or_else(|| at.as_integer().map(|number| number as f64))
    }

    /// Returns a text value of the plan.
    pub fn planned_word(&self, decision: &str) -> Option<String> {
        let value = self.plan.get(decision)?.get("value")?;
        Some(value.as_str().map_or_else(|| value.to_string(), str::to_owned))
    }

    /// Returns the names of the rewards in the plan, in the order of the recipe.
    pub fn reward_names(&self) -> Vec<String> {
        const KINDS: [&str; 5] = ["answer", "regex", "json_schema", "length", "command"];
        let rewards = || self.plan.get("grpo")?.get("value")?.get("rewards")?.as_array();
        let name = |reward: &toml::Value| {
            let kind = || KINDS.into_iter().find(|kind| reward.get(kind).is_some());
            reward.get("name").and_then(toml::Value::as_str).or_else(kind).unwrap_or("reward").to_owned()
        };
        rewards().into_iter().flatten().map(name).collect()
    }

    /// Returns the sample prompts, each with its answers `before` and `after`; a run that has not finished has none after.
    pub fn samples(&self) -> Vec<Value> {
        let list = |of: &Value| of.as_array().cloned().unwrap_or_default();
        if let Some(summary) = &self.summary {
            return list(&summary["samples"]);
        }
        let pairs = list(&self.state["sample_prompts"]).into_iter().zip(list(&self.state["samples_before"]));
        pairs.map(|(prompt, before)| json!({"prompt": prompt, "before": before, "after": "(not finished)"})).collect()
    }

    /// Returns a number of the summary.
    pub fn summed(&self, key: &str) -> Option<f64> {
        self.summary.as_ref()?.get(key)?.as_f64()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_growing_run_is_read_to_its_last_whole_line() {
        let folder = tempfile::tempdir().unwrap();
        let text = "{\"step\":1,\"loss\":2.5,\"energy_j\":100.0,\"throttle\":[\"power_cap\"]}\n{\"step\":2,\"loss\":null,\"energy_j\":250.0}\n\
                    {\"step\":3,\"loss\":2.0,\"energy_j\":50.0}\n{\"step\":4,\"lo";
        fs::write(folder.path().join("metrics.jsonl"), text).unwrap();
        fs::write(
            folder.path().join("plan.toml"),
            "[steps]\nvalue = 9\n[forecast.tokens_per_second.value]\nlower = 1.5\n",
        )
        .unwrap();
        for (file, text) in [
            ("checkpoints/step-2/manifest.json", "{}"),
            ("checkpoints/step-2/state.json", r#"{"sample_prompts": ["a"], "samples_before": ["b"]}"#),
            ("tensorboard/events.out.tfevents.1785414840.host.7.0", ""),
        ] {
            fs::create_dir_all(folder.path().join(file).parent().unwrap()).unwrap();
            fs::write(folder.path().join(file), text).unwrap();
        }
        let record = RunRecord::read(folder.path()).unwrap();
        assert_eq!(record.began.as_deref(), Some("2026-07-30 12:34 UTC"));
        assert_eq!(record.samples(), [json!({"prompt": "a", "before": "b", "after": "(not finished)"})]);
        assert_eq!(record.series("loss"), [(1.0, 2.5), (3.0, 2.0)]);
        assert_eq!(
            (record.last_step(), record.energy_j()),
            (Some(3), Some(300.0)),
            "the meter of a resumed part begins at 0"
        );
        assert_eq!(record.throttled(), (1, BTreeSet::from(["power cap".to_owned()])));
        assert_eq!(record.planned(&["steps"]), Some(9.0));
        assert_eq!(record.planned(&["forecast", "tokens_per_second", "value", "lower"]), Some(1.5));
        assert!(record.summary.is_none() && record.planned(&["nothing"]).is_none());
    }

    #[test]
    fn broken_lines_are_named() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("metrics.jsonl"), "{\"step\":1}\nnot JSON\n").unwrap();
        let message = RunRecord::read(folder.path()).unwrap_err().to_string();
        assert!(message.contains("expected one JSON object per line"), "{message}");
    }
}
