//! What a key of another trainer becomes where more than its name differs.
//!
//! Trade-off: a value that no rule knows is taken as it is; if no recipe may have it, it becomes a comment with the recipe reader's own advice.

use std::path::Path;
use std::sync::LazyLock;

use toml::{Table, Value};

use super::Outcome::{Left, Method, NotNeeded, Set};
use super::{Draft, Outcome, Setting, datasets};
use crate::config::other_names::{self, Answer};
use crate::config::schema::{KnownKeys, known_keys};

/// Prefixes of keys that say how another trainer computes what happens here anyway.
const FUSED: [&str; 8] = [
    "liger_",
    "unsloth_",
    "use_liger",
    "cut_cross_entropy",
    "use_kernels",
    "use_v1_kernels",
    "use_scattermoe",
    "experts_implementation",
];
/// Sections in which a name is looked for that several have: the first one is meant.
const SEARCHED: [&str; 9] = ["", "train", "data", "lora", "bnb_4bit", "preference", "checkpoint", "eval", "best"];
/// Words in the names of keys about images, sound and video.
const MEDIA: [&str; 6] = ["image", "video", "audio", "vision", "multi_modal", "processor_kwargs"];
/// Built-in chat templates, with the names that they have elsewhere.
const TEMPLATES: [(&str, &str); 8] = [
    ("chatml", "chatml"),
    ("llama3", "llama3"),
    ("gemma", "gemma"),
    ("phi3", "phi3"),
    ("phi_3", "phi3"),
    ("phi_35", "phi3"),
    ("zephyr", "zephyr"),
    ("alpaca", "alpaca"),
];
/// Mappings whose keys are looked up by their own names; the names of others mean something else.
const PARENTS: [&str; 12] = [
    "peft_config",
    "lora_config",
    "training_args",
    "special_tokens",
    "optimizer",
    "lr_scheduler",
    "tokenizer",
    "model",
    "checkpointer",
    "quant_config",
    "bnb_config",
    "quantization_config",
];
/// Methods of `rl`, `stage` and `trainer_type` that train on pairs of answers.
const PAIRS: [&str; 3] = ["dpo", "orpo", "ipo"];

/// Returns whether a mapping is one value to a rule.
pub(super) fn takes_whole(path: &str) -> bool {
    matches!(path, "dataset" | "train_dataset" | "deepspeed" | "gradient_checkpointing_kwargs" | "lr_scheduler_kwargs")
}

/// Returns what becomes of a setting among `all`; data sets go into `draft` at once.
pub(super) fn outcome(setting: &Setting, all: &[Setting], draft: &mut Draft, file: &Path) -> Outcome {
    let data = datasets::outcome(setting, all, draft, file);
    data.or_else(|| of_name(setting, all)).unwrap_or_else(|| of_table(setting))
}

fn set(key: &str, value: impl Into<Value>) -> Option<Outcome> {
    Some(Set(vec![(key.to_owned(), value.into())]))
}

fn needless(why: &str) -> Option<Outcome> {
    Some(NotNeeded(why.to_owned()))
}

fn left(why: &str) -> Option<Outcome> {
    Some(Left(why.to_owned()))
}

/// Returns the text of another setting.
pub(super) fn text_of<'a>(all: &'a [Setting], name: &str) -> Option<&'a str> {
    all.iter().find(|setting| setting.name() == name).and_then(|setting| setting.value.as_str())
}

fn is_true(all: &[Setting], name: &str) -> bool {
    all.iter().any(|setting| setting.name() == name && setting.value.as_bool() == Some(true))
}

fn has(all: &[Setting], name: &str) -> bool {
    all.iter().any(|setting| setting.name() == name)
}

/// Returns the number of another setting.
fn number_of(all: &[Setting], name: &str) -> Option<f64> {
    all.iter().find(|setting| setting.name() == name).and_then(|setting| number(&setting.value))
}

/// Returns a number, also where it is written as a text.
fn number(value: &Value) -> Option<f64> {
    match value {
        Value::Integer(number) => Some(*number as f64),
        Value::Float(number) => Some(*number),
        Value::String(text) => text.parse().ok(),
        _ => None,
    }
}

