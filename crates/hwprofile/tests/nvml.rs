//! Tests what follows from NVML's answers, with a recording of one card (`recorded/record.py` has the calls).
//!
//! Trade-off: partitions are added to the recording by hand, because that machine had none.

use firebrick_hwprofile::nvidia::{CudaEnvironment, NvmlDescription, SliceDescription, gpus};
use firebrick_hwprofile::{Gpu, Pcie};

fn recorded() -> NvmlDescription {
    serde_json::from_str(include_str!("recorded/h100.json")).expect("a description")
}

fn seen(description: &NvmlDescription, visible: Option<&str>) -> (Vec<Gpu>, Vec<String>) {
    let environment = CudaEnvironment { visible_devices: visible.map(str::to_owned), device_order: None };
    let mut notes = Vec::new();
    let found = gpus(description, &environment, &mut notes);
    (found, notes)
}

#[test]
fn a_recorded_card_has_its_row_its_slot_and_its_limits() {
    let (found, notes) = seen(&recorded(), None);
    let card = &found[0];
    assert_eq!(card.spec.map(|spec| spec.id), Some("h100"));
    assert_eq!(card.compute_capability, Some((9, 0)));
    assert_eq!(card.pcie, Some(Pcie { generation: 5, lanes: 16 }));
    assert_eq!(card.power_limit_w, Some(700.0));
    let gib = card.memory_total_bytes as f64 / f64::from(1 << 30);
    assert!((79.0..80.0).contains(&gib) && card.memory_free_bytes <= card.memory_total_bytes, "{gib}");
    assert!(notes.is_empty(), "{notes:?}");
}

#[test]
fn clocks_of_the_recording_give_the_peaks_of_the_table() {
    let mut unknown = recorded();
    for card in &mut unknown.cards {
        card.name = "NVIDIA Future Accelerator".to_owned();
    }
    let (known, _) = seen(&recorded(), None);
    let (found, notes) = seen(&unknown, None);
    let (row, derived) = (known[0].spec.expect("in the table"), found[0].spec.expect("from its compute capability"));
    assert_eq!(derived.kind, row.kind);
    let bandwidth = derived.bandwidth_tb_s.value / row.bandwidth_tb_s.value;
    assert!((bandwidth - 1.0).abs() < 0.01, "{bandwidth}");
    // The driver's maximum clock is above the one in the maker's figure.
    let bf16 = derived.rates.bf16.value / row.rates.bf16.value;
    assert!((1.0..1.1).contains(&bf16), "{bf16}");
    assert!(notes.iter().any(|note| note.contains("compute capability")), "{notes:?}");
}

#[test]
fn a_lowered_power_limit_is_noted() {
    let mut limited = recorded();
    limited.cards[0].power_limit_mw = Some(350_000);
    let (found, notes) = seen(&limited, None);
    assert_eq!(found[0].power_limit_w, Some(350.0));
    assert!(notes.iter().any(|note| note.contains("350 W of its 700 W")), "{notes:?}");
}

#[test]
fn hidden_cards_are_left_out_and_partitions_peakless() {
    let mut description = recorded();
    let uuid = description.cards[0].uuid.clone();
    assert_eq!(seen(&description, Some("-1")).0.len(), 0);
    assert_eq!(seen(&description, Some(&uuid)).0[0].uuid, Some(uuid));
    let card = &mut description.cards[0];
    card.mig_enabled = true;
    card.slices = vec![SliceDescription {
        uuid: "MIG-1".to_owned(),
        name: format!("{} MIG 1g.10gb", card.name),
        memory_total_bytes: 10 << 30,
        memory_free_bytes: 9 << 30,
    }];
    let (found, notes) = seen(&description, Some("MIG-1"));
    assert!(found[0].is_partition && found[0].spec.is_none() && found[0].memory_free_bytes == 9 << 30);
    assert!(notes.iter().any(|note| note.contains("partition")), "{notes:?}");
}
