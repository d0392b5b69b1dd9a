//! The matrices of a LoRA adapter, and the adapter folder as a whole.
//!
//! Each adapted module has `base_model.model.{path}.lora_A.weight` `[r, in]` and `.lora_B.weight` `[out, r]`, and those
//! are the names of its tensors everywhere but in the files of adapters of larger checkpoints, whose paths are longer. PyTorch `.bin` adapters are not
//! read.

use std::collections::BTreeMap;
use std::fs::create_dir_all;
use std::path::Path;

use firebrick_arch::json::read_text;
use firebrick_arch::{
    ArchError, EMBEDDING, HEAD, ModelConfig, ModelSpec, TextLayout, adapter_layout, counted, is_other_part, layer_of,
    lora_tensor_names, magnitude_tensor_name, name_in_adapter, saved_tensor_name, text_name_in_adapter,
    token_rows_name,
};
use serde::Serialize;
use serde_json::json;

use super::wrapper::{settings_for_text, settings_for_wrapper};
use super::{ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE, LoraConfig, TargetModules, config_json, parse_config};
use crate::checkpoint::write::companions::write_file;
use crate::checkpoint::{TensorF32, adapter_shapes, read_adapter_f32, safetensors_names, write_safetensors_f32};
use crate::error::ModelError;

/// PEFT's prefix of a module's path.
const PREFIX: &str = "base_model.model.";
const A_SUFFIX: &str = ".lora_A.weight";
const B_SUFFIX: &str = ".lora_B.weight";
const MAGNITUDE_SUFFIX: &str = ".lora_magnitude_vector";
/// No vocabulary has a larger id.
const MAX_TOKEN_ID: usize = 1 << 26;

type Shapes = BTreeMap<String, Vec<usize>>;

/// Reads the settings of an adapter folder. If PEFT finds the targets by a regular expression or by layer number, the adapter's tensors show the
/// result.
///
/// # Errors
/// Missing or damaged files, settings that plain LoRA does not cover, tensors that are not LoRA matrices of a Llama
/// projection, targets that do not agree with the tensors, a matrix without its partner, and a rank other than `r`.
pub fn read_adapter_config(dir: &Path) -> Result<LoraConfig, ModelError> {
    let (config_path, weights_path) = (dir.join(ADAPTER_CONFIG_FILE), dir.join(ADAPTER_WEIGHTS_FILE));
    let not_there = |missing, advice| ModelError::NotThere { dir: dir.to_path_buf(), missing, advice };
    if !config_path.is_file() {
        return Err(not_there(ADAPTER_CONFIG_FILE, "Give a LoRA adapter folder in PEFT's format"));
    }
    if !weights_path.is_file() {
        let advice =
            "Copy it here; an old adapter_model.bin becomes one by loading it with PEFT and calling save_pretrained";
        return Err(not_there(ADAPTER_WEIGHTS_FILE, advice));
    }
    let stored = safetensors_names(&weights_path)?;
    let layout = adapter_layout(stored.iter().map(String::as_str));
    let names: Vec<String> = stored.iter().map(|name| text_name_in_adapter(name)).collect();
    let config = parse_config(&read_text(&config_path)?, &config_path, &lora_modules(&names))?;
    let config = match layout {
        TextLayout::Alone => config,
        _ => settings_for_text(config, layout, &lora_modules(&names)),
    };
    let modules = module_paths(&weights_path, &names, &config)?;
    check_targets(&config, &modules, &config_path, &weights_path)?;
    check_shapes(&config, &modules, &weights_path, &adapter_shapes(&weights_path)?)?;
    Ok(config)
}

/// Checks that the matrices have the ranks of the settings, before anything is allocated by them.
fn check_shapes(config: &LoraConfig, modules: &[String], path: &Path, shapes: &Shapes) -> Result<(), ModelError> {
    for module in modules {
        if let Some(parameter) = config.parameter_of(module) {
            check_parameter(path, shapes, module, config.rank_of(&parameter))?;
            continue;
        }
        let ((a, b), r) = (lora_tensor_names(module), config.rank_of(module));
        check_rank(path, shapes, a, 0, r)?;
        check_rank(path, shapes, b, 1, r)?;
        check_magnitude(path, shapes, module, config)?;
    }
    for table in [EMBEDDING, HEAD] {
        let ids = config.trainable_token_indices.as_ref().map_or(&[][..], |rows| rows.of(table));
        let (name, largest) = (token_rows_name(table), ids.iter().max().copied().unwrap_or(0));
        let rows = shapes.get(&name).and_then(|shape| shape.first());
        if largest > MAX_TOKEN_ID || (!ids.is_empty() && rows.is_some_and(|rows| *rows != ids.len())) {
            let problem = format!(
                "has shape {:?}, but trainable_token_indices in {ADAPTER_CONFIG_FILE} has {} ids, up to {largest}",
                shapes.get(&name),
                ids.len()
            );
            return Err(ModelError::adapter_tensor(path, name, problem));
        }
    }
    Ok(())
}

