//! What a program is compiled to: machine code for the card, or PTX that the driver translates for it.

use crate::error::CudaError;

/// What a program is compiled to, for an architecture given as `10 * major + minor`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Target {
    /// A cubin for this architecture only.
    MachineCode(u32),
    /// PTX, which the driver translates for this and every later architecture.
    Ptx(u32),
}

impl Target {
    /// Chooses what to compile for a card; `known` is what NVRTC compiles for, or empty if it cannot tell.
    pub(super) fn of((major, minor): (u32, u32), known: &[u32], is_imitation: bool) -> Result<Self, CudaError> {
        let number = 10 * major + minor;
        if known.is_empty() || known.contains(&number) {
            return Ok(if is_imitation { Self::Ptx(number) } else { Self::MachineCode(number) });
        }
        let newest = known.iter().copied().filter(|older| *older < number).max();
        newest.map(Self::Ptx).ok_or_else(|| CudaError::UnknownArchitecture { number, known: known.to_vec() })
    }

    /// Returns NVRTC's name of the architecture. Machine code from Hopper on is of the architecture-specific variant (`sm_90a`),
    /// which instructions such as wgmma require, and which no later card runs.
    pub(super) fn name(self) -> String {
        match self {
            Self::MachineCode(number) if number >= 90 => format!("sm_{number}a"),
            Self::MachineCode(number) => format!("sm_{number}"),
            Self::Ptx(number) => format!("compute_{number}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Some of the architectures that NVRTC 12.2 knows.
    const KNOWN: [u32; 6] = [50, 75, 80, 86, 89, 90];

    fn name(capability: (u32, u32), known: &[u32], is_imitation: bool) -> Result<String, CudaError> {
        Target::of(capability, known, is_imitation).map(Target::name)
    }

    #[test]
    fn special_instructions_are_enabled_from_hopper_on() {
        for (capability, expected) in [((8, 0), "sm_80"), ((9, 0), "sm_90a"), ((12, 0), "sm_120a")] {
            assert_eq!(name(capability, &[], false).as_deref(), Ok(expected), "no list refuses anything");
        }
    }

    #[test]
    fn unknown_cards_get_ptx_of_the_newest_older_one() {
        assert_eq!(name((9, 0), &KNOWN, false).as_deref(), Ok("sm_90a"));
        assert_eq!(name((12, 0), &KNOWN, false).as_deref(), Ok("compute_90"));
        assert_eq!(name((8, 7), &KNOWN, false).as_deref(), Ok("compute_86"));
        let message = name((3, 5), &KNOWN, false).expect_err("there is none").to_string();
        assert!(message.contains("capability 3.5") && message.contains("7.5, 8.0"), "{message}");
    }

    #[test]
    fn an_imitated_card_gets_ptx_which_the_real_one_runs() {
        assert_eq!(name((8, 0), &KNOWN, true).as_deref(), Ok("compute_80"));
    }
}
