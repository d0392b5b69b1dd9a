//! What `[preference]` must not contain, and what must not stand next to it.
//!
//! Trade-off: whether the data has pairs is found when it is read.

use firebrick_data::{OverflowPolicy, RecordFormat, TrainOn};

use crate::config::preference_section::{LossType, PreferenceLoss, PreferenceSection};
use crate::config::recipe::RunConfig;
use crate::config::rule::{Rule, above_zero, rule, zero_or_more};

/// The rules of pairs of answers; without the section, that no source is one of pairs.
pub(super) fn rules(config: &RunConfig) -> Vec<Rule> {
    let formats: Vec<RecordFormat> = config
        .data
        .training_sources()
        .into_iter()
        .chain(config.data.held_out_sources())
        .map(|source| source.format)
        .collect();
    let Some(preference) = &config.preference else {
        return vec![rule(
            !formats.contains(&RecordFormat::Preference),
            "data.format",
            "\"preference\" is read by preference training alone",
            "add the section [preference] with loss = \"dpo\" or \"orpo\"",
        )];
    };
    let rules =
        [ranges(preference), keys_of_one_loss(preference), reference(config, preference), data(config, &formats)];
    rules.into_iter().flatten().collect()
}

/// Numbers within their ranges.
fn ranges(preference: &PreferenceSection) -> Vec<Rule> {
    let smoothing = preference.label_smoothing;
    let smooths = matches!(preference.loss_type, LossType::Sigmoid | LossType::Robust) && is_dpo(preference);
    vec![
        above_zero("preference.beta", preference.beta),
        rule(
            (0.0..0.5).contains(&smoothing),
            "preference.label_smoothing",
            format!("must be 0 or more and below 0.5, got {smoothing}"),
            "write a number such as 0.1, or remove this key",
        ),
        rule(
            smoothing == 0.0 || smooths,
            "preference.label_smoothing",
            "only the loss types \"sigmoid\" and \"robust\" of DPO smooth labels",
            "remove it, or write loss_type = \"sigmoid\"",
        ),
        zero_or_more("preference.rpo_alpha", preference.rpo_alpha.unwrap_or(0.0)),
    ]
}

/// Keys that only one of the losses has.
fn keys_of_one_loss(preference: &PreferenceSection) -> Vec<Rule> {
    let is_dpo = is_dpo(preference);
    vec![
        rule(
            is_dpo || (preference.rpo_alpha.is_none() && preference.loss_type == LossType::Sigmoid),
            if preference.rpo_alpha.is_some() { "preference.rpo_alpha" } else { "preference.loss_type" },
            "is a key of DPO; ORPO has one loss, which includes the cross entropy of the chosen",
            "remove it, or write loss = \"dpo\"",
        ),
        rule(
            !is_dpo || preference.prompt_loss.is_none(),
            "preference.prompt_loss",
            "is a key of ORPO: in DPO only answers count",
            "remove it, or write loss = \"orpo\"",
        ),
    ]
}

/// Where the reference comes from.
fn reference(config: &RunConfig, preference: &PreferenceSection) -> Vec<Rule> {
    let starts_elsewhere = config.reference_is_precomputed_always();
    vec![
        rule(
            is_dpo(preference) || preference.precompute_ref_log_probs.is_none(),
            "preference.precompute_ref_log_probs",
            "ORPO has no reference",
            "remove it, or write loss = \"dpo\"",
        ),
        rule(
            preference.precompute_ref_log_probs != Some(false) || !starts_elsewhere,
            "preference.precompute_ref_log_probs",
            "is false, and after the first step the reference could not be computed any more: only an adapter that starts at zero leaves it \
             in the base",
            "remove it, or train a new adapter without modules_to_save and without tokens of its own",
        ),
    ]
}

