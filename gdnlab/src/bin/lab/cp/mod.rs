//! `cargo lab cp`.

mod alive;
mod launch;
mod options;

use crate::checkout::Checkout;
use crate::output::{note, print};
use alive::Alive;
use gdnlab::bench::SeqLens;
use gdnlab::cp::{
    Clock, Cuts, DeviceClock, Exchange, Nccl, Scaling, Setting, Tcp, Terms, Trial, World, complaints, verdict,
    virtual_ranks,
};
use gdnlab::cuda::Gpu;
use gdnlab::inputs::Regime;
use gdnlab::kernel::{Kernel, kernel};
use gdnlab::notebook::text_of_tables;
use gdnlab::problem::{Op, Shape};
use gdnlab::record::{self, Record};
use gdnlab::{Error, Result, table};
use options::{Dims, Transport};
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};
use std::time::Duration;

/// Name of the records' file in `data/`.
const SUITE: &str = "day07_cp";
/// Exit code of a rank that failed because another one did.
const WAITED_IN_VAIN: u8 = 75;
/// Virtual ranks at the most: each has a thread, and a way to each other one.
const MOST_VIRTUAL: usize = 256;
/// Processes that this command starts at the most: each holds the whole call, and a socket to each other one.
const MOST_PROCESSES: usize = 64;
/// Days after which nobody waits any more.
const MOST_DAYS: u64 = 30;

/// Compute sequences that are cut over ranks (context parallelism), and compare with a single run and with float64.
///
/// Under torchrun, mpirun or srun this process is one of the ranks, and finds the others at MASTER_ADDR and MASTER_PORT.
/// Started by itself it starts the ranks: processes with a GPU each where there are as many GPUs, or else threads that share
/// this machine (virtual ranks); it says which. A rank that ends early or hangs is named, and the others are stopped.
///
/// Every tensor must have the bits of a single run where no sequence crosses a border between ranks, and stay below 0.4 %
/// of float64 where one does. With --scaling, times: of N ranks, and of 1, 2, 4 and so on up to N where this starts them.
/// Ranks with a GPU each keep their tensors there, and the GPUs' clocks tell the time.
///
/// Without options that is the test of the GDN-2 precision RFC, for GDN and GDN-2. All ranks have to be started with the same
/// options: where some differ, the rank and the option are named.
///
/// Exit code: 0 when that holds, 1 when it does not or a rank fails, 2 for bad input.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  cargo lab cp --ranks 2                                     the test of the GDN-2 precision RFC, for GDN and GDN-2
  cargo lab cp --ranks 4 --seqlens 1x10240 --cut 3000+1+7000+239
  cargo lab cp --ranks 8 --seqlens 1x16384 --scaling strong weak --save
  torchrun --nproc-per-node 8 --no-python cargo lab cp       each of the 8 processes is a rank
  srun --ntasks 8 --gpus-per-task 1 cargo lab cp             with MASTER_ADDR set where there are several nodes")]
pub struct Args {
    /// Number of ranks; that of the launcher under torchrun, mpirun or srun, 2 otherwise.
    #[arg(long, value_name = "N")]
    ranks: Option<usize>,
    /// Kernel by its name in `cargo lab kernels`. Without it the default one of the GPU, or cpu-chunk-f16-internals.
    #[arg(long, value_name = "NAME")]
    kernel: Option<String>,
    /// Operators: gdn, gdn2 or both. Without it both, where the kernel has both and no heads share q and k.
    #[arg(long, num_args = 1..)]
    op: Vec<Op>,
    /// Lengths of the packed sequences, such as 5120x2, 1x32768 or 28672+4096.
    #[arg(long, value_name = "SEQLENS", default_value_t = SeqLens::new(vec![5120, 5120]))]
    seqlens: SeqLens,
    /// Number of heads; 12 on a GPU and 2 on a CPU without it.
    #[arg(long, value_name = "H")]
    heads: Option<usize>,
    /// Number of q/k heads, which groups of value heads share; as many as heads without it.
    #[arg(long, value_name = "HK")]
    qk_heads: Option<usize>,
    /// Key and value dimension of a head.
    #[arg(long, value_name = "K,V", default_value_t = Dims(128, 128))]
    dims: Dims,
    /// Input regime.
    #[arg(long, default_value_t = Regime::Correlated)]
    regime: Regime,
    /// Seed of the inputs.
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Where to cut: even, aligned (at multiples of 64 tokens), or the tokens of each rank, such as 3000+7240.
    #[arg(long, default_value_t = Cuts::Even)]
    cut: Cuts,
    /// The forward alone, without gradients.
    #[arg(long)]
    forward: bool,
    /// Times instead of errors: strong (the same call on more ranks), weak (sequences grow with them), or both.
    #[arg(long, num_args = 1..)]
    scaling: Vec<Scaling>,
    /// Repetitions of each time; 20 at least where ranks have a GPU each.
    #[arg(long, value_name = "N", default_value_t = 5)]
    repeats: usize,
    /// How ranks exchange states: auto, virtual, tcp or nccl.
    #[arg(long, default_value_t = Transport::Auto)]
    transport: Transport,
    /// Seconds after which a rank that shows no progress is given up.
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    timeout: u64,
    /// Print one JSON record per line instead of the table.
    #[arg(long)]
    json: bool,
    /// Add what was measured to the records in `data/`.
    #[arg(long)]
    save: bool,
}

