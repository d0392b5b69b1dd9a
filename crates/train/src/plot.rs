//! Plots as SVG: lines, points, rooflines and planned values, over linear or logarithmic axes.
//!
//! Colors are CSS variables, so one drawing fits light and dark backgrounds. A long line is drawn as the mean of equal parts with a band from the
//! lowest to the highest value of each, so that no spike is lost.

use firebrick_hwprofile::human::grouped;

/// Colors and rules of drawings, and the colors of the page around them. The lines have the colors of Okabe and Ito, which color-blind readers can
/// distinguish, darkened or lightened for contrast.
pub const STYLE: &str = "\
:root { color-scheme: light dark; --ink: #1b1b1b; --paper: #ffffff; --faint: #5c5c5c; --edge: #e6e6e6; --bar: #5b8def; --plan: #8a8a8a;
  --c0: #0072b2; --c1: #d55e00; --c2: #00805f; --c3: #b0568c; --c4: #8a6d00; --c5: #3a8fc4; --c6: #5c5c5c; --c7: #7048a8 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8e8e8; --paper: #161616; --faint: #b3b3b3; --edge: #303030; --bar: #4a74c9; --plan: #8f8f8f; --c0: #4aa8e8;
    --c1: #ff8a3c; --c2: #2fc79b; --c3: #e590c0; --c4: #e0c040; --c5: #86c8f0; --c6: #a8a8a8; --c7: #b598e8 } }
figure { margin: 0; min-width: 0 } figcaption { font-weight: bold } figcaption span { font-weight: normal; color: var(--faint) }
svg { display: block; width: 100%; height: auto; font: 11px sans-serif }
svg text { fill: var(--faint); paint-order: stroke; stroke: var(--paper); stroke-width: 3px } svg .name { fill: var(--ink) }
.grid { stroke: var(--edge) } .axis { stroke: var(--faint) } .line { fill: none; stroke-width: 1.6; stroke-linejoin: round }
.dot { stroke: var(--paper) } .peak { fill: none; stroke: var(--ink); stroke-width: 1.5 } .band { opacity: 0.18; stroke: none }
.planned { fill: var(--plan); opacity: 0.22 } .limit { stroke: var(--plan); stroke-dasharray: 5 4 }
.key { display: inline-block; margin-right: 1rem; white-space: nowrap; color: var(--faint) }
.key::before { content: \"\"; display: inline-block; width: 0.9rem; height: 0.2rem; margin: 0 0.35rem 0.2rem 0; background: var(--c) }
.dashed::before { height: 0; background: none; border-top: 0.15rem dashed var(--c) } .area::before { height: 0.7rem; opacity: 0.22 }
";

/// Maximum points per line; more are averaged.
const MAX_POINTS: usize = 400;
/// Lines with at most this many points get dots, such as evaluations between steps.
const DOTTED: usize = 40;
/// Number of colors before lines are dashed.
const COLORS: usize = 8;
/// The color of planned values.
const PLAN: &str = "plan";
/// Margins to the right of a drawing, above it and below it.
const RIGHT: f64 = 12.0;
const TOP: f64 = 12.0;
const BOTTOM: f64 = 34.0;

/// The mapping from values to places.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    /// Equal differences are equal distances.
    Linear,
    /// The same, with 0 on the axis.
    FromZero,
    /// Equal ratios are equal distances.
    Log,
}

/// An axis.
#[derive(Clone, Debug)]
pub struct Axis {
    /// The quantity it shows.
    pub title: String,
    /// How values become places.
    pub scale: Scale,
    /// Writes the value of a tick or a point.
    pub label: fn(f64) -> String,
}

/// Points of one color.
#[derive(Clone, Debug)]
pub struct Series {
    /// The name in the key.
    pub name: String,
    /// The points; ascending if a line joins them.
    pub points: Vec<[f64; 2]>,
    /// The tooltip of each point. If there are none, a line joins the points, and their tooltips are name and value.
    pub notes: Vec<String>,
}

/// A value or curve that the points are compared with.
#[derive(Clone, Debug, PartialEq)]
pub enum Reference {
    /// A planned value.
    Limit(f64),
    /// The range between two planned values.
    Between(f64, f64),
    /// At most `slope` times x, and at most `peak`: the lines of a roofline.
    Roofline {
        /// Written above the peak.
        name: String,
        /// Values per x.
        slope: f64,
        /// The highest value.
        peak: f64,
    },
}

