//! Rule `circles`: no circle between the files of one crate.
//!
//! Rationale: files in a circle can only be understood, tested and changed together, whatever their names say. Between
//! crates the compiler refuses circles; inside a crate nothing does, and they grow by one `use` at a time. What both sides
//! need belongs in a third file below them. One kind of circle is allowed: a module file (`mod.rs`, `lib.rs`, `x.rs`) and
//! its own direct children may use each other, because they are one subject in one place, as long as the children without
//! the module file contain no circle of another kind. The top modules of `trainer` have no circle either: its README
//! states them as a stack. How edges are found, and why re-exports are none, is in `modules`.
//!
//! Trade-off: a circle is reported as one of its shortest rings, with the other files of the same strongly connected
//! component; when that ring is cut, the next one is reported.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::finding::Finding;
use super::modules::ModuleGraph;

type Edges = Vec<BTreeMap<usize, usize>>;

/// The crate whose top modules are a stack, too.
const STACK: &str = "crates/trainer/src";

/// The circles of the crate in `source_folder`, from all its files as (path, code without comments).
pub(super) fn check<'a>(source_folder: &str, files: impl Iterator<Item = (&'a str, &'a str)>) -> Vec<Finding> {
    let graph = ModuleGraph::new(source_folder, files);
    let edges = graph.edges();
    let all: BTreeSet<usize> = (0..graph.len()).collect();
    let circles = components(&edges, &all).into_iter().filter(|circle| !is_one_subject(&graph, &edges, circle));
    let mut found: Vec<Finding> = circles.map(|circle| describe(source_folder, &graph, &edges, &circle)).collect();
    if source_folder == STACK {
        let edges = between_top_modules(&graph, &edges);
        let rings = components(&edges, &all);
        found.extend(rings.iter().map(|circle| describe(source_folder, &graph, &edges, circle)));
    }
    found
}

/// The edges with the first file of a top module in place of each of its files; the crate root has none.
fn between_top_modules(graph: &ModuleGraph, edges: &Edges) -> Edges {
    let first = |file: usize| (0..graph.len()).find(|other| graph.top(*other) == graph.top(file)).unwrap_or(file);
    let mut found: Edges = vec![BTreeMap::new(); edges.len()];
    for (from, targets) in edges.iter().enumerate().filter(|(from, _)| graph.top(*from).is_some()) {
        for (to, line) in
            targets.iter().filter(|(to, _)| graph.top(**to).is_some_and(|top| Some(top) != graph.top(from)))
        {
            found[first(from)].entry(first(*to)).or_insert(*line);
        }
    }
    found
}

/// Whether `circle` is a module file with its direct children, and nothing else.
fn is_one_subject(graph: &ModuleGraph, edges: &Edges, circle: &BTreeSet<usize>) -> bool {
    circle.iter().any(|parent| {
        let rest: BTreeSet<usize> = circle.iter().copied().filter(|file| file != parent).collect();
        let below = rest.iter().all(|file| graph.is_inside(*file, *parent));
        let users = rest.iter().filter(|file| edges[**file].contains_key(parent));
        below
            && users.into_iter().all(|file| graph.is_direct_child(*file, *parent))
            && components(edges, &rest).iter().all(|inner| is_one_subject(graph, edges, inner))
    })
}

/// The strongly connected components of more than one file among `files`.
fn components(edges: &Edges, files: &BTreeSet<usize>) -> Vec<BTreeSet<usize>> {
    let reach: BTreeMap<usize, BTreeSet<usize>> =
        files.iter().map(|from| (*from, reachable(edges, files, *from))).collect();
    let mut left = files.clone();
    let mut found = Vec::new();
    while let Some(first) = left.pop_first() {
        let mut component: BTreeSet<usize> = left
            .iter()
            .copied()
            .filter(|other| reach[&first].contains(other) && reach[other].contains(&first))
            .collect();
        left.retain(|file| !component.contains(file));
        if !component.is_empty() {
            component.insert(first);
            found.push(component);
        }
    }
    found
}

/// The files that can be reached from `start` inside `files` over one edge or more.
fn reachable(edges: &Edges, files: &BTreeSet<usize>, start: usize) -> BTreeSet<usize> {
    let mut seen = BTreeSet::new();
    let mut open = vec![start];
    while let Some(file) = open.pop() {
        open.extend(edges[file].keys().filter(|to| files.contains(to) && seen.insert(**to)));
    }
    seen
}

/// A shortest ring inside `circle` over the edges that `keep` accepts; empty if there is none.
fn shortest_ring(edges: &Edges, circle: &BTreeSet<usize>, keep: impl Fn(usize, usize) -> bool) -> Vec<usize> {
    let rings = circle.iter().filter_map(|start| {
        let mut before: BTreeMap<usize, usize> = BTreeMap::new();
        let mut open = VecDeque::from([*start]);
        while let Some(file) = open.pop_front() {
            for to in edges[file].keys().copied().filter(|to| circle.contains(to) && keep(file, *to)) {
                if to == *start {
                    let mut ring = vec![file];
                    while let Some(previous) = before.get(&ring[ring.len() - 1]) {
                        ring.push(*previous);
                    }
                    ring.reverse();
                    return Some(ring);
                }
                if let Entry::Vacant(unseen) = before.entry(to) {
                    unseen.insert(file);
                    open.push_back(to);
                }
            }
        }
        None
    });
    rings.min_by_key(Vec::len).unwrap_or_default()
}

