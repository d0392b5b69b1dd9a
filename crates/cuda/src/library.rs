//! Which CUDA libraries this machine has, and what to install where one is missing.
//!
//! Looking means opening the file: only the loader knows its own search path. A library that was opened stays loaded, since
//! unloading one that registered thread-local state or exit handlers is not safe.

use std::env;
use std::ffi::c_int;
use std::path::PathBuf;
use std::sync::OnceLock;

use libloading::Library as SharedLibrary;

/// A library that the CUDA backend uses beside the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Library {
    /// Its usual name, such as `cuBLASLt`.
    pub name: &'static str,
    /// What it does here.
    pub used_for: &'static str,
    /// What to install when it is missing.
    pub package: &'static str,
    /// File names that were tried.
    pub searched: Vec<String>,
    /// `None`: no file could be opened.
    pub found: Option<FoundLibrary>,
}

/// A library file that could be opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundLibrary {
    /// Name or path that was opened.
    pub file: String,
    /// Its version, such as `9.14.0`, where it has a function that says so.
    pub version: Option<String>,
}

/// What is fixed about a library: names of its files, and how it tells its version.
struct Known {
    name: &'static str,
    used_for: &'static str,
    package: &'static str,
    unix_files: &'static [&'static str],
    windows_files: &'static [&'static str],
    version: fn(&SharedLibrary) -> Option<String>,
}

const KNOWN: [Known; 4] = [
    Known {
        name: "cuBLASLt",
        used_for: "matrix products",
        package: "libcublas-13-0 or libcublas-12-8 (apt, NVIDIA's repository); nvidia-cublas (pip)",
        unix_files: &["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"],
        windows_files: &["cublasLt64_13.dll", "cublasLt64_12.dll"],
        version: |library| packed_version(library, b"cublasLtGetVersion\0"),
    },
    Known {
        name: "cuDNN",
        used_for: "attention",
        package: "libcudnn9-cuda-13 or libcudnn9-cuda-12 (apt, NVIDIA's repository); nvidia-cudnn-cu13 (pip)",
        unix_files: &["libcudnn.so.9", "libcudnn.so"],
        windows_files: &["cudnn64_9.dll"],
        version: |library| packed_version(library, b"cudnnGetVersion\0"),
    },
    Known {
        name: "NVRTC",
        used_for: "compiling kernels",
        package: "cuda-nvrtc-13-0 or cuda-nvrtc-12-8 (apt, NVIDIA's repository); nvidia-cuda-nvrtc (pip)",
        unix_files: &["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"],
        windows_files: &["nvrtc64_130_0.dll", "nvrtc64_120_0.dll"],
        version: nvrtc_version,
    },
    Known {
        name: "NCCL",
        used_for: "several GPUs",
        package: "libnccl2 (apt, NVIDIA's repository); nvidia-nccl-cu13 (pip)",
        unix_files: &["libnccl.so.2", "libnccl.so"],
        windows_files: &["nccl.dll"],
        version: nccl_version,
    },
];

/// Looks for cuBLASLt, cuDNN, NVRTC and NCCL, once a process; needs no driver and no GPU. Opening all four takes about a
/// second where the files are not in the page cache.
pub fn libraries() -> &'static [Library] {
    static LIBRARIES: OnceLock<Vec<Library>> = OnceLock::new();
    LIBRARIES.get_or_init(|| KNOWN.iter().map(look_for).collect())
}

fn look_for(known: &Known) -> Library {
    let files = if cfg!(windows) { known.windows_files } else { known.unix_files };
    let searched = candidates(files);
    let found = open_first(&searched).map(|(library, file)| {
        let version = (known.version)(&library);
        // Stays loaded: see the head of this file.
        std::mem::forget(library);
        FoundLibrary { file, version }
    });
    Library { name: known.name, used_for: known.used_for, package: known.package, searched, found }
}

/// Opens the first of `files` that the loader can open, and says which one.
pub(crate) fn open_first(files: &[String]) -> Option<(SharedLibrary, String)> {
    files.iter().find_map(|file| {
        // SAFETY: opening runs the library's initialisers. The names are those of NVIDIA's libraries, whose initialisers
        // ask nothing of the caller; what stands under such a name on the library path is the machine owner's choice.
        unsafe { SharedLibrary::new(file) }.ok().map(|library| (library, file.clone()))
    })
}

