//! Prints the plan as a table on the terminal, with its values in words; `display/brief.rs` has the few lines before the first step.

mod brief;

use std::fmt;

use firebrick_arch::counted;
use firebrick_hwprofile::human::grouped;
use firebrick_hwprofile::memory::{MemoryLine, human_bytes};
use firebrick_kernels::{BackendKind, GemmFormat};
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
        Value::Number(number) if number.is_u64() => Some(grouped(&number.to_string())),
        Value::Number(number) if number.is_f64() => number.as_f64().map(|number| number.to_string()),
        Value::Array(names) => Some(names.iter().map(to_name).collect::<Vec<_>>().join(" ")),
        other => Some(to_name(other)),
    }
}

pub(super) fn of_several_ranks(plan: &Plan, value: &Value) -> Option<String> {
    plain(plan, value).filter(|_| plan.world_size.value > 1)
}

/// Shows whether what layers save waits in host memory, where that is a choice.
pub(super) fn on_cuda(plan: &Plan, value: &Value) -> Option<String> {
    plain(plan, value).filter(|_| plan.backend.value == BackendKind::Cuda)
}

/// Shows how GEMMs of layers multiply if that is not the format of activations, or was chosen.
pub(super) fn other_than_compute(plan: &Plan, value: &Value) -> Option<String> {
    let is_choice = plan.gemms.reason.starts_with("auto") && plan.backend.value == BackendKind::Cuda;
    plain(plan, value).filter(|_| plan.gemms.value != GemmFormat::Compute || is_choice)
}

pub(super) fn paged_bytes(plan: &Plan, value: &Value) -> Option<String> {
    bytes(plan, value).filter(|_| plan.optimizer.value.is_paged() && plan.backend.value == BackendKind::Cuda)
}

pub(super) fn bytes(_: &Plan, value: &Value) -> Option<String> {
    value.as_u64().map(human_bytes)
}

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

pub(super) fn grpo(plan: &Plan, _: &Value) -> Option<String> {
    let section = &plan.grpo.as_ref()?.value;
    Some(format!("{} of {}", to_name(&section.loss_type), section.num_generations))
}

pub(super) fn best(plan: &Plan, _: &Value) -> Option<String> {
    let section = &plan.best.as_ref()?.value;
    let end = section.patience.map_or(String::new(), |patience| format!(", patience {patience}"));
    Some(format!("{} {}{end}", to_name(&section.mode()), to_name(&section.metric)))
}

/// Writes the counts of a sentence as "12,345": words that are numbers of five digits or more.
pub fn with_grouped_numbers(sentence: &str) -> String {
    let word = |word: &str| {
        let number = word.trim_matches(|sign: char| "(),.:;".contains(sign));
        let is_count = number.len() > 4 && number.bytes().all(|digit| digit.is_ascii_digit());
        if is_count { word.replace(number, &grouped(number)) } else { word.to_owned() }
    };
    sentence.split(' ').map(word).collect::<Vec<_>>().join(" ")
}

enum Line {
    /// Name, value and reason.
    Row(String, String, String),
    /// A line with columns of its own.
    Text(String),
}

/// Writes the lines with the values in a column as wide as those of usual length; after a longer value the reason is on the next line.
fn aligned(lines: &[Line]) -> String {
    const USUAL: usize = 24;
    let width = |value: &str| value.chars().count();
    let values =
        lines.iter().filter_map(|line| if let Line::Row(_, value, _) = line { Some(width(value)) } else { None });
    let column = values.filter(|&value| value <= USUAL).max().unwrap_or(0);
    let shown = |line: &Line| match line {
        Line::Text(text) => text.clone(),
        Line::Row(name, value, reason) if width(value) > column => {
            format!("  {name:<22} {value}\n  {:22} {:column$} {reason}", "", "")
        }
        Line::Row(name, value, reason) => format!("  {name:<22} {value:<column$} {reason}"),
    };
    lines.iter().map(|line| shown(line).trim_end().to_owned()).collect::<Vec<_>>().join("\n")
}

