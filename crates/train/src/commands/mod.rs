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

use std::fmt;
use std::io::IsTerminal;

use tracing::{Event, Level, Subscriber};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

pub(crate) use firebrick_trainer::console::warn;

/// Returns whether output to `stream` may have colors: it is a terminal, and `NO_COLOR` is not set.
pub(crate) fn takes_colors(stream: &impl IsTerminal) -> bool {
    stream.is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

/// Shows on standard error what libraries report: like the program's own messages, or with time and place where `RUST_LOG` asks for it.
pub(crate) fn show_reports() {
    let asked = EnvFilter::try_from_default_env();
    let is_asked = asked.is_ok();
    let reports = tracing_subscriber::fmt()
        .with_env_filter(asked.unwrap_or_else(|_| "warn".into()))
        .with_writer(std::io::stderr)
        .with_ansi(takes_colors(&std::io::stderr()));
    if is_asked { reports.init() } else { reports.event_format(AsMessage).init() }
}

/// Writes a report as `warning: text`.
struct AsMessage;

impl<S, N> FormatEvent<S, N> for AsMessage
where
    S: Subscriber + for<'span> LookupSpan<'span>,
    N: for<'writer> FormatFields<'writer> + 'static,
{
    fn format_event(&self, context: &FmtContext<'_, S, N>, mut writer: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        let what = if *event.metadata().level() == Level::ERROR { "error" } else { "warning" };
        write!(writer, "{what}: ")?;
        context.field_format().format_fields(writer.by_ref(), event)?;
        writeln!(writer)
    }
}
