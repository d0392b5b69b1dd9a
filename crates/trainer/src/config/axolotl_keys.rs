//! The keys that axolotl's examples set most: each has a counterpart here, or a reason why it has none.
//!
//! Counted at commit 067b021c8b87a9e5e380b9173c704cf7340e30f5 of axolotl-ai-cloud/axolotl: for each key of the 252 YAML files in `examples/`, nested
//! ones with the keys above them and entries of lists taken together, the number of files that set it; the 40 with the highest numbers.
//! Trade-off: only names are compared. What a value means here is said by the answer, and tests of other names check its key.

use crate::config::other_names;
use crate::config::schema::known_keys;

/// Each with its number of files.
const AXOLOTL_KEYS: &str = "\
    base_model:250 learning_rate:250 micro_batch_size:250 output_dir:250 sequence_len:250 bf16:249 optimizer:249 datasets:245 datasets.path:245 \
    datasets.type:245 gradient_accumulation_steps:245 lr_scheduler:245 logging_steps:244 num_epochs:242 tf32:236 sample_packing:226 \
    warmup_ratio:225 saves_per_epoch:223 val_set_size:221 attn_implementation:220 gradient_checkpointing:218 weight_decay:208 wandb_name:207 \
    wandb_entity:205 wandb_log_model:205 wandb_project:205 wandb_watch:205 evals_per_epoch:204 adapter:192 lora_alpha:191 lora_r:191 \
    dataset_prepared_path:189 lora_dropout:179 special_tokens:178 resume_from_checkpoint:168 load_in_4bit:154 load_in_8bit:122 \
    lora_model_dir:122 lora_target_modules:111 plugins:107";

#[test]
fn the_keys_that_axolotls_examples_set_most_have_a_counterpart_or_a_reason() {
    let known = known_keys();
    let is_answered = |name: &str| known.values().flatten().any(|key| key == name) || other_names::key(name).is_some();
    let names = AXOLOTL_KEYS.split_whitespace().filter_map(|entry| entry.split(':').next()?.rsplit('.').next());
    let (answered, unanswered): (Vec<&str>, Vec<&str>) = names.partition(|name| is_answered(name));
    assert!(unanswered.is_empty() && answered.len() == 40, "no answer to {unanswered:?}");
}
