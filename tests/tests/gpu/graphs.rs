//! Steps whose launches are repeated as CUDA graphs, against the same steps launch by launch.
//!
//! Trade-off: sums of attention's backward in bf16 have no fixed order by default, so two runs are only nearly alike there.

use burn_tensor::DType;
use firebrick_kernels::backends::Cuda;
use firebrick_kernels::backends::cuda::{launches_in_graphs, use_graphs};
use firebrick_kernels::{GemmFormat, Recompute};
use firebrick_model::{BaseStorage, PassOptions};
use firebrick_tests::{NF4, TRAINED, packed, trainer};

use super::{half, has_card, has_fp8, ids};

const STEPS: usize = 8;

/// Returns the losses of steps over alternating batches, the third of which has documents of other lengths, and the number of launches in graphs.
fn losses(
    storage: BaseStorage,
    (dtype, gemms): (DType, GemmFormat),
    pass: PassOptions,
    graphs: bool,
) -> (Vec<f32>, usize) {
    let adapter = (storage != TRAINED).then_some("tiny-llama-lora");
    let mut trainer = trainer::<Cuda>("tiny-llama", adapter, storage, dtype, gemms, pass);
    let device = trainer.model.device().clone();
    use_graphs(&device, graphs);
    let batch = |lengths: [usize; 3]| {
        let documents = lengths.map(|length| ids(length, length, 7));
        packed(&documents.each_ref().map(Vec::as_slice))
    };
    let batches = [batch([39, 29, 60]), batch([39, 29, 60]), batch([50, 20, 58])];
    let before = launches_in_graphs(&device);
    let mut step =
        |number: usize| trainer.step(&batches[number % 3..][..1]).expect("one rank reaches itself").read().loss;
    ((0..STEPS).map(&mut step).collect(), launches_in_graphs(&device) - before)
}

#[test]
fn steps_repeated_as_graphs_have_the_losses_of_launches_one_by_one() {
    if !has_card() {
        return;
    }
    let [f32, half] = [DType::F32, half()].map(|dtype| (dtype, GemmFormat::Compute));
    let fp8 = (DType::BF16, GemmFormat::Fp8);
    let mut cases = vec![(NF4, f32, 1e-5), (NF4, half, 1e-2), (TRAINED, f32, 1e-5), (TRAINED, half, 1e-2)];
    if has_fp8() {
        cases.extend([(NF4, fp8, 2e-2), (TRAINED, fp8, 2e-2)]);
    }
    for (storage, arithmetic, tolerance) in cases {
        for (recompute, offload) in [
            (Recompute::Full, false),
            (Recompute::Projections, true),
            (Recompute::Selective, false),
            (Recompute::None, false),
        ] {
            let pass = PassOptions { recompute, offload, ..PassOptions::default() };
            let (expected, without) = losses(storage, arithmetic, pass, false);
            let (found, in_graphs) = losses(storage, arithmetic, pass, true);
            assert!(without == 0 && in_graphs > 0, "{in_graphs} launches in graphs, {without} without");
            for (step, (found, expected)) in found.iter().zip(&expected).enumerate() {
                let context = format!("{storage:?} {arithmetic:?} {pass:?}, step {step}");
                assert!((found - expected).abs() <= tolerance, "{context}: {found}, {expected} one by one");
            }
        }
    }
}
