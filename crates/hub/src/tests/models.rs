//! Tests of models: which files are downloaded, from where, and the errors when they are not.

use std::fs;
use std::path::Path;

use firebrick_hub_imitation::{Answer, ImitatedHub, Request, Server, git_blob, sha256};

use super::{Client, NOWHERE, TOKEN, id};
use crate::{HubId, Listing, Need, RepoKind, snapshot_of};

pub(super) const CONFIG: &[u8] = b"{\"model_type\": \"llama\"}";

/// Creates a model with one file of weights, and files that nothing reads; and a client with an empty cache.
pub(super) fn hub_with_model() -> (ImitatedHub, Client) {
    let hub = ImitatedHub::new(TOKEN);
    let weights = [7; 5000];
    hub.add(
        "org/tiny",
        &[
            ("config.json", CONFIG),
            ("tokenizer.json", b"{}"),
            ("LICENSE.txt", b"terms"),
            ("model.safetensors", &weights),
            ("pytorch_model.bin", b"not read"),
            ("onnx/model.onnx", b"not read"),
            ("original/config.json", b"not read"),
        ],
    );
    let client = Client::new(&hub);
    (hub, client)
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let mut names: Vec<String> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn downloads(hub: &ImitatedHub) -> usize {
    hub.server.requests().iter().filter(|request| request.contains("/resolve/")).count()
}

#[test]
fn a_model_has_the_layout_of_huggingface_hub() {
    let (hub, client) = hub_with_model();
    let model = client.hub().model(&id("org/tiny"), Need::Weights).unwrap();
    assert_eq!(names(&model.folder), ["LICENSE.txt", "config.json", "model.safetensors", "tokenizer.json"]);
    assert_eq!(model.missing_bytes, 0);
    let repository = client.cache.path().join("models--org--tiny");
    let commit = hub.store().repos["org/tiny"].commits[0].0.clone();
    assert_eq!(model.folder, repository.join("snapshots").join(&commit));
    assert_eq!(fs::read_to_string(repository.join("refs/main")).unwrap(), commit);
    let weights = repository.join("blobs").join(sha256(&[7; 5000]));
    assert_eq!(fs::read(&weights).unwrap(), [7; 5000]);
    assert!(repository.join("blobs").join(git_blob(CONFIG)).is_file());
    if cfg!(unix) {
        let link = fs::read_link(model.folder.join("model.safetensors")).unwrap();
        assert_eq!(link, Path::new("../../blobs").join(sha256(&[7; 5000])));
    }
    // Files that are already here are not requested again.
    let before = downloads(&hub);
    client.hub().model(&id("org/tiny"), Need::Weights).unwrap();
    assert_eq!(downloads(&hub), before);
}

#[test]
fn a_description_says_how_large_the_weights_are() {
    let (_hub, client) = hub_with_model();
    let model = client.hub().model(&id("org/tiny"), Need::Description).unwrap();
    assert_eq!((names(&model.folder).len(), model.missing_bytes), (3, 5000));
    assert!(!model.folder.join("model.safetensors").exists());
}

#[test]
fn shards_are_those_that_the_index_names_and_all_must_be_there() {
    let hub = ImitatedHub::new(TOKEN);
    let index: &[u8] =
        br#"{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-1.safetensors"}}"#;
    let files: [(&str, &[u8]); 5] = [
        ("config.json", CONFIG),
        ("model.safetensors.index.json", index),
        ("model-1.safetensors", b"one"),
        ("model-2.safetensors", b"two"),
        ("model-3.safetensors", b"of another conversion"),
    ];
    hub.add("org/sharded", &files);
    hub.add("org/cut", &files[..3]);
    let client = Client::new(&hub);
    let model = client.hub().model(&id("org/sharded"), Need::Weights).unwrap();
    assert_eq!(
        names(&model.folder),
        ["config.json", "model-1.safetensors", "model-2.safetensors", "model.safetensors.index.json"]
    );
    let error = client.hub().model(&id("org/cut"), Need::Weights).unwrap_err().to_string();
    assert!(error.contains("org/cut") && error.contains("model-2.safetensors, which is not there"), "{error}");
}

#[test]
fn an_index_cannot_name_files_outside_the_repository() {
    let hub = ImitatedHub::new(TOKEN);
    let index: &[u8] = br#"{"weight_map": {"a": "../../evil.safetensors", "b": "/etc/passwd"}}"#;
    hub.add("org/evil", &[("config.json", CONFIG), ("model.safetensors.index.json", index)]);
    let error = Client::new(&hub).hub().model(&id("org/evil"), Need::Weights).unwrap_err().to_string();
    assert!(error.contains("names no file"), "{error}");
}

#[test]
fn a_model_without_safetensors_says_how_to_convert() {
    let hub = ImitatedHub::new(TOKEN);
    hub.add("org/old", &[("config.json", CONFIG), ("pytorch_model.bin", b"pickle")]);
    hub.add("org/quant", &[("config.json", CONFIG), ("q4.gguf", b"GGUF")]);
    let error = |name| Client::new(&hub).hub().model(&id(name), Need::Weights).unwrap_err().to_string();
    assert!(error("org/old").contains("pytorch_model.bin") && error("org/old").contains("save_pretrained"));
    assert!(error("org/quant").contains("GGUF files are for inference"), "{}", error("org/quant"));
}

#[test]
fn an_adapter_is_its_config_and_weights() {
    let hub = ImitatedHub::new(TOKEN);
    hub.add(
        "org/adapter",
        &[("adapter_config.json", b"{}"), ("adapter_model.safetensors", b"w"), ("optimizer.pt", b"not read")],
    );
    let client = Client::new(&hub);
    let model = client.hub().model(&id("org/adapter"), Need::Weights).unwrap();
    assert_eq!(names(&model.folder), ["adapter_config.json", "adapter_model.safetensors"]);
}

#[test]
fn a_download_that_breaks_goes_on_where_it_ended() {
    let hub = ImitatedHub::new(TOKEN);
    let weights: Vec<u8> = (0..300_000u32).flat_map(u32::to_le_bytes).collect();
    hub.add("org/big", &[("config.json", CONFIG), ("model.safetensors", &weights)]);
    let client = Client::new(&hub);
    client.hub().model(&id("org/big"), Need::Description).unwrap();
    hub.store().breaks = vec![100_000, 7, 500_000];
    let model = client.hub().model(&id("org/big"), Need::Weights).unwrap();
    assert!(fs::read(model.folder.join("model.safetensors")).unwrap() == weights);
    let log = hub.server.log.lock().unwrap();
    let begins: Vec<&str> = log.iter().filter_map(|request| request.header("range")).collect();
    assert_eq!(begins, ["bytes=100000-", "bytes=100007-", "bytes=600007-"]);
}

#[test]
fn partial_files_are_continued_and_wrong_ones_removed() {
    let (hub, client) = hub_with_model();
    let blobs = client.cache.path().join("models--org--tiny/blobs");
    let partial = blobs.join(sha256(&[7; 5000])).with_extension("incomplete");
    fs::create_dir_all(&blobs).unwrap();
    fs::write(&partial, [7; 3000]).unwrap();
    client.hub().model(&id("org/tiny"), Need::Weights).unwrap();
    assert!(hub.server.log.lock().unwrap().iter().any(|request| request.header("range") == Some("bytes=3000-")));

    let client = Client::new(&hub);
    let partial = client.cache.path().join("models--org--tiny/blobs").join(partial.file_name().unwrap());
    fs::create_dir_all(partial.parent().unwrap()).unwrap();
    fs::write(&partial, [6; 3000]).unwrap();
    let error = client.hub().model(&id("org/tiny"), Need::Weights).unwrap_err().to_string();
    assert!(error.contains("model.safetensors") && error.contains("SHA-256"), "{error}");
    assert!(!partial.exists() && !partial.with_extension("").exists());
    client.hub().model(&id("org/tiny"), Need::Weights).unwrap();
}

#[test]
fn a_gated_model_is_explained_and_opens_with_a_token() {
    let (hub, client) = hub_with_model();
    hub.store().repos.get_mut("org/tiny").unwrap().is_gated = true;
    let error = client.hub().model(&id("org/tiny"), Need::Weights).unwrap_err().to_string();
    let page = format!("{}/org/tiny", hub.server.address);
    assert!(error.contains("gated") && error.contains(&page) && error.contains("HF_TOKEN"), "{error}");
    client.with_token().hub().model(&id("org/tiny"), Need::Weights).unwrap();
}

#[test]
fn a_private_or_misspelled_model_is_one_message() {
    let (hub, client) = hub_with_model();
    hub.store().repos.get_mut("org/tiny").unwrap().is_private = true;
    for name in ["org/tiny", "org/tyni"] {
        let error = client.hub().model(&id(name), Need::Weights).unwrap_err().to_string();
        assert!(error.contains("misspelled") && error.contains("private") && error.contains(name), "{error}");
    }
    client.with_token().hub().model(&id("org/tiny"), Need::Weights).unwrap();
}

#[test]
fn a_pinned_commit_stays_and_a_branch_follows() {
    let (hub, client) = hub_with_model();
    let old = hub.store().repos["org/tiny"].commits[0].0.clone();
    let mut files = hub.store().repos["org/tiny"].commits[0].1.clone();
    files.insert("config.json".to_owned(), b"{\"new\": 1}".to_vec());
    let new = hub.store().repos.get_mut("org/tiny").unwrap().commit(files);
    let folder = |name: &str| client.hub().model(&id(name), Need::Weights).unwrap().folder;
    assert!(folder("org/tiny").ends_with(&new));
    let pinned = format!("org/tiny@{old}");
    assert_eq!(fs::read(folder(&pinned).join("config.json")).unwrap(), CONFIG);
    let before = hub.server.requests().len();
    folder(&pinned);
    assert_eq!(hub.server.requests().len(), before, "a commit never changes");
    let error = client.hub().model(&id("org/tiny@v9"), Need::Weights).unwrap_err().to_string();
    assert!(error.contains("no such branch, tag or commit"), "{error}");
}

#[test]
fn offline_reads_the_cache_and_connects_to_nothing() {
    let (hub, client) = hub_with_model();
    let folder = client.hub().model(&id("org/tiny"), Need::Description).unwrap().folder;
    let before = hub.server.requests().len();
    let client = client.offline();
    assert_eq!(client.hub().model(&id("org/tiny"), Need::Description).unwrap().folder, folder);
    let error = client.hub().model(&id("org/tiny"), Need::Weights).unwrap_err().to_string();
    assert!(error.contains("model.safetensors is not in the cache") && error.contains("HF_HUB_OFFLINE"), "{error}");
    assert_eq!(hub.server.requests().len(), before);
}

#[test]
fn offline_reads_a_cache_that_has_no_listing_of_ours() {
    let client = Client::of(NOWHERE).offline();
    let commit = "0123456789abcdef0123456789abcdef01234567";
    let repository = client.cache.path().join("models--org--tiny");
    let snapshot = repository.join("snapshots").join(commit);
    fs::create_dir_all(&snapshot).unwrap();
    fs::create_dir_all(repository.join("refs")).unwrap();
    fs::write(repository.join("refs/main"), commit).unwrap();
    fs::write(snapshot.join("config.json"), CONFIG).unwrap();
    let error = client.hub().model(&id("org/tiny"), Need::Weights).unwrap_err().to_string();
    assert!(error.contains("the cache holds config.json"), "{error}");
    fs::write(snapshot.join("model.safetensors"), "w").unwrap();
    assert_eq!(client.hub().model(&id("org/tiny"), Need::Weights).unwrap().folder, snapshot);
}

#[test]
fn the_token_does_not_go_to_redirected_storage() {
    let storage = Server::new(|_| Answer::new(200, "w"));
    let target = format!("{}/signed?signature=secret", storage.address);
    let commit = "0123456789abcdef0123456789abcdef01234567";
    let server = Server::new(move |request| {
        assert_eq!(request.header("authorization"), Some("bearer hf_secret"));
        if request.target.starts_with("/api") {
            let siblings =
                r#"[{"rfilename": "config.json", "size": 1}, {"rfilename": "model.safetensors", "size": 1}]"#;
            return Answer::new(200, format!(r#"{{"sha": "{commit}", "siblings": {siblings}}}"#));
        }
        Answer::new(302, "").with("location", target.clone()).with("x-linked-etag", "\"x\"")
    });
    let error = Client::of(&server.address).with_token().hub().model(&id("o/n"), Need::Weights).unwrap_err();
    // Another port is another origin; as it is not encrypted, nothing is sent there at all.
    assert!(error.to_string().contains("not encrypted") && !format!("{error:?}").contains("secret"), "{error:?}");
    assert!(storage.requests().is_empty());
}

#[test]
fn a_folder_of_a_cache_stands_for_its_snapshot() {
    let (_hub, client) = hub_with_model();
    let folder = client.hub().model(&id("org/tiny"), Need::Weights).unwrap().folder;
    let root = client.cache.path().join("models--org--tiny");
    assert_eq!(snapshot_of(&root).unwrap(), folder);
    assert_eq!(snapshot_of(&folder).unwrap(), folder);
    assert_eq!(snapshot_of(client.cache.path()).unwrap(), client.cache.path());
    fs::write(root.join("refs/main"), "f".repeat(40)).unwrap();
    assert!(snapshot_of(&root).unwrap_err().to_string().contains("the snapshot ffff"));
    fs::remove_file(root.join("refs/main")).unwrap();
    assert_eq!(snapshot_of(&root).unwrap(), folder);
    fs::create_dir(root.join("snapshots/other")).unwrap();
    assert!(snapshot_of(&root).unwrap_err().to_string().contains("2 snapshots"));
}

#[test]
fn a_busy_hub_is_asked_again() {
    let hub = hub_with_model().0;
    let (inner, count) = (hub.server.address.clone(), std::sync::atomic::AtomicUsize::new(0));
    let server = Server::new(move |_| match count.fetch_add(1, std::sync::atomic::Ordering::Relaxed) {
        0 => Answer::new(503, ""),
        1 => Answer::new(429, ""),
        _ => Answer::new(307, "").with("location", format!("{inner}/api/models/org/tiny/revision/main")),
    });
    let parsed: HubId = id("org/tiny");
    let error = Client::of(&server.address).hub().listing(&parsed).unwrap_err().to_string();
    assert!(error.contains("not encrypted"), "{error}");
    assert!(server.requests().len() >= 3);
}

/// Serves one file of the listed size with these answers, and returns the error of downloading it (empty for none), the number of requests, and the
/// bytes in the cache.
fn served(listed: Option<u64>, answer: impl Fn(&Request) -> Answer + Send + Sync + 'static) -> (String, usize, u64) {
    let server = Server::new(move |request| match request.target.starts_with("/api") {
        true => {
            let siblings = serde_json::json!([{"rfilename": "config.json", "size": listed}]);
            Answer::new(200, format!(r#"{{"sha": "{}", "siblings": {siblings}}}"#, "0".repeat(40)))
        }
        false => answer(request).with("etag", "\"x\""),
    });
    let client = Client::of(&server.address);
    let listing = client.hub().listing(&id("o/n")).unwrap();
    let file = listing.files(&id("o/n"), &["config.json".to_owned()]).next().unwrap();
    let error = client.hub().fetch(&file).map_or_else(|error| error.to_string(), |_| String::new());
    let blobs = fs::read_dir(client.cache.path().join("models--o--n/blobs")).into_iter().flatten().flatten();
    (error, server.requests().len(), blobs.map(|blob| blob.metadata().unwrap().len()).sum())
}

#[test]
fn a_body_is_no_longer_than_the_listing_says() {
    let (error, _, bytes) = served(Some(656), |_| Answer::new(200, vec![7; 3 << 20]));
    assert!(error.contains("656 in the listing") && error.contains("3145728") && bytes == 0, "{error}");
    // A range that claims the right length.
    let (error, _, bytes) =
        served(Some(656), |_| Answer::new(206, vec![7; 3 << 20]).with("content-range", "bytes 0-9/656"));
    assert!(error.contains("more than the 656 bytes") && bytes == 0, "{error}");
    let (error, _, bytes) = served(Some(0), |_| Answer::new(200, "x"));
    assert!(error.contains("0 in the listing") && bytes == 0, "{error}");
}

#[test]
fn a_file_of_unknown_size_ends_and_is_bounded() {
    let chunked =
        |request: &Request, bytes| Answer::ranged(request, &vec![7; bytes]).with("transfer-encoding", "chunked");
    // The first answer breaks.
    let (error, requests, bytes) = served(None, move |request| {
        let mut answer = chunked(request, 3 << 20);
        answer.sent = if request.header("range").is_none() { 1 << 20 } else { answer.sent };
        answer
    });
    assert_eq!((&*error, requests, bytes), ("", 3, 3 << 20));
    let (error, requests, bytes) = served(None, move |request| chunked(request, (4 << 20) + 1));
    assert!(error.contains("unknown size") && (requests, bytes) == (2, 0), "{error}");
}

#[test]
fn a_server_that_always_closes_early_is_left_after_a_few_tries() {
    for sent in [0, 1, 1000] {
        let (error, requests, _) = served(Some(1 << 20), move |request| {
            let mut answer = Answer::ranged(request, &[7; 1 << 20]);
            answer.sent = sent;
            answer
        });
        assert!(error.contains("5 tries in a row") && requests <= 8, "{requests}: {error}");
    }
}

#[test]
fn nothing_goes_to_a_server_that_only_names_the_hub() {
    let other = Server::new(|_| Answer::new(200, "w").with("etag", "\"x\""));
    let port = other.address.rsplit(':').next().unwrap().to_owned();
    for user in ["", "/"] {
        let port = port.clone();
        let server = Server::new(move |request| {
            let hub = request.header("host").unwrap();
            Answer::new(302, "").with("location", format!("http://{hub}{user}@127.0.0.1:{port}/{user}?hf_secret"))
        });
        let error = Client::of(&server.address).with_token().hub().listing(&id("o/n")).unwrap_err().to_string();
        assert!(!error.contains("hf_secret"), "{error}");
    }
    assert!(other.requests().is_empty());
}

#[test]
fn no_message_has_a_secret_of_the_address() {
    let hub = hub_with_model().0;
    let authority = hub.server.address.strip_prefix("http://").unwrap().to_owned();
    for (at, name) in [(&*authority, "org/tyni"), ("127.0.0.1:9", "org/tiny"), ("127.0.0.1:x", "org/tiny")] {
        let client = Client::of(&format!("http://me:hunter2@{at}"));
        let error = client.hub().listing(&id(name)).unwrap_err();
        let reached = client.hub().reach().err().unwrap_or_default();
        let all = format!("{error} {error:?} {reached} {:?}", client.hub());
        assert!(!all.contains("hunter2") && all.contains(at), "{all}");
    }
}

#[test]
fn names_that_escape_folder_or_terminal_are_no_files() {
    for name in
        ["../x", "/x", "a/../../x", "a\\..\\x", "a\0", "\u{1b}[2Jx.jsonl", "a\nb", "a\u{9b}1m", "C:x", "a//b", "", "."]
    {
        let listing =
            serde_json::json!({"sha": "0".repeat(40), "siblings": [{"rfilename": name}, {"rfilename": "ok é"}]});
        assert_eq!(Listing::parse(&listing).unwrap().paths().collect::<Vec<_>>(), ["ok é"]);
        assert_eq!(HubId::parse(RepoKind::Dataset, "o/n", Some(name)), None, "{name:?}");
    }
}
