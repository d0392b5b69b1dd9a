//! How the base weights are stored, and which widths a storage format takes.
//!
//! Trade-off: all frozen projections have one format; the embedding and the head stay dense.

use firebrick_arch::ModelSpec;
use firebrick_kernels::BaseStorage;
use firebrick_precision::{Error as FormatError, Format, QuantFormat};

use crate::config::RunConfig;
use crate::error::RunError;
use crate::plan::chosen::Chosen;

/// What the recipe says, with the format that weights have where it says nothing.
pub(super) fn storage(config: &RunConfig, compute: Format) -> BaseStorage {
    match (config.quantized_base(), &config.lora) {
        (Some(format), _) => BaseStorage::Frozen(Format::Quantized(format)),
        (None, Some(_)) => BaseStorage::Frozen(compute),
        (None, None) => BaseStorage::Trained,
    }
}

/// The storage with its reason.
///
/// # Errors
/// [`RunError::BaseFormat`] where a projection has rows that the format does not take.
pub(super) fn decide(
    config: &RunConfig,
    spec: &ModelSpec,
    storage: BaseStorage,
) -> Result<Chosen<BaseStorage>, RunError> {
    let why = match storage {
        BaseStorage::Trained => "mode = \"full\": every weight trains, in f32".to_owned(),
        BaseStorage::Frozen(Format::Quantized(format)) => {
            check_widths(format, spec)?;
            let key = if config.base.is_some() { "base" } else { "[bnb_4bit]" };
            format!("{key}: {:.3} bits per weight, quantized while it is read", format.bits_per_value())
        }
        BaseStorage::Frozen(_) => "[lora] without [bnb_4bit] or base: frozen in the compute format".to_owned(),
    };
    Ok(Chosen::new(storage, why))
}

fn check_widths(format: QuantFormat, spec: &ModelSpec) -> Result<(), RunError> {
    let refused =
        |module: &str, source: FormatError| RunError::BaseFormat { format, module: module.to_owned(), source };
    spec.modules()
        .try_for_each(|(module, inputs)| format.check_columns(inputs).map_err(|source| refused(&module.path, source)))
}

#[cfg(test)]
mod tests {
    use firebrick_arch::shapes::{llama_3_1_8b, llama_3_2_1b};

    use super::*;

    #[test]
    fn models_take_every_format_and_odd_widths_are_refused_by_name() {
        for format in QuantFormat::ALL {
            for spec in [llama_3_1_8b(), llama_3_2_1b()] {
                check_widths(format, &spec).unwrap();
            }
        }
        let odd = ModelSpec { hidden_size: 2048 + 16, ..llama_3_2_1b() };
        check_widths(QuantFormat::Nvfp4, &odd).unwrap();
        let message = check_widths(QuantFormat::Mxfp4, &odd).unwrap_err().to_string();
        assert!(message.contains("base = \"mxfp4\": model.layers.0.") && message.contains("2064"), "{message}");
    }
}
