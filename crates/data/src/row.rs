//! One line of a data file: what must be in it, and every way in which it can be wrong.
//!
//! Gives up guessing: a row of another shape is an error that names the keys found.

use serde_json::{Map, Value as Json};

use crate::chat_template::Message;
use crate::error::{DataError, Place};
use crate::read::{DatasetFormat, ReadOptions};

/// What a line says.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Row {
    /// A text to be learned whole.
    Text(String),
    /// A conversation.
    Chat(Vec<Message>),
}

/// Parses a line into a JSON object.
pub(crate) fn parse_object(bytes: &[u8], place: &Place) -> Result<Map<String, Json>, DataError> {
    let text = str::from_utf8(bytes)
        .map_err(|reason| DataError::NotUtf8 { place: place.clone(), column: reason.valid_up_to() + 1 })?;
    if let Some(byte) = text.find('\0') {
        return Err(DataError::NulCharacter { place: place.clone(), within: format!("at byte {}", byte + 1) });
    }
    match serde_json::from_str(text) {
        Ok(Json::Object(row)) => Ok(row),
        Ok(other) => Err(wrong_type(place, "a row".to_owned(), "a JSON object like {\"text\": \"...\"}", &other)),
        Err(reason) => {
            let whole = reason.to_string();
            let said = whole.split(" at line ").next().unwrap_or(&whole).to_owned();
            Err(DataError::BadJson { place: place.clone(), column: reason.column(), reason: said })
        }
    }
}

/// The format that the first row's keys show.
pub(crate) fn detect_format(
    row: &Map<String, Json>,
    options: &ReadOptions,
    place: &Place,
) -> Result<DatasetFormat, DataError> {
    if options.format != DatasetFormat::Auto {
        return Ok(options.format);
    }
    if row.contains_key(&options.messages_field) {
        return Ok(DatasetFormat::Chat);
    }
    if row.contains_key(&options.text_field) {
        return Ok(DatasetFormat::Text);
    }
    Err(DataError::MissingKey {
        place: place.clone(),
        expected: format!("{:?} (a conversation) or {:?} (a text)", options.messages_field, options.text_field),
        found: names(row),
        hint: "Rename the key in the file, or name it with messages_field or text_field".to_owned(),
    })
}

/// Takes the text or the messages out of a row of the given format; also gives the keys of messages that are not used.
pub(crate) fn parse_row(
    row: &Map<String, Json>,
    format: DatasetFormat,
    options: &ReadOptions,
    place: &Place,
) -> Result<(Row, Vec<String>), DataError> {
    if format == DatasetFormat::Text {
        let text = row.get(&options.text_field).ok_or_else(|| missing_field(row, &options.text_field, place))?;
        return Ok((Row::Text(string(text, &options.text_field, place)?), Vec::new()));
    }
    let key = &options.messages_field;
    let messages = row.get(key).ok_or_else(|| missing_field(row, key, place))?;
    let Json::Array(messages) = messages else {
        return Err(wrong_type(place, key.clone(), "a list of messages", messages));
    };
    let mut ignored = Vec::new();
    let parse =
        |(index, message): (usize, &Json)| parse_message(message, &format!("{key}[{index}]"), &mut ignored, place);
    let messages = messages.iter().enumerate().map(parse).collect::<Result<_, _>>()?;
    Ok((Row::Chat(messages), ignored))
}

fn parse_message(message: &Json, key: &str, ignored: &mut Vec<String>, place: &Place) -> Result<Message, DataError> {
    let Json::Object(fields) = message else {
        return Err(wrong_type(place, key.to_owned(), "an object with \"role\" and \"content\"", message));
    };
    let field = |name: &str| {
        let value = fields.get(name).ok_or_else(|| DataError::MissingKey {
            place: place.clone(),
            expected: format!("{name:?} in {key}"),
            found: names(fields),
            hint: "Each message needs \"role\" and \"content\"".to_owned(),
        })?;
        string(value, &format!("{key}.{name}"), place)
    };
    let parsed = Message { role: field("role")?, content: field("content")? };
    let unused = fields.iter().filter(|(name, value)| !matches!(name.as_str(), "role" | "content") && !value.is_null());
    ignored.extend(unused.map(|(name, _)| name.clone()));
    Ok(parsed)
}

fn missing_field(row: &Map<String, Json>, key: &str, place: &Place) -> DataError {
    DataError::MissingKey {
        place: place.clone(),
        expected: format!("{key:?}"),
        found: names(row),
        hint: "All rows of a file have the same format".to_owned(),
    }
}

/// The keys of an object, for messages.
fn names(row: &Map<String, Json>) -> String {
    if row.is_empty() {
        return "no key".to_owned();
    }
    row.keys().map(|key| format!("{key:?}")).collect::<Vec<_>>().join(", ")
}

fn string(value: &Json, key: &str, place: &Place) -> Result<String, DataError> {
    let Json::String(text) = value else {
        return Err(wrong_type(place, key.to_owned(), "a string", value));
    };
    if text.contains('\0') {
        return Err(DataError::NulCharacter { place: place.clone(), within: format!("in {key}") });
    }
    Ok(text.clone())
}

fn wrong_type(place: &Place, key: String, expected: &'static str, found: &Json) -> DataError {
    let found = match found {
        Json::Null => "null".to_owned(),
        Json::Bool(value) => format!("the boolean {value}"),
        Json::Number(value) => format!("the number {value}"),
        Json::String(_) => "a string".to_owned(),
        Json::Array(items) => format!("a list of {}", items.len()),
        Json::Object(fields) => format!("an object with {}", names(fields)),
    };
    DataError::WrongType { place: place.clone(), key, expected, found }
}
