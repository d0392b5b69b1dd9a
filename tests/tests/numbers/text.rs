//! Text in and out: tokens, chat templates, greedy generation.

use std::collections::BTreeMap;
use std::fs::read_to_string;
use std::ops::ControlFlow;

use firebrick_data::{Chat, Tokenizer};
use firebrick_kernels::Kernels;
use firebrick_kernels::backends::Flex;
use firebrick_model::{BatchLimits, Decoder, GenerateOptions, ModelError, Sampler};
use firebrick_tests::{
    FAMILIES, FROZEN, Golden, NF4, every_next_token, families, fixture, golden_file, host, is_wgpu, load,
    on_every_backend, some_in_turn, upload,
};
use serde_json::{Map, Value};

fn prompts(golden: &Golden) -> Vec<Vec<u32>> {
    (0..2).map(|index| golden.ids(&format!("prompt{index}.input_ids"))).collect()
}

fn greedy<B: Kernels>(model: &Decoder<B>, prompts: &[Vec<u32>], stop_tokens: Vec<u32>) -> Vec<Vec<u32>> {
    greedy_within(model, prompts, stop_tokens, BatchLimits::NONE)
}

fn options(stop_tokens: Vec<u32>, limits: BatchLimits) -> GenerateOptions {
    GenerateOptions { max_new_tokens: 16, stop_tokens, sampler: Sampler::greedy(), limits }
}

fn greedy_within<B: Kernels>(
    model: &Decoder<B>,
    prompts: &[Vec<u32>],
    stop_tokens: Vec<u32>,
    limits: BatchLimits,
) -> Vec<Vec<u32>> {
    let options = options(stop_tokens, limits);
    model.generate(prompts, &options).expect("the prompts are short and the logits finite")
}

/// For the families with a window of 12, one prompt of 7 tokens is shorter than the window and one is longer. wgpu generates fewer tokens: the text
/// of the short one leaves the window after five.
fn greedy_text<B: Kernels>() {
    let max_new_tokens = if is_wgpu::<B>() { 8 } else { 16 };
    for family in families::<B>() {
        let golden = Golden::open(&format!("{family}-generation"));
        let model = load::<B>(family, None, FROZEN);
        let stop_tokens = model.config.eos_token_ids.clone();
        let options = GenerateOptions { max_new_tokens, ..options(stop_tokens, BatchLimits::NONE) };
        let written = model.generate(&prompts(&golden), &options).expect("the prompts are short and the logits finite");
        for (index, tokens) in written.iter().enumerate() {
            let mut expected = golden.ids(&format!("prompt{index}.new_ids"));
            expected.truncate(max_new_tokens);
            assert_eq!(*tokens, expected, "{family}, prompt {index}");
        }
    }
}

on_every_backend!(greedy_text_of_every_family_equals_that_of_transformers, greedy_text);

/// Two prompts of different lengths share the steps over the cache; each must go on as if the whole text were read at every token.
#[test]
fn text_written_through_the_cache_equals_text_written_without_it() {
    for family in FAMILIES {
        let model = load::<Flex>(family, Some(&format!("{family}-lora")), NF4);
        let prompts = prompts(&Golden::open(&format!("{family}-generation")));
        let through_cache = greedy(&model, &prompts, Vec::new());
        for (prompt, written) in prompts.iter().zip(through_cache) {
            assert_eq!(written.len(), 16);
            let mut tokens = prompt.clone();
            for expected in written {
                let batch = every_next_token(&tokens, tokens.len());
                let logits = host(model.logits(&upload(&model, &batch)));
                let last = &logits[(tokens.len() - 1) * model.config.spec.vocab_size..];
                let best = (0..last.len()).max_by(|&a, &b| last[a].total_cmp(&last[b])).expect("there are logits");
                assert_eq!(best as u32, expected, "{family}, after {} tokens", tokens.len());
                tokens.push(expected);
            }
        }
    }
}

/// Returns prompts of many lengths, shorter and longer than the window of families with one.
fn ragged(golden: &Golden) -> Vec<Vec<u32>> {
    let whole = prompts(golden).concat();
    [9, 1, 18, 3, 14, 2, 5].iter().enumerate().map(|(at, &length)| whole[at..at + length].to_vec()).collect()
}

#[test]
fn a_text_does_not_depend_on_what_is_written_at_the_same_time() {
    let limits = [(usize::MAX, usize::MAX), (3, usize::MAX), (usize::MAX, 80), (2, 50), (0, 0)];
    for (turn, family) in FAMILIES.into_iter().enumerate() {
        let model = load::<Flex>(family, Some(&format!("{family}-lora")), FROZEN);
        let prompts = ragged(&Golden::open(&format!("{family}-generation")));
        let alone: Vec<Vec<u32>> =
            prompts.iter().flat_map(|prompt| greedy(&model, std::slice::from_ref(prompt), Vec::new())).collect();
        // Texts that end at different times make room for others in between.
        let stop = alone[2][4];
        let until = |tokens: &Vec<u32>| tokens.iter().take_while(|token| **token != stop).copied().collect();
        let expected: Vec<Vec<u32>> = alone.iter().map(until).collect();
        for (sequences, tokens) in some_in_turn(&limits, 2, turn) {
            let limits = BatchLimits { sequences, tokens };
            assert_eq!(greedy_within(&model, &prompts, vec![stop], limits), expected, "{family}, {limits:?}");
        }
    }
}

