//! Attention by matrix units. Kernel: `matrices.wgsl`.
//! Not supported: heads of other widths than 64 and 128, which are computed in registers.

use super::super::engine::{DividedBy, Engine, Half, Kernel, Matrices, Matrix, Operand};
use super::Attention;

/// Rows of a workgroup, and of a step through the others.
const ROWS: usize = 64;
const OTHERS: usize = 32;

pub(super) fn has_kernel(matrices: Matrices, head_dim: usize) -> bool {
    match head_dim {
        64 => matrices.lanes == 32,
        128 => matrices.lanes <= 64,
        _ => false,
    }
}

fn constants(matrices: Matrices, head_dim: usize, mode: &'static str, has: [bool; 2]) -> Vec<(&'static str, u32)> {
    let threads = 8 * matrices.lanes;
    let is_forward = mode == "FORWARD";
    let sizes = [
        (mode, 1),
        ("BACKWARD", usize::from(!is_forward)),
        ("SINKS", usize::from(has[0])),
        ("CAP", usize::from(has[1])),
        ("EMULATED", usize::from(matrices.are_emulated)),
        ("LANES", matrices.lanes),
        ("D", head_dim),
        ("OTHERS", OTHERS),
        ("KD", head_dim / 16),
        ("FD", head_dim / 32),
        ("FO", OTHERS / 32),
        ("OD", OTHERS / 16),
        ("NL", OTHERS * head_dim / 8 / threads),
        ("CV", OTHERS * ROWS / threads / 4),
        ("SCORES", if is_forward { 1 } else { 2 }),
        ("PARTS", 2),
        ("SKIP_0", usize::from(is_forward)),
        ("SKIP_1", usize::from(mode == "QUERIES")),
    ];
    sizes.map(|(name, size)| (name, size as u32)).into()
}

/// Rows and others of a launch, each with those of the second product; the forward has no second rows.
pub(super) struct Sides<'a> {
    pub rows: [Option<&'a Half>; 2],
    pub others: [&'a Half; 2],
}

impl Attention<'_> {
    /// Returns copies in float16 of q, k and v.
    pub(super) fn halves(&self, engine: &Engine) -> [Half; 3] {
        self.qkv.each_ref().map(|x| engine.half(x, DividedBy::Measured))
    }

    pub(super) fn launch_by_matrices<'b>(
        &'b self,
        engine: &Engine,
        matrices: Matrices,
        (name, mode): (&'static str, &'static str),
        sides: &'b Sides<'b>,
        [sinks, log_sums, deltas]: [Option<&'b Matrix>; 3],
        results: &[&'b Matrix],
    ) {
        let spec = self.spec;
        let has = [sinks.is_some(), spec.soft_cap.is_some()];
        let kernel = Kernel {
            name,
            template: include_str!("matrices.wgsl"),
            constants: constants(matrices, spec.head_dim, mode, has),
        };
        let mut operands = Vec::new();
        let mut strides = [0; 4];
        for (place, half) in
            [sides.rows[0], Some(sides.others[0]), sides.rows[1], Some(sides.others[1])].into_iter().enumerate()
        {
            let Some(half) = half else { continue };
            strides[place] = half.values.stride;
            let factor = half.factor.as_ref().expect("activations have a factor");
            operands.extend([&half.values, factor].map(Operand::Read));
        }
        operands.push(Operand::Read(&self.boundaries));
        operands.extend([sinks, log_sums, deltas].into_iter().flatten().map(Operand::Read));
        operands.extend(results.iter().map(|result| Operand::Write(result)));
        let [x_0, y_0, x_1, y_1] = strides;
        let window = spec.window.unwrap_or(0);
        let sizes = [self.tokens(), self.documents, spec.heads, spec.heads / spec.kv_heads, window, x_0, x_1, y_0, y_1];
        let mut parameters: Vec<u32> = sizes.map(|size| size as u32).into();
        parameters.extend([spec.scale, spec.soft_cap.unwrap_or(0.0)].map(|value| (value as f32).to_bits()));
        let (heads, cost) = self.work(mode);
        let groups = [self.tokens().div_ceil(ROWS) as u32, heads as u32, 1];
        engine.launch(&kernel, &operands, &parameters, groups, cost);
    }
}

#[cfg(test)]
mod tests {
    use burn_tensor::{Tensor, TensorData};
    use cubecl::wgpu::WgpuDevice;
    use firebrick_arch::AttentionSpec;

    use super::*;
    use crate::attention::{AttentionOps, Documents, Qkv};
    use crate::backends::wgpu::engine::{Wgpu, compile_elsewhere, probe};
    use crate::linear::GemmFormat;
    use crate::session::{RunShape, Session};

    /// The largest score of later keys is far above that of the first, so sums begin again several times.
    #[test]
    fn scores_that_grow_over_a_row_have_the_host_s_outputs() {
        let Ok(()) = probe() else { return };
        Engine::get().emulate_matrices();
        let device = WgpuDevice::DefaultDevice;
        Wgpu::open(&device, &RunShape { gemms: GemmFormat::F16, ..RunShape::default() });
        let tokens = 130;
        let matrix = |of: &dyn Fn(usize, usize) -> f32| {
            let values: Vec<f32> = (0..tokens * 64).map(|i| of(i / 64, i % 64)).collect();
            Tensor::<Wgpu, 2>::from_data(TensorData::new(values, [tokens, 64]), &device)
        };
        let of_value = |token: usize, column: usize| ((token * 7 + column * 3) % 16) as f32 - 8.0;
        let first = |column: usize| if column == 0 { 1.0 } else { 0.0 };
        let qkv = Qkv {
            q: matrix(&|_, column| 8.0 * first(column)),
            k: matrix(&|token, column| 0.5 * token as f32 * first(column)),
            v: matrix(&of_value),
        };
        let documents = Documents::new(&[0, tokens as u32], &device);
        let output = Wgpu::packed_attention(&qkv, None, &AttentionSpec::new(1, 1, 64), &documents);
        let found: Vec<f32> = output.o.into_data().to_vec().expect("f32");
        for token in 0..tokens {
            // A score is half the key's number.
            let weights: Vec<f32> = (0..=token).map(|key| (0.5 * (key as f32 - token as f32)).exp()).collect();
            let total: f32 = weights.iter().sum();
            for column in 0..64 {
                let sum: f32 = weights.iter().enumerate().map(|(key, weight)| weight * of_value(key, column)).sum();
                let difference = (found[token * 64 + column] - sum / total).abs();
                assert!(difference < 2e-2, "token {token}, column {column}: {difference}");
            }
        }
    }

    #[test]
    fn attention_by_matrices_compiles_for_vulkan_and_metal() {
        let matrices = Matrices { lanes: 32, are_emulated: false };
        for mode in ["FORWARD", "KEYS", "QUERIES"] {
            for (head_dim, has) in [(64, [mode == "FORWARD", true]), (128, [false; 2])] {
                let constants = constants(matrices, head_dim, mode, has);
                compile_elsewhere(&Kernel { name: "attention", template: include_str!("matrices.wgsl"), constants });
            }
        }
    }
}
