//! GPUs as wgpu's adapters: Apple's, Intel's, and every other one with Vulkan, Metal or DirectX.
//!
//! Trade-off: an adapter reports neither its memory nor its speed, so only its name and whether it shares the host's memory are used.

use serde::Serialize;

use crate::Memory;
use crate::gpu::{Gpu, unified_share};
use crate::spec::{AcceleratorSpec, Maker};

/// The kind of an adapter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum AdapterKind {
    /// A card with memory of its own.
    Discrete,
    /// A GPU that shares the host's memory.
    Integrated,
    /// A part of another machine's GPU.
    Virtual,
    /// A program on the processor.
    Software,
    /// Not stated.
    Other,
}

/// An adapter of wgpu.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Adapter {
    /// Name that its driver reports.
    pub name: String,
    /// Interface: `vulkan`, `metal`, `dx12`.
    pub interface: String,
    /// Its kind.
    pub kind: AdapterKind,
    /// PCI vendor, or 0.
    pub vendor: u32,
    /// Driver and its version.
    pub driver: String,
    /// Bytes of its largest buffer.
    pub max_buffer_bytes: u64,
}

impl Adapter {
    /// Returns its maker.
    pub fn maker(&self) -> Maker {
        match self.vendor {
            0x10de => Maker::Nvidia,
            0x1002 => Maker::Amd,
            0x8086 => Maker::Intel,
            0x106b => Maker::Apple,
            _ if self.name.starts_with("Apple") => Maker::Apple,
            _ => Maker::Other,
        }
    }

    /// Returns the adapter as an accelerator; `None` for a software renderer, and for a card of unknown memory size.
    pub(crate) fn gpu(&self, host: Memory) -> Option<Gpu> {
        let maker = self.maker();
        let unified = self.kind == AdapterKind::Integrated || maker == Maker::Apple;
        let spec = AcceleratorSpec::find(&self.name).copied();
        let total = match (unified, spec) {
            (true, _) => host.total_bytes,
            (false, Some(spec)) => spec.memory_bytes(),
            (false, None) => return None,
        };
        let free = if unified { host.available_bytes.min(unified_share(total)) } else { total };
        Some(Gpu {
            memory_free_bytes: free,
            unified_memory: unified,
            driver_version: self.driver.clone(),
            power_limit_w: spec.and_then(|spec| spec.power_w).map(|power| power.value),
            spec,
            ..Gpu::described(maker, &self.name, total)
        })
    }
}

/// Adds the adapters that are accelerators and that no other interface has found. Unified memory is the host's and not added to it.
pub(crate) fn add(gpus: &mut Vec<Gpu>, adapters: &[Adapter], host: Memory, notes: &mut Vec<String>) {
    for adapter in adapters {
        let maker = adapter.maker();
        let is_found = |gpu: &Gpu| gpu.maker == maker && (maker != Maker::Other || gpu.name == adapter.name);
        if adapter.kind == AdapterKind::Software || gpus.iter().any(is_found) {
            continue;
        }
        match adapter.gpu(host) {
            Some(gpu) => gpus.push(gpu),
            None => notes.push(format!("{}: {} does not state its memory", adapter.name, adapter.interface)),
        }
    }
}

/// Lists the adapters of this machine. Empty if this binary was built without wgpu.
#[cfg(feature = "wgpu")]
pub(crate) fn adapters() -> Vec<Adapter> {
    let descriptor = wgpu::InstanceDescriptor::new_without_display_handle();
    let found = finish(wgpu::Instance::new(descriptor).enumerate_adapters(wgpu::Backends::all()));
    found.iter().map(described).collect()
}

#[cfg(not(feature = "wgpu"))]
pub(crate) fn adapters() -> Vec<Adapter> {
    Vec::new()
}

#[cfg(feature = "wgpu")]
fn described(adapter: &wgpu::Adapter) -> Adapter {
    let info = adapter.get_info();
    Adapter {
        name: info.name,
        interface: info.backend.to_string(),
        kind: match info.device_type {
            wgpu::DeviceType::DiscreteGpu => AdapterKind::Discrete,
            wgpu::DeviceType::IntegratedGpu => AdapterKind::Integrated,
            wgpu::DeviceType::VirtualGpu => AdapterKind::Virtual,
            wgpu::DeviceType::Cpu => AdapterKind::Software,
            wgpu::DeviceType::Other => AdapterKind::Other,
        },
        vendor: info.vendor,
        driver: format!("{} {}", info.driver, info.driver_info).trim().to_owned(),
        max_buffer_bytes: adapter.limits().max_buffer_size,
    }
}

/// Polls a future that needs no waking: wgpu lists adapters at once everywhere except in browsers.
#[cfg(feature = "wgpu")]
fn finish<F: Future>(future: F) -> F::Output {
    let mut future = std::pin::pin!(future);
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    loop {
        match future.as_mut().poll(&mut context) {
            std::task::Poll::Ready(output) => return output,
            std::task::Poll::Pending => std::thread::yield_now(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;
    const HOST: Memory = Memory { total_bytes: 128 * GIB, available_bytes: 110 * GIB };

    fn adapter(name: &str, kind: AdapterKind, vendor: u32) -> Adapter {
        Adapter {
            name: name.to_owned(),
            interface: "vulkan".to_owned(),
            kind,
            vendor,
            driver: String::new(),
            max_buffer_bytes: 4 * GIB,
        }
    }

    #[test]
    fn unified_memory_is_the_hosts_and_a_part_of_it_is_for_the_gpu() {
        let (mut gpus, mut notes) = (Vec::new(), Vec::new());
        add(&mut gpus, &[adapter("Apple M4 Max", AdapterKind::Integrated, 0)], HOST, &mut notes);
        let mac = &gpus[0];
        assert_eq!((mac.maker, mac.spec.unwrap().id, mac.unified_memory), (Maker::Apple, "m4-max", true));
        assert_eq!((mac.memory_total_bytes, mac.memory_free_bytes), (128 * GIB, 96 * GIB));
        let busy = Memory { available_bytes: 8 * GIB, ..HOST };
        let mut gpus = Vec::new();
        add(&mut gpus, &[adapter("Apple M4 Max", AdapterKind::Integrated, 0)], busy, &mut notes);
        assert_eq!(gpus[0].memory_free_bytes, 8 * GIB, "what is free in the host bounds the GPU");
    }

    #[test]
    fn a_card_is_counted_once_and_software_never() {
        let mut gpus = vec![Gpu::described(Maker::Nvidia, "NVIDIA H100 80GB HBM3", 80 * GIB)];
        let adapters = [
            adapter("NVIDIA H100 80GB HBM3", AdapterKind::Discrete, 0x10de),
            adapter("llvmpipe (LLVM 17.0.6, 256 bits)", AdapterKind::Software, 0x10005),
            adapter("Intel(R) Data Center GPU Max 1550", AdapterKind::Discrete, 0x8086),
            adapter("Unknown Card", AdapterKind::Discrete, 0x1ed5),
        ];
        let mut notes = Vec::new();
        add(&mut gpus, &adapters, HOST, &mut notes);
        assert_eq!(gpus.iter().map(|gpu| gpu.maker).collect::<Vec<_>>(), [Maker::Nvidia, Maker::Intel]);
        assert_eq!(gpus[1].memory_free_bytes, 128 * GIB);
        assert_eq!(notes, ["Unknown Card: vulkan does not state its memory"]);
    }
}
