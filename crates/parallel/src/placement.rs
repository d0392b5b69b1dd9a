//! The rank of this process, from the environment variables of its launcher: torchrun's names, those of SLURM's `srun`, or of Open MPI's `mpirun`.
//!
//! Without such variables, or in a job of one rank, there is nothing to join and no socket is opened.
//! Trade-off: SLURM's tasks become ranks only with `srun`; a batch script that starts a program without it runs one rank.

use std::env;
use std::time::Duration;

use crate::error::ParallelError;
use crate::token::JobToken;

/// Time limit for ranks to join, unless `FIREBRICK_RENDEZVOUS_TIMEOUT` is set.
const TIMEOUT: Duration = Duration::from_secs(300);
/// The port of rank 0 if the launcher chose none; torch's default too.
const PORT: u16 = 29500;

/// A rank's place in its job.
#[derive(Clone, Debug)]
pub struct Placement {
    /// This rank, from 0.
    pub rank: usize,
    /// Number of ranks, at least 2.
    pub world_size: usize,
    /// Index of this rank on its machine, from 0; it selects the card.
    pub local_rank: usize,
    /// Number of ranks on this machine.
    pub local_world_size: usize,
    /// Host of rank 0.
    pub master_host: String,
    /// Port that rank 0 listens on.
    pub master_port: u16,
    /// The shared secret of the job's ranks.
    pub token: JobToken,
    /// Time limit for ranks to join.
    pub timeout: Duration,
}

/// Reads a variable; empty ones count as unset.
type Lookup<'a> = &'a dyn Fn(&str) -> Option<String>;

/// A launcher's names for the numbers.
struct Names {
    launcher: &'static str,
    rank: &'static str,
    world_size: &'static [&'static str],
    local_rank: &'static str,
    local_world_size: &'static str,
}

const TORCHRUN: Names = Names {
    launcher: "torchrun or its variables",
    rank: "RANK",
    world_size: &["WORLD_SIZE"],
    local_rank: "LOCAL_RANK",
    local_world_size: "LOCAL_WORLD_SIZE",
};
const SLURM: Names = Names {
    launcher: "srun",
    rank: "SLURM_PROCID",
    world_size: &["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"],
    local_rank: "SLURM_LOCALID",
    local_world_size: "SLURM_STEP_TASKS_PER_NODE",
};
const OPEN_MPI: Names = Names {
    launcher: "mpirun",
    rank: "OMPI_COMM_WORLD_RANK",
    world_size: &["OMPI_COMM_WORLD_SIZE"],
    local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
    local_world_size: "OMPI_COMM_WORLD_LOCAL_SIZE",
};

impl Placement {
    /// Reads the place of this process from its environment; `None` for a job of one rank.
    ///
    /// # Errors
    /// [`ParallelError::Environment`] if variables are missing or contradict each other.
    pub fn from_environment() -> Result<Option<Self>, ParallelError> {
        Self::read(&|name| env::var(name).ok())
    }

    fn read(lookup: Lookup<'_>) -> Result<Option<Self>, ParallelError> {
        let lookup: Lookup<'_> = &|name| lookup(name).map(|value| value.trim().to_owned()).filter(|v| !v.is_empty());
        let is_set = |name: &str| lookup(name).is_some();
        let names = if is_set("RANK") || is_set("WORLD_SIZE") {
            TORCHRUN
        } else if is_set("SLURM_STEP_ID") && is_set("SLURM_PROCID") {
            SLURM
        } else if is_set("OMPI_COMM_WORLD_RANK") {
            OPEN_MPI
        } else {
            return Ok(None);
        };
        names.read(lookup)
    }

    /// Returns the address on which rank 0 listens.
    pub fn master(&self) -> String {
        if self.master_host.contains(':') {
            return format!("[{}]:{}", self.master_host, self.master_port);
        }
        format!("{}:{}", self.master_host, self.master_port)
    }
}

impl Names {
    fn read(&self, lookup: Lookup<'_>) -> Result<Option<Placement>, ParallelError> {
        let world_name = self.world_size.iter().find(|name| lookup(name).is_some()).unwrap_or(&self.world_size[0]);
        let world_size = self.number(lookup, world_name)?;
        if world_size == Some(1) && self.number(lookup, self.rank)?.unwrap_or(0) == 0 {
            return Ok(None);
        }
        let required = |name: &str, value: Option<usize>| {
            value.ok_or_else(|| self.problem(format!("{name} is not set: set it on every rank")))
        };
        let world_size = required(world_name, world_size)?;
        let rank = required(self.rank, self.number(lookup, self.rank)?)?;
        if rank >= world_size {
            let problem = format!("{} is {rank} and {world_name} is {world_size}: ranks count from 0", self.rank);
            return Err(self.problem(problem));
        }
        let local_rank = self.number(lookup, self.local_rank)?.unwrap_or(0);
        let local_world_size = self.local_world_size(lookup)?.unwrap_or(local_rank + 1);
        if local_rank >= local_world_size || local_world_size > world_size {
            return Err(self.problem(format!(
                "{} is {local_rank}, with {local_world_size} ranks on this machine and {world_size} in the job",
                self.local_rank
            )));
        }
        let is_one_machine = local_world_size == world_size;
        Ok(Some(Placement {
            rank,
            world_size,
            local_rank,
            local_world_size,
            master_host: self.host(lookup, is_one_machine)?,
            master_port: self.port(lookup)?,
            token: self.token(lookup)?,
            timeout: self
                .number(lookup, "FIREBRICK_RENDEZVOUS_TIMEOUT")?
                .map_or(TIMEOUT, |s| Duration::from_secs(s as u64)),
        }))
    }

