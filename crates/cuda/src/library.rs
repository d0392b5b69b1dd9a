//! NVIDIA's libraries: their file names on each system, the package that installs each, and how a file is opened.
//!
//! An opened library stays loaded, since unloading one that registered thread-local state or exit handlers is not safe.

use std::error::Error;
use std::path::Path;

use libloading::Library as SharedLibrary;

/// A library that is opened at run time.
pub(crate) struct Library {
    pub(crate) name: &'static str,
    /// What a file of it is, and what to reinstall if a function is missing there.
    pub(crate) working: &'static str,
    pub(crate) versions: &'static str,
    pub(crate) package: &'static str,
    /// File names, the best first; `#` stands for the major version of CUDA.
    unix_files: &'static [&'static str],
    windows_files: &'static [&'static str],
}

/// GEMMs.
pub(crate) const CUBLASLT: Library = Library {
    name: "cuBLASLt",
    working: "cuBLASLt",
    versions: "cuBLAS 12 or 13",
    package: "libcublas-13-0 or libcublas-12-8 (apt, NVIDIA's repository), nvidia-cublas or nvidia-cublas-cu12 (pip)",
    unix_files: &["libcublasLt.so.#", "libcublasLt.so"],
    windows_files: &["cublasLt64_#.dll"],
};

/// Attention.
pub(crate) const CUDNN: Library = Library {
    name: "cuDNN",
    working: "cuDNN 9",
    versions: "cuDNN 9",
    package: "libcudnn9-cuda-13 or libcudnn9-cuda-12 (apt, NVIDIA's repository), nvidia-cudnn-cu13 or nvidia-cudnn-cu12 (pip)",
    unix_files: &["libcudnn.so.9", "libcudnn.so"],
    windows_files: &["cudnn64_9.dll"],
};

/// Collectives between devices. NVIDIA provides it only for Linux.
pub(crate) const NCCL: Library = Library {
    name: "NCCL",
    working: "NCCL",
    versions: "NCCL",
    package: "libnccl2 (apt, NVIDIA's repository), nvidia-nccl-cu13 or nvidia-nccl-cu12 (pip)",
    unix_files: &["libnccl.so.2", "libnccl.so"],
    windows_files: &["nccl.dll"],
};

/// Compiles kernels.
pub(crate) const NVRTC: Library = Library {
    name: "NVRTC",
    working: "NVRTC",
    versions: "NVRTC",
    package: "cuda-nvrtc-13-0 or cuda-nvrtc-12-8 (apt, NVIDIA's repository), nvidia-cuda-nvrtc or nvidia-cuda-nvrtc-cu12 (pip)",
    unix_files: &["libnvrtc.so.#", "libnvrtc.so"],
    windows_files: &["nvrtc64_#0_0.dll"],
};

impl Library {
    /// Major versions of CUDA whose files are known, the newest first. Those that do not exist yet cost only a failed lookup.
    const MAJORS: [u32; 9] = [20, 19, 18, 17, 16, 15, 14, 13, 12];

    /// Returns the names that the library's file may have, with the major version of CUDA where the name contains it.
    pub(crate) fn file_names(&self, windows: bool) -> Vec<(String, Option<u32>)> {
        let patterns = if windows { self.windows_files } else { self.unix_files };
        let names = patterns.iter().flat_map(|pattern| {
            let majors: &[u32] = if pattern.contains('#') { &Self::MAJORS } else { &[] };
            let unversioned = majors.is_empty().then(|| ((*pattern).to_owned(), None));
            majors.iter().map(|major| (pattern.replace('#', &major.to_string()), Some(*major))).chain(unversioned)
        });
        names.collect()
    }

    /// Returns the major version of CUDA in a name such as `libcublasLt.so.13.0.2`, which a link `libcublasLt.so` leads to.
    /// Libraries with version numbers of their own return `None`.
    pub(crate) fn major_of(&self, file_name: &str) -> Option<u32> {
        let pattern = self.unix_files.iter().find(|pattern| pattern.contains('#'))?;
        let version = file_name.strip_prefix(pattern.trim_end_matches('#'))?;
        version.split('.').next()?.parse().ok()
    }
}

/// Opens one file. A path is opened as it is; for a bare name the loader searches.
pub(crate) fn open_file(file: &Path) -> Result<SharedLibrary, String> {
    // SAFETY: opening runs the library's initializers. The names are those of NVIDIA's libraries, whose initializers
    // have no preconditions. The owner of the machine decides what file has such a name in the places that are searched.
    let opened = unsafe { open_with_its_folder(file) };
    opened.map_err(|error| error.source().map_or_else(|| error.to_string(), ToString::to_string))
}

/// # Safety
/// The library's initializers have no preconditions.
#[cfg(unix)]
unsafe fn open_with_its_folder(file: &Path) -> Result<SharedLibrary, libloading::Error> {
    // SAFETY: the caller's promise.
    unsafe { SharedLibrary::new(file) }
}

/// Windows looks for the libraries that a library needs in its folder only if it is opened with these flags.
///
/// # Safety
/// The library's initializers have no preconditions.
#[cfg(windows)]
unsafe fn open_with_its_folder(file: &Path) -> Result<SharedLibrary, libloading::Error> {
    use libloading::os::windows::{LOAD_LIBRARY_SEARCH_DEFAULT_DIRS, LOAD_LIBRARY_SEARCH_DLL_LOAD_DIR, Library};
    if !file.is_absolute() {
        // SAFETY: the caller's promise.
        return unsafe { SharedLibrary::new(file) };
    }
    let flags = LOAD_LIBRARY_SEARCH_DLL_LOAD_DIR | LOAD_LIBRARY_SEARCH_DEFAULT_DIRS;
    // SAFETY: the caller's promise.
    unsafe { Library::load_with_flags(file, flags) }.map(SharedLibrary::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_names_begin_with_the_newest_cuda() {
        let names = CUBLASLT.file_names(false);
        assert!(names.contains(&("libcublasLt.so.13".to_owned(), Some(13))));
        assert_eq!(names.last(), Some(&("libcublasLt.so".to_owned(), None)));
        assert!(names.iter().filter_map(|name| name.1).is_sorted_by(|first, second| first > second));
        assert!(NVRTC.file_names(true).contains(&("nvrtc64_120_0.dll".to_owned(), Some(12))));
        assert_eq!(CUDNN.file_names(true), [("cudnn64_9.dll".to_owned(), None)]);
    }

    #[test]
    fn only_some_file_names_have_the_version_of_cuda() {
        assert_eq!(NVRTC.major_of("libnvrtc.so.12.9.86"), Some(12));
        assert_eq!(NVRTC.major_of("libnvrtc.alt.so.12"), None);
        assert_eq!(CUDNN.major_of("libcudnn.so.9.18.0"), None);
    }

    #[test]
    fn a_missing_file_is_the_loaders_text_and_not_a_panic() {
        let text = open_file(Path::new("libfirebrick_that_is_not_there.so")).expect_err("there is no such file");
        assert!(text.contains("libfirebrick_that_is_not_there"), "{text}");
    }
}
