//! Model folders: what they hold (`read`), how they are written (`write`), and the forms in which they store weights (`quantized`, `experts`, and
//! `wrapper` for the text model of a larger checkpoint).

pub(crate) mod description;
pub(crate) mod experts;
mod quantized;
pub(crate) mod read;
mod tensor;
mod wrapper;
pub(crate) mod write;

pub use firebrick_arch::folder::{INDEX_FILE, WEIGHTS_FILE};

pub use self::quantized::Bnb4bit;
pub use self::read::HfFolder;
pub(crate) use self::read::ahead::{CodesOrValues, Limits, Request, Values, keeps_narrow_scales, read_ahead};
pub(crate) use self::read::complete::OLD_BUFFER;
pub(crate) use self::read::convert::{not_writable, stored_as};
pub(crate) use self::read::shard::Shard;
pub(crate) use self::read::{adapter_shapes, open_adapter, read_adapter_f32, safetensors_names};
pub use self::tensor::{TensorBytes, TensorF32, TensorInfo};
pub(crate) use self::write::bnb::write_bnb_folder;
pub(crate) use self::write::mxfp4::write_mxfp4_folder;
pub(crate) use self::write::{Fetched, stored_format, write_folder, write_hf_folder, write_safetensors_f32};
pub use self::write::{float_type_of, write_safetensors};
