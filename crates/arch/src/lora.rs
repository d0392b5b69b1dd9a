//! LoRA adapters as a description: ranks, scaling, target modules, modules that train whole, and the tensors that follow from them for a
//! model.
//!
//! Names and matching are those of PEFT. One type is the section of a recipe, what the plan decides and what an adapter folder says;
//! reading and writing adapter files is elsewhere.
//! Trade-off: two fields mean something to a run only, and no adapter folder has them.
//! Not supported: adapters on the embedding or the head.

use serde::{Deserialize, Deserializer, Serialize};

use crate::error::ArchError;
use crate::lora_init::LoraInit;
use crate::module_names::{ByPattern, TargetModules, is_expert_parameter, path_ends_in};
use crate::modules::{GroupKind, GroupSpec, PieceSpec};
use crate::spec::{MlpSpec, ModelSpec};
use crate::tensor_spec::{Role, TensorSpec};
use crate::tensors::{EMBEDDING, Form, HEAD};
use crate::text_names::{TextLayout, is_expert, layer_of, text_name};
use crate::token_rows::TokenIndices;

/// The names of the parameters of fused experts.
const GATE_UP: &str = "gate_up_proj";
const DOWN: &str = "down_proj";
/// Returns what `target_parameters` can name.
fn parameter_names(spec: &ModelSpec) -> String {
    let names = spec.layers.iter().find_map(|layer| match layer.mlp {
        MlpSpec::Experts { names, .. } => Some(names),
        MlpSpec::Gated { .. } => None,
    });
    let of_experts = |experts: String| format!("{experts}.{GATE_UP} and {experts}.{DOWN}");
    names.map_or_else(|| "no experts".to_owned(), |names| of_experts(names.fused_path("experts")))
}

/// What PEFT puts before the names of the model.
pub(crate) const PREFIX: &str = "base_model.model.";

/// `[lora]`: low-rank adapters, scaled by `alpha / r`. Fields carry PEFT's names, which its adapter_config.json has; keys are those of a recipe.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "schemars", schemars(deny_unknown_fields))]
#[serde(default)]
pub struct LoraConfig {
    /// Rank. Default 16.
    pub r: usize,
    /// Numerator of the scale. Default 32.
    #[serde(rename = "alpha", alias = "lora_alpha")]
    pub lora_alpha: f64,
    /// Modules that get an adapter: "all-linear", a list of Hugging Face module names such as ["q_proj", "v_proj"], or one regular
    /// expression over the whole path of a module, as PEFT matches a string. Default "all-linear": every linear module of the layers but experts.
    #[serde(rename = "target", alias = "target_modules")]
    pub target_modules: TargetModules,
    /// Scale by `alpha / sqrt(r)` (rsLoRA). Default false.
    pub use_rslora: bool,
    /// Magnitudes of the outputs that train apart from the directions of the weights (DoRA): `m / |W + s B A|` times the adapted output. Default
    /// false.
    pub use_dora: bool,
    /// How A and B start. true: A uniform, B zero. "pissa" or "pissa_niter_N": the principal singular vectors of the weight, which the base
    /// loses before it is stored or quantized; N iterations of a randomized decomposition, or as many as it takes. The adapter is saved with
    /// twice the rank, for the original base. Default true.
    #[serde(skip_serializing_if = "LoraInit::is_uniform")]
    pub init_lora_weights: LoraInit,
    /// Parameters of fused experts that get an adapter: names such as ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], matched like the names in
    /// `target`. Gate and up of an expert then share one pair, and the adapter is saved as PEFT on transformers 5 saves it. Not with dropout, DoRA or
    /// PiSSA, as in PEFT. `target` may be an empty list. Default: absent, none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target_parameters: Option<Vec<String>>,
    /// Modules among `target` that get no adapter: a list of names or a regular expression. Default: absent, none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exclude_modules: Option<TargetModules>,
    /// Layers whose modules get an adapter, counted from 0. Default: absent, all of them.
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "one_or_several")]
    pub layers_to_transform: Option<Vec<usize>>,
    /// Modules outside of adapters that train whole, in float32, and are saved with the adapter: those whose path ends in one of these, such
    /// as ["embed_tokens", "lm_head"]. Where the model has one table for both, the one that trains becomes a table of its own, as in
    /// PEFT. Default: absent, none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub modules_to_save: Option<Vec<String>>,
    /// Ids of tokens whose rows train, in float32, and are saved with the adapter, while the rest of the table is frozen: a list for the
    /// embedding (and the head, where it is tied), or { embed_tokens = [..], lm_head = [..] }. Default: absent, none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trainable_token_indices: Option<TokenIndices>,
    /// Probability with which a value that an adapter reads is dropped in training, 0 or more and below 1. The modules of a group (queries, keys
    /// and values; gate and up) share the mask of their input. On pairs it is on too, but not for the reference, where TRL turns it off for both
    /// (`disable_dropout`). Default 0.
    #[serde(rename = "dropout", alias = "lora_dropout")]
    pub lora_dropout: f64,
    /// LoRA+: how many times the learning rate of A that of B is. Default: absent, 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loraplus_lr_ratio: Option<f64>,
    /// Adapter to continue from, a folder in PEFT's format or an id of the Hub: the run starts with its matrices and a new optimizer. The other keys of
    /// this section must be the adapter's. Default: absent, a new adapter.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub init_from: Option<String>,
    /// What the saved adapter calls its base: a Hub id such as "HuggingFaceTB/SmolLM2-135M-Instruct". Default: absent, the id where
    /// `model` is a snapshot in a Hub cache, otherwise the model folder's absolute path.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub base_model_name_or_path: Option<String>,
    /// Ranks of modules that have another one: names or regular expressions over the end of a path, such as { "down_proj" = 32 }.
    /// Default: none.
    #[serde(skip_serializing_if = "ByPattern::is_empty")]
    pub rank_pattern: ByPattern<usize>,
    /// Alphas of modules that have another one, written the same way. Default: none.
    #[serde(skip_serializing_if = "ByPattern::is_empty")]
    pub alpha_pattern: ByPattern<f64>,
}

