//! The plan as a table for the terminal.
//!
//! Trade-off: only the decisions that a user looks for are shown; `plan.toml` has all of them.

use std::fmt;

use firebrick_hwprofile::memory::human_bytes;

use crate::config::{PreferenceLoss, to_name};
use crate::plan::values::Plan;

impl fmt::Display for Plan {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let line = |name: &str, value: String, reason: &str| format!("  {name:<22} {value:<16} {reason}");
        let lines = [
            line("backend", self.backend.value.to_string(), &self.backend.reason),
            line("compute", self.compute.value.to_string(), &self.compute.reason),
            line("GEMMs of layers", to_name(&self.gemms.value), &self.gemms.reason),
            line("arithmetic", self.arithmetic.value.clone(), &self.arithmetic.reason),
            line("base", to_name(&self.base.value), &self.base.reason),
            line("trained parameters", self.trained_parameters.value.to_string(), &self.trained_parameters.reason),
            line("recompute", to_name(&self.recompute.value), &self.recompute.reason),
            line("offload", self.offload.value.to_string(), &self.offload.reason),
            line("optimizer", to_name(&self.optimizer.value), &self.optimizer.reason),
            line(
                "state on the device",
                human_bytes(self.resident_state_bytes.value),
                &self.resident_state_bytes.reason,
            ),
            line("row length", self.row_len.value.to_string(), &self.row_len.reason),
            line("micro-batch", self.micro_batch_size.value.to_string(), &self.micro_batch_size.reason),
            line("accumulation", self.gradient_accumulation.value.to_string(), &self.gradient_accumulation.reason),
            line("steps", self.steps.value.to_string(), &self.steps.reason),
            line("learning rate", rate(self.learning_rate.value), &self.learning_rate.reason),
            line("warm-up steps", self.warmup_steps.value.to_string(), &self.warmup_steps.reason),
            line("schedule", to_name(&self.schedule.value), &self.schedule.reason),
            line("lowest rate", rate(self.min_lr.value), &self.min_lr.reason),
            line("loss chunk", self.loss_chunk_tokens.value.to_string(), &self.loss_chunk_tokens.reason),
            line("tokenizing threads", self.tokenize_workers.value.to_string(), &self.tokenize_workers.reason),
            line("loader threads", self.loader_workers.value.to_string(), &self.loader_workers.reason),
            line("memory", human_bytes(self.memory_bytes.value), &self.memory_bytes.reason),
        ];
        if self.world_size.value > 1 {
            writeln!(formatter, "{}", line("ranks", self.world_size.value.to_string(), &self.world_size.reason))?;
            writeln!(formatter, "{}", line("ZeRO stage", self.zero_stage.value.to_string(), &self.zero_stage.reason))?;
        }
        writeln!(formatter, "{}", lines.join("\n"))?;
        for part in &self.memory {
            writeln!(formatter, "    {:<34} {:>10}  {}", part.what, human_bytes(part.bytes), part.why)?;
        }
        let is_divided = self.lora.value.as_ref().is_some_and(|lora| !lora.init_lora_weights.is_uniform());
        if is_divided || self.lora_init_from.value.is_some() {
            let folder =
                self.lora_init_from.value.as_ref().map_or("PiSSA".to_owned(), |from| from.display().to_string());
            writeln!(formatter, "{}", line("adapter starts from", folder, &self.lora_init_from.reason))?;
        }
        if let Some(tokens) = &self.new_tokens {
            writeln!(formatter, "{}", line("new tokens", tokens.value.join(" "), &tokens.reason))?;
        }
        if let Some(dropout) = &self.adapter_dropout {
            writeln!(formatter, "{}", line("adapter dropout", dropout.value.to_string(), &dropout.reason))?;
        }
        if let Some(ratio) = &self.loraplus_lr_ratio {
            writeln!(formatter, "{}", line("rate of B", format!("{} x", ratio.value), &ratio.reason))?;
        }
        if let Some(preference) = &self.preference {
            let section = &preference.value;
            let loss = match section.loss {
                PreferenceLoss::Dpo => format!("dpo {}, beta {}", to_name(&section.loss_type), section.beta),
                PreferenceLoss::Orpo => format!("orpo, beta {}", section.beta),
            };
            writeln!(formatter, "{}", line("preference", loss, &preference.reason))?;
        }
        if let Some(reference) = &self.reference {
            writeln!(formatter, "{}", line("reference", to_name(&reference.value), &reference.reason))?;
        }
        if let Some(kernels) = &self.attention {
            writeln!(formatter, "{}", line("attention kernels", kernels.value.clone(), &kernels.reason))?;
        }
        if let Some(experts) = &self.experts {
            writeln!(formatter, "{}", line("experts", experts.value.clone(), &experts.reason))?;
        }
        if let Some(factors) = &self.long_rope {
            writeln!(formatter, "{}", line("longrope", factors.value.to_owned(), &factors.reason))?;
        }
        if let Some(gemms) = &self.adapter_gemms {
            writeln!(formatter, "{}", line("adapter GEMMs", gemms.value.clone(), &gemms.reason))?;
        }
        if let Some(kept) = &self.kept_weights_bytes {
            writeln!(formatter, "{}", line("kept weights", human_bytes(kept.value), &kept.reason))?;
        }
        if let Some(algorithms) = &self.gemm_algorithms {
            writeln!(formatter, "{}", line("GEMM algorithms", to_name(&algorithms.value), &algorithms.reason))?;
        }
        if self.paged_state_bytes.value > 0 {
            let bytes = human_bytes(self.paged_state_bytes.value);
            writeln!(formatter, "{}", line("paged state", bytes, &self.paged_state_bytes.reason))?;
        }
        if self.host_memory_bytes.value > 0 {
            let bytes = human_bytes(self.host_memory_bytes.value);
            writeln!(formatter, "{}", line("host memory", bytes, &self.host_memory_bytes.reason))?;
        }
        if let Some(forecast) = &self.forecast {
            for (name, value, reason) in forecast.lines() {
                writeln!(formatter, "{}", line(name, value, reason))?;
            }
        }
        if let Some(forced) = &self.forced {
            writeln!(formatter, "\n  !!!!!!!! DOES NOT FIT {}\n", forced.reason)?;
        }
        Ok(())
    }
}

/// "2e-4", and "0" without an exponent.
fn rate(value: f64) -> String {
    if value == 0.0 { "0".to_owned() } else { format!("{value:e}") }
}
