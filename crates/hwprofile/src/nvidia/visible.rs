//! The cards that CUDA shows to this process, and their order: `CUDA_VISIBLE_DEVICES`, `CUDA_DEVICE_ORDER` and MIG.
//!
//! The rules are those of NVIDIA's CUDA programming guide (environment variables) and MIG user guide: numbers count from 0, `GPU-` and
//! `MIG-` are prefixes of identifiers, and the first entry that names no card ends the list.
//! Trade-off: CUDA numbers the fastest card first by a rule that NVIDIA does not document; cards of different names get a note.

use super::description::{CardDescription, NvmlDescription, SliceDescription};

/// The variables that decide.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CudaEnvironment {
    /// `CUDA_VISIBLE_DEVICES`.
    pub visible_devices: Option<String>,
    /// `CUDA_DEVICE_ORDER`.
    pub device_order: Option<String>,
}

impl CudaEnvironment {
    /// Reads this process's variables.
    pub fn of_this_process() -> Self {
        let read = |name| std::env::var(name).ok();
        Self { visible_devices: read("CUDA_VISIBLE_DEVICES"), device_order: read("CUDA_DEVICE_ORDER") }
    }
}

/// A card or a partition of one that CUDA shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Visible<'a> {
    pub(super) card: &'a CardDescription,
    pub(super) slice: Option<&'a SliceDescription>,
}

impl<'a> Visible<'a> {
    /// Returns a whole card, or the first partition of a partitioned one; `None` if it is to be partitioned and has no partition yet.
    fn of(card: &'a CardDescription) -> Option<Self> {
        match (card.mig_enabled, card.slices.first()) {
            (false, _) => Some(Self { card, slice: None }),
            (true, Some(slice)) => Some(Self { card, slice: Some(slice) }),
            (true, None) => None,
        }
    }
}

/// Returns the visible cards in CUDA's order.
pub(super) fn visible<'a>(
    description: &'a NvmlDescription,
    environment: &CudaEnvironment,
    notes: &mut Vec<String>,
) -> Vec<Visible<'a>> {
    let cards = &description.cards;
    let Some(list) = &environment.visible_devices else {
        // If all cards are partitioned, CUDA shows one partition.
        let whole: Vec<_> = cards.iter().filter(|card| !card.mig_enabled).filter_map(Visible::of).collect();
        return if whole.is_empty() { cards.iter().filter_map(Visible::of).take(1).collect() } else { whole };
    };
    let differ = cards.windows(2).any(|pair| pair[0].name != pair[1].name);
    if differ && environment.device_order.as_deref() != Some("PCI_BUS_ID") {
        notes.push(
            "the cards differ, and CUDA numbers the fastest first: set CUDA_DEVICE_ORDER=PCI_BUS_ID for the numbers shown here".to_owned(),
        );
    }
    let mut shown: Vec<Visible<'a>> = Vec::new();
    for entry in list.split(',').map(str::trim) {
        match named(cards, entry) {
            Some(found) if shown.contains(&found) => {
                notes.push(format!("CUDA_VISIBLE_DEVICES={list:?} names {entry:?} twice: what follows is ignored"));
                break;
            }
            Some(found) => shown.push(found),
            None => {
                // Users write "", "-1" or "NoDevFiles" for none.
                if !matches!(entry, "" | "-1" | "NoDevFiles") {
                    notes.push(format!(
                        "CUDA_VISIBLE_DEVICES={list:?}: {entry:?} is no card here, so CUDA ignores it and what follows"
                    ));
                }
                break;
            }
        }
    }
    if shown.len() < cards.len() {
        notes.push(format!("CUDA_VISIBLE_DEVICES={list:?} shows {} of {} cards", shown.len(), cards.len()));
    }
    shown
}

