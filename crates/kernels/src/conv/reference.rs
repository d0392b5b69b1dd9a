//! Causal convolutions in ordinary Burn operations, in f32: one shifted copy of the products per column of the filters.
//!
//! Trade-off: `k` passes over memory, and a mask of all tokens for each shift.

use burn_tensor::activation::sigmoid;
use burn_tensor::{Tensor, TensorData, backend::Backend};

use super::{ConvInputs, ConvState};
use crate::attention::{CachedTokens, Documents};
use crate::dtype::{to_dtype, to_f32};

/// Implements [`crate::ConvOps::causal_conv`].
pub fn forward<B: Backend>(inputs: &ConvInputs<B>, filters_dk: Tensor<B, 2>, documents: &Documents<B>) -> Tensor<B, 2> {
    let s_nd = convolved(product(inputs), &filters_dk, documents);
    gated(inputs, s_nd)
}

/// Returns what is convolved.
fn product<B: Backend>(inputs: &ConvInputs<B>) -> Tensor<B, 2> {
    let x_nd = to_f32(inputs.x.clone());
    match &inputs.gates {
        Some([b_nd, _]) => to_f32(b_nd.clone()).mul(x_nd),
        None => x_nd,
    }
}

/// Multiplies the convolved values by their gate, or passes them through SiLU.
fn gated<B: Backend>(inputs: &ConvInputs<B>, s_nd: Tensor<B, 2>) -> Tensor<B, 2> {
    let y_nd = match &inputs.gates {
        Some([_, c_nd]) => to_f32(c_nd.clone()).mul(s_nd),
        None => s_nd.clone().mul(sigmoid(s_nd)),
    };
    to_dtype(y_nd, inputs.x.dtype())
}

/// Implements [`crate::ConvOps::causal_conv_backward`].
pub fn backward<B: Backend>(
    inputs: ConvInputs<B>,
    filters_dk: Tensor<B, 2>,
    dy_nd: Tensor<B, 2>,
    documents: &Documents<B>,
    filters_train: bool,
) -> (ConvInputs<B>, Option<Tensor<B, 2>>) {
    let dtype = inputs.x.dtype();
    let (u_nd, dy_nd) = (product(&inputs), to_f32(dy_nd));
    let s_nd = convolved(u_nd.clone(), &filters_dk, documents);
    let (ds_nd, d_c) = match &inputs.gates {
        Some([_, c_nd]) => (dy_nd.clone().mul(to_f32(c_nd.clone())), Some(dy_nd.mul(s_nd))),
        None => {
            let gate = sigmoid(s_nd.clone());
            let slope = gate.clone().mul(s_nd.mul(gate.neg().add_scalar(1.0)).add_scalar(1.0));
            (dy_nd.mul(slope), None)
        }
    };
    let [channels, width] = filters_dk.dims();
    let mut du_nd = ds_nd.zeros_like();
    let mut d_filters = Vec::new();
    for shift in (0..width).rev() {
        let column = column(&filters_dk, shift);
        let masked = ds_nd.clone().mul(mask(documents, shift, &ds_nd.device()));
        if filters_train {
            d_filters.push(masked.clone().mul(later(u_nd.clone(), shift)).sum_dim(0).reshape([channels, 1]));
        }
        du_nd = du_nd.add(earlier(masked, shift).mul(column));
    }
    let d_filters = filters_train.then(|| Tensor::cat(d_filters, 1));
    let gradients = match inputs.gates.zip(d_c) {
        None => ConvInputs { gates: None, x: to_dtype(du_nd, dtype) },
        Some(([b_nd, _], d_c)) => {
            let (d_b, d_x) = (du_nd.clone().mul(to_f32(inputs.x)), du_nd.mul(to_f32(b_nd)));
            ConvInputs { gates: Some([d_b, d_c].map(|gradient| to_dtype(gradient, dtype))), x: to_dtype(d_x, dtype) }
        }
    };
    (gradients, d_filters)
}

/// Implements [`crate::ConvOps::cached_causal_conv`].
pub fn cached<B: Backend>(
    inputs: &ConvInputs<B>,
    filters_dk: Tensor<B, 2>,
    state: &mut ConvState<B>,
    tokens: &CachedTokens<B>,
) -> Tensor<B, 2> {
    let width = filters_dk.dims()[1];
    let u_nd = product(inputs);
    let mut results = Vec::new();
    for (new, range) in tokens.in_pass() {
        let u_new = u_nd.clone().narrow(0, range.start, range.len());
        if width == 1 {
            results.push(u_new.mul(column(&filters_dk, 0)));
            continue;
        }
        let past = state.remove(&new.sequence()).filter(|_| new.past > 0);
        let past = past.unwrap_or_else(|| zeros(&u_nd, width - 1));
        let all = Tensor::cat(vec![past, u_new], 0);
        let of_shift =
            |shift: usize| all.clone().narrow(0, width - 1 - shift, range.len()).mul(column(&filters_dk, shift));
        results.push((1..width).map(of_shift).fold(of_shift(0), Tensor::add));
        state.insert(new.sequence(), all.narrow(0, range.len(), width - 1));
    }
    gated(inputs, Tensor::cat(results, 0))
}

/// Returns the sum over a token and those before it in its document, each times its column of the filters.
fn convolved<B: Backend>(u_nd: Tensor<B, 2>, filters_dk: &Tensor<B, 2>, documents: &Documents<B>) -> Tensor<B, 2> {
    let [_, width] = filters_dk.dims();
    let of_shift = |shift: usize| {
        later(u_nd.clone(), shift).mul(mask(documents, shift, &u_nd.device())).mul(column(filters_dk, shift))
    };
    (1..width).map(of_shift).fold(of_shift(0), Tensor::add)
}

