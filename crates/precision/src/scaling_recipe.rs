//! How TransformerEngine's recipes quantize the operands of the three GEMMs of a linear layer, under its names and with
//! its constants (transformer_engine/common/recipe).
//!
//! With N tokens, I inputs and O outputs, each GEMM sums over the columns of both operands:
//!
//! | GEMM | left | right | sums over |
//! |---|---|---|---|
//! | forward ("fprop") | input `[N, I]` | weight `[O, I]` | inputs |
//! | input gradient ("dgrad") | gradient `[N, O]` | weight, transposed `[I, O]` | outputs |
//! | weight gradient ("wgrad") | gradient, transposed `[O, N]` | input, transposed `[I, N]` | tokens |
//!
//! A transposed operand is quantized from the original values, never from the codes of the other order.
//!
//! | recipe | input | weight | gradient | scales |
//! |---|---|---|---|---|
//! | `Float8CurrentScaling` | E4M3 | E4M3 | E5M2 (HYBRID) or E4M3 | per tensor |
//! | the same with [`Float8CurrentScaling::per_row`] | | | | per row; not in TransformerEngine |
//! | `Float8BlockScaling` | E4M3, 1x128 | E4M3, 128x128 | E4M3, 1x128 | f32, powers of two by default |
//! | `MXFP8BlockScaling` | E4M3, 1x32 | E4M3, 1x32 | E4M3, 1x32 | E8M0 |
//! | `NVFP4BlockScaling` | E2M1, 1x16 | E2M1, 16x16 | E2M1, 1x16, stochastic | UE4M3, and f32 per tensor |
//! | `DelayedScaling` | E4M3 | E4M3 | E5M2 or E4M3 | per tensor, from earlier steps |
//!
//! NVFP4 rotates both operands of the weight gradient ([`RandomHadamard`]). The mixture of formats called HYBRID is a
//! choice of `Float8CurrentScaling` and `DelayedScaling` here, as only there it is TransformerEngine's default.
//!
//! Trade-off: the recipes say what is computed, not how fast. The kernels and the choice of GEMM are the backend's.

use crate::delayed::DelayedScaling;
use crate::element::ElementFormat;
use crate::encoder::Rounding;
use crate::error::Result;
use crate::hadamard::RandomHadamard;
use crate::scaled::ScaledTensor;
use crate::scaling::{Scaling, check_matrix};

/// A recipe for low-precision GEMMs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ScalingRecipe {
    /// Scales from the amax of the tensor itself.
    Float8CurrentScaling(Float8CurrentScaling),
    /// Scales of blocks of 128.
    Float8BlockScaling {
        /// f32 scales that are powers of two (`use_f32_scales` off, the default).
        power_of_two_scales: bool,
    },
    /// Scales of 32 values, powers of two.
    Mxfp8BlockScaling,
    /// Scales of 16 values, in 4 bits.
    Nvfp4BlockScaling(Nvfp4BlockScaling),
    /// Scales from earlier steps: a host reference ([`crate::DelayedScale`]), refused in training.
    DelayedScaling {
        /// Margin, length and use of the history.
        settings: DelayedScaling,
        /// Format of gradients: E5M2 (HYBRID) or E4M3.
        gradient: ElementFormat,
    },
}

/// The settings of `Float8CurrentScaling`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Float8CurrentScaling {
    /// Format of gradients: E5M2 (HYBRID) or E4M3.
    pub gradient: ElementFormat,
    /// A scale per row of each operand instead of one per tensor, as `rowwise` in torchao.
    pub per_row: bool,
}

/// The settings of `NVFP4BlockScaling`, the negations of its `disable_*`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Nvfp4BlockScaling {
    /// Rotate both operands of the weight gradient.
    pub random_hadamard: bool,
    /// Round gradients stochastically.
    pub stochastic_rounding: bool,
    /// One scale per 16x16 square of a weight, so that both orders have the same codes.
    pub weight_squares: bool,
}

/// One of the three GEMMs of a linear layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LinearGemm {
    /// `y = x Wᵀ`, "fprop".
    Forward,
    /// `dx = dy W`, "dgrad".
    InputGradient,
    /// `dW = dyᵀ x`, "wgrad".
    WeightGradient,
}

/// How one operand of a GEMM is quantized.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct OperandRecipe {
    /// The format of the codes.
    pub element: ElementFormat,
    /// Which values share a scale.
    pub scaling: Scaling,
    /// Whether rounding is stochastic.
    pub stochastic: bool,
    /// The rotation along the columns that comes first.
    pub hadamard: Option<RandomHadamard>,
}

