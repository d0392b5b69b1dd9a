//! Groups of linear modules in ordinary Burn operations; prologue and epilogue use the backend's own norm, gated activation and rotation.
//!
//! `product.rs` has the products and the formulas. Under dropout, `u`, `dA` and the part `t A` of `dx` go through its mask.
//! Trade-off: `u` is recomputed from the input; that costs less than saving its `r` values per token.

use std::ops::Range;

use burn_tensor::activation::sigmoid;
use burn_tensor::{Bool, Tensor, backend::Backend};
use firebrick_arch::Activation;

use super::magnitude;
use super::product::{GradientOperands, Product, Side};
use super::{
    Epilogue, Group, HeadPart, HeadRole, HeadsEpilogue, InputGradient, Keep, LinearOps, Mask, ModuleGradients,
    ProjectGradients, ProjectSaved, Prologue, RotaryTables, RowChoices, SavedHeads, SavedOutputNorm, into_single,
};
use crate::dtype::{plus, to_dtype, to_f32, weighted};
use crate::norm::NormWeight;

/// Implements [`LinearOps::project`].
pub fn project<B: LinearOps>(
    prologue: Prologue<B>,
    group: &Group<B>,
    epilogue: Epilogue<B>,
    keep: Keep,
) -> (Vec<Tensor<B, 2>>, Option<Box<ProjectSaved<B>>>) {
    let input_ni = prologue_output(&prologue);
    let adapters_ni = adapter_input(&input_ni, group);
    let low_rank = B::low_rank(std::slice::from_ref(&adapters_ni), group, Side::Output);
    let product = |low_rank, add| {
        let product = Product::new(group, Side::Output, vec![input_ni.clone()], low_rank);
        B::product(Product { has_bias: true, add, ..product })
    };
    let (outputs, epilogue) = match epilogue {
        epilogue if group.has_magnitudes() => {
            (magnitude::outputs(input_ni.clone(), adapters_ni, group, low_rank), epilogue)
        }
        Epilogue::Residual(residual_no) if group.modules.len() == 1 => {
            (product(low_rank, Some(residual_no)), Epilogue::None)
        }
        epilogue => (product(low_rank, None), epilogue),
    };
    let parts = regroup(outputs, &columns(group), &part_ranges(&group.parts));
    let (outputs, heads, output_norm) = apply_epilogue(parts, epilogue, keep);
    let saved = (keep != Keep::Nothing).then(|| {
        let is_computed = !matches!(prologue, Prologue::None { .. });
        let prologue_output = (keep == Keep::Everything && is_computed).then_some(input_ni);
        Box::new(ProjectSaved { prologue, prologue_output, low_rank: None, unscaled: None, heads, output_norm })
    });
    (outputs, saved)
}

