//! Agreement between the ranks of a run: on what they are about to do, where they start, and that their weights are the same.
//!
//! Rank 0 decides what only one rank can decide: the date of the run, its folder, and the checkpoint to continue from. With one rank none of this
//! does anything.
//! Trade-off: a resumed run reads its checkpoint on every rank, so all machines see it under the same path.

use std::collections::BTreeSet;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use firebrick_kernels::{CommError, Kernels};
use firebrick_model::Decoder;
use firebrick_parallel::{Facts, ParallelError, Ranks};
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use crate::config::{RunConfig, ZeroStage};
use crate::error::RunError;
use crate::plan::Plan;
use crate::run::interrupt::end_process;
use crate::run::prepare::{Prepared, now};
use crate::state::checkpoint::{RunState, read_state};
use crate::state::resume_point::{ResumeFrom, ResumePoint};
use crate::state::run_folder::RunFolder;
use crate::storage::StorageError;

/// The time that a rank may take to end by itself once another one is lost.
const GRACE: Duration = Duration::from_secs(10);

/// The time that a rank waits for a file of rank 0: a network file system may show it a little later.
const SEEN_WITHIN: Duration = Duration::from_secs(5);

/// Keys of a recipe that name places, which may differ between machines; their contents are compared instead.
const PLACES: [&str; 7] = ["model", "output_dir", "path", "eval_path", "cache", "init_from", "chat_template"];

/// The start of rank 0, for the others.
#[derive(Debug, Serialize, Deserialize)]
struct SharedStart {
    date: i64,
    /// Run folder, its name, and the checkpoint.
    resumed: Option<(PathBuf, String, PathBuf)>,
}

/// Returns the date of the run and the checkpoint that it continues from, as rank 0 finds them.
///
/// # Errors
/// Errors of [`ResumePoint::open`]; a checkpoint that this rank cannot see; a rank is gone.
pub(in crate::run) fn start_of(
    ranks: &Ranks,
    config: &RunConfig,
    resume: Option<&ResumeFrom>,
) -> Result<(i64, Option<ResumePoint>), RunError> {
    if ranks.is_main() {
        let open = |from: &ResumeFrom| ResumePoint::open(from, config.output_dir.as_ref(), &config.name);
        let point = resume.map(open).transpose()?;
        let date = point.as_ref().map_or_else(now, |point| point.state.date);
        let place = |point: &ResumePoint| {
            (absolute(point.folder.path()), point.folder.name().to_owned(), absolute(&point.checkpoint))
        };
        let shared = SharedStart { date, resumed: point.as_ref().map(place) };
        share(ranks, "start", Some(&shared))?;
        return Ok((date, point));
    }
    let SharedStart { date, resumed } = share(ranks, "start", None)?;
    let point = resumed.map(|(folder, name, checkpoint)| -> Result<ResumePoint, RunError> {
        let state: RunState = read_state(&checkpoint)?;
        let folder = RunFolder::of_main_rank(folder, name);
        Ok(ResumePoint { folder, checkpoint, state, notes: Vec::new() })
    });
    Ok((date, point.transpose()?))
}

fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

/// Refuses ranks that cannot see the folder of rank 0, or cannot write to it if each rank writes its part of the checkpoints.
///
/// # Errors
/// The first such rank, the same on all ranks; rank 0 cannot write to the folder; a rank is gone.
pub(in crate::run) fn agree_on_folder(
    ranks: &Ranks,
    plan: &Plan,
    resumed: Option<&ResumePoint>,
) -> Result<(), RunError> {
    let stage = plan.zero_stage.value;
    if ranks.world_size() == 1 || !stage.divides_state() {
        return Ok(());
    }
    let folder = resumed.map_or_else(|| plan.output_dir.value.clone(), |point| absolute(point.folder.path()));
    let mark = || -> io::Result<_> {
        fs::create_dir_all(&folder)?;
        firebrick_files::temporary_in(&folder, ".partial-seen-by-all-ranks-", "")
    };
    // The mark exists until this function returns.
    let mark = ranks.is_main().then(mark).transpose();
    let mark = mark.map_err(|source| StorageError::NotWritable { path: folder.clone(), source })?;
    let own = mark.as_ref().map(|mark| (folder, mark.path().file_name().map(PathBuf::from).unwrap_or_default()));
    let (folder, file): (PathBuf, PathBuf) = share(ranks, "output_dir", own.as_ref())?;
    let (file, started) = (folder.join(file), Instant::now());
    while !file.exists() && started.elapsed() < SEEN_WITHIN {
        sleep(Duration::from_millis(100));
    }
    let is_seen = file.exists();
    let is_writable = firebrick_files::temporary_in(&folder, ".partial-written-by-each-rank-", "").is_ok();
    compare_access(ranks, [is_seen, is_writable], folder, stage)
}

