//! A trace of some steps of a run, for Perfetto or chrome://tracing: when the host queued work and when the device ran it, on one clock.
//!
//! Device operations come from events around each launch, host spans from the run loop. Tracing adds no waits within the steps, so a pause of the
//! device in the trace is one of the run. The first traced step begins with an idle device.
//! Trade-off: launches take a little longer while they are traced, and Burn's own small operations on CUDA are missing from the trace: the device
//! looks idle while they run.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Instant;

use firebrick_kernels::{COLLECTIVE, Kernels, TracedOperation};
use serde_json::{Value, json};

use super::Run;
use crate::error::RunError;

/// The steps to trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceSteps {
    /// The first, from 1.
    pub first: u64,
    /// The last.
    pub last: u64,
}

impl FromStr for TraceSteps {
    type Err = String;

    /// Parses "5-8", or "5" alone.
    fn from_str(text: &str) -> Result<Self, String> {
        let (first, last) = text.split_once('-').unwrap_or((text, text));
        match (first.trim().parse(), last.trim().parse()) {
            (Ok(first), Ok(last)) if 1 <= first && first <= last => Ok(Self { first, last }),
            _ => Err(format!("'{text}' is no range of steps such as 5-8, counted from 1")),
        }
    }
}

/// Spans of the host's work while it was traced.
#[derive(Debug)]
pub(super) struct HostSpans {
    began: Instant,
    spans: Vec<HostSpan>,
}

#[derive(Debug)]
struct HostSpan {
    name: &'static str,
    step: u64,
    start_ms: f64,
    ms: f64,
}

impl HostSpans {
    /// Creates an empty list; the trace begins now.
    pub(super) fn start() -> Self {
        Self { began: Instant::now(), spans: Vec::new() }
    }

    /// Adds the host's work for `step` since `started`.
    pub(super) fn add(&mut self, name: &'static str, step: u64, started: Instant) {
        let start_ms = 1e3 * started.saturating_duration_since(self.began).as_secs_f64();
        self.spans.push(HostSpan { name, step, start_ms, ms: 1e3 * started.elapsed().as_secs_f64() });
    }
}

pub(super) struct RunTrace {
    pub(super) steps: TraceSteps,
    pub(super) host: HostSpans,
    /// In the order of their launches; empty if the backend cannot trace.
    pub(super) device: Vec<TracedOperation>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct DeviceTime {
    /// From the first operation to the end of the last.
    ms: f64,
    busy_ms: f64,
    longest_pause_ms: f64,
}

impl RunTrace {
    /// Returns the events of a rank as a list in Chrome's trace event format, with times in microseconds. A rank is a process there.
    pub(super) fn events(&self, rank: usize) -> Vec<u8> {
        let name = |what: &str, id: u32, name: &str| json!({"ph": "M", "name": what, "pid": rank, "tid": id, "args": {"name": name}});
        let event = |thread: u32, name: &str, start_ms: f64, ms: f64, args: Value| json!({"ph": "X", "name": name, "pid": rank, "tid": thread, "ts": 1e3 * start_ms, "dur": 1e3 * ms, "args": args});
        let host =
            self.host.spans.iter().map(|span| event(1, span.name, span.start_ms, span.ms, json!({"step": span.step})));
        let device = self.device.iter().map(|operation| {
            let args = json!({"flops": operation.flops, "bytes": operation.bytes, "gemm": operation.gemm});
            let thread = if operation.name == COLLECTIVE { 3 } else { 2 };
            event(thread, operation.name, operation.start_ms, operation.milliseconds, args)
        });
        let process = format!("rank {rank}");
        let mut names =
            vec![name("process_name", 0, &process), name("thread_name", 1, "host"), name("thread_name", 2, "device")];
        if self.device.iter().any(|operation| operation.name == COLLECTIVE) {
            names.push(name("thread_name", 3, "between devices"));
        }
        let events: Vec<Value> = names.into_iter().chain(host).chain(device).collect();
        serde_json::to_vec(&events).expect("events of plain fields are expressible as JSON")
    }

    fn device_time(&self) -> Option<DeviceTime> {
        // Operations between devices overlap others.
        let mut operations = self.device.iter().filter(|operation| operation.name != COLLECTIVE).peekable();
        let first = operations.peek()?.start_ms;
        let (mut end, mut busy_ms, mut longest_pause_ms) = (first, 0.0, 0.0f64);
        for operation in operations {
            longest_pause_ms = longest_pause_ms.max(operation.start_ms - end);
            end = end.max(operation.start_ms + operation.milliseconds);
            busy_ms += operation.milliseconds;
        }
        Some(DeviceTime { ms: end - first, busy_ms, longest_pause_ms })
    }

    fn host_ms(&self, name: &str) -> f64 {
        self.host.spans.iter().filter(|span| span.name == name).map(|span| span.ms).sum()
    }
}

impl fmt::Display for RunTrace {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "trace of steps {} to {}: ", self.steps.first, self.steps.last)?;
        match self.device_time() {
            Some(DeviceTime { ms, busy_ms, longest_pause_ms }) => write!(
                formatter,
                "the device ran operations for {busy_ms:.1} of {ms:.1} ms ({:.1} %), its longest pause was {longest_pause_ms:.2} ms; ",
                100.0 * busy_ms / ms
            )?,
            None => write!(formatter, "this backend cannot trace its device; ")?,
        }
        write!(
            formatter,
            "the host queued steps for {:.1} ms, waited for data for {:.1} ms and for numbers for {:.1} ms",
            self.host_ms(QUEUE),
            self.host_ms(DATA),
            self.host_ms(NUMBERS)
        )
    }
}