/// Implements [`LinearOps::project_backward`].
///
/// # Panics
/// If there is not one gradient per part, or a gradient on the residual path comes with a gated prologue.
pub fn project_backward<B: LinearOps>(
    saved: ProjectSaved<B>,
    group: Group<B>,
    d_outputs: Vec<Tensor<B, 2>>,
    d_residual_ni: Option<Tensor<B, 2>>,
) -> ProjectGradients<B> {
    let ProjectSaved { prologue, prologue_output, heads, output_norm, .. } = saved;
    let outputs = heads.as_ref().map_or(group.parts.len(), |heads| heads.epilogue.parts.len());
    assert_eq!(outputs, d_outputs.len(), "each output has one gradient");
    let (d_parts, head_norms) = match heads {
        Some(SavedHeads { epilogue: heads, raw }) => {
            let of_part = |((d_output, part), raw): ((_, &HeadPart<B>), Option<Tensor<B, 2>>)| {
                let d = turned(d_output, part.role, &heads, true);
                let Some(norm) = &part.norm else { return (d, None) };
                let raw = raw.expect("normalized heads are saved before their norm");
                let shape = raw.dims();
                let (dx, d_weight) = B::rms_norm_backward(head_rows(raw, norm), norm, head_rows(d, norm), None);
                (dx.reshape(shape), d_weight)
            };
            let (d_parts, d_norms): (Vec<_>, _) = d_outputs.into_iter().zip(&heads.parts).zip(raw).map(of_part).unzip();
            let is_joined = heads.gates_in_queries;
            (if is_joined { divided_backward(d_parts, heads.head_dim) } else { d_parts }, d_norms)
        }
        None => (d_outputs, Vec::new()),
    };
    let (d_parts, output_norm) = match output_norm {
        Some(SavedOutputNorm { norm, raw }) => {
            let (d_raw, d_weight) = B::rms_norm_backward(raw, &norm, into_single(d_parts), None);
            (vec![d_raw], d_weight)
        }
        None => (d_parts, None),
    };
    let d_modules = regroup(d_parts, &part_ranges(&group.parts), &columns(&group));
    let input_ni = prologue_output.unwrap_or_else(|| self::prologue_output(&prologue));
    let adapters_ni = adapter_input(&input_ni, &group);
    let low_rank = B::low_rank(std::slice::from_ref(&adapters_ni), &group, Side::Output);
    let (dz, magnitudes) = magnitude::backward(&d_modules, &adapters_ni, &group, low_rank.as_ref());
    let d_low_rank = B::low_rank(&dz, &group, Side::Input);
    // The gradient of a residual path around the whole group; one around a norm joins that norm's backward.
    let (add, d_residual_ni) = match prologue {
        Prologue::None { .. } => (d_residual_ni, None),
        _ => (None, d_residual_ni),
    };
    let d_input_ni = input_gradient([&d_modules, &dz], &group, d_low_rank.clone(), add);
    let operands = GradientOperands { x: input_ni, adapters_x: adapters_ni, low_rank, dy: d_modules, dz, d_low_rank };
    let mut modules = B::parameter_gradients(operands, group);
    modules.iter_mut().zip(magnitudes).for_each(|(gradients, magnitude)| gradients.magnitude = magnitude);
    let (input, norm) = match prologue {
        Prologue::Norm { x, norm } => {
            let (dx, d_weight) = B::rms_norm_backward(x, &norm, d_input_ni, d_residual_ni);
            (InputGradient::Plain(dx), d_weight)
        }
        Prologue::None { .. } => (InputGradient::Plain(d_input_ni), None),
        Prologue::Gated { gate, up, activation } => {
            assert!(d_residual_ni.is_none(), "a gated prologue has no residual path around it");
            let (d_gate, d_up) = B::gated_backward(gate, up, activation, d_input_ni);
            (InputGradient::Gated { d_gate, d_up }, None)
        }
    };
    ProjectGradients { input, norm, output_norm, head_norms, modules }
}

/// Implements [`LinearOps::mlp_backward`].
pub fn mlp_backward<B: LinearOps>(
    [(saved_gate_up, gate_up), (saved_down, down)]: [(ProjectSaved<B>, Group<B>); 2],
    dy_no: Tensor<B, 2>,
    d_residual_ni: Option<Tensor<B, 2>>,
    after_down: impl FnOnce(Vec<ModuleGradients<B>>, Option<Tensor<B, 1>>),
) -> ProjectGradients<B> {
    let of_down = B::project_backward(saved_down, down, vec![dy_no], None);
    after_down(of_down.modules, of_down.output_norm);
    let (d_gate, d_up) = of_down.input.gated();
    B::project_backward(saved_gate_up, gate_up, vec![d_gate, d_up], d_residual_ni)
}

