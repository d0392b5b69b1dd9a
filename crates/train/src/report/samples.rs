//! What a run has written: the answers to its sample prompts before and after training, and where it learns from rewards completions of its first,
//! its middle and its last round, with their rewards.
//!
//! Trade-off: of a round the best and the worst completion of a few prompts, of rank 0 alone.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::page::{Block, Column, Table};
use crate::plot::short;

/// Prompts of a round that are shown.
const PROMPTS: usize = 3;
/// Characters of a text that are shown.
const CHARACTERS: usize = 4000;

/// Completions of a round, in the order of its file.
#[derive(Clone, Debug)]
pub struct Round {
    /// The first step that learns from them.
    pub step: u64,
    /// Those of rank 0.
    pub completions: Vec<Value>,
}

/// Reads the first, the middle and the last round of a run folder; none if it has none. Lines that are not JSON are left out.
pub(super) fn read(run: &Path) -> Vec<Round> {
    let step_of = |name: &str| name.strip_prefix("step-")?.strip_suffix("-rank-0.jsonl")?.parse::<u64>().ok();
    let entries = fs::read_dir(run.join("rounds")).into_iter().flatten().flatten();
    let files = entries.filter_map(|entry| Some((step_of(entry.file_name().to_str()?)?, entry.path())));
    let files: BTreeSet<(u64, PathBuf)> = files.collect();
    let last = files.len().saturating_sub(1);
    let round = |(step, path): (u64, PathBuf)| {
        let text = fs::read_to_string(path).unwrap_or_default();
        Round { step, completions: text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect() }
    };
    let shown = files.into_iter().enumerate().filter(|(index, _)| [0, last / 2, last].contains(index));
    shown.map(|(_, file)| round(file)).filter(|round| !round.completions.is_empty()).collect()
}

/// CSS rules of the table of answers, which keep line breaks.
pub(super) const STYLE: &str = "tr.answers td { white-space: pre-wrap; overflow-wrap: anywhere; min-width: 12rem }\n";

/// Shows sample prompts, each with its answers; nothing if there are none.
pub(super) fn answers(samples: &[Value]) -> Vec<Block> {
    let cell = |text: &Value| text.as_str().map_or_else(|| "was not asked".to_owned(), beginning);
    let row = |sample: &Value| ("answers", ["prompt", "before", "after"].map(|key| cell(&sample[key])).to_vec());
    let names = ["prompt", "answer before training", "answer after training"];
    let rows = samples.iter().map(row).collect();
    let table = Table { columns: names.map(|name| (name, Column::Text)).to_vec(), rows };
    if table.rows.is_empty() { Vec::new() } else { vec![Block::heading("Answers"), Block::Table(table)] }
}

/// Shows rounds, whose rewards have these names in the order of the recipe.
pub(super) fn blocks(rounds: &[Round], names: &[String]) -> Vec<Block> {
    let heading = (!rounds.is_empty()).then(|| Block::heading("Samples with their rewards"));
    heading.into_iter().chain(rounds.iter().map(|round| folded(round, names))).collect()
}

fn folded(Round { step, completions }: &Round, names: &[String]) -> Block {
    let rewards: Vec<f64> = completions.iter().filter_map(|one| one["reward"].as_f64()).collect();
    let mean = rewards.iter().sum::<f64>() / rewards.len().max(1) as f64;
    let groups = completions.chunk_by(|one, next| one["document"] == next["document"]);
    let shown = groups.take(PROMPTS).flat_map(|group| of_prompt(group, names)).collect();
    let (count, scored) = (completions.len(), rewards.len());
    let title =
        format!("Before step {step}: {count} completions, {scored} of them scored, mean reward {}", short(mean));
    Block::Folded(title, shown)
}

/// Shows a prompt with its best and its worst completion; one without a reward counts as the worst.
fn of_prompt(group: &[Value], names: &[String]) -> Vec<Block> {
    let reward = |completion: &Value| completion["reward"].as_f64().unwrap_or(f64::NEG_INFINITY);
    let mut sorted: Vec<&Value> = group.iter().collect();
    sorted.sort_by(|one, other| reward(other).total_cmp(&reward(one)));
    let (Some(best), Some(worst)) = (sorted.first(), sorted.last()) else { return Vec::new() };
    let prompt = match &best["prompt"] {
        Value::Null => Vec::new(),
        prompt => vec![Block::Text("Prompt".to_owned()), text(&words(prompt))],
    };
    let both = [("Best completion", best), ("Worst completion", worst)];
    prompt.into_iter().chain(both.into_iter().flat_map(|(what, one)| completion(what, one, names))).collect()
}

fn completion(what: &str, completion: &Value, names: &[String]) -> [Block; 2] {
    let number = |value: &Value| value.as_f64().map_or_else(|| "none".to_owned(), short);
    let parts = completion["parts"].as_array().into_iter().flatten().enumerate();
    let part = |(index, part): (usize, &Value)| {
        let name = names.get(index).cloned().unwrap_or_else(|| format!("reward {}", index + 1));
        format!("{name} {}", number(part))
    };
    let parts: Vec<String> = parts.map(part).collect();
    let tokens = completion["tokens"].as_array().map_or(0, Vec::len);
    let cut = if completion["is_truncated"] == true { ", cut at the limit" } else { "" };
    let reward = number(&completion["reward"]);
    let line = format!("{what}: reward {reward} ({}), {tokens} tokens{cut}", parts.join(", "));
    [Block::Text(line), text(completion["text"].as_str().unwrap_or(""))]
}

