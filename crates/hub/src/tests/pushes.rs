//! Tests of pushes: what arrives, by which way, and the errors when the Hub refuses it.

use std::fs;
use std::path::Path;

use firebrick_hub_imitation::ImitatedHub;
use tempfile::TempDir;

use super::{Client, NOWHERE, TOKEN, id};
use crate::{HubError, Need, Push, Pushed};

/// Creates an adapter folder: small files, a large one, a hidden one, an empty one.
fn adapter() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("adapter_config.json"), "{}").unwrap();
    fs::write(folder.path().join("adapter_model.safetensors"), weights()).unwrap();
    fs::write(folder.path().join(".env"), "SECRET=1").unwrap();
    fs::write(folder.path().join("empty.bin"), "").unwrap();
    fs::create_dir(folder.path().join("additional_chat_templates")).unwrap();
    fs::write(folder.path().join("additional_chat_templates/tool.jinja"), "{{ x }}").unwrap();
    folder
}

fn weights() -> Vec<u8> {
    (0..2500u32).flat_map(u32::to_le_bytes).collect()
}

fn push(client: &Client, folder: &Path) -> Result<Pushed, HubError> {
    push_to("org/mine", None, client, folder)
}

fn push_to(name: &str, private: Option<bool>, client: &Client, folder: &Path) -> Result<Pushed, HubError> {
    let texts = vec![("README.md".to_owned(), "# card\n".to_owned())];
    let message = "Upload adapter".to_owned();
    client.hub().push(&Push { id: id(name), private, message, folder: folder.to_owned(), texts })
}

#[test]
fn a_folder_becomes_a_commit_and_stored_large_files() {
    let (hub, folder) = (ImitatedHub::new(TOKEN), adapter());
    let client = Client::new(&hub).with_token();
    let pushed = push(&client, folder.path()).unwrap();
    assert!(pushed.is_new && pushed.page == format!("{}/org/mine", hub.server.address));
    let expected = [
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
        "additional_chat_templates/tool.jinja",
        "empty.bin",
    ];
    assert_eq!((pushed.files.as_slice(), pushed.stored_bytes), (expected.map(str::to_owned).as_slice(), 10_000));
    {
        let store = hub.store();
        let (commit, files) = store.repos["org/mine"].commits.last().unwrap();
        assert_eq!(pushed.commit.as_ref(), Some(commit));
        assert_eq!(files.keys().collect::<Vec<_>>(), expected);
        assert!(files["adapter_model.safetensors"] == weights() && files["README.md"] == b"# card\n");
        assert!(files["empty.bin"].is_empty() && store.objects.len() == 1 && !store.repos["org/mine"].is_private);
    }
    // The pushed files can be fetched again.
    let fetched = client.hub().model(&id("org/mine"), Need::Weights).unwrap().folder;
    assert!(fs::read(fetched.join("adapter_model.safetensors")).unwrap() == weights());
}

#[test]
fn large_files_go_in_the_parts_that_the_server_asks_for() {
    let (hub, folder) = (ImitatedHub::new(TOKEN), adapter());
    hub.store().part_bytes = Some(3000);
    push(&Client::new(&hub).with_token(), folder.path()).unwrap();
    assert!(hub.store().objects.values().eq([&weights()]));
    let requests = hub.server.requests();
    let parts = requests.iter().filter(|request| request.starts_with("PUT /storage/")).count();
    assert_eq!(parts, 4);
    let lengths: Vec<u64> = {
        let log = hub.server.log.lock().unwrap();
        let parts = log.iter().filter(|request| request.method == "PUT");
        parts.map(|request| request.header("content-length").unwrap().parse().unwrap()).collect()
    };
    assert_eq!(lengths, [3000, 3000, 3000, 1000]);
}

#[test]
fn the_second_push_sends_only_what_changed() {
    let (hub, folder) = (ImitatedHub::new(TOKEN), adapter());
    let client = Client::new(&hub).with_token();
    push(&client, folder.path()).unwrap();
    let again = push(&client, folder.path()).unwrap();
    assert_eq!((again.is_new, again.commit, again.stored_bytes), (false, None, 0));
    assert_eq!(hub.store().repos["org/mine"].commits.len(), 1);
    fs::write(folder.path().join("adapter_config.json"), "{\"r\": 8}").unwrap();
    let changed = push(&client, folder.path()).unwrap();
    assert_eq!(changed.files, ["adapter_config.json"]);
    assert_eq!(hub.store().repos["org/mine"].commits.last().unwrap().1.len(), 5);
}

#[test]
fn what_the_storage_has_is_not_sent_again() {
    let (hub, folder) = (ImitatedHub::new(TOKEN), adapter());
    hub.store().objects.insert(firebrick_hub_imitation::sha256(&weights()), weights());
    let pushed = push(&Client::new(&hub).with_token(), folder.path()).unwrap();
    assert_eq!(pushed.stored_bytes, 0);
    assert!(!hub.server.requests().iter().any(|request| request.starts_with("PUT")));
}

#[test]
fn a_new_repository_is_private_where_that_is_requested() {
    let (hub, folder) = (ImitatedHub::new(TOKEN), adapter());
    push_to("org/hidden", Some(true), &Client::new(&hub).with_token(), folder.path()).unwrap();
    assert!(hub.store().repos["org/hidden"].is_private);
}

#[test]
fn a_push_that_nothing_answers_says_to_push_again() {
    let folder = adapter();
    let error = push(&Client::of(NOWHERE).with_token(), folder.path()).unwrap_err().to_string();
    assert!(error.contains(NOWHERE) && error.contains("Push again"), "{error}");
    assert!(!error.contains("HF_HUB_OFFLINE") && !error.contains(TOKEN), "{error}");
}

#[test]
fn the_token_goes_to_the_hub_and_appears_in_no_message() {
    let (hub, folder) = (ImitatedHub::new("hf_other"), adapter());
    let error = push(&Client::new(&hub), folder.path()).unwrap_err().to_string();
    assert!(error.contains("org/mine") && error.contains("HF_TOKEN"), "{error}");
    assert!(hub.server.requests().is_empty());
    let error = push(&Client::new(&hub).with_token(), folder.path()).unwrap_err();
    assert!(error.to_string().contains("401") && error.to_string().contains("settings/tokens"), "{error}");
    assert!(!error.to_string().contains(TOKEN) && !format!("{error:?}").contains(TOKEN));
    let offline = push(&Client::new(&hub).with_token().offline(), folder.path()).unwrap_err().to_string();
    assert!(offline.contains("HF_HUB_OFFLINE"), "{offline}");
}
