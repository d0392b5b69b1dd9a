//! Causal convolutions against their reference, over packed documents that are shorter and longer than the filters.

use super::{ConvInputs, reference};
use crate::Kernels;
use crate::conformance::check::Check;

pub(crate) fn check<B: Kernels>(check: &mut Check<'_, B>) {
    let size = [check.case.tokens(), check.case.hidden_size];
    let (documents, on_cpu) = check.documents();
    for (width, is_gated) in check.variants([(3, true), (4, false), (7, true), (1, true)]) {
        let [b, c, x, dy] = [(); 4].map(|()| check.random(size, 1.0));
        let filters = check.random_f32([size[1], width], 0.5);
        let inputs = ConvInputs { gates: is_gated.then_some([b.0, c.0]), x: x.0 };
        let expected = ConvInputs { gates: is_gated.then_some([b.1, c.1]), x: x.1 };
        let y = B::causal_conv(&inputs, filters.0.clone(), &documents);
        check.compare("causal_conv", y, reference::forward(&expected, filters.1.clone(), &on_cpu));
        let (frozen, none) =
            B::causal_conv_backward(inputs.clone(), filters.0.clone(), dy.0.clone(), &documents, false);
        assert!(none.is_none(), "frozen filters have no gradient");
        let (found, d_filters) = B::causal_conv_backward(inputs, filters.0, dy.0, &documents, true);
        let (expected, of_filters) = reference::backward(expected, filters.1, dy.1, &on_cpu, true);
        for (found, expected) in found.gates.into_iter().flatten().zip(expected.gates.into_iter().flatten()) {
            check.compare("causal_conv_backward: gates", found, expected);
        }
        check.compare("causal_conv_backward: x", found.x, expected.x.clone());
        check.compare("causal_conv_backward: x, frozen filters", frozen.x, expected.x);
        let d_filters = d_filters.expect("filters that train have a gradient");
        check.compare("causal_conv_backward: filters", d_filters, of_filters.expect("and in the reference"));
    }
}
