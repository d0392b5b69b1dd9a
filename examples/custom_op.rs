//! A custom operation: squared ReLU (So et al., Primer, 2021), `y = max(x, 0)^2`, with a hand-written backward that is checked against
//! finite differences.
//!
//! Firebrick writes every backward by hand, as a second function on plain tensors: it keeps in memory what it needs and nothing else.
//! docs/adding-a-kernel.md tells how such a pair becomes an operation of `firebrick-kernels` that a backend can override.
//! Trade-off: in Burn's operations each arithmetic step is a pass over memory; a hand-written kernel does all of them in one.
#![expect(clippy::print_stdout, reason = "the report is the output of this program")]

use burn_tensor::backend::Backend;
use burn_tensor::{Distribution, Tensor};
use firebrick_kernels::backends::Flex;

/// `max(x, 0)^2`, `[n, f]`.
fn squared_relu<B: Backend>(x_nf: Tensor<B, 2>) -> Tensor<B, 2> {
    let positive = x_nf.clamp_min(0.0);
    positive.clone().mul(positive)
}

/// Backward of [`squared_relu`] at input `x`: from the gradient of the output to that of the input. The derivative is `2 max(x, 0)`.
fn squared_relu_backward<B: Backend>(x_nf: Tensor<B, 2>, dy_nf: Tensor<B, 2>) -> Tensor<B, 2> {
    x_nf.clamp_min(0.0).mul_scalar(2.0).mul(dy_nf)
}

fn main() -> Result<(), String> {
    let device = Default::default();
    let random = || Tensor::<Flex, 2>::random([64, 96], Distribution::Normal(0.0, 1.0), &device);
    let (x_nf, dy_nf, direction_nf) = (random(), random(), random());

    // The loss sum(dy * y) has the gradient `dy` at the output, whatever `dy` is.
    let loss = |x_nf: Tensor<Flex, 2>| squared_relu(x_nf).mul(dy_nf.clone()).sum().into_scalar();
    let dx_nf = squared_relu_backward(x_nf.clone(), dy_nf.clone());

    // Along any direction, the gradient predicts the slope of the loss. Central differences measure it.
    let step = 1e-2;
    let shifted = |sign: f32| loss(x_nf.clone().add(direction_nf.clone().mul_scalar(sign * step)));
    let measured = (shifted(1.0) - shifted(-1.0)) / (2.0 * step);
    let predicted = dx_nf.mul(direction_nf.clone()).sum().into_scalar();
    println!("slope by the backward: {predicted:.4}, by central differences: {measured:.4}");
    let scale = direction_nf.mul(dy_nf).powi_scalar(2).sum().sqrt().into_scalar();
    if (measured - predicted).abs() > 1e-2 * scale {
        return Err("the backward does not belong to the forward".to_owned());
    }
    println!("the backward agrees with the forward");
    Ok(())
}
