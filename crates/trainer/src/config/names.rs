//! The names that recipes, plans and command lines use for the values of an enum: those that serde gives them.
//!
//! Trade-off: a name is found by serializing the value, which costs an allocation; nothing here runs inside a step.

use serde::Serialize;
use serde::de::value::Error;
use serde::de::{DeserializeOwned, IntoDeserializer};
use serde_json::Value;

/// The name of a value such as `Recompute::Full`: "full". A variant that holds a value is followed by that value's name.
#[must_use]
pub fn to_name(value: &impl Serialize) -> String {
    match serde_json::to_value(value) {
        Ok(value) => plain(&value),
        Err(error) => unreachable!("an enum of plain values is expressible as JSON: {error}"),
    }
}

fn plain(value: &Value) -> String {
    match value {
        Value::String(name) => name.clone(),
        Value::Object(map) if map.len() == 1 => {
            map.iter().map(|(name, value)| format!("{name} {}", plain(value))).collect()
        }
        other => other.to_string(),
    }
}

/// The value with a name, for command lines.
///
/// # Errors
/// A sentence with the allowed names.
pub fn from_name<T: DeserializeOwned>(name: &str) -> Result<T, String> {
    let deserializer: serde::de::value::StrDeserializer<'_, Error> = name.into_deserializer();
    T::deserialize(deserializer).map_err(|error| {
        let message = error.to_string().replace('`', "");
        // The name itself is in every message about a command line already.
        message.split_once(", expected ").map_or(message.clone(), |(_, names)| format!("expected {names}"))
    })
}

#[cfg(test)]
mod tests {
    use firebrick_kernels::{BaseStorage, Recompute};
    use firebrick_precision::{Format, QuantFormat};

    use super::*;

    #[test]
    fn names_are_those_of_recipes_and_read_back() {
        assert_eq!(to_name(&Recompute::Selective), "selective");
        assert_eq!(from_name("selective"), Ok(Recompute::Selective));
        let base = BaseStorage::Frozen(Format::Quantized(QuantFormat::Nf4 { double_quant: true }));
        assert_eq!(to_name(&base), "frozen nf4_double_quant");
        assert_eq!(from_name::<Recompute>("some").unwrap_err(), "expected one of full, projections, selective, none");
    }
}
