//! Counts what ranks divide (ZeRO), for the rank with the largest share.
//!
//! The formulas are those of docs/scaling.md. The largest shares of gradients and of weights are counted together, even if they are on different
//! ranks.
//! Trade-off: a parameter is never divided, so with few parameters or many ranks the largest share is above average.

use std::collections::BTreeMap;

use firebrick_arch::{ModelSpec, Role, TensorSpec};
use firebrick_kernels::{BaseStorage, DividedBytes, Storage};
use firebrick_parallel::{BUCKET_BYTES, owners};
use firebrick_precision::FloatType;

use crate::config::ZeroStage;

/// Returns the owner of each layer weight that ranks divide; that of a trained weight also has its optimizer state.
pub fn weight_owners(spec: &ModelSpec, trains: bool, world_size: usize) -> BTreeMap<String, usize> {
    let is_divided = |tensor: &TensorSpec| tensor.role == Role::Projection && tensor.layer.is_some();
    let trained = |tensor: &TensorSpec| is_divided(tensor) || trains && tensor.may_train();
    let tensors: Vec<TensorSpec> = spec.stacked_tensors().into_iter().filter(trained).collect();
    let owners = owners_of(&tensors, world_size);
    let pairs = tensors.into_iter().zip(owners).filter(|(tensor, _)| is_divided(tensor));
    pairs.map(|(tensor, owner)| (tensor.name, owner)).collect()
}

fn owners_of(tensors: &[TensorSpec], world_size: usize) -> Vec<usize> {
    owners(tensors.iter().map(|tensor| (tensor.name.as_str(), tensor.elements())), world_size)
}

/// Returns the bytes that a stage divides in a model that is trained this way. Gradients of parameters in bf16 are summed in the format `sums`.
pub(super) fn divided_bytes(
    stage: ZeroStage,
    world_size: usize,
    spec: &ModelSpec,
    storage: Storage<'_>,
    sums: FloatType,
    trained: &[TensorSpec],
) -> DividedBytes {
    let mut divided = DividedBytes::default();
    if world_size == 1 {
        return divided;
    }
    if stage.divides_gradients() {
        let bytes = |tensor: &TensorSpec| gradient_bytes(storage.base, sums, tensor);
        (divided.gradients_elsewhere, divided.gradients_leaving) = gradients(trained, world_size, bytes);
    }
    if stage.divides_weights() {
        (divided.weights_elsewhere, divided.weights_borrowed) = weights(spec, storage, world_size);
    }
    divided
}

/// Returns the gradient bytes that other ranks hold, and those in flight: two buckets, each of which may end with a parameter larger than itself.
fn gradients(trained: &[TensorSpec], world_size: usize, bytes: impl Fn(&TensorSpec) -> u64) -> (u64, u64) {
    let all: u64 = trained.iter().map(&bytes).sum();
    let mut shares = vec![0; world_size];
    for (tensor, owner) in trained.iter().zip(owners_of(trained, world_size)) {
        shares[owner] += bytes(tensor);
    }
    let mut sizes: Vec<u64> = trained.iter().map(&bytes).collect();
    sizes.sort_unstable_by(|a, b| b.cmp(a));
    let leaving = 2 * BUCKET_BYTES as u64 + sizes.iter().take(2).sum::<u64>();
    (all - shares.into_iter().max().unwrap_or(0), leaving.min(all))
}

fn gradient_bytes(base: BaseStorage, sums: FloatType, tensor: &TensorSpec) -> u64 {
    let format = if base.trained_format(tensor.role) == FloatType::Bf16 { sums } else { FloatType::F32 };
    (tensor.elements() * format.bytes()) as u64
}

