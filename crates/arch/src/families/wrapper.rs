//! Checkpoints with more parts than a text model: their names in `config.json`, and the keys of the text model in it.
//!
//! Only the text model is read. Given text alone, the sections of a multimodal rotary embedding all have the same positions, which is the plain
//! embedding, and tokens see earlier tokens only.
//! Not supported: wrappers whose text model has arithmetic of its own for other inputs than text.

use serde_json::{Map, Value};

use super::{FAMILIES, Family};
use crate::error::ArchError;
use crate::json::JsonObject;
use crate::quantization::QUANTIZATION_CONFIG;

/// The key of the text model's settings. Older files of some wrappers have these settings at the top.
pub(crate) const TEXT_CONFIG: &str = "text_config";
pub(crate) const TIE_WORD_EMBEDDINGS: &str = "tie_word_embeddings";
/// The keys of other parts that may stand next to the text model's settings.
const OTHER_CONFIGS: [&str; 1] = ["vision_config"];

/// A checkpoint of which a family is the text model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wrapper {
    /// The name in `architectures`, such as "Gemma3ForConditionalGeneration".
    pub architecture: &'static str,
    /// The name in `model_type`, such as "gemma3".
    pub model_type: &'static str,
    /// The part that is left alone, for a sentence.
    pub other_part: &'static str,
    /// The name in `model_type` of the text model's settings, and that of the family which reads them. The first is the default.
    texts: &'static [(&'static str, &'static str)],
    /// Keys that published files leave out, with the values that transformers gives them.
    defaults: &'static [(&'static str, usize)],
    /// Whether head and embedding are one table if the wrapper's own `tie_word_embeddings` is absent.
    ties: bool,
    /// Whether that key of the text model may tie them as well.
    text_may_tie: bool,
}

const fn wrapper(
    architecture: &'static str,
    model_type: &'static str,
    texts: &'static [(&'static str, &'static str)],
) -> Wrapper {
    Wrapper {
        architecture,
        model_type,
        other_part: "vision tower",
        texts,
        defaults: &[],
        ties: false,
        text_may_tie: false,
    }
}

const MISTRAL3: Wrapper =
    wrapper("Mistral3ForConditionalGeneration", "mistral3", &[("mistral", "mistral"), ("ministral3", "ministral3")]);

/// The text model of the Gemma 4 12B.
const UNIFIED_TEXT: (&str, &str) = ("gemma4_unified_text", "gemma4_unified_text");
/// What is left alone where it has no name of its own.
const MORE_SENSES: &str = "part for images and sound";

/// Every wrapper.
pub const WRAPPERS: [Wrapper; 8] = [
    Wrapper {
        defaults: &[
            ("vocab_size", 262_208),
            ("hidden_size", 2304),
            ("intermediate_size", 9216),
            ("num_hidden_layers", 26),
            ("num_attention_heads", 8),
        ],
        ties: true,
        ..wrapper("Gemma3ForConditionalGeneration", "gemma3", &[("gemma3_text", "gemma3_text")])
    },
    Wrapper {
        other_part: MORE_SENSES,
        ties: true,
        ..wrapper("Gemma4ForConditionalGeneration", "gemma4", &[("gemma4_text", "gemma4_text")])
    },
    Wrapper {
        other_part: MORE_SENSES,
        ties: true,
        ..wrapper("Gemma4UnifiedForConditionalGeneration", "gemma4_unified", &[UNIFIED_TEXT])
    },
    Wrapper { ties: true, ..MISTRAL3 },
    Wrapper {
        text_may_tie: true,
        ..wrapper("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl", &[("qwen2_5_vl_text", "qwen2")])
    },
    wrapper("Qwen3VLForConditionalGeneration", "qwen3_vl", &[("qwen3_vl_text", "qwen3")]),
    wrapper("Qwen3_5ForConditionalGeneration", "qwen3_5", &[("qwen3_5_text", "qwen3_5_text")]),
    wrapper("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe", &[("qwen3_5_moe_text", "qwen3_5_moe_text")]),
];

pub(crate) struct TextPart {
    pub(crate) wrapper: &'static Wrapper,
    pub(crate) family: &'static Family,
    /// Its settings, as the family reads them.
    pub(crate) settings: Map<String, Value>,
    /// Whether a folder without a head has the embedding's, whatever the settings say.
    pub(crate) ties_without_head: bool,
}

