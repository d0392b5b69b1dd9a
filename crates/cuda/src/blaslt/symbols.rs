//! The functions and constants of cublasLt.h that are used here, looked up in the cuBLASLt of the machine.
//!
//! Constants are integers, not Rust enums: a newer library may return a value that an enum does not list, which would be
//! undefined behavior. They are the same in CUDA 12 and 13; the scale modes came with 12.8 and 12.9, and an older library
//! answers them with `CUBLAS_STATUS_INVALID_VALUE`.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;

use crate::driver::Driver;
use crate::error::CudaError;
use crate::libraries::Libraries;
use crate::symbols::symbols;

/// `cublasStatus_t`.
pub(super) type Status = u32;
/// Handle, descriptor, layout and preference are all pointers to opaque structures.
pub(super) type Opaque = *mut c_void;

/// `cublasOperation_t`: the matrix as it is stored.
pub(super) const OPERATION_NONE: i32 = 0;
/// `cublasOperation_t`: its transpose.
pub(super) const OPERATION_TRANSPOSE: i32 = 1;

/// `CUBLAS_COMPUTE_32F`: multiplication and accumulation in f32; f32 inputs are not rounded to TF32.
pub(super) const COMPUTE_F32: u32 = 68;
/// `CUBLASLT_EPILOGUE_BIAS`. Our A is cuBLASLt's B, as `descriptors.rs` explains, so a bias of columns is one of rows there.
pub(super) const EPILOGUE_BIAS: u32 = 4;
/// `CUDA_R_32F`, the type of alpha and beta.
pub(super) const TYPE_F32: u32 = 0;

/// `cublasLtMatmulDescAttributes_t`.
pub(super) mod description {
    pub(crate) const TRANSPOSE_A: u32 = 3;
    pub(crate) const TRANSPOSE_B: u32 = 4;
    pub(crate) const EPILOGUE: u32 = 7;
    pub(crate) const BIAS_POINTER: u32 = 8;
    pub(crate) const A_SCALE_POINTER: u32 = 17;
    pub(crate) const B_SCALE_POINTER: u32 = 18;
    pub(crate) const FAST_ACCUMULATION: u32 = 25;
    pub(crate) const A_SCALE_MODE: u32 = 31;
    pub(crate) const B_SCALE_MODE: u32 = 32;
}

/// `cublasLtMatmulPreferenceAttributes_t`.
pub(super) mod preference {
    pub(crate) const WORKSPACE_BYTES: u32 = 1;
    pub(crate) const REDUCTION_SCHEMES: u32 = 3;
    pub(crate) const ALIGNMENT_A: u32 = 5;
    pub(crate) const ALIGNMENT_B: u32 = 6;
    pub(crate) const ALIGNMENT_C: u32 = 7;
    pub(crate) const ALIGNMENT_D: u32 = 8;
}

/// `CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE`: partial sums of a split reduction are stored in f32, and added in a separate step.
pub(super) const REDUCTION_IN_COMPUTE_TYPE: u32 = 2;
/// `CUBLASLT_REDUCTION_SCHEME_MASK`: also in the output's type, in the output itself (`INPLACE`) or next to it.
pub(super) const REDUCTION_ANY: u32 = 7;

/// `cublasLtMatmulAlgo_t`: 64 bytes that only the library reads.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Algorithm {
    pub(super) data: [u64; 8],
}

/// `cublasLtMatmulHeuristicResult_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct HeuristicResult {
    pub(super) algorithm: Algorithm,
    pub(super) workspace_bytes: usize,
    pub(super) state: Status,
    _waves: f32,
    _reserved: [c_int; 4],
}

impl HeuristicResult {
    /// Room for the library to write a result into.
    pub(super) const EMPTY: Self = Self {
        algorithm: Algorithm { data: [0; 8] },
        workspace_bytes: 0,
        state: Status::MAX,
        _waves: 0.0,
        _reserved: [0; 4],
    };
}

/// Sets one attribute of a descriptor or a preference: object, attribute, value, its bytes.
pub(super) type SetAttribute = unsafe extern "C" fn(Opaque, u32, *const c_void, usize) -> Status;
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
    *const Algorithm, // kernel and its configuration
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
    c_int,  // how many are requested
    *mut HeuristicResult,
    *mut c_int, // how many were written
) -> Status;

