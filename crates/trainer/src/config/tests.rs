//! Tests of recipes that are read, and of recipes that are refused, with their messages.

use std::fs;
use std::path::Path;

use firebrick_kernels::{BaseStorage, Recompute};
use firebrick_optim::OptimizerKind;
use firebrick_precision::{FloatType, Format, QuantFormat};

use super::*;
use crate::config::compute::Compute;

/// The smallest recipe: every other key has a default.
const SMALLEST: &str = "model = \"m\"\nlora = {}\ndata.path = \"d.jsonl\"\n";
/// Two sources that use every key of a source.
const SEVERAL: &str = "model = 'm'\nmode = 'full'\n[data]\nmix = 'weight'\nmix_until = 'never'\n[[data.sources]]\npath = 'a/*.csv'\n\
                       file_format = 'csv'\nformat = 'chat'\nlimit = 9\nweight = 2\nfields = { messages = 'turns' }\n\
                       roles = { bot = 'assistant' }\n[[data.sources]]\npath = 'owner/name'\nsplit = 'train_sft'\n";

fn read(text: &str, overrides: &[&str]) -> Result<RunConfig, ConfigError> {
    let overrides: Vec<String> = overrides.iter().map(ToString::to_string).collect();
    RunConfig::from_toml(text, Path::new("configs/x.toml"), &overrides)
}

fn refusal(text: &str, overrides: &[&str]) -> String {
    read(text, overrides).expect_err("the recipe should be refused").to_string()
}

#[test]
fn model_and_data_are_enough() {
    let config = read(SMALLEST, &[]).unwrap();
    assert_eq!(config.name, "x");
    assert_eq!(config.length(), RunLength::Epochs(1.0));
    assert_eq!(config.recompute(), None);
    assert_eq!(config.compute(), Compute::Plain(FloatType::Bf16));
    assert_eq!((config.mode(), config.learning_rate()), (Mode::Lora, 2e-4));
    assert_eq!(read(SMALLEST, &["train.recompute=selective"]).unwrap().recompute(), Some(Recompute::Selective));
}

#[test]
fn full_fine_tuning_is_never_what_a_recipe_does_by_omission() {
    let message = refusal(SMALLEST, &["lora="]);
    assert!(message.starts_with("configs/x.toml: mode is missing; add [lora]"), "{message}");
    let cases: &[(&[&str], Mode, f64)] = &[
        (&["bnb_4bit={}", "lora="], Mode::Qlora, 2e-4),
        (&["bnb_4bit={}"], Mode::Qlora, 2e-4),
        (&["mode=qlora"], Mode::Qlora, 2e-4),
        (&["mode=lora", "lora="], Mode::Lora, 2e-4),
        (&["mode=full", "lora="], Mode::Full, 2e-5),
        (&["mode=full", "lora=", "train.learning_rate=1e-4"], Mode::Full, 1e-4),
        (&["init=random", "lora="], Mode::Full, 2e-4),
    ];
    for (overrides, mode, rate) in cases {
        let config = read(SMALLEST, overrides).unwrap();
        assert_eq!((config.mode(), config.train.learning_rate), (*mode, Some(*rate)), "{overrides:?}");
        assert_eq!(config.lora.is_some(), *mode != Mode::Full, "{overrides:?}");
        assert_eq!(config.bnb_4bit.is_some(), *mode == Mode::Qlora, "{overrides:?}");
    }
    assert!(refusal(SMALLEST, &["mode=full"]).contains("[lora] (configs/x.toml:2) trains adapters"));
    assert!(refusal(SMALLEST, &["mode=lora", "bnb_4bit={}"]).contains("write mode = \"qlora\""));
    let written = read(SMALLEST, &["mode=qlora", "lora.r=4"]).unwrap().to_toml();
    assert_eq!(read(&written, &["bnb_4bit="]).unwrap().mode(), Mode::Lora, "{written}");
}

#[test]
fn a_quantized_base_is_written_with_one_key_in_any_format() {
    for format in QuantFormat::ALL {
        let config = read(SMALLEST, &[&format!("base={format}"), "lora="]).unwrap();
        assert_eq!((config.mode(), config.quantized_base()), (Mode::Qlora, Some(format)));
        assert!(config.lora.is_some() && config.bnb_4bit.is_none());
        let again = read(&config.to_toml(), &[]).unwrap();
        assert_eq!(again.quantized_base(), Some(format));
    }
    // Overriding one of them removes the other of the file.
    let bnb = format!("{SMALLEST}[bnb_4bit]\n");
    let replaced = read(&bnb, &["base=mxfp4"]).unwrap();
    assert_eq!((replaced.quantized_base(), replaced.bnb_4bit), (Some(QuantFormat::Mxfp4), None));
    let both = refusal(&format!("base = 'fp8'\n{bnb}"), &[]);
    assert!(both.contains("base: bnb_4bit is there too"), "{both}");
    let message = refusal(SMALLEST, &["base=fp4"]);
    assert!(message.contains("'nvfp4', 'mxfp4', 'fp8'") && message.contains("not there yet"), "{message}");
    assert!(refusal(SMALLEST, &["mode=lora", "base=fp8"]).contains("write mode = \"qlora\""));
    assert!(refusal(SMALLEST, &["mode=full", "lora=", "base=fp8"]).contains("base (--set base=fp8) trains adapters"));
}

