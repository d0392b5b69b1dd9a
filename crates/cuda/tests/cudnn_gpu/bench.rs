//! Times attention calls of training size.

use firebrick_cuda::cudnn::{AttentionShape, Layout};
use firebrick_cuda::{CudaError, Cudnn, Event};

use crate::buffers::Buffers;
use crate::cases::{Columns, shape};
use crate::device::Gpu;
use crate::reference::{Half, Problem, Random};

/// Times calls of training size and prints TFLOP/s, counting the causal half of the matmuls.
pub(crate) fn bench(gpu: &Gpu, cudnn: &Cudnn) {
    let even = |documents: usize, length: usize| (vec![length; documents], Layout::Uniform { documents, length });
    let ragged = |documents: usize, length: usize| {
        let layout = Layout::Packed { documents, longest: length, tokens: documents * length };
        (vec![length; documents], layout)
    };
    for (name, (lengths, layout), heads, deterministic) in [
        ("uniform 2 x 4096, 32/32 heads", even(2, 4096), (32, 32, 128), false),
        ("uniform 2 x 4096, 32/32 heads, deterministic", even(2, 4096), (32, 32, 128), true),
        ("uniform 2 x 4096, 32/8 heads", even(2, 4096), (32, 8, 128), false),
        ("uniform 8 x 1024, 16/8 heads", even(8, 1024), (16, 8, 128), false),
        ("packed 2 x 4096, 32/32 heads", ragged(2, 4096), (32, 32, 128), false),
        ("packed 2 x 4096, 32/8 heads", ragged(2, 4096), (32, 8, 128), false),
        ("packed 2 x 4096, 32/8 heads, deterministic", ragged(2, 4096), (32, 8, 128), true),
        ("packed 16 x 512, 32/8 heads", ragged(16, 512), (32, 8, 128), false),
    ] {
        let mut shape = shape(layout, heads, Columns::JoinedInputs);
        shape.deterministic = deterministic;
        match time(gpu, cudnn, &shape, &lengths) {
            Ok(report) => println!("BENCH {name}: {report}"),
            Err(error) => println!("BENCH {name}: {error}"),
        }
    }
}

fn time(gpu: &Gpu, cudnn: &Cudnn, shape: &AttentionShape, lengths: &[usize]) -> Result<String, CudaError> {
    let (forward, backward) = (cudnn.forward_plan(shape)?, cudnn.backward_plan(shape)?);
    let workspace = forward.workspace_bytes().max(backward.workspace_bytes());
    let problem = Problem::random(&mut Random::new("bench"), Half::Bf16, shape, lengths);
    let buffers = Buffers::new(gpu, shape, &problem, workspace)?;
    let pairs: usize = lengths.iter().map(|length| length * (length + 1) / 2).sum();
    let operations = 2.0 * 2.0 * (pairs * shape.query_heads * shape.head_dim) as f64;
    let mut words = Vec::new();
    for (name, flops, call) in [("forward", operations, true), ("backward", 2.5 * operations, false)] {
        let run = || {
            // SAFETY: the buffers have the shape's sizes and outlive the wait below.
            unsafe {
                if call {
                    cudnn.forward(&gpu.device.stream, &forward, &buffers.pointers.forward)
                } else {
                    cudnn.backward(&gpu.device.stream, &backward, &buffers.pointers)
                }
            }
        };
        let (start, end) = (Event::timed(gpu.device.stream.context())?, Event::timed(gpu.device.stream.context())?);
        let repeats = 30;
        (0..5).try_for_each(|_| run())?;
        gpu.device.stream.record(&start)?;
        (0..repeats).try_for_each(|_| run())?;
        gpu.device.stream.record(&end)?;
        end.synchronize()?;
        let milliseconds = f64::from(end.milliseconds_since(&start)?) / f64::from(repeats);
        let rate = flops / milliseconds / 1e9;
        words.push(format!("{name} {milliseconds:.3} ms, {rate:.0} TFLOP/s"));
    }
    let mebibytes = backward.workspace_bytes() >> 20;
    Ok(format!("{}; backward workspace {mebibytes} MiB", words.join("; ")))
}
