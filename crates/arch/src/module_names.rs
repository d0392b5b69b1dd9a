//! Selects modules of a model: "all-linear", a list of names, or a regular expression; and values by pattern. Matching is PEFT's.
//!
//! Trade-off: a regular expression is searched with backtracking, as Python does, because its dialect has look-ahead.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use fancy_regex::Regex;
use serde::de::value::SeqAccessDeserializer;
use serde::de::{Error as DeError, MapAccess, SeqAccess, Unexpected, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::error::ArchError;
use crate::spec::ModelSpec;
use crate::text_names::is_expert;

/// PEFT's name for every linear layer but the head.
pub const ALL_LINEAR: &str = "all-linear";

/// The linear modules that carry LoRA. In a recipe: `"all-linear"`, a list of names such as `["q_proj", "v_proj"]`, or a regular expression.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TargetModules {
    /// Every linear module of every layer, never the head: PEFT's "all-linear" without a mixture's experts, which carry LoRA only where they are
    /// named.
    AllLinear,
    /// Modules whose path is one of these or ends in a dot and one of these, as PEFT matches a list: `q_proj`, `self_attn.q_proj`, or a
    /// whole path such as `model.layers.3.self_attn.q_proj`.
    Named(Vec<String>),
    /// Modules whose whole path this expression matches, as PEFT matches a string.
    Matching(PathPattern),
}

/// A regular expression over a module's whole path.
#[derive(Clone, Debug)]
pub struct PathPattern {
    text: String,
    whole: Regex,
}

impl PathPattern {
    /// Compiles an expression.
    pub fn new(text: &str) -> Result<Self, ArchError> {
        Self::anchored(text, format!("^(?:{text})$"))
    }

    fn anchored(text: &str, whole: String) -> Result<Self, ArchError> {
        let bad = |source| ArchError::BadPattern { pattern: text.to_owned(), source: Box::new(source) };
        Ok(Self { text: text.to_owned(), whole: Regex::new(&whole).map_err(bad)? })
    }

    /// Returns the expression as it was written.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// Returns the error for an expression that matches the end of one of these paths, and the whole of none.
    fn of_ends(&self, paths: &[String]) -> Option<ArchError> {
        let alternatives = self.text.contains('|') && !self.text.starts_with('(');
        let whole = if alternatives { format!(".*({})", self.text) } else { format!(".*{}", self.text) };
        let pattern = Self::new(&format!(r".*\.(?:{})", self.text)).ok()?;
        let path = paths.iter().find(|path| pattern.matches(path))?;
        Some(ArchError::NotWholePath { pattern: self.text.clone(), path: path.clone(), whole })
    }

    /// Returns whether the expression matches a path. An expression that exceeds the backtracking limit matches nothing.
    pub fn matches(&self, path: &str) -> bool {
        self.whole.is_match(path).unwrap_or(false)
    }
}

impl PartialEq for PathPattern {
    fn eq(&self, other: &Self) -> bool {
        self.text == other.text
    }
}

impl Eq for PathPattern {}

impl TargetModules {
    /// Builds targets from names. A list that is just "all-linear" becomes [`TargetModules::AllLinear`].
    pub fn from_names(names: Vec<String>) -> Self {
        match names.as_slice() {
            [only] if only.eq_ignore_ascii_case(ALL_LINEAR) => Self::AllLinear,
            _ => Self::Named(names),
        }
    }

    /// Builds targets from one string: "all-linear" or a regular expression.
    pub fn from_text(text: &str) -> Result<Self, ArchError> {
        if text.eq_ignore_ascii_case(ALL_LINEAR) {
            return Ok(Self::AllLinear);
        }
        Ok(Self::Matching(PathPattern::new(text)?))
    }

    /// Returns whether the targets include the linear module at a path such as `model.layers.0.self_attn.q_proj`. `path` must come from
    /// [`ModelSpec::modules`].
    pub fn matches(&self, path: &str) -> bool {
        match self {
            Self::AllLinear => !is_expert(path),
            Self::Named(names) => names.iter().any(|name| path_ends_in(path, name)),
            Self::Matching(pattern) => pattern.matches(path),
        }
    }

