//! Runs one case and compares all of its results.

use firebrick_cuda::cudnn::{AttentionShape, BackwardPointers, Element, ForwardPointers, Plan};
use firebrick_cuda::{CudaError, Cudnn, DeviceBuffer};
use firebrick_precision::difference::{is_within, largest_difference, relative_difference};

use crate::cases::Case;
use crate::device::Device;
use crate::reference::{Problem, to_bits, value_of};

/// A NaN in the 16-bit types, and half of one in f32, so that memory that was not written shows.
const UNTOUCHED: u16 = 0xFFFF;
/// Calls that are compared where sums have a fixed order.
const REPEATS: usize = 10;

/// Runs the case and reports its differences. Waits for the device after each pass, so that errors belong to it.
pub(crate) fn check(device: &Device, cudnn: &Cudnn, case: &Case) -> Result<String, String> {
    let (shape, say) = (&case.shape, |error: CudaError| error.to_string());
    let (forward, backward) = (cudnn.forward_plan(shape).map_err(say)?, cudnn.backward_plan(shape).map_err(say)?);
    let problem = Problem::random(case);
    let expected = problem.solve();
    let workspace = forward.workspace_bytes().max(backward.workspace_bytes());
    let buffers = Buffers::new(device, shape, &problem, workspace);
    let pointers = buffers.pointers(problem.scale);
    // SAFETY: the buffers have the shape's sizes and outlive the wait after the call.
    let submitted = unsafe { cudnn.forward(&device.stream, &forward, &pointers.forward) };
    submitted.and_then(|()| device.stream.synchronize()).map_err(|error| format!("forward: {error}"))?;
    // SAFETY: as above, with the results of the forward pass.
    let submitted = unsafe { cudnn.backward(&device.stream, &backward, &pointers) };
    submitted.and_then(|()| device.stream.synchronize()).map_err(|error| format!("backward: {error}"))?;

    let rows = |name: &str, buffer: &DeviceBuffer| {
        let bits: Vec<u16> = device.download(buffer);
        let (inside, outside) = bits.split_at(bits.len() / shape.tokens() * problem.tokens());
        if outside.iter().any(|&bits| bits != UNTOUCHED) {
            return Err(format!("{name}: a row after the last document was written"));
        }
        Ok(inside.iter().map(|&bits| f64::from(value_of(shape.element, bits))).collect::<Vec<_>>())
    };
    let statistics = by_token(shape, &device.download(&buffers.statistics), problem.tokens());
    let [d_query, d_key, d_value] = &buffers.gradients;
    // Probabilities are rounded to 8 or 11 bits of mantissa between the two matmuls.
    let tolerance = if shape.element == Element::Bf16 { 1.2e-2 } else { 2e-3 };
    let report = compare(&[
        ("o", &rows("o", &buffers.output)?, &expected.output, tolerance),
        ("lse", &statistics, &expected.statistics, 1e-4),
        ("dq", &rows("dq", d_query)?, &expected.query_gradient, tolerance),
        ("dk", &rows("dk", d_key)?, &expected.key_gradient, tolerance),
        ("dv", &rows("dv", d_value)?, &expected.value_gradient, tolerance),
    ])?;
    if shape.in_order {
        repeat(device, cudnn, &backward, &pointers, &buffers.gradients)?;
    }
    Ok(report)
}

/// Fails if gradients that were computed differ by a bit when they are computed again.
fn repeat(
    device: &Device,
    cudnn: &Cudnn,
    plan: &Plan,
    pointers: &BackwardPointers,
    gradients: &[DeviceBuffer; 3],
) -> Result<(), String> {
    let bits = || gradients.each_ref().map(|gradient| device.download::<u16>(gradient));
    let first = bits();
    for call in 2..=REPEATS {
        // SAFETY: the pointers are those of an earlier call, to buffers that outlive the wait after this one.
        let submitted = unsafe { cudnn.backward(&device.stream, plan, pointers) };
        submitted.and_then(|()| device.stream.synchronize()).map_err(|error| format!("backward: {error}"))?;
        if bits() != first {
            return Err(format!("backward: the gradients of call {call} are not those of the first"));
        }
    }
    Ok(())
}

