#![doc = include_str!("../README.md")]

pub mod config;
mod counted;
mod counts;
pub mod error;
pub mod families;
pub mod folder;
pub mod groups;
pub mod json;
mod layer_values;
pub mod lora;
mod lora_init;
pub mod mixer;
pub mod module_names;
pub mod modules;
mod naming;
mod new_tokens;
pub mod python_json;
pub mod quantization;
pub mod rope;
pub mod router;
pub mod shapes;
mod sharing;
pub mod spec;
pub mod tensor_spec;
pub mod tensors;
pub mod text_names;
mod token_rows;
pub mod values;

pub use config::{ModelConfig, generation_eos_token_ids, generation_pad_token_id, generation_settings};
pub use counted::{counted, grouped, plural};
pub use error::ArchError;
pub use families::{FAMILIES, Family, WRAPPERS, Wrapper};
pub use folder::{CONFIG_FILE, GENERATION_CONFIG_FILE};
pub use groups::{LayerGroups, MlpGroups, SharedGroups};
pub use lora::{
    LoraConfig, adapter_layout, lora_tensor_names, magnitude_tensor_name, name_in_adapter, saved_tensor_name,
    text_name_in_adapter, token_rows_name,
};
pub use lora_init::LoraInit;
pub use mixer::{
    AttentionSpec, CacheSize, DeltaNetSpec, DeltaProjections, KeysAndValues, Mixer, MixerGroups, MixerSizes,
    OutputGate, QkNorm, ShortConvSpec,
};
pub use module_names::{ALL_LINEAR, ByPattern, PathPattern, TargetModules};
pub use modules::{GroupKind, GroupSpec, ModuleSpec, OutputOrder, PieceSpec};
pub use naming::{FINAL_NORM, LayerPath, Naming};
pub use quantization::{QUANTIZATION_CONFIG, Quantization};
pub use rope::{LongRopeFactors, QueryScale, Rope, RopeScaling};
pub use router::{ExpertGroups, RouterScores, RouterSpec, SharedExpertSpec};
pub use spec::{
    Activation, ExpertNames, LayerNorms, LayerSpec, MlpSpec, ModelSpec, NormNames, PerLayerInputs, SwigluConstants,
};
pub use tensor_spec::{Role, TensorSpec};
pub use tensors::{EMBEDDING, HEAD, PER_LAYER_EMBEDDING, is_stored_in_f32};
pub use text_names::{TextLayout, is_other_part, layer_of, other_modules, stored_name, text_name};
pub use token_rows::{TokenIndices, token_runs};
pub use values::{Moment, Recompute, Value, ValueKind};
