//! PiSSA (Meng et al., 2024): an adapter that starts as the principal part of its weight, and a base that is the remainder.
//!
//! The principal part comes from a randomized singular value decomposition (Halko et al., 2011): GEMMs of the weight with a few vectors
//! on the device, which are made orthonormal by the Cholesky factors of their small Gram matrices on the host. Where these vectors span
//! the whole weight, the decomposition is exact.
//! Trade-off: the host waits for the device twice per iteration and module, for a matrix of a few kilobytes.

use std::path::Path;
use std::sync::Arc;

use burn_tensor::{DType, Tensor, TensorData};
use firebrick_arch::{LoraConfig, LoraInit, ModuleSpec, Role, lora_tensor_names};
use firebrick_kernels::{Kernels, Parameter, Weight};

use super::Builder;
use super::on_device::BaseSpec;
use super::synthetic::{normal, stream};
use crate::checkpoint::open_adapter;
use crate::error::ModelError;
use crate::linear::{self, Base, Lora, StartPair};
use crate::peft::{ADAPTER_WEIGHTS_FILE, read_start};

/// Vectors of the search beyond the rank.
const OVERSAMPLING: usize = 16;
/// The same where PEFT computes the whole decomposition, and the iterations then.
const EXACT_OVERSAMPLING: usize = 32;
const EXACT_ITERATIONS: usize = 16;
/// PEFT decomposes weights exactly if no side is above this.
const SMALL: usize = 192;
/// Added to the diagonal of a Gram matrix, relative to its largest value, so that it has a Cholesky factor. It exceeds the rounding of the f32
/// values, which is all that remains of a direction that the weight lacks.
const SHIFT: f64 = 1e-6;

impl<B: Kernels> Builder<'_, '_, B> {
    /// Splits a PiSSA module into base and adapter: now, or as the adapter in the folder `init_from` was split, if a run continues from it. Each
    /// matrix of a stack is split by itself.
    pub(super) fn divided_at_its_principal_part(
        &mut self,
        weight: &BaseSpec<'_>,
        module: &ModuleSpec,
        config: &LoraConfig,
    ) -> Result<(Base<B>, Option<Lora<B>>), ModelError> {
        let LoraInit::Pissa { niter } = config.init_lora_weights else { unreachable!("the caller has looked") };
        let path = module.lora_path();
        let (rank, scale) = (config.rank_of(path), config.scaling_of(path));
        let (mut rests, mut pairs) = (Vec::new(), Vec::new());
        for (piece, stored) in module.pieces.iter().zip(weight.stored()) {
            let values = (self.read)(&stored)?;
            if values.may_be_codes() {
                return Err(ModelError::PrincipalPartOfCodes { name: stored.name });
            }
            let &[outputs, inputs] = stored.shape.as_slice() else { unreachable!("a base weight is a matrix") };
            let weight_oi = self.upload([outputs, inputs], values, DType::F32)?;
            let pair = match &config.init_from {
                Some(folder) => {
                    let starts = match self.starts.take() {
                        Some(starts) => starts,
                        None => open_adapter(&Path::new(folder).join(ADAPTER_WEIGHTS_FILE))?,
                    };
                    read_start(self.starts.insert(starts), &piece.path, [outputs, inputs], rank)?
                }
                None => {
                    let name = lora_tensor_names(&piece.path).0;
                    principal(&weight_oi, rank, scale, niter, self.options.seed, &name)
                }
            };
            rests.push(residual(weight_oi, &pair, rank, scale));
            pairs.push(Arc::new(pair));
            (self.progress)(&stored.name);
        }
        let rest = B::join_rows(rests);
        let base = match self.format_of(&weight.tensor) {
            Some(format) => self.quantize_on_either_side(weight, rest, format)?,
            None if self.options.frozen_dtype() == DType::F32 => Weight::Dense(rest),
            None => Weight::Dense(rest.cast(self.options.frozen_dtype())),
        };
        let (a_name, b_name) = lora_tensor_names(&module.path);
        let (inputs, all) = (weight.tensor.shape[1], module.pieces.len() * rank);
        let a: Vec<f32> = pairs.iter().flat_map(|pair| &pair.a).copied().collect();
        let b: Vec<f32> = pairs.iter().flat_map(|pair| &pair.b).copied().collect();
        let lora = Lora {
            a: Parameter::from_host(a_name, &[all, inputs], Role::LoraA, a, self.device),
            b: Parameter::from_host(b_name, &[module.rows(), rank], Role::LoraB, b, self.device),
            scale,
            starts: pairs,
            magnitude: None,
        };
        Ok((Base::Frozen(base), Some(lora)))
    }
}

