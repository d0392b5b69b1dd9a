//! Compiles every CUDA program for every supported architecture with NVRTC, which needs no card: `.ci/run` calls it.
//!
//! It fails for programs that do not compile, and for kernels with a larger stack frame than [`LARGEST_FRAME`], where registers that do not
//! suffice are spilled. Images are kept in `FIREBRICK_CACHE`, so a second run compiles only what changed.
//! Trade-off: what compiles may still be wrong or slow.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a program that reports what it compiled")]

use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::available_parallelism;

use burn_tensor::DType;
use firebrick_cuda::{Compiler, Program};
use firebrick_kernels::backends::cuda::every_program;

/// Compute capabilities and the 16-bit format of activations there.
const ARCHITECTURES: [((u32, u32), DType); 9] = [
    ((7, 5), DType::F16),
    ((8, 0), DType::BF16),
    ((8, 6), DType::BF16),
    ((8, 9), DType::BF16),
    ((9, 0), DType::BF16),
    ((10, 0), DType::BF16),
    ((10, 3), DType::BF16),
    ((12, 0), DType::BF16),
    ((12, 1), DType::BF16),
];

/// Maximum bytes of a stack frame: the largest with NVRTC 13.0, of the attention over a cache with a soft cap.
const LARGEST_FRAME: u64 = 72;

/// A program to compile.
struct Job {
    capability: (u32, u32),
    dtype: DType,
    name: String,
    program: Program,
}

impl Job {
    fn all() -> Vec<Self> {
        let of_architecture = |(capability, half): ((u32, u32), DType)| {
            [half, DType::F32].into_iter().flat_map(move |dtype| {
                let programs = every_program(dtype, capability).into_iter();
                programs.map(move |(name, program)| Self { capability, dtype, name, program })
            })
        };
        ARCHITECTURES.into_iter().flat_map(of_architecture).collect()
    }

    /// Compiles the program, and returns the largest stack frame of its kernels.
    fn run(&self, compiler: &Compiler) -> Result<u64, String> {
        let image = compiler.compile(&self.program, self.capability).map_err(|error| error.to_string())?;
        match largest_frame(image.bytes()) {
            None => Err("the image has no stack frames: is it machine code for this architecture?".to_owned()),
            Some(bytes) if bytes > LARGEST_FRAME => {
                Err(format!("a kernel has {bytes} bytes on its stack, at most {LARGEST_FRAME} are allowed"))
            }
            Some(bytes) => Ok(bytes),
        }
    }

    fn describe(&self) -> String {
        let (major, minor) = self.capability;
        format!("{} in {:?} for compute capability {major}.{minor}", self.name, self.dtype)
    }
}

fn main() -> ExitCode {
    let compiler = match Compiler::load() {
        Ok(compiler) => compiler,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::FAILURE;
        }
    };
    let jobs = Job::all();
    let results = compile(&jobs, &compiler);
    for (capability, _) in ARCHITECTURES {
        let of = jobs.iter().zip(&results).filter(|(job, _)| job.capability == capability);
        let frames: Vec<u64> = of.filter_map(|(_, result)| result.as_ref().ok().copied()).collect();
        let largest = frames.iter().max().copied().unwrap_or(0);
        println!("{}.{}: {} programs, stack frames up to {largest} bytes", capability.0, capability.1, frames.len());
    }
    let failed: Vec<String> = jobs
        .iter()
        .zip(&results)
        .filter_map(|(job, result)| Some(format!("{}: {}", job.describe(), result.as_ref().err()?)))
        .collect();
    failed.iter().for_each(|failure| eprintln!("FAILED {failure}"));
    if failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Compiles on all cores; results are in the order of the jobs.