fn compare_access(ranks: &Ranks, access: [bool; 2], folder: PathBuf, stage: ZeroStage) -> Result<(), RunError> {
    let all = ranks.all_gather_numbers("output_dir", access.map(u64::from))?;
    match all.iter().enumerate().find(|(_, access)| access.contains(&0)) {
        Some((rank, [0, _])) => Err(RunError::Refused(format!(
            "rank {rank} does not see the folder {} of rank 0, where with train.zero_stage = {stage} every rank writes its \
             part of a checkpoint: set output_dir to a folder that all machines share under the same path, or \
             train.zero_stage = 0. Nothing was trained",
            folder.display()
        ))),
        Some((rank, _)) => Err(RunError::Refused(format!(
            "rank {rank} sees the folder {} of rank 0 and cannot write to it, although with train.zero_stage = {stage} every \
             rank writes its part of a checkpoint there: give the user of that rank permission to write, or set \
             train.zero_stage = 0. Nothing was trained",
            folder.display()
        ))),
        None => Ok(()),
    }
}

/// Creates the folder of a new run on rank 0, and returns it on all ranks.
pub(in crate::run) fn new_folder(ranks: &Ranks, plan: &Plan) -> Result<RunFolder, RunError> {
    if ranks.is_main() {
        let folder = RunFolder::create(&plan.output_dir.value, &plan.name.value)?;
        share(ranks, "folder", Some(&(folder.path().to_owned(), folder.name().to_owned())))?;
        return Ok(folder);
    }
    let (path, name) = share(ranks, "folder", None)?;
    Ok(RunFolder::of_main_rank(path, name))
}

/// Shares a value of rank 0 with all ranks.
fn share<T: Serialize + for<'a> Deserialize<'a>>(
    ranks: &Ranks,
    operation: &'static str,
    value: Option<&T>,
) -> Result<T, RunError> {
    let bytes = serde_json::to_vec(&value).expect("a value of plain fields is expressible as JSON");
    let bytes = ranks.from_main(operation, bytes)?;
    let read = serde_json::from_slice::<Option<T>>(&bytes).ok().flatten();
    read.ok_or_else(|| {
        let (world_size, problem) = (ranks.world_size(), "rank 0 sent something else".to_owned());
        ParallelError::from(CommError::Lost { rank: ranks.rank(), world_size, operation, problem }).into()
    })
}

/// Prepares a run, first on one rank of each machine, so that the others find its tokens in the cache.
pub(in crate::run) fn prepare_in_turn(
    ranks: &Ranks,
    prepare: impl FnOnce() -> Result<Prepared, RunError>,
) -> Result<Prepared, RunError> {
    if ranks.local_rank() == 0 {
        let prepared = prepare()?;
        ranks.barrier()?;
        return Ok(prepared);
    }
    ranks.barrier()?;
    prepare()
}

/// Refuses ranks that run another program or another recipe.
pub(in crate::run) fn agree_on_recipe(ranks: &Ranks, config: &RunConfig) -> Result<(), RunError> {
    if ranks.world_size() == 1 {
        return Ok(());
    }
    let mut facts = Facts::default();
    let content = std::env::current_exe().and_then(std::fs::read).map_or(0, |bytes| xxh3_64(&bytes));
    facts.add("program", format!("{} {} {content:016x}", env!("CARGO_PKG_NAME"), env!("CARGO_PKG_VERSION")));
    let recipe: toml::Table = config.to_toml().parse().expect("a recipe that was written is well formed");
    add_keys(&mut facts, "", &toml::Value::Table(recipe));
    Ok(ranks.agree(&facts)?)
}

/// Adds each key of a recipe below `prefix` with its value.
fn add_keys(facts: &mut Facts, prefix: &str, value: &toml::Value) {
    match value {
        toml::Value::Table(table) => {
            for (key, value) in table.iter().filter(|(key, _)| !PLACES.contains(&key.as_str())) {
                let name = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
                add_keys(facts, &name, value);
            }
        }
        toml::Value::Array(values) => {
            for (index, value) in values.iter().enumerate() {
                add_keys(facts, &format!("{prefix}[{index}]"), value);
            }
        }
        other => facts.add(prefix, other),
    }
}

/// Refuses ranks that have other data, another plan or another model config.
pub(in crate::run) fn agree_on_data(ranks: &Ranks, prepared: &Prepared) -> Result<(), RunError> {
    let Prepared { plan, model_config, train, .. } = prepared;
    let mut facts = Facts::default();
    facts.add("backend", plan.backend.value);
    facts.add("compute", plan.compute.value);
    facts.add("data", format!("rows {:016x}", train.fingerprint()));
    facts.add("steps", plan.steps.value);
    facts.add("model config", format!("{:016x}", xxh3_64(format!("{model_config:?}").as_bytes())));
    facts.add("held-out data", prepared.evaluation.fingerprint());
    Ok(ranks.agree(&facts)?)
}

