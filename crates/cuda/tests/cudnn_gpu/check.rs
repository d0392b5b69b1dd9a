//! Runs one case and compares all of its results.

use std::sync::Arc;

use firebrick_cuda::cudnn::{AttentionShape, Element, Plan, StatisticsLayout};
use firebrick_cuda::{CudaError, Cudnn};

use crate::buffers::{Buffers, address};
use crate::cases::{Case, Clean};
use crate::device::{Gpu, NAN};
use crate::memory::Device;
use crate::reference::{Difference, Half, Problem, Random, Results};

/// A case on the device.
struct Run<'a> {
    gpu: Gpu,
    cudnn: Cudnn,
    case: &'a Case,
    problem: Problem,
    expected: Results,
    buffers: Buffers,
    forward: Arc<Plan>,
    backward: Arc<Plan>,
}

/// Runs the case and reports each pass that succeeded. Waits for the device after each pass, so that errors belong to it.
pub(crate) fn check(device: Device, case: &Case, tell: impl Fn(&str)) -> Result<(), String> {
    let run = Run::prepare(device, case).map_err(say)?;
    let mebibytes = |plan: &Plan| plan.workspace_bytes() as f64 / f64::from(1 << 20);
    tell(&format!("planned, workspace {:.2} and {:.2} MiB", mebibytes(&run.forward), mebibytes(&run.backward)));
    let report = run.forward().map_err(|report| format!("forward: {report}"))?;
    tell(&format!("forward ok: {report}"));
    let report = run.backward().map_err(|report| format!("backward: {report}"))?;
    tell(&format!("backward ok: {report}"));
    Ok(())
}

fn say(error: CudaError) -> String {
    error.to_string()
}

impl<'a> Run<'a> {
    fn prepare(device: Device, case: &'a Case) -> Result<Self, CudaError> {
        let shape = &case.shape;
        let cudnn = Cudnn::load(&device.context)?;
        let gpu = Gpu { device, fill: if case.clean == Clean::Everything { 0 } else { NAN } };
        let half = if shape.element == Element::Bf16 { Half::Bf16 } else { Half::F16 };
        let problem = Problem::random(&mut Random::new(&case.name), half, shape, &case.lengths);
        let expected = problem.solve();
        let (forward, backward) = (cudnn.forward_plan(shape)?, cudnn.backward_plan(shape)?);
        let workspace = forward.workspace_bytes().max(backward.workspace_bytes());
        let buffers = Buffers::new(&gpu, shape, &problem, workspace)?;
        Ok(Self { gpu, cudnn, case, problem, expected, buffers, forward, backward })
    }

    fn forward(&self) -> Result<String, String> {
        self.clean_workspace(&self.forward);
        // SAFETY: the buffers have the shape's sizes and outlive the wait below.
        unsafe {
            self.cudnn.forward(&self.gpu.device.stream, &self.forward, &self.buffers.pointers.forward).map_err(say)?
        };
        self.gpu.device.stream.synchronize().map_err(say)?;
        let (shape, heads) = (&self.case.shape, self.case.shape.query_heads);
        let output = self.rows("output", address(&self.buffers.output), shape.strides.output, heads)?;
        let statistics = by_token(shape, &self.gpu.device.download(&self.buffers.statistics), self.problem.tokens());
        let tolerance = self.tolerance();
        compare(&[
            ("o", &self.expected.output, &output, tolerance),
            ("lse", &self.expected.statistics, &statistics, 1e-4),
        ])
    }

    fn backward(&self) -> Result<String, String> {
        let found = self.gradients()?;
        let expected = [&self.expected.query_gradient, &self.expected.key_gradient, &self.expected.value_gradient];
        let lists: Vec<_> =
            (0..3).map(|at| (GRADIENTS[at], &expected[at][..], &found[at][..], self.tolerance())).collect();
        compare(&lists)
    }

    /// Computes the gradients of queries, keys and values.
    fn gradients(&self) -> Result<[Vec<f32>; 3], String> {
        self.clean_workspace(&self.backward);
        // SAFETY: the buffers have the shape's sizes and outlive the wait below.
        unsafe { self.cudnn.backward(&self.gpu.device.stream, &self.backward, &self.buffers.pointers).map_err(say)? };
        self.gpu.device.stream.synchronize().map_err(say)?;
        let (shape, pointers) = (&self.case.shape, &self.buffers.pointers);
        let (queries, keys, strides) = (shape.query_heads, shape.key_value_heads, shape.strides);
        Ok([
            self.rows(GRADIENTS[0], pointers.query_gradient, strides.query_gradient, queries)?,
            self.rows(GRADIENTS[1], pointers.key_gradient, strides.key_gradient, keys)?,
            self.rows(GRADIENTS[2], pointers.value_gradient, strides.value_gradient, keys)?,
        ])
    }

    fn clean_workspace(&self, plan: &Plan) {
        if self.case.clean == Clean::Workspace {
            self.gpu.device.write(address(&self.buffers.workspace), &vec![0_u8; plan.workspace_bytes()]);
        }
    }

    /// Downloads rows; fails if a row after the last document was written.
    fn rows(&self, name: &str, address: u64, stride: usize, heads: usize) -> Result<Vec<f32>, String> {
        let shape = &self.case.shape;
        let width = heads * shape.head_dim;
        let bits = self.gpu.download_rows(address, stride, width, shape.tokens());
        let (inside, outside) = bits.split_at(self.problem.tokens() * width);
        if let Some(at) = outside.iter().position(|&bits| bits != self.gpu.untouched()) {
            return Err(format!("{name}: row {} after the last document was written", at / width));
        }
        Ok(inside.iter().map(|&bits| self.problem.half.value_of(bits)).collect())
    }

    /// Returns the tolerance; the probabilities are rounded to 8 or 11 bits of mantissa between the two matmuls.
    fn tolerance(&self) -> f64 {
        if self.problem.half == Half::Bf16 { 1.2e-2 } else { 2e-3 }
    }
}

const GRADIENTS: [&str; 3] = ["dq", "dk", "dv"];

/// Reorders statistics to `[token, head]`.
fn by_token(shape: &AttentionShape, statistics: &[f32], tokens: usize) -> Vec<f32> {
    let heads = shape.query_heads;
    let length = shape.longest();
    let at = |token: usize, head: usize| match shape.statistics_layout() {
        StatisticsLayout::TokensHeads => token * heads + head,
        StatisticsLayout::DocumentsHeadsTokens => (token / length * heads + head) * length + token % length,
    };
    (0..tokens * heads).map(|index| statistics[at(index / heads, index % heads)]).collect()
}

/// Compares lists, each with a name and the allowed relative difference.
fn compare(lists: &[(&str, &[f32], &[f32], f64)]) -> Result<String, String> {
    let (mut words, mut bad) = (Vec::new(), false);
    for &(name, expected, found, tolerance) in lists {
        let difference = Difference::of(expected, found);
        let good = difference.relative <= tolerance && difference.worst <= 5.0 * tolerance;
        bad |= !good;
        words.push(format!("{name} {difference}{}", if good { "" } else { " (!)" }));
    }
    let words = words.join(", ");
    if bad { Err(words) } else { Ok(words) }
}
