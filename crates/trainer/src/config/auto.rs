//! A value that a recipe states, or leaves to the plan with "auto".
//!
//! Trade-off: serde, clap and JSON schema are written by hand, so that a message names "auto" next to the values.

use std::borrow::Cow;
use std::fmt;
use std::marker::PhantomData;
use std::str::FromStr;

use firebrick_kernels::{BackendKind, Recompute};
use firebrick_precision::FloatType;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{DeserializeOwned, Error as DeError, Unexpected, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::json;

use crate::config::section::{FACTOR, Number, Value};
use crate::config::{from_name, to_name};

const AUTO: &str = "auto";

/// A value, or "auto".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Auto<T> {
    /// The plan decides.
    #[default]
    Auto,
    /// The recipe decides.
    Given(T),
}

/// The backend that a recipe or a command line requests: `backend`.
pub type BackendChoice = Auto<BackendKind>;

impl<T> Auto<T> {
    /// Returns the value of the recipe; `None`: the plan decides.
    pub fn given(self) -> Option<T> {
        match self {
            Self::Auto => None,
            Self::Given(value) => Some(value),
        }
    }
}

impl<T> From<Option<T>> for Auto<T> {
    fn from(value: Option<T>) -> Self {
        value.map_or(Self::Auto, Self::Given)
    }
}

/// A value that "auto" may stand for: a number, or one of several names.
pub trait Choice: Copy + Serialize + DeserializeOwned {
    /// Name of the schema's definition.
    const DEFINITION: &'static str;
    /// What a recipe may write.
    const EXPECTED: &'static str = "a string";
    /// "auto" and the names; empty for numbers.
    const NAMES: &'static [&'static str] = &[];

    /// Returns the schema of the value and of "auto".
    fn schema() -> Schema {
        json_schema!({ "type": "string", "enum": Self::NAMES })
    }

    /// Reads what was written: a text other than "auto", or a number.
    fn read<E: DeError>(written: Unexpected<'_>) -> Result<Self, E> {
        let Unexpected::Str(name) = written else { return Err(E::invalid_type(written, &Self::EXPECTED)) };
        let value = from_name(name).ok().filter(|_| Self::NAMES.contains(&name));
        value.ok_or_else(|| E::unknown_variant(name, Self::NAMES))
    }
}

/// Rows of a micro-batch: `train.micro_batch_size`.
impl Choice for usize {
    const DEFINITION: &'static str = "MicroBatchSize";
    const EXPECTED: &'static str = "\"auto\" or a number of rows";

    fn schema() -> Schema {
        json_schema!({ "anyOf": [{ "type": "string", "enum": [AUTO] }, { "type": "integer", "minimum": 1 }] })
    }

    fn read<E: DeError>(written: Unexpected<'_>) -> Result<Self, E> {
        match written {
            Unexpected::Signed(rows) if rows >= 0 => Ok(rows as Self),
            _ => Err(E::invalid_value(written, &Self::EXPECTED)),
        }
    }
}

/// GiB that stay on the device: `train.optimizer_device_gib` and `train.kept_weights_gib`.
impl Choice for f64 {
    const DEFINITION: &'static str = "DeviceBudget";
    const EXPECTED: &'static str = "\"auto\" or a number of GiB";

    fn schema() -> Schema {
        json_schema!({ "anyOf": [{ "type": "string", "enum": [AUTO] }, { "type": "number", "minimum": 0 }] })
    }

    fn read<E: DeError>(written: Unexpected<'_>) -> Result<Self, E> {
        let gib = match written {
            Unexpected::Signed(gib) => gib as Self,
            Unexpected::Float(gib) => gib,
            _ => return Err(E::invalid_value(written, &Self::EXPECTED)),
        };
        let is_allowed = (0.0..=FACTOR).contains(&gib);
        is_allowed.then_some(gib).ok_or_else(|| E::invalid_value(Unexpected::Float(gib), &"0 GiB or more"))
    }
}

/// A fraction of the data: `data.eval_fraction`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Share(pub f64);

impl Choice for Share {
    const DEFINITION: &'static str = "EvalFraction";
    const EXPECTED: &'static str = "\"auto\" or a fraction";

    fn schema() -> Schema {
        json_schema!({ "anyOf": [{ "type": "string", "enum": [AUTO] }, { "type": "number" }] })
    }

    fn read<E: DeError>(written: Unexpected<'_>) -> Result<Self, E> {
        match written {
            Unexpected::Signed(whole) => Ok(Self(whole as f64)),
            Unexpected::Float(share) => Ok(Self(share)),
            _ => Err(E::invalid_value(written, &Self::EXPECTED)),
        }
    }
}

impl Choice for BackendKind {
    const DEFINITION: &'static str = "BackendChoice";
    const NAMES: &'static [&'static str] =
        &[AUTO, Self::Cuda.name(), Self::Wgpu.name(), Self::Candle.name(), Self::Flex.name()];
}

