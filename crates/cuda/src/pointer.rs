//! Addresses in device memory, with the type of what lies there.
//!
//! A type here is a label that keeps arguments in order, and the size that [`DevicePointer::offset`] counts in; nothing is read
//! or written through it on the host. Elements that Rust has no type for are labelled with a crate's, such as `half::bf16`.
//! What it gives up: no lifetime. Launching is where an address becomes an access, and so where `unsafe` asks for a promise.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::marker::PhantomData;

/// The address of elements of type `T` in device memory, or null.
#[repr(transparent)]
pub struct DevicePointer<T> {
    address: u64,
    // A function pointer and not `*const T`: an address may go to any thread, whatever `T` is.
    element: PhantomData<fn() -> T>,
}

impl<T> DevicePointer<T> {
    /// A pointer to this address, whatever is there: that it is valid is promised where it is given to the device.
    pub const fn from_address(address: u64) -> Self {
        Self { address, element: PhantomData }
    }

    /// What kernels take for "none".
    pub const fn null() -> Self {
        Self { address: 0, element: PhantomData }
    }

    /// Whether it points nowhere.
    pub const fn is_null(self) -> bool {
        self.address == 0
    }

    /// The address: a `CUdeviceptr`.
    pub const fn address(self) -> u64 {
        self.address
    }

    /// The same address, of elements of another type.
    pub const fn cast<U>(self) -> DevicePointer<U> {
        DevicePointer { address: self.address, element: PhantomData }
    }

    /// The address of the element that comes `elements` later.
    ///
    /// # Panics
    /// When that is beyond 64 bits, where no memory can be.
    pub fn offset(self, elements: usize) -> Self {
        let bytes = elements.checked_mul(size_of::<T>()).expect("an offset in device memory fits 64 bits");
        self.byte_offset(bytes)
    }

    /// The address that comes `bytes` later.
    ///
    /// # Panics
    /// When that is beyond 64 bits, where no memory can be.
    pub fn byte_offset(self, bytes: usize) -> Self {
        let address = self.address.checked_add(bytes as u64).expect("an address in device memory fits 64 bits");
        Self { address, element: PhantomData }
    }
}

// Written out, since derived ones would ask the same of `T`.
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

impl<T> Hash for DevicePointer<T> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.address.hash(state);
    }
}

impl<T> fmt::Debug for DevicePointer<T> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{:#x}", self.address)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offsets_count_elements_of_the_pointers_type() {
        assert_eq!(DevicePointer::<u16>::from_address(4096).offset(3).address(), 4102);
        assert_eq!(DevicePointer::<f32>::from_address(4096).offset(3).address(), 4108);
        assert_eq!(DevicePointer::<f32>::from_address(4096).byte_offset(3).address(), 4099);
        assert_eq!(DevicePointer::<f32>::from_address(4096).cast::<u8>().offset(3).address(), 4099);
    }

    #[test]
    fn null_is_null_and_nothing_else_is() {
        assert!(DevicePointer::<f32>::null().is_null());
        assert!(!DevicePointer::<f32>::from_address(1).is_null());
    }

    #[test]
    #[should_panic(expected = "fits 64 bits")]
    fn an_offset_beyond_all_memory_is_refused() {
        DevicePointer::<f32>::from_address(u64::MAX - 4).offset(2);
    }

    #[test]
    fn a_pointer_goes_to_any_thread_whatever_it_points_to() {
        fn check<T: Send + Sync>(_: T) {}
        check(DevicePointer::<std::rc::Rc<u8>>::null());
        assert_eq!(size_of::<DevicePointer<[u8; 100]>>(), 8, "it stands for a CUdeviceptr");
    }
}
