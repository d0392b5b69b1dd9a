//! What a recipe must not contain: values out of range, and keys that exclude each other.
//!
//! Trade-off: one problem is reported at a time, the first one.

use std::path::Path;

use firebrick_arch::{LoraConfig, TargetModules};
use firebrick_data::RecordFormat;
use firebrick_optim::ScheduleKind;

use crate::config::bounds;
use crate::config::check_data;
use crate::config::check_preference;
use crate::config::compute::Compute;
use crate::config::error::{ConfigError, Place};
use crate::config::extraction::Extraction;
use crate::config::recipe::{Init, Mode, RunConfig};
use crate::config::rule::{Rule, above_zero, at_least, below_one, rule, zero_or_more};
use crate::config::source::{RIVALS, Source};

/// Refuses the first thing that cannot work, with the place where it was typed.
pub(super) fn refuse_impossible(config: &RunConfig, source: &Source<'_>) -> Result<(), ConfigError> {
    refuse_rivals(source)?;
    refuse_credentials(config, source)?;
    check_data::refuse_missing(config, source)?;
    refuse_missing_mode(config, source)?;
    let rules = [
        names(config),
        ranges(config),
        bounds::rules(config),
        weights(config, source),
        schedule(config),
        agreements(config, source),
        check_data::rules(config),
        check_preference::rules(config),
        evaluation(config),
    ];
    for Rule { holds, key, problem, help } in rules.into_iter().flatten() {
        if !holds {
            let key = key.to_string();
            return Err(ConfigError::Impossible { place: source.place(&key), key, problem, help: help.to_string() });
        }
    }
    Ok(())
}

/// Refuses two keys for the same setting, except where both may be there as long as they agree.
fn refuse_rivals(source: &Source<'_>) -> Result<(), ConfigError> {
    for (one, other, may_agree) in RIVALS {
        if !may_agree && source.is_typed(one) && source.is_typed(other) {
            return Err(ConfigError::Impossible {
                place: source.place(one),
                key: one.to_string(),
                problem: format!("{other} is there too, and both keys decide the same thing"),
                help: "keep one of them".to_string(),
            });
        }
    }
    Ok(())
}

/// A password in an address would be saved with the run, in several files. The message does not repeat it.
fn refuse_credentials(config: &RunConfig, source: &Source<'_>) -> Result<(), ConfigError> {
    const KEY: &str = "mlflow.tracking_uri";
    if config.mlflow.as_ref().is_none_or(|mlflow| !mlflow.has_credentials()) {
        return Ok(());
    }
    let place = match source.place(KEY) {
        Place::Set(_) => Place::Set(format!("{KEY}=...")),
        place => place,
    };
    Err(ConfigError::Impossible {
        place,
        key: KEY.to_owned(),
        problem: "holds a user name or a password, which would be saved with the run".to_owned(),
        help: "write the address alone, and set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or \
               MLFLOW_TRACKING_TOKEN, in the environment"
            .to_owned(),
    })
}

/// Names and paths.
fn names(config: &RunConfig) -> Vec<Rule> {
    let name = &config.name;
    let is_folder_name = !name.is_empty() && !name.starts_with('.') && !name.contains(['/', '\\', '\0']);
    vec![
        rule(is_folder_name, "name", "must be usable as a folder name", "write a word such as \"llama-8b-qlora\""),
        rule(!config.model.is_empty(), "model", "is empty", "write the folder of the model"),
        rule(!config.output_dir.is_empty(), "output_dir", "is empty", "write a folder such as \"runs\""),
        rule(
            config.mlflow.as_ref().is_none_or(|mlflow| mlflow.tracking_uri.starts_with("http")),
            "mlflow.tracking_uri",
            "is no address of a server",
            "write the one that `mlflow server` prints, such as \"http://127.0.0.1:5000\"",
        ),
    ]
}

