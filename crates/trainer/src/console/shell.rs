//! Commands for the user to paste into a shell: the name of this program, and words quoted for a shell.
//!
//! A program started by another one shows its own name, unless the other one passes the name that it was called by.
//! Not supported: shells without POSIX quoting, such as cmd.exe.

/// Environment variable set by a program that starts this one: what the user typed instead of this program's name.
const CALLED_AS: &str = "FIREBRICK_CALLED_AS";

/// Returns the words that start this program: `cargo xtask`, or its own path as it was typed.
pub fn program() -> String {
    match std::env::var(CALLED_AS) {
        Ok(words) if !words.is_empty() => words,
        _ => std::env::args_os().next().map_or("firebrick".to_owned(), |path| shell_quoted(&path.to_string_lossy())),
    }
}

/// Quotes a word so that a POSIX shell reads it back.
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
    fn words_are_quoted_for_the_shell() {
        assert_eq!(shell_quoted("train.steps=3"), "train.steps=3");
        assert_eq!(shell_quoted("eval.prompts=[\"it's\"]"), "'eval.prompts=[\"it'\\''s\"]'");
        assert_eq!((shell_quoted("a b"), shell_quoted("")), ("'a b'".to_owned(), "''".to_owned()));
    }
}