/// Joins the events of all ranks to the text of a trace file.
pub(super) fn of_all_ranks(events: &[Arc<[u8]>]) -> String {
    let list = |events: &Arc<[u8]>| String::from_utf8_lossy(events).trim_matches(['[', ']']).to_owned();
    let lists: Vec<String> = events.iter().map(list).collect();
    format!("{{\"displayTimeUnit\":\"ms\",\"traceEvents\":[{}]}}", lists.join(",\n"))
}

/// The host waits for the loader.
pub(super) const DATA: &str = "wait for data";
/// The host queues a step.
pub(super) const QUEUE: &str = "queue step";
/// The host agrees with the other ranks on a step, which waits for the slowest of them.
pub(super) const AGREE: &str = "wait for ranks";
/// The host copies what is saved, and waits for the checkpoint before.
pub(super) const SAVE: &str = "save";
/// The host waits for the numbers of the preceding step.
pub(super) const NUMBERS: &str = "wait for numbers";

impl<B: Kernels> Run<B> {
    /// Traces steps and writes the trace. The steps run like all others; the host waits for the device before the first and after the last.
    pub(super) fn advance_traced(&mut self, steps: TraceSteps) -> Result<bool, RunError> {
        let device = self.trainer.model.device().clone();
        let last = steps.last.min(self.prepared.plan.steps.value);
        // The clocks of all ranks begin together.
        self.trainer.ranks.barrier()?;
        let (is_stopped, operations) = B::trace(&device, || {
            self.spans = Some(HostSpans::start());
            while self.state.step < last && !self.is_over() {
                if self.advance()? {
                    return Ok(true);
                }
            }
            Ok::<_, RunError>(false)
        });
        let is_stopped = is_stopped?;
        let host = self.spans.take().unwrap_or_else(HostSpans::start);
        let trace = RunTrace { steps: TraceSteps { last, ..steps }, host, device: operations };
        let ranks = &self.trainer.ranks;
        let all = ranks.all_gather("trace", trace.events(ranks.rank()))?;
        if ranks.is_main() {
            self.folder.write("trace.json", &of_all_ranks(&all))?;
        }
        self.console.print(&format!("{trace}; {}", self.folder.path().join("trace.json").display()));
        Ok(is_stopped)
    }

    /// Adds the host's work since `started` to the trace, if there is one.
    pub(super) fn note(&mut self, name: &'static str, step: u64, started: Instant) {
        if let Some(spans) = &mut self.spans {
            spans.add(name, step, started);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn operation(name: &'static str, start_ms: f64, milliseconds: f64) -> TracedOperation {
        TracedOperation { name, start_ms, milliseconds, flops: 0.0, bytes: 8.0, gemm: None }
    }

    fn trace() -> RunTrace {
        let mut host = HostSpans::start();
        host.add(QUEUE, 5, host.began);
        let device = vec![operation("a", 1.0, 2.0), operation("b", 3.5, 1.0), operation("a", 4.5, 0.5)];
        RunTrace { steps: TraceSteps { first: 5, last: 6 }, host, device }
    }

    #[test]
    fn ranges_of_steps_are_read_and_others_refused() {
        assert_eq!("5-8".parse(), Ok(TraceSteps { first: 5, last: 8 }));
        assert_eq!("7".parse(), Ok(TraceSteps { first: 7, last: 7 }));
        for wrong in ["", "0-3", "8-5", "a-b", "3-"] {
            assert!(wrong.parse::<TraceSteps>().unwrap_err().contains("such as 5-8"), "{wrong}");
        }
    }

    #[test]
    fn busy_time_and_the_longest_pause_are_those_of_the_device() {
        let expected = DeviceTime { ms: 4.0, busy_ms: 3.5, longest_pause_ms: 0.5 };
        assert_eq!(trace().device_time(), Some(expected));
        let text = trace().to_string();
        assert!(text.contains("steps 5 to 6") && text.contains("3.5 of 4.0 ms (87.5 %)"), "{text}");
        let without = RunTrace { device: Vec::new(), ..trace() };
        assert!(without.to_string().contains("cannot trace"), "{without}");
    }

    #[test]
    fn the_file_has_host_and_device_in_microseconds() {
        let file: Value = serde_json::from_str(&of_all_ranks(&[trace().events(0).into()])).unwrap();
        let events = file["traceEvents"].as_array().unwrap();
        let of = |name: &str| events.iter().find(|event| event["name"] == name).unwrap();
        assert_eq!(
            (of("b")["ts"].as_f64(), of("b")["dur"].as_f64(), of("b")["tid"].as_u64()),
            (Some(3500.0), Some(1000.0), Some(2))
        );
        assert_eq!((of(QUEUE)["tid"].as_u64(), of(QUEUE)["args"]["step"].as_u64()), (Some(1), Some(5)));
    }

    #[test]
    fn ranks_are_processes_of_one_file_and_what_runs_between_devices_is_a_thread_of_its_own() {
        let mut device = trace().device;
        device.push(operation(COLLECTIVE, 1.0, 9.0));
        let second = RunTrace { device, ..trace() };
        assert_eq!(second.device_time(), trace().device_time());
        let all = [trace().events(0).into(), second.events(1).into()];
        let file: Value = serde_json::from_str(&of_all_ranks(&all)).unwrap();
        let events = file["traceEvents"].as_array().unwrap();
        let names: Vec<&str> = events.iter().filter_map(|event| event["args"]["name"].as_str()).collect();
        assert_eq!(names, ["rank 0", "host", "device", "rank 1", "host", "device", "between devices"]);
        let collective = events.iter().find(|event| event["name"] == COLLECTIVE).unwrap();
        assert_eq!((collective["pid"].as_u64(), collective["tid"].as_u64()), (Some(1), Some(3)));
    }
}
