//! Rewards of completions (`[[grpo.rewards]]`): rules that are built in, and processes of the user that answer over JSON lines.
//!
//! A reward that cannot be judged is `None`, never 0: it counts in no mean ([`super::reward_of`]).

mod built_in;
mod process;
#[cfg(all(test, unix))]
mod tests;

use std::collections::BTreeMap;
use std::path::Path;
use std::thread;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize, Serializer};
use serde_json::{Map, Value};

use process::Process;

/// The reasons why completions have no rewards: what was expected, what was found, and where.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // of fields, which the messages name
pub enum RewardError {
    /// The tables of the recipe.
    #[error("{}", .0.join("\n"))]
    Refused(Vec<String>),
    /// A process.
    #[error("reward '{name}': {problem}")]
    Process { name: String, problem: String },
}

/// `[[grpo.rewards]]`: a reward of completions. It has exactly one of `answer`, `regex`, `json_schema`, `length` and `command`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RewardSection {
    /// Name in metrics and messages. Default: the key that says what is rewarded, such as "regex".
    pub name: Option<String>,
    /// What it is multiplied by before the rewards of a completion are added. Default 1.
    #[serde(default = "one")]
    pub weight: f64,
    /// Column of the data with the right answer: 1 if the completion has the same, otherwise 0. Rows without it are not judged.
    pub answer: Option<String>,
    /// With `answer`, what of both texts is compared, as in `eval.extract`: "whole", "last_number", "choice", or a regular expression with
    /// one group. Default "whole".
    pub extract: Option<String>,
    /// Regular expression: 1 if it matches anywhere in the completion, otherwise 0.
    pub regex: Option<String>,
    /// JSON schema: 1 if the completion is JSON that it accepts, bare or in a fence that begins with "```json", otherwise 0.
    pub json_schema: Option<Map<String, Value>>,
    /// Penalty for long completions, from 0 to -1.
    pub length: Option<LengthSection>,
    /// Program with its arguments that is started and answers over JSON lines, such as `["python", "reward.py"]`.
    pub command: Option<Vec<String>>,
    /// With `command`, number of processes that share the completions. Default 1.
    pub workers: Option<usize>,
    /// With `command`, seconds without an answer until a process is started again; what it has not answered is not judged. Default 30.
    pub timeout: Option<f64>,
}

const SAME_NAME: &str = "another reward has the same name; give one of them another, such as name = \"second\"";

fn one() -> f64 {
    1.0
}

/// `length`: 0 up to `max - soft` tokens, then linearly down to -1 at `max`, and -1 beyond (the soft overlong punishment of DAPO).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct LengthSection {
    /// Tokens from which the penalty is -1.
    pub max: usize,
    /// Number of tokens up to `max` over which it grows.
    pub soft: usize,
}

impl RewardSection {
    /// Returns the name in metrics and messages.
    pub fn name(&self) -> &str {
        self.name.as_deref().or(self.kinds().first().copied()).unwrap_or("without a name")
    }

    /// Returns the seconds without an answer after which completions get no score from a process.
    pub fn timeout(&self) -> f64 {
        self.timeout.unwrap_or(30.0)
    }

    fn kinds(&self) -> Vec<&'static str> {
        let texts = [self.answer.as_ref().map(|_| "answer"), self.regex.as_ref().map(|_| "regex")];
        let json_schema = self.json_schema.as_ref().map(|_| "json_schema");
        let others = [json_schema, self.length.map(|_| "length"), self.command.as_ref().map(|_| "command")];
        texts.into_iter().chain(others).flatten().collect()
    }

    /// Returns what is wrong with a section that comes after others.
    fn problems(&self, others: &[Self]) -> Vec<String> {
        let has_process_keys = self.workers.is_some() || self.timeout.is_some();
        let (kinds, workers, timeout) = (self.kinds(), self.workers.unwrap_or(1), self.timeout.unwrap_or(1.0));
        let program = self.command.as_ref().map(|command| command.first().map_or("", String::as_str));
        let rules = [
            (others.iter().all(|other| other.name() != self.name()), SAME_NAME.to_owned()),
            (kinds.len() == 1, format!("expected one of answer, regex, json_schema, length, command; got {kinds:?}")),
            (self.weight.is_finite(), format!("weight must be finite, got {}", self.weight)),
            (self.answer.is_some() || self.extract.is_none(), "extract needs answer, the column to compare".to_owned()),
            (program.is_some() || !has_process_keys, "workers and timeout need command".to_owned()),
            (program != Some(""), "command must begin with a program, such as \"python\"".to_owned()),
            ((1..=1024).contains(&workers), format!("workers must be from 1 to 1024, got {workers}")),
            (timeout > 0.0 && timeout <= 1e6, format!("timeout must be above 0 and at most 1e6, got {timeout}")),
        ];
        let broken = rules.into_iter().filter_map(|(holds, problem)| (!holds).then_some(problem));
        broken.chain(built_in::open(self).err()).map(|problem| format!("reward '{}': {problem}", self.name())).collect()
    }
}

/// Returns what is wrong with the rewards of a recipe, a message each; none if they can be opened.
pub fn check(rewards: &[RewardSection]) -> Vec<String> {
    rewards.iter().enumerate().flat_map(|(index, reward)| reward.problems(&rewards[..index])).collect()
}

