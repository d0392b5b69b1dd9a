//! Reads and restricts the processors on which the threads of this process run.
//!
//! Trade-off: Linux only; on other systems, every call returns an error. Supports numbers up to 1,023, as glibc's `cpu_set_t` does.

use std::io;

/// Returns the processors that the calling thread may run on, by the system's numbers, ascending.
///
/// # Errors
/// If the system rejects the call, or is not Linux.
#[cfg(target_os = "linux")]
pub fn allowed() -> io::Result<Vec<usize>> {
    let mut mask = Mask::default();
    // SAFETY: the mask is valid for a write of its size; thread 0 is the calling one.
    let result = unsafe { libc::sched_getaffinity(0, size_of::<Mask>(), mask.pointer()) };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok((0..Mask::BITS).filter(|&number| mask.has(number)).collect())
}

/// Restricts all threads of this process, and threads that they start from now on, to some processors.
///
/// # Errors
/// If the system rejects the call, for instance because the process may use none of them, or is not Linux.
#[cfg(target_os = "linux")]
pub fn keep_threads_on(processors: &[usize]) -> io::Result<()> {
    let mut mask = Mask::default();
    processors.iter().for_each(|&number| mask.add(number));
    for thread in std::fs::read_dir("/proc/self/task")? {
        let Some(id) = thread?.file_name().to_str().and_then(|id| id.parse().ok()) else { continue };
        // SAFETY: the mask is valid for a read of its size.
        let result = unsafe { libc::sched_setaffinity(id, size_of::<Mask>(), mask.pointer()) };
        let error = io::Error::last_os_error();
        // A thread that was listed may have ended.
        if result != 0 && error.raw_os_error() != Some(libc::ESRCH) {
            return Err(error);
        }
    }
    Ok(())
}

/// One bit per processor.
#[cfg(target_os = "linux")]
#[derive(Default)]
#[repr(C, align(8))]
struct Mask([u64; 16]);

#[cfg(target_os = "linux")]
impl Mask {
    const BITS: usize = 16 * 64;

    fn pointer(&mut self) -> *mut libc::cpu_set_t {
        std::ptr::from_mut(self).cast()
    }

    fn has(&self, number: usize) -> bool {
        self.0[number / 64] >> (number % 64) & 1 == 1
    }

    fn add(&mut self, number: usize) {
        if number < Self::BITS {
            self.0[number / 64] |= 1 << (number % 64);
        }
    }
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
        assert!(keep_threads_on(&[Mask::BITS - 1]).is_err());
        assert_eq!(allowed().unwrap(), before);
    }
}
