//! AdamW over named parameters, with moments in f32 or in 8 bits, global-norm clipping, and state that can be saved.
//!
//! The clip coefficient is computed and used on the device: nothing is read back in a step. As in bitsandbytes, parameters of
//! fewer than 4,096 elements keep f32 moments in the 8-bit optimizer too: they cost nothing and quantise worst.

use std::collections::BTreeMap;
use std::sync::Arc;

use burn_tensor::{DType, Int, IntDType, Tensor, TensorData};
use firebrick_kernels::{AdamW, EightBitMoments, EightBitUpdate, GradientMap, Kernels, Parameter};
use firebrick_precision::DynamicMap;

use crate::error::OptimError;
use crate::state::{HostTensor, StateData};

/// Parameters below this many elements keep f32 moments (bitsandbytes' `min_8bit_size`).
pub const SMALLEST_EIGHT_BIT: usize = 4096;
const BLOCK: usize = 256;

/// How the moments are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MomentFormat {
    /// 8 bytes a parameter.
    Float32,
    /// About 2 bytes a parameter, in blocks of 256.
    EightBit,
}

/// The constants of a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamWConfig {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub epsilon: f64,
    /// Decoupled weight decay; not applied to vectors (norm weights).
    pub weight_decay: f64,
    /// Largest global norm of the gradients; larger ones are scaled down to it.
    pub max_grad_norm: Option<f64>,
    /// How the moments are stored.
    pub moments: MomentFormat,
}

/// What a step leaves for the log, still on the device.
pub struct StepReport<B: Kernels> {
    /// Global norm of the gradients before clipping, `[1]`.
    pub grad_norm: Tensor<B, 1>,
}

enum Moments<B: Kernels> {
    Float32(Tensor<B, 1>, Tensor<B, 1>),
    EightBit(EightBitMoments<B>),
}

/// AdamW over named parameters.
pub struct Optimizer<B: Kernels> {
    config: AdamWConfig,
    step: u64,
    moments: BTreeMap<Arc<str>, Moments<B>>,
}

impl<B: Kernels> Optimizer<B> {
    /// An optimizer that has taken no step.
    pub fn new(config: AdamWConfig) -> Self {
        Self { config, step: 0, moments: BTreeMap::new() }
    }

    /// Steps taken so far.
    pub fn steps(&self) -> u64 {
        self.step
    }

    /// Updates every parameter from its gradient.
    ///
    /// # Panics
    /// If a parameter has no gradient, or there is a gradient without a parameter: the model made both.
    pub fn step(
        &mut self,
        parameters: Vec<&mut Parameter<B>>,
        mut gradients: GradientMap<B>,
        learning_rate: f64,
    ) -> StepReport<B> {
        assert_eq!(
            parameters.len(),
            gradients.len(),
            "every trained parameter needs a gradient, and only those have one"
        );
        self.step += 1;
        let all: Vec<_> = gradients.iter().map(|(_, gradient)| gradient.clone()).collect();
        let grad_norm = B::squared_norm(&all).sqrt();
        let scale = self.clip_coefficient(&grad_norm);
        drop(all);
        let mut in_8_bits = Vec::new();
        for parameter in parameters {
            let gradient = gradients.remove(&parameter.name);
            let gradient = gradient.unwrap_or_else(|| panic!("parameter {} has no gradient", parameter.name));
            match self.moments.remove(&parameter.name).unwrap_or_else(|| self.zero_moments(parameter)) {
                Moments::Float32(first, second) => {
                    let hyper = self.hyper(parameter, learning_rate);
                    let value = take_value(parameter, &gradient);
                    let (value, (first, second)) = B::adamw(value, gradient, (first, second), scale.clone(), &hyper);
                    parameter.value = value;
                    self.moments.insert(parameter.name.clone(), Moments::Float32(first, second));
                }
                Moments::EightBit(moments) => in_8_bits.push((parameter, gradient, moments)),
            }
        }
        self.update_in_8_bits(in_8_bits, scale, learning_rate);
        StepReport { grad_norm }
    }

