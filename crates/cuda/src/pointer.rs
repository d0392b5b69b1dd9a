//! Addresses in device memory, with the type of the elements there.
//!
//! The type is only a label that helps to keep arguments in order. The host never reads or writes through a pointer.
//!
//! Trade-off: no lifetimes. An address is dereferenced only by launches and copies, which are `unsafe` for that reason.

use std::fmt;
use std::marker::PhantomData;

/// The address of elements of type `T` in device memory, or null.
#[repr(transparent)]
pub struct DevicePointer<T> {
    address: u64,
    // A function pointer, not `*const T`: an address may be sent to any thread, whatever `T` is.
    element: PhantomData<fn() -> T>,
}

impl<T> DevicePointer<T> {
    /// Creates a pointer to this address. It need not be valid until it is given to the device.
    pub const fn from_address(address: u64) -> Self {
        Self { address, element: PhantomData }
    }

    /// Returns the address: a `CUdeviceptr`.
    pub const fn address(self) -> u64 {
        self.address
    }
}

// Not derived, since derived implementations would require the same traits of `T`.
impl<T> Clone for DevicePointer<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for DevicePointer<T> {}

impl<T> PartialEq for DevicePointer<T> {
    fn eq(&self, other: &Self) -> bool {
        self.address == other.address
    }
}

impl<T> Eq for DevicePointer<T> {}

impl<T> fmt::Debug for DevicePointer<T> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{:#x}", self.address)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_pointer_can_be_sent_to_a_thread() {
        fn check<T: Send + Sync>(_: T) {}
        check(DevicePointer::<std::rc::Rc<u8>>::from_address(0));
        assert_eq!(size_of::<DevicePointer<[u8; 100]>>(), 8, "the size of a CUdeviceptr");
    }
}