/// Opens the library of this name in [`libraries`], trying only the files that `usable` lets through: a driver cannot run a
/// library of a newer CUDA. Where none opens: the files that were tried, and the package to install.
pub(crate) fn open_known(
    name: &str,
    usable: impl Fn(&str) -> bool,
) -> Result<(SharedLibrary, String), (Vec<String>, &'static str)> {
    let known = KNOWN.iter().find(|known| known.name == name).expect("a name of the table above");
    let files = if cfg!(windows) { known.windows_files } else { known.unix_files };
    let usable: Vec<&str> = files.iter().copied().filter(|file| usable(file)).collect();
    let searched = candidates(&usable);
    open_first(&searched).ok_or((searched, known.package))
}

/// The bare names, for the loader's own search path, then the same below the CUDA toolkit's folder.
fn candidates(files: &[&str]) -> Vec<String> {
    let folders = toolkit_folders();
    let below = folders.iter().flat_map(|folder| files.iter().map(|file| folder.join(file).display().to_string()));
    files.iter().map(ToString::to_string).chain(below).collect()
}

fn toolkit_folders() -> Vec<PathBuf> {
    let inside: &[&str] = if cfg!(windows) { &["bin/x64", "bin"] } else { &["lib64", "lib"] };
    let mut roots: Vec<PathBuf> =
        ["CUDA_HOME", "CUDA_PATH"].iter().filter_map(env::var_os).map(PathBuf::from).collect();
    if cfg!(unix) {
        roots.push(PathBuf::from("/usr/local/cuda"));
    }
    roots.dedup();
    roots.iter().flat_map(|root| inside.iter().map(|folder| root.join(folder))).filter(|f| f.is_dir()).collect()
}

/// A version function of the form `size_t f(void)`.
fn packed_version(library: &SharedLibrary, symbol: &[u8]) -> Option<String> {
    // SAFETY: only called for `cublasLtGetVersion` and `cudnnGetVersion`, both declared as `size_t f(void)` in NVIDIA's
    // headers; neither touches a device.
    let version = unsafe {
        let function = library.get::<unsafe extern "C" fn() -> usize>(symbol).ok()?;
        function()
    };
    Some(unpack(version))
}

fn nvrtc_version(library: &SharedLibrary) -> Option<String> {
    let (mut major, mut minor): (c_int, c_int) = (0, 0);
    // SAFETY: `nvrtcResult nvrtcVersion(int *major, int *minor)` in nvrtc.h; both pointers are valid for a write.
    let status = unsafe {
        let function = library.get::<unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int>(b"nvrtcVersion\0").ok()?;
        function(&mut major, &mut minor)
    };
    (status == 0).then(|| format!("{major}.{minor}"))
}

fn nccl_version(library: &SharedLibrary) -> Option<String> {
    let mut version: c_int = 0;
    // SAFETY: `ncclResult_t ncclGetVersion(int *version)` in nccl.h; the pointer is valid for a write.
    let status = unsafe {
        let function = library.get::<unsafe extern "C" fn(*mut c_int) -> c_int>(b"ncclGetVersion\0").ok()?;
        function(&mut version)
    };
    // A negative version cannot be: NCCL packs it as below.
    (status == 0).then(|| unpack(usize::try_from(version).unwrap_or(0)))
}

/// NVIDIA packs a version as `10000 * major + 100 * minor + patch` (cuBLASLt, cuDNN from 9, NCCL from 2.9).
fn unpack(version: usize) -> String {
    format!("{}.{}.{}", version / 10_000, version % 10_000 / 100, version % 100)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_library_names_its_files_and_its_package() {
        let libraries = libraries();
        assert_eq!(libraries.iter().map(|l| l.name).collect::<Vec<_>>(), ["cuBLASLt", "cuDNN", "NVRTC", "NCCL"]);
        for library in libraries {
            assert!(!library.searched.is_empty() && !library.package.is_empty(), "{library:?}");
            if let Some(found) = &library.found {
                assert!(library.searched.contains(&found.file), "{library:?}");
            }
        }
    }

    #[test]
    fn a_missing_library_is_none_and_not_a_panic() {
        assert!(open_first(&["libfirebrick_that_is_not_there.so".to_string()]).is_none());
    }

    #[test]
    fn packed_versions_are_unpacked() {
        assert_eq!([unpack(130_000), unpack(91_400), unpack(22_803)], ["13.0.0", "9.14.0", "2.28.3"]);
    }
}
