//! `--gpus N` and `--ranks N`: this process starts and supervises one process per rank on this machine, with one log.
//!
//! A process that a launcher started is already a rank, and joins its job instead.
//! Trade-off: ranks on CPUs divide the cores evenly, whatever else the machine does.

use std::env;
use std::io::{self, Write};
use std::str::FromStr;
use std::sync::mpsc::{Receiver, channel};
use std::thread;

use firebrick_hwprofile::HardwareProfile;
use firebrick_kernels::BackendKind;
use firebrick_parallel::supervisor::{LocalRanks, Print, Printed, SUPERVISED, supervise};
use firebrick_parallel::{ParallelError, Placement};

use crate::config::{Auto, BackendChoice};
use crate::console::program;
use crate::error::RunError;
use crate::plan::choose_backend;
use crate::run::interrupt::Interrupt;
#[cfg(unix)]
use crate::run::interrupt::hangups_are_ignored;

/// The number of GPUs that was requested.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GpuCount {
    /// All GPUs that this process sees.
    All,
    /// The first GPUs, this many.
    Number(usize),
}

impl FromStr for GpuCount {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse() {
            _ if text == "all" => Ok(Self::All),
            Ok(number) if number > 0 => Ok(Self::Number(number)),
            _ => Err("expected a number from 1 on, or all".to_owned()),
        }
    }
}

/// Returns the number of ranks on this machine that `--gpus` or `--ranks` requests; 1 without them.
///
/// # Errors
/// The option does not fit the backend, or the machine has fewer GPUs; a backend that cannot be used.
pub fn requested(choice: BackendChoice, gpus: Option<GpuCount>, ranks: Option<usize>) -> Result<usize, RunError> {
    let option = match (gpus, ranks) {
        (None, None) => return Ok(1),
        (None, Some(ranks)) => format!("--ranks {ranks}"),
        (Some(GpuCount::All), _) => "--gpus all".to_owned(),
        (Some(GpuCount::Number(number)), _) => format!("--gpus {number}"),
    };
    let backend = choose_backend(choice, &HardwareProfile::detect())?.value;
    let there = if backend == BackendKind::Cuda { backend.devices() } else { 0 };
    let problem = match (gpus, ranks.unwrap_or(1)) {
        (None, ranks) if ranks > 1 && backend == BackendKind::Cuda => {
            format!("backend cuda takes one rank per GPU: use --gpus {ranks}")
        }
        (None, ranks) => return Ok(ranks),
        (Some(_), _) if backend != BackendKind::Cuda => match choice {
            Auto::Auto => "no NVIDIA card that CUDA can use was found (`doctor` says why); \
                           on the CPU use --ranks N for several processes"
                .to_owned(),
            Auto::Given(_) => {
                format!("backend {backend} does not drive several GPUs: use --ranks N for several processes")
            }
        },
        (Some(GpuCount::All), _) => return Ok(there.max(1)),
        (Some(GpuCount::Number(number)), _) if number <= there => return Ok(number),
        (Some(GpuCount::Number(_)), _) => {
            format!("this process sees {there} GPUs (nvidia-smi -L, CUDA_VISIBLE_DEVICES)")
        }
    };
    Err(RunError::Refused(format!("{option}: {problem}")))
}

/// Whether this process is a rank that [`run_supervised`] started.
pub fn is_supervised() -> bool {
    env::var_os(SUPERVISED).is_some()
}

/// Returns this process's place in a job, from its launcher's variables. `several`: whether the command line requests ranks too.
///
/// # Errors
/// Errors of [`Placement::from_environment`]; a launcher and the command line both request ranks.
pub fn placement(several: bool) -> Result<Option<Placement>, RunError> {
    let found = Placement::from_environment()?;
    match &found {
        Some(place) if several && !is_supervised() => Err(RunError::Refused(format!(
            "--gpus or --ranks: a launcher started this process as rank {} of {} already: leave the option out, or unset RANK and \
             WORLD_SIZE",
            place.rank, place.world_size
        ))),
        _ => Ok(found),
    }
}

