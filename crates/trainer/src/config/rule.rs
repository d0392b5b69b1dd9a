//! One rule about a recipe, and the rules about ranges of numbers.
//!
//! Trade-off: a rule is evaluated even if an earlier one is already broken; there are a few dozen.

/// Something that must hold for a recipe, with what to say where it does not.
pub(super) struct Rule {
    /// Whether it holds.
    pub(super) holds: bool,
    /// The key that breaks it.
    pub(super) key: &'static str,
    /// Why that cannot work.
    pub(super) problem: String,
    /// What to write instead.
    pub(super) help: &'static str,
}

/// `holds` is what must be true.
pub(super) fn rule(holds: bool, key: &'static str, problem: impl Into<String>, help: &'static str) -> Rule {
    Rule { holds, key, problem: problem.into(), help }
}

pub(super) fn at_least(key: &'static str, value: u64, minimum: u64) -> Rule {
    rule(value >= minimum, key, format!("must be at least {minimum}, got {value}"), "write a larger number")
}

pub(super) fn at_most(key: &'static str, value: u64, maximum: u64) -> Rule {
    rule(value <= maximum, key, format!("must be at most {maximum}, got {value}"), "write a smaller number")
}

pub(super) fn above_zero(key: &'static str, value: f64) -> Rule {
    let holds = value.is_finite() && value > 0.0;
    rule(holds, key, format!("must be above 0 and finite, got {value}"), "write a positive number")
}

pub(super) fn zero_or_more(key: &'static str, value: f64) -> Rule {
    let holds = value.is_finite() && value >= 0.0;
    rule(holds, key, format!("must be 0 or more and finite, got {value}"), "write 0 to turn it off")
}

pub(super) fn below_one(key: &'static str, value: f64) -> Rule {
    let holds = (0.0..1.0).contains(&value);
    rule(holds, key, format!("must be 0 or more and below 1, got {value}"), "write a number such as 0.9 or 0.03")
}
