//! Finds, in an expression of a template, the values that it makes out of others, and sends them through a filter.
//!
//! `a ~ b`, `a + b` and `a * b`, and where a value is bound to a name or put into another one also lists, dictionaries and
//! slices: `f(x ~ y == z)` becomes `f((x ~ y)|firebrick_made == z)`. No grammar is needed: what binds less than arithmetic
//! (comparisons, `and`, `if`, commas, brackets) ends a run of tokens, and a run in brackets with a filter behind it is what
//! the run was. Gives up runs of very many operators or brackets, which the engine would need a deep stack for.

/// The filter that values go through.
const MADE: &str = ")|firebrick_made";
/// The filter of slices: they hold what was there before, so nobody need look into them.
const SLICED: &str = ")|firebrick_bounded";
/// The filter that the texts of a product go through, so that the engine does not multiply them while it compiles.
const KEPT: &str = ")|firebrick_bounded)";
/// The most operators of a run: each may hold as much as the longest text.
const MAX_OPERATORS: usize = 256;
/// How many operators, attributes, filters and brackets may follow or hold each other: the engine goes into each.
const MAX_DEPTH: usize = 500;
/// The depth of brackets; the engine's parser refuses 150.
const MAX_BRACKETS: usize = 150;

/// A tag that the engine is not given.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct TooLong;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Name,
    Number,
    Text,
    Open,
    Close,
    Operator,
}

/// A token of an expression: its bytes.
#[derive(Debug, Clone, Copy)]
struct Token {
    kind: Kind,
    start: usize,
    end: usize,
}

/// What is done with the value of an expression.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Use {
    /// It is written, and pays for that.
    Written,
    /// It is bound to a name, or put into another value.
    Bound,
    /// It is only looked at.
    Tested,
}

/// The tokens of an expression or a statement.
#[derive(Debug)]
pub(super) struct Expression<'a> {
    text: &'a str,
    tokens: Vec<Token>,
    /// For an opening bracket, where it closes.
    closes: Vec<usize>,
    /// What is put into the text, and before which byte.
    insertions: Vec<(usize, &'static str)>,
}

impl<'a> Expression<'a> {
    /// Cuts a text into tokens, as Jinja does.
    pub(super) fn new(text: &'a str) -> Result<Self, TooLong> {
        let tokens = tokens(text);
        let closes = closes(&tokens)?;
        Ok(Self { text, tokens, closes, insertions: Vec::new() })
    }

    pub(super) fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Where a token begins; the end of the text for the one behind the last.
    pub(super) fn start(&self, index: usize) -> usize {
        self.tokens.get(index).map_or(self.text.len(), |token| token.start)
    }

    fn end(&self, index: usize) -> usize {
        self.tokens[index].end
    }

