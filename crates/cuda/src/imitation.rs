//! Environment variables that make this process run as on another machine, for tests and measurements on the cards that there are.
//!
//! Trade-off: only what changes the code that runs here is imitated. Other libraries see the real machine.

use std::env;

use crate::error::CudaError;

/// What is imitated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Imitation {
    /// `FIREBRICK_CUDA_DRIVER`: the CUDA version of a driver, `1000 * major + 10 * minor`; functions that are newer are not used.
    pub(crate) driver: Option<u32>,
}

impl Imitation {
    /// Reads the environment of this process.
    ///
    /// # Errors
    /// [`CudaError::InvalidVariable`].
    pub(crate) fn of_process() -> Result<Self, CudaError> {
        Self::read(|name| env::var_os(name).map(|value| value.to_string_lossy().into_owned()))
    }

    fn read(variable: impl Fn(&str) -> Option<String>) -> Result<Self, CudaError> {
        let driver = version(&variable, "FIREBRICK_CUDA_DRIVER")?;
        Ok(Self { driver: driver.map(|(major, minor)| 1000 * major + 10 * minor) })
    }
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
    fn nothing_is_imitated_without_a_variable() {
        assert_eq!(Imitation::read(|_| None), Ok(Imitation::default()));
        assert_eq!(with("FIREBRICK_CUDA_DRIVER", ""), Ok(Imitation::default()));
    }

    #[test]
    fn the_version_of_a_driver_is_read_like_the_driver_writes_its_own() {
        assert_eq!(with("FIREBRICK_CUDA_DRIVER", "12.2").map(|imitation| imitation.driver), Ok(Some(12_020)));
    }

    #[test]
    fn a_value_that_is_no_version_is_refused_with_its_variable() {
        for value in ["12", "535.x", "new"] {
            let message = with("FIREBRICK_CUDA_DRIVER", value).expect_err(value).to_string();
            assert!(message.contains(&format!("FIREBRICK_CUDA_DRIVER is {value:?}")), "{message}");
        }
    }
}