/// Returns what becomes of a key whose value has another form or meaning here.
fn of_name(setting: &Setting, all: &[Setting]) -> Option<Outcome> {
    let Setting { value, .. } = setting;
    let truth = value.as_bool();
    let text = value.as_str().unwrap_or_default();
    // YAML 1.1 reads `no` as false.
    let strategy_name = if truth == Some(false) { "no" } else { text };
    let name = setting.name();
    if setting.path.starts_with("fsdp") || name.starts_with("ddp_") || setting.path.starts_with("dist_config") {
        return of_several_cards(setting, all);
    }
    if let Some((parent, _)) = setting.path.split_once('.')
        && !PARENTS.contains(&parent)
    {
        return if truth == Some(false) { needless("it is off") } else { left("nothing here does this") };
    }
    if FUSED.iter().any(|prefix| name.starts_with(prefix)) || name.ends_with("_kernel") {
        return needless("fused kernels are always on");
    }
    if MEDIA.iter().any(|word| name.replace("revision", "").contains(word)) {
        return left("models train on text; images, sound and video are not read");
    }
    match (name, truth) {
        ("adapter" | "finetuning_type" | "train_type" | "tuner_type", _) => {
            method(value.as_str().unwrap_or("a value that is no name"))
        }
        ("name", _) if setting.path == "peft_config.name" => method(text),
        ("load_in_4bit", Some(true)) => set("bnb_4bit", Table::new()),
        ("load_in_4bit" | "load_in_8bit" | "fp16" | "float16", Some(false)) => needless("compute and base say it"),
        ("load_in_8bit", Some(true)) => set("base", "fp8"),
        ("quantization_bit", _) => match number(value) {
            Some(4.0) => set("bnb_4bit", Table::new()),
            Some(8.0) => set("base", "fp8"),
            _ => left("a base is stored in 4 or 8 bits, or as it is"),
        },
        ("quantization_method" | "quant_method", _) if matches!(text, "bnb" | "bitsandbytes") => {
            needless("[bnb_4bit] is this method")
        }
        ("quantize_moe_experts", _) => needless("experts are stored as the rest of the base"),
        ("bf16" | "bfloat16", Some(true)) if is_true(all, "fp8") => needless("compute = \"fp8\" is for layers alone"),
        ("bf16" | "bfloat16", Some(true)) => set("compute", "bfloat16"),
        ("bf16" | "bfloat16", _) if text == "auto" => set("compute", "bfloat16"),
        ("bf16" | "bfloat16", Some(false)) if !is_true(all, "fp16") => set("compute", "float32"),
        ("bf16" | "bfloat16", Some(false)) => needless("compute says it"),
        ("fp16" | "float16", Some(true)) => set("compute", "float16"),
        ("fp8", Some(true)) => set("compute", "fp8"),
        ("tf32", _) => needless("matrices of bfloat16 are not float32, and those of float32 are multiplied as such"),
        ("torch_dtype" | "dtype", _) if is_true(all, "bf16") || is_true(all, "fp16") => {
            needless("bf16 or fp16 says it")
        }
        ("torch_dtype" | "dtype", _) => match text {
            "auto" | "" => needless("weights are read in the format in which they are stored"),
            other => set("compute", other.trim_start_matches("torch.")),
        },
        ("val_set_size" | "val_size", _) => match number(value) {
            Some(0.0) => needless("nothing is held out unless it is requested"),
            Some(share) if share < 1.0 => set("data.eval_fraction", share),
            _ => left("a number of records: write data.eval_fraction, a share of them"),
        },
        ("train_on_inputs" | "train_on_prompt", Some(true)) => set("data.train_on", "all"),
        ("mask_history", Some(true)) => set("data.train_on", "last"),
        ("train_on_inputs" | "train_on_prompt" | "mask_history", Some(false)) => {
            needless("the loss counts what the assistant writes")
        }
        ("assistant_only_loss", Some(true)) => set("data.train_on", "assistant"),
        ("completion_only_loss", Some(false)) => set("data.train_on", "all"),
        ("assistant_only_loss" | "completion_only_loss", _) => needless("the first lines say what counts"),
        ("batch_size", _) if has(all, "micro_batch_size") => {
            let times = (number(value)? / number_of(all, "micro_batch_size")?).round().max(1.0);
            set("train.gradient_accumulation", times as i64)
        }
        ("num_warmup_steps", _) => set("train.warmup_steps", value.clone()),
        ("model_revision" | "revision_of_model", _) if !text.is_empty() => needless("it is in the name of the model"),
        ("pissa_init", Some(true)) => {
            let niter = number_of(all, "pissa_iter").unwrap_or(16.0);
            set("lora.init_lora_weights", if niter < 0.0 { "pissa".to_owned() } else { format!("pissa_niter_{niter}") })
        }
        ("pissa_iter", _) if is_true(all, "pissa_init") => needless("it is in lora.init_lora_weights"),
        ("shuffle_merged_datasets", Some(false)) => set("data.shuffle", false),
        ("excess_length_strategy", _) if matches!(text, "drop" | "truncate" | "split") => set("data.overflow", text),
        ("path" | "merges_file", _) if setting.path.starts_with("tokenizer.") => {
            needless("the tokenizer is read from the model's folder")
        }
        ("checkpoint_dir", _) => set("model", text),
        ("lora_target_modules", _) if is_true(all, "lora_target_linear") => {
            let names = value.to_string();
            match ["embed", "lm_head"].iter().any(|name| names.contains(name)) {
                true => left("embedding and head are trained whole, by lora.modules_to_save"),
                false => needless("all linear modules are trained"),
            }
        }
        ("lora_target_linear", Some(true)) => set("lora.target", "all-linear"),
        ("lora_target_linear", Some(false)) => needless("lora.target names the modules"),
        ("lora_target_modules" | "lora_target" | "target_modules", _) => Some(targets(value)),
        ("gradient_checkpointing" | "use_gradient_checkpointing" | "activation_offloading", _)
        | ("disable_gradient_checkpointing" | "gradient_checkpointing_kwargs", _) => {
            needless("the plan takes the fastest recomputation that fits")
        }
        ("max_steps", _) if number(value).is_none_or(|steps| steps <= 0.0) => needless("the epochs say it"),
        ("num_epochs" | "num_train_epochs" | "epochs", _) if has_steps(all) => needless("max_steps takes precedence"),
        ("warmup_steps", _) if number(value).is_some_and(|steps| 0.0 < steps && steps < 1.0) => {
            set("train.warmup_ratio", number(value)?)
        }
        ("warmup_steps" | "warmup_ratio", _) if is_constant(all) => needless("a constant rate has no warm-up there"),
        ("warmup_steps", _) if number(value) == Some(0.0) && has(all, "warmup_ratio") => {
            needless("warmup_ratio says it")
        }
        ("warmup_ratio", _)
            if all.iter().any(|other| other.name() == "warmup_steps" && number(&other.value) != Some(0.0)) =>
        {
            needless("warmup_steps takes precedence")
        }
        ("evals_per_epoch" | "eval_steps" | "eval_strategy" | "evaluation_strategy", _) if !is_evaluated(all) => {
            needless("nothing is held out, so nothing is evaluated")
        }
        ("unfrozen_parameters", _) => left("every weight trains, or those of an adapter and lora.modules_to_save"),
        ("cosine_min_lr_ratio" | "min_lr_ratio" | "min_lr_rate", _) => {
            set("train.min_lr", number_of(all, "learning_rate")? * number(value)?)
        }
        ("saves_per_epoch", _) => per_epoch("checkpoint", value),
        ("evals_per_epoch", _) => per_epoch("eval", value),
        ("eval_strategy" | "evaluation_strategy", _) if text == "steps" && !has(all, "eval_steps") => set(
            "eval.every_steps",
            number_of(all, "logging_steps").filter(|steps| *steps >= 1.0).unwrap_or(500.0) as i64,
        ),
        ("save_strategy", _) => strategy("checkpoint", strategy_name),
        ("eval_strategy" | "evaluation_strategy", _) => strategy("eval", strategy_name),
        ("save_steps", _) if says_another(all, &["save_strategy"]) => needless("save_strategy says it"),
        ("eval_steps", _) if says_another(all, &["eval_strategy", "evaluation_strategy"]) => {
            needless("eval_strategy says it")
        }
        ("save_steps" | "eval_steps" | "logging_steps", _)
            if number(value).is_some_and(|steps| 0.0 < steps && steps < 1.0) =>
        {
            left("a fraction of the run: write steps, or a fraction of an epoch in every_epochs")
        }
        ("output_dir", _) => output_dir(text),
        ("run_name" | "wandb_name", _) if has(all, "output_dir") => needless("the run has the name of its folder"),
        ("report_to", _) => match value.to_string() {
            names if names.contains("wandb") => set("wandb", Table::new()),
            names if ["mlflow", "swanlab", "trackio", "comet", "all"].iter().any(|name| names.contains(name)) => {
                left("metrics.jsonl and TensorBoard files are always written; [wandb] and [mlflow] are there")
            }
            _ => needless("metrics.jsonl and TensorBoard files are always written"),
        },
        ("pad_token" | "eos_token", _) => set(&format!("data.{name}"), text),
        ("chat_template" | "template", _) => Some(template(text)),
        ("deepspeed", _) => Some(deepspeed(value)),
        ("rl" | "stage" | "trainer_type" | "rlhf_type", _) if text_of(all, "pref_loss") == Some("orpo") => {
            needless("pref_loss says it")
        }
        ("rl" | "stage" | "trainer_type" | "rlhf_type", _) => match text {
            "sft" | "pt" => needless("the data say it"),
            "ipo" => Some(Set(vec![
                ("preference.loss".to_owned(), "dpo".into()),
                ("preference.loss_type".to_owned(), "ipo".into()),
            ])),
            _ if PAIRS.contains(&text) => set("preference.loss", text),
            _ => method_is_missing("pairs of answers train by DPO or ORPO; nothing is generated while a model trains"),
        },
        ("pref_loss", _) => match text {
            "orpo" => set("preference.loss", "orpo"),
            "simpo" | "kto_pair" => method_is_missing("pairs of answers train by DPO or ORPO"),
            other => set("preference.loss_type", other),
        },
        ("pref_ftx", _) if number(value) == Some(0.0) => needless("no other loss is added unless it is requested"),
        ("plugins", _) => Some(plugins(value)),
        ("preprocessing_num_workers" | "dataloader_num_workers" | "dataset_num_proc" | "dataset_processes", _) => {
            needless("the number of threads follows from the cores")
        }
        ("optimizer" | "optim", _) if !text.is_empty() => Some(translated("train.optimizer", text)),
        ("lr_scheduler" | "lr_scheduler_type", _) => Some(translated("train.schedule", text)),
        ("lora_r" | "lora_rank" | "r", _) if setting.path.contains("peft_config") || name != "r" => {
            set("lora.r", value.clone())
        }
        ("lora_alpha", _) => set("lora.alpha", value.clone()),
        ("adapter_name_or_path" | "lora_model_dir" | "resume_from_checkpoint", _) if text.is_empty() => {
            needless("there is none")
        }
        _ => None,
    }
}

