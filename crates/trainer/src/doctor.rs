//! Checks what a run needs from this machine, a line for each finding: `firebrick doctor`.
//!
//! A failure is what would end a run with `backend = "auto"` here. What makes it slower, or ends a run that names another backend or a model of the
//! Hub, is a warning.
//! Trade-off: the checks belong to no recipe, so they know neither the memory nor the disk space that a run needs: the plan does.

use std::env;
use std::fmt::{self, Display};
use std::fs;
use std::io;
use std::path::Path;

use firebrick_hub::Hub;
use firebrick_hwprofile::memory::human_bytes;
use firebrick_hwprofile::{AdapterKind, HardwareProfile};
use firebrick_kernels::BackendKind;

use crate::config::Auto;
use crate::console::error_message;
use crate::plan::{choose_backend, compiled_names};
use crate::run::peaks::try_gemm;
use crate::shipped;
use crate::storage::{bytes_in_words, free_space};

/// Less free space than this is a warning: a checkpoint of a small run.
const LITTLE_SPACE: u64 = 1_000_000_000;

/// How a check ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// As it should be.
    Good,
    /// A run starts, but not every run, or not as fast as it could be.
    Warning,
    /// A run would fail.
    Failure,
}

/// One finding about this machine. It is shown as one line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Check {
    /// How it ended.
    pub status: Status,
    /// What was checked, in one word.
    pub subject: &'static str,
    /// What was found and, where it is not good, what to do.
    pub finding: String,
}

impl Check {
    fn new(status: Status, subject: &'static str, finding: impl Into<String>) -> Self {
        Self { status, subject, finding: finding.into() }
    }

    fn good(subject: &'static str, finding: impl Into<String>) -> Self {
        Self::new(Status::Good, subject, finding)
    }

    fn warning(subject: &'static str, finding: impl Into<String>) -> Self {
        Self::new(Status::Warning, subject, finding)
    }

    fn failure(subject: &'static str, finding: impl Into<String>) -> Self {
        Self::new(Status::Failure, subject, finding)
    }
}

impl Display for Check {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let status = match self.status {
            Status::Good => "ok",
            Status::Warning => "warning",
            Status::Failure => "FAILURE",
        };
        let words: Vec<&str> = self.finding.split_whitespace().collect();
        write!(formatter, "{status:<8} {:<9} {}", self.subject, words.join(" "))
    }
}

const CHECKS: [fn(&HardwareProfile) -> Vec<Check>; 8] = [program, driver, cards, adapters, disk, cache, hub, backend];

/// Makes all checks: some seconds, most of them for a matrix multiplication and for a Hub that does not answer. Each is shown when it is done.
/// Returns whether a run would start.
pub fn examine(show: &mut dyn FnMut(&Check)) -> bool {
    let profile = HardwareProfile::detect_with_adapters();
    let mut starts = true;
    for check in CHECKS.iter().flat_map(|check| check(&profile)) {
        starts &= check.status != Status::Failure;
        show(&check);
    }
    starts
}

fn program(_: &HardwareProfile) -> Vec<Check> {
    let (version, backends) = (env!("CARGO_PKG_VERSION"), compiled_names());
    let files = match shipped::folder() {
        Some(folder) => format!("recipes and assets in {}", folder.display()),
        None => "without the shipped recipes and assets, which an archive or a wheel has".to_owned(),
    };
    vec![Check::good("program", format!("version {version} with {backends}; {files}"))]
}

/// Checks the NVIDIA driver and the libraries that runs on a card use.
#[cfg(feature = "cuda")]
fn driver(profile: &HardwareProfile) -> Vec<Check> {
    match firebrick_cuda::Driver::load() {
        Ok(driver) => {
            let (major, minor) = driver.version();
            let release = profile.cuda_card().map_or("of NVIDIA", |card| card.driver_version.as_str());
            let found = Check::good("driver", format!("{release}, for CUDA {major}.{minor} and older"));
            std::iter::once(found).chain(cuda_libraries(&driver)).collect()
        }
        Err(_) if profile.cuda_card().is_none() => {
            vec![Check::good("driver", "no NVIDIA driver with a card, which backend cuda alone needs")]
        }
        Err(error) => vec![Check::warning("driver", error_message(&error))],
    }
}

