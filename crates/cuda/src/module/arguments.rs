//! The arguments of a kernel launch.
//!
//! The driver takes the address of each value, so the values are stored here one after another: inline up to [`INLINE`] words
//! of 16 bytes, which suffices for most launches, and on the heap beyond that.

use std::ffi::c_void;
use std::hash::{Hash, Hasher};
use std::mem::MaybeUninit;
use std::{ptr, slice};

use bytemuck::NoUninit;

use super::signature::Kind;
#[cfg(debug_assertions)]
use super::signature::Parameter;

/// Values are stored in words of this size, the maximum alignment of a kernel parameter.
type Word = MaybeUninit<u128>;
/// A word without a value. Zero in debug builds, so that tests can record the arguments of a launch without knowing their types.
const EMPTY: Word = if cfg!(debug_assertions) { Word::zeroed() } else { Word::uninit() };
/// Words that are stored inline.
const INLINE: usize = 32;
const MAX_ARGUMENTS: usize = 40;

/// Defines a method per type of a number, named like the type.
macro_rules! scalars {
    ($($type:ident: $name:literal $kind:ident,)*) => {$(
        #[doc = concat!("Adds ", $name, ".")]
        #[inline(always)]
        #[must_use]
        pub fn $type(self, value: $type) -> Self {
            self.add(Kind::$kind, &value)
        }
    )*};
}

/// Arguments of a launch, in the order in which the kernel declares its parameters.
///
/// Each call adds one argument of exactly the type that the kernel declares: `i32` for `int`, `i64` for `long long`, an address
/// for any pointer.
#[derive(Clone)]
pub struct Arguments {
    inline: [Word; INLINE],
    /// All words, once they no longer fit into `inline`.
    spilled: Vec<Word>,
    words: usize,
    /// First word and size in bytes of each argument.
    places: [(u32, u32); MAX_ARGUMENTS],
    pub(super) count: usize,
    /// In debug builds, address and bytes of each address argument.
    #[cfg(debug_assertions)]
    blocks: Vec<[u64; 2]>,
    /// In debug builds, the kind of each argument, and its given name.
    #[cfg(debug_assertions)]
    given: Vec<(Kind, &'static str)>,
    #[cfg(debug_assertions)]
    next_name: &'static str,
}

impl Default for Arguments {
    fn default() -> Self {
        Self::new()
    }
}

impl Arguments {
    /// Creates empty arguments. This and all methods that add to it are inlined; otherwise each call would copy all 850 bytes of arguments.
    #[inline(always)]
    pub const fn new() -> Self {
        Self {
            inline: [EMPTY; INLINE],
            spilled: Vec::new(),
            words: 0,
            places: [(0, 0); MAX_ARGUMENTS],
            count: 0,
            #[cfg(debug_assertions)]
            blocks: Vec::new(),
            #[cfg(debug_assertions)]
            given: Vec::new(),
            #[cfg(debug_assertions)]
            next_name: "",
        }
    }

    /// Names the next argument as the kernel declares it, for comparison in debug builds.
    #[inline(always)]
    #[must_use]
    #[cfg_attr(not(debug_assertions), allow(unused_mut, unused_variables, reason = "only debug builds remember it"))]
    pub fn named(mut self, name: &'static str) -> Self {
        #[cfg(debug_assertions)]
        {
            self.next_name = name;
        }
        self
    }

    /// Adds an address, at which the kernel uses at least one byte if it is not null.
    #[inline(always)]
    #[must_use]
    pub fn address(self, address: u64) -> Self {
        self.block(address, 1)
    }

    /// Adds an address at which the kernel uses this many bytes.
    #[inline(always)]
    #[must_use]
    #[cfg_attr(not(debug_assertions), allow(unused_mut, unused_variables, reason = "only debug builds remember them"))]
    pub fn block(mut self, address: u64, bytes: usize) -> Self {
        #[cfg(debug_assertions)]
        self.blocks.push([address, bytes as u64]);
        self.add(Kind::Pointer, &address)
    }

    /// Returns, in debug builds, address and bytes of each address argument.
    #[cfg(debug_assertions)]
    pub fn blocks(&self) -> &[[u64; 2]] {
        &self.blocks
    }

    scalars! {
        i32: "an `int`" Int,
        i64: "a `long long`" Long,
        u32: "an `unsigned int`" Int,
        u64: "an `unsigned long long`" Long,
        f32: "a `float`" Float,
    }

