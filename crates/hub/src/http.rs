//! Requests that read from the Hub: a repository's listing and the content of a file.
//!
//! Redirects are followed here, because only the Hub may receive the token, and because the content's name (its ETag) is in the Hub's response, not
//! in the one of the storage that it redirects to.

use std::io::{ErrorKind, Read};
use std::sync::{Arc, LazyLock};
use std::thread::sleep;
use std::time::Duration;

use serde_json::Value as Json;
use ureq::http::Response;
use ureq::tls::{RootCerts, TlsConfig};
use ureq::{Agent, Body, Error as TransportError, RequestBuilder};

use crate::address::{base, is_same_origin, without_secrets};
use crate::error::HubError;
use crate::id::{HubId, RepoKind};
use crate::listing::HubFile;
use crate::settings::HubSettings;

const MAX_LISTING_BYTES: u64 = 256 << 20;
const MAX_REDIRECTS: usize = 10;
const ATTEMPTS: u32 = 5;
/// Time before the second attempt; tests do not wait for an imitation.
const FIRST_WAIT: Duration = Duration::from_millis(if cfg!(test) { 1 } else { 200 });

/// Time after which the Hub counts as unreachable where nothing but that is asked.
const REACH: Duration = Duration::from_secs(3);

/// One connection pool for the process.
static AGENT: LazyLock<Agent> = LazyLock::new(|| {
    let tls = TlsConfig::builder()
        .root_certs(RootCerts::PlatformVerifier)
        .unversioned_rustls_crypto_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .build();
    Agent::config_builder()
        .tls_config(tls)
        .max_redirects(0)
        .http_status_as_error(false)
        .timeout_connect(Some(Duration::from_secs(20)))
        .timeout_per_read(Some(Duration::from_secs(60)))
        .user_agent(concat!("firebrick/", env!("CARGO_PKG_VERSION")))
        .build()
        .new_agent()
});

/// Returns the HTTP client of this process: TLS by the system's certificates, no redirects, statuses as answers, time limits.
pub fn http_agent() -> &'static Agent {
    &AGENT
}

/// The Hub's response about a file, and the open connection.
pub(crate) struct Content {
    /// Name of the content.
    pub(crate) etag: String,
    /// Size of the whole file in bytes, if reported.
    pub(crate) size: Option<u64>,
    /// Offset of the first byte of `body`: 0 or the requested offset.
    pub(crate) begins_at: u64,
    pub(crate) body: Box<dyn Read + Send>,
}

/// A request without a usable response.
enum Failure {
    /// The network fails, or the server is busy or broken.
    Unreachable(String),
    /// The response is not the expected one.
    Unusable(String),
}

/// Requests a server's start page, once and within a short time.
pub(crate) fn reach(endpoint: &str) -> Result<(), String> {
    if !endpoint.contains("://") {
        return Err(HubError::endpoint(endpoint).to_string());
    }
    let request = AGENT.head(endpoint).config().timeout_global(Some(REACH)).build();
    request.call().map(drop).map_err(|error| without_secrets(&format!("{}: {error}", base(endpoint))))
}

pub(crate) fn listing(settings: &HubSettings, id: &HubId) -> Result<Json, HubError> {
    let (kind, revision) = (id.kind.plural(), encode(&id.revision, false));
    let url = format!("{}/api/{kind}/{}/revision/{revision}?blobs=true", settings.endpoint, id.name);
    let mut response = get(settings, &url, 0, (id.kind, &id.to_string()))?.0;
    let failed = |reason: String| HubError::request(&url, reason);
    let mut text = Vec::new();
    let read = response.body_mut().as_reader().take(MAX_LISTING_BYTES + 1).read_to_end(&mut text);
    read.map_err(|error| {
        HubError::unreachable(&settings.cache, &id.to_string(), &format!("{}: {error}", settings.endpoint))
    })?;
    if text.len() as u64 > MAX_LISTING_BYTES {
        return Err(failed("the listing is larger than 256 MiB".to_owned()));
    }
    serde_json::from_slice(&text).map_err(|error| failed(format!("the answer is not JSON: {error}")))
}

