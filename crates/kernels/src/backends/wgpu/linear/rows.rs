//! Gated activations, rotation, and the norms and rotation of heads. Kernel: `rows.wgsl`.

use burn_tensor::{DType, Tensor};
use firebrick_arch::Activation;

use super::super::engine::{Cost, Engine, Half, Kernel, Matrix, Operand, Wgpu, in_a_row, primitive, tensor};
use crate::linear::{HeadPart, HeadRole, HeadsEpilogue, RotaryTables, SavedHeads};
use crate::norm::NormWeight;

const THREADS: usize = 256;

impl Engine {
    /// Computes `activation(gate) * up`, with its copy in float16 where products are by matrix units.
    pub(super) fn gated(&self, gate: &Matrix, up: &Matrix, activation: Activation) -> Matrix {
        let y = self.empty_matrix(gate.rows, gate.width);
        self.activated("gated", [gate, up], None, activation, &[&y], self.half_rows(&y).as_ref());
        y
    }

    pub(super) fn gated_backward(
        &self,
        gate: &Matrix,
        up: &Matrix,
        activation: Activation,
        dy: &Matrix,
    ) -> [Matrix; 2] {
        let [d_gate, d_up] = [(); 2].map(|()| self.empty_matrix(gate.rows, gate.width));
        self.activated("gated_backward", [gate, up], Some(dy), activation, &[&d_gate, &d_up], None);
        [d_gate, d_up]
    }

    fn activated(
        &self,
        name: &'static str,
        [gate, up]: [&Matrix; 2],
        dy: Option<&Matrix>,
        activation: Activation,
        results: &[&Matrix],
        half: Option<&Half>,
    ) {
        let (kind, limit, alpha) = match activation {
            Activation::Silu => ("SILU", 0.0, 0.0),
            Activation::GeluTanh => ("GELU", 0.0, 0.0),
            Activation::Sigmoid => ("SIGMOID", 0.0, 0.0),
            Activation::ClampedSwiglu(constants) => ("CLAMPED", constants.limit(), constants.alpha()),
        };
        let mut constants = vec![(kind, 1), ("BACKWARD", u32::from(dy.is_some()))];
        constants.extend(Half::constants(half));
        let kernel = Kernel { name, template: include_str!("rows.wgsl"), constants };
        let mut operands = vec![Operand::Read(gate), Operand::Read(up)];
        operands.extend(dy.map(Operand::Read));
        operands.extend(results.iter().map(|result| Operand::Write(result)));
        operands.extend(half.into_iter().flat_map(Half::operands));
        let [dy_row, dy_at] = dy.map_or([0; 2], |dy| [dy.stride, dy.offset]);
        let sizes = [gate.rows, gate.width, gate.stride, gate.offset, up.stride, up.offset, dy_row, dy_at];
        let mut parameters: Vec<u32> = sizes.map(|size| size as u32).into();
        parameters.extend([limit, alpha].map(f32::to_bits));
        match half {
            Some(half) => {
                let cost = Cost { bytes: gate.bytes() * operands.len() as f64, flops: 0.0 };
                self.launch(&kernel, &operands, &parameters, in_a_row(half.values.rows), cost);
            }
            None => self.each_value(&kernel, &operands, &parameters, gate),
        }
    }

    /// Rotates heads, or turns them back.
    pub(super) fn rotary(&self, x: &Matrix, tables: &RotaryTables<Wgpu>, head_dim: usize, turn: Turn) -> Matrix {
        let [cos, sin] = [&tables.cos, &tables.sin].map(|table| self.matrix(table.clone()));
        let half = cos.width;
        assert!(
            cos.rows == x.rows && 2 * half <= head_dim && cos.stride == half && sin.stride == half,
            "rotary tables [{}, {half}] for {} tokens of {head_dim} columns",
            cos.rows,
            x.rows
        );
        let factors = turn.is_query.then_some(tables.query_scale.as_ref()).flatten();
        let factors = factors.map(|factors| self.matrix(factors.clone()));
        let y = self.empty_matrix(x.rows, x.width);
        let constants = vec![
            ("ROTARY", 1),
            ("NEIGHBORS", u32::from(tables.interleaved)),
            ("FACTORS", u32::from(factors.is_some())),
        ];
        let name = if turn.is_back { "rotary_backward" } else { "rotary" };
        let kernel = Kernel { name, template: include_str!("rows.wgsl"), constants };
        let mut operands = vec![Operand::Read(x), Operand::Read(&cos), Operand::Read(&sin)];
        operands.extend(factors.as_ref().map(Operand::Read));
        operands.push(Operand::Write(&y));
        let sizes = [x.rows, x.width, x.stride, x.offset, head_dim, half];
        let mut parameters: Vec<u32> = sizes.map(|size| size as u32).into();
        parameters.push(if turn.is_back { -1.0_f32 } else { 1.0 }.to_bits());
        self.each_value(&kernel, &operands, &parameters, x);
        y
    }