    /// All parameters of one decay are one operation: an adapter is hundreds of small ones.
    fn update_in_8_bits(
        &mut self,
        parameters: Vec<(&mut Parameter<B>, Tensor<B, 1>, EightBitMoments<B>)>,
        scale: Tensor<B, 1>,
        learning_rate: f64,
    ) {
        let (matrices, vectors): (Vec<_>, Vec<_>) =
            parameters.into_iter().partition(|(parameter, ..)| parameter.shape.len() >= 2);
        for group in [matrices, vectors].into_iter().filter(|group| !group.is_empty()) {
            let hyper = self.hyper(group[0].0, learning_rate);
            let (owners, updates): (Vec<_>, Vec<_>) = group
                .into_iter()
                .map(|(owner, gradient, moments)| {
                    let parameter = take_value(owner, &gradient);
                    (owner, EightBitUpdate { parameter, gradient, moments })
                })
                .unzip();
            let updated = B::adamw_8bit_many(updates, scale.clone(), &hyper);
            for (parameter, (value, moments)) in owners.into_iter().zip(updated) {
                parameter.value = value;
                self.moments.insert(parameter.name.clone(), Moments::EightBit(moments));
            }
        }
    }

    /// `min(1, max / (norm + 1e-6))`, as torch's `clip_grad_norm_` has it.
    fn clip_coefficient(&self, grad_norm: &Tensor<B, 1>) -> Tensor<B, 1> {
        match self.config.max_grad_norm {
            Some(max) => grad_norm.clone().add_scalar(1e-6).recip().mul_scalar(max).clamp_max(1.0),
            None => Tensor::ones([1], &grad_norm.device()),
        }
    }

    /// The numbers of this step for a parameter: vectors (norm weights) do not decay.
    fn hyper(&self, parameter: &Parameter<B>, learning_rate: f64) -> AdamW {
        AdamW {
            learning_rate,
            beta1: self.config.beta1,
            beta2: self.config.beta2,
            epsilon: self.config.epsilon,
            weight_decay: if parameter.shape.len() < 2 { 0.0 } else { self.config.weight_decay },
            step: self.step,
        }
    }

    fn is_eight_bit(&self, parameter: &Parameter<B>) -> bool {
        self.config.moments == MomentFormat::EightBit && parameter.elements() >= SMALLEST_EIGHT_BIT
    }

    fn zero_moments(&self, parameter: &Parameter<B>) -> Moments<B> {
        let (device, elements) = (parameter.value.device(), parameter.elements());
        if !self.is_eight_bit(parameter) {
            let zeros = Tensor::zeros([elements], &device);
            return Moments::Float32(zeros.clone(), zeros);
        }
        let blocks = elements.div_ceil(BLOCK);
        let codes = |map: &DynamicMap| upload_codes::<B>(&vec![map.nearest(0.0); blocks * BLOCK], &device);
        Moments::EightBit(EightBitMoments {
            first_codes: codes(DynamicMap::signed()),
            first_absmax: Tensor::zeros([blocks], &device),
            second_codes: codes(DynamicMap::unsigned()),
            second_absmax: Tensor::zeros([blocks], &device),
        })
    }

    /// The state by name, for a checkpoint. Reads the device.
    pub fn save(&self) -> HostTensor {
        let mut state = HostTensor::new();
        for (name, moments) in &self.moments {
            let mut put = |part: &str, data| state.insert(format!("{name}.{part}"), data);
            match moments {
                Moments::Float32(first, second) => {
                    put("exp_avg", read_f32(first));
                    put("exp_avg_sq", read_f32(second));
                }
                Moments::EightBit(moments) => {
                    put("exp_avg.codes", read_codes(&moments.first_codes));
                    put("exp_avg.absmax", read_f32(&moments.first_absmax));
                    put("exp_avg_sq.codes", read_codes(&moments.second_codes));
                    put("exp_avg_sq.absmax", read_f32(&moments.second_absmax));
                }
            }
        }
        state
    }

    /// Takes a saved state for the given parameters, after `steps` steps.
    ///
    /// # Errors
    /// A state that lacks a tensor or holds one of another size or format.
    pub fn load(
        &mut self,
        parameters: &[&mut Parameter<B>],
        mut state: HostTensor,
        steps: u64,
    ) -> Result<(), OptimError> {
        self.step = steps;
        for parameter in parameters {
            let (device, elements) = (parameter.value.device(), parameter.elements());
            let mut floats = |part: &str, length| {
                take_f32(&mut state, format!("{}.{part}", parameter.name), length)
                    .map(|values| Tensor::<B, 1>::from_floats(values.as_slice(), &device))
            };
            let moments = if self.is_eight_bit(parameter) {
                let blocks = elements.div_ceil(BLOCK);
                let (first_absmax, second_absmax) =
                    (floats("exp_avg.absmax", blocks)?, floats("exp_avg_sq.absmax", blocks)?);
                let mut codes = |part: &str| {
                    take_u8(&mut state, format!("{}.{part}", parameter.name), blocks * BLOCK)
                        .map(|values| upload_codes::<B>(&values, &device))
                };
                let (first_codes, second_codes) = (codes("exp_avg.codes")?, codes("exp_avg_sq.codes")?);
                Moments::EightBit(EightBitMoments { first_codes, first_absmax, second_codes, second_absmax })
            } else {
                Moments::Float32(floats("exp_avg", elements)?, floats("exp_avg_sq", elements)?)
            };
            self.moments.insert(parameter.name.clone(), moments);
        }
        Ok(())
    }
}