/// Returns whether anything is held out.
fn is_evaluated(all: &[Setting]) -> bool {
    all.iter().any(|other| match other.name() {
        "val_set_size" | "val_size" => number(&other.value).is_some_and(|size| size > 0.0),
        name => matches!(name, "test_datasets" | "eval_dataset" | "dataset_test_split"),
    })
}

/// Returns whether the run is given in steps.
fn has_steps(all: &[Setting]) -> bool {
    number_of(all, "max_steps").is_some_and(|steps| steps > 0.0)
}

/// Returns whether a strategy says that steps are not what counts.
fn says_another(all: &[Setting], names: &[&str]) -> bool {
    names.iter().any(|name| {
        let text = text_of(all, name);
        let is_off = all.iter().any(|other| other.name() == *name && other.value.as_bool() == Some(false));
        matches!(text, Some("epoch" | "no")) || is_off
    })
}

fn is_constant(all: &[Setting]) -> bool {
    ["lr_scheduler", "lr_scheduler_type"].iter().any(|name| text_of(all, name) == Some("constant"))
}

fn method_is_missing(why: &str) -> Option<Outcome> {
    Some(Method(why.to_owned()))
}

fn method(text: &str) -> Option<Outcome> {
    match text {
        "lora" => set("lora", Table::new()),
        "qlora" => Some(Set(["lora", "bnb_4bit"].map(|section| (section.to_owned(), Table::new().into())).into())),
        "full" => set("mode", "full"),
        "" => set("mode", "full"),
        _ => method_is_missing("not there: adapters are LoRA, and without one every weight trains"),
    }
}