fn compile(jobs: &[Job], compiler: &Compiler) -> Vec<Result<u64, String>> {
    let (next, results) = (AtomicUsize::new(0), Mutex::new(vec![Ok(0); jobs.len()]));
    std::thread::scope(|scope| {
        for _ in 0..available_parallelism().map_or(1, usize::from) {
            let compiler = compiler.clone();
            let (next, results) = (&next, &results);
            scope.spawn(move || {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some(job) = jobs.get(index) else { return };
                    let result = job.run(&compiler);
                    results.lock().expect("no thread panics with the lock")[index] = result;
                }
            });
        }
    });
    results.into_inner().expect("no thread panics with the lock")
}

/// Returns the largest stack frame of a cubin's functions, in bytes; `None` if the bytes are no cubin, or one without frames.
///
/// A cubin is a 64-bit ELF file. Its sections of the type `SHT_CUDA_INFO` hold attributes, each a format, a name and 16 bits; those of the
/// format `SVAL` are followed by so many bytes. `FRAME_SIZE` has a function's symbol and the bytes of its frame.
fn largest_frame(cubin: &[u8]) -> Option<u64> {
    const INFO: u64 = 0x7000_0000;
    const SVAL: u64 = 4;
    const FRAME_SIZE: u64 = 0x11;
    let read = |start: u64, bytes: u64| -> Option<u64> {
        let field = cubin.get(usize::try_from(start).ok()?..)?.get(..bytes as usize)?;
        Some(field.iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte)))
    };
    if !cubin.starts_with(b"\x7fELF") {
        return None;
    }
    let (table, entry, count) = (read(0x28, 8)?, read(0x3a, 2)?, read(0x3c, 2)?);
    let mut largest = None;
    for header in (0..count).map(|index| table + index * entry) {
        if read(header + 4, 4)? != INFO {
            continue;
        }
        let mut at = read(header + 24, 8)?;
        let end = at + read(header + 32, 8)?;
        while at < end {
            let (format, name, value) = (read(at, 1)?, read(at + 1, 1)?, read(at + 2, 2)?);
            if (format, name) == (SVAL, FRAME_SIZE) {
                largest = largest.max(Some(read(at + 8, 4)?));
            }
            at += 4 + if format == SVAL { value } else { 0 };
        }
    }
    largest
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns an ELF file with one section of a type, at the end of the file.
    fn elf(section_type: u32, section: &[u8]) -> Vec<u8> {
        let mut file = vec![0; 64 + 64];
        file[..4].copy_from_slice(b"\x7fELF");
        file[0x28] = 64;
        file[0x3a] = 64;
        file[0x3c] = 1;
        file[64 + 4..64 + 8].copy_from_slice(&section_type.to_le_bytes());
        file[64 + 24] = 128;
        file[64 + 32] = section.len() as u8;
        file.extend(section);
        file
    }

    #[test]
    fn the_largest_frame_of_all_functions_is_found() {
        // An attribute without further bytes, two frames with an attribute between them, and one more.
        let section = [
            [1_u8, 0x37, 9, 0].as_slice(),
            &[4, 0x11, 8, 0, 1, 0, 0, 0, 16, 0, 0, 0],
            &[4, 0x12, 8, 0, 1, 0, 0, 0, 0, 4, 0, 0],
            &[4, 0x11, 8, 0, 2, 0, 0, 0, 0, 1, 0, 0],
            &[3, 0x1b, 255, 0],
        ]
        .concat();
        assert_eq!(largest_frame(&elf(0x7000_0000, &section)), Some(256));
        assert_eq!(largest_frame(&elf(1, &section)), None, "another section");
        assert_eq!(largest_frame(&elf(0x7000_0000, &section[..9])), None, "cut short");
        assert_eq!(largest_frame(b".version 9.0\n.target sm_90\0"), None, "PTX");
    }

    #[test]
    fn every_architecture_has_programs_and_only_the_oldest_none_in_bfloat16() {
        let jobs = Job::all();
        for (capability, half) in ARCHITECTURES {
            let of = |dtype| jobs.iter().filter(|job| job.capability == capability && job.dtype == dtype).count();
            assert!(of(half) > 20 && of(DType::F32) > 20, "{capability:?}");
            assert_eq!(of(DType::BF16) == 0, capability == (7, 5));
        }
    }
}