/// Numbers within their ranges.
fn ranges(config: &RunConfig) -> Vec<Rule> {
    let train = &config.train;
    let at_least_one = |key, value: u64| at_least(key, value, 1);
    let mut rules = vec![
        at_least("max_seq_len", config.max_seq_len as u64, 2),
        at_least_one("train.micro_batch_size", train.micro_batch_size as u64),
        at_least_one("train.gradient_accumulation", train.gradient_accumulation as u64),
        at_least_one("train.log_every", train.log_every.unwrap_or(1)),
        at_least_one("train.loss_chunk_tokens", train.loss_chunk_tokens as u64),
        at_least_one("train.steps", train.steps.unwrap_or(1)),
        at_least_one("checkpoint.keep", config.checkpoint.keep as u64),
        at_least_one("eval.max_new_tokens", config.eval.max_new_tokens as u64),
        at_least_one("eval.micro_batch_size", config.eval.micro_batch_size.unwrap_or(1) as u64),
        above_zero("train.epochs", train.epochs.unwrap_or(1.0)),
        above_zero("train.log_every_epochs", train.log_every_epochs.unwrap_or(1.0)),
        above_zero("eval.every_epochs", config.eval.every_epochs.unwrap_or(1.0)),
        above_zero("checkpoint.every_epochs", config.checkpoint.every_epochs.unwrap_or(1.0)),
        above_zero("train.learning_rate", config.learning_rate()),
        zero_or_more("train.min_lr", train.min_lr),
        above_zero("train.adam_epsilon", train.adam_epsilon),
        zero_or_more("train.weight_decay", train.weight_decay),
        zero_or_more("train.max_grad_norm", train.max_grad_norm),
        below_one("train.adam_beta1", train.adam_beta1),
        below_one("train.adam_beta2", train.adam_beta2),
        below_one("train.warmup_ratio", train.warmup_ratio.unwrap_or(0.0)),
    ];
    let problem = format!("is {}, and ZeRO has stages 0 to 3", train.zero_stage);
    let help = "write 1 (divides the optimizer's state), 2 (gradients too), 3 (weights too), or 0";
    rules.push(rule(train.zero_stage.exists(), "train.zero_stage", problem, help));
    let in_fp8 = config.compute() == Compute::Fp8;
    let problem =
        "is 3, and compute = \"fp8\" keeps what it derives from weights, which borrowed ones do not allow".to_owned();
    let help = "write 2, or compute = \"bfloat16\"";
    rules.push(rule(!train.zero_stage.divides_weights() || !in_fp8, "train.zero_stage", problem, help));
    if let Some(lora) = &config.lora {
        let is_whole = lora.modules_to_save.as_ref().is_some_and(|names| !names.is_empty());
        let problem =
            "is 3, and modules that train whole next to adapters (lora.modules_to_save) are not divided".to_owned();
        let holds = !train.zero_stage.divides_weights() || !is_whole;
        rules.push(rule(holds, "train.zero_stage", problem, "write 2, or adapt those modules"));
        if !lora.init_lora_weights.is_uniform() {
            rules.extend(pissa(config, lora));
        }
        rules.push(at_least_one("lora.r", lora.r as u64));
        rules.push(above_zero("lora.alpha", lora.lora_alpha));
        rules.push(below_one("lora.dropout", lora.lora_dropout));
        rules.push(above_zero("lora.loraplus_lr_ratio", lora.loraplus_lr_ratio.unwrap_or(1.0)));
    }
    if let (Some(warmup), Some(steps)) = (train.warmup_steps, train.steps) {
        let problem = format!("{warmup} steps of warm-up are longer than the run of {steps}");
        rules.push(rule(warmup <= steps, "train.warmup_steps", problem, "warm up for about 3 % of the steps"));
    }
    rules
}

/// What an adapter that starts as a part of its base does not go with.
fn pissa(config: &RunConfig, lora: &LoraConfig) -> [Rule; 3] {
    let key = "lora.init_lora_weights";
    let without = |what: &str| format!("is \"{}\", and {what}", lora.init_lora_weights);
    [
        rule(
            lora.init_from.is_none(),
            key,
            without("lora.init_from has matrices of its own"),
            "remove one of the two; an adapter that was saved continues on the original base",
        ),
        rule(!lora.use_dora, key, without("with lora.use_dora it is not there yet"), "remove one of the two"),
        rule(
            !config.train.zero_stage.divides_weights(),
            key,
            without("with train.zero_stage = 3 no rank has all weights"),
            "write train.zero_stage = 2, or remove the key",
        ),
    ]
}

/// A recipe has to say which weights train: all of a pretrained model by omission would be an accident.
fn refuse_missing_mode(config: &RunConfig, source: &Source<'_>) -> Result<(), ConfigError> {
    let is_said = config.mode.is_some() || config.lora.is_some() || config.quantized_base().is_some();
    if is_said || config.init == Init::Random {
        return Ok(());
    }
    let help = "add [lora] (adapters), [bnb_4bit] or base = \"nvfp4\" (adapters on a quantized base), or mode = \"full\" at the \
                top of the file to train every weight";
    Err(ConfigError::Missing { place: source.file_place(), key: "mode".to_owned(), help: help.to_owned() })
}

