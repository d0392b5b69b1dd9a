//! LoRA adapters as a description: rank, scaling, target modules, and the tensors that follow from them for a model.
//!
//! Names and matching are those of PEFT. Reading and writing adapter files is elsewhere.
//! Not supported: ranks per module, DoRA, adapters on the embedding or the head.

use std::collections::BTreeSet;
use std::fmt;

use serde::de::{Error as DeError, SeqAccess, Unexpected, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::error::ArchError;
use crate::groups::ModuleSpec;
use crate::spec::ModelSpec;
use crate::tensors::{Role, TensorSpec};

/// PEFT's name for every linear layer but the head.
const ALL_LINEAR: &str = "all-linear";

/// The settings of a LoRA adapter. Fields carry PEFT's names.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema))]
pub struct LoraConfig {
    /// Rank: rows of A, columns of B.
    pub r: usize,
    /// Numerator of the scaling.
    pub lora_alpha: f64,
    /// Whether the scaling divides by the square root of the rank (<https://arxiv.org/abs/2312.03732>).
    pub use_rslora: bool,
    /// Which linear modules carry LoRA.
    pub target_modules: TargetModules,
    /// The base model: a Hub id or a folder.
    pub base_model_name_or_path: Option<String>,
}

/// Which linear modules carry LoRA. In a recipe: `"all-linear"` or a list of names such as `["q_proj", "v_proj"]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TargetModules {
    /// Every linear module of every layer, never the head: PEFT's "all-linear".
    AllLinear,
    /// Modules whose path is one of these or ends in a dot and one of these, as PEFT matches a list: `q_proj`, `self_attn.q_proj`, or a
    /// whole path such as `model.layers.3.self_attn.q_proj`.
    Named(Vec<String>),
}

/// PEFT's names of the A `[r, in]` and the B `[out, r]` of the module at `path`.
pub fn lora_tensor_names(path: &str) -> (String, String) {
    let name = |side| format!("base_model.model.{path}.lora_{side}.weight");
    (name('A'), name('B'))
}

impl LoraConfig {
    /// What `B A x` is multiplied by: `lora_alpha / r`, or `lora_alpha / sqrt(r)` with rsLoRA.
    pub fn scaling(&self) -> f64 {
        let rank = self.r as f64;
        self.lora_alpha / if self.use_rslora { rank.sqrt() } else { rank }
    }
}

impl TargetModules {
    /// Targets by name. A list that is just "all-linear" is [`TargetModules::AllLinear`].
    pub fn from_names(names: Vec<String>) -> Self {
        match names.as_slice() {
            [only] if only.eq_ignore_ascii_case(ALL_LINEAR) => Self::AllLinear,
            _ => Self::Named(names),
        }
    }

    /// Whether the linear module at a path such as `model.layers.0.self_attn.q_proj` carries LoRA. `path` must come from
    /// [`ModelSpec::modules`].
    pub fn matches(&self, path: &str) -> bool {
        match self {
            Self::AllLinear => true,
            Self::Named(names) => names.iter().any(|name| path_ends_in(path, name)),
        }
    }

    /// These targets, checked against a model. A list that names every kind of linear module becomes [`TargetModules::AllLinear`], so
    /// that targets which mean the same compare equal.
    ///
    /// # Errors
    /// An empty list, and a name that matches no linear module of the model, `lm_head` and `embed_tokens` among them.
    pub fn resolve(&self, spec: &ModelSpec) -> Result<Self, ArchError> {
        let Self::Named(names) = self else { return Ok(Self::AllLinear) };
        let modules = spec.linear_module_names();
        if names.is_empty() {
            return Err(ArchError::NoTargets { modules });
        }
        let paths: Vec<String> = spec.modules().map(|(module, _)| module.path).collect();
        if let Some(name) = names.iter().find(|name| !paths.iter().any(|path| path_ends_in(path, name))) {
            return Err(ArchError::UnknownTarget { name: name.clone(), modules });
        }
        let given: BTreeSet<&String> = names.iter().collect();
        let all = given == modules.iter().collect();
        Ok(if all { Self::AllLinear } else { self.clone() })
    }

    /// As a list for PEFT. "all-linear" is spelled out, because readers other than PEFT may not know it.
    pub fn names(&self, spec: &ModelSpec) -> Vec<String> {
        match self {
            Self::AllLinear => spec.linear_module_names(),
            Self::Named(names) => names.clone(),
        }
    }
}