#[test]
fn a_yaml_recipe_is_the_same_as_its_toml() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("x.yaml");
    // The keys that were published first, together with the two that have no default.
    let published = "model: m\npack: true\nmax_seq_len: 4096\ntrain:\n  grad_checkpointing: true\n  \
                   optimizer: paged_adamw_8bit\n  bf16: true\n  micro_batch_size: 8\n  gradient_accumulation: 6\n  \
                   # Effective batch size: 48\nbnb_4bit:\n  compute_dtype: bfloat16\ndata:\n  path: d\n";
    fs::write(&file, published).unwrap();
    let config = RunConfig::load(&file, &["train.steps=3".to_owned()]).unwrap();
    let toml = "model = 'm'\npack = true\nmax_seq_len = 4096\ndata.path = 'd'\nbnb_4bit.compute_dtype = 'bfloat16'\n[train]\n\
                grad_checkpointing = true\noptimizer = 'paged_adamw_8bit'\nbf16 = true\nmicro_batch_size = 8\n\
                gradient_accumulation = 6\nsteps = 3\n";
    assert_eq!(config, read(toml, &[]).unwrap());
    assert_eq!((config.mode(), config.rows_per_step(1)), (Mode::Qlora, 48));
    assert_eq!(config.train.optimizer, OptimizerKind::PagedAdamW8bit);
    // The same with the adapter's section written out.
    assert_eq!(read(&format!("{toml}[lora]\n"), &[]).unwrap().rows_per_step(1), 48);

    let refused = |text: &str| {
        fs::write(&file, text).unwrap();
        let message = RunConfig::load(&file, &[]).unwrap_err().to_string();
        message.strip_prefix(&format!("{}:", file.display())).map(str::to_owned).unwrap_or(message)
    };
    let message = refused(&published.replace("data:\n", "dataset:\n"));
    assert_eq!(message, "13: unknown key 'dataset' at the top of the file; here it is 'path' in [data]");
    assert_eq!(
        refused("model: m\nlora: {}\ntrain:\n  steps: many\n"),
        "4: train.steps: expected a whole number, 0 or more, got string \"many\""
    );
    assert!(refused("model: m\nlora:\n").starts_with("2: this is not YAML: 'lora' has no value"));
}

#[test]
fn written_out_recipe_reads_back_the_same() {
    let data_keys = [
        "data.chat_template_kwargs={enable_thinking=false, n=2}",
        "data.fields={text='body'}",
        "data.system_prompt='S'",
        "data.shuffle=false",
        "data.data_seed=7",
        "data.roles_to_train=['assistant', 'tool']",
        "data.split='dev'",
    ];
    let shapes: [(&str, &[&str]); 9] = [
        (SMALLEST, &data_keys),
        (SMALLEST, &[]),
        ("model='m'\n[lora]\ntarget=['q_proj']\n[bnb_4bit]\n[data]\npath='d'\n[train]\nsteps=3\nwarmup_steps=1\n", &[]),
        (SMALLEST, &["train.recompute=none", "data.format=text", "mode=full", "lora="]),
        (SMALLEST, &["eval.every_epochs=0.5", "data.eval_fraction=0.1", "eval.on_start=false", "train.min_lr=1e-6"]),
        (SEVERAL, &["data.eval_sources=[{path='e', split='test'}]", "data.overflow=split", "data.train_on=last"]),
        (SMALLEST, &["preference={loss='orpo'}", "train.recompute=selective", "train.grad_checkpointing=false"]),
        (SMALLEST, &["train.router_aux_loss=true", "train.router_aux_loss_coef=1"]),
        (SMALLEST, &["eval.prompts=['a \"b\"', 'c\\d']", "data.eval_fraction=0.1", "train.learning_rate=1e-5"]),
    ];
    for (text, overrides) in shapes {
        let config = read(text, overrides).unwrap();
        assert_eq!(read(&config.to_toml(), &[]).unwrap(), config, "{}", config.to_toml());
    }
}