    /// Returns these targets, checked against a model. A list that names every kind of linear module becomes [`TargetModules::AllLinear`], so that
    /// equivalent targets compare equal.
    ///
    /// # Errors
    /// An empty list, and a name or expression that matches no linear module of the model, `lm_head` and `embed_tokens` among them.
    pub fn resolve(&self, spec: &ModelSpec) -> Result<Self, ArchError> {
        let modules = || spec.linear_module_names();
        let modules_alone = spec.modules().filter(|(module, _)| module.parameter.is_none());
        let paths: Vec<String> = modules_alone.map(|(module, _)| module.path).collect();
        let unknown = |name: &str| {
            let error = || ArchError::UnknownTarget { name: name.to_owned(), modules: modules() };
            spec.only_missing(name, |path| self.hits_by(name, path)).unwrap_or_else(error)
        };
        match self {
            Self::AllLinear => Ok(Self::AllLinear),
            Self::Matching(pattern) if paths.iter().any(|path| pattern.matches(path)) => Ok(self.clone()),
            Self::Matching(pattern) => Err(pattern.of_ends(&paths).unwrap_or_else(|| unknown(pattern.as_str()))),
            Self::Named(names) if names.is_empty() => Err(ArchError::NoTargets { modules: modules() }),
            Self::Named(names) => {
                let is_unknown = |name: &&String| !paths.iter().any(|path| path_ends_in(path, name));
                if let Some(name) = names.iter().find(is_unknown) {
                    return Err(unknown(name));
                }
                let given: BTreeSet<&String> = names.iter().collect();
                let all = given == modules().iter().collect();
                Ok(if all { Self::AllLinear } else { self.clone() })
            }
        }
    }

    /// Returns whether one of these targets, a name or the expression, hits a path.
    fn hits_by(&self, target: &str, path: &str) -> bool {
        match self {
            Self::AllLinear | Self::Named(_) => path_ends_in(path, target),
            Self::Matching(pattern) => pattern.matches(path),
        }
    }

    /// Returns the list for PEFT. "all-linear" is spelled out, because readers other than PEFT may not know it; an expression is one name.
    pub fn names(&self, spec: &ModelSpec) -> Vec<String> {
        match self {
            Self::AllLinear => spec.linear_module_names(),
            Self::Named(names) => names.clone(),
            Self::Matching(pattern) => vec![pattern.as_str().to_owned()],
        }
    }
}

/// Returns whether a path is that of one parameter of all experts, such as `model.layers.0.mlp.experts.gate_up_proj`.
pub(crate) fn is_expert_parameter(path: &str) -> bool {
    path.rsplit_once(".experts.").is_some_and(|(_, rest)| !rest.starts_with(|first: char| first.is_ascii_digit()))
}

pub(crate) fn path_ends_in(path: &str, end: &str) -> bool {
    path.strip_suffix(end).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
}

/// Values for the modules that a pattern matches: PEFT's `rank_pattern` and `alpha_pattern`. A key is a regular expression over the path
/// or its end after a dot; the first one that matches counts.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ByPattern<T>(Vec<(PathPattern, T)>);

impl<T: Copy + PartialEq> ByPattern<T> {
    /// Builds the table from keys and values, in their order.
    pub fn new(entries: impl IntoIterator<Item = (String, T)>) -> Result<Self, ArchError> {
        let pattern = |key: &str| PathPattern::anchored(key, format!(r"^(?:.*\.)?(?:{key})$"));
        let compiled = |(key, value): (String, T)| Ok((pattern(&key)?, value));
        Ok(Self(entries.into_iter().map(compiled).collect::<Result<_, _>>()?))
    }

    /// Returns the value of the module at `path`.
    pub fn get(&self, path: &str) -> Option<T> {
        self.0.iter().find(|(pattern, _)| pattern.matches(path)).map(|(_, value)| *value)
    }

