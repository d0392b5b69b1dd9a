//! The plan in the few lines that `train` prints before the first step, and `new` under the name of a recipe; `plan` and plan.toml have all of it.
//!
//! Trade-off: reasons are cut after their first clause, so what a choice rests on may be left to the whole plan.

use std::path::Path;

use firebrick_arch::counted;
use firebrick_hwprofile::human::{grouped, human_range, human_seconds};
use firebrick_hwprofile::memory::human_bytes;
use firebrick_kernels::GemmFormat;

use crate::config::to_name;
use crate::plan::Plan;
use crate::plan::display::with_grouped_numbers;

impl Plan {
    /// Returns what a run in `folder` is about to do, one fact per line, with warnings. Without a folder: its rows, steps, memory and time.
    pub fn brief(&self, folder: Option<&Path>) -> String {
        let recompute = format!("{}, {}", to_name(&self.recompute.value), clause(&self.recompute.reason));
        // How full the rows are, without what the label says.
        let fill = self.row_len.reason.split_once("; ").map_or(self.row_len.reason.as_str(), |(_, fill)| fill);
        let (rows, times) = (self.micro_batch_size.value, self.gradient_accumulation.value);
        let accumulated = if times > 1 { format!(", {rows} at a time") } else { String::new() };
        let (steps, why) = (counted(self.steps.value, "step"), &self.steps.reason);
        let of_all = self.gradient_accumulation.reason.split(", one").next().unwrap_or_default();
        let (rate, warmup) = (self.learning_rate.value, counted(self.warmup_steps.value, "step"));
        let mut lines = vec![
            ("model", self.how_it_trains()),
            ("rows", format!("of {} tokens; {fill}", grouped(&self.row_len.value.to_string()))),
            ("step", format!("{of_all}{accumulated}; {steps}, {why}")),
            ("learning rate", format!("{rate:e}, {} after {warmup} of warm-up", to_name(&self.schedule.value))),
            ("recompute", if self.offload.value { format!("{recompute}; offloaded") } else { recompute }),
            ("memory", format!("{} {}", human_bytes(self.memory_bytes.value), self.memory_bytes.reason)),
        ];
        if self.world_size.value > 1 {
            let stage = format!("ZeRO stage {}: {}", self.zero_stage.value, clause(&self.zero_stage.reason));
            lines.insert(2, ("ranks", format!("{}; {stage}", self.world_size.value)));
        }
        if let Some(forecast) = &self.forecast {
            let rate = human_range(forecast.tokens_per_second.value);
            lines.push(("time", format!("{}, at {rate} tokens/s", human_seconds(forecast.run_seconds.value))));
        }
        lines.extend(self.results().map(|(name, when, how)| (name, format!("{when}, {how}"))));
        match folder {
            Some(folder) => lines.push(("saved to", format!("{}, with the whole plan in plan.toml", folder.display()))),
            None => lines.retain(|(name, _)| ["model", "rows", "step", "memory", "time"].contains(name)),
        }
        let mut text: Vec<String> = lines.iter().map(|(name, what)| format!("  {name:<14} {what}")).collect();
        text.extend(self.alarms());
        with_grouped_numbers(&text.join("\n"))
    }

    fn how_it_trains(&self) -> String {
        let gemms = if self.gemms.value == GemmFormat::Compute {
            String::new()
        } else {
            format!(" (layers multiply in {})", to_name(&self.gemms.value))
        };
        let count = grouped(&self.trained_parameters.value.to_string());
        let (backend, compute, base) = (self.backend.value, self.compute.value, to_name(&self.base.value));
        format!(
            "{backend} in {compute}{gemms}, base {base}; {count} parameters train, {}",
            self.trained_parameters.reason
        )
    }
}

/// Returns the first clause of a reason.
fn clause(reason: &str) -> &str {
    reason.split(';').next().unwrap_or(reason)
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use crate::plan::fixtures::resolve;

    #[test]
    fn a_run_begins_with_at_most_ten_lines_that_hold_no_name_of_the_code() {
        let plan = resolve(&["data.eval_fraction=0.1", "train.gradient_accumulation=2"]).unwrap();
        let brief = plan.brief(Some(Path::new("runs/here")));
        assert!(brief.lines().count() <= 10, "{brief}");
        let [step, saved] = ["step", "saved to"].map(|name| brief.lines().find(|line| line.trim().starts_with(name)));
        assert!(step.unwrap().contains("rows per step") && saved.unwrap().contains("runs/here"), "{brief}");
        assert!(!brief.contains(['{', '"']) && !brief.contains("None"), "{brief}");
        let briefest = plan.brief(None);
        assert!(briefest.lines().all(|line| brief.contains(line)), "{briefest}");
        assert!(briefest.lines().count() <= 5 && briefest.contains("rows per step"), "{briefest}");
    }
}
