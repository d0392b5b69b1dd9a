//! What settings of several cards become: FSDP, DDP, and the stage of DeepSpeed's file.

use toml::Value;

use crate::convert::setting::{Outcome, Setting, left, needless, set};

/// Returns the stage that a file of DeepSpeed's settings has in its name or in itself.
pub(super) fn deepspeed(value: &Value) -> Option<Outcome> {
    let text = value.to_string().to_lowercase();
    let is_named = |stage: &i64| ["z", "zero", "stage = "].iter().any(|name| text.contains(&format!("{name}{stage}")));
    match [3, 2, 1, 0].into_iter().find(is_named) {
        Some(stage) => set("train.zero_stage", stage),
        None => left("write train.zero_stage = 1, 2 or 3 for what its ranks divide"),
    }
}

/// Returns what becomes of a setting of FSDP, DDP or `dist_config`; `None` for any other.
pub(super) fn outcome(setting: &Setting, all: &[Setting]) -> Option<Outcome> {
    if !["fsdp", "ddp_", "dist_config"].iter().any(|start| setting.path.starts_with(start)) {
        return None;
    }
    if setting.name().ends_with("offload_params") && setting.value.as_bool() == Some(true) {
        return left("weights are not offloaded: train.zero_stage = 3 divides them");
    }
    let keeps_weights = |other: &Setting| {
        let is_off = other.value.as_bool() == Some(false);
        other.value.to_string().to_uppercase().contains("SHARD_GRAD_OP")
            || other.name().ends_with("reshard_after_forward") && is_off
    };
    if keeps_weights(setting) {
        return set("train.zero_stage", 2);
    }
    let is_none = all.iter().any(|other| {
        let text = other.value.to_string();
        other.path.starts_with("fsdp") && text.contains("NO_SHARD")
            || other.path == "fsdp" && matches!(&*text, "[]" | "{}" | "\"\"" | "false")
    });
    let first = all.iter().find(|other| other.path.starts_with("fsdp") || other.path == "dist_config.name");
    let is_first = first.is_some_and(|first| first.path == setting.path);
    match is_first && !is_none && !all.iter().any(keeps_weights) {
        true => set("train.zero_stage", 3),
        false => needless("train.zero_stage says what ranks divide"),
    }
}
