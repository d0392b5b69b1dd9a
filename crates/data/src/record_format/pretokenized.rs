//! Token ids that were computed elsewhere, with labels or a mask.
//!
//! Labels are aligned with the ids (the model shifts them by one), and are either the id itself or -100. Padding that
//! an attention mask marks is removed at both ends. Not supported: holes in the attention mask, and labels that differ
//! from the ids.

use serde_json::Value as Json;

use super::fields::Fields;
use super::row::Row;
use super::value::{Parsed, Reader, RecordFormatError, bad_value, list, wrong_type};
use crate::source::RecordPlace;

const NO_LOSS: i64 = -100;
/// Keys of a mask of ones and zeros that marks the loss tokens.
const MASK_KEYS: [&str; 4] = ["loss_mask", "completion_mask", "assistant_masks", "assistant_mask"];

/// Parses token ids and their loss mask: all ones if there are neither labels nor a mask.
pub(crate) fn parse(record: Reader<'_>, names: &Fields) -> Parsed<Row> {
    let key = &names.input_ids;
    let place = record.place;
    let ids = integers(record.need(key)?, key, place)?;
    let token = |(index, &id): (usize, &i64)| {
        u32::try_from(id)
            .map_err(|_| bad(place, &format!("{key}[{index}]"), format!("is {id}, which is not a token id")))
    };
    let mut tokens = ids.iter().enumerate().map(token).collect::<Result<Vec<u32>, _>>()?;
    let mut loss_mask = loss_mask(record, names, &ids)?;
    if let Some(mask) = record.get("attention_mask") {
        let mask = bits(mask, "attention_mask", ids.len(), place)?;
        let start = mask.iter().position(|&real| real).unwrap_or(mask.len());
        let end = mask.iter().rposition(|&real| real).map_or(start, |last| last + 1);
        if let Some(hole) = mask[start..end].iter().position(|&real| !real) {
            let key = format!("attention_mask[{}]", start + hole);
            return Err(bad(place, &key, "is 0 between ones".to_owned()));
        }
        tokens = tokens[start..end].to_vec();
        loss_mask = loss_mask[start..end].to_vec();
    }
    Ok(Row::Pretokenized { tokens, loss_mask })
}

fn loss_mask(record: Reader<'_>, names: &Fields, ids: &[i64]) -> Parsed<Vec<bool>> {
    let place = record.place;
    if let Some(labels) = record.get(&names.labels) {
        let labels = integers(labels, &names.labels, place)?;
        same_length(&names.labels, labels.len(), ids.len(), place)?;
        let differs = |&index: &usize| labels[index] != NO_LOSS && labels[index] != ids[index];
        if let Some(index) = (0..ids.len()).find(differs) {
            let problem = format!("is {}, but the token there is {}", labels[index], ids[index]);
            return Err(bad(place, &format!("{}[{index}]", names.labels), problem));
        }
        return Ok(labels.iter().map(|&label| label != NO_LOSS).collect());
    }
    match MASK_KEYS.iter().find_map(|key| Some((key, record.get(key)?))) {
        Some((key, mask)) => bits(mask, key, ids.len(), place),
        None => Ok(vec![true; ids.len()]),
    }
}

fn integers(value: &Json, key: &str, place: &RecordPlace) -> Parsed<Vec<i64>> {
    let integer = |(index, item): (usize, &Json)| {
        item.as_i64().ok_or_else(|| wrong_type(place, &format!("{key}[{index}]"), "a whole number", item))
    };
    list(value, key, "a list of whole numbers", place)?.iter().enumerate().map(integer).collect()
}

fn bits(value: &Json, key: &str, length: usize, place: &RecordPlace) -> Parsed<Vec<bool>> {
    let bit = |(index, item): (usize, &Json)| match (item.as_i64(), item.as_bool()) {
        (Some(0), _) | (_, Some(false)) => Ok(false),
        (Some(1), _) | (_, Some(true)) => Ok(true),
        _ => Err(wrong_type(place, &format!("{key}[{index}]"), "0 or 1", item)),
    };
    let items = list(value, key, "a list of ones and zeros", place)?;
    same_length(key, items.len(), length, place)?;
    items.iter().enumerate().map(bit).collect()
}

fn same_length(key: &str, found: usize, expected: usize, place: &RecordPlace) -> Parsed<()> {
    if found == expected {
        return Ok(());
    }
    Err(bad(place, key, format!("has {found} entries, but there are {expected} tokens")))
}

fn bad(place: &RecordPlace, key: &str, problem: String) -> RecordFormatError {
    let hint = "Ids, labels (the id, or -100) and masks are lists of the same length, aligned with each other";
    bad_value(place, key, &problem, hint)
}