fn describe(source_folder: &str, graph: &ModuleGraph, edges: &Edges, circle: &BTreeSet<usize>) -> Finding {
    // A ring that does not consist of a module file and its child only is the better example.
    let kinds: [&dyn Fn(usize, usize) -> bool; 3] =
        [&|from, to| !graph.is_direct_child(from, to), &|from, to| !graph.is_direct_child(to, from), &|_, _| true];
    let ring = kinds.into_iter().map(|keep| shortest_ring(edges, circle, keep)).find(|ring| !ring.is_empty());
    let ring = ring.unwrap_or_default();
    let short = |file: usize| graph.path(file).trim_start_matches(source_folder).trim_start_matches('/').to_owned();
    let mut text = String::new();
    for (index, file) in ring.iter().enumerate() {
        let next = ring[(index + 1) % ring.len()];
        text += &format!("{}:{} -> ", short(*file), edges[*file][&next]);
    }
    text += &ring.first().map(|file| short(*file)).unwrap_or_default();
    let others: Vec<String> = circle.iter().filter(|file| !ring.contains(file)).map(|file| short(*file)).collect();
    let also = if others.is_empty() {
        String::new()
    } else {
        format!(" ({} files in all, also {})", circle.len(), others.join(", "))
    };
    let message = format!("circle of files: {text}{also}. Move what both sides need into a file below them");
    Finding::new("circles", source_folder, 0, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(files: &[(&str, &str)]) -> Vec<String> {
        let files: Vec<_> = files.iter().map(|(path, code)| (format!("c/src/{path}"), *code)).collect();
        let findings = check("c/src", files.iter().map(|(path, code)| (path.as_str(), *code)));
        findings.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_circle_is_shown_as_a_ring() {
        let found = found(&[
            ("lib.rs", "mod a; mod b; mod c;"),
            ("a.rs", "use crate::b::B; pub struct A;"),
            ("b.rs", "use crate::c::C; pub struct B;"),
            ("c.rs", "use crate::a::A; pub struct C;"),
        ]);
        assert_eq!(found.len(), 1);
        assert!(found[0].contains("a.rs:1 -> b.rs:1 -> c.rs:1 -> a.rs. Move"), "{found:?}");
    }

    #[test]
    fn a_module_file_and_its_children_are_one_subject() {
        let files = [
            ("lib.rs", "mod a;"),
            ("a/mod.rs", "mod x; mod y; struct A; fn f() { x::g(); y::h(); }"),
            ("a/x.rs", "use super::A; use super::y::h; pub fn g() {}"),
            ("a/y.rs", "use super::A; pub fn h() {}"),
        ];
        assert_eq!(found(&files), [""; 0]);
    }

    #[test]
    fn children_that_use_each_other_are_a_circle() {
        let found = found(&[
            ("lib.rs", "mod a;"),
            ("a/mod.rs", "mod x; mod y; struct A; fn f() { x::g(); y::h(); }"),
            ("a/x.rs", "use super::A; use super::y::h; pub fn g() {}"),
            ("a/y.rs", "use super::x::g; pub fn h() {}"),
        ]);
        assert!(found.len() == 1 && found[0].contains("a/x.rs:1 -> a/y.rs:1 -> a/x.rs"), "{found:?}");
    }

    #[test]
    fn a_grandchild_that_uses_the_top_and_a_way_through_another_module_are_circles() {
        let through = found(&[
            ("lib.rs", "mod a; mod b;"),
            ("a/mod.rs", "mod x; pub struct A; fn f() { crate::b::B; }"),
            ("a/x.rs", "use super::A; pub fn g() {}"),
            ("b.rs", "use crate::a::x::g; pub struct B;"),
        ]);
        assert_eq!(through.len(), 1, "{through:?}");
        let grandchild = found(&[
            ("lib.rs", "mod a; pub struct Top; fn f() { a::g() }"),
            ("a/mod.rs", "mod deep; pub fn g() { deep::h() }"),
            ("a/deep.rs", "use crate::Top; pub fn h() {}"),
        ]);
        assert_eq!(grandchild.len(), 1, "{grandchild:?}");
    }

    #[test]
    fn top_modules_of_the_trainer_are_a_stack() {
        let files = [
            ("lib.rs", "mod a; mod b;"),
            ("a/mod.rs", "pub mod x; pub mod y;"),
            ("a/x.rs", "use crate::b::B; pub struct X;"),
            ("a/y.rs", "pub struct Y;"),
            ("b.rs", "use crate::a::y::Y; pub struct B;"),
        ];
        assert_eq!(found(&files), [""; 0]);
        let files = files.map(|(path, code)| (format!("{STACK}/{path}"), code));
        let findings = check(STACK, files.iter().map(|(path, code)| (path.as_str(), *code)));
        assert!(findings.len() == 1 && findings[0].to_string().contains("a/mod.rs:1 -> b.rs:1"), "{findings:?}");
    }

    #[test]
    fn a_graph_without_circles_is_fine() {
        let files = [("lib.rs", "mod a; mod b; pub use a::A;"), ("a.rs", "pub struct A;"), ("b.rs", "use crate::A;")];
        assert_eq!(found(&files), [""; 0]);
    }
}
