//! Compiles CUDA C++ at run time, and caches the images on disk.
//!
//! NVRTC is opened when a [`Compiler`] is created. It needs neither a GPU nor CUDA headers. A card that is newer than NVRTC gets
//! PTX for the newest older one, which the driver translates when it loads the program.
//!
//! Not supported: includes, and linking of several sources.

mod target;

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ptr;
use std::sync::Arc;
use std::time::Instant;

use self::target::Target;
use crate::disk_cache::{Cache, Key};
use crate::driver::Driver;
use crate::error::CudaError;
use crate::imitation::Imitation;
use crate::libraries::{Libraries, Opened};
use crate::library::NVRTC;
use crate::symbols::symbols;

type Status = c_int;
type Raw = *mut c_void;

symbols! {
    /// Functions of nvrtc.h. The last two came with CUDA 11.2: the number of architectures, and each as `10 * major + minor`.
    #[derive(Clone, Copy)]
    struct Symbols of NVRTC {
        create: Create = "nvrtcCreateProgram",
        compile: unsafe extern "C" fn(Raw, c_int, *const *const c_char) -> Status = "nvrtcCompileProgram",
        log_size: unsafe extern "C" fn(Raw, *mut usize) -> Status = "nvrtcGetProgramLogSize",
        log: unsafe extern "C" fn(Raw, *mut c_char) -> Status = "nvrtcGetProgramLog",
        ptx_size: unsafe extern "C" fn(Raw, *mut usize) -> Status = "nvrtcGetPTXSize",
        ptx: unsafe extern "C" fn(Raw, *mut c_char) -> Status = "nvrtcGetPTX",
        cubin_size: unsafe extern "C" fn(Raw, *mut usize) -> Status = "nvrtcGetCUBINSize",
        cubin: unsafe extern "C" fn(Raw, *mut c_char) -> Status = "nvrtcGetCUBIN",
        destroy: unsafe extern "C" fn(*mut Raw) -> Status = "nvrtcDestroyProgram",
        error_string: unsafe extern "C" fn(Status) -> *const c_char = "nvrtcGetErrorString",
    }
    optional {
        architecture_count: unsafe extern "C" fn(*mut c_int) -> Status = "nvrtcGetNumSupportedArchs",
        architecture_list: unsafe extern "C" fn(*mut c_int) -> Status = "nvrtcGetSupportedArchs",
    }
}

/// Program, source, name, number of headers, headers and their names.
type Create = unsafe extern "C" fn(
    *mut Raw,
    *const c_char,
    *const c_char,
    c_int,
    *const *const c_char,
    *const *const c_char,
) -> Status;

/// A source and how to compile it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Program {
    /// The name that messages use.
    pub name: String,
    /// CUDA C++.
    pub source: String,
    /// Additional options of NVRTC, such as `--use_fast_math`.
    pub options: Vec<String>,
}

/// Code for one architecture.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    pub(crate) name: String,
    /// A cubin, or PTX, a text that ends in a zero.
    bytes: Arc<[u8]>,
    pub(crate) source: Arc<str>,
}

impl Image {
    /// Returns the code: a cubin, or PTX, a text that ends in a zero.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

/// NVRTC, with a cache of earlier results.
#[derive(Clone)]
pub struct Compiler {
    symbols: Symbols,
    /// Identifies the build of the library.
    build: String,
    /// What it compiles for, as `10 * major + minor`; empty if it cannot tell.
    architectures: Vec<u32>,
    /// Whether an older card is imitated, for which machine code would not run.
    is_imitation: bool,
    cache: Cache,
}

impl Compiler {
    /// Takes NVRTC from where the other libraries are; without a driver, from the first place that has it. Images are cached in
    /// the folder `kernels` of `FIREBRICK_CACHE`, or of `firebrick` in the user's cache folder. If that folder belongs to another
    /// user or cannot be written, nothing is cached, with a warning.
    ///
    /// # Errors
    /// Errors of [`Libraries::find`], [`CudaError::BrokenLibrary`], or [`CudaError::Compilation`] if it cannot compile anything.
    pub fn load() -> Result<Self, CudaError> {
        Self::with_cache(Cache::of("kernels"))
    }

    fn with_cache(cache: Cache) -> Result<Self, CudaError> {
        let nvrtc: Opened = match Driver::load() {
            Ok(driver) => Libraries::find(&driver)?.nvrtc.clone(),
            Err(_) => Libraries::open_alone(&NVRTC)?,
        };
        let symbols = Symbols::look_up(&nvrtc)?;
        let (build, architectures) = (build(&symbols)?, symbols.architectures());
        let is_imitation = Imitation::of_process()?.capability.is_some();
        Ok(Self { symbols, build, architectures, is_imitation, cache })
    }

    /// Returns whether an older card is imitated: programs are then compiled to PTX, without instructions of one card alone.
    pub fn is_imitation(&self) -> bool {
        self.is_imitation
    }

