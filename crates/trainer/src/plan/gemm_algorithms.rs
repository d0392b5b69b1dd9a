//! Whether the algorithms of large GEMMs are measured before they are used.
//!
//! Trade-off: a run that is planned to be short takes what the library proposes first, even if it is repeated often; `train.tune_gemms`
//! measures once for all of them.

use firebrick_kernels::{BackendKind, GemmAlgorithms};

use crate::plan::chosen::Chosen;
use crate::plan::forecast::Forecast;

/// Runs of at least so many seconds earn back what measuring takes.
const LONG_SECONDS: f64 = 600.0;

/// `None` where there is no choice.
pub(super) fn decide(
    backend: BackendKind,
    tune_gemms: Option<bool>,
    forecast: Option<&Forecast>,
) -> Option<Chosen<GemmAlgorithms>> {
    if backend != BackendKind::Cuda {
        return None;
    }
    let measured =
        "the first step tries what the library proposes, for 5 to 15 s; choices are kept on disk for this card";
    Some(match tune_gemms {
        Some(true) => Chosen::new(GemmAlgorithms::Measured, format!("train.tune_gemms: {measured}")),
        Some(false) => Chosen::new(GemmAlgorithms::Library, "train.tune_gemms: the first that the library proposes"),
        None if forecast.is_some_and(|forecast| forecast.run_seconds.value.lower >= LONG_SECONDS) => {
            Chosen::new(GemmAlgorithms::Measured, format!("auto, for a run of ten minutes or more: {measured}"))
        }
        None => Chosen::new(
            GemmAlgorithms::Kept,
            "auto, for a short run: what was measured on this card before, else the first that the library proposes",
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_cuda_has_a_choice_and_the_recipe_makes_it() {
        assert_eq!(decide(BackendKind::Flex, Some(true), None), None);
        let chosen = |tune| decide(BackendKind::Cuda, tune, None).map(|chosen| chosen.value);
        assert_eq!(chosen(Some(true)), Some(GemmAlgorithms::Measured));
        assert_eq!(chosen(Some(false)), Some(GemmAlgorithms::Library));
        assert_eq!(chosen(None), Some(GemmAlgorithms::Kept), "how long the run takes is not known");
    }
}