/// The value, leaving the gradient's handle in its place: the update then holds the only handle, and may write in place.
fn take_value<B: Kernels>(parameter: &mut Parameter<B>, gradient: &Tensor<B, 1>) -> Tensor<B, 1> {
    std::mem::replace(&mut parameter.value, gradient.clone())
}

fn upload_codes<B: Kernels>(codes: &[u8], device: &B::Device) -> Tensor<B, 1, Int> {
    let dtype: DType = B::code_dtype().into();
    Tensor::from_data(TensorData::new(codes.to_vec(), [codes.len()]).convert_dtype(dtype), (device, dtype))
}

fn read_f32<B: Kernels>(tensor: &Tensor<B, 1>) -> StateData {
    StateData::F32(tensor.to_data().to_vec::<f32>().expect("moments are f32"))
}

fn read_codes<B: Kernels>(tensor: &Tensor<B, 1, Int>) -> StateData {
    let data = tensor.clone().cast(IntDType::I32).into_data().convert::<u8>();
    StateData::U8(data.to_vec::<u8>().expect("codes were just converted to bytes"))
}

fn take_f32(state: &mut HostTensor, name: String, length: usize) -> Result<Vec<f32>, OptimError> {
    match state.remove(&name) {
        Some(StateData::F32(values)) if values.len() == length => Ok(values),
        Some(other) => Err(mismatch(name, format!("{length} f32 values"), &other)),
        None => Err(OptimError::Missing { name }),
    }
}

fn take_u8(state: &mut HostTensor, name: String, length: usize) -> Result<Vec<u8>, OptimError> {
    match state.remove(&name) {
        Some(StateData::U8(values)) if values.len() == length => Ok(values),
        Some(other) => Err(mismatch(name, format!("{length} bytes"), &other)),
        None => Err(OptimError::Missing { name }),
    }
}

fn mismatch(name: String, expected: String, got: &StateData) -> OptimError {
    OptimError::Mismatch { name, expected, got: got.describe() }
}

#[cfg(test)]
mod tests {
    use burn_flex::Flex;

    use super::*;

    fn config(moments: MomentFormat, max_grad_norm: Option<f64>) -> AdamWConfig {
        AdamWConfig { beta1: 0.9, beta2: 0.999, epsilon: 1e-8, weight_decay: 0.1, max_grad_norm, moments }
    }

    /// A large matrix, a small one and a vector.
    fn parameters() -> Vec<Parameter<Flex>> {
        [("large", vec![80, 64]), ("small", vec![4, 4]), ("vector", vec![64])]
            .into_iter()
            .map(|(name, shape)| {
                let values: Vec<f32> = (0..shape.iter().product()).map(|index| (index as f32 * 0.37).sin()).collect();
                Parameter::from_host(name, &shape, &values, &Default::default())
            })
            .collect()
    }

    fn gradients(parameters: &[Parameter<Flex>], step: u64) -> GradientMap<Flex> {
        let mut gradients = GradientMap::default();
        for parameter in parameters {
            let values: Vec<f32> =
                (0..parameter.elements()).map(|index| (index as f32 * 0.11 + step as f32).cos()).collect();
            gradients.add(parameter, Tensor::<Flex, 1>::from_floats(values.as_slice(), &Default::default()));
        }
        gradients
    }

    fn take_steps(optimizer: &mut Optimizer<Flex>, parameters: &mut [Parameter<Flex>], steps: std::ops::Range<u64>) {
        for step in steps {
            let gradients = gradients(parameters, step);
            optimizer.step(parameters.iter_mut().collect(), gradients, 1e-2);
        }
    }

