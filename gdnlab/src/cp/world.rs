//! Which rank this process is, as the program that started it says.

use crate::{Error, Result};

/// Port of rank 0 where none is given: that of PyTorch.
const DEFAULT_PORT: u16 = 29_500;

/// The ranks that were started together, as one of them sees them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct World {
    /// Which rank this is, from 0.
    pub rank: usize,
    /// How many there are.
    pub ranks: usize,
    /// Which of the ranks on its machine, and so which GPU it takes.
    pub local_rank: usize,
    /// Host and port at which rank 0 can be met.
    pub meeting: (String, u16),
    /// Whose variables said so.
    pub launcher: &'static str,
}

/// The variables of one kind of launcher.
struct Names {
    launcher: &'static str,
    rank: &'static str,
    ranks: &'static str,
    local_rank: &'static str,
    /// A variable that says that all ranks are on one machine, and what it says then; the number of ranks where it is none.
    one_machine: Option<(&'static str, Option<&'static str>)>,
}

/// In the order in which they are asked: who starts torchrun under SLURM means torchrun's ranks.
const LAUNCHERS: [Names; 3] = [
    Names { launcher: "torchrun", rank: "RANK", ranks: "WORLD_SIZE", local_rank: "LOCAL_RANK", one_machine: None },
    Names {
        launcher: "Open MPI",
        rank: "OMPI_COMM_WORLD_RANK",
        ranks: "OMPI_COMM_WORLD_SIZE",
        local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
        one_machine: Some(("OMPI_COMM_WORLD_LOCAL_SIZE", None)),
    },
    Names {
        launcher: "SLURM",
        rank: "SLURM_PROCID",
        ranks: "SLURM_NTASKS",
        local_rank: "SLURM_LOCALID",
        one_machine: Some(("SLURM_NNODES", Some("1"))),
    },
];

/// SLURM's number of a step: srun sets it for each task, sbatch and salloc do not.
const SLURM_STEP: [&str; 2] = ["SLURM_STEP_ID", "SLURM_STEPID"];

impl World {
    /// The ranks that torchrun (`RANK`, `WORLD_SIZE`, `LOCAL_RANK`), Open MPI (`OMPI_COMM_WORLD_RANK` and so on) or SLURM
    /// (`SLURM_PROCID`, `SLURM_NTASKS`, `SLURM_LOCALID`) started, and `MASTER_ADDR` and `MASTER_PORT`, where rank 0 is met;
    /// none where this process was started by itself. A single task of SLURM is one by itself too, and so is what a batch script
    /// runs without srun.
    ///
    /// # Errors
    /// [`Error::Input`] where variables are missing or do not fit each other.
    pub fn from_environment() -> Result<Option<Self>> {
        Self::from_variables(&variable)
    }

    /// What to say to who began by itself inside of several tasks of SLURM, and so without srun.
    pub fn hint() -> Option<String> {
        Self::hint_of(&variable)
    }

    fn hint_of(get: &dyn Fn(&str) -> Option<String>) -> Option<String> {
        let tasks = get("SLURM_NTASKS").filter(|tasks| tasks.trim() != "1")?;
        let by_itself = SLURM_STEP.iter().all(|name| get(name).is_none());
        by_itself.then(|| {
            format!("hint: SLURM has {tasks} tasks here, but only srun starts one process for each: put srun before this command")
        })
    }

    fn from_variables(get: &dyn Fn(&str) -> Option<String>) -> Result<Option<Self>> {
        let no_step = SLURM_STEP.iter().all(|name| get(name).is_none());
        let is_there = |names: &&Names| get(names.rank).is_some() && !(names.launcher == "SLURM" && no_step);
        let Some(names) = LAUNCHERS.iter().find(is_there) else {
            return match get("WORLD_SIZE") {
                Some(ranks) => Err(Error::input(format!("WORLD_SIZE={ranks} without RANK: expected both, or neither"))),
                None => Ok(None),
            };
        };
        let number = |name: &str| {
            let text = get(name).ok_or_else(|| {
                Error::input(format!(
                    "{} is set and {name} is not: expected both, as {} sets them",
                    names.rank, names.launcher
                ))
            })?;
            let number = text.trim().parse::<usize>();
            number.map_err(|_| Error::input(format!("{name}={text}: expected a whole number from 0 on")))
        };
        let (rank, ranks) = (number(names.rank)?, number(names.ranks)?);
        if rank >= ranks {
            return Err(Error::input(format!(
                "{}={rank} with {}={ranks}: expected a rank below the number of ranks",
                names.rank, names.ranks
            )));
        }
        if ranks == 1 && names.launcher == "SLURM" {
            return Ok(None);
        }
        let local_rank = number(names.local_rank)?;
        let meeting = meeting(names, ranks, get)?;
        Ok(Some(Self { rank, ranks, local_rank, meeting, launcher: names.launcher }))
    }
}

