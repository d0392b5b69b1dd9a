//! Text of others (errors of chat templates, records, names of files and models) on its way to a terminal.
//!
//! Everything the program prints goes through [`escaped`] once, where it is printed, so that no error or finding has to think of it. Trade-off: the
//! colors that this program writes pass, so others can write in them too.

use std::borrow::Cow;

/// The colors of this program: none, dim, red, green, yellow.
const COLORS: [&str; 5] = ["\x1b[0m", "\x1b[2m", "\x1b[31m", "\x1b[32m", "\x1b[33m"];

/// Returns whether a terminal obeys the character, or reorders other text for it, instead of showing it. Marks that only say how they themselves are
/// to be read, as Arabic and Hebrew texts have them, are none.
pub fn is_hidden(character: char) -> bool {
    character.is_control() || matches!(character, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Returns the text for a terminal: control characters and those that reorder text become escapes as in JSON, except for line ends, tabs and the
/// colors of this program.
pub fn escaped(text: &str) -> Cow<'_, str> {
    let passes = |character| matches!(character, '\n' | '\t') || !is_hidden(character);
    if text.chars().all(passes) {
        return Cow::Borrowed(text);
    }
    let (mut shown, mut rest) = (String::with_capacity(text.len() + 16), text);
    while let Some(character) = rest.chars().next() {
        let color = COLORS.into_iter().find(|color| rest.starts_with(color));
        let length = color.map_or(character.len_utf8(), str::len);
        if color.is_some() || passes(character) || rest.starts_with("\r\n") {
            shown.push_str(&rest[..length]);
        } else {
            shown.push_str(&format!("\\u{:04x}", u32::from(character)));
        }
        rest = &rest[length..];
    }
    Cow::Owned(shown)
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;
    use crate::console::error_message;

    #[test]
    fn texts_of_others_have_no_escapes() {
        let hostile = "a\u{1b}[2J\u{1b}]0;t\u{7}\rb\u{8}\u{9b}1m\u{202e}c\u{2066}\0";
        let shown = "a\\u001b[2J\\u001b]0;t\\u0007\\u000db\\u0008\\u009b1m\\u202ec\\u2066\\u0000";
        let (error, path) = (io::Error::other(hostile), std::path::Path::new(hostile));
        let kinds = [
            (error_message(&error), shown.to_owned()),
            (format!("warning: {hostile}\n\tmore"), format!("warning: {shown}\n\tmore")),
            (format!("  \x1b[33m3 records: {hostile}\x1b[0m"), format!("  \x1b[33m3 records: {shown}\x1b[0m")),
            (format!("written to {}", path.display()), format!("written to {shown}")),
            (format!("model {hostile:?} and {hostile}"), format!("model {hostile:?} and {shown}")),
            ("Größe 数字 🙂 e\u{301}\u{200f}\r\n".to_owned(), "Größe 数字 🙂 e\u{301}\u{200f}\r\n".to_owned()),
        ];
        for (text, expected) in kinds {
            assert_eq!(escaped(&text), expected);
        }
        // What is JSON stays the same JSON.
        let json = serde_json::json!({ "name": hostile });
        assert_eq!(serde_json::from_str::<serde_json::Value>(&escaped(&json.to_string())).unwrap(), json);
    }
}