#[cfg(not(feature = "cuda"))]
fn driver(profile: &HardwareProfile) -> Vec<Check> {
    vec![match profile.cuda_card() {
        Some(card) => {
            let advice = "take a program with cuda, such as one of a release, to train on it";
            Check::warning("driver", format!("{} is here, but cuda is not in this program: {advice}", card.name))
        }
        None => Check::good("driver", "not looked for, because cuda is not in this program"),
    }]
}

/// Checks the libraries that runs on an NVIDIA card open.
#[cfg(feature = "cuda")]
fn cuda_libraries(driver: &firebrick_cuda::Driver) -> Vec<Check> {
    let libraries = match firebrick_cuda::Libraries::find(driver) {
        Ok(found) => found,
        Err(error) => return vec![Check::warning("library", error_message(&error))],
    };
    let shown = libraries.report().into_iter();
    let shown = shown.map(|library| format!("{} {}: {}", library.name, library.version, library.file.display()));
    let major = libraries.major.map_or_else(String::new, |major| format!("CUDA {major}, "));
    let from = Check::good("libraries", format!("{major}from {}", libraries.place));
    std::iter::once(from).chain(shown.map(|text| Check::good("library", text))).collect()
}

fn cards(profile: &HardwareProfile) -> Vec<Check> {
    let cards = profile.gpus.iter().map(|gpu| {
        let (free, total) = (human_bytes(gpu.memory_free_bytes), human_bytes(gpu.memory_total_bytes));
        let capability = gpu.compute_capability;
        let capability =
            capability.map_or_else(String::new, |(major, minor)| format!(", compute capability {major}.{minor}"));
        Check::good("card", format!("{}, {free} of {total} free{capability}", gpu.name))
    });
    let found: Vec<Check> = cards.collect();
    if found.is_empty() { vec![Check::good("card", "none: runs compute on the processor")] } else { found }
}

fn adapters(profile: &HardwareProfile) -> Vec<Check> {
    if !BackendKind::Wgpu.is_compiled() {
        return vec![Check::good("adapter", "not looked for, because wgpu is not in this program")];
    }
    let adapters = profile.adapters.iter().map(|adapter| {
        let software = if adapter.kind == AdapterKind::Software { ", computed by the processor" } else { "" };
        Check::good("adapter", format!("{} through {} ({}){software}", adapter.name, adapter.interface, adapter.driver))
    });
    let found: Vec<Check> = adapters.collect();
    let none = || vec![Check::good("adapter", "none: backend wgpu needs a driver for Vulkan, Metal or DirectX")];
    if found.is_empty() { none() } else { found }
}

/// Checks the current folder, where a run writes its own.
fn disk(_: &HardwareProfile) -> Vec<Check> {
    let here = env::current_dir().unwrap_or_default();
    let (place, free) = (here.display(), free_space(&here).map(|free| free.bytes));
    let space = free.map_or_else(|| "free space unknown".to_owned(), |free| format!("{} free", bytes_in_words(free)));
    vec![match write_in(&here) {
        Err(error) => {
            let advice = "start runs in another folder, or set output_dir";
            Check::failure("disk", format!("a run cannot write into {place}: {error}; {advice}"))
        }
        Ok(()) if free.is_some_and(|free| free < LITTLE_SPACE) => {
            Check::warning("disk", format!("{space} in {place}: set output_dir to a folder on another disk"))
        }
        Ok(()) => Check::good("disk", format!("{space} in {place}")),
    }]
}

/// Checks the folder of tokenized data, compiled kernels and measured peaks.
fn cache(_: &HardwareProfile) -> Vec<Check> {
    // The name of no kind is the folder of all kinds.
    let Some(folder) = firebrick_files::cache_folder("") else {
        let advice = "set FIREBRICK_CACHE or HOME";
        return vec![Check::warning("cache", format!("no folder: every run compiles its kernels again; {advice}"))];
    };
    let place = folder.display();
    vec![match fs::create_dir_all(&folder).and_then(|()| write_in(&folder)) {
        Ok(()) => Check::good("cache", place.to_string()),
        Err(error) => Check::warning("cache", format!("cannot write into {place}: {error}; set FIREBRICK_CACHE")),
    }]
}

