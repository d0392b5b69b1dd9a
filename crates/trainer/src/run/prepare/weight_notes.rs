//! Notes on the weights that a run starts from: how quantized ones are used, and an adapter that was made for another model.
//!
//! Trade-off: bases are compared by their ids alone, since paths differ between machines.

use std::path::Path;

use firebrick_arch::{ModelConfig, Role};
use firebrick_kernels::BaseStorage;
use firebrick_model::HfFolder;
use firebrick_model::peft::read_adapter_config;
use firebrick_precision::Format;

use crate::config::RunConfig;
use crate::hub::hub_id;
use crate::plan::Plan;

/// Returns a note if the adapter's base has another Hub id than the model in `folder`; only shapes are a reason to refuse it. Paths are not compared.
pub(super) fn start_note(from: &Path, recipe: &RunConfig, folder: &Path) -> Option<String> {
    let name = recipe.lora.as_ref()?.init_from.clone()?;
    let made_for = read_adapter_config(from).ok()?.base_model_name_or_path?;
    let base = recipe.adapter(folder)?.base_model_name_or_path?;
    let is_id = |name: &String| hub_id(Path::new(name)).is_some();
    let differs = [&made_for, &base].into_iter().all(is_id) && !made_for.eq_ignore_ascii_case(&base);
    differs.then(|| format!("adapter: {name} was made for {made_for}, and this run trains on {base}"))
}

/// Returns a note on how quantized weights of the folder are used; `None` for an unquantized folder.
pub(super) fn base_note(weights: &HfFolder, model_config: &ModelConfig, plan: &Plan) -> Option<String> {
    let stored = weights.quantized_weights();
    let count: usize = stored.values().sum();
    if count == 0 {
        return None;
    }
    let names = stored.into_keys().collect::<Vec<_>>().join(" and ");
    let begin = format!("weights: {count} are stored in {names}");
    let of_experts = weights.names().filter(|name| model_config.spec.is_mxfp4(name)).count();
    if of_experts == count && matches!(plan.base.value, BaseStorage::Frozen(_)) {
        return Some(format!("{begin}; they are experts, which stay so: their codes are kept byte for byte"));
    }
    let BaseStorage::Frozen(Format::Quantized(format)) = plan.base.value else {
        return Some(format!("{begin}; they are dequantized, because the recipe names no quantized base"));
    };
    let kept = weights.names().filter(|name| weights.stored_format(name) == Some(format)).count();
    let mut note = match count - kept {
        0 => format!("{begin}, the format of the base: their codes are kept byte for byte"),
        changed => format!("{begin}; {changed} of them are dequantized and quantized again to {format}"),
    };
    let tensors = model_config.spec.tensors();
    let dense = tensors.iter().filter(|tensor| tensor.role == Role::Projection && weights.skips(&tensor.name));
    let compute = Format::Float(plan.compute.value);
    let bytes = |shape: &[usize]| compute.bytes(shape).saturating_sub(format.bytes(shape));
    let more: Vec<usize> = dense.map(|tensor| bytes(&tensor.shape)).collect();
    if !more.is_empty() {
        let mib = more.iter().sum::<usize>() as f64 / f64::from(1 << 20);
        note +=
            &format!("; {} projections stay unquantized as in the folder: {mib:.0} MiB more than planned", more.len());
    }
    Some(note)
}
