//! How many blocks one thread takes at a time. Threads are rayon's; the result does not depend on their number.

/// Minimum number of values per thread; with fewer, handing the work over costs more than it saves.
const VALUES_AT_ONCE: usize = 1 << 16;

/// Returns how many blocks of `block_size` values are worth a thread.
pub(crate) fn blocks_at_once(block_size: usize) -> usize {
    (VALUES_AT_ONCE / block_size).max(1)
}