#[test]
fn a_path_is_described_by_the_keys_that_describe_a_source() {
    let keys = [
        "data.file_format=json",
        "data.field=rows",
        "data.split=dev",
        "data.limit=3",
        "data.columns=['a']",
        "data.fields={text='body'}",
        "data.roles={bot='assistant'}",
        "data.text_unit=line",
        "data.eval_path=e",
        "data.eval_split=test",
        "data.config=c",
        "data.revision=r",
    ];
    let data = read(SMALLEST, &keys).unwrap().data;
    let source = &data.training_sources()[0];
    assert_eq!((source.spec().split.as_deref(), source.spec().limit), (Some("dev"), Some(3)));
    assert_eq!(source.field_names().unwrap().text, "body");
    let held_out = data.held_out_sources()[0].spec();
    assert_eq!((held_out.split.as_deref(), held_out.limit, held_out.revision), (Some("test"), None, None));
    assert_eq!((held_out.field.as_deref(), held_out.config.as_deref()), (Some("rows"), Some("c")));
    for key in &keys[..8] {
        let message = refusal(SEVERAL, &[key]);
        assert!(message.contains("write it into each source"), "{key}: {message}");
    }
    assert!(refusal(SMALLEST, &["data.fields={body='text'}"]).contains("unknown field"));
}

#[test]
fn what_is_wrong_is_named_with_its_place_and_the_way_out() {
    let train = format!("{SMALLEST}\n[train]\nlearning_rat = 1e-4\n");
    let top = format!("learning_rate = 1e-4\n{SMALLEST}");
    let both = format!("{SMALLEST}[train]\nsteps = 3\nepochs = 1\n");
    let data = "model = 'm'\nmode = 'full'\n[data]\n";
    // Each message begins with the first text and contains the second.
    for (text, overrides, start, part) in [
        (
            &*train,
            &[] as &[&str],
            "configs/x.toml:6: unknown key 'learning_rat' in [train]; did you mean 'learning_rate'?",
            "",
        ),
        (
            SMALLEST,
            &["train.lr=1e-4"],
            "--set train.lr=1e-4: unknown key 'lr' in [train]; here it is 'learning_rate'",
            "",
        ),
        (&*top, &[], "configs/x.toml:1: unknown key 'learning_rate' at the top of the file; it belongs in [train]", ""),
        (SMALLEST, &["trian.steps=3"], "--set ", "did you mean 'train'?"),
        (SMALLEST, &["micro_batch_size=3"], "--set ", "it belongs in [train]"),
        (SMALLEST, &["checkpoint.zzz=1"], "--set ", "known keys are every_steps, every_epochs, keep"),
        ("[data]\npath='d'\n", &[], "configs/x.toml: model is missing; add `model = ", ""),
        ("model='m'\n", &[], "configs/x.toml: data is missing; add `[data]`", ""),
        ("model='m'\n\n[data]\n", &[], "configs/x.toml:3: data.path is missing; add `path = ", ""),
        ("model = 'm'\n[data\npath = 'd'\n", &[], "configs/x.toml:2: this is not TOML: ", ""),
        (SMALLEST, &["train.steps"], "--set train.steps: expected key=value", ""),
        (SMALLEST, &["model.x=3"], "--set ", "'model' is not a section"),
        (&*both, &[], "configs/x.toml:5: train.steps: ", ""),
        (data, &["data.format=jsonl"], "", "file_format = \"jsonl\""),
        (data, &["data.sources=[{path='d', format='jsonl'}]"], "", "file_format = \"jsonl\""),
    ] {
        let message = refusal(text, overrides);
        assert!(message.starts_with(start) && message.contains(part), "{text:?} {overrides:?}: {message}");
        assert!(!start.contains("unknown key") || message == start, "{message}");
    }
}

#[test]
fn unknown_keys_are_reported_together_in_the_order_of_the_file() {
    let text = format!("base_model = 'm'\n{SMALLEST}\n[train]\nlr = 1e-4\nstep = 3\n");
    let message = refusal(&text, &["datasets=d"]);
    let places: Vec<&str> = message.lines().map(|line| line.split(": ").next().unwrap()).collect();
    assert_eq!(places, ["configs/x.toml:1", "configs/x.toml:7", "configs/x.toml:8", "--set datasets=d"], "{message}");
}

