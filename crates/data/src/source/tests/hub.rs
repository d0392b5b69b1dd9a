//! Tests of Hub datasets: selected by configuration and split, fetched, and read offline; against a server on this machine.

use firebrick_hub::{Hub, HubSettings};
use firebrick_hub_imitation::{Answer, Request, Server, sha256};
use serde_json::{Value as Json, json};
use tempfile::TempDir;

use super::super::{ContentKeys, Record, SourceError, SourceSpec};

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// Returns a dataset with these files and these configurations on its card.
fn dataset(files: &[(&str, &str)], configs: Json) -> impl Fn(&Request) -> Answer + Send + Sync + use<> {
    let files: Vec<(String, String)> = files.iter().map(|&(path, text)| (path.to_owned(), text.to_owned())).collect();
    move |request| {
        if request.target.starts_with("/api/datasets/owner/name/revision/") {
            let sibling = |(path, text): &(String, String)| json!({ "rfilename": path, "size": text.len() });
            let siblings: Vec<Json> = files.iter().map(sibling).collect();
            let card = json!({ "configs": configs });
            let listing = json!({ "id": "owner/name", "sha": COMMIT, "siblings": siblings, "cardData": card });
            return Answer::new(200, listing.to_string());
        }
        let path = request.target.strip_prefix(&format!("/datasets/owner/name/resolve/{COMMIT}/"));
        match files.iter().find(|(known, _)| Some(known.as_str()) == path) {
            Some((_, text)) => Answer::ranged(request, text.as_bytes()).with("etag", format!("\"{}\"", etag(text))),
            None => Answer::new(404, "").with("x-error-code", "RepoNotFound"),
        }
    }
}

fn etag(text: &str) -> String {
    sha256(text.as_bytes())
}

struct Client {
    cache: TempDir,
    settings: HubSettings,
}

impl Client {
    fn new(server: &Server) -> Self {
        let cache = tempfile::tempdir().unwrap();
        let (endpoint, path) = (server.address.clone(), cache.path().to_owned());
        Self { cache, settings: HubSettings { endpoint, cache: path, token: None, is_offline: false } }
    }

    fn offline(mut self) -> Self {
        self.settings.is_offline = true;
        self
    }

    fn hub(&self) -> Hub {
        Hub::new(self.settings.clone())
    }

    fn read(&self, spec: &SourceSpec) -> Result<Vec<Record>, SourceError> {
        spec.resolve(&self.hub())?.records().collect()
    }

    fn texts(&self, spec: &SourceSpec) -> Vec<String> {
        let records = self.read(spec).unwrap_or_else(|error| panic!("{error}"));
        records.iter().map(|record| record.fields["text"].as_str().unwrap().to_owned()).collect()
    }

    fn error(&self, spec: &SourceSpec) -> String {
        self.read(spec).expect_err("must be refused").to_string()
    }
}

fn spec() -> SourceSpec {
    SourceSpec::new("owner/name")
}

fn split(name: &str) -> SourceSpec {
    SourceSpec { split: Some(name.to_owned()), ..spec() }
}

fn row(text: &str) -> String {
    format!("{{\"text\":\"{text}\"}}\n")
}

fn two_splits() -> Vec<(&'static str, &'static str)> {
    vec![
        ("README.md", "---\n"),
        ("data/train-00001-of-00002.jsonl", "{\"text\":\"b\"}\n"),
        ("data/train-00000-of-00002.jsonl", "{\"text\":\"a\"}\n"),
        ("data/test-00000-of-00001.jsonl", "{\"text\":\"c\"}\n"),
        ("train.csv", "text\nnot this\n"),
    ]
}

#[test]
fn a_dataset_is_downloaded_by_split() {
    let server = Server::new(dataset(&two_splits(), Json::Null));
    let client = Client::new(&server);
    assert_eq!(client.texts(&spec()), ["a", "b"]);
    assert_eq!(client.texts(&split("test")), ["c"]);
    let error = client.error(&split("validation"));
    assert!(error.contains("owner/name") && error.contains("test, train"), "{error}");
    // Downloaded files are not downloaded again; only the listing is requested.
    let before = server.requests().len();
    client.texts(&spec());
    assert_eq!(server.requests().len(), before + 1);
}