    /// Returns the code of a program for a compute capability such as `(9, 0)`: from disk, or compiled now. It is machine code, or
    /// PTX for a card that this NVRTC does not know, and where `FIREBRICK_CUDA_CAPABILITY` is set.
    ///
    /// # Errors
    /// [`CudaError::Compilation`] with the compiler's log, or [`CudaError::UnknownArchitecture`].
    pub fn compile(&self, program: &Program, compute_capability: (u32, u32)) -> Result<Image, CudaError> {
        let target = Target::of(compute_capability, &self.architectures, self.is_imitation)?;
        let options = options(program, target);
        let texts = [&self.build, &program.name, &program.source];
        let key = Key::of(texts.into_iter().chain(&options).map(String::as_str));
        let bytes = match self.cache.read(&key) {
            Some(bytes) => bytes,
            None => {
                let start = Instant::now();
                let bytes = Compilation::new(&self.symbols, program, &options)?.code(target)?;
                tracing::debug!("{} compiled in {:.2} s", program.name, start.elapsed().as_secs_f64());
                self.cache.write(&key, &bytes);
                bytes
            }
        };
        Ok(Image { name: program.name.clone(), bytes: bytes.into(), source: program.source.as_str().into() })
    }
}

/// Returns all options: the architecture, the language, and those of the program.
fn options(program: &Program, target: Target) -> Vec<String> {
    let mut options =
        vec![format!("--gpu-architecture={}", target.name()), "--std=c++17".to_owned(), "-default-device".to_owned()];
    options.extend(program.options.iter().cloned());
    options
}

struct Compilation<'a> {
    raw: Raw,
    name: &'a str,
    symbols: &'a Symbols,
}

impl<'a> Compilation<'a> {
    fn new(symbols: &'a Symbols, program: &'a Program, options: &[String]) -> Result<Self, CudaError> {
        let name = program.name.as_str();
        let text = |text: &str| {
            let nul =
                |_| CudaError::Compilation { program: name.to_owned(), log: "the text contains a NUL".to_owned() };
            CString::new(text).map_err(nul)
        };
        let (source, c_name) = (text(&program.source)?, text(name)?);
        let options = options.iter().map(|option| text(option)).collect::<Result<Vec<_>, _>>()?;
        let options: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        let mut raw = ptr::null_mut();
        // SAFETY: all strings end with NUL and outlive the call; there are no headers.
        let status =
            unsafe { (symbols.create)(&mut raw, source.as_ptr(), c_name.as_ptr(), 0, ptr::null(), ptr::null()) };
        symbols.check(status, || format!("creating {name}"))?;
        let compilation = Self { raw, name, symbols };
        // SAFETY: the program is alive, and so are the options.
        let status = unsafe { (symbols.compile)(raw, options.len() as c_int, options.as_ptr()) };
        if status != 0 {
            return Err(CudaError::Compilation { program: name.to_owned(), log: compilation.log() });
        }
        Ok(compilation)
    }

    fn log(&self) -> String {
        let log = self.read("log", self.symbols.log_size, self.symbols.log).unwrap_or_default();
        let log = String::from_utf8_lossy(&log).trim_end_matches('\0').trim_end().to_owned();
        if log.is_empty() { "the compiler left no log".to_owned() } else { log }
    }

    fn code(&self, target: Target) -> Result<Vec<u8>, CudaError> {
        match target {
            Target::MachineCode(_) => self.read("cubin", self.symbols.cubin_size, self.symbols.cubin),
            Target::Ptx(_) => self.ptx(),
        }
    }

    /// Returns the PTX, a text that ends in a zero.
    fn ptx(&self) -> Result<Vec<u8>, CudaError> {
        let mut ptx = self.read("PTX", self.symbols.ptx_size, self.symbols.ptx)?;
        if ptx.last() != Some(&0) {
            ptx.push(0);
        }
        Ok(ptx)
    }

    /// Reads one of the program's outputs; `size` and `get` are the library's functions for it.
    fn read(
        &self,
        what: &str,
        size: unsafe extern "C" fn(Raw, *mut usize) -> Status,
        get: unsafe extern "C" fn(Raw, *mut c_char) -> Status,
    ) -> Result<Vec<u8>, CudaError> {
        let what = || format!("the {what} of {}", self.name);
        let mut length = 0;
        // SAFETY: the program is alive and compiled, and the pointer is valid for a write.
        self.symbols.check(unsafe { size(self.raw, &mut length) }, what)?;
        let mut bytes = vec![0_u8; length];
        // SAFETY: the buffer has the size that the library requires.
        self.symbols.check(unsafe { get(self.raw, bytes.as_mut_ptr().cast()) }, what)?;
        Ok(bytes)
    }
}

impl Drop for Compilation<'_> {
    fn drop(&mut self) {
        // SAFETY: created once and destroyed once. The status is ignored: nothing can be done about an error.
        let _ = unsafe { (self.symbols.destroy)(&mut self.raw) };
    }
}

