//! Names that users of axolotl, TRL, transformers, LLaMA-Factory and Unsloth type, and what each is here.
//!
//! A name leads to a key or a section that means the same. Where nothing does, the answer says so: a key that only looks alike is
//! never offered.
//! Trade-off: the table is kept by hand; a test checks that every key and section in it exists.

use std::fmt;

/// What a name of another trainer is here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    /// This key, written `section.key`.
    Key(&'static str),
    /// This key, whose values are written differently.
    KeyWith(&'static str, &'static str),
    /// This section.
    Section(&'static str),
    /// Nothing yet, because.
    NotYet(&'static str),
    /// Nothing, because it happens anyway or elsewhere.
    NotNeeded(&'static str),
}

impl Answer {
    /// The answer as advice to a user who typed the name in `section`.
    pub(super) fn advice(self, section: &str) -> String {
        match self {
            Self::Key(path) => format!("here it is {}", place(path, section)),
            Self::KeyWith(path, note) => format!("here it is {}: {note}", place(path, section)),
            Self::Section(name) => format!("write the section [{name}]"),
            Self::NotYet(why) => format!("not there yet: {why}"),
            Self::NotNeeded(why) => format!("not needed: {why}"),
        }
    }
}

/// "'r' in [lora]", or "'r'" inside of that section.
fn place(path: &str, section: &str) -> String {
    match path.split_once('.').unwrap_or(("", path)) {
        (home, key) if home == section => format!("'{key}'"),
        ("", key) => format!("'{key}' at the top of the file, before the first [section]"),
        (home, key) => format!("'{key}' in [{home}]"),
    }
}

/// The answer for the name of a key.
pub(super) fn key(name: &str) -> Option<Answer> {
    names().into_iter().find(|(known, _)| *known == name).map(|(_, answer)| answer)
}

/// Every name with its answer.
pub(super) fn names() -> Vec<(&'static str, Answer)> {
    [MODEL, ADAPTER, DATA, SEQUENCE, STEP, SCHEDULE, LOGGING, ELSEWHERE].concat()
}

use Answer::{Key, KeyWith, NotNeeded, NotYet, Section};

const MODEL: &[(&str, Answer)] = &[
    ("base_model", Key("model")),
    ("model_name_or_path", Key("model")),
    ("model_name", Key("model")),
    ("pretrained_model_name_or_path", Key("model")),
    ("tokenizer_name_or_path", NotNeeded("the tokenizer is read from the model's folder")),
    ("tokenizer_name", NotNeeded("the tokenizer is read from the model's folder")),
    ("tokenizer_config", NotNeeded("the tokenizer is read from the model's folder")),
    ("tokenizer_type", NotNeeded("the tokenizer is read from the model's folder")),
    ("model_type", NotNeeded("config.json of the model's folder says it")),
    ("model_revision", KeyWith("model", "\"owner/name@revision\"")),
    ("device_map", NotNeeded("a rank has one device; train.zero_stage = 3 divides a model over several")),
    ("trust_remote_code", NotNeeded("no code of a model folder is ever run")),
    ("torch_dtype", Key("compute")),
    ("dtype", Key("compute")),
    ("fp16", KeyWith("compute", "write compute = \"float16\"")),
    ("float16", KeyWith("compute", "write compute = \"float16\"")),
    ("half", KeyWith("compute", "write compute = \"float16\"")),
    ("bfloat16", KeyWith("compute", "write compute = \"bfloat16\"")),
    ("pure_bf16", NotYet("trained weights are updated in float32; compute = \"bfloat16\" is for everything else")),
    ("fp8", KeyWith("compute", "write compute = \"fp8\"")),
    ("float32", KeyWith("compute", "write compute = \"float32\"")),
    ("fp32", KeyWith("compute", "write compute = \"float32\"")),
    ("tf32", NotYet("float32 is computed in float32; compute = \"bfloat16\" is the fast format")),
    (
        "special_tokens",
        NotNeeded("bos, eos and pad token are those of the model's folder; data.new_special_tokens adds tokens to it"),
    ),
    ("additional_special_tokens", Key("data.new_special_tokens")),
    ("add_special_tokens", Key("data.new_special_tokens")),
    ("tokens", Key("data.new_tokens")),
    ("add_tokens", Key("data.new_tokens")),
    ("added_tokens_overrides", NotYet("the tokens of the model's folder keep their texts")),
    ("resize_vocab", NotNeeded("the tables grow where data.new_tokens need rows")),
    ("resize_token_embeddings_to_32x", NotYet("the tables grow by the rows that data.new_tokens need")),
    ("flash_attention", NotNeeded("attention is fused, of memory linear in the length, wherever the backend can")),
    ("flash_attn", NotNeeded("attention is fused, of memory linear in the length, wherever the backend can")),
    ("attn_implementation", NotNeeded("the backend chooses; the fused kernels are used wherever they can be")),
    ("xformers_attention", NotNeeded("the backend chooses; the fused kernels are used wherever they can be")),
    ("sdp_attention", NotNeeded("the backend chooses; the fused kernels are used wherever they can be")),
    ("use_liger_kernel", NotNeeded("fused kernels are always on")),
    ("use_liger", NotNeeded("fused kernels are always on")),
    ("enable_liger_kernel", NotNeeded("fused kernels are always on")),
    ("torch_compile", NotNeeded("nothing is compiled while a run starts, except for CUDA kernels once per machine")),
];

const ADAPTER: &[(&str, Answer)] = &[
    ("adapter", KeyWith("mode", "\"lora\", \"qlora\" or \"full\"; the sections [lora] and [bnb_4bit] say it too")),
    (
        "finetuning_type",
        KeyWith("mode", "\"lora\", \"qlora\" or \"full\"; the sections [lora] and [bnb_4bit] say it too"),
    ),
    ("full_finetuning", KeyWith("mode", "write mode = \"full\"")),
    ("use_peft", Section("lora")),
    ("peft_config", Section("lora")),
    ("lora_config", Section("lora")),
    ("load_in_4bit", Section("bnb_4bit")),
    ("bnb_config", Section("bnb_4bit")),
    ("quantization_config", Section("bnb_4bit")),
    ("load_in_8bit", KeyWith("base", "\"fp8\" stores the base in 8 bits; int8 is not there")),
    ("quantization_bit", KeyWith("base", "\"nvfp4\", \"mxfp4\" or \"fp8\"; the section [bnb_4bit] is NF4")),
    ("bnb_4bit_quant_type", Key("bnb_4bit.quant_type")),
    ("bnb_4bit_compute_dtype", Key("bnb_4bit.compute_dtype")),
    ("bnb_4bit_use_double_quant", Key("bnb_4bit.double_quant")),
    ("use_double_quant", Key("bnb_4bit.double_quant")),
    ("double_quantization", Key("bnb_4bit.double_quant")),
    ("lora_r", Key("lora.r")),
    ("lora_rank", Key("lora.r")),
    ("rank", Key("lora.r")),
    ("lora_alpha", Key("lora.alpha")),
    ("target_modules", Key("lora.target")),
    ("lora_target_modules", Key("lora.target")),
    ("lora_target", Key("lora.target")),
    ("lora_target_linear", KeyWith("lora.target", "\"all-linear\", which is the default")),
    ("rslora", Key("lora.use_rslora")),
    ("lora_use_rslora", Key("lora.use_rslora")),
    ("peft_use_rslora", Key("lora.use_rslora")),
    ("bias", NotNeeded("adapters have no biases, as with PEFT's default")),
    ("lora_bias", NotYet("adapters have no biases")),
    ("task_type", NotNeeded("every model is a causal language model")),
    ("peft_type", NotNeeded("every adapter is LoRA")),
    ("lora_dropout", Key("lora.dropout")),
    ("adapter_dropout", Key("lora.dropout")),
    ("dora", Key("lora.use_dora")),
    ("lora_use_dora", Key("lora.use_dora")),
    ("peft_use_dora", Key("lora.use_dora")),
    ("lora_modules_to_save", Key("lora.modules_to_save")),
    ("additional_target", Key("lora.modules_to_save")),
    ("peft_trainable_token_indices", Key("lora.trainable_token_indices")),
    ("lora_exclude_modules", Key("lora.exclude_modules")),
    ("peft_init_lora_weights", Key("lora.init_lora_weights")),
    ("pissa_init", KeyWith("lora.init_lora_weights", "\"pissa_niter_16\", or \"pissa\"")),
    ("pissa_iter", KeyWith("lora.init_lora_weights", "\"pissa_niter_N\"")),
    ("pissa_convert", NotNeeded("an adapter is always saved for the original base")),
    ("peft_layers_to_transform", Key("lora.layers_to_transform")),
    ("lora_layers_to_transform", Key("lora.layers_to_transform")),
    ("layers_pattern", NotNeeded("the layers of a model have one name; lora.layers_to_transform counts them")),
    ("peft_layers_pattern", NotNeeded("the layers of a model have one name; lora.layers_to_transform counts them")),
    ("loraplus_lambda", Key("lora.loraplus_lr_ratio")),
    ("loraplus_lr_embedding", NotYet("adapters are on linear modules, not on the embedding")),
    ("unfrozen_parameters", KeyWith("lora.modules_to_save", "names of modules, not expressions over parameters")),
];

const DATA: &[(&str, Answer)] = &[
    ("dataset", Key("data.path")),
    ("dataset_name", Key("data.path")),
    ("dataset_path", Key("data.path")),
    ("train_file", Key("data.path")),
    ("dataset_dir", Key("data.path")),
    ("datasets", KeyWith("data.sources", "[[data.sources]] tables, or `path` in [data] for one source")),
    ("test_datasets", Key("data.eval_sources")),
    ("eval_dataset", Key("data.eval_path")),
    ("validation_file", Key("data.eval_path")),
    ("val_set_size", KeyWith("data.eval_fraction", "a fraction below 1, not a number of records")),
    ("val_size", KeyWith("data.eval_fraction", "a fraction below 1, not a number of records")),
    ("dataset_text_field", KeyWith("data.fields", "{ text = \"name\" }")),
    ("max_samples", KeyWith("data.limit", "records of the source, the first ones")),
    ("ds_type", Key("data.file_format")),
    ("dataset_num_proc", Key("data.workers")),
    ("dataset_processes", Key("data.workers")),
    ("preprocessing_num_workers", Key("data.workers")),
    ("dataloader_num_workers", Key("data.workers")),
    ("dataset_prepared_path", Key("data.cache")),
    ("tokenized_path", Key("data.cache")),
    ("train_on_inputs", KeyWith("data.train_on", "true is \"all\", false is \"assistant\"")),
    ("train_on_prompt", KeyWith("data.train_on", "true is \"all\", false is \"assistant\"")),
    ("assistant_only_loss", KeyWith("data.train_on", "true is \"assistant\", false is \"all\"")),
    ("completion_only_loss", KeyWith("data.train_on", "true is \"assistant\", false is \"all\"")),
    ("train_on_responses_only", KeyWith("data.train_on", "true is \"assistant\", which is the default")),
    ("mask_history", KeyWith("data.train_on", "true is \"last\"")),
    ("enable_thinking", KeyWith("data.chat_template_kwargs", "{ enable_thinking = false }")),
    ("type", KeyWith("data.format", "or nothing: records say it by their keys")),
    ("train_on_eos", KeyWith("data.train_end_of_turn", "true is \"turn\", false is \"none\"")),
    ("remove_unused_columns", NotNeeded("columns that no record format uses are ignored")),
    ("template", Key("data.chat_template")),
    ("chat_template_path", Key("data.chat_template")),
];

const SEQUENCE: &[(&str, Answer)] = &[
    ("sequence_len", Key("max_seq_len")),
    ("max_length", KeyWith("max_seq_len", "with [preference] both answers share a row: write twice as much")),
    ("max_seq_length", Key("max_seq_len")),
    ("cutoff_len", Key("max_seq_len")),
    ("model_max_length", Key("max_seq_len")),
    ("block_size", Key("max_seq_len")),
    ("sample_packing", Key("pack")),
    ("packing", Key("pack")),
    ("neat_packing", Key("pack")),
    ("eval_sample_packing", NotNeeded("evaluation packs as training does (`pack`), which changes no loss")),
    ("eval_packing", NotNeeded("evaluation packs as training does (`pack`), which changes no loss")),
    ("padding_free", NotNeeded("packed documents never see each other, and no padding is computed between them")),
    ("pad_to_sequence_len", NotNeeded("packed rows always have max_seq_len tokens")),
    ("group_by_length", NotNeeded("with pack = false, rows of similar length share a batch")),
];

const STEP: &[(&str, Answer)] = &[
    ("lr", Key("train.learning_rate")),
    (
        "batch_size",
        KeyWith("train.micro_batch_size", "rows per pass; times gradient_accumulation it is the batch of a step"),
    ),
    ("per_device_train_batch_size", Key("train.micro_batch_size")),
    ("per_device_eval_batch_size", Key("eval.micro_batch_size")),
    ("eval_batch_size", Key("eval.micro_batch_size")),
    ("gradient_accumulation_steps", Key("train.gradient_accumulation")),
    ("auto_find_batch_size", NotNeeded("a run that will not fit is refused with the nearest change that does")),
    ("gradient_checkpointing", Key("train.grad_checkpointing")),
    ("use_gradient_checkpointing", Key("train.grad_checkpointing")),
    (
        "gradient_checkpointing_kwargs",
        KeyWith("train.recompute", "\"full\", \"projections\", \"selective\" or \"none\""),
    ),
    ("activation_offloading", Key("train.offload")),
    ("optim", Key("train.optimizer")),
    ("optim_args", NotYet("the keys of [train] are all that optimizers take")),
    ("adam_eps", Key("train.adam_epsilon")),
    ("gradient_clipping", Key("train.max_grad_norm")),
    ("gradient_clip_val", Key("train.max_grad_norm")),
    ("clip_grad_norm", Key("train.max_grad_norm")),
    ("num_epochs", Key("train.epochs")),
    ("num_train_epochs", Key("train.epochs")),
    ("max_steps", Key("train.steps")),
    ("random_state", Key("seed")),
    ("neftune_noise_alpha", NotYet("embeddings are used without noise")),
    ("label_smoothing_factor", NotYet("the loss is plain cross entropy")),
    ("training_args", Section("train")),
    ("training", Section("train")),
];

const SCHEDULE: &[(&str, Answer)] = &[
    ("lr_scheduler", Key("train.schedule")),
    ("lr_scheduler_type", Key("train.schedule")),
    ("lr_scheduler_kwargs", NotYet("of what they hold only the lowest rate has a key, train.min_lr")),
    ("warmup", KeyWith("train.warmup_steps", "or warmup_ratio, a fraction of the run")),
    ("cosine_min_lr_ratio", KeyWith("train.min_lr", "a rate; the ratio times learning_rate")),
    ("min_lr_rate", KeyWith("train.min_lr", "a rate; the ratio times learning_rate")),
    ("min_lr_ratio", KeyWith("train.min_lr", "a rate; the ratio times learning_rate")),
];

const LOGGING: &[(&str, Answer)] = &[
    ("logging_steps", KeyWith("train.log_every", "steps; a fraction goes into log_every_epochs, of an epoch")),
    ("logging_strategy", KeyWith("train.log_every", "or log_every_epochs")),
    ("eval_steps", KeyWith("eval.every_steps", "steps; a fraction goes into every_epochs, of an epoch")),
    ("eval_strategy", KeyWith("eval.every_steps", "or every_epochs; 0 steps is \"no\"")),
    ("evaluation_strategy", KeyWith("eval.every_steps", "or every_epochs; 0 steps is \"no\"")),
    ("evals_per_epoch", KeyWith("eval.every_epochs", "4 per epoch is 0.25")),
    ("eval_on_start", Key("eval.on_start")),
    ("eval_max_new_tokens", Key("eval.max_new_tokens")),
    ("predict_with_generate", KeyWith("eval.exact_match_prompts", "the number of held-out prompts that are answered")),
    ("save_steps", KeyWith("checkpoint.every_steps", "steps; a fraction goes into every_epochs, of an epoch")),
    ("save_strategy", KeyWith("checkpoint.every_steps", "or every_epochs; 0 steps saves at the end only")),
    ("saves_per_epoch", KeyWith("checkpoint.every_epochs", "4 per epoch is 0.25")),
    ("save_total_limit", Key("checkpoint.keep")),
    ("save_safetensors", NotNeeded("weights are always saved as safetensors")),
    ("save_only_model", NotYet("a checkpoint always holds what a resumed run needs")),
    ("load_best_model_at_end", NotYet("the newest checkpoints are kept, not the best")),
    ("metric_for_best_model", NotYet("the newest checkpoints are kept, not the best")),
    ("early_stopping_patience", NotYet("a run ends after its steps or epochs; Ctrl-C saves and ends it before")),
    ("run_name", Key("name")),
    ("plot_loss", NotNeeded("every run writes report.html with its curves")),
    (
        "report_to",
        KeyWith("mlflow", "a section with tracking_uri; metrics.jsonl and TensorBoard files are always written"),
    ),
    ("wandb_project", NotYet("docs/interoperability.md has a script that sends metrics.jsonl to W&B after a run")),
    ("wandb_entity", NotYet("docs/interoperability.md has a script that sends metrics.jsonl to W&B after a run")),
    ("use_wandb", NotYet("docs/interoperability.md has a script that sends metrics.jsonl to W&B after a run")),
    ("mlflow_tracking_uri", Key("mlflow.tracking_uri")),
    ("use_tensorboard", NotNeeded("TensorBoard files are always written")),
    ("logging_dir", NotNeeded("TensorBoard files are in the run folder, below output_dir")),
];

const ELSEWHERE: &[(&str, Answer)] = &[
    ("resume_from_checkpoint", NotNeeded("it is an option of the command: --resume, or --resume FOLDER")),
    ("auto_resume_from_checkpoints", NotNeeded("it is an option of the command: --resume")),
    ("overwrite_output_dir", NotNeeded("a run never overwrites another; a taken name becomes name-2")),
    ("do_train", NotNeeded("the command says it: train, plan or inspect")),
    ("do_eval", NotNeeded("the command says it; [eval] says when to evaluate")),
    ("push_to_hub", NotNeeded("`train push` sends the adapter or the model to the Hub after a run")),
    ("hub_model_id", NotNeeded("`train push` sends the adapter or the model to the Hub after a run")),
    ("rl", KeyWith("preference.loss", "\"dpo\" or \"orpo\"; KTO and GRPO are not there yet")),
    ("stage", KeyWith("preference.loss", "\"dpo\" or \"orpo\"; leave the section out for pt and sft")),
    ("pref_beta", Key("preference.beta")),
    ("rl_beta", Key("preference.beta")),
    ("dpo_beta", Key("preference.beta")),
    ("orpo_alpha", Key("preference.beta")),
    (
        "pref_loss",
        KeyWith("preference.loss_type", "\"sigmoid\", \"robust\", \"hinge\" or \"ipo\"; ORPO is loss = \"orpo\""),
    ),
    ("pref_ftx", Key("preference.rpo_alpha")),
    ("dpo_label_smoothing", Key("preference.label_smoothing")),
    ("reference_free", NotYet("loss = \"orpo\" is a loss without a reference")),
    ("ref_model", NotYet("the reference is the model before training")),
    ("max_prompt_length", NotNeeded("the beginning of a prompt is cut where a pair does not fit into max_seq_len")),
    ("max_completion_length", NotNeeded("answers are cut where a pair does not fit into max_seq_len")),
    (
        "deepspeed",
        NotNeeded("ranks need no configuration (docs/scaling.md); train.zero_stage says what they divide: 1, 2 or 3"),
    ),
    ("fsdp", NotNeeded("train.zero_stage = 3 divides weights, gradients and the optimizer's state over ranks")),
    ("fsdp_config", NotNeeded("train.zero_stage = 3 divides weights, gradients and the optimizer's state over ranks")),
    ("ddp_timeout", NotNeeded("the variable FIREBRICK_RENDEZVOUS_TIMEOUT is how long ranks wait for each other")),
    ("local_rank", NotNeeded("the variables of the launcher say it (docs/scaling.md)")),
];

/// What a value of another trainer is here, as advice.
pub(super) struct OtherValue(&'static str);

impl fmt::Display for OtherValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

/// The advice for a value of another trainer.
pub(super) fn value(key: &str, got: &str) -> Option<OtherValue> {
    let found = VALUES.iter().find(|(of, names, _)| *of == key && names.contains(&got));
    found.map(|(.., advice)| OtherValue(advice))
}

const VALUES: &[(&str, &[&str], &str)] = &[
    (
        "train.optimizer",
        &["adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "adam", "adamw_32bit"],
        "here it is 'adamw'",
    ),
    ("train.optimizer", &["adamw_bnb_8bit", "adamw8bit"], "here it is 'adamw_8bit'"),
    (
        "train.optimizer",
        &["paged_adamw", "paged_adamw_32bit"],
        "paging of 32-bit state is not there yet: 'adamw' is the same arithmetic with its state on the device",
    ),
    (
        "train.optimizer",
        &["sgd", "lion", "lion_8bit", "paged_lion_8bit", "adafactor", "muon", "galore_adamw", "schedule_free_adamw"],
        "not there yet: only AdamW is",
    ),
    (
        "train.schedule",
        &["constant_with_warmup"],
        "here it is 'constant' with train.warmup_steps or train.warmup_ratio",
    ),
    ("train.schedule", &["cosine_with_min_lr", "cosine_warmup_with_min_lr"], "here it is 'cosine' with train.min_lr"),
    (
        "train.schedule",
        &[
            "cosine_with_restarts",
            "polynomial",
            "inverse_sqrt",
            "reduce_lr_on_plateau",
            "warmup_stable_decay",
            "wsd",
            "one_cycle",
            "rex",
        ],
        "not there yet",
    ),
    ("bnb_4bit.quant_type", &["fp4", "int4"], "not there yet"),
    ("bnb_4bit.quant_type", &["nvfp4", "mxfp4", "fp8"], "write base at the top of the file instead of the section"),
    ("base", &["fp4", "int4", "int8", "mxfp8"], "not there yet"),
    ("compute", &["int8", "float8", "tf32"], "not there yet"),
    ("data.format", &["chat_template", "messages", "openai", "conversation", "conversations"], "here it is 'chat'"),
    ("data.format", &["completion", "pretrain", "pretraining", "pt"], "here it is 'text'"),
    ("preference.loss", &["kto", "kto_pair", "simpo", "grpo", "ppo"], "not there yet"),
    ("mode", &["freeze", "oft", "llama-adapter"], "not there yet"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_is_there_once() {
        let mut names: Vec<&str> = names().into_iter().map(|(name, _)| name).collect();
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
    }

    #[test]
    fn a_value_that_is_not_there_is_never_answered_with_another_meaning() {
        let advice = |key, got| value(key, got).map(|advice| advice.to_string());
        assert!(advice("train.optimizer", "paged_adamw_32bit").unwrap().contains("not there yet"));
        assert!(advice("train.schedule", "constant_with_warmup").unwrap().contains("warmup_steps"));
        assert_eq!(advice("train.schedule", "cosin"), None);
    }
}