/// Reads an adapter folder that PEFT or [`Decoder::save_adapter`](crate::Decoder::save_adapter) wrote: its settings, and
/// its matrices by their names in the file.
pub fn read_adapter(dir: &Path) -> Result<(LoraConfig, BTreeMap<String, TensorF32>), ModelError> {
    let config = read_adapter_config(dir)?;
    Ok((config, read_adapter_f32(&dir.join(ADAPTER_WEIGHTS_FILE))?))
}

/// Returns a model as the adapter in `dir` needs it: with the rows of embedding and head that the adapter has and the model's folder lacks, which are
/// those of tokens added in training, and with fused experts if the adapter is of their parameters.
///
/// # Errors
/// Those of [`read_adapter_config`]; rows that neither the model nor the adapter has.
pub fn grow_for_adapter(config: ModelConfig, dir: &Path) -> Result<ModelConfig, ModelError> {
    let lora = read_adapter_config(dir)?;
    let mut config = config.for_adapter(Some(&lora));
    let path = dir.join(ADAPTER_WEIGHTS_FILE);
    let whole = adapter_shapes(&path)?;
    let tables: &[&str] =
        if config.spec.tie_word_embeddings && !lora.unties() { &[EMBEDDING] } else { &[EMBEDDING, HEAD] };
    let saved = |table: &str| whole.get(&saved_tensor_name(table)).and_then(|shape| shape.first().copied());
    let trained = |table: &str| lora.trainable_token_indices.as_ref().map_or(&[][..], |rows| rows.of(table));
    let needed = |table: &&str| saved(table).or(trained(table).iter().max().map(|id| id + 1)).unwrap_or(0);
    let (stored, rows) = (config.spec.vocab_size, tables.iter().map(needed).max().unwrap_or(0));
    for &table in tables.iter().filter(|table| saved(table).is_none()) {
        if let Some(id) = (stored..rows).find(|id| !trained(table).contains(id)) {
            let problem = format!("is missing for token {id}, and the base has {stored} rows");
            return Err(ModelError::adapter_tensor(&path, token_rows_name(table), problem));
        }
    }
    config.grow_vocabulary(rows);
    Ok(config)
}

/// Checks that the adapter in `dir` can be the start of an adapter with these settings on this model: the same rank, scale and modules,
/// and matrices of the model's shapes. Reads no matrix.
///
/// # Errors
/// Those of [`read_adapter_config`]; [`ModelError::OtherAdapter`] with every setting that differs; a matrix that is missing or has another
/// shape.
pub fn check_adapter(dir: &Path, spec: &ModelSpec, expected: &LoraConfig) -> Result<(), ModelError> {
    let found = as_written_in(expected, read_adapter_config(dir)?, spec);
    let settings = settings_of(&found, spec);
    let differences: Vec<String> = settings
        .iter()
        .zip(settings_of(expected, spec))
        .filter(|(found, expected)| *found != expected)
        .map(|((key, found), (_, expected))| format!("{key} = {found}, not {expected}"))
        .collect();
    if !differences.is_empty() {
        let is_set = |(_, value): &&(&str, String)| !["nothing", "{}"].contains(&value.as_str());
        let set: Vec<_> = settings.iter().filter(is_set).map(|(key, value)| format!("{key} = {value}")).collect();
        let settings = set.join(", ");
        return Err(ModelError::OtherAdapter { dir: dir.to_path_buf(), differences, settings });
    }
    let path = dir.join(ADAPTER_WEIGHTS_FILE);
    let shapes = adapter_shapes(&path)?;
    for tensor in spec.adapter_tensors(expected)? {
        let problem = match shapes.get(&tensor.name) {
            Some(shape) if *shape == tensor.shape => continue,
            Some(shape) => format!("has shape {shape:?}, but this model needs {:?}{}", tensor.shape, of_base(&found)),
            None => "is missing, and this model needs it".to_owned(),
        };
        return Err(ModelError::adapter_tensor(&path, tensor.name, problem));
    }
    Ok(())
}

