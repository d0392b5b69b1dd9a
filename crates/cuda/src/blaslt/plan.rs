//! One GEMM in the library's terms, with the algorithms that the library proposes. `tune.rs` chooses among them.
//!
//! Trade-off: bias and scale addresses are attributes of the shared descriptor, so calls of one plan hold a lock while they
//! are submitted.

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::{Mutex, PoisonError};

use super::descriptors::{ColumnMajor, Key, Object, Workspace, describe, lay_out, prefer, requested};
use super::matmul::{Matmul, Scaling};
use super::pointers::Pointers;
use super::symbols::{Algorithm, HeuristicResult, Opaque, Status, Symbols, description};
use crate::error::CudaError;
use crate::stream::Stream;

/// The number of algorithms to request: the first ones may need more workspace than there is, and the first is not always the fastest.
const CANDIDATES: usize = 16;
/// `CUBLAS_STATUS_NOT_SUPPORTED`.
const NOT_SUPPORTED: Status = 15;

/// The descriptors of a GEMM.
pub(super) struct Plan {
    symbols: &'static Symbols,
    pub(super) matmul: Matmul,
    /// Locked while a call is submitted, since the addresses of scales and bias are attributes of the descriptor.
    description: Mutex<Object>,
    first: Object,
    second: Object,
    output: Object,
}

/// The values that differ between calls of a plan.
#[derive(Clone, Copy)]
pub(super) struct Call {
    pub(super) handle: Opaque,
    pub(super) workspace: Workspace,
    pub(super) alpha: f32,
    pub(super) beta: f32,
    pub(super) pointers: Pointers,
}

impl Plan {
    /// Describes the GEMM to the library and requests algorithms, of which `in_order` allows fewer ([`BlasLt::add_in_order`](crate::BlasLt::add_in_order)):
    /// returns at least one, in the library's order.
    ///
    /// # Safety
    /// `handle` must be alive and its context current.
    pub(super) unsafe fn new(
        symbols: &'static Symbols,
        handle: Opaque,
        key: &Key,
        workspace: Workspace,
        in_order: bool,
    ) -> Result<(Self, Vec<Algorithm>), CudaError> {
        let mapped = ColumnMajor::of(&key.matmul);
        let description = describe(symbols, key, &mapped, workspace)?;
        let first = lay_out(symbols, &key.matmul, mapped.first)?;
        let second = lay_out(symbols, &key.matmul, mapped.second)?;
        let output = lay_out(symbols, &key.matmul, mapped.output)?;
        let preference = prefer(symbols, key, workspace, in_order)?;

        let mut results = [HeuristicResult::EMPTY; CANDIDATES];
        let mut written: c_int = 0;
        // SAFETY: the handle is the caller's promise, the other objects were created above, and there is room for as many
        // results as are requested.
        let status = unsafe {
            (symbols.heuristic)(
                handle,
                description.handle,
                first.handle,
                second.handle,
                output.handle,
                output.handle,
                preference.handle,
                CANDIDATES as c_int,
                results.as_mut_ptr(),
                &mut written,
            )
        };
        symbols.checked("cublasLtMatmulAlgoGetHeuristic", status, || requested(&key.matmul))?;
        let written = usize::try_from(written).unwrap_or(0).min(CANDIDATES);
        let usable = |result: &&HeuristicResult| result.state == 0 && result.workspace_bytes <= workspace.bytes;
        let proposed: Vec<_> = results[..written].iter().filter(usable).map(|result| result.algorithm).collect();
        if proposed.is_empty() {
            // The library can return success with no usable result: the GEMM cannot be computed then either.
            return Err(symbols.error("cublasLtMatmulAlgoGetHeuristic", NOT_SUPPORTED, requested(&key.matmul)));
        }
        let description = Mutex::new(description);
        Ok((Self { symbols, matmul: key.matmul, description, first, second, output }, proposed))
    }

    /// Submits the GEMM with one of the algorithms that were proposed for it.
    ///
    /// # Safety
    /// The requirements of [`BlasLt::prepare`](crate::BlasLt::prepare) must hold; the handle and workspace of `call` must be
    /// alive, with their context current. The algorithm must have been proposed for this plan.
    pub(super) unsafe fn submit(&self, algorithm: &Algorithm, call: &Call, stream: &Stream) -> Result<(), CudaError> {
        // After a panic of another call, the addresses in the descriptor are stale; they are set again below.
        let description = self.description.lock().unwrap_or_else(PoisonError::into_inner);
        let p = &call.pointers;
        self.set_addresses(&description, p)?;
        // SAFETY: descriptor and layouts were created for this GEMM, and the algorithm was proposed for them and for this
        // alignment. The caller guarantees the sizes and lifetimes of what the addresses point to. Alpha and beta are read before the
        // call returns, since the pointer mode is the default (host).
        let status = unsafe {
            (self.symbols.matmul)(
                call.handle,
                description.handle,
                ptr::from_ref(&call.alpha).cast(),
                p.b as *const c_void,
                self.first.handle,
                p.a as *const c_void,
                self.second.handle,
                ptr::from_ref(&call.beta).cast(),
                p.c as *const c_void,
                self.output.handle,
                p.d as *mut c_void,
                self.output.handle,
                algorithm,
                call.workspace.address as *mut c_void,
                call.workspace.bytes,
                stream.handle().cast(),
            )
        };
        self.symbols.checked("cublasLtMatmul", status, || requested(&self.matmul))
    }

    fn set_addresses(&self, description: &Object, pointers: &Pointers) -> Result<(), CudaError> {
        let set = |attribute, address: u64| description.set_description(self.symbols, &self.matmul, attribute, address);
        if self.matmul.bias {
            set(description::BIAS_POINTER, pointers.bias)?;
        }
        if self.matmul.scaling != Scaling::None {
            // Our A is the library's B and vice versa.
            set(description::A_SCALE_POINTER, pointers.b_scale)?;
            set(description::B_SCALE_POINTER, pointers.a_scale)?;
        }
        Ok(())
    }
}