/// Returns the text model of a `config.json`, or `None` if it describes no wrapper: by `architectures`, without them by `model_type`.
///
/// # Errors
/// Names that contradict each other, and a text model that no family reads.
pub(crate) fn text_part(json: &JsonObject) -> Result<Option<TextPart>, ArchError> {
    let model_type = json.str("model_type")?;
    let is_named = |wrapper: &&Wrapper| match json.get("architectures").and_then(Value::as_array) {
        Some(names) => names.iter().any(|name| name == wrapper.architecture),
        None => model_type == Some(wrapper.model_type),
    };
    let Some(wrapper) = WRAPPERS.iter().find(is_named) else { return Ok(None) };
    if let Some(name) = model_type.filter(|name| *name != wrapper.model_type) {
        let (architecture, expected) = (wrapper.architecture, wrapper.model_type);
        let rule = format!("{architecture} in `architectures` has \"{expected}\"; correct one of the two keys");
        return Err(json.bad("model_type", format!("\"{name}\""), rule));
    }
    let nested = json.object(TEXT_CONFIG)?;
    let family = wrapper.family_of(nested.as_ref())?;
    let mut settings = nested.as_ref().unwrap_or(json).map().clone();
    OTHER_CONFIGS.iter().for_each(|key| drop(settings.shift_remove(*key)));
    if let Some(value) = json.get(QUANTIZATION_CONFIG) {
        settings.insert(QUANTIZATION_CONFIG.to_owned(), value.clone());
    }
    // The class of the whole checkpoint decides, as in transformers 5; one of them also looks for the key where transformers 4 wrote it. Without a
    // key it ties what has no head, so published files leave out the key and have a head.
    let of_text = nested.as_ref().map(|text| text.bool(TIE_WORD_EMBEDDINGS)).transpose()?.flatten();
    let own = json.bool(TIE_WORD_EMBEDDINGS)?;
    let ties_without_head = own.is_none() && wrapper.ties;
    if !ties_without_head {
        let ties = own == Some(true) || (wrapper.text_may_tie && of_text == Some(true));
        settings.insert(TIE_WORD_EMBEDDINGS.to_owned(), Value::from(ties));
    }
    for (key, value) in wrapper.defaults {
        if settings.get(*key).is_none_or(Value::is_null) {
            settings.insert((*key).to_owned(), Value::from(*value));
        }
    }
    Ok(Some(TextPart { wrapper, family, settings, ties_without_head }))
}

