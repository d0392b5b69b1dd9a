//! What a saved adapter calls its base model: a Hub id only where it is known to be one.
//!
//! Other programs resolve a text such as `models/SmolLM2` as a Hub id, so a folder is named by its absolute path, which is none.
//! Trade-off: the path holds only on this machine; `lora.base_model_name_or_path` gives an id.

use std::path::{Path, absolute};

use firebrick_hub::{HubId, RepoKind};

/// The Hub id where the text is one, or the folder a repository of a Hub cache (`models--ORG--NAME`) or a snapshot of one
/// (`models--ORG--NAME/snapshots/HASH`); otherwise the folder's absolute path.
pub(crate) fn base_name(folder: &Path) -> String {
    let is_here = folder.exists() || folder.parent().is_some_and(Path::is_dir);
    let id = folder.to_str().filter(|_| !is_here).and_then(|text| HubId::parse(RepoKind::Model, text, None));
    if let Some(id) = id {
        return id.name;
    }
    let path = absolute(folder).unwrap_or_else(|_| folder.to_path_buf());
    hub_id(&path).unwrap_or_else(|| path.display().to_string())
}

fn hub_id(snapshot: &Path) -> Option<String> {
    let snapshots = snapshot.parent().filter(|parent| parent.ends_with("snapshots"));
    let is_repository = snapshot.join("snapshots").is_dir();
    let repository = snapshots.and_then(Path::parent).or(is_repository.then_some(snapshot))?;
    let repository = repository.file_name()?.to_str()?.strip_prefix("models--")?;
    // Hub ids have no double hyphen, so that the cache can write `/` as one.
    Some(repository.replacen("--", "/", 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_id_or_what_is_in_a_hub_cache_is_named_by_an_id() {
        let snapshot = "cache/hub/models--HuggingFaceTB--SmolLM2-135M/snapshots/93efa2f0";
        assert_eq!(base_name(Path::new(snapshot)), "HuggingFaceTB/SmolLM2-135M");
        assert_eq!(base_name(Path::new("hub/models--gpt2/snapshots/607a30d7")), "gpt2");
        assert_eq!(base_name(Path::new("HuggingFaceTB/SmolLM2-135M@main")), "HuggingFaceTB/SmolLM2-135M");
        let cache = tempfile::tempdir().unwrap();
        let root = cache.path().join("models--a--b");
        std::fs::create_dir_all(root.join("snapshots")).unwrap();
        assert_eq!(base_name(&root), "a/b");
        for folder in ["src/SmolLM2-135M", "./tiny", "models--a--b", "a/snapshots/b"] {
            let name = base_name(Path::new(folder));
            assert!(Path::new(&name).is_absolute() && name.ends_with(folder.trim_start_matches("./")), "{name}");
        }
    }
}
