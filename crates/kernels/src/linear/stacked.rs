//! A group of stacks (the matrices of all experts below each other) as a loop over its experts with rows.
//!
//! Each expert is a group of its own, over slices of the stacks and of the rows, computed by the backend's [`LinearOps::project`]; results are put
//! together. Experts without rows compute nothing, and their gradients are zero. Under dropout, one mask covers all rows in their order, so it does
//! not depend on how they are divided.
//! Trade-off: the host waits for the row counts, and work on the host and launches grow with the number of experts.

use burn_tensor::{DType, Tensor, backend::Backend};

use super::{
    Adapter, Bias, Epilogue, ExpertRows, Group, InputGradient, Keep, LinearOps, Magnitude, Module, ModuleGradients,
    ProjectGradients, ProjectSaved, Prologue, WeightGradient,
};
use crate::memory::slices;
use crate::session::{Hint, Session};
use crate::weights::evenly;

/// Implements [`LinearOps::project`] for a group of stacks.
///
/// # Panics
/// If the prologue is a norm, or there is an epilogue: rows of experts have neither.
pub fn project<B: LinearOps>(
    prologue: Prologue<B>,
    group: &Group<B>,
    epilogue: Epilogue<B>,
    keep: Keep,
) -> (Vec<Tensor<B, 2>>, Option<Box<ProjectSaved<B>>>) {
    assert!(matches!(epilogue, Epilogue::None), "outputs of experts are combined before anything else");
    let (rows, device) = (rows_of(group), prologue.first_input().device());
    let experts = Experts::of(group, &rows);
    let inputs = slices_of(&prologue, &experts.ranges);
    let (outputs, saved): (Vec<_>, Vec<_>) = with_varying_sizes::<B, _>(&device, || {
        let each = experts.groups.iter().zip(inputs);
        each.map(|(group, input)| B::project(input, group, Epilogue::None, keep)).unzip()
    });
    let saved: Option<Vec<_>> = saved.into_iter().collect();
    let saved = saved.map(|saved| Box::new(joined_saved(prologue, saved)));
    (transposed(outputs).into_iter().map(B::join_rows).collect(), saved)
}

/// Implements [`LinearOps::project_backward`] for a group of stacks.
///
/// # Panics
/// If there is a gradient on a residual path: rows of experts have none.
pub fn project_backward<B: LinearOps>(
    saved: ProjectSaved<B>,
    group: Group<B>,
    d_outputs: Vec<Tensor<B, 2>>,
    d_residual_ni: Option<Tensor<B, 2>>,
) -> ProjectGradients<B> {
    assert!(d_residual_ni.is_none(), "rows of experts are not on a residual path");
    let (rows, device) = (rows_of(&group), d_outputs[0].device());
    let Experts { present, ranges, groups, absent } = Experts::of(&group, &rows);
    let saved = divided_saved(saved, &ranges);
    let d_outputs = transposed(d_outputs.into_iter().map(|d_output| slices(d_output, &ranges)).collect());
    let gradients: Vec<_> = with_varying_sizes::<B, _>(&device, || {
        let each = groups.into_iter().zip(saved).zip(d_outputs);
        each.map(|((group, saved), d_outputs)| B::project_backward(saved, group, d_outputs, None)).collect()
    });
    let (inputs, modules): (Vec<_>, Vec<_>) =
        gradients.into_iter().map(|gradients| (gradients.input, gradients.modules)).unzip();
    let modules = transposed(modules).into_iter().zip(absent);
    let modules = modules.map(|(present_gradients, absent)| {
        let mut all: Vec<_> = absent.into_iter().map(|absent| absent.gradients(&device)).collect();
        present.iter().zip(present_gradients).for_each(|(&expert, gradients)| all[expert] = gradients);
        joined_gradients(all)
    });
    let modules = modules.collect();
    let input = if matches!(inputs.first(), Some(InputGradient::Plain(_))) {
        InputGradient::Plain(B::join_rows(inputs.into_iter().map(InputGradient::plain).collect()))
    } else {
        let (d_gate, d_up): (Vec<_>, Vec<_>) = inputs.into_iter().map(InputGradient::gated).unzip();
        InputGradient::Gated { d_gate: B::join_rows(d_gate), d_up: B::join_rows(d_up) }
    };
    ProjectGradients { input, norm: None, output_norm: None, head_norms: Vec::new(), modules }
}

fn rows_of<B: Backend>(group: &Group<B>) -> ExpertRows<B> {
    group.rows.clone().expect("a group of stacks has rows of experts")
}