/// Starts this program again as `count` ranks, and returns the exit status of the job. `is_for_programs`: a program reads what rank 0 writes to
/// standard output, so it is passed on unchanged.
pub fn run_supervised(count: usize, is_for_programs: bool) -> Result<i32, RunError> {
    let failed = |error: io::Error| {
        let problem = error.to_string();
        ParallelError::Start { rank: 0, program: program(), problem }
    };
    let own = env::current_exe().map_err(failed)?;
    let mut variables = vec![("FIREBRICK_CALLED_AS".to_owned(), program())];
    if env::var_os("RAYON_NUM_THREADS").is_none() {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        variables.push(("RAYON_NUM_THREADS".to_owned(), (cores / count).max(1).to_string()));
    }
    let ranks = LocalRanks { program: own, arguments: env::args_os().skip(1).collect(), count, variables };
    let signals = signals().map_err(failed)?;
    let print: &'static Print = if is_for_programs { &print_for_programs } else { &print };
    Ok(supervise(&ranks, &signals, print)?)
}

/// Prints a line as [`print()`] does, but leaves the standard output of rank 0 unchanged.
fn print_for_programs(rank: usize, printed: Printed, line: &str) {
    match (rank, printed) {
        // A closed output must not end the job.
        (0, Printed::Output) => drop(writeln!(io::stdout().lock(), "{line}")),
        _ => print(rank, printed, line),
    }
}

/// Prints a line of a rank, prefixed with the rank.
fn print(rank: usize, printed: Printed, line: &str) {
    // A closed output must not end the job.
    let _ = match printed {
        Printed::Output => writeln!(io::stdout().lock(), "[rank {rank}] {line}"),
        Printed::Error => writeln!(io::stderr().lock(), "[rank {rank}] {line}"),
    };
}

/// Returns the signals that arrive from now on, to be passed on.
#[cfg(unix)]
fn signals() -> io::Result<Receiver<i32>> {
    use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};

    let mut numbers = vec![SIGINT, SIGTERM, SIGUSR1];
    if !hangups_are_ignored() {
        numbers.push(SIGHUP);
    }
    let mut signals = signal_hook::iterator::Signals::new(numbers)?;
    let (sender, receiver) = channel();
    let pass_on = move || signals.forever().take_while(|signal| sender.send(*signal).is_ok()).for_each(drop);
    thread::Builder::new().name("signals".to_owned()).spawn(pass_on)?;
    Ok(receiver)
}

/// Returns no signals: a console's Ctrl-C reaches the ranks directly.
#[cfg(not(unix))]
fn signals() -> io::Result<Receiver<i32>> {
    let (sender, receiver) = channel();
    // Kept open, so that the receiver waits forever.
    std::mem::forget(sender);
    Ok(receiver)
}

/// Ends the run of a supervised rank, as after a signal, once its supervisor is gone.
pub fn follow_supervisor(interrupt: &Interrupt) {
    if !is_supervised() {
        return;
    }
    let interrupt = interrupt.clone();
    let wait = move || {
        // Nothing is ever written to standard input: this returns when it is closed.
        let _ = io::copy(&mut io::stdin().lock(), &mut io::sink());
        interrupt.end("the process that started this rank is gone");
    };
    // Without this thread, a rank whose supervisor is gone ends with its run.
    let _ = thread::Builder::new().name("supervisor".to_owned()).spawn(wait);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_are_a_number_or_all() {
        assert_eq!(["all", "8"].map(str::parse), [Ok(GpuCount::All), Ok(GpuCount::Number(8))]);
        for wrong in ["0", "-1", "two", ""] {
            assert!(wrong.parse::<GpuCount>().is_err(), "{wrong}");
        }
    }

    #[test]
    #[cfg(feature = "flex")]
    fn gpus_of_a_cpu_backend_are_refused_with_what_to_type_instead() {
        let flex = Auto::Given(BackendKind::Flex);
        assert_eq!(requested(flex, None, None).unwrap(), 1);
        assert_eq!(requested(flex, None, Some(3)).unwrap(), 3);
        let message = requested(flex, Some(GpuCount::Number(2)), None).unwrap_err().to_string();
        assert!(message.contains("--gpus 2: backend flex") && message.contains("--ranks N"), "{message}");
        if BackendKind::Cuda.devices() == 0 {
            let message = requested(Auto::Auto, Some(GpuCount::All), None).unwrap_err().to_string();
            assert!(message.contains("--gpus all: no NVIDIA card") && message.contains("--ranks N"), "{message}");
        }
    }
}
