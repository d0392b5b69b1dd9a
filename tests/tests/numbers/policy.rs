//! GRPO against TRL: advantages, losses and derivatives of every loss type, level and scale from given log-probabilities; log-probabilities and
//! LoRA gradients of a model, and whole steps, with completions packed into one row and into several micro-batches. And sampling against training:
//! log-probabilities of both are the same in every family, and so are the experts of mixtures.

use firebrick_data::{Batch, DocumentSet, Example, PackOptions, PackedDataset};
use firebrick_kernels::{GradientMap, GradientSink, Kernels};
use firebrick_model::{BatchLimits, Decoder, GenerateOptions, LossOptions, PassOptions, Sampler, Sampling};
use firebrick_tests::{
    FROZEN, Golden, MIXTURES, every_next_token, families, host, host_gradients, in_turn, largest_difference, load,
    on_every_backend, relative_difference, trainer_of, upload,
};
use firebrick_trainer::grpo::{
    Completion, Denominators, ImportanceSampling, LossType, Objective, ScaleRewards, Sums, advantages, reward_of,
};
use firebrick_trainer::run::step::policy::{PolicyStep, Sample, micro_batches};

const GROUP: usize = 4;
const MAX_LENGTH: usize = 8;
const TEMPERATURE: f64 = 0.8;
const END: u32 = 257;
const LENGTHS: [usize; 12] = [3, 8, 5, 6, 2, 8, 8, 4, 7, 3, 5, 8];
const TRUNCATED: [usize; 3] = [1, 6, 11];
const WEIGHTS: [f64; 2] = [1.0, 0.5];
const PLAIN: Objective = Objective {
    loss_type: LossType::Dapo,
    level: ImportanceSampling::Token,
    epsilon: 0.2,
    epsilon_high: 0.2,
    beta: 0.0,
    max_completion_length: MAX_LENGTH,
};

/// A case of the golden file.
struct Case {
    name: String,
    objective: Objective,
    scale: ScaleRewards,
    is_masked: bool,
}

fn cases() -> Vec<Case> {
    let types = [("dapo", LossType::Dapo), ("dr_grpo", LossType::DrGrpo), ("grpo", LossType::Grpo)];
    let levels = [("token", ImportanceSampling::Token), ("sequence", ImportanceSampling::Sequence)];
    let case = |name: String, objective| Case { name, objective, scale: ScaleRewards::Group, is_masked: false };
    let mut cases = vec![
        Case { scale: ScaleRewards::Batch, ..case("scale-batch".to_owned(), PLAIN) },
        Case { scale: ScaleRewards::None, ..case("scale-none".to_owned(), PLAIN) },
    ];
    for (name, loss_type) in types {
        cases.push(Case { is_masked: true, ..case(format!("masked-{name}"), Objective { loss_type, ..PLAIN }) });
        cases.extend(levels.map(|(of, level)| case(format!("{name}-{of}"), Objective { loss_type, level, ..PLAIN })));
    }
    for (name, loss_type, level) in
        [(0, 0, 0), (2, 2, 0), (2, 2, 1)].map(|(a, b, c)| (types[a].0, types[b].1, levels[c]))
    {
        let objective = Objective { loss_type, level: level.1, beta: 0.3, epsilon_high: 0.28, ..PLAIN };
        cases.push(case(format!("kl-{name}-{}", level.0), objective));
    }
    cases
}

impl Case {
    /// The completions that are not masked.
    fn rows(&self) -> Vec<usize> {
        (0..LENGTHS.len()).filter(|row| !(self.is_masked && TRUNCATED.contains(row))).collect()
    }

    fn step(&self) -> Denominators {
        let tokens = self.rows().iter().map(|&row| LENGTHS[row] as u64).sum();
        Denominators { tokens, completions: LENGTHS.len() as u64 }
    }

    fn advantages(&self, golden: &Golden) -> Vec<f64> {
        let values = golden.f32s("rewards");
        let part = |value: f32| (!value.is_nan()).then_some(f64::from(value));
        let of_row = |row: usize| reward_of(&[part(values[row]), part(values[LENGTHS.len() + row])], &WEIGHTS);
        let rewards: Vec<_> = (0..LENGTHS.len()).map(of_row).collect();
        let scored = advantages(&rewards, GROUP, self.scale);
        assert_eq!(scored.equal_groups, 1.0 / 3.0, "{}", self.name);
        scored.advantages
    }

