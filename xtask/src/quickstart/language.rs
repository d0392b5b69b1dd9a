//! The quickstart's invented language: a small random generator, and words.
//!
//! Trade-off: a custom generator, so that the shipped data is the same on every machine and with every version of every dependency. Its statistical
//! quality is that of SplitMix64.

/// SplitMix64 (Steele, Lea, Flood 2014): 64 bits of state, one addition and a finalizer per draw.
pub(super) struct Random {
    state: u64,
}

impl Random {
    /// Creates a separate stream for every seed.
    pub(super) fn new(seed: u64) -> Self {
        Self { state: seed }
    }

    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    /// Draws a number in `0..bound`; the bias of the multiply-shift is below 2^-50 for the bounds used here.
    pub(super) fn below(&mut self, bound: usize) -> usize {
        assert!(bound > 0, "an empty range has no number to draw");
        ((u128::from(self.next()) * bound as u128) >> 64) as usize
    }

    /// Draws one item of a list that is not empty.
    pub(super) fn pick<'a, T: ?Sized>(&mut self, items: &[&'a T]) -> &'a T {
        items[self.below(items.len())]
    }

    /// Fisher-Yates.
    pub(super) fn shuffle<T>(&mut self, items: &mut [T]) {
        for end in (1..items.len()).rev() {
            items.swap(end, self.below(end + 1));
        }
    }
}

const ONSETS: [&str; 18] =
    ["b", "d", "f", "g", "k", "l", "m", "n", "p", "r", "s", "t", "v", "z", "br", "dr", "st", "tr"];
const VOWELS: [&str; 5] = ["a", "e", "i", "o", "u"];
const CODAS: [&str; 6] = ["l", "m", "n", "r", "s", "t"];

fn syllables(random: &mut Random, count: usize) -> String {
    let mut word = String::new();
    for _ in 0..count {
        word.push_str(random.pick(&ONSETS));
        word.push_str(random.pick(&VOWELS));
    }
    if random.below(2) == 0 {
        word.push_str(random.pick(&CODAS));
    }
    word
}

/// Draws a pronounceable word of 3 to 6 letters, lower case: the subject of all the text.
pub(super) fn word(random: &mut Random) -> String {
    loop {
        let count = 1 + random.below(3);
        let word = syllables(random, count);
        if (3..=6).contains(&word.len()) {
            return word;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_follows_the_published_splitmix64_sequence() {
        let mut random = Random::new(1_234_567);
        assert_eq!(random.next(), 6_457_827_717_110_365_317);
        assert_eq!(random.next(), 3_203_168_211_198_807_973);
    }

    #[test]
    fn shuffling_keeps_every_item_once() {
        let mut items: Vec<usize> = (0..50).collect();
        Random::new(3).shuffle(&mut items);
        assert_ne!(items, (0..50).collect::<Vec<_>>());
        items.sort_unstable();
        assert_eq!(items, (0..50).collect::<Vec<_>>());
    }
}