#[test]
fn wrong_type_says_expected_and_got_with_the_line() {
    let text = format!("{SMALLEST}[train]\n\nlearning_rate = \"2e-4\"\n");
    assert_eq!(
        refusal(&text, &[]),
        "configs/x.toml:6: train.learning_rate: expected a number, got string \"2e-4\"; write it without the quotes"
    );
    assert_eq!(
        refusal(SMALLEST, &["train.gradient_accumulation=-1"]),
        "--set train.gradient_accumulation=-1: train.gradient_accumulation: expected a whole number, 0 or more, got integer `-1`"
    );
    assert!(refusal(SMALLEST, &["train.bf16=auto"]).contains("for that write compute = \"auto\""));
    assert!(refusal(&format!("bf16 = 'auto'\n{SMALLEST}"), &[]).contains("compute = \"auto\""));
    assert!(refusal("{ \"model\": \"m\" }", &[]).contains("this is JSON; a recipe is TOML or YAML"));
    for name in ["overwrite_cache", "loss_watchdog_threshold"] {
        assert!(refusal(&format!("{name} = 1\n{SMALLEST}"), &[]).contains("not needed: "), "{name}");
    }
    assert!(refusal(SMALLEST, &["pack=3"]).contains("pack: expected true or false, got integer `3`"));
    assert!(refusal(SMALLEST, &["lora=true"]).contains("lora: expected a table of keys"));
    assert!(refusal(SMALLEST, &["lora={r=8, alpha=[1]}"]).contains("lora.alpha: expected a number, got"));
    assert_eq!(
        refusal(SMALLEST, &["eval.prompts=['a', 1]"]),
        "--set eval.prompts=['a', 1]: eval.prompts: expected a string, got integer `1`"
    );
    assert!(
        refusal("model='m'\nmode='lora'\n[data]\npath=[\n'a']\n", &[])
            .starts_with("configs/x.toml:4: data.path: expected a string")
    );
    assert!(
        refusal("model='m'\nmode='lora'\ndata.path=['a', 'b']\n", &[])
            .ends_with("write a [[data.sources]] table for each")
    );
}

#[test]
fn unknown_value_lists_the_allowed_ones_and_the_nearest() {
    let message = refusal(SMALLEST, &["train.optimizer=adamw_8bits"]);
    let start =
        "--set train.optimizer=adamw_8bits: train.optimizer: 'adamw_8bits' is not one of 'adamw', 'adamw_8bit', ";
    assert!(message.starts_with(start), "{message}");
    assert!(message.ends_with("; did you mean 'adamw_8bit'?"), "{message}");
    assert!(refusal(SMALLEST, &["lora.target=q_proj"]).contains("\"all-linear\", a list of module names"));
}

#[test]
fn the_base_is_the_reference_only_of_an_adapter_that_starts_at_zero() {
    let precomputed = |overrides: &[&str]| {
        read(SMALLEST, &[&["preference={}"], overrides].concat()).unwrap().reference_is_precomputed_always()
    };
    assert!(!precomputed(&[]) && !precomputed(&["bnb_4bit={}"]) && !precomputed(&["base=nvfp4", "lora="]));
    assert!(precomputed(&["mode=full", "lora="]));
    assert!(precomputed(&["lora.init_from=a"]) && precomputed(&["lora.modules_to_save=['lm_head']"]));
    assert!(precomputed(&["data.new_tokens=['<x>']"]) && precomputed(&["data.new_special_tokens=['<x>']"]));
}

#[test]
fn rates_of_pairs_are_lower_than_those_of_texts() {
    let rate = |overrides: &[&str]| read(SMALLEST, overrides).unwrap().learning_rate();
    assert_eq!((rate(&["preference={}"]), rate(&["preference={}", "mode=full", "lora="])), (1e-5, 1e-6));
    assert_eq!((rate(&[]), rate(&["preference={}", "train.learning_rate=3e-5"])), (2e-4, 3e-5));
}

#[test]
fn override_value_is_toml_or_else_a_string_and_empty_removes_the_key() {
    let config = read(SMALLEST, &["model=meta-llama/Llama-3.1-8B", "train.learning_rate=3e-5", "lora.r=8"]).unwrap();
    assert_eq!(config.model, "meta-llama/Llama-3.1-8B");
    assert_eq!(config.learning_rate(), 3e-5);
    assert_eq!(config.lora.as_ref().map(|lora| lora.r), Some(8));
    let config = read("model='m'\n[lora]\nr=4\n[data]\npath='d'\n", &["lora=", "mode=full"]).unwrap();
    assert!(config.lora.is_none());
}

#[test]
fn override_of_a_key_that_takes_a_text_is_the_text_that_was_typed() {
    for text in ["2024", "1_000", "nan", "true", "2024-01-01", "1e3"] {
        let [name, model] = ["name", "model"].map(|key| format!("{key}={text}"));
        let config = read(SMALLEST, &[name.as_str(), "train.steps=3", model.as_str()]).unwrap();
        assert_eq!((config.name.as_str(), config.model.as_str(), config.train.steps), (text, text, Some(3)));
    }
    assert!(refusal(SMALLEST, &["name=[1]"]).contains("--set name=[1]: name: expected a string"));
    assert!(refusal(&format!("name = 2024\n{SMALLEST}"), &[]).contains("configs/x.toml:1: name: expected a string"));
}

