//! The sampled quantities: names, units, and how samples become one reading.

/// A number that a machine reports about itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Gauge {
    /// Percent of the time in which at least one kernel ran.
    GpuUtil,
    /// Percent of the multiprocessors that were busy (NVML's GPM counters: Hopper and later).
    SmUtil,
    /// Percent of the time in which multiprocessors used their tensor cores (GPM).
    TensorUtil,
    /// Percent of the peak memory bandwidth (GPM).
    DramUtil,
    /// Percent of the time in which memory was read or written: reported if bandwidth is not counted.
    MemoryBusy,
    /// Watts.
    PowerW,
    /// Joules since the monitor began.
    EnergyJ,
    /// Degrees Celsius, the highest.
    TemperatureC,
    /// Clock of the multiprocessors, MHz.
    SmMhz,
    /// 1e9 bytes per second to the host.
    PcieTxGbS,
    /// 1e9 bytes per second from the host.
    PcieRxGbS,
    /// 1e9 bytes per second to other cards.
    NvlinkTxGbS,
    /// 1e9 bytes per second from other cards.
    NvlinkRxGbS,
    /// Percent of the hardware threads that this process may use.
    CpuUtil,
    /// Bytes of this process in the host's memory, the maximum.
    HostMemory,
}

/// The combination of samples into one reading.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Combine {
    Mean,
    Highest,
    Latest,
}

impl Gauge {
    /// All of them in their order, with their keys in metrics.jsonl.
    pub const ALL: [(Self, &str); 15] = [
        (Self::GpuUtil, "gpu_util"),
        (Self::SmUtil, "sm_util"),
        (Self::TensorUtil, "tensor_util"),
        (Self::DramUtil, "dram_util"),
        (Self::MemoryBusy, "memory_busy"),
        (Self::PowerW, "power_w"),
        (Self::EnergyJ, "energy_j"),
        (Self::TemperatureC, "temperature_c"),
        (Self::SmMhz, "sm_mhz"),
        (Self::PcieTxGbS, "pcie_tx_gb_s"),
        (Self::PcieRxGbS, "pcie_rx_gb_s"),
        (Self::NvlinkTxGbS, "nvlink_tx_gb_s"),
        (Self::NvlinkRxGbS, "nvlink_rx_gb_s"),
        (Self::CpuUtil, "cpu_util"),
        (Self::HostMemory, "host_memory"),
    ];

    /// Returns the gauge's key in metrics.jsonl.
    pub fn name(self) -> &'static str {
        Self::ALL[self as usize].1
    }

    pub(super) fn combine(self) -> Combine {
        match self {
            Self::TemperatureC | Self::HostMemory => Combine::Highest,
            Self::EnergyJ => Combine::Latest,
            _ => Combine::Mean,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_gauge_is_listed_once_in_its_order_with_a_key_of_its_own() {
        assert!(Gauge::ALL.iter().enumerate().all(|(at, (gauge, _))| *gauge as usize == at));
        let mut names = Gauge::ALL.map(|(_, name)| name).to_vec();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), Gauge::ALL.len());
    }
}
