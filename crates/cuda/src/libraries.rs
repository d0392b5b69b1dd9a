//! Finds cuBLASLt, NVRTC, cuDNN, NCCL and the CUDA headers in one place and of one major version of CUDA, and opens them.
//!
//! The places are, in this order: what `FIREBRICK_CUDA` names; the Python environment that this program is installed in; those
//! of `VIRTUAL_ENV` and `CONDA_PREFIX`; the loader's path together with the CUDA toolkit. NVRTC and cuBLASLt are opened
//! before cuDNN, which opens both by their bare names and then gets those that are open.

mod open;
mod place;
mod python;
mod resolve;

use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::{env, fs};

pub(crate) use self::open::Opened;
use self::place::Environment;
use self::resolve::{Choice, resolve};
use crate::driver::Driver;
use crate::error::CudaError;
use crate::library::{CUBLASLT, CUDNN, Library, NCCL, NVRTC};

/// The libraries of this process.
pub struct Libraries {
    /// The place that all of them are from, such as `VIRTUAL_ENV=...`.
    pub place: String,
    /// Their major version of CUDA; `None` if neither a file's name nor the library says.
    pub major: Option<u32>,
    pub(crate) nvrtc: Opened,
    pub(crate) cublaslt: Opened,
    cudnn: Result<Opened, CudaError>,
    /// Opened when it is needed.
    nccl: Option<PathBuf>,
    /// The folder with NVIDIA's headers, such as `cuda_runtime.h`, if the place has some of this version.
    headers: Option<PathBuf>,
}

/// One library that was found, for a report to the user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LibraryReport {
    /// What it is, such as `cuBLASLt`.
    pub name: &'static str,
    /// Its file; for the headers their folder.
    pub file: PathBuf,
    /// Its version, or why it cannot be used.
    pub version: String,
}

impl Libraries {
    /// Finds and opens the libraries, once per process. Only libraries that the driver supports are taken.
    pub fn find(driver: &Driver) -> Result<&'static Self, CudaError> {
        static FOUND: OnceLock<Result<Libraries, CudaError>> = OnceLock::new();
        let open = || Self::open(&Environment::of_process(), driver.version());
        FOUND.get_or_init(open).as_ref().map_err(Clone::clone)
    }

    fn open(environment: &Environment, driver: (u32, u32)) -> Result<Self, CudaError> {
        let choice = resolve(environment.places(), &[&NVRTC, &CUBLASLT], Some(driver.0), &cudnn_major)?;
        let (nvrtc, cublaslt) = (open(&choice, &NVRTC)?, open(&choice, &CUBLASLT)?);
        if let Some(found) = nvrtc.nvrtc_version().filter(|found| *found > driver) {
            // CubeCL loads PTX, and a driver refuses that of a newer compiler.
            return Err(CudaError::NvrtcTooNew { file: nvrtc.file.clone(), found, driver, package: NVRTC.package });
        }
        let nvrtc_major = nvrtc.nvrtc_version().map(|(major, _)| major);
        same_major((&nvrtc, nvrtc_major), (&cublaslt, cublaslt_version(&cublaslt).map(|version| version / 10_000)))?;
        let cudnn = open_cudnn(&choice);
        if let Ok(cudnn) = &cudnn {
            same_major((&nvrtc, nvrtc_major), (cudnn, cudart_version(cudnn).map(|version| version / 1000)))?;
        }
        let major = choice.major.or(nvrtc_major);
        let (nccl, headers) = (choice.file(&NCCL), choice.place.headers(major));
        Ok(Self { place: choice.place.label, major, nvrtc, cublaslt, cudnn, nccl, headers })
    }

    /// Opens one library alone, from the first place that has it, for a machine without a driver: it can compile but run nothing.
    pub(crate) fn open_alone(library: &Library) -> Result<Opened, CudaError> {
        let choice = resolve(Environment::of_process().places(), &[library], None, &cudnn_major)?;
        open(&choice, library)
    }

    /// Lists what was found, with versions. Opens NCCL.
    pub fn report(&self) -> Vec<LibraryReport> {
        let report = |name, file: &str, version: Option<String>| LibraryReport {
            name,
            file: PathBuf::from(file),
            version: version.unwrap_or_else(|| "of unknown version".to_owned()),
        };
        let nvrtc_version = self.nvrtc.nvrtc_version().map(|(major, minor)| format!("{major}.{minor}"));
        let mut found = vec![
            report(NVRTC.name, &self.nvrtc.file, nvrtc_version),
            report(CUBLASLT.name, &self.cublaslt.file, cublaslt_version(&self.cublaslt).map(dotted)),
        ];
        if let Ok(cudnn) = &self.cudnn {
            // SAFETY: `size_t cudnnGetVersion(void)` in cudnn_graph.h.
            let version = unsafe { cudnn.number("cudnnGetVersion") }.map(dotted);
            found.push(report(CUDNN.name, &cudnn.file, version));
        }
        if let Some(file) = &self.nccl {
            let version =
                self.nccl().map_or_else(|error| Some(error.to_string()), |nccl| nccl.nccl_version().map(dotted));
            found.push(report(NCCL.name, &file.display().to_string(), version));
        }
        if let Some(folder) = &self.headers {
            let version = self.major.map(|major| format!("CUDA {major}"));
            found.push(report("CUDA headers", &folder.display().to_string(), version));
        }
        found
    }

    pub(crate) fn cudnn(&self) -> Result<&Opened, CudaError> {
        self.cudnn.as_ref().map_err(Clone::clone)
    }

    pub(crate) fn nccl(&self) -> Result<Opened, CudaError> {
        let found = self.nccl.as_deref().ok_or_else(|| "it is not there".to_owned()).and_then(Opened::open);
        let package = NCCL.package;
        found.map_err(|reason| CudaError::NcclNotFound { place: self.place.clone(), reason, package })
    }
}