impl fmt::Display for Plan {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let row = |name: &str, value: &str, reason: &str| {
            Line::Row(name.to_owned(), value.to_owned(), with_grouped_numbers(reason))
        };
        let plan = self.serialized();
        let mut lines = Vec::new();
        for (name, label, words) in Self::SHOWN {
            if *name == "disk_bytes" {
                lines.extend(self.results().map(|(name, value, reason)| row(name, &value, &reason)));
            }
            if let Some(value) = words(self, &plan[name]["value"]) {
                lines.push(row(label, &value, plan[name]["reason"].as_str().unwrap_or_default()));
            }
            if *name == "memory_bytes" {
                let part = |line: &MemoryLine| {
                    let (bytes, why) = (human_bytes(line.bytes), with_grouped_numbers(&line.why));
                    Line::Text(format!("    {:<34} {bytes:>10}  {why}", line.what))
                };
                lines.extend(self.memory.iter().map(part));
            }
        }
        let folder = self.output_dir.value.join(&self.name.value).display().to_string();
        lines.push(row("saved to", &folder, "a new run whose folder is taken gets a number after its name"));
        let forecast = self.forecast.iter().flat_map(Forecast::lines);
        lines.extend(forecast.map(|(name, value, reason)| row(name, &value, reason)));
        writeln!(formatter, "{}", aligned(&lines))?;
        self.alarms().try_for_each(|line| writeln!(formatter, "{line}"))
    }
}

impl Plan {
    /// Returns what the user should not overlook: settings that hardly anybody means, and a shortage of memory.
    pub(super) fn alarms(&self) -> impl Iterator<Item = String> {
        let warnings = self.warnings.iter().map(|warning| format!("  WARNING: {warning}"));
        warnings.chain(self.forced.iter().map(|forced| format!("\n  !!!!!!!! DOES NOT FIT {}\n", forced.reason)))
    }

    /// Returns when the run is evaluated and saved: name, value and reason of each line.
    pub(super) fn results(&self) -> impl Iterator<Item = (&'static str, String, String)> {
        let is_during = |every: u64| (1..self.steps.value).contains(&every);
        let when = |every: u64| match every {
            1 if is_during(every) => "every step".to_owned(),
            _ if is_during(every) => format!("every {}", counted(every, "step")),
            _ => "at the end".to_owned(),
        };
        let start = if self.eval_on_start.value { "and before the first step" } else { "not before the first step" };
        let end = if is_during(self.eval_every_steps.value) { ", and after the last" } else { "" };
        let evaluation = ("evaluation", when(self.eval_every_steps.value), format!("{start}{end}"));
        let which = match (&self.best, self.checkpoints_kept.value) {
            (None, 1) => "the newest is kept".to_owned(),
            (None, count) => format!("the newest {count} are kept"),
            (Some(_), count) => format!("the best and the newest are kept, {} in all", count.max(2)),
        };
        let end = if is_during(self.checkpoint_every_steps.value) { "and at the end; " } else { "" };
        let kept = format!("{end}{which}, and Ctrl-C saves one too");
        let checkpoints = ("checkpoints", when(self.checkpoint_every_steps.value), kept);
        self.is_evaluated.then_some(evaluation).into_iter().chain([checkpoints])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_begin_in_one_column_whatever_the_values_are() {
        let row = |name: &str, value: &str, reason: &str| Line::Row(name.into(), value.into(), reason.into());
        let long = "frozen nf4_double_quant, and more of it";
        let text = aligned(&[row("base", long, "why"), row("steps", "15", "so"), Line::Text("    part".into())]);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], format!("  {:<22} {long}", "base"));
        assert_eq!((lines[1].find("why"), lines[3]), (lines[2].find("so"), "    part"));
    }
}
