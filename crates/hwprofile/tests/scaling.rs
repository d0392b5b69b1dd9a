//! Steps on many accelerators against measurements of two and four H100s.
//!
//! Trade-off: measurements are files of the whole project, so this test is in no package.

use firebrick_hwprofile::AcceleratorSpec;
use firebrick_hwprofile::scaling::{EIGHT_BY_400_GBIT, LINK_SHARE, Links, RankStep, Sharding};

const MIB: f64 = (1 << 20) as f64;

fn h100() -> Links {
    Links::of(AcceleratorSpec::named("h100").unwrap(), EIGHT_BY_400_GBIT).unwrap()
}

/// QLoRA of Llama-3.1-8B, rank 16.
const QLORA_8B: RankStep =
    RankStep { micro_batch_s: 0.714, micro_batches: 1, gradient_bytes: 168.0 * MIB, bucket_bytes: None };
/// Every weight of Llama-3.1-8B.
const FULL_8B: RankStep = RankStep { gradient_bytes: 4.0 * 8.03e9, bucket_bytes: Some(25.0 * MIB), ..QLORA_8B };

/// Returns the seconds of a step whose computation takes `alone` seconds.
fn seconds(step: RankStep, alone: f64, ranks: usize, sharding: Sharding) -> f64 {
    alone + RankStep { micro_batch_s: alone, ..step }.exposed(ranks, &h100(), sharding)
}

fn assert_within(share: f64, found: f64, expected: f64) {
    assert!((found / expected - 1.0).abs() < share, "{found:e}, expected {expected:e}");
}

#[test]
fn sums_between_two_h100s_take_what_was_measured() {
    for (bytes, seconds) in [(MIB, 40e-6), (168.0 * MIB, 0.61e-3), (1024.0 * MIB, 1024.0 * MIB / 328e9)] {
        assert_within(0.1, h100().all_reduce(bytes, 2), seconds);
    }
}

/// 3 rows of 4,096 tokens: each card alone, then both.
#[test]
fn a_step_on_two_h100s_takes_what_was_measured() {
    let reports = include_str!("../../../benches/results/h100-two-cards.json");
    let reports: serde_json::Value = serde_json::from_str(reports).unwrap();
    let median = |report: usize| reports[report]["step_s"]["median"].as_f64().unwrap();
    assert_within(0.01, seconds(QLORA_8B, median(0).max(median(1)), 2, Sharding::None), median(2));
}

/// Returns the largest of a list of milliseconds, in seconds.
fn slowest(milliseconds: &serde_json::Value) -> f64 {
    milliseconds.as_array().unwrap().iter().map(|ms| ms.as_f64().unwrap() / 1e3).fold(0.0, f64::max)
}

/// The computation is what the slowest of the cards took by itself. Offloaded runs and ZeRO-3 are not modeled.
#[test]
fn steps_on_four_h100s_are_within_8_percent() {
    let report = include_str!("../../../benches/results/h100-four-cards.json");
    let report: serde_json::Value = serde_json::from_str(report).unwrap();
    let mut compared = 0;
    let mut compare = |step, alone, run: &serde_json::Value, sharding| {
        let ranks = run["ranks"].as_u64().unwrap() as usize;
        assert_within(0.08, seconds(step, slowest(alone), ranks, sharding), slowest(&run["step_ms"]));
        compared += 1;
    };
    for runs in report["scaling"].as_array().unwrap().iter().filter(|runs| runs["setting"] == "bf16-selective") {
        for run in runs["together"].as_array().unwrap() {
            compare(QLORA_8B, &runs["one_card_each"]["step_ms"], run, Sharding::None);
        }
    }
    for run in report["full"]["runs"].as_array().unwrap() {
        if run["setting"].as_str().unwrap().contains("zero2") {
            compare(FULL_8B, &run["own_ms"], run, Sharding::Zero2);
        }
    }
    assert_eq!(compared, 6);
}

#[test]
fn one_rank_communicates_nothing_and_more_ranks_never_less() {
    for step in [QLORA_8B, FULL_8B] {
        for sharding in [Sharding::None, Sharding::Zero1, Sharding::Zero2] {
            let exposed = [1, 2, 4, 8, 16, 64].map(|ranks| step.exposed(ranks, &h100(), sharding));
            assert!(exposed[0] == 0.0 && exposed.is_sorted(), "{sharding:?}: {exposed:?}");
        }
    }
}

#[test]
fn a_tree_takes_over_from_a_ring_where_hops_cost_more_than_bytes() {
    let links = h100();
    // 1,024 ranks: a ring's 2,046 hops take 8.5 ms, a tree's 28 take 1.1.
    let small = links.all_reduce(MIB, 1024);
    assert!((1e-3..2e-3).contains(&small), "{small}");
    assert!(links.all_reduce(16384.0 * MIB, 16) < 2.0 * 16384.0 * MIB / (LINK_SHARE * 400e9));
}
