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
    assert_eq!((config.length(), config.max_seq_len()), (None, 2048));
    for others in [&["init=random", "lora="][..], &["preference={}"]] {
        let config = read(SMALLEST, others).unwrap();
        assert_eq!((config.follows_size(), config.length()), (false, Some(Interval::Epochs(1.0))), "{others:?}");
    }
    assert_eq!(config.recompute(), None);
    assert_eq!(config.compute(), Compute::Plain(FloatType::Bf16));
    assert_eq!((config.mode(), config.learning_rate()), (Mode::Lora, 2e-4));
    assert_eq!(read(SMALLEST, &["train.recompute=selective"]).unwrap().recompute(), Some(Recompute::Selective));
}

#[test]
fn full_fine_tuning_is_never_an_omission_and_pairs_have_lower_rates() {
    let cases: &[(&[&str], Mode, f64)] = &[
        (&["bnb_4bit={}", "lora="], Mode::Qlora, 2e-4),
        (&["bnb_4bit={}"], Mode::Qlora, 2e-4),
        (&["mode=qlora"], Mode::Qlora, 2e-4),
        (&["mode=lora", "lora="], Mode::Lora, 2e-4),
        (&["mode=full", "lora="], Mode::Full, 2e-5),
        (&["mode=full", "lora=", "train.learning_rate=1e-4"], Mode::Full, 1e-4),
        (&["init=random", "lora="], Mode::Full, 2e-4),
        (&["preference={}"], Mode::Lora, 1e-5),
        (&["preference={}", "mode=full", "lora="], Mode::Full, 1e-6),
        (&["preference={}", "train.learning_rate=3e-5"], Mode::Lora, 3e-5),
    ];
    for (overrides, mode, rate) in cases {
        let config = read(SMALLEST, overrides).unwrap();
        assert_eq!((config.mode(), config.train.learning_rate), (*mode, Some(*rate)), "{overrides:?}");
        assert_eq!(config.lora.is_some(), *mode != Mode::Full, "{overrides:?}");
        assert_eq!(config.bnb_4bit.is_some(), *mode == Mode::Qlora, "{overrides:?}");
    }
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
    let shapes: [(&str, &[&str]); 10] = [
        (SMALLEST, &["train.micro_batch_size=auto", "data.eval_fraction=auto"]),
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
}

/// What `refusals.toml` has, which says what its columns are.
#[derive(Deserialize)]
struct Refusals {
    combinations: Vec<(Vec<String>, String)>,
    messages: Vec<(String, Vec<String>, String, String)>,
    yaml: Vec<(String, String)>,
}

#[test]
fn what_is_wrong_is_named_with_its_place_and_the_way_out() {
    let table: Refusals = toml::from_str(include_str!("refusals.toml")).unwrap();
    let refusal = |text: &str, overrides: &[String]| {
        let overrides: Vec<&str> = overrides.iter().map(String::as_str).collect();
        refusal(text, &overrides) + "\n"
    };
    for (overrides, part) in &table.combinations {
        let message = refusal(SMALLEST, overrides);
        assert!(message.contains(part), "{overrides:?} gave: {message}");
        assert!(message.starts_with("--set ") || message.starts_with("configs/x.toml"), "{message}");
    }
    for (text, overrides, start, part) in &table.messages {
        let message = refusal(&text.replace("{smallest}", SMALLEST), overrides);
        assert!(message.starts_with(start) && message.contains(part), "{text:?} {overrides:?} gave: {message}");
    }
    for (text, part) in &table.yaml {
        let file = Path::new("configs/x.yaml");
        let source = source::Source::parse(text, file, language::Language::Yaml, &[]);
        let message = source.and_then(|source| RunConfig::from_source(source, file)).unwrap_err().to_string();
        assert!(message.contains(part) && message.lines().count() == 1, "{text:?} gave: {message}");
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
}

#[test]
fn override_of_one_exclusive_key_replaces_the_other_of_the_file() {
    let text = format!("{SMALLEST}[train]\nepochs = 2\ngrad_checkpointing = true\n");
    let config = read(&text, &["train.steps=3", "train.recompute=none"]).unwrap();
    assert_eq!(config.length(), Some(Interval::Steps(3)));
    assert_eq!(config.recompute(), Some(Recompute::None));
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
}

#[test]
fn override_of_compute_replaces_the_older_names_of_the_file() {
    let text = format!("{SMALLEST}[train]\nbf16 = true\n[bnb_4bit]\ncompute_dtype = 'bfloat16'\n");
    assert_eq!(read(&text, &["compute=float32"]).unwrap().compute(), Compute::Plain(FloatType::F32));
    let beside = ["compute=fp8", "train.bf16=true", "bnb_4bit.compute_dtype=bfloat16", "lora={}"];
    assert_eq!(read(SMALLEST, &beside).unwrap().compute(), Compute::Fp8, "bfloat16 is the rest of the arithmetic");
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
    assert_eq!((config.pack, config.max_seq_len()), (true, 4096));
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
        let source = source::Source::parse(&text, Path::new("x.yaml"), language::Language::Yaml, &[]);
        let read = source.and_then(|source| RunConfig::from_source(source, Path::new("x.yaml")));
        match read {
            Ok(config) => assert!(!config.to_toml().is_empty()),
            Err(error) => assert!(!error.to_string().is_empty()),
        }
    });
}
