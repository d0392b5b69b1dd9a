//! Selects the backend of a run, with the reason: from the command line, the recipe, or the hardware of this machine.
//!
//! Trade-off: this decides only what is compiled in, from the presence of a driver. The `firebrick` binary then selects one of the compiled backends.

use std::env;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use saphyr_parser::{Event, Parser};

/// A compute backend; its name is also the name of the cargo feature.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Backend {
    /// Burn's own CPU backend: the default, and always built in.
    Flex,
    /// CPU through candle's kernels.
    Candle,
    /// Vulkan, Metal, DirectX.
    Wgpu,
    /// NVIDIA.
    Cuda,
}

impl Backend {
    /// Every backend, in the order of the written features.
    pub(crate) const ALL: [Self; 4] = [Self::Flex, Self::Candle, Self::Wgpu, Self::Cuda];

    /// Returns the name in recipes, on the command line, and as cargo feature.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Flex => "flex",
            Self::Candle => "candle",
            Self::Wgpu => "wgpu",
            Self::Cuda => "cuda",
        }
    }

    /// Parses a backend's name; `None` for `auto`; fails on any other word, naming `origin`.
    pub(crate) fn parse(name: &str, origin: &str) -> Result<Option<Self>> {
        match Self::ALL.into_iter().find(|backend| backend.name() == name) {
            Some(backend) => Ok(Some(backend)),
            None if name == "auto" => Ok(None),
            None => bail!("unknown backend `{name}` in {origin}: use auto, flex, candle, wgpu or cuda"),
        }
    }
}

/// The facts on which `auto` depends.
pub(crate) struct Machine {
    /// The NVIDIA driver, if it was found.
    pub(crate) nvidia_driver: Option<PathBuf>,
    /// Whether the system is Apple's, which has Metal for wgpu.
    pub(crate) macos: bool,
}

impl Machine {
    /// Looks for the driver in the folders that loaders use; opens nothing, starts nothing.
    pub(crate) fn detect() -> Self {
        Self { nvidia_driver: candidates().into_iter().find(|path| path.exists()), macos: cfg!(target_os = "macos") }
    }
}

/// Lists the possible paths of the NVIDIA driver library, then of `nvidia-smi`.
fn candidates() -> Vec<PathBuf> {
    let split =
        |name: &str| env::var_os(name).map(|list| env::split_paths(&list).collect::<Vec<_>>()).unwrap_or_default();
    let (library, tool) = if cfg!(windows) { ("nvcuda.dll", "nvidia-smi.exe") } else { ("libcuda.so.1", "nvidia-smi") };
    let usual = [
        "/usr/lib/x86_64-linux-gnu",
        "/usr/lib/aarch64-linux-gnu",
        "/usr/lib64",
        "/usr/lib",
        "/usr/lib/wsl/lib",
        "/usr/local/nvidia/lib64",
        "C:\\Windows\\System32",
    ];
    let libraries =
        split("LD_LIBRARY_PATH").into_iter().chain(usual.map(PathBuf::from)).map(|folder| folder.join(library));
    let tools = split("PATH").into_iter().map(|folder| folder.join(tool));
    libraries.chain(tools).collect()
}

/// The backends to build, with the reason in words.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Choice {
    /// The backends to build.
    backends: Vec<Backend>,
    /// Completes "building with these features because ...".
    pub(crate) reason: String,
}

impl Choice {
    /// Chooses this backend, and always `flex`.
    pub(crate) fn one(backend: Backend, reason: String) -> Self {
        let others = Some(backend).filter(|backend| *backend != Backend::Flex);
        Self { backends: [Backend::Flex].into_iter().chain(others).collect(), reason }
    }

    /// Chooses what a released program for the target `triple` has: one backend for each kind of device. candle is left out, whose device, the
    /// CPU, flex drives as well.
    pub(crate) fn release(triple: &str) -> Self {
        let (cuda, reason) = match triple.contains("apple") {
            true => (None, "a release for Apple's systems has every kind of device"),
            false => (Some(Backend::Cuda), "a release has every kind of device"),
        };
        Self { backends: [Backend::Flex, Backend::Wgpu].into_iter().chain(cuda).collect(), reason: reason.to_owned() }
    }

    /// Chooses every backend in one binary.
    pub(crate) fn all(reason: String) -> Self {
        Self { backends: compiled_backends(), reason }
    }

    /// Returns the Cargo features of the program's package.
    pub(crate) fn features(&self) -> String {
        self.backends.iter().map(|backend| backend.name()).collect::<Vec<_>>().join(",")
    }
}

/// Lists the backends that can be compiled here. Apple's systems have no CUDA driver to bind to.
pub(crate) fn compiled_backends() -> Vec<Backend> {
    Backend::ALL.into_iter().filter(|backend| !(cfg!(target_os = "macos") && *backend == Backend::Cuda)).collect()
}

/// Chooses by `requested`, a backend's name and the place where it was named; `None` means `auto`.
pub(crate) fn choose(requested: Option<(&str, &str)>, machine: &Machine) -> Result<Choice> {
    let (prefix, named) = match requested {
        Some((name, origin)) => (format!("{origin} says {name}"), Backend::parse(name, origin)?),
        None => ("no backend was named".to_owned(), None),
    };
    if let Some(backend) = named {
        return Ok(Choice::one(backend, prefix));
    }
    let (backend, found) = match &machine.nvidia_driver {
        _ if machine.macos => (Backend::Wgpu, "this is macOS, where wgpu drives Metal".to_owned()),
        Some(path) => (Backend::Cuda, format!("an NVIDIA driver is here ({})", path.display())),
        None => (Backend::Flex, "no NVIDIA driver is here".to_owned()),
    };
    Ok(Choice::one(backend, format!("{prefix} and {found}")))
}