    fn problem(&self, problem: String) -> ParallelError {
        ParallelError::Environment { launcher: self.launcher, problem }
    }

    fn number(&self, lookup: Lookup<'_>, name: &str) -> Result<Option<usize>, ParallelError> {
        let parse = |text: String| match text.parse() {
            Ok(number) => Ok(number),
            Err(_) => Err(self.problem(format!("{name} is {text:?}: expected a whole number"))),
        };
        lookup(name).map(parse).transpose()
    }

    /// Returns the number of ranks on this machine. SLURM lists them by node, such as `4(x2),3`; they are equal on all nodes except maybe the last.
    fn local_world_size(&self, lookup: Lookup<'_>) -> Result<Option<usize>, ParallelError> {
        if self.launcher != SLURM.launcher {
            return self.number(lookup, self.local_world_size);
        }
        let listed = lookup(self.local_world_size).and_then(|list| tasks_of_node(&list, self.node(lookup)));
        Ok(listed)
    }

    fn node(&self, lookup: Lookup<'_>) -> usize {
        lookup("SLURM_NODEID").and_then(|node| node.parse().ok()).unwrap_or(0)
    }

    fn host(&self, lookup: Lookup<'_>, is_one_machine: bool) -> Result<String, ParallelError> {
        let of_slurm = || {
            let nodes = ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"].iter().find_map(|name| lookup(name))?;
            (self.launcher == SLURM.launcher).then(|| first_node(&nodes))
        };
        let local = || is_one_machine.then(|| "127.0.0.1".to_owned());
        lookup("MASTER_ADDR").or_else(local).or_else(of_slurm).ok_or_else(|| {
            self.problem("MASTER_ADDR is not set: set it on every rank to the address of the machine of rank 0".into())
        })
    }

    /// Returns the port of rank 0. Under torchrun the default is the port after MASTER_PORT, on which torchrun's agent keeps a store for the ranks.
    fn port(&self, lookup: Lookup<'_>) -> Result<u16, ParallelError> {
        let (name, offset) = match lookup("FIREBRICK_PORT") {
            Some(_) => ("FIREBRICK_PORT", 0),
            None => ("MASTER_PORT", usize::from(lookup("TORCHELASTIC_USE_AGENT_STORE").as_deref() == Some("True"))),
        };
        let port = self.number(lookup, name)?.unwrap_or(PORT.into()) + offset;
        u16::try_from(port).map_err(|_| self.problem(format!("{name} gives port {port}: expected up to 65535")))
    }

    fn token(&self, lookup: Lookup<'_>) -> Result<JobToken, ParallelError> {
        let make = "export FIREBRICK_JOB_TOKEN=$(openssl rand -hex 16)";
        let text = lookup("FIREBRICK_JOB_TOKEN").ok_or_else(|| {
            self.problem(format!(
                "FIREBRICK_JOB_TOKEN is not set. It keeps other programs out of the job: set the same secret on every rank, in the \
                 job's script for example with `{make}`"
            ))
        })?;
        JobToken::from_text(&text).ok_or_else(|| {
            self.problem(format!("FIREBRICK_JOB_TOKEN has fewer than 16 characters. A good one: `{make}`"))
        })
    }
}

/// Returns the number of tasks on node `node` in SLURM's list, such as 3 for node 2 in `4(x2),3`.
fn tasks_of_node(list: &str, node: usize) -> Option<usize> {
    let mut first = 0;
    for part in list.split(',') {
        let (tasks, nodes) = match part.trim_end_matches(')').split_once("(x") {
            Some((tasks, nodes)) => (tasks, nodes.parse::<usize>().ok()?),
            None => (part, 1),
        };
        first += nodes;
        if node < first {
            return tasks.trim().parse().ok();
        }
    }
    None
}

