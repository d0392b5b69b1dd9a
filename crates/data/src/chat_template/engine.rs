//! The Jinja engine, configured like transformers' sandboxed environment, with limits for hostile templates.
//!
//! A template is a file of somebody else. Limits apply to its source (`lexer`), and to the instructions of a render, the depth of recursion, the bytes
//! it writes (also into captured blocks), its time, and the memory it holds: a template that never ends, or that writes far more than its own text
//! and the conversation contain, is an error. (The tokenizer needs 250 bytes of memory per byte of text, so the 100 MB that a loop can write would
//! end the process.) A panic of the engine is an error too.
//!
//! Templates are compiled and rendered on a helper thread of the calling thread, which waits for it until a deadline. A helper that misses it, or that
//! exceeds its memory, is abandoned: so the template is not rendered again, and the run ends. Its stack is as deep as values can be nested in
//! allocations that it may hold; only touched pages of it are memory. The handoff costs about 15 µs per render, some percent of tokenizing a
//! conversation.
//!
//! Trade-off: memory, and with it the depth of values, is bounded only in programs that install [`BoundedAllocator`](super::BoundedAllocator).

use std::cell::{Cell, RefCell};
use std::io::{Error as IoError, Write as IoWrite};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::thread::Builder;
use std::time::{Duration, Instant};

use minijinja::value::{Rest, ValueKind};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Output, State, Value};

use super::allocator::Budget;
use super::lexer::{DICT, FILTER, generation};
use super::python_compat::to_str;
use super::{dict, filters, python_methods};
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
/// Maximum time of a render, in which the process is not stopped. Published templates need less than a millisecond per conversation.
pub(super) const DEADLINE: Duration = Duration::from_secs(3);
/// Maximum time of all renders of a record: one or two per message where the text of a message is hard to find.
const RECORD_DEADLINE: Duration = Duration::from_secs(8);
/// Memory that a helper may hold in any case, in addition to a multiple of the text that it may write.
const BASE_MEMORY: usize = 32 << 20;
const TEXTS_IN_MEMORY: usize = 4;
/// Allocations that a helper may hold at once. Published templates need about ten, those that copy messages four per message.
const MAX_ALLOCATIONS: usize = 100_000;
/// Stack of a helper thread: about 2 KiB per allocation, of which a level of nesting takes one or more.
const STACK_BYTES: usize = 256 << 20;
/// How often a waiting caller looks whether its helper has exceeded its memory.
const POLL: Duration = Duration::from_millis(50);

thread_local! {
    /// Bytes that the render of this thread may still write, captured or not.
    static LEFT: Cell<usize> = const { Cell::new(0) };
    /// Time that the renders of this thread's record may still take.
    static TIME_LEFT: Cell<Option<Duration>> = const { Cell::new(None) };
}

/// Encodes a record, whose renders share one deadline.
pub(crate) fn within_deadline<T>(encode: impl FnOnce() -> T) -> T {
    TIME_LEFT.set(Some(RECORD_DEADLINE));
    let encoded = encode();
    TIME_LEFT.set(None);
    encoded
}

/// Returns the maximum number of bytes that a render may write, if template and conversation have `bytes` together.
pub(super) fn max_text_bytes(bytes: usize) -> usize {
    MAX_TEXT_BYTES.min(BASE_BYTES.saturating_add(bytes.saturating_mul(BYTES_PER_BYTE)))
}

/// Creates an environment with everything but the template.
pub(super) fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    // `lexer` has trimmed what Jinja trims.
    environment.set_keep_trailing_newline(true);
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_fuel(Some(FUEL));
    environment.set_recursion_limit(RECURSION);
    environment.set_unknown_method_callback(python_methods::call);
    environment.set_formatter(write);
    environment.add_function("raise_exception", filters::raise_exception);
    environment.add_function("dict", filters::dict);
    let namespace = environment.globals().find(|(name, _)| *name == "namespace").expect("the engine has it").1;
    environment.add_function("namespace", move |state: &State<'_, '_>, arguments: Rest<Value>| {
        namespace.call(state, &[filters::dict(arguments)?])
    });
    environment.add_function(DICT, |map: &Value| dict::dict(map));
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
    for name in ["sequence", "iterable"] {
        // Undefined can be iterated.
        environment.add_test(name, move |value: &Value| is_collection(value.kind()) || value.is_undefined());
    }
    for (name, method) in [("lower", "islower"), ("upper", "isupper")] {
        environment.add_test(name, move |state: &State<'_, '_>, value: &Value| {
            python_methods::call(state, &filters::text_of(value)?, method, &[]).map(|holds| holds.is_true())
        });
    }
    environment.add_test("number", |value: &Value| matches!(value.kind(), ValueKind::Number | ValueKind::Bool));
    environment.add_test("callable", |value: &Value| value.kind() == ValueKind::Plain);
}

