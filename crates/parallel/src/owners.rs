//! Assigns each parameter, and each divided weight, to a rank (ZeRO; Rajbhandari et al., 2020).
//!
//! Whole parameters are assigned, the largest first, each to the rank with the fewest elements so far, so every rank computes the same assignment
//! from names and sizes alone.
//! Trade-off: a parameter is never divided, so one large embedding can be more than a rank's even share.

/// Returns the owner of each parameter, in the order of `sizes`: names, which are unique, and numbers of elements.
pub fn owners<'a>(sizes: impl IntoIterator<Item = (&'a str, usize)>, world_size: usize) -> Vec<usize> {
    let sizes: Vec<(&str, usize)> = sizes.into_iter().collect();
    let mut order: Vec<usize> = (0..sizes.len()).collect();
    order.sort_by_key(|&index| (std::cmp::Reverse(sizes[index].1), sizes[index].0));
    let mut loads = vec![0; world_size];
    let mut owners = vec![0; sizes.len()];
    for index in order {
        let least = (0..world_size).min_by_key(|&rank| loads[rank]).expect("a job has at least one rank");
        owners[index] = least;
        loads[least] += sizes[index].1;
    }
    owners
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_parameter_has_an_owner() {
        let sizes = [("embedding", 100), ("a", 30), ("b", 30), ("c", 30), ("norm", 1), ("d", 30)];
        let found = owners(sizes, 3);
        let mut reversed = owners(sizes.into_iter().rev(), 3);
        reversed.reverse();
        assert_eq!(found, reversed);
        let load = |rank| sizes.iter().zip(&found).filter(|(_, owner)| **owner == rank).map(|(size, _)| size.1).sum();
        let loads: Vec<usize> = (0..3).map(load).collect();
        assert_eq!(loads.iter().sum::<usize>(), 221);
        assert_eq!(loads, [100, 61, 60]);
    }

    #[test]
    fn one_rank_owns_all_and_some_of_many_own_none() {
        assert_eq!(owners([("a", 1), ("b", 2)], 1), [0, 0]);
        assert_eq!(owners([("a", 1), ("b", 2)], 4), [1, 0]);
    }
}
