//! Inputs that are too large or too regular to store as files: each is generated, with the errors that it must cause.

pub(crate) mod files;
pub(crate) mod templates;

/// An input, its target, and text that its errors must contain.
pub(crate) struct Hostile {
    pub(crate) target: &'static str,
    pub(crate) name: &'static str,
    pub(crate) make: Box<dyn Fn() -> Vec<u8>>,
    pub(crate) expected: &'static [&'static str],
}

impl Hostile {
    fn new(
        target: &'static str,
        name: &'static str,
        expected: &'static [&'static str],
        make: impl Fn() -> Vec<u8> + 'static,
    ) -> Self {
        Self { target, name, make: Box::new(make), expected }
    }
}
