//! Ranks that are threads of one process: for tests, and for several devices driven by one program.
//!
//! Trade-off: the whole group shares one lock, which suits exchanges of gradients, a few per step.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use super::{CommError, Communicator, Transport};

/// Creates the communicators of a group of `world_size` ranks, one per thread, in rank order. If the last communicator of a rank is
/// dropped, even by a panic, the rank is lost: the others get [`CommError::Lost`] instead of waiting forever.
///
/// # Panics
/// If `world_size` is 0.
pub fn local_group(world_size: usize) -> Vec<Communicator> {
    assert!(world_size > 0, "a group has at least one rank");
    let exchange = Exchange { slots: vec![None; world_size], ..Exchange::default() };
    let group = Arc::new(Group { exchange: Mutex::new(exchange), changed: Condvar::new() });
    let member = |rank| Communicator::new(rank, world_size, Arc::new(Member { rank, group: group.clone() }));
    (0..world_size).map(member).collect()
}

struct Group {
    exchange: Mutex<Exchange>,
    changed: Condvar,
}

/// The current exchange. A result stays until all ranks have contributed to the next exchange, which each does only after taking this one.
#[derive(Default)]
struct Exchange {
    slots: Vec<Option<Arc<[u8]>>>,
    operation: Option<(usize, &'static str)>,
    finished: u64,
    result: Vec<Arc<[u8]>>,
    lost: Option<String>,
}

struct Member {
    rank: usize,
    group: Arc<Group>,
}

impl Member {
    fn exchange(&self) -> MutexGuard<'_, Exchange> {
        // A panic while the lock is held cannot leave the exchange half changed, because it is changed by single assignments.
        self.group.exchange.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lost(&self, world_size: usize, operation: &'static str, problem: String) -> CommError {
        CommError::Lost { rank: self.rank, world_size, operation, problem }
    }
}

impl Transport for Member {
    fn all_gather(&self, operation: &'static str, bytes: Vec<u8>) -> Result<Vec<Arc<[u8]>>, CommError> {
        let mut exchange = self.exchange();
        let world_size = exchange.slots.len();
        if let Some(problem) = &exchange.lost {
            return Err(self.lost(world_size, operation, problem.clone()));
        }
        match exchange.operation {
            Some((rank, other)) if other != operation => {
                let problem = format!("rank {rank} called {other} while rank {} called {operation}", self.rank);
                exchange.lost = Some(problem.clone());
                self.group.changed.notify_all();
                return Err(self.lost(world_size, operation, problem));
            }
            Some(_) => {}
            None => exchange.operation = Some((self.rank, operation)),
        }
        assert!(exchange.slots[self.rank].is_none(), "two threads use the communicator of rank {}", self.rank);
        exchange.slots[self.rank] = Some(bytes.into());
        let own_exchange = exchange.finished;
        if exchange.slots.iter().all(Option::is_some) {
            exchange.result = exchange.slots.iter_mut().filter_map(Option::take).collect();
            exchange.operation = None;
            exchange.finished += 1;
            self.group.changed.notify_all();
        }
        while exchange.finished == own_exchange {
            if let Some(problem) = &exchange.lost {
                return Err(self.lost(world_size, operation, problem.clone()));
            }
            exchange = self.group.changed.wait(exchange).unwrap_or_else(PoisonError::into_inner);
        }
        Ok(exchange.result.clone())
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.exchange().lost.get_or_insert_with(|| format!("rank {} has left the group", self.rank));
        self.group.changed.notify_all();
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::thread;

    use super::*;

    pub(in crate::comm) fn on_all_ranks<T: Send>(
        world_size: usize,
        work: impl Fn(Communicator) -> T + Sync,
    ) -> Vec<thread::Result<T>> {
        let work = &work;
        thread::scope(|scope| {
            let threads: Vec<_> =
                local_group(world_size).into_iter().map(|ranks| scope.spawn(move || work(ranks))).collect();
            threads.into_iter().map(|thread| thread.join()).collect()
        })
    }

    #[test]
    fn every_rank_gets_the_bytes_of_all_in_rank_order_many_times() {
        let results = on_all_ranks(4, |ranks| {
            for round in 0..200u8 {
                let gathered = ranks.all_gather_bytes("test", vec![ranks.rank() as u8, round]).unwrap();
                let expected: Vec<Vec<u8>> = (0..4).map(|rank| vec![rank, round]).collect();
                assert_eq!(gathered.iter().map(|bytes| bytes.to_vec()).collect::<Vec<_>>(), expected);
            }
        });
        assert!(results.iter().all(Result::is_ok));
    }

    #[test]
    fn a_rank_that_panics_or_leaves_is_lost_to_those_that_wait() {
        for panics in [true, false] {
            let results = on_all_ranks(3, |ranks| {
                if ranks.rank() == 1 {
                    assert!(!panics, "the failure of this test's second rank");
                    return None;
                }
                Some(ranks.all_gather_bytes("test", vec![]).expect_err("rank 1 never comes"))
            });
            for rank in [0, 2] {
                let error = results[rank].as_ref().unwrap().clone().unwrap();
                let problem = "rank 1 has left the group".to_owned();
                assert_eq!(error, CommError::Lost { rank, world_size: 3, operation: "test", problem });
            }
            assert_eq!(results[1].is_err(), panics);
        }
    }

    #[test]
    fn ranks_in_different_operations_get_an_error() {
        let results = on_all_ranks(2, |ranks| {
            let operation = if ranks.rank() == 0 { "sum" } else { "gather" };
            ranks.all_gather_bytes(operation, vec![]).expect_err("the operations differ").to_string()
        });
        for result in results {
            let message = result.unwrap();
            assert!(message.contains("called sum") && message.contains("called gather"), "{message}");
        }
    }
}
