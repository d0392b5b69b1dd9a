//! Plots as SVG: the roofline of a backend with every case as a point, and time against the size of the work.
//!
//! Colors are CSS variables, so that one drawing is right on light and dark paper. Each point has its numbers as a tooltip.
//! Trade-off: logarithmic axes only; a label may cover a point where many are close together.

use super::numbers::{percent, round_seconds, round_si, seconds_text, si};
use super::results::{BackendResults, MatrixResults, Row};
use super::text::has_roofline;
use crate::html::{add, escape};

/// Size of a plot in its own units.
const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 430.0;
/// Room for labels: left, right, top, bottom.
const MARGIN: [f64; 4] = [112.0, 16.0, 18.0, 46.0];

/// Colors of light paper and of dark paper, by CSS variable. The categorical ones are those of Okabe and Ito, which color-blind readers
/// distinguish, darkened or lightened for contrast.
pub(super) const COLORS: &str = "\
:root { --ink: #1b1b1b; --paper: #ffffff; --faint: #5c5c5c; --edge: #e3e3e3; --c0: #0072b2; --c1: #d55e00; --c2: #00805f; --c3: #b0568c;
  --c4: #8a6d00; --c5: #3a8fc4; --c6: #5c5c5c; --c7: #7048a8 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8e8e8; --paper: #161616; --faint: #b3b3b3; --edge: #333333; --c0: #4aa8e8; --c1: #ff8a3c; --c2: #2fc79b; --c3: #e590c0;
    --c4: #e0c040; --c5: #86c8f0; --c6: #a8a8a8; --c7: #b598e8 }
}
";

/// Styles of the drawings.
pub(super) const DRAWING: &str = "\
svg text { font: 12px sans-serif; fill: var(--ink); paint-order: stroke; stroke: var(--paper); stroke-width: 3px } svg .faint { fill: var(--faint) } svg .grid { stroke: var(--edge); stroke-width: 1 }
svg .peak { stroke: var(--ink); stroke-width: 1.5; fill: none } svg .line { stroke-width: 2; fill: none }
svg circle { stroke: var(--paper); stroke-width: 1 }
";

/// Subjects that share a color, and its name in the legend.
const FAMILIES: [(&str, &[&str]); 7] = [
    ("GEMM", &["gemm"]),
    ("attention", &["attention"]),
    ("norm, rotary, gated", &["norm", "rotary", "gated"]),
    ("cross entropy", &["cross_entropy"]),
    ("quantize, dequantize", &["quantize", "dequantize"]),
    ("optimizer", &["optimizer"]),
    ("training step", &["step"]),
];

/// A logarithmic axis from one value to another, over some units of the drawing.
#[derive(Clone, Copy, Debug, PartialEq)]
struct LogAxis {
    values: [f64; 2],
    place: [f64; 2],
}

impl LogAxis {
    /// Around values, with some room at both ends.
    fn around(values: impl Iterator<Item = f64>, place: [f64; 2]) -> Option<Self> {
        let values: Vec<f64> = values.filter(|value| *value > 0.0 && value.is_finite()).collect();
        let (min, max) = (values.iter().copied().reduce(f64::min)?, values.iter().copied().reduce(f64::max)?);
        Some(Self { values: [min / 1.5, max * 1.5], place })
    }

    fn at(&self, value: f64) -> f64 {
        let [min, max] = self.values.map(f64::ln);
        self.place[0] + (self.place[1] - self.place[0]) * (value.ln() - min) / (max - min)
    }

    /// Powers of ten inside; with few of them, two and five times them as well.
    fn ticks(&self) -> Vec<f64> {
        let decades = self.values.map(|value| value.log10().floor() as i32);
        let few = decades[1] - decades[0] < 3;
        let multiples: &[f64] = if few { &[1.0, 2.0, 5.0] } else { &[1.0] };
        let all = (decades[0]..=decades[1]).flat_map(|power| multiples.iter().map(move |m| m * 10f64.powi(power)));
        all.filter(|value| (self.values[0]..=self.values[1]).contains(value)).collect()
    }
}

/// Both axes of a plot.
struct Frame {
    x: LogAxis,
    y: LogAxis,
}

impl Frame {
    fn around(points: &[[f64; 2]]) -> Option<Self> {
        let [left, right, top, bottom] = MARGIN;
        Some(Self {
            x: LogAxis::around(points.iter().map(|point| point[0]), [left, WIDTH - right])?,
            y: LogAxis::around(points.iter().map(|point| point[1]), [HEIGHT - bottom, top])?,
        })
    }