/// A completion to judge, as a process receives it.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Request<'a> {
    /// Number that no other completion of the call has.
    pub id: u64,
    /// Number of its prompt. Completions of one prompt follow each other.
    pub group: u64,
    /// Step of the run.
    pub step: u64,
    /// List of messages, or a text.
    pub prompt: &'a Value,
    /// What the model wrote.
    pub completion: &'a str,
    /// Whether it ended at the limit of its length: `finish` is then "length", otherwise "stop".
    #[serde(rename = "finish", serialize_with = "finish")]
    pub is_truncated: bool,
    /// Its number of tokens.
    pub tokens: usize,
    /// The tokens, with the one that ended it; none where only the text is known.
    #[serde(skip_serializing_if = "<[u32]>::is_empty")]
    pub completion_ids: &'a [u32],
    /// The columns of its data row.
    pub row: &'a Map<String, Value>,
}

fn finish<S: Serializer>(is_truncated: &bool, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(if *is_truncated { "length" } else { "stop" })
}

/// What completions got.
#[derive(Clone, Debug, PartialEq)]
pub struct Scores {
    /// Per completion each reward, not multiplied by its weight; `None` where it could not be judged.
    pub parts: Vec<Vec<Option<f64>>>,
    /// Number of rewards that are `None` because no answer came in time.
    pub timeouts: usize,
    /// Numbers that processes named in their answers: means over those that have the name, of whatever reward.
    pub metrics: BTreeMap<String, f64>,
}

/// The reward of a completion and the numbers that its process named.
type Answer = (Option<f64>, BTreeMap<String, f64>);

/// Returns the answers to requests, in their order; `None` where none came in time.
type Judge = dyn FnMut(&[Request<'_>]) -> Result<Vec<Option<Answer>>, RewardError> + Send;

/// The rewards of a recipe, with their processes, which end when this is dropped.
pub struct Rewards {
    sections: Vec<RewardSection>,
    judges: Vec<Box<Judge>>,
}

impl Rewards {
    /// Opens rewards and starts their processes, whose stderr is appended to the file `log`.
    ///
    /// # Errors
    /// What [`check`] finds; a process that cannot be started or does not begin with its start line; a log that cannot be opened.
    pub fn open(sections: &[RewardSection], log: &Path) -> Result<Self, RewardError> {
        let problems = check(sections);
        if !problems.is_empty() {
            return Err(RewardError::Refused(problems));
        }
        let open = |section: &RewardSection| -> Result<Box<Judge>, RewardError> {
            if let Ok(Some(rule)) = built_in::open(section) {
                let answer = |reward| Some((reward, BTreeMap::new()));
                return Ok(Box::new(move |requests| {
                    Ok(requests.iter().map(|request| answer(rule(request))).collect())
                }));
            }
            let name = section.name().to_owned();
            let refused = move |problem| RewardError::Process { name: name.clone(), problem };
            let mut process = Process::start(section, log).map_err(&refused)?;
            Ok(Box::new(move |requests| process.score(requests).map_err(&refused)))
        };
        Ok(Self { judges: sections.iter().map(open).collect::<Result<_, _>>()?, sections: sections.to_vec() })
    }

    /// Returns the name of each reward.
    pub fn names(&self) -> Vec<&str> {
        self.sections.iter().map(RewardSection::name).collect()
    }

    /// Returns the weight of each reward.
    pub fn weights(&self) -> Vec<f64> {
        self.sections.iter().map(|section| section.weight).collect()
    }

    /// Judges completions, which have different ids, by all rewards at the same time.
    ///
    /// # Errors
    /// A process that ends, or writes what is no answer to its requests. The rewards are then to be dropped.
    pub fn score(&mut self, requests: &[Request<'_>]) -> Result<Scores, RewardError> {
        let answers = together(self.judges.iter_mut().map(|judge| move || judge(requests)))?;
        let mut sums: BTreeMap<&String, (f64, f64)> = BTreeMap::new();
        for (name, value) in answers.iter().flatten().flatten().flat_map(|(_, metrics)| metrics) {
            let (sum, count) = sums.entry(name).or_default();
            (*sum, *count) = (*sum + value, *count + 1.0);
        }
        let parts = |index: usize| answers.iter().map(|of_reward| of_reward[index].as_ref()?.0).collect();
        Ok(Scores {
            parts: (0..requests.len()).map(parts).collect(),
            timeouts: answers.iter().flatten().filter(|answer| answer.is_none()).count(),
            metrics: sums.into_iter().map(|(name, (sum, count))| (name.clone(), sum / count)).collect(),
        })
    }
}

/// Runs jobs at the same time and returns their results, or the first error in their order.
fn together<T: Send, E: Send>(jobs: impl Iterator<Item = impl FnOnce() -> Result<T, E> + Send>) -> Result<Vec<T>, E> {
    thread::scope(|scope| {
        let threads: Vec<_> = jobs.map(|job| scope.spawn(job)).collect();
        threads.into_iter().map(|thread| thread.join().expect("rewards do not panic")).collect()
    })
}
