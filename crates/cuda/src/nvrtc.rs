//! Compiling CUDA C++ at run time, with the images kept on disk.
//!
//! NVRTC is opened when a [`Compiler`] is made and needs no GPU and no CUDA headers; sources that include nothing compile
//! wherever the library is. What it gives up: files to include, and linking of several sources.

mod cache;

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ptr;
use std::sync::Arc;

use crate::library::open_known;
use crate::{CudaError, Driver};
use cache::Cache;

type Status = c_int;
type Raw = *mut c_void;

/// Functions of the library, looked up by name (nvrtc.h).
#[derive(Clone, Copy)]
struct Symbols {
    version: unsafe extern "C" fn(*mut c_int, *mut c_int) -> Status,
    create: unsafe extern "C" fn(
        *mut Raw,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> Status,
    compile: unsafe extern "C" fn(Raw, c_int, *const *const c_char) -> Status,
    log_size: unsafe extern "C" fn(Raw, *mut usize) -> Status,
    log: unsafe extern "C" fn(Raw, *mut c_char) -> Status,
    cubin_size: unsafe extern "C" fn(Raw, *mut usize) -> Status,
    cubin: unsafe extern "C" fn(Raw, *mut c_char) -> Status,
    destroy: unsafe extern "C" fn(*mut Raw) -> Status,
    error_string: unsafe extern "C" fn(Status) -> *const c_char,
}

/// A source and how to compile it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Program {
    /// What messages call it.
    pub name: String,
    /// CUDA C++.
    pub source: String,
    /// Further options of NVRTC, such as `--use_fast_math`.
    pub options: Vec<String>,
}

/// Machine code for one architecture.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    /// The program it was made from.
    pub(crate) name: String,
    /// A cubin.
    pub(crate) bytes: Arc<[u8]>,
}

impl Image {
    /// Its machine code, a cubin.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

/// NVRTC, and what it compiled before.
#[derive(Clone)]
pub struct Compiler {
    symbols: Symbols,
    version: (i32, i32),
    cache: Cache,
}

impl Compiler {
    /// Finds and loads NVRTC. Images are kept in `FIREBRICK_CACHE`, or in the user's cache folder.
    ///
    /// # Errors
    /// [`CudaError::NvrtcNotFound`], or [`CudaError::BrokenNvrtc`].
    pub fn load() -> Result<Self, CudaError> {
        Self::with_cache(Cache::default_folder())
    }

    fn with_cache(cache: Cache) -> Result<Self, CudaError> {
        let (library, file) = open_known("NVRTC", usable)
            .map_err(|(searched, package)| CudaError::NvrtcNotFound { searched, package })?;
        let symbols = Symbols::look_up(&library, &file)?;
        // Function pointers into it are kept: it must never be unloaded.
        std::mem::forget(library);
        let (mut major, mut minor) = (0, 0);
        // SAFETY: both pointers are valid for a write.
        let status = unsafe { (symbols.version)(&mut major, &mut minor) };
        symbols.check(status, || "its version".to_owned())?;
        Ok(Self { symbols, version: (major, minor), cache })
    }

    /// Version of the library.
    pub fn version(&self) -> (i32, i32) {
        self.version
    }

    /// The machine code of a program for a compute capability such as `(9, 0)`: from disk, or compiled now.
    ///
    /// # Errors
    /// [`CudaError::Compilation`] with the compiler's own log.
    pub fn compile(&self, program: &Program, compute_capability: (u32, u32)) -> Result<Image, CudaError> {
        let options = options(program, compute_capability);
        let key = self.cache.key(program, &options, self.version);
        let bytes = match self.cache.read(&key) {
            Some(bytes) => bytes,
            None => {
                let bytes = self.compile_now(program, &options)?;
                self.cache.write(&key, &bytes);
                bytes
            }
        };
        Ok(Image { name: program.name.clone(), bytes: bytes.into() })
    }

    fn compile_now(&self, program: &Program, options: &[String]) -> Result<Vec<u8>, CudaError> {
        let text = |text: &str| {
            let nul = || CudaError::Compilation { program: program.name.clone(), log: "it holds a NUL".to_owned() };
            CString::new(text).map_err(|_| nul())
        };
        let (source, name) = (text(&program.source)?, text(&program.name)?);
        let options = options.iter().map(|option| text(option)).collect::<Result<Vec<_>, _>>()?;
        let options: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        let symbols = &self.symbols;
        let mut raw = ptr::null_mut();
        // SAFETY: all strings end with NUL and outlive the call; there are no headers.
        let status = unsafe { (symbols.create)(&mut raw, source.as_ptr(), name.as_ptr(), 0, ptr::null(), ptr::null()) };
        symbols.check(status, || format!("creating {}", program.name))?;
        let raw = Owned { raw, symbols };
        // SAFETY: the program is alive, and so are the options.
        let status = unsafe { (symbols.compile)(raw.raw, options.len() as c_int, options.as_ptr()) };
        if status != 0 {
            return Err(CudaError::Compilation { program: program.name.clone(), log: raw.log() });
        }
        raw.cubin(&program.name)
    }
}

/// A driver cannot run the code of a newer major version of CUDA. Without a driver any version will do.
fn usable(file: &str) -> bool {
    let newest = Driver::load().map_or(u32::MAX, |driver| driver.version().0);
    !["12", "13", "14"]
        .iter()
        .any(|major| file.contains(&format!(".so.{major}")) && major.parse::<u32>().is_ok_and(|major| major > newest))
}

/// All options: the architecture (its own variant from Hopper on, without which a chip's own instructions are missing), the
/// language, and the program's.
fn options(program: &Program, (major, minor): (u32, u32)) -> Vec<String> {
    let own = if major >= 9 { "a" } else { "" };
    let mut options = vec![
        format!("--gpu-architecture=sm_{major}{minor}{own}"),
        "--std=c++17".to_owned(),
        "-default-device".to_owned(),
    ];
    options.extend(program.options.iter().cloned());
    options
}

/// A program that NVRTC holds.
struct Owned<'a> {
    raw: Raw,
    symbols: &'a Symbols,
}

