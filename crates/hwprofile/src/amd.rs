//! AMD's cards through sysfs, where the kernel driver `amdgpu` describes them.
//!
//! Trade-off: ROCm's own variables that hide cards (`ROCR_VISIBLE_DEVICES`) are not read, because no backend here uses ROCm.

use std::fs;
use std::path::{Path, PathBuf};

use crate::gpu::{Gpu, Pcie};
use crate::spec::{AcceleratorSpec, Maker};

/// The kernel's folder of graphics cards.
pub(crate) const SYSFS: &str = "/sys/class/drm";

/// PCI vendor of AMD.
const AMD: u32 = 0x1002;

/// PCI devices of the Instinct cards whose driver does not report a name.
const DEVICES: [(u32, &str); 3] =
    [(0x74a1, "AMD Instinct MI300X"), (0x74a5, "AMD Instinct MI325X"), (0x75a3, "AMD Instinct MI355X")];

/// Finds the cards below a folder like [`SYSFS`], in the order of their numbers.
pub(crate) fn detect(root: &Path, notes: &mut Vec<String>) -> Vec<Gpu> {
    let Ok(entries) = fs::read_dir(root) else { return Vec::new() };
    let number = |name: &str| name.strip_prefix("card")?.parse::<u32>().ok();
    let mut cards: Vec<(u32, PathBuf)> = entries
        .flatten()
        .filter_map(|entry| Some((number(entry.file_name().to_str()?)?, entry.path().join("device"))))
        .filter(|(_, device)| hex(device, "vendor") == Some(AMD))
        .collect();
    cards.sort_unstable_by_key(|(number, _)| *number);
    let indexed = cards.iter().zip(0u32..);
    indexed.filter_map(|((number, device), index)| card(device, *number, index, notes)).collect()
}

fn card(device: &Path, number: u32, index: u32, notes: &mut Vec<String>) -> Option<Gpu> {
    let Some(total) = integer(device, "mem_info_vram_total") else {
        notes.push(format!("AMD card {number} is there, but its driver does not state its memory"));
        return None;
    };
    let used = integer(device, "mem_info_vram_used").unwrap_or(0);
    let name = name(device);
    let spec = AcceleratorSpec::find(&name).copied();
    if spec.is_none() {
        notes.push(format!("{name} is not in the table of accelerators: its peak rates are not known"));
    }
    Some(Gpu {
        index,
        uuid: text(device, "unique_id"),
        memory_free_bytes: total.saturating_sub(used),
        driver_version: text(Path::new("/sys/module/amdgpu"), "version").unwrap_or_default(),
        power_limit_w: power_limit(device),
        pcie: pcie(device),
        spec,
        ..Gpu::described(Maker::Amd, &name, total)
    })
}

fn name(device: &Path) -> String {
    let known = || {
        let id = hex(device, "device")?;
        DEVICES.iter().find(|(known, _)| *known == id).map(|(_, name)| (*name).to_owned())
    };
    let unnamed = || format!("AMD card {:04x}", hex(device, "device").unwrap_or(0));
    text(device, "product_name").filter(|name| !name.is_empty()).or_else(known).unwrap_or_else(unnamed)
}

/// Reads `hwmon/hwmon*/power1_cap`, which is in microwatts.
fn power_limit(device: &Path) -> Option<f64> {
    let mut monitors = fs::read_dir(device.join("hwmon")).ok()?.flatten();
    monitors.find_map(|monitor| integer(&monitor.path(), "power1_cap")).map(|limit| limit as f64 / 1e6)
}

/// Reads the PCIe link: `max_link_speed` is like `32.0 GT/s PCIe`, `max_link_width` like `16`.
fn pcie(device: &Path) -> Option<Pcie> {
    let speed: f64 = text(device, "max_link_speed")?.split_whitespace().next()?.parse().ok()?;
    let generation = match speed {
        s if s >= 64.0 => 6,
        s if s >= 32.0 => 5,
        s if s >= 16.0 => 4,
        s if s >= 8.0 => 3,
        s if s >= 5.0 => 2,
        _ => 1,
    };
    Some(Pcie { generation, lanes: text(device, "max_link_width")?.parse().ok()? })
}

fn text(folder: &Path, file: &str) -> Option<String> {
    fs::read_to_string(folder.join(file)).ok().map(|text| text.trim().to_owned())
}

fn integer(folder: &Path, file: &str) -> Option<u64> {
    text(folder, file)?.parse().ok()
}

fn hex(folder: &Path, file: &str) -> Option<u32> {
    u32::from_str_radix(text(folder, file)?.strip_prefix("0x")?, 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_card_is_known_by_its_pci_device_where_it_states_no_name() {
        // A folder like `/sys/class/drm` with an MI300X without a name, a card without memory, another maker's card and a connector.
        let (root, mut notes) = (tempfile::tempdir().unwrap(), Vec::new());
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, format!("{text}\n")).unwrap();
        };
        for (file, text) in [
            ("vendor", "0x1002"),
            ("device", "0x74a1"),
            ("mem_info_vram_total", "206141652992"),
            ("mem_info_vram_used", "296452096"),
            ("unique_id", "a1b2c3d4e5f60708"),
            ("max_link_speed", "32.0 GT/s PCIe"),
            ("max_link_width", "16"),
            ("hwmon/hwmon4/power1_cap", "750000000"),
        ] {
            write(&format!("card11/device/{file}"), text);
        }
        write("card2/device/vendor", "0x1002");
        write("card1/device/vendor", "0x10de");
        write("card11-DP-1/status", "disconnected");
        let cards = detect(root.path(), &mut notes);
        assert_eq!(cards.len(), 1);
        let card = &cards[0];
        assert_eq!((card.name.as_str(), card.spec.unwrap().id), ("AMD Instinct MI300X", "mi300x"));
        assert_eq!(card.memory_free_bytes, 206_141_652_992 - 296_452_096);
        assert_eq!((card.power_limit_w, card.pcie), (Some(750.0), Some(Pcie { generation: 5, lanes: 16 })));
        assert_eq!(notes, ["AMD card 2 is there, but its driver does not state its memory"]);
    }

    #[test]
    fn a_machine_without_such_cards_has_none() {
        let root = tempfile::tempdir().unwrap();
        assert!(detect(root.path(), &mut Vec::new()).is_empty());
        assert!(detect(&root.path().join("missing"), &mut Vec::new()).is_empty());
    }
}
