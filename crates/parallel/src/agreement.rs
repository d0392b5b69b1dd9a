//! Checks that all ranks are about to do the same: every rank lists the facts that its run depends on, and the lists must be equal.

use firebrick_kernels::Communicator;

use crate::error::ParallelError;
use crate::wire;

/// Maximum length of a value in a message; some values are whole sections of a recipe.
const MAX_SHOWN: usize = 200;

/// The facts that a run depends on: keys with their values, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Facts(Vec<(String, String)>);

impl Facts {
    /// Adds a key with its value.
    pub fn add(&mut self, key: impl Into<String>, value: impl ToString) {
        self.0.push((key.into(), value.to_string()));
    }

    fn to_bytes(&self) -> Vec<u8> {
        let parts: Vec<&str> = self.0.iter().flat_map(|(key, value)| [key.as_str(), value.as_str()]).collect();
        wire::join(&parts)
    }

    fn from_bytes(bytes: &[u8]) -> Self {
        let text = |part: &[u8]| String::from_utf8_lossy(part).into_owned();
        let parts = wire::split(bytes).unwrap_or_default();
        Self(parts.chunks_exact(2).map(|pair| (text(pair[0]), text(pair[1]))).collect())
    }

    /// Returns the first key whose value differs, with this list's value and the other's.
    fn difference<'a>(&'a self, other: &'a Self) -> Option<(&'a str, &'a str, &'a str)> {
        const NOTHING: &str = "nothing";
        let value = |facts: &'a Self, key: &str| {
            facts.0.iter().find(|(name, _)| name == key).map_or(NOTHING, |(_, value)| value.as_str())
        };
        let keys = self.0.iter().chain(&other.0).map(|(key, _)| key.as_str());
        let mut compared = keys.map(|key| (key, value(self, key), value(other, key)));
        compared.find(|(_, own, others)| own != others)
    }
}

/// Compares the facts of all ranks; every rank gets the same error.
pub(crate) fn agree(communicator: &Communicator, facts: &Facts) -> Result<(), ParallelError> {
    let gathered = communicator.all_gather_bytes("agree", facts.to_bytes())?;
    let all: Vec<Facts> = gathered.iter().map(|bytes| Facts::from_bytes(bytes)).collect();
    for (rank, facts) in all.iter().enumerate().skip(1) {
        if let Some((key, expected, found)) = all[0].difference(facts) {
            let shown = |value: &str| value.chars().take(MAX_SHOWN).collect::<String>();
            let (key, found, expected) = (key.to_owned(), shown(found), shown(expected));
            return Err(ParallelError::Differs { rank, key, found, expected });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::thread;

    use firebrick_kernels::comm::local_group;

    use super::*;

    fn facts(values: &[(&str, &str)]) -> Facts {
        Facts(values.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect())
    }

    fn compared(of_rank: impl Fn(usize) -> Facts + Sync) -> Vec<Result<(), ParallelError>> {
        thread::scope(|scope| {
            let start = |communicator: Communicator| {
                let facts = of_rank(communicator.rank());
                scope.spawn(move || agree(&communicator, &facts))
            };
            let threads: Vec<_> = local_group(3).into_iter().map(start).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    #[test]
    fn the_first_difference_is_the_error_of_all() {
        let same = facts(&[("seed", "7"), ("data", "é")]);
        assert_eq!(compared(|_| same.clone()), [Ok(()), Ok(()), Ok(())]);
        let results = compared(|rank| facts(&[("seed", "7"), ("lr", if rank == 2 { "2e-4" } else { "1e-4" })]));
        let error = ParallelError::Differs {
            rank: 2,
            key: "lr".to_owned(),
            found: "2e-4".to_owned(),
            expected: "1e-4".to_owned(),
        };
        assert!(results.iter().all(|result| *result == Err(error.clone())), "{results:?}");
    }

    #[test]
    fn a_key_that_only_one_rank_has_is_a_difference() {
        let all = facts(&[("a", "1"), ("b", "2")]);
        assert_eq!(all.difference(&facts(&[("a", "1")])), Some(("b", "2", "nothing")));
        assert_eq!(facts(&[("a", "1")]).difference(&all), Some(("b", "nothing", "2")));
    }
}
