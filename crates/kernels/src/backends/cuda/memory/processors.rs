//! Keeps the threads of a process on the processors near its card, and with them pinned memory: Linux allocates memory
//! on the NUMA node of the requesting thread.
//!
//! Processors that a launcher or an administrator excluded stay excluded. `FIREBRICK_NUMA=off` leaves threads where they are.
//! Trade-off: processors of other nodes are no longer used, even for work unrelated to the card.

use std::fmt;

use firebrick_cuda::processors::{allowed, keep_threads_on};
use firebrick_hwprofile::NumaNode;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Threads {
    /// They stay on this number of processors of the card's node.
    Near { node: u32, processors: usize },
    /// Unchanged, because this process may use none of the node's processors.
    Elsewhere { node: u32 },
    /// Unchanged, as `FIREBRICK_NUMA` requests.
    Off,
    /// Unchanged, because the system rejected the change.
    Refused(String),
}

impl fmt::Display for Threads {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Near { node, processors } => {
                write!(
                    formatter,
                    "threads and pinned memory: NUMA node {node}, where the card is; {processors} processors"
                )
            }
            Self::Elsewhere { node } => write!(
                formatter,
                "threads stay where they are: the card is on NUMA node {node}, and this process may not use its processors"
            ),
            Self::Off => formatter.write_str("threads stay where they are, as FIREBRICK_NUMA says"),
            Self::Refused(problem) => write!(formatter, "threads stay where they are: {problem}"),
        }
    }
}

/// Moves the threads near the card at `bus_id`. Returns `None` if the system does not report its node.
pub(super) fn stay_near(bus_id: &str) -> Option<Threads> {
    let node = NumaNode::of_pci_device(bus_id)?;
    let is_off = std::env::var("FIREBRICK_NUMA").as_deref() == Ok("off");
    Some(if is_off { Threads::Off } else { stay_on(&node) })
}

fn stay_on(node: &NumaNode) -> Threads {
    let moved = allowed().and_then(|allowed| {
        let near: Vec<usize> = node.processors.iter().copied().filter(|number| allowed.contains(number)).collect();
        match near.len() {
            0 => Ok(Threads::Elsewhere { node: node.id }),
            processors => keep_threads_on(&near).map(|()| Threads::Near { node: node.id, processors }),
        }
    });
    moved.unwrap_or_else(|error| Threads::Refused(error.to_string()))
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn threads_stay_on_those_processors_of_a_node_that_the_process_may_use() {
        let before = allowed().unwrap();
        let absent = (0..).find(|number| !before.contains(number)).unwrap();
        assert_eq!(stay_on(&NumaNode { id: 3, processors: vec![absent] }), Threads::Elsewhere { node: 3 });
        assert_eq!(allowed().unwrap(), before);
        let node = NumaNode { id: 3, processors: vec![before[0], absent] };
        assert_eq!(stay_on(&node), Threads::Near { node: 3, processors: 1 });
        assert_eq!(allowed().unwrap(), before[..1]);
        keep_threads_on(&before).unwrap();
    }

    #[test]
    fn a_card_whose_node_is_not_known_changes_nothing() {
        assert_eq!(stay_near("ffff:ff:1f.7"), None);
    }
}