    /// Returns for each completion that is not masked which of the log-probabilities are its own.
    fn places(&self) -> Vec<(usize, std::ops::Range<usize>)> {
        let mut at = 0;
        let place = |row: usize| {
            at += LENGTHS[row];
            (row, at - LENGTHS[row]..at)
        };
        self.rows().into_iter().map(place).collect()
    }
}

fn assert_close(what: &str, found: &[f64], expected: &[f32], tolerance: f64) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (index, (found, &expected)) in found.iter().zip(expected).enumerate() {
        let difference = (found - f64::from(expected)).abs();
        assert!(difference <= tolerance * f64::from(expected).abs().max(1e-2), "{what}[{index}]: {found}, {expected}");
    }
}

#[test]
fn advantages_losses_and_derivatives_equal_those_of_trl() {
    let golden = Golden::open("tiny-llama-grpo");
    for case in cases() {
        let (name, objective) = (&case.name, case.objective);
        let advantages = case.advantages(&golden);
        assert_close(name, &advantages, &golden.f32s(&format!("{name}.advantages")), 1e-5);
        let reference = (objective.beta != 0.0).then(|| golden.f32s(&format!("{name}.ref_log_probs")));
        let first = golden.f32s(&format!("{name}.first.log_probs"));
        for (iteration, old) in [("first", None), ("second", Some(&first))] {
            let what = format!("{name}.{iteration}");
            let log_probs = golden.f32s(&format!("{what}.log_probs"));
            let (mut sums, mut d_log_probs) = (Sums::default(), vec![0.0; log_probs.len()]);
            for (row, own) in case.places() {
                let completion = Completion {
                    log_probs: &log_probs[own.clone()],
                    old: old.map(|old| &old[own.clone()]),
                    reference: reference.as_ref().map(|reference| &reference[own.clone()]),
                    advantage: advantages[row],
                };
                sums.add(&objective.part(&completion, case.step(), &mut d_log_probs[own]));
            }
            assert_close(&what, &[sums.loss], &golden.f32s(&format!("{what}.loss")), 1e-5);
            let d_log_probs: Vec<f64> = d_log_probs.into_iter().map(f64::from).collect();
            assert_close(&what, &d_log_probs, &golden.f32s(&format!("{what}.d_log_probs")), 1e-5);
            let metrics = [sums.kl / sums.tokens, sums.clipped[0] / sums.ratios, sums.clipped[1] / sums.ratios];
            assert_close(&what, &metrics, &golden.f32s(&format!("{what}.metrics")), 1e-4);
        }
    }
}

/// Packs prompts and completions into rows of this many tokens, in their order.
fn packed(golden: &Golden, row_len: usize) -> PackedDataset {
    let example = |row: usize| {
        let prompt = golden.ids(&format!("prompt{}", row / GROUP));
        let mut completion = golden.ids(&format!("completion{row}"));
        completion.extend((!TRUNCATED.contains(&row)).then_some(END));
        let loss_mask = [vec![false; prompt.len()], vec![true; completion.len()]].concat();
        Example { tokens: [prompt, completion].concat(), loss_mask }
    };
    let examples: Vec<_> = (0..LENGTHS.len()).map(example).collect();
    PackedDataset::new(DocumentSet::from_examples(&examples), PackOptions::new(row_len))
}

/// Returns the documents of a row and the log-probabilities of all their completions in the golden, in the row's order.
fn in_row(case: &Case, rows: &PackedDataset, row: usize) -> Vec<(usize, std::ops::Range<usize>)> {
    let places = case.places();
    rows.row_documents(row).map(|document| places[document].clone()).collect()
}

