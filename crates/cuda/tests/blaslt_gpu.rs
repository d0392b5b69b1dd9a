//! GEMMs of cuBLASLt on a GPU compared with the host. Without a driver or cuBLASLt, every test returns early. `bench-matrix` measures their speed.
//!
//! Trade-off: inputs are small integers, so that every order of summation gives the same bits and results are compared exactly.
//! Rounding is not tested.

#![allow(unsafe_code, reason = "GEMMs take addresses of device memory")]

mod device;
#[path = "blaslt_gpu/machine.rs"]
mod machine;

use firebrick_cuda::ElementType::{Bf16, E4m3, F16, F32};
use firebrick_cuda::{CudaError, Matmul, Operand, Pointers, Scaling};
use firebrick_precision::difference::largest_difference;
use machine::{Machine, decode, encode, ternary};

/// The value between rows, which must not be overwritten.
const GAP: f32 = 77.0;

/// A GEMM with its inputs on the host: `a` and `b` as stored, `c` row-major, all with gaps; and its bias.
struct Case {
    matmul: Matmul,
    a: Vec<f32>,
    b: Vec<f32>,
    c: Vec<f32>,
    bias: Option<Vec<f32>>,
}

impl Case {
    fn new(matmul: Matmul) -> Self {
        let (m, n, k) = (matmul.m, matmul.n, matmul.k);
        let stored = |operand: Operand, rows, columns, seed| {
            let [rows, columns] = if operand.transposed { [columns, rows] } else { [rows, columns] };
            with_gaps(rows, columns, operand.leading, seed)
        };
        let (a, b) = (stored(matmul.a, m, k, 1), stored(matmul.b, k, n, 2));
        Self { matmul, a, b, c: with_gaps(m, n, matmul.c_leading, 3), bias: None }
    }

    fn a_at(&self, row: usize, inner: usize) -> f32 {
        let a = self.matmul.a;
        if a.transposed { self.a[inner * a.leading + row] } else { self.a[row * a.leading + inner] }
    }

    fn b_at(&self, inner: usize, column: usize) -> f32 {
        let b = self.matmul.b;
        if b.transposed { self.b[column * b.leading + inner] } else { self.b[inner * b.leading + column] }
    }

    fn product_at(&self, row: usize, column: usize) -> f32 {
        (0..self.matmul.k).map(|inner| self.a_at(row, inner) * self.b_at(inner, column)).sum()
    }

    /// Returns `before` with `value(row, column)` in every element of D, and unchanged gaps.
    fn expected(&self, before: &[f32], value: impl Fn(usize, usize) -> f32) -> Vec<f32> {
        let mut expected = before.to_vec();
        for row in 0..self.matmul.m {
            for column in 0..self.matmul.n {
                expected[row * self.matmul.c_leading + column] = value(row, column);
            }
        }
        expected
    }

    /// Runs the GEMM on the device, into a D with contents `before`. C is D itself if `c` is `None`.
    fn run(&self, machine: &Machine, alpha: f32, beta: f32, before: &[f32], c: Option<&[f32]>) -> Vec<f32> {
        let d = machine.device.upload(&encode(self.matmul.output, before));
        let c = c.map(|c| machine.device.upload(&encode(self.matmul.output, c)));
        let a = machine.device.upload(&encode(self.matmul.a.element, &self.a));
        let b = machine.device.upload(&encode(self.matmul.b.element, &self.b));
        let bias = self.bias.as_ref().map(|bias| machine.device.upload(&encode(self.matmul.output, bias)));
        let c_address = c.as_ref().unwrap_or(&d).address();
        let mut pointers = Pointers::new(a.address(), b.address(), c_address, d.address());
        pointers.bias = bias.as_ref().map_or(pointers.bias, |bias| bias.address());
        machine.run(&self.matmul, alpha, beta, pointers).unwrap_or_else(|error| panic!("{error}"));
        decode(self.matmul.output, &machine.device.download(&d))
    }
}

fn with_gaps(rows: usize, columns: usize, leading: usize, seed: u32) -> Vec<f32> {
    let mut numbers = ternary(rows * leading, seed);
    for row in numbers.chunks_mut(leading) {
        row[columns..].fill(GAP);
    }
    numbers
}

