//! Tests of whole plans: decisions agree with each other, and each has a reason.

use firebrick_arch::LoraConfig;
use firebrick_kernels::BaseStorage;
use firebrick_optim::OptimizerKind;
use firebrick_precision::{Format, QuantFormat};
use serde_json::json;

use crate::config::ZeroStage;
use crate::plan::Plan;
use crate::plan::fixtures::{Example, TINY, resolve, resolve_for};
use crate::state::identity::{RunIdentity, RunSettings};

#[test]
fn the_text_model_of_a_larger_checkpoint_is_counted_alone_and_the_plan_says_what_is_not_trained() {
    let alone = TINY.replace("\"LlamaForCausalLM\"", "\"Qwen2ForCausalLM\"").replace("\"llama\"", "\"qwen2\"");
    let with_tower = alone.replace("\"Qwen2ForCausalLM\"", "\"Qwen2_5_VLForConditionalGeneration\"");
    let with_tower = with_tower.replace("\"qwen2\"", "\"qwen2_5_vl\", \"vision_config\": {\"depth\": 2}");
    let [alone, text] = [&alone, &with_tower].map(|config| resolve_for(config, 1, &[]).unwrap());
    assert_eq!((alone.memory, alone.trained_parameters), (text.memory.clone(), text.trained_parameters.clone()));
    let sentence = "the vision tower of the Qwen2_5_VLForConditionalGeneration is not trained; only the text model is \
                    loaded and counted";
    assert!(text.to_string().contains(sentence), "{text}");
    assert_eq!(alone.text_model, None);
}

#[test]
fn what_gemma_4_leaves_out_is_said_in_the_plan() {
    let keys = r#""Gemma4ForCausalLM"], "model_type": "gemma4_text", "num_kv_shared_layers": 2, "head_dim": 8, "global_head_dim": 16,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64"#;
    let model = TINY.replace(r#""LlamaForCausalLM"], "model_type": "llama""#, keys);
    let model = model.replace(r#""num_hidden_layers": 2"#, r#""num_hidden_layers": 4"#);
    let model = model.replace(r#""rope_theta": 10000.0, "#, "").replace(r#""hidden_act": "silu","#, "");
    let named = resolve_for(&model, 1, &["lora.target=['q_proj', 'v_proj']"]).unwrap();
    let skipped = named.skipped_modules.as_ref().unwrap();
    assert_eq!(skipped.value, ["v_proj"]);
    assert!(skipped.reason.starts_with("in layers 2 to 3, which read the keys and values of"), "{}", skipped.reason);
    let table = named.layer_inputs.as_ref().unwrap();
    assert!(table.value == "host memory" && table.reason.contains("never trains"), "{}", table.reason);
    assert_eq!(resolve_for(&model, 1, &[]).unwrap().skipped_modules, None);
    let full = resolve_for(&model, 1, &["lora=", "mode=full"]).unwrap().trained_parameters;
    assert!(full.reason.starts_with("all but the table of the layers' inputs, 2048 parameters"), "{}", full.reason);
    let plain = resolve(&["lora.target=['v_proj']"]).unwrap();
    assert_eq!((plain.skipped_modules, plain.layer_inputs), (None, None));
}

#[test]
fn ranks_multiply_the_rows_of_a_step_and_zero_divides_the_state() {
    let full = ["lora=", "mode=full", "train.micro_batch_size=2", "train.gradient_accumulation=3"];
    let whole = resolve_for(TINY, 4, &full).unwrap();
    assert_eq!((whole.rows_per_step(), whole.steps.value), (24, 5));
    assert!(whole.to_string().contains("24 rows per step (6 on each of 4 ranks)"), "{whole}");
    let zero = [&full[..], &["train.zero_stage=1"]].concat();
    let (divided, alone) = (resolve_for(TINY, 4, &zero).unwrap(), resolve(&zero).unwrap());
    let state = |plan: &Plan| plan.resident_state_bytes.value;
    assert_eq!((divided.zero_stage.value, alone.zero_stage.value), (ZeroStage::STATE, ZeroStage::NONE));
    assert!(state(&divided) * 4 >= state(&whole) && state(&divided) * 3 < state(&whole), "{}", state(&divided));
    assert_eq!(state(&alone), state(&whole));
    let line = |plan: &Plan, what: &str| plan.memory.iter().find(|line| line.what == what).map_or(0, |line| line.bytes);
    let of_stage = |stage: u8| resolve_for(TINY, 4, &[&full[..], &[&format!("train.zero_stage={stage}")]].concat());
    let (gradients, weights) = (of_stage(2).unwrap(), of_stage(3).unwrap());
    for plan in [&gradients, &weights] {
        assert_eq!(state(plan), state(&divided));
        assert!(line(plan, "gradients") * 3 < line(&whole, "gradients"));
        assert!(line(plan, "gradients for other ranks") > 0);
    }
    assert_eq!(line(&gradients, "trained weights"), line(&whole, "trained weights"));
    assert!(line(&weights, "trained weights") < line(&whole, "trained weights") / 2);
    assert!(line(&weights, "weights of other ranks") > 0);
    assert!(weights.to_string().contains("and the weights of the layers are divided over 4 ranks"), "{weights}");
}

#[test]
fn every_decision_has_a_reason_and_plan_toml_has_them_all() {
    let plan = resolve(&["bnb_4bit={}", "train.micro_batch_size=2", "train.gradient_accumulation=3"]).unwrap();
    let saved: toml::Table = plan.to_toml().parse().unwrap();
    for (name, decision) in saved.iter().filter(|(name, _)| *name != "memory") {
        let reason = decision.get("reason").and_then(|reason| reason.as_str());
        assert!(reason.is_some_and(|reason| !reason.is_empty()), "{name} has no reason");
    }
    assert_eq!(saved["compute"]["value"].as_str(), Some("float32"));
    assert_eq!(saved["base"]["value"]["frozen"].as_str(), Some("nf4_double_quant"));
    assert_eq!((plan.steps.value, plan.warmup_steps.value, plan.rows_per_step()), (17, 1, 6));
    // A and B of rank 4: q and o 32 + 32 wide, k and v 32 + 16, gate, up and down 32 + 64, in two layers.
    assert_eq!(plan.trained_parameters.value, 2 * 4 * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 64)));
    assert!(plan.to_string().contains("warm-up steps"));
}

#[test]
fn a_base_in_any_format_is_planned_with_its_bytes_and_named_with_its_key() {
    let planned = |format: &str| resolve(&[&format!("base={format}")]).unwrap();
    let projections = |plan: &Plan| plan.memory.iter().find(|line| line.what == "base weights").unwrap().bytes;
    for format in QuantFormat::ALL {
        let plan = planned(format.name());
        assert_eq!(plan.base.value, BaseStorage::Frozen(Format::Quantized(format)));
        assert!(plan.base.reason.starts_with("base: "), "{}", plan.base.reason);
    }
    // Two layers of 10,240 projection weights each: q, o, k and v, and three of 32 x 64.
    let [mxfp4, nvfp4, fp8] = ["mxfp4", "nvfp4", "fp8"].map(|format| projections(&planned(format)));
    let values = 2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 64);
    assert_eq!(nvfp4 - mxfp4, values / 16 - values / 32);
    let rows = 2 * (32 + 16 + 16 + 32 + 64 + 64 + 32);
    // MXFP4 has a table of 256 scales for each of the 14 modules.
    assert_eq!(fp8 + 14 * 1024 - mxfp4, values - values / 2 - values / 32 + 4 * rows);
}