#[test]
fn override_of_one_exclusive_key_replaces_the_other_of_the_file() {
    let text = format!("{SMALLEST}[train]\nepochs = 2\ngrad_checkpointing = true\n");
    let config = read(&text, &["train.steps=3", "train.recompute=none"]).unwrap();
    assert_eq!(config.length(), RunLength::Steps(3));
    assert_eq!(config.recompute(), Some(Recompute::None));
    assert!(refusal(&text, &["train.steps=3", "train.epochs=1"]).contains("both keys decide the same thing"));
}

#[test]
fn compute_has_one_key_and_older_names_that_must_agree_with_it() {
    let lora = "lora={}";
    let agree: &[(&[&str], FloatType)] = &[
        (&["compute=fp16"], FloatType::F16),
        (&["train.bf16=true"], FloatType::Bf16),
        (&["train.bf16=false"], FloatType::F32),
        (&["bnb_4bit.compute_dtype=float16", lora], FloatType::F16),
        (&["bnb_4bit.compute_dtype=bf16", "train.bf16=true", "compute=bfloat16", lora], FloatType::Bf16),
    ];
    for (overrides, format) in agree {
        let config = read(SMALLEST, overrides).unwrap();
        let plain = Compute::Plain(*format);
        assert_eq!((config.compute(), config.compute), (plain, Some(plain)), "{overrides:?}");
        assert_eq!(config.train.bf16, None, "written out under one name");
    }
    let message = refusal(&format!("compute = 'f32'\n{SMALLEST}[train]\nbf16 = true\n"), &[]);
    assert!(
        message.starts_with("configs/x.toml:6: train.bf16: contradicts compute = \"float32\" (configs/x.toml:1)"),
        "{message}"
    );
    assert!(
        refusal(SMALLEST, &["compute=nf4"])
            .contains("compute: 'nf4' is not one of 'float32', 'bfloat16', 'float16', 'fp8'")
    );
}

#[test]
fn override_of_compute_replaces_the_older_names_of_the_file() {
    let text = format!("{SMALLEST}[train]\nbf16 = true\n[bnb_4bit]\ncompute_dtype = 'bfloat16'\n");
    assert_eq!(read(&text, &["compute=float32"]).unwrap().compute(), Compute::Plain(FloatType::F32));
    let beside = ["compute=fp8", "train.bf16=true", "bnb_4bit.compute_dtype=bfloat16", "lora={}"];
    assert_eq!(read(SMALLEST, &beside).unwrap().compute(), Compute::Fp8, "bfloat16 is the rest of the arithmetic");
}

