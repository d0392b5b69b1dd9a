//! The Jinja engine, configured like transformers' sandboxed environment, with limits for templates that do not terminate.
//!
//! A template is a file in a model folder that the user chose. Limits apply to the instructions of a render, the depth of recursion, the bytes it
//! writes (also into captured blocks), and its time: a template that never ends, or that writes far more than its own text and the conversation
//! contain, is an error. (The tokenizer needs 250 bytes of memory per byte of text, so the 100 MB that a loop can write would end the process.) A
//! panic of the engine is an error too.
//! Trade-off: the memory of values is not bounded where the engine builds them (`{% set x = x ~ x %}` in a loop, lists), and neither is the nesting
//! of expressions while they are compiled.
//!
//! A render runs on a helper thread of the calling thread, which waits for it until a deadline. A helper that misses it is abandoned: it ends once
//! its instructions are used up, or with the process. The handoff costs about 15 µs per render, some percent of tokenizing a conversation.

use std::cell::{Cell, RefCell};
use std::io::{Error as IoError, Write as IoWrite};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::Builder;
use std::time::Duration;

use minijinja::value::ValueKind;
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Output, State, Value};

use super::generation::{FILTER, generation};
use super::python_compat::to_str;
use super::{filters, python_methods};
use crate::catch_panic::catch_panic;

/// Instructions per render. Published templates need about a hundred per message.
const FUEL: u64 = 3_000_000;
/// Depth of macros that call themselves.
const RECURSION: usize = 100;
/// Maximum bytes that a render may write: twice the bytes of the largest record.
const MAX_TEXT_BYTES: usize = 128 << 20;
/// Bytes that it may write in any case: system messages of published templates have some thousand bytes.
const BASE_BYTES: usize = 256 << 10;
/// Bytes that it may write in addition, per byte of the template and the conversation. Published templates write each content once, with less than 80
/// bytes around it; tools as indented JSON take up to 8 times their bytes.
const BYTES_PER_BYTE: usize = 16;
/// Number of times a text may be written: into blocks that are captured, out of them, and at the end.
const WRITES: usize = 8;
/// Maximum time of a render. Published templates need less than a millisecond per conversation.
pub(super) const DEADLINE: Duration = Duration::from_secs(60);
/// Stack of a helper thread: recursive macros take some hundred KiB in unoptimized builds.
const STACK_BYTES: usize = 16 << 20;

thread_local! {
    /// Bytes that the render of this thread may still write, captured or not.
    static LEFT: Cell<usize> = const { Cell::new(0) };
}

/// Returns the maximum number of bytes that a render may write, if template and conversation have `bytes` together.
pub(super) fn max_text_bytes(bytes: usize) -> usize {
    MAX_TEXT_BYTES.min(BASE_BYTES.saturating_add(bytes.saturating_mul(BYTES_PER_BYTE)))
}

/// Creates an environment with everything but the template.
pub(super) fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_trim_blocks(true);
    environment.set_lstrip_blocks(true);
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_fuel(Some(FUEL));
    environment.set_recursion_limit(RECURSION);
    environment.set_unknown_method_callback(python_methods::call);
    environment.set_formatter(write);
    environment.add_function("raise_exception", filters::raise_exception);
    environment.add_function("dict", filters::dict);
    environment.add_filter(FILTER, generation);
    filters::add_filters(&mut environment);
    add_tests(&mut environment);
    environment
}

/// Writes a value as Python does.
fn write(output: &mut Output<'_>, _: &State<'_, '_>, value: &Value) -> Result<(), Error> {
    let text = to_str(value)?;
    let Some(left) = LEFT.get().checked_sub(text.len()) else {
        LEFT.set(0);
        return Err(Error::new(ErrorKind::WriteFailure, "too much text"));
    };
    LEFT.set(left);
    Ok(output.write_str(&text)?)
}

/// Adds the tests of Jinja that follow Python's notion of types.
fn add_tests(environment: &mut Environment<'static>) {
    let is_collection =
        |kind| matches!(kind, ValueKind::Seq | ValueKind::Map | ValueKind::String | ValueKind::Iterable);
    environment.add_test("sequence", move |value: &Value| is_collection(value.kind()));
    // Undefined can be iterated, so Jinja calls it iterable.
    environment.add_test("iterable", move |value: &Value| is_collection(value.kind()) || value.is_undefined());
    environment.add_test("number", |value: &Value| matches!(value.kind(), ValueKind::Number | ValueKind::Bool));
    environment.add_test("callable", |value: &Value| value.kind() == ValueKind::Plain);
}

/// Renders a template of the environment within the limits, writing at most `max_bytes`. Error: the template's or the engine's, with the line; or the
/// limit that was exceeded.
pub(super) fn render(
    environment: &Arc<Environment<'static>>,
    name: &'static str,
    variables: Value,
    max_bytes: usize,
    deadline: Duration,
) -> Result<String, String> {
    thread_local! {
        static HELPER: RefCell<Option<Helper>> = const { RefCell::new(None) };
    }
    HELPER.with_borrow_mut(|helper| {
        let job = Job { environment: environment.clone(), name, variables, max_bytes };
        let result = helper.get_or_insert_with(Helper::spawn).run(job, deadline);
        result.unwrap_or_else(|| {
            *helper = None;
            Err(format!("rendering took more than {} seconds; the template may not end", deadline.as_secs_f32()))
        })
    })
}

