//! The Hub's address, the token and the location of its cache, from the environment variables of `huggingface_hub`.
//!
//! Not supported: tokens from git credential stores.

use std::fs;
use std::path::PathBuf;

use crate::address::without_secrets;

/// Addresses and secrets for access to the Hub.
#[derive(Clone, PartialEq, Eq)]
pub struct HubSettings {
    /// URL without a trailing slash: `HF_ENDPOINT`, or `https://huggingface.co`. Print [`HubSettings::shown_endpoint`] instead.
    pub endpoint: String,
    /// Cache folder: `HF_HUB_CACHE`, `HF_HOME/hub`, or `huggingface/hub` in the user's cache folder.
    pub cache: PathBuf,
    /// `HF_TOKEN`, or the token that `hf auth login` wrote to `HF_HOME/token`.
    pub token: Option<String>,
    /// `HF_HUB_OFFLINE`: only the cache is used.
    pub is_offline: bool,
}

// Implemented by hand so that no log shows the token.
impl std::fmt::Debug for HubSettings {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let token = self.token.as_ref().map(|_| "(hidden)");
        formatter
            .debug_struct("HubSettings")
            .field("endpoint", &self.shown_endpoint())
            .field("cache", &self.cache)
            .field("token", &token)
            .field("is_offline", &self.is_offline)
            .finish()
    }
}

impl HubSettings {
    /// Reads the environment variables of this process.
    pub fn from_environment() -> Self {
        Self::from_variables(|name| std::env::var(name).ok())
    }

    /// Returns the address as it may be printed.
    pub fn shown_endpoint(&self) -> String {
        without_secrets(&self.endpoint)
    }

    /// Reads variables through `read`.
    pub fn from_variables(read: impl Fn(&str) -> Option<String>) -> Self {
        let variable = |name: &str| read(name).map(|value| value.trim().to_owned()).filter(|value| !value.is_empty());
        let is_on = |name: &str| {
            variable(name)
                .is_some_and(|value| ["1", "ON", "YES", "TRUE"].contains(&value.to_ascii_uppercase().as_str()))
        };
        let user = variable("HOME").or_else(|| variable("USERPROFILE")).map(PathBuf::from).unwrap_or_default();
        let path = |name: &str| {
            let value = variable(name)?;
            Some(value.strip_prefix("~/").map_or_else(|| PathBuf::from(&value), |rest| user.join(rest)))
        };
        let home = path("HF_HOME")
            .unwrap_or_else(|| path("XDG_CACHE_HOME").unwrap_or_else(|| user.join(".cache")).join("huggingface"));
        let cache = path("HF_HUB_CACHE").or_else(|| path("HUGGINGFACE_HUB_CACHE")).unwrap_or_else(|| home.join("hub"));
        let token = variable("HF_TOKEN").or_else(|| variable("HUGGING_FACE_HUB_TOKEN")).or_else(|| {
            let file = path("HF_TOKEN_PATH").unwrap_or_else(|| home.join("token"));
            fs::read_to_string(file).ok().map(|token| token.trim().to_owned()).filter(|token| !token.is_empty())
        });
        let endpoint = variable("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".to_owned());
        Self {
            endpoint: endpoint.trim_end_matches('/').to_owned(),
            cache,
            token: token.filter(|_| !is_on("HF_HUB_DISABLE_IMPLICIT_TOKEN")),
            is_offline: ["HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"].into_iter().any(is_on),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn settings(variables: &[(&str, &str)]) -> HubSettings {
        let find =
            |name: &str| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned());
        HubSettings::from_variables(find)
    }

    #[test]
    fn variables_are_read_as_huggingface_hub_reads_them() {
        let plain = settings(&[("HOME", "/u")]);
        assert_eq!(plain.endpoint, "https://huggingface.co");
        assert_eq!(plain.cache, Path::new("/u/.cache/huggingface/hub"));
        assert!(plain.token.is_none() && !plain.is_offline);
        assert_eq!(settings(&[("HOME", "/u"), ("XDG_CACHE_HOME", "/x")]).cache, Path::new("/x/huggingface/hub"));
        assert_eq!(settings(&[("HOME", "/u"), ("HF_HOME", "~/hf")]).cache, Path::new("/u/hf/hub"));
        assert_eq!(settings(&[("HF_HOME", "/h"), ("HF_HUB_CACHE", "/c")]).cache, Path::new("/c"));
        let set = settings(&[("HF_ENDPOINT", "http://m/"), ("HF_TOKEN", " t\n"), ("HF_HUB_OFFLINE", "yes")]);
        assert_eq!((set.endpoint.as_str(), set.token.as_deref(), set.is_offline), ("http://m", Some("t"), true));
        assert!(!format!("{set:?}").contains("\"t\""));
        assert!(!settings(&[("HF_HUB_OFFLINE", "0")]).is_offline);
    }

    #[test]
    fn the_token_of_a_login_is_found() {
        let home = tempfile::tempdir().unwrap();
        fs::write(home.path().join("token"), "secret\n").unwrap();
        let home = home.path().to_str().unwrap();
        assert_eq!(settings(&[("HF_HOME", home)]).token.as_deref(), Some("secret"));
        assert_eq!(settings(&[("HF_HOME", home), ("HF_TOKEN", "other")]).token.as_deref(), Some("other"));
        assert_eq!(settings(&[("HF_HOME", home), ("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")]).token, None);
    }
}