/// Returns the settings `found` in the words of `expected` where both mean the same modules, ranks and scales of this model: a list, an expression
/// and the names of a larger checkpoint may.
fn as_written_in(expected: &LoraConfig, found: LoraConfig, spec: &ModelSpec) -> LoraConfig {
    let LoraConfig { modules_to_save, rank_pattern, alpha_pattern, .. } = expected.clone();
    let saved = |lora: &LoraConfig| -> Vec<String> {
        let names = spec.tensors().into_iter().map(|tensor| tensor.name).chain([HEAD.to_owned()]);
        names.filter(|name| lora.saves_tensor(name)).collect()
    };
    let found = if saved(&found) == saved(expected) { LoraConfig { modules_to_save, ..found } } else { found };
    let modules = |lora: &LoraConfig| -> Vec<String> {
        spec.modules().map(|(module, _)| module.path).filter(|path| lora.adapts(path)).collect()
    };
    let adapted = modules(expected);
    if modules(&found) != adapted {
        return found;
    }
    let same = LoraConfig { rank_pattern, alpha_pattern, ..found.clone() };
    let computes = |lora: &LoraConfig, path: &String| (lora.rank_of(path), lora.scaling_of(path));
    let is_same = adapted.iter().all(|path| computes(&found, path) == computes(&same, path));
    let found = if is_same { same } else { found };
    LoraConfig {
        target_modules: expected.target_modules.clone(),
        exclude_modules: expected.exclude_modules.clone(),
        layers_to_transform: expected.layers_to_transform.clone(),
        ..found
    }
}