/// Computes the pair whose product, times `scale`, is the principal part of a weight `[out, in]` f32: the same for a seed and a name on one device.
fn principal<B: Kernels>(
    weight_oi: &Tensor<B, 2>,
    rank: usize,
    scale: f64,
    niter: Option<usize>,
    seed: u64,
    name: &str,
) -> StartPair {
    let ([outputs, inputs], device) = (weight_oi.dims(), weight_oi.device());
    let shorter = outputs.min(inputs);
    let (vectors, iterations) = match niter {
        None if shorter <= SMALL => (shorter, 1),
        None => (rank + EXACT_OVERSAMPLING, EXACT_ITERATIONS),
        Some(niter) => (rank + OVERSAMPLING, niter),
    };
    let vectors = vectors.min(shorter);
    let weight_io = transposed(weight_oi);
    let start = normal(vectors * inputs, 1.0, &mut stream(seed, name));
    let mut left_qo = orthonormal(times_transposed(uploaded(start, [vectors, inputs], &device), weight_oi));
    for _ in 0..iterations {
        let right_qi = orthonormal(times_transposed(left_qo, &weight_io));
        left_qo = orthonormal(times_transposed(right_qi, weight_oi));
    }
    let small_qi = times_transposed(left_qo.clone(), &weight_io);
    let (values, directions) = eigen(host(times_transposed(small_qi.clone(), &small_qi)), vectors);
    // Rows of both: directions times the root of the singular value over the scale; those of the right side are as long as their
    // singular values.
    let combined = |factor: &dyn Fn(f64) -> f64| -> Vec<f32> {
        let row = |index: usize| {
            let factor = factor(values[index].max(0.0).sqrt());
            directions[index].iter().map(move |value| (factor * value) as f32).collect::<Vec<_>>()
        };
        (0..rank).flat_map(row).collect()
    };
    let b_rows = combined(&|sigma| (sigma / scale).sqrt());
    let a_rows = combined(&|sigma| if sigma > 0.0 { (sigma / scale).sqrt() / sigma } else { 0.0 });
    let combine = |rows: Vec<f32>, basis: &Tensor<B, 2>| {
        times_transposed(uploaded(rows, [rank, vectors], &device), &transposed(basis))
    };
    let b_ro = combine(b_rows, &left_qo);
    StartPair { a: host(combine(a_rows, &small_qi)), b: host(transposed(&b_ro)) }
}

/// Computes `W - scale B A`, f32.
fn residual<B: Kernels>(weight_oi: Tensor<B, 2>, pair: &StartPair, rank: usize, scale: f64) -> Tensor<B, 2> {
    let ([outputs, inputs], device) = (weight_oi.dims(), weight_oi.device());
    let b = uploaded(pair.b.iter().map(|value| value * scale as f32).collect(), [outputs, rank], &device);
    let a = transposed(&uploaded(pair.a.clone(), [rank, inputs], &device));
    weight_oi - times_transposed(b, &a)
}

/// Computes `x yᵀ` by the backend's own GEMM.
fn times_transposed<B: Kernels>(x: Tensor<B, 2>, y: &Tensor<B, 2>) -> Tensor<B, 2> {
    linear::times_transposed(x, Weight::Dense(y.clone()), y.dims()[0])
}

