//! Keys and values of one sequence in one layer, for generation.
//!
//! Room is allocated in powers of two and filled in place, so a growing text asks for few sizes of memory.
//! Trade-off: up to half of the room is unused; there is no paging between sequences.

use burn_tensor::Tensor;
use firebrick_kernels::Kernels;

/// Tokens that a new cache has room for.
const FIRST_ROOM: usize = 64;

/// Keys (already rotated) and values, `[room, g * k]` each, of which the first `length` rows are filled.
#[derive(Clone, Debug, Default)]
pub(crate) struct LayerCache<B: Kernels> {
    stored: Option<(Tensor<B, 2>, Tensor<B, 2>)>,
    length: usize,
}

impl<B: Kernels> LayerCache<B> {
    /// Appends rows; all keys and values so far, `[length, g * k]`.
    pub(crate) fn extend(&mut self, k: Tensor<B, 2>, v: Tensor<B, 2>) -> (Tensor<B, 2>, Tensor<B, 2>) {
        let ([new, width], start) = (k.dims(), self.length);
        self.length += new;
        let room = self.length.next_power_of_two().max(FIRST_ROOM);
        let (keys, values) = match self.stored.take() {
            Some((keys, values)) if keys.dims()[0] >= self.length => (keys, values),
            earlier => {
                let grown = |part: Option<Tensor<B, 2>>, like: &Tensor<B, 2>| {
                    let empty = Tensor::zeros([room, width], (&like.device(), like.dtype()));
                    match part {
                        Some(part) => {
                            let filled = part.narrow(0, 0, start);
                            empty.slice_assign([0..start, 0..width], filled)
                        }
                        None => empty,
                    }
                };
                let (keys, values) = earlier.unzip();
                (grown(keys, &k), grown(values, &v))
            }
        };
        let rows = [start..self.length, 0..width];
        let (keys, values) = (keys.slice_assign(rows.clone(), k), values.slice_assign(rows, v));
        let filled = |part: &Tensor<B, 2>| part.clone().narrow(0, 0, self.length);
        let result = (filled(&keys), filled(&values));
        self.stored = Some((keys, values));
        result
    }
}

#[cfg(test)]
mod tests {
    use burn_tensor::Distribution;
    use firebrick_kernels::backends::Flex;

    use super::*;

    #[test]
    fn a_cache_returns_all_rows_in_order_across_growth() {
        let device = Default::default();
        let mut cache = LayerCache::<Flex>::default();
        let rows: Tensor<Flex, 2> = Tensor::random([200, 6], Distribution::Uniform(-1.0, 1.0), &device);
        let mut start = 0;
        for length in [3, 1, 60, 1, 1, 70, 64] {
            let part = rows.clone().narrow(0, start, length);
            let (k, v) = cache.extend(part.clone(), part.neg());
            start += length;
            let expected = rows.clone().narrow(0, 0, start);
            assert_eq!(k.into_data(), expected.clone().into_data());
            assert_eq!(v.into_data(), expected.neg().into_data());
        }
    }
}
