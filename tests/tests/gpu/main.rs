//! Whole runs and whole models on an NVIDIA card, against the same on the CPU. Part of the GPU suite (`cargo xtask dist --tests`).
//!
//! Trade-off: without a card each test prints that and passes.
#![cfg(feature = "cuda")]

/// Makes a test of each share of the families, which run at the same time.
macro_rules! over_families {
    ($name:ident, $function:ident) => {
        mod $name {
            #[test]
            fn in_the_first_share() {
                super::$function(crate::share(0));
            }
            #[test]
            fn in_the_second_share() {
                super::$function(crate::share(1));
            }
            #[test]
            fn in_the_third_share() {
                super::$function(crate::share(2));
            }
            #[test]
            fn in_the_last_share() {
                super::$function(crate::share(3));
            }
        }
    };
}

mod curve;
mod deterministic;
mod generation;
mod gradients;
mod graphs;
mod leaks;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use burn_tensor::DType;
use firebrick_arch::{AttentionSpec, LoraConfig, MlpSpec, RopeScaling, TargetModules};
use firebrick_data::{Batch, IGNORE_INDEX};
use firebrick_hwprofile::HardwareProfile;
use firebrick_kernels::backends::cuda::{RowScaling, refuse_cudnn, scale_rows};
use firebrick_kernels::backends::{BackendKind, Cuda, Flex};
use firebrick_kernels::{GradientMap, GradientSink, Kernels};
use firebrick_model::{BaseStorage, BuildOptions, Decoder, ModelConfig, PassOptions};
use firebrick_precision::QuantFormat;
use firebrick_precision::difference::largest_difference;
use firebrick_tests::{
    FAMILIES, FROZEN, Golden, MIXTURES, NEW, NEWEST, NF4, TRAINED, assert_held_is_of_its_step, checkpoint_folder,
    finish, finish_traced, fixture, host, host_gradients, load, loss_and_scaled_gradients, metrics, one_step, packed,
    preference_loss, recipe, relative_difference, snapshot, some_in_turn, step_losses, upload,
};
use firebrick_trainer::run::peaks::measure_peaks;
use firebrick_trainer::run::trace::TraceSteps;
use tempfile::tempdir;

#[expect(clippy::print_stderr, reason = "a test that does not run must be seen")]
fn has_card() -> bool {
    match BackendKind::Cuda.probe() {
        Ok(()) => true,
        Err(reason) => {
            eprintln!("SKIPPED: {reason}");
            false
        }
    }
}

/// Number of tests that share the families.
const SHARES: usize = 4;
/// Steps of a run that is compared: enough for the warm-up, and for losses that have moved.
const STEPS: usize = 10;

/// Returns a share of the families; none without a card.
fn share(number: usize) -> Vec<&'static str> {
    if has_card() { FAMILIES.into_iter().skip(number).step_by(SHARES).collect() } else { Vec::new() }
}

/// Returns the losses of ten steps, in the 16-bit format of the card if `changes` name no other.
fn losses(backend: &str, changes: &[&str]) -> Vec<f64> {
    let output = tempdir().unwrap();
    let backend = format!("backend={backend}");
    let count = format!("train.steps={STEPS}");
    let steps = [
        backend.as_str(),
        compute_half(),
        &count,
        "train.warmup_steps=2",
        "train.learning_rate=1e-3",
        "data.eval_fraction=",
    ];
    let summary = finish(recipe(output.path(), &[&steps, changes].concat()), NEW);
    assert_eq!(summary.steps, STEPS as u64);
    step_losses(&output.path().join("run"))
}

/// Asserts that every step's loss on the card is the CPU's, to this absolute tolerance.
fn assert_agrees(changes: &[&str], tolerance: f64) {
    let (ours, expected) = (losses("cuda", changes), losses("flex", changes));
    assert_eq!((ours.len(), expected.len()), (STEPS, STEPS));
    for (step, (ours, expected)) in ours.iter().zip(&expected).enumerate() {
        assert!(
            (ours - expected).abs() < tolerance,
            "{changes:?}, step {}: {ours} on cuda, {expected} on flex",
            step + 1
        );
    }
}

fn model_of(family: &str) -> String {
    format!("model='{}'", fixture(family).display())
}