    fn values(parameters: &[Parameter<Flex>]) -> Vec<Vec<f32>> {
        parameters.iter().map(|parameter| parameter.value.to_data().to_vec().unwrap()).collect()
    }

    #[test]
    fn saved_and_loaded_optimizer_continues_bit_for_bit() {
        for moments in [MomentFormat::Float32, MomentFormat::EightBit] {
            let (mut straight, mut straight_parameters) = (Optimizer::new(config(moments, Some(1.0))), parameters());
            take_steps(&mut straight, &mut straight_parameters, 0..6);

            let (mut first, mut resumed_parameters) = (Optimizer::new(config(moments, Some(1.0))), parameters());
            take_steps(&mut first, &mut resumed_parameters, 0..3);
            let (state, steps) = (first.save(), first.steps());
            let mut second = Optimizer::new(config(moments, Some(1.0)));
            second.load(&resumed_parameters.iter_mut().collect::<Vec<_>>(), state, steps).unwrap();
            take_steps(&mut second, &mut resumed_parameters, 3..6);
            assert_eq!(values(&straight_parameters), values(&resumed_parameters));
            assert_eq!(straight.save(), second.save());
        }
    }

    #[test]
    fn small_parameters_keep_float_moments_in_the_8_bit_optimizer() {
        let (mut optimizer, mut parameters) = (Optimizer::new(config(MomentFormat::EightBit, None)), parameters());
        take_steps(&mut optimizer, &mut parameters, 0..1);
        let state = optimizer.save();
        assert!(matches!(state["large.exp_avg.codes"], StateData::U8(ref codes) if codes.len() == 80 * 64));
        assert!(matches!(state["small.exp_avg"], StateData::F32(ref values) if values.len() == 16));
    }

    #[test]
    fn clipping_scales_the_gradient_to_the_largest_norm() {
        // Without decay, the first step depends on the gradient's scale only through epsilon: compare first moments.
        let moments_of = |max_grad_norm| {
            let (mut optimizer, mut parameters) =
                (Optimizer::new(config(MomentFormat::Float32, max_grad_norm)), parameters());
            let gradients = gradients(&parameters, 0);
            let report = optimizer.step(parameters.iter_mut().collect(), gradients, 1e-2);
            let norm: f32 = report.grad_norm.into_scalar();
            let StateData::F32(values) = optimizer.save().remove("large.exp_avg").unwrap() else {
                panic!("float moments")
            };
            (norm, values[0])
        };
        let ((norm, free), (same_norm, clipped)) = (moments_of(None), moments_of(Some(2.0)));
        assert_eq!(norm, same_norm, "the reported norm is that before clipping");
        assert!((clipped / free - 2.0 / norm).abs() < 1e-5 && norm > 2.0);
        let (_, unclipped) = moments_of(Some(1e6));
        assert_eq!(unclipped, free, "a small norm is left alone");
    }

    #[test]
    fn weight_decay_spares_vectors() {
        let mut parameters = parameters();
        let before = values(&parameters);
        let mut gradients = GradientMap::default();
        for parameter in &parameters {
            gradients.add(parameter, Tensor::<Flex, 1>::zeros([parameter.elements()], &Default::default()));
        }
        let mut optimizer = Optimizer::new(config(MomentFormat::Float32, None));
        optimizer.step(parameters.iter_mut().collect(), gradients, 1e-2);
        let after = values(&parameters);
        assert_eq!(after[2], before[2]);
        assert!((after[0][1] / before[0][1] - (1.0 - 1e-2 * 0.1)).abs() < 1e-6);
    }

    #[test]
    fn a_state_of_another_recipe_is_refused_by_name() {
        let mut parameters = parameters();
        let mut float = Optimizer::new(config(MomentFormat::Float32, None));
        take_steps(&mut float, &mut parameters, 0..1);
        let mut eight_bit = Optimizer::new(config(MomentFormat::EightBit, None));
        let state = float.save();
        let error = eight_bit.load(&parameters.iter_mut().collect::<Vec<_>>(), state, 1).unwrap_err().to_string();
        assert!(error.contains("large.exp_avg.absmax"), "{error}");
        let mut short = float.save();
        short.insert("small.exp_avg".into(), StateData::F32(vec![0.0; 3]));
        let error = float.load(&parameters.iter_mut().collect::<Vec<_>>(), short, 1).unwrap_err().to_string();
        assert!(error.contains("small.exp_avg") && error.contains("16 f32 values"), "{error}");
    }
}
