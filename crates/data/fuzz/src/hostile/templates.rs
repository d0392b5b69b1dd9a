//! Templates that are deep, large or endless: any number of them, from a seed.
//!
//! Trade-off: a template that runs out of memory leaves a sleeping thread with up to 33 MiB, so a process runs some dozens.

/// What is repeated before and after an expression or a text, separated by `@`; lists are separated by ` ; `.
const AROUND: &str = "not @ ; -@ ; 1+@ ; 1~@ ; 1*@ ; 2**@ ; 1<@ ; 1 in @ ; 1 or @ ; 1 if 1 else @ ; 1 is odd and @ ; @|e ; @.b ; @[0] ; @[0:] ; @() ; \
    @ is odd ; [@] ; (@) ; {'a':@} ; a(@) ; [1,@] ; {% if 1 %}@{% endif %} ; {% for x in [1] %}@{% endfor %} ; {% with %}@{% endwith %} ; \
    {% filter e %}@{% endfilter %} ; {% set x %}@{% endset %} ; {% if 0 %}@{% elif 1 %} ; {% raw %}@{% endraw %} ; {{@ ; {#@ ; '@";
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