/// Creates a file in a folder and removes it.
fn write_in(folder: &Path) -> io::Result<()> {
    firebrick_files::temporary_in(folder, ".firebrick-", "").map(drop)
}

fn hub(_: &HardwareProfile) -> Vec<Check> {
    let hub = Hub::from_environment();
    let (endpoint, cache) = (hub.settings().shown_endpoint(), hub.settings().cache.display());
    if hub.settings().is_offline {
        return vec![Check::good("hub", format!("offline, as the environment says: models come from {cache}"))];
    }
    vec![match hub.reach() {
        Ok(()) => Check::good("hub", format!("{endpoint} answers; its files are kept in {cache}")),
        Err(reason) => {
            Check::warning("hub", format!("{reason}: only local folders and what is in {cache} can be used"))
        }
    }]
}

/// Chooses the backend as `auto` does, and computes on it.
fn backend(profile: &HardwareProfile) -> Vec<Check> {
    let chosen = match choose_backend(Auto::Auto, profile) {
        Ok(chosen) => chosen,
        Err(error) => return vec![Check::failure("auto", error_message(&error))],
    };
    let is_slower = profile.cuda_card().is_some() && chosen.value != BackendKind::Cuda;
    let status = if is_slower { Status::Warning } else { Status::Good };
    let auto = Check::new(status, "auto", format!("{}: {}", chosen.value, chosen.reason));
    let kernel = match try_gemm(chosen.value) {
        Ok((format, tflops)) if tflops < 1.0 => {
            Check::good("kernel", format!("matrix multiplication in {format}: {:.1} GFLOP/s", 1e3 * tflops))
        }
        Ok((format, tflops)) => {
            Check::good("kernel", format!("matrix multiplication in {format}: {tflops:.1} TFLOP/s"))
        }
        Err(error) => Check::failure("kernel", error_message(&error)),
    };
    vec![auto, kernel]
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use firebrick_hwprofile::Gpu;
    use firebrick_hwprofile::spec::Maker;

    use super::*;

    fn machine(cards: Vec<Gpu>) -> HardwareProfile {
        HardwareProfile::described(2, 1 << 34, cards)
    }

    #[test]
    fn a_check_is_one_line_whatever_its_message_is() {
        let check = Check::failure("kernel", "the device failed:\n  in its first operation");
        assert_eq!(check.to_string(), "FAILURE  kernel    the device failed: in its first operation");
    }

    #[test]
    fn a_processor_alone_is_good_and_its_rate_is_measured() {
        let checks = backend(&machine(Vec::new()));
        assert!(checks.iter().all(|check| check.status == Status::Good), "{checks:?}");
        assert!(checks[0].finding.starts_with("flex: no NVIDIA card"), "{checks:?}");
        assert!(checks[1].finding.ends_with("FLOP/s"), "{checks:?}");
        assert!(cards(&machine(Vec::new()))[0].finding.contains("processor"));
    }

    #[test]
    fn a_card_that_auto_cannot_use_is_a_warning_and_no_failure() {
        let profile = machine(vec![Gpu::described(Maker::Nvidia, "NVIDIA H100 80GB HBM3", 80 << 30)]);
        assert!(cards(&profile)[0].finding.starts_with("NVIDIA H100 80GB HBM3, 80.0 GiB of 80.0 GiB free"));
        if BackendKind::Cuda.probe().is_ok() {
            return;
        }
        let checks = backend(&profile);
        assert_eq!((checks[0].subject, checks[0].status), ("auto", Status::Warning), "{checks:?}");
        assert!(checks[0].finding.contains("found NVIDIA H100"), "{checks:?}");
        assert_eq!(checks[1].status, Status::Good, "a run would start on the processor: {checks:?}");
    }

    #[test]
    fn a_folder_that_takes_no_file_is_found_and_nothing_is_left_in_another() {
        let folder = tempfile::tempdir().unwrap();
        write_in(folder.path()).unwrap();
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
        let file = folder.path().join("file");
        fs::write(&file, "").unwrap();
        assert!(write_in(&file).is_err());
    }
}