    /// Adds a struct with the same layout in CUDA C++, `#[repr(C)]` and without padding. All parameters together may take 4096 bytes,
    /// or 32764 with CUDA 12.1 and compute capability 7.0 or newer ("CUDA C++ Programming Guide", parameters).
    ///
    /// # Panics
    /// For the 41st argument. A type that is aligned to more than 16 bytes does not compile.
    #[inline(always)]
    #[must_use]
    pub fn value<T: NoUninit>(self, value: &T) -> Self {
        self.add(Kind::Struct, value)
    }

    #[inline(always)]
    #[cfg_attr(not(debug_assertions), allow(unused_variables, reason = "only debug builds remember it"))]
    fn add<T: NoUninit>(mut self, kind: Kind, value: &T) -> Self {
        #[cfg(debug_assertions)]
        self.given.push((kind, std::mem::take(&mut self.next_name)));
        const { assert!(align_of::<T>() <= align_of::<Word>(), "arguments are aligned to at most 16 bytes") };
        assert!(self.count < MAX_ARGUMENTS, "a launch has at most {MAX_ARGUMENTS} arguments");
        let first = self.words;
        let end = first + size_of::<T>().div_ceil(size_of::<Word>());
        self.grow(end);
        // SAFETY: `grow` made the words from `first` to `end` available. They have the size and alignment for a T, and do not
        // overlap `value`, since they are borrowed mutably.
        unsafe { ptr::copy_nonoverlapping(value, self.all_words_mut().as_mut_ptr().add(first).cast(), 1) };
        // The cast cannot truncate: a kernel takes far fewer than 2^32 words.
        self.places[self.count] = (first as u32, size_of::<T>() as u32);
        self.count += 1;
        self
    }

    /// Panics in debug builds if kinds or names of arguments differ from those that the kernel declares.
    #[cfg(debug_assertions)]
    pub(super) fn assert_declared(&self, kernel: &str, declared: &[Parameter]) {
        for (index, (parameter, &(kind, name))) in declared.iter().zip(&self.given).enumerate() {
            let is_same = name.is_empty() || parameter.name.is_empty() || name == parameter.name;
            let is_declared = parameter.kind == kind && is_same;
            assert!(is_declared, "kernel {kernel} declares {parameter:?} as parameter {index}, got {kind:?} {name}");
        }
    }

    pub(super) fn sizes(&self) -> Vec<usize> {
        self.places().iter().map(|(_, bytes)| *bytes as usize).collect()
    }

    pub(super) fn have_sizes(&self, sizes: &[usize]) -> bool {
        self.places().iter().map(|(_, bytes)| *bytes as usize).eq(sizes.iter().copied())
    }

    /// Calls `work` with the address of each argument, valid for reading during the call.
    pub(super) fn with_addresses<R>(&self, work: impl FnOnce(&mut [*mut c_void]) -> R) -> R {
        let words = self.all_words().as_ptr();
        let mut addresses = [ptr::null_mut::<c_void>(); MAX_ARGUMENTS];
        for (address, (first, _)) in addresses.iter_mut().zip(self.places()) {
            // The driver only reads, although its parameter is not const.
            *address = words.wrapping_add(*first as usize).cast_mut().cast();
        }
        work(&mut addresses[..self.count])
    }

    fn places(&self) -> &[(u32, u32)] {
        &self.places[..self.count]
    }

