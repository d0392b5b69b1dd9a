//! The responses of an imitated Hub, request by request, in the form of huggingface.co.
//!
//! Trade-off: only the requests of `huggingface_hub` and `firebrick-hub`.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde_json::{Value as Json, json};

use super::server::{Answer, Request};
use super::store::{Files, Repo, Store};
use crate::{git_blob, sha256};

/// Answers a request.
pub(super) fn answer(store: &mut Store, request: &Request) -> Answer {
    let target = request.target.split('?').next().unwrap_or_default().trim_start_matches('/').replace("%2F", "/");
    let parts: Vec<&str> = target.split('/').collect();
    let may_write = request.header("authorization") == Some(&*format!("bearer {}", store.token.to_lowercase()));
    match (request.method.as_str(), parts.as_slice()) {
        ("PUT", ["storage", oid, number]) => put(store, oid, number, request),
        ("GET", ["api", kind @ ("models" | "datasets"), owner, name, rest @ ..]) => {
            about(store, &key(kind, owner, name), rest, may_write)
        }
        ("GET" | "HEAD", ["datasets", owner, name, "resolve", revision, path @ ..]) => {
            resolve(store, &key("datasets", owner, name), revision, &path.join("/"), request, may_write)
        }
        ("GET" | "HEAD", [owner, name, "resolve", revision, path @ ..]) => {
            resolve(store, &key("models", owner, name), revision, &path.join("/"), request, may_write)
        }
        ("POST", ["api", "validate-yaml"]) => json_answer(200, &json!({ "errors": [], "warnings": [] })),
        ("POST", _) if !may_write => json_answer(401, &json!({ "error": "Invalid username or password." })),
        ("POST", ["api", "repos", "create"]) => create(store, request),
        ("POST", ["api", "models", owner, name, "preupload", "main"]) => {
            preupload(store, &key("models", owner, name), &body(request))
        }
        ("POST", ["api", "models", owner, name, "commit", "main"]) => {
            commit(store, &key("models", owner, name), request)
        }
        ("POST", [_, _, "info", "lfs", "objects", "batch"]) => batch(store, request),
        ("POST", ["complete", oid]) => complete(store, oid, &body(request)),
        ("POST", ["verify"]) => verify(store, &body(request)),
        _ => Answer::new(404, "").with("x-error-code", "EntryNotFound"),
    }
}

fn key(kind: &str, owner: &str, name: &str) -> String {
    if kind == "models" { format!("{owner}/{name}") } else { format!("{kind}/{owner}/{name}") }
}

fn body(request: &Request) -> Json {
    serde_json::from_slice(&request.body).unwrap_or_default()
}

/// Returns the address to which the request was sent.
fn host(request: &Request) -> String {
    format!("http://{}", request.header("host").unwrap_or_default())
}

fn json_answer(status: u16, json: &Json) -> Answer {
    Answer::new(status, json.to_string()).with("content-type", "application/json")
}

/// Returns the repository, unless it is hidden.
fn seen<'a>(store: &'a Store, key: &str, has_token: bool) -> Result<&'a Repo, Answer> {
    let found = store.repos.get(key).filter(|repo| has_token || !repo.is_private);
    // As on huggingface.co, users who are not logged in do not learn what exists.
    let status = if has_token { 404 } else { 401 };
    found.ok_or_else(|| {
        json_answer(status, &json!({ "error": "Repository not found" })).with("x-error-code", "RepoNotFound")
    })
}

