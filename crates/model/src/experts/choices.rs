//! Which experts tokens went to, so that two passes over the same tokens can be compared: that which sampled them and that which trains on them.
//!
//! Trade-off: the choices of a pass stay in device memory until they are taken, and are copied to the host then.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn_tensor::{Int, Tensor};
use firebrick_kernels::Kernels;

/// The choices of all routers of a model since they were last taken, `[n, k]` each, in the order in which the routers ran.
#[derive(Clone, Debug)]
pub struct ExpertChoices<B: Kernels>(Arc<Mutex<Vec<Tensor<B, 2, Int>>>>);

impl<B: Kernels> Default for ExpertChoices<B> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

impl<B: Kernels> ExpertChoices<B> {
    /// Forgets what earlier passes chose.
    pub(crate) fn clear(&self) {
        self.entries().clear();
    }

    pub(crate) fn add(&self, experts_nk: Tensor<B, 2, Int>) {
        self.entries().push(experts_nk);
    }

    /// Takes the choices of the last pass, which was over `tokens` tokens: for each of the tokens `of` a number per router, which is the same where the
    /// same experts were chosen. Call it outside of sections, and before a backward that chooses again.
    ///
    /// # Panics
    /// If one of the tokens is not among `tokens`.
    pub fn take(&self, tokens: usize, of: &[usize]) -> Vec<u32> {
        let entries = std::mem::take(&mut *self.entries());
        let widths: Vec<[usize; 2]> = entries.iter().map(Tensor::dims).collect();
        let flat = entries.into_iter().map(|choices| {
            let count = choices.dims().iter().product::<usize>();
            choices.reshape([count])
        });
        let flat: Vec<Tensor<B, 1, Int>> = flat.collect();
        if flat.is_empty() {
            return Vec::new();
        }
        let experts: Vec<i64> = Tensor::cat(flat, 0).into_data().iter::<i64>().collect();
        // A router may have run over some tokens at a time.
        let (mut rest, mut by_router, mut of_router) = (&experts[..], Vec::new(), Vec::with_capacity(tokens));
        for [rows, top_k] in widths {
            let (own, after) = rest.split_at(rows * top_k);
            rest = after;
            of_router.extend(own.chunks(top_k).map(name_of));
            if of_router.len() == tokens {
                by_router.push(std::mem::take(&mut of_router));
            }
        }
        of.iter().flat_map(|&token| by_router.iter().map(move |router: &Vec<u32>| router[token])).collect()
    }

    fn entries(&self) -> MutexGuard<'_, Vec<Tensor<B, 2, Int>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns a number for a set of experts in any order.
fn name_of(experts: &[i64]) -> u32 {
    let mixed = |expert: &i64| (*expert as u32 + 1).wrapping_mul(0x9E37_79B1).rotate_left(15).wrapping_mul(0x85EB_CA77);
    experts.iter().map(mixed).fold(0, u32::wrapping_add)
}

#[cfg(test)]
mod tests {
    use firebrick_kernels::backends::Flex;

    use super::*;

    #[test]
    fn the_order_of_experts_and_the_parts_of_a_pass_do_not_matter() {
        let choices = ExpertChoices::<Flex>::default();
        let add = |experts: [[i32; 2]; 2]| choices.add(Tensor::from_ints(experts, &Default::default()));
        add([[3, 1], [0, 2]]);
        add([[1, 3], [5, 2]]);
        let found = choices.take(4, &[0, 2, 3]);
        assert_eq!(found[0], found[1]);
        assert_ne!(found[0], found[2]);
        add([[3, 1], [0, 2]]);
        add([[1, 3], [5, 2]]);
        assert_eq!(choices.take(2, &[0]), found[..2], "of two routers");
        assert!(choices.take(2, &[0]).is_empty());
    }
}
