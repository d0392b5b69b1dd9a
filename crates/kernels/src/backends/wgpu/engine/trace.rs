//! Time by operation, from timestamps before and after each launch.
//!
//! Trade-off: while a trace is recorded, each launch is a pass of its own, so the parts add up to a little more than an untraced pass. An adapter
//! without timestamps traces nothing; at most [`MAX_SPANS`] launches have times.

use std::cell::RefCell;

use super::gpu::Gpu;
use crate::TracedOperation;

/// Launches that a trace has times of.
const MAX_SPANS: u32 = 16_384;
/// Timestamps of one query set that every adapter allows.
const QUERIES: u32 = 4096;

/// The unavoidable work of an operation, to compare its time with.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Cost {
    pub flops: f64,
    pub bytes: f64,
}

/// A launch.
pub(super) struct Span {
    pub name: &'static str,
    pub cost: Cost,
}

#[derive(Default)]
pub(crate) struct Trace {
    recording: RefCell<Option<Recorded>>,
}

#[derive(Default)]
struct Recorded {
    spans: Vec<Span>,
    sets: Vec<wgpu::QuerySet>,
}

/// Places of the two timestamps of a pass.
pub(super) struct Timestamps {
    set: wgpu::QuerySet,
    first: u32,
}

impl Timestamps {
    pub(super) fn as_writes(&self) -> wgpu::ComputePassTimestampWrites<'_> {
        wgpu::ComputePassTimestampWrites {
            query_set: &self.set,
            beginning_of_pass_write_index: Some(self.first),
            end_of_pass_write_index: Some(self.first + 1),
        }
    }
}

impl Trace {
    pub(super) fn is_recording(&self) -> bool {
        self.recording.borrow().is_some()
    }

    /// Starts to record; drops earlier records.
    pub(in crate::backends::wgpu) fn start(&self) {
        *self.recording.borrow_mut() = Some(Recorded::default());
    }

    /// Records a launch; returns where its times go.
    pub(super) fn next(&self, gpu: &Gpu, span: Span) -> Option<Timestamps> {
        let mut recording = self.recording.borrow_mut();
        let recorded = recording.as_mut()?;
        let index = 2 * recorded.spans.len() as u32;
        if !gpu.features.contains(wgpu::Features::TIMESTAMP_QUERY) || index >= 2 * MAX_SPANS {
            return None;
        }
        recorded.spans.push(span);
        if index.is_multiple_of(QUERIES) {
            let descriptor = wgpu::QuerySetDescriptor { label: None, ty: wgpu::QueryType::Timestamp, count: QUERIES };
            recorded.sets.push(gpu.device.create_query_set(&descriptor));
        }
        Some(Timestamps { set: recorded.sets.last().expect("just added").clone(), first: index % QUERIES })
    }

    /// Ends recording and returns the launches in order. The caller has waited for the device.
    pub(in crate::backends::wgpu) fn finish(&self) -> Vec<TracedOperation> {
        let Some(Recorded { spans, sets }) = self.recording.borrow_mut().take() else { return Vec::new() };
        let gpu = Gpu::get();
        let written = 2 * spans.len() as u32;
        let of_set = |(index, set)| read(gpu, set, (written - QUERIES * index as u32).min(QUERIES));
        let times: Vec<u64> = sets.iter().enumerate().flat_map(of_set).collect();
        let period = f64::from(gpu.queue.get_timestamp_period()) * 1e-6;
        let first = times.first().copied().unwrap_or(0);
        let operation = |(span, times): (Span, &[u64; 2])| TracedOperation {
            name: span.name,
            start_ms: times[0].saturating_sub(first) as f64 * period,
            milliseconds: times[1].saturating_sub(times[0]) as f64 * period,
            flops: span.cost.flops,
            bytes: span.cost.bytes,
            gemm: None,
        };
        spans.into_iter().zip(times.as_chunks::<2>().0).map(operation).collect()
    }
}

/// Reads the first timestamps of a set. A driver may wait forever for one that was never written.
fn read(gpu: &Gpu, set: &wgpu::QuerySet, count: u32) -> Vec<u64> {
    let size = 8 * u64::from(count);
    let buffer = |usage| {
        gpu.device.create_buffer(&wgpu::BufferDescriptor { label: None, size, usage, mapped_at_creation: false })
    };
    let resolved = buffer(wgpu::BufferUsages::QUERY_RESOLVE | wgpu::BufferUsages::COPY_SRC);
    let host = buffer(wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST);
    let mut encoder = gpu.device.create_command_encoder(&Default::default());
    encoder.resolve_query_set(set, 0..count, &resolved, 0);
    encoder.copy_buffer_to_buffer(&resolved, 0, &host, 0, size);
    gpu.queue.submit([encoder.finish()]);
    let (sender, receiver) = std::sync::mpsc::channel();
    host.slice(..).map_async(wgpu::MapMode::Read, move |result| {
        let _ = sender.send(result.is_ok());
    });
    let _ = gpu.device.poll(wgpu::PollType::wait_indefinitely());
    if receiver.recv() != Ok(true) {
        return Vec::new();
    }
    let view = host.slice(..).get_mapped_range();
    view.as_chunks::<8>().0.iter().map(|bytes| u64::from_ne_bytes(*bytes)).collect()
}
