//! TFLOP/s of GEMMs as they occur in training: a model of 8 billion parameters, 32768 tokens per step.
//!
//! Trade-off: prints rates and does not assert them, since they depend on the card.

#![allow(clippy::print_stdout, reason = "a benchmark prints its results")]

use firebrick_cuda::ElementType::{Bf16, E4m3, F32};
use firebrick_cuda::{ElementType, Event, Matmul, Pointers, Scaling};

use crate::machine::Machine;

const TOKENS: usize = 32768;
const HIDDEN: usize = 4096;
const INNER: usize = 14336;

/// Name, shape, inputs, transposes, output, beta.
type Row = (&'static str, [usize; 3], ElementType, [bool; 2], ElementType, f32);

const ROWS: [Row; 13] = [
    ("up, forward", [TOKENS, INNER, HIDDEN], Bf16, [false, true], Bf16, 0.0),
    ("up, input gradient", [TOKENS, HIDDEN, INNER], Bf16, [false, false], Bf16, 0.0),
    ("up, weight gradient", [INNER, HIDDEN, TOKENS], Bf16, [true, false], Bf16, 0.0),
    ("up, weight gradient, added in f32", [INNER, HIDDEN, TOKENS], Bf16, [true, false], F32, 1.0),
    ("down, forward", [TOKENS, HIDDEN, INNER], Bf16, [false, true], Bf16, 0.0),
    ("query, forward", [TOKENS, HIDDEN, HIDDEN], Bf16, [false, true], Bf16, 0.0),
    ("key, forward", [TOKENS, 1024, HIDDEN], Bf16, [false, true], Bf16, 0.0),
    ("adapter, down to 16", [TOKENS, 16, HIDDEN], Bf16, [false, true], Bf16, 0.0),
    ("adapters, down to 48", [TOKENS, 48, HIDDEN], Bf16, [false, true], Bf16, 0.0),
    ("adapter, up from 16, added", [TOKENS, HIDDEN, 16], Bf16, [false, true], Bf16, 1.0),
    ("adapters' gradient, f32", [48, HIDDEN, TOKENS], Bf16, [true, false], F32, 1.0),
    ("adapter's gradient, f32", [INNER, 16, TOKENS], Bf16, [true, false], F32, 1.0),
    ("up, forward, 8 bits", [TOKENS, INNER, HIDDEN], E4m3, [false, true], Bf16, 0.0),
];

#[test]
fn speed() {
    if std::env::var_os("FIREBRICK_BENCH").is_none() {
        return;
    }
    let Some(machine) = Machine::find() else { return };
    println!("{:<36} {:>22} {:>10} {:>10}", "GEMM", "m x n x k", "ms", "TFLOP/s");
    for row in ROWS {
        let scaling = if row.2.is_fp8() { Scaling::Tensor } else { Scaling::None };
        if row.2.is_fp8() && machine.compute_capability() < (8, 9) {
            continue;
        }
        measure(&machine, row, scaling);
    }
}

fn measure(machine: &Machine, (name, shape, inputs, transposes, output, beta): Row, scaling: Scaling) {
    let matmul = Matmul { scaling, fast_accumulation: true, ..Matmul::dense(shape, inputs, transposes, output) };
    let [m, n, k] = shape;
    let a = machine.upload(&noise(m * k, inputs));
    let b = machine.upload(&noise(k * n, inputs));
    let d = machine.upload(&vec![0; m * n * output.bytes()]);
    let one = machine.upload(&1_f32.to_le_bytes());
    let mut pointers = Pointers::new(a.address, b.address, d.address, d.address);
    (pointers.a_scale, pointers.b_scale) = (one.address, one.address);

    let mean = milliseconds(machine, &matmul, beta, pointers);
    let rate = 2.0 * m as f64 * n as f64 * k as f64 / f64::from(mean) * 1e-9;
    let shape = format!("{m} x {n} x {k}");
    println!("{name:<36} {shape:>22} {mean:>10.3} {rate:>10.1}");
    assert!(mean > 0.0);
}

/// The mean time of one GEMM, over as many as take about a tenth of a second, after a few for warming up.
fn milliseconds(machine: &Machine, matmul: &Matmul, beta: f32, pointers: Pointers) -> f32 {
    let context = machine.stream.context();
    let (start, end) = (Event::timed(context).expect("event"), Event::timed(context).expect("event"));
    let mut repeats = 3;
    let mut mean = 0.0;
    for _ in 0..2 {
        machine.stream.record(&start).expect("record");
        for _ in 0..repeats {
            machine.run(matmul, 1.0, beta, pointers).unwrap_or_else(|error| panic!("{error}"));
        }
        machine.stream.record(&end).expect("record");
        end.synchronize().expect("GEMMs");
        mean = end.milliseconds_since(&start).expect("both are done") / repeats as f32;
        repeats = (100.0 / mean.max(0.005)).clamp(5.0, 2000.0) as u32;
    }
    mean
}

/// Random signs and mantissas with magnitudes of about 1: the power, and so the clock rate, depends on the operands.
fn noise(count: usize, element: ElementType) -> Vec<u8> {
    let mut state = 0x2545_F491_u32;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        (state >> 8) as u16
    };
    let block: Vec<u8> = (0..1 << 20)
        .flat_map(|_| match element {
            // Sign, one of two exponents, mantissa.
            E4m3 => vec![(next() & 0x8F) as u8 | 0x30],
            _ => ((next() & 0x80FF) | 0x3F00).to_le_bytes().to_vec(),
        })
        .collect();
    let bytes = count * element.bytes();
    let mut filled = block.repeat(bytes.div_ceil(block.len()));
    filled.truncate(bytes);
    filled
}