/// One plot.
#[derive(Clone, Debug)]
pub struct Plot {
    /// The quantity it shows.
    pub title: String,
    /// The unit of the values; may be empty.
    pub unit: String,
    /// Width and height, in units of 1/11 of the letter size.
    pub size: [f64; 2],
    /// The horizontal axis.
    pub x: Axis,
    /// The vertical axis. Its title is the plot's.
    pub y: Axis,
    /// Series of points; the index in this list determines the color.
    pub series: Vec<Series>,
    /// What the series are compared with.
    pub references: Vec<Reference>,
}

impl Plot {
    /// Returns drawing, caption and key; empty if there is no point.
    pub fn figure(&self) -> String {
        let drawing = self.svg();
        if drawing.is_empty() {
            return drawing;
        }
        let unit = if self.unit.is_empty() { String::new() } else { format!(", {}", self.unit) };
        // The key shows planned values as the drawing does.
        let is_area = self.references.iter().any(|one| matches!(one, Reference::Between(..)));
        let planned = if is_area { " area" } else { " dashed" };
        let key = |(color, name): (String, &str)| {
            let class = if color == PLAN { planned } else { "" };
            format!("<span class=\"key{class}\" style=\"--c: var(--{color})\">{}</span>", escape(name))
        };
        let keys: String = self.keys().into_iter().map(key).collect();
        let (title, unit) = (escape(&self.title), escape(&unit));
        format!("<figure><figcaption>{title}<span>{unit}</span></figcaption>\n{keys}\n{drawing}</figure>\n")
    }