/// Why a template gives no text.
#[derive(Debug, Clone)]
pub(super) enum Failure {
    /// It refuses the messages, or fails on them.
    Refused(String),
    RanOut(String),
}

impl Failure {
    pub(super) fn reason(self) -> String {
        match self {
            Self::Refused(reason) | Self::RanOut(reason) => reason,
        }
    }
}

/// Compiles a template and adds it to an environment.
pub(super) fn compile(
    mut environment: Environment<'static>,
    name: &'static str,
    source: String,
) -> Result<Environment<'static>, Failure> {
    let compile = move || {
        environment.add_template_owned(name, source).map_err(|error| failure(&error))?;
        Ok(environment)
    };
    on_helper(0, DEADLINE, compile)
}

/// Renders a template of the environment, writing at most `max_bytes`. Error: the template's or the engine's, with the line; or the limit exceeded.
pub(super) fn render(
    environment: &Arc<Environment<'static>>,
    name: &'static str,
    variables: Value,
    max_bytes: usize,
    deadline: Duration,
) -> Result<String, Failure> {
    let environment = environment.clone();
    let deadline = TIME_LEFT.get().map_or(deadline, |left| left.min(deadline));
    on_helper(max_bytes, deadline, move || {
        LEFT.set(max_bytes.saturating_mul(WRITES));
        let mut text = BoundedText { bytes: Vec::with_capacity(1 << 12), max_bytes };
        let template = environment.get_template(name).map_err(|error| failure(&error))?;
        let rendered = template.render_captured_to(variables, &mut text);
        if let Err(error) = rendered {
            let is_full = text.bytes.len() >= max_bytes || LEFT.get() == 0;
            return Err(if is_full {
                let kib = max_bytes >> 10;
                Failure::RanOut(format!("it writes more than {kib} KiB, far more than it and the conversation have"))
            } else {
                failure(&error)
            });
        }
        let incomplete = |_| Failure::Refused("the engine wrote an incomplete character".to_owned());
        String::from_utf8(text.bytes).map_err(incomplete)
    })
}

/// Runs `work` on the helper of this thread.
fn on_helper<T: Send + 'static>(
    max_bytes: usize,
    deadline: Duration,
    work: impl FnOnce() -> Result<T, Failure> + Send + 'static,
) -> Result<T, Failure> {
    thread_local! {
        static HELPER: RefCell<Option<Helper>> = const { RefCell::new(None) };
    }
    HELPER.with_borrow_mut(|helper| {
        let running = match helper {
            Some(running) => running,
            None => helper.insert(Helper::spawn()?),
        };
        let result = running.run(BASE_MEMORY + TEXTS_IN_MEMORY * max_bytes, deadline, work);
        result.unwrap_or_else(|reason| {
            *helper = None;
            Err(Failure::RanOut(reason))
        })
    })
}

type Job = Box<dyn FnOnce() + Send>;

/// A thread that compiles and renders for another thread.
struct Helper {
    jobs: Sender<Job>,
    is_exceeded: &'static AtomicBool,
}

impl Helper {
    fn spawn() -> Result<Self, Failure> {
        let (jobs, incoming) = channel::<Job>();
        let builder = Builder::new().name("chat-template".to_owned()).stack_size(STACK_BYTES);
        let spawned = builder.spawn(move || incoming.into_iter().for_each(|job| job()));
        spawned.map_err(|error| {
            let stack = STACK_BYTES >> 20;
            Failure::RanOut(format!("the system refused a thread with {stack} MiB of address space: {error}"))
        })?;
        // An abandoned thread may write to it at any time.
        Ok(Self { jobs, is_exceeded: Box::leak(Box::new(AtomicBool::new(false))) })
    }