/// Identifies the build of the library: `nvrtcVersion` returns only the major and minor version, but the comments at the top of every
/// PTX file contain the full version and the build number. Compiling an empty program takes about 20 ms.
fn build(symbols: &Symbols) -> Result<String, CudaError> {
    let empty = Program { name: "empty.cu".to_owned(), source: String::new(), options: Vec::new() };
    let ptx = Compilation::new(symbols, &empty, &[])?.ptx()?;
    let ptx = String::from_utf8_lossy(&ptx);
    Ok(ptx.lines().take_while(|line| line.starts_with("//")).collect::<Vec<_>>().join("\n"))
}

impl Symbols {
    /// Returns the architectures that the library compiles for, as `10 * major + minor`; none if it cannot tell.
    fn architectures(&self) -> Vec<u32> {
        let Some((count, list)) = self.architecture_count.zip(self.architecture_list) else { return Vec::new() };
        let mut length: c_int = 0;
        // SAFETY: the pointer is valid for a write.
        let status = unsafe { count(&mut length) };
        let mut numbers = vec![0; usize::try_from(length).unwrap_or(0)];
        // SAFETY: the buffer has as many elements as the library has architectures.
        if status != 0 || unsafe { list(numbers.as_mut_ptr()) } != 0 {
            return Vec::new();
        }
        numbers.into_iter().filter_map(|number| u32::try_from(number).ok()).collect()
    }

    fn check(&self, status: Status, what: impl Fn() -> String) -> Result<(), CudaError> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: the library returns a constant string for every code.
        let message = unsafe { CStr::from_ptr((self.error_string)(status)) };
        Err(CudaError::Compilation { program: what(), log: message.to_string_lossy().into_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn program(source: &str) -> Program {
        Program { name: "test.cu".to_owned(), source: source.to_owned(), options: Vec::new() }
    }

    const SOURCE: &str = "extern \"C\" __global__ void twice(float *x) { x[threadIdx.x] *= 2.0f; }";

    /// Needs NVRTC but no GPU; returns early without NVRTC.
    #[test]
    fn ptx_for_newer_cards_ends_in_a_zero() {
        let Ok(compiler) = Compiler::with_cache(Cache::none()) else { return };
        assert!(compiler.architectures.contains(&90), "{:?}", compiler.architectures);
        let newest = compiler.architectures.iter().max().expect("it knows some");
        let image = compiler.compile(&program(SOURCE), (99, 0)).expect("a valid program");
        let text = CStr::from_bytes_with_nul(image.bytes()).expect("a text with one zero, at its end");
        assert!(text.to_string_lossy().contains(&format!(".target sm_{newest}")), "PTX for {newest}");
    }

    /// Needs NVRTC but no GPU; returns early without NVRTC.
    #[test]
    fn a_program_is_compiled_once_and_then_read_from_disk() {
        let folder = std::env::temp_dir().join(format!("firebrick-nvrtc-{}", std::process::id()));
        let Ok(compiler) = Compiler::with_cache(Cache::in_folder(&folder)) else { return };
        let first = compiler.compile(&program(SOURCE), (9, 0)).expect("a valid program");
        let files = std::fs::read_dir(&folder).expect("the cache folder").count();
        let second = compiler.compile(&program(SOURCE), (9, 0)).expect("a valid program");
        assert_eq!((first, files), (second, 1));
        compiler.compile(&program(SOURCE), (8, 0)).expect("another architecture");
        assert_eq!(std::fs::read_dir(&folder).expect("the cache folder").count(), 2);
        let other = Compiler { build: format!("{} patched", compiler.build), ..compiler.clone() };
        other.compile(&program(SOURCE), (9, 0)).expect("another build of the compiler");
        assert_eq!(std::fs::read_dir(&folder).expect("the cache folder").count(), 3);

        for entry in std::fs::read_dir(&folder).expect("the cache folder") {
            std::fs::write(entry.expect("an entry").path(), b"cut short").expect("overwriting");
        }
        assert!(compiler.compile(&program(SOURCE), (9, 0)).expect("compiled again").bytes().len() > 100);
        std::fs::remove_dir_all(&folder).expect("cleaning up");
    }

    /// Needs NVRTC but no GPU; returns early without NVRTC.
    #[test]
    fn an_error_of_compilation_has_the_log() {
        let Ok(compiler) = Compiler::with_cache(Cache::none()) else { return };
        let error = compiler.compile(&program("int f( {"), (9, 0)).expect_err("not a program");
        assert!(error.to_string().contains("test.cu") && error.to_string().contains("error"), "{error}");
    }

    /// Needs NVRTC but no GPU; returns early without NVRTC.
    #[test]
    fn the_build_has_the_full_version() {
        let Ok(compiler) = Compiler::with_cache(Cache::none()) else { return };
        let version = compiler.build.split_whitespace().find(|word| word.starts_with('V')).unwrap_or_default();
        assert_eq!(version.split('.').count(), 3, "major, minor and patch in {:?}", compiler.build);
    }
}
