//! NUMA nodes of PCI devices and the processors near them, from Linux's sysfs.
//!
//! A machine with several sockets has memory and PCI slots on each of them; a copy between a card and the memory of another socket crosses the link
//! between the sockets.
//! Trade-off: Linux only; elsewhere, and in virtual machines that hide it, a device has no node.

use std::fs;
use std::path::Path;

/// Linux's folder of PCI devices.
const PCI_DEVICES: &str = "/sys/bus/pci/devices";

/// A NUMA node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NumaNode {
    /// Its number.
    pub id: u32,
    /// Processors of the node, by the system's numbers, ascending.
    pub processors: Vec<usize>,
}

impl NumaNode {
    /// Returns the node of the PCI device at `bus_id`, such as `0000:18:00.0`; `None` if the system does not report it.
    pub fn of_pci_device(bus_id: &str) -> Option<Self> {
        Self::of_listed(Path::new(PCI_DEVICES), bus_id)
    }

    fn of_listed(devices: &Path, bus_id: &str) -> Option<Self> {
        let read = |file: &str| fs::read_to_string(devices.join(bus_id.to_lowercase()).join(file)).ok();
        // -1: the firmware does not say.
        let id = read("numa_node")?.trim().parse().ok()?;
        let processors = processors_of(read("local_cpulist")?.trim())?;
        (!processors.is_empty()).then_some(Self { id, processors })
    }
}

/// Parses a list of processors such as `0-15,32-47`.
fn processors_of(list: &str) -> Option<Vec<usize>> {
    let mut numbers = Vec::new();
    for part in list.split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        numbers.extend(first..=last);
    }
    Some(numbers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_processors_are_read_and_others_are_unknown() {
        assert_eq!(processors_of("0-2,8,10-11"), Some(vec![0, 1, 2, 8, 10, 11]));
        assert_eq!(processors_of("7"), Some(vec![7]));
        assert_eq!(processors_of(""), Some(vec![]));
        assert_eq!((processors_of("a-b"), processors_of("1-")), (None, None));
    }

    #[test]
    fn a_device_has_the_node_that_sysfs_names() {
        let devices = tempfile::tempdir().unwrap();
        let add = |bus_id: &str, node: &str, processors: &str| {
            let folder = devices.path().join(bus_id);
            fs::create_dir(&folder).unwrap();
            fs::write(folder.join("numa_node"), node).unwrap();
            fs::write(folder.join("local_cpulist"), processors).unwrap();
        };
        add("0000:9a:00.0", "1\n", "56-58,168-169\n");
        add("0000:18:00.0", "-1\n", "0-3\n");
        let node = NumaNode { id: 1, processors: vec![56, 57, 58, 168, 169] };
        assert_eq!(NumaNode::of_listed(devices.path(), "0000:9A:00.0"), Some(node));
        assert_eq!(NumaNode::of_listed(devices.path(), "0000:18:00.0"), None);
        assert_eq!(NumaNode::of_listed(devices.path(), "0000:ff:00.0"), None);
    }
}