/// Reads the `backend` key of a recipe; `None` if it has none. Fails, with line and column, on a text that does not parse as its file name says: the
/// `firebrick` binary would refuse it too, but only after the build.
pub(crate) fn backend_key(recipe: &str, path: &Path) -> Result<Option<String>> {
    if is_yaml(path) {
        return yaml_key(recipe, path);
    }
    let table: toml::Table = match recipe.parse() {
        Ok(table) => table,
        Err(error) => bail!("{} is not well-formed TOML:\n{error}", path.display()),
    };
    match table.get("backend") {
        None => Ok(None),
        Some(toml::Value::String(name)) => Ok(Some(name.clone())),
        Some(other) => bail!("`backend = {other}` in {}: expected a name in quotes, such as \"auto\"", path.display()),
    }
}

/// Returns whether a recipe of this name is YAML, by the rule of `train`.
pub(crate) fn is_yaml(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "yaml" || extension == "yml")
}

/// Reads the value of `backend:` at the top level of a YAML recipe.
fn yaml_key(recipe: &str, path: &Path) -> Result<Option<String>> {
    // The open mappings and lists, and whether the next scalar of the top level is the value of `backend`.
    let (mut depth, mut is_key, mut is_backend) = (0, true, false);
    for event in Parser::new_from_str(recipe) {
        let (event, _) = event.with_context(|| format!("{} is not well-formed YAML", path.display()))?;
        match event {
            Event::Scalar(text, ..) if depth == 1 && is_key => (is_key, is_backend) = (false, text == "backend"),
            Event::Scalar(text, ..) if depth == 1 && is_backend => return Ok(Some(text.into_owned())),
            Event::MappingStart(..) | Event::SequenceStart(..) => depth += 1,
            Event::MappingEnd | Event::SequenceEnd => {
                depth -= 1;
                is_key |= depth == 1;
            }
            Event::Scalar(..) | Event::Alias(_) if depth == 1 => is_key = true,
            _ => {}
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    const BARE: Machine = Machine { nvidia_driver: None, macos: false };

    fn with_driver() -> Machine {
        Machine { nvidia_driver: Some(PathBuf::from("/usr/lib/libcuda.so.1")), macos: false }
    }

    #[test]
    fn auto_follows_the_machine_and_a_name_does_not() {
        let features =
            |requested: Option<(&str, &str)>, machine: &Machine| choose(requested, machine).unwrap().features();
        assert_eq!(features(None, &BARE), "flex");
        assert_eq!(features(Some(("auto", "a.toml")), &with_driver()), "flex,cuda");
        assert_eq!(features(None, &Machine { nvidia_driver: None, macos: true }), "flex,wgpu");
        assert_eq!(features(Some(("candle", "--backend")), &with_driver()), "flex,candle");
    }

    #[test]
    fn a_choice_says_why_and_an_unknown_backend_is_refused_with_the_known_ones() {
        assert_eq!(choose(Some(("wgpu", "--backend")), &BARE).unwrap().reason, "--backend says wgpu");
        let reason = choose(Some(("auto", "a.toml")), &with_driver()).unwrap().reason;
        assert!(reason.contains("a.toml says auto") && reason.contains("libcuda.so.1"), "{reason}");
        let message = choose(Some(("vulkan", "a.toml")), &BARE).unwrap_err().to_string();
        assert!(message.contains("`vulkan` in a.toml") && message.contains("wgpu"), "{message}");
    }

    #[test]
    fn a_release_has_one_backend_for_each_kind_of_device_of_its_target() {
        assert_eq!(Choice::release("aarch64-unknown-linux-gnu").features(), "flex,wgpu,cuda");
        assert_eq!(Choice::release("x86_64-pc-windows-msvc").features(), "flex,wgpu,cuda");
        assert_eq!(Choice::release("aarch64-apple-darwin").features(), "flex,wgpu");
    }

    #[test]
    fn the_key_is_read_from_the_top_level_only() {
        let toml = |text| backend_key(text, Path::new("a.toml"));
        assert_eq!(toml("backend = \"cuda\" # H100").unwrap().as_deref(), Some("cuda"));
        assert_eq!(toml("[data]\nbackend = \"cuda\"").unwrap(), None);
        assert!(toml("backend = 3").unwrap_err().to_string().contains("expected a name"));
        assert!(toml("a = ").unwrap_err().to_string().contains("a.toml is not well-formed"));
        let yaml = |text| backend_key(text, Path::new("a.yaml"));
        assert_eq!(yaml("model: m\nlora: {r: 8}\nbackend: cuda # H100\n").unwrap().as_deref(), Some("cuda"));
        assert_eq!(yaml("data:\n  backend: cuda\nlist: [backend, cuda]\nname: backend\n").unwrap(), None);
        assert_eq!(yaml("").unwrap(), None);
        assert!(format!("{:#}", yaml("a: [").unwrap_err()).contains("a.yaml is not well-formed YAML"));
    }
}
