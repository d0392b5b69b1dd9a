//! Rule `layers`: the allowed dependencies between crates.
//!
//! Rationale: a dependency may only go to a lower layer, so every crate can be read, built and tested with only the layers below it, and a change
//! never travels sideways. A few crates stay free of Burn, of CubeCL, or of recipe parsing altogether. Declared dependencies of every kind and every
//! feature are read, so no disabled feature hides one.
//!
//! Trade-off: the table below has to be kept by hand, and docs/architecture.md repeats it as a drawing.

use std::collections::BTreeSet;

use anyhow::Result;

use super::Finding;
use crate::workspace::Workspace;

/// The crates and their layers. docs/architecture.md draws the same.
const LAYERS: [(&str, u8); 14] = [
    ("train", 5),
    ("trainer", 4),
    ("model", 3),
    ("optim", 3),
    ("parallel", 3),
    ("kernels", 2),
    ("data", 2),
    ("hub", 1),
    ("cuda", 1),
    ("hwprofile", 1),
    ("arch", 0),
    ("precision", 0),
    ("files", 0),
    // `tests/hub-imitation`, which tests use.
    ("hub-imitation", 0),
];

/// Our packages are named `firebrick-<folder>`.
const PREFIX: &str = "firebrick-";

/// Crates that stay free of Burn, directly and through our other crates.
const WITHOUT_BURN: [&str; 7] = ["arch", "precision", "files", "hub", "data", "hwprofile", "cuda"];

/// Dependencies on a lower layer that are still refused.
const FORBIDDEN: [(&str, &str, &str); 2] = [
    ("model", "data", "a model takes token ids and never knows where they come from"),
    ("model", "hub", "a model is a folder; `trainer` resolves ids"),
];

/// The properties of a workspace package that the rules check.
#[derive(Debug, Default, Clone)]
pub(super) struct Member {
    /// Package name.
    name: String,
    /// Folder from the workspace root, with `/`.
    folder: String,
    /// Names of declared dependencies of every kind: normal, build, dev.
    all: BTreeSet<String>,
    /// The same without dev-dependencies: those that a user of this crate gets too.
    passed_on: BTreeSet<String>,
    /// Whether README.md exists.
    readme: bool,
}

impl Member {
    /// Returns the folder name of a crate in `crates/`; `None` for tests, benches and xtask.
    fn crate_name(&self) -> Option<&str> {
        self.folder.strip_prefix("crates/")
    }
}

/// Reads the workspace's packages from `cargo metadata`.
pub(super) fn members(workspace: &Workspace) -> Result<Vec<Member>> {
    let metadata = workspace.members()?;
    let convert = |package: &cargo_metadata::Package| {
        let folder = package.manifest_path.parent().map(|folder| folder.as_std_path()).unwrap_or(workspace.root());
        let relative = folder.strip_prefix(workspace.root()).unwrap_or(folder);
        let development = cargo_metadata::DependencyKind::Development;
        let names = |keep_development: bool| {
            let kept = package.dependencies.iter().filter(move |d| keep_development || d.kind != development);
            kept.map(|dependency| dependency.name.clone()).collect()
        };
        Member {
            name: package.name.to_string(),
            folder: relative.to_string_lossy().replace('\\', "/"),
            all: names(true),
            passed_on: names(false),
            readme: folder.join("README.md").is_file(),
        }
    };
    Ok(metadata.workspace_packages().into_iter().map(convert).collect())
}

/// Checks the dependency graph.
pub(super) fn check(members: &[Member]) -> Vec<Finding> {
    let of = |member: &Member| {
        let path = format!("{}/Cargo.toml", member.folder);
        let messages = [layout(member), downward(member), burn(member, members), reserved(member)].concat();
        messages.into_iter().map(move |message| Finding::new("layers", &path, 0, message))
    };
    members.iter().flat_map(of).collect()
}

fn layer(crate_name: &str) -> Option<u8> {
    LAYERS.iter().find(|(name, _)| *name == crate_name).map(|(_, layer)| *layer)
}

fn layout(member: &Member) -> Vec<String> {
    let Some(folder) = member.crate_name() else { return Vec::new() };
    let mut messages = Vec::new();
    if member.name != format!("{PREFIX}{folder}") {
        messages.push(format!("package `{}`: name it `{PREFIX}{folder}`, after its folder", member.name));
    }
    if layer(folder).is_none() {
        let message = "has no layer: add it to LAYERS in xtask/src/tidy/layers.rs and to docs/architecture.md";
        messages.push(format!("`{folder}` {message}"));
    }
    if !member.readme {
        messages.push("no README.md: say what the crate is, what it is not, and its invariants".to_owned());
    }
    messages
}

fn downward(member: &Member) -> Vec<String> {
    let Some((from, height)) = member.crate_name().and_then(|from| Some((from, layer(from)?))) else {
        return Vec::new();
    };
    let mut messages = Vec::new();
    for to in member.all.iter().filter_map(|name| name.strip_prefix(PREFIX)) {
        let is_lower = layer(to).is_some_and(|lower| lower < height);
        let why =
            "a dependency goes to a lower layer only. Move what both need below them, or pass it in from `trainer`";
        let forbidden = FORBIDDEN.iter().filter(|(a, b, _)| (*a, *b) == (from, to)).map(|(_, _, why)| *why);
        let reasons = (!is_lower).then_some(why).into_iter().chain(forbidden);
        messages.extend(reasons.map(|why| format!("`{from}` may not depend on `{to}`: {why}")));
    }
    messages
}