/// The CPU computes in f32 here. Rounding to bf16 moves single losses of these models (7.2 to 8.1) by up to 0.022, those of
/// tiny-gemma3 most; of tiny-gpt-oss by twice as much, as it does in transformers (0.010 root mean square before training,
/// 0.002 to 0.006 in others), because routers choose by logits that are close. tiny-qwen3-5 is as sensitive: in ten steps of
/// transformers bf16 moves its losses by 0.010 on average, those of tiny-llama by 0.001. In float16, a step that overflows is skipped.
fn qlora_in_bf16(families: Vec<&'static str>) {
    if !families.is_empty() && half() == DType::BF16 {
        for family in families {
            print_attention(family, DType::BF16);
            let tolerance = if ["tiny-gpt-oss", "tiny-qwen3-5"].contains(&family) { 8e-2 } else { 4e-2 };
            assert_agrees(&[&model_of(family), "compute=bfloat16", "train.optimizer=paged_adamw_8bit"], tolerance);
        }
    }
}

over_families!(ten_steps_of_qlora_of_every_family_in_bf16_have_the_losses_of_the_cpu, qlora_in_bf16);

fn qlora_in_f32(families: Vec<&'static str>) {
    for family in families {
        print_attention(family, DType::F32);
        assert_agrees(&[&model_of(family), "compute=float32"], 1e-2);
    }
}

over_families!(ten_steps_of_qlora_of_every_family_in_f32_have_the_losses_of_the_cpu, qlora_in_f32);

#[test]
fn ten_steps_over_a_base_in_every_format_have_the_losses_of_the_cpu() {
    if has_card() {
        for format in QuantFormat::ALL {
            for compute in ["compute=float32", compute_half()] {
                assert_agrees(&[&format!("base={format}"), compute], 1e-2);
            }
        }
    }
}

/// DoRA and rows of single tokens, on a quantized and on a dense base, with and without dropout and under each recompute policy. One id occurs in
/// most texts, one in none.
fn assert_dora_agrees(compute: &str) {
    let rows = "lora.trainable_token_indices=[97, 101, 102, 262]";
    for base in [&[][..], &["bnb_4bit="]] {
        for more in ["train.recompute=full", "train.recompute=projections", "train.recompute=none", "lora.dropout=0.1"]
        {
            assert_agrees(&[&[compute, "lora.use_dora=true", rows, more], base].concat(), 2e-2);
        }
    }
}

#[test]
fn ten_steps_of_dora_and_token_rows_in_f32_have_the_losses_of_the_cpu() {
    if has_card() {
        assert_dora_agrees("compute=float32");
    }
}

#[test]
fn ten_steps_of_dora_and_token_rows_in_16_bits_have_the_losses_of_the_cpu() {
    if has_card() {
        assert_dora_agrees(compute_half());
    }
}

/// Full fine-tuning adds the gradients of weights, norms and biases. Adam's first updates are nearly the sign of a gradient, so if one is close to
/// zero, bf16 turns whole weights the other way: its tolerance is six times that of f32. The loss of tiny-gemma halves in ten steps, and its weights are
/// stored in bf16: an update below half the spacing of such values moves what the CPU computes with, but not yet what bf16 does. In float16, a step
/// that overflows is skipped.
fn full_fine_tuning(families: Vec<&'static str>) {
    for family in families {
        let tolerance = match family {
            // bf16 moves gradients of Gemma 4's layer inputs by up to their own size and more, in transformers as well.
            "tiny-gemma" | "tiny-gemma4" | "tiny-gemma4-vl" => 3e-1,
            "tiny-gpt-oss" | "tiny-qwen3-next" => 1.2e-1,
            // Its loss falls from 6.3 to 3.5 in these steps.
            "tiny-qwen3-5" => 2e-1,
            _ => 6e-2,
        };
        let in_bf16 = (half() == DType::BF16).then_some(("bfloat16", tolerance));
        for (compute, tolerance) in [("float32", 1e-2)].into_iter().chain(in_bf16) {
            let compute = format!("compute={compute}");
            assert_agrees(&[&model_of(family), &compute, "bnb_4bit=", "lora=", "mode=full"], tolerance);
        }
    }
}

over_families!(ten_steps_of_full_fine_tuning_of_every_family_have_the_losses_of_the_cpu, full_fine_tuning);

#[test]
fn ten_steps_in_f16_with_loss_scaling_have_the_losses_of_the_cpu() {
    if has_card() {
        for (changes, tolerance) in [(&["bnb_4bit={}"][..], 1e-2), (&["bnb_4bit=", "lora=", "mode=full"], 3e-2)] {
            assert_agrees(&[changes, &["compute=float16"]].concat(), tolerance);
        }
    }
}

#[test]
fn a_checkpoint_that_is_held_while_steps_go_on_has_the_bytes_of_one_that_they_wait_for() {
    if has_card() {
        for (adapter, dtype) in [(None, DType::F32), (None, half()), (Some("tiny-llama-lora"), half())] {
            let folder = tempdir().unwrap();
            assert_held_is_of_its_step::<Cuda>(adapter, dtype, folder.path());
        }
    }
}