fn one_or_several<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Vec<usize>>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "must be the number of a layer, from 0, or a list of them")]
    enum Layers {
        One(usize),
        Several(Vec<usize>),
    }
    let layers = Option::<Layers>::deserialize(deserializer)?;
    Ok(layers.map(|layers| match layers {
        Layers::One(layer) => vec![layer],
        Layers::Several(layers) => layers,
    }))
}

impl Default for LoraConfig {
    /// Rank 16 and alpha 32 on every linear module of the layers.
    fn default() -> Self {
        Self {
            r: 16,
            lora_alpha: 32.0,
            target_modules: TargetModules::AllLinear,
            use_rslora: false,
            use_dora: false,
            init_lora_weights: LoraInit::Uniform,
            target_parameters: None,
            exclude_modules: None,
            layers_to_transform: None,
            modules_to_save: None,
            trainable_token_indices: None,
            lora_dropout: 0.0,
            loraplus_lr_ratio: None,
            init_from: None,
            base_model_name_or_path: None,
            rank_pattern: ByPattern::default(),
            alpha_pattern: ByPattern::default(),
        }
    }
}

/// PEFT's names of the A `[r, in]` and the B `[out, r]` of the module at `path`.
pub fn lora_tensor_names(path: &str) -> (String, String) {
    let name = |side| format!("{PREFIX}{path}.lora_{side}.weight");
    (name('A'), name('B'))
}

/// PEFT's name of the magnitudes `[out]` of the module at `path` (DoRA).
pub fn magnitude_tensor_name(path: &str) -> String {
    format!("{PREFIX}{path}.lora_magnitude_vector")
}

/// PEFT's name of a tensor of the model that is saved with an adapter.
pub fn saved_tensor_name(name: &str) -> String {
    format!("{PREFIX}{name}")
}

/// PEFT's name of the rows `[tokens, hidden]` of the table of this name.
pub fn token_rows_name(table: &str) -> String {
    let path = table.strip_suffix(".weight").unwrap_or(table);
    saved_tensor_name(&format!("{path}.token_adapter.trainable_tokens_delta"))
}

