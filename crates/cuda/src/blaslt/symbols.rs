//! The functions and constants of cublasLt.h that are used here, from whichever cuBLASLt the machine has.
//!
//! Constants are integers and not Rust enums: a newer library may return a value that an enum does not list, which would be
//! undefined behaviour. What it gives up: the compiler does not check them against the header. They are the same in CUDA 12
//! and 13; the scale modes came with 12.8 and 12.9, and an older library answers them with `CUBLAS_STATUS_INVALID_VALUE`.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;

use libloading::Library;

use crate::library::open_known;
use crate::{CudaError, Driver};

/// `cublasStatus_t`.
pub(super) type Status = u32;
/// Handle, descriptor, layout and preference are all pointers to opaque structures.
pub(super) type Opaque = *mut c_void;

/// `cublasOperation_t`: the matrix as it is stored.
pub(super) const OPERATION_NONE: i32 = 0;
/// `cublasOperation_t`: its transpose.
pub(super) const OPERATION_TRANSPOSE: i32 = 1;

/// `CUBLAS_COMPUTE_32F`: products and sums in f32; for f32 inputs no rounding to TF32.
pub(super) const COMPUTE_F32: u32 = 68;
/// `CUBLAS_COMPUTE_32F_FAST_TF32`.
pub(super) const COMPUTE_TF32: u32 = 77;
/// `CUDA_R_32F`, the type of alpha and beta.
pub(super) const TYPE_F32: u32 = 0;

/// `cublasLtMatmulDescAttributes_t`.
pub(super) mod description {
    pub(in crate::blaslt) const TRANSPOSE_A: u32 = 3;
    pub(in crate::blaslt) const TRANSPOSE_B: u32 = 4;
    pub(in crate::blaslt) const EPILOGUE: u32 = 7;
    pub(in crate::blaslt) const BIAS_POINTER: u32 = 8;
    pub(in crate::blaslt) const A_SCALE_POINTER: u32 = 17;
    pub(in crate::blaslt) const B_SCALE_POINTER: u32 = 18;
    pub(in crate::blaslt) const FAST_ACCUMULATION: u32 = 25;
    pub(in crate::blaslt) const A_SCALE_MODE: u32 = 31;
    pub(in crate::blaslt) const B_SCALE_MODE: u32 = 32;
}

/// `cublasLtMatmulPreferenceAttributes_t`.
pub(super) mod preference {
    pub(in crate::blaslt) const WORKSPACE_BYTES: u32 = 1;
    pub(in crate::blaslt) const REDUCTION_SCHEMES: u32 = 3;
    pub(in crate::blaslt) const ALIGNMENT_A: u32 = 5;
    pub(in crate::blaslt) const ALIGNMENT_B: u32 = 6;
    pub(in crate::blaslt) const ALIGNMENT_C: u32 = 7;
    pub(in crate::blaslt) const ALIGNMENT_D: u32 = 8;
}

/// `CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE`: partial sums of a split reduction are kept and added in f32.
pub(super) const REDUCTION_IN_COMPUTE_TYPE: u32 = 2;
/// `CUBLASLT_REDUCTION_SCHEME_MASK`: also in the output's type.
pub(super) const REDUCTION_ANY: u32 = 7;

/// `cublasLtMatmulAlgo_t`: 64 bytes that only the library reads.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Algorithm {
    data: [u64; 8],
}

/// `cublasLtMatmulHeuristicResult_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct HeuristicResult {
    pub(super) algorithm: Algorithm,
    pub(super) workspace_bytes: usize,
    pub(super) state: Status,
    pub(super) waves: f32,
    reserved: [c_int; 4],
}

impl HeuristicResult {
    /// Room for the library to write a result into.
    pub(super) const EMPTY: Self = Self {
        algorithm: Algorithm { data: [0; 8] },
        workspace_bytes: 0,
        state: Status::MAX,
        waves: 0.0,
        reserved: [0; 4],
    };
}

/// Sets one attribute of a descriptor or a preference: object, attribute, value, its bytes.
pub(super) type SetAttribute = unsafe extern "C" fn(Opaque, u32, *const c_void, usize) -> Status;
/// Destroys what it is given.
pub(super) type Destroy = unsafe extern "C" fn(Opaque) -> Status;

type Matmul = unsafe extern "C" fn(
    Opaque,           // handle
    Opaque,           // descriptor
    *const c_void,    // alpha
    *const c_void,    // A
    Opaque,           // layout of A
    *const c_void,    // B
    Opaque,           // layout of B
    *const c_void,    // beta
    *const c_void,    // C
    Opaque,           // layout of C
    *mut c_void,      // D
    Opaque,           // layout of D
    *const Algorithm, // which kernel, how configured
    *mut c_void,      // workspace
    usize,            // its bytes
    *mut c_void,      // stream
) -> Status;

type Heuristic = unsafe extern "C" fn(
    Opaque, // handle
    Opaque, // descriptor
    Opaque, // layout of A
    Opaque, // of B
    Opaque, // of C
    Opaque, // of D
    Opaque, // preference
    c_int,  // how many are asked for
    *mut HeuristicResult,
    *mut c_int, // how many were written
) -> Status;

/// Functions of the loaded library.
pub(super) struct Symbols {
    pub(super) create: unsafe extern "C" fn(*mut Opaque) -> Status,
    pub(super) destroy: Destroy,
    pub(super) description_create: unsafe extern "C" fn(*mut Opaque, u32, u32) -> Status,
    pub(super) description_destroy: Destroy,
    pub(super) description_set: SetAttribute,
    pub(super) layout_create: unsafe extern "C" fn(*mut Opaque, u32, u64, u64, i64) -> Status,
    pub(super) layout_destroy: Destroy,
    pub(super) preference_create: unsafe extern "C" fn(*mut Opaque) -> Status,
    pub(super) preference_destroy: Destroy,
    pub(super) preference_set: SetAttribute,
    pub(super) heuristic: Heuristic,
    pub(super) matmul: Matmul,
    status_name: unsafe extern "C" fn(Status) -> *const c_char,
}

