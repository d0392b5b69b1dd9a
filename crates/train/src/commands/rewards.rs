//! `firebrick reward`: tries the rewards of a recipe on completions in a file, without a model.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, bail, ensure};
use clap::Args;
use firebrick_arch::counted;
use firebrick_trainer::grpo::reward::{Request, RewardSection, Rewards};
use firebrick_trainer::grpo::reward_of;
use serde_json::{Map, Value};

use super::recipes::Recipe;
use firebrick_trainer::console::Console;

#[derive(Args)]
pub(crate) struct TryRewards {
    #[command(flatten)]
    recipe: Recipe,
    /// A JSONL file of completions: {"prompt": ..., "completion": "...", and the columns that rewards read}.
    #[arg(long, value_name = "FILE")]
    completions: PathBuf,
    /// Where the standard error of reward processes goes.
    #[arg(long, value_name = "FILE", default_value = "rewards.log")]
    log: PathBuf,
}

/// A completion of the file.
struct Line {
    prompt: Value,
    completion: String,
    row: Map<String, Value>,
}

pub(crate) fn try_rewards(arguments: &TryRewards) -> anyhow::Result<()> {
    let recipe = arguments.recipe.load()?;
    let grpo = recipe.grpo.context("the recipe has no [grpo], and so no rewards")?;
    let lines = read(arguments)?;
    let requests = lines.iter().enumerate().map(|(index, line)| Request {
        id: index as u64,
        group: index as u64,
        step: 0,
        prompt: &line.prompt,
        completion: &line.completion,
        is_truncated: false,
        tokens: line.completion.split_whitespace().count(),
        completion_ids: &[],
        row: &line.row,
    });
    let requests: Vec<Request<'_>> = requests.collect();
    let mut rewards = Rewards::open(&grpo.rewards, &arguments.log)?;
    let scores = rewards.score(&requests)?;
    let shown = |value: Option<f64>| value.map_or_else(|| "null".to_owned(), |value| format!("{value:.4}"));
    let (mut sum, mut count) = (0.0, 0);
    for (index, (line, parts)) in lines.iter().zip(&scores.parts).enumerate() {
        let total = reward_of(parts, &rewards.weights());
        (sum, count) = total.map_or((sum, count), |total| (sum + total, count + 1));
        let parts: Vec<String> =
            rewards.names().iter().zip(parts).map(|(name, part)| format!("{name} {}", shown(*part))).collect();
        let text: String = line.completion.chars().take(60).collect();
        Console::VERBOSE.print(&format!("{}: {}  ({})  {text:?}", index + 1, shown(total), parts.join(", ")));
    }
    let limit = |reward: &RewardSection| format!("timeout = {} s of reward '{}'", reward.timeout(), reward.name());
    let processes = grpo.rewards.iter().filter(|reward| reward.command.is_some());
    let limits: Vec<String> = processes.map(limit).collect();
    let late = format!("{} did not come within {}", counted(scores.timeouts, "score"), limits.join(" or "));
    match (count, scores.timeouts) {
        (0, 0) => bail!("no completion was scored: each reward gave null, as `answer` does without its column"),
        (0, _) => bail!("no completion was scored: {late}; raise it"),
        _ => {}
    }
    let late = if scores.timeouts > 0 { format!("; {late}") } else { String::new() };
    let mean = sum / f64::from(count);
    Console::VERBOSE.print(&format!("mean reward {mean:.4} of {}{late}", counted(count, "completion")));
    Ok(())
}

fn read(arguments: &TryRewards) -> anyhow::Result<Vec<Line>> {
    let file = &arguments.completions;
    let text = fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
    let mut lines = Vec::new();
    for (index, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let place = || format!("{}:{}", file.display(), index + 1);
        let row: Map<String, Value> = serde_json::from_str(line).with_context(place)?;
        let Some(completion) = row.get("completion").and_then(Value::as_str).map(str::to_owned) else {
            let keys = row.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
            bail!("{}: expected the key \"completion\" with a text, the answer to score; found {keys}", place());
        };
        lines.push(Line { prompt: row.get("prompt").cloned().unwrap_or_default(), completion, row });
    }
    ensure!(!lines.is_empty(), "{} has no completion", file.display());
    Ok(lines)
}
