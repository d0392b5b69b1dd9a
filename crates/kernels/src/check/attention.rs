//! Attention over packed documents, and a tensor that goes to the host and back.

use super::Check;
use crate::{Kernels, oracle};

pub(super) fn check<B: Kernels>(check: &mut Check<'_, B>) {
    packed(check);
    offloaded(check);
}

fn packed<B: Kernels>(check: &mut Check<'_, B>) {
    let case = check.case;
    let (tokens, head_dim) = (case.tokens(), case.head_dim);
    let (queries, keys) = ([tokens, case.query_heads, head_dim], [tokens, case.key_value_heads, head_dim]);
    let (q, k, v) = (check.random(queries, 1.5), check.random(keys, 1.5), check.random(keys, 1.0));
    let d_o = check.random(queries, 1.0);
    let (documents, reference) = check.documents();
    let output = B::packed_attention(q.0.clone(), k.0.clone(), v.0.clone(), &documents);
    let expected = oracle::attention::forward(q.1.clone(), k.1.clone(), v.1.clone(), &reference);
    check.compare("packed_attention", output.o_nhk.clone(), expected.o_nhk.clone());
    let (dq, dk, dv) = B::packed_attention_backward(q.0, k.0, v.0, &output, d_o.0, &documents);
    let (eq, ek, ev) = oracle::attention::backward(q.1, k.1, v.1, &expected, d_o.1, &reference);
    check.compare("packed_attention_backward: queries", dq, eq);
    check.compare("packed_attention_backward: keys", dk, ek);
    check.compare("packed_attention_backward: values", dv, ev);
}

fn offloaded<B: Kernels>(check: &mut Check<'_, B>) {
    let shape = [check.case.tokens(), check.case.width];
    let tensors: Vec<_> = (0..5).map(|_| check.random(shape, 1.0)).collect();
    let (ours, expected): (Vec<_>, Vec<_>) = tensors.into_iter().unzip();
    let mut away: Vec<_> = ours.into_iter().map(B::offload).collect();
    let device = check.device;
    for expected in expected.into_iter().rev() {
        let own = away.pop().expect("as many as were put away");
        if let Some(next) = away.last_mut() {
            B::prefetch(next, device);
        }
        check.compare("offload and restore", B::restore(own, device), expected);
    }
}
