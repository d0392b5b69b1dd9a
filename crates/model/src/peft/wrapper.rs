//! Settings of an adapter whose model is the text model of a larger checkpoint, such as one with a vision tower.
//!
//! PEFT matches them against the modules of the whole checkpoint. There `model.layers.0.self_attn.q_proj` is
//! `model.language_model.layers.0.self_attn.q_proj`, and a plain `q_proj` would also be a projection of the tower.
//! Trade-off: settings that no short expression describes are written, and read, as a list of all modules.

use std::collections::BTreeMap;

use firebrick_arch::{ByPattern, HEAD, LoraConfig, ModelSpec, PathPattern, TargetModules, TextLayout, text_name};

/// The layers of a text model, in a larger checkpoint and alone: a module of another part does not match.
const LAYERS: &str = r"model\.(?:language_model\.)?layers\..*\.";

/// Returns these settings as PEFT matches them against the whole checkpoint. `modules` are those of the adapter's matrices.
pub(super) fn settings_for_wrapper(config: &LoraConfig, spec: &ModelSpec, modules: &[String]) -> LoraConfig {
    let paths = paths_in(TextLayout::ModelFirst, modules);
    let saved = spec.tensors().into_iter().map(|tensor| tensor.name).chain([HEAD.to_owned()]);
    let saved = saved.filter(|name| config.saves_tensor(name));
    let module =
        |name: String| TextLayout::ModelFirst.name_of(name.trim_end_matches(".weight").trim_end_matches(".bias"));
    let mut saved: Vec<String> = saved.map(module).collect();
    saved.dedup();
    LoraConfig {
        target_modules: targets(spec, &paths),
        exclude_modules: None,
        layers_to_transform: None,
        rank_pattern: config.rank_pattern.renamed(&paths),
        alpha_pattern: config.alpha_pattern.renamed(&paths),
        modules_to_save: config.modules_to_save.as_ref().map(|_| saved),
        ..config.clone()
    }
}

/// Returns an expression that matches exactly these of the model's modules, if their last names are enough for one; otherwise the list.
fn targets(spec: &ModelSpec, paths: &BTreeMap<String, String>) -> TargetModules {
    let mut names: Vec<&str> = paths.keys().filter_map(|path| path.rsplit('.').next()).collect();
    names.sort_unstable();
    names.dedup();
    let pattern =
        PathPattern::new(&format!("{LAYERS}(?:{})", names.join("|"))).expect("names of modules are expressions");
    let is_exact = spec.modules().all(|(module, _)| pattern.matches(&module.path) == paths.contains_key(&module.path));
    if is_exact { TargetModules::Matching(pattern) } else { TargetModules::Named(paths.values().cloned().collect()) }
}

/// Rewrites adapter settings to text-model names. `modules` are those of the adapter's matrices.
pub(super) fn settings_for_text(config: LoraConfig, layout: TextLayout, modules: &[String]) -> LoraConfig {
    let paths = paths_in(layout, modules);
    let saved = config.modules_to_save.as_ref().map(|names| names.iter().map(|name| text_name(name)).collect());
    let config = LoraConfig {
        rank_pattern: renamed_back(&config.rank_pattern, &paths),
        alpha_pattern: renamed_back(&config.alpha_pattern, &paths),
        modules_to_save: saved,
        ..config
    };
    if modules.iter().all(|module| config.adapts(module)) {
        return config;
    }
    let excludes = |path: &str| config.exclude_modules.as_ref().is_some_and(|excluded| excluded.matches(path));
    let is_target = |path: &str| config.target_modules.matches(path) && !excludes(path);
    let targets = paths.iter().filter(|(_, path)| is_target(path)).map(|(module, _)| module.clone()).collect();
    LoraConfig { target_modules: TargetModules::Named(targets), exclude_modules: None, ..config }
}