    fn said(&self, index: usize) -> &'a str {
        let token = self.tokens[index];
        &self.text[token.start..token.end]
    }

    /// The first token outside of brackets, from one on, that is this name or operator.
    pub(super) fn find(&self, from: usize, said: &str) -> Option<usize> {
        let mut index = from;
        while index < self.len() {
            if self.said(index) == said && matches!(self.tokens[index].kind, Kind::Name | Kind::Operator) {
                return Some(index);
            }
            index = self.after(index);
        }
        None
    }

    /// Puts the value of some tokens, which are a whole expression, through a filter: around what was put there before.
    pub(super) fn wrap(&mut self, from: usize, to: usize, filter: &'static str) {
        if from < to {
            self.insertions.push((self.start(from), "("));
            self.insertions.push((self.end(to - 1), filter));
        }
    }

    /// The text with what was put into it.
    pub(super) fn rewritten(mut self) -> String {
        // At one byte, what ends a run comes before what begins the next; of two that end, the inner was put first.
        self.insertions.sort_by_key(|&(at, what)| (at, what.starts_with('(')));
        let mut text = String::with_capacity(self.text.len() + 16 * self.insertions.len());
        let mut done = 0;
        for (at, what) in self.insertions {
            text.push_str(&self.text[done..at]);
            text.push_str(what);
            done = at;
        }
        text + &self.text[done..]
    }

    /// The token behind one, or behind the bracket that it opens.
    fn after(&self, index: usize) -> usize {
        if self.tokens[index].kind == Kind::Open { self.closes[index] + 1 } else { index + 1 }
    }

    /// Goes through a whole expression, from a token to another. Whether one filter now holds all of it.
    pub(super) fn bound(&mut self, from: usize, to: usize, used: Use) -> Result<bool, TooLong> {
        self.level(from, to, used).map(|(is_whole, _)| is_whole)
    }

    /// Goes through the tokens of one level of brackets. Whether one filter now holds all of them, and how deep the
    /// engine will go into them.
    fn level(&mut self, from: usize, to: usize, used: Use) -> Result<(bool, usize), TooLong> {
        let mut is_whole = false;
        let mut run = Run::new(from);
        let mut index = from;
        // Of what stands between two commas: its links, and the deepest of its brackets.
        let (mut links, mut inner, mut deepest) = (0, 0, 0);
        while index < to {
            if matches!(self.said(index), "," | ":" | "=") && self.tokens[index].kind == Kind::Operator {
                (links, inner) = (0, 0);
            } else if self.tokens[index].kind != Kind::Text && !self.is_plain_name(index) {
                links += 1;
            }
            if self.ends_run(index, from) {
                self.close(&run, index, used, false)?;
                run = Run::new(index + 1);
                index += 1;
            } else {
                self.count(&mut run, index, from);
                if self.tokens[index].kind == Kind::Open {
                    let close = self.closes[index].min(to);
                    let (_, depth) = self.level(index + 1, close, Use::Bound)?;
                    inner = inner.max(depth);
                    index = close;
                }
                index += 1;
            }
            deepest = deepest.max(links + inner);
            if deepest > MAX_DEPTH {
                return Err(TooLong);
            }
        }
        if run.start < to {
            is_whole = self.close(&run, to, used, run.start == from)? && run.start == from;
        }
        Ok((is_whole, deepest))
    }

    /// A name or number that is no operator by itself.
    fn is_plain_name(&self, index: usize) -> bool {
        let is_word = matches!(self.tokens[index].kind, Kind::Name | Kind::Number);
        is_word && !matches!(self.said(index), "and" | "or" | "not" | "if" | "else" | "in" | "is")
    }

    /// Whether a token binds less than arithmetic.
    fn ends_run(&self, index: usize, from: usize) -> bool {
        let before = (index > from).then(|| self.said(index - 1));
        let is_name_of_something = matches!(before, Some("." | "|" | "is"));
        match self.tokens[index].kind {
            Kind::Operator => matches!(self.said(index), "," | ":" | "=" | "==" | "!=" | "<" | ">" | "<=" | ">="),
            Kind::Name if is_name_of_something => false,
            // `is not in`
            Kind::Name if before == Some("not") && index > from + 1 && self.said(index - 2) == "is" => false,
            Kind::Name => matches!(self.said(index), "and" | "or" | "not" | "if" | "else" | "in"),
            _ => false,
        }
    }

    /// Whether an operand ends before a token, so that an operator there has two, and a bracket there belongs to it.
    fn is_behind_operand(&self, index: usize, from: usize) -> bool {
        let Some(before) = index.checked_sub(1).filter(|&before| before >= from) else { return false };
        match self.tokens[before].kind {
            Kind::Open | Kind::Operator => false,
            Kind::Close | Kind::Number | Kind::Text => true,
            Kind::Name => !self.ends_run(before, from),
        }
    }

    fn count(&mut self, run: &mut Run, index: usize, from: usize) {
        let behind = self.is_behind_operand(index, from);
        match (self.tokens[index].kind, self.said(index)) {
            (Kind::Operator, "+" | "~" | "-") if behind => {
                self.close_product(run, index);
                run.operators += 1;
                run.joins |= self.said(index) != "-";
                run.tildes |= self.said(index) == "~";
            }
            (Kind::Operator, "*" | "**" | "/" | "//" | "%") => {
                run.operators += 1;
                run.multiplies |= self.said(index) == "*";
            }
            (Kind::Number, _) => run.numbers = true,
            (Kind::Open, bracket) => {
                let inner = index + 1..self.closes[index].min(self.len());
                let has = |said: &str| self.find_in(inner.clone(), said);
                run.literals |= !behind && (bracket != "(" || has(","));
                run.slices |= behind && bracket == "[" && has(":");
            }
            _ => {}
        }
    }

    fn find_in(&self, tokens: std::ops::Range<usize>, said: &str) -> bool {
        self.find(tokens.start, said).is_some_and(|found| found < tokens.end)
    }

    /// The product before a token has ended.
    fn close_product(&mut self, run: &mut Run, to: usize) {
        if run.multiplies {
            self.wrap_product(run.product, to);
        }
        run.product = to + 1;
        run.multiplies = false;
    }

    /// Puts a product through the filter, and before that the texts in it.
    fn wrap_product(&mut self, from: usize, to: usize) {
        let mut index = from;
        while index < to {
            let is_text = self.tokens[index].kind == Kind::Text;
            let is_group = self.tokens[index].kind == Kind::Open && !self.is_behind_operand(index, from);
            let after = self.after(index);
            if (is_text || is_group) && after <= to {
                self.insertions.push((self.start(index), "(("));
                self.insertions.push((self.end(after - 1), KEPT));
            }
            index = after;
        }
        self.wrap(from, to, MADE);
    }

    /// The run before a token has ended; whether it went through the filter as one.
    fn close(&mut self, run: &Run, to: usize, used: Use, is_all: bool) -> Result<bool, TooLong> {
        if run.operators > MAX_OPERATORS {
            return Err(TooLong);
        }
        // Numbers are only added to numbers.
        let joins = run.joins && (run.tildes || !run.numbers);
        let makes = joins && !(used == Use::Written && is_all);
        let holds = used == Use::Bound && (run.literals || run.slices);
        let is_product = run.multiplies && run.product == run.start;
        if used == Use::Bound && run.slices && !run.literals && !makes && !run.multiplies {
            self.wrap(run.start, to, SLICED);
            return Ok(true);
        }
        if makes || holds || is_product {
            if run.multiplies {
                self.wrap_product(run.product, to);
            }
            if is_product {
                return Ok(true);
            }
            self.wrap(run.start, to, MADE);
            return Ok(true);
        }
        if run.multiplies {
            self.wrap_product(run.product, to);
        }
        Ok(false)
    }
}