/// Computes orthonormal rows that span the same space: `L⁻¹ x` with `x xᵀ = L Lᵀ`, twice, because f32 loses part of the first.
fn orthonormal<B: Kernels>(rows: Tensor<B, 2>) -> Tensor<B, 2> {
    let ([count, _], device) = (rows.dims(), rows.device());
    let once = |rows: Tensor<B, 2>| {
        let gram = host(times_transposed(rows.clone(), &rows));
        let inverse = inverse_cholesky(&gram, count);
        times_transposed(uploaded(inverse, [count, count], &device), &transposed(&rows))
    };
    once(once(rows))
}

/// Computes the inverse of the Cholesky factor of a Gram matrix, row by row.
fn inverse_cholesky(gram: &[f32], n: usize) -> Vec<f32> {
    let at = |row: usize, column: usize| f64::from(gram[row * n + column]);
    let largest = (0..n).map(|index| at(index, index)).fold(1e-30, f64::max);
    let mut factor = vec![0.0f64; n * n];
    for row in 0..n {
        for column in 0..=row {
            let known: f64 = (0..column).map(|k| factor[row * n + k] * factor[column * n + k]).sum();
            let rest = at(row, column) - known;
            factor[row * n + column] = match row == column {
                true => (rest + SHIFT * largest).max(SHIFT * largest).sqrt(),
                false => rest / factor[column * n + column],
            };
        }
    }
    let mut inverse = vec![0.0f64; n * n];
    for column in 0..n {
        for row in column..n {
            let known: f64 = (column..row).map(|k| factor[row * n + k] * inverse[k * n + column]).sum();
            let unit = if row == column { 1.0 } else { 0.0 };
            inverse[row * n + column] = (unit - known) / factor[row * n + row];
        }
    }
    inverse.into_iter().map(|value| value as f32).collect()
}

/// Computes the eigenvalues of a symmetric matrix, largest first, and their eigenvectors (cyclic Jacobi).
fn eigen(matrix: Vec<f32>, n: usize) -> (Vec<f64>, Vec<Vec<f64>>) {
    let mut matrix: Vec<f64> = matrix.into_iter().map(f64::from).collect();
    let mut vectors: Vec<Vec<f64>> =
        (0..n).map(|row| (0..n).map(|column| f64::from(u8::from(row == column))).collect()).collect();
    let total: f64 = matrix.iter().map(|value| value * value).sum();
    // About ten sweeps are enough for a matrix of this size.
    for _ in 0..30 {
        let off: f64 = (0..n).flat_map(|p| (0..p).map(move |q| (p, q))).map(|(p, q)| matrix[p * n + q].powi(2)).sum();
        if off <= 1e-24 * total {
            break;
        }
        for p in 1..n {
            for q in 0..p {
                rotate(&mut matrix, &mut vectors, n, p, q);
            }
        }
    }
    let mut order: Vec<usize> = (0..n).collect();
    order.sort_by(|&a, &b| matrix[b * n + b].total_cmp(&matrix[a * n + a]));
    (order.iter().map(|&at| matrix[at * n + at]).collect(), order.iter().map(|&at| vectors[at].clone()).collect())
}

/// Applies the Jacobi rotation that zeroes the element at `p`, `q`, with `q` below `p`. The rows of `vectors` are eigenvectors.
fn rotate(matrix: &mut [f64], vectors: &mut [Vec<f64>], n: usize, p: usize, q: usize) {
    let element = matrix[p * n + q];
    if element == 0.0 {
        return;
    }
    let theta = (matrix[q * n + q] - matrix[p * n + p]) / (2.0 * element);
    let t = theta.signum() / (theta.abs() + (theta * theta + 1.0).sqrt());
    let (c, s) = (1.0 / (t * t + 1.0).sqrt(), t / (t * t + 1.0).sqrt());
    for k in 0..n {
        let (a, b) = (matrix[k * n + p], matrix[k * n + q]);
        (matrix[k * n + p], matrix[k * n + q]) = (c * a - s * b, s * a + c * b);
    }
    for k in 0..n {
        let (a, b) = (matrix[p * n + k], matrix[q * n + k]);
        (matrix[p * n + k], matrix[q * n + k]) = (c * a - s * b, s * a + c * b);
    }
    let (before, from_p) = vectors.split_at_mut(p);
    for (a, b) in from_p[0].iter_mut().zip(&mut before[q]) {
        (*a, *b) = (c * *a - s * *b, s * *a + c * *b);
    }
}