symbols! {
    /// Functions of cublasLt.h.
    pub(super) struct Symbols of CUBLASLT {
        pub(super) create: unsafe extern "C" fn(*mut Opaque) -> Status = "cublasLtCreate",
        pub(super) destroy: Destroy = "cublasLtDestroy",
        pub(super) description_create: unsafe extern "C" fn(*mut Opaque, u32, u32) -> Status = "cublasLtMatmulDescCreate",
        pub(super) description_destroy: Destroy = "cublasLtMatmulDescDestroy",
        pub(super) description_set: SetAttribute = "cublasLtMatmulDescSetAttribute",
        pub(super) layout_create: unsafe extern "C" fn(*mut Opaque, u32, u64, u64, i64) -> Status = "cublasLtMatrixLayoutCreate",
        pub(super) layout_destroy: Destroy = "cublasLtMatrixLayoutDestroy",
        pub(super) preference_create: unsafe extern "C" fn(*mut Opaque) -> Status = "cublasLtMatmulPreferenceCreate",
        pub(super) preference_destroy: Destroy = "cublasLtMatmulPreferenceDestroy",
        pub(super) preference_set: SetAttribute = "cublasLtMatmulPreferenceSetAttribute",
        pub(super) heuristic: Heuristic = "cublasLtMatmulAlgoGetHeuristic",
        pub(super) matmul: Matmul = "cublasLtMatmul",
        pub(super) version: unsafe extern "C" fn() -> usize = "cublasLtGetVersion",
        status_name: unsafe extern "C" fn(Status) -> *const c_char = "cublasLtGetStatusName",
    }
    optional {}
}

impl Symbols {
    /// Opens the library that this driver can run, once per process.
    pub(super) fn load(driver: &Driver) -> Result<&'static Self, CudaError> {
        static SYMBOLS: OnceLock<Symbols> = OnceLock::new();
        if let Some(symbols) = SYMBOLS.get() {
            return Ok(symbols);
        }
        let cublaslt = &Libraries::find(driver)?.cublaslt;
        let symbols = Self::look_up(cublaslt)?;
        Ok(SYMBOLS.get_or_init(|| symbols))
    }

    /// Loads any version of the library, without a driver.
    #[cfg(test)]
    pub(super) fn load_alone() -> Result<&'static Self, CudaError> {
        let cublaslt = Libraries::open_alone(&crate::library::CUBLASLT)?;
        Ok(Box::leak(Box::new(Self::look_up(&cublaslt)?)))
    }

    /// Turns a status into a result; `requested` is only called for an error.
    pub(super) fn checked(
        &self,
        call: &'static str,
        status: Status,
        requested: impl FnOnce() -> String,
    ) -> Result<(), CudaError> {
        if status == 0 {
            return Ok(());
        }
        Err(self.error(call, status, requested()))
    }

    /// Returns the error of a call that returned `status`.
    pub(super) fn error(&self, call: &'static str, status: Status, requested: String) -> CudaError {
        CudaError::BlasLt { call, code: status, name: self.name_of(status), requested }
    }

    fn name_of(&self, status: Status) -> String {
        // SAFETY: takes any integer and returns a constant string that lives as long as the library.
        let name = unsafe { (self.status_name)(status) };
        if name.is_null() {
            return "a status unknown to this library".to_string();
        }
        // SAFETY: not null, so a constant string that ends in a zero.
        unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_have_the_size_that_the_header_declares() {
        assert_eq!(size_of::<Algorithm>(), 64);
        assert_eq!(size_of::<HeuristicResult>(), 64 + 8 + 4 + 4 + 16);
    }

    /// Needs cuBLASLt but no GPU; returns early without cuBLASLt.
    #[test]
    fn an_error_names_its_status_and_the_requested_gemm() {
        let Ok(symbols) = Symbols::load_alone() else { return };
        assert_eq!(symbols.checked("cublasLtMatmul", 0, || unreachable!("only for errors")), Ok(()));
        let error = symbols.checked("cublasLtMatmul", 15, || "f32 [2, 3]".to_string()).expect_err("15 is an error");
        let message = error.to_string();
        for part in ["cublasLtMatmul", "CUBLAS_STATUS_NOT_SUPPORTED", "f32 [2, 3]"] {
            assert!(message.contains(part), "{part} is missing in: {message}");
        }
    }
}
