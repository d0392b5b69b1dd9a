//! Templates that are deep, large or endless: named ones, and any number of others from a seed.
//!
//! Trade-off: a template that runs out of memory leaves a sleeping thread with up to 33 MiB, so a process runs some dozens.

use super::Hostile;

const CHAIN: &[&str] = &["a tag has more than 16 KiB"];
const MEMORY: &[&str] = &["it holds more than"];
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
        chain("nots", "not ", 32_000),
        chain("sums", "1+", 64_000),
        chain("signs", "-", 100_000),
        chain("joins", "1~", 100_000),
        Hostile::new("template", "attributes", CHAIN, || format!("{{{{ a{} }}}}", ".b".repeat(100_000)).into_bytes()),
        Hostile::new("template", "filters", CHAIN, || format!("{{{{ a{} }}}}", "|e".repeat(100_000)).into_bytes()),
        large("width", "{{ '%10000000000d' | format(3) }}"),
        large("batch", "{{ [1] | batch(10**12, 'x') | list }}"),
        large("slice", "{{ [1] | slice(10**12) | list }}"),
        large(
            "doubled_text",
            "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        ),
        large("two_lists_of_100_000_levels", COMPARED),
        Hostile::new("template", "text_of_100_mb", MEMORY, || b"{{ 'x' * 10**8 }}".to_vec()),
        Hostile::new("template", "captured_text_of_gigabytes", TOO_MUCH, || {
            b"{% set y %}{% for a in range(9999) %}{{ 'x' * 10**6 }}{% endfor %}{% endset %}{{ y }}".to_vec()
        }),
    ]
}

/// Compares two values that are nested as deep as the loop is long.
const COMPARED: &str = "{% set n = namespace(x=[], y=[]) %}{% for i in range(99999) %}\
    {% set n.x = [n.x] %}{% set n.y = [n.y] %}{% endfor %}{{ n.x == n.y }}";
/// What is repeated before and after an expression or a text, separated by `@`; lists are separated by ` ; `.
const AROUND: &str = "not @ ; -@ ; 1+@ ; 1~@ ; 1*@ ; 2**@ ; 1<@ ; 1 in @ ; 1 or @ ; 1 if 1 else @ ; 1 is odd and @ ; @|e ; @.b ; @[0] ; @[0:] ; @() ; \
    @ is odd ; [@] ; (@) ; {'a':@} ; a(@) ; [1,@] ; {% if 1 %}@{% endif %} ; {% for x in [1] %}@{% endfor %} ; {% with %}@{% endwith %} ; \
    {% filter e %}@{% endfilter %} ; {% set x %}@{% endset %} ; {% if 0 %}@{% elif 1 %} ; {% raw %}@{% endraw %}";
/// Expressions whose size is a number `N`.
const SIZED: &str = "'%Nd' | format(3) ; '%.Nf' | format(3.5) ; [1] | batch(N) | list ; [1] | batch(N, 'x') | list ; [1] | slice(N) | list ; range(N) | list \
    | length ; 'x' * N ; ([1] * N) | length ; 'a' | center(N) ; 'a\nb' | indent(N) ; 'a'.center(N) | length ; ('a b ' * 999) | wordwrap(1, \
    wrapstring='x' * N) | length ; ('a' * 999).replace('a', 'b' * N) | length ; ['a' * 999] * N | join ; 2 ** N ; '{:Nd}'.format(1) ; \
    'a'.zfill(N) ; 1.5 | round(N) ; ('a,' * N).split(',') | length ; [[1] * N] * N | tojson(indent=64) ; (['ab'] * N) | map('upper') | sort \
    | length ; range(N) | map('string') | join | length ; ('a' * N).splitlines() | list | string ; dict([[1, 'x' * N]] * 9) | string | \
    length";
/// What grows `n.x`, and what is done with the grown one.
const GROWS: &str = "[N] ; N ~ N ; N + N ; [N, N] ; {'a': N} ; N | list ; N | reverse ; N | map('string') ; N | batch(2) | list ; N * 2 ; namespace(x=N) ; N \
    | tojson ; N | string ; dict(a=N) ; N | replace('a', 'aa') ; N | select ; [N] | groupby(0)";
const USES: &str = "1 ; n.x == n.y ; n.x < n.y ; [n.x, n.y] | sort | length ; [n.x, n.y] | unique | list | length ; {n.x: 1} | length ; n.x | string | \
    length ; n.x | tojson | length ; n.x in [n.y] ; n.x | pprint | length ; n.x | list | length ; n.x ~ '' ; n.x | join ; [n.x, n.y] | max \
    | length ; [n.x].index(n.y) ; [n.x].count(n.y) ; n.x.count(n.y)";

/// Returns the hostile template of a seed.
pub(crate) fn random(seed: u64) -> String {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x2545_f491_4f6c_dd1d;
    let mut below = |end: u64| {
        (0..3).for_each(|_| state = state.wrapping_mul(6_364_136_223_846_793_005).rotate_left(17) ^ 0x5851_f42d);
        state % end
    };
    let pick = |list: &'static str, number: u64| {
        let items: Vec<&str> = list.split(" ; ").collect();
        items[number as usize % items.len()]
    };
    match below(4) {
        0 => {
            let (before, after) = pick(AROUND, below(999)).split_once('@').expect("two parts");
            let bits = 1 + below(16);
            let count = 1 + below(1 << bits) as usize;
            let text = format!("{}a{}", before.repeat(count), after.repeat(count));
            if before.starts_with("{%") { text } else { format!("{{{{ {text} }}}}") }
        }
        1 => format!("{{{{ {} }}}}", pick(SIZED, below(999)).replace('N', &10_u64.pow(below(15) as u32).to_string())),
        _ => {
            let start = pick("'a' ; [] ; {} ; 1 ; messages", below(999));
            let (grow, uses) = (pick(GROWS, below(999)), pick(USES, below(999)));
            let bits = 1 + below(18);
            let (times, x, y) = (1 + below(1 << bits), grow.replace('N', "n.x"), grow.replace('N', "n.y"));
            format!(
                "{{% set n = namespace(x={start}, y={start}) %}}{{% for i in range({times}) %}}{{% set n.x = {x} %}}{{% set n.y = {y} %}}\
                 {{% endfor %}}{{{{ {uses} }}}}"
            )
        }
    }
}

fn chain(name: &'static str, part: &'static str, count: usize) -> Hostile {
    Hostile::new("template", name, CHAIN, move || format!("{{{{ {}1 }}}}", part.repeat(count)).into_bytes())
}

fn large(name: &'static str, source: &'static str) -> Hostile {
    Hostile::new("template", name, MEMORY, || source.as_bytes().to_vec())
}

/// Creates an input that may be refused or rendered, within the time limit.
fn long(name: &'static str, make: impl Fn() -> String + 'static) -> Hostile {
    Hostile::new("template", name, &[], move || make().into_bytes())
}

fn repeat(block: &str) -> String {
    block.repeat(10_000)
}