/// Computes the gradient of the group's input. Under dropout, adapters have another input than weights, and those with magnitudes read the weight
/// a second time.
fn input_gradient<B: LinearOps>(
    [dy, dz]: [&[Tensor<B, 2>]; 2],
    group: &Group<B>,
    d_low_rank: Option<Tensor<B, 2>>,
    add: Option<Tensor<B, 2>>,
) -> Tensor<B, 2> {
    let of = |factors: &[Tensor<B, 2>], low_rank, add| {
        into_single(B::product(Product { add, ..Product::new(group, Side::Input, factors.to_vec(), low_rank) }))
    };
    let Some(mask) = group.dropout.as_ref().filter(|_| d_low_rank.is_some()) else { return of(dz, d_low_rank, add) };
    let again: Vec<_> = if group.has_magnitudes() {
        dz.iter().zip(dy).map(|(dz, dy)| dz.clone().sub(dy.clone())).collect()
    } else {
        Vec::new()
    };
    let d_adapters = B::dropped(of(&again, d_low_rank, None), mask);
    plus(of(dy, None, None).add(d_adapters), add)
}

/// Returns the adapters' input: the group's input after dropout.
fn adapter_input<B: LinearOps>(input_ni: &Tensor<B, 2>, group: &Group<B>) -> Tensor<B, 2> {
    let has_adapter = group.modules.iter().any(|module| module.adapter.is_some());
    match group.dropout.as_ref().filter(|_| has_adapter) {
        Some(mask) => B::dropped(input_ni.clone(), mask),
        None => input_ni.clone(),
    }
}

/// Implements [`LinearOps::dropped`].
pub fn dropped<B: Backend>(x: Tensor<B, 2>, mask: &Mask<B>) -> Tensor<B, 2> {
    let ([rows, width], dtype, device) = (x.dims(), x.dtype(), x.device());
    let factors = match &mask.choices {
        None => mask.dropout.factors([rows, width]),
        Some(RowChoices { rows, per_token }) => {
            let choices: Vec<u64> = rows.to_data().iter::<i64>().map(|choice| choice as u64).collect();
            mask.dropout.factors_of(choices.into_iter(), *per_token, width)
        }
    };
    let factors = Tensor::<B, 1>::from_floats(factors.as_slice(), &device);
    to_dtype(to_f32(x).mul(factors.reshape([rows, width])), dtype)
}

/// Implements [`LinearOps::scaled`].
pub fn scaled<B: Backend>(x: Tensor<B, 2>, factor: f32) -> Tensor<B, 2> {
    let dtype = x.dtype();
    to_dtype(to_f32(x).mul_scalar(factor), dtype)
}

fn prologue_output<B: LinearOps>(prologue: &Prologue<B>) -> Tensor<B, 2> {
    match prologue {
        Prologue::None { x } => x.clone(),
        Prologue::Norm { x, norm } => B::rms_norm(x.clone(), norm, None),
        Prologue::Gated { gate, up, activation } => B::gated(gate.clone(), up.clone(), *activation),
    }
}

fn columns<B: Backend>(group: &Group<B>) -> Vec<Range<usize>> {
    group.modules.iter().map(|module| module.columns.clone()).collect()
}

fn part_ranges(widths: &[usize]) -> Vec<Range<usize>> {
    let ends = widths.iter().scan(0, |end, &width| {
        *end += width;
        Some(*end)
    });
    ends.zip(widths).map(|(end, &width)| end - width..end).collect()
}

/// Splits the same columns at other boundaries: `pieces` cover the ranges `from`, the results the ranges `to`. Pieces
/// whose range does not change are returned without a copy.
fn regroup<B: Backend>(pieces: Vec<Tensor<B, 2>>, from: &[Range<usize>], to: &[Range<usize>]) -> Vec<Tensor<B, 2>> {
    if from == to {
        return pieces;
    }
    let overlap = |a: &Range<usize>, b: &Range<usize>| a.start.max(b.start)..a.end.min(b.end);
    let cut = |target: &Range<usize>| {
        let mut parts: Vec<Tensor<B, 2>> = Vec::new();
        for (piece, place) in pieces.iter().zip(from) {
            let shared = overlap(place, target);
            if !shared.is_empty() {
                parts.push(piece.clone().narrow(1, shared.start - place.start, shared.len()));
            }
        }
        assert!(!parts.is_empty(), "no column of {from:?} lies in {target:?}");
        if parts.len() == 1 { parts.remove(0) } else { Tensor::cat(parts, 1) }
    };
    to.iter().map(cut).collect()
}

