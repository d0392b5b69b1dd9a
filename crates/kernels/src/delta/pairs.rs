//! Between the rows of a chunk: products of keys and queries that decay with their distance, their backward, and the inverse of a triangular matrix.
//!
//! With `G` the sum of the log decays from the start of the chunk to a row, the decay from row `j` to a later row `i` is `exp(G_i - G_j)`. Both
//! exponentials alone may overflow, so the difference comes first.
//! Trade-off: of each matrix product of the inverse all but one square is masked. Sums lose digits where one token forgets everything: after
//! `g = -1000`, later decays in its chunk are right to 6e-5.

use burn_tensor::{Tensor, TensorData, backend::Backend};

/// Decays from rows of a chunk to later ones, zero to others, `[m, h, c, c]`.
pub(super) struct PairDecays<B: Backend>(Tensor<B, 4>);

/// Gradients of [`PairDecays::products`].
pub(super) struct PairGradients<B: Backend> {
    /// Of later rows, `[m, h, c, k]`.
    pub(super) x: Tensor<B, 4>,
    /// Of earlier rows, `[m, h, c, k]`.
    pub(super) y: Tensor<B, 4>,
    /// Of `G`.
    pub(super) log: Tensor<B, 4>,
}

impl<B: Backend> PairDecays<B> {
    /// Takes `G`, `[m, h, c, 1]`.
    pub(super) fn new(log: &Tensor<B, 4>) -> Self {
        let lower = mask(log.dims()[2], &log.device(), |row, column| row >= column);
        let differences = log.clone().sub(transposed(log.clone())).mul(lower.clone());
        Self(differences.exp().mul(lower))
    }

    /// Computes `x_i · y_j`, decayed from row `j` to row `i`, for `j <= i`, else zero, `[m, h, c, c]`.
    pub(super) fn products(&self, x: &Tensor<B, 4>, y: &Tensor<B, 4>) -> Tensor<B, 4> {
        x.clone().matmul(transposed(y.clone())).mul(self.0.clone())
    }

    /// Backward of [`PairDecays::products`] from their gradients `d` and the products themselves.
    ///
    /// The gradients of decays are sums of one matrix over its rows and columns, which cancel exactly whatever the precision of matrix
    /// products. `x · dx - y · dy`, the same in exact arithmetic, would put the gradient of their rate off by 3e-2 with operands of 19 bits.
    pub(super) fn backward(
        &self,
        d: Tensor<B, 4>,
        products: Tensor<B, 4>,
        x: &Tensor<B, 4>,
        y: &Tensor<B, 4>,
    ) -> PairGradients<B> {
        let of_pairs = d.clone().mul(products);
        let log = of_pairs.clone().sum_dim(3).sub(transposed(of_pairs.sum_dim(2)));
        let d = d.mul(self.0.clone());
        PairGradients { x: d.clone().matmul(y.clone()), y: transposed(d).matmul(x.clone()), log }
    }
}

/// Computes the inverse of `I + a`, of which only the strictly lower triangle of `a` is read, `[m, h, c, c]`.
///
/// By halves, all of one size at once: the inverse of `[[L, 0], [M, N]]` is that of `L` and `N`, and `-N⁻¹ M L⁻¹` below. The powers of `a` of a shorter
/// formula grow to 2^63 before they cancel where all keys of a chunk are equal.
pub(super) fn unit_inverse<B: Backend>(a: &Tensor<B, 4>) -> Tensor<B, 4> {
    let ([_, _, rows, _], device) = (a.dims(), a.device());
    let identity = a.zeros_like().add(mask(rows, &device, |row, column| row == column));
    halves(rows).fold(identity, |inverse, size| {
        let below = a.clone().mul(squares(rows, size, &device));
        inverse.clone().sub(inverse.clone().matmul(below).matmul(inverse))
    })
}

/// Swaps the last two dimensions.
pub(super) fn transposed<B: Backend>(x: Tensor<B, 4>) -> Tensor<B, 4> {
    x.swap_dims(2, 3)
}

/// Returns one below the diagonal, else zero, `[1, 1, c, c]`.
pub(super) fn strictly_lower<B: Backend>(rows: usize, device: &B::Device) -> Tensor<B, 4> {
    mask(rows, device, |row, column| row > column)
}

/// Returns the sizes of the squares below the diagonal: all powers of two less than a power of two.
fn halves(rows: usize) -> impl Iterator<Item = usize> {
    (0..rows.ilog2()).map(|level| 1 << level)
}

/// Returns one in the squares of this size next to the diagonal: their rows are in the second half, and their columns in the first half, of the same
/// double size.
fn squares<B: Backend>(rows: usize, size: usize, device: &B::Device) -> Tensor<B, 4> {
    mask(rows, device, |row, column| row / (2 * size) == column / (2 * size) && row / size > column / size)
}

/// Returns one for each row and column that are of interest, else zero, `[1, 1, c, c]`.
fn mask<B: Backend>(rows: usize, device: &B::Device, is_in: impl Fn(usize, usize) -> bool) -> Tensor<B, 4> {
    let values = (0..rows * rows).map(|place| f32::from(u8::from(is_in(place / rows, place % rows))));
    Tensor::from_data(TensorData::new(values.collect(), [1, 1, rows, rows]), device)
}