impl Symbols {
    /// Opens the library that this driver can run, once a process.
    ///
    /// # Errors
    /// [`CudaError::BlasLtNotFound`] or [`CudaError::BrokenBlasLt`].
    pub(super) fn load(driver: &Driver) -> Result<&'static Self, CudaError> {
        Self::load_up_to(driver.version().0)
    }

    /// As [`Symbols::load`], with the newest major CUDA version that may be opened.
    pub(super) fn load_up_to(cuda_major: u32) -> Result<&'static Self, CudaError> {
        static SYMBOLS: OnceLock<Symbols> = OnceLock::new();
        if let Some(symbols) = SYMBOLS.get() {
            return Ok(symbols);
        }
        let opened = open_known("cuBLASLt", |file| cuda_major_of(file).is_none_or(|major| major <= cuda_major));
        let (library, file) =
            opened.map_err(|(searched, package)| CudaError::BlasLtNotFound { searched, cuda_major, package })?;
        let symbols = Self::look_up(&library, &file)?;
        // Function pointers into it are kept: it must never be unloaded.
        std::mem::forget(library);
        Ok(SYMBOLS.get_or_init(|| symbols))
    }

    fn look_up(library: &Library, file: &str) -> Result<Self, CudaError> {
        // SAFETY: the fields' types are the declarations of cublasLt.h, with its enums as the 32-bit integers that they are in
        // C, and the library is never unloaded once this has succeeded.
        unsafe {
            Ok(Self {
                create: symbol(library, file, "cublasLtCreate")?,
                destroy: symbol(library, file, "cublasLtDestroy")?,
                description_create: symbol(library, file, "cublasLtMatmulDescCreate")?,
                description_destroy: symbol(library, file, "cublasLtMatmulDescDestroy")?,
                description_set: symbol(library, file, "cublasLtMatmulDescSetAttribute")?,
                layout_create: symbol(library, file, "cublasLtMatrixLayoutCreate")?,
                layout_destroy: symbol(library, file, "cublasLtMatrixLayoutDestroy")?,
                preference_create: symbol(library, file, "cublasLtMatmulPreferenceCreate")?,
                preference_destroy: symbol(library, file, "cublasLtMatmulPreferenceDestroy")?,
                preference_set: symbol(library, file, "cublasLtMatmulPreferenceSetAttribute")?,
                heuristic: symbol(library, file, "cublasLtMatmulAlgoGetHeuristic")?,
                matmul: symbol(library, file, "cublasLtMatmul")?,
                status_name: symbol(library, file, "cublasLtGetStatusName")?,
            })
        }
    }

    /// Turns a status into a result; `asked` is only called for an error.
    pub(super) fn checked(
        &self,
        call: &'static str,
        status: Status,
        asked: impl FnOnce() -> String,
    ) -> Result<(), CudaError> {
        if status == 0 {
            return Ok(());
        }
        Err(CudaError::BlasLt { call, code: status, name: self.name_of(status), asked: asked() })
    }

    fn name_of(&self, status: Status) -> String {
        // SAFETY: takes any integer, and answers with a constant string that lives as long as the library.
        let name = unsafe { (self.status_name)(status) };
        if name.is_null() {
            return "a status unknown to this library".to_string();
        }
        // SAFETY: not null, so a constant string that ends in a zero.
        unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
    }
}

/// The CUDA version that a file's name ends in: 13 of `libcublasLt.so.13` and of `cublasLt64_13.dll`.
fn cuda_major_of(file: &str) -> Option<u32> {
    let stem = file.strip_suffix(".dll").unwrap_or(file);
    let digits = stem.len() - stem.trim_end_matches(|c: char| c.is_ascii_digit()).len();
    stem[stem.len() - digits..].parse().ok()
}

/// A function of the library.
///
/// # Safety
/// `F` is the type of the function that cublasLt.h declares under this name, and is not used after the library is unloaded.
unsafe fn symbol<F: Copy>(library: &Library, file: &str, name: &'static str) -> Result<F, CudaError> {
    // SAFETY: handed on to the caller.
    let found = unsafe { library.get::<F>(name.as_bytes()) };
    found.map(|function| *function).map_err(|_| CudaError::BrokenBlasLt { file: file.to_string(), symbol: name })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_newer_than_the_driver_is_told_by_its_name() {
        let names = ["libcublasLt.so.13", "cublasLt64_12.dll", "libcublasLt.so"];
        assert_eq!(names.map(cuda_major_of), [Some(13), Some(12), None]);
    }

    #[test]
    fn results_have_the_size_that_the_header_declares() {
        assert_eq!(size_of::<Algorithm>(), 64);
        assert_eq!(size_of::<HeuristicResult>(), 64 + 8 + 4 + 4 + 16);
    }

    #[test]
    fn an_error_names_its_status_and_what_was_asked() {
        let Ok(symbols) = Symbols::load_up_to(u32::MAX) else { return };
        assert_eq!(symbols.checked("cublasLtMatmul", 0, || unreachable!("only for errors")), Ok(()));
        let error = symbols.checked("cublasLtMatmul", 15, || "f32 [2, 3]".to_string()).expect_err("15 is an error");
        let message = error.to_string();
        for part in ["cublasLtMatmul", "CUBLAS_STATUS_NOT_SUPPORTED", "f32 [2, 3]"] {
            assert!(message.contains(part), "{part} is missing in: {message}");
        }
    }
}
