//! Formats ranges for users: one unit for both ends, and no more digits than a forecast supports.

use crate::forecast::Range;

/// Formats `1.8 to 96`, or `10,700 to 586,000`: two significant digits, three from a hundred on. Returns a single number if both ends read alike.
pub fn human_range(range: Range) -> String {
    let [lower, upper] = [range.lower, range.upper].map(digits);
    if lower == upper { lower } else { format!("{lower} to {upper}") }
}

/// Formats seconds as `1.8 to 96 ms`, in the unit that suits the larger end, from milliseconds to days.
pub fn human_seconds(seconds: Range) -> String {
    let (per_second, unit) = match seconds.upper {
        upper if upper < 1.0 => (1e3, "ms"),
        upper if upper < 120.0 => (1.0, "s"),
        upper if upper < 2.0 * 3600.0 => (1.0 / 60.0, "min"),
        upper if upper < 48.0 * 3600.0 => (1.0 / 3600.0, "h"),
        _ => (1.0 / 86_400.0, "days"),
    };
    format!("{} {unit}", human_range(seconds.times(per_second)))
}

/// Formats an energy in kWh as `2.1 to 3.3 kWh`, or in Wh if it is less than one.
pub fn human_energy(kwh: Range) -> String {
    if kwh.upper < 1.0 { format!("{} Wh", human_range(kwh.times(1e3))) } else { format!("{} kWh", human_range(kwh)) }
}

fn digits(value: f64) -> String {
    let after_the_first = if value < 100.0 { 1 } else { 2 };
    let rounded: f64 = format!("{value:.after_the_first$e}").parse().unwrap_or(value);
    grouped(&rounded.to_string())
}

/// Groups the digits of a nonnegative number by thousands before its point: `12,345.5`.
pub fn grouped(ungrouped: &str) -> String {
    let whole = ungrouped.find('.').unwrap_or(ungrouped.len());
    let mut text = String::new();
    for (index, digit) in ungrouped.char_indices() {
        if (1..whole).contains(&index) && (whole - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_two_or_three_digits_and_separators() {
        let of = |lower, upper| human_range(Range { lower, upper });
        assert_eq!(of(10_667.0, 585_559.0), "10,700 to 586,000");
        assert_eq!(of(0.0224, 0.0458), "0.022 to 0.046");
        assert_eq!(of(0.0, 9.96), "0 to 10");
        assert_eq!(of(999.9, 1_234_567.0), "1,000 to 1,230,000");
        assert_eq!(of(14.8, 15.2), "15", "both ends read alike");
    }

    #[test]
    fn times_and_energies_take_the_unit_of_their_larger_end() {
        let times = [
            (0.00177, 0.096, "1.8 to 96 ms"),
            (0.0, 0.0, "0 ms"),
            (0.269, 14.8, "0.27 to 15 s"),
            (60.0, 600.0, "1 to 10 min"),
            (3600.0, 90_000.0, "1 to 25 h"),
            (86_400.0, 864_000.0, "1 to 10 days"),
        ];
        for (lower, upper, text) in times {
            assert_eq!(human_seconds(Range { lower, upper }), text);
        }
        assert_eq!(human_energy(Range { lower: 0.021, upper: 0.33 }), "21 to 330 Wh");
        assert_eq!(human_energy(Range { lower: 0.52, upper: 3.3 }), "0.52 to 3.3 kWh");
    }
}
