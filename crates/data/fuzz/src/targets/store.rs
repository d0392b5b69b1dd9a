//! Token files: arbitrary bytes, and valid files with changes and fixed checksums, so that the later checks are reached.

use std::fs;

use firebrick_data::{CacheError, CacheKey, Example, Origin, StoreWriter, TokenCache};
use xxhash_rust::xxh3::xxh3_64;

use super::{Folder, Outcome};

const HEADER_BYTES: usize = 128;
const VOCABULARY: usize = 1000;

/// Reads a token file. If the first byte is 0, the rest is the file. Otherwise the rest is changes to a valid file, 4 bytes each (the position in 2
/// bytes, and what is added to that byte and to the next); if the first byte is even, the checksums are fixed.
pub(crate) fn token_store(bytes: &[u8]) -> Outcome {
    let (&first, rest) = bytes.split_first().unwrap_or((&0, &[]));
    let folder = Folder::new();
    let cache = TokenCache::in_folder(folder.path());
    let key = CacheKey::from_parts([("data", &b"fuzz"[..])]);
    let built = cache.get_or_build(key, VOCABULARY, |writer: &mut StoreWriter| -> Result<Vec<u8>, CacheError> {
        for length in [1_u32, 7, 64, 33] {
            let example = Example {
                tokens: (0..length).map(|index| index * 7 % VOCABULARY as u32).collect(),
                loss_mask: (0..length).map(|index| index % 3 == 1).collect(),
            };
            writer.push(&example, Origin { line: length, ..Origin::default() })?;
        }
        Ok(b"metadata".to_vec())
    });
    drop(built.expect("a valid store"));
    let entry = fs::read_dir(folder.path()).expect("our folder").next().expect("the file that was built");
    let path = entry.expect("an entry").path();
    let mut file = fs::read(&path).expect("the file that was built");
    if first == 0 {
        file = rest.to_vec();
    } else {
        for change in rest.chunks_exact(4) {
            let at = usize::from(u16::from_le_bytes([change[0], change[1]])) % (file.len() - 1);
            file[at] = file[at].wrapping_add(change[2]);
            file[at + 1] = file[at + 1].wrapping_add(change[3]);
        }
        if first.is_multiple_of(2) {
            fix_checksums(&mut file);
        }
    }
    fs::write(&path, file).expect("the file can be written again");
    let mut outcome = Outcome::default();
    if let Some(Some(store)) = outcome.note(cache.open(key, VOCABULARY)) {
        for index in 0..store.documents() {
            let example = store.document(index).to_example();
            assert_eq!(example.tokens.len(), store.entry(index).tokens as usize);
            outcome.read += 1;
        }
        outcome.note(store.verify());
        outcome.read += store.metadata().len();
    }
    for message in &outcome.messages {
        assert!(message.contains(".tokens"), "an error that does not name the file: {message}");
    }
    outcome
}

/// Makes the three checksums match the ranges in the header.
fn fix_checksums(file: &mut [u8]) {
    let number = |file: &[u8], at: usize| {
        usize::try_from(u64::from_le_bytes(file[at..at + 8].try_into().expect("eight bytes"))).unwrap_or(usize::MAX)
    };
    let end = number(file, 40).saturating_mul(4).saturating_add(HEADER_BYTES).min(file.len());
    let (data, tail) = (xxh3_64(&file[HEADER_BYTES..end]), xxh3_64(&file[end..]));
    file[72..80].copy_from_slice(&data.to_le_bytes());
    file[80..88].copy_from_slice(&tail.to_le_bytes());
    // The header's checksum covers these two.
    let header = xxh3_64(&file[..96]);
    file[96..104].copy_from_slice(&header.to_le_bytes());
}
