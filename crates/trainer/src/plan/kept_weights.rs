//! Decides how many frozen weights stay on the device in the form that GEMMs read, instead of being converted again in every pass.
//!
//! In 8-bit floats each pass has its own copy; those of the backward come first, since writing them transposed costs more. In the compute format both
//! passes read the same copy.
//! Trade-off: with "auto" the memory of a run depends on what is free; its numbers do not.

use firebrick_hwprofile::memory::human_bytes;
use firebrick_kernels::{BackendKind, TrainingShape, converted_weights_bytes};

use crate::config::Auto;
use crate::plan::Chosen;
use crate::plan::fit::Case;
use crate::plan::wish::Wish;

/// Returns the bytes of the weights that stay (`None` if no weights are converted), and the run with them.
pub(super) fn decide(
    case: &Case<'_>,
    wish: &Wish<'_>,
    training: TrainingShape,
) -> (Option<Chosen<u64>>, TrainingShape) {
    let [forward, backward] = converted_weights_bytes(case.spec, &training);
    let all = forward + backward;
    if case.backend != BackendKind::Cuda || all == 0 {
        return (None, training);
    }
    let (budget, why) = match wish.kept_weights_bytes {
        Auto::Given(bytes) => (bytes, "train.kept_weights_gib"),
        Auto::Auto if !wish.recipe.pack => {
            (case.left(&training) / 2, "auto: half of what fits, since rows of many lengths leave buffers of each")
        }
        Auto::Auto => (case.left(&training), "auto: what fits"),
    };
    let of_backward = budget.min(backward);
    let kept_bytes = [(budget - of_backward).min(forward), of_backward];
    let why = format!("{why}, of {} that would be written again in every pass", human_bytes(all));
    (Some(Chosen::new(kept_bytes.iter().sum(), why)), TrainingShape { kept_bytes, ..training })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::fixtures::Example;

    const GIB: f64 = (1_u64 << 30) as f64;

    /// Returns the GiB that stay for the forward and for the backward of an 8B model, on a card of this size.
    fn kept(changes: &[&str], card_gib: u64) -> Option<[f64; 2]> {
        let fp8 = ["pack=true", "compute=fp8", "train.recompute=selective", "train.micro_batch_size=3"];
        let example = Example::new(&[&fp8, changes].concat(), card_gib, 512);
        let (chosen, training) = decide(&example.case(), &example.wish(), example.training());
        assert_eq!(chosen?.value, training.kept_bytes.iter().sum::<u64>());
        Some(training.kept_bytes.map(|bytes| bytes as f64 / GIB))
    }

    #[test]
    fn all_weights_stay_where_there_is_room_and_those_of_the_backward_come_first() {
        let [forward, backward] = kept(&[], 80).unwrap();
        assert!((6.5..7.2).contains(&forward) && (6.5..7.2).contains(&backward), "{forward} {backward}");
        let [forward, backward] = kept(&[], 52).unwrap();
        assert!(forward == 0.0 && backward > 1.0 && backward < 6.0, "{forward} {backward}");
        assert_eq!(kept(&["train.kept_weights_gib=0"], 80), Some([0.0; 2]));
        let [forward, backward] = kept(&["train.kept_weights_gib=8"], 80).unwrap();
        assert!((forward + backward - 8.0).abs() < 1e-6 && backward > 6.5, "{forward} {backward}");
    }

    #[test]
    fn one_buffer_of_the_compute_format_serves_both_passes() {
        let [forward, backward] = kept(&["compute=bf16"], 80).unwrap();
        assert!((13.0..14.5).contains(&forward) && backward == 0.0, "{forward} {backward}");
        let [forward, backward] = kept(&["compute=bf16"], 52).unwrap();
        assert!((3.0..9.0).contains(&forward) && backward == 0.0, "{forward} {backward}");
        let [of_many_lengths, _] = kept(&["compute=bf16", "pack=false"], 52).unwrap();
        assert!((of_many_lengths * 2.0 - forward).abs() < 0.1, "{of_many_lengths} {forward}");
        assert_eq!(kept(&["compute=bf16", "train.kept_weights_gib=0"], 80), Some([0.0; 2]));
        assert_eq!(kept(&["compute=bf16", "mode=lora", "bnb_4bit="], 80), None);
    }
}
