//! Pushes a folder as a commit of a repository.
//!
//! ```text
//! GET  /api/models/OWNER/NAME                     is it there? 404: POST /api/repos/create
//! POST /api/models/OWNER/NAME/preupload/REVISION  which files go to large-file storage
//! POST /OWNER/NAME.git/info/lfs/objects/batch     where those go; PUT there, in parts if the server says so   (upload.rs)
//! POST /api/models/OWNER/NAME/commit/REVISION     one line of JSON per file                                  (commit.rs)
//! ```
//!
//! Files that the repository already has are not sent again.
//! Trade-off: nothing is deleted; a file in the repository that the folder lacks stays.

use std::path::PathBuf;

use firebrick_files::files_below;
use serde_json::{Value as Json, json};

use crate::commit::Upload;
use crate::error::HubError;
use crate::hub::Hub;
use crate::id::HubId;
use crate::send;

/// The content and the target of a push.
#[derive(Debug, Clone)]
pub struct Push {
    /// The repository and its branch.
    pub id: HubId,
    /// Whether a new repository is private. `None`: as in `huggingface_hub`, public unless the organization's settings say otherwise. An existing
    /// repository stays as it is.
    pub private: Option<bool>,
    /// First line of the commit.
    pub message: String,
    /// The folder; hidden files are left out.
    pub folder: PathBuf,
    /// Additional files: paths in the repository, and texts. They replace files of the folder.
    pub texts: Vec<(String, String)>,
}

/// The result of a push.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pushed {
    /// Address of the repository's page.
    pub page: String,
    /// Whether the repository was created.
    pub is_new: bool,
    /// The new commit; `None` if the repository already had everything.
    pub commit: Option<String>,
    /// Paths that are in the commit.
    pub files: Vec<String>,
    /// Paths that the repository's .gitignore leaves out.
    pub ignored: Vec<String>,
    /// Bytes that went to large-file storage.
    pub stored_bytes: u64,
}

impl Hub {
    /// Pushes a folder.
    ///
    /// # Errors
    /// Offline; no token, or one without write access; files that cannot be read; anything that the Hub refuses.
    pub fn push(&self, push: &Push) -> Result<Pushed, HubError> {
        let repository = &push.id;
        if self.settings.is_offline {
            return Err(HubError::push(repository, "the Hub is off (HF_HUB_OFFLINE): unset HF_HUB_OFFLINE"));
        }
        if self.settings.token.is_none() {
            let reason = "no token: put one that may write there into HF_TOKEN, or log in with `hf auth login`";
            return Err(HubError::push(repository, reason));
        }
        let files = files_below(&push.folder).map_err(|(path, reason)| HubError::Read { path, reason })?;
        let uploads = files.iter().map(|(name, path)| Upload::of_file(name, path));
        let mut uploads = uploads.collect::<Result<Vec<_>, _>>()?;
        uploads.retain(|upload| push.texts.iter().all(|(path, _)| *path != upload.path));
        uploads.extend(push.texts.iter().map(|(path, text)| Upload::of_text(path, text)));
        uploads.sort_by(|a, b| a.path.cmp(&b.path));
        if uploads.is_empty() {
            return Err(HubError::push(repository, format!("{} has no files", push.folder.display())));
        }
        let is_new = self.create(repository, push.private)?;
        let ignored = self.choose_modes(repository, &mut uploads)?;
        let stored_bytes = self.store(repository, &uploads)?;
        let files: Vec<String> = uploads.iter().map(|upload| upload.path.clone()).collect();
        let commit = if uploads.is_empty() { None } else { Some(self.commit(repository, &push.message, &uploads)?) };
        let page = format!("{}/{}{}", self.settings.shown_endpoint(), repository.kind.prefix(), repository.name);
        Ok(Pushed { page, is_new, commit, files, ignored, stored_bytes })
    }

    /// Creates the repository if there is none; returns whether it did.
    fn create(&self, id: &HubId, private: Option<bool>) -> Result<bool, HubError> {
        let url = format!("{}/api/{}/{}", self.settings.endpoint, id.kind.plural(), id.name);
        let (status, _) = send::ask(&self.settings, &url)?;
        if status == 200 {
            return Ok(false);
        }
        let (owner, name) = id.name.split_once('/').expect("an id has an owner");
        let mut body = json!({ "type": id.kind.noun(), "organization": owner, "name": name });
        if let Some(private) = private {
            body["visibility"] = Json::from(if private { "private" } else { "public" });
        }
        let url = format!("{}/api/repos/create", self.settings.endpoint);
        let (status, answer) = send::post(&self.settings, &url, "application/json", body.to_string().as_bytes())?;
        match status {
            200 | 201 => Ok(true),
            // Someone else created it in between.
            409 => Ok(false),
            _ => Err(self.not_taken(id, "creating the repository", status, &answer)),
        }
    }

    /// Builds the error for a status that is not success.
    pub(crate) fn not_taken(&self, id: &HubId, doing: &str, status: u16, answer: &Json) -> HubError {
        let said = answer["error"].as_str().or(answer["message"].as_str()).unwrap_or_default();
        let hint = match status {
            401 => ". Your token is not valid: make one at the Hub's settings/tokens and put it into HF_TOKEN",
            403 => {
                ". Your token may read and not write there: it needs the permission to write to this owner's repositories"
            }
            404 => ". There is no such branch, or your token may not see the repository",
            _ => "",
        };
        let said: String = said.chars().take(400).collect();
        HubError::push(id, format!("{doing}: the server answered {status} {said}").trim_end().to_owned() + hint)
    }
}