impl Choice for Recompute {
    const DEFINITION: &'static str = "RecomputeChoice";
    const NAMES: &'static [&'static str] = &[AUTO, "full", "projections", "selective", "none"];

    fn schema() -> Schema {
        let descriptions = [
            "The fastest that fits.",
            "Save the input of each layer.",
            "Save the inputs of attention and of the MLP, and attention's output.",
            "Save the outputs of matrix multiplications and of attention.",
            "Save all that the backward reads.",
        ];
        let policies = Self::NAMES.iter().zip(descriptions);
        let one = |(name, what)| json!({ "type": "string", "const": name, "description": what });
        json_schema!({ "oneOf": policies.map(one).collect::<Vec<_>>(), "description": "The value of `train.recompute`." })
    }
}

/// The format of sums: `train.gradients`.
impl Choice for FloatType {
    const DEFINITION: &'static str = "GradientSums";
    const NAMES: &'static [&'static str] = &[AUTO, Self::F32.name(), Self::Bf16.name()];
}

impl<T: Value> Value for Auto<T> {
    fn number(self) -> Option<Number> {
        self.given().and_then(T::number)
    }
}

impl fmt::Display for BackendChoice {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&to_name(self))
    }
}

impl FromStr for BackendChoice {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        from_name(name).map_err(|_| format!("'{name}' is not one of {}", BackendKind::NAMES.join(", ")))
    }
}

impl<T: Choice> Serialize for Auto<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Auto => serializer.serialize_str(AUTO),
            Self::Given(value) => value.serialize(serializer),
        }
    }
}

impl<'de, T: Choice> Deserialize<'de> for Auto<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Reader(PhantomData))
    }
}

struct Reader<T>(PhantomData<T>);

impl<T: Choice> Visitor<'_> for Reader<T> {
    type Value = Auto<T>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(T::EXPECTED)
    }

    fn visit_str<E: DeError>(self, text: &str) -> Result<Auto<T>, E> {
        if text == AUTO { Ok(Auto::Auto) } else { T::read(Unexpected::Str(text)).map(Auto::Given) }
    }

    fn visit_i64<E: DeError>(self, whole: i64) -> Result<Auto<T>, E> {
        T::read(Unexpected::Signed(whole)).map(Auto::Given)
    }

    fn visit_u64<E: DeError>(self, whole: u64) -> Result<Auto<T>, E> {
        self.visit_i64(i64::try_from(whole).unwrap_or(i64::MAX))
    }

    fn visit_f64<E: DeError>(self, real: f64) -> Result<Auto<T>, E> {
        T::read(Unexpected::Float(real)).map(Auto::Given)
    }
}

impl<T: Choice> JsonSchema for Auto<T> {
    fn schema_name() -> Cow<'static, str> {
        T::DEFINITION.into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        T::schema()
    }
}

#[cfg(test)]
mod tests {
    use std::fmt::Debug;

    use super::*;

    /// Checks that values read back as themselves and "auto" as itself, and what is said of others.
    fn check<T: Choice + Debug + PartialEq>(values: &[T], wrong: &[(&str, &str)]) {
        let read = |json: &str| serde_json::from_str::<Auto<T>>(json).map_err(|error| error.to_string());
        for value in values.iter().copied().map(Auto::Given).chain([Auto::Auto]) {
            assert_eq!(read(&serde_json::to_string(&value).unwrap()), Ok(value));
        }
        for (json, message) in wrong {
            assert!(read(json).is_err_and(|error| error.contains(message)), "{json}: {:?}", read(json));
        }
    }

    #[test]
    fn values_and_auto_read_back_as_themselves() {
        let rows = "\"auto\" or a number of rows";
        check(&[1_usize, 24], &[("\"all\"", rows), ("-1", rows), ("2.5", rows)]);
        check(&[0.0, 2.5], &[("\"all\"", "\"auto\" or a number of GiB"), ("-1", "0 GiB or more")]);
        assert_eq!(serde_json::from_str::<Auto<f64>>("3").unwrap(), Auto::Given(3.0));
        check(&[Share(0.25)], &[("\"all\"", "\"auto\" or a fraction"), ("true", "\"auto\" or a fraction")]);
        check(&BackendKind::ALL, &[("\"tpu\"", "`candle`, `flex`"), ("1", "a string")]);
        check(&[FloatType::F32, FloatType::Bf16], &[("\"float16\"", "`auto`, `float32`, `bfloat16`")]);
        let policies = [Recompute::Full, Recompute::Projections, Recompute::Selective, Recompute::None];
        check(&policies, &[("\"some\"", "`auto`, `full`, `projections`, `selective`, `none`")]);
    }

    #[test]
    fn every_name_of_a_backend_is_an_argument() {
        for name in BackendKind::NAMES {
            assert_eq!(name.parse::<BackendChoice>().unwrap().to_string(), *name);
        }
        assert!("tpu".parse::<BackendChoice>().unwrap_err().contains("candle, flex"));
    }
}