    /// Grid lines and their labels.
    fn draw(&self, out: &mut String, titles: [&str; 2], label: [fn(f64) -> String; 2]) {
        let [left, right, top, bottom] = MARGIN;
        let (low, end) = (HEIGHT - bottom, WIDTH - right);
        for value in self.x.ticks() {
            let (x, text) = (self.x.at(value), label[0](value));
            add(out, format_args!("<line class=\"grid\" x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{top}\" y2=\"{low}\"/>"));
            let y = low + 16.0;
            add(
                out,
                format_args!("<text class=\"faint\" x=\"{x:.1}\" y=\"{y}\" text-anchor=\"middle\">{text}</text>\n"),
            );
        }
        for value in self.y.ticks() {
            let (y, text) = (self.y.at(value), label[1](value));
            add(out, format_args!("<line class=\"grid\" x1=\"{left}\" x2=\"{end}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>"));
            let (x, y) = (left - 6.0, y + 4.0);
            add(out, format_args!("<text class=\"faint\" x=\"{x}\" y=\"{y:.1}\" text-anchor=\"end\">{text}</text>\n"));
        }
        let (middle, y) = (0.5 * (left + end), HEIGHT - 8.0);
        add(out, format_args!("<text x=\"{middle}\" y=\"{y}\" text-anchor=\"middle\">{}</text>\n", titles[0]));
        let middle = 0.5 * (top + low);
        let turned = format!("transform=\"rotate(-90 14 {middle})\"");
        add(out, format_args!("<text x=\"14\" y=\"{middle}\" text-anchor=\"middle\" {turned}>{}</text>\n", titles[1]));
    }
}

/// The roofline of a backend; `None` without a case that has one.
pub(super) fn roofline(results: &MatrixResults, backend: &BackendResults) -> Option<String> {
    let is_ours = |row: &&Row| row.key.backend == backend.backend && has_roofline(row);
    let rows: Vec<(&Row, [f64; 2])> = results
        .rows
        .iter()
        .filter(is_ours)
        .filter_map(|row| Some((row, [row.work.flops / row.work.bytes, row.flops_per_s()?])))
        .collect();
    let mut extent: Vec<[f64; 2]> = rows.iter().map(|(_, point)| *point).collect();
    extent.extend(backend.flops_per_s.values().map(|&peak| [peak / backend.bytes_per_s, peak]));
    let frame = Frame::around(&extent).filter(|_| !rows.is_empty())?;
    let mut out = open(&format!("Roofline of {} on {}", backend.backend, backend.device));
    let flops = |value: f64| format!("{}FLOP/s", round_si(value));
    frame.draw(
        &mut out,
        ["operations per byte", "operations per second"],
        [|value| round_si(value).trim_end().to_owned(), flops],
    );
    let mut peaks: Vec<(&str, f64)> =
        backend.flops_per_s.iter().map(|(format, &peak)| (format.as_str(), peak)).collect();
    peaks.sort_by(|a, b| b.1.total_cmp(&a.1));
    let mut label_y = f64::NEG_INFINITY;
    for (format, peak) in peaks {
        // Above its line, unless the label of a higher peak is there.
        let above = frame.y.at(peak) - 5.0;
        label_y = if above - label_y < 13.0 { label_y + 13.0 } else { above };
        peak_lines(&mut out, &frame, backend.bytes_per_s, (format, peak), label_y);
    }
    for (row, [x, y]) in rows {
        let color = family(&row.key.subject);
        let share = results.roofline_share(row).map_or_else(String::new, percent);
        let (cx, cy) = (frame.x.at(x), frame.y.at(y));
        let key = escape(&row.key.to_string());
        let numbers = format!("{}FLOP/s, {share} of the roofline", si(y));
        add(
            &mut out,
            format_args!(
                "<circle cx=\"{cx:.1}\" cy=\"{cy:.1}\" r=\"5\" fill=\"var(--c{color})\"><title>{key}\n{numbers}</title></circle>\n"
            ),
        );
    }
    out.push_str("</svg>\n");
    Some(out)
}

/// The slope of the memory's rate up to a format's peak, and the peak.
fn peak_lines(out: &mut String, frame: &Frame, bytes_per_s: f64, (format, peak): (&str, f64), y: f64) {
    let ([x_min, x_max], y_min) = (frame.x.values, frame.y.values[0]);
    let start = x_min.max(y_min / bytes_per_s);
    let knee = (peak / bytes_per_s).clamp(start, x_max);
    let point = |x: f64| format!("{:.1},{:.1}", frame.x.at(x), frame.y.at((x * bytes_per_s).min(peak)));
    let points = [start, knee, x_max].map(point).join(" ");
    add(out, format_args!("<polyline class=\"peak\" points=\"{points}\"/>"));
    let x = frame.x.place[1] - 4.0;
    let text = format!("{} {}FLOP/s", escape(format), si(peak));
    add(out, format_args!("<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"end\">{text}</text>\n"));
}

/// The legend of [`roofline`], with the colors of the families that occur.
pub(super) fn legend(rows: &[Row]) -> Vec<(usize, &'static str)> {
    let occurs = |subjects: &[&str]| rows.iter().any(|row| subjects.contains(&row.key.subject.as_str()));
    FAMILIES
        .iter()
        .enumerate()
        .filter(|(_, (_, subjects))| occurs(subjects))
        .map(|(at, (name, _))| (at, *name))
        .collect()
}

