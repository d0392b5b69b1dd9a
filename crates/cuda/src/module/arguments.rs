//! The values that a kernel is launched with.
//!
//! The driver wants the address of each value, so they are kept here one after another: within this value itself up to
//! [`INLINE`] words of 16 bytes, which is all that a launch usually needs, and on the heap beyond that.

use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::ptr;

use crate::DevicePointer;

/// Values are laid out in words of this size, which no value of a kernel is aligned wider than.
type Word = MaybeUninit<u128>;
/// Words that need no heap.
const INLINE: usize = 32;
/// Most arguments of a launch.
const MOST: usize = 40;

/// Arguments of a launch, in the order in which the kernel declares its parameters.
///
/// Each call adds one, of exactly the type that the kernel declares: `i32` for `int`, `i64` for `long long`, an address for any
/// pointer. The kernel sees the values as they are when [`crate::Kernel::launch`] is called.
#[derive(Clone)]
pub struct Arguments {
    inline: [Word; INLINE],
    /// All of the words, as soon as they are too many.
    spilled: Vec<Word>,
    words: usize,
    /// First word and bytes of each argument.
    places: [(u32, u32); MOST],
    count: usize,
}

impl Default for Arguments {
    fn default() -> Self {
        Self::new()
    }
}

impl Arguments {
    /// None yet.
    #[inline]
    pub const fn new() -> Self {
        Self { inline: [Word::uninit(); INLINE], spilled: Vec::new(), words: 0, places: [(0, 0); MOST], count: 0 }
    }

    /// Adds an address.
    #[inline]
    #[must_use]
    pub fn pointer<T>(self, pointer: DevicePointer<T>) -> Self {
        self.value(&pointer.address())
    }

    /// Adds an `int`.
    #[inline]
    #[must_use]
    pub fn i32(self, value: i32) -> Self {
        self.value(&value)
    }

    /// Adds a `long long`.
    #[inline]
    #[must_use]
    pub fn i64(self, value: i64) -> Self {
        self.value(&value)
    }

    /// Adds an `unsigned int`.
    #[inline]
    #[must_use]
    pub fn u32(self, value: u32) -> Self {
        self.value(&value)
    }

    /// Adds an `unsigned long long`.
    #[inline]
    #[must_use]
    pub fn u64(self, value: u64) -> Self {
        self.value(&value)
    }

    /// Adds a `float`.
    #[inline]
    #[must_use]
    pub fn f32(self, value: f32) -> Self {
        self.value(&value)
    }

