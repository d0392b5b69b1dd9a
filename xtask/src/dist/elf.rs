//! What a Linux program needs of the system that starts it: the libraries it names, and the newest version of glibc whose symbols it
//! uses. A program that needs more than a release promises is refused before it is packed.
//!
//! Source: the ELF gABI, and "Symbol Versioning" of the Linux Standard Base.
//!
//! Not supported: 32-bit and big-endian files, and files without section headers, which the linkers used here do not write.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};

/// The glibc that a release promises: that of Debian 10, Ubuntu 20.04 and RHEL 8.
pub(super) const GLIBC: (u32, u32) = (2, 28);

/// The libraries of glibc itself. Drivers and NVIDIA's libraries are opened when a run uses them, and are not needed to start.
const LIBRARIES: [&str; 8] = [
    "libc.so.6",
    "libm.so.6",
    "libpthread.so.0",
    "libdl.so.2",
    "librt.so.1",
    "libutil.so.1",
    "ld-linux-x86-64.so.2",
    "ld-linux-aarch64.so.1",
];

/// Section types, a tag of the dynamic section, and the sizes of a section header and a dynamic entry.
const SHT_DYNAMIC: u32 = 6;
const SHT_GNU_VERNEED: u32 = 0x6fff_fffe;
const DT_NEEDED: u64 = 1;
const SECTION_HEADER: usize = 64;
const DYNAMIC_ENTRY: usize = 16;

/// Names that a program needs; each may occur several times.
#[derive(Debug, Default, PartialEq, Eq)]
struct Needs {
    /// Libraries that the loader has to find.
    libraries: Vec<String>,
    /// Versions of symbols, such as `GLIBC_2.17`.
    versions: Vec<String>,
}

/// Checks that `program` starts on any system with the promised glibc; returns the highest version that it needs, in words.
///
/// # Errors
/// Names the first library or version of a symbol that such a system may lack.
pub(super) fn check_portable(program: &Path) -> Result<String> {
    let bytes = fs::read(program).with_context(|| format!("could not read {}", program.display()))?;
    let needs = Needs::of(&bytes).with_context(|| format!("could not read {} as an ELF file", program.display()))?;
    needs.check().with_context(|| format!("{} would not start everywhere", program.display()))
}

impl Needs {
    /// Reads what the ELF file `bytes` needs.
    fn of(bytes: &[u8]) -> Result<Self> {
        ensure!(bytes.starts_with(b"\x7fELF\x02\x01"), "no 64-bit little-endian ELF file");
        let file = Elf(bytes);
        let (table, size, count) = (file.long(0x28)?, usize::from(file.half(0x3a)?), file.half(0x3c)?);
        ensure!(size == SECTION_HEADER && count > 0, "it has no section headers");
        ensure!(bytes.len().saturating_sub(table) >= usize::from(count) * size, "it ends too early");
        let header = |index: usize| table + index * SECTION_HEADER;
        let mut needs = Self::default();
        for index in 0..usize::from(count) {
            let section = header(index);
            let kind = file.word(section + 4)?;
            if kind != SHT_DYNAMIC && kind != SHT_GNU_VERNEED {
                continue;
            }
            let (start, length) = (file.long(section + 0x18)?, file.long(section + 0x20)?);
            let names = file.long(header(file.word(section + 0x28)? as usize) + 0x18)?;
            if kind == SHT_DYNAMIC {
                needs.libraries = file.libraries(start, length, names)?;
            } else {
                needs.versions = file.versions(start, file.word(section + 0x2c)?, names)?;
            }
        }
        Ok(needs)
    }

    /// Refuses what a system may lack.
    fn check(&self) -> Result<String> {
        if let Some(library) = self.libraries.iter().find(|library| !LIBRARIES.contains(&library.as_str())) {
            bail!("it needs {library}, which is no part of glibc: open it at run time, or link it in");
        }
        let (major, minor) = GLIBC;
        let mut highest = (0, 0);
        for version in &self.versions {
            let needed = glibc_version(version);
            let Some(needed) = needed.filter(|needed| *needed <= GLIBC) else {
                bail!(
                    "it needs {version}, and a release needs no more than GLIBC_{major}.{minor}: was it linked by zig?"
                );
            };
            highest = highest.max(needed);
        }
        Ok(format!("needs glibc {}.{} or newer", highest.0, highest.1))
    }
}

/// Reads a version of a symbol such as `GLIBC_2.2.5`, without its third number; `None` if it is no version of glibc that only counts up.
fn glibc_version(name: &str) -> Option<(u32, u32)> {
    let mut numbers = name.strip_prefix("GLIBC_")?.split('.');
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

/// The bytes of a file; what lies outside of it is an error.
struct Elf<'a>(&'a [u8]);

