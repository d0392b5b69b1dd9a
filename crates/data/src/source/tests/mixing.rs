//! Several sources as one: nothing lost, nothing twice unless asked, the same order each time.

use std::collections::BTreeMap;

use super::super::{ContentKeys, Exhausted, MixOrder, Mixture};
use super::*;

/// Sources a, b, c, ... with so many rows each, and weights.
fn mixture(rows: &[(usize, Option<f64>)], order: MixOrder, exhausted: Exhausted, seed: u64) -> (Folder, Mixture) {
    let folder = Folder::new();
    let source = |(index, &(count, weight)): (usize, &(usize, Option<f64>))| {
        let letter = char::from(b'a' + index as u8);
        folder.write(&format!("{letter}.jsonl"), text_rows(&letter.to_string(), count));
        SourceSpec { weight, ..folder.spec(&format!("{letter}.jsonl")) }.resolve(&no_hub()).unwrap()
    };
    let sources = rows.iter().enumerate().map(source).collect();
    let mixture = Mixture::new(sources, order, exhausted, seed).unwrap();
    (folder, mixture)
}

fn all(mixture: &Mixture) -> Vec<String> {
    mixture.records().map(|record| record.unwrap().fields["text"].as_str().unwrap().to_owned()).collect()
}

fn counts(texts: &[String]) -> BTreeMap<char, usize> {
    let mut counts = BTreeMap::new();
    texts.iter().for_each(|text| *counts.entry(text.chars().next().unwrap()).or_default() += 1);
    counts
}

#[test]
fn concatenation_reads_each_source_whole_in_order() {
    let (_folder, mixture) = mixture(&[(2, None), (0, None), (1, None)], MixOrder::Concatenate, Exhausted::First, 0);
    assert_eq!(all(&mixture), ["a0", "a1", "c0"]);
    let sources: Vec<u32> = mixture.records().map(|record| record.unwrap().source).collect();
    assert_eq!(sources, [0, 0, 2]);
}

#[test]
fn mixing_by_size_keeps_shares_even_all_the_way_and_reads_every_row_once() {
    let (_folder, mixture) = mixture(&[(900, None), (300, None)], MixOrder::Size, Exhausted::First, 0);
    let texts = all(&mixture);
    assert_eq!(counts(&texts), BTreeMap::from([('a', 900), ('b', 300)]));
    for begin in (0..1200).step_by(100) {
        let of_b = counts(&texts[begin..begin + 100])[&'b'];
        assert!((22..=28).contains(&of_b), "{of_b} of b from {begin} on");
    }
    let order = |prefix| {
        texts.iter().filter(move |text| text.starts_with(prefix)).map(|text| text[1..].parse::<u32>().unwrap())
    };
    assert!(order('a').is_sorted() && order('b').is_sorted());
}

#[test]
fn mixing_by_weight_gives_each_source_its_share_and_ends_with_the_first_that_is_exhausted() {
    let rows = [(3000, Some(3.0)), (3000, Some(1.0))];
    let (_folder, mixture) = mixture(&rows, MixOrder::Weight, Exhausted::First, 7);
    let counts = counts(&all(&mixture));
    assert_eq!(counts[&'a'], 3000);
    let share = counts[&'b'] as f64 / 1000.0;
    assert!((0.85..1.15).contains(&share), "{share}");
}

#[test]
fn mixing_by_weight_can_repeat_sources_until_all_were_read() {
    let rows = [(10, Some(1.0)), (1000, Some(1.0)), (0, Some(1.0))];
    let (_folder, mixture) = mixture(&rows, MixOrder::Weight, Exhausted::All, 7);
    let texts = all(&mixture);
    let counts = counts(&texts);
    assert_eq!(counts[&'b'], 1000);
    assert!((800..1200).contains(&counts[&'a']), "{counts:?}");
    let of_a: Vec<&String> = texts.iter().filter(|text| text.starts_with('a')).collect();
    assert!(of_a.iter().enumerate().all(|(index, text)| **text == format!("a{}", index % 10)));
}

#[test]
fn mixing_by_weight_can_read_every_row_once() {
    let rows = [(10, Some(9.0)), (200, Some(1.0))];
    let (_folder, mixture) = mixture(&rows, MixOrder::Weight, Exhausted::Never, 7);
    let mut texts = all(&mixture);
    assert_eq!(texts.len(), 210);
    texts.sort();
    texts.dedup();
    assert_eq!(texts.len(), 210);
}

#[test]
fn the_order_depends_on_the_seed_alone() {
    let rows = [(50, Some(1.0)), (50, Some(2.0))];
    let of_seed = |seed| {
        let (_folder, mixture) = mixture(&rows, MixOrder::Weight, Exhausted::Never, seed);
        (all(&mixture), all(&mixture), mixture.content_key(&ContentKeys::forgetful()).unwrap())
    };
    let (one, again, key) = of_seed(1);
    assert_eq!(one, again);
    assert_eq!((one.clone(), again, key), of_seed(1));
    let (other, _, other_key) = of_seed(2);
    assert!(other != one && other_key != key);
    // This order is part of what runs can be resumed by: it must never change.
    assert_eq!(one[..8].join(" "), FIRST_OF_SEED_1);
}

const FIRST_OF_SEED_1: &str = "b0 a0 b1 a1 a2 b2 b3 a3";

#[test]
fn an_error_ends_the_mixture() {
    for order in [MixOrder::Concatenate, MixOrder::Size, MixOrder::Weight] {
        let (folder, mixture) = mixture(&[(5, None), (5, None)], order, Exhausted::All, 0);
        folder.write("b.jsonl", b"\xff\xff");
        let results: Vec<_> = mixture.records().take(100).collect();
        assert_eq!(results.iter().filter(|result| result.is_err()).count(), 1, "{order:?}");
        assert!(results.last().unwrap().is_err(), "{order:?}");
    }
}

#[test]
fn weights_without_effect_are_refused() {
    let folder = Folder::new();
    folder.write("a.jsonl", text_rows("a", 1));
    let source = SourceSpec { weight: Some(2.0), ..folder.spec("a.jsonl") }.resolve(&no_hub()).unwrap();
    let error = Mixture::new(vec![source], MixOrder::Size, Exhausted::First, 0).unwrap_err().to_string();
    assert!(error.starts_with("weight: "), "{error}");
    assert!(Mixture::new(Vec::new(), MixOrder::Size, Exhausted::First, 0).is_err());
}