fn path_ends_in(path: &str, end: &str) -> bool {
    path.strip_suffix(end).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
}

impl ModelSpec {
    /// The names of the linear modules of the layers without their paths, each once, in the order of the forward pass: `q_proj`,
    /// `k_proj`, `v_proj`, `o_proj`, `gate_proj`, `up_proj`, `down_proj`; or `qkv_proj`, `o_proj`, `gate_up_proj`, `down_proj`.
    pub fn linear_module_names(&self) -> Vec<String> {
        let mut names: Vec<String> = Vec::new();
        for (module, _) in self.modules() {
            if !names.iter().any(|name| name == module.name()) {
                names.push(module.name().to_owned());
            }
        }
        names
    }

    /// The tensors of an adapter in the order of the forward pass: A `[r, in]` and B `[out, r]` of each target, under PEFT's names.
    ///
    /// # Errors
    /// A rank of zero, and what [`TargetModules::resolve`] refuses.
    pub fn adapter_tensors(&self, lora: &LoraConfig) -> Result<Vec<TensorSpec>, ArchError> {
        if lora.r == 0 {
            return Err(ArchError::ZeroRank);
        }
        let targets = lora.target_modules.resolve(self)?;
        let mut tensors = Vec::new();
        for layer in 0..self.layers.len() {
            for group in self.groups(layer) {
                for module in group.modules.iter().filter(|module| targets.matches(&module.path)) {
                    tensors.extend(pair(module, layer, group.in_features, lora.r));
                }
            }
        }
        Ok(tensors)
    }
}

fn pair(module: &ModuleSpec, layer: usize, in_features: usize, r: usize) -> [TensorSpec; 2] {
    let (a, b) = lora_tensor_names(&module.path);
    [
        TensorSpec { name: a, shape: vec![r, in_features], role: Role::LoraA, layer: Some(layer) },
        TensorSpec { name: b, shape: vec![module.out_features(), r], role: Role::LoraB, layer: Some(layer) },
    ]
}

impl Serialize for TargetModules {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::AllLinear => serializer.serialize_str(ALL_LINEAR),
            Self::Named(names) => names.serialize(serializer),
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
        write!(f, "\"{ALL_LINEAR}\" or a list of module names such as [\"q_proj\", \"v_proj\"]")
    }

    fn visit_str<E: DeError>(self, name: &str) -> Result<TargetModules, E> {
        match name {
            ALL_LINEAR => Ok(TargetModules::AllLinear),
            other => Err(E::invalid_value(Unexpected::Str(other), &self)),
        }
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<TargetModules, A::Error> {
        let mut names = Vec::new();
        while let Some(name) = list.next_element()? {
            names.push(name);
        }
        Ok(TargetModules::from_names(names))
    }
}