/// The loss scale and its count of good steps go on where they were.
#[test]
fn interrupted_run_in_f16_equals_uninterrupted_run() {
    if !has_card() {
        return;
    }
    let changes = ["backend=cuda", "compute=float16", "train.steps=3", "eval.every_steps=0", "data.eval_fraction="];
    let folders = [(); 2].map(|()| tempdir().unwrap());
    let [whole, parts] = folders.each_ref().map(|folder| recipe(folder.path(), &changes));
    finish(whole, NEW);
    assert_eq!([one_step(parts.clone(), NEW), one_step(parts.clone(), NEWEST)], [1, 2]);
    finish(parts, NEWEST);
    let [whole, parts] = folders.each_ref().map(|folder| checkpoint_folder(&folder.path().join("run"), 3));
    let state = |folder: &Path| fs::read(folder.join("state.json")).unwrap();
    let of = |folder: &Path| serde_json::from_slice::<serde_json::Value>(&state(folder)).unwrap()["loss_scale"].clone();
    assert_eq!((of(&whole)["good_steps"].as_u64(), of(&parts)), (Some(3), of(&whole)));
}

#[test]
fn ten_steps_in_fp8_have_nearly_the_losses_of_bf16_in_every_mode() {
    if !has_card() || !has_fp8() {
        return;
    }
    // The largest differences in 20 steps are 1 % of the loss: 0.062 of 6.0 at the end over NF4, and 0.054 in full fine-tuning, which takes the loss
    // from 6.3 to 4.6 in five steps.
    let modes = [
        (&["bnb_4bit={}"][..], 0.1),
        (&["base=nvfp4"], 0.1),
        (&["base=mxfp4"], 0.1),
        (&["base=fp8"], 0.1),
        (&["bnb_4bit="], 0.1),
        (&["bnb_4bit=", "lora=", "mode=full"], 0.1),
    ];
    for (mode, tolerance) in modes {
        let [fp8, again, halves, bf16] = [
            &["compute=fp8"][..],
            &["compute=fp8", "train.recompute=full"],
            &["compute=fp8", "train.recompute=projections"],
            &["compute=bfloat16"],
        ]
        .map(|changes| losses("cuda", &[mode, changes].concat()));
        for step in 0..STEPS {
            let all = (fp8[step], again[step], halves[step], bf16[step]);
            let is_near = |loss: f64| (loss - bf16[step]).abs() < tolerance;
            assert!(
                is_near(fp8[step]) && is_near(again[step]) && is_near(halves[step]),
                "{mode:?}, step {}: {all:?}",
                step + 1
            );
        }
        assert!(fp8 != bf16, "{mode:?}: 8-bit floats round differently");
    }
}

/// Returns the compute capability of the card, or of the one that it imitates.
fn capability() -> (u32, u32) {
    let device = firebrick_cuda::Driver::load().and_then(|driver| driver.device(0));
    device.expect("there is a card").compute_capability
}

/// Returns whether the card multiplies 8-bit floats.
fn has_fp8() -> bool {
    capability() >= (8, 9)
}

/// Returns the 16-bit format in which the card usually computes: float16 where it has no bfloat16.
fn half() -> DType {
    if capability() < (8, 0) { DType::F16 } else { DType::BF16 }
}

/// Returns the line of a recipe that names [`half`].
fn compute_half() -> &'static str {
    if half() == DType::F16 { "compute=float16" } else { "compute=bfloat16" }
}

/// Applies scales on this card as other generations of cards do.
#[test]
fn losses_in_fp8_do_not_depend_on_where_the_scales_are_applied() {
    if !has_card() || !has_fp8() {
        return;
    }
    let modes = [(&["bnb_4bit={}"][..], 0.1), (&["base=fp8"], 0.1), (&["bnb_4bit=", "lora=", "mode=full"], 0.1)];
    let ways = [RowScaling::Afterwards, RowScaling::InGemm { powers_of_two: true }];
    // These kernels add in a fixed order, so that two runs in one way are the same.
    refuse_cudnn(&Default::default(), true, true);
    for (mode, tolerance) in modes {
        let changes = [mode, &["compute=fp8"]].concat();
        let usual = losses("cuda", &changes);
        for way in ways {
            let default_scaling = scale_rows(&Default::default(), way);
            let found = losses("cuda", &changes);
            scale_rows(&Default::default(), default_scaling);
            let differs = largest_difference(&usual, &found);
            assert!(differs > 0.0 && differs < tolerance, "{mode:?} {way:?}: {found:?} for {usual:?}");
        }
    }
}

