//! Causal attention of packed documents, forward and backward, over row lengths.
//!
//! One group of heads of the first document is compared with the reference, up to the length that the reference's square of scores allows. Of a
//! longer document only the first queries are checked, which see no later token, and no gradients of its keys.
//! Trade-off: gradients of keys and values are checked at the shorter lengths of the sweep only.

use burn_tensor::{DType, Tensor};
use firebrick_arch::AttentionSpec;
use firebrick_kernels::attention::reference;
use firebrick_kernels::backends::Flex;
use firebrick_kernels::{Documents, Kernels, Qkv};

use super::{Scale, Setting, random, tolerance};
use crate::case::{Case, Comparison, Output, Prepared, axis, key, to_reference, work};

/// Tokens of a document that the reference computes.
const CHECKED: usize = 2048;

pub(super) fn cases<B: Kernels>(setting: &Setting<B>) -> Vec<Case<B>> {
    let spec = setting.model().attention();
    let (lengths, main) = match setting.scale {
        Scale::Small => (setting.sweep(&[128, 256], &[64, 128, 256, 512, 1024]), 256),
        Scale::Medium => (setting.sweep(&[512], &[256, 512, 1024, 2048]), 512),
        Scale::Large => (setting.sweep(&[512, 2048, 8192], &[256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768]), 2048),
    };
    let mut cases = Vec::new();
    for &length in &lengths {
        // The same number of tokens at each length, so that only the length differs.
        let documents = (lengths[lengths.len() - 1].min(8192) / length).max(1);
        for backward in [false, true] {
            cases.push(case(setting, &spec, [documents, length], setting.main_format(), backward));
        }
    }
    for format in setting.formats().into_iter().skip(1) {
        cases.push(case(setting, &spec, [1, main], format, false));
        cases.push(case(setting, &spec, [1, main], format, true));
    }
    cases
}

fn case<B: Kernels>(
    setting: &Setting<B>,
    spec: &AttentionSpec,
    [documents, length]: [usize; 2],
    (dtype, name): (DType, &'static str),
    backward: bool,
) -> Case<B> {
    let (device, count) = (setting.device.clone(), documents * length);
    // Two GEMMs over the causal half of the scores; the backward has five.
    let forward = 4.0 * 0.5 * (spec.heads * spec.head_dim) as f64 * documents as f64 * (length as f64).powi(2);
    let moved = dtype.size() as f64 * count as f64 * (2 * spec.query_size() + 2 * spec.kv_size()) as f64;
    let (flops, bytes) = if backward { (2.5 * forward, 2.0 * moved) } else { (forward, moved) };
    let sizes = [
        ("documents", documents),
        ("length", length),
        ("heads", spec.heads),
        ("kv_heads", spec.kv_heads),
        ("head_dim", spec.head_dim),
    ];
    let (pass, spec) = (if backward { "backward" } else { "forward" }, spec.clone());
    Case {
        key: key("attention", pass, &format!("causal, of {}", setting.model().name()), name, &sizes),
        work: work(count as f64, "tokens", flops, bytes),
        axis: axis("row length", length),
        tolerance: tolerance(dtype),
        set_bytes: bytes,
        prepare: Box::new(move || prepare(&device, &spec, [documents, length], dtype, backward)),
    }
}

fn prepare<B: Kernels>(
    device: &B::Device,
    spec: &AttentionSpec,
    [documents, length]: [usize; 2],
    dtype: DType,
    backward: bool,
) -> Prepared<B> {
    let count = documents * length;
    let values = |width: usize| random::<B, 2>([count, width], 1.0, dtype, device);
    let qkv = Qkv { q: values(spec.query_size()), k: values(spec.kv_size()), v: values(spec.kv_size()) };
    let boundaries: Vec<u32> = (0..=documents).map(|document| (document * length) as u32).collect();
    let packed = Documents::<B>::new(&boundaries, device);
    let (inputs, spec, device) = (qkv.clone(), spec.clone(), device.clone());
    if !backward {
        let checked = spec.clone();
        let call = move || {
            let attend = || B::packed_attention(&inputs, None, &spec, &packed).o;
            Output::Tensors(vec![B::section(&device, attend)])
        };
        let check = move |output: Output<B>| {
            let case = Checked::of(&qkv, &checked, length);
            let expected = reference::forward(&case.qkv, None, &case.spec, &case.documents).o;
            vec![Comparison::of_tensors("output", case.queries(&output.tensors()[0]), expected)]
        };
        return Prepared::new(call, check);
    }
    let d_o = values(spec.query_size());
    let saved = B::section(&device, || B::packed_attention(&inputs, None, &spec, &packed));
    let (gradient, checked) = (d_o.clone(), spec.clone());
    let call = move || {
        let saved = (inputs.clone(), saved.clone());
        let backward = || B::packed_attention_backward(saved.0, None, &spec, saved.1, gradient.clone(), &packed);
        let (Qkv { q, k, v }, _) = B::section(&device, backward);
        Output::Tensors(vec![q, k, v])
    };
    let check = move |output: Output<B>| check_backward(&output.tensors(), &qkv, &d_o, &checked, length);
    Prepared::new(call, check)
}

fn check_backward<B: Kernels>(
    got: &[Tensor<B, 2>],
    qkv: &Qkv<B>,
    d_o: &Tensor<B, 2>,
    spec: &AttentionSpec,
    length: usize,
) -> Vec<Comparison> {
    let case = Checked::of(qkv, spec, length);
    let output = reference::forward(&case.qkv, None, &case.spec, &case.documents);
    let d_o = to_reference(case.queries(d_o));
    let (expected, _) = reference::backward(case.qkv.clone(), None, &case.spec, output, d_o, &case.documents);
    let mut comparisons = vec![Comparison::of_tensors("gradient of queries", case.queries(&got[0]), expected.q)];
    if case.is_whole {
        comparisons.push(Comparison::of_tensors("gradient of keys", case.keys(&got[1]), expected.k));
        comparisons.push(Comparison::of_tensors("gradient of values", case.keys(&got[2]), expected.v));
    }
    comparisons
}

/// The compared part: the first tokens of the first document, the heads of its last key.
struct Checked {
    qkv: Qkv<Flex>,
    spec: AttentionSpec,
    documents: Documents<Flex>,
    is_whole: bool,
    tokens: usize,
}

impl Checked {
    fn of<B: Kernels>(qkv: &Qkv<B>, spec: &AttentionSpec, length: usize) -> Self {
        let tokens = length.min(CHECKED);
        let one = AttentionSpec { heads: spec.heads / spec.kv_heads, kv_heads: 1, ..spec.clone() };
        let documents = Documents::single(tokens, &Default::default());
        let part = |x: &Tensor<B, 2>, width| to_reference(last_columns(x, tokens, width));
        let (queries, keys) = (one.query_size(), one.kv_size());
        let qkv = Qkv { q: part(&qkv.q, queries), k: part(&qkv.k, keys), v: part(&qkv.v, keys) };
        Self { qkv, spec: one, documents, is_whole: tokens == length, tokens }
    }

    fn queries<B: Kernels>(&self, x: &Tensor<B, 2>) -> Tensor<B, 2> {
        last_columns(x, self.tokens, self.spec.query_size())
    }

    fn keys<B: Kernels>(&self, x: &Tensor<B, 2>) -> Tensor<B, 2> {
        last_columns(x, self.tokens, self.spec.kv_size())
    }
}

fn last_columns<B: Kernels>(x: &Tensor<B, 2>, rows: usize, columns: usize) -> Tensor<B, 2> {
    x.clone().narrow(0, 0, rows).narrow(1, x.dims()[1] - columns, columns)
}
