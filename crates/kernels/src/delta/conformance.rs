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

        let output = B::gated_delta(&inputs, &parameters, &spec, &documents);
        let expected = reference::forward(&on_host, &of_host, &spec, &on_cpu);
        check.compare("gated_delta", output.o, expected.o);
        let backward = |parameters_train| {
            let (inputs, states, d_o) = (inputs.clone(), output.states.clone(), d_o.0.clone());
            B::gated_delta_backward(inputs, &parameters, &spec, states, d_o, &documents, parameters_train)
        };
        let (frozen, none) = backward(false);
        assert!(none.is_none(), "frozen parameters have no gradient");
        let (found, d_parameters) = backward(true);
        let (expected, of_parameters) =
            reference::backward(on_host, &of_host, &spec, expected.states, d_o.1, &on_cpu, true);
        check.compare("gated_delta_backward: qkv, frozen parameters", frozen.qkv, expected.qkv.clone());
        check.compare("gated_delta_backward: qkv", found.qkv, expected.qkv);
        check.compare("gated_delta_backward: a", found.a, expected.a);
        check.compare("gated_delta_backward: b", found.b, expected.b);
        let found = d_parameters.expect("parameters that train have gradients");
        let expected = of_parameters.expect("and in the reference");
        check.compare_sums("gated_delta_backward: a_log", found.a_log, expected.a_log);
        check.compare_sums("gated_delta_backward: dt_bias", found.dt_bias, expected.dt_bias);
    }
}
