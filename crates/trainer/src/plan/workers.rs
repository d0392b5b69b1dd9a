//! How many threads tokenize, and how many build batches.
//!
//! A recipe's `data.workers` sets both. Trade-off: other processes on the machine are ignored; the cores that this process may
//! use count, whether they are busy or not.

use std::num::NonZeroUsize;

use firebrick_data::Pipeline;
use firebrick_hwprofile::HardwareProfile;
use firebrick_kernels::BackendKind;

use crate::config::RunConfig;
use crate::plan::Chosen;

/// Threads that build batches of rows of different lengths for an accelerator.
const UNPACKED: usize = 2;

/// The pipeline that tokenizes a recipe's data.
pub fn tokenizing(config: &RunConfig, profile: &HardwareProfile) -> Pipeline {
    let workers = NonZeroUsize::new(to_tokenize(config, profile).value).expect("at least one thread is chosen");
    Pipeline { workers }
}

pub(super) fn to_tokenize(config: &RunConfig, profile: &HardwareProfile) -> Chosen<usize> {
    if let Some(workers) = config.data.workers {
        return Chosen::new(workers, "the recipe: data.workers");
    }
    Chosen::new(cores(profile), "one per core that this process may use: nothing trains yet")
}

pub(super) fn to_load(config: &RunConfig, profile: &HardwareProfile, backend: BackendKind) -> Chosen<usize> {
    if let Some(workers) = config.data.workers {
        return Chosen::new(workers, "the recipe: data.workers");
    }
    if backend.is_cpu() {
        return Chosen::new(
            1,
            format!("{backend} trains on all cores, and one thread builds more batches than they train"),
        );
    }
    match (config.pack, cores(profile)) {
        (true, _) => {
            Chosen::new(1, "one thread builds over 100 million packed tokens per second, more than a device trains")
        }
        (false, 1) => Chosen::new(1, "this process may use one core"),
        (false, _) => Chosen::new(
            UNPACKED,
            format!("rows of different lengths are padded for each batch; {backend} leaves cores free"),
        ),
    }
}

fn cores(profile: &HardwareProfile) -> usize {
    profile.cpu.logical_cores.max(1)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn chosen(changes: &[&str], cores: usize, backend: BackendKind) -> [usize; 2] {
        let changes: Vec<String> = changes.iter().map(ToString::to_string).collect();
        let config =
            RunConfig::from_toml("model='m'\nmode='full'\n[data]\npath='d'\n", Path::new("r.toml"), &changes).unwrap();
        let profile = HardwareProfile::described(cores, 0, Vec::new());
        let (tokenize, load) = (to_tokenize(&config, &profile), to_load(&config, &profile, backend));
        assert!([&tokenize, &load].iter().all(|chosen| !chosen.reason.is_empty()));
        assert_eq!(tokenizing(&config, &profile).workers.get(), tokenize.value);
        [tokenize.value, load.value]
    }

    #[test]
    fn all_cores_tokenize_and_a_cpu_backend_keeps_them_for_training() {
        for backend in [BackendKind::Flex, BackendKind::Candle] {
            assert_eq!(chosen(&[], 32, backend), [32, 1]);
            assert_eq!(chosen(&["pack=false"], 32, backend), [32, 1]);
        }
    }

    #[test]
    fn an_accelerator_gets_more_loader_threads_for_unpacked_rows_but_never_more_than_cores() {
        for backend in [BackendKind::Cuda, BackendKind::Wgpu] {
            assert_eq!(chosen(&["pack=true"], 32, backend), [32, 1]);
            assert_eq!(chosen(&["pack=false"], 32, backend), [32, UNPACKED]);
            assert_eq!(chosen(&["pack=false"], 1, backend), [1, 1]);
        }
    }

    #[test]
    fn a_number_in_the_recipe_wins_over_the_machine() {
        assert_eq!(chosen(&["data.workers=5"], 2, BackendKind::Flex), [5, 5]);
        assert_eq!(chosen(&["data.workers=1", "pack=false"], 8, BackendKind::Cuda), [1, 1]);
    }
}
