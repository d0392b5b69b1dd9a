//! Templates whose source repeats one construct many times.
//!
//! Not covered: chains of thousands of operators or filters, for which the engine's compiler needs a deep stack.

use super::Hostile;

const TOO_MUCH: &[&str] = &["it writes more than", "far more than it and the conversation have"];

pub(super) fn all() -> Vec<Hostile> {
    vec![
        long("brackets_in_brackets", || format!("{{{{ {}{} }}}}", "[".repeat(20_000), "]".repeat(20_000))),
        long("calls_in_calls", || format!("{{{{ {}{} }}}}", "a(".repeat(20_000), ")".repeat(20_000))),
        long("blocks_in_blocks", || [repeat("{% if true %}"), repeat("{% endif %}")].concat()),
        long("loops_in_loops", || [repeat("{% for x in [1] %}"), repeat("{% endfor %}")].concat()),
        long("many_small_tags", || "{{ 1 }}".repeat(100_000)),
        long("open_tags", || "{{".repeat(100_000)),
        long("open_comments", || "{#".repeat(100_000)),
        long("open_quotes", || "{{ '".repeat(100_000)),
        long("quotes_of_backslashes", || format!("{{{{ '{} }}}}", "\\".repeat(500_000))),
        long("raw_blocks", || "{% raw %}{% endraw %}".repeat(20_000)),
        long("raw_blocks_open", || "{% raw %}".repeat(20_000)),
        long("source_of_two_mib", || "a".repeat(2 << 20)),
        Hostile::new("template", "text_of_100_mb", TOO_MUCH, || b"{{ 'x' * 10**8 }}".to_vec()),
        Hostile::new("template", "captured_text_of_gigabytes", TOO_MUCH, || {
            b"{% set y %}{% for a in range(9999) %}{{ 'x' * 10**6 }}{% endfor %}{% endset %}{{ y }}".to_vec()
        }),
    ]
}

/// Creates an input that may be refused or rendered, within the time limit.
fn long(name: &'static str, make: impl Fn() -> String + 'static) -> Hostile {
    Hostile::new("template", name, &[], move || make().into_bytes())
}

fn repeat(block: &str) -> String {
    block.repeat(10_000)
}
