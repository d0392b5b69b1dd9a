//! Turns panics of third-party parsers into errors: if one panics on invalid bytes, the file is at fault.
//!
//! The error contains the panic's message, so the panic hook prints nothing. Trade-off: the place in the library's source is lost, and a panic on a
//! thread that a library starts is printed; the libraries used here start none.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::sync::Once;

thread_local! {
    /// Whether this thread runs the `work` of [`catch_panic`].
    static IS_CAUGHT: Cell<bool> = const { Cell::new(false) };
}

/// Runs `work` and turns its panic into an error that names `library`. Do not reuse what `work` was modifying.
pub(crate) fn catch_panic<T>(library: &str, work: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    install_hook();
    let outer = IS_CAUGHT.replace(true);
    let result = catch_unwind(AssertUnwindSafe(work));
    IS_CAUGHT.set(outer);
    result.unwrap_or_else(|panic| {
        let message = panic.downcast_ref::<String>().map(String::as_str);
        let message = message.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no reason given");
        Err(format!("{library} failed internally: {message}"))
    })
}

/// Keeps the panic hook from printing panics that [`catch_panic`] returns.
fn install_hook() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let earlier = take_hook();
        set_hook(Box::new(move |info| {
            if !IS_CAUGHT.get() {
                earlier(info);
            }
        }));
    });
}

#[cfg(test)]
mod tests {
    use std::env;
    use std::process::Command;

    use super::*;

    #[test]
    fn a_panic_becomes_an_error_with_its_message() {
        assert_eq!(catch_panic("it", || Ok(1)), Ok(1));
        assert_eq!(catch_panic("it", || Err::<(), _>("no".to_owned())), Err("no".to_owned()));
        let failed = catch_panic("it", || -> Result<(), String> { panic!("index {}", 5) });
        assert_eq!(failed, Err("it failed internally: index 5".to_owned()));
    }

    /// Runs itself in a child process, whose standard error is read.
    #[test]
    fn a_caught_panic_is_not_printed_and_every_other_one_is() {
        const CHILD: &str = "FIREBRICK_PANIC_CHILD";
        if env::var_os(CHILD).is_some() {
            let nested = || -> Result<(), String> {
                let inner = catch_panic("it", || -> Result<(), String> { panic!("silent inside") });
                assert!(inner.is_err());
                panic!("silent outside")
            };
            assert!(catch_panic("it", nested).is_err());
            assert!(catch_unwind(|| -> u8 { panic!("loud") }).is_err());
            return;
        }
        let test = "catch_panic::tests::a_caught_panic_is_not_printed_and_every_other_one_is";
        let mut command = Command::new(env::current_exe().unwrap());
        let output = command.args(["--exact", test, "--nocapture"]).env(CHILD, "1").output().unwrap();
        let printed = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{printed}");
        assert!(printed.contains("loud") && !printed.contains("silent"), "{printed}");
    }
}
