//! Environment variables that make this process run as on another machine, for tests and measurements on the cards that there are.
//!
//! Trade-off: only what changes the code that runs here is imitated. Other libraries see the real machine.

use std::env;

use crate::error::CudaError;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Imitation {
    /// `FIREBRICK_CUDA_DRIVER`: the CUDA version of a driver, `1000 * major + 10 * minor`; functions that are newer are not used.
    pub(crate) driver: Option<u32>,
    /// `FIREBRICK_CUDA_CAPABILITY`: the compute capability of an older card. Kernels are then compiled to PTX for it.
    pub(crate) capability: Option<(u32, u32)>,
    /// `FIREBRICK_CUDA_BLOCK_BYTES`: the shared memory that a block may use.
    pub(crate) block_bytes: Option<u32>,
}

impl Imitation {
    /// Reads the environment of this process.
    pub(crate) fn of_process() -> Result<Self, CudaError> {
        Self::read(|name| env::var_os(name).map(|value| value.to_string_lossy().into_owned()))
    }

    fn read(variable: impl Fn(&str) -> Option<String>) -> Result<Self, CudaError> {
        let driver = version(&variable, "FIREBRICK_CUDA_DRIVER")?;
        Ok(Self {
            driver: driver.map(|(major, minor)| 1000 * major + 10 * minor),
            capability: version(&variable, CAPABILITY)?,
            block_bytes: bytes(&variable, "FIREBRICK_CUDA_BLOCK_BYTES")?,
        })
    }

    /// Changes the compute capability and the shared memory of a card to what is imitated.
    ///
    /// # Errors
    /// [`CudaError::InvalidVariable`] if the card is older than what it should imitate.
    pub(crate) fn apply(&self, capability: &mut (u32, u32), block_bytes: &mut u32) -> Result<(), CudaError> {
        if let Some((major, minor)) = self.capability {
            if (major, minor) > *capability {
                let value = format!("{major}.{minor}");
                let expected = format!("at most {}.{}, which this card has,", capability.0, capability.1);
                return Err(CudaError::InvalidVariable { name: CAPABILITY, value, expected });
            }
            *capability = (major, minor);
            *block_bytes = (*block_bytes).min(block_bytes_of((major, minor)));
        }
        *block_bytes = (*block_bytes).min(self.block_bytes.unwrap_or(u32::MAX));
        Ok(())
    }
}

const CAPABILITY: &str = "FIREBRICK_CUDA_CAPABILITY";

/// Returns the maximum shared memory of a block in bytes (CUDA programming guide, technical specifications per compute capability).
fn block_bytes_of(capability: (u32, u32)) -> u32 {
    const KIB: u32 = 1024;
    match capability {
        (..7, _) => 48 * KIB,
        (7, 0 | 2) => 96 * KIB,
        (7, _) => 64 * KIB,
        (8, 0 | 7) => 163 * KIB,
        (8, _) | (12.., _) => 99 * KIB,
        _ => 227 * KIB,
    }
}

/// Reads a number of bytes; `None` if the variable is not set or empty.
fn bytes(variable: impl Fn(&str) -> Option<String>, name: &'static str) -> Result<Option<u32>, CudaError> {
    let Some(value) = variable(name).filter(|value| !value.is_empty()) else { return Ok(None) };
    let invalid =
        |_| CudaError::InvalidVariable { name, value: value.clone(), expected: "a number of bytes".to_owned() };
    value.parse().map(Some).map_err(invalid)
}

/// Reads two numbers with a dot between them; `None` if the variable is not set or empty.
fn version(variable: impl Fn(&str) -> Option<String>, name: &'static str) -> Result<Option<(u32, u32)>, CudaError> {
    let Some(value) = variable(name).filter(|value| !value.is_empty()) else { return Ok(None) };
    let numbers = value.split_once('.').and_then(|(major, minor)| Some((major.parse().ok()?, minor.parse().ok()?)));
    let invalid =
        || CudaError::InvalidVariable { name, value: value.clone(), expected: "a version such as 12.2".to_owned() };
    numbers.map(Some).ok_or_else(invalid)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads an environment that has only this variable.
    fn with(name: &str, value: &str) -> Result<Imitation, CudaError> {
        Imitation::read(|other| (other == name).then(|| value.to_owned()))
    }

    #[test]
    fn what_the_variables_say_is_imitated() {
        assert_eq!(Imitation::read(|_| None), Ok(Imitation::default()));
        assert_eq!(with("FIREBRICK_CUDA_DRIVER", ""), Ok(Imitation::default()));
        assert_eq!(with("FIREBRICK_CUDA_DRIVER", "12.2").map(|imitation| imitation.driver), Ok(Some(12_020)));
    }

    #[test]
    fn an_older_card_has_no_more_shared_memory() {
        let h100 = ((9, 0), 232_448);
        let imitated = |capability, block_bytes| {
            let (mut own, mut own_bytes) = h100;
            let imitation = Imitation { capability, block_bytes, ..Imitation::default() };
            imitation.apply(&mut own, &mut own_bytes).map(|()| (own, own_bytes))
        };
        assert_eq!(imitated(None, None), Ok(h100));
        assert_eq!(imitated(None, Some(101_376)), Ok(((9, 0), 101_376)));
        assert_eq!(imitated(Some((8, 0)), None), Ok(((8, 0), 166_912)));
        assert_eq!(imitated(Some((8, 0)), Some(101_376)), Ok(((8, 0), 101_376)));
        assert_eq!(imitated(Some((8, 9)), Some(999_999)), Ok(((8, 9), 101_376)));
        assert_eq!(imitated(Some((7, 5)), None), Ok(((7, 5), 65_536)));
        let message = imitated(Some((10, 0)), None).expect_err("an H100 is no Blackwell").to_string();
        assert!(message.contains("FIREBRICK_CUDA_CAPABILITY") && message.contains("at most 9.0"), "{message}");
    }

    #[test]
    fn a_value_without_meaning_is_refused_by_variable() {
        let message = with("FIREBRICK_CUDA_BLOCK_BYTES", "64 KiB").expect_err("bytes").to_string();
        assert!(message.contains("FIREBRICK_CUDA_BLOCK_BYTES is \"64 KiB\""), "{message}");
        for value in ["12", "535.x", "new"] {
            let message = with("FIREBRICK_CUDA_DRIVER", value).expect_err(value).to_string();
            assert!(message.contains(&format!("FIREBRICK_CUDA_DRIVER is {value:?}")), "{message}");
        }
    }
}
