//! A profile as lines for the terminal.

use std::fmt;

use crate::memory::human_bytes;
use crate::peaks::{MeasuredGemm, MeasuredPeaks};
use crate::spec::{AcceleratorSpec, DenseRates, HardwareKind};
use crate::tuning::{HardwareConfig, get_optimal_config};
use crate::{Cpu, Gpu, HardwareProfile};

impl fmt::Display for HardwareProfile {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Cpu { name, logical_cores, physical_cores, simd } = &self.cpu;
        writeln!(formatter, "processor      {name}, {logical_cores} threads on {physical_cores} cores, {simd}")?;
        let (free, total) = (human_bytes(self.memory.available_bytes), human_bytes(self.memory.total_bytes));
        writeln!(formatter, "memory         {free} free of {total}")?;
        for gpu in &self.gpus {
            writeln!(formatter, "accelerator {:<2} {}", gpu.index, describe(gpu))?;
            for line in details(gpu) {
                writeln!(formatter, "               {line}")?;
            }
        }
        if self.gpus.is_empty() {
            writeln!(formatter, "accelerator    none")?;
        }
        for adapter in &self.adapters {
            writeln!(formatter, "adapter        {} through {}, {:?}", adapter.name, adapter.interface, adapter.kind)?;
        }
        for MeasuredPeaks { backend, device, gemm_size, gemms, copy_tb_s, .. } in &self.measured {
            let rate = |gemm: &MeasuredGemm| format!("{} {:.3}", gemm.format.name(), gemm.tflops);
            let rates = gemms.iter().map(rate).collect::<Vec<_>>().join(", ");
            write!(formatter, "measured       {backend} on {device}: GEMMs of {gemm_size} {rates} TFLOP/s, ")?;
            writeln!(formatter, "copies {copy_tb_s:.3} TB/s")?;
        }
        let kind = self.gpus.first().and_then(Gpu::kind).unwrap_or(HardwareKind::Cpu);
        let config = get_optimal_config(kind);
        let HardwareConfig { kind, precision, attention_here, compute_here, .. } = config;
        let (attention, rows) = (config.use_flash_attention, config.micro_batch_start);
        write!(formatter, "tuning         {kind}: {attention} and {precision} to prefer, start with {rows} rows of ")?;
        writeln!(formatter, "4,096 tokens; here {attention_here}, {compute_here}")?;
        for note in &self.notes {
            writeln!(formatter, "note           {note}")?;
        }
        Ok(())
    }
}

fn describe(gpu: &Gpu) -> String {
    let (free, total) = (human_bytes(gpu.memory_free_bytes), human_bytes(gpu.memory_total_bytes));
    let place = if gpu.unified_memory { " of unified memory, counted in the host's" } else { "" };
    let capability = gpu
        .compute_capability
        .map_or_else(String::new, |(major, minor)| format!(", compute capability {major}.{minor}"));
    format!("{}, {free} free of {total}{place}{capability}", gpu.name)
}

fn details(gpu: &Gpu) -> Vec<String> {
    let mut lines = Vec::new();
    if let Some(spec) = &gpu.spec {
        lines.push(peaks(spec));
    }
    let mut parts = Vec::new();
    if let Some(clocks) = gpu.clocks.filter(|clocks| clocks.sm_mhz > 0) {
        parts.push(format!("up to {} MHz, memory {} MHz", clocks.sm_mhz, clocks.memory_mhz));
    }
    parts.extend(gpu.power_limit_w.map(|limit| format!("{limit:.0} W")));
    parts.extend(gpu.pcie.map(|pcie| format!("PCIe {} x{}", pcie.generation, pcie.lanes)));
    if !gpu.driver_version.is_empty() {
        parts.push(format!("driver {}", gpu.driver_version));
    }
    if !parts.is_empty() {
        lines.push(parts.join(", "));
    }
    lines
}

fn peaks(spec: &AcceleratorSpec) -> String {
    let DenseRates { f32, bf16, fp8, fp4, .. } = spec.rates;
    let rates = [(spec.kind.half().name(), Some(bf16)), ("FP8", fp8), ("FP4", fp4), ("f32", f32)];
    let rates = rates.iter().filter_map(|(name, rate)| Some(format!("{name} {:.0}", (*rate)?.value)));
    let rates: Vec<String> = rates.collect();
    let unverified = spec.unverified();
    let doubt =
        if unverified.is_empty() { String::new() } else { format!("; not verified: {}", unverified.join(", ")) };
    format!(
        "peaks: {} dense TFLOP/s ({}), {} TB/s ({}){doubt}",
        rates.join(", "),
        spec.rates.bf16.source(),
        spec.bandwidth_tb_s.value,
        spec.bandwidth_tb_s.source()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_named_machine_can_be_printed_with_its_peaks_and_tuning() {
        for spec in AcceleratorSpec::all() {
            let text = HardwareProfile::of_machine(spec).to_string();
            assert!(text.contains(spec.name) && text.contains("dense TFLOP/s") && text.contains("tuning"), "{text}");
            assert_eq!(text.contains("not verified"), !spec.unverified().is_empty(), "{text}");
        }
    }

    #[test]
    fn a_machine_without_accelerators_is_tuned_as_a_processor() {
        let text = HardwareProfile::described(8, 1 << 34, Vec::new()).to_string();
        assert!(text.contains("accelerator    none") && text.contains("CPU: FlashAttention 2"), "{text}");
    }
}
