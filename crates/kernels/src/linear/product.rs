//! The products of a group with its weights and adapters, over all its modules at once: outputs, the gradient of the input, and the gradients of
//! the parameters. [`reference`](super::reference) composes `project` and `project_backward` over them.
//!
//! Forward of a module: `y = x Wᵀ + s (x Aᵀ) Bᵀ + bias`. Backward, with `u = x Aᵀ` and `t = s dy B`: `dx = dy W + t A`, `dA = tᵀ x`, `dB = s dyᵀ u`,
//! `dW = dyᵀ x`, `dbias = Σ dy` over the tokens. So `u` and `t` are operands of rank `r` whose columns extend those of `x` and `dy`, and `s B` and
//! `A` those of the weight: a kernel runs both products in one loop over the columns.
//! Trade-off: a group of stacks is multiplied expert by expert (`stacked.rs`).

use std::ops::Range;

use burn_tensor::{DType, Tensor, backend::Backend};

use super::{Adapter, GemmFormat, Group, LinearOps, Module, ModuleGradients, WeightGradient, fp8_reference};
use crate::dtype::{added, plus, to_dtype, to_f32};
use crate::weights::reference::dense;

/// What a product computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The output of each module, from the group's input.
    Output,
    /// The gradient of the group's input, from the gradient of each module's output.
    Input,
}

/// Operands of [`LinearOps::product`].
#[derive(Clone, Debug)]
pub struct Product<'a, B: Backend> {
    /// The modules; not stacks.
    pub group: &'a Group<B>,
    /// What is computed.
    pub side: Side,
    /// The input `[n, i]`; or one gradient `[n, o]` per module. Empty: the low-rank operand alone is multiplied.
    pub factors: Vec<Tensor<B, 2>>,
    /// The result of [`LinearOps::low_rank`] for the same side, `[n, ranks]`; `None`: the weights alone are multiplied.
    pub low_rank: Option<Tensor<B, 2>>,
    /// Whether biases are added to the outputs.
    pub has_bias: bool,
    /// Added to the result: `[n, o]` of a group with one module, or `[n, i]`.
    pub add: Option<Tensor<B, 2>>,
}

impl<'a, B: Backend> Product<'a, B> {
    /// Builds a product to which nothing is added.
    pub fn new(group: &'a Group<B>, side: Side, factors: Vec<Tensor<B, 2>>, low_rank: Option<Tensor<B, 2>>) -> Self {
        Self { group, side, factors, low_rank, has_bias: false, add: None }
    }
}

/// Operands of [`LinearOps::parameter_gradients`].
#[derive(Clone, Debug)]
pub struct GradientOperands<B: Backend> {
    /// Input of the weights, `[n, i]`.
    pub x: Tensor<B, 2>,
    /// Input of the adapters, `[n, i]`: `x` after dropout.
    pub adapters_x: Tensor<B, 2>,
    /// `u`, `[n, ranks]`.
    pub low_rank: Option<Tensor<B, 2>>,
    /// Gradient of each module's output, `[n, o]`.
    pub dy: Vec<Tensor<B, 2>>,
    /// Gradient of each module's sum of weight and adapter before its magnitudes, `[n, o]`; `dy` where it has none.
    pub dz: Vec<Tensor<B, 2>>,
    /// `t`, `[n, ranks]`.
    pub d_low_rank: Option<Tensor<B, 2>>,
}

/// Implements [`LinearOps::low_rank`].
pub fn low_rank<B: LinearOps>(factors: &[Tensor<B, 2>], group: &Group<B>, side: Side) -> Option<Tensor<B, 2>> {
    let dtype = factors.first()?.dtype();
    let of_module = |(index, module): (usize, &Module<B>)| {
        let pair = module.adapter.as_ref()?;
        Some(match side {
            Side::Output => factors[0].clone().matmul(to_dtype(pair.a.clone(), dtype).transpose()),
            Side::Input => factors[index].clone().matmul(scaled_b(pair, dtype)),
        })
    };
    let mut columns: Vec<_> = group.modules.iter().enumerate().filter_map(of_module).collect();
    if columns.len() > 1 { Some(Tensor::cat(columns, 1)) } else { columns.pop() }
}

