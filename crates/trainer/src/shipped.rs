//! Finds the files that come with the program: recipes and configs of models in `configs/`, and in `assets/` the model and the data of the quickstart.
//!
//! They are in one folder, the first of these that has `configs/`: the one that `FIREBRICK_SHARE` names, the program's own (an unpacked archive),
//! `../share/firebrick` seen from there (a wheel), and the checkout that a program in `target/PROFILE` was built from. The current folder is always
//! looked at first.
//! Trade-off: only names that begin with `assets/` are looked for there, so that a misspelled path of the user's own never means another file.

use std::env;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

const RECIPES: &str = "configs";
const ASSETS: &str = "assets";
/// Environment variable with the folder of both, for programs that are somewhere else. `cargo xtask` sets it.
const SHARE: &str = "FIREBRICK_SHARE";

/// Returns the folder that holds `configs/` and `assets/`; `None` if the program has none.
pub fn folder() -> Option<&'static Path> {
    static OF_PROCESS: LazyLock<Option<PathBuf>> = LazyLock::new(|| {
        let program = env::current_exe().ok();
        // On Windows the resolved form of a path is one that other programs do not take.
        let resolved = program.map(|path| if cfg!(windows) { path } else { path.canonicalize().unwrap_or(path) });
        folder_of(env::var_os(SHARE).map(PathBuf::from), resolved.as_deref())
    });
    OF_PROCESS.as_deref()
}

fn folder_of(named: Option<PathBuf>, program: Option<&Path>) -> Option<PathBuf> {
    let above = |levels: usize| program.and_then(|path| path.ancestors().nth(levels));
    let near = [above(1).map(Path::to_owned), above(2).map(|prefix| prefix.join("share/firebrick"))];
    let checkout = above(3).map(Path::to_owned);
    let folders = [named].into_iter().chain(near).chain([checkout]).flatten();
    folders.into_iter().find(|folder| folder.join(RECIPES).is_dir())
}

/// Returns the folders in which a recipe is looked up by its name, the current folder's first.
pub(crate) fn recipe_folders() -> impl Iterator<Item = PathBuf> {
    std::iter::once(PathBuf::from(RECIPES)).chain(folder().map(|folder| folder.join(RECIPES)))
}

/// Returns the place of a name that begins with `assets/`; `None` if it is in the current folder, is not shipped, or is another path.
pub(crate) fn asset(name: &Path) -> Option<PathBuf> {
    asset_in(folder()?, name)
}

/// Returns the folder with the config.json of a model that the recipes name, by its id of the Hub; `None` if it is not shipped.
pub(crate) fn model(id: &str) -> Option<PathBuf> {
    let id = id.split('@').next().unwrap_or(id);
    let is_id = id.split('/').count() == 2 && !id.contains("..");
    recipe_folders()
        .map(|folder| folder.join("models").join(id))
        .find(|folder| is_id && folder.join("config.json").is_file())
}

fn asset_in(folder: &Path, name: &Path) -> Option<PathBuf> {
    let is_asset = name.starts_with(ASSETS) && !name.exists();
    is_asset.then(|| folder.join(name)).filter(|path| path.exists())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn files_are_next_to_the_program_or_in_its_share_folder_or_in_its_checkout() {
        let root = tempfile::tempdir().unwrap();
        let at = |path: &str| root.path().join(path);
        assert_eq!(folder_of(None, Some(&at("prefix/bin/firebrick"))), None, "nothing is there");
        for folder in ["archive", "prefix/share/firebrick", "checkout", "named"] {
            fs::create_dir_all(at(folder).join(RECIPES)).unwrap();
        }
        let of = |program: &str| folder_of(None, Some(&at(program)));
        assert_eq!(of("archive/firebrick"), Some(at("archive")));
        assert_eq!(of("prefix/bin/firebrick"), Some(at("prefix/share/firebrick")));
        assert_eq!(of("checkout/target/fast/firebrick"), Some(at("checkout")));
        assert_eq!(folder_of(Some(at("named")), Some(&at("archive/firebrick"))), Some(at("named")));
        assert_eq!(folder_of(Some(at("absent")), Some(&at("archive/firebrick"))), Some(at("archive")));
    }

    #[test]
    fn only_a_name_in_assets_that_is_not_here_is_looked_for() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("assets/quickstart")).unwrap();
        fs::write(root.path().join("mine.jsonl"), "").unwrap();
        let found = |name: &str| asset_in(root.path(), Path::new(name));
        assert_eq!(found("assets/quickstart"), Some(root.path().join("assets/quickstart")));
        let own = root.path().join("assets/quickstart");
        for name in ["assets/absent", "mine.jsonl", own.to_str().unwrap(), "owner/assets"] {
            assert_eq!(found(name), None, "{name}");
        }
    }
}