    /// Returns the drawing as a separate file, with title, key and colors.
    pub fn file(&self) -> String {
        let [width, height] = self.size;
        let title = escape(&format!("{}, {}", self.title, self.unit));
        let mut out = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {0}\">\n<style>\n{STYLE}</style>\n\
             <rect width=\"{width}\" height=\"{0}\" fill=\"var(--paper)\"/>\n<text class=\"name\" x=\"14\" y=\"20\">{title}</text>\n",
            height + 52.0
        );
        let mut x = 14.0;
        for (color, name) in self.keys() {
            let (dot, text) = (x + 5.0, x + 14.0);
            out += &format!("<circle cx=\"{dot}\" cy=\"38\" r=\"5\" fill=\"var(--{color})\"/>");
            out += &format!("<text class=\"name\" x=\"{text}\" y=\"42\">{}</text>\n", escape(name));
            x += 28.0 + 6.4 * name.chars().count() as f64;
        }
        let place = format!("<svg y=\"52\" width=\"{width}\" height=\"{height}\" ");
        out + &self.svg().replacen("<svg ", &place, 1) + "</svg>\n"
    }

    /// Returns colors and names for the key: the series that the title does not name, and the planned values.
    fn keys(&self) -> Vec<(String, &str)> {
        let is_named = |series: &Series| !series.points.is_empty() && series.name != self.title;
        let named = self.series.iter().enumerate().filter(|(_, series)| is_named(series));
        let lines = named.map(|(index, series)| (format!("c{}", index % COLORS), series.name.as_str()));
        let is_planned = self.references.iter().any(|one| !matches!(one, Reference::Roofline { .. }));
        lines.chain(is_planned.then(|| (PLAN.to_owned(), "planned"))).collect()
    }

    /// Returns the drawing alone; empty if there is no point.
    pub fn svg(&self) -> String {
        let Some(frame) = Frame::of(self) else { return String::new() };
        let ([width, height], title) = (self.size, escape(&self.title));
        let mut out = format!("<svg viewBox=\"0 0 {width} {height}\" role=\"img\" aria-label=\"{title}\">\n");
        self.axes(&mut out, &frame);
        self.draw_references(&mut out, &frame);
        for (index, series) in self.series.iter().enumerate().filter(|(_, series)| !series.points.is_empty()) {
            if series.notes.is_empty() {
                self.line(&mut out, &frame, index, series);
            } else {
                for (point, note) in series.points.iter().zip(&series.notes) {
                    dot(&mut out, frame.place(*point), 5.0, index, note);
                }
            }
        }
        out + "</svg>\n"
    }

    fn axes(&self, out: &mut String, Frame { x, y }: &Frame) {
        let ([left, right], [bottom, top]) = (x.place, y.place);
        for tick in y.ticks(5.0) {
            let (at, label) = (y.at(tick), escape(&(self.y.label)(tick)));
            let (before, below) = (left - 6.0, at + 4.0);
            *out += &format!("<line class=\"grid\" x1=\"{left:.1}\" y1=\"{at:.1}\" x2=\"{right}\" y2=\"{at:.1}\"/>");
            *out += &format!("<text x=\"{before:.1}\" y=\"{below:.1}\" text-anchor=\"end\">{label}</text>\n");
        }
        // A linear axis shows steps, which are whole numbers.
        for tick in x.ticks(6.0).into_iter().filter(|tick| x.is_log || tick.fract() == 0.0) {
            let (at, label) = (x.at(tick), escape(&(self.x.label)(tick)));
            *out += &format!("<line class=\"grid\" x1=\"{at:.1}\" y1=\"{bottom}\" x2=\"{at:.1}\" y2=\"{top}\"/>");
            let below = bottom + 15.0;
            *out += &format!("<text x=\"{at:.1}\" y=\"{below}\" text-anchor=\"middle\">{label}</text>\n");
        }
        *out += &format!("<line class=\"axis\" x1=\"{left:.1}\" y1=\"{bottom}\" x2=\"{right}\" y2=\"{bottom}\"/>");
        let (low, title) = (self.size[1] - 4.0, escape(&self.x.title));
        *out += &format!("<text x=\"{right}\" y=\"{low}\" text-anchor=\"end\">{title}</text>\n");
    }

    fn draw_references(&self, out: &mut String, frame: &Frame) {
        let [left, right] = frame.x.place;
        let label = |value| escape(&(self.y.label)(value));
        let mut label_y = f64::NEG_INFINITY;
        for reference in &self.references {
            match reference {
                Reference::Limit(value) => {
                    let (y, value) = (frame.y.at(*value), label(*value));
                    *out +=
                        &format!("<line class=\"limit\" x1=\"{left:.1}\" y1=\"{y:.1}\" x2=\"{right}\" y2=\"{y:.1}\">");
                    *out += &format!("<title>planned: {value}</title></line>\n");
                }
                Reference::Between(from, to) => {
                    let (y, width) = (frame.y.at(*to), right - left);
                    let (height, from, to) = (frame.y.at(*from) - y, label(*from), label(*to));
                    *out += &format!("<rect class=\"planned\" x=\"{left:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" ");
                    *out += &format!("height=\"{height:.1}\"><title>planned: {from} to {to}</title></rect>\n");
                }
                Reference::Roofline { name, slope, peak } => {
                    let ([x_min, x_max], y_min) = (frame.x.values, frame.y.values[0]);
                    let start = x_min.max(y_min / slope);
                    let knee = (peak / slope).clamp(start, x_max);
                    let points = [start, knee, x_max].map(|x| pair(frame.place([x, (x * slope).min(*peak)]))).join(" ");
                    // The label is above its line, unless the label of a higher peak is there.
                    let above = frame.y.at(*peak) - 5.0;
                    label_y = if above - label_y < 13.0 { label_y + 13.0 } else { above };
                    let (x, name) = (right - 4.0, escape(name));
                    *out += &format!("<polyline class=\"peak\" points=\"{points}\"/>");
                    *out += &format!(
                        "<text class=\"name\" x=\"{x}\" y=\"{label_y:.1}\" text-anchor=\"end\">{name}</text>\n"
                    );
                }
            }
        }
    }

    fn line(&self, out: &mut String, frame: &Frame, index: usize, series: &Series) {
        let (parts, color) = (parts(&series.points), index % COLORS);
        let place = |x, y| pair(frame.place([x, y]));
        if parts.iter().any(|part| part.high > part.low) {
            let over = parts.iter().map(|part| place(part.x, part.high));
            let under = parts.iter().rev().map(|part| place(part.x, part.low));
            let outline = over.chain(under).collect::<Vec<_>>().join(" ");
            *out += &format!("<polygon class=\"band\" fill=\"var(--c{color})\" points=\"{outline}\"/>\n");
        }
        let (name, label) = (&series.name, self.y.label);
        if parts.len() > 1 {
            let points = parts.iter().map(|part| place(part.x, part.mean)).collect::<Vec<_>>().join(" ");
            let dash = if index >= COLORS { " stroke-dasharray=\"5 4\"" } else { "" };
            let last = escape(&format!("{name}, last {}", label(parts[parts.len() - 1].mean)));
            *out += &format!("<polyline class=\"line\" stroke=\"var(--c{color})\"{dash} points=\"{points}\">");
            *out += &format!("<title>{last}</title></polyline>\n");
        }
        if parts.len() <= DOTTED {
            for Part { x, mean, .. } in parts {
                let note = format!("{name}, {}: {}", (self.x.label)(x), label(mean));
                dot(out, frame.place([x, mean]), 3.0, index, &note);
            }
        }
    }
}