#[cfg(feature = "schemars")]
impl schemars::JsonSchema for TargetModules {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "TargetModules".into()
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({
            "description": "\"all-linear\" or a list of Hugging Face module names.",
            "oneOf": [{ "const": ALL_LINEAR }, { "type": "array", "items": { "type": "string" }, "minItems": 1 }]
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{from_value, json, to_value};

    use super::*;
    use crate::config::tests::tiny;
    use crate::shapes::llama_3_1_8b;

    fn named(names: &[&str]) -> TargetModules {
        TargetModules::from_names(names.iter().map(|&name| name.to_owned()).collect())
    }

    fn lora(target_modules: TargetModules) -> LoraConfig {
        LoraConfig { r: 16, lora_alpha: 32.0, use_rslora: false, target_modules, base_model_name_or_path: None }
    }

    fn tiny_spec() -> ModelSpec {
        tiny(&[]).unwrap().spec
    }

    #[test]
    fn scaling_divides_by_the_rank_or_by_its_root() {
        assert_eq!(lora(TargetModules::AllLinear).scaling(), 2.0);
        assert_eq!(LoraConfig { use_rslora: true, ..lora(TargetModules::AllLinear) }.scaling(), 8.0);
    }

    #[test]
    fn targets_match_whole_parts_of_a_path() {
        assert!(named(&["q_proj"]).matches("model.layers.0.self_attn.q_proj"));
        assert!(named(&["model.layers.1.self_attn.q_proj"]).matches("model.layers.1.self_attn.q_proj"));
        assert!(!named(&["1.self_attn.q_proj"]).matches("model.layers.11.self_attn.q_proj"));
        assert!(!named(&["model.layers.1.self_attn.q_proj"]).matches("model.layers.11.self_attn.q_proj"));
    }

    #[test]
    fn a_target_that_matches_nothing_is_refused_with_the_names_there_are() {
        for name in ["lm_head", "embed_tokens", "proj", "xq_proj", "qkv_proj", "model.layers.2.self_attn.q_proj"] {
            let error = tiny_spec().adapter_tensors(&lora(named(&["q_proj", name]))).unwrap_err().to_string();
            let names = "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj";
            assert!(error.contains(&format!("`{name}`")) && error.ends_with(names), "{error}");
        }
        assert!(matches!(named(&[]).resolve(&tiny_spec()), Err(ArchError::NoTargets { .. })));
        let zero = LoraConfig { r: 0, ..lora(TargetModules::AllLinear) };
        assert!(matches!(tiny_spec().adapter_tensors(&zero), Err(ArchError::ZeroRank)));
    }

    #[test]
    fn all_linear_is_the_seven_projections_of_each_layer_however_it_is_said() {
        let spec = tiny_spec();
        let spelled_out = TargetModules::AllLinear.names(&spec);
        let names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"];
        assert_eq!(spelled_out, names);
        let reversed = named(&names.iter().rev().copied().collect::<Vec<_>>());
        assert_eq!(reversed.resolve(&spec).unwrap(), TargetModules::AllLinear);
        assert_eq!(named(&["all-linear"]), TargetModules::AllLinear);
        assert_eq!(named(&names[..6]).resolve(&spec).unwrap(), named(&names[..6]));
        assert_eq!(spec.adapter_tensors(&lora(TargetModules::AllLinear)).unwrap().len(), 2 * 14);
    }

    #[test]
    fn adapter_tensors_have_pefts_names_and_shapes_in_the_order_of_the_forward_pass() {
        let tensors = tiny_spec().adapter_tensors(&lora(named(&["down_proj", "k_proj"]))).unwrap();
        assert_eq!(tensors.len(), 8);
        let at = |index: usize| {
            let TensorSpec { name, shape, role, layer } = &tensors[index];
            (name.as_str(), &shape[..], *role, *layer)
        };
        let k_proj = "base_model.model.model.layers.0.self_attn.k_proj";
        assert_eq!(at(0), (format!("{k_proj}.lora_A.weight").as_str(), &[16, 8][..], Role::LoraA, Some(0)));
        assert_eq!(at(1), (format!("{k_proj}.lora_B.weight").as_str(), &[4, 16][..], Role::LoraB, Some(0)));
        let down_proj = "base_model.model.model.layers.1.mlp.down_proj";
        assert_eq!(at(6), (format!("{down_proj}.lora_A.weight").as_str(), &[16, 12][..], Role::LoraA, Some(1)));
        assert_eq!(lora_tensor_names("model.layers.1.mlp.down_proj").1, format!("{down_proj}.lora_B.weight"));
    }

    #[test]
    fn an_adapter_of_rank_16_on_llama_3_1_8b_has_its_known_size() {
        let tensors = llama_3_1_8b().adapter_tensors(&lora(TargetModules::AllLinear)).unwrap();
        assert_eq!(tensors.iter().map(|tensor| tensor.elements() as u64).sum::<u64>(), 41_943_040);
    }

    #[test]
    fn targets_read_from_a_word_or_a_list_and_are_written_the_same_way() {
        for value in [json!("all-linear"), json!(["q_proj", "v_proj"])] {
            let targets: TargetModules = from_value(value.clone()).unwrap();
            assert_eq!(to_value(&targets).unwrap(), value);
        }
        assert_eq!(from_value::<TargetModules>(json!(["q_proj"])).unwrap(), named(&["q_proj"]));
        let error = from_value::<TargetModules>(json!("q_proj")).unwrap_err().to_string();
        assert!(error.contains("\"all-linear\" or a list of module names"), "{error}");
    }

    #[cfg(feature = "schemars")]
    #[test]
    fn the_schema_allows_the_word_or_a_list() {
        let schema = to_value(schemars::schema_for!(TargetModules)).unwrap();
        assert_eq!(schema["oneOf"][0]["const"], "all-linear");
        assert_eq!(schema["oneOf"][1]["items"]["type"], "string");
    }
}