fn per_epoch(section: &str, value: &Value) -> Option<Outcome> {
    match number(value) {
        Some(times) if times > 0.0 => set(&format!("{section}.every_epochs"), 1.0 / times),
        Some(_) => set(&format!("{section}.every_steps"), 0),
        None => left("a number of times per epoch was expected"),
    }
}

fn strategy(section: &str, text: &str) -> Option<Outcome> {
    match text {
        "epoch" => set(&format!("{section}.every_epochs"), 1.0),
        "steps" => needless("its steps say it"),
        "no" => set(&format!("{section}.every_steps"), 0),
        _ => left("write every_steps or every_epochs"),
    }
}

/// Returns the run's folder as the folder of all runs and the run's name.
fn output_dir(text: &str) -> Option<Outcome> {
    let path = Path::new(text);
    let name = path.file_name()?.to_string_lossy().into_owned();
    let above = path.parent().map(|above| above.to_string_lossy().into_owned()).filter(|above| !above.is_empty());
    let above = above.unwrap_or_else(|| ".".to_owned());
    Some(Set(vec![("name".to_owned(), name.into()), ("output_dir".to_owned(), above.into())]))
}

fn targets(value: &Value) -> Outcome {
    let target = match value {
        Value::String(text) if matches!(&**text, "all" | "all-linear") => Value::from("all-linear"),
        Value::String(text) if text.contains(',') && !text.contains(['(', '[', '\\']) => {
            Value::Array(text.split(',').map(|name| name.trim().into()).collect())
        }
        Value::Array(names) if names.len() == 1 && names[0].as_str().is_some_and(|name| name.contains("all")) => {
            Value::from("all-linear")
        }
        other => other.clone(),
    };
    Set(vec![("lora.target".to_owned(), target)])
}

