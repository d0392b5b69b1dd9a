//! Chooses the accelerator whose usage a run samples: the one that its backend computes on.
//!
//! Trade-off: wgpu does not report which card it took, so on a machine with several cards none is sampled.

use firebrick_hwprofile::HardwareProfile;
use firebrick_hwprofile::usage::UsageTarget;
use firebrick_kernels::BackendKind;

/// Returns the target for the rank with this number on its machine, and why it is only the process where a user would expect a card.
pub(crate) fn usage_target(backend: BackendKind, local_rank: usize) -> (UsageTarget, Option<String>) {
    match backend {
        BackendKind::Flex | BackendKind::Candle => (UsageTarget::Process, None),
        BackendKind::Cuda => of_card(&HardwareProfile::detect(), Some(cuda_index(local_rank))),
        BackendKind::Wgpu => of_card(&HardwareProfile::detect(), None),
    }
}

/// Returns the card with this number among those that CUDA sees, or the only card of the machine.
fn of_card(profile: &HardwareProfile, cuda_index: Option<usize>) -> (UsageTarget, Option<String>) {
    let is_cuda = cuda_index.is_some();
    let mut cards = profile.gpus.iter().filter(|gpu| !is_cuda || gpu.maker == firebrick_hwprofile::spec::Maker::Nvidia);
    let card = match cuda_index {
        Some(index) => cards.nth(index),
        None if profile.gpus.len() > 1 => {
            let note = "the card's usage is not sampled: wgpu does not report which of several it uses";
            return (UsageTarget::Process, Some(note.to_owned()));
        }
        None => cards.next(),
    };
    let partition = card.filter(|card| card.is_partition);
    let note =
        partition.map(|card| format!("the usage of {} is not sampled: NVML does not measure partitions", card.name));
    (card.and_then(UsageTarget::of).unwrap_or_default(), note)
}

/// Returns the number of a rank's card among those that CUDA sees.
fn cuda_index(local_rank: usize) -> usize {
    #[cfg(feature = "cuda")]
    {
        use firebrick_kernels::MemoryOps;

        firebrick_kernels::backends::Cuda::device_of(local_rank).index
    }
    #[cfg(not(feature = "cuda"))]
    local_rank
}

#[cfg(test)]
mod tests {
    use firebrick_hwprofile::Gpu;
    use firebrick_hwprofile::spec::Maker;

    use super::*;

    fn machine(makers: &[Maker]) -> HardwareProfile {
        let card = |(index, maker): (usize, &Maker)| Gpu {
            uuid: Some(format!("GPU-{index}")),
            ..Gpu::described(*maker, "a card", 1 << 34)
        };
        HardwareProfile::described(8, 1 << 34, makers.iter().enumerate().map(card).collect())
    }

    #[test]
    fn a_rank_samples_its_own_card_and_wgpu_the_only_one() {
        let two = machine(&[Maker::Nvidia, Maker::Nvidia]);
        let nvidia = |uuid: &str| UsageTarget::Nvidia { uuid: uuid.to_owned(), library: None };
        assert_eq!(of_card(&two, Some(1)), (nvidia("GPU-1"), None));
        assert_eq!(of_card(&machine(&[Maker::Nvidia]), None), (nvidia("GPU-0"), None));
        let (target, note) = of_card(&two, None);
        assert_eq!(target, UsageTarget::Process);
        assert!(note.is_some_and(|note| note.contains("several")));
    }

    #[test]
    fn partitions_leave_the_process() {
        let mut slice = machine(&[Maker::Nvidia]);
        slice.gpus[0].is_partition = true;
        let (target, note) = of_card(&slice, Some(0));
        assert_eq!(target, UsageTarget::Process);
        assert!(note.is_some_and(|note| note.contains("partitions")));
        assert_eq!(of_card(&machine(&[Maker::Apple]), None), (UsageTarget::Process, None));
        assert_eq!(usage_target(BackendKind::Flex, 0), (UsageTarget::Process, None));
    }
}