/// A run of tokens in which nothing binds less than arithmetic.
struct Run {
    /// Its first token, and that of the product at its end.
    start: usize,
    product: usize,
    operators: usize,
    /// `+` or `~`.
    joins: bool,
    tildes: bool,
    /// The product at its end has a `*`.
    multiplies: bool,
    numbers: bool,
    literals: bool,
    slices: bool,
}

impl Run {
    fn new(start: usize) -> Self {
        Self {
            start,
            product: start,
            operators: 0,
            joins: false,
            tildes: false,
            multiplies: false,
            numbers: false,
            literals: false,
            slices: false,
        }
    }
}

fn tokens(text: &str) -> Vec<Token> {
    let bytes = text.as_bytes();
    let is_word = |byte: &u8| byte.is_ascii_alphanumeric() || *byte == b'_' || *byte >= 0x80;
    let mut tokens = Vec::new();
    let mut at = 0;
    while at < bytes.len() {
        let rest = &bytes[at..];
        let (kind, length) = match rest[0] {
            byte if byte.is_ascii_whitespace() => {
                at += 1;
                continue;
            }
            b'\'' | b'"' => (Kind::Text, text_length(rest)),
            b'0'..=b'9' => (Kind::Number, rest.iter().take_while(|byte| is_word(byte)).count()),
            byte if is_word(&byte) => (Kind::Name, rest.iter().take_while(|byte| is_word(byte)).count()),
            b'(' | b'[' | b'{' => (Kind::Open, 1),
            b')' | b']' | b'}' => (Kind::Close, 1),
            _ if ["**", "//", "==", "!=", "<=", ">="].iter().any(|two| rest.starts_with(two.as_bytes())) => {
                (Kind::Operator, 2)
            }
            _ => (Kind::Operator, 1),
        };
        tokens.push(Token { kind, start: at, end: at + length });
        at += length;
    }
    tokens
}

/// Bytes of a text with its quotes.
fn text_length(bytes: &[u8]) -> usize {
    let mut escaped = false;
    for (index, &byte) in bytes.iter().enumerate().skip(1) {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = true,
            _ if byte == bytes[0] => return index + 1,
            _ => {}
        }
    }
    bytes.len()
}

