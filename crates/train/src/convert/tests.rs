//! Configurations as users of other trainers write them, and the recipes that they become.

use firebrick_trainer::config::ZeroStage;
use toml::Table;

use super::*;

fn converted(text: &str) -> Converted {
    let converted = convert(text, Path::new("mine.yaml")).unwrap();
    assert_eq!(converted.problem, None, "{}", converted.recipe);
    RunConfig::from_toml(&converted.recipe, Path::new("mine.toml"), &[]).unwrap();
    converted
}

#[test]
fn llama_factory_finds_its_data_in_dataset_info() {
    let root = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(root.path().join("data")).unwrap();
    let info = r#"{"mine": {"file_name": "mine.json", "formatting": "sharegpt", "ranking": true,
        "columns": {"messages": "conversations", "chosen": "good", "rejected": "rejected"}},
        "hub": {"hf_hub_url": "owner/data", "subset": "en", "columns": {"prompt": "question", "response": "output"}}}"#;
    std::fs::write(root.path().join("data/dataset_info.json"), info).unwrap();
    let text = "
model_name_or_path: owner/base
stage: dpo
finetuning_type: lora
pref_loss: hinge
pref_beta: 0.2
dataset: mine
max_samples: 10
template: qwen3_nothink
cutoff_len: 1024
per_device_train_batch_size: 1
num_train_epochs: 3.0
bf16: true
deepspeed: examples/deepspeed/ds_z3_config.json
";
    let file = root.path().join("examples/train_lora/mine.yaml");
    let pairs = convert(text, &file).unwrap();
    assert_eq!((pairs.problem.as_deref(), pairs.left.len()), (None, 0), "{}", pairs.recipe);
    let recipe = RunConfig::from_toml(&pairs.recipe, Path::new("mine.toml"), &[]).unwrap();
    let source = &recipe.data.training_sources()[0];
    assert_eq!((&*source.path, source.limit), (&*root.path().join("data/mine.json").to_string_lossy(), Some(10)));
    assert_eq!((&*source.fields["chosen"], &*source.fields["prompt"]), ("good", "conversations"));
    // Their rank and scale are defaults that differ from ours; each of both answers may have cutoff_len tokens.
    let lora = recipe.lora.as_ref().unwrap();
    assert_eq!((lora.r, lora.lora_alpha, recipe.max_seq_len(), recipe.pack), (8, 16.0, 2048, false));
    assert_eq!((recipe.preference.as_ref().unwrap().beta, recipe.train.zero_stage), (0.2, ZeroStage::WEIGHTS));
    // What is absent has their defaults, and LoRA is one of them.
    assert_eq!((recipe.learning_rate(), recipe.train.schedule), (5e-5, firebrick_optim::ScheduleKind::Linear));
    let shortest = convert("model_name_or_path: a/b\nstage: pt\ndataset: hub\n", &file).unwrap();
    let shortest = RunConfig::from_toml(&shortest.recipe, Path::new("mine.toml"), &[]).unwrap();
    assert!(shortest.lora.is_some() && shortest.pack);
    let single = convert("model_name_or_path: a/b\nstage: sft\nfinetuning_type: full\ndataset: hub\n", &file).unwrap();
    let recipe = RunConfig::from_toml(&single.recipe, Path::new("mine.toml"), &[]).unwrap();
    let source = &recipe.data.training_sources()[0];
    assert_eq!(
        (&*source.path, source.config.as_deref(), &*source.fields["instruction"]),
        ("owner/data", Some("en"), "question")
    );
    assert!(recipe.lora.is_none());
}

#[test]
fn another_method_is_not_complete_and_says_so() {
    let data = "base_model: a/b\ndatasets: [{path: d.jsonl, type: alpaca}]\n";
    let of = |text: &str| convert(&format!("{data}{text}"), Path::new("x")).unwrap();
    for text in ["plugins: [mine.Plugin]", "unfrozen_parameters: [a]", "unknown_key: 1", "profiler: {warmup_steps: 3}"]
    {
        let converted = of(text);
        assert_eq!((converted.left.len(), converted.problem), (1, None), "{text}: {}", converted.recipe);
        assert_eq!(converted.left[0].line, 3, "{text}");
    }
    for text in ["rl: kto\nrl_beta: 0.1", "adapter: llama-adapter", "adapter: [lora]"] {
        let converted = of(text);
        let problem = converted.problem.unwrap_or_default();
        assert!(problem.starts_with("rl: ") || problem.starts_with("adapter: "), "{text}: {problem}");
        assert!(
            !converted.recipe.contains("\n[preference]") && !converted.recipe.contains("\nmode ="),
            "{}",
            converted.recipe
        );
    }
    // Without an adapter nothing of an adapter is left, and nothing is stored in 4 bits.
    let full = of("load_in_4bit: true\nbnb_4bit_quant_type: nf4\nlora_r: 8\n");
    assert_eq!((full.left.len(), full.problem), (3, None), "{}", full.recipe);
    let without_model = convert("datasets: [{path: d.jsonl}]", Path::new("x")).unwrap();
    assert!(without_model.problem.unwrap().contains("model is missing"));
    let error = convert("a: 1\n  b: 2\n", Path::new("x.yaml")).unwrap_err().to_string();
    assert!(error.starts_with("x.yaml:2"), "{error}");
}

