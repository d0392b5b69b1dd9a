//! The rule in chunks against its definition, token by token, and Burn's autodiff of it.

use std::ops::Range;

use burn_tensor::activation::{sigmoid, softplus};
use burn_tensor::{Tensor, backend::Backend};
use firebrick_arch::{DeltaNetSpec, DeltaProjections};

use super::rule::{self, RuleInputs};
use super::{Chunks, DeltaInputs, DeltaParameters, DeltaState, reference};
use crate::testing::{Plain, Recorded, assert_close, backward as recorded_backward, leaf, random};
use crate::{CachedTokens, Documents, NewTokens};

const SPEC: DeltaNetSpec = DeltaNetSpec {
    key_heads: 2,
    value_heads: 4,
    key_head_dim: 8,
    value_head_dim: 6,
    conv_width: 4,
    projections: DeltaProjections::Joined,
    doubles_beta: false,
    norm_epsilon: None,
};
/// Boundaries of documents of 1, 3, 64, 65 and 70 tokens.
const BOUNDARIES: [u32; 6] = [0, 1, 4, 68, 133, 203];
const TOKENS: usize = 203;

fn ranges() -> Vec<Range<usize>> {
    Documents::<Plain>::new(&BOUNDARIES, &Default::default()).ranges().collect()
}

/// Computes the rule as it is defined.
fn recurrence<B: Backend>(inputs: &RuleInputs<B, 3>) -> Tensor<B, 3> {
    let ([_, heads, k], v) = (inputs.k.dims(), inputs.v.dims()[2]);
    let mut outputs = Vec::new();
    for document in ranges() {
        let mut state = Tensor::<B, 3>::zeros([heads, k, v], &inputs.k.device());
        for token in document {
            let of_token = |x: &Tensor<B, 3>| x.clone().narrow(0, token, 1).swap_dims(0, 1);
            let [q, k, v] = [&inputs.q, &inputs.k, &inputs.v].map(of_token);
            state = state.mul(of_token(&inputs.decay).exp().swap_dims(1, 2));
            let written = v.sub(k.clone().matmul(state.clone()));
            state = state.add(k.swap_dims(1, 2).matmul(written.mul(of_token(&inputs.beta))));
            outputs.push(q.matmul(state.clone()));
        }
    }
    Tensor::cat(outputs, 1).swap_dims(0, 1)
}

/// Computes the whole operation as it is defined.
fn operation<B: Backend>(inputs: &DeltaInputs<B>, parameters: &DeltaParameters<B>) -> Tensor<B, 2> {
    let of_key_head = |first: usize, head: usize| {
        let x = inputs.qkv.clone().narrow(1, first + head / 2 * 8, 8);
        x.clone().div(x.powf_scalar(2.0).sum_dim(1).add_scalar(1e-6).sqrt()).unsqueeze_dim::<3>(1)
    };
    let of_heads = |first: usize| Tensor::cat((0..4).map(|head| of_key_head(first, head)).collect(), 1);
    let biased = inputs.a.clone().add(parameters.dt_bias.clone().unsqueeze());
    let decay = softplus(biased, 1.0).mul(parameters.a_log.clone().exp().neg().unsqueeze());
    let rule_inputs = RuleInputs {
        q: of_heads(0).div_scalar(8f64.sqrt()),
        k: of_heads(16),
        v: inputs.qkv.clone().narrow(1, 32, 24).reshape([TOKENS, 4, 6]),
        beta: sigmoid(inputs.b.clone()).unsqueeze_dim(2),
        decay: decay.unsqueeze_dim(2),
    };
    recurrence(&rule_inputs).reshape([TOKENS, 24])
}

/// Returns queries, keys of length one at most, values, factors in `0..1`, and log decays in `-2..0`.
fn rule_inputs() -> RuleInputs<Plain, 3> {
    let [q, k] = [1, 2].map(|seed| random::<Plain, 3>(seed, [TOKENS, 4, 8]).div_scalar(8f64.sqrt()));
    let beta = random::<Plain, 3>(4, [TOKENS, 4, 1]).add_scalar(1.0).div_scalar(2.0);
    let decay = random::<Plain, 3>(5, [TOKENS, 4, 1]).sub_scalar(1.0);
    RuleInputs { q, k, v: random(3, [TOKENS, 4, 6]), beta, decay }
}

