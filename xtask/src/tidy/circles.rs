//! Rule `circles`: no circle between the files of one crate.
//!
//! Rationale: files in a circle can only be understood, tested and changed together, whatever their names say. Between
//! crates the compiler refuses circles; inside a crate nothing does, and they grow by one `use` at a time. What both sides
//! need belongs in a third file below them. One kind of circle is allowed: a module file (`mod.rs`, `lib.rs`, `x.rs`) and
//! its own direct children may use each other, because they are one subject in one place, as long as the children without
//! the module file contain no circle of another kind. The top modules of `trainer` have no circle either: its README
//! states them as a stack. How edges are found, and which re-exports are edges, is in `modules`.
//!
//! Trade-off: a circle is reported as one of its shortest rings, with the other files of the same strongly connected
//! component; when that ring is cut, the next one is reported.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::Finding;
use super::modules::ModuleGraph;
use super::uses::FileNames;

type Edges = Vec<BTreeMap<usize, usize>>;

/// The crate whose top modules are a stack, too.
const STACK: &str = "crates/trainer/src";

/// Finds the circles of the crate in `source_folder`, from all its files by path.
pub(super) fn check(source_folder: &str, files: BTreeMap<String, FileNames>) -> Vec<Finding> {
    let graph = ModuleGraph::new(source_folder, files);
    let edges = graph.edges();
    let all: BTreeSet<usize> = (0..graph.len()).collect();
    let circles = components(&edges, &all).into_iter();
    let circles = circles.filter(|circle| !is_one_subject(&graph, &edges, circle));
    let mut found: Vec<Finding> = circles.map(|circle| describe(source_folder, &graph, &edges, &circle)).collect();
    if source_folder == STACK {
        let edges = between_top_modules(&graph, &edges);
        let rings = components(&edges, &all);
        found.extend(rings.iter().map(|circle| describe(source_folder, &graph, &edges, circle)));
    }
    found
}

/// Returns the edges between top modules, each represented by its first file; the crate root has none.
fn between_top_modules(graph: &ModuleGraph, edges: &Edges) -> Edges {
    let first = |file: usize| (0..graph.len()).find(|other| graph.top(*other) == graph.top(file)).unwrap_or(file);
    let mut found: Edges = vec![BTreeMap::new(); edges.len()];
    for (from, targets) in edges.iter().enumerate() {
        for (to, line) in targets {
            if let (Some(user), Some(used)) = (graph.top(from), graph.top(*to))
                && user != used
            {
                found[first(from)].entry(first(*to)).or_insert(*line);
            }
        }
    }
    found
}

/// Returns whether `circle` is a module file with its direct children, and nothing else.
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

/// Finds the strongly connected components of more than one file among `files`.
fn components(edges: &Edges, files: &BTreeSet<usize>) -> BTreeSet<BTreeSet<usize>> {
    let reach: BTreeMap<usize, BTreeSet<usize>> =
        files.iter().map(|from| (*from, reachable(edges, files, *from))).collect();
    let in_circles = files.iter().filter(|file| reach[file].contains(file));
    let component = |file: &usize| reach[file].iter().copied().filter(|other| reach[other].contains(file)).collect();
    in_circles.map(component).collect()
}

/// Finds the files that can be reached from `start` inside `files` over one edge or more.
fn reachable(edges: &Edges, files: &BTreeSet<usize>, start: usize) -> BTreeSet<usize> {
    let mut seen = BTreeSet::new();
    let mut open = vec![start];
    while let Some(file) = open.pop() {
        open.extend(edges[file].keys().filter(|to| files.contains(to) && seen.insert(**to)));
    }
    seen
}

/// Finds a shortest ring from `start` inside `circle` over the edges that `keep` accepts.
fn ring(
    edges: &Edges,
    circle: &BTreeSet<usize>,
    start: usize,
    keep: impl Fn(usize, usize) -> bool,
) -> Option<Vec<usize>> {
    let mut seen = BTreeSet::new();
    let mut open = VecDeque::from([vec![start]]);
    while let Some(path) = open.pop_front() {
        let last = path[path.len() - 1];
        for to in edges[last].keys().copied().filter(|to| circle.contains(to) && keep(last, *to)) {
            if to == start {
                return Some(path);
            }
            if seen.insert(to) {
                open.push_back([&path[..], &[to]].concat());
            }
        }
    }
    None
}