/// Returns the settings that two adapters must share to continue one from the other, as a recipe writes them.
fn settings_of(config: &LoraConfig, spec: &ModelSpec) -> [(&'static str, String); 12] {
    let mut names = config.target_modules.names(spec);
    names.sort();
    names.dedup();
    [
        ("r", config.r.to_string()),
        ("alpha", config.lora_alpha.to_string()),
        ("use_rslora", config.use_rslora.to_string()),
        ("use_dora", config.use_dora.to_string()),
        ("target", format!("{names:?}")),
        (
            "target_parameters",
            or_nothing(&config.target_parameters, |names| {
                let mut names = names.clone();
                names.sort();
                format!("{names:?}")
            }),
        ),
        ("exclude_modules", or_nothing(&config.exclude_modules, |names| json!(names).to_string())),
        ("layers_to_transform", or_nothing(&config.layers_to_transform, |layers| format!("{layers:?}"))),
        ("rank_pattern", as_toml(&config.rank_pattern)),
        ("alpha_pattern", as_toml(&config.alpha_pattern)),
        ("trainable_token_indices", or_nothing(&config.trainable_token_indices, |rows| json!(rows).to_string())),
        ("modules_to_save", or_nothing(&config.modules_to_save, |names| format!("{names:?}"))),
    ]
}

/// Writes a table as recipes do: `{ "q_proj" = 8 }`.
fn as_toml(pattern: &impl Serialize) -> String {
    let value = json!(pattern);
    let entries: Vec<String> =
        value.as_object().into_iter().flatten().map(|(name, value)| format!("{name:?} = {value}")).collect();
    if entries.is_empty() { "{}".to_owned() } else { format!("{{ {} }}", entries.join(", ")) }
}

fn or_nothing<T>(value: &Option<T>, show: impl Fn(&T) -> String) -> String {
    value.as_ref().map_or_else(|| "nothing".to_owned(), show)
}

/// Writes the folder of an adapter of this model, as PEFT loads it: matrices by their names in PEFT, settings and a short model
/// card, each file atomically. Files of an older adapter in the folder are replaced.
pub(crate) fn write_adapter(
    dir: &Path,
    config: &LoraConfig,
    model: &ModelConfig,
    tensors: &BTreeMap<String, TensorF32>,
) -> Result<(), ModelError> {
    create_dir_all(dir).map_err(ModelError::io("create", dir))?;
    let names: Vec<String> = tensors.keys().cloned().collect();
    let layout = model.wrapper.map_or(TextLayout::Alone, |_| TextLayout::ModelFirst);
    let stored: BTreeMap<_, _> = tensors.iter().map(|(name, tensor)| (name_in_adapter(name, layout), tensor)).collect();
    write_safetensors_f32(&dir.join(ADAPTER_WEIGHTS_FILE), &stored)?;
    let (settings, targets) = match layout {
        TextLayout::Alone => (config.clone(), target_names(config, &model.spec, &names)),
        _ => {
            let settings = settings_for_wrapper(config, &model.spec, &lora_modules(&names));
            let targets = settings.target_modules.names(&model.spec);
            (settings, targets)
        }
    };
    write_file(&dir.join(ADAPTER_CONFIG_FILE), config_json(&settings, &targets))?;
    write_file(&dir.join("README.md"), model_card(config, model))
}

/// Returns the targets as a list for PEFT: those of the settings, or for "all-linear" the model's names of all adapted modules. No path of an expert
/// ends in one of them, so PEFT finds the same modules.
fn target_names(config: &LoraConfig, spec: &ModelSpec, tensors: &[String]) -> Vec<String> {
    let mut names = config.target_modules.names(spec);
    if config.target_modules == TargetModules::AllLinear {
        let modules = lora_modules(tensors);
        names.retain(|name| {
            let single = TargetModules::Named(vec![name.clone()]);
            modules.iter().any(|module| single.matches(module))
        });
    }
    names
}

/// Returns the modules of the file's matrices, after checking that it holds nothing else.
fn module_paths(path: &Path, names: &[String], config: &LoraConfig) -> Result<Vec<String>, ModelError> {
    let has_rows = config.trainable_token_indices.is_some();
    let is_rows = |name: &str| has_rows && [EMBEDDING, HEAD].iter().any(|table| name == token_rows_name(table));
    let is_saved =
        |name: &str| is_rows(name) || name.strip_prefix(PREFIX).is_some_and(|name| config.saves_tensor(name));
    let is_of_tower = |name: &str| name.strip_prefix(PREFIX).is_some_and(is_other_part);
    match names.iter().find(|name| lora_module(name).is_none() && !is_saved(name)) {
        Some(name) if is_of_tower(name) => {
            let problem = "adapts another part than the text model, which alone is loaded here. Train an adapter of the \
                           text model only, or merge this one into its base with PEFT and give the merged folder as \
                           the model";
            Err(ModelError::adapter_tensor(path, name, problem))
        }
        Some(name) => {
            let problem = "is not a LoRA matrix of a layer's linear module \
                           (base_model.model.model.layers.N.*.lora_A.weight or lora_B.weight), and modules_to_save does not \
                           name it. Merge this adapter into its base with PEFT and give the merged folder as the model";
            Err(ModelError::adapter_tensor(path, name, problem))
        }
        None => Ok(lora_modules(names)),
    }
}

/// Returns the settings of a stored adapter without targets that the model ignores ([`ModelSpec::is_ignored`]). Other programs have modules for them,
/// and train pairs that change nothing.
pub(crate) fn without_ignored(config: &LoraConfig, spec: &ModelSpec) -> LoraConfig {
    let TargetModules::Named(names) = &config.target_modules else { return config.clone() };
    let names = names.iter().filter(|name| !spec.is_ignored(name)).cloned().collect();
    LoraConfig { target_modules: TargetModules::Named(names), ..config.clone() }
}

/// Removes the matrices of such modules from those of the adapter in `dir`, and warns if there are any.
pub(crate) fn leave_ignored(tensors: &mut BTreeMap<String, TensorF32>, spec: &ModelSpec, dir: &Path) {
    let ignored: Vec<String> = tensors.extract_if(.., |name, _| spec.is_ignored(name)).map(|(name, _)| name).collect();
    if let Some(first) = ignored.first() {
        tracing::warn!(
            "{}: {} of layers that read the keys and values of another layer, such as `{first}`, change nothing and are left out",
            dir.display(),
            counted(ignored.len(), "tensor")
        );
    }
}

/// Refuses an adapter with tensors of layers that a model of this many lacks.
pub(crate) fn check_layers(
    dir: &Path,
    tensors: &BTreeMap<String, TensorF32>,
    layers: usize,
    config: &LoraConfig,
) -> Result<(), ModelError> {
    let layer = |name: &String| name.split_once(".layers.")?.1.split('.').next()?.parse::<usize>().ok();
    let highest = tensors.keys().filter_map(layer).max();
    let Some(highest) = highest.filter(|highest| *highest >= layers) else { return Ok(()) };
    let base = config.base_model_name_or_path.as_ref().filter(|base| !base.is_empty());
    let called = base.map(|base| format!("; the adapter calls it {base}")).unwrap_or_default();
    let (dir, last, advice) = (dir.to_path_buf(), layers.saturating_sub(1), format!("Give that as the model{called}"));
    Err(ModelError::MoreLayers { dir, highest, last, advice })
}

/// Returns the modules of these LoRA matrices, each once.
pub(super) fn lora_modules(names: &[String]) -> Vec<String> {
    let mut modules: Vec<String> = names.iter().filter_map(|name| lora_module(name)).map(str::to_owned).collect();
    modules.sort();
    modules.dedup();
    modules
}

/// Returns the module of a LoRA matrix or a magnitude vector.
fn lora_module(name: &str) -> Option<&str> {
    let suffixes = [A_SUFFIX, B_SUFFIX, MAGNITUDE_SUFFIX];
    let stem = suffixes.into_iter().find_map(|suffix| name.strip_suffix(suffix))?;
    // Loading onto a model checks that its layer has such a module.
    stem.strip_prefix(PREFIX).filter(|module| layer_of(module).is_some())
}

/// Checks that settings and matrices name the same modules.
fn check_targets(
    config: &LoraConfig,
    modules: &[String],
    config_path: &Path,
    weights_path: &Path,
) -> Result<(), ModelError> {
    let is_target = |module: &&String| config.adapts(module) || config.parameter_of(module).is_some();
    if let Some(module) = modules.iter().find(|module| !is_target(module)) {
        let problem = "is not a target by the settings of adapter_config.json: the two files do not belong together";
        return Err(ModelError::adapter_tensor(weights_path, lora_tensor_names(module).0, problem));
    }
    let TargetModules::Named(names) = &config.target_modules else { return Ok(()) };
    if config.exclude_modules.is_some() || config.modules_to_save.is_some() {
        // These settings may leave a target without any module.
        return Ok(());
    }
    let unused = names.iter().find(|name| {
        let single = TargetModules::Named(vec![(*name).clone()]);
        !modules.iter().any(|module| single.matches(module))
    });
    match unused {
        Some(name) => Err(ArchError::BadValue {
            path: config_path.to_path_buf(),
            key: "target_modules".to_owned(),
            got: format!("\"{name}\""),
            expected: format!("{ADAPTER_WEIGHTS_FILE} has no matrix for it: the two files do not belong together"),
        }
        .into()),
        None => Ok(()),
    }
}

/// Checks that a matrix is there and has rank `r` along `rank_axis`.
fn check_rank(path: &Path, shapes: &Shapes, name: String, rank_axis: usize, r: usize) -> Result<(), ModelError> {
    let problem = match shapes.get(&name) {
        None => "is missing, though its partner is there: save the adapter again".to_owned(),
        Some(shape) if shape.len() == 2 && shape[rank_axis] == r => return Ok(()),
        Some(shape) => format!("has shape {shape:?}, but r in {ADAPTER_CONFIG_FILE} is {r}"),
    };
    Err(ModelError::adapter_tensor(path, name, problem))
}

/// Returns what an adapter whose shapes do not fit says of its base.
pub(crate) fn of_base(config: &LoraConfig) -> String {
    match config.base_model_name_or_path.as_deref().filter(|base| !base.is_empty()) {
        Some(base) => format!(". The adapter was trained on {base}: give that as the model"),
        None => ". The adapter was trained on another model".to_owned(),
    }
}

/// Checks that the matrices of a parameter of experts have whole ranks `r`, equally many.
fn check_parameter(path: &Path, shapes: &Shapes, module: &str, r: usize) -> Result<(), ModelError> {
    let (a_name, b_name) = lora_tensor_names(module);
    let Some(a) = shapes.get(&a_name) else { return check_rank(path, shapes, a_name, 0, r) };
    let ranks = a.first().copied().unwrap_or(0);
    if ranks == 0 || !ranks.is_multiple_of(r) {
        let problem = format!("has shape {a:?}, which is no multiple of r = {r} in {ADAPTER_CONFIG_FILE}");
        return Err(ModelError::adapter_tensor(path, a_name, problem));
    }
    check_rank(path, shapes, b_name, 1, ranks)
}

/// Checks that a module has magnitudes, one per output, exactly if the settings have DoRA.
fn check_magnitude(path: &Path, shapes: &Shapes, module: &str, config: &LoraConfig) -> Result<(), ModelError> {
    let name = magnitude_tensor_name(module);
    let outputs = &shapes[&lora_tensor_names(module).1][..1];
    let problem = match (shapes.get(&name), config.use_dora) {
        (None, false) => return Ok(()),
        (Some(shape), true) if shape == outputs => return Ok(()),
        (Some(shape), true) => format!("has shape {shape:?}, but the module's lora_B has {outputs:?}"),
        (None, true) => format!("is missing, though use_dora in {ADAPTER_CONFIG_FILE} is true"),
        (Some(_), false) => format!("belongs to DoRA, but use_dora in {ADAPTER_CONFIG_FILE} is not true"),
    };
    Err(ModelError::adapter_tensor(path, name, problem))
}

/// Builds a README.md with the front matter that model hubs read.
fn model_card(config: &LoraConfig, model: &ModelConfig) -> String {
    let base = config.base_model_name_or_path.as_deref().unwrap_or("its base model");
    // A hub accepts only an id such as `owner/name` here, not a folder.
    let is_id = base.split('/').count() == 2
        && !base.starts_with(['.', '/', '~'])
        && !base.contains(['\\', ' '])
        && !Path::new(base).exists();
    let base_line = if is_id { format!("base_model: {base}\n") } else { String::new() };
    let targets = match &config.target_modules {
        TargetModules::AllLinear => "all linear projections".to_owned(),
        TargetModules::Named(names) => names.join(", "),
        TargetModules::Matching(pattern) => format!("`{}`", pattern.as_str()),
    };
    let (r, alpha) = (config.r, config.lora_alpha);
    let kind = match (config.use_dora, config.use_rslora) {
        (false, false) => "LoRA",
        (false, true) => "rsLoRA",
        (true, false) => "DoRA",
        (true, true) => "rank-stabilized DoRA",
    };
    // Added tokens need rows first.
    let class = model.wrapper.map_or("AutoModelForCausalLM", |_| "AutoModelForImageTextToText");
    let (more, grown) = match config.trainable_token_indices {
        None => ("", ""),
        Some(_) => (
            ", AutoTokenizer",
            "tokenizer = AutoTokenizer.from_pretrained(\"path/to/this/folder\")\n\
             if len(tokenizer) > model.get_input_embeddings().num_embeddings:\n    \
             model.resize_token_embeddings(len(tokenizer))\n",
        ),
    };
    format!(
        "---\n{base_line}library_name: peft\npipeline_tag: text-generation\ntags:\n- lora\n---\n\n\
         # {kind} adapter\n\nFor `{base}`: rank {r}, alpha {alpha}, on {targets}.\n\n\
         ```python\nfrom peft import PeftModel\nfrom transformers import {class}{more}\n\n\
         model = {class}.from_pretrained(\"{base}\")\n{grown}\
         model = PeftModel.from_pretrained(model, \"path/to/this/folder\")\n```\n"
    )
}

#[cfg(test)]
mod tests {
    use std::fs::{read_to_string, remove_file, write};

    use tempfile::{TempDir, tempdir};

    use super::*;
    use crate::test_config::tiny;
    use firebrick_arch::{ModelConfig, WRAPPERS};

    fn lora(names: &[&str]) -> LoraConfig {
        LoraConfig {
            r: 2,
            lora_alpha: 4.0,
            target_modules: TargetModules::from_names(names.iter().map(|&name| name.to_owned()).collect()),
            base_model_name_or_path: Some("owner/tiny".to_owned()),
            ..LoraConfig::default()
        }
    }

    fn matrices(lora: &LoraConfig, config: &ModelConfig) -> BTreeMap<String, TensorF32> {
        let tensors = config.spec.adapter_tensors(lora).unwrap();
        let matrix_of = |tensor: firebrick_arch::TensorSpec| {
            let start = if tensor.role == firebrick_arch::Role::LoraA { 0.5 } else { -3.0 };
            let values = (0..tensor.elements()).map(|i| start + i as f32).collect();
            (tensor.name, TensorF32 { shape: tensor.shape, values })
        };
        tensors.into_iter().map(matrix_of).collect()
    }

    /// Returns the settings with equivalent targets written the same way.
    fn resolved(config: LoraConfig) -> LoraConfig {
        let target_modules = config.target_modules.resolve(&tiny(&[]).unwrap().spec).unwrap();
        LoraConfig { target_modules, ..config }
    }

    fn written(names: &[&str]) -> (TempDir, LoraConfig, BTreeMap<String, TensorF32>) {
        let (dir, lora, config) = (tempdir().unwrap(), lora(names), tiny(&[]).unwrap());
        let tensors = matrices(&lora, &config);
        write_adapter(dir.path(), &lora, &config, &tensors).unwrap();
        (dir, lora, tensors)
    }

    fn rewrite_tensors(dir: &Path, change: impl FnOnce(&mut BTreeMap<String, TensorF32>)) -> String {
        let path = dir.join(ADAPTER_WEIGHTS_FILE);
        let mut tensors = read_adapter_f32(&path).unwrap();
        change(&mut tensors);
        write_safetensors_f32(&path, &tensors).unwrap();
        read_adapter(dir).unwrap_err().to_string()
    }

    #[test]
    fn an_adapter_starts_only_its_own_settings() {
        let (dir, lora, _) = written(&["q_proj", "v_proj"]);
        let spec = tiny(&[]).unwrap().spec;
        check_adapter(dir.path(), &spec, &lora).unwrap();
        let paths = spec.modules().map(|(module, _)| module.path);
        let whole = paths.filter(|path| path.ends_with("q_proj") || path.ends_with("v_proj")).collect();
        // Other words for the same modules.
        check_adapter(dir.path(), &spec, &LoraConfig { target_modules: TargetModules::Named(whole), ..lora.clone() })
            .unwrap();
        let other = LoraConfig { r: 4, lora_alpha: 16.0, ..lora.clone() };
        let message = check_adapter(dir.path(), &spec, &other).unwrap_err().to_string();
        assert!(message.contains("it has r = 2, not 4; alpha = 4, not 16. Write"), "{message}");
        let (config, tensors) = read_adapter(dir.path()).unwrap();
        check_layers(dir.path(), &tensors, 2, &config).unwrap();
        let message = check_layers(dir.path(), &tensors, 1, &config).unwrap_err().to_string();
        assert!(message.contains("goes up to layer 1, and the model to layer 0: it was trained on"), "{message}");
        let wider = tiny(&[("hidden_size", 16.into())]).unwrap().spec;
        let message = check_adapter(dir.path(), &wider, &lora).unwrap_err().to_string();
        assert!(message.contains("has shape [2, 8], but this model needs [2, 16]"), "{message}");
    }

    #[test]
    fn an_adapter_of_a_wrapper_starts_its_settings() {
        let (dir, mut config) = (tempdir().unwrap(), tiny(&[]).unwrap());
        config.wrapper = WRAPPERS.first();
        let json = json!({
            "r": 2, "target": ["q_proj", "v_proj"], "modules_to_save": ["embed_tokens", "norm"],
            "rank_pattern": {"model.layers.1.self_attn.q_proj": 3}, "alpha_pattern": {"v_proj": 7}
        });
        let lora: LoraConfig = serde_json::from_value(json).unwrap();
        write_adapter(dir.path(), &lora, &config, &matrices(&lora, &config)).unwrap();
        let stored = safetensors_names(&dir.path().join(ADAPTER_WEIGHTS_FILE)).unwrap();
        assert!(stored.iter().all(|name| name.contains("language_model")), "{stored:?}");
        check_adapter(dir.path(), &config.spec, &lora).unwrap();
        for other in [json!({"rank_pattern": {"v_proj": 3}}), json!({"modules_to_save": ["norm"]})] {
            let mut changed = serde_json::to_value(&lora).unwrap();
            changed.as_object_mut().unwrap().extend(other.as_object().unwrap().clone());
            let changed: LoraConfig = serde_json::from_value(changed).unwrap();
            let key = other.as_object().unwrap().keys().next().unwrap();
            let message = check_adapter(dir.path(), &config.spec, &changed).unwrap_err().to_string();
            assert!(message.contains(key.as_str()), "{message}");
        }
    }

    #[test]
    fn missing_settings_are_named() {
        let (dir, ..) = written(&["q_proj"]);
        remove_file(dir.path().join(ADAPTER_CONFIG_FILE)).unwrap();
        assert!(read_adapter(dir.path()).unwrap_err().to_string().contains("no adapter_config.json"));
    }

    #[test]
    fn what_is_no_lora_matrix_is_refused() {
        let names = [
            "base_model.model.model.embed_tokens.lora_embedding_A",
            "base_model.model.lm_head.lora_A.weight",
            "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude",
            "model.layers.0.self_attn.q_proj.lora_A.weight",
            "base_model.model.model.layers.x.self_attn.q_proj.lora_A.weight",
        ];
        for name in names {
            let (dir, ..) = written(&["q_proj"]);
            let message = rewrite_tensors(dir.path(), |tensors| {
                tensors.insert(name.to_owned(), TensorF32 { shape: vec![2, 8], values: vec![0.0; 16] });
            });
            assert!(message.contains(name) && message.contains("not a LoRA matrix"), "{message}");
        }
    }

    #[test]
    fn ranks_and_partners_are_checked() {
        let key = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight";
        let (dir, ..) = written(&["q_proj"]);
        let message = rewrite_tensors(dir.path(), |tensors| tensors.get_mut(key).unwrap().shape.reverse());
        assert!(message.contains(key) && message.contains("r in adapter_config.json is 2"), "{message}");
        let message = rewrite_tensors(dir.path(), |tensors| drop(tensors.remove(key)));
        assert!(message.contains(key) && message.contains("is missing"), "{message}");
    }

    #[test]
    fn magnitudes_are_there_exactly_with_use_dora() {
        let key = "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector";
        let vector = |length| TensorF32 { shape: vec![length], values: vec![1.0; length] };
        let (dir, ..) = written(&["q_proj"]);
        let message = rewrite_tensors(dir.path(), |tensors| drop(tensors.insert(key.to_owned(), vector(8))));
        assert!(message.contains(key) && message.contains("use_dora in adapter_config.json is not true"), "{message}");
        let (dir, dora) = (tempdir().unwrap(), LoraConfig { use_dora: true, ..lora(&["q_proj"]) });
        let config = tiny(&[]).unwrap();
        let tensors = matrices(&dora, &config);
        assert_eq!(tensors.len(), 6);
        write_adapter(dir.path(), &dora, &config, &tensors).unwrap();
        assert_eq!(read_adapter(dir.path()).unwrap(), (resolved(dora), tensors));
        let message = rewrite_tensors(dir.path(), |tensors| tensors.get_mut(key).unwrap().shape.push(1));
        assert!(message.contains("has shape [8, 1]"), "{message}");
        let message = rewrite_tensors(dir.path(), |tensors| drop(tensors.remove(key)));
        assert!(message.contains(key) && message.contains("is missing"), "{message}");
    }

    #[test]
    fn targets_and_matrices_must_agree() {
        let (dir, ..) = written(&["q_proj"]);
        for (names, part) in [(&["k_proj"][..], "not a target by the settings"), (&["q_proj", "k_proj"], "\"k_proj\"")]
        {
            let targets: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
            write(dir.path().join(ADAPTER_CONFIG_FILE), config_json(&lora(names), &targets)).unwrap();
            let message = read_adapter(dir.path()).unwrap_err().to_string();
            assert!(message.contains(part) && message.contains("do not belong together"), "{message}");
        }
    }

    #[test]
    fn a_base_folder_is_not_written_as_a_hub_id() {
        let card = |base: &str| {
            let lora = LoraConfig { base_model_name_or_path: Some(base.to_owned()), ..lora(&["q_proj"]) };
            model_card(&lora, &tiny(&[]).unwrap())
        };
        assert!(card("owner/name").contains("base_model:"));
        assert!(!card("/models/tiny").contains("base_model:") && !card("./tiny").contains("base_model:"));
    }

    #[test]
    fn impossible_numbers_are_refused_before_allocation() {
        let (dir, lora, _) = written(&["q_proj"]);
        let path = dir.path().join(ADAPTER_CONFIG_FILE);
        let good: serde_json::Value = serde_json::from_str(&read_to_string(&path).unwrap()).unwrap();
        assert_eq!(resolved(read_adapter_config(dir.path()).unwrap()), lora);
        for (key, value) in [
            ("r", json!(3)),
            ("r", json!(100_000_000)),
            ("r", json!(1u64 << 63)),
            ("rank_pattern", json!({ "q_proj": 100_000_000 })),
            ("rank_pattern", json!({ "q_proj": 3 })),
            ("rank_pattern", json!({ "q_proj": 0 })),
            ("alpha_pattern", json!({ "q_proj": 1e300 })),
            ("lora_alpha", json!(-1e300)),
            ("lora_dropout", json!(1e300)),
            ("trainable_token_indices", json!([u64::MAX])),
        ] {
            let mut settings = good.clone();
            settings[key] = value;
            write(&path, settings.to_string()).unwrap();
            let error = read_adapter_config(dir.path()).unwrap_err().to_string();
            assert!(
                error.contains(if key == "rank_pattern" { "rank" } else { key }) || error.contains("r in"),
                "{error}"
            );
        }
    }
}