impl ScalingRecipe {
    /// Every recipe with TransformerEngine's defaults.
    pub const ALL: [Self; 5] = [
        Self::Float8CurrentScaling(Float8CurrentScaling { gradient: ElementFormat::E5m2, per_row: false }),
        Self::Float8BlockScaling { power_of_two_scales: true },
        Self::Mxfp8BlockScaling,
        Self::Nvfp4BlockScaling(Nvfp4BlockScaling {
            random_hadamard: true,
            stochastic_rounding: true,
            weight_squares: true,
        }),
        Self::DelayedScaling { settings: DelayedScaling::DEFAULT, gradient: ElementFormat::E5m2 },
    ];

    /// TransformerEngine's name of the recipe.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Float8CurrentScaling(_) => "Float8CurrentScaling",
            Self::Float8BlockScaling { .. } => "Float8BlockScaling",
            Self::Mxfp8BlockScaling => "MXFP8BlockScaling",
            Self::Nvfp4BlockScaling(_) => "NVFP4BlockScaling",
            Self::DelayedScaling { .. } => "DelayedScaling",
        }
    }

    /// How the left and the right operand of a GEMM are quantized, in the order of the table above. For `DelayedScaling`
    /// the formats and groups; its scales come from [`crate::DelayedScale`].
    pub fn operands(self, gemm: LinearGemm) -> [OperandRecipe; 2] {
        match gemm {
            LinearGemm::Forward => [self.input(), self.weight()],
            LinearGemm::InputGradient => [self.gradient(), self.weight()],
            LinearGemm::WeightGradient => {
                let hadamard = match self {
                    Self::Nvfp4BlockScaling(settings) if settings.random_hadamard => {
                        Some(RandomHadamard::TRANSFORMER_ENGINE)
                    }
                    _ => None,
                };
                [self.gradient(), self.input()].map(|operand| OperandRecipe { hadamard, ..operand })
            }
        }
    }

    fn input(self) -> OperandRecipe {
        match self {
            Self::Float8CurrentScaling(settings) => OperandRecipe::new(ElementFormat::E4m3, settings.scaling()),
            Self::Float8BlockScaling { power_of_two_scales } => {
                OperandRecipe::new(ElementFormat::E4m3, block(Scaling::BLOCK_1X128, power_of_two_scales))
            }
            Self::Mxfp8BlockScaling => OperandRecipe::new(ElementFormat::E4m3, Scaling::MX),
            Self::Nvfp4BlockScaling(_) => OperandRecipe::new(ElementFormat::E2m1, Scaling::NVFP4),
            Self::DelayedScaling { .. } => OperandRecipe::new(ElementFormat::E4m3, Scaling::PER_TENSOR),
        }
    }

    fn weight(self) -> OperandRecipe {
        match self {
            Self::Float8BlockScaling { power_of_two_scales } => {
                OperandRecipe::new(ElementFormat::E4m3, block(Scaling::BLOCK_128X128, power_of_two_scales))
            }
            Self::Nvfp4BlockScaling(settings) if settings.weight_squares => {
                OperandRecipe::new(ElementFormat::E2m1, Scaling::NVFP4_16X16)
            }
            _ => self.input(),
        }
    }

    fn gradient(self) -> OperandRecipe {
        match self {
            Self::Float8CurrentScaling(Float8CurrentScaling { gradient, .. })
            | Self::DelayedScaling { gradient, .. } => OperandRecipe { element: gradient, ..self.input() },
            Self::Nvfp4BlockScaling(settings) => {
                OperandRecipe { stochastic: settings.stochastic_rounding, ..self.input() }
            }
            _ => self.input(),
        }
    }
}

impl Float8CurrentScaling {
    const fn scaling(self) -> Scaling {
        if self.per_row { Scaling::PER_ROW } else { Scaling::PER_TENSOR }
    }
}

const fn block(scaling: Scaling, power_of_two: bool) -> Scaling {
    if power_of_two { scaling.with_power_of_two_scales() } else { scaling }
}

impl OperandRecipe {
    const fn new(element: ElementFormat, scaling: Scaling) -> Self {
        Self { element, scaling, stochastic: false, hadamard: None }
    }

