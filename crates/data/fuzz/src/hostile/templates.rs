//! Templates whose source is one thing many times over.

use super::Hostile;

pub(super) fn all() -> Vec<Hostile> {
    vec![
        long("attributes_in_a_row", || format!("{{{{ a{} }}}}", ".b".repeat(20_000))),
        long("filters_in_a_row", || format!("{{{{ a{} }}}}", "|e".repeat(20_000))),
        long("calls_in_a_row", || format!("{{{{ a{} }}}}", "()".repeat(20_000))),
        long("tests_in_a_row", || format!("{{{{ a{} }}}}", " is b".repeat(20_000))),
        long("operators_in_a_row", || format!("{{{{ 1{} }}}}", "+1".repeat(20_000))),
        long("ands_in_a_row", || format!("{{{{ a{} }}}}", " and a".repeat(20_000))),
        long("comparisons_in_a_row", || format!("{{{{ a{} }}}}", "<a".repeat(20_000))),
        long("slices_in_a_row", || format!("{{{{ [1]{} }}}}", "[0:]".repeat(8000))),
        long("brackets_in_brackets", || format!("{{{{ {}{} }}}}", "[".repeat(20_000), "]".repeat(20_000))),
        long("calls_in_calls", || format!("{{{{ {}{} }}}}", "a(".repeat(20_000), ")".repeat(20_000))),
        long("blocks_in_blocks", || [repeat("{% if true %}"), repeat("{% endif %}")].concat()),
        long("loops_in_loops", || [repeat("{% for x in [1] %}"), repeat("{% endfor %}")].concat()),
        long("elifs", || format!("{{% if a %}}{}{{% endif %}}", "{% elif a %}".repeat(8000))),
        long("ternaries", || format!("{{{{ {}1 }}}}", "1 if a else ".repeat(8000))),
        long("ternaries_in_the_condition", || format!("{{{{ {} }}}}", vec!["1"; 8000].join(" if "))),
        long("nots", || format!("{{{{ {}a }}}}", "not ".repeat(20_000))),
        long("minuses", || format!("{{{{ {}1 }}}}", "-".repeat(20_000))),
        long("powers", || format!("{{{{ {}2 }}}}", "2**".repeat(20_000))),
        long("sets_in_a_row", || format!("{}{{{{ x }}}}", "{% set x = [x] %}".repeat(10_000))),
        long("sets_of_slices", || format!("{{% set x = [1] %}}{}{{{{ x }}}}", "{% set x = x[0:] %}".repeat(10_000))),
        long("for_filters", || format!("{{% for x in {} y %}}{{% endfor %}}", "x if ".repeat(8000))),
        long("tilde_chain", || format!("{{% set x = 'x' * 100000 %}}{{{{ {} }}}}", vec!["x"; 8000].join(" ~ "))),
        long("with_chain_doubles", || {
            let pairs: Vec<String> = (1..200).map(|index| format!("a{index} = a{0} ~ a{0}", index - 1)).collect();
            format!("{{% with a0 = 'aaaa', {} %}}{{{{ a199 }}}}{{% endwith %}}", pairs.join(", "))
        }),
        long("raw_text_in_loops", || {
            let text = "0123456789".repeat(6000);
            format!(
                "{{% set x %}}{{% for i in range(100000) %}}{{% for j in range(100000) %}}{text}{{% endfor %}}\
                 {{% endfor %}}{{% endset %}}"
            )
        }),
        long("many_small_tags", || "{{ 1 }}".repeat(100_000)),
        long("open_tags", || "{{".repeat(100_000)),
        long("open_comments", || "{#".repeat(100_000)),
        long("open_quotes", || "{{ '".repeat(100_000)),
        long("quotes_of_backslashes", || format!("{{{{ '{} }}}}", "\\".repeat(500_000))),
        long("raw_blocks", || "{% raw %}{% endraw %}".repeat(20_000)),
        long("raw_blocks_open", || "{% raw %}".repeat(20_000)),
        Hostile::new("template", "source_of_two_mib", &["the recipe", "bytes"], || vec![b'a'; 2 << 20]),
    ]
}

/// May be refused or rendered, soon.
fn long(name: &'static str, make: impl Fn() -> String + 'static) -> Hostile {
    Hostile::new("template", name, &[], move || make().into_bytes())
}

fn repeat(block: &str) -> String {
    block.repeat(10_000)
}
