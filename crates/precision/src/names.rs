//! Formats as text: printing, parsing, serde and, with the feature `schemars`, JSON schemas. All use the one list of
//! names and aliases in `format.rs`.
//!
//! Trade-off: the schema lists the names without the aliases, so that editors suggest one spelling.

use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;

use serde::de::{Deserialize, Deserializer, Error as _};
use serde::ser::{Serialize, Serializer};

use crate::error::Error;
use crate::format::{FloatType, QuantFormat};

macro_rules! implement_names {
    ($format:ident) => {
        impl $format {
            const NAMES: &'static [&'static str] = &{
                let mut names = [""; $format::ALL.len()];
                let mut index = 0;
                while index < names.len() {
                    names[index] = $format::ALL[index].name();
                    index += 1;
                }
                names
            };
        }

        impl fmt::Display for $format {
            fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.pad(self.name())
            }
        }

        impl FromStr for $format {
            type Err = Error;

            fn from_str(text: &str) -> Result<Self, Error> {
                let matches = |format: &$format| format.name() == text || format.aliases().contains(&text);
                let unknown = || Error::UnknownFormat { got: text.to_owned(), expected: Self::NAMES };
                Self::ALL.into_iter().find(matches).ok_or_else(unknown)
            }
        }

        impl Serialize for $format {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(self.name())
            }
        }

        impl<'de> Deserialize<'de> for $format {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let text = Cow::<str>::deserialize(deserializer)?;
                text.parse().map_err(|_| D::Error::unknown_variant(&text, Self::NAMES))
            }
        }

        #[cfg(feature = "schemars")]
        impl schemars::JsonSchema for $format {
            fn schema_name() -> Cow<'static, str> {
                stringify!($format).into()
            }

            fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
                schemars::json_schema!({ "type": "string", "enum": Self::NAMES })
            }
        }
    };
}

implement_names!(FloatType);
implement_names!(QuantFormat);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::Format;

    #[test]
    fn names_and_aliases_are_distinct_and_parse_to_their_format() {
        let mut seen = QuantFormat::ALL.map(QuantFormat::name).to_vec();
        assert!(QuantFormat::ALL.into_iter().all(|format| format.name().parse() == Ok(format)));
        for float in FloatType::ALL {
            for word in [float.name()].iter().chain(float.aliases()) {
                assert_eq!(word.parse::<FloatType>(), Ok(float), "{word}");
                seen.push(*word);
            }
        }
        let count = seen.len();
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), count, "{seen:?}");
    }

    #[test]
    fn serde_writes_the_name_and_reads_names_and_aliases() {
        let floats = FloatType::ALL.map(Format::Float).into_iter();
        let formats: Vec<Format> = floats.chain(QuantFormat::ALL.map(Format::Quantized)).collect();
        let text = serde_json::to_string(&formats).unwrap();
        let names = formats.iter().map(|format| format!("\"{format}\"")).collect::<Vec<_>>();
        assert_eq!(text, format!("[{}]", names.join(",")));
        assert!(text.starts_with(r#"["float32","bfloat16","float16","nf4","nf4_double_quant","#), "{text}");
        assert_eq!(serde_json::from_str::<Vec<Format>>(&text).unwrap(), formats);
        assert_eq!(serde_json::from_str::<Format>(r#""bf16""#).unwrap(), Format::Float(FloatType::Bf16));
        let double = QuantFormat::Nf4 { double_quant: true };
        assert_eq!(serde_json::to_value(double).unwrap(), "nf4_double_quant");
        assert_eq!(serde_json::from_str::<QuantFormat>(r#""nf4_double_quant""#).unwrap(), double);
    }

    #[test]
    fn an_unknown_name_lists_the_known_ones() {
        let error = "nf5".parse::<QuantFormat>().unwrap_err();
        let names = QuantFormat::ALL.map(QuantFormat::name);
        assert!(matches!(&error, Error::UnknownFormat { got, expected } if got == "nf5" && *expected == names));
        assert_eq!(error.to_string(), format!("unknown format `nf5`, expected one of: {}", names.join(", ")));
        let error = serde_json::from_str::<Format>(r#""nf5""#).unwrap_err().to_string();
        assert!(error.starts_with("expected the name of "), "{error}");
        let error = serde_json::from_str::<QuantFormat>(r#""nf5""#).unwrap_err().to_string();
        assert!(error.contains("unknown variant `nf5`, expected "), "{error}");
        assert!(names.iter().all(|name| error.contains(&format!("`{name}`"))), "{error}");
    }

    #[cfg(feature = "schemars")]
    #[test]
    fn the_schema_lists_the_names() {
        let schema = schemars::schema_for!(QuantFormat).to_value();
        assert_eq!(schema["enum"], serde_json::json!(QuantFormat::ALL));
    }
}
