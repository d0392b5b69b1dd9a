//! Chooses the place and the major version of CUDA that all libraries come from, from the names of files alone.
//!
//! Trade-off: the name of cuDNN does not contain the version of CUDA that it was built for. It is opened to find out only where
//! there is a choice; otherwise the check after opening finds a mix.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use super::place::{FoundFile, SearchedFolders};
use crate::error::CudaError;
use crate::library::{CUDNN, Library};

/// The place and the version that were chosen.
pub(super) struct Choice {
    pub(super) place: SearchedFolders,
    /// Major version of CUDA; `None` if no name of a file contains it.
    pub(super) major: Option<u32>,
}

impl Choice {
    pub(super) fn file(&self, library: &Library) -> Option<PathBuf> {
        let files = self.place.files(library);
        let fits = |file: &&FoundFile| file.major.is_none() || file.major == self.major;
        files.iter().find(fits).map(|file| file.path.clone())
    }
}

/// Returns the first place that has what is needed, and the newest version that all needed libraries have there and that the
/// driver supports. `driver_major` is `None` without a driver, which then limits nothing; `cudnn_major` returns the version
/// that a file of cuDNN was built for.
pub(super) fn resolve(
    places: Vec<SearchedFolders>,
    needed: &[&Library],
    driver_major: Option<u32>,
    cudnn_major: &dyn Fn(&Path) -> Option<u32>,
) -> Result<Choice, CudaError> {
    let mut places_with_problems = Vec::new();
    for place in places {
        let usable: Vec<Vec<FoundFile>> = needed.iter().map(|library| usable(&place, library, driver_major)).collect();
        let mut lacking: Vec<String> = (needed.iter().zip(&usable))
            .filter(|(_, usable)| usable.is_empty())
            .map(|(library, _)| lack(&place, library))
            .collect();
        if place.needs_cudnn && needed.len() > 1 && place.files(&CUDNN).is_empty() {
            lacking.push(format!("no {}", CUDNN.name));
        }
        if !lacking.is_empty() {
            places_with_problems.push(format!("{} ({})", place.label, lacking.join(", ")));
            continue;
        }
        let major = common_major(&usable, || place.files(&CUDNN).first().and_then(|file| cudnn_major(&file.path)))?;
        return Ok(Choice { place, major });
    }
    let needed = needed.iter().map(|library| library.name).collect::<Vec<_>>().join(" and ");
    Err(CudaError::LibrariesNotFound { needed, places: places_with_problems, cuda_major: driver_major })
}

fn usable(place: &SearchedFolders, library: &Library, driver_major: Option<u32>) -> Vec<FoundFile> {
    let supported = |major: Option<u32>| major.is_none_or(|major| driver_major.is_none_or(|driver| major <= driver));
    place.files(library).into_iter().filter(|file| supported(file.major)).collect()
}

/// Describes a library that has no usable file: there is none, or the driver is too old for it.
fn lack(place: &SearchedFolders, library: &Library) -> String {
    match place.files(library).first() {
        None => format!("no {}", library.name),
        Some(file) => format!("{} is too new for the driver", file.path.display()),
    }
}

/// Returns the newest version of which each library has a file. If there are several, `preferred` decides.
fn common_major(libraries: &[Vec<FoundFile>], preferred: impl Fn() -> Option<u32>) -> Result<Option<u32>, CudaError> {
    let known: BTreeSet<u32> = libraries.iter().flatten().filter_map(|file| file.major).collect();
    let has = |files: &Vec<FoundFile>, major| files.iter().any(|file| file.major.is_none_or(|own| own == major));
    let common: Vec<u32> = known.into_iter().filter(|major| libraries.iter().all(|files| has(files, *major))).collect();
    if common.len() > 1
        && let Some(major) = preferred().filter(|major| common.contains(major))
    {
        return Ok(Some(major));
    }
    match common.last() {
        Some(newest) => Ok(Some(*newest)),
        None => mixed(libraries).map_or(Ok(None), Err),
    }
}

