//! Opens libraries by their paths, and calls the functions that return their versions.

use std::ffi::c_int;
use std::fs;
use std::path::Path;

use libloading::Library as SharedLibrary;

use crate::error::CudaError;
use crate::library::{Library, open_file};

#[derive(Clone)]
pub(crate) struct Opened {
    library: &'static SharedLibrary,
    pub(crate) file: String,
}

impl Opened {
    pub(super) fn open(path: &Path) -> Result<Self, String> {
        let library = Box::leak(Box::new(open_file(path)?));
        Ok(Self { library, file: path.display().to_string() })
    }

    /// Opens the library with the built-in functions of NVRTC, next to NVRTC itself. Some releases search for it by its name
    /// alone, on the loader's path, and use one that is already open.
    pub(super) fn open_builtins(nvrtc: &Path, major: Option<u32>) {
        let entries = nvrtc.parent().and_then(|folder| fs::read_dir(folder).ok()).into_iter().flatten().flatten();
        for entry in entries.filter(|entry| is_builtins(&entry.file_name().to_string_lossy(), major)) {
            // NVRTC may find it in another way; if it does not, compiling fails with its message.
            if let Err(text) = Self::open(&entry.path()) {
                tracing::debug!("{} could not be opened: {text}", entry.path().display());
            }
        }
    }

    pub(super) fn nvrtc_version(&self) -> Option<(u32, u32)> {
        let (mut major, mut minor): (c_int, c_int) = (0, 0);
        // SAFETY: `nvrtcResult nvrtcVersion(int *major, int *minor)` in nvrtc.h; both pointers are valid for a write.
        let status = unsafe {
            let function = self.library.get::<unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int>(b"nvrtcVersion\0");
            function.ok()?(&mut major, &mut minor)
        };
        if status == 0 { Some((major.try_into().ok()?, minor.try_into().ok()?)) } else { None }
    }

    /// Looks up a function of this library.
    ///
    /// # Safety
    /// `F` is the type of the function that the library's header declares under this name.
    pub(crate) unsafe fn function<F: Copy>(&self, of: &Library, symbol: &'static str) -> Result<F, CudaError> {
        // SAFETY: the caller's promise; the library is never unloaded.
        let found = unsafe { self.library.get::<F>(symbol.as_bytes()) };
        let (file, library, versions) = (self.file.clone(), of.working, of.versions);
        found.map(|function| *function).map_err(|_| CudaError::BrokenLibrary { file, library, symbol, versions })
    }

    /// Returns the result of `size_t name(void)`, which is the form of the functions of cuBLASLt and cuDNN for versions.
    ///
    /// # Safety
    /// If the library has a function of this name, then it has this form.
    pub(super) unsafe fn number(&self, name: &str) -> Option<u32> {
        // SAFETY: the caller's promise.
        let function = unsafe { self.library.get::<unsafe extern "C" fn() -> usize>(name.as_bytes()) };
        // SAFETY: the caller's promise.
        u32::try_from(unsafe { function.ok()?() }).ok()
    }

    /// Returns the version of NCCL, `10_000 * major + 100 * minor + patch`.
    pub(super) fn nccl_version(&self) -> Option<u32> {
        let mut version: c_int = 0;
        // SAFETY: `ncclResult_t ncclGetVersion(int *version)` in nccl.h; the pointer is valid for a write.
        let status = unsafe {
            let function = self.library.get::<unsafe extern "C" fn(*mut c_int) -> c_int>(b"ncclGetVersion\0");
            function.ok()?(&mut version)
        };
        if status == 0 { version.try_into().ok() } else { None }
    }
}

/// Returns whether a file is the library with the built-in functions of NVRTC of this major version, or of any for `None`.
fn is_builtins(name: &str, major: Option<u32>) -> bool {
    let version = match name.strip_prefix("libnvrtc-builtins.so.") {
        Some(version) => version,
        None => match name.strip_prefix("nvrtc-builtins64_") {
            Some(version) if version.ends_with(".dll") => version,
            _ => return false,
        },
    };
    major.is_none_or(|major| version.starts_with(&major.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_builtins_are_those_of_the_same_cuda() {
        assert!(
            is_builtins("libnvrtc-builtins.so.13.0", Some(13)) && is_builtins("libnvrtc-builtins.so.12.9.86", None)
        );
        assert!(is_builtins("nvrtc-builtins64_129.dll", Some(12)));
        for other in ["libnvrtc-builtins.so.12.9", "libnvrtc-builtins.alt.so.13.0", "libnvrtc.so.13", "libcudnn.so.9"] {
            assert!(!is_builtins(other, Some(13)), "{other}");
        }
    }
}