fn template(text: &str) -> Outcome {
    match TEMPLATES.iter().find(|(theirs, _)| *theirs == text) {
        Some((_, ours)) => Set(vec![("data.chat_template".to_owned(), (*ours).into())]),
        None if matches!(text, "jinja" | "default" | "empty" | "vicuna") => {
            Left("write data.chat_template: a file, or a built-in one".to_owned())
        }
        None => NotNeeded("the chat template of the model's tokenizer is used".to_owned()),
    }
}

/// Returns the stage that a file of DeepSpeed's settings has in its name or in itself.
fn deepspeed(value: &Value) -> Outcome {
    let named = value.as_str().and_then(|text| {
        let lower = text.to_lowercase();
        let stages = [(3, ["z3", "zero3"]), (2, ["z2", "zero2"]), (1, ["z1", "zero1"]), (0, ["z0", "zero0"])];
        stages.into_iter().find(|(_, names)| names.iter().any(|name| lower.contains(name))).map(|(stage, _)| stage)
    });
    let inline = value.get("zero_optimization").and_then(|zero| zero.get("stage")).and_then(Value::as_integer);
    match named.or(inline) {
        Some(stage) => Set(vec![("train.zero_stage".to_owned(), stage.into())]),
        None => Left("write train.zero_stage = 1, 2 or 3 for what its ranks divide".to_owned()),
    }
}