struct Experts<B: Backend> {
    /// The experts with rows.
    present: Vec<usize>,
    /// Start and count of their rows.
    ranges: Vec<(usize, usize)>,
    groups: Vec<Group<B>>,
    /// The modules of every expert, by module of the stack, for the gradients of those without rows.
    absent: Vec<Vec<Absent<B>>>,
}

impl<B: LinearOps> Experts<B> {
    fn of(group: &Group<B>, rows: &ExpertRows<B>) -> Self {
        let (present, ranges): (Vec<_>, Vec<_>) = rows.ranges().into_iter().unzip();
        let modules: Vec<Vec<Module<B>>> =
            group.modules.iter().map(|module| matrices(module, rows.experts())).collect();
        let of_expert = |(&expert, &(start, count)): (&usize, &(usize, usize))| Group {
            modules: modules.iter().map(|module| module[expert].clone()).collect(),
            parts: group.parts.clone(),
            gemms: group.gemms,
            dropout: group.dropout.as_ref().map(|mask| mask.narrow(start, count)),
            rows: None,
        };
        let groups = present.iter().zip(&ranges).map(of_expert).collect();
        let absent = modules.into_iter().map(|module| module.into_iter().map(Absent::of).collect()).collect();
        Self { present, ranges, groups, absent }
    }
}

fn matrices<B: LinearOps>(module: &Module<B>, count: usize) -> Vec<Module<B>> {
    let rows = |x: &Tensor<B, 2>| slices(x.clone(), &evenly(x.dims()[0], count)).into_iter();
    let vectors = |x: &Tensor<B, 1>| slices(x.clone(), &evenly(x.dims()[0], count)).into_iter();
    let mut sums = match &module.weight_gradient {
        WeightGradient::AddTo(sum) => Some(rows(sum)),
        WeightGradient::Frozen | WeightGradient::New => None,
    };
    let mut biases = module.bias.as_ref().map(|bias| (vectors(&bias.value), bias.trains));
    let mut adapters = module.adapter.as_ref().map(|adapter| {
        let magnitudes = adapter.magnitude.as_ref();
        let magnitudes = magnitudes.map(|magnitude| (vectors(&magnitude.value), vectors(&magnitude.norm)));
        (rows(&adapter.a), rows(&adapter.b), magnitudes, adapter.scale)
    });
    let all = "a stack has a matrix for each expert";
    let of_expert = |weight| Module {
        columns: module.columns.clone(),
        weight,
        weight_gradient: match &mut sums {
            Some(sums) => WeightGradient::AddTo(sums.next().expect(all)),
            None => module.weight_gradient.clone(),
        },
        bias: biases.as_mut().map(|(values, trains)| Bias { value: values.next().expect(all), trains: *trains }),
        adapter: adapters.as_mut().map(|(a, b, magnitudes, scale)| Adapter {
            a: a.next().expect(all),
            b: b.next().expect(all),
            scale: *scale,
            magnitude: magnitudes
                .as_mut()
                .map(|(values, norms)| Magnitude { value: values.next().expect(all), norm: norms.next().expect(all) }),
        }),
    };
    module.weight.matrices(count).into_iter().map(of_expert).collect()
}

/// What the gradients of a module are, if its expert has no rows.
struct Absent<B: Backend> {
    /// `None`: frozen; else the sum so far, or the shape of zeros.
    weight: Option<Result<Tensor<B, 2>, [usize; 2]>>,
    bias: Option<usize>,
    adapter: Option<[[usize; 2]; 2]>,
    magnitude: Option<usize>,
}

impl<B: LinearOps> Absent<B> {
    fn of(module: Module<B>) -> Self {
        Self {
            magnitude: module.magnitude().map(|magnitude| magnitude.value.dims()[0]),
            weight: match module.weight_gradient {
                WeightGradient::Frozen => None,
                WeightGradient::New => Some(Err(module.weight.shape())),
                WeightGradient::AddTo(sum) => Some(Ok(sum)),
            },
            bias: module.bias.filter(|bias| bias.trains).map(|bias| bias.value.dims()[0]),
            adapter: module.adapter.map(|adapter| [adapter.a.dims(), adapter.b.dims()]),
        }
    }

