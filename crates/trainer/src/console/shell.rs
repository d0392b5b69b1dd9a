//! Commands that the user may paste into a shell: how this program is called, and words as a shell reads them back.
//!
//! A program that another one started shows its own name, unless the other one says how it was called.
//! Not supported: shells without POSIX quoting, such as cmd.exe.

/// Set by a program that starts this one: what the user typed instead of this program's name.
const CALLED_AS: &str = "FIREBRICK_CALLED_AS";

/// The words that start this program: `cargo xtask`, or its own path as it was typed.
pub fn program() -> String {
    match std::env::var(CALLED_AS) {
        Ok(words) if !words.is_empty() => words,
        _ => std::env::args_os().next().map_or("firebrick".to_owned(), |path| shell_quoted(&path.to_string_lossy())),
    }
}

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