/// Returns the layout of the checkpoint that PEFT made an adapter with these tensors for.
pub fn adapter_layout<'a>(names: impl IntoIterator<Item = &'a str>) -> TextLayout {
    TextLayout::of(names.into_iter().filter_map(|name| name.strip_prefix(PREFIX)))
}

/// Returns the name of an adapter's tensor where the text model is a part of a checkpoint in this layout; `name` is that for the text model alone.
pub fn name_in_adapter(name: &str, layout: TextLayout) -> String {
    name.strip_prefix(PREFIX).map_or_else(|| name.to_owned(), |inner| format!("{PREFIX}{}", layout.name_of(inner)))
}

/// Returns the name of an adapter's tensor for the text model alone.
pub fn text_name_in_adapter(name: &str) -> String {
    name.strip_prefix(PREFIX).map_or_else(|| name.to_owned(), |inner| format!("{PREFIX}{}", text_name(inner)))
}

fn module_of(tensor: &str) -> &str {
    tensor.strip_suffix(".weight").or(tensor.strip_suffix(".bias")).unwrap_or(tensor)
}

impl LoraConfig {
    /// Whether the linear module at `path` carries LoRA. `path` must come from [`ModelSpec::modules`].
    pub fn adapts(&self, path: &str) -> bool {
        if is_expert_parameter(path) {
            return !self.saves(path) && self.parameters().any(|name| path_ends_in(path, name));
        }
        let excluded = self.exclude_modules.as_ref().is_some_and(|excluded| excluded.matches(path));
        !excluded && !self.saves(path) && self.target_modules.matches(path) && self.is_in_layers(path)
    }

    fn parameters(&self) -> impl Iterator<Item = &String> {
        self.target_parameters.iter().flatten()
    }

    /// Whether experts are adapted as parameters, so that the model must have them fused ([`ModelConfig::for_adapter`](crate::ModelConfig::for_adapter)).
    pub fn adapts_parameters(&self) -> bool {
        self.parameters().next().is_some()
    }

    /// PEFT's path of the adapter of the experts' parameter at `path`: the wrappers of one module's parameters are nested, the first one innermost.
    pub fn parameter_adapter(&self, path: &str) -> String {
        let (experts, name) = path.rsplit_once('.').unwrap_or(("", path));
        let is_inner = name == GATE_UP && self.adapts(&format!("{experts}.{DOWN}"));
        if is_inner { format!("{experts}.base_layer") } else { experts.to_owned() }
    }

    /// The experts' parameter whose adapter has this path in PEFT: the reverse of [`LoraConfig::parameter_adapter`].
    pub fn parameter_of(&self, adapter: &str) -> Option<String> {
        let experts = adapter.strip_suffix(".base_layer").unwrap_or(adapter);
        let paths = [GATE_UP, DOWN].map(|name| format!("{experts}.{name}"));
        paths
            .into_iter()
            .find(|path| is_expert_parameter(path) && self.adapts(path) && self.parameter_adapter(path) == adapter)
    }

    /// Whether the module at `path` trains whole.
    pub fn saves(&self, path: &str) -> bool {
        self.modules_to_save.iter().flatten().any(|name| path.ends_with(name.as_str()))
    }

    /// Whether the tensor of this name trains whole.
    pub fn saves_tensor(&self, name: &str) -> bool {
        self.saves(module_of(name))
    }

    /// Whether embedding and head, which share one table in the model, are two: one of them trains, or both do.
    pub fn unties(&self) -> bool {
        self.saves_tensor(EMBEDDING) || self.saves_tensor(HEAD)
    }

    fn is_in_layers(&self, path: &str) -> bool {
        let Some(layers) = self.layers_to_transform.as_ref().filter(|layers| !layers.is_empty()) else { return true };
        layer_of(path).is_some_and(|layer| layers.contains(&layer))
    }

    /// The rank of the adapter of the module at `path`.
    pub fn rank_of(&self, path: &str) -> usize {
        self.rank_pattern.get(path).unwrap_or(self.r)
    }