    fn gradients(self, device: &B::Device) -> ModuleGradients<B> {
        let zeros = |shape: [usize; 2]| B::zeros(shape, DType::F32, device);
        let vector = |length: usize| zeros([1, length]).reshape([length]);
        ModuleGradients {
            weight: self.weight.map(|weight| weight.unwrap_or_else(zeros)),
            bias: self.bias.map(vector),
            adapter: self.adapter.map(|[a, b]| (zeros(a), zeros(b))),
            magnitude: self.magnitude.map(vector),
        }
    }
}

fn joined_gradients<B: LinearOps>(of_experts: Vec<ModuleGradients<B>>) -> ModuleGradients<B> {
    let (mut weights, mut biases, mut magnitudes) = (Vec::new(), Vec::new(), Vec::new());
    let (mut a, mut b) = (Vec::new(), Vec::new());
    for ModuleGradients { weight, bias, adapter, magnitude } in of_experts {
        weights.extend(weight);
        biases.extend(bias);
        magnitudes.extend(magnitude);
        if let Some((of_a, of_b)) = adapter {
            a.push(of_a);
            b.push(of_b);
        }
    }
    let matrix = |parts: Vec<Tensor<B, 2>>| (!parts.is_empty()).then(|| B::join_rows(parts));
    let vector = |parts: Vec<Tensor<B, 1>>| {
        let rows = |part: Tensor<B, 1>| {
            let [length] = part.dims();
            part.reshape([1, length])
        };
        let joined = matrix(parts.into_iter().map(rows).collect())?;
        let [rows, length] = joined.dims();
        Some(joined.reshape([rows * length]))
    };
    ModuleGradients {
        weight: matrix(weights),
        bias: vector(biases),
        adapter: matrix(a).zip(matrix(b)),
        magnitude: vector(magnitudes),
    }
}

/// Returns the rows of each expert of a prologue's inputs.
fn slices_of<B: LinearOps>(prologue: &Prologue<B>, ranges: &[(usize, usize)]) -> Vec<Prologue<B>> {
    match prologue {
        Prologue::None { x } => slices(x.clone(), ranges).into_iter().map(|x| Prologue::None { x }).collect(),
        Prologue::Gated { gate, up, activation } => {
            let [gates, ups] = [gate, up].map(|x| slices(x.clone(), ranges));
            let gated = |(gate, up)| Prologue::Gated { gate, up, activation: *activation };
            gates.into_iter().zip(ups).map(gated).collect()
        }
        Prologue::Norm { .. } => panic!("rows of experts are normalized before they are sorted"),
    }
}

/// Puts together what the forwards of experts saved besides their inputs.
fn joined_saved<B: LinearOps>(prologue: Prologue<B>, saved: Vec<Box<ProjectSaved<B>>>) -> ProjectSaved<B> {
    let joined = |of: fn(&ProjectSaved<B>) -> &Option<Tensor<B, 2>>| {
        let parts: Option<Vec<_>> = saved.iter().map(|saved| of(saved).clone()).collect();
        parts.map(B::join_rows)
    };
    ProjectSaved {
        prologue,
        prologue_output: joined(|saved| &saved.prologue_output),
        low_rank: joined(|saved| &saved.low_rank),
        unscaled: joined(|saved| &saved.unscaled),
        heads: None,
        output_norm: None,
    }
}

fn divided_saved<B: LinearOps>(saved: ProjectSaved<B>, ranges: &[(usize, usize)]) -> Vec<ProjectSaved<B>> {
    let ProjectSaved { prologue, prologue_output, low_rank, unscaled, .. } = saved;
    let [outputs, low_ranks, unscaled] = [prologue_output, low_rank, unscaled].map(|x| {
        let parts = x.map(|x| slices(x, ranges).into_iter());
        std::iter::repeat_with(move || ()).scan(parts, |parts, ()| Some(parts.as_mut().and_then(Iterator::next)))
    });
    let each = slices_of(&prologue, ranges).into_iter().zip(outputs).zip(low_ranks).zip(unscaled);
    each.map(|(((prologue, prologue_output), low_rank), unscaled)| ProjectSaved {
        prologue,
        prologue_output,
        low_rank,
        unscaled,
        heads: None,
        output_norm: None,
    })
    .collect()
}

/// Turns one list per expert into one list per part.
fn transposed<T>(of_experts: Vec<Vec<T>>) -> Vec<Vec<T>> {
    let mut parts: Vec<Vec<T>> = Vec::new();
    for list in of_experts {
        parts.resize_with(list.len(), Vec::new);
        parts.iter_mut().zip(list).for_each(|(part, value)| part.push(value));
    }
    parts
}