fn model_of<B: Kernels>(model: &Decoder<B>, golden: &Golden, case: &Case, row_len: usize) {
    let (name, advantages, rows) = (&case.name, case.advantages(golden), packed(golden, row_len));
    let expected = golden.f32s(&format!("{name}.first.log_probs"));
    let mut gradients = GradientMap::<B>::default();
    let mut sums = Sums::default();
    for row in 0..rows.rows() {
        gradients.begin_micro_batch(row + 1 == rows.rows());
        let batch: Batch = rows.batch(&[row]);
        let (places, on_device) = (in_row(case, &rows, row), upload(model, &batch));
        let base = (case.objective.beta != 0.0).then(|| model.log_probs(&on_device, false, 7, TEMPERATURE));
        let loss =
            LossOptions { chunk_tokens: 7, gradient_scale: Some(1.0), log_probs: false, temperature: TEMPERATURE };
        let derivatives = |log_probs: &[f32]| {
            let (mut at, mut d_log_probs) = (0, vec![0.0; log_probs.len()]);
            for (completion, place) in places {
                let own = at..at + place.len();
                at = own.end;
                let found: Vec<f64> = log_probs[own.clone()].iter().map(|&value| f64::from(value)).collect();
                assert_close(&format!("{name}: completion {completion}"), &found, &expected[place], 1e-4);
                let completion = Completion {
                    log_probs: &log_probs[own.clone()],
                    old: None,
                    reference: base.as_ref().map(|base| &base[own.clone()]),
                    advantage: advantages[completion],
                };
                sums.add(&case.objective.part(&completion, case.step(), &mut d_log_probs[own]));
            }
            assert_eq!(at, log_probs.len(), "every target is a completion's");
            d_log_probs
        };
        let none = model.policy_gradients(&on_device, PassOptions::default(), loss, None, derivatives, &mut gradients);
        assert!(none.is_none(), "a dense model has no auxiliary loss");
    }
    assert_close(name, &[sums.loss], &golden.f32s(&format!("{name}.first.loss")), 1e-4);
    let gradients = host_gradients(&gradients);
    let names = golden.keys(&format!("{name}.first.grad."));
    assert_eq!(names, gradients.keys().cloned().collect::<Vec<_>>());
    for parameter in names {
        let expected = golden.f32s(&format!("{name}.first.grad.{parameter}"));
        let difference = relative_difference(&gradients[&parameter], &expected);
        assert!(difference < 1e-3, "{name}, {parameter}: {difference:e}");
    }
}

fn gradients<B: Kernels>() {
    let golden = Golden::open("tiny-llama-grpo");
    let model = load::<B>("tiny-llama", Some("tiny-llama-lora"), FROZEN);
    let shown = cases().into_iter().filter(|case| ["dapo-token", "kl-grpo-sequence"].contains(&&*case.name));
    for (turn, case) in shown.enumerate() {
        for row_len in in_turn::<B, _>(&[200, 30], turn) {
            model_of(&model, &golden, &case, row_len);
        }
    }
}

on_every_backend!(log_probabilities_and_gradients_of_completions_equal_those_of_trl, gradients);

/// Takes the step of a case with its completions in rows of so many tokens, so many rows in a micro-batch.
fn step_of<B: Kernels>(golden: &Golden, case: &Case, (row_len, rows, pack): (usize, usize, bool)) {
    let (name, advantages) = (&case.name, case.advantages(golden));
    let expected = golden.f32s(&format!("{name}.first.log_probs"));
    let sample = |(row, place): (usize, std::ops::Range<usize>)| {
        let mut tokens = golden.ids(&format!("completion{row}"));
        tokens.extend((!TRUNCATED.contains(&row)).then_some(END));
        let prompt = golden.ids(&format!("prompt{}", row / GROUP));
        let (sampled, advantage) = (expected[place].to_vec(), advantages[row]);
        Sample { prompt, tokens, sampled, advantage, ..Sample::default() }
    };
    let mut samples: Vec<Sample> = case.places().into_iter().map(sample).collect();
    let model = load::<B>("tiny-llama", Some("tiny-llama-lora"), FROZEN);
    let mut trainer = trainer_of(model, PassOptions::default());
    let batches = micro_batches(&samples, row_len, rows, pack);
    if case.objective.beta != 0.0 {
        let references = trainer.log_probs(&samples, &batches, false, TEMPERATURE).expect("tokens of the model");
        samples.iter_mut().zip(references).for_each(|(sample, reference)| sample.reference = Some(reference));
    }
    let step = PolicyStep { objective: case.objective, temperature: TEMPERATURE, denominators: case.step() };
    let (outcome, sums) = trainer.policy_step(&samples, &batches, step).expect("one rank reaches itself");
    let numbers = outcome.read();
    assert_close(name, &[f64::from(numbers.loss)], &golden.f32s(&format!("{name}.first.loss")), 1e-4);
    // Neither prompts nor padding nor masked completions.
    assert_eq!(sums.loss.tokens, expected.len() as f64, "{name}");
    assert!(sums.max_drift < 1e-3, "{name}: a log-probability differs by {:e} from TRL's", sums.max_drift);
    let gradients = golden.keys(&format!("{name}.first.grad.")).into_iter();
    let squares = gradients.flat_map(|parameter| golden.f32s(&format!("{name}.first.grad.{parameter}")));
    let norm = squares.map(|value| f64::from(value).powi(2)).sum::<f64>().sqrt();
    if norm > 0.0 {
        let found = f64::from(numbers.grad_norm);
        assert!((found / norm - 1.0).abs() < 1e-3, "{name}: the norm of the gradients is {found}, not {norm}");
    }
}

