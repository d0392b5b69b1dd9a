//! Places where CUDA's libraries may be, in the order in which they are looked at.
//!
//! Trade-off: the loader's folders are read from `LD_LIBRARY_PATH` and the cache of `ldconfig`, since the loader itself could only
//! be asked by opening files, of which the wrong ones could not be closed again.

use std::collections::BTreeSet;
use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use super::python::{Folders, conda, python, site_folders, toolkit};
use crate::library::Library;

#[derive(Clone, Default)]
pub(super) struct Environment {
    pub(super) windows: bool,
    /// `FIREBRICK_CUDA`.
    pub(super) named: Option<PathBuf>,
    /// The running program, with links resolved.
    pub(super) executable: Option<PathBuf>,
    /// `VIRTUAL_ENV`.
    pub(super) virtual_env: Option<PathBuf>,
    /// `CONDA_PREFIX`.
    pub(super) conda_prefix: Option<PathBuf>,
    /// Folders that the system's loader searches.
    pub(super) loader: Vec<PathBuf>,
    pub(super) toolkits: Vec<PathBuf>,
    /// The system's folder of headers.
    pub(super) headers: Vec<PathBuf>,
}

/// Folders that are searched together, and named as one place.
pub(super) struct SearchedFolders {
    pub(super) label: String,
    /// Whether it is taken only if it has cuDNN: a Python environment with half of the libraries would hide a complete toolkit.
    pub(super) needs_cudnn: bool,
    folders: Folders,
    windows: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct FoundFile {
    pub(super) path: PathBuf,
    /// Major version of CUDA; `None` if the name does not say.
    pub(super) major: Option<u32>,
}

impl Environment {
    pub(super) fn of_process() -> Self {
        let variable = |name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let executable = env::current_exe().and_then(fs::canonicalize).ok();
        let mut toolkits: Vec<PathBuf> = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(variable).collect();
        if cfg!(unix) {
            toolkits.push(PathBuf::from("/usr/local/cuda"));
        }
        Self {
            windows: cfg!(windows),
            named: variable("FIREBRICK_CUDA").and_then(|path| std::path::absolute(path).ok()),
            loader: loader_folders(executable.as_deref()),
            executable,
            virtual_env: variable("VIRTUAL_ENV"),
            conda_prefix: variable("CONDA_PREFIX"),
            toolkits,
            headers: if cfg!(unix) { vec![PathBuf::from("/usr/include")] } else { Vec::new() },
        }
    }

    /// Returns the places in their order. `FIREBRICK_CUDA` leaves only the one that it names.
    pub(super) fn places(&self) -> Vec<SearchedFolders> {
        if let Some(root) = &self.named {
            let flat = Folders { libraries: vec![root.clone()], headers: vec![root.clone()] };
            let folders = flat.and(toolkit(root, self.windows)).and(python(root, self.windows)).and(conda(root));
            return vec![self.place(format!("FIREBRICK_CUDA={}", root.display()), false, folders)];
        }
        let mut places = self.environments();
        let system = Folders { libraries: self.loader.clone(), headers: Vec::new() };
        let toolkits = self.toolkits.iter().map(|root| toolkit(root, self.windows));
        let headers = Folders { libraries: Vec::new(), headers: self.headers.clone() };
        let folders = toolkits.fold(system, Folders::and).and(headers);
        places.push(self.place("the loader's path with the CUDA toolkit".to_owned(), false, folders));
        places
    }

    fn environments(&self) -> Vec<SearchedFolders> {
        let with_sites = |prefix: &&Path| !site_folders(prefix, self.windows).is_empty();
        let own = self.executable.as_deref().and_then(|file| file.ancestors().nth(2)).filter(with_sites);
        let variables = [("VIRTUAL_ENV", &self.virtual_env), ("CONDA_PREFIX", &self.conda_prefix)];
        let named = variables.into_iter().filter_map(|(name, prefix)| {
            prefix.as_deref().map(|prefix| (format!("{name}={}", prefix.display()), prefix))
        });
        let own = own.map(|prefix| (format!("this program's Python environment {}", prefix.display()), prefix));
        let mut seen = BTreeSet::new();
        let distinct = own.into_iter().chain(named).filter(|(_, prefix)| seen.insert(real(prefix)));
        let conda_prefix = self.conda_prefix.as_deref().map(real);
        let place = |(label, prefix): (String, &Path)| {
            let wheels = python(prefix, self.windows);
            let is_conda = conda_prefix.as_deref() == Some(real(prefix).as_path());
            let folders = if is_conda { wheels.and(conda(prefix)) } else { wheels };
            self.place(label, true, folders)
        };
        distinct.map(place).collect()
    }