/// Where rank 0 is met.
fn meeting(names: &Names, ranks: usize, get: &dyn Fn(&str) -> Option<String>) -> Result<(String, u16)> {
    let on_one_machine = names
        .one_machine
        .is_some_and(|(name, value)| get(name) == Some(value.map_or_else(|| ranks.to_string(), str::to_owned)));
    let host = match get("MASTER_ADDR") {
        Some(host) => host,
        None if ranks == 1 || on_one_machine => "127.0.0.1".to_owned(),
        None => {
            return Err(Error::input(format!(
                "{ranks} ranks of {} and no MASTER_ADDR: expected the host of rank 0 in it, and a free port there in MASTER_PORT",
                names.launcher
            )));
        }
    };
    let port = match get("MASTER_PORT") {
        Some(text) => text
            .parse::<u16>()
            .ok()
            .filter(|port| *port > 0)
            .ok_or_else(|| Error::input(format!("MASTER_PORT={text}: expected a port from 1 to 65535")))?,
        None => DEFAULT_PORT,
    };
    // torchrun itself listens at that port, and says so here; the next one is as good.
    let taken = get("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|value| value == "True");
    Ok((host, if taken { port.checked_add(1).unwrap_or(port - 1) } else { port }))
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn world(variables: &[(&str, &str)]) -> Result<Option<World>> {
        World::from_variables(&|name| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        })
    }

    fn complaint(variables: &[(&str, &str)]) -> String {
        world(variables).unwrap_err().to_string()
    }

    const TORCHRUN: [(&str, &str); 5] =
        [("RANK", "3"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "1"), ("MASTER_ADDR", "node7"), ("MASTER_PORT", "4321")];

    #[test]
    fn each_launcher_is_understood() {
        let expected =
            World { rank: 3, ranks: 8, local_rank: 1, meeting: ("node7".to_owned(), 4321), launcher: "torchrun" };
        assert_eq!(world(&TORCHRUN).unwrap(), Some(expected.clone()));
        let mpi = [
            ("OMPI_COMM_WORLD_RANK", "1"),
            ("OMPI_COMM_WORLD_SIZE", "4"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "4"),
        ];
        let found = world(&mpi).unwrap().unwrap();
        assert_eq!((found.rank, found.ranks, found.launcher), (1, 4, "Open MPI"));
        assert_eq!(found.meeting, ("127.0.0.1".to_owned(), DEFAULT_PORT));
        let step = ("SLURM_STEP_ID", "0");
        let slurm = [("SLURM_PROCID", "5"), ("SLURM_NTASKS", "6"), ("SLURM_LOCALID", "2"), ("SLURM_NNODES", "1"), step];
        let found = world(&slurm).unwrap().unwrap();
        assert_eq!((found.rank, found.ranks, found.local_rank, found.launcher), (5, 6, 2, "SLURM"));
        // torchrun in a job of SLURM.
        assert_eq!(world(&[&slurm[..], &TORCHRUN].concat()).unwrap(), Some(expected));
    }

    #[test]
    fn a_process_by_itself_is_no_rank() {
        assert_eq!(world(&[]).unwrap(), None);
        // The shell of an allocation, and one task in it.
        assert_eq!(world(&[("SLURM_NTASKS", "4")]).unwrap(), None);
        assert_eq!(world(&[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "1"), ("SLURM_STEP_ID", "0")]).unwrap(), None);
        // A batch script without srun.
        let batch = [("SLURM_PROCID", "0"), ("SLURM_NTASKS", "4"), ("SLURM_LOCALID", "0"), ("SLURM_NNODES", "1")];
        assert_eq!(world(&batch).unwrap(), None);
        let hint = |variables: &[(&str, &str)]| {
            World::hint_of(&|name| {
                variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
            })
        };
        assert!(hint(&batch).unwrap().contains("4 tasks here, but only srun"));
        assert_eq!(hint(&[&batch[..], &[("SLURM_STEP_ID", "0")]].concat()), None);
        assert_eq!((hint(&[]), hint(&[("SLURM_NTASKS", "1")])), (None, None));
    }

    #[test]
    fn torchrun_keeps_its_port_and_ranks_meet_at_the_next() {
        let agent = [&TORCHRUN[..], &[("TORCHELASTIC_USE_AGENT_STORE", "True")]].concat();
        assert_eq!(world(&agent).unwrap().unwrap().meeting.1, 4322);
    }

    #[test]
    fn what_is_missing_or_wrong_is_named() {
        assert!(complaint(&[("WORLD_SIZE", "2")]).contains("without RANK"));
        assert!(complaint(&[("RANK", "0")]).contains("WORLD_SIZE is not"));
        assert!(complaint(&TORCHRUN[..2]).contains("LOCAL_RANK is not"));
        assert!(complaint(&TORCHRUN[..3]).contains("no MASTER_ADDR"));
        assert!(complaint(&[("RANK", "-1"), ("WORLD_SIZE", "2")]).contains("RANK=-1"));
        assert!(complaint(&[("RANK", "2"), ("WORLD_SIZE", "2")]).contains("below the number"));
        let port = |port| [&TORCHRUN[..4], &[("MASTER_PORT", port)]].concat();
        assert!(complaint(&port("0")).contains("MASTER_PORT=0") && complaint(&port("70000")).contains("65535"));
        let step = ("SLURM_STEP_ID", "3");
        let nodes = [("SLURM_PROCID", "5"), ("SLURM_NTASKS", "6"), ("SLURM_LOCALID", "2"), ("SLURM_NNODES", "2"), step];
        assert!(complaint(&nodes).contains("6 ranks of SLURM and no MASTER_ADDR"));
    }
}