/// Lists each impossible combination as overrides of the smallest recipe, with a part of the expected message.
#[test]
fn impossible_combinations_are_refused_with_the_way_out() {
    let cases: &[(&[&str], &str)] = &[
        (&["train.steps=3", "train.epochs=1"], "train.steps: train.epochs"),
        (&["train.warmup_steps=3", "train.warmup_ratio=0.1"], "keep one"),
        (&["data.sources=[{path='a', name='x'}]", "data.path="], "write it in data.eval_sources"),
        (&["data.eval_sources=[{path='a', name='a b'}]"], "cannot be part of eval_NAME_loss"),
        (&["data.eval_path=e", "data.eval_fraction=0.1"], "keep one"),
        (&["train.grad_checkpointing=false", "train.recompute=full"], "contradicts train.grad_checkpointing = false"),
        (&["train.grad_checkpointing=true", "train.recompute=none"], "contradicts train.grad_checkpointing = true"),
        (&["train.offload=true", "train.recompute=selective"], "train.offload: layers save too much"),
        (&["lora="], "mode = \"full\""),
        (&["train.min_lr=1"], "train.min_lr: is 1e0, above the highest rate"),
        (&["train.min_lr=1e-5", "train.schedule=constant"], "never decreases"),
        (&["train.min_lr=-1"], "train.min_lr: must be 0 or more"),
        (&["train.log_every=2", "train.log_every_epochs=1"], "keep one"),
        (&["eval.every_epochs=1"], "nothing to evaluate on"),
        (&["checkpoint.every_epochs=0"], "checkpoint.every_epochs: must be above 0"),
        (&["eval.extract=last"], "'last' has 0 groups"),
        (&["lora.r=0"], "lora.r: must be at least 1"),
        (&["lora.alpha=0"], "lora.alpha: must be above 0"),
        (&["lora.target=[]"], "lora.target: names no module"),
        (
            &["lora.init_lora_weights=pissa", "lora.init_from=a"],
            "lora.init_lora_weights: is \"pissa\", and lora.init_from",
        ),
        (&["lora.init_lora_weights=pissa", "lora.use_dora=true"], "not there yet"),
        (&["lora.init_lora_weights=pissa_niter_4", "train.zero_stage=3"], "no rank has all weights"),
        (&["lora.init_lora_weights=olora"], "pissa_niter_4"),
        (&["init=random", "lora.r=8"], "init = \"random\""),
        (&["init=random", "bnb_4bit={}", "lora={}"], "init = \"random\""),
        (
            &["train.bf16=false", "bnb_4bit.compute_dtype=bfloat16", "lora={}"],
            "train.bf16: contradicts bnb_4bit.compute_dtype = \"bfloat16\"",
        ),
        (
            &["train.bf16=true", "bnb_4bit.compute_dtype=float32", "lora={}"],
            "train.bf16: contradicts bnb_4bit.compute_dtype = \"float32\"",
        ),
        (&["data.format=text", "data.train_on=assistant"], "plain text has no messages"),
        (&["eval.every_steps=10"], "nothing to evaluate on"),
        (&["eval.exact_match_prompts=10"], "nothing to evaluate on"),
        (&["eval.exact_match_prompts=1", "data.format=text", "data.eval_fraction=0.1"], "chat records"),
        (&["data.eval_fraction=1.5"], "above 0 and below 1"),
        (&["data.eval_fraction=0.1", "data.eval_sources=[{path='e'}]"], "keep one"),
        (&["data.path=a", "data.sources=[{path='e'}]"], "keep one"),
        (&["data.sources=[{path=''}]"], "data.sources: source 1: path is empty"),
        (&["data.sources=[{path='a'},{path='b', limit=0}]"], "data.sources: source 2: limit is 0"),
        (&["data.sources=[{path='a', fields={txt='b'}}]"], "source 1: fields: unknown field `txt`"),
        (&["data.sources=[{path='a', weight=2.0}]"], "data.mix = \"weight\""),
        (&["data.sources=[{path='a', weight=0.0},{path='b'}]", "data.mix=weight"], "weight must be above 0"),
        (&["data.sources=[{path='a'}]", "data.format=chat"], "write it into each source"),
        (&["data.mix=size"], "not several data.sources"),
        (&["data.mix_until=all"], "only a mixture by weight"),
        (&["data.max_bad_share=1.1"], "data.max_bad_share: must be from 0 to 1"),
        (&["data.pad_to_multiple_of=0"], "data.pad_to_multiple_of: must be at least 1"),
        (&["data.train_on=all", "data.train_end_of_turn=false"], "the ends of turns too"),
        (&["data.workers=0"], "data.workers: must be at least 1"),
        (&["data.workers=1025"], "data.workers: must be at most 1024, got 1025"),
        (&["data.sources=[{path='a', limit=99999999999}]"], "source 1: limit must be at most 4294967296"),
        (&["lora.rank_pattern={q_proj=99999}"], "lora.rank_pattern: must be at most 65536"),
        (&["train.micro_batch_size=65536", "max_seq_len=131072"], "65536 rows of 131072 tokens are more than"),
        (&["train.epochs=1e9"], "train.epochs: must be at most 1000000"),
        (&["data.chat_template=''"], "data.chat_template: is empty"),
        (&["data.cache=''"], "data.cache: is empty"),
        (&["data.format=text", "data.train_on=last"], "plain text has no messages"),
        (&["data.format=text", "data.train_on=flags"], "plain text has no messages"),
        (&["train.steps=0"], "train.steps: must be at least 1"),
        (&["train.epochs=0"], "train.epochs: must be above 0"),
        (&["train.steps=5", "train.warmup_steps=6"], "longer than the run"),
        (&["train.warmup_ratio=1"], "0 or more and below 1"),
        (&["train.schedule=constant", "train.learning_rate=nan"], "train.learning_rate: must be above 0"),
        (&["train.adam_beta2=1"], "train.adam_beta2: must be 0 or more and below 1"),
        (&["train.adam_epsilon=0"], "train.adam_epsilon: must be above 0"),
        (&["train.weight_decay=-1"], "train.weight_decay: must be 0 or more"),
        (&["train.zero_stage=4"], "train.zero_stage: is 4, and ZeRO has stages 0 to 3"),
        (&["train.zero_stage=3", "compute=fp8"], "train.zero_stage: is 3, and compute = \"fp8\""),
        (
            &["train.zero_stage=3", "lora.modules_to_save=['lm_head']"],
            "train.zero_stage: is 3, and modules that train whole",
        ),
        (&["train.max_grad_norm=-1"], "train.max_grad_norm: must be 0 or more"),
        (&["train.micro_batch_size=0"], "train.micro_batch_size: must be at least 1"),
        (&["train.gradient_accumulation=0"], "train.gradient_accumulation: must be at least 1"),
        (&["train.log_every=0"], "train.log_every: must be at least 1"),
        (&["train.loss_chunk_tokens=0"], "train.loss_chunk_tokens: must be at least 1"),
        (&["max_seq_len=1"], "max_seq_len: must be at least 2"),
        (&["checkpoint.keep=0"], "checkpoint.keep: must be at least 1"),
        (&["eval.max_new_tokens=0"], "eval.max_new_tokens: must be at least 1"),
        (&["eval.micro_batch_size=0"], "eval.micro_batch_size: must be at least 1"),
        (&["name=a/b"], "name: must be usable as a folder name"),
        (&["model=''"], "model: is empty"),
        (&["data.path=''"], "data.path: is empty"),
        (&["preference={beta=0}"], "preference.beta"),
        (&["preference={label_smoothing=0.5}"], "below 0.5"),
        (&["preference={label_smoothing=0.1, loss_type='hinge'}"], "smooth labels"),
        (&["preference={loss='orpo', rpo_alpha=1}"], "is a key of DPO"),
        (&["preference={loss='orpo', loss_type='ipo'}"], "is a key of DPO"),
        (&["preference={prompt_loss=false}"], "is a key of ORPO"),
        (&["preference={loss='orpo', precompute_ref_log_probs=true}"], "ORPO has no reference"),
        (&["preference={precompute_ref_log_probs=false}", "mode=full", "lora="], "could not be computed any more"),
        (&["preference={precompute_ref_log_probs=false}", "data.new_tokens=['<x>']"], "tokens of its own"),
        (&["preference={}", "data.format=chat"], "trains on pairs of answers"),
        (&["preference={}", "data.train_on=all"], "compares answers"),
        (&["preference={}", "data.overflow=split"], "never divided"),
        (&["preference={}", "eval.exact_match_prompts=3", "data.eval_fraction=0.1"], "no reference answers"),
        (&["data.format=preference"], "add the section [preference]"),
        (&["train.router_aux_loss_coef=1"], "train.router_aux_loss_coef: is the weight of a loss"),
        (
            &["train.router_aux_loss=true", "train.router_aux_loss_coef=-1"],
            "train.router_aux_loss_coef: must be 0 or more",
        ),
    ];
    for (overrides, piece) in cases {
        let message = refusal(SMALLEST, overrides);
        assert!(message.contains(piece), "{overrides:?} gave: {message}");
        assert!(message.starts_with("--set ") || message.starts_with("configs/x.toml"), "{message}");
    }
}