    /// Iterates over keys and values in their order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, T)> {
        self.0.iter().map(|(pattern, value)| (pattern.as_str(), *value))
    }

    /// Returns the same keys with other values.
    #[must_use]
    pub fn map(&self, to: impl Fn(T) -> T) -> Self {
        Self(self.0.iter().map(|(pattern, value)| (pattern.clone(), to(*value))).collect())
    }

    /// Returns a table with the same values for modules that are called otherwise: `paths` has their names by this table's names. Keys stay where
    /// they give the same; otherwise each module is a key.
    #[must_use]
    pub fn renamed(&self, paths: &BTreeMap<String, String>) -> Self {
        if paths.iter().all(|(from, to)| self.get(from) == self.get(to)) {
            return self.clone();
        }
        let value = |(from, to): (&String, &String)| Some((to.clone(), self.get(from)?));
        Self::new(paths.iter().filter_map(value)).expect("a path is an expression")
    }

    /// Returns whether the table is empty.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the keys that match none of these paths.
    pub(crate) fn unused<'a>(&'a self, paths: &'a [String]) -> impl Iterator<Item = &'a str> {
        let matches_none = |pattern: &&(PathPattern, T)| !paths.iter().any(|path| pattern.0.matches(path));
        self.0.iter().filter(matches_none).map(|(pattern, _)| pattern.as_str())
    }

    /// Returns two keys that match the same path with different values.
    pub(crate) fn ambiguous<'a>(&'a self, paths: &'a [String]) -> Option<(&'a str, &'a str, &'a str)> {
        paths.iter().find_map(|path| {
            let mut matching = self.0.iter().filter(|(pattern, _)| pattern.matches(path));
            let (first, value) = matching.next()?;
            let (other, _) = matching.find(|(_, other)| other != value)?;
            Some((path.as_str(), first.as_str(), other.as_str()))
        })
    }
}

impl<T: Serialize> Serialize for ByPattern<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(pattern, value)| (pattern.as_str(), value)))
    }
}

impl<'de, T: Deserialize<'de> + Copy + PartialEq> Deserialize<'de> for ByPattern<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries<T>(std::marker::PhantomData<T>);
        impl<'de, T: Deserialize<'de> + Copy + PartialEq> Visitor<'de> for Entries<T> {
            type Value = ByPattern<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a table of module names or regular expressions, each with a number")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<ByPattern<T>, A::Error> {
                let mut entries = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    entries.push(entry);
                }
                ByPattern::new(entries).map_err(A::Error::custom)
            }
        }
        deserializer.deserialize_map(Entries(std::marker::PhantomData))
    }
}

impl Serialize for TargetModules {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::AllLinear => serializer.serialize_str(ALL_LINEAR),
            Self::Named(names) => names.serialize(serializer),
            Self::Matching(pattern) => serializer.serialize_str(pattern.as_str()),
        }
    }
}

impl<'de> Deserialize<'de> for TargetModules {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(TargetVisitor)
    }
}

struct TargetVisitor;

impl<'de> Visitor<'de> for TargetVisitor {
    type Value = TargetModules;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "\"{ALL_LINEAR}\", a list of module names such as [\"q_proj\", \"v_proj\"], or a regular expression such as \".*_proj\""
        )
    }

    fn visit_str<E: DeError>(self, text: &str) -> Result<TargetModules, E> {
        // A name alone would be an expression that matches no whole path: a list was meant.
        if !text.eq_ignore_ascii_case(ALL_LINEAR)
            && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
        {
            return Err(E::invalid_value(Unexpected::Str(text), &self));
        }
        TargetModules::from_text(text).map_err(E::custom)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<TargetModules, A::Error> {
        Vec::deserialize(SeqAccessDeserializer::new(list)).map(TargetModules::from_names)
    }
}

#[cfg(feature = "schemars")]
impl schemars::JsonSchema for TargetModules {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "TargetModules".into()
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({
            "description": "\"all-linear\", a list of Hugging Face module names, or a regular expression over the whole path of a module.",
            "oneOf": [{ "type": "string" }, { "type": "array", "items": { "type": "string" }, "minItems": 1 }]
        })
    }
}

