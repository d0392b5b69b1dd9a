//! Comparison with Hugging Face transformers: the rendered text, the token ids, and the loss mask.
//!
//! Goldens and the script that generates them are in `tests/golden/`. Trade-off: the two tokenizers there are small, but cover the two kinds of
//! Llama-like models (byte level, and SentencePiece-like).

use std::collections::BTreeMap;
use std::env;
use std::fs::read_to_string;
use std::path::{Path, PathBuf};

use firebrick_data::{Chat, EncodeOptions, Encoder, FindingKind, Record, RecordPlace, TemplateChoice, Tokenizer};
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
    let place = RecordPlace { path: "golden".into(), line: 1 };
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
fn the_mask_equals_that_of_transformers() {
    for blocks in [true, false] {
        assert_eq!(compare_masks(blocks), [], "blocks: {blocks}");
    }
}

/// Chats, and templates with the text that Jinja2 renders of each chat; none where it raises an error.
#[derive(Deserialize)]
struct JinjaCases {
    chats: Vec<JinjaChat>,
    templates: Vec<JinjaTemplate>,
}

#[derive(Deserialize)]
struct JinjaChat {
    messages: Vec<Map<String, Json>>,
    tools: Option<Vec<Json>>,
    documents: Option<Vec<Json>>,
    arguments: Map<String, Json>,
    prompt: bool,
}

#[derive(Deserialize)]
struct JinjaTemplate {
    name: String,
    source: String,
    texts: Vec<Option<String>>,
}

/// Reads the rules that `tests/golden/compare_templates.py` of the workspace renders, or the cases that it wrote elsewhere.
#[test]
fn templates_render_as_in_jinja() {
    let rules = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/jinja-rules.json");
    let path = env::var_os("FIREBRICK_JINJA_CASES").map_or(rules, PathBuf::from);
    let cases: JinjaCases = serde_json::from_str(&read_to_string(path).unwrap()).unwrap();
    let mut tokenizer = tokenizer("chatml", &golden().styles["chatml"], true);
    tokenizer.set_date(0);
    let (mut compared, mut differing) = (0, Vec::new());
    for JinjaTemplate { name, source, texts } in &cases.templates {
        let chosen =
            tokenizer.choose_template(&TemplateChoice::Text(source.clone())).map_err(|error| error.to_string());
        for (index, (chat, text)) in cases.chats.iter().zip(texts).enumerate() {
            let JinjaChat { tools, documents, arguments, .. } = chat;
            let (tools, documents, arguments) = (tools.clone(), documents.clone(), arguments.clone());
            let given = Chat { tools, documents, arguments, ..Chat::from_messages(chat.messages.clone()) };
            let render = || tokenizer.chat_template().unwrap().render(&given, chat.prompt);
            let found = chosen.clone().and_then(|()| render().map_err(|error| error.to_string()));
            compared += 1;
            // Rules that are known to differ must, so that their list stays true.
            if (found.as_ref().ok() == text.as_ref()) == (name == "differs") {
                let shown = if cases.chats.len() == 1 { source.as_str() } else { "" };
                differing.push(format!("{name} {index} {shown:?}\n  expected {text:?}\n  found    {found:?}"));
            }
        }
    }
    println!("{compared} texts of {} templates compared", cases.templates.len());
    assert!(differing.is_empty(), "{} of {compared}:\n{}", differing.len(), differing.join("\n"));
}
