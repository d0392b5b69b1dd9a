//! Room for passes over different numbers of tokens.
//!
//! CubeCL's pools keep a buffer for every exact size, so rows of many lengths (`pack = false`) would leave a set of buffers for each length.
//! A pass over another number of tokens than the one before therefore asks the driver what is left; where that is less than the pass may
//! take, everything that is kept for reuse is returned first. So are pinned buffers of what layers save once those that wait for reuse are more
//! than the largest pass needs.
//! Trade-off: returning it waits for the device and allocates again, so a card that is nearly full is slower with rows of many lengths
//! than with packed rows.

use std::cell::Cell;

/// Pinned bytes of ids, numbers and the like, which are never too many.
const SMALL_BYTES: u64 = 64 << 20;

/// What passes take, and how large the last one was.
#[derive(Debug, Default)]
pub(crate) struct Room {
    /// Bytes of a pass, on the device and pinned, over so many tokens.
    expected: Cell<([u64; 2], usize)>,
    last_tokens: Cell<usize>,
}

impl Room {
    /// A pass over `tokens` tokens takes up to `bytes` on the device and in pinned memory.
    pub(crate) fn expect(&self, bytes: [u64; 2], tokens: usize) {
        self.expected.set((bytes, tokens));
    }

    /// What a pass over `tokens` tokens may take on the device, and how many pinned bytes may wait for reuse; `None` if it is as large as
    /// the last one, or nothing is known about passes.
    pub(crate) fn needed(&self, tokens: usize) -> Option<[u64; 2]> {
        let ([device, pinned], expected_tokens) = self.expected.get();
        let is_another = self.last_tokens.replace(tokens) != tokens;
        let share = |of: usize| (u128::from(device) * tokens as u128).div_ceil(of as u128) as u64;
        (is_another && expected_tokens > 0).then(|| [share(expected_tokens), pinned + SMALL_BYTES])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pass_of_another_size_needs_its_share_and_one_of_the_same_size_nothing_new() {
        let room = Room::default();
        assert_eq!(room.needed(64), None, "nothing is known about passes");
        room.expect([1 << 40, 0], 4096);
        let device = |tokens| room.needed(tokens).map(|[device, _]| device);
        assert_eq!([1024, 1024, 4096, 1024].map(device), [Some(1 << 38), None, Some(1 << 40), Some(1 << 38)]);
    }
}
