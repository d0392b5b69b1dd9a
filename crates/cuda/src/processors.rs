//! Reads and restricts the processors on which the threads of this process run.
//!
//! Trade-off: Linux only; on other systems, every call returns an error. Supports numbers up to 1,023, as glibc's `cpu_set_t` does.

use std::io;

#[cfg(target_os = "linux")]
use rustix::{
    io::Errno,
    process::Pid,
    thread::{CpuSet, sched_getaffinity, sched_setaffinity},
};

/// Returns the processors that the calling thread may run on, by the system's numbers, ascending.
///
/// # Errors
/// If the system rejects the call, or is not Linux.
#[cfg(target_os = "linux")]
pub fn allowed() -> io::Result<Vec<usize>> {
    let mask = sched_getaffinity(None)?;
    Ok((0..CpuSet::MAX_CPU).filter(|&number| mask.is_set(number)).collect())
}

/// Restricts all threads of this process, and threads that they start from now on, to some processors.
///
/// # Errors
/// If the system rejects the call, for instance because the process may use none of them, or is not Linux.
#[cfg(target_os = "linux")]
pub fn keep_threads_on(processors: &[usize]) -> io::Result<()> {
    let mut mask = CpuSet::new();
    processors.iter().filter(|&&number| number < CpuSet::MAX_CPU).for_each(|&number| mask.set(number));
    for thread in std::fs::read_dir("/proc/self/task")? {
        let id = thread?.file_name().to_str().and_then(|id| id.parse().ok());
        let Some(thread) = id.and_then(Pid::from_raw) else { continue };
        match sched_setaffinity(Some(thread), &mask) {
            // A thread that was listed may have ended.
            Ok(()) | Err(Errno::SRCH) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Replaces the Linux version on other systems.
#[cfg(not(target_os = "linux"))]
pub fn allowed() -> io::Result<Vec<usize>> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Replaces the Linux version on other systems.
#[cfg(not(target_os = "linux"))]
pub fn keep_threads_on(_processors: &[usize]) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::sync::mpsc::channel;
    use std::thread;

    use super::*;

    #[test]
    fn new_and_old_threads_stay_on_the_processors() {
        let before = allowed().unwrap();
        let (stop, stopped) = channel::<()>();
        let earlier = thread::spawn(move || {
            let _ = stopped.recv();
            allowed().unwrap()
        });
        keep_threads_on(&before[..1]).unwrap();
        drop(stop);
        assert_eq!(earlier.join().unwrap(), before[..1]);
        assert_eq!(thread::spawn(|| allowed().unwrap()).join().unwrap(), before[..1]);
        keep_threads_on(&before).unwrap();
        assert_eq!(allowed().unwrap(), before);
    }

    #[test]
    fn processors_that_do_not_exist_change_nothing() {
        let before = allowed().unwrap();
        assert!(keep_threads_on(&[CpuSet::MAX_CPU - 1]).is_err());
        assert_eq!(allowed().unwrap(), before);
    }
}
