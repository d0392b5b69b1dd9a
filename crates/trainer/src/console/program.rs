//! How this program is called, for commands that the user may paste.
//!
//! Trade-off: a program that was started through another one shows its own name unless the other one says how it was called.

use crate::console::shell::shell_quoted;

/// Set by a program that starts this one: what the user typed instead of this program's name.
const CALLED_AS: &str = "FIREBRICK_CALLED_AS";

/// The words that start this program: `cargo xtask`, or its own path as it was typed.
#[must_use]
pub fn program() -> String {
    match std::env::var(CALLED_AS) {
        Ok(words) if !words.is_empty() => words,
        _ => std::env::args_os().next().map_or("train".to_owned(), |path| shell_quoted(&path.to_string_lossy())),
    }
}