/// One second turn begins with the first, one differs from it, and one is part of it.
#[test]
fn a_conversation_goes_on_as_if_it_were_read_at_once() {
    for family in FAMILIES {
        let model = load::<Flex>(family, None, FROZEN);
        let prompts = prompts(&Golden::open(&format!("{family}-generation")));
        let options = options(Vec::new(), BatchLimits::NONE);
        let mut conversation = model.conversation(64);
        let mut say = |prompt: &[u32]| {
            let mut written = Vec::new();
            let mut on_token = |token| {
                written.push(token);
                ControlFlow::Continue(())
            };
            model.converse(&mut conversation, prompt, &options, &mut on_token).expect("there is room");
            written
        };
        let first = &prompts[0][..prompts[0].len().min(9)];
        let answer = say(first);
        let second = [first, &answer[..], &prompts[1][..3]].concat();
        let [left, part] = [[&first[..4], &prompts[1][..5]].concat(), first[..6].to_vec()];
        for prompt in [&second, &left, &part] {
            assert_eq!(say(prompt), greedy(&model, std::slice::from_ref(prompt), Vec::new())[0], "{family}");
        }
        assert_eq!(answer, greedy(&model, &[first.to_vec()], Vec::new())[0], "{family}");
    }
}

#[test]
fn tokens_come_as_they_are_chosen_and_a_break_ends_all_texts() {
    let golden = Golden::open("tiny-llama-generation");
    let model = load::<Flex>("tiny-llama", None, FROZEN);
    let expected = greedy(&model, &prompts(&golden), Vec::new());
    let mut seen = Vec::new();
    let mut on_token = |prompt, token| {
        seen.push((prompt, token));
        if seen.len() == 6 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let options = options(Vec::new(), BatchLimits::NONE);
    model.generate_each(&prompts(&golden), &options, &mut on_token).expect("the logits are finite");
    let order: Vec<(usize, u32)> = (0..3).flat_map(|at| [(0, expected[0][at]), (1, expected[1][at])]).collect();
    assert_eq!(seen, order);
}

#[test]
fn a_stop_token_ends_a_text_and_is_not_part_of_it() {
    let golden = Golden::open("tiny-llama-generation");
    let model = load::<Flex>("tiny-llama", None, FROZEN);
    let [first, second] = [0, 1].map(|index| golden.ids(&format!("prompt{index}.new_ids")));
    let stop = first[5];
    let until = |tokens: &[u32]| tokens.iter().position(|&token| token == stop).unwrap_or(tokens.len());
    let written = greedy(&model, &prompts(&golden), vec![stop]);
    assert_eq!(written, [&first[..until(&first)], &second[..until(&second)]]);
}

#[test]
fn a_token_outside_the_vocabulary_is_refused_before_a_device_reads_it() {
    let model = load::<Flex>("tiny-llama", None, FROZEN);
    let vocabulary = model.config.spec.vocab_size as u32;
    let uploaded = |id: u32, target: i64| model.upload(&[1, id], &[target, -100], &[0, 1], &[0, 2]).map(|_| ());
    uploaded(vocabulary - 1, i64::from(vocabulary) - 1).expect("the last token is one of the model");
    let options = options(Vec::new(), BatchLimits::NONE);
    let mut talk = model.conversation(32);
    let refused = [
        (vocabulary, uploaded(vocabulary, 1)),
        (u32::MAX, uploaded(u32::MAX, 1)),
        (vocabulary + 1, uploaded(1, i64::from(vocabulary) + 1)),
        (vocabulary, model.generate(&[vec![1], vec![2, vocabulary]], &options).map(|_| ())),
        (vocabulary, model.converse(&mut talk, &[vocabulary], &options, &mut |_| ControlFlow::Continue(()))),
    ];
    for (id, result) in refused {
        let error = result.expect_err("the model has no such token");
        assert!(matches!(error, ModelError::TokenOutsideVocabulary { .. }), "{error}");
        assert!(
            error.to_string().contains(&format!("{id} is outside the model's vocabulary of {vocabulary}")),
            "{error}"
        );
    }
}

#[test]
fn tokens_and_rendered_chats_equal_those_of_transformers() {
    let tokenizer = Tokenizer::from_folder(&fixture("tiny-llama")).expect("the fixture has a tokenizer");
    let text = read_to_string(golden_file("tiny-llama-tokenizer.json")).expect("the golden is there");
    let cases: BTreeMap<String, Value> = serde_json::from_str(&text).expect("the golden is JSON");
    let encode =
        |text: &str, special| serde_json::to_value(tokenizer.encode(text, special).expect("it encodes")).unwrap();
    for (name, case) in cases {
        if let Some(text) = case["text"].as_str() {
            assert_eq!(encode(text, true), case["ids"], "{name}");
            assert_eq!(encode(text, false), case["bare_ids"], "{name}");
            continue;
        }
        let messages: Vec<Map<String, Value>> = serde_json::from_value(case["messages"].clone()).expect("messages");
        let template = tokenizer.chat_template().expect("the fixture has a template");
        let question = Chat::from_messages(messages[..messages.len() - 1].to_vec());
        let rendered = template.render(&Chat::from_messages(messages), false).expect("it renders");
        assert_eq!(case["rendered"], rendered, "{name}");
        assert_eq!(encode(&rendered, false), case["ids"], "{name}");
        let prompt = template.render(&question, true).expect("it renders");
        assert_eq!(case["prompt_rendered"], prompt, "{name}");
    }
}
