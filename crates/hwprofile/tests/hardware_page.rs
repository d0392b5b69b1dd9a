//! Checks that docs/hardware.md equals the tables. `UPDATE_GOLDEN=1 cargo test -p firebrick-hwprofile` writes it.

use std::fmt::Write as _;
use std::path::Path;

use firebrick_hwprofile::AcceleratorSpec;
use firebrick_hwprofile::spec::{Figure, Origin, Source, Voice};
use firebrick_hwprofile::tuning::HARDWARE_CONFIGS;

const HEAD: &str = "# Hardware: what accelerators can do, and how they are tuned

Written from the tables of `firebrick-hwprofile` (`src/spec/accelerators.json`, `src/tuning.json`); change those, not this page. A plan for any of these
machines: `firebrick plan my-recipe.toml --for h100`. Memory is what a driver reports where such a report was read, which is what
a plan may count on; else it is what is sold.

Rates are dense 10^12 operations per second with f32 accumulation. A number is followed by its source's number in the list below; `~`
marks one that follows from that source, `halved` a rate that the source prints with 2:4 sparsity, twice as high, `?` one that no
document was read for. `f16` marks a card without bfloat16, whose rate in float16 is in that column.
";

/// The sources in the order in which they are first named.
struct Sources(Vec<&'static Source>);

impl Sources {
    fn cell(&mut self, figure: Option<Figure>) -> String {
        let Some(figure) = figure else { return "-".to_owned() };
        match figure.origin {
            Origin::Document(source) => format!("{} [{}]", figure.value, self.number(source)),
            Origin::Halved(source) => format!("{} [{}, halved]", figure.value, self.number(source)),
            Origin::Derived { from, .. } => format!("~{} [{}]", figure.value, self.number(from)),
            Origin::Unverified { .. } => format!("{} ?", figure.value),
        }
    }

    fn number(&mut self, source: &'static Source) -> usize {
        let found = self.0.iter().position(|known| *known == source);
        found.unwrap_or_else(|| {
            self.0.push(source);
            self.0.len() - 1
        }) + 1
    }
}

fn page() -> String {
    let mut sources = Sources(Vec::new());
    let mut page = HEAD.to_owned();
    peaks(&mut page, &mut sources);
    links(&mut page, &mut sources);
    tuning(&mut page);
    page.push_str("\n## Sources\n\n");
    for (index, source) in sources.0.iter().enumerate() {
        let voice = match source.voice {
            Voice::Maker => "the maker",
            Voice::Account => "an account",
            Voice::Measurement => "a measurement",
        };
        let title = if source.url.starts_with("http") {
            format!("[{}]({})", source.title, source.url)
        } else {
            source.title.into()
        };
        writeln!(page, "{}. {title}: {voice}", index + 1).unwrap();
    }
    page
}

fn peaks(page: &mut String, sources: &mut Sources) {
    page.push_str(
        "\n## Peaks\n\n| name | accelerator | memory, GiB | TB/s | bf16 | FP8 | FP4 | f32 | best bf16 measured |\n",
    );
    page.push_str("|---|---|---:|---:|---:|---:|---:|---:|---:|\n");
    for spec in AcceleratorSpec::all() {
        let figures = [
            Some(spec.memory_gib),
            Some(spec.bandwidth_tb_s),
            Some(spec.rates.bf16),
            spec.rates.fp8,
            spec.rates.fp4,
            spec.rates.f32,
            spec.sustained_bf16,
        ];
        let mut cells = figures.map(|figure| sources.cell(figure));
        if !spec.kind.has_bf16() {
            cells[2] += " f16";
        }
        writeln!(page, "| `{}` | {} | {} |", spec.id, spec.name, cells.join(" | ")).unwrap();
    }
}

fn links(page: &mut String, sources: &mut Sources) {
    page.push_str("\n## Links, power, features\n\nGB/s of both directions together.\n\n");
    page.push_str("| name | to the host | to others | W | features |\n|---|---|---|---:|---|\n");
    for spec in AcceleratorSpec::all() {
        let mut link = |link: Option<firebrick_hwprofile::spec::Link>| match link {
            Some(link) => format!("{}: {}", link.name, sources.cell(Some(link.gb_s))),
            None => "-".to_owned(),
        };
        let (host, peers) = (link(spec.host_link), link(spec.peer_link));
        let features: Vec<String> = spec.features.iter().map(|feature| format!("{feature:?}")).collect();
        let power = sources.cell(spec.power_w);
        writeln!(page, "| `{}` | {host} | {peers} | {power} | {} |", spec.id, features.join(", ")).unwrap();
    }
}

fn tuning(page: &mut String) {
    page.push_str("\n## Tuning\n\n`get_optimal_config` returns a row of `HARDWARE_CONFIGS`. Attention, precision, FP8 and FP4, tile and batch\n");
    page.push_str("are what suits the hardware in general; the last columns are what runs here.\n\n");
    page.push_str("| kind | attention | precision | FP8, FP4 | tile | batch | runs here | computes in | rows to start with | padding | notes |\n");
    page.push_str("|---|---|---|---|---:|---:|---|---|---:|---|---|\n");
    for config in HARDWARE_CONFIGS.iter() {
        writeln!(
            page,
            "| {:?} | {:?} | {} | {}, {} | {} | {} | {:?}: {} | {} | {} | {} x {} | {} |",
            config.kind,
            config.use_flash_attention,
            config.precision,
            config.use_fp8,
            config.use_fp4,
            config.tile_size,
            config.batch_size,
            config.kind.engine(),
            config.attention_here,
            config.compute_here,
            config.micro_batch_start,
            config.padding.rows,
            config.padding.width,
            config.notes
        )
        .unwrap();
    }
}

#[test]
fn the_page_on_hardware_says_what_the_tables_say() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/hardware.md");
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        std::fs::write(&path, page()).unwrap();
    }
    let written = std::fs::read_to_string(&path).unwrap();
    assert!(written == page(), "docs/hardware.md is out of date: UPDATE_GOLDEN=1 cargo test -p firebrick-hwprofile");
}