/// Full fine-tuning with all state that is large enough for paging in host memory, on kernels that add in a fixed order.
#[test]
fn paging_changes_no_bit_of_a_run() {
    if !has_card() {
        return;
    }
    refuse_cudnn(&Default::default(), true, true);
    let run = |budget: &str| {
        let output = tempdir().unwrap();
        let model = tempdir().unwrap();
        wide_model(model.path());
        let changes = [
            "backend=cuda",
            compute_half(),
            "init=random",
            "bnb_4bit=",
            "lora=",
            "data.eval_fraction=",
            "train.optimizer=paged_adamw_8bit",
            &format!("train.optimizer_device_gib={budget}"),
            &format!("model='{}'", model.path().display()),
        ];
        let summary = finish(recipe(output.path(), &changes), NEW);
        assert_eq!(summary.steps, 6);
        let run = output.path().join("run");
        let plan = std::fs::read_to_string(run.join("plan.toml")).expect("the run wrote its plan");
        let mut tensors = snapshot(&run);
        tensors.retain(|path, _| path.extension().is_some_and(|extension| extension == "safetensors"));
        let waits = metrics(&run).iter().filter(|line| line["restore_wait_ms"].as_f64().is_some()).count();
        (step_losses(&run), tensors, plan, waits)
    };
    let (resident, paged) = (run("auto"), run("0"));
    refuse_cudnn(&Default::default(), false, false);
    assert!(resident.2 != paged.2 && paged.2.contains("in pinned host memory"), "{}", paged.2);
    assert_eq!(paged.3, 6, "each step reports what it waited");
    assert_eq!(resident.0, paged.0);
    assert!(resident.1 == paged.1, "weights and state are the same bytes");
}

/// Writes a copy of `tiny-llama` whose projections have enough elements for their state to be paged.
fn wide_model(folder: &std::path::Path) {
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(fixture("tiny-llama").join(file), folder.join(file)).expect("the fixture can be copied");
    }
    let text = std::fs::read_to_string(fixture("tiny-llama").join("config.json")).expect("the fixture has a config");
    let mut config: serde_json::Value = serde_json::from_str(&text).expect("it is JSON");
    config["hidden_size"] = 256.into();
    config["head_dim"] = 64.into();
    config["num_attention_heads"] = 4.into();
    config["num_key_value_heads"] = 2.into();
    config["intermediate_size"] = 512.into();
    std::fs::write(folder.join("config.json"), config.to_string()).expect("the folder can be written");
}

/// The trace of a run has the device's operations of its steps, and the host asks for the numbers of a step once the next one is queued.
/// (That the host then waits for no later work is tested in firebrick-kernels, with work that takes long enough.)
#[test]
fn a_traced_run_shows_host_and_device_side_by_side() {
    if !has_card() {
        return;
    }
    let output = tempdir().unwrap();
    let changes = ["backend=cuda", compute_half(), "train.steps=8", "data.eval_fraction="];
    finish_traced(recipe(output.path(), &changes), TraceSteps { first: 3, last: 6 });
    let text = std::fs::read_to_string(output.path().join("run/trace.json")).expect("the run wrote its trace");
    let file: serde_json::Value = serde_json::from_str(&text).expect("a trace is JSON");
    let events = file["traceEvents"].as_array().expect("a trace has events");
    let start = |event: &serde_json::Value| event["ts"].as_f64().expect("an event has a time");
    let end = |event: &serde_json::Value| start(event) + event["dur"].as_f64().expect("an event has a duration");
    let host = |name: &str, step: u64| {
        let found = events.iter().find(|event| event["name"] == name && event["args"]["step"] == step);
        found.unwrap_or_else(|| panic!("{name} of step {step} is not in the trace"))
    };
    for step in 3..=6 {
        assert!(end(host("wait for data", step)) <= start(host("queue step", step)) + 1.0, "step {step}");
        assert!(end(host("queue step", step)) <= start(host("wait for numbers", step - 1)) + 1.0, "step {step}");
    }
    let device: Vec<_> = events.iter().filter(|event| event["ph"] == "X" && event["tid"] == 2).collect();
    assert!(device.len() > 400, "{} operations in four steps", device.len());
    assert!(device.is_sorted_by_key(|event| start(event)), "one stream runs them in the order of their launches");
    // The two clocks begin together: the device works while the steps are queued.
    let queued = (start(host("queue step", 3)), end(host("queue step", 6)));
    assert!(device.iter().any(|event| queued.0 < start(event) && end(event) < queued.1), "{queued:?}");
}