/// Requests a file's content from byte `begin` on.
pub(crate) fn content(settings: &HubSettings, file: &HubFile, begin: u64) -> Result<Content, HubError> {
    let HubFile { kind, name, commit, path, .. } = file;
    let url = format!("{}/{}{name}/resolve/{commit}/{}", settings.endpoint, kind.prefix(), encode(path, true));
    let (response, etag) = get(settings, &url, begin, (*kind, name))?;
    // It becomes the name of a file.
    let of_name = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
    let etag = etag.filter(|etag| (1..=128).contains(&etag.len()) && etag.bytes().all(of_name));
    let etag = etag.ok_or_else(|| HubError::request(&url, "the answer has no ETag"))?;
    let header = |name: &str| response.headers().get(name)?.to_str().ok();
    let begins_at = if response.status().as_u16() == 206 { begin } else { 0 };
    // "bytes 100-199/200"
    let whole = header("content-range").and_then(|range| range.rsplit_once('/')?.1.parse().ok());
    let length: Option<u64> = header("content-length").and_then(|length| length.parse().ok());
    let size = whole.or_else(|| length.map(|length| length + begins_at));
    Ok(Content { etag, size, begins_at, body: Box::new(response.into_body().into_reader()) })
}

/// Sends a GET with the token and with retries, and follows redirects; also returns the ETag of the Hub itself.
fn get(
    settings: &HubSettings,
    url: &str,
    begin: u64,
    what: (RepoKind, &str),
) -> Result<(Response<Body>, Option<String>), HubError> {
    if !settings.endpoint.contains("://") {
        return Err(HubError::endpoint(&settings.endpoint));
    }
    let unreachable = |reason: String| Err(HubError::unreachable(&settings.cache, what.1, &reason));
    match repeated(|| follow(settings, url, begin), |(response, _)| response) {
        Ok((response, etag)) => match response.status().as_u16() {
            200 | 206 => Ok((response, etag)),
            status if is_busy(status) => unreachable(format!("{}: the server answered {status}", base(url))),
            _ => Err(refused(settings, url, &response, what)),
        },
        Err(Failure::Unreachable(reason)) => unreachable(reason),
        Err(Failure::Unusable(reason)) => Err(HubError::request(url, reason)),
    }
}

/// Repeats a request that got no response, or a response that asks for a retry.
pub(crate) fn repeated<T, E>(
    request: impl Fn() -> Result<T, E>,
    response: impl Fn(&T) -> &Response<Body>,
) -> Result<T, E> {
    for attempt in 1..ATTEMPTS {
        let result = request();
        if result.as_ref().is_ok_and(|answer| !is_busy(response(answer).status().as_u16())) {
            return result;
        }
        wait_after(attempt);
    }
    request()
}

/// Returns whether a status says that the server is busy or broken.
fn is_busy(status: u16) -> bool {
    matches!(status, 429 | 500..=599)
}

/// Waits before the next attempt: 0.2, 0.4, 0.8, 1.6 seconds.
pub(crate) fn wait_after(attempt: u32) {
    sleep(FIRST_WAIT * (1 << (attempt - 1)));
}

