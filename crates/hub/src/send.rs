//! Requests that write to the Hub, and one that asks whether something is there.
//!
//! Redirects are not followed: a repository that has moved is pushed to under its new name. The token goes to the Hub alone.
//! Trade-off: a body is sent again as a whole when its request failed.

use std::io::Read;

use serde_json::Value as Json;
use ureq::http::Response;
use ureq::{Body, SendBody};

use crate::error::HubError;
use crate::http::{ATTEMPTS, http_agent, origin, wait_after};
use crate::settings::HubSettings;

/// Status and JSON of a GET with the token; null for an answer that is no JSON.
pub(crate) fn ask(settings: &HubSettings, url: &str) -> Result<(u16, Json), HubError> {
    repeated(url, || {
        let mut request = http_agent().get(url);
        if let Some(token) = token_for(settings, url) {
            request = request.header("authorization", token);
        }
        request.call().map_err(|error| error.to_string())
    })
    .map(answer)
}

/// Status and JSON of a POST with the token, repeated where the server is busy.
pub(crate) fn post(settings: &HubSettings, url: &str, kind: &str, body: &[u8]) -> Result<(u16, Json), HubError> {
    allowed(settings, url)?;
    repeated(url, || send(settings, url, kind, body)).map(answer)
}

/// The same, once: for what must not happen twice.
pub(crate) fn post_once(settings: &HubSettings, url: &str, kind: &str, body: &[u8]) -> Result<(u16, Json), HubError> {
    allowed(settings, url)?;
    send(settings, url, kind, body).map(answer).map_err(|reason| HubError::not_sent(url, reason))
}

/// Status and ETag of a PUT of so many bytes to a signed address; `open` gives them from the beginning for each attempt.
pub(crate) fn put<R: Read>(
    settings: &HubSettings,
    url: &str,
    bytes: u64,
    open: impl Fn() -> Result<R, HubError>,
) -> Result<(u16, Option<String>), HubError> {
    allowed(settings, url)?;
    // Whether it can be read at all; each attempt opens it again.
    open()?;
    let response = repeated(url, || {
        let mut body = open().map_err(|error| error.to_string())?;
        let request = http_agent().put(url).header("content-length", bytes.to_string());
        request.send(SendBody::from_reader(&mut body)).map_err(|error| error.to_string())
    })?;
    let etag = response.headers().get("etag").and_then(|etag| etag.to_str().ok()).map(str::to_owned);
    Ok((response.status().as_u16(), etag))
}

fn send(settings: &HubSettings, url: &str, kind: &str, body: &[u8]) -> Result<Response<Body>, String> {
    let mut request = http_agent().post(url).header("content-type", kind);
    if kind.contains("git-lfs") {
        request = request.header("accept", kind);
    }
    if let Some(token) = token_for(settings, url) {
        request = request.header("authorization", token);
    }
    request.send(body).map_err(|error| error.to_string())
}

/// Repeats a request that got no answer, or one that says to come again.
fn repeated(url: &str, request: impl Fn() -> Result<Response<Body>, String>) -> Result<Response<Body>, HubError> {
    let mut attempt = 1;
    loop {
        let result = request();
        let is_busy = |response: &Response<Body>| matches!(response.status().as_u16(), 429 | 500..=599);
        if attempt == ATTEMPTS || result.as_ref().is_ok_and(|response| !is_busy(response)) {
            return result.map_err(|reason| HubError::not_sent(url, reason));
        }
        wait_after(attempt);
        attempt += 1;
    }
}

fn answer(mut response: Response<Body>) -> (u16, Json) {
    let text = response.body_mut().read_to_string().unwrap_or_default();
    (response.status().as_u16(), serde_json::from_str(&text).unwrap_or(Json::Null))
}

/// The header for the Hub's own addresses; nothing for any other.
fn token_for(settings: &HubSettings, url: &str) -> Option<String> {
    let token = settings.token.as_ref().filter(|_| origin(url) == origin(&settings.endpoint))?;
    Some(format!("Bearer {token}"))
}

/// What a server asks us to write to is encrypted, or the Hub itself.
fn allowed(settings: &HubSettings, url: &str) -> Result<(), HubError> {
    if url.starts_with("https://") || origin(url) == origin(&settings.endpoint) {
        return Ok(());
    }
    Err(HubError::request(url, "the address to write to is not encrypted"))
}