fn of_several_cards(setting: &Setting, all: &[Setting]) -> Option<Outcome> {
    let text = setting.value.to_string().to_uppercase();
    if setting.name().ends_with("offload_params") && setting.value.as_bool() == Some(true) {
        return left("weights are not offloaded: train.zero_stage = 3 divides them");
    }
    if text.contains("SHARD_GRAD_OP") {
        return set("train.zero_stage", 2);
    }
    let is_none = all.iter().any(|other| {
        other.path.starts_with("fsdp")
            && (other.value.to_string().contains("NO_SHARD") || other.value.to_string() == "[]")
    });
    let divides_less = all.iter().any(|other| other.value.to_string().to_uppercase().contains("SHARD_GRAD_OP"));
    if is_none || divides_less {
        return needless("train.zero_stage says what ranks divide");
    }
    let is_first = all.iter().find(|other| other.path.starts_with("fsdp") || other.path == "dist_config.name");
    if is_first.is_some_and(|first| first.path == setting.path) {
        return set("train.zero_stage", 3);
    }
    needless("train.zero_stage = 3 divides weights, gradients and the optimizer's state")
}

fn plugins(value: &Value) -> Outcome {
    let names: Vec<&str> = value.as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    let is_fused = |name: &&str| ["cut_cross_entropy", "liger", "kernels"].iter().any(|part| name.contains(part));
    match names.iter().find(|name| !is_fused(name)) {
        None => NotNeeded("fused kernels are always on".to_owned()),
        Some(other) => Left(format!("there are no plugins: {other}")),
    }
}

/// Returns a value under the name that it has here, which the advice on it says.
fn translated(key: &str, text: &str) -> Outcome {
    let advice = other_names::value(key, text);
    let name = advice.and_then(|advice| advice.strip_prefix("here it is '")?.split('\'').next());
    let same_arithmetic = advice.and_then(|advice| {
        let quoted = advice.split('\'').nth(1)?;
        advice.contains("the same arithmetic").then_some(quoted)
    });
    Set(vec![(key.to_owned(), name.or(same_arithmetic).unwrap_or(text).into())])
}

/// Returns the key of the recipe that a name is, with its section.
fn path_of(name: &str) -> Option<String> {
    if let Some(Answer::Key(path, _)) = other_names::key(name) {
        return Some(path.to_owned());
    }
    // Made from the whole schema, once.
    static KNOWN: LazyLock<KnownKeys> = LazyLock::new(known_keys);
    let has = |section: &&str| KNOWN.get(*section).is_some_and(|keys| keys.iter().any(|key| key == name));
    let section = SEARCHED.into_iter().find(has)?;
    Some(if section.is_empty() { name.to_owned() } else { format!("{section}.{name}") })
}

/// Returns what the table of other names says of a setting.
fn of_table(setting: &Setting) -> Outcome {
    let name = setting.name();
    let known = path_of(name).filter(|path| !setting.path.contains('.') || path.contains('.'));
    match (other_names::key(name), known) {
        (Some(Answer::NotNeeded(why)), _) => NotNeeded(why.to_owned()),
        (Some(Answer::NotYet(_)), _) if setting.value.as_bool() == Some(false) => NotNeeded("it is off".to_owned()),
        (Some(Answer::NotYet(why)), _) => Left(why.to_owned()),
        (Some(Answer::Section(section)), _) => match setting.value.as_bool() {
            Some(false) => NotNeeded(format!("[{section}] is left out")),
            _ => Set(vec![(section.to_owned(), Table::new().into())]),
        },
        (_, Some(path)) if path.starts_with("wandb.") || path == "name" => Set(vec![(path, setting.value.clone())]),
        (_, Some(path)) => Set(vec![(path, plain_number(&setting.value))]),
        (_, None) => match setting.value.as_bool() {
            Some(false) => NotNeeded("it is off".to_owned()),
            _ => Left("nothing here does this".to_owned()),
        },
    }
}

/// Returns a number that was written as a text as a number.
fn plain_number(value: &Value) -> Value {
    let Value::String(text) = value else { return value.clone() };
    let whole = text.parse().map(Value::Integer);
    whole.or_else(|_| text.parse().map(Value::Float)).unwrap_or_else(|_: std::num::ParseFloatError| value.clone())
}
