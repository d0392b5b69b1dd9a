//! The keys of a record that its format does not read: images, audio and video are refused, others are listed.
//!
//! Trade-off: only the keys of the record itself. Templates read more keys of a message than this crate knows.

use std::ptr;

use serde_json::Value as Json;

use super::row::Object;
use super::value::{RecordFormatError, bad_value};
use crate::place::Place;

/// Columns of images, audio and video (LLaMA-Factory's in the plural, LLaVA's in the singular).
const MEDIA: [&str; 6] = ["images", "audios", "videos", "image", "audio", "video"];

/// The keys with a value, except for those whose values are among `read`. Error: one of them holds images, audio or
/// video.
pub(super) fn unread_keys<'a>(
    fields: &'a Object,
    read: &[&Json],
    place: &Place,
) -> Result<Vec<&'a str>, RecordFormatError> {
    let is_unread = |value: &Json| !is_empty(value) && !read.iter().any(|&known| ptr::eq(known, value));
    let unread: Vec<&str> = fields.iter().filter(|(_, value)| is_unread(value)).map(|(key, _)| key.as_str()).collect();
    // A number or a yes or no is about the media, not the media.
    let is_media = |key: &str| MEDIA.contains(&key) && !matches!(fields[key], Json::Bool(_) | Json::Number(_));
    match unread.iter().find(|key| is_media(key)) {
        Some(key) => {
            let problem = "is not empty, but images, audio and video cannot be trained on";
            let hint = "If the texts make sense without it, name the other keys with columns = [...]; if it is a text, \
                        name it with fields = { ... }; otherwise remove the rows that have it";
            Err(bad_value(place, key, problem, hint))
        }
        None => Ok(unread),
    }
}

/// Whether there is nothing in a value: tables fill rows with null, and with empty texts and lists.
fn is_empty(value: &Json) -> bool {
    match value {
        Json::Null => true,
        Json::Bool(_) | Json::Number(_) => false,
        Json::String(text) => text.trim().is_empty(),
        Json::Array(items) => items.iter().all(is_empty),
        Json::Object(fields) => fields.values().all(is_empty),
    }
}