fn steps<B: Kernels>() {
    let golden = Golden::open("tiny-llama-grpo");
    let shown =
        cases().into_iter().filter(|case| case.is_masked || case.name.starts_with("kl") || case.name == "dapo-token");
    for (turn, case) in shown.enumerate() {
        for division in in_turn::<B, _>(&[(200, 1, true), (30, 2, true), (30, 1, false)], turn) {
            step_of::<B>(&golden, &case, division);
        }
    }
}

on_every_backend!(steps_equal_those_of_trl_however_completions_are_divided, steps);

/// Compares the log-probabilities of tokens that were sampled together, after prompts of several lengths, with those of the training pass over packed
/// rows; and those of that pass with the softmax of the logits, which equal transformers'.
fn sampled_and_trained<B: Kernels>() {
    let sampling = Sampling { temperature: TEMPERATURE as f32, ..Sampling::GREEDY };
    let options = GenerateOptions {
        max_new_tokens: 5,
        stop_tokens: Vec::new(),
        sampler: Sampler::new(sampling, 3).expect("the settings are in range"),
        limits: BatchLimits::NONE,
    };
    for family in families::<B>() {
        let golden = Golden::open(family);
        let ids = golden.ids("input_ids");
        let model = load::<B>(family, Some(&format!("{family}-lora")), FROZEN);
        let mut trainer = trainer_of(model, PassOptions::default());
        trainer.model.note_choices();
        let prompts: Vec<Vec<u32>> = [9, 2, 17, 17].map(|length| ids[..length].to_vec()).into();
        let completions = trainer.model.complete(&prompts, &options, 0).expect("the prompts are short");
        let sample = |(prompt, completion): (Vec<u32>, firebrick_model::Completion)| {
            assert!(completion.is_truncated && completion.tokens.len() == 5, "{family}");
            let firebrick_model::Completion { tokens, log_probs: sampled, experts, .. } = completion;
            Sample { prompt, tokens, sampled, experts, ..Sample::default() }
        };
        let samples: Vec<Sample> = prompts.into_iter().zip(completions).map(sample).collect();
        let batches = micro_batches(&samples, 48, 1, true);
        let differences = |adapters: bool| {
            let found = trainer.log_probs(&samples, &batches, adapters, TEMPERATURE).expect("tokens of the model");
            let sampled: Vec<f32> = samples.iter().flat_map(|sample| sample.sampled.clone()).collect();
            largest_difference(&found.concat(), &sampled)
        };
        let (with, without) = (differences(true), differences(false));
        assert!(with < 2e-3, "{family}: a log-probability differs by {with:e}");
        assert!(without > 0.1, "{family}: the adapter takes no part in the sampling: {without:e}");

        let batch = every_next_token(&ids[..24], 24);
        let on_device = upload(&trainer.model, &batch);
        let found = trainer.model.log_probs(&on_device, true, 7, TEMPERATURE);
        let logits = host(trainer.model.logits(&on_device));
        let vocabulary = trainer.model.config.spec.vocab_size;
        let expected = logits.chunks(vocabulary).zip(&ids[1..24]).map(|(logits, &target)| {
            let scaled = |logit: f32| f64::from(logit) / TEMPERATURE;
            let total: f64 = logits.iter().map(|&logit| scaled(logit).exp()).sum();
            (scaled(logits[target as usize]) - total.ln()) as f32
        });
        let expected: Vec<f32> = expected.collect();
        let found: Vec<f64> = found.into_iter().map(f64::from).collect();
        assert_close(family, &found, &expected, 1e-3);
        if MIXTURES.contains(&family) {
            let denominators = Denominators { tokens: 20, completions: 4 };
            let step = PolicyStep { objective: PLAIN, temperature: TEMPERATURE, denominators };
            let (_, sums) = trainer.policy_step(&samples, &batches, step).expect("tokens of the model");
            assert_eq!(sums.routed, [20, 0], "{family}: tokens went to other experts than in sampling");
        }
    }
}

on_every_backend!(sampled_tokens_have_the_log_probabilities_of_training_in_every_family, sampled_and_trained);