#[test]
fn recomputation_and_offloading_change_no_loss() {
    if has_card() {
        let full = losses("cuda", &["train.recompute=full", "train.offload=true"]);
        for changes in [
            &["train.recompute=full", "train.offload=false"][..],
            &["train.recompute=projections", "train.offload=true"],
            &["train.recompute=projections", "train.offload=false"],
            &["train.recompute=selective"],
            &["train.recompute=none"],
        ] {
            let other = losses("cuda", changes);
            let difference = largest_difference(&full, &other);
            assert!(difference < 1e-3, "{changes:?} differs by {difference}");
        }
    }
}

/// Memory of evaluations and answers is returned between steps, including scratch memory: the next step allocates again.
#[test]
fn evaluations_between_steps_change_no_loss() {
    if !has_card() {
        return;
    }
    let of = |every: &str| {
        let answers = ["eval.exact_match_prompts=3", "eval.prompts=['2+2?', 'Hello']", "data.eval_fraction=0.2"];
        losses("cuda", &[&answers[..], &[every]].concat())
    };
    let (often, never) = (of("eval.every_steps=3"), of("eval.on_start=false"));
    for (step, (with, without)) in often.iter().zip(&never).enumerate() {
        assert!((with - without).abs() < 1e-2, "step {}: {with} with evaluations, {without} without", step + 1);
    }
}

/// Creates a small model of a family with random weights and heads of this width; with an adapter on all projections if the base is frozen.
fn random_model<B: Kernels>(family: &str, head_dim: usize, dtype: DType, storage: BaseStorage) -> Decoder<B> {
    let mut config = ModelConfig::read(&fixture(family)).expect("the model has a readable config");
    config.spec.hidden_size = 256;
    let narrow = config.spec.attentions().next().unwrap().head_dim;
    for rope in &mut config.spec.ropes {
        rope.rotary_dim = head_dim * rope.rotary_dim / narrow.max(rope.rotary_dim); // the same share of each head
        if let Some(scale) = &mut rope.query_scale {
            // As published. With the fixture's, scores of random weights are so far apart that bf16 moves gradients by a fifth of their size.
            scale.beta = 0.1;
        }
        if let RopeScaling::LongRope { short_factor, long_factor, .. } = &mut rope.scaling {
            short_factor.resize(rope.rotary_dim / 2, 1.9);
            long_factor.resize(rope.rotary_dim / 2, 7.0);
        }
    }
    for attention in config.spec.attentions_mut() {
        (attention.heads, attention.kv_heads, attention.head_dim) = (4, 2, head_dim);
        attention.scale = AttentionSpec::new(4, 2, head_dim).scale;
    }
    for layer in &mut config.spec.layers {
        let (MlpSpec::Gated { intermediate_size, .. } | MlpSpec::Experts { intermediate_size, .. }) = &mut layer.mlp;
        *intermediate_size = 384;
    }
    let lora = (storage != TRAINED).then_some(LoraConfig {
        r: 8,
        lora_alpha: 16.0,
        target_modules: TargetModules::AllLinear,
        ..LoraConfig::default()
    });
    let build = BuildOptions { lora, seed: 3, ..BuildOptions::new(storage, dtype, 512) };
    Decoder::random(config, &build, None, &B::Device::default()).expect("every module can be adapted")
}

fn ids(document: usize, length: usize, shift: u32) -> Vec<u32> {
    (0..length as u32).map(|index| (index * 37 + 11 * document as u32 + shift) % 256).collect()
}

/// Builds one packed sequence; every next token counts in the loss except in the document `changed`, whose tokens `shift` replaces by others.
fn sequence_of(lengths: &[usize], changed: Option<usize>, shift: u32) -> Batch {
    let is_changed = |document| changed == Some(document);
    let documents: Vec<Vec<u32>> = (0..lengths.len())
        .map(|document| ids(document, lengths[document], if is_changed(document) { shift } else { 0 }))
        .collect();
    let mut batch = packed(&documents.iter().map(Vec::as_slice).collect::<Vec<_>>());
    if let Some(document) = changed {
        let [start, end] = [0, 1].map(|edge| batch.cu_seqlens[document + edge] as usize);
        batch.targets[start..end].fill(IGNORE_INDEX);
    }
    batch
}

/// Returns the sum of the losses of a batch, and the gradients of the mean loss by name. Where the 16-bit format is float16, gradients are scaled as
/// in a run, by a power of two that leaves room for those of random weights.
fn loss_and_gradients<B: Kernels>(
    model: &Decoder<B>,
    batch: &Batch,
    pass: PassOptions,
) -> (f32, BTreeMap<String, Vec<f32>>) {
    let scale = if half() == DType::F16 { 1024.0 } else { 1.0 };
    loss_and_scaled_gradients(model, batch, pass, scale)
}

