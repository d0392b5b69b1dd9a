//! The commands of `firebrick`: their options, and what each calls.
//!
//! Trade-off: options that two commands share are flattened from one type, so neither can word them for itself.

pub(crate) mod machine;
pub(crate) mod ranks;
pub(crate) mod text;
pub(crate) mod timing;
pub(crate) mod training;

use std::io::{IsTerminal, Write};

/// Whether what is written there may have colors: it is a terminal, and `NO_COLOR` is not set.
pub(crate) fn takes_colors(stream: &impl IsTerminal) -> bool {
    stream.is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

/// A line on standard error, which may be closed: then there is nothing to do about it.
pub(crate) fn warn(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}