    fn each_value(&self, kernel: &Kernel, operands: &[Operand<'_>], parameters: &[u32], like: &Matrix) {
        let cost = Cost { bytes: like.bytes() * operands.len() as f64, flops: 0.0 };
        self.launch(kernel, operands, parameters, in_a_row(like.count().div_ceil(THREADS)), cost);
    }

    pub(super) fn head_part(&self, x: Matrix, part: &HeadPart<Wgpu>, heads: &HeadsEpilogue<Wgpu>) -> Matrix {
        let (rows, width) = (x.rows, x.width);
        let x = match &part.norm {
            Some(norm) => with_rows(self.rms_norm(&norm_rows(x, norm), norm, None), rows, width),
            None => x,
        };
        match turn_of(part.role, heads) {
            Some((tables, is_query)) => self.rotary(&x, tables, heads.head_dim, Turn { is_query, is_back: false }),
            None => x,
        }
    }

    /// Computes the gradients of the parts before the epilogue, and of the norm weights that train.
    pub(super) fn heads_backward(
        &self,
        saved: SavedHeads<Wgpu>,
        d_outputs: Vec<Matrix>,
    ) -> (Vec<Matrix>, Vec<Option<Tensor<Wgpu, 1>>>) {
        let SavedHeads { epilogue: heads, raw } = saved;
        let of_part = |((d, part), raw): ((Matrix, &HeadPart<Wgpu>), Option<Tensor<Wgpu, 2>>)| {
            let d = match turn_of(part.role, &heads) {
                Some((tables, is_query)) => self.rotary(&d, tables, heads.head_dim, Turn { is_query, is_back: true }),
                None => d,
            };
            let Some(norm) = &part.norm else { return (d, None) };
            let raw = self.matrix(raw.expect("normalized heads are saved before their norm"));
            let (rows, width) = (raw.rows, raw.width);
            let (d_x, d_weight) =
                self.rms_norm_backward(&norm_rows(raw, norm), norm, &norm_rows(self.dense(d), norm), None);
            (with_rows(d_x, rows, width), d_weight.map(Matrix::into_vector))
        };
        d_outputs.into_iter().zip(&heads.parts).zip(raw).map(of_part).unzip()
    }

    /// Returns the same matrix without gaps between rows.
    pub(super) fn dense(&self, x: Matrix) -> Matrix {
        if x.stride == x.width {
            return x;
        }
        let view = tensor::<2>(x.tensor);
        self.matrix_of(self.pause(|| burn_cubecl::kernel::into_contiguous(primitive(view))))
    }

    /// Views a tensor as an f32 matrix, and converts it if it is in another format.
    pub(in super::super) fn f32_matrix<const D: usize>(&self, x: Tensor<Wgpu, D>) -> Matrix {
        if x.dtype() == DType::F32 { self.matrix(x) } else { self.matrix(self.pause(|| x.cast(DType::F32))) }
    }

    /// Returns where a sum goes on: in its own memory, if nothing else has that; else in a copy.
    pub(in super::super) fn writable(&self, sum: Tensor<Wgpu, 2>) -> Matrix {
        let [rows, width] = sum.dims();
        let values = self.owned(primitive(sum));
        Matrix { rows, width, stride: width, ..values }
    }
}

#[derive(Clone, Copy)]
pub(super) struct Turn {
    /// Whether they are multiplied by the factor of their token.
    pub is_query: bool,
    pub is_back: bool,
}

/// Returns the angles of a role's heads, and whether they are queries.
fn turn_of(role: HeadRole, heads: &HeadsEpilogue<Wgpu>) -> Option<(&RotaryTables<Wgpu>, bool)> {
    match role {
        HeadRole::Value | HeadRole::Gate => None,
        HeadRole::Key => heads.rotary.as_ref().map(|tables| (tables, false)),
        HeadRole::Query => heads.rotary.as_ref().map(|tables| (tables, true)),
    }
}

/// Views rows as those of a norm: a head, or all heads of a token.
fn norm_rows(x: Matrix, norm: &NormWeight<Wgpu>) -> Matrix {
    let [normed] = norm.weight.dims();
    assert_eq!(x.stride, x.width, "heads are without gaps");
    Matrix { rows: x.count() / normed, width: normed, stride: normed, ..x }
}

/// Gives a new matrix without gaps another shape.
fn with_rows(x: Matrix, rows: usize, width: usize) -> Matrix {
    let tensor = tensor::<2>(x.tensor).reshape([rows, width]);
    Matrix { tensor: primitive(tensor), rows, width, stride: width, offset: x.offset }
}