fn describe(source_folder: &str, graph: &ModuleGraph, edges: &Edges, circle: &BTreeSet<usize>) -> Finding {
    // A ring beyond a module file and its child is the better example.
    let kinds: [&dyn Fn(usize, usize) -> bool; 3] =
        [&|from, to| !graph.is_direct_child(from, to), &|from, to| !graph.is_direct_child(to, from), &|_, _| true];
    let shortest = |keep| circle.iter().filter_map(|start| ring(edges, circle, *start, keep)).min_by_key(Vec::len);
    let ring = kinds.into_iter().find_map(shortest).expect("a circle has a ring");
    let short = |file: usize| graph.path(file)[source_folder.len() + 1..].to_owned();
    let steps = ring.iter().zip(ring.iter().cycle().skip(1));
    let steps: String = steps.map(|(from, to)| format!("{}:{} -> ", short(*from), edges[*from][to])).collect();
    let others: Vec<String> = circle.iter().filter(|file| !ring.contains(file)).map(|file| short(*file)).collect();
    let also = format!(" ({} files in all, also {})", circle.len(), others.join(", "));
    let also = if others.is_empty() { "" } else { &also };
    let first = short(ring[0]);
    let message = format!("circle of files: {steps}{first}{also}. Move what both sides need into a file below them");
    Finding::new("circles", source_folder, 0, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(source_folder: &str, files: &[(&str, &str)]) -> Vec<String> {
        let read = |(path, code): &(&str, &str)| (format!("{source_folder}/{path}"), FileNames::read(code).unwrap());
        check(source_folder, files.iter().map(read).collect()).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_circle_is_shown_as_a_ring() {
        let mut files = [
            ("lib.rs", "mod a; mod b; mod c; pub use a::A;"),
            ("a.rs", "use crate::b::B; pub struct A;"),
            ("b.rs", "use crate::c::C;\npub struct B;"),
            ("c.rs", "pub struct C;"),
        ];
        assert_eq!(found("c/src", &files), [""; 0]);
        files[3].1 = "\nuse crate::A; pub struct C;";
        let found = found("c/src", &files);
        let ring = "c/src: [circles] circle of files: a.rs:1 -> b.rs:1 -> c.rs:2 -> a.rs. Move";
        assert!(found.len() == 1 && found[0].starts_with(ring), "{found:?}");
    }

    #[test]
    fn a_module_file_and_its_children_are_one_subject_and_children_that_use_each_other_are_a_circle() {
        let mut files = [
            ("lib.rs", "mod a;"),
            ("a/mod.rs", "mod x; mod y; struct A; fn f() { x::g(); y::h(); }"),
            ("a/x.rs", "use super::A; use super::y::h; pub fn g() {}"),
            ("a/y.rs", "use super::A; pub fn h() {}"),
        ];
        assert_eq!(found("c/src", &files), [""; 0]);
        files[3].1 = "use super::x::g; pub fn h() {}";
        let found = found("c/src", &files);
        assert!(found.len() == 1 && found[0].contains("a/x.rs:1 -> a/y.rs:1 -> a/x.rs"), "{found:?}");
    }

    #[test]
    fn a_grandchild_that_uses_the_top_and_a_way_through_another_module_are_circles() {
        let through = [
            ("lib.rs", "mod a; mod b;"),
            ("a/mod.rs", "mod x; pub struct A; fn f() { crate::b::B; }"),
            ("a/x.rs", "use super::A; pub fn g() {}"),
            ("b.rs", "use crate::a::x::g; pub struct B;"),
        ];
        let grandchild = [
            ("lib.rs", "mod a; pub struct Top; fn f() { a::g() }"),
            ("a/mod.rs", "mod deep; pub fn g() { deep::h() }"),
            ("a/deep.rs", "use crate::Top; pub fn h() {}"),
        ];
        assert_eq!((found("c/src", &through).len(), found("c/src", &grandchild).len()), (1, 1));
    }

    #[test]
    fn a_reexport_closes_a_circle() {
        let mut files = [
            ("lib.rs", "mod a; mod b; pub use a::X;"),
            ("a/mod.rs", "mod x; mod y; pub use x::X; pub use y::Y;"),
            ("a/x.rs", "pub struct X;"),
            ("a/y.rs", "use crate::b::B; pub struct Y;"),
            ("b.rs", "use crate::a::X; pub struct B;"),
        ];
        let found_first = found("c/src", &files);
        let ring = "a/mod.rs:1 -> a/y.rs:1 -> b.rs:1 -> a/mod.rs";
        assert!(found_first.len() == 1 && found_first[0].contains(ring), "{found_first:?}");
        // Past the index, only files count.
        files[1].1 = "pub mod x; mod y; pub use x::X; pub use y::Y;";
        files[4].1 = "use crate::a::x::X; pub struct B;";
        assert_eq!(found("c/src", &files), [""; 0]);
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
        assert_eq!(found("c/src", &files), [""; 0]);
        let found = found(STACK, &files);
        assert!(found.len() == 1 && found[0].contains("a/mod.rs:1 -> b.rs:1"), "{found:?}");
    }
}
