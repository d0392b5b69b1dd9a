//! The plan as a table for the terminal.
//!
//! Trade-off: only the decisions that a user looks for are shown; `plan.toml` has all of them.

use std::fmt;

use firebrick_hwprofile::memory::human_bytes;

use crate::config::{PreferenceLoss, to_name};
use crate::plan::chosen::Chosen;
use crate::plan::forecast::Forecast;
use crate::plan::values::Plan;

/// The lines of a plan: a name, a value and its reason each.
#[derive(Default)]
struct Table(Vec<String>);

impl Table {
    fn add(&mut self, name: &str, value: impl fmt::Display, reason: &str) {
        let value = value.to_string();
        self.0.push(format!("  {name:<22} {value:<16} {reason}"));
    }

    /// A decision, in words.
    fn decision<T>(&mut self, name: &str, chosen: &Chosen<T>, words: impl Fn(&T) -> String) {
        self.add(name, words(&chosen.value), &chosen.reason);
    }

    /// A decision that not every run takes.
    fn maybe<T>(&mut self, name: &str, chosen: Option<&Chosen<T>>, words: impl Fn(&T) -> String) {
        if let Some(chosen) = chosen {
            self.decision(name, chosen, words);
        }
    }

    /// Bytes, where there are any.
    fn bytes(&mut self, name: &str, chosen: &Chosen<u64>) {
        self.maybe(name, Some(chosen).filter(|chosen| chosen.value > 0), |&bytes| human_bytes(bytes));
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = Table::default();
        self.of_ranks(&mut table);
        self.of_every_run(&mut table);
        for part in &self.memory {
            table.0.push(format!("    {:<34} {:>10}  {}", part.what, human_bytes(part.bytes), part.why));
        }
        self.of_some_runs(&mut table);
        self.of_results(&mut table);
        for (name, value, reason) in self.forecast.iter().flat_map(Forecast::lines) {
            table.add(name, value, reason);
        }
        writeln!(formatter, "{}", table.0.join("\n"))?;
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
    fn of_ranks(&self, table: &mut Table) {
        if self.world_size.value > 1 {
            table.decision("ranks", &self.world_size, ToString::to_string);
            table.decision("ZeRO stage", &self.zero_stage, ToString::to_string);
        }
    }

    fn of_every_run(&self, table: &mut Table) {
        table.decision("backend", &self.backend, ToString::to_string);
        table.decision("compute", &self.compute, ToString::to_string);
        table.decision("GEMMs of layers", &self.gemms, to_name);
        table.decision("arithmetic", &self.arithmetic, String::clone);
        table.decision("base", &self.base, to_name);
        table.decision("trained parameters", &self.trained_parameters, ToString::to_string);
        table.decision("recompute", &self.recompute, to_name);
        table.decision("offload", &self.offload, ToString::to_string);
        table.decision("optimizer", &self.optimizer, to_name);
        table.decision("state on the device", &self.resident_state_bytes, |&bytes| human_bytes(bytes));
        table.decision("row length", &self.row_len, ToString::to_string);
        table.decision("micro-batch", &self.micro_batch_size, ToString::to_string);
        table.decision("accumulation", &self.gradient_accumulation, ToString::to_string);
        table.decision("steps", &self.steps, ToString::to_string);
        table.decision("learning rate", &self.learning_rate, |&value| rate(value));
        table.decision("warm-up steps", &self.warmup_steps, ToString::to_string);
        table.decision("schedule", &self.schedule, to_name);
        table.decision("lowest rate", &self.min_lr, |&value| rate(value));
        table.decision("loss chunk", &self.loss_chunk_tokens, ToString::to_string);
        table.decision("tokenizing threads", &self.tokenize_workers, ToString::to_string);
        table.decision("loader threads", &self.loader_workers, ToString::to_string);
        table.decision("memory", &self.memory_bytes, |&bytes| human_bytes(bytes));
    }

    fn of_some_runs(&self, table: &mut Table) {
        let is_divided = self.lora.value.as_ref().is_some_and(|lora| !lora.init_lora_weights.is_uniform());
        if is_divided || self.lora_init_from.value.is_some() {
            table.decision("adapter starts from", &self.lora_init_from, |from| {
                from.as_ref().map_or("PiSSA".to_owned(), |folder| folder.display().to_string())
            });
        }
        table.maybe("new tokens", self.new_tokens.as_ref(), |tokens| tokens.join(" "));
        table.maybe("adapter dropout", self.adapter_dropout.as_ref(), ToString::to_string);
        table.maybe("rate of B", self.loraplus_lr_ratio.as_ref(), |ratio| format!("{ratio} x"));
        table.maybe("preference", self.preference.as_ref(), |section| match section.loss {
            PreferenceLoss::Dpo => format!("dpo {}, beta {}", to_name(&section.loss_type), section.beta),
            PreferenceLoss::Orpo => format!("orpo, beta {}", section.beta),
        });
        table.maybe("reference", self.reference.as_ref(), to_name);
        table.maybe("attention kernels", self.attention.as_ref(), String::clone);
        table.maybe("experts", self.experts.as_ref(), String::clone);
        table.maybe("longrope", self.long_rope.as_ref(), ToString::to_string);
        table.maybe("adapter GEMMs", self.adapter_gemms.as_ref(), String::clone);
        table.maybe("kept weights", self.kept_weights_bytes.as_ref(), |&bytes| human_bytes(bytes));
        table.maybe("GEMM algorithms", self.gemm_algorithms.as_ref(), to_name);
        table.bytes("paged state", &self.paged_state_bytes);
        table.bytes("host memory", &self.host_memory_bytes);
    }

    /// When the run is evaluated and saved, and where to.
    fn of_results(&self, table: &mut Table) {
        let is_during = |every: u64| (1..self.steps.value).contains(&every);
        let when = |every: u64| if is_during(every) { format!("every {every} steps") } else { "at the end".to_owned() };
        if self.is_evaluated {
            let start =
                if self.eval_on_start.value { "and before the first step" } else { "not before the first step" };
            let end = if is_during(self.eval_every_steps.value) { ", and after the last" } else { "" };
            table.add("evaluation", when(self.eval_every_steps.value), &format!("{start}{end}"));
        }
        let kept =
            format!("and at the end; the newest {} are kept, and Ctrl-C saves one too", self.checkpoints_kept.value);
        table.add("checkpoints", when(self.checkpoint_every_steps.value), &kept);
        table.decision("disk", &self.disk_bytes, |&bytes| human_bytes(bytes));
        let folder = self.output_dir.value.join(&self.name.value);
        table.add("saved to", folder.display(), "or, where that is taken, the name with a number after it");
    }
}

/// "2e-4", and "0" without an exponent.
fn rate(value: f64) -> String {
    if value == 0.0 { "0".to_owned() } else { format!("{value:e}") }
}