/// An operator's call, and the kernel that computes it.
struct Call {
    setting: Setting,
    kernel: Box<dyn Kernel>,
}

impl Args {
    pub fn run(self) -> Result<ExitCode> {
        if self.repeats == 0 || self.timeout == 0 || self.ranks == Some(0) {
            return Err(Error::input("--ranks, --repeats and --timeout: expected at least 1"));
        }
        if self.timeout > MOST_DAYS * 24 * 3600 {
            return Err(Error::input(format!(
                "--timeout {}: expected seconds of {MOST_DAYS} days at most",
                self.timeout
            )));
        }
        if self.seqlens.tokens() == 0 {
            return Err(Error::input(format!("--seqlens {}: expected at least one token", self.seqlens)));
        }
        let world = World::from_environment()?;
        let ranks = world.as_ref().map_or(self.ranks.unwrap_or(2), |world| world.ranks);
        match (&self.cut, self.scaling.is_empty()) {
            (Cuts::Lengths(lengths), false) => {
                return Err(Error::input(format!("--cut {lengths} with --scaling: expected even or aligned")));
            }
            (cut, _) => cut.cut(self.seqlens.tokens(), ranks).map(drop)?,
        }
        if let Some(hint) = World::hint().filter(|_| world.is_none() && self.ranks.is_none()) {
            note(hint);
        }
        let calls = self.calls()?;
        match world {
            Some(world) => self.run_as_rank(&world, &calls),
            None => self.run_ranks(ranks, &calls),
        }
    }

    /// One rank of those that a launcher started.
    fn run_as_rank(&self, world: &World, calls: &[Call]) -> Result<ExitCode> {
        if let Some(ranks) = self.ranks.filter(|ranks| *ranks != world.ranks) {
            return Err(Error::input(format!(
                "--ranks {ranks}, but {} started {}: leave --ranks out, or say the same",
                world.launcher, world.ranks
            )));
        }
        if on_gpu(calls) && self.transport != Transport::Tcp {
            choose_gpu(world)?;
        }
        let alive = Alive::of_launcher();
        let timeout = Duration::from_secs(self.timeout);
        let report = |words: &str| alive.say(words);
        let report: Option<&(dyn Fn(&str) + Sync)> = if alive.is_watched() { Some(&report) } else { None };
        // Who watches notices a rank that hangs, and says which one, before others give it up.
        let timeout = if alive.is_watched() { timeout + Duration::from_secs(30) } else { timeout };
        let ran = self.exchange(world, calls, timeout).and_then(|exchange| {
            let mut records = Vec::new();
            for Call { setting, kernel } in calls {
                let trial = Trial::new(setting, &self.cut, kernel.as_ref()).reporting(report);
                records.extend(self.records(&trial, exchange.as_ref())?);
                gdnlab::cp::barrier(exchange.as_ref())?;
            }
            Ok(records)
        });
        match ran {
            Ok(records) if world.rank == 0 => self.show(&records),
            Ok(_) => Ok(ExitCode::SUCCESS),
            Err(error @ Error::Rank { .. }) => {
                note(format_args!("error: {error}"));
                Ok(if alive.is_watched() { WAITED_IN_VAIN.into() } else { ExitCode::FAILURE })
            }
            Err(error) if alive.is_watched() || matches!(error, Error::Input(_)) => Err(error),
            Err(error) => {
                note(format_args!("error: {error}"));
                Ok(ExitCode::FAILURE)
            }
        }
    }

    fn exchange(&self, world: &World, calls: &[Call], timeout: Duration) -> Result<Box<dyn Exchange>> {
        match self.transport {
            Transport::Virtual => Err(Error::input(format!(
                "--transport virtual is for ranks of one process, and {} started {}: expected auto, tcp or nccl",
                world.launcher, world.ranks
            ))),
            Transport::Auto if on_gpu(calls) => Ok(Box::new(Nccl::join(world, &self.terms(calls, "nccl"), timeout)?)),
            Transport::Nccl => Ok(Box::new(Nccl::join(world, &self.terms(calls, "nccl"), timeout)?)),
            _ => Ok(Box::new(Tcp::join(world, &self.terms(calls, "tcp"), timeout)?)),
        }
    }

