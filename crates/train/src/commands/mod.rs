//! The commands of `firebrick`: their options, and the functions they call.

pub(crate) mod answers;
#[cfg(test)]
mod command_page;
pub(crate) mod machine;
pub(crate) mod overview;
pub(crate) mod ranks;
pub(crate) mod recipes;
pub(crate) mod rewards;
pub(crate) mod text;
pub(crate) mod timing;
pub(crate) mod training;

use std::io::IsTerminal;

pub(crate) use firebrick_trainer::console::warn;

/// Returns whether output to `stream` may have colors: it is a terminal, and `NO_COLOR` is not set.
pub(crate) fn takes_colors(stream: &impl IsTerminal) -> bool {
    stream.is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}
