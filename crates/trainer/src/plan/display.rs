//! Prints the plan as a table on the terminal, with its values in words.
//!
//! Trade-off: only the decisions that a user looks for are shown; `plan.toml` has all of them. Rows are read from the serialized plan by name.

use std::fmt;

use firebrick_hwprofile::memory::{MemoryLine, human_bytes};
use serde_json::Value;

use crate::config::{PreferenceLoss, to_name};
use crate::plan::Plan;
use crate::plan::forecast::Forecast;

/// Puts a serialized value in words; `None` if there is nothing to show.
pub(super) type Words = fn(&Plan, &Value) -> Option<String>;

/// Shows a number, a name, or several of them.
pub(super) fn plain(_: &Plan, value: &Value) -> Option<String> {
    match value {
        Value::Null => None,
        Value::Number(number) if number.is_f64() => number.as_f64().map(|number| number.to_string()),
        Value::Array(names) => Some(names.iter().map(to_name).collect::<Vec<_>>().join(" ")),
        other => Some(to_name(other)),
    }
}

/// Shows a value only if there are several ranks.
pub(super) fn of_several_ranks(plan: &Plan, value: &Value) -> Option<String> {
    plain(plan, value).filter(|_| plan.world_size.value > 1)
}

pub(super) fn bytes(_: &Plan, value: &Value) -> Option<String> {
    value.as_u64().map(human_bytes)
}

/// Shows bytes, unless there are none.
pub(super) fn some_bytes(_: &Plan, value: &Value) -> Option<String> {
    value.as_u64().filter(|&bytes| bytes > 0).map(human_bytes)
}

/// Shows "2e-4", and "0" without an exponent.
pub(super) fn rate(_: &Plan, value: &Value) -> Option<String> {
    value.as_f64().map(|rate| if rate == 0.0 { "0".to_owned() } else { format!("{rate:e}") })
}

pub(super) fn times(_: &Plan, value: &Value) -> Option<String> {
    value.as_f64().map(|ratio| format!("{ratio} x"))
}

/// Shows how an adapter starts, unless it starts at zero.
pub(super) fn start(plan: &Plan, folder: &Value) -> Option<String> {
    let is_pissa = plan.lora.value.as_ref().is_some_and(|lora| !lora.init_lora_weights.is_uniform());
    folder.as_str().map(str::to_owned).or(is_pissa.then(|| "PiSSA".to_owned()))
}

pub(super) fn preference(plan: &Plan, _: &Value) -> Option<String> {
    let section = &plan.preference.as_ref()?.value;
    Some(match section.loss {
        PreferenceLoss::Dpo => format!("dpo {}, beta {}", to_name(&section.loss_type), section.beta),
        PreferenceLoss::Orpo => format!("orpo, beta {}", section.beta),
    })
}

pub(super) fn best(plan: &Plan, _: &Value) -> Option<String> {
    let section = &plan.best.as_ref()?.value;
    let end = section.patience.map_or(String::new(), |patience| format!(", patience {patience}"));
    Some(format!("{} {}{end}", to_name(&section.mode()), to_name(&section.metric)))
}

impl fmt::Display for Plan {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let row = |name: &str, value: &str, reason: &str| format!("  {name:<22} {value:<16} {reason}");
        let plan = self.serialized();
        let mut lines = Vec::new();
        for (name, label, words) in Self::SHOWN {
            if *name == "disk_bytes" {
                lines.extend(self.results().map(|[name, value, reason]| row(&name, &value, &reason)));
            }
            if let Some(value) = words(self, &plan[name]["value"]) {
                lines.push(row(label, &value, plan[name]["reason"].as_str().unwrap_or_default()));
            }
            if *name == "memory_bytes" {
                let part =
                    |line: &MemoryLine| format!("    {:<34} {:>10}  {}", line.what, human_bytes(line.bytes), line.why);
                lines.extend(self.memory.iter().map(part));
            }
        }
        let folder = self.output_dir.value.join(&self.name.value).display().to_string();
        lines.push(row("saved to", &folder, "or, where that is taken, the name with a number after it"));
        let forecast = self.forecast.iter().flat_map(Forecast::lines);
        lines.extend(forecast.map(|(name, value, reason)| row(name, &value, reason)));
        writeln!(formatter, "{}", lines.join("\n"))?;
        for warning in &self.warnings {
            writeln!(formatter, "  WARNING: {warning}")?;
        }
        match &self.forced {
            Some(forced) => writeln!(formatter, "\n  !!!!!!!! DOES NOT FIT {}\n", forced.reason),
            None => Ok(()),
        }
    }
}

impl Plan {
    /// Returns when the run is evaluated and saved: name, value and reason of each line.
    fn results(&self) -> impl Iterator<Item = [String; 3]> {
        let is_during = |every: u64| (1..self.steps.value).contains(&every);
        let when = |every: u64| if is_during(every) { format!("every {every} steps") } else { "at the end".to_owned() };
        let start = if self.eval_on_start.value { "and before the first step" } else { "not before the first step" };
        let end = if is_during(self.eval_every_steps.value) { ", and after the last" } else { "" };
        let evaluation = ["evaluation".to_owned(), when(self.eval_every_steps.value), format!("{start}{end}")];
        let which = match (&self.best, self.checkpoints_kept.value) {
            (None, count) => format!("the newest {count} are kept"),
            (Some(_), count) => format!("the best and the newest are kept, {} in all", count.max(2)),
        };
        let kept = format!("and at the end; {which}, and Ctrl-C saves one too");
        let checkpoints = ["checkpoints".to_owned(), when(self.checkpoint_every_steps.value), kept];
        self.is_evaluated.then_some(evaluation).into_iter().chain([checkpoints])
    }
}