fn about(store: &Store, key: &str, rest: &[&str], has_token: bool) -> Answer {
    let repo = match seen(store, key, has_token) {
        Ok(repo) => repo,
        Err(answer) => return answer,
    };
    let (what, revision) = match rest {
        [] => ("revision", "main".to_owned()),
        [what, revision @ ..] => (*what, revision.join("/")),
    };
    let Some((commit, files)) = repo.at(&revision) else {
        // A repository without commits exists all the same.
        return if rest.is_empty() && repo.commits.is_empty() {
            json_answer(200, &json!({ "id": key, "siblings": [] }))
        } else {
            Answer::new(404, "").with("x-error-code", "RevisionNotFound")
        };
    };
    let lfs = |path: &str, bytes: &[u8]| {
        let lfs = json!({ "oid": sha256(bytes), "sha256": sha256(bytes), "size": bytes.len(), "pointerSize": 130 });
        if store.is_large(path, bytes.len()) { lfs } else { Json::Null }
    };
    if what == "tree" {
        let entry = |(path, bytes): (&String, &Vec<u8>)| {
            let mut entry = json!({ "type": "file", "oid": git_blob(bytes), "size": bytes.len(), "path": path });
            if let lfs @ Json::Object(_) = lfs(path, bytes) {
                entry["lfs"] = lfs;
            }
            entry
        };
        return json_answer(200, &files.iter().map(entry).collect());
    }
    let siblings: Vec<Json> = files
        .iter()
        .map(|(path, bytes)| json!({ "rfilename": path, "size": bytes.len(), "lfs": lfs(path, bytes), "blobId": git_blob(bytes) }))
        .collect();
    let gated = if repo.is_gated { json!("auto") } else { json!(false) };
    let id = key.trim_start_matches("datasets/");
    json_answer(
        200,
        &json!({ "id": id, "sha": commit, "private": repo.is_private, "gated": gated, "siblings": siblings, "cardData": repo.card }),
    )
}

fn resolve(store: &mut Store, key: &str, revision: &str, path: &str, request: &Request, has_token: bool) -> Answer {
    let repo = match seen(store, key, has_token) {
        Ok(repo) => repo,
        Err(answer) => return answer,
    };
    if repo.is_gated && !has_token {
        return Answer::new(401, "Access to this model is restricted.").with("x-error-code", "GatedRepo");
    }
    let Some((commit, files)) = repo.at(revision) else {
        return Answer::new(404, "").with("x-error-code", "RevisionNotFound");
    };
    let Some(bytes) = files.get(path) else {
        return Answer::new(404, "").with("x-error-code", "EntryNotFound").with("x-repo-commit", commit.clone());
    };
    let etag = if store.is_large(path, bytes.len()) { sha256(bytes) } else { git_blob(bytes) };
    let mut answer = Answer::ranged(request, bytes)
        .with("etag", format!("\"{etag}\""))
        .with("x-repo-commit", commit.clone())
        .with("accept-ranges", "bytes");
    if request.method == "GET" && !store.breaks.is_empty() {
        answer.sent = answer.sent.min(store.breaks.remove(0));
    }
    answer
}

fn create(store: &mut Store, request: &Request) -> Answer {
    let body = body(request);
    let text = |key: &str| body[key].as_str().unwrap_or_default();
    let key = format!("{}/{}", text("organization"), text("name"));
    if store.repos.contains_key(&key) {
        return json_answer(409, &json!({ "error": "You already created this model repo" }));
    }
    let is_private = body["visibility"] == "private" || body["private"] == true;
    store.repos.insert(key.clone(), Repo { is_private, ..Repo::default() });
    json_answer(200, &json!({ "url": format!("{}/{key}", host(request)), "name": key, "id": key }))
}

fn newest(store: &Store, key: &str) -> Files {
    store.repos.get(key).and_then(|repo| repo.commits.last()).map(|(_, files)| files.clone()).unwrap_or_default()
}

fn preupload(store: &Store, key: &str, body: &Json) -> Answer {
    if !store.repos.contains_key(key) {
        return json_answer(404, &json!({ "error": "Repository not found" })).with("x-error-code", "RepoNotFound");
    }
    let known = newest(store, key);
    let mode = |file: &Json| {
        let path = file["path"].as_str().unwrap_or_default();
        // The mode is by name, so an empty file may be announced as large too.
        let is_large = store.is_large(path, file["size"].as_u64().unwrap_or(0).max(1) as usize);
        let is_stored = |bytes: &[u8]| store.is_large(path, bytes.len());
        let oid = known.get(path).map(|bytes| if is_stored(bytes) { sha256(bytes) } else { git_blob(bytes) });
        let sample = BASE64.decode(file["sample"].as_str().unwrap_or("?"));
        assert!(sample.is_ok_and(|sample| sample.len() <= 512), "a sample of {path} that huggingface.co would refuse");
        let mode = if is_large { "lfs" } else { "regular" };
        json!({ "path": path, "uploadMode": mode, "shouldIgnore": path.ends_with(".tmp"), "oid": oid })
    };
    let files: Vec<Json> = body["files"].as_array().into_iter().flatten().map(mode).collect();
    json_answer(200, &json!({ "files": files }))
}

