//! Attention over packed documents and over a cache against the reference.
//!
//! Trade-off: the log-sum-exp is compared only where its layout is the reference's; the backward covers the others.

use firebrick_arch::AttentionSpec;

use super::{Qkv, StatisticsLayout, reference};
use crate::Kernels;
use crate::conformance::check::Check;

pub(crate) fn check<B: Kernels>(check: &mut Check<'_, B>) {
    for soft_cap in check.variants([None, Some(1.5)]) {
        let spec = AttentionSpec { soft_cap, ..check.case.attention() };
        packed(check, &spec);
        cached(check, &spec);
    }
}

fn packed<B: Kernels>(check: &mut Check<'_, B>, spec: &AttentionSpec) {
    let tokens = check.case.tokens();
    let (queries, keys) = ([tokens, spec.query_size()], [tokens, spec.kv_size()]);
    let (q, k, v) = (check.random(queries, 1.5), check.random(keys, 1.5), check.random(keys, 1.0));
    let d_o = check.random(queries, 1.0);
    let (documents, expected_documents) = check.documents();
    let (qkv, expected_qkv) = (Qkv { q: q.0, k: k.0, v: v.0 }, Qkv { q: q.1, k: k.1, v: v.1 });
    let output = B::packed_attention(&qkv, spec, &documents);
    let expected = reference::forward(&expected_qkv, spec, &expected_documents);
    check.compare("attention", output.o.clone(), expected.o.clone());
    if output.statistics.layout == StatisticsLayout::HeadsTokens {
        let log_sum_exp = output.statistics.log_sum_exp.clone();
        check.compare("attention: log-sum-exp", log_sum_exp, expected.statistics.log_sum_exp.clone());
    }
    let copies = (d_o.0.clone(), qkv.q.clone());
    let gradients = B::packed_attention_backward(qkv, spec, output, d_o.0, &documents);
    let expected = reference::backward(expected_qkv.clone(), spec, expected, d_o.1.clone(), &expected_documents);
    check.compare("attention_backward: queries", gradients.q, expected.q);
    check.compare("attention_backward: keys", gradients.k, expected.k);
    check.compare("attention_backward: values", gradients.v, expected.v);
    check.compare("attention_backward: a copy of its output gradient", copies.0, d_o.1);
    check.compare("attention_backward: a copy of its queries", copies.1, expected_qkv.q);
}

fn cached<B: Kernels>(check: &mut Check<'_, B>, spec: &AttentionSpec) {
    let past = check.case.tokens();
    let keys = [past, spec.kv_size()];
    let (k, v) = (check.random(keys, 1.5), check.random(keys, 1.0));
    for tokens in [1, past.div_ceil(2)] {
        let q = check.random([tokens, spec.query_size()], 1.5);
        let o = B::attention_cached(q.0, k.0.clone(), v.0.clone(), spec);
        check.compare("attention_cached", o, reference::cached(q.1, k.1.clone(), v.1.clone(), spec));
    }
}
