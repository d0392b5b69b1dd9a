//! Compiled images on disk: one file a key, written whole or not at all.
//!
//! The key is a hash of all that decides the machine code: source, options (the architecture among them), and the compiler's
//! version. A file begins with the key and a checksum of what follows, so one that was cut short or damaged is no image; it
//! is compiled and written again. A folder that cannot be written only means that nothing is kept.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use xxhash_rust::xxh3::xxh3_128;

use super::Program;

/// A folder of images; `None` keeps nothing.
#[derive(Clone, Debug)]
pub(super) struct Cache {
    folder: Option<PathBuf>,
}

/// What an image is kept under.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Key(u128);

const HEADER: usize = 32;

impl Cache {
    /// `FIREBRICK_CACHE`, or `firebrick` in the user's cache folder; in it, `kernels`.
    pub(super) fn default_folder() -> Self {
        let variable = |name: &str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let user = || {
            if cfg!(windows) {
                return variable("LOCALAPPDATA");
            }
            variable("XDG_CACHE_HOME").or_else(|| Some(variable("HOME")?.join(".cache")))
        };
        let folder = variable("FIREBRICK_CACHE").or_else(|| Some(user()?.join("firebrick")));
        Self { folder: folder.map(|folder| folder.join("kernels")) }
    }

    #[cfg(test)]
    pub(super) fn in_folder(folder: &Path) -> Self {
        Self { folder: Some(folder.to_owned()) }
    }

    #[cfg(test)]
    pub(super) fn none() -> Self {
        Self { folder: None }
    }

    pub(super) fn key(&self, program: &Program, options: &[String], version: (i32, i32)) -> Key {
        let mut text = format!("{} {}.{}\n", env!("CARGO_PKG_VERSION"), version.0, version.1);
        for part in options.iter().chain([&program.name, &program.source]) {
            // Lengths keep one part from running into the next.
            text.push_str(&format!("{} {part}\n", part.len()));
        }
        Key(xxh3_128(text.as_bytes()))
    }

    /// The image, if a whole one is there.
    pub(super) fn read(&self, key: &Key) -> Option<Vec<u8>> {
        let file = fs::read(self.file(key)?).ok()?;
        let (header, image) = file.split_at_checked(HEADER)?;
        (header == header_of(key, image)).then(|| image.to_vec())
    }

    /// Keeps an image. Two processes at once write the same bytes under names of their own, and the last rename wins.
    pub(super) fn write(&self, key: &Key, image: &[u8]) {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let Some(file) = self.file(key) else { return };
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let unfinished = file.with_extension(format!("{}-{count}.part", std::process::id()));
        let whole = [header_of(key, image).as_slice(), image].concat();
        let kept = file.parent().map_or(Ok(()), fs::create_dir_all);
        let kept = kept.and_then(|()| fs::write(&unfinished, whole)).and_then(|()| fs::rename(&unfinished, &file));
        if kept.is_err() {
            // Nothing is lost but the time to compile it again.
            let _ = fs::remove_file(&unfinished);
        }
    }

    fn file(&self, key: &Key) -> Option<PathBuf> {
        self.folder.as_deref().map(|folder: &Path| folder.join(format!("{:032x}.cubin", key.0)))
    }
}

fn header_of(key: &Key, image: &[u8]) -> [u8; HEADER] {
    let mut header = [0; HEADER];
    header[..16].copy_from_slice(&key.0.to_le_bytes());
    header[16..].copy_from_slice(&xxh3_128(image).to_le_bytes());
    header
}

#[cfg(test)]
mod tests {
    use super::*;

    fn program(source: &str, options: &[&str]) -> (Program, Vec<String>) {
        let options: Vec<String> = options.iter().map(ToString::to_string).collect();
        (Program { name: "a.cu".to_owned(), source: source.to_owned(), options: options.clone() }, options)
    }

    #[test]
    fn what_decides_the_code_decides_the_key() {
        let cache = Cache::none();
        let key = |source, options: &[&str], version| {
            let (program, options) = program(source, options);
            cache.key(&program, &options, version)
        };
        let one = key("x", &["-a", "-b"], (13, 0));
        assert_eq!(one, key("x", &["-a", "-b"], (13, 0)));
        for other in [
            key("y", &["-a", "-b"], (13, 0)),
            key("x", &["-a"], (13, 0)),
            key("x", &["-a -b"], (13, 0)),
            key("x", &["-a", "-b"], (12, 9)),
        ] {
            assert_ne!(one, other);
        }
    }

    #[test]
    fn damaged_files_are_no_images_and_leave_nothing_half_written() {
        let folder = env::temp_dir().join(format!("firebrick-cache-{}", std::process::id()));
        let cache = Cache::in_folder(&folder);
        let (program, options) = program("x", &[]);
        let key = cache.key(&program, &options, (13, 0));
        assert_eq!(cache.read(&key), None);
        cache.write(&key, b"the image");
        assert_eq!(cache.read(&key).as_deref(), Some(b"the image".as_slice()));
        let file = cache.file(&key).expect("a folder was given");
        let whole = fs::read(&file).expect("it was written");
        for damaged in [&whole[..whole.len() - 1], &whole[..7], &[whole.as_slice(), b"x"].concat()] {
            fs::write(&file, damaged).expect("overwriting");
            assert_eq!(cache.read(&key), None);
        }
        assert_eq!(fs::read_dir(&folder).expect("the folder").count(), 1);
        fs::remove_dir_all(&folder).expect("cleaning up");
    }

    #[test]
    fn a_folder_that_cannot_be_written_keeps_nothing_and_says_nothing() {
        let cache = Cache::in_folder(Path::new("/dev/null/nowhere"));
        let (program, options) = program("x", &[]);
        let key = cache.key(&program, &options, (13, 0));
        cache.write(&key, b"image");
        assert_eq!(cache.read(&key), None);
    }
}
