//! Other programs next to ours, as text: their time over our time.
//!
//! Trade-off: medians only.

use super::numbers::{seconds_text, si};
use super::peer_results::{MEMORY, PeerResults, PeerRow};
use super::results::MatrixResults;
use crate::html::{add, escape};

/// Cases with our time, the other's, and the other's over ours.
fn ratios<'a>(peers: &'a PeerResults, results: &'a MatrixResults) -> impl Iterator<Item = (&'a PeerRow, f64, f64)> {
    peers.rows.iter().filter_map(|peer| {
        let ours = results.rows.iter().find(|row| row.key == peer.key)?.timing()?.seconds.median;
        Some((peer, ours, peer.seconds.median / ours))
    })
}

/// PyTorch's peaks over ours.
fn peak_line(peers: &PeerResults, results: &MatrixResults) -> Option<String> {
    let backend = results.compared_backend()?;
    let ratio = |(name, &theirs): (&String, &f64)| {
        let (ours, unit) = match backend.flops_per_s.get(name) {
            Some(&ours) => (ours, "FLOP/s"),
            None => (Some(backend.bytes_per_s).filter(|_| name == MEMORY)?, "B/s"),
        };
        Some(format!("{name} {:.2} ({}{unit}, ours {}{unit})", theirs / ours, si(theirs), si(ours)))
    };
    let ratios: Vec<String> = peers.peaks.iter().filter_map(ratio).collect();
    (!ratios.is_empty()).then(|| format!("PyTorch's peaks over ours on {}: {}.", backend.backend, ratios.join(", ")))
}

fn introduction(peers: &PeerResults, results: &MatrixResults) -> Vec<String> {
    let versions: Vec<String> = peers.versions.iter().map(|(name, version)| format!("{name} {version}")).collect();
    let found = (!versions.is_empty()).then(|| format!("Other programs on {}: {}.", peers.device, versions.join(", ")));
    found.into_iter().chain(peak_line(peers, results)).chain(peers.notes.iter().cloned()).collect()
}

/// A line about a case that has just run.
pub(super) fn progress(row: &PeerRow) -> String {
    format!("{}: {} {}", row.key, row.peer, seconds_text(row.seconds.median))
}

/// For the page: bars of the other program's time over ours, with a line at 1.
pub(super) fn peer_html(peers: &PeerResults, results: &MatrixResults) -> String {
    let mut out = String::from("<ul>\n");
    for line in introduction(peers, results) {
        add(&mut out, format_args!("<li>{}</li>\n", escape(&line)));
    }
    out.push_str("</ul>\n<p>Its time over ours: above 1 Firebrick is faster. Bars are logarithmic, from a tenth to ten times.</p>\n");
    out.push_str("<div class=\"bars\">\n");
    for (peer, ours, ratio) in ratios(peers, results) {
        // A tenth is the left end, ten times the right one, 1 the middle.
        let end = 50.0 + 50.0 * ratio.log10().clamp(-1.0, 1.0);
        let (start, width) = (end.min(50.0), (end - 50.0).abs());
        let color = usize::from(ratio < 1.0);
        let bar = format!(
            "<svg><rect x=\"{start:.1}%\" width=\"{width:.1}%\" height=\"100%\" fill=\"var(--c{color})\"/>\
             <rect x=\"50%\" width=\"1\" height=\"100%\" fill=\"var(--ink)\"/></svg>"
        );
        let times = format!("{ratio:.2} ({} / {})", seconds_text(peer.seconds.median), seconds_text(ours));
        add(&mut out, format_args!("<div class=\"case\">{}</div>\n", escape(&peer.key.to_string())));
        add(&mut out, format_args!("<span>{}</span>{bar}<span>{times}</span>\n", escape(&peer.peer)));
    }
    out.push_str("</div>\n");
    out
}

/// For a terminal.
pub(super) fn peer_text(peers: &PeerResults, results: &MatrixResults) -> String {
    let mut out = introduction(peers, results).join("\n") + "\n";
    for (peer, ours, ratio) in ratios(peers, results) {
        let (theirs, ours) = (seconds_text(peer.seconds.median), seconds_text(ours));
        add(&mut out, format_args!("{ratio:>6.2} times our time: {} {theirs}, ours {ours}  {}\n", peer.peer, peer.key));
    }
    out
}

/// For a file.
pub(super) fn peer_markdown(peers: &PeerResults, results: &MatrixResults) -> String {
    let mut out: String = introduction(peers, results).iter().map(|line| format!("- {line}\n")).collect();
    out.push_str("\n| case | program | its time | our time | its time / ours |\n|---|---|---:|---:|---:|\n");
    for (peer, ours, ratio) in ratios(peers, results) {
        let (theirs, ours) = (seconds_text(peer.seconds.median), seconds_text(ours));
        let key = peer.key.to_string().replace('|', "/");
        add(&mut out, format_args!("| {key} | {} | {theirs} | {ours} | {ratio:.2} |\n", peer.peer));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::super::super::spread::Spread;
    use super::super::results::tests::results;
    use super::*;

    #[test]
    fn peaks_of_a_name_that_both_have_are_compared() {
        let results = results();
        let peaks = [("f32".to_owned(), 9e10), (MEMORY.to_owned(), 1.1e10), ("bf16".to_owned(), 1.0)].into();
        let line = peak_line(&PeerResults { peaks, ..PeerResults::default() }, &results).unwrap();
        assert!(line.contains("on flex: f32 0.90 (90.0 GFLOP/s, ours 100 GFLOP/s)"), "{line}");
        assert!(line.ends_with("memory 1.10 (11.0 GB/s, ours 10.0 GB/s)."), "{line}");
        assert_eq!(peak_line(&PeerResults::default(), &results), None);
    }

    #[test]
    fn ratios_are_their_time_over_ours() {
        let results = results();
        let row =
            PeerRow { key: results.rows[0].key.clone(), peer: "pytorch".to_owned(), seconds: Spread::of(vec![2e-2]) };
        let peers = PeerResults { rows: vec![row], notes: vec!["no unsloth".to_owned()], ..PeerResults::default() };
        assert!(peer_text(&peers, &results).contains("2.00 times our time: pytorch 20.0 ms, ours 10.0 ms"));
        assert!(peer_text(&peers, &results).contains("no unsloth"));
        let html = peer_html(&peers, &results);
        assert!(html.contains("<rect x=\"50.0%\" width=\"15.1%\"") && html.contains("a &lt;b&gt; &amp; c"), "{html}");
        assert!(html.contains("2.00 (20.0 ms / 10.0 ms)") && html.contains("<li>no unsloth</li>"), "{html}");
        assert!(peer_markdown(&peers, &results).contains("| pytorch | 20.0 ms | 10.0 ms | 2.00 |"));
    }
}
