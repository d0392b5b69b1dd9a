//! Host memory that a tensor's bytes are read into before they are uploaded: plain, or what the device copies from fastest.
//!
//! Trade-off: the memory's own type is behind a trait object, so each access to the bytes is a virtual call; take a slice once.

use std::fmt;
use std::ops::{Deref, DerefMut};

/// Bytes on the host; see [`crate::MemoryOps::host_buffer`].
pub struct HostBuffer {
    bytes: Box<dyn Memory>,
}

/// What a buffer is made of: bytes, and a way back to the backend's own type.
pub(crate) trait Memory: DerefMut<Target = [u8]> + Send {
    fn into_any(self: Box<Self>) -> Box<dyn std::any::Any + Send>;
}

impl Memory for Vec<u8> {
    fn into_any(self: Box<Self>) -> Box<dyn std::any::Any + Send> {
        self
    }
}

impl HostBuffer {
    pub(crate) fn new(bytes: impl Memory + 'static) -> Self {
        Self { bytes: Box::new(bytes) }
    }

    /// The memory itself, if it is of this type.
    pub(crate) fn into_memory<T: std::any::Any>(self) -> Option<T> {
        self.bytes.into_any().downcast().ok().map(|memory| *memory)
    }
}

impl Deref for HostBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}

impl DerefMut for HostBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.bytes
    }
}

impl fmt::Debug for HostBuffer {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "HostBuffer({} bytes)", self.len())
    }
}
