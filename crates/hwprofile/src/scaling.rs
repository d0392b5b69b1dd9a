//! What a step on many accelerators takes besides the computation of one: the communication that this does not hide.
//!
//! ```text
//! collective = START + hops x latency of a hop + bytes that cross each link / rate of the link
//! step       = computation of the slowest rank + exposed communication
//! ```
//!
//! A ring over N ranks on M machines has N - M hops inside machines and M between them. In a sum over all, every rank's share crosses every
//! link twice; what an owner sends to all, or gets as the sum of all, crosses every link once and whole. All adapters of a machine carry a part of each ring, so a ring is as fast as its slower kind of link. A tree has a depth of log2 M between
//! machines; NCCL takes it for sums over all ranks where a ring's hops cost more, and has only rings for the other two.
//!
//! Start and rates are fitted to sums and copies between two H100s and on four; what is between machines is an assumption, named as such
//! ([`Network`]). Tests compare forecasts with steps on two and four H100s that were not used for that: all are within 8 %.
//! Weights that are divided too (ZeRO-3) are not modeled.
//! Trade-off: collectives are taken to slow no computation down, and all ranks to be equally fast. Cards of one machine differ by 1 to 3 %,
//! and a step is that of the slowest.

use crate::spec::AcceleratorSpec;

/// Seconds from the call of a collective to its first byte, launches included: 1 MiB between two H100s takes 40 us, of which two hops and
/// the bytes are 10.
pub const START: f64 = 30e-6;
/// What a collective reaches of a link's rate in one direction: 328 of 450 GB/s were measured with 1 GiB between two H100s.
pub const LINK_SHARE: f64 = 328.0 / 450.0;
/// Seconds of a hop of a ring inside a machine and between machines, as NCCL's own model has them (`src/graph/tuning.cc`, ring, Simple).
const RING_HOP: [f64; 2] = [3.4e-6, 9.6e-6];
/// The same of a tree.
const TREE_HOP: [f64; 2] = [28e-6, 50e-6];
/// What a tree reaches of a ring's rate, from the same file.
const TREE_SHARE: f64 = 0.9;
/// Share of a pass that is its backward: it has two of three products of matrices.
const BACKWARD: f64 = 2.0 / 3.0;

/// Bytes per second that the accelerators of one machine copy to its pinned memory together, or from it: four H100s reach 31.3 to 33.1 GB/s
/// each, two 52, one 54. Measured on one kind of machine; a machine with more than [`HOST_SHARED_BY`] is taken to have that once more.
pub const HOST_BYTES_S: f64 = 130e9;
/// Accelerators that were measured to share [`HOST_BYTES_S`].
pub const HOST_SHARED_BY: usize = 4;

/// What joins machines.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Network {
    /// Accelerators of a machine, which peer links join.
    pub per_machine: usize,
    /// 1e9 bytes per second of each accelerator's adapter in one direction.
    pub gb_s: f64,
}

/// Eight accelerators and eight adapters of 400 Gb/s per machine. An assumption about the machine: nothing was measured between machines.
pub const EIGHT_BY_400_GBIT: Network = Network { per_machine: 8, gb_s: 50.0 };

/// How many times longer a rank's copies to the host take while the other ranks of its machine copy too.
pub fn copies_slowed_by(spec: &AcceleratorSpec, ranks: usize) -> f64 {
    let Some(link) = spec.host_link else { return 1.0 };
    let one = link.gb_s.value * 1e9 / 2.0;
    // A link faster than that leads to memory of its own (Grace).
    if ranks == 1 || one > HOST_BYTES_S {
        return 1.0;
    }
    (HOST_SHARED_BY.min(ranks) as f64 * one / HOST_BYTES_S).max(1.0)
}

/// The links of a job.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Links {
    /// Bytes per second of an accelerator to its peers, in one direction.
    inside: f64,
    network: Network,
}

