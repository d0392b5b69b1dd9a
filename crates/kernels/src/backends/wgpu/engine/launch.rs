//! Launches: recorded into one pass until it is submitted.
//!
//! wgpu translates a pass for the driver when it is submitted, which takes about as long as small launches run. So a submission holds work that is
//! expected to take [`SUBMIT_SECONDS`], and the first one of a section less: the device begins early, and has work while more is translated. Drivers also
//! end what runs for seconds without a break. The expectation is learned: each submission's time corrects it.
//! Bind groups are kept by program and buffers, since tensors of a step have the memory of the step before.

use std::cell::Cell;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use super::Engine;
use super::program::{Kernel, PARAMETER_BYTES, Program};
use super::tensor::Matrix;
use super::trace::{Cost, Span};

/// Expected time of the work of one submission.
const SUBMIT_SECONDS: f64 = 0.005;
/// Expected time of the first submission of a section.
const FIRST_SECONDS: f64 = 0.001;
/// Launches of one submission at most.
const MAX_LAUNCHES: usize = 2000;
/// Workgroups along one axis that every adapter allows.
const MAX_WORKGROUPS: u32 = 65_535;
/// Bind groups after which all are dropped.
const MAX_GROUPS: usize = 1 << 15;

/// An operand of a launch, in the order of the template's bindings.
pub(crate) enum Operand<'a> {
    Read(&'a Matrix),
    Write(&'a Matrix),
}

/// A bind group's program and buffers.
pub(super) type GroupKey = (u32, Vec<usize>);

/// Work that is recorded and not yet submitted.
pub(super) struct Recording {
    encoder: wgpu::CommandEncoder,
    pass: Option<wgpu::ComputePass<'static>>,
    launches: usize,
    /// Expected time of the launches.
    seconds: f64,
    /// What is expected for each second that is assumed.
    factor: f64,
    /// Name of the last launch.
    last: &'static str,
}

/// How long work is expected to take.
pub(super) struct Pace {
    learned: Arc<Mutex<Learned>>,
    submissions: Cell<usize>,
}

/// What finished submissions have shown.
struct Learned {
    /// Seconds per second that [`assumed_seconds`] assumes.
    factor: f64,
    /// When the last one was done.
    done: Option<Instant>,
}

impl Default for Pace {
    fn default() -> Self {
        Self { learned: Arc::new(Mutex::new(Learned { factor: 1.0, done: None })), submissions: Cell::new(0) }
    }
}

impl Pace {
    fn factor(&self) -> f64 {
        self.learned.lock().unwrap_or_else(PoisonError::into_inner).factor
    }

    /// Learns from the time of a submission that was assumed to take so long. It began when the one before was done.
    fn learn(&self, queue: &wgpu::Queue, assumed: f64) {
        let (learned, submitted) = (self.learned.clone(), Instant::now());
        queue.on_submitted_work_done(move || {
            let mut learned = learned.lock().unwrap_or_else(PoisonError::into_inner);
            let began = learned.done.map_or(submitted, |done| done.max(submitted));
            let measured = began.elapsed().as_secs_f64() / assumed;
            learned.factor = (0.5 * (learned.factor + measured)).clamp(1e-3, 1e3);
            learned.done = Some(Instant::now());
        });
    }
}

/// Returns workgroups for `count` tasks, which a kernel numbers `workgroup.x + workgroup.y * 65535`.
pub(crate) fn in_a_row(count: usize) -> [u32; 3] {
    let count = u32::try_from(count.max(1)).expect("fewer workgroups than 2^32");
    [count.min(MAX_WORKGROUPS), count.div_ceil(MAX_WORKGROUPS), 1]
}

impl Engine {
    /// Records a launch. `parameters` are the words of the template's `P`. An operand that is read and shares its memory with one that is written
    /// is allowed where the kernel reads each value before it writes it.
    pub(crate) fn launch(
        &self,
        kernel: &Kernel,
        operands: &[Operand<'_>],
        parameters: &[u32],
        workgroups: [u32; 3],
        cost: Cost,
    ) {
        debug_assert!(self.is_in_section(), "{} runs in a section", kernel.name);
        if workgroups.contains(&0) {
            return;
        }
        let buffers: Vec<_> = operands.iter().map(|operand| self.bound(operand)).collect();
        let program = self.programs.get(self.gpu, kernel, are_aliased(&buffers));
        assert_eq!(program.operands, operands.len(), "{}: operands of the launch and of its template", kernel.name);
        let writes = operands.iter().map(|operand| matches!(operand, Operand::Write(_)));
        debug_assert!(
            writes.zip(&program.only_read).all(|(writes, only_read)| !(writes && *only_read)),
            "{}: an operand that the template only reads",
            kernel.name
        );
        let group = self.group(&program, &buffers);
        let mut recorded = self.recording.borrow_mut();
        let recording = recorded.get_or_insert_with(|| self.begin_recording());
        let is_timed = self.trace.is_recording();
        if is_timed {
            recording.timed_pass(self, kernel.name, cost);
        }
        let pass = recording.pass.as_mut().expect("a recording has an open pass");
        pass.set_pipeline(&program.pipeline);
        pass.set_bind_group(0, &group, &[]);
        let mut bytes = [0_u8; PARAMETER_BYTES as usize];
        for (word, place) in parameters.iter().zip(bytes.as_chunks_mut::<4>().0) {
            *place = word.to_ne_bytes();
        }
        debug_assert!(4 * parameters.len() <= bytes.len(), "{}: parameters", kernel.name);
        pass.set_immediates(0, &bytes);
        let [x, y, z] = workgroups;
        pass.dispatch_workgroups(x, y, z);
        if is_timed {
            recording.new_pass();
        }
        recording.launches += 1;
        // As on a device of 1 TFLOP/s and 100 GB/s.
        recording.seconds += recording.factor * (2e-6 + cost.flops / 1e12 + cost.bytes / 1e11);
        recording.last = kernel.name;
        let is_first = self.pace.submissions.get() == 0;
        let most = if is_first { FIRST_SECONDS } else { SUBMIT_SECONDS };
        let is_full = recording.seconds >= most || recording.launches >= MAX_LAUNCHES;
        if let Some(full) = recorded.take_if(|_| is_full) {
            self.submit_recording(full);
        }
    }

    /// Submits what is recorded, at the end of a section.
    pub(super) fn submit(&self) {
        self.submit_so_far();
        self.pace.submissions.set(0);
    }

    pub(super) fn submit_so_far(&self) {
        let recording = self.recording.borrow_mut().take();
        if let Some(recording) = recording {
            self.submit_recording(recording);
        }
    }

    fn submit_recording(&self, recording: Recording) {
        let Recording { encoder, pass, seconds, factor, last, .. } = recording;
        drop(pass);
        self.gpu.scoped(last, || self.gpu.queue.submit([encoder.finish()]));
        self.gpu.check(last);
        self.pace.learn(&self.gpu.queue, seconds / factor);
        self.pace.submissions.set(self.pace.submissions.get() + 1);
        // Callbacks of finished work run here.
        let _ = self.gpu.device.poll(wgpu::PollType::Poll);
    }

    fn begin_recording(&self) -> Recording {
        let mut encoder = self.gpu.device.create_command_encoder(&Default::default());
        let pass = encoder.begin_compute_pass(&Default::default()).forget_lifetime();
        Recording {
            encoder,
            pass: Some(pass),
            launches: 0,
            seconds: 0.0,
            factor: self.pace.factor(),
            last: "recording",
        }
    }

    fn bound(&self, operand: &Operand<'_>) -> Bound {
        let (matrix, is_written) = match operand {
            Operand::Read(matrix) => (matrix, false),
            Operand::Write(matrix) => (matrix, true),
        };
        let (buffer, number) = self.buffer(&matrix.tensor.handle);
        self.hold(&matrix.tensor.handle);
        Bound { buffer, number, is_written }
    }

    fn group(&self, program: &Program, buffers: &[Bound]) -> wgpu::BindGroup {
        let numbers: Option<Vec<usize>> = buffers.iter().map(|bound| bound.number).collect();
        let Some(numbers) = numbers else { return self.new_group(program, buffers) };
        let key = (program.number, numbers);
        if let Some(known) = self.groups.borrow().get(&key) {
            return known.clone();
        }
        let group = self.gpu.scoped(program.name, || self.new_group(program, buffers));
        let mut groups = self.groups.borrow_mut();
        if groups.len() >= MAX_GROUPS {
            groups.clear();
        }
        groups.insert(key, group.clone());
        group
    }

    fn new_group(&self, program: &Program, buffers: &[Bound]) -> wgpu::BindGroup {
        let whole = |(binding, bound)| group_entry(binding, bound);
        let entries: Vec<_> = buffers.iter().enumerate().map(whole).collect();
        self.gpu.device.create_bind_group(&wgpu::BindGroupDescriptor {
            label: None,
            layout: &program.layout,
            entries: &entries,
        })
    }
}

fn group_entry(binding: usize, bound: &Bound) -> wgpu::BindGroupEntry<'_> {
    wgpu::BindGroupEntry { binding: binding as u32, resource: bound.buffer.as_entire_binding() }
}

struct Bound {
    buffer: wgpu::Buffer,
    number: Option<usize>,
    is_written: bool,
}

/// Returns whether a buffer is both read and written: one kind of access is all that a launch may have to it.
fn are_aliased(buffers: &[Bound]) -> bool {
    let written = buffers.iter().filter(|bound| bound.is_written);
    written
        .into_iter()
        .any(|written| buffers.iter().filter(|other| !other.is_written).any(|other| other.buffer == written.buffer))
}

impl Recording {
    /// Replaces the open pass by one between two timestamps.
    fn timed_pass(&mut self, engine: &Engine, name: &'static str, cost: Cost) {
        self.pass = None;
        let Some(writes) = engine.trace.next(engine.gpu, Span { name, cost }) else { return self.new_pass() };
        let descriptor = wgpu::ComputePassDescriptor { label: None, timestamp_writes: Some(writes.as_writes()) };
        self.pass = Some(self.encoder.begin_compute_pass(&descriptor).forget_lifetime());
    }

    fn new_pass(&mut self) {
        self.pass = None;
        self.pass = Some(self.encoder.begin_compute_pass(&Default::default()).forget_lifetime());
    }
}
