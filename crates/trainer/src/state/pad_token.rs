//! The padding token in `generation_config.json`, where a run chose another than the model's: batches of `generate` are padded with it.
//!
//! Trade-off: the file is written a second time, after the other files of the folder.

use std::path::Path;

use firebrick_arch::GENERATION_CONFIG_FILE;
use firebrick_arch::json::{parse_object, read_text};
use serde_json::{Map, Value, json};

use crate::error::RunError;
use crate::storage::write_atomically;

const KEY: &str = "pad_token_id";

/// Reads the padding token that the generation settings of a folder name; `None` if they name none or there are no settings.
///
/// # Errors
/// A file that cannot be read or is no JSON object.
pub fn read(folder: &Path) -> Result<Option<u32>, RunError> {
    // Older models write -1 for none.
    Ok(settings(folder)?.get(KEY).and_then(Value::as_u64).and_then(|id| u32::try_from(id).ok()))
}

/// Writes the padding token into the generation settings of a folder that weights were saved in; unchanged settings are not touched.
///
/// # Errors
/// A file that cannot be read or written.
pub fn write(folder: &Path, id: u32) -> Result<(), RunError> {
    let mut settings = settings(folder)?;
    if settings.insert(KEY.to_owned(), json!(id)) == Some(json!(id)) {
        return Ok(());
    }
    let text = format!("{:#}\n", Value::Object(settings));
    Ok(write_atomically(&folder.join(GENERATION_CONFIG_FILE), text.as_bytes())?)
}

fn settings(folder: &Path) -> Result<Map<String, Value>, RunError> {
    let path = folder.join(GENERATION_CONFIG_FILE);
    if !path.is_file() {
        return Ok(Map::new());
    }
    Ok(parse_object(&read_text(&path)?, &path)?)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn settings_gain_the_padding_token_and_keep_the_rest() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(read(folder.path()).unwrap(), None);
        write(folder.path(), 3).unwrap();
        assert_eq!(read(folder.path()).unwrap(), Some(3));
        let path = folder.path().join(GENERATION_CONFIG_FILE);
        let same = "{\"pad_token_id\": 4, \"eos_token_id\": [1, 2]}";
        fs::write(&path, same).unwrap();
        write(folder.path(), 4).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), same);
        write(folder.path(), 5).unwrap();
        let written: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
        assert_eq!(written, json!({"pad_token_id": 5, "eos_token_id": [1, 2]}));
    }
}
