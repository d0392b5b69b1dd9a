//! What settings of GRPO become: TRL's names, which axolotl has under `trl` and ms-swift has too.
//!
//! Rows are completions there too.

use toml::{Table, Value};

use crate::convert::draft::{Draft, has_key};
use crate::convert::kind::{Trainer, is_grpo};
use crate::convert::setting::{Outcome, Setting, has, left, needless, number, number_of, set};
use crate::convert::values::{self, plain_number};

/// Rewards in TRL's module of them that need no arguments.
const OF_TRL: [&str; 3] = ["accuracy_reward", "reasoning_accuracy_reward", "think_format_reward"];
/// Maximum tokens of a completion there, and of a prompt while prompts had one.
pub(in crate::convert) const LENGTH: i64 = 512;

/// Returns what becomes of a setting of a run of GRPO; `None` for any other.
pub(super) fn outcome(setting: &Setting, all: &[Setting], draft: &mut Draft) -> Option<Outcome> {
    let name = setting.path.strip_prefix("trl.").unwrap_or(&setting.path);
    if !is_grpo(all, draft.trainer) {
        return None;
    }
    match name {
        "reward_funcs" => rewards(setting, all, draft),
        "reward_weights" if has(all, "reward_funcs") => needless("each reward has its own weight"),
        "soft_max_length" | "soft_cache_length" => needless("it is in the reward of that name"),
        "max_prompt_length" | "max_length" => needless("it is in max_seq_len"),
        "steps_per_generation" => steps_of_round(number(&setting.value)?, all, draft.trainer),
        // Also the section of axolotl's server.
        name if name.starts_with("vllm") => values::in_section("Grpo", "use_vllm", &true.into()),
        name => values::in_section("Grpo", name, &setting.value).or_else(|| {
            has_key("grpo", name).then(|| set(&format!("grpo.{name}"), plain_number(&setting.value))).flatten()
        }),
    }
}

/// Returns the optimizer steps of a round; theirs are passes, of which a step has some.
fn steps_of_round(passes: f64, all: &[Setting], trainer: Trainer) -> Option<Outcome> {
    let of_step = number_of(all, "gradient_accumulation_steps").or((trainer != Trainer::Swift).then_some(1.0));
    match of_step.map(|of_step| passes / of_step) {
        Some(steps) if steps >= 1.0 && steps.fract() == 0.0 => set("grpo.steps_per_generation", steps as i64),
        _ => left("write grpo.steps_per_generation: optimizer steps whose completions are sampled at once, not passes"),
    }
}

/// Returns the rewards of functions that are named, with their weights.
fn rewards(setting: &Setting, all: &[Setting], draft: &mut Draft) -> Option<Outcome> {
    let list = |value: &Value| value.as_array().cloned().unwrap_or_else(|| vec![value.clone()]);
    let weights = all.iter().find(|other| other.name() == "reward_weights").map(|other| list(&other.value));
    let mut rewards = Vec::new();
    for (index, function) in list(&setting.value).iter().enumerate() {
        let name = function.as_str().unwrap_or_default();
        if name.contains('/') {
            return Some(Outcome::Method(
                "no reward model scores completions; a process may (docs/rewards.md)".to_owned(),
            ));
        }
        let mut reward = reward(name, all).unwrap_or_else(|| {
            let why = format!("{}: write the module of the function {name} in place of MODULE", setting.path);
            draft.incomplete.get_or_insert(why);
            of_function("MODULE", name)
        });
        if let Some(weight) = weights.as_ref().and_then(|weights| weights.get(index)) {
            reward.insert("weight".to_owned(), plain_number(weight));
        }
        rewards.push(Value::Table(reward));
    }
    set("grpo.rewards", rewards)
}

/// Returns the reward of a name; `None` where it does not say which module has the function.
fn reward(name: &str, all: &[Setting]) -> Option<Table> {
    let of_length = |max: i64, soft: i64| {
        let length = Table::from_iter([("max".to_owned(), max.into()), ("soft".to_owned(), soft.into())]);
        Table::from_iter([("name".to_owned(), name.into()), ("length".to_owned(), length.into())])
    };
    let whole = |name: &str| number_of(all, name).map(|number| number as i64);
    match name {
        "get_soft_overlong_punishment" => Some(of_length(1280, 256)),
        "soft_overlong" => {
            let max = whole("soft_max_length").or_else(|| whole("max_completion_length")).unwrap_or(LENGTH);
            Some(of_length(max, whole("soft_cache_length")?))
        }
        name if OF_TRL.contains(&name) => Some(of_function("trl.rewards", name)),
        name => name.rsplit_once('.').map(|(module, function)| of_function(module, function)),
    }
}

/// Returns the reward of a Python function with TRL's arguments.
pub(in crate::convert) fn of_function(module: &str, name: &str) -> Table {
    let function = format!("{module}:{name}");
    let command = ["python3", "assets/reward.py", &function].map(Value::from);
    Table::from_iter([("name".to_owned(), name.into()), ("command".to_owned(), command.to_vec().into())])
}
