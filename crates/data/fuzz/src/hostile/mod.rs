//! Hostile inputs that are too large or too regular to keep as files: each says how it is made, and what must be said
//! about it.

mod columns;
mod files;
mod templates;

/// An input, which target it is for, and words that its errors must hold.
pub(crate) struct Hostile {
    pub(crate) target: &'static str,
    pub(crate) name: &'static str,
    pub(crate) make: Box<dyn Fn() -> Vec<u8>>,
    pub(crate) says: &'static [&'static str],
}

impl Hostile {
    fn new(
        target: &'static str,
        name: &'static str,
        says: &'static [&'static str],
        make: impl Fn() -> Vec<u8> + 'static,
    ) -> Self {
        Self { target, name, make: Box::new(make), says }
    }
}

/// All of them.
pub(crate) fn all() -> Vec<Hostile> {
    [files::all(), columns::all(), templates::all()].into_iter().flatten().collect()
}