/// What pairs of answers do not go with in data and evaluation. `formats`: those of all sources.
fn data(config: &RunConfig, formats: &[RecordFormat]) -> Vec<Rule> {
    let data = &config.data;
    let are_pairs = |format: &RecordFormat| matches!(format, RecordFormat::Auto | RecordFormat::Preference);
    vec![
        rule(
            formats.iter().all(are_pairs),
            "data.format",
            "[preference] trains on pairs of answers, and this format has one",
            "remove it: the shape of prompt and answers is recognized by the keys",
        ),
        rule(
            matches!(data.train_on, None | Some(TrainOn::Assistant | TrainOn::Last)),
            "data.train_on",
            "[preference] compares answers, so that only what the assistant writes counts",
            "remove it; preference.prompt_loss is for ORPO's cross entropy",
        ),
        rule(
            data.overflow != Some(OverflowPolicy::Split),
            "data.overflow",
            "is \"split\", and a pair is never divided",
            "write \"truncate\" or \"drop\"",
        ),
        rule(
            config.eval.exact_match_prompts == 0,
            "eval.exact_match_prompts",
            "[preference] has no reference answers; held-out pairs are evaluated by their rewards",
            "remove it",
        ),
    ]
}

fn is_dpo(preference: &PreferenceSection) -> bool {
    preference.loss == PreferenceLoss::Dpo
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use crate::config::RunConfig;

    const RECIPE: &str = "model = 'm'\n[lora]\n[preference]\n[data]\npath = 'd.jsonl'\n";

    fn read(overrides: &[&str]) -> Result<RunConfig, String> {
        let overrides: Vec<String> = overrides.iter().map(ToString::to_string).collect();
        RunConfig::from_toml(RECIPE, Path::new("x.toml"), &overrides).map_err(|error| error.to_string())
    }

    #[test]
    fn keys_of_the_other_loss_and_data_of_single_texts_are_refused() {
        for (overrides, word) in [
            (&["preference.beta=0"][..], "preference.beta"),
            (&["preference.label_smoothing=0.5"], "below 0.5"),
            (&["preference.label_smoothing=0.1", "preference.loss_type=hinge"], "smooth labels"),
            (&["preference.loss=orpo", "preference.rpo_alpha=1"], "is a key of DPO"),
            (&["preference.loss=orpo", "preference.loss_type=ipo"], "is a key of DPO"),
            (&["preference.prompt_loss=false"], "is a key of ORPO"),
            (&["preference.loss=orpo", "preference.precompute_ref_log_probs=true"], "ORPO has no reference"),
            (&["preference.precompute_ref_log_probs=false", "mode=full", "lora="], "could not be computed any more"),
            (&["preference.precompute_ref_log_probs=false", "data.new_tokens=['<x>']"], "tokens of its own"),
            (&["data.format=chat"], "trains on pairs of answers"),
            (&["data.train_on=all"], "compares answers"),
            (&["data.overflow=split"], "never divided"),
            (&["eval.exact_match_prompts=3", "data.eval_fraction=0.1"], "no reference answers"),
            (&["preference=", "data.format=preference"], "add the section [preference]"),
        ] {
            let message = read(overrides).unwrap_err();
            assert!(message.contains(word), "{overrides:?}: {message}");
        }
    }

    #[test]
    fn the_base_is_the_reference_only_of_an_adapter_that_starts_at_zero() {
        let precomputed = |overrides: &[&str]| read(overrides).unwrap().reference_is_precomputed_always();
        assert!(!precomputed(&[]) && !precomputed(&["bnb_4bit={}"]) && !precomputed(&["base=nvfp4", "lora="]));
        assert!(precomputed(&["mode=full", "lora="]));
        assert!(precomputed(&["lora.init_from=a"]) && precomputed(&["lora.modules_to_save=['lm_head']"]));
        assert!(precomputed(&["data.new_tokens=['<x>']"]) && precomputed(&["data.new_special_tokens=['<x>']"]));
    }

    #[test]
    fn rates_of_pairs_are_lower_than_those_of_texts() {
        let rate = |overrides: &[&str]| read(overrides).unwrap().learning_rate();
        assert_eq!((rate(&[]), rate(&["mode=full", "lora="])), (1e-5, 1e-6));
        assert_eq!((rate(&["preference="]), rate(&["train.learning_rate=3e-5"])), (2e-4, 3e-5));
        let config = read(&["preference.loss=orpo"]).unwrap();
        assert_eq!(RunConfig::from_toml(&config.to_toml(), Path::new("x.toml"), &[]).unwrap(), config);
    }
}