fn dot(out: &mut String, [x, y]: [f64; 2], radius: f64, index: usize, note: &str) {
    let (color, note) = (index % COLORS, escape(note));
    *out += &format!("<circle class=\"dot\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"{radius}\" fill=\"var(--c{color})\">");
    *out += &format!("<title>{note}</title></circle>\n");
}

fn pair([x, y]: [f64; 2]) -> String {
    format!("{x:.1},{y:.1}")
}

/// Neighboring points combined: the middle of their places, and the mean, lowest and highest value.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Part {
    x: f64,
    mean: f64,
    low: f64,
    high: f64,
}

fn parts(points: &[[f64; 2]]) -> Vec<Part> {
    let part = |points: &[[f64; 2]]| {
        let values = points.iter().map(|point| point[1]);
        Part {
            x: (points[0][0] + points[points.len() - 1][0]) / 2.0,
            mean: values.clone().sum::<f64>() / points.len() as f64,
            low: values.clone().fold(f64::INFINITY, f64::min),
            high: values.fold(f64::NEG_INFINITY, f64::max),
        }
    };
    points.chunks(points.len().div_ceil(MAX_POINTS).max(1)).map(part).collect()
}

/// Values along one axis, and their places in the drawing.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Range {
    is_log: bool,
    values: [f64; 2],
    place: [f64; 2],
}

struct Frame {
    x: Range,
    y: Range,
}

impl Frame {
    /// Creates the axes around all points and references; `None` without a point.
    fn of(plot: &Plot) -> Option<Self> {
        let points: Vec<[f64; 2]> = plot.series.iter().flat_map(|series| series.points.iter().copied()).collect();
        if points.is_empty() {
            return None;
        }
        let (mut xs, mut ys): (Vec<f64>, Vec<f64>) = points.iter().map(|[x, y]| (*x, *y)).unzip();
        let [low, high] = ends(&ys)?;
        for reference in &plot.references {
            match reference {
                Reference::Limit(value) => ys.push(*value),
                // A planned range far from the measurements would squeeze the line, so it extends to three times the measured range at most.
                Reference::Between(from, to) => ys.extend([from.max(low / 3.0), to.min(high * 3.0)]),
                Reference::Roofline { slope, peak, .. } => {
                    xs.push(peak / slope);
                    ys.push(*peak);
                }
            }
        }
        let [width, height] = plot.size;
        let mut y = Range::around(&ys, plot.y.scale, [height - BOTTOM, TOP])?;
        let longest = y.ticks(5.0).into_iter().map(|tick| (plot.y.label)(tick).chars().count()).max().unwrap_or(0);
        // Coordinates are written to tenths of a unit, and a point must not be outside by one.
        y.place = y.place.map(f64::round);
        let left = (16.0 + 6.2 * longest as f64).round();
        Some(Self { x: Range::around(&xs, plot.x.scale, [left, width - RIGHT])?, y })
    }

    fn place(&self, [x, y]: [f64; 2]) -> [f64; 2] {
        [self.x.at(x), self.y.at(y)]
    }
}

/// Returns the minimum and the maximum of the finite values.
fn ends(values: &[f64]) -> Option<[f64; 2]> {
    let finite = || values.iter().copied().filter(|value| value.is_finite());
    Some([finite().reduce(f64::min)?, finite().reduce(f64::max)?])
}

