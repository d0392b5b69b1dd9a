//! Tests of whole optimizer steps: saving, clipping, paging and refusals.

use burn_flex::Flex;
use burn_tensor::TensorData;
use firebrick_arch::TensorSpec;
use firebrick_kernels::optimizer::rounding::widened;
use firebrick_kernels::{GradientSink, Rounding};

use super::*;
use crate::config::{OptimizerKind, TrainedWeights};
use crate::state::HostTensor;

fn config(kind: OptimizerKind, max_grad_norm: Option<f64>) -> OptimizerConfig {
    OptimizerConfig { weight_decay: 0.1, max_grad_norm, ..rules::tests::config(kind) }
}

fn parameters_of(shapes: &[(&'static str, &[usize], Role)]) -> Vec<Parameter<Flex>> {
    let parameter = |&(name, shape, role): &(&'static str, &[usize], Role)| {
        let values: Vec<f32> = (0..shape.iter().product()).map(|index| (index as f32 * 0.37).sin()).collect();
        Parameter::from_host(name, shape, role, values, &Default::default())
    };
    shapes.iter().map(parameter).collect()
}

/// Creates a large matrix, a small one, a norm and an embedding that is large enough for 8-bit moments.
fn parameters() -> Vec<Parameter<Flex>> {
    parameters_of(&[
        ("large", &[80, 64], Role::Projection),
        ("small", &[4, 4], Role::LoraA),
        ("vector", &[64], Role::Norm),
        ("table", &[100, 64], Role::Embedding),
    ])
}

/// Creates the gradients of a step, after `change` was applied to those of `large`.
fn gradients_with(parameters: &[Parameter<Flex>], step: u64, change: impl Fn(&mut [f32])) -> GradientMap<Flex> {
    let mut gradients = GradientMap::default();
    for parameter in parameters {
        let values = (0..parameter.elements()).map(|index| (index as f32 * 0.11 + step as f32).cos());
        let mut values: Vec<f32> = values.collect();
        if parameter.name.as_ref() == "large" {
            change(&mut values);
        }
        gradients.add(parameter, Tensor::<Flex, 1>::from_floats(values.as_slice(), &Default::default()));
    }
    gradients
}

fn take_steps(optimizer: &mut Optimizer<Flex>, parameters: &mut [Parameter<Flex>], steps: std::ops::Range<u64>) {
    for step in steps {
        let gradients = gradients_with(parameters, step, |_| {});
        optimizer.step(parameters.iter_mut().collect(), gradients, 1e-2);
    }
}

fn values(parameters: &[Parameter<Flex>]) -> Vec<Vec<f32>> {
    parameters.iter().map(|parameter| parameter.value.to_data().to_vec().unwrap()).collect()
}

fn load(optimizer: &mut Optimizer<Flex>, parameters: &[Parameter<Flex>], state: StateDict) -> Result<(), OptimError> {
    optimizer.load(&parameters.iter().collect::<Vec<_>>(), state, 3)
}

#[test]
fn optimizers_of_parts_update_as_one() {
    for kind in [OptimizerKind::AdamW, OptimizerKind::AdamW8bit] {
        let (mut whole, mut expected) = (Optimizer::new(config(kind, Some(1.0))), parameters());
        take_steps(&mut whole, &mut expected, 0..3);
        let parts = [&["large", "vector"][..], &["small", "table"]];
        let mut saved = StateDict::new();
        for part in parts {
            let owned = part.iter().map(|&name| Arc::from(name));
            let mut optimizer = Optimizer::new(config(kind, Some(1.0))).owning(owned);
            let mut found = parameters();
            take_steps(&mut optimizer, &mut found, 0..3);
            for ((found, expected), first) in found.iter().zip(&expected).zip(parameters()) {
                let is_owned = part.contains(&found.name.as_ref());
                let expected = if is_owned { expected } else { &first };
                assert_eq!(values(std::slice::from_ref(found)), values(std::slice::from_ref(expected)));
            }
            saved.extend(optimizer.save());
        }
        assert_eq!(saved, whole.save());
        // Each takes its part of the whole state.
        let mut part = Optimizer::new(config(kind, Some(1.0))).owning(["table".into()]);
        load(&mut part, &expected, saved).unwrap();
        assert!(part.is_partial() && part.save().keys().all(|name| name.starts_with("table.")));
    }
}

#[test]
fn state_tensors_are_named_by_parameter_and_part() {
    let (mut optimizer, mut parameters) = (Optimizer::new(config(OptimizerKind::AdamW8bit, None)), parameters());
    take_steps(&mut optimizer, &mut parameters, 0..1);
    let state = optimizer.save();
    let names: Vec<&str> = state.keys().map(String::as_str).collect();
    let expected = [
        "large.exp_avg.absmax",
        "large.exp_avg.codes",
        "large.exp_avg_sq.absmax",
        "large.exp_avg_sq.codes",
        "small.exp_avg",
        "small.exp_avg_sq",
        "table.exp_avg",
        "table.exp_avg_sq",
        "vector.exp_avg",
        "vector.exp_avg_sq",
    ];
    assert_eq!(names, expected);
    assert!(matches!(state["large.exp_avg.codes"], HostTensor::U8(ref codes) if codes.len() == 80 * 64));
    assert!(matches!(state["small.exp_avg"], HostTensor::F32(ref values) if values.len() == 16));
    assert!(matches!(state["table.exp_avg"], HostTensor::F32(ref values) if values.len() == 6400));
}

#[test]
fn clipping_scales_to_the_largest_norm() {
    // The first step depends on the scale of the gradient only through epsilon: compare first moments.
    let first_step = |max_grad_norm| {
        let mut parameters = parameters();
        let mut optimizer = Optimizer::new(config(OptimizerKind::AdamW, max_grad_norm));
        let gradients = gradients_with(&parameters, 0, |_| {});
        let report = optimizer.step(parameters.iter_mut().collect(), gradients, 1e-2);
        let norm: f32 = report.grad_norm.into_scalar();
        let Some(HostTensor::F32(values)) = optimizer.save().remove("large.exp_avg") else {
            panic!("AdamW has f32 moments")
        };
        (norm, values[0])
    };
    let ((norm, unscaled), (same_norm, clipped)) = (first_step(None), first_step(Some(2.0)));
    assert_eq!(norm, same_norm, "the reported norm is that before clipping");
    assert!((clipped / unscaled - 2.0 / norm).abs() < 1e-5 && norm > 2.0);
    let (_, below_the_limit) = first_step(Some(1e6));
    assert_eq!(below_the_limit, unscaled);
}

/// Returns the values of a parameter of each role after one step, in which all gradients are this large.
fn after_a_step<T>(
    mut optimizer: Optimizer<Flex>,
    roles: &[(Role, T)],
    values_before: [f32; 2],
    gradient: f32,
) -> Vec<Vec<f32>> {
    let device = Default::default();
    let parameter = |&(role, _): &(Role, T)| {
        let shape: &[usize] = if [Role::Norm, Role::Bias].contains(&role) { &[2] } else { &[1, 2] };
        Parameter::from_host(format!("{role:?}"), shape, role, values_before, &device)
    };
    let mut parameters: Vec<Parameter<Flex>> = roles.iter().map(parameter).collect();
    let mut gradients = GradientMap::default();
    for parameter in &parameters {
        gradients.add(parameter, Tensor::<Flex, 1>::full([2], gradient, &device));
    }
    optimizer.step(parameters.iter_mut().collect(), gradients, 1e-2);
    values(&parameters)
}

#[test]
fn loraplus_moves_b_and_vectors_by_the_ratio() {
    let optimizer = Optimizer::new(config(OptimizerKind::AdamW, None)).with_loraplus(16.0);
    // The first update of Adam is the learning rate, whatever the gradient.
    let roles = [(Role::LoraA, 1.0), (Role::LoraB, 16.0), (Role::Head, 1.0), (Role::Norm, 16.0)];
    for ((_, expected), values) in roles.iter().zip(after_a_step(optimizer, &roles, [0.0, 0.0], 1.0)) {
        let moved = -values[0] / 1e-2;
        assert!((moved - expected).abs() < 1e-4, "{moved} instead of {expected}");
    }
}

#[test]
fn only_norms_and_biases_do_not_decay() {
    let roles = [
        (Role::Embedding, true),
        (Role::Projection, true),
        (Role::Head, true),
        (Role::LoraA, true),
        (Role::LoraB, true),
        (Role::Norm, false),
        (Role::Bias, false),
    ];
    let optimizer = Optimizer::new(config(OptimizerKind::AdamW, None));
    for ((role, decays), values) in roles.iter().zip(after_a_step(optimizer, &roles, [0.5, -2.0], 0.0)) {
        let factor = if *decays { 1.0 - 1e-2 * 0.1 } else { 1.0 };
        assert!((values[0] - 0.5 * factor).abs() < 1e-7 && (values[1] + 2.0 * factor).abs() < 1e-6, "{role:?}");
    }
}

#[test]
fn a_step_that_is_not_finite_or_beyond_the_limit_changes_nothing_and_the_next_one_is_taken() {
    for (kind, max_grad_norm) in [OptimizerKind::AdamW, OptimizerKind::AdamW8bit].into_iter().zip([None, Some(1.0)]) {
        for bad in [f32::NAN, f32::INFINITY, 1e6] {
            let mut parameters = parameters();
            let mut optimizer = Optimizer::new(config(kind, max_grad_norm));
            optimizer.set_norm_limit(1e5);
            take_steps(&mut optimizer, &mut parameters, 0..1);
            let before = (values(&parameters), optimizer.save());
            let gradients = gradients_with(&parameters, 1, |values| values[300] = bad);
            let report = optimizer.step(parameters.iter_mut().collect(), gradients, 1e-2);
            let norm: f32 = report.grad_norm.into_scalar();
            assert_eq!(norm.is_finite(), bad.is_finite(), "the report shows the norm as it is");
            assert!((values(&parameters), optimizer.save()) == before, "{kind:?}, {bad}");
            take_steps(&mut optimizer, &mut parameters, 2..3);
            let after = values(&parameters);
            assert!(after.iter().flatten().all(|value| value.is_finite()) && after[0][300] != before.0[0][300]);
        }
    }
}

/// Creates two matrices whose 8-bit state is large enough for paging, an embedding with pageable f32 moments, and small parameters.
fn large_parameters() -> Vec<Parameter<Flex>> {
    parameters_of(&[
        ("embedding", &[400, 256], Role::Embedding),
        ("first", &[500, 256], Role::Projection),
        ("norm", &[256], Role::Norm),
        ("second", &[256, 500], Role::Projection),
        ("small", &[64, 80], Role::Projection),
    ])
}

#[test]
fn paging_changes_no_bit() {
    let config = config(OptimizerKind::PagedAdamW8bit, Some(1.0));
    let tensor = |parameter: Parameter<Flex>| {
        let Parameter { name, shape, role, .. } = parameter;
        TensorSpec { name: name.to_string(), shape, role, layer: None }
    };
    let tensors: Vec<_> = large_parameters().into_iter().map(tensor).collect();
    let all = config.state_bytes(&tensors);
    let run = |resident_bytes: u64| {
        let (mut optimizer, mut parameters) = (Optimizer::new(config).with_paging(resident_bytes), large_parameters());
        take_steps(&mut optimizer, &mut parameters, 0..3);
        // A checkpoint in the middle is loaded into another optimizer with the same paging.
        let mut resumed = Optimizer::new(config).with_paging(resident_bytes);
        resumed.load(&parameters.iter().collect::<Vec<_>>(), optimizer.save(), 3).unwrap();
        assert_eq!(resumed.paged_bytes(), optimizer.paged_bytes());
        take_steps(&mut resumed, &mut parameters, 3..5);
        assert_eq!(resumed.paged_bytes(), config.paging(&tensors, resident_bytes).host);
        (values(&parameters), resumed.save(), resumed.paged_bytes())
    };
    let (parameters, state, paged) = run(all);
    assert_eq!(paged, 0);
    for (resident_bytes, expected) in [(all - 300_000, 4 * 128_000), (0, 4 * 128_000 + 8 * 102_400)] {
        let (paged_parameters, paged_state, paged) = run(resident_bytes);
        assert_eq!(paged, expected, "{resident_bytes} of {all} bytes stay");
        assert!(paged_parameters == parameters && paged_state == state, "{resident_bytes} of {all} bytes stay");
    }
}

/// Takes steps of parameters in bf16 with these weights; returns their values and the state.
fn steps_in_bf16(weights: TrainedWeights, kind: OptimizerKind, seed: u64) -> (Vec<Parameter<Flex>>, StateDict) {
    let config = OptimizerConfig { weights, ..config(kind, Some(1.0)) };
    let mut parameters = in_bf16(large_parameters());
    let mut optimizer = Optimizer::new(config).with_seed(seed);
    take_steps(&mut optimizer, &mut parameters, 0..2);
    // A checkpoint in the middle is loaded into another optimizer, which pages what it can.
    let mut resumed = Optimizer::new(config).with_seed(seed).with_paging(0);
    load(&mut resumed, &parameters, optimizer.save()).unwrap();
    resumed.steps = optimizer.steps();
    take_steps(&mut resumed, &mut parameters, 2..5);
    (parameters, resumed.save())
}

/// Rounds matrices to bf16.
fn in_bf16(parameters: Vec<Parameter<Flex>>) -> Vec<Parameter<Flex>> {
    let is_vector = |parameter: &Parameter<Flex>| parameter.shape.len() == 1;
    let round = |parameter| if is_vector(&parameter) { parameter } else { parameter.in_format(DType::BF16) };
    parameters.into_iter().map(round).collect()
}

#[test]
fn both_halves_are_the_parameters_of_f32_bit_for_bit() {
    for kind in [OptimizerKind::AdamW, OptimizerKind::AdamW8bit] {
        let mut expected: Vec<_> =
            in_bf16(large_parameters()).into_iter().map(|parameter| parameter.in_format(DType::F32)).collect();
        let mut optimizer = Optimizer::new(config(kind, Some(1.0)));
        take_steps(&mut optimizer, &mut expected, 0..5);
        let (parameters, mut state) = steps_in_bf16(TrainedWeights::Bf16Exact, kind, 0);
        for (parameter, expected) in parameters.into_iter().zip(&expected) {
            let expected: Vec<f32> = expected.value.to_data().to_vec().unwrap();
            let Some(lower) = state.remove(&format!("{}.low_bits", parameter.name)) else {
                assert!(parameter.value.dtype() == DType::F32 && parameter.name.as_ref() == "norm");
                continue;
            };
            let HostTensor::U8(lower) = lower else { panic!("lower halves are bytes") };
            let (data, device) = (TensorData::new(lower, [2 * expected.len()]), parameter.value.device());
            let lower = Tensor::from_data(data, (&device, DType::U8));
            let rounded: Vec<f32> = parameter.value.to_data().convert::<f32>().to_vec().unwrap();
            let whole = widened(parameter.value, &Rounding::Exact(lower)).into_data().to_vec::<f32>().unwrap();
            assert!(whole.iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits()), "{}", parameter.name);
            assert!(whole.iter().zip(rounded).all(|(whole, rounded)| (whole - rounded).abs() <= whole.abs() / 256.0));
        }
        assert_eq!(state, optimizer.save(), "all other state is that of f32");
    }
}

#[test]
fn random_rounding_follows_from_the_seed_and_has_the_mean_of_f32() {
    let kind = OptimizerKind::AdamW8bit;
    let run = |seed| steps_in_bf16(TrainedWeights::Bf16Stochastic, kind, seed);
    let floats = |parameters: &[Parameter<Flex>]| -> Vec<Vec<f32>> {
        parameters.iter().map(|parameter| parameter.value.to_data().convert::<f32>().to_vec().unwrap()).collect()
    };
    let (first, state) = run(7);
    let (same, other) = (run(7), run(8));
    assert!(floats(&same.0) == floats(&first) && same.1 == state, "also where it is paged");
    assert!(floats(&other.0) != floats(&first) && !state.keys().any(|name| name.ends_with("low_bits")));
    let mut uninterrupted = in_bf16(large_parameters());
    let config = OptimizerConfig { weights: TrainedWeights::Bf16Stochastic, ..config(kind, Some(1.0)) };
    take_steps(&mut Optimizer::new(config).with_seed(7), &mut uninterrupted, 0..5);
    assert!(floats(&uninterrupted) == floats(&first));
    // Each of two ranks updates its share, to the same bits.
    for owned in ["first", "second"] {
        let mut parameters = in_bf16(large_parameters());
        let mut part = Optimizer::new(config).with_seed(7).owning([owned.into()]);
        take_steps(&mut part, &mut parameters, 0..5);
        let place = parameters.iter().position(|parameter| parameter.name.as_ref() == owned).unwrap();
        assert!(floats(&parameters)[place] == floats(&first)[place], "{owned}");
    }
    let mut expected = in_bf16(large_parameters());
    expected = expected.into_iter().map(|parameter| parameter.in_format(DType::F32)).collect();
    take_steps(&mut Optimizer::new(config), &mut expected, 0..5);
    let mean = |values: &[f32]| values.iter().copied().map(f64::from).sum::<f64>() / values.len() as f64;
    let differences = floats(&first).into_iter().zip(floats(&expected));
    let of_matrix: Vec<f32> = differences.flat_map(|(a, b)| a.into_iter().zip(b).map(|(a, b)| a - b)).collect();
    // Some 300,000 values, each off by up to five rounding steps of at most 1/256, at random.
    assert!(mean(&of_matrix).abs() < 3e-5, "{}", mean(&of_matrix));
}

#[test]
fn a_state_of_another_recipe_is_refused_by_name() {
    let mut parameters = parameters();
    let mut adamw = Optimizer::new(config(OptimizerKind::AdamW, None));
    take_steps(&mut adamw, &mut parameters, 0..1);
    let mut in_8_bits = Optimizer::new(config(OptimizerKind::AdamW8bit, None));
    let message = load(&mut in_8_bits, &parameters, adamw.save()).unwrap_err().to_string();
    assert!(message.contains("lacks `large.exp_avg.codes`"), "{message}");
    assert_eq!((in_8_bits.steps(), in_8_bits.save().len()), (0, 0), "a state that is refused changes nothing");

    let mut short = adamw.save();
    short.insert("small.exp_avg".into(), HostTensor::F32(vec![0.0; 3]));
    let message = load(&mut adamw, &parameters, short).unwrap_err().to_string();
    assert!(message.contains("`small.exp_avg` has 3 f32 values, expected 16 f32 values"), "{message}");

    let mut foreign = adamw.save();
    foreign.insert("other.exp_avg".into(), HostTensor::F32(vec![0.0]));
    let message = load(&mut adamw, &parameters, foreign).unwrap_err().to_string();
    assert!(message.contains("`other.exp_avg`"), "{message}");
}
