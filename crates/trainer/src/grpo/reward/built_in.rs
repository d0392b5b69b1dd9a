//! The rewards that need no process: the right answer, a regular expression, a JSON schema, and the length.

use regex::Regex;
use serde_json::Value;

use super::{LengthSection, Request, RewardSection};
use crate::extraction::Extraction;

/// Returns the reward of a completion; `None` if it cannot be judged.
pub(super) type Rule = Box<dyn Fn(&Request<'_>) -> Option<f64> + Send>;

/// Opens the rule of a section; `None` if it has none.
pub(super) fn open(section: &RewardSection) -> Result<Option<Rule>, String> {
    let rule: Rule = if let Some(column) = section.answer.clone() {
        let extraction = Extraction::parse(section.extract.as_deref().unwrap_or("whole"));
        let extraction = extraction.map_err(|problem| format!("extract: {problem}"))?;
        Box::new(move |request| match request.row.get(&column)? {
            Value::Null => None,
            Value::String(text) => Some(f64::from(extraction.matches(request.completion, text))),
            other => Some(f64::from(extraction.matches(request.completion, &other.to_string()))),
        })
    } else if let Some(pattern) = &section.regex {
        // The last line of the message states the problem; those above point at the place.
        let problem = |error: regex::Error| {
            let problem = error.to_string().lines().last().unwrap_or_default().to_owned();
            let advice = "; write what is around the text as it is, since only whether the whole matches counts";
            if problem.contains("look-around") { problem + advice } else { problem }
        };
        let regex = Regex::new(pattern).map_err(|error| format!("regex '{pattern}': {}", problem(error)))?;
        Box::new(move |request| Some(f64::from(regex.is_match(request.completion))))
    } else if let Some(schema) = &section.json_schema {
        let schema = jsonschema::validator_for(&Value::Object(schema.clone()));
        let schema = schema.map_err(|error| format!("json_schema{}: {error}", error.instance_path()))?;
        Box::new(move |request| {
            let value = serde_json::from_str(without_fence(request.completion));
            Some(f64::from(value.is_ok_and(|value| schema.is_valid(&value))))
        })
    } else if let Some(length) = section.length {
        if length.max == 0 || length.soft > length.max {
            return Err(format!("length.max must be at least 1 and length.soft at most max, got {length:?}"));
        }
        Box::new(move |request| Some(penalty(length, request.tokens)))
    } else {
        return Ok(None);
    };
    Ok(Some(rule))
}

fn without_fence(text: &str) -> &str {
    let text = text.trim();
    text.strip_prefix("```json").and_then(|rest| rest.strip_suffix("```")).unwrap_or(text)
}

fn penalty(length: LengthSection, tokens: usize) -> f64 {
    let over = tokens.saturating_sub(length.max - length.soft);
    if over == 0 { 0.0 } else { -f64::min(over as f64 / length.soft as f64, 1.0) }
}