impl Range {
    /// Creates a range around values, with some room at the ends.
    fn around(values: &[f64], scale: Scale, place: [f64; 2]) -> Option<Self> {
        if scale == Scale::Log {
            let positive: Vec<f64> = values.iter().copied().filter(|value| *value > 0.0).collect();
            let [low, high] = ends(&positive)?;
            return Some(Self { is_log: true, values: [low / 1.5, high * 1.5], place });
        }
        let [mut low, mut high] = ends(values)?;
        let is_horizontal = place[0] < place[1];
        if scale == Scale::FromZero {
            (low, high) = (low.min(0.0), high.max(0.0));
        }
        let margin = match high > low {
            _ if is_horizontal => 0.0,
            true => 0.05 * (high - low),
            false => high.abs().max(1e-12) * 0.1,
        };
        let low = if scale == Scale::FromZero && low == 0.0 { 0.0 } else { low - margin };
        Some(Self { is_log: false, values: [low, high + margin], place })
    }

    fn at(&self, value: f64) -> f64 {
        let scaled = |value: f64| if self.is_log { value.ln() } else { value };
        let [low, high] = self.values.map(scaled);
        let share = if high > low { ((scaled(value) - low) / (high - low)).clamp(0.0, 1.0) } else { 0.5 };
        self.place[0] + share * (self.place[1] - self.place[0])
    }

    /// Returns powers of ten, and if there are few, two and five times them as well; on a linear axis about `count` multiples of 1, 2 or 5 times a
    /// power of ten.
    fn ticks(&self, count: f64) -> Vec<f64> {
        let [low, high] = self.values;
        if self.is_log {
            let [first, last] = self.values.map(|value| value.log10().floor() as i32);
            let multiples: &[f64] = if last - first < 3 { &[1.0, 2.0, 5.0] } else { &[1.0] };
            let all = (first..=last).flat_map(|power| multiples.iter().map(move |times| times * 10f64.powi(power)));
            return all.filter(|value| (low..=high).contains(value)).collect();
        }
        let rough = (high - low) / count;
        if rough.is_nan() || rough <= 0.0 {
            return vec![low];
        }
        let power = 10f64.powf(rough.log10().floor());
        let factor = [1.0, 2.0, 5.0, 10.0].into_iter().find(|factor| factor * power >= rough).unwrap_or(10.0);
        let every = factor * power;
        let first = (low / every).ceil() as i64;
        (first..).map(|index| index as f64 * every).take_while(|tick| *tick <= high + 1e-9 * every).collect()
    }
}

/// Formats `1.5k`, `2e-4`: short enough for an axis.
pub fn short(value: f64) -> String {
    let trimmed = |text: String| {
        if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
    };
    match value.abs() {
        0.0 => "0".to_owned(),
        v if !(1e-3..1e9).contains(&v) => format!("{value:.1e}").replace(".0e", "e"),
        v if v < 10.0 => trimmed(format!("{value:.4}")),
        v if v < 1e4 => grouped(&trimmed(format!("{value:.1}"))),
        v if v < 1e6 => trimmed(format!("{:.1}", value / 1e3)) + "k",
        _ => trimmed(format!("{:.1}", value / 1e6)) + "M",
    }
}

