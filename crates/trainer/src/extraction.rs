//! `eval.extract`: the part of an answer that is compared with the reference.
//!
//! Trade-off: the last match counts, in answer and reference alike, because models reason first and answer last.

use regex::Regex;

/// A number with an optional sign, separators of thousands and a fraction.
const NUMBER: &str = r"(-?\d[\d,]*(?:\.\d+)?)";
/// A letter from A to J that stands alone.
const CHOICE: &str = r"\b([A-J])\b";

/// The part of an answer that is compared.
#[derive(Clone, Debug)]
pub enum Extraction {
    /// All of it, without white space around it.
    Whole,
    /// The last number, without separators of thousands and a fraction of zeros.
    LastNumber(Regex),
    /// The last match of the group of a regular expression, without white space around it.
    Group(Regex),
}

impl Extraction {
    /// Parses the extraction that a recipe names.
    ///
    /// # Errors
    /// A sentence about what is wrong with the regular expression.
    pub fn parse(written: &str) -> Result<Self, String> {
        // The last line of a message of the regex crate states the problem; the lines above point at the place.
        let problem =
            |message: String| message.lines().last().unwrap_or_default().trim_start_matches("error: ").to_owned();
        let compiled = |pattern: &str| Regex::new(pattern).map_err(|error| problem(error.to_string()));
        match written {
            "whole" => Ok(Self::Whole),
            "last_number" => compiled(NUMBER).map(Self::LastNumber),
            "choice" => compiled(CHOICE).map(Self::Group),
            pattern => {
                let regex = compiled(pattern)?;
                match regex.captures_len() - 1 {
                    1 => Ok(Self::Group(regex)),
                    groups => Err(format!("'{pattern}' has {groups} groups, and one group in parentheses is compared")),
                }
            }
        }
    }

    /// Returns the part of an answer that is compared; `None` if it is not there.
    pub fn part(&self, answer: &str) -> Option<String> {
        let last = |regex: &Regex| {
            let found = regex.captures_iter(answer).last()?.get(1)?;
            Some(found.as_str().trim().to_owned())
        };
        match self {
            Self::Whole => Some(answer.trim().to_owned()),
            Self::LastNumber(regex) => last(regex).map(|number| plain_number(&number)),
            Self::Group(regex) => last(regex),
        }
    }

    /// Returns whether an answer matches the reference. An answer without the part is wrong.
    pub fn matches(&self, answer: &str, reference: &str) -> bool {
        let part = self.part(answer);
        part.is_some() && part == self.part(reference)
    }
}

/// Writes "1,234.50" as "1234.5".
fn plain_number(number: &str) -> String {
    let digits = number.replace(',', "");
    match digits.contains('.') {
        true => digits.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => digits,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_match_of_answer_and_reference_is_compared() {
        let cases = [
            ("whole", " evots\n", "evots", true),
            ("whole", "It is evots.", "evots", false),
            ("last_number", "2 + 2 = 4, so 1,234.50", "The answer: 1234.5", true),
            ("last_number", "12.", "12", true),
            ("last_number", "-3", "3", false),
            ("last_number", "none", "3", false),
            ("last_number", "none", "none either", false),
            ("choice", "A or B? The answer is C.", "(C)", true),
            ("choice", "Cats", "C", false),
            ("#### (.+)", "so 6\n#### 7 ", "#### 7", true),
        ];
        for (written, answer, reference, expected) in cases {
            let extraction = Extraction::parse(written).unwrap();
            assert_eq!(extraction.matches(answer, reference), expected, "{written}: {answer:?} and {reference:?}");
        }
    }

    #[test]
    fn a_pattern_needs_exactly_one_group() {
        assert!(Extraction::parse("last number").unwrap_err().contains("has 0 groups"));
        assert!(Extraction::parse("(a)(b)").unwrap_err().contains("has 2 groups"));
        let message = Extraction::parse("(a").unwrap_err();
        assert!(message.contains("unclosed group") && !message.contains('\n'), "{message}");
    }
}
