//! Tests of when the Hub is asked and when the cache is enough: one that cannot be written, one that another program filled, and a Hub that does not
//! respond.
//!
//! Trade-off: a file in place of a folder simulates a folder that cannot be written, because permissions do not stop root.

use std::fs::{self, File};
use std::time::{Duration, SystemTime};

use firebrick_hub_imitation::{Answer, Server};

use super::models::hub_with_model;
use super::{Client, NOWHERE, TOKEN, id};
use crate::{Hub, HubSettings, Need};

#[test]
fn the_hub_is_reached_whatever_it_answers_and_only_if_it_answers() {
    let (hub, client) = hub_with_model();
    client.hub().reach().unwrap();
    assert_eq!(hub.server.requests().len(), 1, "it is asked once");
    let reason = Client::of(NOWHERE).hub().reach().unwrap_err();
    assert!(reason.starts_with(NOWHERE), "{reason}");
}

#[test]
fn a_process_sees_one_commit_of_a_branch_and_requests_it_once() {
    let (hub, client) = hub_with_model();
    let of_process = client.hub();
    let folder = of_process.model(&id("org/tiny"), Need::Description).unwrap().folder;
    let files = hub.store().repos["org/tiny"].commits[0].1.clone();
    let new = hub.store().repos.get_mut("org/tiny").unwrap().commit(files);
    assert_eq!(of_process.clone().model(&id("org/tiny"), Need::Weights).unwrap().folder, folder);
    let listings = hub.server.requests().iter().filter(|request| request.contains("/api/models/")).count();
    assert_eq!(listings, 1);
    assert!(client.hub().model(&id("org/tiny"), Need::Weights).unwrap().folder.ends_with(new), "a new process");
}

#[test]
fn a_told_process_lists_nothing_and_sees_one_commit() {
    let hub = hub_with_model().0;
    let (first, second, third) = (Client::new(&hub), Client::new(&hub), Client::new(&hub));
    let main = first.hub();
    main.model(&id("org/tiny"), Need::Description).unwrap();
    let commit = hub.store().repos["org/tiny"].commits[0].0.clone();
    let files = hub.store().repos["org/tiny"].commits[0].1.clone();
    hub.store().repos.get_mut("org/tiny").unwrap().commit(files);
    let learned = second.hub();
    learned.learn(&main.to_share());
    let folder = learned.model(&id("org/tiny"), Need::Weights).unwrap().folder;
    assert!(folder.ends_with(&commit));
    let listings = hub.server.requests().iter().filter(|request| request.contains("/api/models/")).count();
    assert_eq!(listings, 1);
    // Its cache is as if it had asked. Data from another process's cache is no news about the branch.
    let offline = second.offline();
    let of_cache = offline.hub();
    assert_eq!(of_cache.model(&id("org/tiny"), Need::Weights).unwrap().folder, folder);
    third.hub().learn(&of_cache.to_share());
    assert!(!third.cache.path().join("models--org--tiny/refs").exists());
}

#[test]
fn what_the_cache_knows_is_not_written_again() {
    let (_hub, client) = hub_with_model();
    let folder = client.hub().model(&id("org/tiny"), Need::Weights).unwrap().folder;
    let repository = client.cache.path().join("models--org--tiny");
    let listing = repository.join(".firebrick").join(folder.file_name().unwrap()).with_extension("json");
    let written = [repository.join("refs/main"), listing];
    let old = SystemTime::now() - Duration::from_secs(3600);
    for path in &written {
        File::options().write(true).open(path).unwrap().set_modified(old).unwrap();
    }
    let times = || written.each_ref().map(|path| fs::metadata(path).unwrap().modified().unwrap());
    let before = times();
    client.hub().model(&id("org/tiny"), Need::Weights).unwrap();
    assert_eq!(times(), before);
}

#[test]
fn a_whole_cache_need_not_be_writable() {
    let (_hub, client) = hub_with_model();
    let model = || client.hub().model(&id("org/tiny"), Need::Weights);
    let folder = model().unwrap().folder;
    let repository = client.cache.path().join("models--org--tiny");
    for closed in [repository.join("refs"), repository.join(".firebrick"), client.cache.path().join(".locks")] {
        // A file in place of the folder.
        fs::remove_dir_all(&closed).unwrap();
        fs::write(&closed, "").unwrap();
    }
    assert_eq!(model().unwrap().folder, folder);
    fs::remove_file(folder.join("config.json")).unwrap();
    let error = model().unwrap_err().to_string();
    assert!(error.contains("cannot use the Hub cache at") && error.contains(".locks"), "{error}");
}

