//! Words of commands that the user may paste into a shell.
//!
//! Not supported: shells without POSIX quoting, such as cmd.exe.

/// A word as a POSIX shell reads it back.
pub fn shell_quoted(word: &str) -> String {
    let is_plain = |character: char| character.is_ascii_alphanumeric() || "-_./=:,+@%".contains(character);
    if !word.is_empty() && word.chars().all(is_plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', "'\\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_with_spaces_quotes_and_brackets_are_quoted_for_the_shell() {
        assert_eq!(shell_quoted("train.steps=3"), "train.steps=3");
        assert_eq!(shell_quoted("eval.prompts=[\"it's\"]"), "'eval.prompts=[\"it'\\''s\"]'");
        assert_eq!((shell_quoted("a b"), shell_quoted("")), ("'a b'".to_owned(), "''".to_owned()));
    }
}
