//! The gated delta rule against its reference, over packed documents, with value heads that share keys and without.

use firebrick_arch::{DeltaNetSpec, DeltaProjections};

use super::{DeltaInputs, DeltaParameters, reference};
use crate::Kernels;
use crate::conformance::check::Check;

pub(crate) fn check<B: Kernels>(check: &mut Check<'_, B>) {
    let (tokens, (documents, on_cpu)) = (check.case.tokens(), check.documents());
    for value_heads in check.variants([4, 2]) {
        let spec = DeltaNetSpec {
            key_heads: 2,
            value_heads,
            key_head_dim: 32,
            value_head_dim: 16,
            conv_width: 4,
            projections: DeltaProjections::Joined,
            doubles_beta: false,
            norm_epsilon: None,
        };
        let qkv = check.random([tokens, spec.channels()], 1.0);
        let [a, b] = [(); 2].map(|()| check.random([tokens, value_heads], 1.0));
        let d_o = check.random([tokens, spec.value_size()], 1.0);
        let [a_log, dt_bias] = [(); 2].map(|()| check.random_f32([value_heads], 1.0));
        let inputs = DeltaInputs { qkv: qkv.0, a: a.0, b: b.0 };
        let on_host = DeltaInputs { qkv: qkv.1, a: a.1, b: b.1 };
        let parameters = DeltaParameters { a_log: a_log.0, dt_bias: dt_bias.0 };
        let of_host = DeltaParameters { a_log: a_log.1, dt_bias: dt_bias.1 };

        // The first document may have begun before these tokens, and the last one go on after them.
        let is_tile = value_heads == 4;
        let documents = documents.clone().of_tile(is_tile, is_tile);
        let on_cpu = on_cpu.clone().of_tile(is_tile, is_tile);
        let [start, d_end] = [(); 2].map(|()| {
            let (ours, expected) = check.random_f32([value_heads, 32, 16], 0.2);
            (is_tile.then_some(ours), is_tile.then_some(expected))
        });
        let output = B::gated_delta(&inputs, &parameters, &spec, &documents, start.0);
        let expected = reference::forward(&on_host, &of_host, &spec, &on_cpu, start.1);
        check.compare("gated_delta", output.o, expected.o);
        if is_tile {
            let end = expected.end.clone().expect("it goes on");
            check.compare("gated_delta: end", output.end.clone().expect("so does this"), end);
        }
        let backward = |parameters_train| {
            let (inputs, states, d_o) = (inputs.clone(), output.states.clone(), d_o.0.clone());
            let d_end = d_end.0.clone();
            B::gated_delta_backward(inputs, &parameters, &spec, states, d_o, d_end, &documents, parameters_train)
        };
        let frozen = backward(false);
        assert!(frozen.parameters.is_none(), "frozen parameters have no gradient");
        let found = backward(true);
        let expected =
            reference::backward(on_host, &of_host, &spec, expected.states, d_o.1, d_end.1.clone(), &on_cpu, true);
        if is_tile {
            let start = expected.start.clone().expect("it began before");
            check.compare("gated_delta_backward: start", found.start.clone().expect("so did this"), start);
        }
        let (frozen, found, d_parameters) = (frozen.inputs, found.inputs, found.parameters);
        let (expected, of_parameters) = (expected.inputs, expected.parameters);
        check.compare("gated_delta_backward: qkv, frozen parameters", frozen.qkv, expected.qkv.clone());
        check.compare("gated_delta_backward: qkv", found.qkv, expected.qkv);
        check.compare("gated_delta_backward: a", found.a, expected.a.clone());
        check.compare_sums("gated_delta_backward: b", found.b, expected.b);
        let found = d_parameters.expect("parameters that train have gradients");
        let of_parameters = of_parameters.expect("and in the reference");
        // Both are sums over the tokens, of the gradients of `a` and of up to 2.4 times as much.
        let terms = expected.a.mul_scalar(2.0);
        check.compare_sums_of("gated_delta_backward: a_log", found.a_log, of_parameters.a_log, terms.clone());
        check.compare_sums_of("gated_delta_backward: dt_bias", found.dt_bias, of_parameters.dt_bias, terms);
    }
}