/// Returns the column of the filters that meets the token `shift` before, `[1, d]`.
fn column<B: Backend>(filters_dk: &Tensor<B, 2>, shift: usize) -> Tensor<B, 2> {
    let [channels, width] = filters_dk.dims();
    filters_dk.clone().narrow(1, width - 1 - shift, 1).reshape([1, channels])
}

/// Moves rows to `shift` rows later; the first are zero. No tensor is empty, which CubeCL cannot launch.
fn later<B: Backend>(x_nd: Tensor<B, 2>, shift: usize) -> Tensor<B, 2> {
    let tokens = x_nd.dims()[0];
    match shift {
        0 => x_nd,
        shift if shift >= tokens => x_nd.zeros_like(),
        shift => Tensor::cat(vec![zeros(&x_nd, shift), x_nd.narrow(0, 0, tokens - shift)], 0),
    }
}

/// Moves rows to `shift` rows earlier; the last are zero.
fn earlier<B: Backend>(x_nd: Tensor<B, 2>, shift: usize) -> Tensor<B, 2> {
    let tokens = x_nd.dims()[0];
    match shift {
        0 => x_nd,
        shift if shift >= tokens => x_nd.zeros_like(),
        shift => Tensor::cat(vec![x_nd.clone().narrow(0, shift, tokens - shift), zeros(&x_nd, shift)], 0),
    }
}

/// Returns this many rows of zeros, as wide as `x_nd`.
fn zeros<B: Backend>(x_nd: &Tensor<B, 2>, rows: usize) -> Tensor<B, 2> {
    Tensor::zeros([rows, x_nd.dims()[1]], (&x_nd.device(), x_nd.dtype()))
}

/// Returns one for each token that has a token `shift` before it in its document, else zero, `[n, 1]`.
fn mask<B: Backend>(documents: &Documents<B>, shift: usize, device: &B::Device) -> Tensor<B, 2> {
    let has = |range: std::ops::Range<usize>| (0..range.len()).map(move |place| f32::from(u8::from(place >= shift)));
    let values: Vec<f32> = documents.ranges().flat_map(has).collect();
    Tensor::from_data(TensorData::new(values, [documents.tokens(), 1]), device)
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use crate::NewTokens;
    use crate::testing::{Plain, assert_close, backward as recorded_backward, leaf, random};

    fn inputs(tokens: usize, is_gated: bool) -> ConvInputs<Plain> {
        let [b, c, x] = [1, 2, 3].map(|seed| random::<Plain, 2>(seed, [tokens, 6]));
        ConvInputs { gates: is_gated.then_some([b, c]), x }
    }

    fn part(inputs: &ConvInputs<Plain>, start: usize, length: usize) -> ConvInputs<Plain> {
        let part = |x: &Tensor<Plain, 2>| x.clone().narrow(0, start, length);
        ConvInputs { gates: inputs.gates.as_ref().map(|gates| gates.each_ref().map(part)), x: part(&inputs.x) }
    }

    #[test]
    fn documents_do_not_see_each_other() {
        let device = Default::default();
        for (width, is_gated) in [(1, true), (3, true), (4, false), (7, true)] {
            let (inputs, filters) = (inputs(11, is_gated), random::<Plain, 2>(4, [6, width]));
            let packed = forward(&inputs, filters.clone(), &Documents::new(&[0, 2, 3, 11], &device));
            for (start, length) in [(0, 2), (2, 1), (3, 8)] {
                let alone = part(&inputs, start, length);
                let alone = forward(&alone, filters.clone(), &Documents::single(length, &device));
                assert_close(packed.clone().narrow(0, start, length), alone, 1e-6);
            }
        }
    }

    #[test]
    fn backward_equals_autodiff() {
        let device = Default::default();
        for (width, is_gated) in [(1, false), (3, true), (4, false), (7, true)] {
            let (filters, dy) = (random::<Plain, 2>(4, [6, width]), random::<Plain, 2>(5, [9, 6]));
            let inputs = inputs(9, is_gated);
            let recorded: Vec<_> = inputs.gates.iter().flatten().chain([&inputs.x, &filters]).map(leaf).collect();
            let mut leaves = recorded.clone();
            let [of_filters, x] = [(); 2].map(|()| leaves.pop().unwrap());
            let of_leaves = ConvInputs { gates: leaves.try_into().ok(), x };
            let y = forward(&of_leaves, of_filters, &Documents::new(&[0, 5, 6, 9], &Default::default()));
            let expected = recorded_backward(y, &dy);
            let documents = Documents::new(&[0, 5, 6, 9], &device);
            let (gradients, d_filters) = backward(inputs, filters, dy, &documents, true);
            let found = gradients.gates.into_iter().flatten().chain([gradients.x, d_filters.unwrap()]);
            for (found, recorded) in found.zip(recorded) {
                assert_close(found, recorded.grad(&expected).unwrap(), 1e-5);
            }
        }
    }

    #[test]
    fn tokens_one_by_one_give_what_a_document_gives() {
        let device = Default::default();
        for is_gated in [true, false] {
            let (inputs, filters) = (inputs(7, is_gated), random::<Plain, 2>(4, [6, 4]));
            let whole = forward(&inputs, filters.clone(), &Documents::single(7, &device));
            let mut state = ConvState::new();
            let mut past = 0;
            for count in [3, 1, 1, 2] {
                let new = part(&inputs, past, count);
                let tokens = CachedTokens::new(vec![NewTokens { pages: vec![5], past, count }], &device);
                let found = cached(&new, filters.clone(), &mut state, &tokens);
                assert_close(found, whole.clone().narrow(0, past, count), 1e-6);
                past += count;
            }
        }
    }
}