fn family(subject: &str) -> usize {
    FAMILIES.iter().position(|(_, subjects)| subjects.contains(&subject)).unwrap_or(FAMILIES.len())
}

/// The roofline as a file of its own, with title, legend and colors.
pub(super) fn roofline_file(results: &MatrixResults, backend: &BackendResults) -> String {
    let drawing = roofline(results, backend).unwrap_or_else(|| open("no case was timed") + "</svg>\n");
    let inner = drawing.replacen("<svg ", &format!("<svg y=\"52\" width=\"{WIDTH}\" height=\"{HEIGHT}\" "), 1);
    let total = HEIGHT + 52.0;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {total}\">\n<style>\n{COLORS}{DRAWING}</style>\n\
         <rect width=\"{WIDTH}\" height=\"{total}\" fill=\"var(--paper)\"/>\n"
    );
    let title = format!("{} on {}, {}", backend.backend, backend.device, results.date);
    add(&mut out, format_args!("<text x=\"14\" y=\"20\">{}</text>\n", escape(&title)));
    let mut x = 14.0;
    for (color, name) in legend(&results.rows) {
        add(&mut out, format_args!("<circle cx=\"{}\" cy=\"38\" r=\"5\" fill=\"var(--c{color})\"/>", x + 5.0));
        add(&mut out, format_args!("<text x=\"{}\" y=\"42\">{name}</text>\n", x + 14.0));
        // Capitals are wider.
        let capitals = name.chars().filter(char::is_ascii_uppercase).count();
        x += 28.0 + 6.4 * name.len() as f64 + 4.0 * capitals as f64;
    }
    out + &inner + "</svg>\n"
}

/// A line of a plot: its name and its points, ascending.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Series {
    pub name: String,
    pub points: Vec<[f64; 2]>,
}

/// Time against a size.
pub(super) fn cost(title: &str, axis: &str, series: &[Series]) -> Option<String> {
    let points: Vec<[f64; 2]> = series.iter().flat_map(|series| series.points.iter().copied()).collect();
    let frame = Frame::around(&points)?;
    let mut out = open(title);
    frame.draw(&mut out, [axis, "time"], [|value| round_si(value).trim_end().to_owned(), round_seconds]);
    for (index, Series { name, points }) in series.iter().enumerate() {
        let color = index % 8;
        let places: Vec<String> =
            points.iter().map(|[x, y]| format!("{:.1},{:.1}", frame.x.at(*x), frame.y.at(*y))).collect();
        // A second round of the colors is dashed.
        let dash = if index >= 8 { " stroke-dasharray=\"5 4\"" } else { "" };
        add(
            &mut out,
            format_args!(
                "<polyline class=\"line\" stroke=\"var(--c{color})\"{dash} points=\"{}\"/>\n",
                places.join(" ")
            ),
        );
        for ([x, y], place) in points.iter().zip(&places) {
            let (cx, cy) = place.split_once(',').expect("a pair");
            let text = format!("{}\n{}: {}", escape(name), si(*x).trim_end(), seconds_text(*y));
            add(
                &mut out,
                format_args!(
                    "<circle cx=\"{cx}\" cy=\"{cy}\" r=\"4\" fill=\"var(--c{color})\"><title>{text}</title></circle>\n"
                ),
            );
        }
    }
    out.push_str("</svg>\n");
    Some(out)
}

fn open(title: &str) -> String {
    let title = escape(title);
    format!("<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{title}\">\n")
}

#[cfg(test)]
mod tests {
    use super::super::results::tests::results;
    use super::*;

    #[test]
    fn equal_ratios_are_equal_distances() {
        let axis = LogAxis { values: [1.0, 1000.0], place: [0.0, 300.0] };
        assert!((axis.at(10.0) - 100.0).abs() < 1e-9 && (axis.at(100.0) - 200.0).abs() < 1e-9);
        assert_eq!(axis.ticks(), [1.0, 10.0, 100.0, 1000.0]);
        assert_eq!(LogAxis { values: [1.5, 30.0], ..axis }.ticks(), [2.0, 5.0, 10.0, 20.0]);
        assert_eq!(LogAxis::around([0.0, f64::NAN].into_iter(), [0.0, 1.0]), None);
    }

    #[test]
    fn every_timed_case_is_a_point_of_its_backend() {
        let results = results();
        let of = |index: usize| roofline(&results, &results.backends[index]).unwrap();
        assert_eq!((of(0).matches("<circle").count(), of(1).matches("<circle").count()), (3, 1));
        assert!(of(0).contains("f32 100 GFLOP/s") && of(0).contains("a &lt;b&gt; &amp; c"), "{}", of(0));
    }

    #[test]
    fn a_file_has_its_colors_and_its_legend() {
        let results = results();
        let file = roofline_file(&results, &results.backends[0]);
        assert!(
            file.starts_with("<svg xmlns") && file.contains("prefers-color-scheme: dark") && file.contains(">GEMM<")
        );
        assert_eq!(file.matches("<svg").count(), file.matches("</svg>").count());
    }
}