struct Job {
    environment: Arc<Environment<'static>>,
    name: &'static str,
    variables: Value,
    max_bytes: usize,
}

/// A thread that renders for another thread.
struct Helper {
    jobs: Sender<Job>,
    results: Receiver<Result<String, String>>,
}

impl Helper {
    fn spawn() -> Self {
        let (jobs, incoming) = channel::<Job>();
        let (outgoing, results) = channel();
        let work = move || {
            for job in incoming {
                let text = catch_panic("the template engine", || render_here(job));
                if outgoing.send(text).is_err() {
                    return;
                }
            }
        };
        // A system refuses a thread only if it has none free; then nothing could be rendered.
        let builder = Builder::new().name("chat-template".to_owned()).stack_size(STACK_BYTES);
        builder.spawn(work).expect("the system refused a thread");
        Self { jobs, results }
    }

    /// Runs a job; `None` if it missed the deadline.
    fn run(&self, job: Job, deadline: Duration) -> Option<Result<String, String>> {
        // Panics are caught in the helper, so it lives as long as `self`.
        self.jobs.send(job).expect("the helper waits for jobs");
        match self.results.recv_timeout(deadline) {
            Ok(result) => Some(result),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => panic!("the helper ended while its caller waited"),
        }
    }
}

fn render_here(job: Job) -> Result<String, String> {
    let Job { environment, name, variables, max_bytes } = job;
    LEFT.set(max_bytes.saturating_mul(WRITES));
    let mut text = BoundedText { bytes: Vec::with_capacity(1 << 12), max_bytes };
    let template = environment.get_template(name).map_err(|error| full_reason(&error))?;
    let rendered = template.render_captured_to(variables, &mut text);
    if let Err(error) = rendered {
        let is_full = text.bytes.len() >= max_bytes || LEFT.get() == 0;
        return Err(if is_full {
            format!("it writes more than {} KiB, far more than it and the conversation have", max_bytes >> 10)
        } else {
            full_reason(&error)
        });
    }
    String::from_utf8(text.bytes).map_err(|_| "the engine wrote an incomplete character".to_owned())
}

/// Returns the engine's error with its causes and the template's line.
pub(super) fn full_reason(error: &Error) -> String {
    let mut reason = match error.kind() {
        ErrorKind::OutOfFuel => "it executes too many instructions; the template may not end".to_owned(),
        _ => error.detail().map_or_else(|| error.to_string(), str::to_owned),
    };
    if let Some(line) = error.line() {
        reason.push_str(&format!(" (template line {line})"));
    }
    reason
}

struct BoundedText {
    bytes: Vec<u8>,
    max_bytes: usize,
}

impl IoWrite for BoundedText {
    fn write(&mut self, bytes: &[u8]) -> Result<usize, IoError> {
        let space = self.max_bytes - self.bytes.len();
        self.bytes.extend_from_slice(&bytes[..bytes.len().min(space)]);
        if bytes.len() > space { Err(IoError::other("too much text")) } else { Ok(bytes.len()) }
    }

    fn flush(&mut self) -> Result<(), IoError> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn render_within(source: &'static str, deadline: Duration) -> Result<String, String> {
        let mut environment = environment();
        environment.add_template("t", source).unwrap();
        render(&Arc::new(environment), "t", Value::UNDEFINED, 1 << 20, deadline)
    }

    #[test]
    fn a_render_that_misses_its_deadline_is_an_error_and_the_next_one_works() {
        // Each instruction compares a megabyte.
        let slow =
            "{% set x = 'a' * 1000000 %}{% for i in range(90000) %}{% if x ~ 'b' == x ~ 'c' %}{% endif %}{% endfor %}";
        let error = render_within(slow, Duration::from_millis(50)).unwrap_err();
        assert!(error.contains("more than 0.05 seconds"), "{error}");
        assert_eq!(render_within("a", DEADLINE).unwrap(), "a");
    }

    #[test]
    fn instructions_recursion_and_output_are_bounded_and_a_panic_is_an_error() {
        let cases = [
            ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "too many instructions"),
            ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "recursion"),
            ("{% set x = 'x' * 100000 %}{% for a in range(9999) %}{{ x }}{% endfor %}", "more than 1024 KiB"),
            ("{{ 'x' * 10**7 }}", "more than 1024 KiB"),
            ("{% set y %}{% for a in range(9999) %}{{ 'x' * 10**5 }}{% endfor %}{% endset %}", "more than 1024 KiB"),
            ("{{ (['a' * 10**6] * 10**6) | tojson }}", "larger than 128 MiB"),
            ("{{ (['a' * 10**6] * 10**6) | join('b') }}", "larger than 128 MiB"),
            ("{{ ','.join(['a' * 10**6] * 10**6) }}", "larger than 128 MiB"),
            ("{{ ('a' * 10**5).replace('a', 'b' * 10**5) }}", "larger than 128 MiB"),
            ("{{ 'a'.ljust(10**12) }}", "larger than 128 MiB"),
            ("{{ ('a\n' * 10**5) | indent(10**5) }}", "larger than 128 MiB"),
            // The engine divides by the number of arguments.
            ("{% for i in [1] %}{{ loop.cycle() }}{% endfor %}", "the template engine failed internally"),
        ];
        for (source, expected) in cases {
            let error = render_within(source, DEADLINE).unwrap_err();
            assert!(error.contains(expected), "{source}: {error}");
        }
    }
}