/// Counts the calls of each engine operation in a forward and a backward pass. Reference implementations are not counted.
fn operations(model: &Decoder<Cuda>, batch: &Batch) -> BTreeMap<&'static str, usize> {
    let (_, trace) = Cuda::trace(model.device(), || loss_and_gradients(model, batch, PassOptions::default()));
    let mut counts = BTreeMap::new();
    for operation in trace {
        *counts.entry(operation.name).or_default() += 1;
    }
    counts
}

/// Returns whether the forward and the backward of attention ran in every layer that has it, by cuDNN or by the flash kernels.
fn attention_is_fused(model: &Decoder<Cuda>, operations: &BTreeMap<&'static str, usize>) -> bool {
    let layers = model.config.spec.attentions().count();
    let count = |name: &str| operations.get(name).copied().unwrap_or(0);
    // With full recomputation the forward runs twice.
    count("attention") + count("flash_forward") >= 2 * layers
        && count("attention_backward") + count("flash_backward_keys") >= layers
}

/// Prints whether the fixture's head width, which is smaller than that of real models, uses the reference implementation.
#[expect(clippy::print_stderr, reason = "which attention is tested must be seen")]
fn print_attention(family: &str, dtype: DType) {
    let config = ModelConfig::read(&fixture(family)).expect("the model has a readable config");
    let head_dim = config.spec.attentions().next().unwrap().head_dim;
    let options = BuildOptions::new(TRAINED, dtype, 128);
    let model = Decoder::<Cuda>::random(config, &options, None, &Default::default()).expect("there is no adapter");
    let fused = attention_is_fused(&model, &operations(&model, &sequence_of(&[30, 34], None, 0)));
    let by = if fused { "the engine" } else { "the REFERENCE body" };
    eprintln!("{family} in {dtype:?}: heads of {head_dim} go to {by}");
}

/// How far gradients through a delta rule without kernels may be in f32: its products are Burn's, in TF32, and each multiplies the error of the last.
const IN_TF32: f64 = 5e-2;

fn heads_of_64_and_128(families: Vec<&'static str>) {
    let batch = sequence_of(&[40, 100, 61], None, 0);
    for family in families {
        for head_dim in [64, 128] {
            let reference = random_model::<Flex>(family, head_dim, DType::F32, TRAINED);
            let expected = loss_and_gradients(&reference, &batch, PassOptions::default());
            for (dtype, tolerance) in [(DType::F32, 5e-3), (half(), 1.5e-1)] {
                let context = format!("{family}, heads of {head_dim}, {dtype:?}");
                let model = random_model::<Cuda>(family, head_dim, dtype, TRAINED);
                let operations = operations(&model, &batch);
                assert!(attention_is_fused(&model, &operations), "{context}: {operations:?}");
                for name in ["rms_norm", "rms_norm_backward", "heads_forward", "heads_backward", "cross_entropy"] {
                    assert!(operations.contains_key(name), "{context}: no {name} in {operations:?}");
                }
                let ours = loss_and_gradients(&model, &batch, PassOptions::default());
                assert!((ours.0 / expected.0 - 1.0).abs() < 1e-2, "{context}: loss {} {}", ours.0, expected.0);
                assert!(ours.1.keys().eq(expected.1.keys()), "{context}");
                let has_layer_inputs = matches!(family, "tiny-gemma4" | "tiny-gemma4-vl");
                let is_moved = MIXTURES.contains(&family) || family.starts_with("tiny-qwen3-5") || has_layer_inputs;
                if is_moved && dtype != DType::F32 {
                    // The choices of random routers are nearly ties, and rounding sends tokens to other experts. In transformers, bf16 moves the
                    // gradients of a random Qwen3.5 by 0.4 to 5 times their size, of a Gemma 4 with inputs of each layer by 0.1 to 2 (twelve
                    // models), of a Llama by 0.03.
                    continue;
                }
                let tolerance = if family == "tiny-olmo-hybrid" { f64::max(tolerance, IN_TF32) } else { tolerance };
                for (name, expected) in &expected.1 {
                    let difference = relative_difference(&ours.1[name], expected);
                    assert!(difference < tolerance, "{context}, {name}: {difference:e}");
                }
            }
        }
    }
}

over_families!(
    every_family_with_heads_of_64_and_128_runs_without_reference_bodies_and_has_the_gradients_of_the_cpu,
    heads_of_64_and_128
);