#[track_caller]
fn assert_rule(inputs: RuleInputs<Plain, 3>, tolerance: f32) {
    let leaves = [&inputs.q, &inputs.k, &inputs.v, &inputs.beta, &inputs.decay].map(leaf);
    let [q, k, v, beta, decay] = leaves.clone();
    let expected = recurrence(&RuleInputs { q, k, v, beta, decay });
    let chunks = Chunks::new(&ranges(), &Default::default());
    let output = rule::forward(inputs.clone(), &chunks, None);
    assert_close(output.o, expected.clone().inner(), tolerance);
    let d_o = random(6, [TOKENS, 4, 6]);
    let (found, _) = rule::backward(inputs, &chunks, output.states, d_o.clone(), None);
    let expected = recorded_backward(expected, &d_o);
    for (found, leaf) in [found.q, found.k, found.v, found.beta, found.decay].into_iter().zip(&leaves) {
        assert_close(found, leaf.grad(&expected).unwrap(), tolerance);
    }
}

fn inputs() -> (DeltaInputs<Plain>, DeltaParameters<Plain>) {
    let [a, b] = [2, 3].map(|seed| random(seed, [TOKENS, 4]));
    let [a_log, dt_bias] = [4, 5].map(|seed| random(seed, [4]));
    (DeltaInputs { qkv: random(1, [TOKENS, SPEC.channels()]), a, b }, DeltaParameters { a_log, dt_bias })
}

fn part(inputs: &DeltaInputs<Plain>, range: &Range<usize>) -> DeltaInputs<Plain> {
    let part = |x: &Tensor<Plain, 2>| x.clone().narrow(0, range.start, range.len());
    DeltaInputs { qkv: part(&inputs.qkv), a: part(&inputs.a), b: part(&inputs.b) }
}

#[test]
fn chunks_equal_the_recurrence_forward_and_backward() {
    assert_rule(rule_inputs(), 1e-5);
}

#[test]
fn equal_keys_without_decay_are_stable() {
    let inputs = rule_inputs();
    let ones = inputs.k.ones_like();
    let (k, beta) = (ones.div_scalar(8f64.sqrt()), inputs.beta.ones_like().mul_scalar(0.97));
    // The gradients of decays cancel to a few hundredths of their terms.
    assert_rule(RuleInputs { k, beta, decay: inputs.decay.zeros_like(), ..inputs }, 3e-4);
}

#[test]
fn tokens_that_forget_everything_give_no_nan() {
    let inputs = rule_inputs();
    let decay = inputs.decay.clone().div_scalar(2.0).powi_scalar(15).mul_scalar(200.0);
    assert_rule(RuleInputs { decay, ..inputs }, 1e-3);
}

#[test]
fn the_backward_equals_autodiff_of_the_definition() {
    let (inputs, parameters) = inputs();
    let [qkv, a, b] = [&inputs.qkv, &inputs.a, &inputs.b].map(leaf);
    let [a_log, dt_bias] = [&parameters.a_log, &parameters.dt_bias].map(leaf);
    let recorded = DeltaInputs { qkv: qkv.clone(), a: a.clone(), b: b.clone() };
    let of_recorded = DeltaParameters { a_log: a_log.clone(), dt_bias: dt_bias.clone() };
    let o = operation::<Recorded>(&recorded, &of_recorded);
    let documents = Documents::new(&BOUNDARIES, &Default::default());
    let output = reference::forward(&inputs, &parameters, &SPEC, &documents, None);
    assert_close(output.o, o.clone().inner(), 1e-5);
    let d_o = random(6, [TOKENS, SPEC.value_size()]);
    let expected = recorded_backward(o, &d_o);
    let gradients = reference::backward(inputs, &parameters, &SPEC, output.states, d_o, None, &documents, true);
    let (found, of_parameters) = (gradients.inputs, gradients.parameters);
    for (found, leaf) in [found.qkv, found.a, found.b].into_iter().zip([qkv, a, b]) {
        assert_close(found, leaf.grad(&expected).unwrap(), 1e-5);
    }
    let of_parameters = of_parameters.unwrap();
    for (found, leaf) in [of_parameters.a_log, of_parameters.dt_bias].into_iter().zip([a_log, dt_bias]) {
        assert_close(found, leaf.grad(&expected).unwrap(), 1e-4);
    }
}