fn batch(store: &Store, request: &Request) -> Answer {
    let (body, host) = (body(request), host(request));
    let action = |object: &Json| {
        let (oid, size) = (object["oid"].as_str().unwrap_or_default(), object["size"].as_u64().unwrap_or(0) as usize);
        let mut answer = json!({ "oid": oid, "size": size });
        if store.objects.contains_key(oid) {
            return answer;
        }
        let upload = match store.part_bytes.filter(|part| *part < size) {
            None => json!({ "href": format!("{host}/storage/{oid}/0?signature=secret") }),
            Some(part) => {
                let mut header = json!({ "chunk_size": part.to_string() });
                for number in 1..=size.div_ceil(part) {
                    header[number.to_string()] = json!(format!("{host}/storage/{oid}/{number}?signature=secret"));
                }
                json!({ "href": format!("{host}/complete/{oid}"), "header": header })
            }
        };
        answer["actions"] = json!({ "upload": upload, "verify": { "href": format!("{host}/verify") } });
        answer
    };
    let objects: Vec<Json> = body["objects"].as_array().into_iter().flatten().map(action).collect();
    json_answer(200, &json!({ "transfer": "basic", "objects": objects }))
}

/// Stores a large file, or part `number` of one, counted from 1.
fn put(store: &mut Store, oid: &str, number: &str, request: &Request) -> Answer {
    if request.header("content-length").is_none() {
        return Answer::new(411, "the storage needs a length");
    }
    let number: usize = number.parse().unwrap_or(0);
    if number == 0 {
        if sha256(&request.body) != oid {
            return Answer::new(400, "other content than announced");
        }
        store.objects.insert(oid.to_owned(), request.body.clone());
    } else {
        store.parts.insert((oid.to_owned(), number), request.body.clone());
    }
    Answer::new(200, "").with("etag", format!("\"part-{number}\""))
}

fn complete(store: &mut Store, oid: &str, body: &Json) -> Answer {
    let mut bytes = Vec::new();
    for part in body["parts"].as_array().into_iter().flatten() {
        let number = part["partNumber"].as_u64().unwrap_or(0) as usize;
        let is_its = part["etag"] == json!(format!("\"part-{number}\""));
        match store.parts.remove(&(oid.to_owned(), number)).filter(|_| is_its) {
            Some(part) => bytes.extend(part),
            None => return json_answer(400, &json!({ "error": format!("part {number} is not there") })),
        }
    }
    if sha256(&bytes) != oid {
        return json_answer(400, &json!({ "error": "other content than announced" }));
    }
    store.objects.insert(oid.to_owned(), bytes);
    json_answer(200, &json!({}))
}

fn verify(store: &Store, body: &Json) -> Answer {
    let size = store.objects.get(body["oid"].as_str().unwrap_or_default()).map(Vec::len);
    let is_there = size.is_some() && size.map(|size| size as u64) == body["size"].as_u64();
    json_answer(if is_there { 200 } else { 404 }, &json!({ "error": "not stored" }))
}

fn commit(store: &mut Store, key: &str, request: &Request) -> Answer {
    let mut files = newest(store, key);
    for line in request.body.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
        let line: Json = serde_json::from_slice(line).unwrap_or_default();
        let (value, text) = (&line["value"], |key: &str| line["value"][key].as_str().unwrap_or_default().to_owned());
        match line["key"].as_str() {
            Some("header") if !text("summary").is_empty() => {}
            Some("file") if value["encoding"] == "base64" => {
                let Ok(content) = BASE64.decode(text("content")) else {
                    return json_answer(400, &json!({ "error": "not base64" }));
                };
                files.insert(text("path"), content);
            }
            Some("lfsFile") if value["algo"] == "sha256" => {
                let Some(object) = store.objects.get(&text("oid")) else {
                    return json_answer(422, &json!({ "error": format!("{} is not stored", text("path")) }));
                };
                files.insert(text("path"), object.clone());
            }
            _ => return json_answer(400, &json!({ "error": format!("cannot use {line}") })),
        }
    }
    let Some(repo) = store.repos.get_mut(key) else {
        return json_answer(404, &json!({ "error": "Repository not found" }));
    };
    let hash = repo.commit(files);
    let url = format!("{}/{key}/commit/{hash}", host(request));
    json_answer(200, &json!({ "success": true, "commitOid": hash, "commitUrl": url, "hookOutput": "" }))
}
