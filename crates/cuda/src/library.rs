//! Finds and opens NVIDIA's libraries, and names the package to install if one is missing.
//!
//! Finding a library means opening its file, since only the loader knows its search path. An opened library stays
//! loaded, since unloading one that registered thread-local state or exit handlers is not safe.
//!
//! Trade-off: only the usual file names, on the loader's path and in the CUDA toolkit's folder. Nothing else is searched.

use std::env;
use std::path::PathBuf;

use libloading::Library as SharedLibrary;

/// A library that is opened at run time: its file names, and the package that installs it.
pub(crate) struct Library {
    package: &'static str,
    unix_files: &'static [&'static str],
    windows_files: &'static [&'static str],
}

/// GEMMs.
pub(crate) const CUBLASLT: Library = Library {
    package: "libcublas-13-0 or libcublas-12-8 (apt, NVIDIA's repository); nvidia-cublas (pip)",
    unix_files: &["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"],
    windows_files: &["cublasLt64_13.dll", "cublasLt64_12.dll"],
};

/// Attention.
pub(crate) const CUDNN: Library = Library {
    package: "libcudnn9-cuda-13 or libcudnn9-cuda-12 (apt, NVIDIA's repository); nvidia-cudnn-cu13 (pip)",
    unix_files: &["libcudnn.so.9", "libcudnn.so"],
    windows_files: &["cudnn64_9.dll"],
};

/// Collectives between devices. NVIDIA provides it only for Linux.
pub(crate) const NCCL: Library = Library {
    package: "libnccl2 (apt, NVIDIA's repository); nvidia-nccl-cu13 or nvidia-nccl-cu12 (pip), with its folder in LD_LIBRARY_PATH",
    unix_files: &["libnccl.so.2", "libnccl.so"],
    windows_files: &["nccl.dll"],
};

/// Compiles kernels.
pub(crate) const NVRTC: Library = Library {
    package: "cuda-nvrtc-13-0 or cuda-nvrtc-12-8 (apt, NVIDIA's repository); nvidia-cuda-nvrtc (pip)",
    unix_files: &["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"],
    windows_files: &["nvrtc64_130_0.dll", "nvrtc64_120_0.dll"],
};

/// A library of which no file could be opened.
pub(crate) struct NotFound {
    /// The file names that were tried.
    pub(crate) searched: Vec<String>,
    /// The package to install.
    pub(crate) package: &'static str,
}

impl Library {
    /// Opens the library, trying only the file names that `usable` accepts: a driver cannot run a library of a newer CUDA.
    /// Returns it with the name of its file.
    pub(crate) fn open(&self, usable: impl Fn(&str) -> bool) -> Result<(SharedLibrary, String), NotFound> {
        let files = if cfg!(windows) { self.windows_files } else { self.unix_files };
        let usable: Vec<&str> = files.iter().copied().filter(|file| usable(file)).collect();
        let searched = candidates(&usable);
        open_first(&searched).ok_or(NotFound { searched, package: self.package })
    }
}

/// Opens the first of `files` that the loader can open, and returns it with its name.
pub(crate) fn open_first(files: &[String]) -> Option<(SharedLibrary, String)> {
    files.iter().find_map(|file| {
        // SAFETY: opening runs the library's initializers. The names are those of NVIDIA's libraries, whose initializers
        // have no preconditions. The owner of the machine decides what file has such a name on the library path.
        unsafe { SharedLibrary::new(file) }.ok().map(|library| (library, file.clone()))
    })
}

/// Returns the bare names, for the loader's own search path, then the same names in the CUDA toolkit's folder.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_not_found_names_its_files_and_its_package() {
        for library in [CUBLASLT, CUDNN, NCCL, NVRTC] {
            assert!(!library.unix_files.is_empty() && !library.windows_files.is_empty());
            let Err(missing) = library.open(|_| false) else { panic!("no file was usable") };
            assert!(missing.searched.is_empty() && missing.package.contains("apt"), "{}", missing.package);
        }
        assert_eq!(candidates(CUDNN.unix_files)[0], "libcudnn.so.9");
    }

    #[test]
    fn a_missing_file_is_none_and_not_a_panic() {
        assert!(open_first(&["libfirebrick_that_is_not_there.so".to_string()]).is_none());
    }
}
