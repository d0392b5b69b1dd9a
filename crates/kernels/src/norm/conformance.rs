//! RMSNorm against its reference, with and without a residual path and a gradient of the weight.

use super::{NormWeight, reference};
use crate::Kernels;
use crate::conformance::check::Check;

pub(crate) fn check<B: Kernels>(check: &mut Check<'_, B>) {
    let shape = [check.case.tokens(), check.case.hidden_size];
    let (x, dy, residual) = (check.random(shape, 2.0), check.random(shape, 1.0), check.random(shape, 1.0));
    let weight = check.random_f32([shape[1]], 1.0);
    for (trains, offset) in [(false, 0.0), (true, 0.0), (true, 1.0)] {
        let norm = NormWeight { weight: weight.0.clone(), offset, epsilon: 1e-5, trains };
        let expected_norm = NormWeight { weight: weight.1.clone(), offset, epsilon: 1e-5, trains };
        let y = B::rms_norm(x.0.clone(), &norm, None);
        let expected = reference::forward(x.1.clone(), &expected_norm);
        check.compare("rms_norm", y, expected.clone());
        let y = B::rms_norm(x.0.clone(), &norm, Some(residual.0.clone()));
        check.compare("rms_norm: plus a residual", y, expected.add(residual.1.clone()));
        for (past, past_reference) in [(None, None), (Some(residual.0.clone()), Some(residual.1.clone()))] {
            let (dx, dw) = B::rms_norm_backward(x.0.clone(), &norm, dy.0.clone(), past);
            let expected = reference::backward(x.1.clone(), &expected_norm, dy.1.clone(), past_reference);
            check.compare("rms_norm_backward: input", dx, expected.0);
            check.same("rms_norm_backward: which gradients", dw.is_some() == trains);
            check.compare_optional("rms_norm_backward: weight", dw, expected.1);
        }
    }
    // A matrix that is a range of columns of a wider one.
    let width = check.case.hidden_size;
    let wide = check.random([check.case.tokens(), width + 24], 1.0);
    let weight = check.random_f32([width], 1.0);
    let norm = NormWeight { weight: weight.0, offset: 1.0, epsilon: 1e-6, trains: false };
    let expected_norm = NormWeight { weight: weight.1, offset: 1.0, epsilon: 1e-6, trains: false };
    let y = B::rms_norm(wide.0.narrow(1, 8, width), &norm, None);
    check.compare("rms_norm of a view", y, reference::forward(wide.1.narrow(1, 8, width), &expected_norm));
}
