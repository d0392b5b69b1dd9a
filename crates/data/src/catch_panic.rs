//! Turns panics of third-party parsers into errors: where one panics on invalid bytes, the file is at fault.
//!
//! Trade-off: the panic's own message is still printed to standard error.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs `work` and turns its panic into an error that names `library`. Do not reuse what `work` was modifying.
pub(crate) fn catch_panic<T>(library: &str, work: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        let message = panic.downcast_ref::<String>().map(String::as_str);
        let message = message.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no reason given");
        Err(format!("{library} failed internally: {message}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_an_error_with_its_message() {
        assert_eq!(catch_panic("it", || Ok(1)), Ok(1));
        assert_eq!(catch_panic("it", || Err::<(), _>("no".to_owned())), Err("no".to_owned()));
        let failed = catch_panic("it", || -> Result<(), String> { panic!("index {}", 5) });
        assert_eq!(failed, Err("it failed internally: index 5".to_owned()));
    }
}