#[test]
fn tokens_one_by_one_give_what_documents_give() {
    let ((inputs, parameters), device) = (inputs(), Default::default());
    let whole = reference::forward(&inputs, &parameters, &SPEC, &Documents::new(&BOUNDARIES, &device), None).o;
    // The last two documents side by side, 65 and 70 tokens; the rows of the first one had another sequence before.
    let stale = Tensor::ones([4, 8, 6], &device);
    let (mut state, mut past) = (DeltaState::from([(300, stale)]), [0, 0]);
    for counts in [[1, 3], [50, 1], [1, 65], [13, 1]] {
        let new: Vec<_> =
            [0, 1].map(|place| [68, 133][place] + past[place]..[68, 133][place] + past[place] + counts[place]).into();
        let sequence =
            |place: usize| NewTokens { pages: vec![[300, 0][place]; 8], past: past[place], count: counts[place] };
        let tokens = CachedTokens::new([0, 1].map(sequence).to_vec(), &device);
        let parts = [0, 1].map(|place| part(&inputs, &new[place]));
        let join =
            |of: fn(&DeltaInputs<Plain>) -> &Tensor<Plain, 2>| Tensor::cat(parts.iter().map(of).cloned().collect(), 0);
        let both = DeltaInputs { qkv: join(|x| &x.qkv), a: join(|x| &x.a), b: join(|x| &x.b) };
        let found = reference::cached(&both, &parameters, &SPEC, &mut state, &tokens);
        let expected = new.iter().map(|new| whole.clone().narrow(0, new.start, new.len())).collect();
        assert_close(found, Tensor::cat(expected, 0), 1e-5);
        past = [0, 1].map(|place| past[place] + counts[place]);
    }
    assert_eq!(past, [65, 70]);
}

/// Two tiles of a row, whose boundary is a chunk's in a document, equal the row forward and backward.
#[test]
fn tiles_that_pass_states_on_equal_the_row() {
    let ((inputs, parameters), device) = (inputs(), Default::default());
    let documents = |boundaries: &[u32]| Documents::<Plain>::new(boundaries, &device);
    let whole = documents(&BOUNDARIES);
    let output = reference::forward(&inputs, &parameters, &SPEC, &whole, None);
    let d_o = random(6, [TOKENS, SPEC.value_size()]);
    let backward = |inputs: DeltaInputs<Plain>, states, d_o, d_end, documents: &Documents<Plain>| {
        reference::backward(inputs, &parameters, &SPEC, states, d_o, d_end, documents, false)
    };
    let expected = backward(inputs.clone(), output.states, d_o.clone(), None, &whole);

    // One chunk into the last document.
    let [last, end] = [BOUNDARIES[BOUNDARIES.len() - 2], BOUNDARIES[BOUNDARIES.len() - 1]];
    let cut = last + 64;
    let first = [&BOUNDARIES[..BOUNDARIES.len() - 1], &[cut]].concat();
    let first = documents(&first).of_tile(false, true);
    let second = documents(&[0, end - cut]).of_tile(true, false);
    let (cut, end) = (cut as usize, end as usize);
    let [of_first, of_second] = [0..cut, cut..end].map(|range| part(&inputs, &range));
    let rows = |x: &Tensor<Plain, 2>, range: std::ops::Range<usize>| x.clone().narrow(0, range.start, range.len());
    let one = reference::forward(&of_first, &parameters, &SPEC, &first, None);
    let two = reference::forward(&of_second, &parameters, &SPEC, &second, one.end);
    assert_close(Tensor::cat(vec![one.o, two.o], 0), output.o, 1e-6);
    let of_two = backward(of_second, two.states, rows(&d_o, cut..end), None, &second);
    let of_one = backward(of_first, one.states, rows(&d_o, 0..cut), of_two.start, &first);
    let each = |x: DeltaInputs<Plain>| [x.qkv, x.a, x.b];
    let found = each(of_one.inputs).into_iter().zip(each(of_two.inputs));
    for ((one, two), expected) in found.zip(each(expected.inputs)) {
        assert_close(Tensor::cat(vec![one, two], 0), expected, 1e-5);
    }
}