    /// What `B A x` is multiplied by in the module at `path`: `alpha / r`, or `alpha / sqrt(r)` with rsLoRA.
    pub fn scaling_of(&self, path: &str) -> f64 {
        let (alpha, rank) = (self.alpha_pattern.get(path).unwrap_or(self.lora_alpha), self.rank_of(path) as f64);
        alpha / if self.use_rslora { rank.sqrt() } else { rank }
    }

    /// These settings for a pair next to the one that it started as: twice the ranks at the same scaling, as PEFT converts PiSSA.
    pub fn with_start(&self) -> Self {
        let factor = if self.use_rslora { std::f64::consts::SQRT_2 } else { 2.0 };
        Self {
            r: 2 * self.r,
            lora_alpha: factor * self.lora_alpha,
            init_lora_weights: LoraInit::Uniform,
            rank_pattern: self.rank_pattern.map(|rank| 2 * rank),
            alpha_pattern: self.alpha_pattern.map(|alpha| factor * alpha),
            ..self.clone()
        }
    }

    /// The tokens whose rows of a table (the embedding, or the head) train, in the order in which they are saved. Empty for a head that shares
    /// its table with the embedding.
    pub fn token_rows(&self, table: &str, spec: &ModelSpec) -> &[usize] {
        match &self.trainable_token_indices {
            Some(_) if table == HEAD && spec.tie_word_embeddings => &[],
            Some(indices) => indices.of(table),
            None => &[],
        }
    }

    /// The rows that train, as tensors under PEFT's names.
    fn token_row_tensors(&self, spec: &ModelSpec) -> Vec<TensorSpec> {
        let tensor = |table: &str| {
            let ids = self.token_rows(table, spec);
            (!ids.is_empty()).then(|| TensorSpec {
                name: token_rows_name(table),
                shape: vec![ids.len(), spec.hidden_size],
                role: Role::TokenRows,
                layer: None,
            })
        };
        [EMBEDDING, HEAD].into_iter().filter_map(tensor).collect()
    }

    /// These settings, checked against a model, with targets that mean the same written the same.
    ///
    /// # Errors
    /// A rank of zero; what [`TargetModules::resolve`] refuses; a name, key or layer that matches nothing of the model; settings under which
    /// no module carries LoRA; settings that hold for some experts of a layer and not for others.
    pub fn resolve(&self, spec: &ModelSpec) -> Result<Self, ArchError> {
        if self.r == 0 || self.rank_pattern.iter().any(|(_, rank)| rank == 0) {
            return Err(ArchError::ZeroRank);
        }
        let target_modules = match &self.target_modules {
            TargetModules::Named(names) if names.is_empty() && self.adapts_parameters() => self.target_modules.clone(),
            targets => targets.resolve(spec)?,
        };
        let resolved = Self { target_modules, ..self.clone() };
        self.check_parameters(spec)?;
        let unused = |key, value: &str, has: String| ArchError::Unused { key, value: value.to_owned(), has };
        let names = || spec.linear_module_names().join(", ");
        if let Some(excluded) = &self.exclude_modules {
            let wrong = |_| unused("exclude_modules", &excluded.names(spec).join(", "), names());
            excluded.resolve(spec).map_err(wrong)?;
        }
        let layers = spec.layers.len();
        if let Some(layer) = self.layers_to_transform.iter().flatten().find(|layer| **layer >= layers) {
            return Err(unused("layers_to_transform", &layer.to_string(), format!("layers 0 to {}", layers - 1)));
        }
        if matches!(self.target_modules, TargetModules::Matching(_)) && self.layers_to_transform.is_some() {
            return Err(ArchError::LayersAndExpression);
        }
        let paths: Vec<String> = spec.modules().map(|(module, _)| module.path).collect();
        self.check_layers(spec, &paths)?;
        for (key, pattern) in [
            ("rank_pattern", self.rank_pattern.unused(&paths).next()),
            ("alpha_pattern", self.alpha_pattern.unused(&paths).next()),
        ] {
            if let Some(pattern) = pattern {
                return Err(unused(key, pattern, names()));
            }
        }
        // Sinks are a parameter of attention, which PEFT could save only with all of attention; so are the factors of a router.
        let is_module = |tensor: &TensorSpec| {
            !matches!(tensor.role, Role::Sinks | Role::RouterScale | Role::LayerScalar | Role::PerLayerEmbedding)
        };
        let modules = spec.tensors().into_iter().filter(is_module);
        let whole: Vec<String> = modules.map(|tensor| tensor.name).chain([HEAD.to_owned()]).collect();
        for name in self.modules_to_save.iter().flatten() {
            if !whole.iter().any(|tensor| module_of(tensor).ends_with(name.as_str())) {
                return Err(unused("modules_to_save", name, format!("embed_tokens, lm_head, norms and {}", names())));
            }
        }
        if let Some(indices) = &self.trainable_token_indices {
            indices.check(spec, |table| self.saves_tensor(table))?;
        }
        if !self.init_lora_weights.is_uniform() {
            let shapes = spec.modules().filter(|(module, _)| resolved.adapts(&module.path));
            let mut most = shapes.map(|(module, inputs)| (inputs.min(module.out_features()), module.path));
            if let Some((most, module)) = most.find(|(most, path)| self.rank_of(path) > *most) {
                let rank = self.rank_of(&module);
                return Err(ArchError::NoSuchPart { module, rank, most });
            }
        }
        if !paths.iter().any(|path| resolved.adapts(path)) {
            return Err(ArchError::NoTargets { modules: spec.linear_module_names() });
        }
        resolved.check_stacks(spec)?;
        Ok(resolved)
    }

