//! JSON that somebody else wrote, for fuzzers: a valid document with two of its values replaced, removed or nested.
//!
//! Trade-off: what is no JSON is left to the readers' own tests. Tests of other crates include this file by its path.

use serde_json::{Value, json};

/// Returns the document with number `seed`; the same for the same seed.
pub(crate) fn hostile(document: &Value, seed: u64) -> Value {
    let mut changed = document.clone();
    for round in 0..2 {
        // SplitMix64.
        let mut random = (2 * seed + round).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        random = (random ^ (random >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        random = (random ^ (random >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        let mut paths = vec![String::new()];
        list(&changed, "", &mut paths);
        let path = &paths[(random >> 20) as usize % paths.len()];
        let (parent, name) = path.rsplit_once('/').unwrap_or(("", ""));
        let values = values();
        match (random % (values.len() as u64 + 2)) as usize {
            0 => match changed.pointer_mut(parent) {
                Some(Value::Object(map)) => drop(map.remove(name)),
                Some(Value::Array(list)) => list.clear(),
                _ => {}
            },
            1 => {
                let value = changed.pointer_mut(path).expect("a listed path");
                (0..100).for_each(|_| *value = json!([value.take()]));
            }
            index => *changed.pointer_mut(path).expect("a listed path") = values[index - 2].clone(),
        }
    }
    changed
}

fn values() -> Vec<Value> {
    let numbers = [-1, 0, 1, 100_000_000, 1 << 31, 1 << 32, (1 << 53) + 1, i64::MAX, i64::MIN];
    let texts = [
        "",
        "../../../etc/passwd",
        "/etc/passwd",
        "\u{1b}[2J\0\r\n",
        "nan",
        "18446744073709551616",
        "https://a:b@c?d",
        ".*(",
    ];
    let others = json!([null, true, u64::MAX, 1e300, -1e-300, 0.5, [], {}, "x".repeat(16_000), vec![0; 20_000]]);
    let others = others.as_array().cloned().unwrap_or_default();
    numbers.map(Value::from).into_iter().chain(texts.map(Value::from)).chain(others).collect()
}

/// Lists the pointers of all values below this one, at most 64 of a list.
fn list(value: &Value, path: &str, paths: &mut Vec<String>) {
    let entries: Vec<(String, &Value)> = match value {
        Value::Object(map) if !map.keys().any(|key| key.contains(['/', '~'])) => {
            map.iter().map(|(key, value)| (key.clone(), value)).collect()
        }
        Value::Array(list) => {
            list.iter().take(64).enumerate().map(|(index, value)| (index.to_string(), value)).collect()
        }
        _ => Vec::new(),
    };
    for (key, value) in entries {
        let path = format!("{path}/{key}");
        paths.push(path.clone());
        list(value, &path, paths);
    }
}

/// Runs a test's work on many documents: few in ordinary runs. None may take long.
pub(crate) fn each_hostile(document: &Value, mut work: impl FnMut(&Value)) {
    let count = if std::env::var_os("FIREBRICK_SLOW_TESTS").is_some() { 2500 } else { 60 };
    for seed in 0..count {
        let started = std::time::Instant::now();
        work(&hostile(document, seed));
        assert!(started.elapsed().as_secs() < 20, "document {seed} took {:?}", started.elapsed());
    }
}