/// f32 is not TF32, whichever kernels or reference implementations a head width uses: 40 and others that are no multiple of 32 use the reference.
/// The families take the widths in turn.
fn every_head_width(families: Vec<&'static str>) {
    let batch = sequence_of(&[40, 29], None, 0);
    for (turn, family) in families.into_iter().enumerate() {
        for head_dim in some_in_turn(&[16, 24, 40, 80, 96, 112, 256], 3, turn) {
            let context = format!("{family}, heads of {head_dim}");
            let expected = loss_and_gradients(
                &random_model::<Flex>(family, head_dim, DType::F32, TRAINED),
                &batch,
                PassOptions::default(),
            );
            let model = random_model::<Cuda>(family, head_dim, DType::F32, TRAINED);
            let ours = loss_and_gradients(&model, &batch, PassOptions::default());
            let (of_loss, of_gradients) = if family == "tiny-olmo-hybrid" { (3e-4, IN_TF32) } else { (2e-5, 2e-4) };
            assert!((ours.0 / expected.0 - 1.0).abs() < of_loss, "{context}: loss {} {}", ours.0, expected.0);
            for (name, expected) in &expected.1 {
                let difference = relative_difference(&ours.1[name], expected);
                assert!(difference < of_gradients, "{context}, {name}: {difference:e}");
            }
        }
    }
}

over_families!(every_family_in_f32_has_the_loss_and_the_gradients_of_the_cpu_at_every_head_width, every_head_width);

/// Each thread has its own engine, and one runs Burn operations while the other is inside a section.
#[test]
fn two_models_that_train_in_two_threads_have_the_losses_of_one_after_the_other() {
    if !has_card() {
        return;
    }
    let cases = [&[compute_half()][..], &["compute=float32", "bnb_4bit=", "lora=", "mode=full"]];
    let alone = cases.map(|changes| losses("cuda", changes));
    let together = std::thread::scope(|scope| {
        let workers = cases.map(|changes| scope.spawn(move || losses("cuda", changes)));
        workers.map(|worker| worker.join().expect("the run of a thread"))
    });
    for (alone, together) in alone.iter().zip(&together) {
        for (step, (alone, together)) in alone.iter().zip(together).enumerate() {
            assert!((alone - together).abs() < 1e-2, "step {}: {together}, alone {alone}", step + 1);
        }
    }
}

/// Returns the widths of heads that published models of a family have, and those of most families.
fn head_widths(family: &str) -> &'static [usize] {
    match family {
        gemma if gemma.starts_with("tiny-gemma") => &[64, 128, 256],
        "tiny-phi3" => &[64, 96, 128],
        _ => &[64, 128],
    }
}

fn heads_of_published_widths(families: Vec<&'static str>) {
    let batch = sequence_of(&[40, 100, 61], None, 0);
    for family in families {
        for &head_dim in head_widths(family) {
            let reference = random_model::<Flex>(family, head_dim, DType::F32, NF4);
            let (expected, _) = loss_and_gradients(&reference, &batch, PassOptions::default());
            let model = random_model::<Cuda>(family, head_dim, half(), NF4);
            let operations = operations(&model, &batch);
            assert!(attention_is_fused(&model, &operations), "{family}, heads of {head_dim}: {operations:?}");
            let (ours, gradients) = loss_and_gradients(&model, &batch, PassOptions::default());
            assert!((ours / expected - 1.0).abs() < 1e-2, "{family}, heads of {head_dim}: loss {ours} {expected}");
            // A starts with a gradient of zero, because B is zero.
            let of_b = gradients.iter().filter(|(name, _)| name.contains("lora_B"));
            assert!(of_b.into_iter().all(|(_, values)| values.iter().any(|&value| value != 0.0)), "{family}");
        }
    }
}

over_families!(
    qlora_of_every_family_with_heads_of_its_published_widths_runs_without_reference_bodies,
    heads_of_published_widths
);

/// Computes the loss and the gradients of the adapter.
fn preference<B: Kernels>(family: &str) -> (f32, BTreeMap<String, Vec<f32>>) {
    let model = load::<B>(family, Some(&format!("{family}-lora")), FROZEN);
    let golden = Golden::open(&format!("{family}-packed"));
    let documents = [golden.ids("doc0.input_ids"), golden.ids("doc1.input_ids")];
    let batch = upload(&model, &packed(&[&documents[0], &documents[1]]));
    let mut gradients = GradientMap::default();
    gradients.begin_micro_batch(true);
    let loss = host(preference_loss(&model, &batch, documents[0].len() - 1, 0.05, &mut gradients))[0];
    (loss, host_gradients(&gradients))
}

#[test]
fn a_custom_loss_in_burn_operations_runs_inside_a_section_and_has_the_gradients_of_the_cpu() {
    if !has_card() {
        return;
    }
    for family in FAMILIES {
        let (ours, expected) = (preference::<Cuda>(family), preference::<Flex>(family));
        assert!((ours.0 - expected.0).abs() < 1e-2, "{family}: loss {} {}", ours.0, expected.0);
        assert!(ours.1.keys().eq(expected.1.keys()), "{family}");
        for (name, expected) in &expected.1 {
            let difference = relative_difference(&ours.1[name], expected);
            assert!(difference < 1e-2, "{family}, {name}: {difference:e}");
        }
    }
}