impl Wrapper {
    /// Returns the family of the text model with these settings.
    fn family_of(&self, text: Option<&JsonObject>) -> Result<&'static Family, ArchError> {
        let default = self.texts[0].0;
        let name = text.map(|text| text.str("model_type")).transpose()?.flatten().unwrap_or(default);
        let known = self.texts.iter().find(|(text, _)| *text == name);
        let family = known.and_then(|(_, family)| FAMILIES.iter().find(|known| known.model_type == *family));
        family.ok_or_else(|| {
            let names: Vec<String> = self.texts.iter().map(|(text, _)| format!("\"{text}\"")).collect();
            let advice = format!("The text model of a {} may be {}", self.architecture, names.join(" or "));
            text.expect("the default has a family").unsupported("model_type", format!("\"{name}\""), advice)
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::config::ModelConfig;
    use crate::config::tests::{parse, refusal_of};
    use crate::rope::RopeScaling;

    /// The text model's settings of a Qwen2.5-VL.
    fn qwen_text() -> Value {
        json!({
            "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "vocab_size": 11, "max_position_embeddings": 64, "rope_theta": 1000000.0,
            "tie_word_embeddings": true, "bos_token_id": 1, "eos_token_id": 2,
            "rope_scaling": {"type": "mrope", "mrope_section": [1, 0, 0]}
        })
    }

    fn qwen(text: Value, nests: bool) -> Value {
        let mut config = json!({
            "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl",
            "vision_config": {"depth": 2}, "torch_dtype": "bfloat16"
        });
        if nests {
            config["text_config"] = text;
        } else {
            config.as_object_mut().unwrap().extend(text.as_object().unwrap().clone());
        }
        config
    }

    fn read(config: &Value) -> ModelConfig {
        parse(&config.to_string()).unwrap()
    }

    #[test]
    fn text_settings_are_read_from_either_level() {
        let mut nested = qwen_text();
        nested["model_type"] = json!("qwen2_5_vl_text");
        let mut above = qwen(nested.clone(), true);
        above["eos_token_id"] = json!([1, 106]);
        assert_eq!(read(&above).eos_token_ids, [1, 106]);
        let [top, nested] = [read(&qwen(qwen_text(), false)), read(&qwen(nested, true))];
        assert_eq!(top.spec, nested.spec);
        assert_eq!((top.model_type.as_str(), top.wrapper.unwrap().model_type), ("qwen2", "qwen2_5_vl"));
        assert_eq!((top.bos_token_id, &nested.eos_token_ids[..], nested.bos_token_id), (Some(1), &[2][..], Some(1)));
        assert_eq!(nested.dtype.as_deref(), Some("bfloat16"));
        assert_eq!(top.spec.ropes[0].scaling, RopeScaling::Default);
        assert!(top.spec.attentions().next().unwrap().qkv_bias);
    }

    #[test]
    fn changes_go_where_the_text_model_has_its_settings() {
        for nests in [false, true] {
            let mut config = read(&qwen(qwen_text(), nests));
            config.set_tied(false);
            config.grow_vocabulary(13);
            config.set_pad_token_id(3);
            config.add_eos_token_ids([2, 5]);
            let again = parse(&config.text_with("float32", None)).unwrap();
            assert_eq!(again.eos_token_ids, [2, 5]);
            assert_eq!((again.spec.vocab_size, again.spec.tie_word_embeddings), (13, false));
            assert_eq!((again.dtype.as_deref(), again.wrapper), (Some("float32"), config.wrapper));
            let text: Value = serde_json::from_str(config.text()).unwrap();
            let settings = if nests { &text[TEXT_CONFIG] } else { &text };
            assert_eq!((&settings["vocab_size"], &text["tie_word_embeddings"]), (&json!(13), &json!(false)));
            assert_eq!((&settings["pad_token_id"], &settings["eos_token_id"]), (&json!(3), &json!([2, 5])));
            assert_eq!((text["vision_config"]["depth"].as_u64(), text.get("vocab_size").is_some()), (Some(2), !nests));
        }
    }

    #[test]
    fn a_head_is_shared_where_the_class_of_transformers_shares_it() {
        // As transformers 5.24's classes do: the wrapper's own key, or what it does without one, or also the key of its text_config.
        let keys = [Some(true), Some(false), None];
        for (name, absent, or_of_text) in [
            ("gemma3", true, false),
            ("gemma4", true, false),
            ("mistral3", true, false),
            ("qwen2_5_vl", false, true),
            ("qwen3_vl", false, false),
        ] {
            let wrapper = WRAPPERS.iter().find(|wrapper| wrapper.model_type == name).unwrap();
            for (own, text) in keys.into_iter().flat_map(|own| keys.map(|text| (own, text))) {
                let mut config = qwen(qwen_text(), true);
                config["architectures"] = json!([wrapper.architecture]);
                config["model_type"] = json!(name);
                config["tie_word_embeddings"] = json!(own);
                config[TEXT_CONFIG]["model_type"] = json!(wrapper.texts[0].0);
                config[TEXT_CONFIG]["tie_word_embeddings"] = json!(text);
                let map = config.as_object().unwrap();
                let part = text_part(&JsonObject::new(std::path::Path::new("c"), map)).unwrap().unwrap();
                let ties = part.ties_without_head || part.settings["tie_word_embeddings"] == json!(true);
                let is_tied = own.unwrap_or(absent) || (or_of_text && text == Some(true));
                assert_eq!(ties, is_tied, "{name} {own:?} {text:?}");
            }
        }
    }

    #[test]
    fn quantization_of_the_checkpoint_is_that_of_its_text_model() {
        let mut config = qwen(qwen_text(), true);
        config[QUANTIZATION_CONFIG] = json!({"quant_method": "gptq"});
        let message = refusal_of(parse(&config.to_string()));
        assert!(message.contains("gptq"), "{message}");
    }

    #[test]
    fn another_text_model_and_other_names_are_refused_by_key() {
        let mut config = qwen(qwen_text(), true);
        config[TEXT_CONFIG]["model_type"] = json!("llama");
        let message = refusal_of(parse(&config.to_string()));
        for part in ["`text_config.model_type` is \"llama\"", "Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl_text"] {
            assert!(message.contains(part), "{message}");
        }
        let mut config = qwen(qwen_text(), true);
        config["model_type"] = json!("qwen3_vl");
        assert!(refusal_of(parse(&config.to_string())).contains("`model_type` is \"qwen3_vl\""));
        let mut config = qwen(qwen_text(), true);
        config[TEXT_CONFIG]["hidden_size"] = json!("wide");
        assert!(refusal_of(parse(&config.to_string())).contains("`text_config.hidden_size`"));
    }

    #[test]
    fn every_text_model_has_a_family() {
        for wrapper in WRAPPERS {
            for (text, _) in wrapper.texts {
                let map = Map::from_iter([("model_type".to_owned(), json!(text))]);
                let path = std::path::Path::new("config.json");
                assert!(wrapper.family_of(Some(&JsonObject::within(path, TEXT_CONFIG, &map))).is_ok(), "{text}");
            }
        }
    }
}