/// Implements [`LinearOps::product`]: outputs by module; or one gradient, the sum over modules.
///
/// # Panics
/// If the group is one of stacks, or there is nothing to multiply.
pub fn product<B: LinearOps>(product: Product<'_, B>) -> Vec<Tensor<B, 2>> {
    let Product { group, side, factors, low_rank, has_bias, add } = product;
    assert!(group.rows.is_none(), "stacks are multiplied expert by expert");
    let low_ranks = of_modules(low_rank, group);
    let modules = group.modules.iter().zip(low_ranks);
    match side {
        Side::Output => {
            let of_module = |(module, low_nr): (&Module<B>, Option<Tensor<B, 2>>)| {
                let base_no = factors.first().map(|x_ni| match group.gemms {
                    GemmFormat::Compute | GemmFormat::F16 => {
                        x_ni.clone().matmul(dense(&module.weight, x_ni.dtype()).transpose())
                    }
                    GemmFormat::Fp8 => fp8_reference::product(x_ni.clone(), &module.weight),
                });
                let update_no = low_nr.zip(module.adapter.as_ref()).map(|(low_nr, pair)| update(low_nr, pair));
                let y_no = base_no.into_iter().chain(update_no).reduce(Tensor::add).expect("a product has operands");
                plus(if has_bias { biased(y_no, module) } else { y_no }, add.clone())
            };
            modules.map(of_module).collect()
        }
        Side::Input => {
            let through_weights = group.modules.iter().zip(&factors).map(|(module, dy_no)| match group.gemms {
                GemmFormat::Compute | GemmFormat::F16 => dy_no.clone().matmul(dense(&module.weight, dy_no.dtype())),
                GemmFormat::Fp8 => fp8_reference::input_gradient(dy_no.clone(), &module.weight),
            });
            let pairs = modules.filter_map(|(module, t_nr)| t_nr.zip(module.adapter.as_ref()));
            let through_adapters = pairs.map(|(t_nr, pair)| {
                let dtype = t_nr.dtype();
                t_nr.matmul(to_dtype(pair.a.clone(), dtype))
            });
            let parts = [through_weights.reduce(Tensor::add), through_adapters.reduce(Tensor::add), add];
            vec![parts.into_iter().flatten().reduce(Tensor::add).expect("a product has operands")]
        }
    }
}

/// Implements [`LinearOps::parameter_gradients`].
///
/// # Panics
/// If a weight with magnitudes trains.
pub fn parameter_gradients<B: LinearOps>(operands: GradientOperands<B>, group: Group<B>) -> Vec<ModuleGradients<B>> {
    let [u_nr, t_nr] = [operands.low_rank, operands.d_low_rank].map(|low_rank| of_modules(low_rank, &group));
    let gradients = operands.dy.into_iter().zip(operands.dz);
    let low_rank = u_nr.into_iter().zip(t_nr).map(|(u_nr, t_nr)| u_nr.zip(t_nr));
    let (x_ni, adapters_ni) = (operands.x, operands.adapters_x);
    let modules = group.modules.into_iter().zip(gradients).zip(low_rank);
    modules
        .map(|((module, (dy_no, dz_no)), low_rank)| {
            let is_frozen = !module.weight_gradient.is_needed();
            assert!(module.magnitude().is_none() || is_frozen, "a weight under magnitudes is frozen");
            let trained_bias = module.bias.filter(|bias| bias.trains);
            let bias = trained_bias.map(|_| to_f32(dy_no.clone()).sum_dim(0).squeeze_dim(0));
            let of_weight = || to_f32(dy_no.transpose().matmul(x_ni.clone()));
            let weight = match module.weight_gradient {
                WeightGradient::Frozen => None,
                WeightGradient::New => Some(of_weight()),
                WeightGradient::AddTo(sum) => Some(added(sum, of_weight())),
            };
            let adapter = low_rank.zip(module.adapter).map(|((u_nr, t_nr), pair)| {
                let da_ri = to_f32(t_nr.transpose().matmul(adapters_ni.clone()));
                (da_ri, to_f32(dz_no.transpose().matmul(u_nr)).mul_scalar(pair.scale))
            });
            ModuleGradients { weight, bias, adapter, magnitude: None }
        })
        .collect()
}

/// Computes the adapter's part of an output, `s u Bᵀ`.
pub(super) fn update<B: Backend>(low_nr: Tensor<B, 2>, adapter: &Adapter<B>) -> Tensor<B, 2> {
    let dtype = low_nr.dtype();
    low_nr.matmul(scaled_b(adapter, dtype).transpose())
}

/// Adds the module's bias, if it has one.
pub(super) fn biased<B: Backend>(y_no: Tensor<B, 2>, module: &Module<B>) -> Tensor<B, 2> {
    let dtype = y_no.dtype();
    match &module.bias {
        Some(bias) => y_no.add(to_dtype(bias.value.clone(), dtype).unsqueeze()),
        None => y_no,
    }
}

/// Multiplies the scale into B, the smallest of the matrices.
fn scaled_b<B: Backend>(adapter: &Adapter<B>, dtype: DType) -> Tensor<B, 2> {
    to_dtype(adapter.b.clone().mul_scalar(adapter.scale), dtype)
}

/// Divides `[n, ranks]` into the columns of each module; `None` for modules without an adapter.
pub(super) fn of_modules<B: Backend>(low_rank_nr: Option<Tensor<B, 2>>, group: &Group<B>) -> Vec<Option<Tensor<B, 2>>> {
    let ranges = ranks(group);
    let of_range = |range: Option<Range<usize>>| {
        let low_rank_nr = low_rank_nr.as_ref()?;
        range.map(|range| low_rank_nr.clone().narrow(1, range.start, range.len()))
    };
    ranges.into_iter().map(of_range).collect()
}

/// Returns the columns of each module's adapter in `[n, ranks]`.
fn ranks<B: Backend>(group: &Group<B>) -> Vec<Option<Range<usize>>> {
    let of_module = |end: &mut usize, module: &Module<B>| {
        let rank = module.adapter.as_ref().map(|pair| pair.a.dims()[0]);
        let start = *end;
        *end += rank.unwrap_or(0);
        Some(rank.map(|_| start..*end))
    };
    group.modules.iter().scan(0, of_module).collect()
}
