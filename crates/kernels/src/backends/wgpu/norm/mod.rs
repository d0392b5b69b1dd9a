//! RMSNorm on wgpu, and sums over the rows of a matrix. Kernels: `norm.wgsl`, `columns.wgsl`.

use burn_tensor::{DType, Tensor};

use super::engine::{Cost, Engine, Half, Kernel, Matrix, Operand, Wgpu, in_a_row, in_section, tensor};
use crate::dtype::plus;
use crate::norm::reference;
use crate::{NormOps, NormWeight};

/// Rows that one workgroup sums.
const PIECE: usize = 256;

impl NormOps for Wgpu {
    fn rms_norm(
        x_nd: Tensor<Self, 2>,
        norm: &NormWeight<Self>,
        residual_nd: Option<Tensor<Self, 2>>,
    ) -> Tensor<Self, 2> {
        in_section(|engine| {
            if x_nd.dtype() != DType::F32 {
                return engine.pause(|| plus(reference::forward(x_nd, norm), residual_nd));
            }
            let residual = residual_nd.map(|residual_nd| engine.matrix(residual_nd));
            tensor(engine.rms_norm(&engine.matrix(x_nd), norm, residual.as_ref()).tensor)
        })
    }

    fn rms_norm_backward(
        x_nd: Tensor<Self, 2>,
        norm: &NormWeight<Self>,
        dy_nd: Tensor<Self, 2>,
        d_residual_nd: Option<Tensor<Self, 2>>,
    ) -> (Tensor<Self, 2>, Option<Tensor<Self, 1>>) {
        in_section(|engine| {
            if x_nd.dtype() != DType::F32 {
                return engine.pause(|| reference::backward(x_nd, norm, dy_nd, d_residual_nd));
            }
            let residual = d_residual_nd.map(|residual_nd| engine.matrix(residual_nd));
            let (dx, d_weight) =
                engine.rms_norm_backward(&engine.matrix(x_nd), norm, &engine.matrix(dy_nd), residual.as_ref());
            (tensor(dx.tensor), d_weight.map(Matrix::into_vector))
        })
    }
}

impl Engine {
    /// Computes `x / rms(x) * (offset + weight)`, plus a residual if given.
    pub(super) fn rms_norm(&self, x: &Matrix, norm: &NormWeight<Wgpu>, residual: Option<&Matrix>) -> Matrix {
        let y = self.empty_matrix(x.rows, x.width);
        self.norm_rows("rms_norm", x, norm, None, residual, &y, None, None);
        y
    }

    /// Computes the same as the first matrix of products, with its copy in float16 where they are by matrix units.
    pub(super) fn rms_norm_for_products(&self, x: &Matrix, norm: &NormWeight<Wgpu>) -> Matrix {
        let y = self.empty_matrix(x.rows, x.width);
        self.norm_rows("rms_norm", x, norm, None, None, &y, None, self.half_rows(&y).as_ref());
        y
    }

    /// Computes the gradient of the input plus the residual's, and that of the weight `[1, d]` if it trains.
    pub(super) fn rms_norm_backward(
        &self,
        x: &Matrix,
        norm: &NormWeight<Wgpu>,
        dy: &Matrix,
        residual: Option<&Matrix>,
    ) -> (Matrix, Option<Matrix>) {
        let dx = self.empty_matrix(x.rows, x.width);
        let rstds = norm.trains.then(|| self.empty_matrix(1, x.rows));
        self.norm_rows("rms_norm_backward", x, norm, Some(dy), residual, &dx, rstds.as_ref(), None);
        (dx, rstds.map(|rstds| self.column_sums(dy, Some((x, &rstds)))))
    }

    fn norm_rows(
        &self,
        name: &'static str,
        x: &Matrix,
        norm: &NormWeight<Wgpu>,
        dy: Option<&Matrix>,
        residual: Option<&Matrix>,
        y: &Matrix,
        rstds: Option<&Matrix>,
        half: Option<&Half>,
    ) {
        let weight = self.matrix(norm.weight.clone());
        let mut operands = vec![Operand::Read(x), Operand::Read(&weight)];
        operands.extend(dy.map(Operand::Read));
        operands.extend(residual.map(Operand::Read));
        operands.push(Operand::Write(y));
        operands.extend(rstds.map(Operand::Write));
        operands.extend(half.into_iter().flat_map(Half::operands));
        let has = |part: Option<&Matrix>| u32::from(part.is_some());
        let mut constants = vec![("BACKWARD", has(dy)), ("ADD", has(residual)), ("SCALES", has(rstds))];
        constants.extend(Half::constants(half));
        let kernel = Kernel { name, template: include_str!("norm.wgsl"), constants };
        let [residual, dy] = [residual, dy].map(|part| part.map_or([0; 2], |part| [part.stride, part.offset]));
        let float = |value: f64| (value as f32).to_bits();
        let sizes = [x.rows, x.width, x.stride, x.offset, weight.offset].map(|size| size as u32);
        let strides = [residual[0], residual[1], dy[0], dy[1]].map(|size| size as u32);
        let parameters = [&sizes[..], &[float(norm.offset), float(norm.epsilon)], &strides].concat();
        let bytes = x.bytes() * operands.len().saturating_sub(1) as f64;
        self.launch(
            &kernel,
            &operands,
            &parameters,
            in_a_row(half.map_or(x.rows, |half| half.values.rows)),
            Cost { bytes, flops: 0.0 },
        );
    }

    /// Sums the rows of `y`, times those of `x` and a factor per row if given: `[1, width]`.
    pub(super) fn column_sums(&self, y: &Matrix, product: Option<(&Matrix, &Matrix)>) -> Matrix {
        let pieces = y.rows.div_ceil(PIECE);
        let sums = self.empty_matrix(pieces, y.width);
        let mut operands = vec![Operand::Read(y)];
        operands.extend(product.iter().flat_map(|(x, rstds)| [Operand::Read(x), Operand::Read(rstds)]));
        operands.push(Operand::Write(&sums));
        let constants = vec![("PRODUCT", u32::from(product.is_some()))];
        let kernel = Kernel { name: "column_sums", template: include_str!("columns.wgsl"), constants };
        let [x_row, x_at] = product.map_or([0; 2], |(x, _)| [x.stride, x.offset]);
        let parameters = [y.rows, y.width, y.stride, y.offset, x_row, x_at, PIECE].map(|size| size as u32);
        let groups = [y.width.div_ceil(64) as u32, pieces as u32, 1];
        self.launch(&kernel, &operands, &parameters, groups, Cost { bytes: y.bytes(), flops: 0.0 });
        if pieces > 1 { self.column_sums(&sums, None) } else { sums }
    }
}