/// Returns the paths in this layout of modules of the text model.
fn paths_in(layout: TextLayout, modules: &[String]) -> BTreeMap<String, String> {
    modules.iter().map(|module| (module.clone(), layout.name_of(module))).collect()
}

fn renamed_back<T: Copy + PartialEq>(table: &ByPattern<T>, paths: &BTreeMap<String, String>) -> ByPattern<T> {
    table.renamed(&paths.iter().map(|(module, path)| (path.clone(), module.clone())).collect())
}

#[cfg(test)]
mod tests {
    use firebrick_arch::EMBEDDING;
    use serde_json::json;

    use super::super::adapter::lora_modules;
    use super::*;
    use crate::test_config::tiny;

    fn settings(json: serde_json::Value) -> LoraConfig {
        serde_json::from_value(json).unwrap()
    }

    /// Returns the names of the adapter's tensors, and its settings for a wrapper.
    fn written(config: &LoraConfig) -> (Vec<String>, LoraConfig) {
        let spec = tiny(&[]).unwrap().spec;
        let names: Vec<String> = spec.tensors_of(config).into_iter().map(|tensor| tensor.name).collect();
        let settings = settings_for_wrapper(config, &spec, &lora_modules(&names));
        (names, settings)
    }

    #[test]
    fn settings_for_a_wrapper_match_no_tower() {
        let all = [
            json!({"target": "all-linear"}),
            json!({"target": ["q_proj", "down_proj"]}),
            json!({"target": ["q_proj", "down_proj"], "layers_to_transform": [1]}),
            json!({"target": r"model\.layers\.0\.self_attn\.[qk]_proj", "exclude_modules": ["k_proj"]}),
        ];
        for json in all {
            let config = settings(json);
            let (names, found) = written(&config);
            for (module, _) in tiny(&[]).unwrap().spec.modules() {
                let path = TextLayout::ModelFirst.name_of(&module.path);
                assert_eq!(found.target_modules.matches(&path), config.adapts(&module.path), "{path}");
            }
            for tower in ["model.vision_tower.encoder.layers.0.self_attn.q_proj", "model.visual.blocks.0.mlp.down_proj"]
            {
                assert!(!found.target_modules.matches(tower), "{tower}");
            }
            let back = settings_for_text(found, TextLayout::ModelFirst, &lora_modules(&names));
            for (module, _) in tiny(&[]).unwrap().spec.modules() {
                assert_eq!(back.adapts(&module.path), config.adapts(&module.path), "{}", module.path);
            }
        }
    }

    #[test]
    fn ranks_keep_their_modules_on_a_wrapper() {
        let config = settings(json!({
            "target": ["q_proj", "v_proj"], "r": 2, "rank_pattern": {"model.layers.1.self_attn.q_proj": 3, "v_proj": 4},
            "modules_to_save": ["embed_tokens", "model.norm"]
        }));
        let (names, found) = written(&config);
        assert_eq!(found.rank_pattern.get("model.language_model.layers.1.self_attn.q_proj"), Some(3));
        assert_eq!(found.rank_pattern.get("model.language_model.layers.0.self_attn.q_proj"), None);
        assert_eq!(found.rank_pattern.get("model.language_model.layers.0.self_attn.v_proj"), Some(4));
        let saved = ["model.language_model.embed_tokens", "model.language_model.norm"].map(str::to_owned);
        assert_eq!(found.modules_to_save, Some(saved.to_vec()));
        let back = settings_for_text(found, TextLayout::ModelFirst, &lora_modules(&names));
        for (module, _) in tiny(&[]).unwrap().spec.modules() {
            assert_eq!(back.adapts(&module.path), config.adapts(&module.path));
            if config.adapts(&module.path) {
                assert_eq!(back.rank_of(&module.path), config.rank_of(&module.path), "{}", module.path);
            }
        }
        assert!(back.saves_tensor(EMBEDDING) && !back.saves_tensor(HEAD));
    }
}
