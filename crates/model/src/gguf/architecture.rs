//! The families that a GGUF file can describe: what llama.cpp computes for each, and the metadata that it reads.
//!
//! A family is one line of [`ARCHITECTURES`]. Whatever a model has and llama.cpp has not is refused by name: a file that loads and computes something
//! else is worse than none. A sliding window that llama.cpp does not know limits the context of the file instead, within which both are the same.
//! Trade-off: the table describes llama.cpp as of 2026; older programs refuse to load files of families that they do not know.

mod metadata;

use firebrick_arch::{
    Activation, AttentionSpec, KeysAndValues, MlpSpec, ModelConfig, ModelSpec, Rope, RopeScaling, SwigluConstants,
};

use crate::error::ModelError;

/// llama.cpp's name of the one family whose layers differ in sizes and share keys and values.
const GEMMA4: &str = "gemma4";
/// What llama.cpp divides the frequency of a pair of columns by that is not rotated.
const NOT_ROTATED: f32 = 1e30;

/// What llama.cpp does for a family.
#[derive(Clone, Copy, Debug)]
pub(super) struct Architecture {
    /// The family's name in `config.json`.
    model_type: &'static str,
    /// llama.cpp's name.
    name: &'static str,
    activation: Activation,
    /// Whether neighboring columns of queries and keys are rotated, instead of halves.
    rotates_neighbors: bool,
    /// Whether attention's output and the MLP may have biases.
    output_biases: bool,
    head: Head,
    windows: Windows,
    /// Whether the divisors of frequencies are read that Llama 3's scaling and longrope need.
    divisors: Divisors,
    /// The n of every n-th layer that does not rotate queries and keys.
    unrotated: Option<usize>,
    /// Whether all query heads together have to be as wide as the hidden size.
    whole_heads: bool,
}

/// Where the output head comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Head {
    Either,
    Tied,
    Own,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Windows {
    /// None.
    Unknown,
    /// All but every n-th, or those that the file lists; none if it names no window.
    AllButEvery(usize),
    /// The same, and the file has to name a window.
    AlwaysAllButEvery(usize),
    /// Those that the file lists, of which there has to be one.
    AlwaysListed,
}

/// The tensors of divisors that are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Divisors {
    None,
    LongRope,
    Both,
}

const fn family(model_type: &'static str, name: &'static str) -> Architecture {
    Architecture {
        model_type,
        name,
        activation: Activation::Silu,
        rotates_neighbors: false,
        output_biases: false,
        head: Head::Either,
        windows: Windows::Unknown,
        divisors: Divisors::None,
        unrotated: None,
        whole_heads: false,
    }
}

const fn like_llama(model_type: &'static str, name: &'static str) -> Architecture {
    Architecture { rotates_neighbors: true, output_biases: true, divisors: Divisors::Both, ..family(model_type, name) }
}

const fn like_gemma(model_type: &'static str, name: &'static str) -> Architecture {
    Architecture { activation: Activation::GeluTanh, ..family(model_type, name) }
}

const fn like_gemma4(model_type: &'static str) -> Architecture {
    Architecture { windows: Windows::AlwaysListed, ..like_gemma(model_type, GEMMA4) }
}

const fn like_olmo2(model_type: &'static str) -> Architecture {
    Architecture { head: Head::Own, windows: Windows::AllButEvery(4), whole_heads: true, ..family(model_type, "olmo2") }
}

const ARCHITECTURES: [Architecture; 17] = [
    Architecture { head: Head::Tied, ..like_gemma("gemma", "gemma") },
    Architecture { head: Head::Tied, windows: Windows::AlwaysAllButEvery(2), ..like_gemma("gemma2", "gemma2") },
    Architecture { windows: Windows::AllButEvery(6), ..like_gemma("gemma3_text", "gemma3") },
    like_gemma4("gemma4_text"),
    like_gemma4("gemma4_unified_text"),
    Architecture {
        activation: Activation::ClampedSwiglu(SwigluConstants::PUBLISHED),
        output_biases: true,
        head: Head::Own,
        windows: Windows::AlwaysAllButEvery(2),
        ..family("gpt_oss", "gpt-oss")
    },
    like_llama("granite", "granite"),
    like_llama("llama", "llama"),
    like_llama("mistral", "llama"),
    like_llama("mixtral", "llama"),
    like_olmo2("olmo2"),
    like_olmo2("olmo3"),
    Architecture { divisors: Divisors::LongRope, whole_heads: true, ..family("phi3", "phi3") },
    family("qwen2", "qwen2"),
    family("qwen3", "qwen3"),
    family("qwen3_moe", "qwen3moe"),
    Architecture { rotates_neighbors: true, unrotated: Some(4), ..family("smollm3", "smollm3") },
];

