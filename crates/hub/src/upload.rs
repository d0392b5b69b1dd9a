//! Large files: the batch API of git LFS returns the URL for each, or that it is already stored.
//!
//! The storage gets no token, because its URLs are signed. Parts have the size that the server requests.
//! Trade-off: one file at a time, and a part that fails is sent again from its beginning.

use std::io::{Read, Seek, SeekFrom, Take};

use serde_json::{Value as Json, json};

use crate::commit::{ReadSeek, Upload};
use crate::error::HubError;
use crate::hub::{Hub, Progress};
use crate::id::HubId;
use crate::send;

const LFS_JSON: &str = "application/vnd.git-lfs+json";
/// Objects per request, as in `huggingface_hub`.
const OBJECTS_PER_REQUEST: usize = 256;

/// A body of known length that reports its progress.
struct Part<'a> {
    content: Take<Box<dyn ReadSeek + 'a>>,
    progress: &'a dyn Progress,
}

impl Read for Part<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let count = self.content.read(buffer)?;
        self.progress.advance(count as u64);
        Ok(count)
    }
}

impl Hub {
    /// Stores the large files that are not stored yet; returns the number of their bytes.
    pub(crate) fn store(&self, id: &HubId, uploads: &[Upload]) -> Result<u64, HubError> {
        let large: Vec<(&Upload, &str)> =
            uploads.iter().filter_map(|upload| Some((upload, upload.sha256.as_deref()?))).collect();
        let mut stored = 0;
        for group in large.chunks(OBJECTS_PER_REQUEST) {
            let objects = self.batch(id, group)?;
            let size = |object: &&Json| object["size"].as_u64().unwrap_or(0);
            let bytes: u64 = objects.iter().filter(|object| object["actions"].is_object()).map(|o| size(&o)).sum();
            self.progress.begin(&format!("uploading to {}", id.name), bytes);
            let result = objects.iter().try_for_each(|object| {
                let of_object = |(_, oid): &&(&Upload, &str)| object["oid"].as_str() == Some(oid);
                let (upload, oid) = *group
                    .iter()
                    .find(of_object)
                    .ok_or_else(|| HubError::push(id, "the server's answer is about a file that was not announced"))?;
                stored += self.store_one(id, upload, oid, &object["actions"])?;
                Ok(())
            });
            self.progress.end();
            result?;
        }
        Ok(stored)
    }

    /// Asks what to do with each of the files.
    fn batch(&self, id: &HubId, group: &[(&Upload, &str)]) -> Result<Vec<Json>, HubError> {
        let objects: Vec<Json> = group.iter().map(|(upload, oid)| json!({ "oid": oid, "size": upload.size })).collect();
        let body = json!({
            "operation": "upload", "transfers": ["basic", "multipart"], "hash_algo": "sha256", "objects": objects,
            "ref": { "name": id.revision },
        });
        let url = format!("{}/{}{}.git/info/lfs/objects/batch", self.settings.endpoint, id.kind.prefix(), id.name);
        let (status, answer) = send::post(&self.settings, &url, LFS_JSON, body.to_string().as_bytes())?;
        let Some(objects) = answer["objects"].as_array().filter(|_| status == 200) else {
            return Err(self.not_taken(id, "asking where large files go", status, &answer));
        };
        if let Some(error) = objects.iter().find_map(|object| object["error"]["message"].as_str()) {
            let error: String = error.chars().take(400).collect();
            return Err(HubError::push(id, format!("the storage of large files refuses one: {error}")));
        }
        Ok(objects.clone())
    }

    /// Stores a file, unless the answer requires nothing; returns its bytes.
    fn store_one(&self, id: &HubId, upload: &Upload, oid: &str, actions: &Json) -> Result<u64, HubError> {
        let Some(address) = actions["upload"]["href"].as_str() else { return Ok(0) };
        let header = &actions["upload"]["header"];
        let part_bytes = header["chunk_size"].as_str().and_then(|size| size.parse::<u64>().ok());
        match part_bytes.or(header["chunk_size"].as_u64()).filter(|bytes| *bytes > 0) {
            None => self.put(id, upload, address, 0, upload.size).map(drop)?,
            // The header lists the parts by number.
            Some(part_bytes) => {
                let part =
                    |(key, value): (&String, &Json)| Some((key.parse::<u64>().ok()?, value.as_str()?.to_owned()));
                let mut parts: Vec<(u64, String)> = header.as_object().into_iter().flatten().filter_map(part).collect();
                parts.sort();
                let needed = upload.size.div_ceil(part_bytes);
                if parts.len() as u64 != needed {
                    let listed = parts.len();
                    let problem = format!("{} needs {needed} parts, the server lists {listed}", upload.path);
                    return Err(HubError::push(id, problem));
                }
                let mut done = Vec::new();
                for (index, (_, address)) in parts.iter().enumerate() {
                    let begin = index as u64 * part_bytes;
                    let etag = self.put(id, upload, address, begin, part_bytes.min(upload.size - begin))?;
                    let no_etag = || format!("the storage sent no ETag for a part of {}", upload.path);
                    let etag = etag.ok_or_else(|| HubError::push(id, no_etag()))?;
                    done.push(json!({ "partNumber": index + 1, "etag": etag }));
                }
                let body = json!({ "oid": oid, "parts": done }).to_string();
                let (status, answer) = send::post(&self.settings, address, LFS_JSON, body.as_bytes())?;
                if status != 200 {
                    return Err(self.not_taken(id, "completing a large file", status, &answer));
                }
            }
        }
        if let Some(address) = actions["verify"]["href"].as_str() {
            let body = json!({ "oid": oid, "size": upload.size }).to_string();
            let (status, answer) = send::post(&self.settings, address, LFS_JSON, body.as_bytes())?;
            if status != 200 {
                return Err(self.not_taken(id, "verifying a large file", status, &answer));
            }
        }
        Ok(upload.size)
    }

    /// Writes `bytes` of a file from `begin` on to the storage; returns the ETag of the response.
    fn put(
        &self,
        id: &HubId,
        upload: &Upload,
        address: &str,
        begin: u64,
        bytes: u64,
    ) -> Result<Option<String>, HubError> {
        let (status, etag) = send::put(&self.settings, address, bytes, || {
            let mut content = upload.open()?;
            content.seek(SeekFrom::Start(begin)).map_err(|reason| upload.unreadable(reason))?;
            Ok(Part { content: content.take(bytes), progress: &*self.progress })
        })?;
        match status {
            200 | 201 => Ok(etag),
            _ => Err(HubError::push(id, format!("the storage answered {status} to {}", upload.path))),
        }
    }
}
