//! Requests that write to the Hub, and one that asks whether a repository exists.
//!
//! Redirects are not followed: push to a moved repository under its new name. Only the Hub receives the token.
//! Trade-off: a failed request is repeated with the whole body.

use std::io::Read;

use serde_json::Value as Json;
use ureq::http::Response;
use ureq::{Body, SendBody};

use crate::address::is_same_origin;
use crate::error::HubError;
use crate::http::{self, http_agent, with_token};
use crate::settings::HubSettings;

/// Sends a GET with the token and returns status and JSON; null for a response that is not JSON.
pub(crate) fn ask(settings: &HubSettings, url: &str) -> Result<(u16, Json), HubError> {
    let request = || with_token(http_agent().get(url), settings, url);
    repeated(url, || request().call().map_err(|error| error.to_string())).map(answer)
}

/// Sends a POST with the token, repeated while the server is busy, and returns status and JSON.
pub(crate) fn post(settings: &HubSettings, url: &str, kind: &str, body: &[u8]) -> Result<(u16, Json), HubError> {
    allowed(settings, url)?;
    repeated(url, || send(settings, url, kind, body)).map(answer)
}

/// Sends a POST only once: for requests that must not happen twice.
pub(crate) fn post_once(settings: &HubSettings, url: &str, kind: &str, body: &[u8]) -> Result<(u16, Json), HubError> {
    allowed(settings, url)?;
    send(settings, url, kind, body).map(answer).map_err(|reason| HubError::not_sent(url, reason))
}

/// Sends a PUT of `bytes` bytes to a signed URL and returns status and ETag; `open` opens the content again for each attempt.
pub(crate) fn put<R: Read>(
    settings: &HubSettings,
    url: &str,
    bytes: u64,
    open: impl Fn() -> Result<R, HubError>,
) -> Result<(u16, Option<String>), HubError> {
    allowed(settings, url)?;
    // Checks that the content can be read at all; each attempt opens it again.
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
    let mut request = with_token(http_agent().post(url), settings, url).header("content-type", kind);
    if kind.contains("git-lfs") {
        request = request.header("accept", kind);
    }
    request.send(body).map_err(|error| error.to_string())
}

/// Repeats a request that got no response, or a response that asks for a retry.
fn repeated(url: &str, request: impl Fn() -> Result<Response<Body>, String>) -> Result<Response<Body>, HubError> {
    http::repeated(request, |response| response).map_err(|reason| HubError::not_sent(url, reason))
}

fn answer(mut response: Response<Body>) -> (u16, Json) {
    let text = response.body_mut().read_to_string().unwrap_or_default();
    (response.status().as_u16(), serde_json::from_str(&text).unwrap_or(Json::Null))
}

/// Checks that the URL to write to is encrypted, or belongs to the Hub itself.
fn allowed(settings: &HubSettings, url: &str) -> Result<(), HubError> {
    if url.starts_with("https://") || is_same_origin(url, &settings.endpoint) {
        return Ok(());
    }
    Err(HubError::request(url, "the address to write to is not encrypted"))
}