fn burn(member: &Member, members: &[Member]) -> Vec<String> {
    let Some(name) = member.crate_name().filter(|name| WITHOUT_BURN.contains(name)) else { return Vec::new() };
    let way = way_to_burn(&member.all, members, &mut BTreeSet::new()).map(|way| way.join(" -> "));
    let message =
        |way| format!("`{name}` may not depend on Burn, but: {name} -> {way}. Take numbers and slices, not tensors");
    way.map(message).into_iter().collect()
}

/// Finds a chain of dependencies to a crate of Burn, through `members` only.
fn way_to_burn<'a>(
    dependencies: &'a BTreeSet<String>,
    members: &'a [Member],
    seen: &mut BTreeSet<&'a str>,
) -> Option<Vec<&'a str>> {
    if let Some(burn) = dependencies.iter().find(|name| *name == "burn" || name.starts_with("burn-")) {
        return Some(vec![burn]);
    }
    for next in members.iter().filter(|member| dependencies.contains(&member.name)) {
        if seen.insert(&next.name)
            && let Some(mut way) = way_to_burn(&next.passed_on, members, seen)
        {
            way.insert(0, &next.name);
            return Some(way);
        }
    }
    None
}

/// Reports dependencies that belong to another crate: CubeCL to `kernels`, TOML to `trainer` (recipes and run folders) and the program above it.
fn reserved(member: &Member) -> Vec<String> {
    let mut messages = Vec::new();
    for name in &member.all {
        if (name.starts_with("cubecl") || name == "burn-cubecl") && member.folder != "crates/kernels" {
            messages.push(format!("`{name}` belongs to `kernels` alone: add the operation that is missing there"));
        }
        if name == "toml" && member.crate_name().is_some_and(|name| !matches!(name, "trainer" | "train")) {
            let message =
                "`toml` belongs to `trainer`, which reads recipes, and to `train`: take the values as arguments";
            messages.push(message.to_owned());
        }
    }
    messages
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Creates a crate with the dependencies `all`, none of them for development only.
    fn of(folder: &str, all: &[&str]) -> Member {
        let all: BTreeSet<String> = all.iter().map(|name| (*name).to_owned()).collect();
        let name = format!("{PREFIX}{}", folder.trim_start_matches("crates/"));
        Member { name, folder: folder.to_owned(), passed_on: all.clone(), all, readme: true }
    }

    fn messages(members: &[Member]) -> Vec<String> {
        check(members).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn dependencies_on_lower_layers_are_fine() {
        let members = [
            of("crates/train", &["firebrick-trainer", "firebrick-data", "toml"]),
            of("crates/trainer", &["firebrick-model", "firebrick-data", "firebrick-parallel", "toml", "burn-tensor"]),
            of("crates/model", &["firebrick-kernels", "firebrick-arch", "firebrick-precision", "burn-tensor"]),
            of("crates/kernels", &["firebrick-cuda", "firebrick-hwprofile", "cubecl", "burn-cubecl"]),
            of("crates/cuda", &["firebrick-precision", "cudarc"]),
            of("tests", &["firebrick-train", "toml"]),
        ];
        assert_eq!(messages(&members), [""; 0]);
    }

    #[test]
    fn no_dependency_goes_sideways_or_up_or_is_refused_by_name() {
        for (from, to, why) in [
            ("model", "optim", "a lower layer only"),
            ("optim", "model", "a lower layer only"),
            ("kernels", "parallel", "a lower layer only"),
            ("trainer", "train", "a lower layer only"),
            ("hwprofile", "cuda", "a lower layer only"),
            ("model", "data", "token ids"),
            ("model", "hub", "`trainer` resolves ids"),
        ] {
            let found = messages(&[of(&format!("crates/{from}"), &[&format!("{PREFIX}{to}")])]);
            assert_eq!(found.len(), 1, "{found:?}");
            let is_named = found[0].contains(&format!("`{from}` may not depend on `{to}`: "));
            assert!(is_named && found[0].contains(why), "{found:?}");
        }
    }

    #[test]
    fn burn_is_found_through_other_crates_but_not_through_their_tests() {
        let hwprofile = of("crates/hwprofile", &["firebrick-precision"]);
        let precision = of("crates/precision", &["burn-tensor"]);
        let found = messages(&[hwprofile.clone(), precision.clone()]);
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found[0].contains("hwprofile -> firebrick-precision -> burn-tensor"), "{found:?}");
        let only_its_tests = Member { passed_on: BTreeSet::new(), ..precision };
        assert_eq!(messages(&[hwprofile, only_its_tests]).len(), 1);
    }

    #[test]
    fn toml_and_cubecl_have_one_owner_each_and_a_crate_is_named_placed_and_described() {
        let stray = Member { name: "utils".to_owned(), readme: false, ..of("crates/utils", &[]) };
        let [train, benches] = [of("crates/train", &["cubecl"]), of("benches", &["burn-cubecl"])];
        let found = messages(&[train, benches, of("crates/data", &["toml"]), stray]);
        assert_eq!(found.len(), 6, "{found:?}");
        assert!(found.iter().any(|message| message.contains("LAYERS")));
    }
}
