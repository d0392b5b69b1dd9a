//! Decides by name which files of a folder or dataset belong to a split, like the `datasets` library.
//!
//! `train-00000-of-00003.parquet` names its split exactly; otherwise a word in the name of the file or of a folder
//! (train, test, validation and their usual synonyms) does; files without such a word belong to the split "train".
//!
//! Not supported: custom patterns other than those in the dataset's card.

use super::error::{SourceError, SourceResult};

pub(super) const TRAIN: &str = "train";

/// Returns whether a path (with `/`) is that of a file that describes the data of its folder and contains none.
pub(super) fn describes(path: &str) -> bool {
    let names = ["state.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json", "metadata.json"];
    names.contains(&path.rsplit('/').next().unwrap_or_default())
}

/// Returns the split that a path (with `/`) implies.
pub(super) fn split_of(path: &str) -> Option<String> {
    let mut parts = path.rsplit('/');
    let stem = parts.next().and_then(|name| name.split('.').next()).unwrap_or_default();
    if let Some(split) = sharded(stem) {
        return Some(split.to_owned());
    }
    std::iter::once(stem).chain(parts).find_map(|part| {
        part.split(|character: char| !character.is_ascii_alphabetic()).find_map(keyword).map(str::to_owned)
    })
}

/// Returns `NAME` of `NAME-00000-of-00003`.
fn sharded(stem: &str) -> Option<&str> {
    let digits = |text: &str| text.len() >= 5 && text.bytes().all(|byte| byte.is_ascii_digit());
    let (rest, count) = stem.rsplit_once("-of-")?;
    let (name, index) = rest.rsplit_once('-')?;
    (digits(count) && digits(index) && !name.is_empty()).then_some(name)
}

/// Maps the usual synonyms of the three usual splits.
fn keyword(word: &str) -> Option<&'static str> {
    match word.to_ascii_lowercase().as_str() {
        "train" | "training" => Some(TRAIN),
        "validation" | "valid" | "val" | "dev" => Some("validation"),
        "test" | "testing" | "eval" | "evaluation" => Some("test"),
        _ => None,
    }
}

/// Returns the splits that the paths imply, each once, sorted.
pub(super) fn splits_of<'a>(paths: impl IntoIterator<Item = &'a str>) -> Vec<String> {
    let mut splits: Vec<String> = paths.into_iter().filter_map(split_of).collect();
    splits.sort();
    splits.dedup();
    splits
}

/// Returns the paths of a configuration: those in a folder of its name. Error: there is no such folder.
pub(super) fn of_config(paths: Vec<String>, config: Option<&str>, place: &str) -> SourceResult<Vec<String>> {
    let Some(config) = config else { return Ok(paths) };
    let folders = |path: &String| -> Vec<String> {
        let mut parts: Vec<String> = path.split('/').map(str::to_owned).collect();
        parts.pop();
        parts
    };
    let (inside, outside): (Vec<String>, Vec<String>) =
        paths.into_iter().partition(|path| folders(path).iter().any(|folder| folder == config));
    if inside.is_empty() {
        let mut known: Vec<String> = outside.iter().flat_map(folders).collect();
        known.sort();
        known.dedup();
        let hint = if known.is_empty() {
            "it has a single configuration: remove config".to_owned()
        } else {
            format!("its folders are {}", known.join(", "))
        };
        return Err(SourceError::no_such_part(place, "config", config, &hint));
    }
    Ok(inside)
}

/// Returns the paths of a split, "train" by default. Error: no path belongs to it.
pub(super) fn of_split(paths: Vec<String>, split: Option<&str>, place: &str) -> SourceResult<Vec<String>> {
    let name = split.unwrap_or(TRAIN);
    let known = splits_of(paths.iter().map(String::as_str));
    if known.is_empty() && name == TRAIN {
        return Ok(paths);
    }
    let usual = keyword(name).unwrap_or(name);
    let is_match = |path: &String| split_of(path).is_some_and(|found| found == name || found == usual);
    let chosen: Vec<String> = paths.into_iter().filter(is_match).collect();
    if chosen.is_empty() {
        let hint = if known.is_empty() {
            "no file name shows a split, so all of it is \"train\"".to_owned()
        } else {
            format!("it has {}; name one with split = \"...\"", known.join(", "))
        };
        return Err(SourceError::no_such_part(place, "split", name, &hint));
    }
    Ok(chosen)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_imply_splits_as_in_datasets() {
        let cases = [
            ("data/train-00000-of-00003.parquet", Some("train")),
            ("data/train_sft-00000-of-00003-a1b2.parquet", Some("train")),
            ("data/train_sft-00000-of-00003.parquet", Some("train_sft")),
            ("plain_text/test-00000-of-00001.parquet", Some("test")),
            ("default/train/0000.parquet", Some("train")),
            ("my_dev.jsonl", Some("validation")),
            ("Train.jsonl.gz", Some("train")),
            ("training-set.csv", Some("train")),
            ("constraints.jsonl", None),
            ("alpaca_data.json", None),
            ("validation/test_1.json", Some("test")),
        ];
        for (path, split) in cases {
            assert_eq!(split_of(path).as_deref(), split, "{path}");
        }
    }

    #[test]
    fn a_missing_split_lists_the_available_ones() {
        let paths = || vec!["train.jsonl".to_owned(), "val.jsonl".to_owned()];
        assert_eq!(of_split(paths(), Some("valid"), "d").unwrap(), ["val.jsonl"]);
        assert_eq!(of_split(paths(), None, "d").unwrap(), ["train.jsonl"]);
        let error = of_split(paths(), Some("test"), "d").unwrap_err().to_string();
        assert!(error.contains("train, validation"), "{error}");
    }
}
