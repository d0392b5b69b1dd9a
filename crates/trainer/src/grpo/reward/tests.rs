//! Built-in rewards, and processes that answer, err, hang and end.

use std::fs;
use std::process::Command;

use serde_json::json;
use tempfile::TempDir;

use super::*;

fn cases(name: &str) -> Vec<Value> {
    let cases: Value = toml::from_str(include_str!("tests.toml")).expect("TOML");
    cases[name].as_array().cloned().expect(name)
}

fn open(folder: &TempDir, reward: &Value) -> Result<Rewards, RewardError> {
    let section = serde_json::from_value(reward.clone()).unwrap_or_else(|error| panic!("{reward}: {error}"));
    Rewards::open(&[section], &folder.path().join("log"))
}

/// Opens a reward whose process writes its start line, and has the folder as `$0`.
fn shell(folder: &TempDir, script: &str, timeout: f64) -> Rewards {
    let script = format!("echo '{{\"firebrick_reward\": 1, \"batch\": false}}'; {script}");
    let command = ["sh", "-c", &script, folder.path().to_str().unwrap()];
    open(folder, &json!({"name": "r", "command": command, "timeout": timeout})).unwrap()
}

/// Scores completions, two of each prompt.
fn score(rewards: &mut Rewards, prompt: &Value, completions: &[&str]) -> Result<Scores, RewardError> {
    let row = serde_json::from_str(r#"{"solution": "so 42", "number": 42, "empty": null}"#).unwrap();
    let ids: Vec<[u32; 1]> = completions.iter().map(|completion| [completion.len() as u32]).collect();
    let request = |((id, &completion), completion_ids)| {
        let (tokens, is_truncated) = (str::len(completion), true);
        Request { id, group: id / 2, step: 1, prompt, completion, is_truncated, tokens, completion_ids, row: &row }
    };
    let ids = ids.iter().map(<[u32; 1]>::as_slice);
    rewards.score(&(0..).zip(completions).zip(ids).map(request).collect::<Vec<_>>())
}

#[test]
fn built_in_kinds() {
    for case in cases("scored") {
        let mut rewards = open(&TempDir::new().unwrap(), &case["reward"]).unwrap();
        for pair in case["completions"].as_array().unwrap() {
            let scores = score(&mut rewards, &json!("p"), &[pair[0].as_str().unwrap()]).unwrap();
            assert_eq!(json!(scores.parts), json!([[pair[1]]]), "{case}, {pair}");
        }
    }
}

#[test]
fn what_cannot_be_opened_is_named() {
    for case in cases("refused") {
        let message = open(&TempDir::new().unwrap(), &case["reward"]).err().expect("an error").to_string();
        assert!(message.contains(case["message"].as_str().unwrap()), "{case}: {message}");
    }
    let section: RewardSection = toml::from_str("regex = 'a'").unwrap();
    assert_eq!(check(&[section.clone(), section]), [format!("reward 'regex': {SAME_NAME}")]);
}

#[test]
fn what_is_no_answer_is_named() {
    for case in cases("wrong") {
        let folder = TempDir::new().unwrap();
        let script = format!("read a; echo why >&2; {}", case["script"].as_str().unwrap());
        let message = score(&mut shell(&folder, &script, 30.0), &json!("p"), &["x", "y"]).unwrap_err().to_string();
        assert!(message.starts_with("reward 'r': ") && message.ends_with("/log: 'why'"), "{case}: {message}");
        assert!(message.contains(case["message"].as_str().unwrap()), "{case}: {message}");
    }
}

#[test]
fn answers_come_in_any_order_while_stderr_fills() {
    let folder = TempDir::new().unwrap();
    let script = r#"read a; yes 'a line of stderr' | head -c 1000000 >&2; read b; echo "$b" >"$0/request"
        echo '{"id": 1, "reward": null, "metrics": {"m": 1}}'; echo '{"id": 0, "reward": 2, "metrics": {"m": 2}}'; read c"#;
    let scores = score(&mut shell(&folder, script, 30.0), &json!("p"), &["x", "y"]).unwrap();
    let metrics = BTreeMap::from([("m".to_owned(), 1.5)]);
    assert_eq!(scores, Scores { parts: vec![vec![Some(2.0)], vec![None]], timeouts: 0, metrics });
    let request = fs::read_to_string(folder.path().join("request")).unwrap();
    let expected = r#"{"id":1,"group":0,"step":1,"prompt":"p","completion":"y","finish":"length","tokens":1,"#;
    let rest = request.strip_prefix(expected).unwrap_or_else(|| panic!("{request}"));
    assert!(rest.starts_with(r#""completion_ids":[1],"row":{"#), "{request}");
}

#[test]
fn a_timeout_gives_null_and_the_next_call_works() {
    let folder = TempDir::new().unwrap();
    let script = r#"mkdir "$0/first" && { read a; echo '{"id": 0, "reward": 1}'; sleep 60; }
        while read a; do echo '{"id": 0, "reward": 2}'; done"#;
    let (mut rewards, fills_the_pipe) = (shell(&folder, script, 1.0), "x".repeat(1_000_000));
    let scores = score(&mut rewards, &json!("p"), &["x", &fills_the_pipe]).unwrap();
    assert_eq!((scores.parts, scores.timeouts), (vec![vec![Some(1.0)], vec![None]], 1));
    assert_eq!(score(&mut rewards, &json!("p"), &["x"]).unwrap().parts, [[Some(2.0)]]);
}

#[test]
fn functions_of_trl_run_unchanged_on_whole_groups() {
    if Command::new("python3").arg("--version").output().is_err() {
        assert!(std::env::var_os("CI").is_none(), "CI must have python3");
        return;
    }
    let folder = TempDir::new().unwrap();
    fs::write(folder.path().join("functions.py"), include_str!("tests.py")).unwrap();
    let wrapper = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/reward.py");
    let command = |name: &str| json!(["sh", "-c", "cd \"$0\"; exec python3 \"$@\"", folder.path(), wrapper, name]);
    let two = json!({"command": command("functions:count_in_two_processes"), "workers": 2});
    let mut rewards = open(&folder, &two).unwrap();
    for prompt in [json!("p"), json!([{"role": "user", "content": "p"}])] {
        let scores = score(&mut rewards, &prompt, &["a", "none", "b", "nan", "c", "d"]).unwrap();
        assert_eq!(scores.parts.concat(), [Some(46.0), None, Some(44.0), None, Some(46.0), Some(46.0)]);
        assert_eq!(scores.metrics["completions"], 3.0);
    }
    let mut too_few = open(&folder, &json!({"command": command("functions:too_few")})).unwrap();
    let message = score(&mut too_few, &json!("p"), &["a", "b"]).unwrap_err().to_string();
    assert!(message.ends_with("'ValueError: 1 rewards for 2 completions, whose ids begin with 0'"), "{message}");
}