#[test]
fn refused_keys_are_problems_and_no_secret_is_shown() {
    let data = "base_model: a/b\nadapter: lora\n";
    let cases = [
        ("datasets: [{path: d, type: chat_template, roles_to_train: []}]", "datasets.roles_to_train: "),
        ("datasets: [{path: d, roles_to_train: [user]}, {path: e}]", "datasets.roles_to_train: "),
        ("datasets: [{path: d}]\nlora_target_modules: 1", "lora_target_modules: "),
        ("datasets: [{path: 'https://me:hunter2@host/d.jsonl'}, {path: d, hub_token: hunter2}]", "datasets: "),
        ("datasets: ['http://me:hunter2@host/d', {token: hunter2}]", "missing"),
        ("dataset: 'http://host/a,http://me:hunter2@host/d'\nmlflow_tracking_uri: http://me:hunter2@host", "dataset: "),
        ("WANDB_API_KEY: hunter2\nhub_token: hunter2\ndeepspeed: {a: {password: hunter2}}", "missing"),
    ];
    for (text, part) in cases {
        let converted = convert(&format!("{data}{text}\n"), Path::new("x.yaml")).unwrap();
        assert!(converted.problem.as_ref().is_some_and(|problem| problem.contains(part)), "{text}: {converted:?}");
        assert!(!format!("{converted:?}").contains("hunter2"), "{text}: {converted:?}");
    }
    // A value of several lines is written in one, so the refused key is found.
    let rest = "datasets: [{path: d}]\nspecial_tokens: {pad_token: \"a\\nb\"}\nweight_decay: x\nlearning_rate: 0.5\noptim: adam\n";
    let recipe = converted(&format!("{data}{rest}")).recipe;
    let parts = [
        "\nlearning_rate = 0.5",
        "line 5, weight_decay: \"x\"",
        "pad_token = \"a\\nb\"",
        "optimizer = \"adamw\"  # optim: \"adam\"",
    ];
    assert!(parts.iter().all(|part| recipe.contains(part)), "{recipe}");
}

/// Returns the value at a path of a recipe, where numbers count the elements of lists.
fn value_at(recipe: &str, path: &str) -> Option<Value> {
    let inside = |value: Value, name: &str| match name.parse::<usize>() {
        Ok(index) => value.get(index).cloned(),
        Err(_) => value.get(name).cloned(),
    };
    path.split('.').try_fold(Value::Table(recipe.parse().unwrap()), inside)
}

/// Returns what became of the setting at `path`: keys of the recipe with their values, "-" for a comment that nothing is needed, "#" for one without a
/// counterpart, "!" for another method; nothing if the recipe does not name it with its value.
fn became(converted: &Converted, path: &str, value: &str) -> String {
    let keys = converted.keys.iter().filter(|(_, at, _)| at.split(',').next() == Some(path));
    let mut found: Vec<String> = keys
        .map(|(.., key)| {
            let find = |key: &str| value_at(&converted.recipe, key);
            find(key).or_else(|| find(&format!("data.{key}"))).map_or(key.clone(), |value| format!("{key} = {value}"))
        })
        .collect();
    let is_method = converted.problem.as_ref().is_some_and(|problem| problem.starts_with(&format!("{path}: ")));
    for (remarks, sign) in [(&converted.not_needed, "-"), (&converted.left, if is_method { "!" } else { "#" })] {
        let named = format!("{path}: ");
        let is_it = |remark: &&Remark| remark.setting.strip_prefix(&named).is_some_and(|rest| same(rest, value));
        found.extend(remarks.iter().filter(is_it).map(|_| sign.to_owned()));
    }
    found.join("; ")
}

/// Returns whether a remark shows the value that was typed in YAML.
fn same(shown: &str, typed: &str) -> bool {
    let plain = |text: &str| text.replace(['"', '\'', ' '], "").replace("false", "no");
    plain(shown) == plain(typed) || shown.parse::<f64>().is_ok_and(|number| Ok(number) == typed.parse())
}