    /// Checks that no target hits in the chosen layers only modules that are missing because their layers read another's keys and values.
    fn check_layers(&self, spec: &ModelSpec, paths: &[String]) -> Result<(), ArchError> {
        let TargetModules::Named(names) = &self.target_modules else { return Ok(()) };
        let hits = |name: &str, path: &str| path_ends_in(path, name) && self.is_in_layers(path);
        let mut unused = names.iter().filter(|name| !paths.iter().any(|path| hits(name, path)));
        let error = unused.find_map(|name| spec.only_missing(name, |path| hits(name, path)));
        error.map_or(Ok(()), Err)
    }

    /// The modules that targets by name or expression hit and that are not there, because their layers read another's keys and values.
    pub fn skipped_modules(&self, spec: &ModelSpec) -> Vec<String> {
        let is_chosen = self.target_modules != TargetModules::AllLinear;
        spec.missing_modules().filter(|path| is_chosen && self.adapts(path)).collect()
    }

    /// Checks that every one of `target_parameters` is a parameter of the model, and that nothing is set that PEFT refuses with them.
    fn check_parameters(&self, spec: &ModelSpec) -> Result<(), ArchError> {
        if !self.adapts_parameters() {
            return Ok(());
        }
        let paths: Vec<String> =
            spec.stacks().filter(|(module, _)| module.parameter.is_some()).map(|(module, _)| module.path).collect();
        if let Some(name) = self.parameters().find(|name| !paths.iter().any(|path| path_ends_in(path, name))) {
            let has = parameter_names(spec);
            return Err(ArchError::Unused { key: "target_parameters", value: name.clone(), has });
        }
        let pieces = spec.stacks().flat_map(|(module, _)| module.pieces).map(|piece| piece.path);
        let refused = [
            ("dropout", self.lora_dropout > 0.0),
            ("use_dora", self.use_dora),
            ("init_lora_weights", !self.init_lora_weights.is_uniform()),
            ("modules_to_save on experts", paths.into_iter().chain(pieces).any(|path| self.saves(&path))),
        ];
        match refused.into_iter().find(|(_, is_set)| *is_set) {
            Some((key, _)) => Err(ArchError::NotWithParameters { key }),
            None => Ok(()),
        }
    }

