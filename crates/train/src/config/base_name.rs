//! What a saved adapter calls its base model: a Hub id only where it is known to be one.
//!
//! Other programs resolve a text such as `models/SmolLM2` as a Hub id, so a folder is named by its absolute path, which is none.
//! Trade-off: the path holds only on this machine; `lora.base_model_name_or_path` gives an id.

use std::path::{Path, absolute};

/// The Hub id where the folder is a snapshot in a Hub cache (`models--ORG--NAME/snapshots/HASH`), otherwise its absolute path.
pub(crate) fn base_name(folder: &Path) -> String {
    let path = absolute(folder).unwrap_or_else(|_| folder.to_path_buf());
    hub_id(&path).unwrap_or_else(|| path.display().to_string())
}

fn hub_id(snapshot: &Path) -> Option<String> {
    let snapshots = snapshot.parent().filter(|parent| parent.ends_with("snapshots"))?;
    let repository = snapshots.parent()?.file_name()?.to_str()?.strip_prefix("models--")?;
    // Hub ids have no double hyphen, so that the cache can write `/` as one.
    Some(repository.replacen("--", "/", 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_snapshot_in_a_hub_cache_is_named_by_its_id() {
        let snapshot = "cache/hub/models--HuggingFaceTB--SmolLM2-135M/snapshots/93efa2f0";
        assert_eq!(base_name(Path::new(snapshot)), "HuggingFaceTB/SmolLM2-135M");
        assert_eq!(base_name(Path::new("hub/models--gpt2/snapshots/607a30d7")), "gpt2");
        for folder in ["models/SmolLM2-135M", "./tiny", "models--a--b", "a/snapshots/b"] {
            let name = base_name(Path::new(folder));
            assert!(Path::new(&name).is_absolute() && name.ends_with(folder.trim_start_matches("./")), "{name}");
        }
    }
}
