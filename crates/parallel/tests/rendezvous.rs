//! Tests of ranks that find each other over TCP, and of missing, foreign and lost ranks.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc::{TryRecvError, channel};
use std::thread;
use std::time::{Duration, Instant};

use burn_flex::Flex;
use burn_tensor::Tensor;
use firebrick_parallel::{JobToken, Limits, ParallelError, Placement, Ranks, Watchdog};

/// Returns placements for a job on this machine, at a free port.
fn placements(world_size: usize) -> Vec<Placement> {
    let port = TcpListener::bind(("127.0.0.1", 0)).unwrap().local_addr().unwrap().port();
    let token = JobToken::random();
    let of_rank = |rank| Placement {
        rank,
        world_size,
        local_rank: rank,
        local_world_size: world_size,
        master_host: "127.0.0.1".to_owned(),
        master_port: port,
        token: token.clone(),
        timeout: Duration::from_secs(20),
    };
    (0..world_size).map(of_rank).collect()
}

/// Runs each rank on a thread; returns their results in rank order.
fn on_ranks<T: Send>(placements: Vec<Placement>, work: impl Fn(Placement) -> T + Sync) -> Vec<T> {
    let work = &work;
    thread::scope(|scope| {
        let threads: Vec<_> = placements.into_iter().map(|placement| scope.spawn(move || work(placement))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn is_reachable(port: u16) -> bool {
    TcpStream::connect(("127.0.0.1", port)).is_ok()
}

#[test]
fn ranks_start_in_any_order_and_exchange() {
    let results = on_ranks(placements(4), |placement| {
        // Rank 0 comes last.
        thread::sleep(Duration::from_millis(60 * (4 - placement.rank as u64)));
        let ranks = Ranks::join(&placement).unwrap();
        assert_eq!((ranks.rank(), ranks.world_size()), (placement.rank, 4));
        assert_eq!((ranks.local_rank(), ranks.local_world_size()), (placement.rank, 4));
        assert_eq!(ranks.all_reduce_count(u64::MAX / 8 + ranks.rank() as u64).unwrap(), u64::MAX / 8 * 4 + 6);
        for round in 0..50u8 {
            let gathered = ranks.all_gather("bytes", vec![round; ranks.rank()]).unwrap();
            let expected: Vec<Vec<u8>> = (0..4).map(|rank| vec![round; rank]).collect();
            assert_eq!(gathered.iter().map(|bytes| bytes.to_vec()).collect::<Vec<_>>(), expected);
        }
        assert_eq!(&ranks.from_main("main", vec![9, ranks.rank() as u8]).unwrap()[..], [9, 0]);
        let large: Tensor<Flex, 1> = Tensor::ones([1 << 20], &Default::default()) * ranks.rank() as f32;
        let sum = ranks.all_reduce_scalar(large.sum()).unwrap().into_scalar();
        assert_eq!(sum, 6.0 * (1 << 20) as f32);
        ranks.leave().unwrap();
        assert!(ranks.check("the end").is_ok());
        placement.master_port
    });
    assert!(!is_reachable(results[0]), "rank 0 still listens");
}

/// The stuck rank's connections are alive; the other rank waits for it in an exchange, and is not blamed.
#[test]
fn a_stuck_rank_ends_the_job_and_says_so() {
    let limits = Limits { least: Duration::from_millis(300), device: Duration::from_millis(100) };
    let (done, is_done) = channel::<()>();
    let is_done = std::sync::Mutex::new(is_done);
    let results = on_ranks(placements(2), |placement| {
        let done = (placement.rank == 0).then(|| done.clone());
        let ranks = Ranks::join(&placement).unwrap();
        let watchdog = Watchdog::start(&ranks, limits);
        for step in 1.. {
            watchdog.step_begins(step);
            if ranks.rank() == 1 && step == 5 {
                // Until the other rank has ended.
                is_done.lock().unwrap().recv().unwrap();
            }
            if let Err(error) = ranks.all_reduce_count(step) {
                if let Some(done) = done {
                    done.send(()).unwrap();
                }
                return (step, error.to_string());
            }
            watchdog.step_ends();
        }
        unreachable!("the job ends");
    });
    for (step, error) in results {
        assert!(step == 5 && error.contains("rank 1 failed: it is stuck in step 5"), "{error}");
    }
}

#[test]
fn strangers_are_refused_without_ending_the_job() {
    let all = placements(2);
    let (master, member) = (all[0].clone(), all[1].clone());
    let port = master.master_port;
    let first = thread::spawn(move || Ranks::join(&master).and_then(|ranks| ranks.all_reduce_count(1)));
    while !is_reachable(port) {
        thread::sleep(Duration::from_millis(10));
    }
    for garbage in [&b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"[..], &[0xff; 4096], b"", b"FBRANKS\n"] {
        let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
        stream.write_all(garbage).unwrap();
    }
    // A silent connection that stays open must not delay the others.
    let silent = TcpStream::connect(("127.0.0.1", port)).unwrap();
    let refusal = |placement: &Placement| match Ranks::join(placement) {
        Err(ParallelError::Refused { reason, .. }) => reason,
        other => panic!("{other:?}"),
    };
    let reason = refusal(&Placement { token: JobToken::random(), ..member.clone() });
    assert!(reason.contains("FIREBRICK_JOB_TOKEN is not the one of this job"), "{reason}");
    let reason = refusal(&Placement { world_size: 3, rank: 2, ..member.clone() });
    assert!(reason.contains("rank 2 of 3") && reason.contains("ranks 1 to 1 of 2"), "{reason}");
    let second = Ranks::join(&member).unwrap();
    assert_eq!(second.all_reduce_count(1), Ok(2));
    assert_eq!(first.join().unwrap(), Ok(2));
    drop(silent);
}

/// There are more strangers than rank 0 listens to at once. Some are silent; the others send a byte of a rank's message now and then.
#[test]
fn slow_strangers_keep_no_rank_out() {
    let all = placements(2);
    let (master, member) = (all[0].clone(), all[1].clone());
    let impatient = Placement { timeout: Duration::from_secs(2), ..placements(2)[0].clone() };
    let (is_over, over) = channel::<()>();
    let strangers = |port| -> Vec<TcpStream> {
        while !is_reachable(port) {
            thread::sleep(Duration::from_millis(10));
        }
        (0..200).map(|_| TcpStream::connect(("127.0.0.1", port)).unwrap()).collect()
    };
    thread::scope(|scope| {
        let first = scope.spawn(move || Ranks::join(&master).and_then(|ranks| ranks.all_reduce_count(1)));
        let mut slow = strangers(member.master_port);
        let silent: Vec<TcpStream> = slow.drain(..100).collect();
        scope.spawn(move || {
            let mut bytes = b"FBRANKS\n\x01\x00".iter().chain(std::iter::repeat(&0));
            while over.try_recv() == Err(TryRecvError::Empty) {
                let byte = *bytes.next().unwrap();
                // Rank 0 closes them in the end.
                slow.iter_mut().for_each(|stream| drop(stream.write_all(&[byte])));
                thread::sleep(Duration::from_millis(100));
            }
        });
        thread::sleep(Duration::from_millis(300));
        let started = Instant::now();
        let second = Ranks::join(&member).unwrap();
        assert!(started.elapsed() < Duration::from_secs(4), "{:?}", started.elapsed());
        assert_eq!(second.all_reduce_count(1), Ok(2));
        assert_eq!(first.join().unwrap(), Ok(2));
        drop((is_over, silent));
    });
    thread::scope(|scope| {
        let port = impatient.master_port;
        let started = Instant::now();
        let alone = scope.spawn(move || Ranks::join(&impatient).unwrap_err().to_string());
        let silent = strangers(port);
        let message = alone.join().unwrap();
        assert!(message.contains("rank 1 of 2 did not come") && message.contains("were refused, "), "{message}");
        assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
        drop(silent);
    });
}

#[test]
fn a_program_that_is_not_rank_0_is_recognized() {
    let all = placements(2);
    let listener = TcpListener::bind(("127.0.0.1", all[1].master_port)).unwrap();
    let server = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(&[b'x'; 100]).unwrap();
        let _ = stream.read(&mut [0; 100]);
    });
    let message = Ranks::join(&all[1]).unwrap_err().to_string();
    assert!(message.contains("what listens there is another program"), "{message}");
    server.join().unwrap();
}

#[test]
fn ranks_that_do_not_come_are_named_on_all_that_did() {
    let all = placements(5).into_iter().map(|place| Placement { timeout: Duration::from_secs(1), ..place });
    let came = all.filter(|placement| [0, 3].contains(&placement.rank)).collect();
    let started = Instant::now();
    let messages = on_ranks(came, |placement| Ranks::join(&placement).unwrap_err().to_string());
    for message in messages {
        assert!(message.contains("ranks 1, 2 and 4 of 5 did not come to 127.0.0.1"), "{message}");
        assert!(message.contains("within 1 s"), "{message}");
    }
    assert!(started.elapsed() < Duration::from_secs(5));
}

#[test]
fn without_rank_0_the_others_say_where_they_looked() {
    let placement = Placement { timeout: Duration::from_millis(300), ..placements(2)[1].clone() };
    let message = Ranks::join(&placement).unwrap_err().to_string();
    assert!(message.contains("rank 1 did not reach rank 0 at 127.0.0.1:"), "{message}");
}

#[test]
fn rank_0_needs_an_address_of_this_machine() {
    let placement = Placement { master_host: "192.0.2.1".to_owned(), ..placements(2)[0].clone() };
    let message = Ranks::join(&placement).unwrap_err().to_string();
    assert!(message.contains("rank 0 cannot listen on 192.0.2.1:"), "{message}");
}

#[test]
fn a_lost_rank_ends_all_with_its_reason() {
    for says_why in [true, false] {
        let (sender, watched) = channel();
        let results = on_ranks(placements(4), |placement| {
            let ranks = Ranks::join(&placement).unwrap();
            ranks.barrier().unwrap();
            if ranks.rank() == 2 {
                // Until all others are through the barrier.
                thread::sleep(Duration::from_millis(100));
                if says_why {
                    ranks.fail("the disk is on fire");
                }
                return None;
            }
            let sender = sender.clone();
            ranks.when_lost(move |problem| sender.send(problem.to_owned()).unwrap());
            let error = ranks.all_reduce_count(1).unwrap_err().to_string();
            assert!(ranks.check("the next step").is_err() && ranks.barrier().is_err());
            Some(error)
        });
        let expected = if says_why { "rank 2 failed: the disk is on fire" } else { "rank 2 (127.0.0.1) closed" };
        for (rank, error) in results.into_iter().enumerate().filter(|(rank, _)| *rank != 2) {
            let error = error.unwrap();
            assert!(error.contains(expected) && error.contains("all_reduce_count"), "rank {rank}: {error}");
        }
        for _ in 0..3 {
            let problem = watched.recv_timeout(Duration::from_secs(5)).unwrap();
            assert!(problem.contains(expected), "{problem}");
        }
    }
}

#[test]
fn a_lost_rank_0_ends_all() {
    let results = on_ranks(placements(3), |placement| {
        let ranks = Ranks::join(&placement).unwrap();
        if ranks.rank() == 0 {
            return String::new();
        }
        ranks.barrier().unwrap_err().to_string()
    });
    assert!(results[1..].iter().all(|error| error.contains("rank 0 (127.0.0.1) closed")), "{results:?}");
    let results = on_ranks(placements(3), |placement| {
        let ranks = Ranks::join(&placement).unwrap();
        let result = if ranks.rank() == 1 { ranks.barrier() } else { ranks.all_reduce_count(1).map(|_| ()) };
        result.unwrap_err().to_string()
    });
    for error in results {
        assert!(error.contains("rank 1 called barrier while rank 0 called all_reduce_count"), "{error}");
    }
}

#[test]
fn a_rank_that_ends_after_leaving_is_no_loss() {
    let results = on_ranks(placements(3), |placement| {
        let ranks = Ranks::join(&placement).unwrap();
        ranks.when_lost(|problem| panic!("{problem}"));
        ranks.leave().unwrap();
        if ranks.rank() != 1 {
            thread::sleep(Duration::from_millis(200));
        }
        ranks.check("the end")
    });
    assert!(results.into_iter().all(|result| result.is_ok()));
}
