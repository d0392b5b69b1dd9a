//! One rule about a recipe, and the rules about ranges of numbers.
//!
//! Trade-off: a rule is evaluated even if an earlier one is already broken; there are a few dozen.

/// A rule: whether it holds, the key that breaks it, the problem, and what to write instead.
pub(super) type Rule = (bool, &'static str, String, &'static str);

pub(super) fn at_least(key: &'static str, value: u64, minimum: u64) -> Rule {
    (value >= minimum, key, format!("must be at least {minimum}, got {value}"), "write a larger number")
}

pub(super) fn above_zero(key: &'static str, value: f64) -> Rule {
    let holds = value.is_finite() && value > 0.0;
    (holds, key, format!("must be above 0 and finite, got {value}"), "write a positive number")
}

pub(super) fn zero_or_more(key: &'static str, value: f64) -> Rule {
    let holds = value.is_finite() && value >= 0.0;
    (holds, key, format!("must be 0 or more and finite, got {value}"), "write 0 to turn it off")
}

pub(super) fn below_one(key: &'static str, value: f64) -> Rule {
    let holds = (0.0..1.0).contains(&value);
    (holds, key, format!("must be 0 or more and below 1, got {value}"), "write a number such as 0.9 or 0.03")
}