/// Returns the error for libraries without a common version; `None` if no version is known.
fn mixed(libraries: &[Vec<FoundFile>]) -> Option<CudaError> {
    let newest = |files: &Vec<FoundFile>| {
        let known = files.iter().filter_map(|file| file.major.map(|major| (major, file.path.display().to_string())));
        known.max()
    };
    let (first_major, first) = newest(libraries.first()?)?;
    let (second_major, second) = newest(libraries.last()?)?;
    Some(CudaError::MixedMajors { first, first_major, second, second_major })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use tempfile::TempDir;

    use super::super::place::Environment;
    use super::*;
    use crate::library::{CUBLASLT, NCCL, NVRTC};

    const SITE: &str = "lib/python3.12/site-packages";

    /// A machine of empty files: roots of environments and toolkits below one folder.
    struct Machine {
        folder: TempDir,
        environment: Environment,
    }

    impl Machine {
        fn new(files: &[&str]) -> Self {
            let machine = Self { folder: tempfile::tempdir().unwrap(), environment: Environment::default() };
            files.iter().for_each(|file| machine.add(file));
            machine
        }

        fn add(&self, file: &str) {
            let path = self.path(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "").unwrap();
        }

        /// Adds NVIDIA's wheels for one major version to the environment `root`.
        fn add_wheels(&self, root: &str, major: u32) {
            for (package, file) in [
                ("cublas", format!("libcublasLt.so.{major}")),
                ("cuda_nvrtc", format!("libnvrtc.so.{major}")),
                ("cudnn", "libcudnn.so.9".to_owned()),
                ("nccl", "libnccl.so.2".to_owned()),
            ] {
                self.add(&format!("{root}/{SITE}/nvidia/{package}/lib/{file}"));
            }
        }

        fn path(&self, name: &str) -> PathBuf {
            self.folder.path().join(name)
        }

        fn resolve(&self, driver_major: u32) -> Result<Choice, CudaError> {
            self.resolve_with(driver_major, &|_| panic!("there is no choice"))
        }

        fn resolve_with(&self, driver: u32, cudnn: &dyn Fn(&Path) -> Option<u32>) -> Result<Choice, CudaError> {
            resolve(self.environment.places(), &[&NVRTC, &CUBLASLT], Some(driver), cudnn)
        }

        fn refusal(&self, driver_major: u32) -> String {
            self.resolve(driver_major).err().expect("it is refused").to_string()
        }
    }

    const TOOLKIT: [&str; 2] = ["toolkit/lib64/libcublasLt.so.13", "toolkit/lib64/libnvrtc.so.13"];

    #[test]
    fn each_place_is_taken_if_those_before_it_are_missing() {
        let mut machine = Machine::new(&TOOLKIT);
        ["named", "own", "venv", "conda"].iter().for_each(|root| machine.add_wheels(root, 13));
        machine.add("own/bin/firebrick");
        machine.environment = Environment {
            named: Some(machine.path("named")),
            executable: Some(machine.path("own/bin/firebrick")),
            virtual_env: Some(machine.path("venv")),
            conda_prefix: Some(machine.path("conda")),
            toolkits: vec![machine.path("toolkit")],
            ..Environment::default()
        };
        for root in ["named", "own", "venv", "conda", "toolkit"] {
            let choice = machine.resolve(13).expect(root);
            for library in [&NVRTC, &CUBLASLT] {
                assert!(choice.file(library).expect(root).starts_with(machine.path(root)), "{root}");
            }
            assert_eq!((choice.major, choice.file(&NCCL).is_some()), (Some(13), root != "toolkit"), "{root}");
            let environment = &mut machine.environment;
            match root {
                "named" => environment.named = None,
                "own" => environment.executable = None,
                "venv" => environment.virtual_env = None,
                _ => environment.conda_prefix = None,
            }
        }
    }

    #[test]
    fn the_loaders_path_and_the_toolkit_are_one_place() {
        let mut machine = Machine::new(&["system/libcudnn.so.9", "system/libnvrtc.so.13", TOOLKIT[0]]);
        machine.environment.loader = vec![machine.path("system")];
        machine.environment.toolkits = vec![machine.path("toolkit")];
        let choice = machine.resolve(13).expect("together they are complete");
        assert_eq!(choice.file(&CUBLASLT), Some(machine.path(TOOLKIT[0])));
        assert_eq!(choice.file(&CUDNN), Some(machine.path("system/libcudnn.so.9")));
    }

    #[test]
    fn half_an_environment_hides_no_complete_toolkit() {
        let mut machine = Machine::new(&TOOLKIT);
        machine.add_wheels("venv", 13);
        fs::remove_file(machine.path(&format!("venv/{SITE}/nvidia/cudnn/lib/libcudnn.so.9"))).unwrap();
        machine.environment.virtual_env = Some(machine.path("venv"));
        assert!(machine.refusal(13).contains("(no cuDNN)"), "{}", machine.refusal(13));
        machine.environment.toolkits = vec![machine.path("toolkit")];
        assert_eq!(machine.resolve(13).ok().and_then(|choice| choice.file(&NVRTC)), Some(machine.path(TOOLKIT[1])));
    }

    #[test]
    fn the_newest_version_that_driver_and_cudnn_have_wins() {
        let mut machine = Machine::new(&[]);
        machine.add_wheels("venv", 12);
        machine.add_wheels("venv", 13);
        machine.environment.virtual_env = Some(machine.path("venv"));
        let major = |driver, cudnn: &dyn Fn(&Path) -> Option<u32>| {
            let choice = machine.resolve_with(driver, cudnn).expect("both are complete");
            let file = choice.file(&CUBLASLT).expect("it was chosen");
            assert!(file.to_string_lossy().ends_with(&format!(".{}", choice.major.unwrap())), "{}", file.display());
            choice.major
        };
        assert_eq!(major(13, &|_| None), Some(13));
        assert_eq!(major(13, &|_| Some(12)), Some(12));
        assert_eq!(major(13, &|_| Some(11)), Some(13));
        assert_eq!(major(12, &|_| panic!("one version is left")), Some(12));
    }

    #[test]
    fn libraries_without_a_common_version_are_refused() {
        let mut machine = Machine::new(&["both/libcublasLt.so.12", "both/libnvrtc.so.13"]);
        machine.environment.loader = vec![machine.path("both")];
        let message = machine.refusal(13);
        for part in ["both/libcublasLt.so.12", "CUDA 12", "both/libnvrtc.so.13", "CUDA 13", "flex", "wgpu"] {
            assert!(message.contains(part), "{part} is missing in: {message}");
        }
    }

    #[test]
    fn an_incomplete_named_place_is_an_error() {
        let mut machine = Machine::new(&TOOLKIT);
        fs::create_dir(machine.path("empty")).unwrap();
        machine.environment.named = Some(machine.path("empty"));
        machine.environment.toolkits = vec![machine.path("toolkit")];
        let message = machine.refusal(13);
        assert!(message.contains("empty (no NVRTC, no cuBLASLt)"), "{message}");
        assert!(!message.contains("loader's path"), "{message}");
    }

    #[test]
    fn a_named_place_may_be_a_flat_folder_without_cudnn() {
        let mut machine = Machine::new(&["flat/libcublasLt.so.12", "flat/libnvrtc.so.12"]);
        machine.environment.named = Some(machine.path("flat"));
        assert_eq!(machine.resolve(13).ok().and_then(|choice| choice.major), Some(12));
    }

    #[test]
    fn every_place_is_listed_with_what_it_lacks() {
        let mut machine = Machine::new(&[]);
        machine.add_wheels("venv", 13);
        machine.environment.virtual_env = Some(machine.path("venv"));
        machine.environment.conda_prefix = Some(machine.path("conda"));
        let message = machine.refusal(12);
        for part in [
            "VIRTUAL_ENV=",
            "libnvrtc.so.13 is too new for the driver",
            "CONDA_PREFIX=",
            "no NVRTC, no cuBLASLt, no cuDNN",
            "the loader's path",
            "nvidia-cuda-nvrtc-cu12",
            "FIREBRICK_CUDA",
            "backend = \"flex\"",
            "backend = \"wgpu\"",
        ] {
            assert!(message.contains(part), "{part} is missing in: {message}");
        }
    }

    #[test]
    fn the_wheels_of_windows_are_found_by_their_names() {
        let site = "venv/Lib/site-packages/nvidia/cu13/bin/x86_64";
        let mut machine = Machine::new(&[]);
        ["cublasLt64_13.dll", "nvrtc64_130_0.dll", "cudnn64_9.dll"]
            .iter()
            .for_each(|file| machine.add(&format!("{site}/{file}")));
        machine.environment.windows = true;
        machine.environment.virtual_env = Some(machine.path("venv"));
        let choice = machine.resolve(13).expect("all three are there");
        assert_eq!(choice.file(&CUBLASLT), Some(machine.path(&format!("{site}/cublasLt64_13.dll"))));
    }

    #[test]
    fn compiling_alone_needs_only_nvrtc() {
        let mut machine = Machine::new(&["venv/lib/python3.12/site-packages/nvidia/cu13/lib/libnvrtc.so.13"]);
        machine.environment.virtual_env = Some(machine.path("venv"));
        let choice = resolve(machine.environment.places(), &[&NVRTC], None, &|_| None);
        assert_eq!(choice.ok().and_then(|choice| choice.major), Some(13));
    }
}