/// Returns the bytes of layer weights owned by other ranks, and those of the two consecutive layers that are gathered at a time.
fn weights(spec: &ModelSpec, storage: Storage<'_>, world_size: usize) -> (u64, u64) {
    let owners = weight_owners(spec, storage.base.trains(), world_size);
    // Indexed by layer, then by rank.
    let mut bytes = vec![vec![0u64; world_size]; spec.layers.len()];
    for tensor in spec.stacked_tensors() {
        if let (Some(owner), Some(layer)) = (owners.get(&tensor.name), tensor.layer) {
            bytes[layer][*owner] += storage.bytes(spec, &tensor);
        }
    }
    let of = |rank: usize| bytes.iter().map(|layer| layer[rank]).sum::<u64>();
    let foreign = |layer: &[u64], rank: usize| layer.iter().sum::<u64>() - layer[rank];
    let borrowed = |rank: usize| {
        let layers: Vec<u64> = bytes.iter().map(|layer| foreign(layer, rank)).collect();
        let pairs = layers.windows(2).map(|pair| pair.iter().sum()).max();
        pairs.unwrap_or_else(|| layers.iter().sum())
    };
    let all: u64 = bytes.iter().flatten().sum();
    let most = (0..world_size).map(of).max().unwrap_or(0);
    (all - most, (0..world_size).map(borrowed).max().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use firebrick_arch::LoraConfig;
    use firebrick_arch::shapes::llama_3_1_8b;
    use firebrick_precision::{Format, QuantFormat};

    use super::*;

    static NONE: BTreeSet<String> = BTreeSet::new();

    fn storage(base: BaseStorage, dense: &BTreeSet<String>) -> Storage<'_> {
        Storage { base, lora: None, compute: FloatType::Bf16, dense }
    }

    #[test]
    fn shares_of_gradients_and_weights_are_nearly_even() {
        let model = llama_3_1_8b();
        let trained = model.tensors();
        let bytes = 4 * model.parameters();
        for ranks in [2, 4, 8] {
            let in_f32 = |tensor: &TensorSpec| gradient_bytes(BaseStorage::Trained, FloatType::F32, tensor);
            let (elsewhere, leaving) = gradients(&trained, ranks, in_f32);
            let in_bf16 = |tensor: &TensorSpec| gradient_bytes(BaseStorage::TrainedBf16, FloatType::Bf16, tensor);
            let halves = gradients(&trained, ranks, in_bf16);
            assert!(halves.0 < elsewhere * 51 / 100 && halves.1 < leaving * 52 / 100, "{halves:?}");
            let share = bytes - elsewhere;
            assert!(share >= bytes / ranks as u64 && share < bytes / ranks as u64 * 11 / 10, "{ranks}: {share}");
            // The two largest parameters are the embedding and the head.
            assert_eq!(leaving, 2 * (25 << 20) + 2 * 4 * 128_256 * 4096);
        }
    }

    #[test]
    fn two_layers_are_borrowed_at_most() {
        let model = llama_3_1_8b();
        let format = Format::Quantized(QuantFormat::Nf4 { double_quant: true });
        let lora = LoraConfig::default();
        let storage = Storage { lora: Some(&lora), ..storage(BaseStorage::Frozen(format), &NONE) };
        let projections = model.tensors().into_iter().filter(|tensor| tensor.role == Role::Projection);
        let all: u64 = projections.map(|tensor| format.bytes(&tensor.shape) as u64).sum();
        for ranks in [2, 4, 8] {
            let (elsewhere, borrowed) = weights(&model, storage, ranks);
            let share = all - elsewhere;
            assert!(share * ranks as u64 >= all && share * ranks as u64 <= all * 11 / 10, "{ranks}: {share} of {all}");
            assert!(borrowed <= all / 16 && borrowed >= all / 16 / 3, "{ranks}: {borrowed}");
        }
    }

    #[test]
    fn one_rank_divides_nothing() {
        let (model, storage) = (llama_3_1_8b(), storage(BaseStorage::Trained, &NONE));
        let divided = |stage, ranks| divided_bytes(stage, ranks, &model, storage, FloatType::F32, &model.tensors());
        assert_eq!(divided(ZeroStage::WEIGHTS, 1), DividedBytes::default());
        let stage_1 = divided(ZeroStage::STATE, 4);
        assert_eq!(stage_1, DividedBytes::default(), "stage 1 divides the state alone");
    }
}