fn follow(settings: &HubSettings, url: &str, begin: u64) -> Result<(Response<Body>, Option<String>), Failure> {
    let unusable = |reason: &str| Failure::Unusable(reason.to_owned());
    let (mut url, mut etag) = (url.to_owned(), None);
    for _ in 0..=MAX_REDIRECTS {
        let is_hub = is_same_origin(&url, &settings.endpoint);
        let mut request = with_token(AGENT.get(&url), settings, &url).header("accept-encoding", "identity");
        if begin > 0 {
            request = request.header("range", format!("bytes={begin}-"));
        }
        let response = request.call().map_err(|error| {
            let is_of_network = match &error {
                // Certificates that are not accepted arrive as invalid data: the server responded.
                TransportError::Io(error) => error.kind() != ErrorKind::InvalidData,
                TransportError::Timeout(_) | TransportError::HostNotFound | TransportError::ConnectionFailed => true,
                _ => false,
            };
            let reason = format!("{}: {error}", base(&url));
            if is_of_network { Failure::Unreachable(reason) } else { Failure::Unusable(reason) }
        })?;
        let header = |name: &str| response.headers().get(name)?.to_str().ok().map(str::to_owned);
        if is_hub {
            let reported = header("x-linked-etag").or_else(|| header("etag"));
            etag = reported.map(|etag| etag.trim_start_matches("W/").trim_matches('"').to_owned()).or(etag);
        }
        if !response.status().is_redirection() {
            return Ok((response, etag));
        }
        let target = header("location").ok_or_else(|| unusable("a redirect without a target"))?;
        url = if target.starts_with('/') { format!("{}{target}", base(&url)) } else { target };
        if !url.starts_with("https://") && !is_same_origin(&url, &settings.endpoint) {
            let target = without_secrets(&url);
            return Err(Failure::Unusable(format!("redirected to {target}, which is not encrypted")));
        }
    }
    Err(unusable("too many redirects"))
}

/// Adds the token to a request for the Hub itself.
pub(crate) fn with_token<B>(request: RequestBuilder<B>, settings: &HubSettings, url: &str) -> RequestBuilder<B> {
    match settings.token.as_ref().filter(|_| is_same_origin(url, &settings.endpoint)) {
        Some(token) => request.header("authorization", format!("Bearer {token}")),
        None => request,
    }
}

/// Explains why the Hub refuses access to a repository, with advice.
pub(crate) fn refused(
    settings: &HubSettings,
    url: &str,
    response: &Response<Body>,
    (kind, what): (RepoKind, &str),
) -> HubError {
    let code = response.headers().get("x-error-code").and_then(|code| code.to_str().ok()).unwrap_or_default();
    let has_token = settings.token.is_some();
    let page = format!("{}/{}{}", settings.shown_endpoint(), kind.prefix(), what.split('@').next().unwrap_or(what));
    let hint = match (response.status().as_u16(), code) {
        (_, "GatedRepo") if has_token => {
            format!("it is gated: ask for access at {page} with the account of your token")
        }
        (_, "GatedRepo") => {
            format!(
                "it is gated: ask for access at {page}, then put a token into HF_TOKEN or log in with `hf auth login`"
            )
        }
        (_, "RevisionNotFound") => "there is no such branch, tag or commit; leave the revision out for main".to_owned(),
        (_, "EntryNotFound") => "the file is gone from that commit".to_owned(),
        (401 | 403 | 404, _) if has_token => {
            "the name is misspelled (and no local path), or it is private and your token \
                                              may not read it"
                .to_owned()
        }
        (401 | 403 | 404, _) => {
            "the name is misspelled (and no local path), or it is private: put a token that may read \
                                 it into HF_TOKEN, or log in with `hf auth login`"
                .to_owned()
        }
        (status, code) => {
            let answer = format!("the server answered {status} {code}");
            return HubError::request(url, answer.trim_end());
        }
    };
    HubError::Refused { endpoint: settings.shown_endpoint(), what: format!("{} {what:?}", kind.noun()), hint }
}

/// Percent-encodes a part of a URL; slashes too unless it is a path.
pub(crate) fn encode(text: &str, is_path: bool) -> String {
    let mut encoded = String::with_capacity(text.len());
    for &byte in text.as_bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => encoded.push(char::from(byte)),
            b'/' if is_path => encoded.push('/'),
            _ => encoded.push_str(&format!("%{byte:02X}")),
        }
    }
    encoded
}