/// Returns the text of a prompt: messages with their roles, or what it is as JSON.
fn words(prompt: &Value) -> String {
    let message = |message: &Value| {
        let of = |keys: [&str; 2]| keys.into_iter().find_map(|key| message.get(key)?.as_str().map(str::to_owned));
        Some(format!("{}: {}", of(["role", "from"])?, of(["content", "value"])?))
    };
    let messages = || prompt.as_array()?.iter().map(message).collect::<Option<Vec<_>>>();
    match prompt.as_str() {
        Some(text) => text.to_owned(),
        None => messages().map_or_else(|| prompt.to_string(), |messages| messages.join("\n")),
    }
}

fn text(all: &str) -> Block {
    Block::Verbatim(beginning(all))
}

fn beginning(all: &str) -> String {
    let shown: String = all.chars().take(CHARACTERS).collect();
    let more = all.chars().count().saturating_sub(CHARACTERS);
    if more > 0 { format!("{shown} [{more} more characters]") } else { shown }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::page::Page;
    use crate::report::page;

    /// Writes a round of two prompts with three completions each; `prompt` is a key of newer files.
    fn write_round(run: &Path, step: u64, prompt: Option<&Value>) {
        let completion = |index: usize| {
            let reward = [json!(0.25), json!(1.5), json!(null)][index % 3].clone();
            let text = format!("<i>step {step}, {index}</i>");
            let mut line = json!({ "id": index, "document": index / 3, "text": text, "tokens": [5, 6, 7],
                "is_truncated": index == 1, "parts": [reward, null], "reward": reward, "advantage": 0.0, "sampled": [] });
            prompt.into_iter().for_each(|prompt| line["prompt"] = prompt.clone());
            line.to_string() + "\n"
        };
        let lines: String = (0..6).map(completion).collect();
        fs::create_dir_all(run.join("rounds")).unwrap();
        fs::write(run.join(format!("rounds/step-{step:08}-rank-0.jsonl")), lines).unwrap();
    }

    fn shown(run: &Path) -> String {
        let blocks = blocks(&read(run), &["answer".to_owned()]);
        Page { name: String::new(), what: String::new(), style: "", blocks }.render()
    }

    #[test]
    fn the_first_the_middle_and_the_last_round_are_shown_best_and_worst_first() {
        let folder = tempfile::tempdir().unwrap();
        assert!(blocks(&read(folder.path()), &[]).is_empty());
        let messages = json!([{ "role": "user", "content": "2 < 3?" }]);
        (1..=5).for_each(|step| write_round(folder.path(), step, Some(&messages)));
        fs::write(folder.path().join("rounds/step-00000009-rank-1.jsonl"), "{}\n").unwrap();
        fs::write(folder.path().join("rounds/rewards.log"), "no round").unwrap();
        let page = shown(folder.path());
        for part in [
            "Before step 3: 6 completions, 4 of them scored, mean reward 0.875",
            "<pre>user: 2 &lt; 3?</pre>",
            "Best completion: reward 1.5 (answer 1.5, reward 2 none), 3 tokens, cut at the limit",
            "<pre>&lt;i&gt;step 1, 1&lt;/i&gt;</pre>",
            "Worst completion: reward none (answer none, reward 2 none), 3 tokens",
            "<pre>&lt;i&gt;step 5, 5&lt;/i&gt;</pre>",
        ] {
            assert!(page.contains(part), "{part:?} is not in {page}");
        }
        let steps: Vec<u64> = read(folder.path()).iter().map(|round| round.step).collect();
        assert_eq!(steps, [1, 3, 5]);
    }

    #[test]
    fn files_without_prompts_are_read_and_a_report_has_the_names_of_the_plan() {
        let folder = tempfile::tempdir().unwrap();
        write_round(folder.path(), 7, None);
        assert!(!shown(folder.path()).contains("Prompt"));
        fs::write(folder.path().join("metrics.jsonl"), "{\"step\":7,\"reward\":0.875}\n").unwrap();
        let plan = "[grpo]\nreason = \"r\"\n[[grpo.value.rewards]]\nname = \"exact\"\nanswer = \"answer\"\n\
                    [[grpo.value.rewards]]\nregex = \"x\"\nweight = 1.0\n";
        fs::write(folder.path().join("plan.toml"), plan).unwrap();
        let page = page(folder.path()).unwrap();
        assert!(page.contains("Best completion: reward 1.5 (exact 1.5, regex none), 3 tokens"), "{page}");
    }

    #[test]
    fn a_long_text_is_cut() {
        assert!(beginning(&"é".repeat(CHARACTERS + 5)).ends_with("é [5 more characters]"));
    }
}
