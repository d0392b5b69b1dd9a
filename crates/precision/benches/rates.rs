//! The time of quantizing a matrix relative to reading it once (the sum of its magnitudes), and of NF4 straight to E4M3
//! relative to the way through an f32 copy.
//!
//! `cargo bench -p firebrick-precision`. Both sides of a ratio run in the same process, alternately, and the best of
//! several turns counts. Trade-off: one shape, the largest matrix of a layer of an 8B model at a quarter of its rows.

#![allow(clippy::print_stdout)]

use std::hint::black_box;
use std::time::{Duration, Instant};

use firebrick_precision::{ElementFormat, QuantFormat, Rounding, Scaling, WeightOrder, random_bits};

const SHAPE: [usize; 2] = [3584, 4096];
const TURNS: usize = 7;

/// The best time of each of two tasks, run in turn.
fn best(mut first: impl FnMut(), mut second: impl FnMut()) -> [Duration; 2] {
    let mut best = [Duration::MAX; 2];
    let time = |task: &mut dyn FnMut(), best: &mut Duration| {
        let start = Instant::now();
        task();
        *best = (*best).min(start.elapsed());
    };
    for _ in 0..TURNS {
        time(&mut first, &mut best[0]);
        time(&mut second, &mut best[1]);
    }
    best
}

fn report(name: &str, [task, reference]: [Duration; 2]) {
    let values = (SHAPE[0] * SHAPE[1]) as f64;
    let rate = values / task.as_secs_f64() / 1e6;
    println!("{name:<34} {:>6.2} x, {rate:>7.0} million values/s", task.as_secs_f64() / reference.as_secs_f64());
}

fn main() {
    let count = SHAPE[0] * SHAPE[1];
    let values: Vec<f32> = (0..count as u64).map(|index| random_bits(1, index) as i32 as f32 * 1e-11).collect();
    let read = || {
        black_box(values.iter().map(|value| value.abs()).sum::<f32>());
    };
    println!("relative to the sum of magnitudes on one core:");
    let cases = [
        ("e4m3 per row", ElementFormat::E4m3, Scaling::PER_ROW, Rounding::Nearest),
        ("e4m3 per row, stochastic", ElementFormat::E4m3, Scaling::PER_ROW, Rounding::Stochastic { seed: 1 }),
        ("e4m3 128x128", ElementFormat::E4m3, Scaling::BLOCK_128X128, Rounding::Nearest),
        ("mxfp8", ElementFormat::E4m3, Scaling::MX, Rounding::Nearest),
        ("nvfp4", ElementFormat::E2m1, Scaling::NVFP4, Rounding::Nearest),
    ];
    for (name, element, scaling, rounding) in cases {
        let quantize = || {
            black_box(scaling.quantize(element, &values, SHAPE, rounding).expect("a matrix of this shape"));
        };
        report(name, best(quantize, read));
    }
    let weight = QuantFormat::Nf4 { double_quant: true }.quantize(&values, &SHAPE).expect("finite values");
    println!("relative to dequantizing and quantizing:");
    for (name, order) in [
        ("nf4 to e4m3, sums over inputs", WeightOrder::SumOverInputs),
        ("nf4 to e4m3, sums over outputs", WeightOrder::SumOverOutputs),
    ] {
        let straight = || {
            black_box(weight.to_e4m3(order).expect("a matrix"));
        };
        let by_copy = || {
            let copy = weight.dequantize();
            let quantized = Scaling::PER_ROW.quantize(ElementFormat::E4m3, &copy, SHAPE, Rounding::Nearest);
            black_box(quantized.expect("a matrix of this shape"));
        };
        report(name, best(straight, by_copy));
    }
}
