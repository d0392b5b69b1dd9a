//! The functions and constants of nccl.h that are used here, loaded from the NCCL of the machine.
//!
//! Constants are integers, not Rust enums: a newer library may return a value that an enum does not list.
//! Trade-off: the compiler does not check declarations and constants against the header (NCCL 2.18 to 2.31 have these).

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;

use super::NcclId;
use crate::driver::Driver;
use crate::error::CudaError;
use crate::libraries::Libraries;
use crate::symbols::symbols;

/// `ncclResult_t`.
pub(super) type Status = c_int;
/// `ncclComm_t` and `cudaStream_t`: pointers to opaque structures.
pub(super) type Opaque = *mut c_void;
type Data = *mut c_void;

/// `ncclInProgress`.
pub(super) const IN_PROGRESS: Status = 7;
/// `ncclUint8` of `ncclDataType_t`.
pub(super) const UINT8: c_int = 1;
/// `ncclFloat32` of `ncclDataType_t`.
pub(super) const FLOAT32: c_int = 7;
/// `ncclBfloat16` of `ncclDataType_t`.
pub(super) const BFLOAT16: c_int = 9;
/// `ncclSum` of `ncclRedOp_t`.
pub(super) const SUM: c_int = 0;

/// Data to send and to receive, their number, type and operation, communicator, stream.
type Reduce = unsafe extern "C" fn(Data, Data, usize, c_int, c_int, Opaque, Opaque) -> Status;
/// The same with the root after the operation.
type ReduceTo = unsafe extern "C" fn(Data, Data, usize, c_int, c_int, c_int, Opaque, Opaque) -> Status;

symbols! {
    /// Functions of nccl.h; `broadcast` has the root where the reductions have their operation. `last_error` came with NCCL 2.13.
    pub(super) struct Symbols of NCCL {
        pub(super) get_version: unsafe extern "C" fn(*mut c_int) -> Status = "ncclGetVersion",
        pub(super) get_unique_id: unsafe extern "C" fn(*mut NcclId) -> Status = "ncclGetUniqueId",
        pub(super) comm_init_rank: unsafe extern "C" fn(*mut Opaque, c_int, NcclId, c_int) -> Status = "ncclCommInitRank",
        pub(super) comm_abort: unsafe extern "C" fn(Opaque) -> Status = "ncclCommAbort",
        pub(super) get_async_error: unsafe extern "C" fn(Opaque, *mut Status) -> Status = "ncclCommGetAsyncError",
        pub(super) group_start: unsafe extern "C" fn() -> Status = "ncclGroupStart",
        pub(super) group_end: unsafe extern "C" fn() -> Status = "ncclGroupEnd",
        pub(super) all_reduce: Reduce = "ncclAllReduce",
        pub(super) reduce: ReduceTo = "ncclReduce",
        pub(super) broadcast: Reduce = "ncclBroadcast",
        error_string: unsafe extern "C" fn(Status) -> *const c_char = "ncclGetErrorString",
    }
    optional { last_error: unsafe extern "C" fn(Opaque) -> *const c_char = "ncclGetLastError", }
}

impl Symbols {
    /// Opens the library, once per process.
    pub(super) fn load() -> Result<&'static Self, CudaError> {
        static SYMBOLS: OnceLock<Symbols> = OnceLock::new();
        if let Some(symbols) = SYMBOLS.get() {
            return Ok(symbols);
        }
        let symbols = Self::look_up(&Libraries::find(&Driver::load()?)?.nccl()?)?;
        Ok(SYMBOLS.get_or_init(|| symbols))
    }

    pub(super) fn checked(&self, call: &'static str, status: Status) -> Result<(), CudaError> {
        match status {
            0 | IN_PROGRESS => Ok(()),
            failed => Err(self.error(call, failed)),
        }
    }

    /// Returns the error of a call that returned `status`.
    pub(super) fn error(&self, call: &'static str, status: Status) -> CudaError {
        // SAFETY: takes any integer and returns a constant string that lives as long as the library.
        let name = text(unsafe { (self.error_string)(status) });
        // SAFETY: the communicator is not used by the library and may be null; the string lives until the next error of this thread.
        let detail = self.last_error.map(|last_error| text(unsafe { last_error(std::ptr::null_mut()) }));
        let detail = detail.filter(|detail| !detail.is_empty()).unwrap_or_else(|| "no details".to_owned());
        CudaError::Nccl { call, status, name, detail }
    }
}

/// Converts a string of the library; returns an empty one for null.
fn text(string: *const c_char) -> String {
    if string.is_null() {
        return String::new();
    }
    // SAFETY: not null, so a string of the library that ends in a zero, copied before anything else is called.
    unsafe { CStr::from_ptr(string) }.to_string_lossy().trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_has_the_size_that_the_header_declares() {
        assert_eq!((size_of::<NcclId>(), align_of::<NcclId>()), (128, 1));
    }
}