    /// Checks that all experts of a module have the same settings: they are one weight of a run. Those of some families are one parameter everywhere, so
    /// no program would read an adapter of one of them.
    fn check_stacks(&self, spec: &ModelSpec) -> Result<(), ArchError> {
        let settings = |path: &str| {
            let pair = self.adapts(path).then(|| (self.rank_of(path), self.scaling_of(path).to_bits()));
            (pair, self.saves(path))
        };
        let is_one_tensor = |mlp: &MlpSpec| matches!(mlp, MlpSpec::Experts { names, .. } if names.are_in_one_tensor());
        for (module, _) in spec.stacks().filter(|(module, _)| module.parameter.is_none()) {
            let first = settings(module.lora_path());
            if first.0.is_some() && spec.layers.iter().any(|layer| is_one_tensor(&layer.mlp)) {
                let has = parameter_names(spec);
                return Err(ArchError::OnlyAsParameters { module: module.lora_path().to_owned(), has });
            }
            if let Some(other) = module.pieces.iter().find(|piece| settings(&piece.path) != first) {
                let (first, other) = (module.lora_path().to_owned(), other.path.clone());
                return Err(ArchError::ExpertsDiffer { first, other });
            }
            if self.saves(&module.path) != first.1 {
                let (first, other) = (module.path.clone(), module.lora_path().to_owned());
                return Err(ArchError::ExpertsDiffer { first, other });
            }
        }
        Ok(())
    }

    /// Checks that no module gets two values from the keys of a pattern: in a file the first key counts, but in a recipe keys have no
    /// order.
    pub fn check_unordered(&self, spec: &ModelSpec) -> Result<(), ArchError> {
        let paths: Vec<String> = spec.modules().map(|(module, _)| module.path).collect();
        match self.rank_pattern.ambiguous(&paths).or_else(|| self.alpha_pattern.ambiguous(&paths)) {
            Some((path, first, other)) => {
                let [module, first, other] = [path, first, other].map(str::to_owned);
                Err(ArchError::TwoValues { module, first, other })
            }
            None => Ok(()),
        }
    }
}

impl ModelSpec {
    /// The names of the linear modules of the layers without their paths, each once, in the order of the forward pass: `q_proj`,
    /// `k_proj`, `v_proj`, `o_proj`, `gate_proj`, `up_proj`, `down_proj`; or `qkv_proj`, `o_proj`, `gate_up_proj`, `down_proj`. Experts
    /// are left out, and the MLPs of other layers next to them are named `mlp.gate_proj` and so on, which no expert's path ends in, as are shared
    /// experts: `shared_experts.gate_proj`.
    pub fn linear_module_names(&self) -> Vec<String> {
        let is_mixture = self.is_mixture();
        let mut names: Vec<String> = Vec::new();
        for (module, _) in self.modules().filter(|(module, _)| !is_expert(&module.path)) {
            let in_mlp = is_mixture && [".mlp.", ".feed_forward."].iter().any(|block| module.path.contains(block));
            let name = if in_mlp { module.name_in_parent() } else { module.name() }.to_owned();
            if !names.contains(&name) {
                names.push(name);
            }
        }
        names
    }

    /// The tensors of an adapter on disk, under PEFT's names: A `[r, in]`, B `[out, r]` and with DoRA magnitudes `[out]` of each target in the order
    /// of [`ModelSpec::tensors`], and then the tensors that train whole.
    pub fn adapter_tensors(&self, lora: &LoraConfig) -> Result<Vec<TensorSpec>, ArchError> {
        Ok(self.tensors_of(&lora.resolve(self)?))
    }

    /// [`ModelSpec::adapter_tensors`] of settings that were checked.
    pub fn tensors_of(&self, lora: &LoraConfig) -> Vec<TensorSpec> {
        self.adapter_in(lora, Form::Stored)
    }

    /// The tensors of an adapter as a run has them: [`ModelSpec::tensors_of`] with the experts of a module as one tensor, A `[e * r, in]` and B
    /// `[e * out, r]`.
    pub fn stacked_tensors_of(&self, lora: &LoraConfig) -> Vec<TensorSpec> {
        self.adapter_in(lora, Form::Stacked)
    }