impl Elf<'_> {
    fn array<const N: usize>(&self, at: usize) -> Result<[u8; N]> {
        let found = at.checked_add(N).and_then(|end| self.0.get(at..end)).context("it ends too early")?;
        Ok(found.try_into().expect("the slice has N bytes"))
    }

    fn half(&self, at: usize) -> Result<u16> {
        self.array(at).map(u16::from_le_bytes)
    }

    fn word(&self, at: usize) -> Result<u32> {
        self.array(at).map(u32::from_le_bytes)
    }

    fn long(&self, at: usize) -> Result<usize> {
        self.array(at).map(|bytes| u64::from_le_bytes(bytes) as usize)
    }

    /// Reads the name at `at`, which ends in a zero byte.
    fn name(&self, at: usize) -> Result<String> {
        let rest = self.0.get(at..).context("a name lies outside")?;
        let end = rest.iter().position(|byte| *byte == 0).context("a name does not end")?;
        Ok(String::from_utf8_lossy(&rest[..end]).into_owned())
    }

    /// Lists the needed libraries of the dynamic section, whose names lie from `names` on.
    fn libraries(&self, start: usize, length: usize, names: usize) -> Result<Vec<String>> {
        let entries = (0..length / DYNAMIC_ENTRY).map(|index| start + index * DYNAMIC_ENTRY);
        let mut found = Vec::new();
        for entry in entries {
            if self.long(entry)? as u64 == DT_NEEDED {
                found.push(self.name(names + self.long(entry + 8)?)?);
            }
        }
        Ok(found)
    }

    /// Lists the needed versions: `count` records at `start`, one for each library, with a chain of versions each.
    fn versions(&self, start: usize, count: u32, names: usize) -> Result<Vec<String>> {
        let (mut record, mut found) = (start, Vec::new());
        for _ in 0..count {
            let mut version = record + self.word(record + 8)? as usize;
            for _ in 0..self.half(record + 2)? {
                found.push(self.name(names + self.word(version + 8)? as usize)?);
                version += self.word(version + 12)? as usize;
            }
            record += self.word(record + 12)? as usize;
        }
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Writes an ELF file that needs `libraries`, and of the first of them `versions`.
    fn elf(libraries: &[&str], versions: &[&str]) -> Vec<u8> {
        let mut names = vec![0];
        let mut place = |name: &str| {
            let at = names.len();
            names.extend(name.bytes().chain([0]));
            at as u64
        };
        let dynamic: Vec<u8> = libraries
            .iter()
            .flat_map(|library| [DT_NEEDED, place(library)])
            .chain([0, 0])
            .flat_map(u64::to_le_bytes)
            .collect();
        let mut needed = [1u16, versions.len() as u16].map(u16::to_le_bytes).concat();
        needed.extend([1u32, 16, 0].map(u32::to_le_bytes).concat());
        for (index, version) in versions.iter().enumerate() {
            let next = if index + 1 == versions.len() { 0 } else { 16 };
            needed.extend([0u32, 0, place(version) as u32, next].map(u32::to_le_bytes).concat());
        }
        let mut file = b"\x7fELF\x02\x01".to_vec();
        file.resize(64, 0);
        let mut headers = vec![0; SECTION_HEADER];
        for (kind, content, records) in
            [(3u32, &names, 0u32), (SHT_DYNAMIC, &dynamic, 0), (SHT_GNU_VERNEED, &needed, 1)]
        {
            let mut header = [0, kind].map(u32::to_le_bytes).concat();
            header.extend([0, 0, file.len() as u64, content.len() as u64].map(u64::to_le_bytes).concat());
            header.extend([1, records].map(u32::to_le_bytes).concat());
            header.resize(SECTION_HEADER, 0);
            headers.extend(header);
            file.extend(content);
        }
        let table = (file.len() as u64).to_le_bytes();
        file[0x28..0x30].copy_from_slice(&table);
        file[0x3a..0x3e].copy_from_slice(&[SECTION_HEADER as u16, 4].map(u16::to_le_bytes).concat());
        file.extend(headers);
        file
    }

    fn checked(libraries: &[&str], versions: &[&str]) -> Result<String, String> {
        Needs::of(&elf(libraries, versions)).unwrap().check().map_err(|error| error.to_string())
    }

    #[test]
    fn a_program_for_the_promised_glibc_passes_with_the_version_it_needs() {
        let needs = Needs::of(&elf(&["libc.so.6", "libm.so.6"], &["GLIBC_2.2.5", "GLIBC_2.28"])).unwrap();
        assert_eq!(needs.libraries, ["libc.so.6", "libm.so.6"]);
        assert_eq!(needs.versions, ["GLIBC_2.2.5", "GLIBC_2.28"]);
        let usual = checked(&["libc.so.6", "ld-linux-aarch64.so.1"], &["GLIBC_2.17", "GLIBC_2.3.4"]);
        assert_eq!(usual.unwrap(), "needs glibc 2.17 or newer");
    }

    #[test]
    fn a_newer_symbol_and_a_foreign_library_are_refused_by_name() {
        for version in ["GLIBC_2.29", "GLIBC_3.0", "GLIBC_PRIVATE", "GLIBC_ABI_DT_RELR", "GCC_3.0"] {
            let message = checked(&["libc.so.6"], &["GLIBC_2.17", version]).unwrap_err();
            assert!(message.contains(version) && message.contains("GLIBC_2.28"), "{message}");
        }
        let message = checked(&["libc.so.6", "libgcc_s.so.1"], &["GLIBC_2.17"]).unwrap_err();
        assert!(message.contains("libgcc_s.so.1"), "{message}");
    }

    #[test]
    fn a_damaged_file_is_an_error_wherever_it_ends() {
        let whole = elf(&["libc.so.6"], &["GLIBC_2.17"]);
        for length in 0..whole.len() {
            assert!(Needs::of(&whole[..length]).is_err(), "{length} of {} bytes", whole.len());
        }
        assert!(Needs::of(b"MZ").is_err());
    }

    /// This test is itself a Linux program that needs its C library.
    #[cfg(all(target_os = "linux", target_env = "gnu", target_pointer_width = "64"))]
    #[test]
    fn a_real_program_is_read_as_the_linker_wrote_it() {
        let needs = Needs::of(&fs::read(std::env::current_exe().unwrap()).unwrap()).unwrap();
        assert!(needs.libraries.contains(&"libc.so.6".to_owned()), "{needs:?}");
        assert!(needs.versions.iter().filter_map(|version| glibc_version(version)).any(|version| version >= (2, 2)));
    }
}
