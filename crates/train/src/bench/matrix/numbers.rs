//! Numbers as readers like them: three digits and a unit.
//!
//! Trade-off: the exact ones are in `matrix.json`.

/// Three digits with the prefix of a unit: `1.23 G`.
pub(super) fn si(value: f64) -> String {
    let prefixes = [(1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, "")];
    let (factor, prefix) = prefixes.into_iter().find(|(factor, _)| value >= *factor).unwrap_or((1.0, ""));
    format!("{} {prefix}", three_digits(value / factor))
}

fn three_digits(value: f64) -> String {
    let decimals = if value >= 99.95 {
        0
    } else if value >= 9.995 {
        1
    } else {
        2
    };
    format!("{value:.decimals$}")
}

/// A round number of an axis, without zeros after the point: `100 G`.
pub(super) fn round_si(value: f64) -> String {
    let (number, prefix) =
        si(value).split_once(' ').map(|(number, prefix)| (number.to_owned(), prefix.to_owned())).unwrap_or_default();
    format!("{} {prefix}", without_zeros(&number))
}

/// A round time of an axis: `10 ms`.
pub(super) fn round_seconds(seconds: f64) -> String {
    let text = seconds_text(seconds);
    let (number, unit) = text.split_once(' ').unwrap_or((&text, ""));
    format!("{} {unit}", without_zeros(number))
}

fn without_zeros(number: &str) -> &str {
    if number.contains('.') { number.trim_end_matches('0').trim_end_matches('.') } else { number }
}

/// Seconds in a unit that suits them.
pub(super) fn seconds_text(seconds: f64) -> String {
    let (factor, unit) = if seconds >= 1.0 {
        (1.0, "s")
    } else if seconds >= 1e-3 {
        (1e3, "ms")
    } else {
        (1e6, "µs")
    };
    format!("{} {unit}", three_digits(seconds * factor))
}

pub(super) fn percent(share: f64) -> String {
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
        assert_eq!([round_si(1e10), round_si(200.0), round_si(1.0), round_si(0.1)], ["10 G", "200 ", "1 ", "0.1 "]);
        assert_eq!([round_seconds(1e-2), round_seconds(1e-7)], ["10 ms", "0.1 µs"]);
    }
}
