//! Attention over packed documents and over a cache against the reference.

use burn_flex::Flex;
use burn_tensor::{DType, Tensor};
use firebrick_arch::AttentionSpec;

use super::{CachedTokens, KvCache, NewTokens, Qkv, Sinks, StatisticsLayout, reference};
use crate::Kernels;
use crate::PAGE_ROWS;
use crate::conformance::check::Check;

pub(crate) fn check<B: Kernels>(check: &mut Check<'_, B>) {
    for (soft_cap, has_sinks) in check.variants([(None, false), (Some(1.5), false), (None, true), (Some(1.5), true)]) {
        // Of a single key, gradients are differences of outputs that are already rounded.
        let has_several_keys = check.case.tokens() >= 16 && check.case.window.is_none_or(|window| window > 1);
        let has_sinks = has_sinks && (check.case.dtype == DType::F32 || has_several_keys);
        let spec = AttentionSpec { soft_cap, sinks: has_sinks, ..check.case.attention() };
        // From sinks that take next to nothing to some that take nearly all.
        let logits = has_sinks.then(|| check.random_f32([spec.heads], 4.0));
        let sinks = logits.map(|(got, expected)| (of_logits(got), of_logits(expected))).unzip();
        packed(check, &sinks, &spec);
        cached(check, &sinks, &spec);
    }
}

/// Sinks of the backend under test and of the reference, or of neither.
type BothSinks<B> = (Option<Sinks<B>>, Option<Sinks<Flex>>);

fn of_logits<B: Kernels>(logits_h: Tensor<B, 1>) -> Sinks<B> {
    Sinks { logits_h, trains: true }
}

fn packed<B: Kernels>(check: &mut Check<'_, B>, (sinks, expected_sinks): &BothSinks<B>, spec: &AttentionSpec) {
    let (sinks, expected_sinks) = (sinks.as_ref(), expected_sinks.as_ref());
    let tokens = check.case.tokens();
    let (queries, keys) = ([tokens, spec.query_size()], [tokens, spec.kv_size()]);
    let (q, k, v) = (check.random(queries, 1.5), check.random(keys, 1.5), check.random(keys, 1.0));
    let d_o = check.random(queries, 1.0);
    let (documents, expected_documents) = check.documents();
    let (qkv, expected_qkv) = (Qkv { q: q.0, k: k.0, v: v.0 }, Qkv { q: q.1, k: k.1, v: v.1 });
    let output = B::packed_attention(&qkv, sinks, spec, &documents);
    let expected = reference::forward(&expected_qkv, expected_sinks, spec, &expected_documents);
    check.compare("attention", output.o.clone(), expected.o.clone());
    if output.statistics.layout == StatisticsLayout::HeadsTokens {
        let log_sum_exp = output.statistics.log_sum_exp.clone();
        check.compare("attention: log-sum-exp", log_sum_exp, expected.statistics.log_sum_exp.clone());
    }
    if sinks.is_some() {
        // With the output as its own gradient all terms of the sum have one sign: cancellation would multiply the outputs' rounding.
        let (d_o, expected_d_o) = (output.o.clone(), expected.o.clone());
        let (_, d_sinks) = B::packed_attention_backward(qkv.clone(), sinks, spec, output.clone(), d_o, &documents);
        let (qkv, output) = (expected_qkv.clone(), expected.clone());
        let (_, expected) = reference::backward(qkv, expected_sinks, spec, output, expected_d_o, &expected_documents);
        let (d_sinks, expected) = d_sinks.zip(expected).expect("sinks that train have a gradient");
        check.compare("attention_backward: sinks", d_sinks, expected);
    }
    let copies = (d_o.0.clone(), qkv.q.clone());
    let (gradients, d_sinks) = B::packed_attention_backward(qkv, sinks, spec, output, d_o.0, &documents);
    let (expected, expected_d_sinks) =
        reference::backward(expected_qkv.clone(), expected_sinks, spec, expected, d_o.1.clone(), &expected_documents);
    // Any gradient, where outputs are not rounded.
    if let Some((d_sinks, expected)) = d_sinks.zip(expected_d_sinks).filter(|_| check.case.dtype == DType::F32) {
        check.compare("attention_backward: sinks under any gradient", d_sinks, expected);
    }
    check.compare("attention_backward: queries", gradients.q, expected.q);
    check.compare("attention_backward: keys", gradients.k, expected.k);
    check.compare("attention_backward: values", gradients.v, expected.v);
    check.compare("attention_backward: a copy of its output gradient", copies.0, d_o.1);
    check.compare("attention_backward: a copy of its queries", copies.1, expected_qkv.q);
}

/// Tests sequences that are read at once, then continued by several tokens, then by one; other rows of the cache must not change.
fn cached<B: Kernels>(check: &mut Check<'_, B>, (sinks, expected_sinks): &BothSinks<B>, spec: &AttentionSpec) {
    let (sinks, expected_sinks) = (sinks.as_ref(), expected_sinks.as_ref());
    let lengths = check.case.documents.clone();
    // Two sequences take turns at pages.
    let pages_of = |length: usize| (length + 4).div_ceil(PAGE_ROWS);
    let all: usize = lengths.iter().map(|&length| pages_of(length)).sum();
    let shape = [(all + 1) * PAGE_ROWS, spec.kv_size()];
    let (mut cache, mut expected_cache) =
        (KvCache::<B>::new(shape, check.case.dtype, check.device), KvCache::<Flex>::new(shape, DType::F32, &check.cpu));
    for step in 0..4 {
        let mut page = 0;
        let new = |&length: &usize| {
            let past = if step == 0 { 0 } else { length + step.min(2) - 1 + usize::from(step == 3) };
            let count = [length, 1, 2, 1][step];
            // From the last page on, so that the pages of a sequence do not follow each other.
            let pages = (page..page + pages_of(length)).map(|page| (all - page) as u32).collect();
            page += pages_of(length);
            NewTokens { pages, past, count }
        };
        let sequences: Vec<NewTokens> = lengths.iter().map(new).collect();
        let tokens = CachedTokens::<B>::new(sequences.clone(), check.device);
        let expected_tokens = CachedTokens::<Flex>::new(sequences, &check.cpu);
        let [queries, keys] = [spec.query_size(), spec.kv_size()].map(|width| [tokens.count(), width]);
        let (q, k, v) = (check.random(queries, 1.5), check.random(keys, 1.5), check.random(keys, 1.0));
        reference::store(&mut expected_cache, k.1, v.1, &expected_tokens);
        let expected = reference::cached(Tensor::matmul, q.1, expected_sinks, &expected_cache, &expected_tokens, spec);
        let qkv = Qkv { q: q.0, k: k.0, v: v.0 };
        if step == 0 {
            let (documents, _) = check.documents();
            let o = B::cached_attention(&qkv, sinks, &mut cache, &tokens, Some(&documents), spec);
            check.compare("cached_attention: prompts", o, expected.clone());
        }
        let o = B::cached_attention(&qkv, sinks, &mut cache, &tokens, None, spec);
        check.compare("cached_attention", o, expected);
    }
    for (stored, expected) in cache.tensors().into_iter().zip(expected_cache.tensors()) {
        check.compare("cached_attention: what is stored", stored, expected);
    }
}
