//! One line of a data file as a JSON object, and every way in which it can be none.
//!
//! Gives up guessing: a line of another form is an error.

use serde_json::{Map, Value as Json};

use crate::error::{DataError, Place};
use crate::shape::value::wrong_type;

/// Parses a line into a JSON object.
pub(crate) fn parse_object(bytes: &[u8], place: &Place) -> Result<Map<String, Json>, DataError> {
    let text = str::from_utf8(bytes)
        .map_err(|reason| DataError::NotUtf8 { place: place.clone(), column: reason.valid_up_to() + 1 })?;
    if let Some(byte) = text.find('\0') {
        return Err(DataError::NulCharacter { place: place.clone(), within: format!("at byte {}", byte + 1) });
    }
    match serde_json::from_str(text) {
        Ok(Json::Object(row)) => Ok(row),
        Ok(other) => Err(wrong_type(place, "a row", "a JSON object like {\"text\": \"...\"}", &other).into()),
        Err(reason) => {
            let whole = reason.to_string();
            let said = whole.split(" at line ").next().unwrap_or(&whole).to_owned();
            Err(DataError::BadJson { place: place.clone(), column: reason.column(), reason: said })
        }
    }
}
