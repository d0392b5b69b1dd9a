//! Exchanges over the connections of the rendezvous: every rank sends its part to rank 0, which sends all parts to every rank.
//!
//! The order of parts is that of the ranks, whichever arrives first, so results do not depend on timing.
//! Trade-off: rank 0 sends all parts to all ranks. That suits counts, and small models on CPUs; at scale, tensors travel through the backend's
//! library.

use std::sync::Arc;

use firebrick_kernels::CommError;
use firebrick_kernels::comm::Transport;

use crate::links::{Links, Watcher};
use crate::wire;

/// A rank's end of the connections: from rank 0 to all others, or from another rank to rank 0.
pub(crate) struct SocketTransport {
    rank: usize,
    world_size: usize,
    links: Arc<Links>,
}

impl SocketTransport {
    pub(crate) fn new(rank: usize, world_size: usize, links: Arc<Links>) -> Self {
        assert_eq!(links.len(), if rank == 0 { world_size - 1 } else { 1 }, "connections of rank {rank}");
        Self { rank, world_size, links }
    }

    /// Gathers the parts on rank 0, in rank order, and sends all of them to all ranks.
    fn gather(&self, operation: &str, own: Vec<u8>) -> Result<Vec<Arc<[u8]>>, String> {
        let mut parts: Vec<Arc<[u8]>> = vec![own.into()];
        for index in 0..self.links.len() {
            parts.push(self.links.receive(index, self.rank, operation)?.into());
        }
        let joined = wire::join(&parts);
        for index in 0..self.links.len() {
            self.links.send(index, operation, joined.clone())?;
        }
        Ok(parts)
    }

    /// Sends this rank's part to rank 0 and waits for all parts.
    fn contribute(&self, operation: &str, own: Vec<u8>) -> Result<Vec<Arc<[u8]>>, String> {
        self.links.send(0, operation, own)?;
        let joined = self.links.receive(0, self.rank, operation)?;
        match wire::split(&joined) {
            Some(parts) if parts.len() == self.world_size => Ok(parts.into_iter().map(Arc::from).collect()),
            _ => Err(self.links.lose(format!("rank 0 sent no parts of {} ranks in {operation}", self.world_size))),
        }
    }
}

impl Transport for SocketTransport {
    fn all_gather(&self, operation: &'static str, bytes: Vec<u8>) -> Result<Vec<Arc<[u8]>>, CommError> {
        let Self { rank, world_size, .. } = *self;
        let gathered = if rank == 0 { self.gather(operation, bytes) } else { self.contribute(operation, bytes) };
        gathered.map_err(|problem| CommError::Lost { rank, world_size, operation, problem })
    }

    fn lost(&self) -> Option<String> {
        self.links.lost()
    }

    fn fail(&self, problem: &str) {
        self.links.lose(format!("rank {} failed: {problem}", self.rank));
    }

    fn close(&self) {
        self.links.close();
    }

    fn when_lost(&self, act: Watcher) {
        self.links.when_lost(act);
    }
}

impl Drop for SocketTransport {
    fn drop(&mut self) {
        self.links.end();
    }
}