    fn place(&self, label: String, needs_cudnn: bool, folders: Folders) -> SearchedFolders {
        SearchedFolders { label, needs_cudnn, folders, windows: self.windows }
    }
}

impl SearchedFolders {
    pub(super) fn files(&self, library: &Library) -> Vec<FoundFile> {
        let names = library.file_names(self.windows);
        let in_folder = |folder: &PathBuf| {
            let files = names.iter().map(|(name, major)| FoundFile { path: folder.join(name), major: *major });
            let with_major = |file: FoundFile| {
                let real_name = real(&file.path).file_name().map(|name| name.to_string_lossy().into_owned());
                let major = file.major.or_else(|| library.major_of(&real_name?));
                FoundFile { major, ..file }
            };
            files.filter(|file| file.path.is_file()).map(with_major).collect::<Vec<_>>()
        };
        self.folders.libraries.iter().flat_map(in_folder).collect()
    }

    /// Returns the first folder with CUDA's headers of this major version, or of one that cannot be read.
    pub(super) fn headers(&self, cuda_major: Option<u32>) -> Option<PathBuf> {
        let fits = |folder: &&PathBuf| {
            let major = header_major(folder);
            folder.join("cuda_runtime.h").is_file() && (major.is_none() || cuda_major.is_none() || major == cuda_major)
        };
        self.folders.headers.iter().find(fits).cloned()
    }
}

fn header_major(folder: &Path) -> Option<u32> {
    let text = fs::read(folder.join("cuda_runtime_api.h")).ok()?;
    let text = String::from_utf8_lossy(&text);
    let version = text.lines().find_map(|line| line.strip_prefix("#define CUDART_VERSION"))?;
    version.trim().parse::<u32>().ok().map(|version| version / 1000)
}

/// Returns the path without links, or the path itself if it does not exist.
fn real(path: &Path) -> PathBuf {
    fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf())
}

/// Returns the folders that the loader searches, in its order.
fn loader_folders(executable: Option<&Path>) -> Vec<PathBuf> {
    let variable = if cfg!(windows) { "PATH" } else { "LD_LIBRARY_PATH" };
    let listed = env::var_os(variable).map_or_else(Vec::new, |value| env::split_paths(&value).collect());
    let listed = listed.into_iter().filter(|folder| !folder.as_os_str().is_empty());
    if cfg!(windows) {
        return executable.and_then(Path::parent).map(Path::to_path_buf).into_iter().chain(listed).collect();
    }
    let cached = fs::read("/etc/ld.so.cache").map_or_else(|_| Vec::new(), |cache| cached_folders(&cache));
    let usual = ["/lib64", "/usr/lib64", "/lib", "/usr/lib"].map(PathBuf::from);
    listed.chain(cached).chain(usual).collect()
}

/// Returns the folders of the files that a cache of `ldconfig` lists. Both of its formats end with the paths, each followed by
/// a zero, so that nothing else of them needs to be read.
fn cached_folders(cache: &[u8]) -> Vec<PathBuf> {
    let mut seen = BTreeSet::new();
    let paths = cache.split(|byte| *byte == 0).filter(|text| text.starts_with(b"/"));
    let folders = paths.filter_map(|text| Path::new(std::str::from_utf8(text).ok()?).parent().map(Path::to_path_buf));
    folders.filter(|folder| seen.insert(folder.clone())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ldconfig_gives_each_folder_once_in_order() {
        let cache =
            b"glibc-ld.so.cache1.1\0\x02\0\0\0\0libb.so\0/opt/b/libb.so\0liba.so\0/lib/liba.so\0/opt/b/libc.so\0";
        assert_eq!(cached_folders(cache), ["/opt/b", "/lib"].map(PathBuf::from));
    }

    #[test]
    fn headers_are_those_of_the_same_cuda() {
        let folder = tempfile::tempdir().unwrap();
        let folders = [12, 13].map(|major| {
            let include = folder.path().join(major.to_string());
            fs::create_dir(&include).unwrap();
            fs::write(include.join("cuda_runtime.h"), "").unwrap();
            let text = format!("// a comment\n#define CUDART_VERSION  {major}020\n");
            fs::write(include.join("cuda_runtime_api.h"), text).unwrap();
            include
        });
        let folders_of_place = Folders { libraries: Vec::new(), headers: folders.to_vec() };
        let place = Environment::default().place(String::new(), false, folders_of_place);
        assert_eq!(place.headers(Some(13)), Some(folders[1].clone()));
        assert_eq!(place.headers(Some(14)), None);
    }

    #[cfg(unix)]
    #[test]
    fn a_link_has_the_version_of_its_target() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("libnvrtc.so.12.9.86"), "").unwrap();
        std::os::unix::fs::symlink("libnvrtc.so.12.9.86", folder.path().join("libnvrtc.so")).unwrap();
        let environment = Environment { named: Some(folder.path().to_owned()), ..Environment::default() };
        let files = environment.places()[0].files(&crate::library::NVRTC);
        assert_eq!(files, [FoundFile { path: folder.path().join("libnvrtc.so"), major: Some(12) }]);
    }
}