fn open(choice: &Choice, library: &Library) -> Result<Opened, CudaError> {
    let path = choice.file(library).expect("a place is chosen only if it has the library in this version");
    if library.name == NVRTC.name {
        Opened::open_builtins(&path, choice.major);
    }
    let (file, package) = (path.display().to_string(), library.package);
    Opened::open(&path).map_err(|reason| CudaError::LibraryNotOpened { file, reason, package })
}

fn open_cudnn(choice: &Choice) -> Result<Opened, CudaError> {
    let path = choice.file(&CUDNN).ok_or_else(|| "it is not there".to_owned());
    let (place, package) = (choice.place.label.clone(), CUDNN.package);
    path.and_then(|path| Opened::open(&path)).map_err(|reason| CudaError::CudnnNotFound { place, reason, package })
}

/// Sets `CUDA_PATH`, by which CubeCL finds the headers that its kernels include, to the place that the libraries are from. Does nothing if the user has
/// set it, if the place has no headers, or if the process has other threads: then they may be reading the environment. So it is the first thing that
/// a program does; one that does not call it needs a CUDA toolkit or `CUDA_PATH`.
pub fn name_headers() {
    const VARIABLE: &str = "CUDA_PATH";
    if env::var_os(VARIABLE).is_some() || !is_single_threaded() {
        return;
    }
    let Ok(choice) = resolve(Environment::of_process().places(), &[&NVRTC, &CUBLASLT], None, &cudnn_major) else {
        return;
    };
    if let Some(root) = choice.place.headers(choice.major).as_deref().and_then(Path::parent) {
        // SAFETY: this is the only thread of the process (on Windows, variables may be set at any time).
        unsafe { env::set_var(VARIABLE, root) };
    }
}

/// Returns whether this thread is the only one; `false` where the system does not say.
fn is_single_threaded() -> bool {
    cfg!(windows) || fs::read_dir("/proc/self/task").is_ok_and(|threads| threads.count() == 1)
}

/// Returns an error if two libraries are of different major versions of CUDA, where both are known.
fn same_major(first: (&Opened, Option<u32>), second: (&Opened, Option<u32>)) -> Result<(), CudaError> {
    match (first.1, second.1) {
        (Some(first_major), Some(second_major)) if first_major != second_major => Err(CudaError::MixedMajors {
            first: first.0.file.clone(),
            first_major,
            second: second.0.file.clone(),
            second_major,
        }),
        _ => Ok(()),
    }
}

/// Opens a file of cuDNN and returns the major version of CUDA that it was built for.
fn cudnn_major(path: &Path) -> Option<u32> {
    Opened::open(path).ok().and_then(|cudnn| cudart_version(&cudnn)).map(|version| version / 1000)
}

/// Returns the version of CUDA that cuDNN was built for, `1000 * major + 10 * minor`.
fn cudart_version(cudnn: &Opened) -> Option<u32> {
    // SAFETY: `size_t cudnnGetCudartVersion(void)` in cudnn_graph.h.
    unsafe { cudnn.number("cudnnGetCudartVersion") }
}

/// Returns the version of cuBLASLt, `10_000 * major + 100 * minor + patch`, whose major version is that of CUDA.
fn cublaslt_version(cublaslt: &Opened) -> Option<u32> {
    // SAFETY: `size_t cublasLtGetVersion(void)` in cublasLt.h.
    unsafe { cublaslt.number("cublasLtGetVersion") }
}

/// Formats `91_800` as `9.18.0`.
fn dotted(version: u32) -> String {
    format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_printed_with_dots() {
        assert_eq!([91_800, 130_002, 22_703].map(dotted), ["9.18.0", "13.0.2", "2.27.3"]);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_file_that_is_no_library_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["libnvrtc.so.13", "libcublasLt.so.13"] {
            fs::write(folder.path().join(name), "a text is no library").unwrap();
        }
        let environment = Environment { named: Some(folder.path().to_owned()), ..Environment::default() };
        let error = Libraries::open(&environment, (13, 0)).err().expect("they are texts");
        assert!(
            matches!(&error, CudaError::LibraryNotOpened { file, .. } if file.ends_with("libnvrtc.so.13")),
            "{error}"
        );
        for part in ["too short", "nvidia-cuda-nvrtc", "backend = \"flex\""] {
            assert!(error.to_string().contains(part), "{part} is missing in: {error}");
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn the_environment_is_not_set_under_other_threads() {
        // The test harness runs this test in a second thread.
        assert!(!is_single_threaded());
        let before = env::var_os("CUDA_PATH");
        name_headers();
        assert_eq!(env::var_os("CUDA_PATH"), before);
    }

    /// Needs a driver and the libraries; returns early without them.
    #[test]
    fn what_was_found_is_reported_with_files_that_exist() {
        let Ok(libraries) = Driver::load().and_then(|driver| Libraries::find(&driver)) else { return };
        let report = libraries.report();
        assert!(report.len() >= 2 && report.iter().all(|library| library.file.exists()), "{report:?}");
        assert!(!libraries.place.is_empty() && libraries.major.is_some_and(|major| major >= 12));
    }
}
