//! One product as the library knows it, and the algorithms that it proposes for it.

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

use super::column_major::{ColumnMajor, Key};
use super::descriptors::{Object, asked, describe, lay_out, prefer};
use super::matmul::{Epilogue, Matmul, Scaling};
use super::pointers::Pointers;
use super::symbols::{HeuristicResult, Opaque, Status, Symbols, description};
use super::tune::Tuning;
use crate::CudaError;

/// How many algorithms the library is asked for.
const CANDIDATES: usize = 8;
/// `CUBLAS_STATUS_NOT_SUPPORTED`.
const NOT_SUPPORTED: Status = 15;

/// A product as the library knows it: descriptors, and algorithms in the order in which the library believes in them.
pub struct Plan {
    symbols: &'static Symbols,
    matmul: Matmul,
    /// Locked while a call is submitted, since the addresses of scales and bias are attributes of the descriptor.
    description: Mutex<Object>,
    first: Object,
    second: Object,
    output: Object,
    candidates: Vec<HeuristicResult>,
    chosen: AtomicUsize,
    pub(super) tuning: OnceLock<Tuning>,
}

/// The memory that a call may use for itself.
#[derive(Clone, Copy)]
pub(super) struct Scratch {
    pub(super) address: u64,
    pub(super) bytes: usize,
}

/// What differs from one call of a plan to the next.
#[derive(Clone, Copy)]
pub(super) struct Call {
    pub(super) handle: Opaque,
    pub(super) stream: *mut c_void,
    pub(super) scratch: Scratch,
    pub(super) alpha: f32,
    pub(super) beta: f32,
    pub(super) pointers: Pointers,
}

impl Plan {
    /// Describes the product to the library and asks for algorithms.
    ///
    /// # Safety
    /// `handle` is alive and its context is current.
    pub(super) unsafe fn new(
        symbols: &'static Symbols,
        handle: Opaque,
        key: &Key,
        scratch: Scratch,
    ) -> Result<Self, CudaError> {
        let mapped = ColumnMajor::of(&key.matmul);
        let description = describe(symbols, key, &mapped, scratch)?;
        let first = lay_out(symbols, &key.matmul, mapped.first)?;
        let second = lay_out(symbols, &key.matmul, mapped.second)?;
        let output = lay_out(symbols, &key.matmul, mapped.output)?;
        let wanted = prefer(symbols, key, scratch)?;

        let mut results = [HeuristicResult::EMPTY; CANDIDATES];
        let mut written: c_int = 0;
        // SAFETY: the handle is the caller's promise, the other objects were made above, and there is room for as many
        // results as are asked for.
        let status = unsafe {
            (symbols.heuristic)(
                handle,
                description.handle,
                first.handle,
                second.handle,
                output.handle,
                output.handle,
                wanted.handle,
                CANDIDATES as c_int,
                results.as_mut_ptr(),
                &mut written,
            )
        };
        let written = usize::try_from(written).unwrap_or(0).min(CANDIDATES);
        let passed = |result: &&HeuristicResult| result.state == 0 && result.workspace_bytes <= scratch.bytes;
        let candidates: Vec<HeuristicResult> = results[..written].iter().filter(passed).copied().collect();
        // A status of success with no result left would be a product that cannot be computed all the same.
        let status = if status == 0 && candidates.is_empty() { NOT_SUPPORTED } else { status };
        symbols.checked("cublasLtMatmulAlgoGetHeuristic", status, || asked(&key.matmul))?;
        Ok(Self {
            symbols,
            matmul: key.matmul,
            description: Mutex::new(description),
            first,
            second,
            output,
            candidates,
            chosen: AtomicUsize::new(0),
            tuning: OnceLock::new(),
        })
    }

    /// The product.
    pub fn matmul(&self) -> &Matmul {
        &self.matmul
    }

    /// How many algorithms the library proposed, at least 1.
    pub fn candidates(&self) -> usize {
        self.candidates.len()
    }

    /// Which of them is used, 0 being the library's own first choice.
    pub fn chosen(&self) -> usize {
        self.chosen.load(Ordering::Relaxed)
    }

    /// Bytes of workspace that the chosen algorithm uses.
    pub fn workspace_bytes(&self) -> usize {
        self.candidates[self.chosen()].workspace_bytes
    }

    /// How many times over the chosen algorithm's tiles fill the device; a fraction far below the next whole number leaves
    /// multiprocessors idle at the end.
    pub fn waves(&self) -> f32 {
        self.candidates[self.chosen()].waves
    }

    /// What [`BlasLt::tune`](super::BlasLt::tune) measured, where it has.
    pub fn tuning(&self) -> Option<Tuning> {
        self.tuning.get().copied()
    }

    pub(super) fn choose(&self, candidate: usize) {
        assert!(candidate < self.candidates.len(), "candidate {candidate} of {}", self.candidates.len());
        self.chosen.store(candidate, Ordering::Relaxed);
    }

    /// Submits the product with one of the candidates.
    ///
    /// # Safety
    /// As [`BlasLt::run`](super::BlasLt::run); `call.handle`, stream and scratch are alive, and their context is current.
    pub(super) unsafe fn submit(&self, candidate: usize, call: &Call) -> Result<(), CudaError> {
        // A panic while the lock was held leaves at worst addresses of another call, which are set anew below.
        let description = self.description.lock().unwrap_or_else(PoisonError::into_inner);
        let p = &call.pointers;
        self.set_addresses(&description, p)?;
        // SAFETY: descriptor and layouts were made for this product, and the algorithm was proposed for them and for addresses
        // so aligned; sizes and life of what the addresses point to are the caller's promise. Alpha and beta are read before
        // the call returns, since the pointer mode is the default, the host's.
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
                &self.candidates[candidate].algorithm,
                call.scratch.address as *mut c_void,
                call.scratch.bytes,
                call.stream,
            )
        };
        self.symbols.checked("cublasLtMatmul", status, || asked(&self.matmul))
    }

    /// Tells the library where the bias and the scales of this call are.
    fn set_addresses(&self, description: &Object, pointers: &Pointers) -> Result<(), CudaError> {
        let set = |attribute, address: u64| description.set_description(self.symbols, &self.matmul, attribute, address);
        if self.matmul.epilogue != Epilogue::None {
            set(description::BIAS_POINTER, pointers.bias)?;
        }
        if self.matmul.scaling != Scaling::None {
            set(description::A_SCALE_POINTER, pointers.b_scale)?;
            set(description::B_SCALE_POINTER, pointers.a_scale)?;
        }
        Ok(())
    }
}