/// Escapes a text, so that a browser shows it instead of interpreting it, and so does a terminal that prints a page.
pub(crate) fn escape(text: &str) -> String {
    visible(text).replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// Names control characters and those that reorder text, so that a terminal shows a text instead of interpreting it.
pub(crate) fn visible(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '\n' | '\t' => out.push(character),
            _ if firebrick_trainer::console::is_hidden(character) => out.extend(character.escape_default()),
            _ => out.push(character),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plot(scale: Scale, points: Vec<[f64; 2]>, references: Vec<Reference>) -> Plot {
        let axis = |title: &str, scale| Axis { title: title.to_owned(), scale, label: short };
        let series = vec![Series { name: "a<b".to_owned(), points, notes: Vec::new() }];
        let x = axis("step", if scale == Scale::Log { scale } else { Scale::Linear });
        let (title, unit) = ("speed".to_owned(), "tokens/s".to_owned());
        Plot { title, unit, size: [560.0, 240.0], x, y: axis("", scale), series, references }
    }

    #[test]
    fn long_series_are_averaged_and_keep_their_extremes() {
        let mut points: Vec<[f64; 2]> = (0..4000).map(|step| [f64::from(step), 1.0]).collect();
        points[1234][1] = 9.0;
        let parts = parts(&points);
        assert_eq!(parts.len(), 400);
        assert_eq!(parts.iter().map(|part| part.high).fold(0.0, f64::max), 9.0);
        let mean = parts.iter().map(|part| part.mean).sum::<f64>() / 400.0;
        assert!((mean - 1.002).abs() < 1e-9, "{mean}");
        assert!(plot(Scale::FromZero, points, Vec::new()).svg().contains("class=\"band\""));
    }

    #[test]
    fn ticks_are_round_and_inside() {
        let ticks = |is_log, values| Range { is_log, values, place: [0.0, 300.0] }.ticks(5.0);
        assert_eq!(ticks(false, [0.0, 10.0]), [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]);
        assert_eq!(ticks(false, [3.0, 3.0]), [3.0]);
        assert_eq!(ticks(true, [1.0, 1000.0]), [1.0, 10.0, 100.0, 1000.0]);
        assert_eq!(ticks(true, [1.5, 30.0]), [2.0, 5.0, 10.0, 20.0]);
    }

    #[test]
    fn equal_ratios_are_equal_distances() {
        let axis = Range { is_log: true, values: [1.0, 1000.0], place: [0.0, 300.0] };
        assert!((axis.at(10.0) - 100.0).abs() < 1e-9 && (axis.at(100.0) - 200.0).abs() < 1e-9);
        assert_eq!(Range::around(&[0.0, f64::NAN], Scale::Log, [0.0, 1.0]), None);
    }

    #[test]
    fn axis_labels_are_short() {
        let labels = [0.0, 2e-4, 0.25, 1.5, 950.0, 1500.0, 16_280.0, 2.5e6].map(short);
        assert_eq!(labels, ["0", "2e-4", "0.25", "1.5", "950", "1,500", "16.3k", "2.5M"]);
    }

    #[test]
    fn every_point_is_inside_of_the_drawing() {
        let roofline = Reference::Roofline { name: "<f32>".to_owned(), slope: 10.0, peak: 40.0 };
        for (scale, references) in [
            (Scale::FromZero, Vec::new()),
            (Scale::Linear, vec![Reference::Limit(50.0)]),
            (Scale::FromZero, vec![Reference::Between(1.0, 1e9)]),
            (Scale::Log, vec![roofline]),
        ] {
            let plot = plot(scale, vec![[1.0, 10.0], [2.0, 30.0], [3.0, 20.0]], references);
            let (svg, Frame { x, y }) = (plot.svg(), Frame::of(&plot).unwrap());
            let mut count = 0;
            for points in svg.split("points=\"").skip(1).map(|rest| rest.split('"').next().unwrap()) {
                for pair in points.split(' ') {
                    let (left, top) = pair.split_once(',').unwrap();
                    let (left, top): (f64, f64) = (left.parse().unwrap(), top.parse().unwrap());
                    assert!(
                        (x.place[0]..=x.place[1]).contains(&left) && (y.place[1]..=y.place[0]).contains(&top),
                        "{pair}"
                    );
                    count += 1;
                }
            }
            assert!(count >= 3, "{svg}");
            assert!(plot.figure().contains("a&lt;b") && !plot.figure().contains("a<b") && !svg.contains("<f32>"));
            let is_planned = plot.references.iter().any(|one| !matches!(one, Reference::Roofline { .. }));
            assert_eq!(plot.figure().contains("planned"), is_planned);
            for (class, drawn) in [("key dashed", "class=\"limit\""), ("key area", "class=\"planned\"")] {
                assert_eq!(plot.figure().contains(class), svg.contains(drawn), "{class}");
            }
        }
    }

    #[test]
    fn nothing_to_draw_is_no_figure() {
        assert_eq!(plot(Scale::FromZero, Vec::new(), vec![Reference::Limit(1.0)]).figure(), "");
        assert!(plot(Scale::FromZero, vec![[7.0, 7.0]], Vec::new()).svg().contains("<circle"));
    }

    #[test]
    fn a_file_has_its_colors_its_title_and_its_key() {
        let mut plot = plot(Scale::Log, vec![[1.0, 10.0], [2.0, 30.0]], Vec::new());
        let notes = vec!["one <note>".to_owned()];
        plot.series.push(Series { name: "GEMM".to_owned(), points: vec![[1.0, 5.0]], notes });
        let file = plot.file();
        assert!(file.starts_with("<svg xmlns") && file.contains("prefers-color-scheme: dark"), "{file}");
        assert!(
            file.contains(">GEMM<") && file.contains(">speed, tokens/s<") && file.contains("one &lt;note&gt;"),
            "{file}"
        );
        assert_eq!(file.matches("<svg").count(), file.matches("</svg>").count());
    }
}
