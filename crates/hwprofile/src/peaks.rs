//! Measured peak rates of this machine, stored between processes: `profile --measure` writes them, plans read them.
//!
//! One JSON file per backend, device and driver in `firebrick/peaks` in the user's cache folder, so that a new driver is measured again.
//! Trade-off: if the power limit or clocks of a card change, its old peaks stay until it is measured again.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::HardwareProfile;
use crate::roofline::{RateSource, Rates};
use crate::spec::MathFormat;

/// The rate of large GEMMs in a format.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct MeasuredGemm {
    /// Format of the operands.
    pub format: MathFormat,
    /// 1e12 operations per second.
    pub tflops: f64,
}

/// The measured peaks of a backend on a device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MeasuredPeaks {
    /// The backend: `cuda`, `wgpu`, `candle`, `flex`.
    pub backend: String,
    /// Name of the device.
    pub device: String,
    /// Version of its driver; empty on a processor.
    pub driver: String,
    /// When, in seconds since 1970.
    pub measured_at: u64,
    /// Size of the square GEMMs: rows, columns and inner dimension.
    pub gemm_size: usize,
    /// GEMMs, one entry per format that the backend supports there.
    pub gemms: Vec<MeasuredGemm>,
    /// Memory traffic of a copy-like pass, 1e12 bytes per second, reads and writes together.
    pub copy_tb_s: f64,
}

impl MeasuredPeaks {
    /// Returns the rate in a format, 1e12 operations per second; `None`: not measured.
    pub fn rate(&self, format: MathFormat) -> Option<f64> {
        self.gemms.iter().find(|gemm| gemm.format == format).map(|gemm| gemm.tflops)
    }

    /// Returns the rates for GEMMs in a format, with attention at a share of them. `None`: that format was not measured.
    pub fn rates(&self, format: MathFormat, attention_share: f64) -> Option<Rates> {
        let flops = self.rate(format)? * 1e12;
        Some(Rates {
            matmul_flops_per_s: flops,
            fp8_flops_per_s: self.rate(MathFormat::Fp8).map_or(flops, |tflops| tflops * 1e12),
            attention_flops_per_s: flops * attention_share,
            bytes_per_s: self.copy_tb_s * 1e12,
            source: RateSource::Measured,
        })
    }

    /// Stores the peaks in a folder, in place of earlier ones with the same key. Returns the file.
    pub fn save(&self, folder: &Path) -> io::Result<PathBuf> {
        fs::create_dir_all(folder)?;
        let word = |text: &str| {
            let word: String =
                text.chars().map(|c| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '-' }).collect();
            word.split('-').filter(|part| !part.is_empty()).collect::<Vec<_>>().join("-")
        };
        let path = folder.join(format!("{}_{}_{}.json", word(&self.backend), word(&self.device), word(&self.driver)));
        // Another process may be reading the file.
        firebrick_files::write(&path, serde_json::to_string_pretty(self)? + "\n")?;
        Ok(path)
    }

    /// Reads all peaks in a folder; a file that cannot be read becomes a note.
    pub fn load_all(folder: &Path, notes: &mut Vec<String>) -> Vec<Self> {
        let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
        let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
        paths.retain(|path| path.extension().is_some_and(|extension| extension == "json"));
        paths.sort();
        let read = |path: &PathBuf| {
            let found = fs::read_to_string(path).map_err(|error| error.to_string());
            let parsed = found.and_then(|text| serde_json::from_str(&text).map_err(|error| error.to_string()));
            parsed.map_err(|why| notes.push(format!("measured peaks in {} are ignored: {why}", path.display()))).ok()
        };
        paths.iter().filter_map(read).collect()
    }

    /// Returns whether the peaks belong to a device of this machine, under its present driver.
    pub fn is_of(&self, profile: &HardwareProfile) -> bool {
        let is_card = || profile.gpus.iter().any(|gpu| gpu.name == self.device && gpu.driver_version == self.driver);
        let is_adapter =
            || profile.adapters.iter().any(|adapter| adapter.name == self.device && adapter.driver == self.driver);
        processor_key(profile) == self.device || is_card() || is_adapter()
    }
}

/// Returns the key of the peaks of this machine's processor, which depend on the threads that a process may use.
pub fn processor_key(profile: &HardwareProfile) -> String {
    format!("{}, {} threads", profile.cpu.name, profile.cpu.logical_cores)
}

/// Returns the folder of the stored peaks. `None`: the user has no cache folder.
pub fn cache_folder() -> Option<PathBuf> {
    firebrick_files::cache_folder("peaks")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Gpu;
    use crate::spec::Maker;

    fn peaks(driver: &str) -> MeasuredPeaks {
        MeasuredPeaks {
            backend: "cuda".to_owned(),
            device: "NVIDIA H100 80GB HBM3".to_owned(),
            driver: driver.to_owned(),
            measured_at: 1_790_000_000,
            gemm_size: 8192,
            gemms: vec![
                MeasuredGemm { format: MathFormat::Bf16, tflops: 785.5 },
                MeasuredGemm { format: MathFormat::Fp8, tflops: 1307.0 },
            ],
            copy_tb_s: 2.98,
        }
    }

    #[test]
    fn a_second_measurement_replaces_the_kept_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = peaks("580.1").save(folder.path()).unwrap();
        assert!(path.ends_with("cuda_nvidia-h100-80gb-hbm3_580-1.json"), "{}", path.display());
        let second = MeasuredPeaks { copy_tb_s: 3.0, ..peaks("580.1") };
        second.save(folder.path()).unwrap();
        peaks("590.0").save(folder.path()).unwrap();
        let mut notes = Vec::new();
        assert_eq!(MeasuredPeaks::load_all(folder.path(), &mut notes), [second, peaks("590.0")]);
        fs::write(folder.path().join("broken.json"), "{").unwrap();
        assert_eq!(MeasuredPeaks::load_all(folder.path(), &mut notes).len(), 2);
        assert!(notes.len() == 1 && notes[0].contains("broken.json"), "{notes:?}");
    }

    #[test]
    fn peaks_belong_to_a_device_under_one_driver() {
        let mut card = Gpu::described(Maker::Nvidia, "NVIDIA H100 80GB HBM3", 80 << 30);
        card.driver_version = "580.1".to_owned();
        let machine = HardwareProfile::described(4, 1 << 34, vec![card]);
        assert!(peaks("580.1").is_of(&machine) && !peaks("590.0").is_of(&machine));
        let of_processor = MeasuredPeaks { device: processor_key(&machine), ..peaks("") };
        assert!(
            of_processor.is_of(&machine) && !of_processor.is_of(&HardwareProfile::described(8, 1 << 34, Vec::new()))
        );
    }

    #[test]
    fn rates_are_those_of_the_format_and_attention_has_a_share() {
        let rates = peaks("1").rates(MathFormat::Bf16, 0.5).unwrap();
        assert_eq!((rates.matmul_flops_per_s, rates.fp8_flops_per_s), (785.5e12, 1307.0e12));
        assert_eq!((rates.attention_flops_per_s, rates.source), (785.5e12 / 2.0, RateSource::Measured));
        assert!(peaks("1").rates(MathFormat::F32, 0.5).is_none());
    }
}