/// The device memory of a case. Everything but the values of its documents is NaN.
struct Buffers {
    query: DeviceBuffer,
    key: DeviceBuffer,
    value: DeviceBuffer,
    output_gradient: DeviceBuffer,
    output: DeviceBuffer,
    statistics: DeviceBuffer,
    /// Of queries, keys and values.
    gradients: [DeviceBuffer; 3],
    index: DeviceBuffer,
    workspace: DeviceBuffer,
}

impl Buffers {
    fn new(device: &Device, shape: &AttentionShape, problem: &Problem, workspace: usize) -> Self {
        let tokens = shape.tokens();
        let [queries, keys] = [shape.query_heads, shape.key_value_heads].map(|heads| tokens * heads * shape.head_dim);
        let filled = |mut bits: Vec<u16>, count: usize| {
            bits.resize(count, UNTOUCHED);
            device.upload(&bits)
        };
        let empty = |count| filled(Vec::new(), count);
        let input =
            |values: &[f32], count| filled(values.iter().map(|&value| to_bits(shape.element, value)).collect(), count);
        let index = if shape.is_packed() { packed_index(shape, &problem.lengths) } else { vec![0] };
        Self {
            query: input(&problem.query, queries),
            key: input(&problem.key, keys),
            value: input(&problem.value, keys),
            output_gradient: input(&problem.output_gradient, queries),
            output: empty(queries),
            statistics: empty(2 * tokens * shape.query_heads),
            gradients: [queries, keys, keys].map(empty),
            index: device.upload(&index),
            workspace: empty(workspace.max(256).div_ceil(2)),
        }
    }

    fn pointers(&self, scale: f32) -> BackwardPointers {
        let [query_gradient, key_gradient, value_gradient] = self.gradients.each_ref().map(DeviceBuffer::address);
        let forward = ForwardPointers {
            query: self.query.address(),
            key: self.key.address(),
            value: self.value.address(),
            output: self.output.address(),
            statistics: self.statistics.address(),
            index: self.index.address(),
            workspace: self.workspace.address(),
            scale,
        };
        let output_gradient = self.output_gradient.address();
        BackwardPointers { forward, output_gradient, query_gradient, key_gradient, value_gradient }
    }
}

/// Builds the index of documents of these lengths; those that are missing are empty and at the end.
fn packed_index(shape: &AttentionShape, lengths: &[usize]) -> Vec<i32> {
    const ALIGNMENT: usize = 4;
    let mut index: Vec<i32> = lengths.iter().map(|&length| length as i32).collect();
    index.resize(shape.documents().next_multiple_of(ALIGNMENT), 0);
    for stride in shape.index_strides() {
        let starts = (0..=shape.documents()).map(|document| lengths.iter().take(document).sum::<usize>());
        index.extend(starts.map(|start| (start * stride) as i32));
        index.resize(index.len().next_multiple_of(ALIGNMENT), 0);
    }
    assert_eq!(index.len(), shape.packed_index_len());
    index
}

/// Reorders statistics to `[token, head]`.
fn by_token(shape: &AttentionShape, statistics: &[f32], tokens: usize) -> Vec<f64> {
    let heads = shape.query_heads;
    let length = shape.longest();
    let at = |token: usize, head: usize| match shape.is_packed() {
        true => token * heads + head,
        false => (token / length * heads + head) * length + token % length,
    };
    (0..tokens * heads).map(|index| f64::from(statistics[at(index / heads, index % heads)])).collect()
}

/// Compares lists, each with a name, what is expected, and the allowed relative difference.
fn compare(lists: &[(&str, &[f64], &[f64], f64)]) -> Result<String, String> {
    let (mut words, mut bad) = (Vec::new(), false);
    for &(name, found, expected, tolerance) in lists {
        let largest = expected.iter().fold(0.0_f64, |largest, value| largest.max(value.abs()));
        // If all are zero, like the gradients of a document of one token, rounding is measured against 1 instead.
        let (smallest, largest) = if largest < 1e-6 { ((expected.len() as f64).sqrt(), 1.0) } else { (0.0, largest) };
        let relative = relative_difference(found, expected, smallest);
        let worst = largest_difference(found, expected) / largest;
        let good = is_within(relative, tolerance) && is_within(worst, 5.0 * tolerance);
        bad |= !good;
        words.push(format!("{name} {relative:.1e} (worst {worst:.1e}){}", if good { "" } else { " (!)" }));
    }
    let words = words.join(", ");
    if bad { Err(words) } else { Ok(words) }
}