#[test]
fn every_allowed_value_is_translated_or_commented() {
    let groups: Table = include_str!("theirs.toml").parse().unwrap();
    let (mut wrong, mut count) = (Vec::new(), 0);
    for (name, group) in &groups {
        let bases = group["base"].as_array().cloned().unwrap_or_else(|| vec![group["base"].clone()]);
        let inside = group.get("in").map_or("", |text| text.as_str().unwrap());
        let keys = group.as_table().unwrap().iter().filter(|(key, _)| !matches!(key.as_str(), "base" | "in"));
        let keys = keys.flat_map(|(keys, of_key)| keys.split(", ").map(move |key| (key, of_key.as_table().unwrap())));
        let values: Vec<_> =
            keys.flat_map(|(key, of_key)| of_key.iter().map(move |of_value| (key, of_value))).collect();
        let cases = bases.iter().flat_map(|base| values.iter().map(move |case| (base.as_str().unwrap(), *case)));
        for (base, (key, (result, values))) in cases {
            for value in values.as_str().unwrap().split(" | ") {
                let text = match key.split_once('.') {
                    _ if base.contains('@') => base.replace('@', &format!(", {key}: {value}")).replace("{,", "{"),
                    Some((parent, name)) => format!("{base}{parent}: {{{name}: {value}}}\n"),
                    None => format!("{base}{key}: {value}\n"),
                };
                let converted = convert(&text, Path::new("x.yaml")).unwrap();
                let found = became(&converted, &format!("{inside}{key}"), value);
                if found != *result {
                    wrong.push(format!("{name}, {key}: {value}: {found:?} instead of {result:?}"));
                }
                count += 1;
            }
        }
    }
    assert!(wrong.is_empty() && count > 700, "{count} values\n{}", wrong.join("\n"));
}

#[test]
fn no_key_vanishes_whatever_is_around_it() {
    let cases = [
        (
            "base_model: a/b\ndatasets: [{path: d, message_property_mappings: {role: from}, split: 'train[:1%]'}]\ntf32: false\n",
            "datasets.path datasets.message_property_mappings datasets.split tf32",
        ),
        ("base_model: a/b\nrl: kto\nrl_beta: 0.1\ndpo_label_smoothing: 0.1\n", "rl rl_beta dpo_label_smoothing"),
        ("base_model: a/b\nlora_r: 8\nbnb_4bit_quant_type: nf4\n", "lora_r bnb_4bit_quant_type"),
        (
            "model: a/b\ntorch_dtype: float16\nbf16: true\nlearning_rate: x\nmax_steps: [1]\n",
            "bf16 learning_rate max_steps",
        ),
    ];
    for (text, paths) in cases {
        let converted = convert(text, Path::new("x.yaml")).unwrap();
        let remarks = converted.not_needed.iter().chain(&converted.left).map(|remark| &*remark.setting);
        let named: Vec<&str> = converted.keys.iter().map(|(_, path, _)| &**path).chain(remarks).collect();
        let is_named = |path: &str| named.iter().any(|name| name.split([',', ':']).next() == Some(path));
        assert!(paths.split(' ').all(is_named), "{paths}: {named:?}");
    }
}

#[test]
fn whole_configurations_mean_the_same_here() {
    let cases: Table = include_str!("meanings.toml").parse().unwrap();
    for (text, keys) in &cases {
        let recipe = converted(text).recipe;
        for (key, expected) in keys.as_table().unwrap() {
            let found = value_at(&recipe, key).map_or_else(String::new, |value| value.to_string());
            assert_eq!(found, expected.as_str().unwrap(), "{key} of {recipe}");
        }
    }
}

#[test]
fn rewards_whose_functions_are_not_named_are_incomplete() {
    for (functions, part) in
        [("num_generations: 4", "MODULE:FUNCTION"), ("reward_funcs: [accuracy]", "function accuracy")]
    {
        let text = format!("model_name_or_path: a/b\ndataset_name: o/d\n{functions}\n");
        let Converted { problem, recipe, .. } = convert(&text, Path::new("x.yaml")).unwrap();
        assert!(problem.is_some_and(|problem| problem.contains(part)), "{recipe}");
        assert!(recipe.contains("\n[grpo]\n") && recipe.contains("MODULE:"), "{recipe}");
    }
}

#[test]
fn a_file_that_is_no_configuration_is_named() {
    let cases = [
        ("", "x.yaml", "empty"),
        ("# nothing\n", "x.yaml", "empty"),
        ("model = \"a/b\"\n", "x.toml", "recipes are"),
        ("model: a/b\ndata: {path: x}\n", "x.yaml", "a recipe of Firebrick already"),
        ("import torch\n", "train.py", "a program"),
        ("{\"a\": 1}\n{\"a\": 2}\n", "x.json", "records"),
        ("[{\"instruction\": \"a\"}]", "x.json", "records"),
        ("{\"a\": 1}\n", "x.jsonl", "a data set"),
        ("{\"zero_optimization\": {\"stage\": 3}}", "ds_z3.json", "DeepSpeed's"),
        ("compute_environment: LOCAL_MACHINE\n", "x.yaml", "accelerate's"),
        ("{\"mine\": {\"file_name\": \"mine.json\"}}", "dataset_info.json", "describes data sets"),
    ];
    for (text, file, part) in cases {
        let error = convert(text, Path::new(file)).unwrap_err().to_string();
        assert!(error.starts_with(&format!("{file}:1: ")) && error.contains(part), "{file}: {error}");
    }
}