    /// Quantizes an operand `[rows, columns]` whose columns the GEMM sums over. `seed` counts only for stochastic rounding.
    ///
    /// # Errors
    /// As [`Scaling::quantize`]; [`Error::Indivisible`](crate::Error::Indivisible) if a rotation finds columns that 16 does
    /// not divide.
    pub fn quantize(self, values: &[f32], shape: [usize; 2], seed: u64) -> Result<ScaledTensor> {
        check_matrix(values.len(), shape[0], shape[1])?;
        let rounding = if self.stochastic { Rounding::Stochastic { seed } } else { Rounding::Nearest };
        let Some(hadamard) = self.hadamard else {
            return self.scaling.quantize(self.element, values, shape, rounding);
        };
        let mut rotated = values.to_vec();
        rotated.chunks_mut(shape[1]).try_for_each(|row| hadamard.apply(row))?;
        self.scaling.quantize(self.element, &rotated, shape, rounding)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Error;
    use crate::linear::scaled_linear;
    use crate::test_values::Draws;

    const GEMMS: [LinearGemm; 3] = [LinearGemm::Forward, LinearGemm::InputGradient, LinearGemm::WeightGradient];

    #[test]
    fn names_are_transformer_engines() {
        let names = ScalingRecipe::ALL.map(ScalingRecipe::name);
        let expected =
            ["Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling", "NVFP4BlockScaling", "DelayedScaling"];
        assert_eq!(names, expected);
    }

    #[test]
    fn only_gradients_of_nvfp4_round_stochastically_and_only_its_weight_gradient_rotates() {
        for recipe in ScalingRecipe::ALL {
            for gemm in GEMMS {
                let [left, right] = recipe.operands(gemm);
                let nvfp4 = matches!(recipe, ScalingRecipe::Nvfp4BlockScaling(_));
                assert_eq!(left.stochastic, nvfp4 && gemm != LinearGemm::Forward, "{recipe:?} {gemm:?}");
                assert!(!right.stochastic, "{recipe:?} {gemm:?}");
                let rotated = [left, right].map(|operand| operand.hadamard.is_some());
                assert_eq!(rotated, [nvfp4 && gemm == LinearGemm::WeightGradient; 2], "{recipe:?} {gemm:?}");
            }
        }
    }

    #[test]
    fn never_two_operands_with_square_blocks_meet() {
        // No GEMM of the hardware takes 128x128 on both sides.
        for recipe in ScalingRecipe::ALL {
            for gemm in GEMMS {
                let squares = recipe.operands(gemm).map(|operand| operand.scaling.group(512, 512)[0] == 128);
                assert_ne!(squares, [true, true], "{recipe:?} {gemm:?}");
            }
        }
    }

    #[test]
    fn each_recipe_computes_each_gemm_within_the_noise_of_its_format() {
        let mut draws = Draws(71);
        let (rows, sums, columns) = (64, 256, 48);
        let [left, right] = [rows, columns].map(|rows| draws.vector(rows * sums, 1.0));
        for recipe in ScalingRecipe::ALL {
            for gemm in GEMMS {
                let [first, second] = recipe.operands(gemm);
                let a = first.quantize(&left, [rows, sums], 5).unwrap();
                let b = second.quantize(&right, [columns, sums], 6).unwrap();
                let error = relative_error(&scaled_linear(&a, &b).unwrap(), &left, &right, [rows, sums, columns]);
                // Errors of single values average out over the sum: a third of the largest relative one is typical.
                let bound = f64::from(first.element.relative_error().max(second.element.relative_error())) * 0.8;
                assert!(error < bound && error > bound / 10.0, "{} {gemm:?}: {error}", recipe.name());
            }
        }
    }

    /// Root of the mean square error over that of the result.
    fn relative_error(result: &[f32], left: &[f32], right: &[f32], [rows, sums, columns]: [usize; 3]) -> f64 {
        let (mut error, mut total) = (0.0, 0.0);
        for row in 0..rows {
            for column in 0..columns {
                let pairs = left[row * sums..][..sums].iter().zip(&right[column * sums..][..sums]);
                let exact: f64 = pairs.map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
                error += (f64::from(result[row * columns + column]) - exact).powi(2);
                total += exact.powi(2);
            }
        }
        (error / total).sqrt()
    }

    #[test]
    fn a_rotation_refuses_columns_that_16_does_not_divide() {
        let [left, _] = ScalingRecipe::ALL[3].operands(LinearGemm::WeightGradient);
        let error = left.quantize(&[1.0; 48], [2, 24], 0).unwrap_err();
        assert_eq!(error, Error::Indivisible { what: "values", got: 24, by: 16 });
    }
}
