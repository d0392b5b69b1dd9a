//! Backend descriptors: cuDNN's attribute lists, which describe tensors, operations, graphs and plans alike.

use std::ffi::c_void;
use std::ptr;

use super::sys::{Attribute, Data, Kind, Raw, Symbols, Type};
use crate::error::CudaError;

/// An owned descriptor. Errors use its label, such as `tensor K` or `operation scores`.
pub(super) struct Descriptor {
    raw: Raw,
    symbols: Symbols,
    label: String,
}

// SAFETY: a descriptor is not tied to a thread. Only the thread that builds it writes it; a finished one is only read, and
// executed only under the lock of the handle.
unsafe impl Send for Descriptor {}
// SAFETY: as above; after `finish` nothing changes it.
unsafe impl Sync for Descriptor {}

impl Descriptor {
    pub(super) fn new(symbols: Symbols, kind: Kind, label: impl Into<String>) -> Result<Self, CudaError> {
        let label = label.into();
        let mut raw = ptr::null_mut();
        // SAFETY: the kind is one of cuDNN's, and the pointer is valid for a write.
        let status = unsafe { (symbols.create_descriptor)(kind as i32, &mut raw) };
        symbols.check(status, || format!("creating a descriptor ({kind:?}) for {label}"))?;
        Ok(Self { raw, symbols, label })
    }

    /// Finalizes the descriptor; cuDNN checks its attributes here.
    pub(super) fn finish(self) -> Result<Self, CudaError> {
        // SAFETY: the descriptor is alive.
        let status = unsafe { (self.symbols.finalize)(self.raw) };
        self.symbols.check(status, || format!("finalizing {}", self.label))?;
        Ok(self)
    }

    pub(super) fn integers(&mut self, attribute: Attribute, values: &[i64]) -> Result<&mut Self, CudaError> {
        // SAFETY: 64-bit integers, as the attribute type requires.
        unsafe { self.set(attribute, Type::Int64, values.len(), values.as_ptr().cast()) }
    }

    pub(super) fn flag(&mut self, attribute: Attribute) -> Result<&mut Self, CudaError> {
        let yes = true;
        // SAFETY: one C++ bool, as the attribute type requires.
        unsafe { self.set(attribute, Type::Boolean, 1, (&raw const yes).cast()) }
    }

    pub(super) fn data_type(&mut self, attribute: Attribute, value: Data) -> Result<&mut Self, CudaError> {
        self.choice(attribute, Type::Element, value as i32)
    }

    /// Sets one value of the enum `of`.
    pub(super) fn choice(&mut self, attribute: Attribute, of: Type, value: i32) -> Result<&mut Self, CudaError> {
        // SAFETY: one C enum, which is an int, as the attribute type requires.
        unsafe { self.set(attribute, of, 1, (&raw const value).cast()) }
    }

    pub(super) fn descriptor(&mut self, attribute: Attribute, value: &Self) -> Result<&mut Self, CudaError> {
        // SAFETY: one live descriptor, as the attribute type requires.
        unsafe { self.set(attribute, Type::Descriptor, 1, (&raw const value.raw).cast()) }
    }

    pub(super) fn descriptors(&mut self, attribute: Attribute, values: &[Self]) -> Result<&mut Self, CudaError> {
        let raw: Vec<Raw> = values.iter().map(|value| value.raw).collect();
        // SAFETY: live descriptors, as the attribute type requires; cuDNN copies the array.
        unsafe { self.set(attribute, Type::Descriptor, raw.len(), raw.as_ptr().cast()) }
    }

    pub(super) fn pointers(&mut self, attribute: Attribute, values: &[Raw]) -> Result<&mut Self, CudaError> {
        // SAFETY: pointers, as the attribute type requires; cuDNN copies the array and does not follow them here.
        unsafe { self.set(attribute, Type::Pointer, values.len(), values.as_ptr().cast()) }
    }

    /// # Safety
    /// `handle` must be a live cuDNN handle.
    pub(super) unsafe fn handle(&mut self, attribute: Attribute, handle: Raw) -> Result<&mut Self, CudaError> {
        // SAFETY: one live handle, as the attribute type requires.
        unsafe { self.set(attribute, Type::Handle, 1, (&raw const handle).cast()) }
    }

    /// # Safety
    /// `values` must point to `count` values of the C type that `of` denotes.
    unsafe fn set(
        &mut self,
        attribute: Attribute,
        of: Type,
        count: usize,
        values: *const c_void,
    ) -> Result<&mut Self, CudaError> {
        // SAFETY: the descriptor is alive; the rest is the caller's promise.
        let status =
            unsafe { (self.symbols.set_attribute)(self.raw, attribute as i32, of as i32, count as i64, values) };
        self.symbols.check(status, || format!("setting {attribute:?} of {}", self.label))?;
        Ok(self)
    }

    pub(super) fn integer(&self, attribute: Attribute) -> Result<i64, CudaError> {
        let (mut count, mut value) = (0, 0_i64);
        let (name, of) = (attribute as i32, Type::Int64 as i32);
        // SAFETY: both pointers are valid for a write of a 64-bit integer.
        let status =
            unsafe { (self.symbols.get_attribute)(self.raw, name, of, 1, &mut count, (&raw mut value).cast()) };
        self.symbols.check(status, || format!("reading {attribute:?} of {}", self.label))?;
        Ok(value)
    }

    /// Reads a list of descriptors of `kind`. cuDNN fills in descriptors that the caller has created.
    pub(super) fn list(&self, attribute: Attribute, kind: Kind) -> Result<Vec<Self>, CudaError> {
        let (name, of) = (attribute as i32, Type::Descriptor as i32);
        let reading = || format!("reading {attribute:?} of {}", self.label);
        let mut count = 0_i64;
        // SAFETY: with room for no element, cuDNN only writes the number of elements.
        let status = unsafe { (self.symbols.get_attribute)(self.raw, name, of, 0, &mut count, ptr::null_mut()) };
        self.symbols.check(status, reading)?;

        let made =
            (0..count).map(|index| Self::new(self.symbols, kind, format!("candidate {index} of {}", self.label)));
        let mut made = made.collect::<Result<Vec<_>, _>>()?;
        let mut raw: Vec<Raw> = made.iter().map(|descriptor| descriptor.raw).collect();
        let mut filled = 0_i64;
        // SAFETY: the array has `count` live descriptors of the kind that the attribute has.
        let status =
            unsafe { (self.symbols.get_attribute)(self.raw, name, of, count, &mut filled, raw.as_mut_ptr().cast()) };
        self.symbols.check(status, reading)?;
        made.truncate(usize::try_from(filled).unwrap_or(0));
        Ok(made)
    }

    /// Runs this execution plan with a variant pack.
    ///
    /// # Safety
    /// `handle` must be live and used by no other thread. Every pointer of the pack must be valid for the plan's tensor
    /// of that number until the stream has done the work.
    pub(super) unsafe fn execute(&self, handle: Raw, pack: &Self) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        let status = unsafe { (self.symbols.execute)(handle, self.raw, pack.raw) };
        self.symbols.check(status, || format!("executing {}", self.label))
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: created by cudnnBackendCreateDescriptor and destroyed once. The status is ignored: nothing could be done.
        let _ = unsafe { (self.symbols.destroy_descriptor)(self.raw) };
    }
}