/// Returns the transposed matrix, laid out row by row.
fn transposed<B: Kernels>(matrix: &Tensor<B, 2>) -> Tensor<B, 2> {
    let [rows, columns] = matrix.dims();
    // Reshaping a tensor that is not contiguous copies it.
    matrix.clone().transpose().reshape([rows * columns]).reshape([columns, rows])
}

fn uploaded<B: Kernels>(values: Vec<f32>, shape: [usize; 2], device: &B::Device) -> Tensor<B, 2> {
    Tensor::from_data(TensorData::new(values, shape), (device, DType::F32))
}

fn host<B: Kernels>(matrix: Tensor<B, 2>) -> Vec<f32> {
    matrix.into_data().to_vec::<f32>().expect("the decomposition is in f32")
}

#[cfg(test)]
mod tests {
    use firebrick_kernels::backends::Flex;
    use firebrick_precision::difference::largest_difference;

    use super::*;

    /// Returns a weight with singular values 2⁰, 2⁻¹, .. on random directions.
    fn weight(outputs: usize, inputs: usize, count: usize) -> (Tensor<Flex, 2>, Vec<Tensor<Flex, 2>>) {
        let device = Default::default();
        let basis = |width: usize, name: &str| {
            orthonormal(uploaded::<Flex>(normal(count * width, 1.0, &mut stream(5, name)), [count, width], &device))
        };
        let (left, right) = (basis(outputs, "left"), basis(inputs, "right"));
        let parts: Vec<Tensor<Flex, 2>> = (0..count)
            .map(|at| {
                let column = transposed(&left.clone().narrow(0, at, 1)) * 0.5f32.powi(at as i32);
                times_transposed(column, &transposed(&right.clone().narrow(0, at, 1)))
            })
            .collect();
        let sum = parts.iter().cloned().reduce(|sum, part| sum + part).unwrap();
        (sum, parts)
    }

    #[test]
    fn the_pair_is_the_principal_part_of_the_base() {
        for (outputs, inputs, niter) in [(40, 24, None), (24, 40, None), (300, 256, None), (300, 256, Some(4))] {
            let (sum, parts) = weight(outputs, inputs, 12);
            let (rank, scale) = (3, 2.0);
            let pair = principal(&sum, rank, scale, niter, 1, "w");
            let rest = host(residual(sum, &pair, rank, scale));
            let expected = host(parts[rank..].iter().cloned().reduce(|sum, part| sum + part).unwrap());
            assert!(rest.iter().all(|value| value.is_finite()), "{outputs} x {inputs}, {niter:?}");
            let largest = largest_difference(&rest, &expected);
            assert!(largest < 2e-5, "{outputs} x {inputs}, {niter:?}: {largest:e}");
            let norms = |values: &[f32]| values.iter().map(|value| value * value).sum::<f32>();
            // Both sides have the root of the singular values: 1 + 1/2 + 1/4 over the scale.
            assert!((norms(&pair.a) - 0.875).abs() < 1e-3 && (norms(&pair.b) - 0.875).abs() < 1e-3);
        }
    }

    #[test]
    fn a_weight_of_zeros_has_a_pair_of_zeros() {
        let zeros = Tensor::<Flex, 2>::zeros([8, 6], &Default::default());
        let pair = principal(&zeros, 2, 1.0, None, 0, "w");
        assert!(pair.a.iter().chain(&pair.b).all(|value| *value == 0.0), "{pair:?}");
    }
}