/// The outputs, and the values that the backward of heads or of a norm needs.
type AfterEpilogue<B> = (Vec<Tensor<B, 2>>, Option<SavedHeads<B>>, Option<SavedOutputNorm<B>>);

fn apply_epilogue<B: LinearOps>(parts: Vec<Tensor<B, 2>>, epilogue: Epilogue<B>, keep: Keep) -> AfterEpilogue<B> {
    match epilogue {
        Epilogue::None => (parts, None, None),
        Epilogue::Residual(residual_no) => (vec![into_single(parts).add(residual_no)], None, None),
        Epilogue::NormResidual { norm, residual } => {
            let raw = into_single(parts);
            let output = B::rms_norm(raw.clone(), &norm, Some(residual));
            (vec![output], None, (keep != Keep::Nothing).then_some(SavedOutputNorm { norm, raw }))
        }
        Epilogue::Heads(heads) => {
            let parts = if heads.gates_in_queries { divided(parts, heads.head_dim) } else { parts };
            assert_eq!(heads.parts.len(), parts.len(), "each part of the group is one of the epilogue");
            let is_saved = keep != Keep::Nothing;
            let raw = parts
                .iter()
                .zip(&heads.parts)
                .map(|(x, part)| part.norm.as_ref().filter(|_| is_saved).map(|_| x.clone()));
            let raw = raw.collect();
            let each = parts.into_iter().zip(&heads.parts);
            let outputs =
                each.map(|(x, part)| turned(normalized(x, part.norm.as_ref()), part.role, &heads, false)).collect();
            (outputs, Some(SavedHeads { epilogue: heads, raw }), None)
        }
    }
}

/// Divides the first part into queries and gates, which become the last one.
fn divided<B: Backend>(mut parts: Vec<Tensor<B, 2>>, head_dim: usize) -> Vec<Tensor<B, 2>> {
    let [tokens, width] = parts[0].dims();
    let both = parts[0].clone().reshape([tokens, width / (2 * head_dim), 2, head_dim]);
    let half = |index| both.clone().narrow(2, index, 1).reshape([tokens, width / 2]);
    parts[0] = half(0);
    parts.push(half(1));
    parts
}

/// Backward of [`divided`].
fn divided_backward<B: Backend>(mut d_parts: Vec<Tensor<B, 2>>, head_dim: usize) -> Vec<Tensor<B, 2>> {
    let d_gates = d_parts.pop().expect("gates are the last part");
    let [tokens, width] = d_gates.dims();
    let by_head = |d: Tensor<B, 2>| d.reshape([tokens, width / head_dim, 1, head_dim]);
    d_parts[0] = Tensor::cat(vec![by_head(d_parts[0].clone()), by_head(d_gates)], 2).reshape([tokens, 2 * width]);
    d_parts
}

/// Rotates heads by their role, and multiplies queries by the factor of their token; or the backward of that.
fn turned<B: LinearOps>(x: Tensor<B, 2>, role: HeadRole, heads: &HeadsEpilogue<B>, backward: bool) -> Tensor<B, 2> {
    let Some(tables) = &heads.rotary else { return x };
    let rotated = |x| B::rotary(x, tables, heads.head_dim, backward);
    match role {
        HeadRole::Value | HeadRole::Gate => x,
        HeadRole::Key => rotated(x),
        HeadRole::Query if backward => rotated(query_scaled(x, tables)),
        HeadRole::Query => query_scaled(rotated(x), tables),
    }
}

/// Multiplies rotated queries, or the gradient of them, by the factor of each token, if there is one.
fn query_scaled<B: Backend>(q: Tensor<B, 2>, tables: &RotaryTables<B>) -> Tensor<B, 2> {
    let Some(scale) = tables.query_scale.clone() else { return q };
    let (dtype, [tokens, _]) = (q.dtype(), q.dims());
    to_dtype(to_f32(q).mul(scale.reshape([tokens, 1])), dtype)
}