    fn adapter_in(&self, lora: &LoraConfig, form: Form) -> Vec<TensorSpec> {
        let mut tensors = Vec::new();
        for layer in 0..self.layers.len() {
            for group in self.groups(layer).into_iter().filter(|group| group.kind != GroupKind::Router) {
                add_adapters(lora, layer, &group, form, &mut tensors);
            }
        }
        let head = TensorSpec {
            name: HEAD.to_owned(),
            shape: vec![self.vocab_size, self.hidden_size],
            role: Role::Head,
            layer: None,
        };
        let whole = match form {
            Form::Stored => self.tensors(),
            Form::Stacked => self.stacked_tensors(),
        };
        let whole = whole.into_iter().chain(self.tie_word_embeddings.then_some(head));
        let saved = whole.filter(|tensor| lora.saves_tensor(&tensor.name));
        tensors.extend(saved.map(|tensor| TensorSpec { name: saved_tensor_name(&tensor.name), ..tensor }));
        tensors.extend(lora.token_row_tensors(self));
        tensors
    }
}

/// Adds the pairs of a group's modules, and with DoRA their magnitudes. On disk B of an experts' parameter is `[out, r * e]`, the expert fastest.
fn add_adapters(lora: &LoraConfig, layer: usize, group: &GroupSpec, form: Form, tensors: &mut Vec<TensorSpec>) {
    let tensor = |name, shape, role| TensorSpec { name, shape, role, layer: Some(layer) };
    let pair = |path: &str, a_rows: usize, b: [usize; 2]| {
        let (a_name, b_name) = lora_tensor_names(path);
        [tensor(a_name, vec![a_rows, group.in_features], Role::LoraA), tensor(b_name, b.to_vec(), Role::LoraB)]
    };
    for module in group.modules.iter().filter(|module| lora.adapts(module.lora_path())) {
        let r = lora.rank_of(module.lora_path());
        if module.parameter.is_some() {
            let all = r * group.matrices();
            let (path, b) = match form {
                Form::Stored => (lora.parameter_adapter(&module.path), [module.out_features(), all]),
                Form::Stacked => (module.path.clone(), [module.rows(), r]),
            };
            tensors.extend(pair(&path, all, b));
            continue;
        }
        for PieceSpec { path, rows } in module.pieces_in(form) {
            let matrices = rows / (module.rows() / module.pieces.len());
            tensors.extend(pair(&path, matrices * r, [rows, r]));
            let magnitudes = || tensor(magnitude_tensor_name(&path), vec![rows], Role::LoraMagnitude);
            tensors.extend(lora.use_dora.then(magnitudes));
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{from_value, json};

    use super::*;
    use crate::config::tests::tiny;
    use crate::families::tests::read;
    use crate::module_names::tests::named;

    fn lora(target_modules: TargetModules) -> LoraConfig {
        LoraConfig { target_modules, ..LoraConfig::default() }
    }

    fn tiny_spec() -> ModelSpec {
        tiny(&[]).unwrap().spec
    }

    #[test]
    fn scaling_divides_by_the_rank_or_by_its_root() {
        let path = "model.layers.0.mlp.up_proj";
        assert_eq!(lora(TargetModules::AllLinear).scaling_of(path), 2.0);
        assert_eq!(LoraConfig { use_rslora: true, ..lora(TargetModules::AllLinear) }.scaling_of(path), 8.0);
    }

    #[test]
    fn a_pair_next_to_its_start_has_twice_the_rank_and_the_same_scaling() {
        let names = ["model.layers.0.mlp.up_proj", "model.layers.1.self_attn.q_proj"];
        for use_rslora in [false, true] {
            let patterns = json!({"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"up_proj": 3}});
            let lora = LoraConfig { use_rslora, ..settings(patterns) };
            for name in names {
                assert!((lora.with_start().scaling_of(name) - lora.scaling_of(name)).abs() < 1e-12);
                assert_eq!(lora.with_start().rank_of(name), 2 * lora.rank_of(name));
            }
        }
        let large = LoraConfig { r: 9, init_lora_weights: LoraInit::Pissa { niter: None }, ..LoraConfig::default() };
        let message = large.resolve(&tiny_spec()).unwrap_err().to_string();
        assert!(message.contains("q_proj") && message.contains("at most 8"), "{message}");
    }

    #[test]
    fn a_target_that_matches_nothing_is_refused_with_the_names_there_are() {
        for name in ["lm_head", "embed_tokens", "proj", "xq_proj", "qkv_proj", "model.layers.2.self_attn.q_proj"] {
            let error = tiny_spec().adapter_tensors(&lora(named(&["q_proj", name]))).unwrap_err().to_string();
            let names = "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj";
            assert!(error.contains(&format!("`{name}`")) && error.contains(names), "{error}");
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
    fn all_linear_takes_in_shared_experts_and_leaves_out_others_and_routers() {
        let dense = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"];
        let shared = |name: &str| dense.map(|module| module.replace("mlp", name)).to_vec();
        let gated = [shared("shared_expert"), vec!["mlp.shared_expert_gate".to_owned()]].concat();
        let experts = json!({"num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": [0]});
        let glm = json!({"hidden_size": 16, "num_hidden_layers": 3, "n_routed_experts": 4, "num_experts_per_tok": 2});
        for (model_type, changes, more, modules, of_routers) in [
            ("qwen2_moe", experts.clone(), gated, 2 * 4 + 3 + 4, 4 * 8 + 8),
            ("qwen3_moe", experts.clone(), Vec::new(), 2 * 4 + 3, 4 * 8),
            ("glm4_moe", glm, shared("shared_experts"), 3 * 4 + 3 * 3, 2 * 4 * 16),
        ] {
            let spec = read(model_type, changes).spec;
            let names = TargetModules::AllLinear.names(&spec);
            assert_eq!((&names[4..7], &names[7..]), (&dense.map(str::to_owned)[..], &more[..]), "{model_type}");
            for targets in [TargetModules::AllLinear, TargetModules::Named(names)] {
                assert_eq!(spec.adapter_tensors(&lora(targets)).unwrap().len(), 2 * modules, "{model_type}");
            }
            assert_eq!(spec.parameters_of(Role::Router), of_routers, "{model_type}: never quantized");
        }
        let spec = read("qwen3_moe", experts).spec;
        assert_eq!(spec.adapter_tensors(&lora(named(&["up_proj"]))).unwrap().len(), 2 * (1 + 4));
        assert!(named(&["gate"]).resolve(&spec).is_err(), "PEFT adapts no router either");
    }

    fn settings(keys: serde_json::Value) -> LoraConfig {
        let mut all = json!({"r": 4, "lora_alpha": 8, "use_rslora": false, "target_modules": "all-linear"});
        all.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
        from_value(all).unwrap()
    }

    #[test]
    fn what_matches_nothing_is_refused_by_its_key() {
        for (keys, part) in [
            (json!({"exclude_modules": ["lm_head"]}), "exclude_modules: `lm_head`"),
            (json!({"layers_to_transform": [2]}), "layers_to_transform: `2`"),
            (json!({"rank_pattern": {"qproj": 2}}), "rank_pattern: `qproj`"),
            (json!({"alpha_pattern": {"qproj": 2}}), "alpha_pattern: `qproj`"),
            (json!({"modules_to_save": ["score"]}), "modules_to_save: `score`"),
            (json!({"target_modules": ".*", "layers_to_transform": 1}), "layers_to_transform"),
            (json!({"exclude_modules": ".*"}), "no module"),
            (json!({"rank_pattern": {"q_proj": 0}}), "`r` is 0"),
        ] {
            let message = tiny_spec().adapter_tensors(&settings(keys)).unwrap_err().to_string();
            assert!(message.contains(part), "{message}");
        }
        let two = settings(json!({"rank_pattern": {"0.self_attn.q_proj": 2, "q_proj": 8}}));
        let message = two.check_unordered(&tiny_spec()).unwrap_err().to_string();
        assert!(message.contains("`model.layers.0.self_attn.q_proj`"), "{message}");
    }
}
