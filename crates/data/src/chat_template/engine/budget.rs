//! What one render may make: the length of a text, the nodes of a list, and all work together, in bytes.
//!
//! The engine counts instructions, but one instruction may copy any number of bytes; so every value that a template makes
//! passes here ([`made`], [`bounded`], the filters and methods), and pays for its size. A render stays on its thread, so
//! the account lies there. The limits grow with the conversation, whose size is only found where a limit is met. Gives up
//! charging for reading: what compares or searches long texts in a long loop pays when the loop begins ([`looped`]).

use std::cell::{Cell, RefCell};

use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind, Value};

use super::{MAX_ITEMS, MAX_TEXT_BYTES};

/// A text that a template makes out of little.
const TEXT_BYTES: usize = 64 << 10;
/// How much longer than the conversation a text that a template makes may be.
const TEXT_FACTOR: usize = 8;
/// Bytes that a render may make of little.
const WORK_BYTES: u64 = 128 << 20;
/// And for each byte of the conversation.
const WORK_FACTOR: u64 = 64;
/// Nodes of a value made out of little.
const NODES: usize = 300_000;
/// Depth of a value that a template makes; conversations are at most twice as deep, by the JSON parser's limit.
const MAX_DEPTH: usize = 400;
/// What a value is counted as beside its text.
const NODE_BYTES: usize = 32;
/// What a loop pays for each turn, as a part of the longest text that was made before it.
const LOOP_SHARE: usize = 8;

/// The account of the render that runs on this thread.
struct Account {
    text: Cell<usize>,
    nodes: Cell<usize>,
    left: Cell<u64>,
    longest: Cell<usize>,
    /// What the render was given; taken out when its size has been added to the limits.
    given: RefCell<Option<Value>>,
}

thread_local! {
    static ACCOUNT: Account = const {
        Account {
            text: Cell::new(TEXT_BYTES),
            nodes: Cell::new(NODES),
            left: Cell::new(WORK_BYTES),
            longest: Cell::new(0),
            given: RefCell::new(None),
        }
    };
}

/// Opens the account of a render of these variables.
pub(super) fn open(given: &Value) {
    ACCOUNT.with(|account| {
        account.text.set(TEXT_BYTES);
        account.nodes.set(NODES);
        account.left.set(WORK_BYTES);
        account.longest.set(0);
        account.given.replace(Some(given.clone()));
    });
}

/// Lets go of what the render was given.
pub(super) fn close() {
    ACCOUNT.with(|account| account.given.replace(None));
}

/// Pays for so many bytes of work.
#[inline]
pub(crate) fn spend(bytes: usize) -> Result<(), Error> {
    ACCOUNT.with(|account| match account.left.get().checked_sub(bytes as u64) {
        Some(left) => {
            account.left.set(left);
            Ok(())
        }
        None => grow().and_then(|()| spend(bytes)),
    })
}

/// Whether a text of so many bytes may be made; pays for it.
pub(crate) fn spend_text(bytes: usize) -> Result<(), Error> {
    ACCOUNT.with(|account| {
        while bytes > account.text.get() {
            grow()?;
        }
        account.longest.set(account.longest.get().max(bytes));
        Ok::<(), Error>(())
    })?;
    spend(bytes)
}

/// Adds the size of the conversation to the limits; an error if that was done already.
#[cold]
fn grow() -> Result<(), Error> {
    ACCOUNT.with(|account| {
        let Some(given) = account.given.take() else { return Err(too_large()) };
        let mut bytes = 0;
        measure(&given, &mut bytes, 0);
        account.text.set((TEXT_BYTES + bytes * TEXT_FACTOR).min(MAX_TEXT_BYTES));
        account.nodes.set(NODES + bytes);
        account.left.set(account.left.get() + bytes as u64 * WORK_FACTOR);
        Ok(())
    })
}

/// Bytes of a value that came from JSON: no cycle, no value twice.
fn measure(value: &Value, bytes: &mut usize, depth: usize) {
    *bytes += NODE_BYTES + value.as_str().map_or(0, str::len);
    if depth < MAX_DEPTH && matches!(value.kind(), ValueKind::Seq | ValueKind::Map) {
        for item in value.try_iter().into_iter().flatten() {
            measure(&item, bytes, depth + 1);
            if value.kind() == ValueKind::Map {
                measure(&value.get_item(&item).unwrap_or_default(), bytes, depth + 1);
            }
        }
    }
}

