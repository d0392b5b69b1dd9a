//! Tests of mixtures: no row is lost, none is repeated unless configured, and the order is always the same.

use std::collections::BTreeMap;

use super::super::{ContentKeys, Mix, MixUntil, Mixture};
use super::*;

/// Sources a, b, c, ... with the given numbers of rows and weights.
fn mixture(rows: &[(usize, Option<f64>)], order: Mix, until: MixUntil, seed: u64) -> (Folder, Mixture) {
    let folder = Folder::new();
    let source = |(index, &(count, weight)): (usize, &(usize, Option<f64>))| {
        let letter = char::from(b'a' + index as u8);
        folder.write(&format!("{letter}.jsonl"), text_rows(&letter.to_string(), count));
        SourceSpec { weight, ..folder.spec(&format!("{letter}.jsonl")) }.resolve(&no_hub()).unwrap()
    };
    let sources = rows.iter().enumerate().map(source).collect();
    let mixture = Mixture::new(sources, order, until, seed).unwrap();
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
fn concatenation_reads_each_source_completely_in_order() {
    let (_folder, mixture) = mixture(&[(2, None), (0, None), (1, None)], Mix::Concatenate, MixUntil::First, 0);
    assert_eq!(all(&mixture), ["a0", "a1", "c0"]);
    let sources: Vec<u32> = mixture.records().map(|record| record.unwrap().source).collect();
    assert_eq!(sources, [0, 0, 2]);
}

#[test]
fn mixing_by_size_keeps_shares_and_reads_rows_once() {
    let (_folder, mixture) = mixture(&[(900, None), (300, None)], Mix::Size, MixUntil::First, 0);
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
fn mixing_by_weight_ends_with_the_first_source() {
    let rows = [(3000, Some(3.0)), (3000, Some(1.0))];
    let (_folder, mixture) = mixture(&rows, Mix::Weight, MixUntil::First, 7);
    let counts = counts(&all(&mixture));
    assert_eq!(counts[&'a'], 3000);
    let share = counts[&'b'] as f64 / 1000.0;
    assert!((0.85..1.15).contains(&share), "{share}");
}

#[test]
fn mixing_by_weight_can_repeat_sources_until_all_were_read() {
    let rows = [(10, Some(1.0)), (1000, Some(1.0)), (0, Some(1.0))];
    let (_folder, mixture) = mixture(&rows, Mix::Weight, MixUntil::All, 7);
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
    let (_folder, mixture) = mixture(&rows, Mix::Weight, MixUntil::Never, 7);
    let mut texts = all(&mixture);
    assert_eq!(texts.len(), 210);
    texts.sort();
    texts.dedup();
    assert_eq!(texts.len(), 210);
}

#[test]
fn the_order_depends_only_on_the_seed() {
    let rows = [(50, Some(1.0)), (50, Some(2.0))];
    let of_seed = |seed| {
        let (_folder, mixture) = mixture(&rows, Mix::Weight, MixUntil::Never, seed);
        (all(&mixture), all(&mixture), mixture.content_key(&ContentKeys::default()).unwrap())
    };
    let (one, again, key) = of_seed(1);
    assert_eq!(one, again);
    assert_eq!((one.clone(), again, key), of_seed(1));
    let (other, _, other_key) = of_seed(2);
    assert!(other != one && other_key != key);
    // Resumed runs depend on this order: it must never change.
    assert_eq!(one[..8].join(" "), "b0 a0 b1 a1 a2 b2 b3 a3");
}

#[test]
fn an_error_ends_the_mixture() {
    for order in [Mix::Concatenate, Mix::Size, Mix::Weight] {
        let (folder, mixture) = mixture(&[(5, None), (5, None)], order, MixUntil::All, 0);
        folder.write("b.jsonl", b"\xff\xfe");
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
    let error = Mixture::new(vec![source], Mix::Size, MixUntil::First, 0).unwrap_err().to_string();
    assert!(error.starts_with("weight: "), "{error}");
    assert!(Mixture::new(Vec::new(), Mix::Size, MixUntil::First, 0).is_err());
}