/// Runs work whose tensor sizes differ in every pass.
fn with_varying_sizes<B: Session, R>(device: &B::Device, work: impl FnOnce() -> R) -> R {
    /// Ends this mode, even if the work panics.
    struct End<'a, B: Session>(&'a B::Device);
    impl<B: Session> Drop for End<'_, B> {
        fn drop(&mut self) {
            B::hint(self.0, Hint::VaryingSizes(false));
        }
    }
    B::hint(device, Hint::VaryingSizes(true));
    let _end = End::<B>(device);
    work()
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use firebrick_arch::Activation;

    use super::*;
    use crate::linear::{Dropout, GemmFormat, Mask, RowChoices};
    use crate::testing::{Plain, assert_close, random};
    use crate::weights::Weight;

    const COUNTS: [usize; 4] = [3, 0, 5, 1];
    const INPUTS: usize = 6;
    const WIDTHS: [usize; 2] = [4, 8];

    /// Builds two stacked modules with all that can train, side by side.
    fn group(dropout: Option<Mask<Plain>>, gradient: fn([usize; 2]) -> WeightGradient<Plain>) -> Group<Plain> {
        let (experts, mut end) = (COUNTS.len(), 0);
        let module = |width: usize| {
            let columns = end..end + width;
            end += width;
            let shape = [experts * width, INPUTS];
            Module {
                columns,
                weight: Weight::Dense(random(width as u64, shape)),
                weight_gradient: gradient(shape),
                bias: Some(Bias { value: random(1 + width as u64, [shape[0]]), trains: true }),
                adapter: Some(Adapter {
                    a: random(2 + width as u64, [experts * 2, INPUTS]),
                    b: random(3 + width as u64, [shape[0], 2]),
                    scale: 0.5,
                    magnitude: None,
                }),
            }
        };
        let modules = WIDTHS.map(module).into();
        let rows = Some(ExpertRows::of_counts(COUNTS.to_vec(), &Default::default()));
        Group { modules, parts: vec![6, 6], gemms: GemmFormat::Compute, dropout, rows }
    }

    fn of_expert(group: &Group<Plain>, expert: usize, first_row: usize) -> Group<Plain> {
        let rows = |x: &Tensor<Plain, 2>| {
            let each = x.dims()[0] / COUNTS.len();
            x.clone().narrow(0, expert * each, each)
        };
        let module = |module: &Module<Plain>| {
            let Weight::Dense(weight) = &module.weight else { panic!("the test's weights are dense") };
            let width = module.columns.len();
            let bias = module.bias.as_ref().unwrap().value.clone().narrow(0, expert * width, width);
            let pair = module.adapter.as_ref().unwrap();
            Module {
                weight: Weight::Dense(rows(weight)),
                weight_gradient: WeightGradient::New,
                bias: Some(Bias { value: bias, trains: true }),
                adapter: Some(Adapter { a: rows(&pair.a), b: rows(&pair.b), ..pair.clone() }),
                ..module.clone()
            }
        };
        let mask = group.dropout.as_ref().filter(|_| COUNTS[expert] > 0);
        let dropout = mask.map(|mask| mask.narrow(first_row, COUNTS[expert]));
        Group { modules: group.modules.iter().map(module).collect(), dropout, rows: None, ..group.clone() }
    }

    fn total() -> usize {
        COUNTS.iter().sum()
    }

    #[test]
    fn every_expert_computes_its_rows_and_experts_without_rows_have_gradients_of_zero() {
        let mask = Mask::from(Dropout::new(0.3, 7).unwrap());
        // Two rows of each token, in an order that is not that of the tokens.
        let choices = (0..total()).map(|row| (5 * row % total()) as i32).collect::<Vec<_>>();
        let choices = RowChoices { rows: Tensor::from_ints(choices.as_slice(), &Default::default()), per_token: 2 };
        for dropout in [None, Some(mask.clone()), Some(Mask { choices: Some(choices), ..mask })] {
            let group = group(dropout, |_| WeightGradient::New);
            let x = random::<Plain, 2>(20, [total(), INPUTS]);
            let d_outputs: Vec<Tensor<Plain, 2>> = vec![random(21, [total(), 6]), random(22, [total(), 6])];
            let prologue = Prologue::None { x: x.clone() };
            let (outputs, saved) = Plain::project(prologue, &group, Epilogue::None, Keep::Inputs);
            let got = Plain::project_backward(*saved.unwrap(), group.clone(), d_outputs.clone(), None);
            let dx = got.input.plain();
            let mut start = 0;
            for (expert, count) in COUNTS.into_iter().enumerate() {
                let alone = of_expert(&group, expert, start);
                let part = |x: &Tensor<Plain, 2>| x.clone().narrow(0, start, count);
                let of_expert = |x: &Tensor<Plain, 2>| {
                    let each = x.dims()[0] / COUNTS.len();
                    x.clone().narrow(0, expert * each, each)
                };
                if count == 0 {
                    for gradients in &got.modules {
                        let (a, b) = gradients.adapter.as_ref().unwrap();
                        let all =
                            [gradients.weight.as_ref().unwrap(), a, b].map(|x| of_expert(x).abs().sum().into_scalar());
                        assert_eq!(all, [0.0; 3]);
                    }
                    continue;
                }
                let prologue = Prologue::None { x: part(&x) };
                let (expected, saved) = Plain::project(prologue, &alone, Epilogue::None, Keep::Inputs);
                for (got, expected) in outputs.iter().zip(expected) {
                    assert_close(part(got), expected, 1e-6);
                }
                let d_outputs = d_outputs.iter().map(part).collect();
                let expected = Plain::project_backward(*saved.unwrap(), alone, d_outputs, None);
                assert_close(part(&dx), expected.input.plain(), 1e-6);
                for (got, expected) in got.modules.iter().zip(expected.modules) {
                    assert_close(of_expert(got.weight.as_ref().unwrap()), expected.weight.unwrap(), 1e-6);
                    let bias = |bias: &Tensor<Plain, 1>| bias.clone().unsqueeze_dim::<2>(1);
                    assert_close(of_expert(&bias(got.bias.as_ref().unwrap())), bias(&expected.bias.unwrap()), 1e-6);
                    let (got, expected) = (got.adapter.as_ref().unwrap(), expected.adapter.unwrap());
                    assert_close(of_expert(&got.0), expected.0, 1e-6);
                    assert_close(of_expert(&got.1), expected.1, 1e-6);
                }
                start += count;
            }
        }
    }

    #[test]
    fn gradients_are_added_to_the_sum_of_the_stack_and_experts_without_rows_keep_theirs() {
        let x = random::<Plain, 2>(30, [total(), INPUTS]);
        let d_outputs: Vec<Tensor<Plain, 2>> = vec![random(31, [total(), 6]), random(32, [total(), 6])];
        let weights = |gradient| {
            let group = group(None, gradient);
            let prologue = Prologue::None { x: x.clone() };
            let (_, saved) = Plain::project(prologue, &group, Epilogue::None, Keep::Everything);
            let gradients = Plain::project_backward(*saved.unwrap(), group, d_outputs.clone(), None);
            gradients.modules.into_iter().map(|module| module.weight.unwrap()).collect::<Vec<_>>()
        };
        let new = weights(|_| WeightGradient::New);
        let sums = weights(|shape| WeightGradient::AddTo(random(40, shape)));
        for (new, sum) in new.into_iter().zip(sums) {
            assert_close(sum, new.clone().add(random(40, new.dims())), 1e-6);
        }
    }

    #[test]
    fn a_gated_mlp_of_experts_goes_back_as_one_of_dense_groups_does() {
        let down = group(None, |_| WeightGradient::Frozen);
        let (gate, up) = (random::<Plain, 2>(50, [total(), INPUTS]), random::<Plain, 2>(51, [total(), INPUTS]));
        let gated = || Prologue::Gated { gate: gate.clone(), up: up.clone(), activation: Activation::Silu };
        let (outputs, saved) = Plain::project(gated(), &down, Epilogue::None, Keep::Inputs);
        let d_outputs = outputs.iter().map(|output| output.clone().mul_scalar(0.5)).collect();
        let (d_gate, d_up) = Plain::project_backward(*saved.unwrap(), down.clone(), d_outputs, None).input.gated();
        let x = Plain::gated(gate.clone(), up.clone(), Activation::Silu);
        let (plain, saved) = Plain::project(Prologue::None { x }, &down, Epilogue::None, Keep::Inputs);
        let d_outputs = plain.iter().map(|output| output.clone().mul_scalar(0.5)).collect();
        let dx = Plain::project_backward(*saved.unwrap(), down, d_outputs, None).input.plain();
        let expected = Plain::gated_backward(gate, up, Activation::Silu, dx);
        outputs.into_iter().zip(plain).for_each(|(got, expected)| assert_close(got, expected, 1e-6));
        assert_close(d_gate, expected.0, 1e-6);
        assert_close(d_up, expected.1, 1e-6);
    }
}
