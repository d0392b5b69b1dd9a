//! The macro that defines a section of the recipe (each key with its doc, default and limit in one place), and the rules about several keys.
//!
//! Limits are far above any real run, and low enough that the plan's products of several numbers fit into 64 bits.

use std::fmt;

/// Defines the struct of a section. A key is `name: type = default`; a [`Limit`] may follow if its value is a number. `limits` returns the keys that
/// have one, named as in `--set`. A key that a plan takes as it is ends with `=>` and an [`OnResume`](crate::chosen::OnResume): the section is then
/// `planned as` a struct of such decisions, and the key needs no row in the plan.
macro_rules! section {
    ($(#[$about:meta])* pub struct $name:ident in $prefix:literal, planned as $planned:ident { $($keys:tt)* }) => {
        $crate::config::section::section! { $(#[$about])* pub struct $name in $prefix { $($keys)* } }
        $crate::config::section::planned! { $name $planned $prefix $($keys)* }
    };
    (
        $(#[$about:meta])*
        pub struct $name:ident in $prefix:literal {
            $($(#[$doc:meta])* $key:ident: $type:ty = $default:expr $(, $limit:expr)? $(=> $on_resume:ident)?;)*
        }
    ) => {
        $(#[$about])*
        #[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
        #[serde(default, deny_unknown_fields)]
        pub struct $name {
            $($(#[$doc])* pub $key: $type,)*
        }

        impl Default for $name {
            fn default() -> Self {
                Self { $($key: $default,)* }
            }
        }

        impl $name {
            pub(in crate::config) fn limits(&self) -> Vec<$crate::config::section::Limited> {
                vec![$($($crate::config::section::Limited::new(
                    concat!($prefix, stringify!($key)), self.$key, $limit,
                ),)?)*]
            }
        }
    };
}
pub(super) use section;

/// Defines the decisions of a section's keys that a plan takes as they are.
macro_rules! planned {
    (
        $name:ident $planned:ident $prefix:literal
        $($(#[$doc:meta])* $key:ident: $type:ty = $default:expr $(, $limit:expr)? $(=> $on_resume:ident)?;)*
    ) => {
        #[doc = concat!("The decisions of the keys of [`", stringify!($name), "`] that are taken as they are.")]
        #[derive(Clone, Debug, PartialEq, serde::Serialize)]
        pub struct $planned {
            $($(
                #[doc = concat!("`", $prefix, stringify!($key), "`: [`", stringify!($on_resume), "`](OnResume).")]
                pub $key: Chosen<$type>,
            )?)*
        }

        impl Default for $planned {
            fn default() -> Self {
                Self::new(&$name::default())
            }
        }

        impl $planned {
            /// Each of these decisions.
            pub(crate) const KEYS: &[KeyRow] =
                &[$($((stringify!($key), concat!($prefix, stringify!($key)), OnResume::$on_resume),)?)*];

            /// Takes the values of a section, with the reasons.
            pub(crate) fn new(section: &$name) -> Self {
                let default = $name::default();
                Self {
                    $($($key: {
                        const _: OnResume = OnResume::$on_resume;
                        Chosen::key(section.$key.clone(), &default.$key)
                    },)?)*
                }
            }
        }
    };
}
pub(super) use planned;

/// Tokens of a row, an answer, or a chunk of the loss.
pub(super) const TOKENS: u64 = 1 << 24;
pub(super) const ROWS: u64 = 1 << 16;
/// Steps, records, and other counts.
pub(super) const COUNT: u64 = 1 << 32;
pub(super) const EPOCHS: f64 = 1e6;
/// A learning rate, a decay, or another factor.
pub(super) const FACTOR: f64 = 1e6;
/// A number that means nothing in float32 if it is smaller.
const TINY: f64 = 1e-30;
/// The largest whole number of TOML.
pub(super) const SEED: u64 = i64::MAX as u64;

#[derive(Clone, Copy, Debug)]
pub(super) enum Limit {
    /// From the first to the second, both included.
    Whole(u64, u64),
    /// Above 0, by more than float32 rounds to 0, and at most this.
    AboveZero(f64),
    /// 0, or as above.
    ZeroOrMore(f64),
    /// 0 or more and below 1, also in float32.
    BelowOne,
}
pub(super) use Limit::{AboveZero, BelowOne, Whole, ZeroOrMore};

#[derive(Clone, Copy, Debug)]
pub(super) enum Number {
    Count(u64),
    Real(f64),
}

impl fmt::Display for Number {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Count(value) => value.fmt(formatter),
            Self::Real(value) => value.fmt(formatter),
        }
    }
}

/// The value of a key; `None` where it is absent.
pub(super) trait Value {
    fn number(self) -> Option<Number>;
}

impl Value for u64 {
    fn number(self) -> Option<Number> {
        Some(Number::Count(self))
    }
}

impl Value for usize {
    fn number(self) -> Option<Number> {
        Some(Number::Count(self as u64))
    }
}

impl Value for f64 {
    fn number(self) -> Option<Number> {
        Some(Number::Real(self))
    }
}

impl<T: Value> Value for Option<T> {
    fn number(self) -> Option<Number> {
        self.and_then(T::number)
    }
}

pub(super) struct Limited {
    pub(super) key: &'static str,
    pub(super) limit: Limit,
    value: Option<Number>,
}

impl Limited {
    pub(super) fn new(key: &'static str, value: impl Value, limit: Limit) -> Self {
        Self { key, limit, value: value.number() }
    }

    /// Returns the problem with the value and the remedy; `None` if the value is within its limit.
    pub(super) fn broken(&self) -> Option<(String, &'static str)> {
        let value = self.value?;
        let (problem, help) = match (self.limit, value) {
            (Whole(least, _), Number::Count(count)) if count < least => {
                (format!("must be at least {least}"), "write a larger number")
            }
            (Whole(_, most), Number::Count(count)) if count > most => {
                (format!("must be at most {most}"), "write a smaller number")
            }
            (AboveZero(most) | ZeroOrMore(most), Number::Real(real)) if real > most => {
                (format!("must be at most {most}"), "write a smaller number")
            }
            (AboveZero(_), Number::Real(real)) if real.is_nan() || real < TINY => {
                (format!("must be above 0 (at least {TINY:e}) and finite"), "write a positive number")
            }
            (ZeroOrMore(_), Number::Real(real)) if real != 0.0 && (real.is_nan() || real < TINY) => {
                (format!("must be 0 or more (at least {TINY:e}) and finite"), "write 0 to turn it off")
            }
            (BelowOne, Number::Real(real)) if !(0.0..1.0).contains(&(real as f32)) => {
                let help = match self.key {
                    "train.adam_beta1" => "write a number such as 0.9, the default",
                    "train.adam_beta2" => "write a number such as 0.999, the default, or 0.95",
                    _ => "it is a share: write 0.05 for 5 %",
                };
                ("must be 0 or more and below 1".to_owned(), help)
            }
            _ => return None,
        };
        Some((format!("{problem}, got {value}"), help))
    }
}

/// Something that must hold for a recipe, and the message if it does not.
pub(super) struct Rule {
    pub(super) holds: bool,
    pub(super) key: String,
    pub(super) problem: String,
    pub(super) help: &'static str,
}

/// Creates a rule; `holds` must be true.
pub(super) fn rule(holds: bool, key: impl Into<String>, problem: impl Into<String>, help: &'static str) -> Rule {
    Rule { holds, key: key.into(), problem: problem.into(), help }
}

/// Builds rules from `key: what must be true, problem => help;`.
macro_rules! rules {
    ($($key:tt: $holds:expr, $problem:expr => $help:expr;)*) => {
        vec![$($crate::config::section::rule($holds, $key, $problem, $help)),*]
    };
}
pub(super) use rules;

impl From<&Limited> for Rule {
    fn from(limited: &Limited) -> Self {
        let broken = limited.broken();
        let (problem, help) = broken.clone().unwrap_or_default();
        rule(broken.is_none(), limited.key, problem, help)
    }
}
