//! Rotary position embedding, rotate-half form: halves `(a, b)` of each head become `(a cos - b sin, b cos + a sin)`.
//!
//! The tables hold one row a token, looked up by the token's position inside its document, so packed rows need nothing
//! special. A scaled rotary embedding (yarn) multiplies both tables by its attention factor; backward does the same.

use burn_tensor::{Tensor, backend::Backend};

use super::{to_dtype, to_f32};

/// Cosine and sine of each token's angles, `[n, k / 2]` f32 each.
#[derive(Clone, Debug)]
pub struct RotaryTables<B: Backend> {
    /// Cosines, times the attention factor.
    pub cos: Tensor<B, 2>,
    /// Sines, times the attention factor.
    pub sin: Tensor<B, 2>,
}

/// See [`crate::Kernels::rotary`].
pub fn forward<B: Backend>(x_nhk: Tensor<B, 3>, tables: &RotaryTables<B>) -> Tensor<B, 3> {
    rotate(x_nhk, tables.cos.clone(), tables.sin.clone())
}

/// See [`crate::Kernels::rotary_backward`].
pub fn backward<B: Backend>(dy_nhk: Tensor<B, 3>, tables: &RotaryTables<B>) -> Tensor<B, 3> {
    rotate(dy_nhk, tables.cos.clone(), tables.sin.clone().neg())
}

fn rotate<B: Backend>(x_nhk: Tensor<B, 3>, cos: Tensor<B, 2>, sin: Tensor<B, 2>) -> Tensor<B, 3> {
    let (dtype, [_, _, width]) = (x_nhk.dtype(), x_nhk.dims());
    let (cos, sin): (Tensor<B, 3>, Tensor<B, 3>) = (cos.unsqueeze_dim(1), sin.unsqueeze_dim(1));
    let x_nhk = to_f32(x_nhk);
    let first = x_nhk.clone().narrow(2, 0, width / 2);
    let second = x_nhk.narrow(2, width / 2, width / 2);
    let rotated_first = first.clone().mul(cos.clone()).sub(second.clone().mul(sin.clone()));
    let rotated_second = second.mul(cos).add(first.mul(sin));
    to_dtype(Tensor::cat(vec![rotated_first, rotated_second], 2), dtype)
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Plain, Recorded, assert_close, backward as recorded_backward, leaf, random};
    use super::*;

    #[test]
    fn rotary_backward_equals_autodiff() {
        let (x, dy) = (random::<Plain, 3>(1, [5, 3, 8]), random::<Plain, 3>(2, [5, 3, 8]));
        let tables = RotaryTables { cos: random::<Plain, 2>(3, [5, 4]), sin: random(4, [5, 4]) };
        let recorded = RotaryTables::<Recorded> {
            cos: Tensor::from_inner(tables.cos.clone()),
            sin: Tensor::from_inner(tables.sin.clone()),
        };
        let rx = leaf(&x);
        let expected = recorded_backward(forward(rx.clone(), &recorded), &dy);
        assert_close(backward(dy, &tables), rx.grad(&expected).unwrap(), 1e-5);
    }

    #[test]
    fn rotating_back_undoes_rotating() {
        let angles = random::<Plain, 2>(1, [6, 4]).mul_scalar(3.0);
        let tables = RotaryTables { cos: angles.clone().cos(), sin: angles.sin() };
        let x = random::<Plain, 3>(2, [6, 2, 8]);
        assert_close(backward(forward(x.clone(), &tables), &tables), x, 1e-5);
    }
}