#[test]
fn the_configurations_of_the_card_take_precedence() {
    let configs = json!([
        { "config_name": "en", "data_files": [
            { "split": "train", "path": ["x/*.jsonl"] }, { "split": "held_out", "path": "y/1.jsonl" },
        ] },
        { "config_name": "de", "data_files": "z/**" },
    ]);
    let rows = ["a", "b", "c", "d"].map(row);
    let files =
        [("x/1.jsonl", &rows[0]), ("x/deep/2.jsonl", &rows[1]), ("y/1.jsonl", &rows[2]), ("z/q/1.jsonl", &rows[3])];
    let server = Server::new(dataset(&files.map(|(path, text)| (path, text.as_str())), configs));
    let client = Client::new(&server);
    let of = |config: &str, split: Option<&str>| SourceSpec {
        config: Some(config.to_owned()),
        split: split.map(str::to_owned),
        ..spec()
    };
    assert_eq!(client.texts(&of("en", None)), ["a"]);
    assert_eq!(client.texts(&of("en", Some("held_out"))), ["c"]);
    assert_eq!(client.texts(&of("de", None)), ["d"]);
    for (bad, expected) in [(spec(), "en, de"), (of("fr", None), "en, de"), (of("en", Some("test")), "held_out, train")]
    {
        let error = client.error(&bad);
        assert!(error.contains(expected), "{error}");
    }
    // The same configurations apply offline.
    assert_eq!(client.offline().texts(&of("en", Some("held_out"))), ["c"]);
}

#[test]
fn a_redirect_within_the_hub_keeps_token_and_etag() {
    let open = dataset(&[("train.jsonl", "{\"text\":\"a\"}\n")], Json::Null);
    let server = Server::new(move |request| {
        assert!(request.header("authorization") == Some("bearer secret"));
        if request.target.contains("/resolve/") {
            let linked = format!("\"{}\"", etag(&row("a")));
            return Answer::new(302, "").with("location", "/elsewhere").with("x-linked-etag", linked);
        }
        if request.target == "/elsewhere" { Answer::new(200, row("a")) } else { open(request) }
    });
    let mut client = Client::new(&server);
    client.settings.token = Some("secret".to_owned());
    assert_eq!(client.texts(&spec()), ["a"]);
    assert!(client.cache.path().join("datasets--owner--name/blobs").join(etag(&row("a"))).is_file());
}

#[test]
fn a_dataset_without_data_files_names_the_branch_with_parquet() {
    let server = Server::new(dataset(&[("name.py", ""), ("x.bin", "")], Json::Null));
    let error = Client::new(&server).error(&spec());
    assert!(error.contains("name.py") && error.contains("refs/convert/parquet"), "{error}");
}

#[test]
fn a_limit_downloads_only_the_files_it_needs() {
    let server = Server::new(dataset(&two_splits(), Json::Null));
    let client = Client::new(&server);
    assert_eq!(client.texts(&SourceSpec { limit: Some(1), ..spec() }), ["a"]);
    assert_eq!(server.requests().len(), 2);
    assert_eq!(client.offline().texts(&SourceSpec { limit: Some(1), ..spec() }), ["a"]);
}

#[test]
fn the_content_key_of_a_dataset_needs_no_download() {
    let key = |commit: &'static str| {
        let server = Server::new(move |_| {
            let siblings = json!([{ "rfilename": "train.jsonl", "size": 3 }]);
            Answer::new(200, json!({ "sha": commit, "siblings": siblings }).to_string())
        });
        let client = Client::new(&server);
        let key = spec().resolve(&client.hub()).unwrap().content_key(&ContentKeys::default()).unwrap();
        assert_eq!(server.requests().len(), 1);
        key
    };
    let other = "76543210fedcba9876543210fedcba9876543210";
    assert_eq!(key(COMMIT), key(COMMIT));
    assert_ne!(key(COMMIT), key(other));
}