/// Asserts equality, where NaN equals NaN.
fn assert_same(found: &[f32], expected: &[f32], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let differing = found.iter().zip(expected).position(|(f, e)| f != e && !(f.is_nan() && e.is_nan()));
    if let Some(at) = differing {
        panic!("{what}: element {at} is {} expected {}", found[at], expected[at]);
    }
}

#[test]
fn gemms_equal_those_of_the_host() {
    let Some(machine) = Machine::find() else { return };
    for (inputs, output) in [(Bf16, Bf16), (Bf16, F32), (F16, F16), (F16, F32), (F32, F32)] {
        for transposes in [[false, false], [false, true], [true, false], [true, true]] {
            for (shape, gap) in [([33, 50, 67], 0), ([33, 50, 67], 5), ([64, 48, 128], 8), ([1, 16, 40], 0)] {
                let mut matmul = Matmul::dense(shape, inputs, transposes, output);
                for leading in [&mut matmul.a.leading, &mut matmul.b.leading, &mut matmul.c_leading] {
                    *leading += gap;
                }
                let case = Case::new(matmul);
                let old = vec![f32::NAN; case.c.len()];
                let found = case.run(&machine, 1.0, 0.0, &old, None);
                assert_same(&found, &case.expected(&old, |i, j| case.product_at(i, j)), &format!("beta 0, {matmul}"));

                let half_and_old = |i: usize, j: usize| 0.5 * case.product_at(i, j) + case.c[i * matmul.c_leading + j];
                let found = case.run(&machine, 0.5, 1.0, &case.c, None);
                assert_same(&found, &case.expected(&case.c, half_and_old), &format!("in place, {matmul}"));
                let found = case.run(&machine, 0.5, 1.0, &old, Some(&case.c));
                assert_same(&found, &case.expected(&old, half_and_old), &format!("from C, {matmul}"));
            }
        }
    }
}

#[test]
fn misaligned_addresses_give_the_same_result() {
    let Some(machine) = Machine::find() else { return };
    let case = Case::new(Matmul::dense([64, 96, 128], Bf16, [false, true], Bf16));
    let shifted = |numbers: &[f32]| {
        let mut one_before = vec![GAP];
        one_before.extend_from_slice(numbers);
        machine.device.upload(&encode(Bf16, &one_before))
    };
    let old = vec![f32::NAN; case.c.len()];
    let (a, b, d) = (shifted(&case.a), shifted(&case.b), shifted(&old));
    let pointers = Pointers::new(a.address() + 2, b.address() + 2, 0, d.address() + 2);
    machine.run(&case.matmul, 1.0, 0.0, pointers).expect("a GEMM of misaligned views");
    let found = decode(Bf16, &machine.device.download(&d));
    assert_eq!(found[0], GAP);
    assert_same(&found[1..], &case.expected(&old, |i, j| case.product_at(i, j)), "misaligned");
}

#[test]
fn f32_keeps_its_precision() {
    let Some(machine) = Machine::find() else { return };
    let mut case = Case::new(Matmul::dense([64, 64, 256], F32, [false, true], F32));
    // TF32 keeps 10 bits of mantissa and would lose the small part.
    case.a.iter_mut().for_each(|x| *x += *x / 4096.0);
    let old = vec![f32::NAN; case.c.len()];
    let exact = case.expected(&old, |i, j| case.product_at(i, j));
    let full = largest_difference(&case.run(&machine, 1.0, 0.0, &old, None), &exact);
    assert!(full < 1e-5, "off by {full}");
}

#[test]
fn long_reductions_accumulate_exactly() {
    let Some(machine) = Machine::find() else { return };
    for (shape, transposes) in [([48, 512, 4096], [true, false]), ([512, 16, 4096], [true, false])] {
        let case = Case::new(Matmul::dense(shape, Bf16, transposes, F32));
        let zero = vec![0.0; case.c.len()];
        let once = case.run(&machine, 1.0, 1.0, &zero, None);
        assert_same(&once, &case.expected(&zero, |i, j| case.product_at(i, j)), "from zero");
        let twice = case.run(&machine, 1.0, 1.0, &once, None);
        assert_same(&twice, &case.expected(&zero, |i, j| 2.0 * case.product_at(i, j)), "twice");
    }
}

