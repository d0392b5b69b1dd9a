//! URLs: which server they name, and what of them may be shown.
//!
//! Trade-off: a secret that is part of a path is not recognized.

use ureq::http::Uri;

/// Returns a text whose URLs have neither user, password, query nor fragment, which may be secrets. Whatever prints or saves a URL uses it.
pub fn without_secrets(text: &str) -> String {
    let (mut shown, mut rest) = (String::with_capacity(text.len()), text);
    while let Some(at) = rest.find("://").map(|at| at + 3) {
        shown.push_str(&rest[..at]);
        // All other marks may stand in a password. Those at the end belong to the sentence.
        let is_end = |letter: char| letter.is_whitespace() || letter.is_control() || "\"`<>".contains(letter);
        let word = &rest[at..][..rest[at..].find(is_end).unwrap_or(rest.len() - at)];
        let is_scheme = |letter: char| letter.is_ascii_alphanumeric() || "+-.".contains(letter);
        let word = word.find("://").map_or(word, |next| word[..next].trim_end_matches(is_scheme));
        let (url, after) = rest[at..].split_at(word.trim_end_matches([',', ';', '.', ':', '\'', ')', ']', '}']).len());
        let authority = &url[..url.find(['/', '?', '#', '\\']).unwrap_or(url.len())];
        // A password with a slash, which stands where a port would: the `@` is in what looks like the path.
        let is_cut =
            authority.rsplit_once(':').is_some_and(|(_, port)| port.bytes().any(|byte| !byte.is_ascii_digit()));
        let begin = if is_cut { url } else { authority }.rfind('@').map_or(0, |user| user + 1);
        let end = url[begin..].find(['?', '#']).map_or(url.len(), |query| begin + query);
        shown.push_str(&url[begin..end]);
        rest = after;
    }
    shown + rest
}

/// Returns whether a text is a URL with something that [`without_secrets`] removes.
pub fn has_secrets(text: &str) -> bool {
    without_secrets(text) != text
}

/// Returns whether two URLs name the same server: scheme, host and port.
pub(crate) fn is_same_origin(one: &str, other: &str) -> bool {
    let origin = |url: &str| {
        let uri: Uri = url.parse().ok()?;
        let scheme = uri.scheme_str()?.to_ascii_lowercase();
        let port = uri.port_u16().unwrap_or(if scheme == "https" { 443 } else { 80 });
        Some((scheme, uri.host()?.to_ascii_lowercase(), port))
    };
    origin(one).is_some_and(|server| Some(server) == origin(other))
}

/// Returns the beginning of a URL, up to its path.
pub(crate) fn base(url: &str) -> &str {
    let start = url.find("://").map_or(0, |at| at + 3);
    url[start..].find(['/', '?', '#']).map_or(url, |end| &url[..start + end])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shown_urls_have_no_secrets_and_texts_without_urls_stay() {
        for (text, shown) in [
            ("https://user:hunter2@host:1/a", "https://host:1/a"),
            ("https://hunter2@host", "https://host"),
            ("https://u:hun/ter2@host/a", "https://host/a"),
            ("https://u:hunter2@x@host/a", "https://host/a"),
            ("http://host/a?token=hunter2#hunter2", "http://host/a"),
            ("http://host#hunter2", "http://host"),
            (
                "cannot get \"http://a:hunter2@h/x?s=hunter2\": x (http://h?t=hunter2)",
                "cannot get \"http://h/x\": x (http://h)",
            ),
            ("see http://u:hunter2@h/x?t=hunter2, 'http://h/?s=hunter2'; done.", "see http://h/x, 'http://h/'; done."),
            ("http://x/a,http://me:hunter2@h/b", "http://x/a,http://h/b"),
            ("o/n@main, a?b and http://host:1/team@work", "o/n@main, a?b and http://host:1/team@work"),
        ] {
            assert_eq!(without_secrets(text), shown);
            assert_eq!(has_secrets(text), text != shown);
        }
        for mark in ('!'..='~').filter(|mark| !mark.is_alphanumeric() && !"\"`<>".contains(*mark)) {
            for url in [format!("http://me:a{mark}b@host/x"), format!("http://host/x?token=a{mark}b")] {
                assert_eq!(without_secrets(&url), "http://host/x", "{url}");
            }
        }
    }

    #[test]
    fn a_server_is_its_scheme_host_and_port() {
        let hub = "http://hub.example:80";
        assert!(is_same_origin(hub, "HTTP://user:x@HUB.example/a?b"));
        for other in ["http://hub.example@evil", "http://hub.example:80@evil/", "http://hub.example.evil"] {
            assert!(!is_same_origin(hub, other), "{other}");
        }
        for other in ["https://hub.example:80", "http://hub.example:8", "hub.example", "http://evil\\@hub.example"] {
            assert!(!is_same_origin(hub, other), "{other}");
        }
    }
}
