//! The start values of an adapter's matrices: PEFT's `init_lora_weights`.
//!
//! Trade-off: only PEFT's default and PiSSA are supported; the other methods are refused by name.

use std::fmt;

use serde::de::{Error, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// `init_lora_weights`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LoraInit {
    /// A uniform, B zero: `true`.
    #[default]
    Uniform,
    /// The principal part of the weight, which the base loses: "pissa", or with this number of iterations "pissa_niter_N" (Meng et al., 2024).
    Pissa {
        /// Iterations of the randomized decomposition; `None`: as many as make it exact for the purpose.
        niter: Option<usize>,
    },
}

impl LoraInit {
    /// Returns whether it is PEFT's default.
    pub fn is_uniform(&self) -> bool {
        *self == Self::Uniform
    }

    fn parse(text: &str) -> Option<Self> {
        match text.strip_prefix("pissa")? {
            "" => Some(Self::Pissa { niter: None }),
            rest => Some(Self::Pissa { niter: Some(rest.strip_prefix("_niter_")?.parse().ok()?) }),
        }
    }
}

impl fmt::Display for LoraInit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Uniform => f.write_str("true"),
            Self::Pissa { niter: None } => f.write_str("pissa"),
            Self::Pissa { niter: Some(niter) } => write!(f, "pissa_niter_{niter}"),
        }
    }
}

impl Serialize for LoraInit {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Uniform => serializer.serialize_bool(true),
            Self::Pissa { .. } => serializer.collect_str(self),
        }
    }
}

impl<'de> Deserialize<'de> for LoraInit {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Named;
        impl Visitor<'_> for Named {
            type Value = LoraInit;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("true, \"pissa\" or \"pissa_niter_4\" (any number of iterations)")
            }

            fn visit_bool<E: Error>(self, value: bool) -> Result<LoraInit, E> {
                let wrong = || E::invalid_value(serde::de::Unexpected::Bool(value), &self);
                value.then_some(LoraInit::Uniform).ok_or_else(wrong)
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<LoraInit, E> {
                LoraInit::parse(text).ok_or_else(|| E::invalid_value(serde::de::Unexpected::Str(text), &self))
            }
        }
        deserializer.deserialize_any(Named)
    }
}

#[cfg(feature = "schemars")]
impl schemars::JsonSchema for LoraInit {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "LoraInit".into()
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({
            "description": "true, \"pissa\", or \"pissa_niter_N\" with a number of iterations.",
            "oneOf": [{ "const": true }, { "type": "string", "pattern": "^pissa(_niter_[0-9]+)?$" }]
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{from_value, json, to_value};

    use super::*;

    #[test]
    fn names_are_those_of_peft() {
        for (value, init) in [
            (json!(true), LoraInit::Uniform),
            (json!("pissa"), LoraInit::Pissa { niter: None }),
            (json!("pissa_niter_16"), LoraInit::Pissa { niter: Some(16) }),
        ] {
            assert_eq!((from_value::<LoraInit>(value.clone()).unwrap(), to_value(init).unwrap()), (init, value));
        }
        for value in [json!(false), json!("olora"), json!("pissa_niter_"), json!("pissa_niter_x"), json!(3)] {
            let error = from_value::<LoraInit>(value).unwrap_err().to_string();
            assert!(error.contains("pissa_niter_4"), "{error}");
        }
    }
}