#[test]
fn a_sufficient_cache_is_taken_where_nothing_answers() {
    let (_hub, mut client) = hub_with_model();
    let folder = client.hub().model(&id("org/tiny"), Need::Description).unwrap().folder;
    client.settings.endpoint = NOWHERE.to_owned();
    let unreachable = client.hub();
    let found = unreachable.model(&id("org/tiny"), Need::Description).unwrap();
    assert_eq!((found.folder, found.missing_bytes), (folder, 5000));
    let error = unreachable.model(&id("org/tiny"), Need::Weights).unwrap_err().to_string();
    assert!(error.contains("does not hold all of org/tiny@") && error.contains("/model.safetensors"), "{error}");
    assert!(error.contains(NOWHERE), "{error}");
}

#[test]
fn a_server_that_only_fails_counts_as_unreachable() {
    let (_hub, mut client) = hub_with_model();
    let folder = client.hub().model(&id("org/tiny"), Need::Weights).unwrap().folder;
    // This is how huggingface_hub leaves a cache.
    fs::remove_dir_all(client.cache.path().join("models--org--tiny/.firebrick")).unwrap();
    let server = Server::new(|_| Answer::new(503, ""));
    client.settings.endpoint.clone_from(&server.address);
    let broken = client.hub();
    assert_eq!(broken.model(&id("org/tiny"), Need::Weights).unwrap().folder, folder);
    let before = server.requests().len();
    // Its other repositories are taken from the cache at once.
    fs::rename(client.cache.path().join("models--org--tiny"), client.cache.path().join("models--org--other")).unwrap();
    let other = broken.model(&id("org/other"), Need::Weights).unwrap().folder;
    assert_eq!((other.file_name(), server.requests().len()), (folder.file_name(), before));
}

#[test]
fn a_whole_pinned_model_needs_no_request() {
    let server = Server::new(|_| Answer::new(404, "").with("x-error-code", "RepoNotFound"));
    let client = Client::of(&server.address);
    let commit = "0123456789abcdef0123456789abcdef01234567";
    let snapshot = client.cache.path().join("models--org--tiny/snapshots").join(commit);
    let model = || client.hub().model(&id(&format!("org/tiny@{commit}")), Need::Weights);
    fs::create_dir_all(&snapshot).unwrap();
    let index = r#"{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}"#;
    for file in ["config.json", "tokenizer.json", "tokenizer_config.json", "model-1.safetensors"] {
        fs::write(snapshot.join(file), "{}").unwrap();
    }
    fs::write(snapshot.join("model.safetensors.index.json"), index).unwrap();
    // If parts are missing, the listing is requested from the Hub.
    assert!(model().is_err());
    assert_eq!(server.requests().len(), 1);
    fs::write(snapshot.join("model-2.safetensors"), "w").unwrap();
    // The chat template and settings of generation may be there although the other program did not download them.
    fs::write(snapshot.join("chat_template.jinja"), "").unwrap();
    assert!(model().is_err());
    assert_eq!(server.requests().len(), 2);
    let unreachable = Hub::new(HubSettings { endpoint: NOWHERE.to_owned(), ..client.settings.clone() });
    let found = unreachable.model(&id(&format!("org/tiny@{commit}")), Need::Weights).unwrap();
    assert_eq!((found.folder, found.missing_bytes), (snapshot.clone(), 0));
    let absent = client.cache.path().join("models--org--tiny/.no_exist").join(commit);
    fs::create_dir_all(&absent).unwrap();
    fs::write(absent.join("generation_config.json"), "").unwrap();
    let found = model().unwrap();
    assert_eq!((found.folder, found.missing_bytes), (snapshot.clone(), 0));
    assert_eq!(server.requests().len(), 2);
    fs::remove_file(snapshot.join("tokenizer.json")).unwrap();
    assert!(model().is_err());
}

#[test]
fn a_refusal_is_no_reason_to_take_the_cache() {
    let (_hub, client) = hub_with_model();
    let mut client = client.with_token();
    client.hub().model(&id("org/tiny"), Need::Weights).unwrap();
    for (status, code) in [(401, "RepoNotFound"), (403, "GatedRepo"), (404, "RepoNotFound")] {
        let server = Server::new(move |_| Answer::new(status, "").with("x-error-code", code));
        client.settings.endpoint.clone_from(&server.address);
        let error = client.hub().model(&id("org/tiny"), Need::Weights).unwrap_err().to_string();
        assert!(error.contains("that you can access") && !error.contains(TOKEN), "{error}");
    }
}

#[test]
fn an_endpoint_without_its_beginning_is_named() {
    let message = Client::of("me:secret@hf-mirror.com").hub().listing(&id("o/n")).unwrap_err().to_string();
    let expected =
        "HF_ENDPOINT=hf-mirror.com is no address: write it with its beginning, HF_ENDPOINT=https://hf-mirror.com";
    assert_eq!(message, expected);
}
