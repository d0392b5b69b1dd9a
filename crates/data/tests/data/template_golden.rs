//! Comparison with Hugging Face transformers: the rendered text, the token ids, and the loss mask.
//!
//! Goldens and the script that generates them are in `tests/golden/`. Trade-off: the two tokenizers there are small, but cover the two kinds of
//! Llama-like models (byte level, and SentencePiece-like).

use std::collections::BTreeMap;
use std::fs::read_to_string;
use std::path::{Path, PathBuf};

use firebrick_data::{Chat, EncodeOptions, Encoder, FindingKind, Place, Record, Tokenizer};
use serde::Deserialize;
use serde_json::{Map, Value as Json, json};

#[derive(Deserialize)]
struct Golden {
    conversations: Vec<Conversation>,
    styles: BTreeMap<String, Style>,
}

#[derive(Deserialize)]
struct Conversation {
    messages: Vec<Map<String, Json>>,
    tools: Option<Vec<Json>>,
}

#[derive(Deserialize)]
struct Style {
    tokenizer: String,
    special_tokens: BTreeMap<String, String>,
    cases: Vec<Case>,
}

/// The output of transformers for a conversation; without a text if the template refuses it.
#[derive(Deserialize)]
struct Case {
    text: Option<String>,
    prompt_adds: Option<String>,
    prompt: Option<String>,
    #[serde(default)]
    ids: Vec<u32>,
    /// Lengths of runs of equal bits, beginning with zeros.
    #[serde(default)]
    mask: Vec<usize>,
}

impl Case {
    fn mask(&self) -> Vec<bool> {
        self.mask.iter().enumerate().flat_map(|(run, &length)| vec![run % 2 == 1; length]).collect()
    }
}

fn golden_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden")
}

fn golden() -> Golden {
    serde_json::from_str(&read_to_string(golden_folder().join("templates.json")).unwrap()).unwrap()
}

/// Returns a tokenizer with a template. Without `blocks`, the template's generation tags become plain conditions.
fn tokenizer(name: &str, style: &Style, blocks: bool) -> Tokenizer {
    let mut template = read_to_string(golden_folder().join(format!("templates/{name}.jinja"))).unwrap();
    if !blocks {
        template = template.replace("endgeneration", "endif").replace(" generation ", " if true ");
        template = template.replace("- generation", "- if true");
        assert!(!template.contains(" generation"));
    }
    crate::tokenizer(&style.tokenizer, Some(&template), &json!(style.special_tokens))
}

/// Returns the tokens of a conversation and their mask, or why it was dropped.
fn encode(tokenizer: &Tokenizer, conversation: &Conversation) -> Result<(Vec<u32>, Vec<bool>), FindingKind> {
    let record = json!({ "messages": conversation.messages, "tools": conversation.tools });
    let place = Place { path: "golden".into(), line: 1 };
    let record = Record::new(record.as_object().unwrap().clone(), place);
    let encoder = Encoder::new(tokenizer, EncodeOptions::new(100_000), &record).unwrap();
    let mut encoded = encoder.encode(&record).unwrap();
    match encoded.examples.pop() {
        Some(example) => Ok((example.tokens, example.loss_mask)),
        None => Err(encoded.findings[0].kind),
    }
}

#[test]
fn text_and_ids_equal_those_of_transformers() {
    let golden = golden();
    let mut compared = 0;
    for (name, style) in &golden.styles {
        let tokenizer = tokenizer(name, style, true);
        for (index, (case, conversation)) in style.cases.iter().zip(&golden.conversations).enumerate() {
            let tools = conversation.tools.as_deref();
            let template = tokenizer.chat_template_for(tools.is_some()).unwrap();
            let chat =
                Chat { tools: tools.map(<[Json]>::to_vec), ..Chat::from_messages(conversation.messages.clone()) };
            let render = |add_generation_prompt| template.render(&chat, add_generation_prompt);
            let Some(text) = &case.text else {
                assert!(render(false).is_err(), "{name} {index}");
                continue;
            };
            assert_eq!(&render(false).unwrap(), text, "{name} {index}");
            let with_prompt = case.prompt.clone().unwrap_or_else(|| text.clone() + case.prompt_adds.as_ref().unwrap());
            assert_eq!(render(true).unwrap(), with_prompt, "{name} {index}");
            assert_eq!(tokenizer.encode(text, false).unwrap(), case.ids, "{name} {index}");
            compared += 1;
        }
    }
    assert!(golden.styles.len() >= 12 && golden.conversations.len() >= 10 && compared >= 120);
}

/// Compares the masks of every conversation that transformers renders; returns those whose text cannot be located.
fn compare_masks(blocks: bool) -> Vec<(String, usize)> {
    let golden = golden();
    let mut not_found = Vec::new();
    for (name, style) in &golden.styles {
        let tokenizer = tokenizer(name, style, blocks);
        for (index, (case, conversation)) in style.cases.iter().zip(&golden.conversations).enumerate() {
            let mask = case.mask();
            match encode(&tokenizer, conversation) {
                Ok(found) => {
                    let shown = |mask: &[bool]| {
                        let ids = case.ids.iter().zip(mask).filter(|(_, trained)| **trained).map(|(id, _)| *id);
                        tokenizer.decode(&ids.collect::<Vec<_>>(), false).unwrap()
                    };
                    assert_eq!(found.0, case.ids, "{name} {index}");
                    assert_eq!(shown(&found.1), shown(&mask), "{name} {index}");
                    assert_eq!(found.1, mask, "{name} {index}");
                }
                Err(FindingKind::TemplateRefused) => assert!(case.text.is_none(), "{name} {index}"),
                Err(FindingKind::NothingToTrain) => assert!(!mask.contains(&true), "{name} {index}"),
                Err(FindingKind::MaskNotFound) => not_found.push((name.clone(), index)),
                Err(other) => panic!("{name} {index}: {other:?}"),
            }
        }
    }
    not_found
}

#[test]
fn mask_equals_that_of_transformers_with_generation_blocks_and_without() {
    for blocks in [true, false] {
        assert_eq!(compare_masks(blocks), [], "blocks: {blocks}");
    }
}

#[derive(Deserialize)]
struct Snippets {
    variables: Map<String, Json>,
    snippets: Vec<Snippet>,
}

#[derive(Deserialize)]
struct Snippet {
    source: String,
    text: Option<String>,
}

#[test]
fn expressions_have_the_same_values_as_in_jinja() {
    let golden = golden();
    let mut tokenizer = tokenizer("chatml", &golden.styles["chatml"], true);
    let snippets: Snippets =
        serde_json::from_str(&read_to_string(golden_folder().join("snippets.json")).unwrap()).unwrap();
    let mut differing = Vec::new();
    for snippet in &snippets.snippets {
        let choice = firebrick_data::TemplateChoice::Text(snippet.source.clone());
        let rendered = tokenizer.choose_template(&choice).and_then(|()| {
            let chat = Chat { arguments: snippets.variables.clone(), ..Chat::default() };
            tokenizer.chat_template().unwrap().render(&chat, false)
        });
        let rendered = rendered.map_err(|error| error.to_string());
        if rendered.as_ref().ok() != snippet.text.as_ref() {
            differing.push(format!("{}\n  expected {:?}\n  found    {rendered:?}", snippet.source, snippet.text));
        }
    }
    assert!(differing.is_empty(), "{} of {}:\n{}", differing.len(), snippets.snippets.len(), differing.join("\n"));
}