/// The error of a template that grows without bound.
pub(crate) fn too_large() -> Error {
    let message = "the template makes a text or a list of more than a chat can need: far longer than the conversation";
    Error::new(ErrorKind::InvalidOperation, message)
}

/// A value as it is kept: an iterable that is made anew each time it is read becomes a list, once.
fn settled(value: Value) -> Result<Value, Error> {
    if value.kind() != ValueKind::Iterable {
        return Ok(value);
    }
    let most = value.len().unwrap_or(MAX_ITEMS);
    check_items(value.len().unwrap_or(0))?;
    // Of an empty list many times over the engine would go on to look for an item.
    let items: Vec<Value> = if most == 0 { Vec::new() } else { value.try_iter()?.take(most).collect() };
    spend(items.len() * NODE_BYTES)?;
    Ok(Value::from(items))
}

/// Lets a value pass that is not too large: every `set` of a template.
pub(super) fn bounded(value: Value) -> Result<Value, Error> {
    match value.as_str() {
        Some(text) => spend_text(text.len()).map(|()| value),
        None => check_items(value.len().unwrap_or(0)).and_then(|()| settled(value)),
    }
}

/// Whether a list may have so many items.
fn check_items(items: usize) -> Result<(), Error> {
    while items > ACCOUNT.with(|account| account.nodes.get()) {
        grow()?;
    }
    Ok(())
}

/// [`bounded`], for an attribute of a namespace: no namespace, or it could hold itself.
pub(super) fn attribute(value: Value) -> Result<Value, Error> {
    if is_namespace(&value) { Err(nested()) } else { bounded(value) }
}

/// [`bounded`], for a value that the template made itself, which may be deep.
pub(super) fn made(value: Value) -> Result<Value, Error> {
    let value = bounded(value)?;
    if matches!(value.kind(), ValueKind::Seq | ValueKind::Map) {
        spend(size_of(&value)?.nodes * NODE_BYTES)?;
    }
    Ok(value)
}

/// How large a value is when it is written out: what is in it several times counts as often.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Size {
    /// Values.
    pub(crate) nodes: usize,
    /// Bytes of its texts.
    pub(crate) text: usize,
}

/// Measures a value. Errors: too many nodes, too deep, a namespace.
pub(crate) fn size_of(value: &Value) -> Result<Size, Error> {
    let mut size = Size::default();
    walk(value, &mut size, 0)?;
    Ok(size)
}

fn walk(value: &Value, size: &mut Size, depth: usize) -> Result<(), Error> {
    size.nodes += 1;
    check_items(size.nodes)?;
    if let Some(text) = value.as_str() {
        size.text = size.text.saturating_add(text.len());
        return Ok(());
    }
    let kind = value.kind();
    if !matches!(kind, ValueKind::Seq | ValueKind::Map | ValueKind::Iterable) {
        return Ok(());
    }
    if depth > MAX_DEPTH {
        return Err(Error::new(ErrorKind::InvalidOperation, "the template puts values into each other too deeply"));
    }
    if is_namespace(value) {
        return Err(nested());
    }
    if value.len() == Some(0) {
        return Ok(());
    }
    check_items(value.len().unwrap_or(0))?;
    for item in value.try_iter()? {
        walk(&item, size, depth + 1)?;
        if kind == ValueKind::Map {
            walk(&value.get_item(&item)?, size, depth + 1)?;
        }
    }
    Ok(())
}

fn is_namespace(value: &Value) -> bool {
    value.kind() == ValueKind::Map
        && value.as_object().is_some_and(|object| object.type_name().ends_with("::Namespace"))
}

fn nested() -> Error {
    Error::new(ErrorKind::InvalidOperation, "a namespace inside another value, which could hold itself")
}

/// What a loop runs over; pays for each of its turns.
pub(super) fn looped(value: Value) -> Result<Value, Error> {
    if let Some(turns) = value.len() {
        let longest = ACCOUNT.with(|account| account.longest.get());
        spend(turns.saturating_mul(longest / LOOP_SHARE))?;
    }
    Ok(value)
}