fn named<'a>(cards: &'a [CardDescription], entry: &str) -> Option<Visible<'a>> {
    if let Ok(number) = entry.parse::<usize>() {
        return cards.get(number).and_then(Visible::of);
    }
    if entry.starts_with("GPU-") {
        return only(cards.iter().filter(|card| card.uuid.starts_with(entry))).and_then(Visible::of);
    }
    let slices = cards.iter().flat_map(|card| card.slices.iter().map(move |slice| (card, slice)));
    let (card, slice) = only(slices.filter(|(_, slice)| entry.starts_with("MIG-") && slice.uuid.starts_with(entry)))?;
    Some(Visible { card, slice: Some(slice) })
}

/// Returns the only item; `None` if there are several, because a prefix must be unique.
fn only<T>(mut items: impl Iterator<Item = T>) -> Option<T> {
    let first = items.next()?;
    items.next().is_none().then_some(first)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine() -> NvmlDescription {
        let card = |index: u32, name: &str| CardDescription {
            index,
            uuid: format!("GPU-{index}aaa-0001"),
            name: name.to_owned(),
            ..CardDescription::default()
        };
        let slice = |uuid: &str| SliceDescription { uuid: uuid.to_owned(), ..SliceDescription::default() };
        let mut cards = vec![card(0, "H100"), card(1, "H100"), card(2, "H100")];
        cards[2].mig_enabled = true;
        cards[2].slices = vec![slice("MIG-first"), slice("MIG-second")];
        NvmlDescription { cards, ..NvmlDescription::default() }
    }

    fn shown(list: Option<&str>) -> (Vec<String>, usize) {
        let machine = machine();
        let environment = CudaEnvironment { visible_devices: list.map(str::to_owned), device_order: None };
        let mut notes = Vec::new();
        let found = visible(&machine, &environment, &mut notes);
        let name =
            |seen: &Visible<'_>| seen.slice.map_or_else(|| seen.card.index.to_string(), |slice| slice.uuid.clone());
        (found.iter().map(name).collect(), notes.len())
    }

    #[test]
    fn cards_are_shown_in_the_order_of_the_list() {
        assert_eq!(shown(Some("1,0")).0, ["1", "0"]);
        assert_eq!(shown(Some("GPU-1aaa, GPU-0")).0, ["1", "0"]);
        assert_eq!(shown(Some("MIG-second")).0, ["MIG-second"]);
        assert_eq!(shown(Some("2")).0, ["MIG-first"], "a partitioned card shows its first partition");
    }

    #[test]
    fn the_first_entry_that_is_no_card_ends_the_list() {
        assert_eq!(shown(Some("1,7,0")), (vec!["1".to_owned()], 2));
        assert_eq!(shown(Some("1,1,0")).0, ["1"]);
        assert_eq!(shown(Some("GPU-")).0, Vec::<String>::new(), "a prefix of several names none");
        for none in ["", "-1", "NoDevFiles"] {
            assert_eq!(shown(Some(none)), (Vec::new(), 1), "{none:?}");
        }
    }

    #[test]
    fn without_a_list_whole_cards_come_before_partitions() {
        assert_eq!(shown(None), (vec!["0".to_owned(), "1".to_owned()], 0));
        let mut machine = machine();
        machine.cards.drain(..2);
        let found = visible(&machine, &CudaEnvironment::default(), &mut Vec::new());
        assert_eq!(
            found.iter().filter_map(|seen| seen.slice).map(|slice| slice.uuid.as_str()).collect::<Vec<_>>(),
            ["MIG-first"]
        );
    }

    #[test]
    fn different_cards_need_an_order_to_be_numbered() {
        let mut machine = machine();
        machine.cards[1].name = "L4".to_owned();
        let mut environment = CudaEnvironment { visible_devices: Some("0,1,2".to_owned()), device_order: None };
        let mut notes = Vec::new();
        visible(&machine, &environment, &mut notes);
        assert!(notes.iter().any(|note| note.contains("PCI_BUS_ID")), "{notes:?}");
        environment.device_order = Some("PCI_BUS_ID".to_owned());
        notes.clear();
        visible(&machine, &environment, &mut notes);
        assert!(notes.is_empty(), "{notes:?}");
    }
}
