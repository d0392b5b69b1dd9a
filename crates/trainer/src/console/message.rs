//! Formats an error as the message that ends the program: each cause once, at most a screen long.
//!
//! Trade-off: a message that is too long loses its middle, because the beginning names the problem and the end the remedy.

use std::error::Error;

const CODE: &str = " (os error ";
const MAX_CHARACTERS: usize = 4000;
/// Characters at the end of a message that is cut.
const END_CHARACTERS: usize = 1000;

/// Joins the error and its causes with colons, leaving out any cause that the message before it contains, and secrets in URLs.
pub fn error_message(error: &dyn Error) -> String {
    let mut message = String::new();
    let mut next: Option<&dyn Error> = Some(error);
    while let Some(cause) = next {
        next = cause.source();
        let text = cause.to_string();
        if message.is_empty() {
            message = text;
        } else if !message.contains(&text) {
            message = format!("{message}: {text}");
        }
    }
    // The system's numbers of errors, which stand after their texts: " (os error 17)".
    while let Some(at) = message.find(CODE) {
        let end = message[at + CODE.len()..].find(')').map_or(message.len(), |end| at + CODE.len() + end + 1);
        message.replace_range(at..end, "");
    }
    let count = message.chars().count();
    if count > MAX_CHARACTERS {
        let start: String = message.chars().take(MAX_CHARACTERS - END_CHARACTERS).collect();
        let end: String = message.chars().skip(count - END_CHARACTERS).collect();
        message = format!("{start} [... {} characters ...] {end}", count - MAX_CHARACTERS);
    }
    firebrick_hub::without_secrets(&message)
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("cannot read x{}", if *.repeats { format!(": {cause}") } else { String::new() })]
    struct Outer {
        repeats: bool,
        #[source]
        cause: io::Error,
    }

    #[test]
    fn a_cause_is_said_once() {
        for repeats in [true, false] {
            let error = Outer { repeats, cause: io::Error::other("disk on fire") };
            assert_eq!(error_message(&error), "cannot read x: disk on fire");
        }
    }

    #[test]
    fn numbers_of_the_system_are_left_out() {
        let error =
            io::Error::other("cannot read a: No such file or directory (os error 2); cannot read b: x (os error 13)");
        assert_eq!(error_message(&error), "cannot read a: No such file or directory; cannot read b: x");
    }

    #[test]
    fn a_long_message_keeps_beginning_and_end() {
        let long = format!("what {} do this", "é".repeat(300_000));
        let message = error_message(&io::Error::other(long));
        assert!(message.starts_with("what ") && message.ends_with(" do this"), "{}", message.len());
        assert!(message.contains("[... 296013 characters ...]") && message.chars().count() < MAX_CHARACTERS + 50);
    }
}