#[test]
fn a_plan_is_everything_that_optimizer_and_schedule_need() {
    let plan =
        resolve(&["train.optimizer=adamw_8bit", "train.max_grad_norm=0", "train.steps=50", "lora=", "mode=full"])
            .unwrap();
    let optimizer = plan.optimizer_config();
    assert_eq!((optimizer.kind, optimizer.max_grad_norm), (OptimizerKind::AdamW8bit, None));
    let schedule = plan.learning_rate_schedule();
    assert_eq!((schedule.peak, schedule.warmup_steps, schedule.total_steps), (2e-5, 2, 50));
    assert_eq!((plan.base.value, plan.lora.value), (BaseStorage::Trained, None));
}

#[test]
fn the_factors_of_longrope_follow_from_max_seq_len_alone() {
    let ones = ["1.0"; 4].join(", ");
    let lists = format!(r#""type": "longrope", "short_factor": [{ones}], "long_factor": [{ones}]"#);
    let model = TINY.replace("LlamaForCausalLM", "Phi3ForCausalLM").replace("\"llama\"", "\"phi3\"").replace(
        "\"rope_theta\"",
        &format!(r#""original_max_position_embeddings": 64, "rope_scaling": {{{lists}}}, "rope_theta""#),
    );
    for (tokens, expected) in [(64, "short_factor"), (65, "long_factor")] {
        let plan = resolve_for(&model, 1, &[&format!("max_seq_len={tokens}"), "eval.max_new_tokens=32"]).unwrap();
        assert_eq!(plan.long_rope.as_ref().unwrap().value, expected);
        assert!(plan.to_string().contains(expected) && plan.to_toml().contains(expected));
    }
    assert!(resolve(&[]).unwrap().long_rope.is_none());
}

/// Uses both as `state.json` stored them when each value was a field of a struct.
#[test]
fn a_plan_continues_the_run_of_a_state_with_the_same_values() {
    let plan = resolve(&[
        "bnb_4bit={}",
        "seed=7",
        "lora.dropout=0.1",
        "lora.base_model_name_or_path=a/b",
        "train.recompute=full",
    ])
    .unwrap();
    let identity: RunIdentity = serde_json::from_value(json!({
        "init": "pretrained", "seed": 7, "data.data_seed": null, "data.shuffle": true, "max_seq_len": 64, "pack": true,
        "lora": LoraConfig { r: 4, ..LoraConfig::default() }, "data.new_tokens": [], "base": {"frozen": "nf4_double_quant"},
        "compute": "float32", "gemms": "compute", "train.optimizer": "adamw",
        "train.micro_batch_size x train.gradient_accumulation": 1, "data": "rows 000000000000002a",
    }))
    .unwrap();
    identity.check(&RunIdentity::new(&plan, 42, 7)).unwrap();
    let settings = |learning_rate: f64, steps: u64| -> RunSettings {
        let values = json!({
            "ranks": 1, "train.zero_stage": 0, "train.micro_batch_size": 1, "train.gradient_accumulation": 1,
            "train.recompute": "full", "train.learning_rate": learning_rate, "lora.dropout": 0.1,
            "lora.loraplus_lr_ratio": null, "train.schedule": "cosine", "train.min_lr": 0.0, "train.warmup_steps": 3,
            "train.steps": steps, "train.weight_decay": 0.0, "train.max_grad_norm": 1.0, "train.adam_beta1": 0.9,
            "train.adam_beta2": 0.999, "train.adam_epsilon": 1e-8, "train.loss_chunk_tokens": 1024, "train.log_every": 1,
            "eval.every_steps": 0, "checkpoint.every_steps": 500, "checkpoint.keep": 3,
        });
        serde_json::from_value(values).unwrap()
    };
    let now = RunSettings::new(&plan);
    assert_eq!(settings(2e-4, 100).changes(&now), None);
    let changes = settings(1e-3, 90).changes(&now).unwrap();
    let expected = ["changed since the checkpoint: ", "train.learning_rate 0.001 -> 0.0002", "train.steps 90 -> 100"];
    assert!(expected.iter().all(|part| changes.contains(part)) && changes.matches("->").count() == 2, "{changes}");
    let text = |changes: &[&str]| RunIdentity::new(&resolve(changes).unwrap(), 42, 7);
    let message = text(&[]).check(&text(&["preference={}"])).unwrap_err().to_string();
    assert!(message.contains("made with preference = nothing, now it is {\"loss\":\"dpo\""), "{message}");
}

#[test]
fn steps_go_on_where_the_host_has_room_for_a_copy_of_what_neither_is_paged_nor_divided() {
    let copied = |optimizer: &str, host_gib: u64| {
        let optimizer = format!("train.optimizer={optimizer}");
        let full =
            ["mode=full", "lora=", "bnb_4bit=", "train.micro_batch_size=1", "train.optimizer_device_gib=0", &optimizer];
        let mut example = Example::on("h200", &full);
        let memory = &mut example.profile.memory;
        (memory.total_bytes, memory.available_bytes) = (host_gib << 30, host_gib << 30);
        let plan = example.plan();
        (plan.snapshot_bytes.value, 4 * plan.trained_parameters.value, plan.checkpoint_bytes.value)
    };
    let (copy, _, checkpoint) = copied("adamw_8bit", 512);
    assert_eq!((copy, copied("adamw_8bit", 40).0), (checkpoint, 0));
    let (copy, weights, _) = copied("paged_adamw_8bit", 512);
    assert_eq!(copy, weights);
    assert_eq!(resolve_for(TINY, 2, &["train.zero_stage=1"]).unwrap().snapshot_bytes.value, 0);
}

#[test]
fn a_checkpoint_is_held_on_a_card_that_has_room_for_it_next_to_steps() {
    let full = ["mode=full", "lora=", "bnb_4bit=", "train.micro_batch_size=1", "train.recompute=full"];
    let on = |changes: &[&str], bytes: u64| {
        let mut example = Example::on("h200", changes);
        let card = &mut example.profile.gpus[0];
        (card.memory_total_bytes, card.memory_free_bytes) = (bytes, bytes);
        example.profile.memory.available_bytes = 512 << 30;
        example.plan()
    };
    let roomy = [on(&[], 400 << 30), on(&full, 400 << 30)].map(|plan| {
        let bytes = 4 * plan.trained_parameters.value + plan.resident_state_bytes.value;
        assert_eq!(plan.held_bytes.as_ref().map(|held| held.value), Some(bytes));
        plan
    });
    // A tenth of a card is not planned for.
    let held = on(&full, roomy[1].memory_bytes.value / 9 * 10 + (1 << 30)).held_bytes.unwrap();
    assert!(held.value == 0 && held.reason.starts_with("steps wait"), "{held:?}");
    assert_eq!(on(&["train.optimizer=paged_adamw_8bit", "train.optimizer_device_gib=0"], 400 << 30).held_bytes, None);
}
