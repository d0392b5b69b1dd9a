//! Decides how many threads tokenize, and how many build batches.
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

/// Returns the pipeline that tokenizes a recipe's data.
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
    use super::*;
    use crate::plan::fixtures::read_recipe;

    #[test]
    fn all_cores_tokenize_and_loaders_leave_a_cpu_backend_its_cores_unless_the_recipe_has_a_number() {
        use BackendKind::{Candle, Cuda, Flex, Wgpu};
        for (changes, cores, backends, expected) in [
            (&[] as &[&str], 32, &[Flex, Candle] as &[BackendKind], [32, 1]),
            (&["pack=false"], 32, &[Flex, Candle], [32, 1]),
            (&["pack=true"], 32, &[Cuda, Wgpu], [32, 1]),
            (&["pack=false"], 32, &[Cuda, Wgpu], [32, UNPACKED]),
            (&["pack=false"], 1, &[Cuda, Wgpu], [1, 1]),
            (&["data.workers=5"], 2, &[Flex], [5, 5]),
            (&["data.workers=1", "pack=false"], 8, &[Cuda], [1, 1]),
        ] {
            let config = read_recipe("model='m'\nmode='full'\n[data]\npath='d'\n", changes);
            let profile = HardwareProfile::described(cores, 0, Vec::new());
            for &backend in backends {
                let chosen = [to_tokenize(&config, &profile), to_load(&config, &profile, backend)];
                assert!(chosen.iter().all(|chosen| !chosen.reason.is_empty()));
                assert_eq!(tokenizing(&config, &profile).workers.get(), chosen[0].value);
                assert_eq!(chosen.map(|chosen| chosen.value), expected, "{changes:?}, {cores} cores, {backend}");
            }
        }
    }
}