/// Where each bracket closes; the end if it does not.
fn closes(tokens: &[Token]) -> Result<Vec<usize>, TooLong> {
    let mut closes = vec![tokens.len(); tokens.len()];
    let mut open = Vec::new();
    for (index, token) in tokens.iter().enumerate() {
        match token.kind {
            Kind::Open => open.push(index),
            Kind::Close => {
                if let Some(opened) = open.pop() {
                    closes[opened] = index;
                }
            }
            _ => {}
        }
        if open.len() > MAX_BRACKETS {
            return Err(TooLong);
        }
    }
    Ok(closes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rewritten(text: &str, used: Use) -> String {
        let mut expression = Expression::new(text).unwrap();
        let tokens = expression.len();
        expression.bound(0, tokens, used).unwrap();
        expression.rewritten().replace("|firebrick_made", "|m").replace("|firebrick_bounded", "|b")
    }

    #[test]
    fn what_is_made_goes_through_the_filter_and_nothing_else() {
        let cases = [
            ("a ~ b", "a ~ b"),
            ("a ~ b if c + d == e else f", "(a ~ b)|m if (c + d)|m == e else f"),
            ("f(a ~ b, g + 1, [h])", "f((a ~ b)|m, g + 1, ([h])|m)"),
            ("a * b + c * d", "(a * b)|m + (c * d)|m"),
            ("'x' * 9", "((('x')|b) * 9)|m"),
            ("('x').y(2 * 'z') * 9 ~ w", "(((('x'))|b).y((2 * (('z')|b))|m) * 9)|m ~ w"),
            ("a[-1:] + b[1]", "a[-1:] + b[1]"),
            ("(a + b)|trim", "((a + b)|m)|trim"),
            ("-a * -b", "(-a * -b)|m"),
            ("a is not in [b ~ c] and not d ~ e", "a is not in [(b ~ c)|m] and not (d ~ e)|m"),
            ("{'a': b ~ c, 'd': [e + f]}", "{'a': (b ~ c)|m, 'd': ([(e + f)|m])|m}"),
            ("x.in ~ y.if == z|not ~ w", "(x.in ~ y.if)|m == (z|not ~ w)|m"),
            ("m(x[1:], k=y)", "m((x[1:])|b, k=y)"),
            ("'a ~ b' == c", "'a ~ b' == c"),
        ];
        for (text, expected) in cases {
            assert_eq!(rewritten(text, Use::Written), expected, "{text}");
        }
    }

    #[test]
    fn what_is_bound_may_be_a_literal_or_a_slice() {
        let cases = [
            ("[a]", "([a])|m"),
            ("a[1:]", "(a[1:])|b"),
            ("[a][1:]", "([a][1:])|m"),
            ("a[1]", "a[1]"),
            ("(a)", "(a)"),
            ("(a, b)", "((a, b))|m"),
            ("a ~ b * c", "(a ~ (b * c)|m)|m"),
            ("a * b ~ c", "((a * b)|m ~ c)|m"),
            ("[a] if b else c", "([a])|m if b else c"),
        ];
        for (text, expected) in cases {
            assert_eq!(rewritten(text, Use::Bound), expected, "{text}");
        }
    }

    #[test]
    fn damaged_expressions_are_left_to_the_engine_and_long_ones_refused() {
        for text in ["(", ")", "a ~", "~ ~", "[a ~ b", "'", "\"\\", "a ~ b)", "é ~ ü", ", , ~", "* ("] {
            let mut expression = Expression::new(text).unwrap();
            let tokens = expression.len();
            expression.bound(0, tokens, Use::Bound).unwrap();
            assert!(expression.rewritten().len() >= text.len());
        }
        assert!(Expression::new(&"[".repeat(1000)).is_err());
        let nested = format!("{}{}", format!("f({}", "a.".repeat(100)).repeat(10), ")".repeat(10));
        for text in ["a+".repeat(1000), "a.".repeat(1000), "a and ".repeat(1000), "a|".repeat(1000), nested] {
            let mut long = Expression::new(&text).unwrap();
            let tokens = long.len();
            assert_eq!(long.bound(0, tokens, Use::Written), Err(TooLong));
        }
        let many = "a.b, ".repeat(10_000);
        let mut many = Expression::new(&many).unwrap();
        let tokens = many.len();
        assert_eq!(many.bound(0, tokens, Use::Written), Ok(false));
    }
}