    /// Makes room for `words` words in total.
    #[inline]
    fn grow(&mut self, words: usize) {
        if words > INLINE {
            if self.spilled.is_empty() {
                self.spilled.extend_from_slice(&self.inline[..self.words]);
            }
            self.spilled.resize(words, EMPTY);
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

/// Hashes the bytes of all values. Their sizes are those that the kernel declares.
impl Hash for Arguments {
    fn hash<H: Hasher>(&self, state: &mut H) {
        let words = self.all_words().as_ptr();
        for &(first, bytes) in self.places() {
            // SAFETY: `value` wrote these bytes, all of which are initialized, since its types have no padding.
            state.write(unsafe { slice::from_raw_parts(words.add(first as usize).cast(), bytes as usize) });
        }
    }
}

#[cfg(test)]
mod tests {
    use std::hash::DefaultHasher;

    use super::*;

    #[repr(C)]
    #[derive(Clone, Copy, Debug, PartialEq, NoUninit)]
    struct Pair {
        small: [u8; 8],
        large: f64,
    }

    /// Returns the value that a kernel would read as parameter `index`.
    fn read<T: Copy>(arguments: &Arguments, index: usize) -> T {
        assert_eq!(arguments.sizes()[index], size_of::<T>());
        // SAFETY: the size was compared, and the tests read the type that they added.
        arguments.with_addresses(|addresses| unsafe { addresses[index].cast::<T>().read() })
    }

    #[test]
    fn every_argument_has_its_value_and_size() {
        let pair = Pair { small: [7; 8], large: 0.5 };
        let arguments = Arguments::new().address(0x1234_5678_9abc).i32(-1).i64(-2).u32(3).u64(4).f32(1.5).value(&pair);
        assert_eq!(arguments.sizes(), [8, 4, 8, 4, 8, 4, 16]);
        assert!(arguments.have_sizes(&[8, 4, 8, 4, 8, 4, 16]));
        assert!(!arguments.have_sizes(&[8, 4, 8, 4, 8, 4]), "one too many");
        assert!(!arguments.have_sizes(&[8, 4, 8, 4, 8, 8, 16]), "another type");
        assert_eq!(read::<u64>(&arguments, 0), 0x1234_5678_9abc);
        assert_eq!((read::<i32>(&arguments, 1), read::<i64>(&arguments, 2)), (-1, -2));
        assert_eq!((read::<u32>(&arguments, 3), read::<u64>(&arguments, 4)), (3, 4));
        assert_eq!(read::<f32>(&arguments, 5), 1.5);
        assert_eq!(read::<Pair>(&arguments, 6), pair);
    }

    #[test]
    #[cfg(debug_assertions)]
    fn arguments_that_differ_from_parameters_are_refused() {
        let declared = |name: &str, kind| Parameter { name: name.to_owned(), kind };
        let declared = [declared("x", Kind::Pointer), declared("stride", Kind::Long), declared("", Kind::Int)];
        let pointer = || Arguments::new().address(64);
        let refuses = |arguments: Arguments| {
            std::panic::catch_unwind(|| arguments.assert_declared("a kernel", &declared)).is_err()
        };
        assert!(!refuses(pointer().i64(1).i32(2)));
        assert!(!refuses(pointer().named("stride").u64(1).i32(2)));
        assert!(refuses(pointer().named("width").i64(1).i32(2)));
        assert!(refuses(pointer().f32(1.0).i32(2)));
        assert!(refuses(Arguments::new().i64(64).i64(1).i32(2)));
    }

    #[test]
    fn arguments_beyond_the_inline_words_keep_all_values() {
        let table: [u32; 500] = std::array::from_fn(|index| index as u32);
        let mut arguments = Arguments::new().i32(-5).value(&table);
        for value in 0..MAX_ARGUMENTS - 2 {
            arguments = arguments.i64(value as i64);
        }
        // This must also hold for a clone that was moved.
        let arguments = Box::new(arguments.clone());
        assert_eq!(arguments.sizes().len(), MAX_ARGUMENTS);
        assert_eq!(read::<i32>(&arguments, 0), -5);
        assert_eq!(read::<[u32; 500]>(&arguments, 1), table);
        for value in 0..MAX_ARGUMENTS - 2 {
            assert_eq!(read::<i64>(&arguments, value + 2), value as i64);
        }
    }

    #[test]
    fn more_words_than_fit_inline_keep_the_earlier_ones() {
        for count in [INLINE - 1, INLINE, INLINE + 1] {
            let arguments = (0..count).fold(Arguments::new(), |arguments, value| arguments.u32(value as u32));
            for value in 0..count {
                assert_eq!(read::<u32>(&arguments, value), value as u32, "{count} arguments");
            }
        }
    }

    #[test]
    fn arguments_hash_alike_exactly_if_equal() {
        let hash = |arguments: Arguments| {
            let mut hasher = DefaultHasher::new();
            arguments.hash(&mut hasher);
            hasher.finish()
        };
        let table: [u32; 500] = std::array::from_fn(|index| index as u32);
        let last = |value| hash(Arguments::new().f32(0.5).value(&table).i32(value));
        assert_eq!(last(3), last(3));
        assert_ne!(last(3), last(4));
        assert_ne!(hash(Arguments::new().f32(0.0)), hash(Arguments::new().f32(-0.0)));
    }

    #[test]
    #[should_panic(expected = "at most 40 arguments")]
    fn too_many_arguments_are_refused() {
        let _ = (0..=MAX_ARGUMENTS).fold(Arguments::new(), |arguments, _| arguments.i32(0));
    }
}
