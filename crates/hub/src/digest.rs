//! The hashes that identify content: SHA-256 for large files, git's blob hash for small ones.
//!
//! The Hub sends them as ETag, so a download is checked against its own name.
//! Trade-off: an ETag of another form (from a mirror) identifies content, but only the length is checked, if it is known.

use std::fs::File;
use std::io::{Read, Result as IoResult};
use std::path::Path;

use ring::digest::{Algorithm, Context, SHA1_FOR_LEGACY_USE_ONLY, SHA256};

use crate::error::HubError;

const BUFFER_BYTES: usize = 1 << 20;

/// Computes the SHA-256 of content, in hexadecimal digits.
pub(crate) fn sha256(content: impl Read) -> IoResult<String> {
    hashed(&SHA256, "", content)
}

/// Computes git's hash of a file with this content: SHA-1 of `blob SIZE\0` and the content.
pub(crate) fn git_blob(content: impl Read, size: u64) -> IoResult<String> {
    hashed(&SHA1_FOR_LEGACY_USE_ONLY, &format!("blob {size}\0"), content)
}

fn hashed(algorithm: &'static Algorithm, head: &str, mut content: impl Read) -> IoResult<String> {
    let (mut context, mut buffer) = (Context::new(algorithm), vec![0; BUFFER_BYTES]);
    context.update(head.as_bytes());
    loop {
        match content.read(&mut buffer)? {
            0 => return Ok(context.finish().as_ref().iter().map(|byte| format!("{byte:02x}")).collect()),
            count => context.update(&buffer[..count]),
        }
    }
}

fn git_blob_of(path: &Path) -> IoResult<String> {
    let file = File::open(path)?;
    let size = file.metadata()?.len();
    git_blob(file, size)
}

/// Checks that a downloaded file has the content that its ETag names.
pub(crate) fn check(path: &Path, etag: &str, what: &str) -> Result<(), HubError> {
    let read = HubError::cache(path);
    let is_hexadecimal = etag.bytes().all(|byte| byte.is_ascii_hexdigit());
    let (algorithm, got) = match etag.len() {
        64 if is_hexadecimal => ("SHA-256", File::open(path).and_then(sha256).map_err(read)?),
        40 if is_hexadecimal => ("git hash", git_blob_of(path).map_err(read)?),
        _ => return Ok(()),
    };
    if got.eq_ignore_ascii_case(etag) {
        return Ok(());
    }
    Err(HubError::WrongContent { what: what.to_owned(), algorithm, expected: etag.to_owned(), got })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_are_those_of_git_and_of_sha256sum() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, "hello\n").unwrap();
        // `printf 'hello\n' | git hash-object --stdin` and `| sha256sum`.
        assert_eq!(git_blob_of(&path).unwrap(), "ce013625030ba8dba906f756967f9e9ca394464a");
        assert_eq!(git_blob(&b"hello\n"[..], 6).unwrap(), "ce013625030ba8dba906f756967f9e9ca394464a");
        let digest = "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03";
        assert_eq!(sha256(&b"hello\n"[..]).unwrap(), digest);
        assert!(check(&path, digest, "file").is_ok() && check(&path, "a-mirror's", "file").is_ok());
        assert!(check(&path, &digest.replace('5', "6"), "file").unwrap_err().to_string().contains("SHA-256"));
    }
}