/// Refuses ranks with different base weights. If trained weights differ by a bit, all ranks get those of rank 0.
pub(in crate::run) fn agree_on_weights<B: Kernels>(
    ranks: &Ranks,
    plan: &Plan,
    model: &mut Decoder<B>,
) -> Result<(), RunError> {
    if ranks.world_size() == 1 {
        return Ok(());
    }
    let mut facts = Facts::default();
    facts.add("model", model.base_hash().map_or("random weights".to_owned(), |hash| format!("weights {hash:016x}")));
    ranks.agree(&facts)?;
    let is_part_of_base = plan.lora.value.as_ref().is_some_and(|lora| !lora.init_lora_weights.is_uniform());
    if are_the_same(ranks, checksum(model), is_part_of_base)? {
        return Ok(());
    }
    let mut shared: BTreeSet<Arc<str>> = model.parameters().iter().map(|parameter| parameter.name.clone()).collect();
    shared.retain(|name| !model.divides(name));
    let parameters = model.parameters_mut().into_iter().filter(|parameter| shared.contains(&parameter.name));
    ranks.broadcast_parameters(parameters)?;
    model.refresh_adapter();
    let mut facts = Facts::default();
    facts.add("the sum of the trained weights", format!("{:016x}", checksum(model)));
    Ok(ranks.agree(&facts)?)
}

/// Returns whether the trained weights of all ranks have one checksum. Errors if weights that started as a part of the base differ: those of rank 0
/// do not fit another base.
fn are_the_same(ranks: &Ranks, checksum: u64, is_part_of_base: bool) -> Result<bool, RunError> {
    let sums = ranks.all_gather_numbers("weights", [checksum])?;
    match sums.iter().position(|sum| *sum != sums[0]) {
        None => Ok(true),
        Some(rank) if is_part_of_base => Err(RunError::Refused(format!(
            "rank {rank} has taken another part out of the base than rank 0: with lora.init_lora_weights = \"pissa\" every \
             rank decomposes the weights itself, and devices of different kinds round differently. Use devices of one \
             kind, or start on one rank and continue from its checkpoint on all, or remove the key. Nothing was trained"
        ))),
        Some(_) => Ok(false),
    }
}

/// Hashes all trained weights with their names, except those that only one rank has.
fn checksum<B: Kernels>(model: &Decoder<B>) -> u64 {
    let mut hash = Xxh3::new();
    for parameter in model.parameters().into_iter().filter(|parameter| !model.divides(&parameter.name)) {
        hash.update(parameter.name.as_bytes());
        hash.update(parameter.value.to_data().as_bytes());
    }
    hash.digest()
}

/// Runs work that may fail because weights of other ranks do not arrive, and returns that failure as an error.
pub fn catch_loss<T>(work: impl FnOnce() -> Result<T, RunError>) -> Result<T, RunError> {
    CommError::catch(work).unwrap_or_else(|error| Err(ParallelError::from(error).into()))
}

/// Ends this process from now on when another rank is lost, even if the process does not notice because it waits for a device or computes for long. A
/// save in progress is finished; earlier ones are complete, because saves are atomic.
pub fn end_when_lost(ranks: &Ranks, is_saving: Arc<AtomicBool>) {
    ranks.when_lost(move |problem| {
        let lost = Instant::now();
        while lost.elapsed() < GRACE || is_saving.load(Ordering::Relaxed) {
            sleep(Duration::from_millis(50));
        }
        let _ = writeln!(std::io::stderr(), "error: {problem}; this rank did not end by itself and is ended");
        end_process(1);
    });
}

#[cfg(test)]
mod tests {
    use std::thread;

    use firebrick_kernels::comm::local_group;

    use super::*;

    /// Returns the results of three ranks, in rank order.
    fn on_three_ranks<T: Send>(find: impl Fn(Ranks) -> Result<T, RunError> + Sync) -> Vec<Result<T, String>> {
        thread::scope(|scope| {
            let find = &find;
            let start =
                |communicator| scope.spawn(move || find(Ranks::new(communicator)).map_err(|error| error.to_string()));
            let threads: Vec<_> = local_group(3).into_iter().map(start).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    #[test]
    fn the_first_rank_that_does_not_see_the_folder_or_cannot_write_to_it_is_named_on_all_ranks() {
        let refused = |access: [[bool; 2]; 3]| {
            on_three_ranks(|ranks| compare_access(&ranks, access[ranks.rank()], "runs".into(), ZeroStage::STATE))
        };
        assert_eq!(refused([[true; 2]; 3]), [Ok(()), Ok(()), Ok(())]);
        for (access, expected) in [
            ([[true; 2], [true, false], [false; 2]], "rank 1 sees the folder runs of rank 0 and cannot write"),
            ([[true; 2], [true; 2], [false; 2]], "rank 2 does not see the folder runs of rank 0"),
        ] {
            for message in refused(access) {
                assert!(message.as_ref().is_err_and(|message| message.starts_with(expected)), "{message:?}");
            }
        }
    }

    #[test]
    fn weights_that_differ_are_shared_unless_they_started_as_parts_of_different_bases() {
        let found = |checksums: [u64; 3], is_part_of_base| {
            on_three_ranks(|ranks| are_the_same(&ranks, checksums[ranks.rank()], is_part_of_base))
        };
        assert_eq!(found([7, 7, 7], true), [Ok(true), Ok(true), Ok(true)]);
        assert_eq!(found([7, 7, 8], false), [Ok(false), Ok(false), Ok(false)]);
        for result in found([7, 7, 8], true) {
            let message = result.unwrap_err();
            assert!(message.contains("rank 2 ") && message.contains("init_lora_weights"), "{message}");
        }
    }
}
