//! Names of a text model's tensors and modules inside a checkpoint with other parts, such as a vision tower, and alone.
//!
//! Everything in this program has the names of the text model alone; files are translated where they are read and written. Reading goes by the names
//! themselves, so it needs no config.json.
//! Trade-off: the other parts are known by the names that the supported checkpoints give them. A part with another name is reported as a tensor
//! without a place, not left aside.

use std::collections::BTreeSet;

/// The first parts of the names of tensors that do not belong to the text model.
const OTHER_PARTS: [&str; 15] = [
    "audio_tower.",
    "embed_audio.",
    "embed_vision.",
    "model.audio_tower.",
    "model.embed_audio.",
    "model.embed_vision.",
    "model.multi_modal_projector.",
    "model.vision_embedder.",
    "model.vision_tower.",
    "model.visual.",
    // Layers that predict more tokens (Qwen3.5).
    "mtp.",
    "multi_modal_projector.",
    "vision_embedder.",
    "vision_tower.",
    "visual.",
];

/// Where a checkpoint has the tensors of its text model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TextLayout {
    /// Under the names of the text model alone: `model.layers.0...`, `lm_head`.
    #[default]
    Alone,
    /// `language_model.model.layers.0...`, `language_model.lm_head`.
    LanguageModelFirst,
    /// `model.language_model.layers.0...`, `lm_head`: the names of the modules in transformers, and so those of PEFT.
    ModelFirst,
}

impl TextLayout {
    /// Returns the layout that these names of tensors have.
    pub fn of<'a>(names: impl IntoIterator<Item = &'a str>) -> Self {
        let layout = |name: &str| {
            [Self::LanguageModelFirst, Self::ModelFirst].into_iter().find(|layout| name.starts_with(layout.prefix()))
        };
        names.into_iter().find_map(layout).unwrap_or_default()
    }

    fn prefix(self) -> &'static str {
        match self {
            Self::Alone => "",
            Self::LanguageModelFirst => "language_model.",
            Self::ModelFirst => "model.language_model.",
        }
    }

    /// Translates a text-model name into the checkpoint's.
    pub fn name_of(self, name: &str) -> String {
        match (self, name.strip_prefix("model.")) {
            (Self::ModelFirst, Some(inner)) => format!("{}{inner}", self.prefix()),
            (Self::ModelFirst, None) | (Self::Alone, _) => name.to_owned(),
            (Self::LanguageModelFirst, _) => format!("{}{name}", self.prefix()),
        }
    }
}

/// What files and modules of transformers call attention's gates (LFM3); some files have the name of the module.
const GATES: [&str; 2] = [".self_attn.gate_proj.", ".self_attn.g_proj."];

/// Returns what the text model alone calls a tensor or module; a name in none of the layouts stays as it is.
pub fn text_name(name: &str) -> String {
    let [in_files, of_modules] = GATES;
    if name.contains(in_files) {
        return text_name(&name.replace(in_files, of_modules));
    }
    if let Some(inner) = name.strip_prefix(TextLayout::ModelFirst.prefix()) {
        return format!("model.{inner}");
    }
    name.strip_prefix(TextLayout::LanguageModelFirst.prefix()).unwrap_or(name).to_owned()
}

/// Returns what transformers calls a tensor in the files that it writes.
pub fn stored_name(name: &str) -> String {
    let [in_files, of_modules] = GATES;
    name.replace(of_modules, in_files)
}

/// Returns the modules that hold these tensors of other parts, by the names that versions of transformers have for them.
pub fn other_modules<'a>(names: impl IntoIterator<Item = &'a str>) -> Vec<String> {
    let part = |name: &str| OTHER_PARTS.iter().find(|part| name.starts_with(**part)).copied();
    let parts: BTreeSet<&str> =
        names.into_iter().filter_map(part).map(|part| part.trim_start_matches("model.")).collect();
    let module = |part: &str| part.trim_end_matches('.').to_owned();
    parts.into_iter().flat_map(|part| [module(part), format!("model.{}", module(part))]).collect()
}

/// Returns whether a tensor or module belongs to another part of a checkpoint than its text model.
pub fn is_other_part(name: &str) -> bool {
    OTHER_PARTS.iter().any(|part| name.starts_with(part))
}

/// Returns the number of the layer that a path such as `model.layers.3.mlp.up_proj` lies in.
pub fn layer_of(path: &str) -> Option<usize> {
    path.strip_prefix("model.layers.")?.split_once('.')?.0.parse().ok()
}

pub(crate) fn is_expert(path: &str) -> bool {
    path.contains(".experts.")
}
