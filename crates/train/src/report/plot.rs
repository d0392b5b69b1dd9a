//! Lines over steps as inline SVG.
//!
//! A long series is drawn as the mean of equal parts with a band from the lowest to the highest value of each, so that no spike is lost.
//! Trade-off: fixed proportions; a narrow window shows smaller letters.

use crate::html::{add, escape};

/// A page's rules for plots: colors are those of the reader's mode.
pub(super) const STYLE: &str = "\
:root { --line0: #2563c9; --line1: #c2410c; --line2: #15803d; --line3: #7e22ce; --line4: #0e7490; --line5: #a16207; --plan: #8a8a8a }
@media (prefers-color-scheme: dark) { :root { --line0: #7aa7f5; --line1: #f59e6b; --line2: #6ccb8b; --line3: #c79bf0; --line4: #62c3d6;
  --line5: #d8b45a; --plan: #8f8f8f } }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(26rem, 100%), 1fr)); gap: 1.2rem 1.6rem }
figure { margin: 0; min-width: 0 } figcaption { font-weight: bold } figcaption span { font-weight: normal; color: var(--faint) }
svg { display: block; width: 100%; height: auto; font: 11px sans-serif } svg text { fill: var(--faint) }
.grid { stroke: var(--edge) } .axis { stroke: var(--faint) } .line { fill: none; stroke-width: 1.6; stroke-linejoin: round }
.band { opacity: 0.18; stroke: none } .planned { fill: var(--plan); opacity: 0.22 } .limit { stroke: var(--plan); stroke-dasharray: 5 4 }
.key { display: inline-block; margin-right: 1rem; white-space: nowrap; color: var(--faint) }
.key::before { content: \"\"; display: inline-block; width: 0.9rem; height: 0.2rem; margin: 0 0.35rem 0.2rem 0; background: var(--c) }
";

/// Points per line, at most; more are averaged.
const MAX_POINTS: usize = 400;

/// Lines of so few points have dots, as evaluations between steps.
const DOTTED: usize = 40;

const WIDTH: f64 = 560.0;
const HEIGHT: f64 = 240.0;
const LEFT: f64 = 62.0;
const RIGHT: f64 = 12.0;
const TOP: f64 = 10.0;
const BOTTOM: f64 = 34.0;

/// A named line.
#[derive(Clone, Debug)]
pub(super) struct Series {
    pub(super) name: String,
    pub(super) points: Vec<(f64, f64)>,
}

/// What a plan promised.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Planned {
    Nothing,
    /// A value.
    Limit(f64),
    /// From one value to another.
    Between(f64, f64),
}

/// One plot.
#[derive(Clone, Debug)]
pub(super) struct Plot {
    pub(super) title: &'static str,
    pub(super) unit: &'static str,
    pub(super) series: Vec<Series>,
    pub(super) planned: Planned,
    /// Whether the axis begins at 0.
    pub(super) from_zero: bool,
}

impl Plot {
    /// The plot as a figure; nothing if it has no points.
    pub(super) fn svg(&self) -> String {
        let lines: Vec<(&str, Vec<Part>)> = self
            .series
            .iter()
            .filter(|series| !series.points.is_empty())
            .map(|series| (series.name.as_str(), parts(&series.points)))
            .collect();
        if lines.is_empty() {
            return String::new();
        }
        let scale = Scale::new(&lines, self.planned, self.from_zero);
        let mut out = self.caption(&lines);
        add(
            &mut out,
            format_args!("<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{}\">\n", escape(self.title)),
        );
        axes(&mut out, &scale);
        planned(&mut out, &scale, self.planned);
        for (index, (name, parts)) in lines.iter().enumerate() {
            line(&mut out, &scale, index, name, parts);
        }
        out.push_str("</svg></figure>\n");
        out
    }

    fn caption(&self, lines: &[(&str, Vec<Part>)]) -> String {
        let unit = if self.unit.is_empty() { String::new() } else { format!(", {}", self.unit) };
        let mut out =
            format!("<figure><figcaption>{}<span>{}</span></figcaption>\n", escape(self.title), escape(&unit));
        if lines.len() > 1 || self.planned != Planned::Nothing {
            for (index, (name, _)) in lines.iter().enumerate() {
                add(
                    &mut out,
                    format_args!("<span class=\"key\" style=\"--c: var(--line{})\">{}</span>", index % 6, escape(name)),
                );
            }
            if self.planned != Planned::Nothing {
                out.push_str("<span class=\"key\" style=\"--c: var(--plan)\">planned</span>");
            }
            out.push('\n');
        }
        out
    }
}

/// Neighboring points as one: the middle of their steps, mean, lowest and highest value.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Part {
    x: f64,
    mean: f64,
    low: f64,
    high: f64,
}

fn parts(points: &[(f64, f64)]) -> Vec<Part> {
    let per_part = points.len().div_ceil(MAX_POINTS);
    let part = |points: &[(f64, f64)]| {
        let values = points.iter().map(|(_, value)| *value);
        Part {
            x: (points[0].0 + points[points.len() - 1].0) / 2.0,
            mean: values.clone().sum::<f64>() / points.len() as f64,
            low: values.clone().fold(f64::INFINITY, f64::min),
            high: values.fold(f64::NEG_INFINITY, f64::max),
        }
    };
    points.chunks(per_part).map(part).collect()
}

/// From steps and values to places in the drawing.
struct Scale {
    steps: [f64; 2],
    values: [f64; 2],
}

impl Scale {
    fn new(lines: &[(&str, Vec<Part>)], planned: Planned, from_zero: bool) -> Self {
        let all = || lines.iter().flat_map(|(_, parts)| parts);
        let bound = |of: fn(&Part) -> f64, fold: fn(f64, f64) -> f64, start| all().map(of).fold(start, fold);
        let (mut low, mut high) =
            (bound(|p| p.low, f64::min, f64::INFINITY), bound(|p| p.high, f64::max, f64::NEG_INFINITY));
        match planned {
            Planned::Nothing => {}
            Planned::Limit(value) => (low, high) = (low.min(value), high.max(value)),
            // A promise that is far from what happened would squeeze the line: three times the measured range at most.
            Planned::Between(from, to) => (low, high) = (low.min(from.max(low / 3.0)), high.max(to.min(high * 3.0))),
        }
        if from_zero {
            (low, high) = (low.min(0.0), high.max(0.0));
        }
        let margin = if high > low { 0.05 * (high - low) } else { high.abs().max(1e-12) * 0.1 };
        let low = if from_zero && low == 0.0 { 0.0 } else { low - margin };
        let steps = [bound(|p| p.x, f64::min, f64::INFINITY), bound(|p| p.x, f64::max, f64::NEG_INFINITY)];
        Self { steps, values: [low, high + margin] }
    }

    fn x(&self, step: f64) -> f64 {
        let [first, last] = self.steps;
        let share = if last > first { (step - first) / (last - first) } else { 0.5 };
        LEFT + share * (WIDTH - LEFT - RIGHT)
    }

    fn y(&self, value: f64) -> f64 {
        let [low, high] = self.values;
        TOP + (1.0 - ((value - low) / (high - low)).clamp(0.0, 1.0)) * (HEIGHT - TOP - BOTTOM)
    }
}

/// About `count` round numbers within a range: multiples of 1, 2 or 5 times a power of ten.
fn ticks([low, high]: [f64; 2], count: f64) -> Vec<f64> {
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

/// `1.5k`, `2e-4`: short enough for an axis.
pub(super) fn short(value: f64) -> String {
    let trimmed = |text: String| {
        if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
    };
    match value.abs() {
        0.0 => "0".to_owned(),
        v if v < 1e-3 => trimmed_exponent(value),
        v if v < 10.0 => trimmed(format!("{value:.4}")),
        v if v < 1e4 => trimmed(format!("{value:.1}")),
        v if v < 1e6 => trimmed(format!("{:.1}", value / 1e3)) + "k",
        v if v < 1e9 => trimmed(format!("{:.1}", value / 1e6)) + "M",
        _ => trimmed_exponent(value),
    }
}

fn trimmed_exponent(value: f64) -> String {
    let text = format!("{value:.1e}");
    text.replace(".0e", "e")
}

fn axes(out: &mut String, scale: &Scale) {
    let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
    for tick in ticks(scale.values, 5.0) {
        let y = scale.y(tick);
        let label = short(tick);
        add(out, format_args!("<line class=\"grid\" x1=\"{LEFT}\" y1=\"{y:.1}\" x2=\"{right}\" y2=\"{y:.1}\"/>"));
        add(out, format_args!("<text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{label}</text>\n", LEFT - 6.0, y + 4.0));
    }
    for tick in ticks(scale.steps, 6.0).into_iter().filter(|tick| tick.fract() == 0.0) {
        let (x, y) = (scale.x(tick), bottom + 15.0);
        add(out, format_args!("<text x=\"{x:.1}\" y=\"{y}\" text-anchor=\"middle\">{}</text>\n", short(tick)));
    }
    add(out, format_args!("<line class=\"axis\" x1=\"{LEFT}\" y1=\"{bottom}\" x2=\"{right}\" y2=\"{bottom}\"/>"));
    add(out, format_args!("<text x=\"{right}\" y=\"{}\" text-anchor=\"end\">step</text>\n", HEIGHT - 4.0));
}

fn planned(out: &mut String, scale: &Scale, planned: Planned) {
    let right = WIDTH - RIGHT;
    match planned {
        Planned::Nothing => {}
        Planned::Limit(value) => {
            let y = scale.y(value);
            add(
                out,
                format_args!(
                    "<line class=\"limit\" x1=\"{LEFT}\" y1=\"{y:.1}\" x2=\"{right}\" y2=\"{y:.1}\"><title>planned: {}</title></line>\n",
                    short(value)
                ),
            );
        }
        Planned::Between(from, to) => {
            let (top, bottom) = (scale.y(to), scale.y(from));
            let (width, height) = (right - LEFT, bottom - top);
            add(
                out,
                format_args!(
                    "<rect class=\"planned\" x=\"{LEFT}\" y=\"{top:.1}\" width=\"{width}\" height=\"{height:.1}\"><title>planned: {} to {}</title></rect>\n",
                    short(from),
                    short(to)
                ),
            );
        }
    }
}

fn line(out: &mut String, scale: &Scale, index: usize, name: &str, parts: &[Part]) {
    let color = index % 6;
    let point = |x: f64, y: f64| format!("{:.1},{:.1}", scale.x(x), scale.y(y));
    if parts.iter().any(|part| part.high > part.low) {
        let over = parts.iter().map(|part| point(part.x, part.high));
        let under = parts.iter().rev().map(|part| point(part.x, part.low));
        let outline: Vec<String> = over.chain(under).collect();
        add(
            out,
            format_args!("<polygon class=\"band\" fill=\"var(--line{color})\" points=\"{}\"/>\n", outline.join(" ")),
        );
    }
    let mean: Vec<String> = parts.iter().map(|part| point(part.x, part.mean)).collect();
    let last = parts.last().map_or(f64::NAN, |part| part.mean);
    let name = escape(name);
    if parts.len() <= DOTTED {
        for part in parts {
            let (x, y, value) = (scale.x(part.x), scale.y(part.mean), short(part.mean));
            add(
                out,
                format_args!(
                    "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"2.5\" fill=\"var(--line{color})\"><title>{name}: {value}</title></circle>\n"
                ),
            );
        }
    }
    if parts.len() == 1 {
        return;
    }
    add(
        out,
        format_args!(
            "<polyline class=\"line\" stroke=\"var(--line{color})\" points=\"{}\"><title>{name}, last {}</title></polyline>\n",
            mean.join(" "),
            short(last)
        ),
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plot(points: Vec<(f64, f64)>, planned: Planned) -> Plot {
        let series = vec![Series { name: "a<b".to_owned(), points }];
        Plot { title: "speed", unit: "tokens/s", series, planned, from_zero: true }
    }

    #[test]
    fn long_series_are_averaged_and_keep_their_extremes() {
        let mut points: Vec<(f64, f64)> = (0..4000).map(|step| (f64::from(step), 1.0)).collect();
        points[1234].1 = 9.0;
        let parts = parts(&points);
        assert_eq!(parts.len(), 400);
        assert_eq!(parts.iter().map(|part| part.high).fold(0.0, f64::max), 9.0);
        let mean = parts.iter().map(|part| part.mean).sum::<f64>() / 400.0;
        assert!((mean - 1.002).abs() < 1e-9, "{mean}");
        assert!(plot(points, Planned::Nothing).svg().contains("class=\"band\""));
    }

    #[test]
    fn ticks_are_round_and_inside() {
        assert_eq!(ticks([0.0, 10.0], 5.0), [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]);
        assert_eq!(ticks([-0.9, 1.1], 4.0), [-0.5, 0.0, 0.5, 1.0]);
        assert_eq!(ticks([3.0, 3.0], 5.0), [3.0]);
    }

    #[test]
    fn axis_labels_are_short() {
        let labels = [0.0, 2e-4, 0.25, 1.5, 950.0, 1500.0, 16_280.0, 2.5e6].map(short);
        assert_eq!(labels, ["0", "2e-4", "0.25", "1.5", "950", "1500", "16.3k", "2.5M"]);
    }

    #[test]
    fn every_point_is_inside_of_the_drawing_and_names_are_not_interpreted() {
        for planned in [Planned::Nothing, Planned::Limit(50.0), Planned::Between(1.0, 1e9)] {
            let svg = plot(vec![(1.0, 10.0), (2.0, 30.0), (3.0, 20.0)], planned).svg();
            let points = svg.split("points=\"").nth(1).and_then(|rest| rest.split('"').next()).unwrap();
            for pair in points.split(' ') {
                let (x, y) = pair.split_once(',').unwrap();
                let (x, y): (f64, f64) = (x.parse().unwrap(), y.parse().unwrap());
                assert!((LEFT..=WIDTH - RIGHT).contains(&x) && (TOP..=HEIGHT - BOTTOM).contains(&y), "{pair}");
            }
            assert!(svg.contains("a&lt;b") && !svg.contains("a<b"));
            assert_eq!(svg.contains("planned"), planned != Planned::Nothing);
        }
    }

    #[test]
    fn nothing_to_draw_is_no_figure_and_one_point_is_a_dot() {
        assert_eq!(plot(Vec::new(), Planned::Limit(1.0)).svg(), "");
        assert!(plot(vec![(7.0, 7.0)], Planned::Nothing).svg().contains("<circle"));
    }
}
