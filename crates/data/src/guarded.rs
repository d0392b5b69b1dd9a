//! Other people's parsers on bytes that anybody may have written: where one panics instead of refusing them, that is an
//! error of the file to us. Gives up silence: the panic's own message has gone to standard error by then.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs `work`; its panic becomes an error that says that `who` failed. What it worked on is not to be used again.
pub(crate) fn guarded<T>(who: &str, work: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        let said = panic.downcast_ref::<String>().map(String::as_str);
        let said = said.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no reason given");
        Err(format!("{who} failed inside its library: {said}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_an_error_with_its_words() {
        assert_eq!(guarded("it", || Ok(1)), Ok(1));
        assert_eq!(guarded("it", || Err::<(), _>("no".to_owned())), Err("no".to_owned()));
        let failed = guarded("it", || -> Result<(), String> { panic!("index {}", 5) });
        assert_eq!(failed, Err("it failed inside its library: index 5".to_owned()));
    }
}