/// Which weights are trained.
fn weights(config: &RunConfig, source: &Source<'_>) -> Vec<Rule> {
    let typed = |section: &str| source.is_typed(section);
    let quantized = ["bnb_4bit", "base"].into_iter().find(|key| typed(key));
    let frozen_base = ["lora"].into_iter().find(|section| typed(section)).or(quantized);
    let of = |key: &str| {
        let written = if key == "base" { key.to_owned() } else { format!("[{key}]") };
        format!("{written} ({})", source.place(key))
    };
    let base_name = config.lora.as_ref().and_then(|lora| lora.base_model_name_or_path.as_ref());
    let mut rules = vec![
        rule(
            config.init == Init::Pretrained || config.mode() == Mode::Full,
            if typed("init") { "init" } else { frozen_base.unwrap_or("mode") },
            "init = \"random\" makes an untrained base, and adapters would leave it frozen",
            "train all weights (remove [lora], [bnb_4bit] and base) or start from init = \"pretrained\"",
        ),
        rule(
            config.lora.as_ref().is_none_or(|lora| lora.target_modules != TargetModules::Named(Vec::new())),
            "lora.target",
            "names no module",
            "write \"all-linear\", or module names such as [\"q_proj\", \"v_proj\"]",
        ),
        rule(
            base_name.is_none_or(|name| !Path::new(name).exists()),
            "lora.base_model_name_or_path",
            "is a file or folder here, and others would read it as a Hub id",
            "write the id of the base on the Hub, such as \"HuggingFaceTB/SmolLM2-135M-Instruct\", or leave the key out",
        ),
    ];
    if let (Some(Mode::Full), Some(section)) = (config.mode, frozen_base) {
        let problem = format!("\"full\" trains every weight, and {} trains adapters on a frozen base", of(section));
        rules.push(rule(
            false,
            "mode",
            problem,
            "remove one of the two; on the command line, `--set lora= --set bnb_4bit= --set base=`",
        ));
    }
    if let (Some(Mode::Lora), Some(key)) = (config.mode, quantized) {
        let problem = format!("\"lora\" keeps the base as stored, and {} quantizes it", of(key));
        rules.push(rule(false, "mode", problem, "write mode = \"qlora\", or remove [bnb_4bit] and base"));
    }
    rules
}

/// The shape of the learning rate.
fn schedule(config: &RunConfig) -> Vec<Rule> {
    let (train, peak) = (&config.train, config.learning_rate());
    vec![
        rule(
            train.min_lr <= peak,
            "train.min_lr",
            format!("is {:e}, above the highest rate, train.learning_rate = {peak:e}", train.min_lr),
            "write a rate such as a tenth of train.learning_rate",
        ),
        rule(
            train.min_lr == 0.0 || train.schedule != ScheduleKind::Constant,
            "train.min_lr",
            "schedule = \"constant\" never decreases",
            "write schedule = \"cosine\" or \"linear\", or remove this key",
        ),
    ]
}

/// Keys for the same setting must agree.
fn agreements(config: &RunConfig, source: &Source<'_>) -> Vec<Rule> {
    let checkpointing = config.train.grad_checkpointing;
    let recompute_agrees = checkpointing
        .zip(config.train.recompute)
        .is_none_or(|(checkpointing, recompute)| checkpointing == recompute.repeats_gemms());
    let mut rules: Vec<Rule> = Vec::new();
    if let Some((key, written, other)) = config.compute_contradiction() {
        let problem = format!("contradicts {written} ({})", source.place(other));
        rules.push(rule(
            false,
            key,
            problem,
            "a run computes in one number format: write `compute` and remove the older keys",
        ));
    }
    rules.extend([
        rule(
            recompute_agrees,
            "train.recompute",
            format!("contradicts train.grad_checkpointing = {}", checkpointing.unwrap_or(true)),
            "remove one of the two keys: true is \"full\" or \"projections\", false is \"selective\" or \"none\"",
        ),
        rule(
            config.train.offload != Some(true) || config.recompute().may_offload(),
            "train.offload",
            "layers save too much of their work to be copied to the host and back next to it",
            "write train.recompute = \"full\" or \"projections\", or remove this key",
        ),
    ]);
    rules
}

/// Evaluation needs something to evaluate on.
fn evaluation(config: &RunConfig) -> Vec<Rule> {
    let eval = &config.eval;
    let nothing = || "there is nothing to evaluate on".to_string();
    let help = "add data.eval_path, or data.eval_fraction = 0.05, or remove this key";
    let every_steps = eval.every_steps.is_some_and(|steps| steps > 0);
    vec![
        rule(config.has_eval_data() || !every_steps, "eval.every_steps", nothing(), help),
        rule(config.has_eval_data() || eval.every_epochs.is_none(), "eval.every_epochs", nothing(), help),
        rule(config.has_eval_data() || eval.exact_match_prompts == 0, "eval.exact_match_prompts", nothing(), help),
        rule(
            eval.exact_match_prompts == 0 || config.data.format != RecordFormat::Text,
            "eval.exact_match_prompts",
            "needs chat records, whose last assistant turn is the reference answer",
            "set it to 0 for format = \"text\"",
        ),
        extraction(&eval.extract),
    ]
}

/// `eval.extract` is a name, or a regular expression that says what it takes.
fn extraction(written: &str) -> Rule {
    let problem = Extraction::parse(written).err();
    let help = "write \"whole\", \"last_number\", \"choice\", or a regular expression such as \"#### (-?[0-9]+)\"";
    rule(problem.is_none(), "eval.extract", problem.unwrap_or_default(), help)
}