#[test]
fn sources_are_read_as_tables_and_a_path_from_the_command_line_replaces_them() {
    let config = read(SEVERAL, &[]).unwrap();
    let first = &config.data.sources[0];
    assert_eq!((config.data.sources.len(), first.weight, first.limit), (2, Some(2.0), Some(9)));
    let names = first.field_names().unwrap();
    assert_eq!((names.messages.as_deref(), names.roles["bot"].as_str()), (Some("turns"), "assistant"));
    assert_eq!(first.spec().weight, Some(2.0));
    let config = read(SEVERAL, &["data.path=one.jsonl", "data.mix=", "data.mix_until="]).unwrap();
    assert!(config.data.sources.is_empty() && config.data.training_sources()[0].path == "one.jsonl");
    assert!(refusal(SEVERAL, &["data.sources=[{path='a', shap='chat'}]"]).contains("unknown field `shap`"));
}

#[test]
fn unreadable_recipe_is_named() {
    let message = RunConfig::load(Path::new("no/such.toml"), &[]).unwrap_err().to_string();
    assert!(message.contains("cannot read the recipe no/such.toml"), "{message}");
}

#[test]
fn the_recipe_of_the_readme_is_accepted() {
    let readme = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../README.md")).unwrap();
    let recipe = readme.split("```toml").nth(1).and_then(|rest| rest.split("```").next()).unwrap();
    assert_eq!(read(recipe, &[]).unwrap().mode(), Mode::Qlora);
}

#[test]
fn every_shipped_recipe_loads_and_is_written_out_the_same() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs");
    let mut seen = 0;
    for entry in fs::read_dir(&folder).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "toml") {
            let config = RunConfig::load(&path, &[]).unwrap_or_else(|error| panic!("{error}"));
            assert_eq!(RunConfig::from_toml(&config.to_toml(), &path, &[]).unwrap(), config);
            seen += 1;
        }
    }
    assert!(seen >= 4, "only {seen} recipes in {}", folder.display());
}

#[test]
fn h100_recipe_holds_the_values_of_published() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs/h100.toml");
    let config = RunConfig::load(&path, &[]).unwrap();
    let train = &config.train;
    assert_eq!(
        (train.micro_batch_size, config.gradient_accumulation(), config.rows_per_step(1)),
        (Auto::Given(3), 16, 48)
    );
    assert_eq!((config.pack, config.max_seq_len), (true, 4096));
    assert_eq!(train.optimizer, OptimizerKind::PagedAdamW8bit);
    assert_eq!(config.recompute(), None, "the fastest that fits");
    assert_eq!(config.compute(), Compute::Plain(FloatType::Bf16));
}