/// Returns the first host of SLURM's list, such as `gpu-03` of `gpu-[03-05,09],login`.
fn first_node(list: &str) -> String {
    let Some((prefix, rest)) = list.split_once('[').filter(|(prefix, _)| !prefix.contains(',')) else {
        return list.split(',').next().unwrap_or(list).trim().to_owned();
    };
    let (inside, after) = rest.split_once(']').unwrap_or((rest, ""));
    let number = inside.split([',', '-']).next().unwrap_or(inside);
    format!("{prefix}{number}{}", after.split(',').next().unwrap_or(""))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOKEN: (&str, &str) = ("FIREBRICK_JOB_TOKEN", "0123456789abcdef");

    fn read(variables: &[(&str, &str)]) -> Result<Option<Placement>, String> {
        let lookup = |name: &str| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
        Placement::read(&lookup).map_err(|error| error.to_string())
    }

    /// Reads the place that these variables and the job's token give.
    fn placed(variables: &str) -> (usize, usize, usize, usize, String) {
        let variables = variables.split(' ').map(|variable| variable.split_once('=').unwrap());
        let found = read(&variables.chain([TOKEN]).collect::<Vec<_>>()).unwrap().expect("a job of several ranks");
        (found.rank, found.world_size, found.local_rank, found.local_world_size, found.master())
    }

    #[test]
    fn without_a_launcher_there_is_one_rank() {
        for alone in [
            &[][..],
            &[("RANK", "0"), ("WORLD_SIZE", "1")],
            &[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "8")],
            &[("SLURM_STEP_ID", "0"), ("SLURM_PROCID", "0"), ("SLURM_STEP_NUM_TASKS", "1")],
            &[("OMPI_COMM_WORLD_RANK", "0"), ("OMPI_COMM_WORLD_SIZE", "1")],
        ] {
            assert!(read(alone).unwrap().is_none(), "{alone:?}");
        }
    }

    #[test]
    fn torchruns_variables_are_read() {
        let variables = "RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 MASTER_ADDR=10.0.0.7 MASTER_PORT=4000";
        assert_eq!(placed(variables), (5, 8, 1, 4, "10.0.0.7:4000".to_owned()));
        let agent = format!("{variables} TORCHELASTIC_USE_AGENT_STORE=True");
        assert_eq!(placed(&agent).4, "10.0.0.7:4001");
        assert_eq!(placed(&format!("{agent} FIREBRICK_PORT=77")).4, "10.0.0.7:77");
    }

    #[test]
    fn sruns_variables_are_read() {
        let variables = "SLURM_STEP_ID=0 SLURM_PROCID=6 SLURM_STEP_NUM_TASKS=7 SLURM_LOCALID=2 SLURM_NODEID=1 \
                         SLURM_STEP_TASKS_PER_NODE=4,3 SLURM_STEP_NODELIST=gpu-[03-04,09],login";
        assert_eq!(placed(variables), (6, 7, 2, 3, "gpu-03:29500".to_owned()));
        let nodes = ["a", "a,b", "n[07,09-12]", "a,n[1-2]", "r[1-2]c5,x"].map(first_node);
        assert_eq!(nodes, ["a", "a", "n07", "a", "r1c5"]);
        assert_eq!([0, 1, 2, 3].map(|node| tasks_of_node("4(x2),3", node)), [Some(4), Some(4), Some(3), None]);
    }

    #[test]
    fn mpiruns_variables_are_read() {
        let variables = "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1 \
                         OMPI_COMM_WORLD_LOCAL_SIZE=2";
        assert_eq!(placed(variables), (1, 2, 1, 2, "127.0.0.1:29500".to_owned()));
    }

    #[test]
    fn what_is_missing_or_contradicts_itself_is_named() {
        let two = [("RANK", "0"), ("WORLD_SIZE", "2")];
        for (change, expected) in [
            (&[("RANK", "0")][..], "WORLD_SIZE is not set"),
            (&[("WORLD_SIZE", "2")], "RANK is not set"),
            (&[("RANK", "2"), ("WORLD_SIZE", "2")], "RANK is 2 and WORLD_SIZE is 2"),
            (&[("RANK", "one"), ("WORLD_SIZE", "2")], "RANK is \"one\": expected a whole number"),
            (&[two[0], two[1]], "MASTER_ADDR is not set"),
            (&[two[0], two[1], ("MASTER_ADDR", "a")], "FIREBRICK_JOB_TOKEN is not set"),
            (&[two[0], two[1], ("MASTER_ADDR", "a"), ("FIREBRICK_JOB_TOKEN", "short")], "fewer than 16 characters"),
            (&[two[0], two[1], ("MASTER_ADDR", "a"), ("MASTER_PORT", "70000"), TOKEN], "port 70000"),
            (&[two[0], two[1], ("LOCAL_RANK", "2"), ("LOCAL_WORLD_SIZE", "2")], "LOCAL_RANK is 2"),
        ] {
            let message = read(change).unwrap_err();
            assert!(message.contains(expected), "{message}");
        }
    }
}