    /// Runs a job. Error: it missed the deadline or exceeded its memory, and this helper cannot be used again.
    fn run<T: Send + 'static>(
        &self,
        bytes: usize,
        deadline: Duration,
        work: impl FnOnce() -> Result<T, Failure> + Send + 'static,
    ) -> Result<Result<T, Failure>, String> {
        let budget = Budget { bytes, allocations: MAX_ALLOCATIONS, is_exceeded: self.is_exceeded };
        let (sender, result) = channel();
        let job = move || {
            let done = budget.run(|| catch_panic("the template engine", || Ok(work())));
            // The caller may have stopped waiting.
            let _ = sender.send(done.unwrap_or_else(|reason| Err(Failure::Refused(reason))));
        };
        // Panics are caught in the helper, so it lives as long as `self`.
        self.jobs.send(Box::new(job)).expect("the helper waits for jobs");
        let mut left = deadline;
        loop {
            let start = Instant::now();
            let received = result.recv_timeout(left.min(POLL));
            // However long the process was stopped meanwhile, that counts as one poll.
            let waited = start.elapsed().min(POLL);
            left = left.saturating_sub(waited);
            TIME_LEFT.set(TIME_LEFT.get().map(|left| left.saturating_sub(waited)));
            match received {
                Ok(done) => return Ok(done),
                Err(_) if self.is_exceeded.load(Ordering::Acquire) => {
                    return Err(format!(
                        "it holds more than {} MiB or {MAX_ALLOCATIONS} values in memory",
                        bytes >> 20
                    ));
                }
                Err(_) if left.is_zero() => {
                    let seconds = deadline.as_secs_f32();
                    return Err(format!(
                        "it takes more than {seconds} seconds ({DEADLINE:?} per render, {RECORD_DEADLINE:?} per record); the template may not end"
                    ));
                }
                Err(_) => {}
            }
        }
    }
}

/// Returns the engine's error with its causes and the template's line.
fn failure(error: &Error) -> Failure {
    let line = error.line().map(|line| format!(" (template line {line})")).unwrap_or_default();
    match error.kind() {
        ErrorKind::OutOfFuel => {
            Failure::RanOut(format!("it executes too many instructions; the template may not end{line}"))
        }
        _ => Failure::Refused(error.detail().map_or_else(|| error.to_string(), str::to_owned) + &line),
    }
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
        let environment = compile(environment(), "t", source.to_owned()).map_err(Failure::reason)?;
        render(&Arc::new(environment), "t", Value::UNDEFINED, 1 << 20, deadline).map_err(Failure::reason)
    }

    #[test]
    fn a_late_render_is_an_error_and_the_next_one_works() {
        // Each instruction compares a megabyte.
        let slow =
            "{% set x = 'a' * 1000000 %}{% for i in range(90000) %}{% if x ~ 'b' == x ~ 'c' %}{% endif %}{% endfor %}";
        let error = render_within(slow, Duration::from_millis(50)).unwrap_err();
        assert!(error.contains("more than 0.05 seconds"), "{error}");
        let short = "{% for i in range(9999) %}{% endfor %}";
        TIME_LEFT.set(Some(Duration::from_millis(50)));
        let failed = (0..9999).find(|_| render_within(short, DEADLINE).is_err());
        TIME_LEFT.set(None);
        assert!(failed.is_some_and(|renders| renders > 1), "{failed:?}");
        assert_eq!(render_within("a", DEADLINE).unwrap(), "a");
    }

    #[test]
    fn instructions_recursion_and_output_are_bounded() {
        let cases = [
            ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "too many instructions"),
            ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "recursion"),
            ("{% set x = 'x' * 100000 %}{% for a in range(9999) %}{{ x }}{% endfor %}", "more than 1024 KiB"),
            ("{{ 'x' * 10**7 }}", "more than 1024 KiB"),
            ("{% set y %}{% for a in range(9999) %}{{ 'x' * 10**5 }}{% endfor %}{% endset %}", "more than 1024 KiB"),
            ("{{ (['a' * 10**6] * 10**6) | tojson }}", "holds more than"),
            ("{{ (['a' * 10**6] * 10**6) | join('b') }}", "holds more than"),
            ("{{ ','.join(['a' * 10**6] * 10**6) }}", "holds more than"),
            ("{{ ('a' * 10**5).replace('a', 'b' * 10**5) }}", "larger than 128 MiB"),
            ("{{ 'a'.ljust(10**12) }}", "larger than 128 MiB"),
            ("{{ ('a\n' * 10**5) | indent(10**5) }}", "holds more than"),
            // Two values that are nested as deep as the loop is long, compared.
            (
                "{% set n = namespace(x=[], y=[]) %}{% for i in range(99999) %}{% set n.x = [n.x] %}{% set n.y = [n.y] %}{% endfor %}\
                 {{ n.x == n.y }}",
                "holds more than",
            ),
            // The engine divides by the number of arguments.
            ("{% for i in [1] %}{{ loop.cycle() }}{% endfor %}", "the template engine failed internally"),
        ];
        for (source, expected) in cases {
            let error = render_within(source, DEADLINE).unwrap_err();
            assert!(error.contains(expected), "{source}: {error}");
        }
    }
}