#[test]
fn names_are_those_of_recipes_and_read_back() {
    assert_eq!(to_name(&Recompute::Selective), "selective");
    assert_eq!(from_name("selective"), Ok(Recompute::Selective));
    let base = BaseStorage::Frozen(Format::Quantized(QuantFormat::Nf4 { double_quant: true }));
    assert_eq!(to_name(&base), "frozen nf4_double_quant");
    assert_eq!(from_name::<Recompute>("some").unwrap_err(), "expected one of full, projections, selective, none");
}

/// Reads the smallest recipe with one key set to a value.
fn with_key(section: &str, key: &str, value: &str) -> Result<RunConfig, ConfigError> {
    let dot = if section.is_empty() { "" } else { "." };
    read(SMALLEST, &[&format!("{section}{dot}{key}={value}")])
}

#[test]
fn every_number_has_a_meaningful_limit() {
    for (section, keys) in schema::known_keys() {
        for key in keys.iter().filter(|key| !["seed", "data_seed", "layers_to_transform"].contains(&key.as_str())) {
            for value in ["1e300", "9223372036854775807"] {
                let read = with_key(&section, key, value);
                let is_text = read.as_ref().is_ok_and(|config| config.to_toml().contains(&format!("\"{value}\"")));
                // A run with such a rate diverges, and says so.
                let is_rate = ["learning_rate", "min_lr"].contains(&key.as_str()) && value.starts_with('9');
                assert!(read.is_err() || is_text || is_rate, "{section}.{key} = {value}");
            }
        }
    }
    for (key, value) in [
        ("train.rows_per_step", "2147483648"),
        ("train.adam_epsilon", "1.5"),
        ("train.learning_rate", "1e-300"),
        ("train.max_grad_norm", "1e-300"),
        ("train.adam_beta2", "0.99999999999"),
        ("lora.alpha_pattern", "{ q_proj = 1e300 }"),
        ("lora.rank_pattern", "{ q_proj = 100000000 }"),
    ] {
        assert!(refusal(SMALLEST, &[&format!("{key}={value}")]).contains(key), "{key}");
    }
}

#[test]
fn a_secret_in_an_address_is_neither_printed_nor_saved() {
    let url = "https://me:hunter2@host/x?token=hunter2";
    for (section, keys) in schema::known_keys() {
        for key in keys.iter().filter(|key| !key.contains("prompt") && !key.contains("template")) {
            for value in [url.to_owned(), format!("[\"{url}\"]"), format!("{{ a = \"{url}\" }}")] {
                let shown = match with_key(&section, key, &value) {
                    Ok(config) => config.to_toml(),
                    Err(error) => error.to_string(),
                };
                assert!(!shown.contains("hunter2"), "{section}.{key}: {shown}");
            }
        }
    }
    for uri in ["http:hunter2@host", "http://h?token=hunter2"] {
        let message = refusal(SMALLEST, &[&format!("mlflow.tracking_uri={uri}")]);
        assert!(message.contains("mlflow.tracking_uri: ") && !message.contains("hunter2"), "{message}");
    }
    let _ = read(SMALLEST, &["mlflow.tracking_uri=http://host:5000/team@work"]).unwrap();
}

#[test]
fn very_many_unknown_keys_are_counted_at_once() {
    let keys: String = (0..200_000).map(|index| format!("k{index} = 1\n")).collect();
    let started = std::time::Instant::now();
    let message = refusal(&format!("{keys}{}", "y".repeat(100_000) + " = 1"), &[]);
    assert!(started.elapsed().as_secs() < 10, "{:?}", started.elapsed());
    assert!(message.contains("and 199981 more unknown keys") && message.lines().count() == 21, "{message:.3000}");
}

#[test]
fn hostile_recipes_are_read_or_refused() {
    let mut recipe = serde_json::to_value(read(SMALLEST, &[]).unwrap()).unwrap();
    recipe["mlflow"] = serde_json::json!({ "tracking_uri": "http://h", "experiment_name": "e" });
    recipe["data"]["sources"] = serde_json::json!([{ "path": "a" }]);
    crate::hostile_json::each_hostile(&recipe, |document| {
        let text = document.to_string();
        let source = source::Source::parse(&text, Path::new("x.yaml"), source::Language::Yaml, &[]);
        let read = source.and_then(|source| RunConfig::from_source(source, Path::new("x.yaml")));
        match read {
            Ok(config) => assert!(!config.to_toml().is_empty()),
            Err(error) => assert!(!error.to_string().is_empty()),
        }
    });
}
