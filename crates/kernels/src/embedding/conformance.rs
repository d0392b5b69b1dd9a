//! Embedding lookup and its gradient against the reference, with ids that repeat.
//!
//! Trade-off: ids out of range are not tested; they are rejected before they reach a device.

use burn_tensor::DType;

use super::reference;
use crate::Kernels;
use crate::conformance::check::Check;
use crate::dtype::{added, to_dtype};

pub(crate) fn check<B: Kernels>(check: &mut Check<'_, B>) {
    let (tokens, width, vocabulary) = (check.case.tokens(), check.case.hidden_size, check.case.vocab_size);
    let ids: Vec<i32> = (0..tokens).map(|token| ((token * 37) % vocabulary.min(11)) as i32).collect();
    let ids = check.ints(&ids);
    let dtype = check.case.dtype;
    for scale in check.variants([1.0, 7.5]) {
        for table in [check.random([vocabulary, width], 1.0), check.random_f32([vocabulary, width], 1.0)] {
            let rows = B::embed(table.0, ids.0.clone(), scale, dtype);
            check.same("embed: format", rows.dtype() == dtype);
            check.compare("embed", rows, reference::forward(table.1, ids.1.clone(), scale, DType::F32));
        }
        let dy = check.random([tokens, width], 1.0);
        let table = B::embed_backward(ids.0.clone(), dy.0.clone(), scale, vocabulary, false);
        let expected = reference::backward(ids.1.clone(), dy.1.clone(), scale, vocabulary, false);
        check.compare("embed_backward", table, expected.clone());
        for dtype in check.variants(check.sums()) {
            let (sum, of_sum) = check.random_in(dtype, [vocabulary, width], 1.0);
            let copy = sum.clone();
            let sum = B::add_embed_backward(sum, ids.0.clone(), dy.0.clone(), scale);
            check.same("add_embed_backward: format", sum.dtype() == dtype);
            let expected = added(to_dtype(of_sum.clone(), dtype), expected.clone());
            check.compare("add_embed_backward", sum, expected);
            check.compare("add_embed_backward: a copy of its input", copy, of_sum);
        }
        let slots: Vec<i32> = (0..tokens).map(|token| (token as i32 * 5) % 7 - 3).map(|slot| slot.max(-1)).collect();
        let slots = check.ints(&slots);
        let rows = B::embed_backward(slots.0, dy.0, scale, 4, true);
        check.compare("embed_backward: some rows", rows, reference::backward(slots.1, dy.1, scale, 4, true));
    }
}