#[cfg(feature = "schemars")]
impl<T: schemars::JsonSchema> schemars::JsonSchema for ByPattern<T> {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        format!("ByPatternOf{}", T::schema_name()).into()
    }

    fn json_schema(generator: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({ "type": "object", "additionalProperties": generator.subschema_for::<T>() })
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use serde_json::{from_str, from_value, json, to_value};

    use super::*;
    use crate::config::tests::tiny;

    pub(crate) fn named(names: &[&str]) -> TargetModules {
        TargetModules::from_names(names.iter().map(|&name| name.to_owned()).collect())
    }

    #[test]
    fn targets_match_whole_parts_of_a_path() {
        assert!(named(&["q_proj"]).matches("model.layers.0.self_attn.q_proj"));
        assert!(named(&["model.layers.1.self_attn.q_proj"]).matches("model.layers.1.self_attn.q_proj"));
        assert!(!named(&["1.self_attn.q_proj"]).matches("model.layers.11.self_attn.q_proj"));
        assert!(!named(&["model.layers.1.self_attn.q_proj"]).matches("model.layers.11.self_attn.q_proj"));
    }

    #[test]
    fn an_expression_matches_a_whole_path_and_may_look_ahead() {
        let targets = TargetModules::from_text(r"model\.layers\.(?!1\b)\d+\..*\.(q|v)_proj").unwrap();
        assert!(
            targets.matches("model.layers.0.self_attn.q_proj") && targets.matches("model.layers.11.self_attn.v_proj")
        );
        assert!(!targets.matches("model.layers.1.self_attn.q_proj") && !targets.matches("model.layers.0.mlp.up_proj"));
        let spec = tiny(&[]).unwrap().spec;
        assert_eq!(targets.resolve(&spec).unwrap(), targets);
        let message = TargetModules::from_text("xq.*").unwrap().resolve(&spec).unwrap_err().to_string();
        assert!(message.contains("`xq.*` matches no linear module"), "{message}");
        for (text, whole) in [("(q|v)_proj", "'.*(q|v)_proj'"), ("q_proj|v_proj", "'.*(q_proj|v_proj)'")] {
            let message = TargetModules::from_text(text).unwrap().resolve(&spec).unwrap_err().to_string();
            assert!(message.contains(&format!("write lora.target = {whole}, or a list of names")), "{message}");
        }
        assert!(matches!(TargetModules::from_text("(q_proj"), Err(ArchError::BadPattern { .. })));
    }

    #[test]
    fn the_first_pattern_that_matches_gives_the_value() {
        let text = r#"{"layers.1.self_attn.q_proj": 2, "q_proj": 8, "mlp\\..*": 4}"#;
        let ranks: ByPattern<usize> = from_str(text).unwrap();
        assert_eq!(ranks.get("model.layers.1.self_attn.q_proj"), Some(2));
        assert_eq!(ranks.get("model.layers.0.self_attn.q_proj"), Some(8));
        assert_eq!(ranks.get("model.layers.0.mlp.up_proj"), Some(4));
        assert_eq!(ranks.get("model.layers.0.self_attn.k_proj"), None);
        assert_eq!(to_value(&ranks).unwrap(), from_str::<serde_json::Value>(text).unwrap());
        let paths = ["model.layers.1.self_attn.q_proj".to_owned()];
        assert_eq!(ranks.ambiguous(&paths), Some((&paths[0][..], "layers.1.self_attn.q_proj", "q_proj")));
        assert_eq!(ranks.unused(&paths).collect::<Vec<_>>(), [r"mlp\..*"]);
        assert!(from_str::<ByPattern<usize>>(r#"{"(": 1}"#).is_err());
    }

    #[test]
    fn targets_read_from_a_word_a_list_or_an_expression_and_are_written_the_same_way() {
        for value in [json!("all-linear"), json!(["q_proj", "v_proj"]), json!(".*_proj")] {
            let targets: TargetModules = from_value(value.clone()).unwrap();
            assert_eq!(to_value(&targets).unwrap(), value);
        }
        assert_eq!(from_value::<TargetModules>(json!(["q_proj"])).unwrap(), named(&["q_proj"]));
        let error = from_value::<TargetModules>(json!("q_proj")).unwrap_err().to_string();
        assert!(error.contains("\"all-linear\", a list of module names"), "{error}");
    }
}
