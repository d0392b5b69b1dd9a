//! Samples of cases, so that a run of the tests ends soon; `cargo xtask test --slow` takes all of them.
//!
//! Trade-off: a sample is always the same, so that a failure is found again.

/// Returns whether tests take all of their cases instead of a sample.
pub fn is_slow() -> bool {
    std::env::var_os("FIREBRICK_SLOW_TESTS").is_some()
}

/// Returns the first of the cases and every `step`-th after it, or all cases where [`is_slow`].
pub fn sample<T>(cases: impl IntoIterator<Item = T>, step: usize) -> Vec<T> {
    cases.into_iter().step_by(if is_slow() { 1 } else { step }).collect()
}

/// Returns as many of the cases as `count` for a test's `turn`-th model, so that its models take the cases in turn, or all cases where [`is_slow`].
pub fn some_in_turn<T: Clone>(cases: &[T], count: usize, turn: usize) -> Vec<T> {
    if is_slow() {
        return cases.to_vec();
    }
    (turn * count..(turn + 1) * count).map(|index| cases[index % cases.len()].clone()).collect()
}