impl Architecture {
    /// Returns the family of a model that llama.cpp computes as it is here.
    pub(super) fn of(config: &ModelConfig) -> Result<&'static Self, ModelError> {
        let refused = |what: String| ModelError::NoGguf { what };
        let found = ARCHITECTURES.iter().find(|known| known.model_type == config.model_type).ok_or_else(|| {
            let known: Vec<&str> = ARCHITECTURES.iter().map(|known| known.model_type).collect();
            refused(format!("the family {}: only {} can be written", config.model_type, known.join(", ")))
        })?;
        found.check(&config.spec).map_err(refused)?;
        Ok(found)
    }

    /// Returns whether llama.cpp merges characters to tokens in the order of the tokenizer's merges, where bytes stand for unknown ones.
    pub(super) fn merges_in_order(&self) -> bool {
        self.name == GEMMA4
    }

    /// Returns whether the rows of a tensor are reordered, because llama.cpp rotates neighboring columns.
    pub(super) fn reorders(&self, name: &str) -> bool {
        self.rotates_neighbors && (name.contains("self_attn.q_proj") || name.contains("self_attn.k_proj"))
    }

    fn check(&self, spec: &ModelSpec) -> Result<(), String> {
        (0..spec.layers.len()).try_for_each(|layer| self.check_layer(spec, layer))?;
        match (self.head, spec.tie_word_embeddings) {
            (Head::Tied, false) => return Err("a head of its own, where llama.cpp takes the embedding".to_owned()),
            (Head::Own, true) => return Err("a tied head, where llama.cpp has one of its own".to_owned()),
            _ => {}
        }
        if let Some(inputs) = spec.per_layer_inputs.filter(|inputs| inputs.vocab_size != spec.vocab_size) {
            return Err(format!("a table of layers' inputs for {} of {} tokens", inputs.vocab_size, spec.vocab_size));
        }
        if self.windows == Windows::AlwaysListed && spec.attentions().all(|attention| attention.window.is_none()) {
            return Err("no layer with a window".to_owned());
        }
        let caps_logits = spec.logit_soft_cap.is_some();
        if (self.name == "gemma2" && !caps_logits) || (!self.name.starts_with("gemma") && caps_logits) {
            return Err(format!("the soft cap {:?} of its logits", spec.logit_soft_cap));
        }
        self.check_ropes(spec)
    }

    fn check_layer(&self, spec: &ModelSpec, number: usize) -> Result<(), String> {
        let layer = &spec.layers[number];
        let is = |what: &str| Err(format!("{what} in layer {number}"));
        let Some(attention) = layer.mixer.attention() else { return is("no attention") };
        if let Some(source) = self.source_unlike_llama_cpp(spec, attention) {
            return is(&format!("keys and values of layer {source}"));
        }
        let expected = self.attention_scale(spec);
        if expected.is_some_and(|expected| (attention.scale / expected - 1.0).abs() > 1e-6) {
            return is(&format!("attention scores times {}", attention.scale));
        }
        if attention.soft_cap.is_some() != (self.name == "gemma2") {
            return is(&format!("the soft cap {:?} of attention scores", attention.soft_cap));
        }
        if self.whole_heads && attention.query_size() != spec.hidden_size {
            return is(&format!("{} heads of {} columns", attention.heads, attention.head_dim));
        }
        let rotates = self.unrotated.is_none_or(|every| !(number + 1).is_multiple_of(every));
        if attention.rope.is_some() != rotates {
            return is(if rotates { "no rotation of queries and keys" } else { "rotated queries and keys" });
        }
        let mlp_bias = matches!(layer.mlp, MlpSpec::Gated { bias: true, .. });
        if (attention.output_bias || mlp_bias) && !self.output_biases {
            return is("biases of attention's output or of the MLP");
        }
        if layer.mlp.activation() != self.activation {
            let (found, expected) = (layer.mlp.activation().name(), self.activation.name());
            let constants = if found == expected { " with other constants" } else { "" };
            return is(&format!("the activation {found}{constants}"));
        }
        if layer.mlp.is_mixture() != (spec.layers[0].mlp.is_mixture() || self.name == "qwen3moe") {
            return is("an MLP of another kind than in other layers");
        }
        match layer.mlp.router() {
            Some(router) if !router.normalizes => is("weights of experts that do not add up to one"),
            _ => Ok(()),
        }
    }

    /// Returns the layer that has the keys and values which another reads, unless llama.cpp takes the same: of the last two layers with their own it has the last for
    /// layers without a window, and the other for those with one.
    fn source_unlike_llama_cpp(&self, spec: &ModelSpec, attention: &AttentionSpec) -> Option<usize> {
        let KeysAndValues::OfLayer(source) = attention.keys_and_values else { return None };
        let own = spec.attentions().filter(|attention| !attention.reads_another()).count();
        let back = if attention.window.is_some() { 2 } else { 1 };
        (self.name != GEMMA4 || source + back != own).then_some(source)
    }

    /// Returns the factor of attention scores that llama.cpp has in a family; `None`: the file names it.
    fn attention_scale(&self, spec: &ModelSpec) -> Option<f64> {
        let attention = spec.attentions().next()?;
        let columns = match (self.name, spec.layers.len()) {
            ("granite", _) => return None,
            (GEMMA4, _) => return Some(1.0),
            // The largest models of these families are known by their number of layers.
            ("gemma2", 46) | ("gemma3", 62) => spec.hidden_size / attention.heads,
            _ => attention.head_dim,
        };
        Some(1.0 / (columns as f64).sqrt())
    }

    fn check_ropes(&self, spec: &ModelSpec) -> Result<(), String> {
        let [full, others @ ..] = spec.ropes.as_slice() else { return Err("no rotary embedding".to_owned()) };
        let is_read = match full.scaling {
            RopeScaling::Default | RopeScaling::Linear { .. } | RopeScaling::Proportional { .. } => true,
            RopeScaling::Llama3 { .. } => self.divisors == Divisors::Both,
            RopeScaling::LongRope { .. } => self.divisors != Divisors::None,
            // llama.cpp reads no others in these families. It rounds the ends of the ramp, which gpt-oss does not; see the notes of a file.
            RopeScaling::Yarn { beta_fast, beta_slow, truncate, .. } => {
                (beta_fast, beta_slow) == (32.0, 1.0) && (truncate || self.name == "gpt-oss")
            }
        };
        let is_proportional = matches!(full.scaling, RopeScaling::Proportional { .. });
        if !is_read || is_proportional != (self.name == GEMMA4) {
            return Err(format!("its rotary embedding {:?}", full.scaling));
        }
        let is_known = |other: &Rope| {
            let has_own_base = ["gemma3", GEMMA4].contains(&self.name);
            other.scaling == RopeScaling::Default && (has_own_base || other.theta == full.theta)
        };
        match others.iter().find(|other| !is_known(other)) {
            Some(other) => Err(format!("the rotary embedding {other:?} of its layers with a window")),
            None => Ok(()),
        }
    }

    /// Says what a user of the file has to know besides what the command wrote.
    pub(super) fn notes(&self, config: &ModelConfig) -> Vec<String> {
        let mut notes = Vec::new();
        if let Some(wrapper) = config.wrapper {
            notes.push(format!("the file has the text model alone; the {} is left out", wrapper.other_part));
        }
        if let (Windows::Unknown, Some(window)) = (self.windows, window(&config.spec)) {
            notes.push(format!(
                "llama.cpp has no sliding window in this family, so the file names its {window} tokens as the whole context: up to there both \
                 compute the same"
            ));
        }
        if let Some(Rope { scaling: RopeScaling::Yarn { truncate: false, .. }, .. }) = config.spec.ropes.first() {
            notes.push(
                "llama.cpp rounds the ends of YaRN's ramp to whole dimensions, which this model does not".to_owned(),
            );
        }
        notes
    }

    /// Returns the tensors by which frequencies are divided.
    pub(super) fn divisors(&self, spec: &ModelSpec) -> Vec<(&'static str, Vec<f32>)> {
        let rope = &spec.ropes[0];
        match &rope.scaling {
            RopeScaling::Llama3 { .. } => {
                let plain = Rope { scaling: RopeScaling::Default, ..rope.clone() };
                let [(plain, _), (scaled, _)] = [&plain, rope].map(|rope| rope.inverse_frequencies(1));
                vec![("rope_freqs.weight", plain.iter().zip(&scaled).map(|(plain, scaled)| plain / scaled).collect())]
            }
            RopeScaling::LongRope { short_factor, long_factor, .. } => {
                let floats = |factors: &[f64]| factors.iter().map(|&factor| factor as f32).collect();
                vec![
                    ("rope_factors_long.weight", floats(long_factor)),
                    ("rope_factors_short.weight", floats(short_factor)),
                ]
            }
            RopeScaling::Proportional { rotated } => {
                let divisor = |pair: usize| if pair < *rotated { 1.0 } else { NOT_ROTATED };
                vec![("rope_freqs.weight", (0..rope.rotary_dim / 2).map(divisor).collect())]
            }
            RopeScaling::Default | RopeScaling::Linear { .. } | RopeScaling::Yarn { .. } => Vec::new(),
        }
    }
}

/// Returns the smallest window that hides anything within the context.
fn window(spec: &ModelSpec) -> Option<usize> {
    spec.attentions().filter_map(|attention| attention.window_within(spec.max_position_embeddings)).min()
}

/// Returns the attention of the first layer; every layer was checked to have one.
pub(super) fn first_attention(spec: &ModelSpec) -> &AttentionSpec {
    spec.attentions().next().expect("every layer has attention")
}
