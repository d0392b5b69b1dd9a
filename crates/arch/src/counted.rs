//! Counts in sentences: "1 row", "2 rows", "12,345 entries". It is here because every crate that writes messages may use it.

/// Writes a count with its noun, which is in the singular.
pub fn counted(count: impl TryInto<u64>, noun: &str) -> String {
    let count = count.try_into().unwrap_or(u64::MAX);
    format!("{} {}", grouped(count), plural(count == 1, noun))
}

/// Returns a noun, which is in the singular, as it follows one or several.
pub fn plural(is_one: bool, noun: &str) -> String {
    let before_y = noun.strip_suffix('y').filter(|rest| !rest.ends_with(['a', 'e', 'o', 'u']));
    match before_y {
        _ if is_one => noun.to_owned(),
        Some(rest) => format!("{rest}ies"),
        None if ["s", "x", "ch", "sh"].iter().any(|end| noun.ends_with(end) && noun != "epoch") => format!("{noun}es"),
        None => format!("{noun}s"),
    }
}

/// Writes "12,345".
pub fn grouped(number: u64) -> String {
    match number {
        0..1_000 => number.to_string(),
        _ => format!("{},{:03}", grouped(number / 1_000), number % 1_000),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_count_and_its_noun_agree() {
        let said = [
            (1, "row"),
            (2, "row"),
            (0, "record"),
            (12_345, "entry"),
            (2, "day"),
            (3, "pass"),
            (2, "match"),
            (2, "epoch"),
        ]
        .map(|(count, noun): (usize, &str)| counted(count, noun));
        assert_eq!(
            said,
            ["1 row", "2 rows", "0 records", "12,345 entries", "2 days", "3 passes", "2 matches", "2 epochs"]
        );
        assert_eq!(counted(u64::MAX, "byte"), "18,446,744,073,709,551,615 bytes");
    }
}