    /// What all ranks have to be started with alike.
    fn terms(&self, calls: &[Call], transport: &str) -> Terms {
        let words = |of: &dyn Fn(&Call) -> String| calls.iter().map(of).collect::<Vec<_>>().join(" ");
        let heads = |of: fn(&Shape) -> usize| calls.first().map_or(0, |call| of(&call.setting.shape)).to_string();
        let scaling: Vec<String> = self.scaling.iter().map(Scaling::to_string).collect();
        Terms::new([
            ("--transport", transport.to_owned()),
            ("--op", words(&|call| call.setting.op.to_string())),
            ("--kernel", words(&|call| call.kernel.name().to_owned())),
            ("--seqlens", self.seqlens.to_string()),
            ("--heads", heads(|shape| shape.value_heads)),
            ("--qk-heads", heads(|shape| shape.qk_heads)),
            ("--dims", self.dims.to_string()),
            ("--regime", self.regime.to_string()),
            ("--seed", self.seed.to_string()),
            ("--cut", self.cut.to_string()),
            ("--forward", self.forward.to_string()),
            ("--scaling", if scaling.is_empty() { "none".to_owned() } else { scaling.join(" ") }),
            ("--repeats", self.repeats.to_string()),
        ])
    }

    /// All ranks, started from here.
    fn run_ranks(&self, ranks: usize, calls: &[Call]) -> Result<ExitCode> {
        let on_gpu = on_gpu(calls);
        let gpus = if on_gpu { Gpu::visible()? } else { 0 };
        let processes = match self.transport {
            Transport::Auto => on_gpu && gpus >= ranks && ranks > 1,
            Transport::Virtual => false,
            Transport::Tcp => true,
            Transport::Nccl if gpus >= ranks => true,
            Transport::Nccl => {
                return Err(Error::input(format!(
                    "--transport nccl with {ranks} ranks and {gpus} GPUs: expected a kernel of the GPU and a GPU for each rank"
                )));
            }
        };
        expect_few(ranks, processes)?;
        let counts = if self.scaling.is_empty() { vec![ranks] } else { up_to(ranks) };
        if processes {
            let gpu_each = on_gpu && gpus >= ranks;
            let joined =
                if on_gpu && self.transport != Transport::Tcp { "with a GPU each" } else { "joined by sockets" };
            note(format_args!("{ranks} ranks, processes {joined}"));
            let mut worst = 0;
            for count in counts {
                worst = worst.max(launch::Ranks { count, gpu_each, timeout: Duration::from_secs(self.timeout) }.run()?);
            }
            return Ok(worst.into());
        }
        match on_gpu {
            true => {
                note(format_args!("{ranks} virtual ranks, which take turns on one GPU (this machine shows {gpus})"))
            }
            false => note(format_args!("{ranks} virtual ranks, threads that take turns on this machine")),
        }
        let mut records = Vec::new();
        for Call { setting, kernel } in calls {
            let timed = !self.scaling.is_empty() && kernel.on_gpu();
            let clock = if timed { DeviceClock::of(kernel.name())? } else { None };
            let clock = clock.as_ref().map(|clock| clock as &dyn Clock);
            let trial = Trial::new(setting, &self.cut, kernel.as_ref()).timed_by(clock);
            for &count in &counts {
                let timeout = Duration::from_secs(self.timeout.saturating_mul(count as u64));
                let all = virtual_ranks(count, timeout, |exchange| self.records(&trial, exchange))?;
                records.extend(all.into_iter().flatten());
            }
        }
        self.show(&records)
    }

    /// What this rank measures together with the others; the records are rank 0's.
    fn records(&self, trial: &Trial<'_>, exchange: &dyn Exchange) -> Result<Vec<Record>> {
        if self.scaling.is_empty() {
            return trial.exactness(exchange);
        }
        let mut records = Vec::new();
        for &scaling in &self.scaling {
            records.extend(trial.scaling(exchange, scaling, self.repeats)?);
        }
        Ok(records)
    }

