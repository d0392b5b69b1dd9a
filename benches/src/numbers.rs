//! Formats numbers for readers: three digits and a unit.
//!
//! Trade-off: the exact ones are in `matrix.json`.

/// Formats three digits with the prefix of a unit: `1.23 G`.
pub(crate) fn si(value: f64) -> String {
    let prefixes = [(1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, "")];
    let (factor, prefix) = prefixes.into_iter().find(|(factor, _)| value >= *factor).unwrap_or((1.0, ""));
    format!("{} {prefix}", three_digits(value / factor))
}

/// Formats seconds in a suitable unit.
pub(crate) fn seconds_text(seconds: f64) -> String {
    let (factor, unit) = match seconds {
        seconds if seconds >= 1.0 => (1.0, "s"),
        seconds if seconds >= 1e-3 => (1e3, "ms"),
        _ => (1e6, "µs"),
    };
    format!("{} {unit}", three_digits(seconds * factor))
}

fn three_digits(value: f64) -> String {
    let decimals = match value {
        value if value >= 99.95 => 0,
        value if value >= 9.995 => 1,
        _ => 2,
    };
    format!("{value:.decimals$}")
}

/// Formats a number of an axis without zeros after the point: `10 ms` and not `10.0 ms`.
pub(crate) fn round(text: &str) -> String {
    let (number, unit) = text.split_once(' ').unwrap_or((text, ""));
    let number = if number.contains('.') { number.trim_end_matches('0').trim_end_matches('.') } else { number };
    format!("{number} {unit}").trim_end().to_owned()
}

pub(crate) fn percent(share: f64) -> String {
    let percent = 100.0 * share;
    if percent >= 9.5 { format!("{percent:.0} %") } else { format!("{percent:.1} %") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_three_digits_and_a_unit() {
        assert_eq!([si(0.0), si(1234.0), si(12.3e12), si(999.0)], ["0.00 ", "1.23 k", "12.3 T", "999 "]);
        assert_eq!([seconds_text(1.5), seconds_text(0.0123), seconds_text(4e-5)], ["1.50 s", "12.3 ms", "40.0 µs"]);
        assert_eq!([percent(0.5), percent(0.0123)], ["50 %", "1.2 %"]);
        assert_eq!([1e10, 200.0, 1.0, 0.1].map(|value| round(&si(value))), ["10 G", "200", "1", "0.1"]);
        assert_eq!([1e-2, 1e-7].map(|value| round(&seconds_text(value))), ["10 ms", "0.1 µs"]);
    }
}