    /// Adds a value of any type that is the same in CUDA C++, such as a `#[repr(C)]` struct. All parameters together may have
    /// 4096 bytes, and 32764 with CUDA 12.1 on compute capability 7.0 and newer ("CUDA C++ Programming Guide", parameters).
    ///
    /// # Panics
    /// For the 41st argument, and for a type that is aligned to more than 16 bytes.
    #[inline]
    #[must_use]
    pub fn value<T: Copy>(mut self, value: &T) -> Self {
        const { assert!(align_of::<T>() <= align_of::<Word>(), "arguments are aligned to at most 16 bytes") };
        assert!(self.count < MOST, "a launch has at most {MOST} arguments");
        let first = self.words;
        let end = first + size_of::<T>().div_ceil(size_of::<Word>());
        self.grow(end);
        // SAFETY: the words from `first` to `end` were just made sure of, they have room for a T and are aligned for one, and
        // they are borrowed mutably while `value` is elsewhere. Words may hold anything, so padding is no matter.
        unsafe { ptr::copy_nonoverlapping(value, self.all_words_mut().as_mut_ptr().add(first).cast(), 1) };
        // 2^32 words are far beyond what a kernel can take.
        self.places[self.count] = (first as u32, size_of::<T>() as u32);
        self.count += 1;
        self
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.count
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Bytes of each.
    pub(super) fn sizes(&self) -> Vec<usize> {
        self.places().iter().map(|(_, bytes)| *bytes as usize).collect()
    }

    /// Whether those are the sizes.
    pub(super) fn have_sizes(&self, sizes: &[usize]) -> bool {
        self.places().iter().map(|(_, bytes)| *bytes as usize).eq(sizes.iter().copied())
    }

    /// Calls `work` with the address of each argument, valid for reading meanwhile.
    pub(super) fn with_addresses<R>(&self, work: impl FnOnce(&mut [*mut c_void]) -> R) -> R {
        let words = self.all_words().as_ptr();
        let mut addresses = [ptr::null_mut::<c_void>(); MOST];
        for (address, (first, _)) in addresses.iter_mut().zip(self.places()) {
            // The driver's parameter is not const, yet it only reads.
            *address = words.wrapping_add(*first as usize).cast_mut().cast();
        }
        work(&mut addresses[..self.count])
    }

    fn places(&self) -> &[(u32, u32)] {
        &self.places[..self.count]
    }

    /// Makes room for `words` words in all.
    #[inline]
    fn grow(&mut self, words: usize) {
        if words > INLINE {
            if self.spilled.is_empty() {
                self.spilled.extend_from_slice(&self.inline[..self.words]);
            }
            self.spilled.resize(words, Word::uninit());
        }
        self.words = words;
    }

    fn all_words(&self) -> &[Word] {
        if self.words > INLINE { &self.spilled } else { &self.inline }
    }

    fn all_words_mut(&mut self) -> &mut [Word] {
        if self.words > INLINE { &mut self.spilled } else { &mut self.inline }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[repr(C)]
    #[derive(Clone, Copy, Debug, PartialEq)]
    struct Padded {
        small: u8,
        large: f64,
    }

    /// What a kernel would read as its parameter number `index`.
    fn read<T: Copy>(arguments: &Arguments, index: usize) -> T {
        assert_eq!(arguments.sizes()[index], size_of::<T>());
        // SAFETY: the size was compared, and the tests ask for the type that they added.
        arguments.with_addresses(|addresses| unsafe { addresses[index].cast::<T>().read() })
    }

    #[test]
    fn every_argument_is_found_with_its_value_and_size() {
        let pointer = DevicePointer::<f32>::from_address(0x1234_5678_9abc);
        let padded = Padded { small: 7, large: 0.5 };
        let arguments = Arguments::new().pointer(pointer).i32(-1).i64(-2).u32(3).u64(4).f32(1.5).value(&padded);
        assert_eq!(arguments.sizes(), [8, 4, 8, 4, 8, 4, 16]);
        assert!(arguments.have_sizes(&[8, 4, 8, 4, 8, 4, 16]));
        assert!(!arguments.have_sizes(&[8, 4, 8, 4, 8, 4]), "one too many");
        assert!(!arguments.have_sizes(&[8, 4, 8, 4, 8, 8, 16]), "another type");
        assert_eq!(read::<u64>(&arguments, 0), 0x1234_5678_9abc);
        assert_eq!((read::<i32>(&arguments, 1), read::<i64>(&arguments, 2)), (-1, -2));
        assert_eq!((read::<u32>(&arguments, 3), read::<u64>(&arguments, 4)), (3, 4));
        assert_eq!(read::<f32>(&arguments, 5), 1.5);
        assert_eq!(read::<Padded>(&arguments, 6), padded);
    }

    #[test]
    fn arguments_beyond_the_inline_room_keep_all_values() {
        let table: [u32; 500] = std::array::from_fn(|index| index as u32);
        let mut arguments = Arguments::new().i32(-5).value(&table);
        for value in 0..MOST - 2 {
            arguments = arguments.i64(value as i64);
        }
        // Also of a clone that has moved.
        let arguments = Box::new(arguments.clone());
        assert_eq!(arguments.len(), MOST);
        assert_eq!(read::<i32>(&arguments, 0), -5);
        assert_eq!(read::<[u32; 500]>(&arguments, 1), table);
        for value in 0..MOST - 2 {
            assert_eq!(read::<i64>(&arguments, value + 2), value as i64);
        }
    }

    #[test]
    fn the_first_word_beyond_the_inline_room_keeps_those_before_it() {
        for count in [INLINE - 1, INLINE, INLINE + 1] {
            let arguments = (0..count).fold(Arguments::new(), |arguments, value| arguments.u32(value as u32));
            for value in 0..count {
                assert_eq!(read::<u32>(&arguments, value), value as u32, "{count} arguments");
            }
        }
    }

    #[test]
    fn no_arguments_are_none() {
        assert!(Arguments::new().is_empty());
        Arguments::new().with_addresses(|addresses| assert!(addresses.is_empty()));
    }

    #[test]
    #[should_panic(expected = "at most 40 arguments")]
    fn too_many_arguments_are_refused() {
        let _ = (0..=MOST).fold(Arguments::new(), |arguments, _| arguments.i32(0));
    }
}