    /// A call for each operator that is asked for, or else for each that the kernel has and the heads allow.
    fn calls(&self) -> Result<Vec<Call>> {
        let ops = if self.op.is_empty() { Op::ALL.to_vec() } else { self.op.clone() };
        let mut calls = Vec::with_capacity(ops.len());
        for op in ops {
            let kernel = self.kernel(op)?;
            let setting = self.setting(op, kernel.as_ref());
            let has = kernel.ops().contains(&op);
            let shares_heads = setting.shape.qk_heads != setting.shape.value_heads;
            if self.op.is_empty() && (!has || op == Op::Gdn2 && shares_heads) {
                continue;
            }
            if !has {
                let name = kernel.name();
                return Err(Error::input(format!("{name} does not implement {op}: choose another --kernel")));
            }
            calls.push(Call { setting, kernel });
        }
        if calls.is_empty() {
            return Err(Error::input(
                "this kernel has GDN-2 alone, whose heads share no q and k: leave --qk-heads out",
            ));
        }
        Ok(calls)
    }

    fn setting(&self, op: Op, kernel: &dyn Kernel) -> Setting {
        let heads = self.heads.unwrap_or(if kernel.on_gpu() { 12 } else { 2 });
        let shape = Shape::new(self.seqlens.tokens(), heads, self.dims.0, self.dims.1);
        Setting {
            op,
            shape: Shape { qk_heads: self.qk_heads.unwrap_or(heads), ..shape },
            seqlens: self.seqlens.clone(),
            regime: self.regime,
            seed: self.seed,
            backward: !self.forward,
        }
    }

    fn kernel(&self, op: Op) -> Result<Box<dyn Kernel>> {
        match (&self.kernel, Gpu::visible(), op) {
            (Some(name), ..) => kernel(name),
            (None, Ok(_), Op::Gdn) => kernel("cuda-chunk-bf16"),
            (None, Ok(_), Op::Gdn2) => kernel("cuda-gdn2-bf16"),
            (None, Err(_), _) => kernel("cpu-chunk-f16-internals"),
        }
    }

    fn show(&self, records: &[Record]) -> Result<ExitCode> {
        if self.save {
            let kept = record::keep(Checkout::find()?.root().join("data"), SUITE, records)?;
            note(format_args!("kept in {}", kept.display()));
        }
        let table = if self.scaling.is_empty() { table::cp_exactness(records)? } else { table::cp_scaling(records)? };
        print(&if self.json { record::to_json_lines(records)? } else { text_of_tables(&[("", &table)]) })?;
        let complaints = complaints(records);
        complaints.iter().for_each(note);
        if let Some(verdict) = verdict(records).filter(|_| complaints.is_empty()) {
            note(format_args!("holds: {verdict}"));
        }
        Ok(ExitCode::from(u8::from(!complaints.is_empty())))
    }
}

fn on_gpu(calls: &[Call]) -> bool {
    calls.iter().any(|call| call.kernel.on_gpu())
}

/// Refuses more ranks than one machine is good for.
fn expect_few(ranks: usize, processes: bool) -> Result<()> {
    match processes {
        true if ranks > MOST_PROCESSES => Err(Error::input(format!(
            "--ranks {ranks}: expected at most {MOST_PROCESSES} processes on one machine, since each holds the whole call and \
             a socket to each other; start more on several machines, with torchrun, mpirun or srun"
        ))),
        false if ranks > MOST_VIRTUAL => Err(Error::input(format!(
            "--ranks {ranks}: expected at most {MOST_VIRTUAL} virtual ranks, since each has a thread and a way to each other, \
             and they take turns"
        ))),
        _ => Ok(()),
    }
}

/// 1, 2, 4 and so on, and `most`.
fn up_to(most: usize) -> Vec<usize> {
    let mut counts: Vec<usize> =
        std::iter::successors(Some(1), |count| Some(count * 2)).take_while(|count| *count < most).collect();
    counts.push(most);
    counts
}

/// The GPU of a process is chosen before anything starts it: where the launcher left the choice, this program begins again
/// with that of its local rank.
fn choose_gpu(world: &World) -> Result<()> {
    if std::env::var_os("GDNLAB_GPU").is_some_and(|chosen| !chosen.is_empty()) {
        return Ok(());
    }
    let gpus = Gpu::visible()?;
    if gpus == 1 && world.local_rank > 0 && std::env::var_os("CUDA_VISIBLE_DEVICES").is_some() {
        // The launcher shows each rank its own.
        return Ok(());
    }
    if world.local_rank >= gpus {
        return Err(Error::input(format!(
            "rank {} is the process number {} of its machine, which shows {gpus} GPUs: expected a GPU for each",
            world.rank, world.local_rank
        )));
    }
    if world.local_rank == 0 {
        return Ok(());
    }
    let program = std::env::current_exe().map_err(|error| Error::io("this program", error))?;
    let arguments = std::env::args_os().skip(1);
    let failure = Command::new(&program).args(arguments).env("GDNLAB_GPU", world.local_rank.to_string()).exec();
    Err(Error::io(program, failure))
}