/// Applies the RMSNorm, if any, to `[n, heads * head_dim]`: per head, or over all heads of a token.
fn normalized<B: LinearOps>(x: Tensor<B, 2>, norm: Option<&NormWeight<B>>) -> Tensor<B, 2> {
    let Some(norm) = norm else { return x };
    let shape = x.dims();
    B::rms_norm(head_rows(x, norm), norm, None).reshape(shape)
}

/// Reshapes to one row per norm: a head, or all heads of a token.
fn head_rows<B: Backend>(x: Tensor<B, 2>, norm: &NormWeight<B>) -> Tensor<B, 2> {
    let ([tokens, width], [normed]) = (x.dims(), norm.weight.dims());
    x.reshape([tokens * width / normed, normed])
}

const SQRT_2_OVER_PI: f64 = 0.797_884_560_802_865_4;
/// Coefficient of the cubic term inside the hyperbolic tangent.
const GELU_CUBIC: f64 = 0.044_715;

/// Computes `(1 + tanh(u)) / 2` with `u = sqrt(2 / pi) (g + 0.044715 g³)`: the logistic function of `2 u`.
fn gelu_sigma<B: Backend>(gate_nf: Tensor<B, 2>) -> Tensor<B, 2> {
    let cubic = gate_nf.clone().square().mul_scalar(GELU_CUBIC).add_scalar(1.0);
    sigmoid(gate_nf.mul(cubic).mul_scalar(2.0 * SQRT_2_OVER_PI))
}

/// Implements [`LinearOps::gated`].
pub fn gated<B: Backend>(gate_nf: Tensor<B, 2>, up_nf: Tensor<B, 2>, activation: Activation) -> Tensor<B, 2> {
    let dtype = gate_nf.dtype();
    let ([activated_nf, _], (factor_nf, _)) = (of_gate(to_f32(gate_nf), activation), of_up(to_f32(up_nf), activation));
    to_dtype(activated_nf.mul(factor_nf), dtype)
}

/// Implements [`LinearOps::gated_backward`]. With the activation `a(g)` and the factor `b(u)`: `dg = dy b a'`, `du = dy a b'`.
pub fn gated_backward<B: Backend>(
    gate_nf: Tensor<B, 2>,
    up_nf: Tensor<B, 2>,
    activation: Activation,
    dy_nf: Tensor<B, 2>,
) -> (Tensor<B, 2>, Tensor<B, 2>) {
    let (dtype, dy_nf) = (gate_nf.dtype(), to_f32(dy_nf));
    let [activated_nf, slope_nf] = of_gate(to_f32(gate_nf), activation);
    let (factor_nf, factor_slope_nf) = of_up(to_f32(up_nf), activation);
    let d_gate = dy_nf.clone().mul(factor_nf).mul(slope_nf);
    let d_factor = dy_nf.mul(activated_nf);
    (to_dtype(d_gate, dtype), to_dtype(weighted(d_factor, factor_slope_nf), dtype))
}

/// Computes the activation of the gate, and its slope.
fn of_gate<B: Backend>(gate_nf: Tensor<B, 2>, activation: Activation) -> [Tensor<B, 2>; 2] {
    // With the value `g σ(z)` the slope is σ + g σ', where σ' = σ (1 - σ) z'.
    let slope =
        |value: &Tensor<B, 2>, sigma: Tensor<B, 2>| value.clone().mul(sigma.clone().neg().add_scalar(1.0)).add(sigma);
    match activation {
        Activation::Silu => {
            let sigma = sigmoid(gate_nf.clone());
            let silu = gate_nf.mul(sigma.clone());
            let slope = slope(&silu, sigma);
            [silu, slope]
        }
        Activation::GeluTanh => {
            let sigma = gelu_sigma(gate_nf.clone());
            let gelu = gate_nf.clone().mul(sigma.clone());
            let z_slope =
                gate_nf.square().mul_scalar(3.0 * GELU_CUBIC).add_scalar(1.0).mul_scalar(2.0 * SQRT_2_OVER_PI);
            let slope = gelu.clone().mul(sigma.clone().neg().add_scalar(1.0)).mul(z_slope).add(sigma);
            [gelu, slope]
        }
        Activation::Sigmoid => {
            let sigma = sigmoid(gate_nf);
            let slope = sigma.clone().mul(sigma.clone().neg().add_scalar(1.0));
            [sigma, slope]
        }
        Activation::ClampedSwiglu(constants) => {
            let inside_nf = to_f32_mask(gate_nf.clone().lower_equal_elem(constants.limit()));
            let gate_nf = gate_nf.clamp_max(constants.limit());
            let sigma = sigmoid(gate_nf.clone().mul_scalar(constants.alpha()));
            let value = gate_nf.mul(sigma.clone());
            let steeper = value.clone().mul_scalar(constants.alpha());
            let slope = slope(&steeper, sigma).mul(inside_nf);
            [value, slope]
        }
    }
}