impl Links {
    /// The links of an accelerator of the table. `None`: its table has no link to others.
    pub fn of(spec: &AcceleratorSpec, network: Network) -> Option<Self> {
        // A link's figure counts both directions.
        let inside = spec.peer_link.or(spec.host_link)?.gb_s.value * 1e9 / 2.0;
        Some(Self { inside, network })
    }

    fn machines(&self, ranks: usize) -> usize {
        ranks.div_ceil(self.network.per_machine)
    }

    /// Bytes per second of a ring over so many ranks.
    fn ring_rate(&self, ranks: usize) -> f64 {
        let adapters = self.network.per_machine.min(ranks) as f64 * self.network.gb_s * 1e9;
        LINK_SHARE * if self.machines(ranks) == 1 { self.inside } else { self.inside.min(adapters) }
    }

    /// Seconds of the hops of one lap of a ring, from the first rank to the last.
    fn lap(&self, ranks: usize) -> f64 {
        let machines = self.machines(ranks);
        (ranks - machines) as f64 * RING_HOP[0] + (machines - 1) as f64 * RING_HOP[1]
    }

    /// Seconds until owners have sent `bytes` in all to the other ranks, or have the sums of them.
    pub fn one_way(&self, bytes: f64, ranks: usize) -> f64 {
        if ranks == 1 {
            return 0.0;
        }
        START + self.lap(ranks) + bytes / self.ring_rate(ranks)
    }

    /// Seconds of a sum of `bytes` over all ranks, which all of them get.
    pub fn all_reduce(&self, bytes: f64, ranks: usize) -> f64 {
        if ranks == 1 {
            return 0.0;
        }
        let (machines, rate) = (self.machines(ranks), self.ring_rate(ranks));
        let ring = 2.0 * self.lap(ranks) + 2.0 * (ranks - 1) as f64 / ranks as f64 * bytes / rate;
        let inside = (ranks.div_ceil(machines) - 1) as f64 * TREE_HOP[0];
        let tree = 2.0 * (inside + (machines as f64).log2() * TREE_HOP[1] + bytes / (TREE_SHARE * rate));
        START + ring.min(tree)
    }
}

/// What ranks divide among them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sharding {
    /// Nothing: gradients are summed, every rank makes every update.
    None,
    /// The optimizer's state: then updated weights are gathered.
    Zero1,
    /// State and gradients: these are summed for their owners in every micro-batch.
    Zero2,
}

/// A step of one rank.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RankStep {
    /// Seconds of a micro-batch on one accelerator, forward and backward.
    pub micro_batch_s: f64,
    /// Micro-batches of a step on each rank.
    pub micro_batches: usize,
    /// Bytes of the gradients, and of the trained weights where they are gathered after an update.
    pub gradient_bytes: f64,
    /// Bytes of gradients that are summed at once during the backward; `None`: all of them after it.
    pub bucket_bytes: Option<f64>,
}

impl RankStep {
    /// Seconds of communication between `ranks` ranks that the computation of a step does not hide.
    pub fn exposed(&self, ranks: usize, links: &Links, sharding: Sharding) -> f64 {
        let bucket = self.bucket_bytes.unwrap_or(self.gradient_bytes).min(self.gradient_bytes);
        let buckets = (self.gradient_bytes / bucket).ceil().max(1.0);
        let updates = links.one_way(self.gradient_bytes, ranks);
        // What a backward does not hide of sums that take `one` each: at least the last, which is complete when the backward ends.
        let left = |one: f64| (buckets * one - BACKWARD * self.micro_batch_s).max(one);
        match sharding {
            // Sums over all ranks in the backward of the last micro-batch.
            Sharding::None => left(links.all_reduce(bucket, ranks)),
            Sharding::Zero1 => left(links.all_reduce(bucket, ranks)) + updates,
            // Sums for the owners in every backward.
            Sharding::Zero2 => self.micro_batches as f64 * left(links.one_way(bucket, ranks)) + updates,
        }
    }
}
