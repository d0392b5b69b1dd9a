//! Gated short convolutions against their reference, over packed documents that are shorter and longer than the filters.

use super::{ConvInputs, reference};
use crate::Kernels;
use crate::conformance::check::Check;

pub(crate) fn check<B: Kernels>(check: &mut Check<'_, B>) {
    let size = [check.case.tokens(), check.case.hidden_size];
    let (documents, on_cpu) = check.documents();
    for width in check.variants([3, 4, 7, 1]) {
        let [b, c, x, dy] = [(); 4].map(|()| check.random(size, 1.0));
        let filters = check.random_f32([size[1], width], 0.5);
        let inputs = ConvInputs { b: b.0, c: c.0, x: x.0 };
        let expected = ConvInputs { b: b.1, c: c.1, x: x.1 };
        let y = B::short_conv(&inputs, filters.0.clone(), &documents);
        check.compare("short_conv", y, reference::forward(&expected, filters.1.clone(), &on_cpu));
        let (found, d_filters) = B::short_conv_backward(inputs, filters.0, dy.0, &documents);
        let (expected, of_filters) = reference::backward(expected, filters.1, dy.1, &on_cpu);
        check.compare("short_conv_backward: b", found.b, expected.b);
        check.compare("short_conv_backward: c", found.c, expected.c);
        check.compare("short_conv_backward: x", found.x, expected.x);
        check.compare("short_conv_backward: filters", d_filters, of_filters);
    }
}
