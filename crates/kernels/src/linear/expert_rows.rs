//! The rows of each expert among rows that are sorted by expert, on the device.
//!
//! Trade-off: the host knows the counts only after waiting for the device, so operations that need none stay on the device.

use std::sync::{Arc, OnceLock};

use burn_tensor::{Int, Tensor, TensorData, backend::Backend};

use super::dropout::RowChoices;
use crate::memory::MemoryOps;

/// The rows of each expert: expert `e` has rows `starts[e] .. starts[e + 1]`. Clones share the counts on the host.
#[derive(Clone, Debug)]
pub struct ExpertRows<B: Backend> {
    /// `[experts + 1]` i32, ascending from 0 to the number of rows.
    pub starts: Tensor<B, 1, Int>,
    /// The tokens that the rows come from; `None` where nothing depends on that.
    pub choices: Option<RowChoices<B>>,
    counts: Arc<OnceLock<Vec<usize>>>,
}

impl<B: Backend> ExpertRows<B> {
    /// Wraps starts `[experts + 1]` i32 that the device has computed.
    pub fn new(starts: Tensor<B, 1, Int>) -> Self {
        Self { starts, choices: None, counts: Arc::default() }
    }

    /// Builds the rows of experts with these counts, which are then known to the host.
    pub fn of_counts(counts: Vec<usize>, device: &B::Device) -> Self {
        let ends = counts.iter().scan(0, |end, &count| {
            *end += count as i32;
            Some(*end)
        });
        let starts: Vec<i32> = [0].into_iter().chain(ends).collect();
        let starts = Tensor::from_data(TensorData::from(starts.as_slice()), device);
        Self { starts, choices: None, counts: Arc::new(OnceLock::from(counts)) }
    }

    /// Returns the number of experts.
    pub fn experts(&self) -> usize {
        self.starts.dims()[0] - 1
    }
}

impl<B: MemoryOps> ExpertRows<B> {
    /// Returns the number of rows of each expert. The first call waits for the device, unless the host counted them.
    pub fn counts(&self) -> &[usize] {
        self.counts.get_or_init(|| {
            let starts = B::read_integers(self.starts.clone());
            starts.windows(2).map(|pair| (pair[1] - pair[0]) as usize).collect()
        })
    }

    /// Returns start and count of the rows of each expert that has any, as [`MemoryOps::slices`] takes them, with the expert.
    pub fn ranges(&self) -> Vec<(usize, (usize, usize))> {
        let mut start = 0;
        let range = |(expert, &count): (usize, &usize)| {
            start += count;
            (expert, (start - count, count))
        };
        self.counts().iter().enumerate().map(range).filter(|(_, (_, count))| *count > 0).collect()
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use crate::testing::Plain;

    #[test]
    fn counts_read_back_from_the_starts_and_experts_without_rows_have_no_range() {
        let device = Default::default();
        let counted = ExpertRows::<Plain>::of_counts(vec![2, 0, 3], &device);
        let read = ExpertRows::<Plain>::new(counted.starts.clone());
        assert_eq!((read.experts(), read.counts(), counted.counts()), (3, &[2, 0, 3][..], &[2, 0, 3][..]));
        assert_eq!(read.ranges(), [(0, (0, 2)), (2, (2, 3))]);
    }
}
