//! The two requests about all files of a push: which of them are large, and the commit.
//!
//! Trade-off: small files (those that the Hub keeps in git) are held in memory, as text in one request.

use std::fs::{self, File};
use std::io::{Error as IoError, Read};
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde_json::{Value as Json, json};

use crate::digest;
use crate::error::HubError;
use crate::http;
use crate::hub::Hub;
use crate::id::HubId;
use crate::send;

/// Size of the sample from which the Hub tells text from binary data.
const SAMPLE_BYTES: u64 = 512;
/// Files per request, as in `huggingface_hub`.
const FILES_PER_REQUEST: usize = 256;

/// The source of a file's content.
#[derive(Debug)]
pub(crate) enum Content {
    File(PathBuf),
    Text(Vec<u8>),
}

#[derive(Debug)]
pub(crate) struct Upload {
    pub(crate) path: String,
    pub(crate) content: Content,
    pub(crate) size: u64,
    /// The SHA-256, if the file goes to large-file storage.
    pub(crate) sha256: Option<String>,
}

impl Upload {
    pub(crate) fn of_text(path: &str, text: &str) -> Self {
        let bytes = text.as_bytes().to_vec();
        Self { path: path.to_owned(), size: bytes.len() as u64, content: Content::Text(bytes), sha256: None }
    }

    pub(crate) fn of_file(path: &str, file: &Path) -> Result<Self, HubError> {
        let size = fs::metadata(file).map_err(|reason| HubError::Read { path: file.to_owned(), reason })?.len();
        Ok(Self { path: path.to_owned(), content: Content::File(file.to_owned()), size, sha256: None })
    }

    pub(crate) fn open(&self) -> Result<Box<dyn ReadSeek + '_>, HubError> {
        match &self.content {
            Content::File(path) => Ok(Box::new(File::open(path).map_err(|reason| self.unreadable(reason))?)),
            Content::Text(bytes) => Ok(Box::new(std::io::Cursor::new(bytes.as_slice()))),
        }
    }

    pub(crate) fn unreadable(&self, reason: IoError) -> HubError {
        let path = match &self.content {
            Content::File(path) => path.clone(),
            Content::Text(_) => PathBuf::from(&self.path),
        };
        HubError::Read { path, reason }
    }

    fn bytes(&self, most: u64) -> Result<Vec<u8>, HubError> {
        let mut bytes = Vec::new();
        self.open()?.take(most).read_to_end(&mut bytes).map_err(|reason| self.unreadable(reason))?;
        Ok(bytes)
    }

    fn sha256(&self) -> Result<String, HubError> {
        digest::sha256(self.open()?).map_err(|reason| self.unreadable(reason))
    }

    fn git_blob(&self) -> Result<String, HubError> {
        digest::git_blob(self.open()?, self.size).map_err(|reason| self.unreadable(reason))
    }
}

/// Content that is read in parts.
pub(crate) trait ReadSeek: Read + std::io::Seek {}

impl<T: Read + std::io::Seek> ReadSeek for T {}

impl Hub {
    /// Asks which files go to large-file storage, and hashes those. Drops the files that the repository already has and those that it ignores, and
    /// returns the paths of the latter.
    pub(crate) fn choose_modes(&self, id: &HubId, uploads: &mut Vec<Upload>) -> Result<Vec<String>, HubError> {
        let url = self.address(id, "preupload");
        let (mut kept, mut ignored) = (Vec::new(), Vec::new());
        let mut rest = std::mem::take(uploads).into_iter();
        loop {
            let group: Vec<Upload> = rest.by_ref().take(FILES_PER_REQUEST).collect();
            if group.is_empty() {
                break;
            }
            let described = group.iter().map(|upload| {
                let sample = BASE64.encode(upload.bytes(SAMPLE_BYTES)?);
                Ok(json!({ "path": upload.path, "size": upload.size, "sample": sample }))
            });
            let body = json!({ "files": described.collect::<Result<Vec<Json>, HubError>>()? });
            let (status, answer) = send::post(&self.settings, &url, "application/json", body.to_string().as_bytes())?;
            let Some(modes) = answer["files"].as_array().filter(|_| status == 200) else {
                return Err(self.not_taken(id, "announcing the files", status, &answer));
            };
            for mut upload in group {
                let Some(mode) = modes.iter().find(|mode| mode["path"].as_str() == Some(&upload.path)) else {
                    return Err(HubError::push(id, format!("the server's answer says nothing of {}", upload.path)));
                };
                if mode["shouldIgnore"].as_bool() == Some(true) {
                    ignored.push(upload.path);
                    continue;
                }
                // Storage takes no empty files.
                let is_large = mode["uploadMode"].as_str() == Some("lfs") && upload.size > 0;
                upload.sha256 = is_large.then(|| upload.sha256()).transpose()?;
                let own = upload.sha256.clone().map_or_else(|| upload.git_blob(), Ok)?;
                if mode["oid"].as_str() != Some(&own) {
                    kept.push(upload);
                }
            }
        }
        *uploads = kept;
        Ok(ignored)
    }

    /// Makes the commit; its hash.
    pub(crate) fn commit(&self, id: &HubId, message: &str, uploads: &[Upload]) -> Result<String, HubError> {
        let mut lines = vec![json!({ "key": "header", "value": { "summary": message, "description": "" } })];
        for upload in uploads {
            lines.push(match &upload.sha256 {
                Some(oid) => json!({ "key": "lfsFile", "value": {
                    "path": upload.path, "algo": "sha256", "oid": oid, "size": upload.size,
                } }),
                None => json!({ "key": "file", "value": {
                    "path": upload.path, "encoding": "base64", "content": BASE64.encode(upload.bytes(u64::MAX)?),
                } }),
            });
        }
        let body: String = lines.iter().map(|line| format!("{line}\n")).collect();
        let url = self.address(id, "commit");
        // Sent once: if only the answer were lost, a second request would commit again.
        let (status, answer) = send::post_once(&self.settings, &url, "application/x-ndjson", body.as_bytes())?;
        match answer["commitOid"].as_str().filter(|_| matches!(status, 200 | 201)) {
            Some(commit) => Ok(commit.to_owned()),
            None => Err(self.not_taken(id, "making the commit", status, &answer)),
        }
    }

    fn address(&self, id: &HubId, what: &str) -> String {
        let (kind, revision) = (id.kind.plural(), http::encode(&id.revision, false));
        format!("{}/api/{kind}/{}/{what}/{revision}", self.settings.endpoint, id.name)
    }
}
