//! Steps on many accelerators against measurements of two and four H100s, and the table of docs/scaling.md.
//!
//! Trade-off: measurements and page are files of the whole project, so this test is in no package.

use std::fmt::Write;

use firebrick_hwprofile::AcceleratorSpec;
use firebrick_hwprofile::scaling::{EIGHT_BY_400_GBIT, LINK_SHARE, Links, RankStep, Sharding};

const MIB: f64 = (1 << 20) as f64;
const RANKS: [usize; 5] = [2, 4, 8, 16, 64];

fn h100() -> Links {
    Links::of(AcceleratorSpec::named("h100").unwrap(), EIGHT_BY_400_GBIT).unwrap()
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

/// QLoRA of Llama-3.1-8B, 3 rows of 4,096 tokens, rank 16: each card alone, then both.
#[test]
fn a_step_on_two_h100s_takes_what_was_measured() {
    let reports = include_str!("../../../benches/results/h100-two-cards.json");
    let reports: serde_json::Value = serde_json::from_str(reports).unwrap();
    let median = |report: usize| reports[report]["step_s"]["median"].as_f64().unwrap();
    let slower = median(0).max(median(1));
    let predicted = RankStep { micro_batch_s: slower, ..qlora_8b() }.on(2, &h100(), Sharding::None);
    assert_within(0.01, predicted.seconds(), median(2));
}

/// Reads the report of steps on four H100s.
fn four_cards() -> serde_json::Value {
    serde_json::from_str(include_str!("../../../benches/results/h100-four-cards.json")).unwrap()
}

/// Returns the largest of a list of milliseconds, in seconds.
fn slowest(milliseconds: &serde_json::Value) -> f64 {
    milliseconds.as_array().unwrap().iter().map(|ms| ms.as_f64().unwrap() / 1e3).fold(0.0, f64::max)
}

#[test]
fn steps_of_adapters_are_within_8_percent() {
    let report = four_cards();
    for runs in report["scaling"].as_array().unwrap() {
        let alone = slowest(&runs["one_card_each"]["step_ms"]);
        let host_bytes = if runs["setting"] == "fp8-offloaded" { OFFLOADED_8_ROWS } else { 0.0 };
        for run in runs["together"].as_array().unwrap() {
            let ranks = run["ranks"].as_u64().unwrap() as usize;
            let step = RankStep { micro_batch_s: alone, host_bytes, ..qlora_8b() };
            assert_within(0.08, step.on(ranks, &h100(), Sharding::None).seconds(), slowest(&run["step_ms"]));
        }
    }
}

/// The computation is what the slowest of the ranks took by itself.
#[test]
fn steps_of_all_weights_are_within_8_percent() {
    let report = four_cards();
    let mut compared = 0;
    for run in report["full"]["runs"].as_array().unwrap() {
        let sharding = match run["setting"].as_str().unwrap() {
            name if name.contains("zero3") => Sharding::Zero3,
            name if name.contains("zero2") => Sharding::Zero2,
            _ => continue,
        };
        let step = RankStep { micro_batch_s: slowest(&run["own_ms"]), ..full_8b() };
        let ranks = run["ranks"].as_u64().unwrap() as usize;
        assert_within(0.08, step.on(ranks, &h100(), sharding).seconds(), slowest(&run["step_ms"]));
        compared += 1;
    }
    assert_eq!(compared, 4);
}

#[test]
fn one_rank_communicates_nothing_and_more_ranks_never_less() {
    let links = h100();
    for step in [qlora_8b(), full_1b(), full_8b(), offloaded_8b()] {
        for sharding in [Sharding::None, Sharding::Zero1, Sharding::Zero2, Sharding::Zero3] {
            let alone = step.on(1, &links, sharding);
            assert_eq!((alone.communication, alone.efficiency()), (0.0, 1.0), "{sharding:?}");
            let steps = RANKS.map(|ranks| step.on(ranks, &links, sharding));
            assert!(steps.windows(2).all(|pair| pair[1].seconds() >= pair[0].seconds()), "{sharding:?}: {steps:?}");
            assert!(steps.iter().all(|step| step.exposed <= step.communication), "{sharding:?}");
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

/// The inputs of both halves of 32 layers and attention's output, 8 rows of 4,096 tokens in 16 bits.
const OFFLOADED_8_ROWS: f64 = 24.0 * 1024.0 * MIB;

/// 3 rows of 4,096 tokens in 714 ms, benches/results/h100-four-cards.json.
fn qlora_8b() -> RankStep {
    RankStep {
        micro_batch_s: 0.714,
        micro_batches: 1,
        gradient_bytes: 168.0 * MIB,
        weight_bytes: 5.70e9,
        common_bytes: 168.0 * MIB,
        host_bytes: 0.0,
        blocks: 32,
        bucket_bytes: None,
    }
}

/// 571 ms for 8 rows of 4,096 tokens, docs/roofline.md; weights travel in f32.
fn full_1b() -> RankStep {
    RankStep {
        micro_batch_s: 0.571,
        micro_batches: 1,
        gradient_bytes: 4.0 * 1.236e9,
        weight_bytes: 4.0 * 0.973e9,
        common_bytes: 4.0 * 0.263e9,
        host_bytes: 0.0,
        blocks: 16,
        bucket_bytes: Some(25.0 * MIB),
    }
}

/// 2 rows of 4,096 tokens under ZeRO-3, what each of two cards took by itself: benches/results/h100-four-cards.json.
fn full_8b() -> RankStep {
    RankStep {
        micro_batch_s: 0.863,
        gradient_bytes: 4.0 * 8.03e9,
        weight_bytes: 4.0 * 6.98e9,
        common_bytes: 4.0 * 1.05e9,
        blocks: 32,
        ..full_1b()
    }
}

/// 8 rows of 4,096 tokens in fp8, benches/results/h100-four-cards.json.
fn offloaded_8b() -> RankStep {
    RankStep { micro_batch_s: 1.687, host_bytes: OFFLOADED_8_ROWS, ..qlora_8b() }
}

/// The table of docs/scaling.md: efficiency and exposed milliseconds by number of H100s.
fn table() -> String {
    let rows = [
        ("QLoRA 8B, 12,288 tokens", qlora_8b(), vec![Sharding::None, Sharding::Zero3]),
        ("full 1B, 32,768 tokens", full_1b(), vec![Sharding::None, Sharding::Zero1, Sharding::Zero2, Sharding::Zero3]),
        ("full 8B, 8,192 tokens", full_8b(), vec![Sharding::None, Sharding::Zero2, Sharding::Zero3]),
        ("QLoRA 8B in fp8, 32,768 tokens, offloaded", offloaded_8b(), vec![Sharding::None]),
    ];
    let mut text = "| per rank and step | sharding |".to_owned();
    RANKS.iter().for_each(|ranks| write!(text, " {ranks} |").unwrap());
    text += &format!("\n|---|---|{}\n", "---:|".repeat(RANKS.len()));
    for (what, step, shardings) in rows {
        for sharding in shardings {
            let name = match sharding {
                Sharding::None => "none",
                Sharding::Zero1 => "ZeRO-1",
                Sharding::Zero2 => "ZeRO-2",
                Sharding::Zero3 => "ZeRO-3",
            };
            write!(text, "| {what} | {name} |").unwrap();
            for ranks in RANKS {
                let scaled = step.on(ranks, &h100(), sharding);
                let exposed = scaled.exposed + scaled.copies;
                write!(text, " {:.3} ({:.1}) |", scaled.efficiency(), 1e3 * exposed).unwrap();
            }
            text.push('\n');
        }
    }
    text
}

/// `UPDATE_GOLDEN=1` writes the table.
#[test]
fn the_table_of_the_documentation_is_what_the_model_says() {
    const BEGIN: &str = "<!-- scaling table -->\n";
    const END: &str = "<!-- end -->";
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/scaling.md");
    let page = std::fs::read_to_string(&path).unwrap();
    let (before, rest) = page.split_once(BEGIN).unwrap();
    let (found, after) = rest.split_once(END).unwrap();
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        std::fs::write(&path, format!("{before}{BEGIN}{}{END}{after}", table())).unwrap();
    } else {
        assert_eq!(found, table());
    }
}