#[test]
fn a_bias_is_added_to_every_row() {
    let Some(machine) = Machine::find() else { return };
    for (transposes, inputs, output) in
        [([false, true], Bf16, Bf16), ([false, false], Bf16, Bf16), ([false, true], F32, F32)]
    {
        let mut case = Case::new(Matmul::dense([64, 48, 128], inputs, transposes, output));
        case.matmul.bias = true;
        let bias = ternary(48, 9);
        case.bias = Some(bias.clone());
        for (alpha, beta) in [(1.0, 0.0), (1.0, 1.0), (0.5, 1.0)] {
            let found = case.run(&machine, alpha, beta, &case.c, None);
            let value = |i: usize, j: usize| {
                alpha * case.product_at(i, j) + beta * case.c[i * case.matmul.c_leading + j] + bias[j]
            };
            let what = format!("bias, alpha {alpha}, beta {beta}, {}", case.matmul);
            assert_same(&found, &case.expected(&case.c, value), &what);
        }
    }
}

/// `CUBLAS_STATUS_INVALID_VALUE`.
const INVALID_VALUE: u32 = 7;

#[test]
fn eight_bit_inputs_are_scaled_by_row_and_column() {
    let Some(machine) = Machine::find() else { return };
    let capability = machine.compute_capability();
    for (scaling, needs) in [(Scaling::None, (8, 9)), (Scaling::OuterVector, (9, 0))] {
        if capability < needs {
            continue;
        }
        let matmul = Matmul { scaling, ..Matmul::dense([64, 48, 128], E4m3, [false, true], Bf16) };
        let case = Case::new(matmul);
        // Powers of two, so that bf16 outputs stay exact.
        let powers = |count: usize| (0..count).map(|i| [0.5, 2.0, 1.0, 4.0][i % 4]).collect::<Vec<f32>>();
        let (a_scale, b_scale) = (powers(64), powers(48));
        let memory = [
            machine.device.upload(&encode(E4m3, &case.a)),
            machine.device.upload(&encode(E4m3, &case.b)),
            machine.device.upload(&encode(Bf16, &case.c)),
            machine.device.upload(&encode(F32, &a_scale)),
            machine.device.upload(&encode(F32, &b_scale)),
        ];
        let mut pointers = Pointers::new(memory[0].address(), memory[1].address(), 0, memory[2].address());
        (pointers.a_scale, pointers.b_scale) = (memory[3].address(), memory[4].address());
        match machine.run(&matmul, 1.0, 0.0, pointers) {
            Ok(()) => {}
            // Scale vectors were added in cuBLASLt 12.9; older versions do not know the attribute.
            Err(CudaError::BlasLt { code: INVALID_VALUE, .. }) if scaling == Scaling::OuterVector => continue,
            Err(error) => panic!("{error}"),
        }
        let factor = |i: usize, j: usize| match scaling {
            Scaling::None => 1.0,
            _ => a_scale[i] * b_scale[j],
        };
        let expected = case.expected(&case.c, |i, j| factor(i, j) * case.product_at(i, j));
        assert_same(&decode(Bf16, &machine.device.download(&memory[2])), &expected, &matmul.to_string());
    }
}

#[test]
fn empty_gemms_do_nothing_and_empty_sums_are_errors() {
    let Some(machine) = Machine::find() else { return };
    let nothing = Pointers::new(0, 0, 0, 0);
    assert_eq!(machine.run(&Matmul::dense([0, 16, 32], Bf16, [false, false], Bf16), 1.0, 0.0, nothing), Ok(()));
    let somewhere = Pointers::new(256, 256, 256, 256);
    let error = machine.run(&Matmul::dense([16, 16, 0], Bf16, [false, false], Bf16), 1.0, 0.0, somewhere);
    assert!(matches!(error, Err(CudaError::InvalidMatmul { .. })), "{error:?}");
}