impl Owned<'_> {
    fn log(&self) -> String {
        let mut size = 0;
        // SAFETY: the program is alive and the pointer valid for a write.
        let status = unsafe { (self.symbols.log_size)(self.raw, &mut size) };
        let mut bytes = vec![0_u8; size];
        // SAFETY: the buffer has the size that the library asked for.
        if status != 0 || size == 0 || unsafe { (self.symbols.log)(self.raw, bytes.as_mut_ptr().cast()) } != 0 {
            return "the compiler left no log".to_owned();
        }
        String::from_utf8_lossy(&bytes).trim_end_matches('\0').trim_end().to_owned()
    }

    fn cubin(&self, name: &str) -> Result<Vec<u8>, CudaError> {
        let mut size = 0;
        // SAFETY: the program is alive and compiled, and the pointer valid for a write.
        let status = unsafe { (self.symbols.cubin_size)(self.raw, &mut size) };
        self.symbols.check(status, || format!("the size of {name}"))?;
        let mut bytes = vec![0_u8; size];
        // SAFETY: the buffer has the size that the library asked for.
        let status = unsafe { (self.symbols.cubin)(self.raw, bytes.as_mut_ptr().cast()) };
        self.symbols.check(status, || format!("the code of {name}"))?;
        Ok(bytes)
    }
}

impl Drop for Owned<'_> {
    fn drop(&mut self) {
        // SAFETY: created once and destroyed once. The status is dropped: nothing can be done about it.
        let _ = unsafe { (self.symbols.destroy)(&mut self.raw) };
    }
}

impl Symbols {
    fn look_up(library: &libloading::Library, file: &str) -> Result<Self, CudaError> {
        macro_rules! function {
            ($name:literal) => {
                // SAFETY: declared in nvrtc.h as the type of the field that it is put into.
                *unsafe { library.get(concat!($name, "\0").as_bytes()) }
                    .map_err(|_| CudaError::BrokenNvrtc { file: file.to_owned(), symbol: $name })?
            };
        }
        Ok(Self {
            version: function!("nvrtcVersion"),
            create: function!("nvrtcCreateProgram"),
            compile: function!("nvrtcCompileProgram"),
            log_size: function!("nvrtcGetProgramLogSize"),
            log: function!("nvrtcGetProgramLog"),
            cubin_size: function!("nvrtcGetCUBINSize"),
            cubin: function!("nvrtcGetCUBIN"),
            destroy: function!("nvrtcDestroyProgram"),
            error_string: function!("nvrtcGetErrorString"),
        })
    }

    fn check(&self, status: Status, what: impl Fn() -> String) -> Result<(), CudaError> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: the library returns a string of its own for every code.
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

    #[test]
    fn the_chip_s_own_instructions_are_asked_for_from_hopper_on() {
        let of = |capability| options(&program(""), capability)[0].clone();
        assert_eq!(of((8, 0)), "--gpu-architecture=sm_80");
        assert_eq!(of((9, 0)), "--gpu-architecture=sm_90a");
        assert_eq!(of((12, 0)), "--gpu-architecture=sm_120a");
    }

    /// Says something only where NVRTC is installed; needs no GPU.
    #[test]
    fn a_program_compiles_once_and_comes_from_disk_afterwards() {
        let folder = std::env::temp_dir().join(format!("firebrick-nvrtc-{}", std::process::id()));
        let Ok(compiler) = Compiler::with_cache(Cache::in_folder(&folder)) else { return };
        let first = compiler.compile(&program(SOURCE), (9, 0)).expect("a valid program");
        let files = std::fs::read_dir(&folder).expect("the cache folder").count();
        let second = compiler.compile(&program(SOURCE), (9, 0)).expect("a valid program");
        assert_eq!((first, files), (second, 1));
        compiler.compile(&program(SOURCE), (8, 0)).expect("another architecture");
        assert_eq!(std::fs::read_dir(&folder).expect("the cache folder").count(), 2);

        for entry in std::fs::read_dir(&folder).expect("the cache folder") {
            std::fs::write(entry.expect("an entry").path(), b"cut short").expect("overwriting");
        }
        assert!(compiler.compile(&program(SOURCE), (9, 0)).expect("compiled anew").bytes().len() > 100);
        std::fs::remove_dir_all(&folder).expect("cleaning up");
    }

    /// Says something only where NVRTC is installed; needs no GPU.
    #[test]
    fn a_program_that_does_not_compile_says_why() {
        let Ok(compiler) = Compiler::with_cache(Cache::none()) else { return };
        let error = compiler.compile(&program("int f( {"), (9, 0)).expect_err("not a program");
        assert!(error.to_string().contains("test.cu") && error.to_string().contains("error"), "{error}");
    }
}