/// Computes what the activated gate multiplies, and its slope; `None`: one.
fn of_up<B: Backend>(up_nf: Tensor<B, 2>, activation: Activation) -> (Tensor<B, 2>, Option<Tensor<B, 2>>) {
    match activation {
        Activation::Silu | Activation::GeluTanh | Activation::Sigmoid => (up_nf, None),
        Activation::ClampedSwiglu(constants) => {
            let limit = constants.limit();
            let inside_nf = to_f32_mask(up_nf.clone().abs().lower_equal_elem(limit));
            (up_nf.clamp(-limit, limit).add_scalar(1.0), Some(inside_nf))
        }
    }
}

/// Converts a mask to ones and zeros.
fn to_f32_mask<B: Backend>(mask_nf: Tensor<B, 2, Bool>) -> Tensor<B, 2> {
    to_f32(mask_nf.float())
}

/// Implements [`LinearOps::rotary`]: halves `(a, b)` of the rotated columns in each head become `(a cos - b sin, b cos + a sin)`, or even and odd
/// columns do; the backward has the opposite sine.
pub fn rotary<B: Backend>(x: Tensor<B, 2>, tables: &RotaryTables<B>, head_dim: usize, backward: bool) -> Tensor<B, 2> {
    let sin = if backward { tables.sin.clone().neg() } else { tables.sin.clone() };
    let (dtype, [tokens, width]) = (x.dtype(), x.dims());
    let [rows, half] = tables.cos.dims();
    assert!(
        rows == tokens && 2 * half <= head_dim,
        "rotary tables [{rows}, {half}] for {tokens} tokens of {head_dim} columns"
    );
    let heads = width / head_dim;
    let (cos, sin): (Tensor<B, 3>, Tensor<B, 3>) = (tables.cos.clone().unsqueeze_dim(1), sin.unsqueeze_dim(1));
    let x_nhk = to_f32(x).reshape([tokens, heads, head_dim]);
    let [first, second] = if tables.interleaved {
        let pairs = x_nhk.clone().narrow(2, 0, 2 * half).reshape([tokens, heads, half, 2]);
        [0, 1].map(|side| pairs.clone().narrow(3, side, 1).reshape([tokens, heads, half]))
    } else {
        [0, half].map(|start| x_nhk.clone().narrow(2, start, half))
    };
    let rotated_first = first.clone().mul(cos.clone()).sub(second.clone().mul(sin.clone()));
    let rotated_second = second.mul(cos).add(first.mul(sin));
    let mut columns = if tables.interleaved {
        let sides = [rotated_first, rotated_second].map(|side| side.reshape([tokens, heads, half, 1]));
        vec![Tensor::cat(sides.to_vec(), 3).reshape([tokens, heads, 2 * half])]
    } else {
        vec![rotated_first, rotated_second]
    };
    if 2 * half < head_dim {
        columns.push(x_nhk.narrow(2, 2 * half, head_dim - 2 * half));
    }
    to_dtype(Tensor::cat(columns, 2).reshape([tokens, width]), dtype)
}

#[cfg(all(test, feature = "flex"))]
mod tests;
