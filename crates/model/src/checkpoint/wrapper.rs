//! Names and non-text tensors of the checkpoint being written.
//!
//! Other parts are copied byte for byte. Only what the base stores quantized is written in the format of the folder, whose config.json describes no
//! quantization of theirs.
//! Trade-off: without a base the folder holds the text model alone: enough for a checkpoint of a run. Its names are those of the modules in
//! transformers, which then loads the text model and starts the other parts at random, with a warning.

use firebrick_arch::{ModelConfig, TextLayout, is_other_part, other_modules, stored_name};
use firebrick_precision::FloatType;

use crate::checkpoint::read::convert::{bytes_of, stored_as};
use crate::checkpoint::{HfFolder, TensorInfo};
use crate::error::ModelError;

/// The names and other parts of a written folder.
#[derive(Clone, Copy)]
pub(super) struct WrapperTensors<'a> {
    base: Option<&'a HfFolder>,
    layout: TextLayout,
}

impl<'a> WrapperTensors<'a> {
    /// Describes a folder with the names and other parts of `base`; plain if the model is the whole checkpoint.
    pub(super) fn new(config: &ModelConfig, base: Option<&'a HfFolder>) -> Self {
        if config.wrapper.is_none() {
            return Self { base: None, layout: TextLayout::Alone };
        }
        Self { base, layout: base.map_or(TextLayout::ModelFirst, HfFolder::layout) }
    }

    /// Returns the name in the folder of a tensor of the model.
    pub(super) fn name_of(&self, name: &str) -> String {
        stored_name(&self.layout.name_of(name))
    }

    /// Lists the tensors of other parts, for a folder of this format.
    pub(super) fn tensors(&self, dtype: FloatType) -> Result<Vec<(String, TensorInfo)>, ModelError> {
        let Some(base) = self.base else { return Ok(Vec::new()) };
        let listed = base.other_parts().map(|name| {
            let mut info = base.info(name)?;
            if base.is_quantized(name) {
                info.dtype = stored_as(dtype);
            }
            Ok((name.to_owned(), info))
        });
        listed.collect()
    }

    /// Reads a tensor of another part, as [`WrapperTensors::tensors`] lists it; `None` for the model's.
    pub(super) fn read(&self, name: &str, dtype: FloatType) -> Result<Option<Vec<u8>>, ModelError> {
        let Some(base) = self.base.filter(|_| is_other_part(name)) else { return Ok(None) };
        if base.is_quantized(name) {
            return bytes_of(name, &base.read_f32(name, &base.info(name)?.shape)?, dtype).map(Some);
        }
        Ok(Some(base.read(name)?.bytes))
    }

    /// Names the modules of other parts, as transformers calls them.
    pub(super) fn modules(&self) -> Vec<String> {
        self.base.map_or_else(Vec::new, |base| other_modules(base.other_parts()))
    }

    /// Returns what transformers calls a module of the model.
    pub(super) fn module(&self, path: &str) -> String {
        let layout = self.base.map_or_else(TextLayout::default, |_| TextLayout::ModelFirst);
        layout.name_of(path)
    }
}