/// Half of the targets are what the logits predict. The head's GEMM over fewer rows may round a tie to the other side.
#[test]
fn evaluation_counts_the_predictions_of_the_logits_and_has_the_loss_of_training() {
    if !has_card() {
        return;
    }
    let all = [DType::BF16, DType::F16, DType::F32];
    for &dtype in if half() == DType::F16 { &all[1..] } else { &all } {
        let model = random_model::<Cuda>("tiny-llama", 64, dtype, FROZEN);
        let mut batch = sequence_of(&[300, 17, 257], Some(1), 5);
        let vocabulary = model.config.spec.vocab_size;
        let logits = host(model.logits(&upload(&model, &batch)));
        let highest = |row: &[f32]| (0..vocabulary).max_by(|&a, &b| row[a].total_cmp(&row[b])).expect("logits");
        let mut right = 0;
        for (token, target) in batch.targets.iter_mut().enumerate().filter(|(_, target)| **target != IGNORE_INDEX) {
            let predicted = highest(&logits[token * vocabulary..][..vocabulary]);
            right += usize::from(token % 2 == 0);
            *target = if token % 2 == 0 { predicted } else { (predicted + 1) % vocabulary } as i64;
        }
        let on_device = upload(&model, &batch);
        for chunk_tokens in [7, 100, 4096] {
            let score = model.score(&on_device, chunk_tokens);
            let (loss, expected) = (host(score.loss_sum), host(model.loss_only(&on_device, chunk_tokens)));
            let difference = relative_difference(&loss, &expected);
            assert!(difference < 1e-6, "{dtype:?}, chunks of {chunk_tokens}: {loss:?} {expected:?}");
            let correct = host(score.correct)[0];
            assert!((correct - right as f32).abs() <= 2.0, "{dtype:?}, chunks of {chunk_tokens}: {correct} {right}");
        }
    }
}

#[test]
fn a_run_on_a_card_reports_how_busy_the_card_was() {
    if !has_card() {
        return;
    }
    let output = tempdir().unwrap();
    // Wide enough and long enough for several samples.
    let model = tempdir().unwrap();
    wide_model(model.path());
    let model = format!("model='{}'", model.path().display());
    let steps = ["train.steps=1000", "data.eval_fraction="];
    let changes = ["backend=cuda", compute_half(), &model, "init=random", "bnb_4bit=", "lora="];
    let changes = [&changes[..], &steps].concat();
    finish(recipe(output.path(), &changes), NEW);
    let lines = metrics(&output.path().join("run"));
    let read = |key: &str| lines.iter().filter_map(|line| line.get(key)?.as_f64()).collect::<Vec<f64>>();
    for key in ["gpu_util", "power_w", "energy_j", "temperature_c", "sm_mhz", "host_memory"] {
        assert!(read(key).iter().any(|value| *value > 0.0), "{key} was not sampled: {:?}", lines.last());
    }
    assert!(read("energy_j").windows(2).all(|pair| pair[0] <= pair[1]), "a meter does not run backward");
    let machine = HardwareProfile::detect();
    let card = machine.cuda_card().expect("there is a card");
    if card.compute_capability >= Some((9, 0)) && !card.is_partition {
        for key in ["sm_util", "tensor_util", "dram_util", "pcie_tx_gb_s", "pcie_rx_gb_s"] {
            let found = read(key);
            assert!(!found.is_empty() && found.iter().all(|value| *value >= 0.0), "{key}: {found:?}");
        }
        assert!(read("tensor_util").iter().all(|percent| *percent <= 100.0));
    }
    let report = std::fs::read_to_string(output.path().join("run/report.html")).unwrap();
    assert!(report.contains("<figcaption>Power") && report.contains("<figcaption>Utilization"));
}

#[test]
fn peaks_are_measured_in_every_format_of_the_card() {
    if !has_card() {
        return;
    }
    let mut machine = HardwareProfile::detect();
    // An imitated card does not have all formats of the real one, which is what NVML describes.
    machine.gpus[0].compute_capability = Some(capability());
    let peaks = measure_peaks(BackendKind::Cuda, &machine, &|_| ()).unwrap();
    assert!(peaks.is_of(&machine), "{peaks:?}");
    let formats = 2 + usize::from(half() == DType::BF16) + usize::from(has_fp8());
    assert_eq!(peaks.gemms.len(), formats, "{peaks:?}");
    assert!(peaks.gemms.iter().all(|gemm| gemm.tflops > 0.0) && peaks.copy_tb_s > 0.0, "{peaks:?}");
}
